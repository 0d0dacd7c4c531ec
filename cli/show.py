"""``layerstore show``: everything about one commit."""

from typing import TYPE_CHECKING

from layerstore.cli.ls import layer_fields
from layerstore.cli.options import AsJson, Reference, StorePath, opened
from layerstore.cli.policy import policy_in_words
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
# What JSON tells of a layer that fell back.
_AGE_FIELDS = ("run", "attempt", "step", "steps", "saves")


def show(ref: Reference = None, store: StorePath = None, as_json: AsJson = False) -> None:
    """
    Show one commit, and where its layers were saved.

    SAVED AT is the step that wrote a layer's version: the commit's own, or an earlier one that it was taken over from.
    The policy says which layers the save wrote: full wrote every one.
    Of a pinned composite it says where the layers were taken from: that is a mixture.
    Weights beside the shards that are rounded from the masters are derived: made again when needed, so in no SIZE.

    \b
    Examples:
      layerstore show sft@200
      layerstore show best --json
    """
    with opened(store) as opened_store:
        view = opened_store.show(ref)
        [name], names = opened_store.names_of([view]), opened_store.names_of(view.layers)
    if as_json:
        say_json(_fields(view))
        return
    say_facts(_facts(view, name))
    say()
    columns = [
        Column("LAYER", folds=True),
        Column("SAVED AT", folds=True),
        Column("VERSION"),
        Column("PARAMETERS", "right"),
        Column("SIZE", "right"),
    ]
    say_table(columns, map(_row, view.layers, names))


def _facts(view: "CommitView", name: str) -> dict[str, str]:
    facts = {
        "commit": view.commit,
        "run": name,
        "attempt": f"{view.attempt}, forked from {view.fork}" if view.fork else str(view.attempt),
        "pins": ", ".join(view.pins),
        "mixture": f"{_policy(view)} chose the layers; all else is from {name}" if view.is_mixture else "",
        "saved": f"{age(view.time_ns)} ({iso_time(view.time_ns)})",
        "world size": str(view.world_size),
        "layout": f"{view.flavour}, tag {view.tag}",
        # That of a mixture did not save anything.
        "policy": "" if view.is_mixture else f"{_policy(view)}, save {view.turn + 1}",
        "replaces": ", ".join(commit[:SHORT_ID_DIGITS] for commit in view.supersedes),
        "layers": f"{len(view.layers)}, {view.layers_saved} of them saved at this step, {size(view.size_bytes)}",
        "moments": "" if view.has_moments else "weights only: its moments were dropped by gc",
        "besides": f"{size(view.beside_bytes)} of what ranks have of their own, and files",
        "files": _files(view.files),
    }
    return {name: value for name, value in facts.items() if value}


def _policy(view: "CommitView") -> str:
    return policy_in_words(view.policy, view.policy_parameters)


def _files(names: tuple[str, ...]) -> str:
    if not names:
        return ""
    shown_names = ", ".join(names[:_FILES_SHOWN_MAX])
    more = ", … (--json lists all)" if len(names) > _FILES_SHOWN_MAX else ""
    return f"{len(names)} beside the shards: {shown_names}{more}"


def _row(line: "LayerLine", name: str) -> list[str]:
    return [
        line.layer,
        name,
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
        "turn": view.turn,
        "commit": view.commit,
        "pin": view.pin,
        "time": iso_time(view.time_ns),
        "world_size": view.world_size,
        "flavour": view.flavour,
        "tag": view.tag,
        "policy": view.policy,
        "policy_parameters": view.policy_parameters,
        "mixture": view.is_mixture,
        "supersedes": list(view.supersedes),
        "pins": list(view.pins),
        "layers_saved": view.layers_saved,
        "size_bytes": view.size_bytes,
        "layers": [layer_fields(line) for line in view.layers],
        "files": list(view.files),
        "beside_bytes": view.beside_bytes,
        "has_moments": view.has_moments,
    }
