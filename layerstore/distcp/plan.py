"""
Plan a DCP save: which rank writes which objects, from the boxes that DCP has assigned to ranks.

The slices of a parameter are numbered in element order, whichever rank writes them. So a mesh whose replicas share the
work makes the same slices as a mesh without replicas, and two ranks may each write some slices of one layer's shard.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path

from layerstore.distcp.contents import Contents
from layerstore.distcp.metadata import Entry
from layerstore.framing import canonical_order
from layerstore.handover import Held, KeyPath
from layerstore.layers import layers_in_order
from layerstore.limits import STEP_MAX
from layerstore.model import Kind
from layerstore.numbers import box_runs
from layerstore.zero3 import LayerSource, ObjectSource, SliceSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A box of a tensor, or a value, that a rank is to write."""

    rank: int
    number: int
    """The item's position among the rank's items."""
    key: str
    dtype: str | None
    """Code of the element type; None for a value."""
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def path(self) -> Path:
        """The path by which slices refer to the item, and by which the rank finds it again."""
        return Path(str(self.number))


Work = tuple[tuple[str, ObjectSource], ...]
"""The objects that a rank writes, each with its layer; slices refer to items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSave:
    """A save before anything is written."""

    entries: Mapping[str, Entry]
    """Everything in the state, by key; its chunks have no locations yet."""
    contents: Contents
    layers: tuple[LayerSource, ...]
    """Every layer, with the objects of all ranks."""
    by_rank: tuple[Work, ...]
    world_size: int


def plan_save(
    items: Iterable[Item],
    paths: Mapping[str, KeyPath],
    *,
    world_size: int,
    pattern: re.Pattern[str] | None = None,
    aliases: Mapping[str, str] | None = None,
    trained: Collection[str] = (),
    of_optimizer: Collection[str] | None = None,
) -> PlannedSave:
    """
    Plan a save of *items* on *world_size* ranks; *pattern* finds the layer in a name, if given.

    *paths* are the paths of all keys in the nested state, in its order. *aliases*, *trained* and
    *of_optimizer* are for `Contents`.
    """
    # Ranks pass their items in any order; layers, parameters and values keep the order of the state.
    order = {key: number for number, key in enumerate(paths)}
    items = sorted(items, key=lambda item: order.get(item.key, len(order)))
    entries = {item.key: _entry(item, paths.get(item.key, ())) for item in items}
    contents = Contents.of(entries, aliases=aliases, trained=trained, of_optimizer=of_optimizer)
    # A tied tensor has two keys, and is written once, under the first key.
    by_key = _boxes_by_key((item for item in items if item.key not in (aliases or {})), contents)
    shards = max(map(len, by_key.values()), default=1)
    layers, work = [], [list[tuple[str, ObjectSource]]() for _ in range(world_size)]
    keys = _keys_by_name(contents)
    for layer, names in layers_in_order(contents.parameters, pattern=pattern).items():
        slices: dict[tuple[Kind, int, int], list[SliceSource]] = {}
        for key in (key for name in names for key in keys[name]):
            held = contents.tensors[key]
            for shard, (item, part) in enumerate(_slices(held, by_key.get(key, []))):
                slices.setdefault((held.kind, shard, item.rank), []).append(part)
        objects = []
        for (kind, shard, rank), parts in slices.items():
            source = ObjectSource(kind=kind, shard=shard, shards=shards, slices=tuple(canonical_order(parts)))
            objects.append(source)
            work[rank].append((layer, source))
        layers.append(
            LayerSource(
                layer=layer,
                parameters=tuple(contents.parameters[name] for name in sorted(names)),
                buffers=(),
                objects=tuple(objects),
                # Counters are values, which are not known before they are written.
                optimizer_step=None,
                cut="boxes" if any(part.box for source in objects for part in source.slices) else "partition",
            )
        )
    return PlannedSave(
        entries=entries,
        contents=contents,
        layers=tuple(layers),
        by_rank=tuple(map(tuple, work)),
        world_size=world_size,
    )


def _entry(item: Item, path: KeyPath) -> Entry:
    return Entry(key=item.key, path=path or (item.key,), dtype=item.dtype, shape=item.shape, chunks=())


def _boxes_by_key(items: Iterable[Item], contents: Contents) -> dict[str, list[Item]]:
    """Return the boxes of each tensor that a layer holds, in the tensor's order, without empty boxes."""
    boxes_by_key: dict[str, list[Item]] = {}
    for item in items:
        if item.key in contents.tensors and prod(item.sizes) > 0:
            boxes_by_key.setdefault(item.key, []).append(item)
    for boxes in boxes_by_key.values():
        boxes.sort(key=lambda item: item.offsets)
    return boxes_by_key


def _keys_by_name(contents: Contents) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for key, held in contents.tensors.items():
        keys.setdefault(held.name, []).append(key)
    return keys


def _slices(held: Held, boxes: Sequence[Item]) -> Iterator[tuple[Item, SliceSource]]:
    """Yield the *boxes* of a tensor as slices: as runs of elements if every box is one run, otherwise as boxes."""
    # Two runs are enough to know that a box is not a single run.
    runs = [[*islice(box_runs(item.shape, item.offsets, item.sizes), 2)] for item in boxes]
    are_runs = all(len(runs_of_box) == 1 for runs_of_box in runs)
    for item, (first, *_) in zip(boxes, runs, strict=True):
        assert item.dtype is not None, "layers hold tensors"
        yield (
            item,
            SliceSource(
                name=held.name,
                state=held.state,
                dtype=item.dtype,
                elements=prod(item.sizes),
                begin=first[0],
                box=() if are_runs else (*item.offsets, *item.sizes),
                path=item.path,
                offset_bytes=0,
            ),
        )


def common_step(counts: Iterable[float | None]) -> int | None:
    """Return how often a layer was updated, from its parameters' counts; None if the counts differ."""
    numbers = {int(count) for count in counts if count is not None and 0 <= count < STEP_MAX}
    return numbers.pop() if len(numbers) == 1 else None
