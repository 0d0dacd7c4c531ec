"""
What can go wrong around a store, case by case, with what has to happen then, and the tests that show that it does.

    python -m tests.fault_cases

writes docs/internals/faults.md anew. A test says which cases it shows where it is defined:

    @pytest.mark.fault(34, 35)

How marks are found: tests/marks.py. Numbers are never given anew: tests, commits and people speak of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.marks import ROOT, MarkedTest, Marker, cell

PAGE = ROOT / "docs" / "internals" / "faults.md"
MARKER = Marker(mark="fault", kind=int)


@dataclass(frozen=True, slots=True)
class Group:
    """Cases of one kind."""

    title: str
    cases: Mapping[int, tuple[str, str]]
    """What happens, and what has to come of it; both by the case's number."""


DEATH = Group(
    "Death of a process, loss of power",
    {
        1: (
            "killed while an object is written to `tmp/`",
            "no commit; nobody reads the file, a collection removes it once it is old",
        ),
        2: ("killed between an object's fsync and its link", "the same"),
        3: (
            "killed between an object's link and its folder's fsync",
            "the object may be there or not; no record names it",
        ),
        4: (
            "killed between the objects and the record, also with half a record in `tmp/`",
            "objects that nothing names; a repeat reuses them once it has looked at them and synced their folders",
        ),
        5: ("killed inside the index's transaction", "the commit is there; the next open catches up by itself"),
        6: (
            "killed between the index's data and its meta page",
            "the index is the old or the new one; the commit is there",
        ),
        7: (
            "killed after the index, before pin and cleaning up",
            "the commit is there, locks are free, a pin is old or new",
        ),
        8: (
            "power fails at any step: what was not synced is lost, reordered or torn",
            "every record that survives has all its objects, byte for byte, with the index or without",
        ),
        9: ("power fails in the first `init`", "no store, or a whole empty one"),
        10: (
            "SIGINT or SIGTERM in ingest, compose, gc, reindex",
            "exit code 130 or 143, no temporary file left, nothing lost",
        ),
        11: (
            "a collection is killed while it removes records",
            "each is whole or gone; the next collection marks afresh",
        ),
        12: (
            "a collection is killed while it moves objects aside, puts them back or removes them",
            "whatever is named is found, at its place or aside; the next collection takes up what is left",
        ),
        13: ("compose is killed", "the target is absent or whole; only a folder `.partial-…` is left"),
        14: ("a migration is killed at any step", "the old store or the new one opens; a repeat completes it"),
        15: (
            "a damaged index would kill the process that maps it",
            "found before it is opened; cut while it is open, it kills that process only, and the next open rebuilds",
        ),
    },
)

LIMITS = Group(
    "Limits of disks and systems",
    {
        16: (
            "the disk is full while an object is written",
            "exit code 23 with the bytes that are free; nothing left behind",
        ),
        17: ("the disk turns out full at fsync", "the file is thrown away, its fsync never tried again"),
        18: (
            "the disk is full inside the index's transaction",
            "the commit stands, with a warning; the index catches up",
        ),
        19: ("the disk is full before `lock.mdb` is there", "no signal; questions are answered without an index"),
        20: ("the disk is full when gc is called", "it frees all the same"),
        21: ("the disk under a composite is full", "nothing is left there, the store is as it was"),
        22: (
            "an object or record cannot be read (EIO)",
            "it is named, with who needs it; the rest is not affected, and verify lists all of them",
        ),
        23: (
            "a file's, folder's or the index's sync fails (EIO)",
            "before the record: nothing was saved; in the index: a warning; never tried again on the same file",
        ),
        24: ("short writes, interrupted calls", "written on until all is there"),
        25: ("no more descriptors (EMFILE)", "told as what it is; every descriptor that was opened is closed"),
        26: ("no memory", "no commit, nothing left behind; large tensors need no more of it than small ones"),
        27: ("the store is read-only", "exit code 12 for what writes; questions, verify and compose work"),
        28: ("a file may not grow (EFBIG, EDQUOT)", "as on a full disk"),
        29: ("`tmp/` is on another filesystem", "refused when the store is opened"),
        30: ("no hard links on this filesystem", "files get their names by a rename that replaces nothing"),
        31: (
            "the store is on a network filesystem",
            "the index goes to a disk of this node; to force it elsewhere is refused",
        ),
        32: ("the index outgrows its map", "it grows; commits are not affected"),
        33: (
            "umask 077, a store of a group, a foreign owner",
            "files get what the umask leaves; who may not is told the file, its mode and its owner, exit code 12",
        ),
    },
)

DAMAGE = Group(
    "Damage that is found later",
    {
        34: (
            "an object is cut short",
            "found by its size; an error that says how much there should be, and who needs it",
        ),
        35: ("an object has a flipped bit", "an error before a byte is handed out; `verify --read-data` lists it"),
        36: (
            "an object is missing",
            "looked for aside; compose refuses before it writes; the same checkpoint again heals",
        ),
        37: ("an object lies under another one's name", "found by every read that verifies"),
        38: (
            "a folder, fifo, link or device lies where an object or record should",
            "never followed, never waited for",
        ),
        39: ("a value of the index has a flipped bit", "found, or without effect; the index is rebuilt"),
        40: (
            "the index is cut, or has noise or zeros in it",
            "rebuilt with one line of notice; nothing lost, no signal",
        ),
        41: ("the index is missing or empty", "rebuilt; never taken for a store without commits"),
        42: ("`lock.mdb` is missing, or noise", "answers stay"),
        43: ("`store.json` is missing, empty or another store's", "refused; repair restores it on request only"),
        44: (
            "repair meets damage, and is interrupted",
            "it moves to the trash, fetches from copies and tells the rest; nothing is lost, and it can be repeated",
        ),
        45: ("an old copy of the index is restored", "it catches up; a collection asks the records, not the index"),
        46: ("a store is copied while it is written to", "the copy is whole, or names what its newest commits lack"),
    },
)

CONCURRENCY = Group(
    "Several at once",
    {
        47: ("two ingests", "both succeed, or the second is told who is busy, exit code 11; never mixed"),
        48: ("many readers, one writer", "readers see whole commits only"),
        49: ("gc beside ingest", "both end; no published commit lacks anything"),
        50: ("gc beside compose", "compose finds what was moved aside, or says that it was collected meanwhile"),
        51: ("an ingest of bytes that gc is about to remove", "they are kept, put back or written again"),
        52: ("a fork with an open store", "the child is told to open it again; the parent does not notice"),
        53: ("several stores and threads in one process", "they share the index; closing one does not break another"),
        54: (
            "who holds a lock is suspended for hours",
            "others are told at their deadline; a late collection looks again",
        ),
        55: ("stale words in a lock file", "only words"),
        56: (
            "clocks jump, times lie in the future",
            "order is by step, age by the filesystem's clock, the future is young",
        ),
    },
)

INPUT = Group(
    "Hostile or wrong input",
    {
        57: ("a pickle that runs code", "refused with the names that it wants; nothing is run"),
        58: ("a class that nobody knows", "refused by its name; allowed by name it stays an inert object"),
        59: ("bombs, overlaps and odd names in archives", "refused within bounds, memory flat"),
        60: ("a flipped bit in a checkpoint's tensors", "found by the archive's checksum; nothing is ingested"),
        61: ("a rank's file is cut short", "incomplete, with rank and file"),
        62: ("a rank's file is missing, or one too many", "all ranks that are missing are named"),
        63: ("ranks of other world sizes, steps or tags", "a mismatch, with what each says"),
        64: ("the checkpoint is still being written", "incomplete, with the hint to wait; never half of it"),
        65: ("`latest` is missing, empty or leads elsewhere", "refused; naming the tag works"),
        66: ("no ZeRO-3 checkpoint, or a setting that is refused", "unsupported, with what was found"),
        67: (
            "padding is not zero; lengths or shapes do not fit",
            "padding is ignored; the others are named, never guessed",
        ),
        68: ("NaN, infinities, -0.0, denormals", "kept bit for bit, shared by their bytes"),
        69: (
            "empty, 0-d, shared, huge tensors of any type and layout",
            "a round trip bit for bit, or unsupported with type or layout",
        ),
        70: ("tied, renamed or reshaped parameters", "ties are kept; what changed its shape is another version"),
        71: ("names of any text", "kept as data or refused; never a path; printed escaped"),
        72: ("file names that are no text", "left out with a note where nobody needs them, else refused readably"),
        73: ("links in a checkpoint", "refused unless they are to be followed; circles end"),
        74: ("the store's path, or a folder in it, is a link", "the path is resolved once; a planted link is refused"),
        75: ("gc or repair of what is no store", "refused; nothing is removed"),
        76: ("a recipe made to exhaust or mislead", "refused with the place, in bounded time and memory"),
        77: ("a recipe names what is not there, or could be several", "told with what there is; nothing is written"),
        78: ("compose onto something that is there, or into the store", "refused without force; never into the store"),
        79: ("an id that is none", "refused before any file is touched"),
    },
)

VERSIONS = Group(
    "Versions and surroundings",
    {
        80: ("a store of a newer format", "unsupported; nothing is written, not even a lock"),
        81: ("a flag that is not known, of a store or a record", "read where that is safe, never written"),
        82: ("a store of an older format", "it opens, or names `layerstore migrate`; an older index is rebuilt"),
        83: ("old code meets a new store", "it refuses: the field that it looks at never moves"),
        84: ("a migration twice, or out of order", "nothing to do, or refused"),
        85: ("a record of an unknown schema", "named; the others are listed; gc stops"),
        86: ("another engine of LMDB is the default", "the pinned one is used; another format of the index is rebuilt"),
        87: (
            "no torch, other libraries, another byte order",
            "ingest and compose need no torch; what cannot be is refused",
        ),
        88: ("no terminal, closed stdout, LANG=C, `--json`", "right exit codes, no half JSON, errors on stderr"),
        89: ("`python -O`", "the same behaviour: no check of the world is an assertion"),
        90: ("long, odd or relative paths of a store", "resolved once, when it is opened"),
    },
)

RECORDS = Group(
    "Records against the index",
    {
        91: (
            "a record is damaged",
            "only that commit is; repair fetches it from another store; else gc stops until it is dropped by name",
        ),
        92: ("the index is behind, or lacks a row", "the listing tells; answers are those of a fresh index"),
        93: ("the index has a row of a record that is gone", "the row goes, and whoever asks is told once, by name"),
        94: ("the index of another store", "not used"),
        95: ("`commits/` is missing or cannot be read", "an error, never no commits"),
        96: ("a record under a wrong name, run or store", "damage; queries pass it over, gc stops"),
        97: ("a link answers with an error although it worked", "name and source are one file: that is success"),
        98: ("the fsync behind a record fails", "published, not confirmed, and said so; a repeat confirms it"),
        99: ("reindex is killed, or the disk refuses", "the old index or none; a repeat completes it"),
        100: ("there can be no index", "a warning, and the same answers, slower"),
        101: ("the index is removed after any step", "the same answers, in bounded time"),
        102: (
            "two records of one step",
            "equal content is one commit; else a conflict, or both are shown as ambiguous",
        ),
        103: (
            "a pin's commit is gone; a pin is damaged",
            "a pin is a whole record; a damaged one is named and blocks gc",
        ),
    },
)

RANKS = Group(
    "Many ranks and nodes",
    {
        104: ("a rank dies before its part; attempts mix", "never visible, never joined; leftovers are collected"),
        105: ("the committing rank dies, or two commit", "one name, one link; whoever repeats it succeeds"),
        106: (
            "another node's view of a folder is old",
            "fewer commits, never half of one; what seems missing is looked for again; what goes waits a grace age",
        ),
        107: ("a lock is lost while its holder works", "no promise rests on it: the second look decides"),
    },
)

GROUPS = (DEATH, LIMITS, DAMAGE, CONCURRENCY, INPUT, VERSIONS, RECORDS, RANKS)
CASES: Mapping[int, tuple[str, str]] = {number: case for group in GROUPS for number, case in group.cases.items()}

INTRODUCTION = f"""\
# Faults

What can go wrong around a store, what has to come of it, and the tests that show that it does.
Everywhere, unless a case says otherwise: a documented exit code, one line with what was asked and found,
one with what to do next; nothing that was saved before is lost or changed; the same command succeeds once
the cause is gone. What the promises rest on: [durability](durability.md).

This page is generated. A test names its cases with `@pytest.mark.{MARKER.mark}(34, 35)`.
`python -m tests.fault_cases` writes the page anew, and `pytest -m {MARKER.mark}` runs what it names.
"""


def cases_with_tests(tests: list[MarkedTest[int]]) -> dict[int, list[MarkedTest[int]]]:
    """Return the tests of each case; what a test names beyond them is there too."""
    found: dict[int, list[MarkedTest[int]]] = {number: [] for number in CASES}
    for test in tests:
        for number in test.shows:
            found.setdefault(number, []).append(test)
    return found


def page(tests: list[MarkedTest[int]]) -> str:
    """Return the text of the page."""
    by_case = cases_with_tests(tests)
    counts = f"{len(CASES)} cases, shown by {len(tests)} tests.\n"
    return "\n".join([INTRODUCTION, counts, *(_section(group, by_case) for group in GROUPS)])


def _section(group: Group, by_case: Mapping[int, list[MarkedTest[int]]]) -> str:
    rows = [f"| {number} | {what} | {rule} | {cell(by_case[number])} |" for number, (what, rule) in group.cases.items()]
    return "\n".join(
        [f"## {group.title}", "", "| no. | what happens | what comes of it | tests |", "|---|---|---|---|", *rows, ""]
    )


if __name__ == "__main__":
    PAGE.write_text(page(MARKER.tests()))
