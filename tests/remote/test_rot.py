"""Verified means read and hashed now: what rots here while a store is open is never handed out."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import layerstore
from layerstore import Composite, Store
from layerstore.disk import OpenFile
from layerstore.dtypes import by_code
from layerstore.errors import IntegrityError
from layerstore.format import STATE_MAGIC, VERSION_MAGIC
from layerstore.hashing import NameHasher
from layerstore.remote import Bucket
from layerstore.remote.fetch import FetchedObjects
from layerstore.shards import RankLoad
from layerstore.storage import objects
from layerstore.zero3.pt import layout_pt
from tests.faults.harness import seeded
from tests.unit.checkpoints import Checkpoints, digests

Way = Callable[[Store, Path], object]


def loaded(store: Store, out: Path) -> object:
    """Return all that two ranks of three load when they resume."""
    found = []
    for rank in range(2):
        load = RankLoad(store.repo, store.compose("r").composition, rank=rank, world_size=3)
        for file in (load.state.model, load.state.optimizer):
            for storage, _offset in layout_pt(file.tree, name="any").storages:
                data = bytearray(storage.elements * by_code(storage.dtype).bytes)
                load.fill(storage, memoryview(data))
                found.append(bytes(data))
    return found


def loaded_state(composite: Composite) -> dict[str, bytes]:
    """Return the bytes of all weights."""
    return {name: tensor.float().numpy().tobytes() for name, tensor in composite.state_dict().items()}


def written(write: Callable[[Store, Path], object]) -> Way:
    """Return the way out that writes a folder."""

    def way(store: Store, out: Path) -> object:
        write(store, out)
        return digests(out)

    return way


WAYS: dict[str, Way] = {
    "shards": written(lambda store, out: store.compose("r").write(out)),
    "shards of older layers": written(lambda store, out: store.compose("r", policy="parity").write(out)),
    "shards for other ranks": written(lambda store, out: store.compose("r").write(out, world_size=3)),
    "shards without damage": written(lambda store, out: store.compose("r", without_damaged=True).write(out)),
    "export": written(lambda store, out: store.compose("r").export(out)),
    "rounded export": written(lambda store, out: store.compose("r").export(out, dtype="fp16")),
    "dcp": written(lambda store, out: store.compose("r").export(out, format="dcp")),
    "universal": written(lambda store, out: store.compose("r").export(out, format="universal")),
    "average": written(lambda store, out: store.average("r@2,r@6").export(out)),
    "delta": written(lambda store, out: store.compose("r").export(out, format="delta", since="r@4")),
    "resume": loaded,
    "tensors": lambda store, _: {name: array.tobytes() for name, array in store.compose("r").tensors().items()},
    "state dict": lambda store, _: loaded_state(store.compose("r")),
    "state dict of an average": lambda store, _: loaded_state(store.average("r@2,r@6")),
    "diff": lambda store, _: store.diff("r@2", "r@6", stat=True).layers,
    "show": lambda store, _: store.show("r@6"),
}


def rot(store: Store, *, blobs: bool) -> set[str]:
    """Change the last byte of every object that is here, or of all but *blobs*; return their names."""
    rotted = set()
    for path in store.path.glob("objects/*/*"):
        data = bytearray(path.read_bytes())
        if blobs or not data.startswith((VERSION_MAGIC, STATE_MAGIC)):
            data[-1] ^= 1
            path.write_bytes(data)
            rotted.add(path.name)
    return rotted


@pytest.mark.fault(108)
@pytest.mark.parametrize("way", WAYS)
def test_what_rots_in_the_cache_is_never_handed_out(pushed: Store, url: str, way: str, tmp_path: Path) -> None:
    """Not even by the store that fetched and checked it: it is fetched again."""
    go = WAYS[way]
    expected = go(pushed, tmp_path / "here")
    with layerstore.open(url) as remote:
        assert go(remote, tmp_path / "first") == expected
        assert rot(remote, blobs=True)
        assert go(remote, tmp_path / "second") == expected


@pytest.mark.fault(109)
@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"show", "shards without damage"}))
def test_what_rots_in_a_partial_clone_is_never_handed_out(pushed: Store, url: str, way: str, tmp_path: Path) -> None:
    """It is a store like any other: damage is an error, and nothing heals along the way."""
    go = WAYS[way]
    with layerstore.clone(url, tmp_path / "clone", records=True) as clone:
        go(clone, tmp_path / "first")
        rotted = rot(clone, blobs=False)
        with pytest.raises(IntegrityError, match="is damaged") as told:
            go(clone, tmp_path / "second")
        assert "repair --read-data --from" in (told.value.hint or "")
        assert not (tmp_path / "second").exists()
        assert {damage.id for damage in clone.verify(read_data=True).damaged} == rotted


@pytest.mark.fault(113)
@pytest.mark.parametrize("rotten", ["commits/r/4.*", "pins/best", "store.json"])
def test_a_record_that_rots_in_the_cache_is_not_the_buckets(pushed: Store, url: str, rotten: str) -> None:
    """It is fetched again, by the process that has the store open and by others; damage there is told as it is."""
    pushed.pin("best", "r@2")
    pushed.push(url)
    for is_open in (True, False):
        with layerstore.open(url) as remote:
            [path] = remote.path.glob(rotten)
            if is_open:
                path.write_bytes(b"rotten")
            assert [entry.step for entry in remote.log()] == [6, 4, 2]
            assert (remote.show("r@4"), remote.show("best")) == (pushed.show("r@4"), pushed.show("best"))
            assert remote.verify().ok
            path.write_bytes(b"rotten")

    name = path.relative_to(remote.path).as_posix()
    Bucket(url).write(name, lambda: [b"rotten"])
    with pytest.raises(IntegrityError, match=re.escape(name)), layerstore.open(url) as remote:
        remote.show("best" if rotten == "pins/best" else "r@4")


@pytest.mark.fault(108)
def test_no_check_is_remembered(pushed: Store, url: str, tmp_path: Path) -> None:
    """Whether all of it was used or not, nothing of a finished download stays behind."""
    with layerstore.open(url) as remote:
        remote.compose("r").write(tmp_path / "unverified", verify=False)
        remote.compose("r").write(tmp_path / "verified")
        fetched = remote.repo.objects
        assert isinstance(fetched, FetchedObjects)
        kept = [value for value in vars(fetched).values() if isinstance(value, (dict, set, list))]
        assert not any(kept)


def test_what_was_just_fetched_is_not_read_twice(
    pushed: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was hashed as it came, so a first composite costs one hash of each object, and the next one another."""
    hashed, read = objects.hashed, list[str]()

    def counted(file: OpenFile) -> NameHasher:
        read.append(file.path.name)
        return hashed(file)

    monkeypatch.setattr(objects, "hashed", counted)
    record = pushed.repo.catalog.commit(pushed.repo.records.names("r")[-1]).record
    tensors = {each.ref.id for entry in record.layers for each in pushed.repo.version_of(entry).objects}
    with layerstore.open(url) as remote:
        remote.compose("r").write(tmp_path / "first")
        assert not tensors & {*read}
        remote.compose("r").write(tmp_path / "second")
    assert sorted(tensors & {*read}) == sorted(name for name in read if name in tensors) == sorted(tensors)


# What a host that comes new to the bucket reads of it, and nothing here has verified before.
READ_THERE = {"store.json": 6, "commits/*/*": 20, "pins/*": 12, "objects/*/*": 40, "trash/commits/*/*": 10}
"""Files of a bucket, and how many flips of them a run tries."""


@pytest.fixture
def saved_there(saved: Checkpoints, tmp_path: Path) -> Path:
    """Return the folder of a bucket that was saved to: exact and compact saves, a pin, a dropped commit."""
    with layerstore.init(f"file://{tmp_path}/remote") as store:
        saved.into(store, 2, 4, precision="delta8")
        store.pin("best", "r@4")
        store.ingest(saved(2), run="other")  # objects that no record names are nobody's to read
        store.drop("other@2")
    return tmp_path / "remote"


@pytest.mark.full
@pytest.mark.fault(108, 113)
@pytest.mark.parametrize("files", READ_THERE)
def test_a_flipped_bit_in_a_bucket_is_never_handed_out(saved_there: Path, files: str, tmp_path: Path) -> None:
    """A new host is refused it, or told by name; everything else is what it was."""
    chance = seeded(f"flips of {files} in a bucket")
    places = [(path, place) for path in sorted(saved_there.glob(files)) for place in range(path.stat().st_size)]
    expected = _answers(saved_there, tmp_path / "sound")
    assert not [answer for answer in expected.values() if isinstance(answer, type)]
    for number, (path, place) in enumerate(chance.sample(places, READ_THERE[files])):
        data = path.read_bytes()
        bit = 1 << chance.randrange(8)
        path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        found = _answers(saved_there, tmp_path / str(number))
        path.write_bytes(data)
        wrong = {asked for asked in found if found[asked] not in (expected[asked], IntegrityError)}
        # Verify says that it is damaged; what was dropped, and cannot come back, is listed no more.
        assert wrong <= ({"verify"} if found["dropped"] else {"verify", "dropped"}), (path, place, bit, wrong)
        assert wrong or IntegrityError in found.values(), (path, place, bit)


def _answers(bucket: Path, cache: Path) -> dict[str, object]:
    """Return what a host with nothing in its *cache* is told; the class of the error, if it is refused."""
    asked: dict[str, Callable[[Store], object]] = {
        "verify": lambda store: store.verify(read_data=True).ok,
        "newest": lambda store: WAYS["tensors"](store, cache),
        "exact": lambda store: {name: of.tobytes() for name, of in store.compose("r@2").tensors().items()},
        "pin": lambda store: store.compose("best").commit,
        "dropped": lambda store: [each.commit.id for each in store.dropped()],
    }
    found: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LAYERSTORE_CACHE_DIR", str(cache))
        for name, ask in asked.items():
            try:
                with layerstore.open(f"file://{bucket}") as store:
                    found[name] = ask(store)
            except IntegrityError:
                found[name] = IntegrityError
    return found
