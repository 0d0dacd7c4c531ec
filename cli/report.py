"""``layerstore report``: one page about a store, to look at, to print and to send."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.gc import DropOptimizer, KeepBest, KeepEvery, KeepLast, KeepWithin
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import counted, say, say_json, say_paragraph, say_warning, shown, size
from layerstore.errors import InvalidInput

if TYPE_CHECKING:
    from layerstore.inspect import Report, RetentionReport

Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="The page; an older report is replaced.")]
RunName = Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only this run.", show_default=False)]


def report(
    *,
    out: Out = None,
    run: RunName = None,
    keep_last: KeepLast = None,
    keep_every: KeepEvery = None,
    keep_within: KeepWithin = None,
    keep_best: KeepBest = None,
    drop_optimizer_older_than: DropOptimizer = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Write one HTML page: each layer's version at every step.

    It needs no network and stays below 1 MB: of a long history only some saves are shown, and the page says so.
    It shows how old a composite at any step would be, storage over time, and drift and save timings if recorded.
    With the options of gc it also shows what gc would keep; nothing is removed.

    \b
    Examples:
      layerstore report -o report.html
      layerstore report -o report.html --run sft --keep-last 3 --keep-every 1000
      layerstore report --json
    """
    from layerstore.policy import Keep

    keep = Keep(
        last=keep_last,
        every=keep_every,
        within=keep_within,
        best=keep_best,
        drop_optimizer_older_than=drop_optimizer_older_than,
    )
    with opened(store) as opened_store, shown_progress(as_json=as_json) as progress:
        if out is None and not as_json:
            raise InvalidInput("a report needs a file", hint="layerstore report -o report.html")
        found = opened_store.report(out, run=run, keep=keep, progress=progress)
    for problem in found.left_out:
        say_warning(f"left out: {problem}")
    if as_json:
        from layerstore.inspect import report_fields

        say_json({"out": None if out is None else str(out), **report_fields(found)})
    else:
        _tell(found, out)


def _tell(found: "Report", out: Path | None) -> None:
    say(f"wrote {shown(out)}: {counted(found.stats.commits, 'commit')} of {counted(len(found.stats.runs), 'run')}")
    if found.retention is not None:
        say_paragraph(_planned(found.retention, run=found.stats.run), indent=2)
    for run in found.runs:
        if len(run.saves) < run.commits:
            say(f"{shown(run.run)}: sampled, {len(run.saves):,} of {counted(run.commits, 'save')} are shown")


def _planned(retention: "RetentionReport", *, run: str | None) -> str:
    """Return what gc by the rules would do."""
    from layerstore.inspect import rules_of

    rules, outcome = rules_of(retention.keep), retention.outcome
    if run is not None:
        rules = f"{run} {rules}"
    if outcome is None:
        return f"gc {shown(rules)} would refuse: {shown(retention.refusal)}"
    trimmed = f", take the moments of {len(outcome.trimmed):,}" if outcome.trimmed else ""
    later = f", and {size(outcome.young.size_bytes)} later, too young now" if outcome.young.size_bytes else ""
    removed = counted(len(outcome.removed), "commit") if outcome.removed else "no commit"
    freed = size(outcome.bytes_freed) if outcome.bytes_freed else "nothing at once" if later else "nothing"
    stay = counted(retention.commits_kept, "commit")
    return f"gc {shown(rules)} would remove {removed}{trimmed} and free {freed}{later}; {stay} would stay"
