"""``layerstore log``: which commits there are."""

from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.render import (
    SHORT_ID_DIGITS,
    Column,
    age,
    counted,
    iso_time,
    say_json,
    say_note,
    say_table,
    say_warning,
    shown,
    size,
    with_store,
)

if TYPE_CHECKING:
    from layerstore.ops.queries import LogEntry, LogLine
    from layerstore.storage.timings import SaveTiming

    Took = dict[tuple[str, int, int], SaveTiming]
    """By run, attempt and step."""


# What JSON tells of a timing.
_TIMINGS = (
    "blocked_seconds",
    "durable_seconds",
    "visible_seconds",
    "copied_bytes",
    "written_bytes",
    "queued",
)

# Beside the columns that are as wide as they are.
_NOTE_WIDTH_MIN = 10

# One screen or two: as much as somebody reads.
_LIMIT = 50


def log(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Only this run.", show_default=False)] = None,
    *,
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=0, help="At most this many of each run; 0 for all.")
    ] = _LIMIT,
    before: Annotated[
        str | None,
        typer.Option("--before", metavar="COMMIT", help="Go on after this commit, in its run.", show_default=False),
    ] = None,
    graph: Annotated[bool, typer.Option("--graph", help="Draw attempts and where they forked.")] = False,
    timing: Annotated[
        bool, typer.Option("--timing", help="Show what saves in training took, not what they hold.")
    ] = False,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    List commits by run, newest step first.

    Where gc has dropped a commit's moments, LACKS says so.

    \b
    Examples:
      layerstore log sft --graph
      layerstore log sft --timing
      layerstore log sft --limit 20 --before 3f0c9a1b --json
    """
    with opened(store) as opened_store:
        page = opened_store.log_page(run, limit=limit or None, before=before, graph=graph and not as_json)
        runs = dict.fromkeys(entry.run for entry in page.entries) if timing else ()
        took = {(name, *place): each for name in runs for place, each in opened_store.timings(name).items()}
    sound = [line for line in page.lines if line.entry is None or line.entry.damage is None]
    damaged = [entry for entry in page.entries if entry.damage is not None]
    for entry in damaged:
        say_warning(f"{entry.run}@{entry.step} is left out, its record is damaged: {entry.damage}")
    if as_json:
        entries = [line.entry for line in sound if line.entry is not None]
        say_json(_fields(entries, damaged, took if timing else None, more=bool(page.more)))
    elif sound:
        _say_lines(sound, took if timing else None)
        for more in page.more:
            options = f"{f' --limit {limit}' if limit != _LIMIT else ''}{' --graph' if graph else ''}"
            next_page = with_store(f"layerstore log {shown(more.run)} --before {more.after[:SHORT_ID_DIGITS]}{options}")
            say_note(f"{counted(more.commits, 'older commit')}: {next_page}")
    elif not damaged and before is None:
        next_one = with_store("layerstore ingest CHECKPOINT")
        none = "no commits yet" if run is None else f"no commit of {shown(run)} shows: all were dropped"
        say_note(f"{none}; next: {next_one}")


def _fields(
    sound: list["LogEntry"], damaged: list["LogEntry"], took: "Took | None", *, more: bool
) -> dict[str, object]:
    fields: dict[str, object] = {
        "commits": [
            {
                "run": entry.run,
                "attempt": entry.attempt,
                "step": entry.step,
                "commit": entry.commit,
                "time": iso_time(entry.time_ns),
                "layers_saved": entry.layers_saved,
                "bytes_new": entry.bytes_new,
                "pins": list(entry.pins),
                "has_moments": entry.has_moments,
                **({} if took is None else {"timing": _timing_fields(entry, took)}),
            }
            for entry in sound
        ],
        "more": more,
    }
    if damaged:
        fields["damaged"] = [
            {"run": entry.run, "step": entry.step, "commit": entry.commit, "reason": entry.damage} for entry in damaged
        ]
    return fields


def _timing_fields(entry: "LogEntry", took: "Took") -> dict[str, object] | None:
    found = took.get((entry.run, entry.attempt, entry.step))
    return None if found is None else {name: getattr(found, name) for name in _TIMINGS}


def _say_lines(lines: list["LogLine"], took: "Took | None") -> None:
    entries = [line.entry for line in lines if line.entry is not None]
    with_graph = any(line.drawing for line in lines)
    with_attempts = with_graph or any(entry.attempt > 1 for entry in entries)
    # Timings stand in their place: all of it together would fit no terminal.
    with_pins = took is None and any(entry.pins for entry in entries)
    with_lacks = took is None and any(map(_lacks, entries))
    columns = [
        *([Column("GRAPH")] if with_graph else []),
        Column("RUN", folds=True),
        *([Column("ATTEMPT", "right")] if with_attempts else []),
        Column("STEP", "right"),
        Column("COMMIT"),
        Column("SAVED"),
        *([Column("LAYERS", "right"), Column("NEW", "right")] if took is None else []),
        *([Column("LACKS", folds=True, width_min=_NOTE_WIDTH_MIN)] if with_lacks else []),
        *([Column("PINS", folds=True, width_min=_NOTE_WIDTH_MIN)] if with_pins else []),
        *([Column(name, "right") for name in ("BLOCKED", "DURABLE", "COPIED")] if took is not None else []),
    ]
    blank = [""] * (len(columns) - with_graph)
    say_table(
        columns,
        (
            [
                *([line.drawing] if with_graph else []),
                # Where two lines of descent meet there is no commit.
                *(
                    _row(line.entry, took, with_attempts=with_attempts, with_lacks=with_lacks, with_pins=with_pins)
                    if line.entry
                    else blank
                ),
            ]
            for line in lines
        ),
    )
    if took is not None and any((entry.run, entry.attempt, entry.step) not in took for entry in entries):
        say_note("-: not measured; only saves made with attach() are timed")


def _lacks(entry: "LogEntry") -> str:
    """Return what *entry* has not got any more that it was saved with."""
    return "" if entry.has_moments else "moments"


def _row(
    entry: "LogEntry", took: "Took | None", *, with_attempts: bool, with_lacks: bool, with_pins: bool
) -> list[str]:
    is_full = entry.layers_saved == entry.layers
    saved = str(entry.layers) if is_full else f"{entry.layers_saved} of {entry.layers}"
    return [
        entry.run,
        *([str(entry.attempt)] if with_attempts else []),
        str(entry.step),
        entry.commit[:SHORT_ID_DIGITS],
        age(entry.time_ns),
        *([saved, size(entry.bytes_new)] if took is None else []),
        *([_lacks(entry)] if with_lacks else []),
        *([", ".join(entry.pins)] if with_pins else []),
        *([] if took is None else _timing_cells(took.get((entry.run, entry.attempt, entry.step)))),
    ]


def _timing_cells(found: "SaveTiming | None") -> list[str]:
    if found is None:
        return ["-", "-", "-"]
    return [f"{found.blocked_seconds * 1e3:.1f} ms", f"{found.durable_seconds:.2f} s", size(found.copied_bytes)]
