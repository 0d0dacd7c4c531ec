"""
What an attempt resumed from, where that was no commit as it stands but a composite: kept by the attempt's first record.

Training went on from the composite's layers, not from its base's. Records that inherit layers name these; a full
record does not, so its decisions do.
"""

from collections.abc import Collection, Iterable
from typing import cast

from layerstore.errors import IntegrityError
from layerstore.format.canonical import Plain
from layerstore.format.fields import from_plain, to_plain
from layerstore.model import CommitRecord, LayerEntry
from layerstore.ops.rooms import Rooms
from layerstore.storage.manifest import RecordRow, packed_versions
from layerstore.storage.runview import RunView
from layerstore.tree import Tree

KEY = "resumed"


def resumed_decision(layers: Iterable[LayerEntry]) -> dict[Tree, Tree]:
    """Return what the first record of an attempt says of the *layers* that it resumed from."""
    return {KEY: [cast(Tree, to_plain(entry)) for entry in layers]}


def what_resumed(record: CommitRecord) -> dict[Tree, Tree]:
    """Return what *record* says of that, to be said by another one in its place."""
    return {key: value for key, value in record.policy.decisions.items() if key == KEY}


def beginning(rooms: Rooms, own: Collection[RecordRow]) -> RecordRow | None:
    """Return which of *own*, all rows of an attempt, says what it resumed from: one with the lowest number."""
    lowest = min((row.save_number for row in own), default=0)
    for row in own:
        if row.save_number == lowest and what_resumed(rooms.catalog.commit(row.name).record):
            return row
    return None


def resumed_layers(rooms: Rooms, view: RunView, attempt: int) -> tuple[RecordRow, list[LayerEntry]] | None:
    """
    Return the save that *attempt* went on from, as a row of its own, with its layers.

    None where it went on from a commit as that stands, or from nothing. No record needs these layers, only a pin may:
    what a collection has taken of them is no part of it any more.
    """
    first = beginning(rooms, [row for row in view.rows.values() if row.attempt == attempt])
    if first is None:
        return None
    said = _decoded(what_resumed(rooms.catalog.commit(first.name).record)[KEY], first)
    layers = [entry for entry in said if rooms.whole_version_of(entry) is not None]
    row = first._replace(
        step=first.fork.step if first.fork else 0,
        attempt=first.fork.attempt if first.fork else attempt,
        save_number=first.save_number - 1,
        layer_names=tuple(entry.layer for entry in layers),
        versions=packed_versions(layers),
    )
    return row, layers


def _decoded(said: Tree, row: RecordRow) -> list[LayerEntry]:
    what = f"what {row.run}@{row.step} resumed from"
    if not isinstance(said, list):
        raise IntegrityError(f"{what} is in a form that is not known")
    return [from_plain(LayerEntry, cast(Plain, each), what=what) for each in said]
