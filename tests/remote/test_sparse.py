"""A rank among another number of ranks fetches the chunks that it needs, each once, and no wrong byte of them."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from layerstore.assemble import fill_pieces
from layerstore.disk import Files, OpenFile
from layerstore.dtypes import by_code
from layerstore.errors import IntegrityError
from layerstore.model import Kind
from layerstore.remote import Bucket
from layerstore.shards import RankLoad
from layerstore.slices import Slices
from layerstore.zero3.pt import layout_pt
from tests.unit.checkpoints import Checkpoints

CHUNK_BYTES = 512
WORLD_SIZE = 3
"""The checkpoint is of two ranks."""

Reads = list[tuple[str, int, int]]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("layerstore.hashing", "layerstore.remote.fetch"):
        monkeypatch.setattr(sys.modules[module], "VERIFY_CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture
def pushed(store: Store, saved: Checkpoints, url: str) -> Store:
    """Return a store whose only commit is in the bucket, too."""
    store.ingest(saved(2, hidden=32), run="r")
    store.push(url)
    return store


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Return what is read of objects from buckets, as it happens: name, start and size."""
    found: Reads = []
    chunks = Bucket.chunks

    def counted(
        self: Bucket, name: str, *, start: int, size_bytes: int, is_whole: bool = False
    ) -> Iterator[memoryview]:
        found.append((name, start, size_bytes))
        return chunks(self, name, start=start, size_bytes=size_bytes, is_whole=is_whole)

    monkeypatch.setattr(Bucket, "chunks", counted)
    return found


def filled(store: Store, rank: int, *, world_size: int = WORLD_SIZE, ref: str = "r") -> list[bytes]:
    """Return all that *rank* of *world_size* loads."""
    load = RankLoad(store.repo, store.compose(ref).composition, rank=rank, world_size=world_size)
    found = []
    for file in (load.state.model, load.state.optimizer):
        for storage, _ in layout_pt(file.tree, name="any").storages:
            data = bytearray(storage.elements * by_code(storage.dtype).bytes)
            load.fill(storage, memoryview(data))
            found.append(bytes(data))
    return found


def large(store: Store) -> dict[str, int]:
    """Return the sizes of objects of more than a chunk, by their names in the bucket."""
    repo = store.repo
    names = [name for run in repo.records.runs() for name in repo.records.names(run)]
    layers = [entry for name in names for entry in repo.catalog.commit(name).record.layers]
    refs = [each.ref for entry in layers for each in repo.version_of(entry).objects]
    return {repo.layout.object_name(ref.id): ref.size_bytes for ref in refs if ref.size_bytes > CHUNK_BYTES}


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_a_rank_fetches_what_it_needs(pushed: Store, url: str, read: Reads, rank: int) -> None:
    """Of large objects only a part, and no range twice."""
    with layerstore.open(url) as remote:
        assert filled(remote, rank) == filled(pushed, rank)
        sizes = large(pushed)
        fetched = [each for each in read if each[0] in sizes]
        assert len(set(fetched)) == len(fetched)
        assert sum(size for *_, size in fetched) < sum(sizes.values()) * 0.7
        before = len(read)
        assert filled(remote, rank) == filled(pushed, rank)
        assert len(read) == before


def test_a_stretch_that_is_rounded_comes_alone_too(pushed: Store, url: str, read: Reads) -> None:
    """Of its object no more is fetched than of one whose bytes are taken as they are."""
    with layerstore.open(url) as remote:
        slices = Slices(remote.repo.version_of(entry) for entry in remote.compose("r").composition.layers)
        for name in slices.parameters:
            pieces = list(slices.pieces(Kind.MASTER, name, dtype="BF16", offset=0, begin=0, end=4))
            fill_pieces(remote.repo, pieces, memoryview(bytearray(8)), set())
            assert all(piece.rounding for piece in pieces)
    sizes = large(pushed)
    fetched = [each for each in read if each[0] in sizes]
    assert fetched
    assert max(size for *_, size in fetched) <= CHUNK_BYTES
    assert len(set(fetched)) == len(fetched)


def test_ranks_of_a_host_share_what_they_fetch(pushed: Store, url: str, read: Reads) -> None:
    """All at once, each as a process of its own would: nothing comes twice."""
    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        found = list(pool.map(lambda rank: filled(layerstore.open(url), rank), range(WORLD_SIZE)))

    assert found == [filled(pushed, rank) for rank in range(WORLD_SIZE)]
    sizes = large(pushed)
    fetched = [each for each in read if each[0] in sizes]
    assert len(set(fetched)) == len(fetched)
    assert sum(size for *_, size in fetched) <= sum(sizes.values())


@pytest.mark.full
def test_four_ranks_then_six_then_one(store: Store, saved: Checkpoints, url: str, read: Reads, tmp_path: Path) -> None:
    """Each resumes from the bucket what the ones before have saved, and nobody reads a range twice."""
    store.ingest(saved(2, hidden=16, world_size=4), run="r")
    store.push(url)

    def resumed(world_size: int, ref: str) -> list[list[bytes]]:
        """Load all ranks at once, each as a process of its own would."""

        def load(rank: int) -> list[bytes]:
            with layerstore.open(url) as remote:
                return filled(remote, rank, world_size=world_size, ref=ref)

        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(load, range(world_size)))

    assert resumed(6, "r") == [filled(store, rank, world_size=6) for rank in range(6)]
    store.ingest(saved(4, hidden=16, world_size=6), run="s")
    store.push(url)
    assert resumed(1, "s") == [filled(store, 0, world_size=1, ref="s")]

    assert len({name for name, *_ in read if name in large(store)}) > WORLD_SIZE
    ends: dict[str, int] = {}
    for name, start, size_bytes in sorted(each for each in read if each[0].startswith("objects/")):
        assert start >= ends.get(name, 0), f"{name} was read twice at {start}"
        ends[name] = start + size_bytes


@pytest.mark.full
def test_a_flipped_bit_in_a_chunk_is_found(pushed: Store, url: str, bucket: Bucket, read: Reads) -> None:
    """In the bucket it is refused, and in the mirror the chunk is fetched again."""
    with layerstore.open(url) as remote:
        filled(remote, 0)
        numbers = {(name, start) for name, start, _ in read if name in large(pushed)}
        name, start = min(numbers)
        path = remote.path / "sparse" / name.rpartition("/")[2]
        flip(path, start)
        read.clear()
        assert filled(remote, 0) == filled(pushed, 0)
        assert {(name, start) for name, start, _ in read if name in large(pushed)} == {(name, start)}

        flip(path, start)
        data = bytearray((pushed.path / name).read_bytes())
        data[start] ^= 1
        bucket.write(name, lambda: [bytes(data)])
        with pytest.raises(IntegrityError, match=f"is damaged between {start} and") as caught:
            filled(remote, 0)
        assert "repair --read-data --remote" in (caught.value.hint or "")


def test_what_is_evicted_before_it_is_opened_comes_again(
    pushed: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process made room for its own."""
    opened, evicted = Files.open, set[str]()

    def after_all(self: Files, path: Path) -> OpenFile:
        if path.parent.name == "sparse" and path.name not in evicted:
            evicted.add(path.name)
            path.unlink()
        return opened(self, path)

    monkeypatch.setattr(Files, "open", after_all)
    with layerstore.open(url) as remote:
        assert filled(remote, 0) == filled(pushed, 0)
    assert evicted


def flip(path: Path, at: int) -> None:
    """Change a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
