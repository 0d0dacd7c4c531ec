"""The part of docs/benchmarks.md that is generated: tables, what was not run, where we lose, and the two pictures."""

from collections.abc import Iterator
from pathlib import Path

from tests.bench.peers.plots import draw
from tests.bench.peers.table import Findings, Table, about, absent, losses, tables

BEGIN = "<!-- written by python -m tests.bench peers --page -->"
END = "<!-- end -->"

_PICTURES = (
    "![For each system two dots: the seconds that a save holds training up, and the seconds until it is on disk.]"
    "(pictures/peers-saving.svg)",
    "![For each system two dots: what it has on disk after one save, and after all saves of the last round.]"
    "(pictures/peers-bytes.svg)",
)


def write(found: Findings, *, docs: Path) -> None:
    """Write what *found* says between the two marks of the page, and draw its pictures."""
    page = docs / "benchmarks.md"
    page.write_text(filled(page.read_text(), found))
    draw(found, docs / "pictures")


def filled(text: str, found: Findings) -> str:
    """Return the page *text* with what *found* says between its marks."""
    before, rest = text.split(f"{BEGIN}\n")
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n" + "\n".join(_section(found)) + f"\n{END}{after}"


def _section(found: Findings) -> Iterator[str]:
    yield from (f"{line}." for line in about(found))
    yield ""
    for table in tables(found):
        yield from [f"**{table.title}**", "", *_markdown(table), ""]
    for line in absent(found):
        yield f"- {line}"
    yield from ["", "layerstore beside the best of the others:", ""]
    for line in losses(found):
        yield f"- {line}"
    yield ""
    for picture in _PICTURES:
        yield from [picture, ""]


def _markdown(table: Table) -> Iterator[str]:
    yield f"| {' | '.join(table.header)} |"
    yield "|---" + "|---:" * (len(table.header) - 1) + "|"
    for line in table.lines:
        yield f"| {' | '.join(line)} |"
