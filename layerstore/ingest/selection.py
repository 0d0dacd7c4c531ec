"""Select which layers of a checkpoint to store: those that are due, and those that cannot be inherited."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from math import prod

from layerstore.distance import Meter, can_measure
from layerstore.dtypes import by_code
from layerstore.history import Place
from layerstore.model import Kind, LayerEntry, LayerVersion, Parameter
from layerstore.policy import Policy, Save, anchored, due_layers
from layerstore.publish import SourceReader
from layerstore.storage import Repository
from layerstore.tree import Tree
from layerstore.zero3 import Checkpoint, LayerSource, Slices, SliceSource, stretches

# 32 runs of 64 elements of each parameter: a block of ten parameters is read in a few milliseconds.
RUNS = 32
RUN_ELEMENTS = 64


def movements(
    repo: Repository, layers: tuple[LayerSource, ...], inherited: Mapping[str, LayerEntry]
) -> dict[str, float]:
    """Return the relative movement of every layer that has an older version with masters of the same shapes."""
    found = {}
    with closing(SourceReader()) as reader:
        for layer in layers:
            version = repo.whole_version_of(inherited[layer.layer]) if layer.layer in inherited else None
            movement = None if version is None else _movement(repo, reader, layer, version)
            if movement is not None:
                found[layer.layer] = movement
    return found


def _movement(repo: Repository, reader: SourceReader, layer: LayerSource, version: LayerVersion) -> float | None:
    if version.parameters != layer.parameters:
        return None
    if is_still(layer.parameters):
        return 0.0
    slices = Slices([version])
    masters = [source for source in layer.objects if source.kind is Kind.MASTER]
    sources = {(part.name, source.shard): part for source in masters for part in source.slices}
    meter = Meter()
    for parameter in layer.parameters:
        name, elements = parameter.name, prod(parameter.shape)
        if not slices.shards(Kind.MASTER, name) or (name, 0) not in sources:
            continue
        old_type = slices.find(Kind.MASTER, name, shard=0).tensor.dtype
        new_type = sources[name, 0].dtype
        if can_measure(old_type) and can_measure(new_type):
            for begin, end in sampled(elements):
                old, new = b"", b""
                for piece in slices.pieces(Kind.MASTER, name, dtype=old_type, offset=0, begin=begin, end=end):
                    with repo.objects.open(piece.object) as file:
                        old += file.read_at(piece.object_offset, piece.size_bytes)
                for part in stretches(elements, masters[0].shards, begin=begin, end=end):
                    new += _read(reader, sources[name, part.shard], part.start, part.elements)
                meter.add(memoryview(old), memoryview(new), dtype_a=old_type, dtype_b=new_type)
    return meter.movement()


def _read(reader: SourceReader, source: SliceSource, start: int, elements: int) -> bytes:
    item_bytes = by_code(source.dtype).bytes
    chunks = reader.chunks(source.path, source.offset_bytes + start * item_bytes, elements * item_bytes)
    return b"".join(map(bytes, chunks))


def is_still(parameters: Sequence[Parameter]) -> bool:
    """Whether a layer of these *parameters* cannot move because all of it is frozen."""
    return bool(parameters) and all(parameter.frozen for parameter in parameters)


def sampled(elements: int) -> Iterator[tuple[int, int]]:
    """
    Yield the runs that are sampled from a parameter of *elements* elements: all of it if it is small.

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


def layers_due(
    repo: Repository, checkpoint: Checkpoint, place: Place, policy: Policy, *, run: str
) -> tuple[frozenset[str], dict[Tree, Tree]]:
    """
    Return the layers to store, and the decisions that the record keeps.

    These are all layers if the history has no complete save yet. Otherwise, they are those that *policy* names, and
    every layer that has changed its shape, that the optimizer has updated for the first time, or that the store has
    lost.
    """
    layers = checkpoint.layers
    ages = {layer: place.save_number - number for layer, number in place.own_numbers(run).items()}
    save = Save(number=place.save_number, layers=tuple(layer.layer for layer in layers), ages=ages)
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


def _can_inherit(repo: Repository, layer: LayerSource, entry: LayerEntry | None) -> bool:
    if entry is None or (layer.optimizer_step is not None and entry.optimizer_step is None):
        return False
    states = {(part.name, part.state) for of in layer.objects if of.kind is Kind.OPTIMIZER for part in of.slices}
    version = repo.whole_version_of(entry)  # lost versions are stored again, and verify reports them
    return (
        version is not None
        and version.parameters == layer.parameters
        and version.buffers == layer.buffers
        and version.optimizer_states == states
    )
