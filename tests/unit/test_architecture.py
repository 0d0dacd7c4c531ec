"""
The rooms of the house and who may enter them, checked on the syntax trees of every module.

Each rule carries its reason, which a failure prints. Nothing is imported, so a broken module is judged too.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

import pytest


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "layerstore"

# Room -> floor. A room may enter those below; rooms of one floor do not see each other.
FLOORS = {
    "arguments": 0,
    "errors": 0,
    "limits": 0,
    "host": 0,
    "dtypes": 0,
    "json_fields": 0,
    "layout": 0,
    "model": 0,
    "layers": 0,
    "nearest": 0,
    "precision": 0,
    "progress": 0,
    "rank_options": 0,
    "setting": 0,
    "parts": 0,
    "states": 0,
    "redact": 0,
    "shares": 0,
    "tables": 0,
    "threads": 0,
    "tree": 0,
    "units": 0,
    "filenames": 0,
    "hashing": 0,
    "json_text": 0,
    "coding": 0,
    "format": 1,
    "numbers": 1,
    "framing": 1,
    "slices": 2,
    "source": 2,
    "disk": 1,
    "storage": 3,
    "policy": 2,
    "zero3": 3,
    "history": 4,
    "ingest_options": 3,
    "staging": 5,
    "publish": 6,
    "compose": 6,
    "assemble": 7,
    "arrays": 8,
    "handover": 8,
    "hf": 8,
    "shards": 9,
    "distcp": 10,
    "delta": 10,
    "ingest": 11,
    "gc": 11,
    "check": 12,
    "bisect": 11,
    "inspect": 13,  # a report plans a collection, and composes
    "remote": 13,  # collecting a remote follows the same retention
    "formats": 14,
    "composite": 15,
    "store": 16,
    "live": 17,
    "demo": 17,
    "transformers": 18,
    "dcp": 18,
    "": 18,  # layerstore/__init__.py, the front door
    "cli": 19,
    "migrations": 19,
}
# Rooms that others import from ``__init__`` alone. A room is added once that holds.
DOORS = {
    "arrays",
    "assemble",
    "handover",
    "hf",
    "coding",
    "numbers",
    "shards",
    "source",
    "zero3.reshard",
    "zero3.trees",
    "bisect",
    "check",
    "compose",
    "distcp",
    "delta",
    "disk",
    "formats",
    "demo",
    "format",
    "gc",
    "history",
    "ingest",
    "inspect",
    "migrations",
    "policy",
    "policy.recipe",
    "publish",
    "staging",
    "remote",
    "storage",
    "zero3",
    "zero3.pt",
    "live.saver",
    "live.deepspeed",
    "live.engine",
    "live.ranks",
}
MAPPED = ("cli", "migrations")
MIGRATION_ROOMS = {"disk", "format", "hashing", "json_text", "storage", "migrations"}
# One frozen module per step.
STEPS = sorted((ROOT / "migrations").glob("m[0-9]*.py"))
STEP_IMPORTS = {"layerstore.errors", "layerstore.format", "layerstore.hashing", "layerstore.migrations.step"}
# Of the format a step uses what no format changes: msgpack's one spelling, and the checksum.
STEP_NAMES = {"Plain", "digest", "pack", "unpack"}

WHY_DOWN = "a lower room that knows an upper one can be neither understood nor tested without it (FLOORS, above)"
WHY_STRANGERS = (
    "rooms of one floor do not know each other: storage must not know DeepSpeed's files, nor zero3 the store's, "
    "so that either can change alone; ingest and compose bring them together"
)
WHY_DOORS = "what a room offers stands in its __init__: behind it, files may be cut and renamed unnoticed"
WHY_MIGRATIONS = "migrations are frozen: they use format, disk and storage alone, because everything above moves on"
WHY_SHORT = (
    "cli and migrations lie at the repository's root, but are installed as layerstore.cli and layerstore.migrations: "
    "the short form works here and nowhere else"
)

# Library -> the modules that may import it (a trailing dot means the whole room), and why no other may.
FOREIGN = {
    "lmdb": (("layerstore.storage.index",), "the index is a cache behind one door: its errors are mapped there"),
    "msgpack": (("layerstore.format.canonical",), "only its canonical form may be read or written"),
    "xxhash": (("layerstore.hashing",), "the checksums of the format are defined once"),
    "isal": (("layerstore.hashing",), "the checksums of the format are defined once"),
    "numpy": (
        (
            "layerstore.numbers.",
            "layerstore.coding.",
            "layerstore.arrays.tensors",
            "layerstore.delta.codec",
            "layerstore.live.",
        ),
        "only these compute with numbers or hand out arrays; everything else moves bytes",
    ),
    "ml_dtypes": (
        ("layerstore.numbers.rounding", "layerstore.delta.codec"),
        "bfloat16 is rounded in one place, and NaNs as stores expect them; a delta only names its type",
    ),
    "zstandard": (("layerstore.delta.codec",), "a delta is compressed as its readers expect, and nothing else is"),
    "pandas": (
        ("layerstore.tables", "layerstore.composite", "layerstore.inspect."),
        "it is optional: tables makes all frames, the others only name the class in annotations",
    ),
    "yaml": (
        ("layerstore.policy.recipe.document",),
        "only its parser is used: its constructors could execute other people's text",
    ),
    "safetensors": (
        ("layerstore.delta.delta_folder",),
        "it maps what it reads, and holds what it writes in memory, which only a delta's small files allow: ADR 30",
    ),
    "typer": (("layerstore.cli.",), "a library does not talk to terminals"),
    "click": (("layerstore.cli.",), "a library does not talk to terminals"),
    "rich": (("layerstore.cli.",), "a library does not talk to terminals"),
    "obstore": (
        ("layerstore.remote.cloud", "layerstore.remote.credentials"),
        "its requests are made there alone; bucket maps its errors and repeats them",
    ),
    "boto3": (("layerstore.remote.credentials",), "it is asked who we are, and nothing else"),
    "torch": (
        (
            "layerstore.live.",
            "layerstore.demo.",
            "layerstore.shares.",
            "layerstore.hf.",
            "layerstore.arrays.state_dict",
            "layerstore.composite",
        ),
        "importing torch takes seconds and gigabytes",
    ),
    "deepspeed": (("layerstore.live.", "layerstore.demo."), "importing deepspeed takes seconds and may compile"),
    "transformers": (
        ("layerstore.live.", "layerstore.demo.", "layerstore.hf."),
        "importing transformers takes seconds",
    ),
    "accelerate": (("layerstore.live.",), "importing accelerate takes seconds"),
}
FOUNDATIONS = _words("torch deepspeed safetensors lmdb xxhash msgpack typer")
HEAVY = {"pandas", "torch", "deepspeed", "transformers", "accelerate"}
# trainer subclasses their callback, and `layerstore.transformers` loads it on demand, with trainer_fsdp; saved_names is
# a program; reader and writer subclass those of DCP, and `layerstore.dcp` loads them on demand.
EAGER = {
    "layerstore.live.trainer",
    "layerstore.live.trainer_fsdp",
    "layerstore.live.dcp.copies",
    "layerstore.live.dcp.reader",
    "layerstore.live.dcp.writer",
    "layerstore.live.module.capture",
    "layerstore.live.module.engine",
    "layerstore.live.module.held",
    "layerstore.live.module.load",
    "layerstore.hf.saved_names",
}
WHY_LAZY = "heavy libraries are imported inside the functions that need them: `import layerstore` must stay fast"

EXECUTING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "copyreg"}
WHY_NO_PICKLE = "a pickle can execute anything: zero3/pt reads .pt files itself, inertly, with no fallback"

# Modules that touch files themselves, and why each may. All others go through disk/files.py.
OWN_FILES = {
    "layerstore.disk.files": "it is the seam",
    "layerstore.disk.open_files": "its open files",
    "layerstore.disk.stream": "its way past the page cache",
    "layerstore.disk.locks": "locks are descriptors, and no promise rests on them",
    "layerstore.storage.lmdb_file": "it looks at LMDB's files, and gives them blocks, before LMDB has them",
    "layerstore.storage.index": "LMDB owns its folder",
    "layerstore.storage.repository": "it asks where temporary files go, and touches none",
    "layerstore.storage.catalog": "it deletes the index as a whole, which is only a cache",
    "layerstore.live.saver.collector": "it talks with its process through files without a name",
    "layerstore.live.scratch": "its folders are for libraries to read, and end with the process",
    "layerstore.source.sourcefile": "it reads the source, which is not the store",
    "layerstore.threads": "it asks for memory, not for a file",
    "layerstore.host": "it asks the kernel how much memory is free",
}
WHY_SEAM = (
    "disk/files.py alone opens and changes files: a write beside it is neither synced, nor are its errors mapped, "
    "nor can tests inject faults into it"
)
# What the command line and the demo write is not part of the store.
SEAM_EXEMPT = ("layerstore.cli.", "layerstore.demo.")

OS_CALLS = _words(
    """
    chmod chown copy_file_range fchmod fchown fdatasync fdopen fsync ftruncate lchown link lchmod makedirs mkdir mkfifo
    mknod open posix_fallocate pwrite pwritev remove removedirs removexattr rename renames replace rmdir sendfile
    setxattr splice symlink sync truncate unlink utime write writev
    """
)
PATH_CALLS = _words(
    """
    chmod hardlink_to lchmod mkdir open read_bytes read_text rename rmdir symlink_to touch unlink write_bytes write_text
    """
)
FILE_MODULES = {"shutil", "tempfile", "fcntl", "mmap"}
# Objects whose methods of these names are the seam, or stand on it.
SEAM_OBJECTS = {"files", "_files", "self", "objects", "_objects", "_sparse_objects", "_store", "lmdb"}

MODULE_LINES_MAX = 500
# Who is longer, and why.
LONGER = {"layerstore.store": "the front door: a short method for each verb, and what it promises"}
FUNCTION_LINES_MAX = 70


@dataclass(frozen=True)
class Module:
    """One source file of the library."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        """What it says; parsed once, and only in the process that looks at it."""
        return ast.parse(self.path.read_bytes(), filename=str(self.path))

    @property
    def room(self) -> str:
        """The part of the name after ``layerstore``; empty for the front door."""
        return self.name.split(".")[1] if "." in self.name else ""

    def at(self, node: ast.AST) -> str:
        """Say where *node* is."""
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module."""

    target: str
    node: ast.stmt
    is_lazy: bool
    """Whether it stands inside a function, or is for type checkers alone."""


def sources() -> Iterator[Path]:
    """Yield every file of the library, cli and migrations under their real paths."""
    for folder in (LIBRARY, *(ROOT / name for name in MAPPED)):
        # rglob does not descend into the two links.
        yield from sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def module_name(path: Path) -> str:
    """Return the name that the file *path* is imported by once installed."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "layerstore" else ("layerstore", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [Module(module_name(path), path) for path in sources()]
"""The whole library."""
NAMES = {module.name for module in MODULES}


@cache
def imports_of(module: Module) -> tuple[Import, ...]:
    """Return what *module* imports, relative imports resolved, with submodules told from names."""
    return tuple(_imports(module))


def _imports(module: Module) -> Iterator[Import]:
    lazy = {id(inner) for part in ast.walk(module.tree) if _is_lazy(part) for inner in ast.walk(part)}
    for node in ast.walk(module.tree):
        is_lazy = id(node) in lazy
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in NAMES else base, node, is_lazy)


def _is_lazy(part: ast.AST) -> bool:
    """Whether what *part* imports is not imported with its module: in a function, or for type checkers alone."""
    is_for_types = isinstance(part, ast.If) and isinstance(part.test, ast.Name) and part.test.id == "TYPE_CHECKING"
    return is_for_types or isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    is_package = module.path.name == "__init__.py"
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*parts, *([node.module] if node.module else [])])


def dynamic_imports_of(module: Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield modules that are named in ``import_module("…")`` or ``__import__("…")``."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.args[0].value, node


def report(violations: Iterable[str], why: str) -> None:
    """Fail with every violation and the reason of the rule they break."""
    found = list(violations)
    if found:
        pytest.fail("\n  ".join([*found, f"WHY: {why}."]), pytrace=False)


def room_of(target: str) -> str:
    """Return the room that the module *target* of ours is in."""
    return target.split(".")[1] if "." in target else ""


def own_imports() -> Iterator[tuple[Module, Import]]:
    """Yield every import of one module of ours by another."""
    for module in MODULES:
        for found in imports_of(module):
            if found.target.split(".")[0] == "layerstore":
                yield module, found


def forbid(is_wrong: Callable[[Module, Import], bool], why: str) -> None:
    """Fail where an import of ours *is_wrong*."""
    report(
        (
            f"{module.at(found.node)}: {module.name} imports {found.target}"
            for module, found in own_imports()
            if is_wrong(module, found)
        ),
        why,
    )


Node = TypeVar("Node", bound=ast.AST)


def nodes(kind: type[Node]) -> Iterator[tuple[Module, Node]]:
    """Yield every node of *kind* in a module of ours."""
    for module in MODULES:
        yield from ((module, node) for node in ast.walk(module.tree) if isinstance(node, kind))


def calls() -> Iterator[tuple[Module, ast.Call]]:
    """Yield every call in a module of ours."""
    return nodes(ast.Call)


def test_every_room_has_a_floor() -> None:
    """A new room is given its floor here before anybody moves in."""
    assert {"layerstore.errors", "layerstore.disk.files", "layerstore.cli", "layerstore.migrations"} <= NAMES
    report(
        (f"{module.name} is on no floor" for module in MODULES if module.room not in FLOORS),
        "the plan of the house is drawn before it is built: design, section 7",
    )


def test_imports_go_down_only() -> None:
    """No room imports from a higher floor, at module level or lazily; the command line stands above all."""
    forbid(lambda module, found: FLOORS[module.room] < FLOORS[room_of(found.target)], WHY_DOWN)


def test_no_room_names_a_class_of_a_higher_one_in_a_string() -> None:
    """A table of the names of higher rooms' classes is an import upwards, too."""
    floors: dict[str, int] = {}
    for module, node in nodes(ast.ClassDef):
        floors[node.name] = min(floors.get(node.name, FLOORS[module.room]), FLOORS[module.room])
    report(
        (
            f"{module.at(node)}: {module.name} names {node.value}"
            for module, node in nodes(ast.Constant)
            if isinstance(node.value, str)
            and floors.get(node.value, 0) > FLOORS[module.room]
            and node.value not in _bound_in(module)
        ),
        WHY_DOWN,
    )


def _bound_in(module: Module) -> set[str]:
    """Return what *module* imports or assigns: a type variable and ``__all__`` have names in strings, too."""
    found = {node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name)}
    return found | {node.asname or node.name for node in ast.walk(module.tree) if isinstance(node, ast.alias)}


def test_rooms_of_one_floor_do_not_see_each_other() -> None:
    """Storage, zero3 and policy are strangers, and so are ingest and compose, live and remote."""
    forbid(
        lambda module, found: (
            module.room != room_of(found.target)
            and FLOORS[module.room] == FLOORS[room_of(found.target)] >= 1
            and (module.room, room_of(found.target)) != ("cli", "migrations")
        ),
        WHY_STRANGERS,
    )


def test_rooms_are_entered_by_their_doors() -> None:
    """Other rooms import from a room's ``__init__``, and not from its files."""

    def is_around(module: Module, found: Import, door: str) -> bool:
        return (
            found.target.startswith(f"{door}.")
            and not f"{module.name}.".startswith(f"{door}.")
            and found.target.removeprefix("layerstore.") not in DOORS
            # A door may offer a function that is called as its file is: `attach`, `resume`, `capture`.
            and not (isinstance(found.node, ast.ImportFrom) and found.node.module == door)
        )

    forbid(lambda module, found: any(is_around(module, found, f"layerstore.{room}") for room in DOORS), WHY_DOORS)


def test_errors_and_limits_import_nothing_of_ours() -> None:
    """Everything may use the errors and the limits, so these use nothing but what keeps keys out of messages."""
    forbid(
        lambda module, found: (
            module.name in {"layerstore.errors", "layerstore.limits"} and found.target != "layerstore.redact"
        ),
        "every room uses them: what they imported, every room would depend on",
    )


def test_there_are_no_import_cycles() -> None:
    """Modules can be put in an order in which each imports only earlier ones."""
    edges: dict[str, set[str]] = {module.name: set() for module in MODULES}
    for module, found in own_imports():
        if found.target in NAMES and found.target != module.name:
            edges[module.name].add(found.target)

    cycle = _find_cycle(edges)

    report(
        [" -> ".join(cycle)] if cycle else [],
        "modules that import each other can only be understood, and only be changed, together",
    )


def _find_cycle(edges: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str] | None:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return None
        for target in sorted(edges[name]):
            found = visit(target, [*trail, name])
            if found:
                return found
        done.add(name)
        return None

    return next((cycle for name in sorted(edges) if (cycle := visit(name, []))), None)


def test_migrations_use_only_frozen_rooms() -> None:
    """A migration uses format, storage and what lies below them; only the command line calls migrations."""
    forbid(
        lambda module, found: (
            module.room == "migrations"
            and room_of(found.target) not in MIGRATION_ROOMS
            and FLOORS[room_of(found.target)] > 0
        ),
        WHY_MIGRATIONS,
    )
    forbid(
        lambda module, found: room_of(found.target) == "migrations" and module.room not in {"migrations", "cli"},
        "opening an old store raises and names the command that helps; it never migrates by itself",
    )


def test_a_step_imports_next_to_nothing() -> None:
    """A step from one format to the next knows msgpack's one spelling, checksums, errors, and what a step is."""
    report(
        (
            f"{module.at(found.node)}: {module.name} imports {found.target}"
            for module in (Module(path.stem, path) for path in STEPS)
            for found in imports_of(module)
            if (found.target not in STEP_IMPORTS and found.target.split(".")[0] not in sys.stdlib_module_names)
            or (found.target == "layerstore.format" and not _names_of(found.node) <= STEP_NAMES)
        ),
        "a step has to work when the library around it reads another format: what it needs of records and envelopes "
        "it spells out itself, as they were when it was written",
    )
    assert STEPS


def _names_of(node: ast.stmt) -> set[str]:
    return {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()


def test_each_foreign_library_has_one_room() -> None:
    """A foreign library is imported only where its errors are mapped and its options are passed."""
    ours_or_standard = {"layerstore", "__future__", *sys.stdlib_module_names}
    unknown: tuple[tuple[str, ...], str] = ((), "a new library is given its one room in this test first")
    by_reason: dict[str, list[str]] = {}
    for module in MODULES:
        for found in imports_of(module):
            library = found.target.split(".")[0]
            if library in ours_or_standard:
                continue
            rooms, why = FOREIGN.get(library, unknown)
            if not f"{module.name}.".startswith(rooms):
                by_reason.setdefault(why, []).append(f"{module.at(found.node)}: {module.name} imports {found.target}")

    report(
        (f"{violation}: {why}" for why, violations in by_reason.items() for violation in violations),
        "each foreign library has one importing room, where its errors are mapped and its options are passed",
    )


def test_each_library_that_the_project_is_founded_on_is_used() -> None:
    """Each of them is imported by the library, and ADR 42 says which rooms import it."""
    said = (ROOT / "docs/adr/0042-what-each-library-is-for.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|", said, re.MULTILINE)
    table = {library: set(re.findall(r"`(\w+)(?:/|\.py)`", rooms)) for library, rooms in rows}
    imports: dict[str, set[str]] = {library: set() for library in FOUNDATIONS}
    for module in MODULES:
        for library in {found.target.split(".")[0] for found in imports_of(module)} & FOUNDATIONS:
            imports[library].add(module.name.split(".")[1])

    assert all(imports.values())
    assert table == imports


def test_heavy_libraries_are_imported_inside_functions() -> None:
    """No module needs torch, deepspeed or the like for being imported."""
    report(
        (
            f"{module.at(found.node)}: {module.name} imports {found.target} at module level"
            for module in MODULES
            for found in imports_of(module)
            if found.target.split(".")[0] in HEAVY and not found.is_lazy and module.name not in EAGER
        ),
        WHY_LAZY,
    )


def test_nothing_imports_pickle() -> None:
    """No module can unpickle, by whatever name."""
    named: list[tuple[Module, str, ast.AST]] = [
        (module, found.target, found.node) for module in MODULES for found in imports_of(module)
    ]
    named += [(module, target, node) for module in MODULES for target, node in dynamic_imports_of(module)]
    report(
        (
            f"{module.at(node)}: {module.name} imports {target}"
            for module, target, node in named
            if target.split(".")[0] in EXECUTING
        ),
        WHY_NO_PICKLE,
    )


def test_nothing_evaluates_code() -> None:
    """No module calls eval, exec or compile."""
    report(
        (
            f"{module.at(node)}: {node.func.id}(…)"
            for module, node in calls()
            if isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec", "compile"}
        ),
        "sources and stores are other people's data; nothing in them may become code",
    )


def test_only_the_seam_touches_files() -> None:
    """Opening and changing files is left to disk/files.py and the few that say here why they may."""
    report(
        (
            f"{module.at(node)}: {module.name} calls {ast.unparse(node.func)}"
            for module, node in calls()
            if module.name not in OWN_FILES and not f"{module.name}.".startswith(SEAM_EXEMPT) and _touches_files(node)
        ),
        WHY_SEAM,
    )


def _touches_files(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id == "open"
    if not isinstance(call.func, ast.Attribute):
        return False
    name, receiver = call.func.attr, call.func.value
    owner = receiver.id if isinstance(receiver, ast.Name) else getattr(receiver, "attr", "")
    if owner == "os":
        return name in OS_CALLS
    return owner in FILE_MODULES or (name in PATH_CALLS and owner not in SEAM_OBJECTS)


def test_the_list_of_those_with_own_files_is_true() -> None:
    """Nobody is excused who has no need of it."""
    by_name = {module.name: module for module in MODULES}
    for name in OWN_FILES:
        looks = {"listdir", "lstat", "scandir", "pread", "preadv"} | OS_CALLS | PATH_CALLS
        calls = [node for node in ast.walk(by_name[name].tree) if isinstance(node, ast.Call)]
        named = {node.func.attr for node in calls if isinstance(node.func, ast.Attribute)}

        assert named & looks or any(map(_touches_files, calls)), (
            f"{name} does not touch files any more: remove it from OWN_FILES"
        )


def test_nobody_writes_the_short_form() -> None:
    """No file of the repository, tests included, says ``import cli`` or ``import migrations``."""
    files = [*sources(), *sorted((ROOT / "tests").rglob("*.py"))]
    found = []
    mapped = "|".join(MAPPED)
    names_one = re.compile(rf"import[^\n]*\b(?:{mapped})\b|from (?:{mapped})\b".encode())
    for path in files:
        data = path.read_bytes()
        for node in ast.walk(ast.parse(data)) if names_one.search(data) else ():
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            found += [
                f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: imports {name}"
                for name in names
                if name.split(".")[0] in MAPPED
            ]

    report(found, WHY_SHORT)


@pytest.mark.parametrize("name", MAPPED)
def test_the_mapped_folders_are_linked(name: str) -> None:
    """Static tools find layerstore.cli and layerstore.migrations through relative links to the real folders."""
    link = LIBRARY / name

    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert (ROOT / name / "__init__.py").is_file()


# -- tidiness ------------------------------------------------------------------------------------------------------


def test_no_todo_without_an_issue() -> None:
    """A TODO names the issue that will do it."""
    sign = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK)\b(?!.*(issue |#)\d+)")
    files = [*sources(), *sorted((ROOT / "tests").rglob("*.py"))]

    report(
        (
            f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
            for path in files
            if path != Path(__file__)
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if sign.search(line)
        ),
        "what has no issue is never done, and its author is the only one who knows what was meant",
    )


def test_no_error_is_swallowed_blindly() -> None:
    """No handler of everything does nothing."""
    report(
        (
            f"{module.at(node)}: {ast.unparse(node.type) if node.type else 'everything'} is swallowed"
            for module in MODULES
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ExceptHandler)
            and (node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"})
            and all(
                isinstance(statement, ast.Pass | ast.Continue)
                or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
                for statement in node.body
            )
        ),
        "an error that may be ignored is named, and a comment proves why",
    )


def test_functions_fit_a_screen() -> None:
    """No function has more than 70 lines, its docstring included."""
    report(
        (
            f"{module.at(node)}: {node.name} has {lines} lines"
            for module in MODULES
            for node in ast.walk(module.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX
        ),
        f"a function of more than {FUNCTION_LINES_MAX} lines cannot be checked at one look: push ifs up and loops down",
    )


def test_modules_are_read_in_one_sitting() -> None:
    """No module has more than 500 lines."""
    report(
        (
            f"{module.at(module.tree)}: {lines} lines"
            for module in MODULES
            if (lines := len(module.path.read_text().splitlines())) > MODULE_LINES_MAX and module.name not in LONGER
        ),
        f"a module of more than {MODULE_LINES_MAX} lines holds more than one idea: give the second one its own file",
    )
