"""What is damaged of a compact save, or of what it refers to, is noticed, named, and costs no more than it must."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from layerstore import Store
from layerstore.errors import IntegrityError, LayerstoreError
from layerstore.history import NextCommit, resolve
from layerstore.model import Kind, StoredObject
from layerstore.staging import referable
from tests.precision.twins import counts, path_of, versions
from tests.unit.checkpoints import Checkpoints, header_of, snapshot, tensors_of

LAYER = "model.layers.1"


@pytest.fixture
def five(store: Store, saved: Checkpoints) -> Store:
    """Return a store with keyframes at 2 and 8, and compact saves at 4, 6 and 10."""
    for step in (2, 4, 6, 8, 10):
        store.ingest(saved(step), run="r", precision="delta8", exact_every=3)
    return store


def object_of(store: Store, ref: str, kind: Kind) -> StoredObject:
    """Return the first object of *kind* of a layer of *ref*."""
    return next(stored for stored in versions(store, ref)[LAYER].objects if stored.kind is kind)


def test_a_damaged_keyframe_costs_exactly_what_refers_to_it(five: Store, tmp_path: Path) -> None:
    """Verify names these saves and no other; each of the others is composed."""
    path = path_of(five, object_of(five, "r@2", Kind.MASTER))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    [damage] = five.verify(read_data=True).damaged

    assert damage.id == path.name
    assert set(damage.needed_by) == {"r@2", "r@4", "r@6"}
    assert {cost.layers for cost in damage.costs} == {(LAYER,)}
    for step in (8, 10):
        five.compose(f"r@{step}").write(tmp_path / str(step), durable=False)
    for step in (2, 4, 6):
        with pytest.raises(IntegrityError) as caught:
            five.compose(f"r@{step}").write(tmp_path / str(step), durable=False)
        assert path.name in caught.value.message
        assert not (tmp_path / str(step)).exists()


def test_lost_moments_of_a_keyframe_cost_that_save_alone(five: Store) -> None:
    """Differences refer to masters only."""
    path_of(five, object_of(five, "r@2", Kind.OPTIMIZER)).unlink()
    [damage] = five.verify().damaged
    assert set(damage.needed_by) == {"r@2"}


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_without_its_keyframe_whole_a_layer_is_kept_exactly(
    five: Store, saved: Checkpoints, tmp_path: Path, how: str
) -> None:
    """And the save says so in one line; or the damage is named in one, and nothing was stored."""
    path = path_of(five, object_of(five, "r@8", Kind.MASTER))
    if how == "lost":
        path.unlink()
        ingested = five.ingest(saved(12), run="r", precision="delta8", exact_every=None)
        assert any(f"{LAYER} is kept exactly" in note for note in ingested.notes)
        assert {layer for layer, count in counts(five, "r@12").items() if not count} == {LAYER}
        five.compose("r@12").write(tmp_path / "out", durable=False)
        return
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = snapshot(five)
    with pytest.raises(IntegrityError) as caught:
        five.ingest(saved(12), run="r", precision="delta8", exact_every=None)
    assert caught.value.message == (
        f"object {path.name}, which r's compact saves refer to, is damaged; nothing was changed"
    )
    assert "ingest again the checkpoint that it came from; --precision exact saves without it" in str(caught.value.hint)
    assert snapshot(five) == before
    assert not five.ingest(saved(8), run="r").is_new
    assert five.ingest(saved(12), run="r", precision="delta8", exact_every=None).is_new
    assert five.verify(read_data=True).ok


def test_what_lost_its_keyframe_is_referred_to_by_no_rank(five: Store) -> None:
    """Whoever had the lost masters: all ranks of a saver that continues from there keep the layer exactly."""
    path_of(five, object_of(five, "r@8", Kind.MASTER)).unlink()
    base, ranks = resolve(five.repo, "r"), versions(five, "r@10")[LAYER].world_size
    place = NextCommit.resumed(five.repo.catalog.find("r"), base.record, of_commit=base.commit, is_as_it_stands=True)

    for rank in range(ranks):
        found, others = referable(five.repo, place, shard=rank, world_size=ranks)
        assert found.keys() == place.inherited.keys() - {LAYER}
        assert not others


def _header(stored: StoredObject, path: Path) -> range:
    return range(header_of(path)[1])


def _part(suffix: str) -> Callable[[StoredObject, Path], range]:
    def of(stored: StoredObject, path: Path) -> range:
        header, payload = header_of(path)
        entry = next(entry for name, entry in header.items() if name.endswith(f":{stored.tensors[0].coding}{suffix}"))
        return range(*(payload + at for at in entry["data_offsets"]))

    return of


PLACES: dict[str, Callable[[StoredObject, Path], range]] = {
    "header": _header,
    "codes": _part(""),
    "scales": _part(":scales"),
}


@pytest.mark.parametrize("place", [*PLACES, "reference"])
@pytest.mark.parametrize("count", [2, pytest.param(100, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)])])
def test_every_flipped_bit_is_noticed(five: Store, tmp_path: Path, place: str, count: int) -> None:
    """By verify, and by whoever composes; with the bit as it was, all is well again."""
    chance = random.Random(f"{place}/{count}")
    for number in range(count):
        compact = object_of(five, "r@4", chance.choice([Kind.MASTER, Kind.OPTIMIZER]))
        if place == "reference":
            compact = object_of(five, "r@2", Kind.MASTER)
        path = path_of(five, compact)
        data = path.read_bytes()
        where = range(len(data)) if place == "reference" else PLACES[place](compact, path)
        flipped = bytearray(data)
        flipped[chance.choice(where)] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        assert {damage.id for damage in five.verify(read_data=True).damaged} == {path.name}
        with pytest.raises(LayerstoreError):
            five.compose("r@4").write(tmp_path / f"{number}", durable=False)
        with pytest.raises(LayerstoreError):
            five.compose("r@4").tensors("master" if compact.kind is Kind.MASTER else "optimizer")[
                compact.tensors[0].key
            ]
        path.write_bytes(data)
    assert five.verify(read_data=True).ok
    assert tensors_of(path_of(five, object_of(five, "r@4", Kind.MASTER)))
