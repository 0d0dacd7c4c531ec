"""``layerstore log``: list the commits."""

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.remote import remote_names
from layerstore.cli.render import (
    Column,
    age,
    counted,
    print_json,
    print_note,
    print_rows,
    print_warning,
    shown,
    with_store,
)
from layerstore.json_fields import json_fields, json_value
from layerstore.units import short_id, size

if TYPE_CHECKING:
    from layerstore import Store
    from layerstore.gc import DroppedCommit
    from layerstore.inspect import LogEntry, LogLine, LogPage
    from layerstore.publish import SaveTiming

    Took = dict[tuple[str, int, int], SaveTiming]
    """How long each save took, by run, attempt and step."""

ABOUT = About("Look", store="anywhere", answers=True, elsewhere=("history", "list", "snapshots"))

# One screen or two.
_LIMIT = 50


def log(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Only this run.")] = None,
    *,
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=0, help="At most N commits of each run; 0 for all.")
    ] = _LIMIT,
    before: Annotated[
        str | None,
        typer.Option("--before", metavar="COMMIT", help="Only older commits of this commit's run."),
    ] = None,
    graph: Annotated[bool, typer.Option("--graph", help="Draw attempts and where they forked.")] = False,
    timing: Annotated[
        bool, typer.Option("--timing", help="Show how long saves took in training, not their contents.")
    ] = False,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="METRIC", help="Show what training measured, such as eval_loss; repeatable."),
    ] = None,
    dropped: Annotated[bool, typer.Option("--dropped", help="List what is in the trash instead.")] = False,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    List commits by run, newest step first.

    LACKS marks commits whose moments gc has removed. PRECISION, shown if some commit is not exact,
    is exact if all layers are kept bit for bit. PUSHED lists remotes as of the last push or pull.
    Metrics come from trainer_state.json, client_state and save(metrics=…).

    \b
    Examples:
      layerstore log sft --graph
      layerstore log sft --timing
      layerstore log sft --metric loss --metric eval_loss
      layerstore log sft --limit 20 --before 3f0c9a1b --json
    """
    if dropped:
        with opened(store) as opened_store:
            _print_dropped(opened_store.dropped(run), as_json=as_json)
        return
    with opened(store) as opened_store:
        page = opened_store.log_page(
            run, limit=limit or None, before=before, graph=graph and not as_json, metrics=bool(metric)
        )
        is_pushed = any(entry.pushed for entry in page.entries)
        remotes = remote_names(opened_store) if is_pushed else {}
        # Determined while the store is open, but printed last.
        if not page.entries and before is None:
            none = _said_of_none(opened_store)
        runs = dict.fromkeys(entry.run for entry in page.entries) if timing else ()
        took = {(name, save.attempt, save.step): save for name in runs for save in opened_store.timings(name)}
    sound = [line for line in page.lines if line.entry is None or line.entry.damage is None]
    damaged = [entry for entry in page.entries if entry.damage is not None]
    for entry in damaged:
        print_warning(f"{entry.run}@{entry.step} is left out, its record is damaged: {entry.damage}")
    lacking = _lacking(metric or (), page)
    if as_json:
        entries = [line.entry for line in sound if line.entry is not None]
        print_json(_fields(entries, damaged, took if timing else None, metrics=metric, more=bool(page.more)))
    elif sound:
        _print_lines(sound, took if timing else None, remotes, metrics=metric or ())
        if lacking:
            print_note(f"none of these commits has {', '.join(map(shown, lacking))}; older ones may")
        for more in page.more:
            options = f"{f' --limit {limit}' if limit != _LIMIT else ''}{' --graph' if graph else ''}"
            next_page = with_store(f"layerstore log {shown(more.run)} --before {short_id(more.after)}{options}")
            print_note(f"{counted(more.commits, 'older commit')}: {next_page}")
    elif not damaged and before is None:
        print_note(none)


def _lacking(wanted: Collection[str], page: "LogPage") -> list[str]:
    """Return the *wanted* metrics that no commit of the page has; raise NotFound if no other page can have them."""
    from layerstore.nearest import unknown

    entries = [entry for entry in page.entries if entry.damage is None]
    damaged = sum(entry.metrics is None for entry in entries)
    if damaged:
        print_warning(
            f"the metrics of {counted(damaged, 'commit')} cannot be read; layerstore verify says what is damaged"
        )
    known = list(dict.fromkeys(name for entry in entries for name in entry.metrics or ()))
    lacking = [name for name in wanted if entries and name not in known]
    if lacking and not page.more and not damaged:
        raise unknown("metric", lacking[0], known)
    return lacking


def _said_of_none(store: "Store") -> str:
    """Return why *store* shows no commit, and what to do."""
    if store.repo.trash.records():
        return f"all commits were dropped: {with_store('layerstore log --dropped')} lists them"
    if store.repo.remote is not None:
        return "no commits yet; next: save or ingest into it, or push to it from another store: layerstore push URL"
    # A store with a remote but without commits is an interrupted clone.
    command = "layerstore pull" if store.remotes.urls() else "layerstore ingest CHECKPOINT"
    return f"no commits yet; next: {with_store(command)}"


def _print_dropped(dropped: list["DroppedCommit"], *, as_json: bool) -> None:
    if as_json:
        fields = [json_fields(commit) for commit in dropped]
        print_json({"dropped": fields})
    elif dropped:
        columns: dict[Column, Callable[[DroppedCommit], str]] = {
            Column("RUN", folds=True): lambda entry: entry.commit.record.run
        }
        if any(entry.commit.record.attempt > 1 for entry in dropped):
            columns[Column("ATTEMPT", "right")] = lambda entry: str(entry.commit.record.attempt)
        columns |= {
            Column("STEP", "right"): lambda entry: str(entry.commit.record.step),
            Column("COMMIT", drops=2): lambda entry: short_id(entry.commit.id),
            Column("SAVED", drops=1): lambda entry: age(entry.commit.observed.time_ns),
            Column("DROPPED"): lambda entry: age(entry.dropped_ns),
        }
        if any(entry.commit.record.kept_precision != "exact" for entry in dropped):
            columns[Column("PRECISION")] = lambda entry: entry.commit.record.kept_precision
        print_rows(columns, dropped)
        print_note(f"{with_store('layerstore undrop RUN@STEP')} brings one back, with --run RUN a whole run")
    else:
        print_note("the trash holds no commit")


def _fields(
    sound: list["LogEntry"],
    damaged: list["LogEntry"],
    took: "Took | None",
    *,
    metrics: Collection[str] | None,
    more: bool,
) -> dict[str, object]:
    commits = [json_fields(entry) for entry in sound]
    if metrics is not None:
        for fields, entry in zip(commits, sound, strict=True):
            has = entry.metrics
            fields["metrics"] = has and json_value({name: has[name] for name in metrics if name in has})
    if took is not None:
        for fields, entry in zip(commits, sound, strict=True):
            timing = took.get((entry.run, entry.attempt, entry.step))
            fields["timing"] = None if timing is None else json_fields(timing)
    lost = [{"run": entry.run, "step": entry.step, "commit": entry.commit, "reason": entry.damage} for entry in damaged]
    return {"commits": commits, "more": more, **({"damaged": lost} if lost else {})}


def _print_lines(
    lines: list["LogLine"], took: "Took | None", remotes: dict[str, str], *, metrics: Collection[str]
) -> None:
    entries = [line.entry for line in lines if line.entry is not None]
    with_graph = any(line.drawing for line in lines)
    of_entry: dict[Column, Callable[[LogEntry], str]] = {Column("RUN", folds=True): lambda entry: entry.run}
    if with_graph or any(entry.attempt > 1 for entry in entries):
        of_entry[Column("ATTEMPT", "right")] = lambda entry: str(entry.attempt)
    of_entry[Column("STEP", "right")] = lambda entry: str(entry.step)
    of_entry[Column("COMMIT", drops=1)] = lambda entry: short_id(entry.commit)
    of_entry[Column("SAVED", drops=2)] = lambda entry: age(entry.time_ns)
    of_entry |= _what_commits_hold(entries, remotes) if took is None else _what_saves_took(took)
    # Metric names keep their case, since two may differ only in case. A space after a name in capitals keeps the name
    # from being equal to another column's header, such as STEP, whose column it would replace.
    of_entry |= {Column(f"{name} " if name.isupper() else name, "right"): partial(_metric, name) for name in metrics}

    def of_line(cell: "Callable[[LogEntry], str]") -> "Callable[[LogLine], str]":
        return lambda line: "" if line.entry is None else cell(line.entry)  # None where two attempts join

    columns: dict[Column, Callable[[LogLine], str]] = {}
    if with_graph:
        columns[Column("GRAPH")] = lambda line: line.drawing
    print_rows(columns | {column: of_line(cell) for column, cell in of_entry.items()}, lines)
    if took is not None and any((entry.run, entry.attempt, entry.step) not in took for entry in entries):
        print_note("-: not measured; only saves made with attach() are timed")


def _metric(name: str, entry: "LogEntry") -> str:
    if entry.metrics is None:
        return "?"
    return f"{entry.metrics[name]:.6g}" if name in entry.metrics else "-"


def _what_commits_hold(entries: list["LogEntry"], remotes: dict[str, str]) -> "dict[Column, Callable[[LogEntry], str]]":
    columns: dict[Column, Callable[[LogEntry], str]] = {
        Column("LAYERS", "right", drops=3): lambda entry: (
            str(entry.layers) if entry.layers_saved == entry.layers else f"{entry.layers_saved} of {entry.layers}"
        ),
        Column("NEW", "right", drops=4): lambda entry: size(entry.bytes_new),
    }
    if any(entry.precision != "exact" for entry in entries):
        columns[Column("PRECISION")] = lambda entry: entry.precision
    if not all(entry.has_moments for entry in entries):
        lacks = Column("LACKS")
        columns[lacks] = lambda entry: "" if entry.has_moments else "moments"
    if any(entry.pushed for entry in entries):
        columns[Column("PUSHED", folds=True, drops=5)] = lambda entry: ", ".join(
            remotes.get(url, url) for url in entry.pushed
        )
    if any(entry.pins for entry in entries):
        columns[Column("PINS", folds=True)] = lambda entry: ", ".join(entry.pins)
    return columns


def _what_saves_took(took: "Took") -> "dict[Column, Callable[[LogEntry], str]]":
    def if_timed(cell: "Callable[[SaveTiming], str]") -> "Callable[[LogEntry], str]":
        by_place = {place: cell(timing) for place, timing in took.items()}
        return lambda entry: by_place.get((entry.run, entry.attempt, entry.step), "-")

    return {
        Column("BLOCKED", "right"): if_timed(lambda timing: f"{timing.blocked_seconds * 1e3:.1f} ms"),
        Column("DURABLE", "right"): if_timed(lambda timing: f"{timing.durable_seconds:.2f} s"),
        Column("COPIED", "right", drops=3): if_timed(lambda timing: size(timing.copied_bytes)),
    }
