"""
Faults seen in other tools, and the tests that show that layerstore does not have them.

    python -m tests.known_faults

writes docs/internals/known-faults.md anew. A test says which faults it is about where it is defined:

    @pytest.mark.known_fault("llmtailor 7", "llmtailor 12")

The marks are read from the syntax trees, so that nothing has to be imported, and no test collected, for the page.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals" / "known-faults.md"
MARKER = "known_fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultList:
    """Faults of one kind, numbered from 1."""

    name: str
    """What stands before the number in a mark."""
    title: str
    about: str
    """Where the faults were seen, as the page says it."""
    faults: tuple[str, ...]
    """One sentence each: what went wrong there."""

    @property
    def references(self) -> list[str]:
        """The faults as marks name them."""
        return [f"{self.name} {number}" for number in range(1, len(self.faults) + 1)]


@dataclass(frozen=True, slots=True, order=True)
class MarkedTest:
    """A test that says which faults it is about."""

    path: str
    """Of its file, below the root of the repository."""
    line: int
    name: str
    faults: tuple[str, ...]


LLMTAILOR = FaultList(
    name="llmtailor",
    title="Composing from several checkpoints: LLMTailor",
    about=(
        "LLMTailor merges layers of several ZeRO-3 checkpoints into one.\n"
        "The sentences say what its code, or a run of it, does."
    ),
    faults=(
        "Layers are found by their place among the optimizer's groups, "
        "so that groups listed blocks first give a composite of wrong layers.",
        "Only an optimizer with a group per layer is understood: two plain groups, several sub-groups to a group, "
        "parameters outside the usual layers and names that contain other names go wrong.",
        "A layer that no slice covers stays empty in the file, and a doubled or surplus one passes, "
        "or changes how many layers the config says there are.",
        "Where the config does not say whether embeddings are tied, or names another architecture than two, "
        "the composite has no optimizer.",
        "Weights and optimizer state of one layer may come from different checkpoints, "
        "and a tied model may be given a head of its own, without a word.",
        "The scheduler's entries are spliced group by group, one off and some never, "
        "and a source that has no file of a scheduler's cannot be used.",
        "Composing changes a source: a file that the composite has as a hard link is edited in place.",
        "Trainer, engine, scheduler and optimizer of one composite count different steps.",
        "A file that is missing beside the shards is a printed line, "
        "and what an earlier composite left in the folder stays there.",
        "An interrupted composition leaves a folder that looks whole, as the file 'latest' comes before the shards.",
        "The number of ranks is believed, not read: too small a one drops shards in silence, too large a one crashes, "
        "and names of files other than bf16's are not known.",
        "Shards that are cut short, damaged or absent are merged as they are.",
        "Unknown keys of a recipe are ignored, paths with '@' or '+' are misread, "
        "and kinds of plans that merge no optimizer crash.",
        "Config and tokenizer are those of any source, settings those of the last one read, "
        "and keys of DeepSpeed's that the tool does not know are lost.",
        "A recipe that is made for a failure takes layers from after it, or names a head that a tied model has not.",
        "A checkpoint is found by the number in its name, so that a tag one off, or a folder named otherwise, is lost.",
        "All shards of a source are read again for every slice and every rank, all sources stay in memory, "
        "and tensors pass between processes by descriptors, of which there are only so many.",
        "Files with a part of the weights work for two architectures, and shards with a part of the layers "
        "only in one order of groups.",
    ),
)

LISTS: tuple[FaultList, ...] = (LLMTAILOR,)

INTRODUCTION = f"""\
# Known faults

Faults that were seen in other tools, each with the tests that show that layerstore does not have it.
The sentences say what goes wrong *there*; the tests say what happens here.

This page is generated. A test names its faults with `@pytest.mark.{MARKER}("{LLMTAILOR.name} 7")`.
`python -m tests.known_faults` writes the page anew, and `pytest -m {MARKER}` runs what it names.
"""


def marked_tests(folder: Path = ROOT / "tests") -> list[MarkedTest]:
    """Return every marked test below *folder*, in the order of files and lines."""
    return sorted(test for path in folder.rglob("*.py") for test in _marked_in(path, folder.parent))


def _marked_in(path: Path, root: Path) -> Iterator[MarkedTest]:
    """
    Yield the marked tests of one file.

    Raises:
        ValueError: A mark is not a decorator of a test, or names its faults by something else than plain strings.
    """
    source = path.read_bytes()
    if MARKER.encode() not in source:
        return
    tree = ast.parse(source)
    marks = {node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == MARKER}
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        own = [call for call in node.decorator_list if isinstance(call, ast.Call) and call.func in marks]
        marks -= {call.func for call in own if isinstance(call.func, ast.Attribute)}
        faults = tuple(_text(argument, path) for call in own for argument in call.args)
        if faults:
            yield MarkedTest(path.relative_to(root).as_posix(), node.lineno, node.name, faults)
    for mark in marks:
        raise ValueError(f"{path}:{mark.lineno}: {MARKER} is no decorator of a test, so nobody would see it")


def _text(argument: ast.expr, path: Path) -> str:
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value
    raise ValueError(f"{path}:{argument.lineno}: a fault is named by a plain string, list and number")


def faults_with_tests(tests: list[MarkedTest]) -> Mapping[str, list[MarkedTest]]:
    """Return the tests of each fault of every list; what a test names beyond them is there too."""
    found: dict[str, list[MarkedTest]] = {reference: [] for of in LISTS for reference in of.references}
    for test in tests:
        for fault in test.faults:
            found.setdefault(fault, []).append(test)
    return found


def page(tests: list[MarkedTest]) -> str:
    """Return the text of the page."""
    by_fault = faults_with_tests(tests)
    return "\n".join([INTRODUCTION, *(_section(of, by_fault) for of in LISTS)])


def _section(of: FaultList, by_fault: Mapping[str, list[MarkedTest]]) -> str:
    rows = [
        f"| {number} | {sentence} | {_cell(by_fault[reference])} |"
        for number, (sentence, reference) in enumerate(zip(of.faults, of.references, strict=True), 1)
    ]
    return "\n".join(
        [f"## {of.title}", "", of.about, "", "| no. | what goes wrong there | tests |", "|---|---|---|", *rows, ""]
    )


def _cell(tests: list[MarkedTest]) -> str:
    """Return the names of *tests*, gathered by file; each file is a link."""
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.path, []).append(f"`{test.name}`")
    above = "../" * len(PAGE.parent.relative_to(ROOT).parts)
    return "<br>".join(
        f"[{path.removeprefix('tests/')}]({above}{path}): {', '.join(names)}" for path, names in files.items()
    )


if __name__ == "__main__":
    PAGE.write_text(page(marked_tests()))
