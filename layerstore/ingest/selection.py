"""Which layers of a checkpoint are stored: those that are due, and those that nothing can stand in for."""

from dataclasses import replace

from layerstore.history import Place, own_numbers
from layerstore.ingest.movement import movements
from layerstore.model import Kind, LayerEntry
from layerstore.policy import Policy
from layerstore.policy.due import Save, anchored, due_layers
from layerstore.storage.rooms import Rooms
from layerstore.tree import Tree
from layerstore.zero3 import Checkpoint, LayerSource


def layers_due(
    rooms: Rooms, checkpoint: Checkpoint, place: Place, policy: Policy, *, run: str
) -> tuple[frozenset[str], dict[Tree, Tree]]:
    """
    Return the layers to be stored, and what the record is to say of why.

    Everything where the history has no complete save yet; else what *policy* says, together with every layer
    that has changed its shape since, that the optimizer has updated for the first time, or that the store has lost.
    """
    layers = checkpoint.layers
    save = Save(number=place.save_number, layers=tuple(layer.layer for layer in layers), ages=_ages(place, run))
    if getattr(policy, "measures", False):
        sizes = {layer.layer: sum(part.size_bytes for of in layer.objects for part in of.slices) for layer in layers}
        save = replace(save, movements=movements(rooms, layers, place.inherited), sizes=sizes)
    due = due_layers(anchored(policy, 0), save)
    due |= {
        layer.layer
        for layer in layers
        if layer.layer not in due and not _can_inherit(rooms, layer, place.inherited.get(layer.layer))
    }
    decisions: dict[Tree, Tree] = {"due": [layer for layer in save.layers if layer in due]}
    if save.movements:
        decisions["movements"] = dict(save.movements.items())
    return due, decisions


def _ages(place: Place, run: str) -> dict[str, int]:
    return {layer: place.save_number - number for layer, number in own_numbers(place, run).items()}


def _can_inherit(rooms: Rooms, layer: LayerSource, entry: LayerEntry | None) -> bool:
    if entry is None or (layer.optimizer_step is not None and entry.optimizer_step is None):
        return False
    version = rooms.whole_version_of(entry)  # what the store has lost is stored again, and verify reports it
    return (
        version is not None
        and version.parameters == layer.parameters
        and version.buffers == layer.buffers
        and version.optimizer_states == _source_states(layer)
    )


def _source_states(layer: LayerSource) -> set[tuple[str, str]]:
    return {
        (part.name, part.state) for source in layer.objects if source.kind is Kind.OPTIMIZER for part in source.slices
    }
