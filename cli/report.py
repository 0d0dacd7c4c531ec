"""``layerstore report``: one page about a store, to look at, to print and to send."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.policy import keep_of, with_rules
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import counted, say, say_json, say_paragraph, say_warning, shown
from layerstore.errors import InvalidInput
from layerstore.units import size

ABOUT = About("Look", store="anywhere")

Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="The page; an older report is replaced.")]
RunName = Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only this run.", show_default=False)]


@with_rules
def report(
    *,
    out: Out = None,
    run: RunName = None,
    rules: Mapping[str, object],
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Write one HTML page: each layer's version at every step.

    It needs no network and stays below 1 MB: for a long history, only some saves are shown, and the page says so.
    It shows how old a composite at any step would be, storage over time, and drift and save timings if recorded.
    With the options of gc, it also shows what gc would keep; nothing is removed.

    \b
    Examples:
      layerstore report -o report.html
      layerstore report -o report.html --run sft --keep-last 3 --keep-every 1000
      layerstore report --json
    """
    keep = keep_of(rules)
    with opened(store) as opened_store, shown_progress(as_json=as_json) as progress:
        if out is None and not as_json:
            raise InvalidInput("a report needs a file", hint="layerstore report -o report.html")
        found = opened_store.report(out, run=run, keep=keep, progress=progress)
    for problem in found["left_out"]:
        say_warning(f"left out: {problem}")
    if as_json:
        say_json({"out": None if out is None else str(out), **found})
    else:
        _tell(found, out)


def _tell(found: dict[str, Any], out: Path | None) -> None:
    stats, plan = found["stats"], found["retention"]
    say(f"wrote {shown(out)}: {counted(stats['commits'], 'commit')} of {counted(stats['run_count'], 'run')}")
    if plan is not None:
        rules = plan["rules"] if found["run"] is None else f"{found['run']} {plan['rules']}"
        say_paragraph(f"gc {shown(rules)} would {_planned(plan)}", indent=2)
    for run in found["runs"]:
        count = len(run["saves"]["step"])
        if count < run["commits"]:
            say(f"{shown(run['run'])}: sampled, {count:,} of {counted(run['commits'], 'save')} are shown")


def _planned(plan: dict[str, Any]) -> str:
    """Return what gc would do under the rules."""
    if plan["refusal"] is not None:
        return f"refuse: {shown(plan['refusal'])}"
    trimmed = f", take the moments of {plan['commits_trimmed']:,}" if plan["commits_trimmed"] else ""
    later = f", and {size(plan['bytes_freed_later'])} later, too young now" if plan["bytes_freed_later"] else ""
    removed = counted(plan["commits_removed"], "commit") if plan["commits_removed"] else "no commit"
    freed = size(plan["bytes_freed"]) if plan["bytes_freed"] else "nothing at once" if later else "nothing"
    stay = counted(plan["commits_kept"], "commit")
    return f"remove {removed}{trimmed} and free {freed}{later}; {stay} would stay"
