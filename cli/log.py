"""``layerstore log``: which commits there are."""

from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.render import SHORT_ID_DIGITS, Column, age, iso_time, say, say_json, say_table, say_warning, size

if TYPE_CHECKING:
    from layerstore.ops.queries import LogEntry


def log(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Only this run.", show_default=False)] = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    List commits by run, newest step first.

    \b
    Examples:
      layerstore log
      layerstore log sft --json
    """
    with opened(store) as opened_store:
        entries = opened_store.log(run)
    sound = [entry for entry in entries if entry.damage is None]
    damaged = [entry for entry in entries if entry.damage is not None]
    for entry in damaged:
        say_warning(f"{entry.run}@{entry.step} is left out, its record is damaged: {entry.damage}")
    if as_json:
        say_json(_fields(sound, damaged))
    elif sound:
        _say_entries(sound)
    elif not damaged:
        say("no commits yet; next: layerstore ingest CHECKPOINT")


def _fields(sound: list["LogEntry"], damaged: list["LogEntry"]) -> dict[str, object]:
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
            }
            for entry in sound
        ]
    }
    if damaged:
        fields["damaged"] = [
            {"run": entry.run, "step": entry.step, "commit": entry.commit, "reason": entry.damage} for entry in damaged
        ]
    return fields


def _say_entries(entries: list["LogEntry"]) -> None:
    with_attempts = any(entry.attempt > 1 for entry in entries)
    with_pins = any(entry.pins for entry in entries)
    columns = [
        Column("RUN", folds=True),
        *([Column("ATTEMPT", "right")] if with_attempts else []),
        Column("STEP", "right"),
        Column("COMMIT"),
        Column("SAVED"),
        Column("LAYERS", "right"),
        Column("NEW", "right"),
        *([Column("PINS", folds=True)] if with_pins else []),
    ]
    say_table(columns, (_row(entry, with_attempts=with_attempts, with_pins=with_pins) for entry in entries))


def _row(entry: "LogEntry", *, with_attempts: bool, with_pins: bool) -> list[str]:
    is_full = entry.layers_saved == entry.layers
    return [
        entry.run,
        *([str(entry.attempt)] if with_attempts else []),
        str(entry.step),
        entry.commit[:SHORT_ID_DIGITS],
        age(entry.time_ns),
        str(entry.layers) if is_full else f"{entry.layers_saved} of {entry.layers}",
        size(entry.bytes_new),
        *([", ".join(entry.pins)] if with_pins else []),
    ]
