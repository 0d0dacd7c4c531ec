"""The part of docs/benchmarks.md that is generated: tables, what was not run, where we lose, and the two pictures."""

from collections.abc import Iterator
from pathlib import Path

from tests.bench.peers.plots import draw
from tests.bench.peers.table import Findings, about, absent, losses, tables
from tests.bench.report import fill

BEGIN = "<!-- written by python -m tests.bench peers --page -->"

_PICTURES = (
    "![For each system two dots: the seconds that a save holds training up, and the seconds until it is on disk.]"
    "(pictures/peers-saving.svg)",
    "![For each system two dots: what it has on disk after one save, and after all saves of the last round.]"
    "(pictures/peers-bytes.svg)",
)


def write(found: Findings, *, docs: Path) -> None:
    """Write what *found* says between the two marks of the page, and draw its pictures."""
    fill(docs / "benchmarks.md", section(found), begin=BEGIN)
    draw(found, docs / "pictures")


def section(found: Findings) -> Iterator[str]:
    """Yield that part of the page."""
    yield from (f"{line}." for line in about(found))
    yield ""
    for table in tables(found):
        yield from [*table.markdown(), ""]
    for line in absent(found):
        yield f"- {line}"
    yield from ["", "layerstore beside the best of the others:", ""]
    for line in losses(found):
        yield f"- {line}"
    yield ""
    for picture in _PICTURES:
        yield from [picture, ""]
