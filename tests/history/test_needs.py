"""Promises of numbered references: nothing is lost, what is said twice counts once, memory is what is stated."""

import random
import tracemalloc

import pytest

from layerstore import Store
from layerstore.check.verify import parse_sample
from layerstore.history.needs import Needs, NumberedRefs
from layerstore.model import BlobRef, ObjectId


def test_what_goes_in_comes_out_once() -> None:
    """Sizes and numbers are kept apart, however often a row is said."""
    chance = random.Random(1)
    refs = [BlobRef(id=ObjectId(f"{chance.getrandbits(128):032x}"), size_bytes=n) for n in range(500)]
    expected: dict[BlobRef, set[int]] = {}
    packed = NumberedRefs()
    for _ in range(30_000):
        ref, number = chance.choice(refs), chance.randrange(3)
        expected.setdefault(ref, set()).add(number)
        packed.add(ref, number)

    found = dict(packed)

    assert {ref: set(numbers) for ref, numbers in found.items()} == expected
    assert all(len(set(numbers)) == len(numbers) for numbers in found.values())
    assert list(found) == sorted(found, key=lambda ref: (ref.id, ref.size_bytes))
    assert {ref for at in range(NumberedRefs.PARTS) for ref in packed.part(at)} == set(found)


def test_a_needed_object_keeps_its_first_number(store: Store) -> None:
    """Whoever names it later, and unless it is left out."""
    ids = [ObjectId(f"{number:032x}") for number in range(3)]
    first, second, third = (BlobRef(id=each, size_bytes=1) for each in ids)
    besides, needs = Needs(store.repo), Needs(store.repo)
    besides.add([third])
    rest = Needs(store.repo, besides=besides)

    assert needs.add([first, second], number=7) == [first, second]
    assert needs.add([second, third], number=8) == [third]
    assert rest.add([second, third]) == [second]
    assert [needs.number(each) for each in ids] == [7, 7, 8]
    assert (ids[2] in rest, rest.number(ids[2])) == (False, None)


def test_a_million_references_stay_in_bounds() -> None:
    """A gc and a verify hold at most two such collections at a time, and are to stay below 300 MB."""
    chance, packed = random.Random(5), NumberedRefs()
    tracemalloc.start()
    try:
        for number in range(20_000):
            packed.add(BlobRef(id=ObjectId(f"{chance.getrandbits(128):032x}"), size_bytes=1), number // 100)
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert size_bytes < 20_000 * 120


@pytest.mark.parametrize("of", [1, 7, 1000])
def test_slices_are_everything_and_share_nothing(of: int) -> None:
    """Whatever they divide by."""
    chance = random.Random(2)
    edges = [f"{value:08x}" + "0" * 24 for value in (0, 2**32 // of - 1, 2**32 // of, 2**32 - 1)]
    ids = [*edges, *(f"{chance.getrandbits(128):032x}" for _ in range(200))]
    slices = [parse_sample(f"{at}/{of}") for at in range(1, of + 1)]

    for each in ids:
        ref = BlobRef(id=ObjectId(each), size_bytes=1)
        assert sum(ref in one for one in slices) == 1


def test_a_percentage_is_that_much_and_its_seed_says_which() -> None:
    """Also where the stretch goes round the end."""
    chance = random.Random(3)
    refs = [BlobRef(id=ObjectId(f"{chance.getrandbits(128):032x}"), size_bytes=1) for _ in range(20_000)]
    for seed in range(20):
        sample = parse_sample("10%", seed=seed)
        assert 1700 < sum(ref in sample for ref in refs) < 2300
        assert sample == parse_sample("10%", seed=seed)
    assert all(ref in parse_sample("100%") for ref in refs)
