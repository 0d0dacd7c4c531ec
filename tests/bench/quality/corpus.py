"""
The texts that every machine has: sources of Python's standard library, manuals, and docstrings of installed packages.

What is held out depends on names alone: of a file, or of the package that a docstring is from. So does the order.
Nothing is downloaded, so two machines have different texts, and their results are compared only in tendency.
"""

import ast
import gzip
import hashlib
import re
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

HELD_OUT = 16
"""One file in so many is held out; of packages, which are fewer and of different sizes, one in half as many."""

DOCSTRING_MIN = 20
DOCSTRING_MAX = 600
"""Characters of a docstring's first paragraph: neither a word, nor an essay."""

MANUALS = Path("/usr/share/man")
DOCUMENTATION = Path("/usr/share/doc")
_NOT_PROSE = ("copyright", "changelog", "AUTHORS", "THANKS")
_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "lib2to3", "vendor", "_vendor"}


Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True)
class Split(Generic[Part]):
    """What is trained on, and what is evaluated."""

    trained: list[Part]
    held_out: list[Part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A function's signature, and what its docstring says of it."""

    signature: str
    docstring: str


def is_held_out(name: str, *, one_in: int = HELD_OUT) -> bool:
    """Return whether the text of this *name* is held out; the same on every machine."""
    return _number(name) // 2 % one_in == 0


def sources(*, size_bytes_max: int) -> Split[str]:
    """Return the standard library's sources, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if not _NOT_SOURCE & set(path.relative_to(root).parts))
    return _split(_ordered(paths, root), size_bytes_max=size_bytes_max)


def manuals(*, size_bytes_max: int) -> Split[str]:
    """Return the English manual pages, without their markup, and what packages document."""
    pages = (path for path in MANUALS.glob("man[1-9]/*") if not path.is_symlink())
    documents = (
        path
        for path in DOCUMENTATION.rglob("*")
        if path.is_file() and not path.is_symlink() and not path.name.startswith(_NOT_PROSE) and _is_text(path)
    )
    return _split(_ordered([*pages, *documents], Path("/usr/share")), size_bytes_max=size_bytes_max)


def docstrings(*, files_per_package: int, pairs_per_package: int, root: Path | None = None) -> Split[Pair]:
    """Return the pairs of all installed packages, below *root* if given; no package is on both sides."""
    root = root or Path(sysconfig.get_path("purelib"))
    split = Split[Pair](trained=[], held_out=[])
    for package in sorted(path.parent for path in root.glob("*/__init__.py")):
        paths = _ordered(package.rglob("*.py"), package)
        side = split.held_out if is_held_out(package.name, one_in=HELD_OUT // 2) else split.trained
        found = [pair for _, path in paths[:files_per_package] for pair in pairs(_read(path))]
        side += dict.fromkeys(found[:pairs_per_package])
    for side in (split.trained, split.held_out):
        side.sort(key=lambda pair: _number(pair.signature + pair.docstring))
    return split


def pairs(source: str) -> Iterator[Pair]:
    """
    Yield the functions of *source* that have a docstring.

    >>> [pair] = pairs('def area(side: int) -> int:\\n    "Return the area of a square.\\\\n\\\\n    Fast."')
    >>> pair.signature, pair.docstring
    ('def area(side: int) -> int:', 'Return the area of a square.')
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return  # templates and sources of other Pythons; which ones is the same at every run
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if DOCSTRING_MIN <= len(text) <= DOCSTRING_MAX:
                yield Pair(signature=_signature(node), docstring=text)


def plain(manual: str) -> str:
    r"""
    Return what *manual*, in roff, says, without most of its markup.

    >>> plain('.\\" who wrote it\n.SH NAME\nls \\- list\n.B \\-a\nall')
    'NAME\nls - list\n-a\nall'
    """
    lines = (line for line in manual.splitlines() if not re.match(r"['.]\s*\\\"|\.\.?$|'''", line))
    text = "\n".join(re.sub(r"^[.']\s*\w+ ?", "", line) for line in lines)
    text = re.sub(r"\\f(\[\w*\]|\(..|.)|\\s[-+]?\d+|\\[&/,c|^]", "", text)
    text = re.sub(r"\\\((?:aq|cq)", "'", text)
    return re.sub(r"\\(-|e|\(..|\[\w+\]|.)", lambda found: {"-": "-", "e": "\\"}.get(found[1], " "), text)


def _signature(node: ast.FunctionDef) -> str:
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return textwrap.shorten(f"def {node.name}({ast.unparse(node.args)}){returns}:", 300, placeholder="…")


def _split(paths: Iterable[tuple[str, Path]], *, size_bytes_max: int) -> Split[str]:
    split, size = Split[str](trained=[], held_out=[]), 0
    for name, path in paths:
        text = _read(path)
        if path.is_relative_to(MANUALS):
            text = plain(text)
        if len(text) < 500:
            continue  # little more than a reference to another page
        (split.held_out if is_held_out(name) else split.trained).append(text)
        size += len(text)
        if size >= size_bytes_max:
            break
    if not split.trained or not split.held_out:
        raise SystemExit("this machine has too few texts: install manual pages, or Python with its sources")
    return split


def _ordered(paths: Iterable[Path], root: Path) -> list[tuple[str, Path]]:
    """Return *paths* and their names below *root*, in an order that mixes the folders."""
    return sorted(((path.relative_to(root).as_posix(), path) for path in paths), key=lambda each: _number(each[0]))


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:8], "big")


def _read(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    return data.decode(errors="replace")


def _is_text(path: Path) -> bool:
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    return suffix in {"", ".txt", ".md", ".markdown", ".rst"}
