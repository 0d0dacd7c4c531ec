"""Which layers of a checkpoint are stored: those that are due, and those that nothing can stand in for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from layerstore.distance import Meter, can_measure
from layerstore.dtypes import by_code
from layerstore.history import Place, own_numbers
from layerstore.model import Kind, LayerEntry, LayerVersion, Parameter
from layerstore.policy import Policy, Save, anchored, due_layers
from layerstore.publish import SourceReader
from layerstore.storage.repository import Repository
from layerstore.tree import Tree
from layerstore.zero3 import Checkpoint, LayerSource, Slices, SliceSource, stretches

# 32 runs of 64 elements of each parameter: a block of ten parameters is read in a few milliseconds.
RUNS = 32
RUN_ELEMENTS = 64


def movements(
    repo: Repository, layers: tuple[LayerSource, ...], inherited: Mapping[str, LayerEntry]
) -> dict[str, float]:
    """Return the relative movement of every layer that has an older version with masters of the same shapes."""
    reader = SourceReader()
    try:
        found = {
            layer.layer: _movement(repo, reader, layer, version)
            for layer in layers
            if layer.layer in inherited and (version := repo.whole_version_of(inherited[layer.layer]))
        }
    finally:
        reader.close()
    return {layer: movement for layer, movement in found.items() if movement is not None}


def _movement(repo: Repository, reader: SourceReader, layer: LayerSource, version: LayerVersion) -> float | None:
    if version.parameters != layer.parameters:
        return None
    if is_still(layer.parameters):
        return 0.0
    slices = Slices([version])
    sources = {
        (part.name, source.shard): part
        for source in layer.objects
        if source.kind is Kind.MASTER
        for part in source.slices
    }
    meter = Meter()
    for parameter in layer.parameters:
        if slices.shards(Kind.MASTER, parameter.name) and (parameter.name, 0) in sources:
            for begin, end in sampled(prod(parameter.shape)):
                old, old_type = _stored(repo, slices, parameter, begin, end)
                new, new_type = _source(reader, sources, layer, parameter, (begin, end))
                if can_measure(old_type) and can_measure(new_type):
                    meter.add(memoryview(old), memoryview(new), dtype_a=old_type, dtype_b=new_type)
    return meter.movement()


def is_still(parameters: Sequence[Parameter]) -> bool:
    """Whether a layer of these has no masters that could move: all of it is frozen."""
    return bool(parameters) and all(parameter.frozen for parameter in parameters)


def sampled(elements: int) -> Iterator[tuple[int, int]]:
    """
    Yield the runs of a parameter of *elements* elements that are looked at: all of a small one.

    >>> list(sampled(10))
    [(0, 10)]
    >>> runs = list(sampled(1_000_000)); len(runs), runs[0], runs[-1]
    (32, (0, 64), (999936, 1000000))
    """
    if elements <= RUNS * RUN_ELEMENTS:
        yield from [(0, elements)] if elements else []
        return
    for run in range(RUNS):
        begin = run * (elements - RUN_ELEMENTS) // (RUNS - 1)
        yield begin, begin + RUN_ELEMENTS


def _stored(repo: Repository, slices: Slices, parameter: Parameter, begin: int, end: int) -> tuple[bytes, str]:
    shards = slices.shards(Kind.MASTER, parameter.name)
    data, dtype = b"", ""
    for part in stretches(prod(parameter.shape), shards, begin=begin, end=end):
        place = slices.find(Kind.MASTER, parameter.name, shard=part.shard)
        dtype = place.tensor.dtype
        piece = place.piece(0)
        item_bytes = by_code(dtype).bytes
        with repo.objects.open(piece.object) as file:
            data += file.read_at(piece.object_offset + part.start * item_bytes, part.elements * item_bytes)
    return data, dtype


def _source(
    reader: SourceReader,
    sources: Mapping[tuple[str, int], SliceSource],
    layer: LayerSource,
    parameter: Parameter,
    run: tuple[int, int],
) -> tuple[bytes, str]:
    shards = next(source.shards for source in layer.objects if source.kind is Kind.MASTER)
    data, dtype = b"", ""
    for part in stretches(prod(parameter.shape), shards, begin=run[0], end=run[1]):
        source = sources[parameter.name, part.shard]
        dtype = source.dtype
        item_bytes = by_code(dtype).bytes
        start = source.offset_bytes + part.start * item_bytes
        data += b"".join(map(bytes, reader.chunks(source.path, start, part.elements * item_bytes)))
    return data, dtype


def layers_due(
    repo: Repository, checkpoint: Checkpoint, place: Place, policy: Policy, *, run: str
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
        save = replace(save, movements=movements(repo, layers, place.inherited), sizes=sizes)
    due = due_layers(anchored(policy, 0), save)
    due |= {
        layer.layer
        for layer in layers
        if layer.layer not in due and not _can_inherit(repo, layer, place.inherited.get(layer.layer))
    }
    decisions: dict[Tree, Tree] = {"due": [layer for layer in save.layers if layer in due]}
    if save.movements:
        decisions["movements"] = dict(save.movements.items())
    return due, decisions


def _ages(place: Place, run: str) -> dict[str, int]:
    return {layer: place.save_number - number for layer, number in own_numbers(place, run).items()}


def _can_inherit(repo: Repository, layer: LayerSource, entry: LayerEntry | None) -> bool:
    if entry is None or (layer.optimizer_step is not None and entry.optimizer_step is None):
        return False
    version = repo.whole_version_of(entry)  # what the store has lost is stored again, and verify reports it
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
