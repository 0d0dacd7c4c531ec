"""
The pages of the documentation as the tests look at them: their code, what is said of it, their headings and links.

What is to be known of a block of code stands in a comment above it, which nobody sees who reads the page:

    <!-- not run: WHY -->       it is only parsed, and its calls and options are held against the code
    <!-- says TEXT -->          its last command says this
    <!-- afresh -->             it does not go on from what the blocks above it have done
    <!-- lines of FILE -->      each of its lines is one of FILE, in this order; FILE is what runs
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = (README, *sorted(DOCS.rglob("*.md")))
GENERATED = "This page is generated: `python -m tests.docs.reference` writes it anew."

# A fence may be indented where it belongs to an item of a list.
_BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<note>[^\n]*) -->\n(?P=indent))?```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_NOTES = ("not run: ", "says ", "afresh", "lines of ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of code on a page."""

    page: Path
    line: int
    """Where its fence is, counted from 1."""
    language: str
    text: str
    note: str
    """What the comment above it says; empty where there is none."""

    def __str__(self) -> str:
        return f"{name(self.page)}:{self.line}"

    def said(self, key: str) -> str | None:
        """Return what the note says behind *key*, None if it says nothing of the kind."""
        return self.note.removeprefix(key).strip() if self.note.startswith(key) else None

    @property
    def runs(self) -> bool:
        """Whether it is to be run as it stands."""
        return self.said("not run: ") is None and self.said("lines of ") is None


def name(page: Path) -> str:
    """Return how *page* is called below the root of the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the blocks of *page* that are in one of *languages*, or all of them."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        note = match["note"] or ""
        assert not note or note.startswith(_NOTES), f"{name(page)}: <!-- {note} --> says nothing that is known"
        indent = match["indent"]
        lines = [line.removeprefix(indent) for line in match["text"].splitlines()]
        found.append(
            Block(
                page=page,
                line=text.count("\n", 0, match.start("language")) + 1,
                language=match["language"],
                text="\n".join(lines) + "\n",
                note=note,
            )
        )
    return [block for block in found if not languages or block.language in languages]


def prose(page: Path) -> str:
    """Return the text of *page* with its blocks of code left empty, so that lines keep their numbers."""
    return _BLOCK.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())


def inline_code(page: Path) -> Iterator[str]:
    """Yield what stands between backticks in the prose of *page*."""
    for match in _INLINE.finditer(prose(page)):
        yield match[1]
