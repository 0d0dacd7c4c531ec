"""The ranks' buffers, cut into the slices of layers: where every byte of every layer lies."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from layerstore.dtypes import by_code
from layerstore.errors import LayoutMismatch
from layerstore.format.hashing import ObjectHasher
from layerstore.format.objects import canonical_order
from layerstore.layers import layer_of, layers_in_order
from layerstore.limits import IO_CHUNK_BYTES
from layerstore.model import Buffer, Kind, Parameter
from layerstore.tree import Located, Tensor
from layerstore.zero3.checkpoint import LayerSource, ObjectSource, SliceSource
from layerstore.zero3.ranks import MASTER, Groups, RankSource
from layerstore.zero3.slices import elements_of, slice_length, valid_elements
from layerstore.zero3.sourcefile import open_source

_KINDS = tuple(Kind)


def cut_layers(
    ranks: list[RankSource],
    groups: Groups,
    parameters: Mapping[str, Parameter],
    buffers: Mapping[str, Buffer],
    *,
    steps: list[int | None],
    world_size: int,
    pattern: re.Pattern[str] | None,
) -> tuple[LayerSource, ...]:
    """
    Return every layer, in the model's order, with the slices that *ranks* of *world_size* have.

    *pattern* overrides how layers are named.
    """

    def layer(name: str) -> str:
        return layer_of(name, pattern=pattern)

    objects: dict[str, list[ObjectSource]] = {}
    for rank in ranks:
        slices = [*_flat_slices(rank, groups, world_size), *_frozen_slices(rank, parameters, world_size)]
        for name, source in _by_layer(slices, layer, shard=rank.rank, shards=world_size):
            objects.setdefault(name, []).append(source)
    for name, source in _buffer_objects(ranks, buffers, layer):
        objects.setdefault(name, []).append(source)
    module = [str(name) for name in ranks[0].model["module"].mapping() if name in parameters or name in buffers]
    return tuple(
        LayerSource(
            layer=name,
            parameters=tuple(parameters[member] for member in sorted(members) if member in parameters),
            buffers=tuple(buffers[member] for member in sorted(members) if member in buffers),
            objects=tuple(sorted(objects.get(name, ()), key=lambda source: (_KINDS.index(source.kind), source.shard))),
            optimizer_step=_common_step(steps[group] for group, of in enumerate(groups) if of.keys() & set(members)),
        )
        for name, members in layers_in_order(module, pattern=pattern).items()
    )


def _common_step(steps: Iterable[int | None]) -> int | None:
    found = set(steps)
    return found.pop() if len(found) == 1 else None


def _flat_slices(rank: RankSource, groups: Groups, world_size: int) -> Iterator[tuple[Kind, SliceSource]]:
    for flat in rank.flats:
        kind = Kind.MASTER if flat.state == MASTER else Kind.OPTIMIZER
        start = 0
        for name, shape in groups[flat.group].items():
            elements = elements_of(shape)
            valid = valid_elements(elements, world_size, rank.rank)
            yield from ((kind, source) for source in _slice(flat.tensor, start, valid, name=name, state=flat.state))
            start += slice_length(elements, world_size)


def _frozen_slices(
    rank: RankSource, parameters: Mapping[str, Parameter], world_size: int
) -> Iterator[tuple[Kind, SliceSource]]:
    fragments = rank.model.get("frozen_param_fragments")
    for name, fragment in fragments.children() if fragments is not None else ():
        elements = elements_of(parameters[str(name)].shape)
        tensor = fragment.tensor()
        if tensor.elements != slice_length(elements, world_size) or not tensor.is_contiguous:
            raise LayoutMismatch(
                f"{rank.model.path}: the fragment of frozen parameter {name!r} has {tensor.elements} elements, "
                f"expected {slice_length(elements, world_size)}"
            )
        valid = valid_elements(elements, world_size, rank.rank)
        yield from ((Kind.WEIGHTS, source) for source in _slice(tensor, 0, valid, name=str(name), state=""))


def _slice(tensor: Tensor, start: int, elements: int, *, name: str, state: str) -> Iterator[SliceSource]:
    """Yield the slice of *tensor* from element *start* on, or nothing where all of it is padding."""
    located = tensor.storage.content
    assert isinstance(located, Located), "trees that were just read point into their files"
    if elements:
        yield SliceSource(
            name=name,
            state=state,
            dtype=tensor.storage.dtype,
            elements=elements,
            path=located.path,
            offset_bytes=located.offset_bytes + (tensor.offset + start) * by_code(tensor.storage.dtype).bytes,
        )


def _by_layer(
    slices: Iterable[tuple[Kind, SliceSource]], layer: Callable[[str], str], *, shard: int, shards: int
) -> Iterator[tuple[str, ObjectSource]]:
    found: dict[tuple[str, Kind], list[SliceSource]] = {}
    for kind, source in slices:
        found.setdefault((layer(source.name), kind), []).append(source)
    for (name, kind), members in found.items():
        yield name, ObjectSource(kind=kind, shard=shard, shards=shards, slices=tuple(canonical_order(members)))


def _buffer_objects(
    ranks: list[RankSource], buffers: Mapping[str, Buffer], layer: Callable[[str], str]
) -> Iterator[tuple[str, ObjectSource]]:
    """Yield one object per layer where all ranks hold the same buffers, else one per rank."""
    by_rank = [
        dict(_by_layer(_buffer_slices(rank, buffers), layer, shard=rank.rank, shards=len(ranks))) for rank in ranks
    ]
    for name, source in by_rank[0].items():
        others = [objects.get(name) for objects in by_rank[1:]]
        if any(other is None or len(other.slices) != len(source.slices) for other in others):
            raise LayoutMismatch(f"the ranks of {ranks[0].model.path.parent} hold different buffers in layer {name!r}")
        if all(other is not None and _digests(other) == _digests(source) for other in others):
            yield name, ObjectSource(kind=Kind.BUFFERS, shard=0, shards=1, slices=source.slices)
        else:
            yield from ((name, objects[name]) for objects in by_rank)


def _buffer_slices(rank: RankSource, buffers: Mapping[str, Buffer]) -> Iterator[tuple[Kind, SliceSource]]:
    module = rank.model["module"]
    for name, buffer in buffers.items():
        tensor = module[name].tensor()
        if tuple(tensor.shape) != buffer.shape or tensor.storage.dtype != buffer.dtype or not tensor.is_contiguous:
            raise LayoutMismatch(f"{rank.model.path}: buffer {name!r} has another shape or type than on rank 0")
        yield from ((Kind.BUFFERS, source) for source in _slice(tensor, 0, tensor.elements, name=name, state=""))


def _digests(source: ObjectSource) -> str:
    hasher = ObjectHasher()
    for part in source.slices:
        with open_source(part.path) as file:
            for start in range(0, part.size_bytes, IO_CHUNK_BYTES):
                hasher.update(file.read_at(part.offset_bytes + start, min(IO_CHUNK_BYTES, part.size_bytes - start)))
    return hasher.id()
