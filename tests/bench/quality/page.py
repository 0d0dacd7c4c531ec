"""The part of docs/evidence.md that is generated: what was trained, tables, and the pictures."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench.quality import means, precision_trial, real_model, trial
from tests.bench.quality.plots import draw
from tests.bench.quality.settings import Settings
from tests.bench.quality.table import Findings, about, remarks, tables
from tests.bench.report import fill
from tests.bench.rows import Row

BEGIN = "<!-- written by python -m tests.bench quality --page -->"

_PICTURES = {
    "frontier": "Each arm by how many times fewer bytes a run saves, and by how far its loss is from the control's; "
    "a line ends where the interval does, and shaded is what other batches alone do.",
    "recovery": "The difference to the control by steps after the resume, a curve for each arm, from the "
    "resume to the last step that all jobs have.",
    "movements": "A row for each layer and a column for each save, from the first step to the last; darker cells "
    "moved further.",
    "loss": "The training loss of both tasks from the first step to the last; a band around each curve is the range "
    "over seeds.",
}
_TRIAL = (
    "A curve for each way to choose layers: how many times fewer bytes the later saves have, and by how much the "
    "loss is higher right after a resume."
)


def write(settings: Settings, rows: Sequence[Row], *, docs: Path) -> None:
    """Write what *rows* say between the two marks of the page, and draw its pictures."""
    if not Findings(rows).trunks:
        raise SystemExit("nothing was run yet: there is nothing to write")
    draw(settings, rows, docs / "pictures")
    fill(docs / "evidence.md", section(settings, rows), begin=BEGIN)


def section(settings: Settings, rows: Sequence[Row]) -> Iterator[str]:
    """Yield that part of the page."""
    found = Findings(rows)
    yield from (f"- {line}" for line in [*about(settings, found), *remarks(settings, found)])
    yield ""
    whole, *each = tables(settings, found)
    yield from [*whole.markdown(), ""]
    for name, words in _PICTURES.items():
        yield from [f"![{words}](pictures/quality-{name}.svg)", ""]
    for table in each:
        yield from [*table.markdown(), ""]
    tried = trial.table(rows)
    if tried is not None:
        yield from [*tried.markdown(), "", f"![{_TRIAL}](pictures/quality-trial.svg)", ""]
    for other in (means.table(rows), precision_trial.table(rows), real_model.table(rows)):
        if other is not None:
            yield from [*other.markdown(), ""]
