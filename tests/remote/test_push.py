"""``push``, ``pull`` and ``clone``: the same bytes elsewhere, whoever is killed, and only what is missing."""

import errno
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import AlreadyExists, Conflict, IntegrityError, NotFound, StorageIO
from layerstore.history import PushedNotice
from layerstore.remote import Bucket, RemoteNotice
from layerstore.remote.folder import Listed
from tests.remote.conftest import watch_writes
from tests.unit.checkpoints import Checkpoints, snapshot


def test_a_clone_is_the_store(store: Store, saved: Checkpoints, url: str, tmp_path: Path) -> None:
    """Records, pins and objects, byte for byte; what it is cloned from is its origin."""
    saved.into(store, 2, 4, 6)
    store.pin("best", "r@4")

    pushed = store.push(url)

    assert (pushed.commits, pushed.pins) == (("r@2", "r@4", "r@6"), ("best",))
    with layerstore.clone(url, tmp_path / "clone") as clone:
        assert snapshot(clone) == snapshot(store)
        assert clone.verify(read_data=True).ok
        assert clone.remotes.urls() == {"origin": url}
        assert [entry.pushed for entry in clone.log()] == [(url,)] * 3
        saved.into(clone, 8)
        assert clone.push().commits == ("r@8",)
    assert store.pull(url).commits == ("r@8",)
    assert [entry.pushed for entry in store.log()] == [(url,)] * 4


def test_only_what_is_missing_is_sent(store: Store, saved: Checkpoints, bucket: Bucket) -> None:
    """A push that has nothing to do sends nothing; the next save sends its own bytes."""
    saved.into(store, 2)
    store.push(bucket.url)
    assert store.push(bucket.url).bytes_sent == 0
    before = {each.name: each.size_bytes for folder in ("objects", "commits") for each in bucket.listed(folder)}
    saved.into(store, 4, policy="parity")

    pushed = store.push(bucket.url)

    after = {each.name: each.size_bytes for folder in ("objects", "commits") for each in bucket.listed(folder)}
    assert pushed.bytes_sent == sum(after.values()) - sum(before.values())
    assert before.items() <= after.items()


def test_a_reference_is_pushed_alone(store: Store, saved: Checkpoints, url: str, tmp_path: Path) -> None:
    """A commit is complete by itself, and so is a pinned composite."""
    saved.into(store, 2, 4)
    store.compose("r@4", policy="parity").pin("mixed")

    assert store.push(url, refs=["r@4", "mixed"]).commits == ("r@4",)

    with layerstore.clone(url, tmp_path / "clone") as clone:
        assert [entry.step for entry in clone.log()] == [4]
        assert clone.verify(read_data=True).ok
        clone.compose("mixed").write(tmp_path / "out")
    with pytest.raises(NotFound, match="no step 2"):
        layerstore.open(url).show("r@2")


def test_a_pull_of_references_takes_only_them(store: Store, saved: Checkpoints, url: str, tmp_path: Path) -> None:
    """A step, a run, or a pin, as they are called there."""
    saved.into(store, 2, 4)
    store.push(url, refs=["r@2"])
    with layerstore.clone(url, tmp_path / "clone") as clone:
        store.pin("best", "r@4")
        store.push(url)
        assert clone.pull(refs=["r@4"]).commits == ("r@4",)
        assert clone.pull(refs=["best"]).pins == ("best",)
        with pytest.raises(NotFound):
            clone.pull(refs=["r@6"])


def test_what_was_dropped_stays_dropped(store: Store, saved: Checkpoints, url: str) -> None:
    """A pull does not bring back what lies in the trash, unless it is named: then it no longer counts as dropped."""
    saved.into(store, 2, 4)
    store.push(url)
    dropped = store.drop("r@2")

    pulled = store.pull(url)
    assert (pulled.commits, pulled.dropped) == ((), (dropped.commit,))
    assert store.pull(url, refs=["r@2"]).commits == ("r@2",)
    assert (store.dropped(), store.pull(url).dropped) == ([], ())
    emptied = store.gc(empty_trash=True)
    assert (emptied.trash.count, emptied.dropped) == (1, ())
    assert [entry.step for entry in store.log()] == [4, 2]


def test_a_push_that_was_killed_goes_on(
    store: Store, saved: Checkpoints, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wherever it ends, what shows is whole, and what has arrived is not sent again."""
    saved.into(store, 2, 4)
    total = store.push(f"memory://{tmp_path.name}").objects
    sent: list[str] = []
    for limit in (0, 1, 7, 20):
        count = 0

        def cut(_: Bucket, name: str, limit: int = limit) -> None:
            nonlocal count
            if not name.startswith("gc/"):
                if count == limit:
                    raise KeyboardInterrupt
                count += 1
                sent.append(name)

        with monkeypatch.context() as patched:
            watch_writes(patched, before=cut)
            with pytest.raises(KeyboardInterrupt):
                store.push(bucket.url)
        if bucket.read("store.json", size_bytes_max=10_000):
            assert layerstore.open(bucket.url).verify(read_data=True).ok
    pushed = store.push(bucket.url)

    objects = [name for name in sent if name.startswith("objects/")]
    assert len(objects) == len(set(objects))
    assert len(objects) + pushed.objects == total
    with layerstore.clone(bucket.url, tmp_path / "clone") as clone:
        assert snapshot(clone) == snapshot(store)


def test_a_clone_that_was_killed_goes_on(
    store: Store, saved: Checkpoints, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Commits that have come are whole; the rest follows."""
    saved.into(store, 2, 4)
    store.push(url)
    chunks = Bucket.chunks
    for limit in (1, 30):
        asked: list[str] = []

        def counted(
            self: Bucket, name: str, limit: int = limit, asked: list[str] = asked, **stretch: int
        ) -> Iterator[memoryview]:
            asked.append(name)
            if len(asked) > limit:
                raise KeyboardInterrupt
            return chunks(self, name, **stretch)  # type: ignore[arg-type]  # fields by name

        with monkeypatch.context() as patched:
            patched.setattr(Bucket, "chunks", counted)
            with pytest.raises(KeyboardInterrupt):
                layerstore.clone(url, tmp_path / "clone")
        with layerstore.open(tmp_path / "clone") as half:
            assert half.verify(read_data=True).ok
    with layerstore.clone(url, tmp_path / "clone") as clone:
        assert snapshot(clone) == snapshot(store)


def test_another_store_is_refused(store: Store, saved: Checkpoints, url: str, tmp_path: Path) -> None:
    """Neither of the two is changed."""
    saved.into(store, 2)
    store.push(url)
    with layerstore.init(tmp_path / "other") as other:
        saved.into(other, 4)
        with pytest.raises(Conflict, match="another store"):
            other.push(url)
        with pytest.raises(Conflict, match="another store"):
            other.pull(url)
        assert [entry.step for entry in other.log()] == [4]
    with pytest.raises(AlreadyExists, match="another store"):
        layerstore.clone(url, tmp_path / "other")
    assert [entry.step for entry in layerstore.open(url).log()] == [2]


def test_a_pin_that_means_something_else_is_refused(store: Store, saved: Checkpoints, url: str, tmp_path: Path) -> None:
    """Both ways."""
    saved.into(store, 2, 4)
    store.push(url)
    store.pin("best", "r@2")
    with layerstore.clone(url, tmp_path / "clone") as clone:
        clone.pin("best", "r@4")
        clone.push()
        with pytest.raises(AlreadyExists, match="best"):
            store.push(url)
        with pytest.raises(AlreadyExists, match="best"):
            store.pull(url)


def test_a_pin_is_moved_on_request(store: Store, saved: Checkpoints, url: str, tmp_path: Path) -> None:
    """What is best changes: then the remote's pin means what it means here, and readers there see that."""
    saved.into(store, 2, 4)
    store.pin("best", "r@2")
    store.push(url)
    store.delete_pin("best")
    store.pin("best", "r@4")

    assert store.push(url, move_pins=True).pins == ("best",)

    [pin] = layerstore.open(url).pins()
    assert (pin.base, store.push(url).pins) == (store.pins()[0].base, ())


def test_damage_here_is_not_sent(store: Store, saved: Checkpoints, bucket: Bucket) -> None:
    """The object is named, and the commit does not show there."""
    saved.into(store, 2)
    path = max((store.path / "objects").rglob("??/*"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    with pytest.raises(IntegrityError, match=path.name):
        store.push(bucket.url)

    assert bucket.listed("commits") == []
    assert bucket.size(f"objects/{path.name[:2]}/{path.name}") is None


def test_a_copy_at_another_place_is_not_counted_on(store: Store, saved: Checkpoints, bucket: Bucket) -> None:
    """Somebody has moved an object there: it is sent again, and verify misses it until then."""
    saved.into(store, 2)
    store.push(bucket.url)
    victim = bucket.objects()[0]
    folder, _, object_id = victim.name.rpartition("/")
    data = bucket.read(victim.name, size_bytes_max=victim.size_bytes) or b""
    bucket.write(f"{folder}/moved/{object_id}", lambda: [data])
    bucket.remove([victim.name, *(each.name for each in bucket.listed("commits"))])

    assert store.push(bucket.url).objects == 1
    bucket.remove([victim.name])
    assert [damage.path for damage in layerstore.open(bucket.url).verify().damaged] == [victim.name]


def test_damage_there_is_not_taken(store: Store, saved: Checkpoints, bucket: Bucket, tmp_path: Path) -> None:
    """The object is named, and what it costs; all other commits have come."""
    saved.into(store, 2, 4)
    store.pin("all", "r@2")
    store.push(bucket.url)
    [victim] = sorted(
        each.name for each in bucket.listed("objects") if each.name.rpartition("/")[2] == str(newest_object(store))
    )
    data = bytearray(bucket.read(victim, size_bytes_max=10**9) or b"")
    data[-1] ^= 1
    bucket.write(victim, lambda: [bytes(data)])

    with pytest.raises(IntegrityError, match=rf"{victim.rpartition('/')[2]}.*not fetched: r@4; everything else was"):
        layerstore.clone(bucket.url, tmp_path / "clone")

    with layerstore.open(tmp_path / "clone") as clone:
        assert [entry.step for entry in clone.log()] == [2]
        assert [pin.name for pin in clone.pins()] == ["all"]
        assert clone.verify(read_data=True).ok
    store.repair(remote=bucket.url, read_data=True)
    with layerstore.clone(bucket.url, tmp_path / "clone") as clone:
        assert snapshot(clone) == snapshot(store)


def test_what_is_cut_short_there_is_damage(store: Store, saved: Checkpoints, bucket: Bucket, tmp_path: Path) -> None:
    """And no failure of the network: it is not asked for again."""
    saved.into(store, 2)
    store.push(bucket.url)
    name = f"objects/{(found := newest_object(store))[:2]}/{found}"
    bucket.write(name, lambda: [b"short"])

    with pytest.raises(IntegrityError, match=f"{name} is shorter"):
        layerstore.clone(bucket.url, tmp_path / "clone")
    with layerstore.open(bucket.url) as remote, pytest.raises(IntegrityError, match=r"has 5 bytes|is shorter"):
        remote.compose("r@2").write(tmp_path / "out")


def newest_object(store: Store) -> str:
    """Return an object of the newest commit's first layer."""
    record = store.repo.catalog.commit(store.repo.records.names("r")[-1]).record
    return store.repo.version_of(record.layers[0]).objects[0].id


def test_a_pin_is_deleted_there(store: Store, saved: Checkpoints, url: str) -> None:
    """Else each pull would bring it back, and a collection there keep what it names."""
    saved.into(store, 2)
    store.pin("best", "r@2")
    store.push(url)
    store.delete_pin("best")
    assert store.pull(url).pins == ("best",)
    store.delete_pin("best")

    assert store.delete_pin("best", remote=url) is True

    assert (store.pull(url).pins, layerstore.open(url).pins()) == ((), [])
    with pytest.raises(NotFound, match="no pin 'best'"):
        store.delete_pin("best", remote=url)


def test_a_clone_that_was_cut_off_fetches_nothing_twice(
    store: Store, saved: Checkpoints, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of one large commit neither, over a connection that is lost now and then."""
    saved.into(store, 2)
    store.push(url)
    monkeypatch.setattr(sys.modules["layerstore.remote.pull"], "_PUBLISHED_BYTES", 20_000)
    chunks, came, limits = Bucket.chunks, list[str](), [10, 20, sys.maxsize]

    def counted(self: Bucket, name: str, **stretch: int) -> Iterator[memoryview]:
        if len(came) >= limits[0]:
            raise StorageIO("the server is gone", errno=errno.EIO, filename=url)
        yield from chunks(self, name, **stretch)  # type: ignore[arg-type]  # fields by name
        came.append(name)

    monkeypatch.setattr(Bucket, "chunks", counted)
    for _ in range(2):
        with pytest.raises(StorageIO, match="is gone"):
            layerstore.clone(url, tmp_path / "clone")
        del limits[0]
    with layerstore.clone(url, tmp_path / "clone") as clone:
        assert snapshot(clone) == snapshot(store)
    tensors = [name for name in came if (store.path / name).stat().st_size > 4096]
    assert len(tensors) == len(set(tensors)) > 20


def test_a_push_goes_on_behind_a_run(
    store: Store, saved: Checkpoints, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved later is sent later, by the listing that it has; cut off amid objects, it finds out what came."""
    monkeypatch.setattr(sys.modules["layerstore.remote.push"], "FOLLOW_SECONDS", 0.05)
    saved.into(store, 2, 4)
    listings: list[None] = []
    objects = Bucket.objects
    stop, away, before = threading.Event(), [False], set[str]()

    def counted(self: Bucket) -> list[Listed]:
        listings.append(None)
        return objects(self)

    def at_times(bucket: Bucket, name: str) -> None:
        if away[0] and name not in before:
            away[0] = False
            raise StorageIO("the server is away", errno=errno.EIO, filename=bucket.url)

    monkeypatch.setattr(Bucket, "objects", counted)
    watch_writes(monkeypatch, before=at_times)
    made: list[str] = []
    follower = store.follow(bucket.url, stop=stop, on_made=made.append)

    away[0] = True
    with pytest.warns(RemoteNotice, match="the server is away; trying again in"):
        assert next(follower).commits == ("r@2", "r@4")
    before |= {each.name for each in objects(bucket)}
    away[0] = True
    saved.into(store, 6)
    with pytest.warns(RemoteNotice, match="the server is away; trying again in"):
        sent = next(follower)
    assert sent.commits == ("r@6",)
    saved.into(store, 8)
    count = len(listings)
    assert next(follower).commits == ("r@8",)
    assert len(listings) == count
    stop.set()
    assert list(follower) == []
    assert made == [bucket.url]
    assert layerstore.open(bucket.url).verify(read_data=True).ok


def test_a_push_behind_a_run_sends_what_it_can(
    store: Store, saved: Checkpoints, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pin that means something else there is named once, and each new commit is sent."""
    monkeypatch.setattr(sys.modules["layerstore.remote.push"], "FOLLOW_SECONDS", 0.05)
    saved.into(store, 2, 4)
    store.pin("best", "r@2")
    store.push(bucket.url)
    store.delete_pin("best")
    store.pin("best", "r@4")
    stop = threading.Event()
    follower = store.follow(bucket.url, stop=stop)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert next(follower).commits == ()
        for step in (6, 8):
            saved.into(store, step)
            assert next(follower).commits == (f"r@{step}",)
        stop.set()
        assert list(follower) == []

    assert [str(each.message).split(";")[1] for each in told] == [" not sent: pin best"]


def test_what_a_remote_lacks_stays(store: Store, saved: Checkpoints, bucket: Bucket) -> None:
    """A collection here that asks for it removes only what the remote has; the log tells what that is."""
    saved.into(store, 2, 4)
    store.push(bucket.url)
    saved.into(store, 6, 8)

    plan = store.gc(Keep(last=1), pushed_to=bucket.url, grace_seconds=0)

    assert [fate.step for fate in plan.removed] == [4, 2]
    assert [fate.kept_by for fate in plan.commits if fate.step == 6] == [("not pushed yet",)]
    assert [(entry.step, entry.pushed) for entry in store.log()] == [(8, ()), (6, ())]
    store.push(bucket.url)
    assert [entry.pushed for entry in store.log()] == [(bucket.url,), (bucket.url,)]


def test_a_damaged_note_of_what_was_pushed(store: Store, saved: Checkpoints, bucket: Bucket) -> None:
    """It is told, once, and the next push or pull writes it anew."""
    saved.into(store, 2)
    store.push(bucket.url)
    store.repo.layout.pushed.write_text("[]")
    with pytest.warns(PushedNotice, match="the next push writes it anew"):
        assert [entry.pushed for entry in store.log()] == [()]
    with pytest.warns(PushedNotice):
        store.push(bucket.url)
    assert [entry.pushed for entry in store.log()] == [(bucket.url,)]
    store.repo.layout.pushed.write_text("[]")
    with pytest.warns(PushedNotice) as told:
        store.pull(bucket.url, refs=["r@2"])
    assert len(told) == 1
    assert [entry.pushed for entry in store.log()] == [(bucket.url,)]


def test_one_run_is_pushed(store: Store, saved: Checkpoints, bucket: Bucket) -> None:
    """With its pins."""
    saved.into(store, 2)
    saved.into(store, 3, run="q")
    store.pin("best", "q@3")
    store.pin("other", "r@2")
    pushed = store.push(bucket.url, runs=["q"])
    assert (pushed.commits, pushed.pins) == (("q@3",), ("best",))


@pytest.mark.filterwarnings("ignore::layerstore.storage.IndexNotice")  # whoever lists its commits meanwhile is told
def test_what_was_collected_meanwhile_is_left_out(
    store: Store, saved: Checkpoints, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push beside a collection of the store sends what is left."""
    saved.into(store, 2, 4, 6)

    def collecting(_: Bucket, name: str) -> None:
        if name.startswith("objects/") and len(store.log()) == 3:
            store.gc(Keep(last=1), grace_seconds=0, empty_trash=True)

    watch_writes(monkeypatch, after=collecting)

    with pytest.warns(PushedNotice, match=r"r@[24] was removed here during the push, and is not sent"):
        assert "r@6" in store.push(bucket.url).commits
    assert layerstore.open(bucket.url).verify(read_data=True).ok


def test_what_is_collected_before_it_is_read_is_left_out(
    store: Store, saved: Checkpoints, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at what there is and the reading of a record."""
    saved.into(store, 2, 4, 6)

    module = sys.modules["layerstore.remote.identity"]
    found = module.records_in

    def names(bucket: Bucket) -> object:
        if len(store.log()) == 3:
            store.gc(Keep(last=1), grace_seconds=0, empty_trash=True)
        return found(bucket)

    monkeypatch.setattr(module, "records_in", names)

    with pytest.warns(PushedNotice, match=r"r@[24] was removed here during the push, and is not sent"):
        assert store.push(bucket.url).commits == ("r@6",)


def test_a_place_that_is_not_there_is_no_success(
    store: Store, saved: Checkpoints, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some servers say so when an upload was swept away half way."""
    saved.into(store, 2)

    def put(*_: object) -> None:
        raise FileNotFoundError("NoSuchUpload")

    monkeypatch.setattr(type(bucket._client), "put", put)
    with pytest.raises(StorageIO, match="there is no such place"):
        store.push(bucket.url)
