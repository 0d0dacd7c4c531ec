"""``layerstore show``: everything about one commit."""

from typing import TYPE_CHECKING

from layerstore.cli.ls import layer_fields
from layerstore.cli.options import AsJson, Reference, StorePath, opened
from layerstore.cli.render import (
    SHORT_ID_DIGITS,
    Column,
    age,
    iso_time,
    say,
    say_facts,
    say_json,
    say_table,
    size,
)

if TYPE_CHECKING:
    from layerstore.ops.queries import CommitView, LayerLine

_FILES_SHOWN_MAX = 6


def show(ref: Reference = None, store: StorePath = None, as_json: AsJson = False) -> None:
    """
    Show one commit, and where its layers were saved.

    \b
    Examples:
      layerstore show sft@200
      layerstore show best --json
    """
    with opened(store) as opened_store:
        view = opened_store.show(ref)
    if as_json:
        say_json(_fields(view))
        return
    say_facts(_facts(view))
    say()
    columns = [
        Column("LAYER", folds=True),
        Column("SAVED AT", folds=True),
        Column("VERSION"),
        Column("PARAMETERS", "right"),
        Column("SIZE", "right"),
    ]
    say_table(columns, (_row(line) for line in view.layers))


def _facts(view: "CommitView") -> dict[str, str]:
    facts = {
        "commit": view.commit,
        "run": f"{view.run}@{view.step}",
        "attempt": f"{view.attempt}, forked from {view.fork}" if view.fork else str(view.attempt),
        "pin": view.pin or "",
        "saved": f"{age(view.time_ns)} ({iso_time(view.time_ns)})",
        "world size": str(view.world_size),
        "layout": f"{view.flavour}, tag {view.tag}",
        "policy": f"{view.policy}, save {view.save_number}",
        "layers": f"{len(view.layers)}, {size(view.size_bytes)}",
        "files": _files(view.files),
    }
    return {name: value for name, value in facts.items() if value}


def _files(names: tuple[str, ...]) -> str:
    if not names:
        return ""
    shown_names = ", ".join(names[:_FILES_SHOWN_MAX])
    more = ", … (--json lists all)" if len(names) > _FILES_SHOWN_MAX else ""
    return f"{len(names)} beside the shards: {shown_names}{more}"


def _row(line: "LayerLine") -> list[str]:
    return [
        line.layer,
        f"{line.run}@{line.step}",
        line.version[:SHORT_ID_DIGITS],
        f"{line.parameters:,}",
        size(sum(line.bytes_by_kind.values())),
    ]


def _fields(view: "CommitView") -> dict[str, object]:
    return {
        "run": view.run,
        "step": view.step,
        "attempt": view.attempt,
        "fork": view.fork,
        "save_number": view.save_number,
        "commit": view.commit,
        "pin": view.pin,
        "time": iso_time(view.time_ns),
        "world_size": view.world_size,
        "flavour": view.flavour,
        "tag": view.tag,
        "policy": view.policy,
        "size_bytes": view.size_bytes,
        "layers": [layer_fields(line) for line in view.layers],
        "files": list(view.files),
    }
