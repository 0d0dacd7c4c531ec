"""Promises of the shardings: each rank's fragments tile what is trained, wherever ranks begin and end."""

from math import prod
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from layerstore.zero3.trees.sharding import EvenSharding, PartitionSharding, Sharding, dealt, gathered_again

shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)
groups_of = st.lists(st.lists(shapes, min_size=1, max_size=6), min_size=1, max_size=3)


def named(groups: list[list[tuple[int, ...]]]) -> list[dict[str, tuple[int, ...]]]:
    """Return *groups* with a name for each parameter."""
    return [{f"{number}.{at}": shape for at, shape in enumerate(group)} for number, group in enumerate(groups)]


def check_tiles(sharding: Sharding, world_size: int) -> None:
    """Check that every element of every parameter is in one fragment, in order, and fragments do not overlap."""
    for group, members in enumerate(sharding.groups):
        found: dict[str, int] = {}
        for rank in range(world_size):
            end = 0
            for of in sharding.fragments(group, rank):
                assert of.elements > 0
                assert of.begin == found.get(of.name, 0)
                assert of.start >= end
                found[of.name] = of.begin + of.elements
                end = of.start + of.elements
            assert end <= sharding.lean(group, rank) <= sharding.elements(group, rank)
        assert found == {name: prod(shape) for name, shape in members.items() if prod(shape)}


@given(groups_of, st.integers(1, 9))
def test_slices_of_stage_3_tile_each_parameter(groups: list[Any], world_size: int) -> None:
    """Whatever divides by what."""
    check_tiles(EvenSharding(named(groups), world_size), world_size)


@given(groups_of, st.integers(1, 9), st.booleans())
def test_partitions_tile_each_group(groups: list[Any], world_size: int, is_aligned: bool) -> None:
    """Partitions are alike and even; what is not a parameter's comes last, or between parameters that are aligned."""
    paddings = [[-prod(shape) % 8 for shape in group] for group in groups] if is_aligned else []
    sharding = PartitionSharding(named(groups), world_size, paddings)

    check_tiles(sharding, world_size)
    for group in range(len(groups)):
        [size] = {sharding.elements(group, rank) for rank in range(world_size)}
        total = sum(map(prod, groups[group])) + sum(paddings[group] if is_aligned else ())
        assert size % 2 == 0
        assert total <= size * world_size < total + 2 * world_size
        assert sum(sharding.lean(group, rank) for rank in range(world_size)) == total


@given(st.lists(st.text(), max_size=20), st.integers(1, 9))
def test_what_was_dealt_out_is_gathered_again(names: list[str], world_size: int) -> None:
    """In the order that it had; a rank after another has every nth."""
    out = dealt(names, world_size)

    assert gathered_again(out, world_size) == names
    assert out[: -(-len(names) // world_size)] == names[::world_size]
