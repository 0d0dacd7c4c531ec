"""Promises of packed references: nothing is lost, what is said twice counts once, and memory is what is stated."""

import random
import sys

import pytest

from layerstore.check.verify import parse_sample
from layerstore.errors import IntegrityError
from layerstore.history.needs import PARTS, NumberedIds, PackedRefs
from layerstore.model import BlobRef, ObjectId


def test_what_goes_in_comes_out_once() -> None:
    """Sizes and numbers are kept apart, however often a row is said."""
    chance = random.Random(1)
    refs = [BlobRef(id=ObjectId(f"{chance.getrandbits(128):032x}"), size_bytes=n) for n in range(500)]
    expected: dict[BlobRef, set[int]] = {}
    packed = PackedRefs()
    for _ in range(30_000):
        ref, number = chance.choice(refs), chance.randrange(3)
        expected.setdefault(ref, set()).add(number)
        packed.add(ref, number)

    found = dict(packed)

    assert {ref: set(numbers) for ref, numbers in found.items()} == expected
    assert all(len(set(numbers)) == len(numbers) for numbers in found.values())
    assert list(found) == sorted(found, key=lambda ref: (ref.id, ref.size_bytes))
    assert {ref for at in range(PARTS) for ref in packed.part(at)} == set(found)


def test_rows_that_repeat_take_no_memory() -> None:
    """A layer that ten thousand commits inherit is one row."""
    packed = PackedRefs()
    for number in range(200_000):
        packed.add(BlobRef(id=ObjectId(f"{number % 10:032x}"), size_bytes=1))

    assert sum(map(sys.getsizeof, packed._parts)) < 200_000


@pytest.mark.parametrize(("object_id", "size_bytes"), [("A" * 32, 1), ("a" * 31, 1), ("a" * 32, -1), ("a" * 32, 2**63)])
def test_what_can_be_no_object_is_refused(object_id: str, size_bytes: int) -> None:
    """A record may say anything."""
    with pytest.raises(IntegrityError, match="is no object"):
        PackedRefs().add(BlobRef(id=ObjectId(object_id), size_bytes=size_bytes))
    if object_id != "a" * 32:
        with pytest.raises(IntegrityError, match="is no id of an object"):
            NumberedIds().add(ObjectId(object_id), 0)


def test_a_numbered_id_keeps_its_first_number_and_is_found_at_once() -> None:
    """As a dictionary would, also where one id's bytes lie across two others', and where all begin alike."""
    chance = random.Random(4)
    alike = [ObjectId(f"{chance.randrange(3):016x}{chance.randrange(3):016x}") for _ in range(50)]
    ids = [ObjectId(f"{chance.getrandbits(128):032x}") for _ in range(2000)] + alike
    packed, expected = NumberedIds(), dict[ObjectId, int]()
    for _ in range(10_000):
        object_id, number = chance.choice(ids), chance.randrange(2**32)
        assert packed.add(object_id, number) == (object_id not in expected)
        expected.setdefault(object_id, number)

    assert len(packed) == len(expected)
    assert {object_id: packed.number(object_id) for object_id in expected} == expected
    assert all((object_id in packed) == (object_id in expected) for object_id in ids)
    assert ObjectId("f" * 32) not in packed


def test_a_numbered_id_takes_18_bytes() -> None:
    """Beside what a part takes that has none."""
    packed = NumberedIds()
    empty = sum(map(sys.getsizeof, packed._parts))
    chance = random.Random(5)
    for number in range(200_000):
        packed.add(ObjectId(f"{chance.getrandbits(128):032x}"), number)

    assert sum(map(sys.getsizeof, packed._parts)) - empty == 18 * 200_000


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
