"""Select which layers of a checkpoint to store: those that are due, and those that cannot be inherited."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from math import prod

from layerstore.compose import mismatch
from layerstore.dtypes import by_code
from layerstore.history import NextCommit
from layerstore.model import Kind, LayerEntry, LayerVersion, Parameter
from layerstore.numbers import (
    SECOND_MOMENT,
    Meter,
    Movements,
    Numbers,
    Weighted,
    WeightedMeter,
    can_measure,
    weighted_movements,
)
from layerstore.policy import Policy, Save, anchored, due_layers
from layerstore.slices import Slices
from layerstore.staging import SourceReader
from layerstore.storage import Repository
from layerstore.tree import Tree
from layerstore.zero3 import LayerSource, SliceSource

# Of each parameter, 32 stretches of 64 elements are sampled: this takes a few milliseconds for ten parameters.
RUNS = 32
RUN_ELEMENTS = 64


def movements(repo: Repository, layers: tuple[LayerSource, ...], inherited: Mapping[str, LayerEntry]) -> Movements:
    """Return the movement of every layer that has an older version with masters of the same shapes."""
    relative, sums, is_weighted = dict[str, float](), dict[str, Weighted](), True
    with closing(SourceReader()) as reader:
        for layer in layers:
            version = repo.whole_version_of(inherited[layer.layer]) if layer.layer in inherited else None
            if version is None or version.parameters != layer.parameters:
                continue
            meter, weighted = Meter(), WeightedMeter()
            for weight, old, new, squares in _samples(repo, reader, layer, version):
                meter.add(old.data, new.data, dtype_a=old.dtype, dtype_b=new.dtype, weight=weight)
                is_weighted &= squares is not None
                if squares is not None:
                    weighted.add(old, new, squares, weight=weight)
            movement = 0.0 if is_still(layer.parameters) else meter.movement()
            if movement is not None:
                relative[layer.layer] = movement
                sums[layer.layer] = weighted.sums()
    return Movements(relative=relative, weighted=weighted_movements(sums) if is_weighted else {})


def _samples(
    repo: Repository, reader: SourceReader, layer: LayerSource, version: LayerVersion
) -> Iterator[tuple[float, Numbers, Numbers, Numbers | None]]:
    """
    Yield samples of the masters in *version* and in *layer*, and of *layer*'s second moments if it has any.

    Each tuple begins with the number of elements that one sampled element represents.
    """
    slices = Slices([version])
    masters, squares = _slices(layer, Kind.MASTER), _slices(layer, Kind.OPTIMIZER, state=SECOND_MOMENT)
    for parameter in layer.parameters:
        name, elements = parameter.name, prod(parameter.shape)
        if not slices.shards(Kind.MASTER, name) or name not in masters:
            continue
        old_type = slices.dtype(Kind.MASTER, name)
        if not can_measure(old_type) or not can_measure(masters[name][0].dtype):
            continue
        is_weighted = name in squares and can_measure(squares[name][0].dtype)
        for begin, end in sampled(elements):
            old = b""
            for piece in slices.pieces(Kind.MASTER, name, dtype=old_type, offset=0, begin=begin, end=end):
                # Not verified: these numbers only decide which layers are due, and are not stored.
                with repo.open_object(piece.object) as file:
                    old += file.read_at(piece.object_offset, piece.size_bytes)
            yield (
                sample_weight(elements),
                Numbers(memoryview(old), old_type),
                _read(reader, masters[name], begin, end),
                _read(reader, squares[name], begin, end) if is_weighted else None,
            )


def _slices(layer: LayerSource, kind: Kind, *, state: str = "") -> dict[str, list[SliceSource]]:
    """Return the slices of one kind and state, by parameter, in order."""
    slices: dict[str, list[SliceSource]] = {}
    parts = (part for source in layer.objects if source.kind is kind for part in source.slices if part.state == state)
    for part in sorted(parts, key=lambda part: part.begin):
        slices.setdefault(part.name, []).append(part)
    return slices


def _read(reader: SourceReader, slices: Sequence[SliceSource], begin: int, end: int) -> Numbers:
    """Return the elements *begin* to *end* of the parameter that *slices* make up."""
    data, item_bytes = b"", by_code(slices[0].dtype).bytes
    at = bisect_right(slices, begin, key=lambda part: part.begin) - 1
    while begin < end:
        part = slices[at]
        last, place = min(end, part.begin + part.elements), part.offset_bytes + (begin - part.begin) * item_bytes
        data += b"".join(map(bytes, reader.chunks(part.path, place, (last - begin) * item_bytes)))
        begin, at = last, at + 1
    return Numbers(memoryview(data), slices[0].dtype)


def is_still(parameters: Sequence[Parameter]) -> bool:
    """Whether a layer of these *parameters* cannot move because all of it is frozen."""
    return bool(parameters) and all(parameter.frozen for parameter in parameters)


def sampled(elements: int) -> Iterator[tuple[int, int]]:
    """
    Yield the stretches that are sampled from a parameter of *elements* elements; a small parameter is one stretch.

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


def sample_weight(elements: int) -> float:
    """
    Return how many elements one sampled element represents, in a parameter of *elements* elements.

    Without this weight, a norm layer's 4,096 elements, all near 1, would count for as much as a matrix of millions.

    >>> sample_weight(10), sample_weight(1_048_576)
    (1.0, 512.0)
    """
    return max(elements / (RUNS * RUN_ELEMENTS), 1.0)


def layers_due(
    repo: Repository, layers: tuple[LayerSource, ...], place: NextCommit, policy: Policy, *, run: str
) -> tuple[frozenset[str], dict[Tree, Tree]]:
    """
    Return which of *layers* to store, and the decisions that the record keeps.

    All layers are stored if the history has no complete save yet. Otherwise, the layers that *policy* selects are
    stored, and so is every layer that has changed its shape, that the optimizer has updated for the first time, or that
    the store has lost.
    """
    ages = {layer: place.save_number - number for layer, number in place.own_numbers(run).items()}
    save = Save(number=place.save_number, layers=tuple(layer.layer for layer in layers), ages=ages)
    moved = Movements()
    if getattr(policy, "measures", False):
        sizes = {
            layer.layer: sum(part.size_bytes for source in layer.objects for part in source.slices) for layer in layers
        }
        moved = movements(repo, layers, place.inherited)
        save = replace(save, movements=moved.relative, weighted_movements=moved.weighted, sizes=sizes)
    # 0, because at an ingest, `fresh` is the half due at save 0 (which is full anyway, as the first of its history).
    due = due_layers(anchored(policy, 0), save)
    # Whatever the policy says, layers that cannot be inherited must be stored.
    due |= {
        layer.layer
        for layer in layers
        if layer.layer not in due and not _can_inherit(repo, layer, place.inherited.get(layer.layer))
    }
    decisions: dict[Tree, Tree] = {"due": [layer for layer in save.layers if layer in due]}
    return due, decisions | moved.decisions()


def _can_inherit(repo: Repository, layer: LayerSource, entry: LayerEntry | None) -> bool:
    if entry is None or (layer.optimizer_step is not None and entry.optimizer_step is None):
        return False
    states = {
        (part.name, part.state) for source in layer.objects if source.kind is Kind.OPTIMIZER for part in source.slices
    }
    version = repo.whole_version_of(entry)  # lost versions are stored again, and verify reports them
    return version is not None and mismatch(version, layer) is None and version.optimizer_states == states
