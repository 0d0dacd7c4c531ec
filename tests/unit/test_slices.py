"""Promises of the slicing: DeepSpeed's own rule, for every length and world size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstore.zero3.slices import elements_of, slice_length, valid_elements

# sub_group_size = 10; group 0 has a (15), b (12), c (7); group 1 has d (3), e (5).
PARAMETERS = {"a": 15, "b": 12, "c": 7, "d": 3, "e": 5}


def ranges(name: str, world_size: int, rank: int) -> tuple[int, int, int]:
    """Return the first valid element, how many there are, and how many elements of padding follow."""
    elements = PARAMETERS[name]
    length, valid = slice_length(elements, world_size), valid_elements(elements, world_size, rank)
    return (rank * length if valid else 0), valid, length - valid


@pytest.mark.parametrize(
    ("world_size", "lengths"),
    [
        (2, {"a": 8, "b": 6, "c": 4, "d": 2, "e": 3}),
        (3, {"a": 5, "b": 4, "c": 3, "d": 1, "e": 2}),
    ],
)
def test_slices_of_the_worked_example_have_its_lengths(world_size: int, lengths: dict[str, int]) -> None:
    """k = ceil(n / W) for every parameter."""
    assert lengths == {name: slice_length(elements, world_size) for name, elements in PARAMETERS.items()}


@pytest.mark.parametrize(
    ("world_size", "rank", "expected"),
    [
        # name -> (first element, valid elements, padding), as in a0-7 b0-5 …
        (2, 0, {"a": (0, 8, 0), "b": (0, 6, 0), "c": (0, 4, 0), "d": (0, 2, 0), "e": (0, 3, 0)}),
        (2, 1, {"a": (8, 7, 1), "b": (6, 6, 0), "c": (4, 3, 1), "d": (2, 1, 1), "e": (3, 2, 1)}),
        (3, 0, {"a": (0, 5, 0), "b": (0, 4, 0), "c": (0, 3, 0), "d": (0, 1, 0), "e": (0, 2, 0)}),
        (3, 1, {"a": (5, 5, 0), "b": (4, 4, 0), "c": (3, 3, 0), "d": (1, 1, 0), "e": (2, 2, 0)}),
        (3, 2, {"a": (10, 5, 0), "b": (8, 4, 0), "c": (6, 1, 2), "d": (2, 1, 0), "e": (4, 1, 1)}),
    ],
)
def test_ranks_of_the_worked_example_hold_its_elements(
    world_size: int, rank: int, expected: dict[str, tuple[int, int, int]]
) -> None:
    """Each rank holds the elements that the worked example gives it, padding behind them."""
    assert expected == {name: ranges(name, world_size, rank) for name in PARAMETERS}


def test_padding_may_take_whole_ranks() -> None:
    """Nine elements on eight ranks: rank 4 is half padding, ranks 5 to 7 are nothing else."""
    valid = [valid_elements(9, 8, rank) for rank in range(8)]

    assert valid == [2, 2, 2, 2, 1, 0, 0, 0]


@given(st.integers(0, 10**12), st.integers(1, 4096))
def test_slices_tile_the_parameter(elements: int, world_size: int) -> None:
    """All valid elements together are the parameter, each rank's slice starts where the one before it ends."""
    length = slice_length(elements, world_size)
    valid = [valid_elements(elements, world_size, rank) for rank in range(world_size)]

    assert sum(valid) == elements
    assert length * world_size - elements in range(world_size)
    assert all(count == length for count in valid[: elements // length if length else 0])
    assert valid == sorted(valid, reverse=True)


@given(st.lists(st.integers(0, 50), max_size=6))
def test_a_tensor_has_the_product_of_its_shape(shape: list[int]) -> None:
    """A scalar has one element, and a tensor with an empty dimension none."""
    expected = 1
    for extent in shape:
        expected *= extent

    assert expected == elements_of(shape)
