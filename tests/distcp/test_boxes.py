"""Boxes of a tensor, as any mesh cuts it, are found again element by element, and planned alike whoever writes them."""

from __future__ import annotations

import mmap
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstore.arrays import open_tensors
from layerstore.distcp import Item, plan_save
from layerstore.errors import LayoutMismatch
from layerstore.framing import frame
from layerstore.model import BlobRef, Kind, LayerVersion, ObjectId, Parameter, StoredObject, StoredTensor
from layerstore.slices import Slices

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The first index and the extent, by dimension."""

NAME = "layers.0.weight"


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape, and boxes that tile it: cut in two again and again, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dimension = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dimension]))
        for begin, extent in ((0, at), (at, sizes[dimension] - at)):
            if extent:
                own = list(offsets), list(sizes)
                own[0][dimension] += begin
                own[1][dimension] = extent
                boxes.append((tuple(own[0]), tuple(own[1])))
    return shape, draw(st.permutations(boxes))


def stored(number: int, box: Box, *, of: int) -> StoredObject:
    """Return an object that holds one *box* of a tensor."""
    tensor = StoredTensor(name=NAME, state="", dtype="I32", elements=prod(box[1]), crc32=0, box=(*box[0], *box[1]))
    return StoredObject(
        id=ObjectId(f"{number:032x}"),
        size_bytes=frame([tensor]).size_bytes,
        kind=Kind.WEIGHTS,
        shard=number,
        shards=of,
        tensors=(tensor,),
        chunks=b"",
    )


def slices(shape: tuple[int, ...], objects: list[StoredObject]) -> Slices:
    """Return the slices of a layer with one parameter."""
    return Slices([version_of(shape, objects)])


def version_of(shape: tuple[int, ...], objects: list[StoredObject]) -> LayerVersion:
    """Return a layer with one parameter, which *objects* hold."""
    parameter = Parameter(name=NAME, dtype="I32", shape=shape, frozen=True, aliases=())
    return LayerVersion(
        layer="layers.0", world_size=len(objects), parameters=(parameter,), buffers=(), objects=tuple(objects)
    )


@given(tilings(), st.data())
def test_boxes_that_tile_a_tensor_give_back_its_elements(
    tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    """Any of them, in the tensor's own order."""
    shape, boxes = tiling
    tensor = np.arange(prod(shape), dtype=np.int32).reshape(shape)
    objects = [stored(number, box, of=len(boxes)) for number, box in enumerate(boxes)]
    files: dict[BlobRef, bytes] = {}
    for each, (offsets, sizes) in zip(objects, boxes, strict=True):
        part = tensor[tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))]
        files[each.ref] = frame(each.tensors).header + part.tobytes()
    begin = data.draw(st.integers(0, tensor.size))
    end = data.draw(st.integers(begin, tensor.size))

    found = bytearray(4 * (end - begin))
    pieces = slices(shape, objects).pieces(Kind.WEIGHTS, NAME, dtype="I32", offset=0, begin=begin, end=end)
    for piece in pieces:
        data_of = files[piece.object][piece.object_offset : piece.object_offset + piece.size_bytes]
        found[piece.offset : piece.offset + piece.written_bytes] = data_of

    assert bytes(found) == tensor.reshape(-1)[begin:end].tobytes()


@given(tilings())
def test_arrays_have_boxes_in_their_places(tiling: tuple[tuple[int, ...], list[Box]]) -> None:
    """A tensor that several ranks have cut by columns is not their parts one after another."""
    shape, boxes = tiling
    tensor = np.arange(prod(shape), dtype=np.int32).reshape(shape)
    objects = [stored(number, box, of=len(boxes)) for number, box in enumerate(boxes)]
    maps: dict[BlobRef, mmap.mmap] = {}
    for each, (offsets, sizes) in zip(objects, boxes, strict=True):
        part = tensor[tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))]
        maps[each.ref] = mmap.mmap(-1, each.size_bytes)
        maps[each.ref].write(frame(each.tensors).header + part.tobytes())
    repo: Any = SimpleNamespace(objects=SimpleNamespace(map=lambda ref, *, verify: maps[ref]))

    tensors = open_tensors(repo, [version_of(shape, objects)], kind="weights", state=None, verify=True)

    assert np.array_equal(tensors[NAME], tensor)


@given(tilings(), st.data())
def test_a_box_that_is_missing_is_noticed(tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    """No other elements take its place."""
    shape, boxes = tiling
    objects = [stored(number, box, of=len(boxes)) for number, box in enumerate(boxes)]
    objects.pop(data.draw(st.integers(0, len(objects) - 1)))

    with pytest.raises(LayoutMismatch):
        list(slices(shape, objects).pieces(Kind.WEIGHTS, NAME, dtype="I32", offset=0))


# -- plans -------------------------------------------------------------------------------------------------------------


def item(rank: int, box: Box, *, shape: tuple[int, ...], number: int = 0, key: str = f"model.{NAME}") -> Item:
    """Return a box that a rank is to write."""
    return Item(rank=rank, number=number, key=key, dtype="F32", shape=shape, offsets=box[0], sizes=box[1])


PATHS = {f"model.{NAME}": ("model", NAME)}


def test_rows_are_slices_like_any_other() -> None:
    """So they can be mixed with what DeepSpeed has cut."""
    items = [item(rank, ((first, 0), (2, 3)), shape=(4, 3)) for rank, first in ((0, 0), (1, 2))]

    planned = plan_save(items, PATHS, world_size=2)

    (layer,) = planned.layers
    assert layer.cut == "partition"
    found = [part for source in layer.objects for part in source.slices]
    assert [(part.begin, part.elements, part.box) for part in found] == [(0, 6, ()), (6, 6, ())]


def test_columns_are_boxes() -> None:
    """Each is written as it lies in the rank's memory."""
    items = [item(rank, ((0, first), (4, 1)), shape=(4, 2)) for rank, first in ((0, 0), (1, 1))]

    planned = plan_save(items, PATHS, world_size=2)

    (layer,) = planned.layers
    assert layer.cut == "boxes"
    assert [part.box for source in layer.objects for part in source.slices] == [(0, 0, 4, 1), (0, 1, 4, 1)]
    assert [len(work) for work in planned.by_rank] == [1, 1]


def test_whoever_writes_the_slices_are_the_same() -> None:
    """Replicas that share the work make the objects that one of them would make."""
    boxes = [((first, 0), (1, 3)) for first in range(4)]
    plans = [
        plan_save([item(rank, box, shape=(4, 3)) for rank, box in zip(ranks, boxes, strict=True)], PATHS, world_size=4)
        for ranks in ((0, 1, 2, 3), (3, 1, 0, 2))
    ]

    one, other = ([(of.shard, [part.begin for part in of.slices]) for of in plan.layers[0].objects] for plan in plans)
    assert sorted(one) == sorted(other)


def test_empty_boxes_are_nobodys_work() -> None:
    """A rank of a mesh that is larger than a tensor has none of it."""
    items = [item(0, ((0,), (2,)), shape=(2,)), item(1, ((2,), (0,)), shape=(2,))]

    planned = plan_save(items, PATHS, world_size=2)

    assert [len(work) for work in planned.by_rank] == [1, 0]
