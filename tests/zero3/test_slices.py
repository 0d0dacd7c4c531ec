"""Promises of the slicing: DeepSpeed's own rule, for every length and world size."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstore.errors import IntegrityError, LayoutMismatch, Unsupported
from layerstore.framing import frame
from layerstore.model import Kind, LayerVersion, ObjectId, Parameter, StoredObject, StoredTensor
from layerstore.slices import Slices, slice_length, slices_in, valid_elements


@given(st.integers(0, 10**12), st.integers(1, 4096))
def test_slices_tile_the_parameter(elements: int, world_size: int) -> None:
    """All valid elements together are the parameter, each rank's slice starts where the one before it ends."""
    length = slice_length(elements, world_size)
    valid = [valid_elements(elements, world_size, rank) for rank in range(world_size)]

    assert sum(valid) == elements
    assert length * world_size - elements in range(world_size)
    assert all(count == length for count in valid[: elements // length if length else 0])
    assert valid == sorted(valid, reverse=True)


def cut(values: list[int], world_size: int) -> list[list[int]]:
    """Return the slices of all ranks, padding left out."""
    length = slice_length(len(values), world_size)
    return [values[rank * length : (rank + 1) * length] for rank in range(world_size)]


def cut_again(slices: list[list[int]], elements: int, world_size: int) -> list[list[int]]:
    """Return the slices for *world_size* ranks, each put together from the *slices* that there are."""
    stored = stored_slices(*map(len, slices), elements=elements)
    length = slice_length(elements, world_size)
    made = []
    for rank in range(world_size):
        begin, valid = rank * length, valid_elements(elements, world_size, rank)
        parts = stored.stretches(Kind.MASTER, "a", begin=begin, end=begin + valid)
        made.append([value for of, start, count in parts for value in slices[of.object.shard][start:][:count]])
    return made


@given(st.integers(0, 200), st.integers(1, 40), st.integers(1, 40))
def test_slices_cut_again_are_those_that_were_cut_at_once(elements: int, before: int, after: int) -> None:
    """From any world size to any other and back, every element is where that size has it."""
    values = list(range(elements))

    there = cut_again(cut(values, before), elements, after)
    back = cut_again(there, elements, before)

    assert cut(values, after) == there
    assert cut(values, before) == back


lengths_of_ranks = st.lists(st.integers(0, 10**9), min_size=1, max_size=64).filter(any)


@given(lengths_of_ranks, st.data())
def test_stretches_are_few_whole_where_possible_and_in_order(lengths: list[int], data: st.DataObject) -> None:
    """However ranks have cut it, only the slices that are needed are looked at, each once, within its bounds."""
    elements = sum(lengths)
    begin = data.draw(st.integers(0, elements))
    end = data.draw(st.integers(begin, elements))
    stored = stored_slices(*lengths, elements=elements)

    parts = [(of.object.shard, *rest) for of, *rest in stored.stretches(Kind.MASTER, "a", begin=begin, end=end)]

    assert sum(count for _, _, count in parts) == end - begin
    assert [shard for shard, _, _ in parts] == sorted({shard for shard, _, _ in parts})
    assert all(0 < count <= lengths[shard] - start for shard, start, count in parts)
    assert all(start == 0 for _, start, _ in parts[1:])
    bounds = stored.bounds(Kind.MASTER, "a")
    assert (bounds[0], bounds[-1]) == (0, elements)
    assert len(bounds) == sum(length > 0 for length in lengths) + 1


# -- slices of stored layers ---------------------------------------------------------------------------------------


def stored_slices(*lengths: int, elements: int = 9, dtype: str = "F32") -> Slices:
    """Return the masters of one parameter, stored by as many ranks as there are *lengths*."""
    objects = []
    for shard, length in enumerate(lengths):
        if not length:
            continue
        tensor = StoredTensor(name="a", state="", dtype=dtype, elements=length, crc32=shard)
        objects.append(
            StoredObject(
                id=ObjectId(f"{shard:032x}"),
                size_bytes=frame([tensor]).size_bytes,
                kind=Kind.MASTER,
                shard=shard,
                shards=len(lengths),
                tensors=(tensor,),
                chunks=b"",
            )
        )
    parameter = Parameter(name="a", dtype="BF16", shape=(elements,), frozen=False, aliases=())
    version = LayerVersion(
        layer="a", parameters=(parameter,), buffers=(), world_size=len(lengths), objects=tuple(objects)
    )
    return Slices([version])


def test_elements_that_are_not_stored_so_are_refused() -> None:
    """Slices of another length, ones that are missing, a type without a way to the one asked for."""
    with pytest.raises(LayoutMismatch, match="master of 'a' is stored with 8 elements, its shape asks for 9"):
        list(stored_slices(5, 3).pieces(Kind.MASTER, "a", dtype="F32", offset=0))
    with pytest.raises(LayoutMismatch, match="no weights of 'a' is stored"):
        list(stored_slices(5, 4).pieces(Kind.WEIGHTS, "a", dtype="F32", offset=0))
    with pytest.raises(Unsupported, match="stored as I64 and cannot be written as F16"):
        list(stored_slices(9, dtype="I64").pieces(Kind.MASTER, "a", dtype="F16", offset=0))


def test_an_object_that_lists_a_slice_twice_is_damage() -> None:
    """Also of a coded one, whose parts have names of their own; both would be read from one place."""
    tensor = StoredTensor(name="a", state="exp_avg", dtype="F32", elements=8, crc32=1)
    coded = replace(tensor, coding="companded8")
    for twice in ((tensor, tensor), (coded, coded), (tensor, coded)):
        stored = StoredObject(
            id=ObjectId("0" * 32), size_bytes=4096, kind=Kind.OPTIMIZER, shard=0, shards=1, tensors=twice, chunks=b""
        )
        with pytest.raises(IntegrityError, match=r"object 0{32} is listed wrongly: two slices have one name"):
            list(slices_in(stored))
