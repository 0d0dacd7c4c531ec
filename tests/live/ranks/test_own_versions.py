"""What versions say about each rank's own slices: one rank reads each version, and tells the others."""

import errno
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import layerstore
from layerstore import Store
from layerstore.compose import Composition
from layerstore.dtypes import by_code
from layerstore.errors import IntegrityError, Internal, LayoutMismatch, StorageIO
from layerstore.format import encode_blob
from layerstore.history import NextCommit, resolve
from layerstore.live.ranks import Exchange, OwnVersions, own_versions, versions_to_load
from layerstore.live.saver.background import referable_on_all
from layerstore.model import BlobRef, Kind, LayerVersion, ObjectId
from layerstore.shards import RankLoad
from layerstore.slices import Slices
from layerstore.staging import referable
from layerstore.storage import ObjectStore
from layerstore.zero3.pt import layout_pt
from tests.bench.histories import write_blob, write_version
from tests.faults.harness import flip
from tests.ranks.exchanges import InTurn, Together
from tests.unit import samples
from tests.unit.checkpoints import Checkpoints

RANKS = 3
MANY = 512


class Ranks:
    """The ranks that resume from a composition."""

    def __init__(self, store: Store, composition: Composition, count: int = RANKS) -> None:
        """Let each read its share."""
        self._store, self._composition = store, composition
        self._exchange = InTurn(count)
        for self._exchange.rank in range(count):
            own_versions(self._exchange, store.repo, versions_to_load(composition))
        self._exchange.hears = True

    def told(self, rank: int) -> OwnVersions:
        """Return what *rank* knows."""
        self._exchange.rank = rank
        return own_versions(self._exchange, self._store.repo, versions_to_load(self._composition))

    def sent_to(self, rank: int) -> int:
        """Return how many bytes are sent to *rank*."""
        return sum(len(messages[rank]) for messages in self._exchange.sent.values())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return an empty store."""
    with layerstore.init(tmp_path / "store") as made:
        for number in range(256):  # for blobs that are written by hand
            (made.path / "objects" / f"{number:02x}").mkdir()
        yield made


@pytest.fixture
def saved(store: Store, tmp_path: Path) -> Store:
    """Return it with five saves of a run: the third and fourth are compact, the last has half the layers."""
    checkpoints = Checkpoints(tmp_path / "made", hidden=10, vocab=7, world_size=RANKS)
    checkpoints.into(store, 1, 2)
    checkpoints.into(store, 3, 4, precision="delta8")
    checkpoints.into(store, 5, policy="parity")
    return store


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[BlobRef]:
    """Return the blobs that are read, as it happens."""
    found: list[BlobRef] = []
    read = ObjectStore.read

    def counted(self: ObjectStore, ref: BlobRef) -> bytes:
        found.append(ref)
        return read(self, ref)

    monkeypatch.setattr(ObjectStore, "read", counted)
    return found


def loaded(store: Store, composition: Composition, rank: int, own: OwnVersions) -> tuple[list[bytes], tuple[str, ...]]:
    """Return all bytes that *rank* loads, and the notes."""
    load = RankLoad(store.repo, composition, rank=rank, world_size=RANKS, own_versions=own)
    found = []
    for file in (load.state.model, load.state.optimizer):
        for storage, _ in layout_pt(file.tree, name="any").storages:
            data = bytearray(storage.elements * by_code(storage.dtype).bytes)
            load.fill(storage, memoryview(data))
            found.append(bytes(data))
    return found, load.notes


def of_ranks(store: Store, ranks: int, *, layers: int) -> Composition:
    """Return a composition of *layers* that so many *ranks* have saved; the objects are nowhere."""
    entries = []
    for number in range(layers):
        name = f"model.layers.{number}"
        ids = [ObjectId(f"{number:016x}{rank:016x}") for rank in range(ranks)]
        entries.append(replace(samples.entry(name), version=write_version(store.repo, name, ids)))
    return samples.composition(entries)


@pytest.mark.parametrize("ref", ["r@2", "r@4", "r@5"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_is_told_loads_what_one_that_reads_loads(saved: Store, ref: str, rank: int) -> None:
    """Exact, compact, and of several saves: every byte and every note."""
    composition = saved.compose(ref).composition
    told = Ranks(saved, composition).told(rank)

    assert told.keys() == {entry.version for entry in composition.layers}
    assert loaded(saved, composition, rank, told) == loaded(saved, composition, rank, {})


def test_what_a_policy_chose_is_compared_with_the_base(saved: Store) -> None:
    """So the base's own versions are told as well."""
    composition = saved.compose("r@2", policy="filter:every=2").composition
    told = Ranks(saved, composition).told(1)

    assert composition.older_layers
    assert told.keys() == {entry.version for entry in (*composition.layers, *composition.base.layers)}
    assert loaded(saved, composition, 1, told) == loaded(saved, composition, 1, {})


def test_a_rank_that_is_told_reads_no_version(saved: Store, reads: list[BlobRef]) -> None:
    """It reads its own state, and the first rank's."""
    composition = saved.compose("r@4").composition
    told = Ranks(saved, composition).told(2)
    reads.clear()

    loaded(saved, composition, 2, told)

    assert set(reads) == {composition.base.states[0], composition.base.states[2]}


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "layers"), [(MANY, 3), (MANY, 20), (4, 9)])
def test_of_many_ranks_none_reads_more_than_its_share(
    store: Store, reads: list[BlobRef], ranks: int, layers: int
) -> None:
    """Each version is read once, by ranks far apart; and what a rank is told does not grow with their number."""
    composition = of_ranks(store, ranks, layers=layers)
    exchange, before, shares = InTurn(ranks), 0, []
    for exchange.rank in range(ranks):
        own_versions(exchange, store.repo, versions_to_load(composition))
        shares.append(len(reads) - before)
        before = len(reads)
    told = Ranks(store, composition, ranks)

    assert Counter(reads[:before]) == Counter(entry.version for entry in composition.layers)
    assert max(shares) == -(-layers // ranks)
    assert ranks < MANY or shares[: MANY // 2].count(1) == layers // 2
    assert {len(version.objects) for version in told.told(ranks - 1).values()} == {1}
    assert told.sent_to(0) < 600 * layers + 30 * ranks


def test_whoever_would_need_more_is_stopped(saved: Store) -> None:
    """A rank knows nothing of others' slices, and asks for none."""
    told = Ranks(saved, saved.compose("r@2").composition).told(1)
    slices = Slices(told.values())
    name, parameter = next(iter(slices.parameters.items()))

    with pytest.raises(Internal, match="its own slice"):
        slices.pieces(Kind.MASTER, name, dtype="F32", offset=0)
    with pytest.raises(Internal, match="its own slice"):
        slices.stretches(Kind.MASTER, name, begin=0, end=1)
    assert prod(parameter.shape) > 1


@pytest.mark.parametrize("change", [{"cut": "partition"}, {"cut": "boxes"}, {"objects": ()}])
def test_layers_that_others_have_cut_are_not_told(store: Store, change: dict[str, Any]) -> None:
    """Neither are those that another number of ranks has saved; each rank reads these itself."""
    composition = of_ranks(store, RANKS, layers=2)
    other = of_ranks(store, RANKS + 1, layers=1).layers[0] if "objects" in change else None
    if other is None:
        version = store.repo.version(composition.layers[0].version)
        other = replace(composition.layers[0], version=write_blob(store.repo, encode_blob(replace(version, **change))))
    told = Ranks(store, samples.composition([other, composition.layers[1]])).told(0)

    assert told.keys() == {composition.layers[1].version}


@pytest.mark.parametrize("loses", [True, False])
def test_a_damaged_version_is_found_by_every_rank(saved: Store, loses: bool) -> None:
    """No rank is told of it, so each reads it itself, and names it; the other layers are told."""
    composition = saved.compose("r@2").composition
    lost = composition.layers[1].version
    if loses:
        saved.repo.layout.object(lost.id).unlink()
    else:
        flip(saved.repo.layout.object(lost.id))
    ranks = Ranks(saved, composition)

    for rank in range(RANKS):
        told = ranks.told(rank)
        assert told.keys() == {entry.version for entry in composition.layers} - {lost}
        with pytest.raises(IntegrityError, match=lost.id):
            loaded(saved, composition, rank, told)


def test_damage_in_what_only_a_comparison_needs_does_not_matter(saved: Store) -> None:
    """As without being told: a run has one model."""
    composition = saved.compose("r@2", policy="filter:every=2").composition
    entry = composition.older_layers[0]
    own = next(base for base in composition.base.layers if base.layer == entry.layer)
    saved.repo.layout.object(own.version.id).unlink()
    told = Ranks(saved, composition).told(1)

    assert not {entry.version, own.version} & told.keys()
    assert loaded(saved, composition, 1, told) == loaded(saved, composition, 1, {})


def test_all_ranks_say_the_same_of_layers_that_some_have_nothing_of(store: Store, tmp_path: Path) -> None:
    """Of a layer with fewer numbers than ranks some rank has no slice, and yet it was not kept bit for bit."""
    checkpoints = Checkpoints(tmp_path / "made", hidden=2, vocab=64, world_size=RANKS)
    checkpoints.into(store, 1)
    checkpoints.into(store, 2, precision="delta8")
    composition = store.compose("r").composition
    ranks = Ranks(store, composition)
    told = [ranks.told(rank) for rank in range(RANKS)]

    assert {all(version.objects for version in own.values()) for own in told} == {True, False}
    said = {loaded(store, composition, rank, own)[1] for rank, own in enumerate(told)}
    assert said == {loaded(store, composition, 0, {})[1]}


def test_a_slice_of_another_length_is_refused(saved: Store) -> None:
    """As that of a whole layer is: its place would be another."""
    composition = saved.compose("r@2").composition
    entry = composition.layers[0]
    version = saved.repo.version(entry.version)
    longer = tuple(replace(each, shape=(each.shape[0] + RANKS, *each.shape[1:])) for each in version.parameters)
    blob = write_blob(saved.repo, encode_blob(replace(version, parameters=longer)))
    layers = (replace(entry, version=blob), *composition.layers[1:])
    odd = replace(composition, layers=layers, base=replace(composition.base, layers=layers), chosen_from=())

    for own in ({}, Ranks(saved, odd).told(0)):
        with pytest.raises(LayoutMismatch, match=r"is stored with \d+ elements, its shape asks for"):
            loaded(saved, odd, 0, own)


def test_differences_refer_on_all_ranks_to_what_each_has(saved: Store, reads: list[BlobRef]) -> None:
    """Each version is read once, and each rank looks for its own objects; what one has lost, no rank refers to."""
    base = resolve(saved.repo, "r@4")
    place = NextCommit.resumed(saved.repo.catalog.find("r"), base.record, of_commit=base.commit, is_as_it_stands=True)
    lost = next(iter(place.inherited))
    [master] = [each for each in saved.repo.version(place.inherited[lost].version).references if each.shard == 2]
    saved.repo.layout.object(master.id).unlink()
    together = Together(RANKS)
    reads.clear()

    def on(rank: int) -> tuple[dict[str, LayerVersion], list[str]]:
        return referable_on_all(together.of(rank), saved.repo, place, shard=rank, world_size=RANKS)

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(on, range(RANKS)))

    assert Counter(reads) == Counter(entry.version for entry in place.inherited.values())
    for rank, (older, others) in enumerate(found):
        whole, _ = referable(saved.repo, place, shard=rank, world_size=RANKS)
        assert older.keys() == whole.keys() == place.inherited.keys() - {lost}
        assert [each.references for each in older.values()] == [each.references for each in whole.values()]
        assert [each.objects for each in older.values()] == [each.objects for each in whole.values()]
        assert not others


class Alone(Exchange):
    """An exchange whose messages come back, with a bit flipped at *place*."""

    def __init__(self, place: int | None) -> None:
        """Send to itself."""
        super().__init__()
        self._place = place

    def _dealt(self, mine: torch.Tensor, dealt: torch.Tensor, sizes: list[int], sizes_dealt: list[int]) -> torch.Tensor:
        if mine.dtype == torch.uint8 and self._place is not None:
            mine[self._place] ^= 1
        return mine


@pytest.mark.parametrize("data", [b"", b"abc"])
def test_what_is_sent_arrives_or_is_refused(data: bytes) -> None:
    """A flip on the way, in the message or in its checksum, is found."""
    assert Alone(None).deal([data]) == [data]
    for place in (0, -1):
        with pytest.raises(IntegrityError, match="a message from rank 0 was damaged in transit"):
            Alone(place).deal([data])


def test_a_rank_without_memory_leaves_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so before the others wait for what it has to send."""
    together, calls, empty = Together(2), itertools.count(), torch.empty

    def made(*sizes: int, **options: Any) -> torch.Tensor:
        if next(calls) == 0:
            raise MemoryError("no room")
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", made)
    with ThreadPoolExecutor(2) as pool:
        dealing = [pool.submit(together.of(rank).deal, [b"a", b"b"]) for rank in range(2)]
        errors = sorted(str(each.exception()) for each in dealing)

    assert errors[0] == "no room"
    assert re.fullmatch(r"rank [01]: no room", errors[1])


def test_a_store_that_does_not_answer_is_asked_once(saved: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other ranks wait for each further request, which may take minutes."""
    composition, asked = saved.compose("r@2").composition, []

    def silent(_: ObjectStore, ref: BlobRef) -> bytes:
        asked.append(ref)
        raise StorageIO("the bucket does not answer", errno=errno.EIO, filename="s3://bucket")

    monkeypatch.setattr(ObjectStore, "read", silent)
    exchange = InTurn(2)
    exchange.rank = 0
    own_versions(exchange, saved.repo, versions_to_load(composition))

    assert len(asked) == 1
