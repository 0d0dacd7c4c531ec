"""
Marks that name what a test shows, read from the syntax trees of all tests.

Nothing is imported and no test collected: a page that is made of marks can be compared in a moment.
A mark stands where the test is defined, and names what it shows by plain texts or plain numbers:

    @pytest.mark.known_fault("llmtailor 7")
    @pytest.mark.fault(34, 35)
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeGuard, TypeVar

ROOT = Path(__file__).parents[1]

Name = TypeVar("Name", str, int)


@dataclass(frozen=True, slots=True, order=True)
class MarkedTest(Generic[Name]):
    """A test that says what it shows."""

    path: str
    """Of its file, below the root of the repository."""
    line: int
    name: str
    shows: tuple[Name, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker(Generic[Name]):
    """One mark, and by what it names things."""

    mark: str
    kind: type[Name]

    def tests(self, folder: Path = ROOT / "tests") -> "list[MarkedTest[Name]]":
        """Return every marked test below *folder*, in the order of files and lines."""
        return sorted(test for path in folder.rglob("*.py") for test in self._tests_in(path, folder.parent))

    def _tests_in(self, path: Path, root: Path) -> "Iterator[MarkedTest[Name]]":
        """
        Yield the marked tests of one file.

        Raises:
            ValueError: A mark is not a decorator of a test, or names things by something else than plain values.
        """
        source = path.read_bytes()
        if self.mark.encode() not in source:
            return
        tree = ast.parse(source)
        marks = {node for node in ast.walk(tree) if self._is_mark(node)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            own = [call for call in node.decorator_list if isinstance(call, ast.Call) and call.func in marks]
            marks -= {call.func for call in own if isinstance(call.func, ast.Attribute)}
            shows = tuple(self._value(argument, path) for call in own for argument in call.args)
            if shows:
                yield MarkedTest(path.relative_to(root).as_posix(), node.lineno, node.name, shows)
        for mark in marks:
            raise ValueError(f"{path}:{mark.lineno}: {self.mark} is no decorator of a test, so nobody would see it")

    def _is_mark(self, node: ast.AST) -> TypeGuard[ast.Attribute]:
        if not isinstance(node, ast.Attribute) or node.attr != self.mark:
            return False
        return isinstance(node.value, ast.Attribute) and node.value.attr == "mark"

    def _value(self, argument: ast.expr, path: Path) -> Name:
        if isinstance(argument, ast.Constant) and type(argument.value) is self.kind:
            return argument.value
        raise ValueError(f"{path}:{argument.lineno}: {self.mark} names what it shows by a plain {self.kind.__name__}")


def cell(tests: list[MarkedTest[Name]]) -> str:
    """Return the names of *tests*, gathered by file, for a table: no links, as tests are not on the site."""
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.path, []).append(f"`{test.name}`")
    return "<br>".join(f"`{path.removeprefix('tests/')}`: {', '.join(names)}" for path, names in files.items())
