"""
What a model consists of by a checkpoint or a commit of it: the layers that were seen, and what of them is trained.

Headers alone are read: the shards' trees, or the version blobs of a commit. No weights are.
"""

import shlex
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path

from layerstore.errors import InvalidInput
from layerstore.history.references import resolve
from layerstore.model import Kind, Parameter
from layerstore.ops.architectures import ADAM, CONFIG, INSTEAD, Model, Source, model_of
from layerstore.storage.rooms import Rooms
from layerstore.zero3 import discover, holds_zero3, list_folder, read_checkpoint, read_pointer, real_path

# Names in a folder that are listed in an error.
_NAMES_MAX = 5


def model_at(path: Path) -> Model:
    """
    Return the model of *path*: a ``config.json``, or a folder with ZeRO-3 shards, or with a config and no shards.

    Raises:
        InvalidInput: There is neither, or several checkpoints, or one that lies in a store; the message says what
            there is.
        SourceCheckpoint: The shards are incomplete, damaged or untrusted.
        Unsupported: The architecture is not known here, or a setting kept state out of the shards.
    """
    place = real_path(path)
    if not place.is_dir():
        return model_of(path)
    if holds_zero3(place):
        return _model_of_checkpoint(place)
    if (place / CONFIG).is_file():
        return model_of(path)
    raise InvalidInput(
        f"{path} holds neither ZeRO-3 shards nor a {CONFIG} to estimate from; it holds {_listed(place)}",
        hint=f"a checkpoint's folder, or a commit of a store; {INSTEAD}",
    )


def _listed(folder: Path) -> str:
    names = list_folder(folder)
    more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
    return f"{', '.join(names[:_NAMES_MAX])}{more}" if names else "nothing"


def _model_of_checkpoint(folder: Path) -> Model:
    try:
        found = discover(folder)
    except InvalidInput as exc:
        raise InvalidInput(str(exc), hint="name one of them; its config.json does, too") from exc
    pointer = read_pointer(found.ranks[0].model)
    if pointer is not None:
        raise InvalidInput(
            f"{folder} holds pointers to {pointer.name} in the store {pointer.store}",
            hint=f"layerstore estimate {shlex.quote(pointer.name)} --store {shlex.quote(pointer.store)}",
        )
    checkpoint = read_checkpoint(found)
    slices = [(source.kind, part) for layer in checkpoint.layers for source in layer.objects for part in source.slices]
    return _seen(
        found.folder.name,
        "checkpoint",
        [(layer.layer, layer.parameters) for layer in checkpoint.layers],
        held={part.name for kind, part in slices if kind in {Kind.MASTER, Kind.WEIGHTS}},
        states={part.state for kind, part in slices if kind is Kind.OPTIMIZER},
        world_size=checkpoint.world_size,
    )


def model_of_commit(rooms: Rooms, reference: str) -> Model:
    """
    Return the model of the commit, or pin, that *reference* means.

    Raises:
        NotFound: There is no such run, step or pin.
        IntegrityError: The store has lost what tells it.
    """
    record = resolve(rooms, reference).record
    versions = [rooms.version_of(entry) for entry in record.layers]
    tensors = [(stored.kind, part) for version in versions for stored in version.objects for part in stored.tensors]
    return _seen(
        reference,
        "commit",
        [(version.layer, version.parameters) for version in versions],
        held={part.name for kind, part in tensors if kind in {Kind.MASTER, Kind.WEIGHTS}},
        states={part.state for kind, part in tensors if kind is Kind.OPTIMIZER},
        world_size=record.world_size,
    )


def _seen(
    name: str,
    source: Source,
    layers: Iterable[tuple[str, Iterable[Parameter]]],
    *,
    held: set[str],
    states: set[str],
    world_size: int,
) -> Model:
    """Return the model of *layers*, as far as its parameters are *held*: a frozen one may be kept elsewhere."""
    there = {layer: [each for each in parameters if each.name in held] for layer, parameters in layers}
    parameters = [each for of_layer in there.values() for each in of_layer]
    types = Counter[str]()
    for each in parameters:
        types[each.dtype] += prod(each.shape)
    return Model(
        name=name,
        architecture=None,
        shapes=tuple((each.name, each.shape) for each in parameters),
        source=source,
        gathered={layer: [each.name for each in of_layer] for layer, of_layer in there.items()},
        frozen=frozenset(each.name for each in parameters if each.frozen),
        # A collection may have dropped the moments of a commit; who trains on has some again.
        states=tuple(sorted(states)) or ADAM,
        world_size=world_size,
        dtype=max(types, key=types.__getitem__, default=None),
    )
