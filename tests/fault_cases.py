"""
The pages of faults in docs/internals: which tests show what comes of a case.

    python -m tests.fault_cases 34 "llmtailor 7"

prints them, of all cases if none is named. A test names its cases where it is defined:

    @pytest.mark.fault(34, 35)
    @pytest.mark.known_fault("llmtailor 7")

Marks are read from the syntax trees: nothing is imported and no test collected. Numbers are never given anew: tests,
commits and people speak of them.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_ROW = re.compile(r"^\| (\d+) \| ", re.MULTILINE)


@dataclass(frozen=True, slots=True, order=True)
class MarkedTest:
    """A test that says which cases it shows."""

    path: str
    """Of its file, below the folder of all tests."""
    line: int
    name: str
    shows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of faults, and the mark of its tests."""

    path: Path
    mark: str
    prefix: str = ""
    """What stands before the number in a mark that holds texts; empty where it holds plain numbers."""

    def numbers(self) -> list[int]:
        """Return the numbers of its cases, in their order."""
        return [int(number) for number in _ROW.findall(self.path.read_text())]

    def tests(self, folder: Path = ROOT / "tests") -> list[MarkedTest]:
        """
        Return the marked tests below *folder*, in the order of files and lines.

        Raises:
            ValueError: A mark is not a decorator of a test, or names cases by something else than plain values.
        """
        return sorted(test for path in folder.rglob("*.py") for test in self._tests_in(path, folder))

    def _tests_in(self, path: Path, folder: Path) -> Iterator[MarkedTest]:
        source = path.read_bytes()
        if self.mark.encode() not in source:
            return
        tree = ast.parse(source)
        marks = {node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and self._is_mark(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                own = [call for call in node.decorator_list if isinstance(call, ast.Call) and call.func in marks]
                marks -= {call.func for call in own if isinstance(call.func, ast.Attribute)}
                shows = tuple(self._number(argument, path) for call in own for argument in call.args)
                if shows:
                    yield MarkedTest(path.relative_to(folder).as_posix(), node.lineno, node.name, shows)
        for mark in marks:
            raise ValueError(f"{path}:{mark.lineno}: {self.mark} is not a decorator of a test, so nobody would see it")

    def _is_mark(self, node: ast.Attribute) -> bool:
        return node.attr == self.mark and isinstance(node.value, ast.Attribute) and node.value.attr == "mark"

    def _number(self, argument: ast.expr, path: Path) -> int:
        value = argument.value if isinstance(argument, ast.Constant) else None
        if self.prefix and isinstance(value, str) and re.fullmatch(rf"{self.prefix} \d+", value):
            return int(value.removeprefix(self.prefix))
        if not self.prefix and type(value) is int:
            return value
        form = f'"{self.prefix} 7"' if self.prefix else "7"
        raise ValueError(f"{path}:{argument.lineno}: {self.mark} names a case as in {self.mark}({form})")


INTERNALS = ROOT / "docs" / "internals"
PAGES = (
    Page(path=INTERNALS / "faults.md", mark="fault"),
    Page(path=INTERNALS / "known-faults.md", mark="known_fault", prefix="llmtailor"),
)


def printed(pages: tuple[Page, ...], *names: str) -> Iterator[str]:
    """Yield a line for each case of *pages* that is among *names*, or for all, and one for each test that shows it."""
    for page in pages:
        tests = page.tests()
        for number in page.numbers():
            name = f"{page.prefix} {number}".strip()
            if name in names or not names:
                yield f"{page.path.stem} {number}"
                yield from (f"  tests/{test.path}::{test.name}" for test in tests if number in test.shows)


if __name__ == "__main__":
    print("\n".join(printed(PAGES, *sys.argv[1:])))
