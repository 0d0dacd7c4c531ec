"""
Every message of layerstore stands on one of the pages that explain them.

The messages are taken from the syntax trees: the words with which an error class is made, and those of every warning.
What is filled in is written … there, and a row may also say … for words that differ between messages.
Words that are passed on as they come, without words of the place that raises them, are that other place's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest

from layerstore import errors
from layerstore.remote.bucket import NoBucket
from layerstore.storage.index import IndexUnusable
from tests.unit.test_architecture import MODULES, ROOT

FOLDER = ROOT / "docs" / "operating" / "troubleshooting"
PAGES = sorted(FOLDER.glob("*.md"))
WARNINGS = {
    *(("warnings", "warn"), ("LOG", "warning"), ("LOG", "error"), ("", "print_warning")),
    *(("notes", "append"), ("_notes", "append"), ("", "RemoteNotice")),
}
CLASSES = {
    value.__name__
    for value in [*vars(errors).values(), IndexUnusable, NoBucket]
    if isinstance(value, type) and issubclass(value, errors.LayerstoreError)
}
HOLE = "…"
MESSAGES_OF_A_ROW_MAX = 16


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """What somebody may read, with holes where facts are filled in."""

    text: str
    where: str

    @property
    def has_words(self) -> bool:
        """Whether it says anything itself: a word such as "is" between two holes does not."""
        return len(re.findall(r"[A-Za-z]", self.text)) >= 5


def texts(node: ast.expr) -> list[str]:
    """Return what *node* may be, a string with holes; both where one of two is chosen."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [re.sub(r"%[sdr]", HOLE, node.value)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(texts(part)[0] for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in texts(node.left) for right in texts(node.right)]
    if isinstance(node, ast.IfExp):
        return [*texts(node.body), *texts(node.orelse)]
    return [HOLE]


@cache
def messages() -> list[Message]:
    """Return every message of the library and its command line."""
    return sorted(message for message in _messages() if message.has_words)


def _messages() -> Iterator[Message]:
    for module in MODULES:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and node.args and _is_said(node.func):
                for text in texts(node.args[0]):
                    yield Message(text, module.at(node))


def _is_said(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        owner = getattr(function.value, "id", "") or getattr(function.value, "attr", "")
        return (owner, function.attr) in WARNINGS
    return isinstance(function, ast.Name) and (function.id in CLASSES or ("", function.id) in WARNINGS)


def patterns() -> list[str]:
    """Return the messages of the pages: what stands in code in the first cell of a table's row."""
    return [pattern for cells in rows() for pattern in re.findall(r"`([^`]+)`", cells[0])]


def rows() -> Iterator[list[str]]:
    """Yield the cells of each row of the tables of messages."""
    for page in PAGES:
        is_ours = False
        for line in page.read_text().splitlines():
            is_ours = line.startswith("|") and (is_ours or line.startswith("| message |"))
            if is_ours and not line.startswith(("| message |", "|---")):
                yield [cell.strip() for cell in line.strip("| ").split(" | ")]


def matches(pattern: str, text: str) -> bool:
    """Whether *text* is what *pattern* says."""
    return _compiled(pattern).fullmatch(text) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    # There are more patterns than re keeps.
    return re.compile(".*".join(map(re.escape, pattern.split(HOLE))), re.DOTALL)


def test_the_walk_finds_the_messages() -> None:
    """An empty walk would pass; these three are said in three ways."""
    found = {message.text for message in messages()}

    assert len(found) > 300
    assert "there is no store at …" in found
    assert "…: this filesystem cannot fsync folders" in found
    assert "step … is not saved: earlier saves still wait for the disk" in found


def test_every_message_is_explained() -> None:
    """Whoever adds a message adds a row, or lets one of those that are there say a little more."""
    known = patterns()
    missing = [message for message in messages() if not any(matches(pattern, message.text) for pattern in known)]

    if missing:
        wanted = "\n  ".join(
            f"| `{message.text}` | MEANING | WHAT TO DO |    <- {message.where}" for message in missing
        )
        pytest.fail(
            f"{len(missing)} messages are not explained in {FOLDER.relative_to(ROOT)}; rows to fill in:\n  {wanted}\n"
            "WHY: a message is read by somebody who is stuck; a page says what it means and what to do.",
            pytrace=False,
        )


def test_every_row_explains_a_message() -> None:
    """A message that is no more, or says something else now, takes its row along."""
    stale = [pattern for pattern in patterns() if not any(matches(pattern, message.text) for message in messages())]

    assert stale == []


def test_no_row_is_for_anything() -> None:
    """Each has words of its own, and speaks for a few messages, not for any."""
    texts_said = {message.text for message in messages()}
    spoken_for = {pattern: sum(matches(pattern, text) for text in texts_said) for pattern in patterns()}

    assert [pattern for pattern in spoken_for if not Message(pattern, "").has_words] == []
    assert {pattern: count for pattern, count in spoken_for.items() if count > MESSAGES_OF_A_ROW_MAX} == {}


def test_every_row_says_what_it_means_and_what_to_do() -> None:
    """Three cells, none of them empty."""
    for cells in rows():
        assert len(cells) == 3, cells
        assert all(cells), cells


def test_every_kind_of_error_has_its_section() -> None:
    """What a program sees in ``kind`` is looked up on the first of the pages."""
    text = (FOLDER / "README.md").read_text()
    kinds = {getattr(errors, name).kind for name in CLASSES if hasattr(errors, name)} | {"permission", "no_space"}

    assert sorted(kind for kind in kinds if f"`{kind}`" not in text) == []
