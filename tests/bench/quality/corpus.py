"""
The texts: sources and docstrings of packages that the test extra pins, so that they are the same on every machine.

The base is trained on the sources of one package, the tasks on docstrings of others: nothing of them is in the base.
What is held out depends on names alone, of a file or of a subpackage, and so does the order. Nothing here depends on
Python's minor version either: its library is left out, and signatures are cut from the source, not written anew.
"""

import ast
import hashlib
import json
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Generic, TypeVar

HELD_OUT = 16
"""One file in so many is held out; of subpackages, which are fewer and of different sizes, one in half as many."""

DOCSTRING_MIN = 20
DOCSTRING_MAX = 600
"""Characters of a docstring's first paragraph: neither a word, nor an essay."""

PROSE_MIN = 400
"""Characters of a whole docstring that is documentation."""

SOURCES = ("transformers",)
DOCUMENTED = ("sympy", "networkx", "pandas")
PINS = {"transformers": "5.24.0", "tokenizers": "0.23.3", "sympy": "1.14.0", "networkx": "3.6.1", "pandas": "3.1.1"}
"""As pyproject.toml pins them; the tokenizer's trainer decides what the tokens are."""

Files = list[tuple[str, Path]]
"""Names, as the package lists them, and paths."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """All that the experiment reads."""

    base: Split[str]
    documentation: Split[str]
    docstrings: Split[Pair]

    def digest(self) -> str:
        """Return what tells these texts from others."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]


def texts(*, base_bytes: int, task_bytes: int, files_per_package: int, pairs_per_package: int) -> Texts:
    """Return the texts of the pinned packages; SystemExit if one of them is another version."""
    check_pins()
    documented = files_of(DOCUMENTED)
    return Texts(
        base=sources(files_of(SOURCES), size_bytes_max=base_bytes),
        documentation=documentation(documented, size_bytes_max=task_bytes),
        docstrings=docstrings(documented, files_per_package=files_per_package, pairs_per_package=pairs_per_package),
    )


def check_pins() -> None:
    """Refuse other versions of the packages: their texts would be others."""
    for package, wanted in PINS.items():
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            found = "none"
        if found != wanted:
            raise SystemExit(f"the texts are those of {package} {wanted}, not {found}: pip install {package}=={wanted}")


def files_of(packages: Iterable[str]) -> Files:
    """Return the sources of *packages* without their tests."""
    listed = (file for package in packages for file in metadata.distribution(package).files or ())
    return [
        (file.as_posix(), Path(str(file.locate())))
        for file in listed
        if file.suffix == ".py" and not {"test", "tests", "testing"} & set(file.parts)
    ]


def is_held_out(name: str, *, one_in: int = HELD_OUT) -> bool:
    """Return whether the text of this *name* is held out; the same on every machine."""
    return _number(name) // 2 % one_in == 0


def sources(files: Files, *, size_bytes_max: int) -> Split[str]:
    """Return the texts of *files* as they are."""
    return _split(((name, _read(path)) for name, path in _ordered(files)), size_bytes_max=size_bytes_max)


def documentation(files: Files, *, size_bytes_max: int) -> Split[str]:
    """Return what the long docstrings of each of *files* say."""
    found = ((name, "\n\n".join(prose(_read(path)))) for name, path in _ordered(files))
    return _split(found, size_bytes_max=size_bytes_max)


def docstrings(files: Files, *, files_per_package: int, pairs_per_package: int) -> Split[Pair]:
    """Return the pairs of *files*; no subpackage is on both sides."""
    split, by_package = Split[Pair](trained=[], held_out=[]), dict[str, Files]()
    for name, path in _ordered(files):
        by_package.setdefault("/".join(name.split("/")[:-1][:2]), []).append((name, path))
    for package, of in sorted(by_package.items()):
        side = split.held_out if is_held_out(package, one_in=HELD_OUT // 2) else split.trained
        found = [pair for _, path in of[:files_per_package] for pair in pairs(_read(path))]
        side += list(dict.fromkeys(found))[:pairs_per_package]
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
    lines = [line.encode() for line in source.split("\n")]
    for node, docstring in _documented(source):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            text = " ".join(docstring.split("\n\n")[0].split())
            if DOCSTRING_MIN <= len(text) <= DOCSTRING_MAX:
                yield Pair(signature=_signature(lines, node), docstring=text)


def prose(source: str) -> Iterator[str]:
    """Yield the docstrings of *source* that are long enough to be read as documentation."""
    return (docstring for _, docstring in _documented(source) if len(docstring) >= PROSE_MIN)


_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _documented(source: str) -> Iterator[tuple[_Documented, str]]:
    """Yield what has a docstring, and that without its margin."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which escapes are warned of depends on Python
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return  # templates
    for node in ast.walk(tree):
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
            yield node, _without_margin(ast.get_docstring(node, clean=False) or "")


def _without_margin(docstring: str) -> str:
    """Return it as `inspect.cleandoc` does, which is not the same in every Python."""
    first, *rest = docstring.expandtabs().split("\n")
    margin = min((len(line) - len(line.lstrip(" ")) for line in rest if line.strip()), default=0)
    return "\n".join([first.strip(), *(line[margin:].rstrip() for line in rest)]).strip()


def _signature(source: Sequence[bytes], node: ast.FunctionDef) -> str:
    """Return the line that defines *node*, as its author wrote it; `ast.unparse` depends on Python."""
    body = node.body[0]
    lines = [*source[node.lineno - 1 : body.lineno]]
    lines[-1] = lines[-1][: body.col_offset]  # first the end: both may be one line
    lines[0] = lines[0][node.col_offset :]
    written = (re.sub(r"\s#[^'\"]*$", "", line.decode()) for line in lines)
    joined = re.sub(r"(?<=[(\[]) | (?=[)\]])", "", " ".join(" ".join(written).split()))
    return textwrap.shorten(joined.replace(",)", ")"), 300, placeholder="…")


def _split(found: Iterable[tuple[str, str]], *, size_bytes_max: int) -> Split[str]:
    split, size = Split[str](trained=[], held_out=[]), 0
    for name, text in found:
        if len(text) < 500:
            continue  # little more than imports
        (split.held_out if is_held_out(name) else split.trained).append(text)
        size += len(text)
        if size >= size_bytes_max:
            break
    return split


def _ordered(files: Files) -> Files:
    """Return *files* in an order that mixes the folders, whatever order they come in."""
    return sorted(files, key=lambda file: _number(file[0]))


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:8], "big")


def _read(path: Path) -> str:
    return path.read_bytes().decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
