"""
Count what each room of the house holds: `python -m tests.house [COMMIT]`.

Lines, files, public names (functions, classes and methods of no leading underscore) and the door (the names that a room
exports), room by room; beside them those of COMMIT, which is read from git and not checked out. Then the walks: how
much a warm verb enters here (tests/walks.py).
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests import walks

ROOT = Path(__file__).parent.parent
PRODUCT = ("layerstore", "cli", "migrations")
# Rooms of these have rooms inside, each counted for itself.
NESTED = ("layerstore/live", "layerstore/policy", "layerstore/zero3")
ALONE = "layerstore/*.py"


@dataclass(frozen=True, slots=True)
class Count:
    """What some files hold."""

    lines: int = 0
    files: int = 0
    names: int = 0
    door: int = 0

    def __add__(self, other: "Count") -> "Count":
        """Return both together."""
        return Count(
            lines=self.lines + other.lines,
            files=self.files + other.files,
            names=self.names + other.names,
            door=self.door + other.door,
        )


def room_of(path: str) -> str:
    """Return the room of the file at *path*, below the root of the repository."""
    parts = path.split("/")[:-1]
    if parts[0] == "tests":
        return "tests"
    if parts == ["layerstore"]:
        return ALONE
    return "/".join(parts[: 3 if "/".join(parts[:2]) in NESTED else 2])


def public_names(text: str) -> int:
    """Return how many functions, classes and methods of *text* others may use."""
    return sum(_public_in(ast.parse(text).body))


def _public_in(body: Iterable[ast.stmt]) -> Iterator[int]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield 1
            if isinstance(node, ast.ClassDef):
                yield from _public_in(node.body)


def door(path: str, text: str) -> int:
    """Return how many names a room whose ``__init__`` is *text* exports: it defines them or imports its own files'."""
    if path not in {f"{room_of(path)}/__init__.py", "layerstore/__init__.py"}:
        return 0
    names, room = set[str](), room_of(path).replace("/", ".")
    for node in ast.parse(text).body:
        match node:
            case ast.Assign(targets=[ast.Name("__all__")], value=value):  # of the package, and of rooms that had one
                return len(ast.literal_eval(value))
            case ast.ImportFrom(module=str(module)) if f"{room}." in module:  # other rooms' names are for its own use
                names |= {each.asname or each.name for each in node.names}
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
    return sum(not name.startswith("_") for name in names)


def counted(sources: Mapping[str, str]) -> dict[str, Count]:
    """Return what each room holds of *sources*, texts by their paths."""
    found: defaultdict[str, Count] = defaultdict(Count)
    for path, text in sources.items():
        found[room_of(path)] += Count(
            lines=len(text.splitlines()), files=1, names=public_names(text), door=door(path, text)
        )
    return dict(found)


def _is_counted(path: str) -> bool:
    return path.endswith(".py") and path.split("/", maxsplit=1)[0] in {*PRODUCT, "tests"}


def sources_here() -> dict[str, str]:
    """Return the texts of all Python files of product and tests, as they are in the working tree."""
    paths = [path for top in (*PRODUCT, "tests") for path in (ROOT / top).rglob("*.py")]
    # layerstore/cli and layerstore/migrations are links to folders that are counted under their own names.
    linked = {ROOT / "layerstore" / "cli", ROOT / "layerstore" / "migrations"}
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths if linked.isdisjoint(path.parents)}


def sources_at(commit: str) -> dict[str, str]:
    """Return the same of *commit*; raises CalledProcessError where git knows none of that name."""
    paths = [path for path in _git("ls-tree", "-r", "-z", "--name-only", commit).split("\0") if _is_counted(path)]
    return {path: _git("show", f"{commit}:{path}") for path in paths}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def table(now: Mapping[str, Count], before: Mapping[str, Count] | None = None) -> str:
    """Return the rooms with what they hold, and what they held *before*, as text."""
    rooms = sorted({*now, *(before or ())} - {"tests"})
    rows = [(room, [room]) for room in rooms]
    rows += [("product", rooms), ("tests", ["tests"])]
    width = max(len(name) for name, _ in rows)
    columns = f"{'lines':>7} {'files':>6} {'names':>6} {'door':>5}"
    heading = columns if before is None else f"{columns}  {columns}   (before, now)"
    lines = [f"{'':{width}} {heading}"]
    for name, parts in rows:
        counts = [
            sum((each.get(part, Count()) for part in parts), Count()) for each in (before, now) if each is not None
        ]
        told = "  ".join(f"{of.lines:>7,} {of.files:>6,} {of.names:>6,} {of.door:>5,}" for of in counts)
        lines.append(f"{name:{width}} {told}")
    return "\n".join(lines)


def main(words: list[str]) -> int:
    """Print the tables; *words* may name a commit to compare with."""
    if len(words) > 1 or any(word.startswith("-") for word in words):
        sys.stderr.write("usage: python -m tests.house [COMMIT]\n")
        return 2
    try:
        before = counted(sources_at(words[0])) if words else None
    except subprocess.CalledProcessError:
        return 1  # git has said why
    sys.stdout.write(table(counted(sources_here()), before) + "\n\n")
    sys.stdout.flush()
    sys.stdout.write(walks.table(walks.walks()) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
