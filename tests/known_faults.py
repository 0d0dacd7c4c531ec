"""
Faults seen in other tools, and the tests that show that layerstore does not have them.

    python -m tests.known_faults

writes docs/internals/known-faults.md anew. A test says which faults it is about where it is defined:

    @pytest.mark.known_fault("llmtailor 7", "llmtailor 12")

How marks are found: tests/marks.py.
"""

from tests.marks import ROOT, MarkedTest, Marker, cell

PAGE = ROOT / "docs" / "internals" / "known-faults.md"
MARKER = Marker(mark="known_fault", kind=str)


NAME = "llmtailor"
"""What stands before the number in a mark."""

FAULTS = (
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
)
"""One sentence each: what goes wrong there. Numbered from 1, and never anew."""

REFERENCES = [f"{NAME} {number}" for number in range(1, len(FAULTS) + 1)]
"""The faults as marks name them."""

INTRODUCTION = f"""\
# Known faults

Faults that were seen in other tools, each with the tests that show that layerstore does not have it.
The sentences say what goes wrong *there*; the tests say what happens here.

This page is generated. A test names its faults with `@pytest.mark.{MARKER.mark}("{NAME} 7")`.
`python -m tests.known_faults` writes the page anew, and `pytest -m {MARKER.mark}` runs what it names.

## Composing from several checkpoints: LLMTailor

LLMTailor merges layers of several ZeRO-3 checkpoints into one.
The sentences say what its code, or a run of it, does.

| no. | what goes wrong there | tests |
|---|---|---|
"""


def faults_with_tests(tests: list[MarkedTest[str]]) -> dict[str, list[MarkedTest[str]]]:
    """Return the tests of each fault; what a test names beyond them is there too."""
    found: dict[str, list[MarkedTest[str]]] = {reference: [] for reference in REFERENCES}
    for test in tests:
        for fault in test.shows:
            found.setdefault(fault, []).append(test)
    return found


def page(tests: list[MarkedTest[str]]) -> str:
    """Return the text of the page."""
    by_fault = faults_with_tests(tests)
    rows = [
        f"| {number} | {sentence} | {cell(by_fault[reference])} |\n"
        for number, (sentence, reference) in enumerate(zip(FAULTS, REFERENCES, strict=True), 1)
    ]
    return "".join([INTRODUCTION, *rows])


if __name__ == "__main__":
    PAGE.write_text(page(MARKER.tests()))
