"""``layerstore runs``: a line for each run."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.remote import remote_names
from layerstore.cli.render import (
    Column,
    age,
    output,
    print_json,
    print_line,
    print_note,
    print_paragraph,
    print_rows,
    shown,
    some,
    with_store,
)
from layerstore.errors import InvalidInput
from layerstore.json_fields import json_fields
from layerstore.units import size

if TYPE_CHECKING:
    from layerstore.inspect import RunLine

ABOUT = About("Look", store="anywhere", answers=True, elsewhere=("status",))

_METRICS = ("eval_loss", "loss")


def runs(
    place: Annotated[
        str | None, typer.Argument(metavar="STORE", help="A folder or URL, instead of --store.", show_default=False)
    ] = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    List the runs with their newest saves.

    SIZE, PRECISION, POLICY and METRIC describe the newest save; layerstore stats RUN counts the whole run.
    SIZE is the stored size of that save's layers, even inherited ones; NEW in layerstore log is all that it added.
    HEALTH is ok if everything that the newest save needs exists in full size, and no save has failed since.
    No tensor is read: layerstore verify does that.

    \b
    Examples:
      layerstore runs
      layerstore runs --json
    """
    named = output.store
    if place is not None and named is not None and place != named:
        raise InvalidInput(f"two stores were given: {place} and --store {named}", hint="leave one of them out")
    with opened(place or store) as opened_store:
        lines = opened_store.overview()
        any_pushed = any(pushed.step is not None for line in lines for pushed in line.pushed)
        names = remote_names(opened_store) if any_pushed else {}
        dropped = sorted({name.run for name in opened_store.repo.trash.records()} - {line.run for line in lines})
    if as_json:
        print_json({"runs": [json_fields(line) for line in lines]})
        return
    if lines:
        _print_result(lines, names)
    elif not dropped:
        print_note("no runs yet")
    if dropped:
        listed = with_store("layerstore log --dropped")
        print_note(f"dropped: {shown(some(dropped))}; {listed} lists their commits")


def _print_result(lines: list["RunLine"], names: dict[str, str]) -> None:
    columns: dict[Column, Callable[[RunLine], str]] = {
        Column("RUN", folds=True): lambda line: line.run,
        Column("STEP", "right"): lambda line: "-" if line.step is None else str(line.step),
        Column("SAVED"): lambda line: "-" if line.time_ns is None else age(line.time_ns),
        Column("SAVES", "right", drops=3): lambda line: f"{line.saves:,}",
        Column("SIZE", "right", drops=2): lambda line: "-" if line.size_bytes is None else size(line.size_bytes),
    }
    if any(line.precision not in {"exact", None} for line in lines):
        columns[Column("PRECISION", drops=4)] = lambda line: line.precision or "-"
    columns[Column("POLICY", drops=5)] = lambda line: line.policy or "-"
    if any(line.pushed for line in lines):
        columns[Column("PUSHED", folds=True, drops=1)] = lambda line: _pushed(line, names)
    if any(line.metrics for line in lines):
        columns[Column("METRIC", "right", drops=6)] = _metric
    columns[Column("HEALTH")] = lambda line: "ok" if line.is_healthy else "problem"
    print_rows(columns, lines)
    if not all(line.is_healthy for line in lines):
        print_line()
    for line in lines:
        for problem in line.problems:
            print_paragraph(shown(f"{line.run}: {problem}"), indent=2)


def _pushed(line: "RunLine", names: dict[str, str]) -> str:
    """Return the remotes that have the run, with the last pushed step where that is not the newest."""
    remotes = []
    for pushed in line.pushed:
        if pushed.step is not None:
            name = names.get(pushed.remote, pushed.remote)
            remotes.append(name if pushed.step == line.step else f"{name} to {pushed.step}")
    return ", ".join(remotes) or "no"


def _metric(line: "RunLine") -> str:
    """Return eval_loss or loss of the newest save; otherwise, its first metric by name."""
    metrics = line.metrics or {}
    name = next((name for name in (*_METRICS, *sorted(metrics)) if name in metrics), None)
    return "-" if name is None else f"{name} {metrics[name]:.6g}"
