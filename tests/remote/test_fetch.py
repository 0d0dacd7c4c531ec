"""A store straight from a bucket: records first, bytes as they are needed, and nothing is written there."""

import os
import random
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import IntegrityError, InvalidInput, NoStore, StorageIO, Unsupported
from layerstore.history import named_by
from layerstore.limits import REMOTE_REQUESTS_MAX
from layerstore.model import BlobRef
from layerstore.remote import Bucket, RemoteNotice
from tests.faults.harness import Failure, attempt, become_nobody, in_child
from tests.unit.checkpoints import Checkpoints, digests


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return what is read of objects from buckets: names and bytes, as it happens."""
    found: list[tuple[str, int]] = []
    chunks = Bucket.chunks

    def counted(
        self: Bucket, name: str, *, start: int, size_bytes: int, is_whole: bool = False
    ) -> Iterator[memoryview]:
        found.append((name, size_bytes))
        return chunks(self, name, start=start, size_bytes=size_bytes, is_whole=is_whole)

    monkeypatch.setattr(Bucket, "chunks", counted)
    return found


QUESTIONS: dict[str, Callable[[Store], object]] = {
    "log": lambda store: [replace(entry, pushed=()) for entry in store.log()],
    "show": lambda store: store.show("r@4"),
    "ls": lambda store: store.ls("best"),
    "diff": lambda store: store.diff("r@2", "r@6"),
    "pins": lambda store: store.pins(),
    "stats": lambda store: replace(store.stats(), physical_bytes=0),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_remote_answers_as_the_store_does(
    pinned: Store, url: str, read: list[tuple[str, int]], question: str
) -> None:
    """And no tensor is fetched for it."""
    ask = QUESTIONS[question]
    tensors = {ref.id for ref in tensor_objects(pinned)}

    with layerstore.open(url) as remote:
        assert ask(remote) == ask(pinned)

    assert not [name for name, _ in read if name.rpartition("/")[2] in tensors]


def test_stats_of_a_remote(pinned: Store, url: str) -> None:
    """The bytes that the bucket holds, not those that have been fetched from there."""
    with layerstore.open(url) as remote:
        found = remote.stats()
    assert found.missing == 0
    assert 0 <= found.physical_bytes - found.unique_bytes <= 4 * 4096  # records, by blocks


def tensor_objects(store: Store) -> list[BlobRef]:
    """Return all that version blobs name."""
    repo = store.repo
    records = [repo.catalog.commit(name).record for name in repo.records.names("r")]
    return [each.ref for record in records for entry in record.layers for each in repo.version_of(entry).objects]


def test_a_composite_fetches_what_it_needs(
    pinned: Store, url: str, read: list[tuple[str, int]], tmp_path: Path
) -> None:
    """Each object once, none that it does not need; the same bytes come out."""
    pinned.compose("r@6", policy="parity").write(tmp_path / "here")
    composite = pinned.compose("r@6", policy="parity")

    with layerstore.open(url) as remote:
        remote.compose("r@6", policy="parity").write(tmp_path / "there")

    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    names = [name for name, _ in read]
    assert len(names) == len(set(names))
    chosen = composite.composition
    blobs = [*(entry.version for entry in chosen.layers), *chosen.base.states]
    needed = {ref.id for blob in blobs for ref in named_by(pinned.repo, blob)}
    tensors = {ref.id for ref in tensor_objects(pinned)}
    assert {name.rpartition("/")[2] for name in names} & tensors == needed & tensors


def test_what_was_fetched_is_used_again(pinned: Store, url: str, read: list[tuple[str, int]], tmp_path: Path) -> None:
    """By another process, too; and what has rotted in the cache is fetched again."""
    with layerstore.open(url) as remote:
        remote.compose("r@6").write(tmp_path / "a")
    read.clear()
    with layerstore.open(url) as remote:
        remote.compose("r@6").write(tmp_path / "b")
    assert read == []
    victim = max((tmp_path / "cache").rglob("objects/??/*"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)

    with layerstore.open(url) as remote:
        remote.compose("r@6").write(tmp_path / "c")

    assert [name.rpartition("/")[2] for name, _ in read] == [victim.name]
    assert digests(tmp_path / "c") == digests(tmp_path / "a")


def test_the_cache_is_bounded(
    pinned: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[tuple[str, int]]
) -> None:
    """What was used longest ago goes first; a composite that is larger than the cache comes out all the same."""
    pinned.compose("r@6").write(tmp_path / "here")
    monkeypatch.setenv("LAYERSTORE_CACHE_SIZE", "40kB")
    with layerstore.open(url) as remote:
        remote.compose("r@6").write(tmp_path / "there")
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "cache").rglob("objects/??/*")) <= 40_000
    monkeypatch.setenv("LAYERSTORE_CACHE_SIZE", "much")
    with pytest.raises(InvalidInput, match="is not a size"):
        layerstore.open(url)


def test_downloads_that_were_killed_are_removed(
    pinned: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a day: a younger one may be under way."""
    monkeypatch.setattr("layerstore.remote.cache._sums", {})
    with layerstore.open(url) as remote:
        old, young = (remote.path / "tmp" / name for name in ("old", "young"))
        for path, age_seconds in ((old, 90_000), (young, 80_000)):
            path.write_bytes(bytes(1000))
            os.utime(path, (time.time() - age_seconds,) * 2)
        remote.compose("r@6").write(tmp_path / "out")
    assert (old.exists(), young.exists()) == (False, True)


@pytest.mark.full
def test_no_thread_is_left_behind(pinned: Store, url: str) -> None:
    """Each verb closes the remote that it opened: a process that is cut off from its job waits for all threads."""
    pinned.drop("r@2")
    before = threading.active_count()
    for _ in range(2):
        pinned.pull(url, refs=["r@2"])
        pinned.gc(remote=url, dry_run=True)
        pinned.repair(remote=url, read_data=True, dry_run=True)
        pinned.repair(sources=[url], dry_run=True)
        with layerstore.open(url) as remote:
            remote.verify(read_data=True)
        pinned.drop("r@2")
    assert threading.active_count() == before


def test_a_record_that_is_damaged_later_is_found(pinned: Store, url: str, bucket: Bucket) -> None:
    """A verify reads records in the bucket, and not what the mirror has of them; healed there, they are sound here."""
    [name] = [each.name for each in bucket.listed("commits") if "/4." in each.name]
    with layerstore.open(url) as remote:
        assert remote.verify().ok
        bucket.write(name, lambda: [b"rotten"])
        assert [damage.path for damage in remote.verify().damaged] == [name]
        assert [each.path for each in pinned.repair(remote=url).fetched] == [name]
        assert remote.verify().ok


def test_what_a_cleaner_took_is_made_again(pinned: Store, url: str, tmp_path: Path) -> None:
    """A mirror may lose any part of itself between two commands."""
    with layerstore.open(url) as remote:
        remote.show("r@6")
        place = remote.path
    (place / "store.json").unlink()
    for taken in ("commits", "tmp", "locks", "manifest"):
        shutil.rmtree(place / taken)
        with layerstore.open(url) as remote:
            assert remote.log() == [replace(entry, pushed=()) for entry in pinned.log()]
    with layerstore.open(url) as remote:
        remote.compose("r@4").write(tmp_path / "out")


@pytest.mark.fault(129)
def test_strangers_in_a_bucket_stop_a_collection(pinned: Store, bucket: Bucket) -> None:
    """Whatever lies beside the records and pins, however deep or long its name, may be one of them by another name."""
    record = pinned.repo.layout.name(next((pinned.path / "commits" / "r").glob("4.*")))
    strangers = ["commits/r/a/b/c", "commits/stray", f"commits/r/{'x' * 300}", f"commits/{'x' * 300}/1", "pins/a/b"]
    strangers += [f"{record}.sync-conflict", record.replace("/r/", "/r (copy)@1/")]
    if bucket.url.startswith("file://"):
        strangers = [name for name in strangers if len(name) < 255]
    before = {each.name for each in bucket.objects()}
    for name in strangers:
        bucket.write(name, lambda: [b"stray"])
    bucket.remove([record])

    for dry_run in (True, False):
        with pytest.raises(IntegrityError, match=r"is not named like a record.*; nothing was removed") as told:
            pinned.gc(Keep(last=1), remote="origin", grace_seconds=0, dry_run=dry_run)
        assert f"layerstore verify --remote {bucket.url} lists" in (told.value.hint or "")
    with layerstore.open(bucket.url) as remote:
        assert [entry.step for entry in remote.log()] == [6, 2]
        assert {damage.path for damage in remote.verify().damaged} == set(strangers)
    assert {each.name for each in bucket.objects()} == before
    bucket.remove(strangers)
    assert len(pinned.gc(Keep(last=1), remote="origin", grace_seconds=0).removed) == 1


@pytest.mark.fault(129)
@pytest.mark.parametrize(("old", "new"), [("r/2.", "r/.2."), ("/r/", "/r (copy)@1/")])
def test_strangers_in_a_buckets_trash_stop_a_collection(pinned: Store, bucket: Bucket, old: str, new: str) -> None:
    """A record there keeps its objects for a day, under whatever name; with its own it goes when its time has come."""
    pinned.gc(Keep(last=1), remote="origin")
    before = {each.name for each in bucket.objects()}
    [called] = [each.name for each in bucket.listed("trash/commits") if "/2." in each.name]
    data = bucket.read(called, size_bytes_max=1 << 20) or b""
    stranger = called.replace(old, new)
    bucket.write(stranger, lambda: [data])
    bucket.remove([called])

    for dry_run in (True, False):
        with pytest.raises(IntegrityError, match=r"is not named like a record.*; nothing was removed"):
            pinned.gc(Keep(last=1), remote="origin", grace_seconds=0, dry_run=dry_run)
    with layerstore.open(bucket.url) as remote:
        assert [damage.path for damage in remote.verify().damaged] == [stranger]

    assert {each.name for each in bucket.objects()} == before
    bucket.write(called, lambda: [data])
    bucket.remove([stranger])
    assert pinned.gc(Keep(last=1), remote="origin", grace_seconds=0).trash.count == 1


def test_what_stands_for_a_folder_in_a_bucket_stops_nothing(pinned: Store, bucket: Bucket) -> None:
    """Consoles and mounts write an empty object in a folder's place."""
    if not bucket.url.startswith("file://"):  # there folders are folders
        for name in ("commits/r", "commits/s"):
            bucket.write(name, lambda: [b""])

    assert len(pinned.gc(Keep(last=1), remote="origin").removed) == 1


def _opened_by_two(folder: Path) -> Failure | None:
    """Open the bucket at *folder* as one user, and then as another one with the same cache."""
    os.environ["LAYERSTORE_CACHE_DIR"] = str(folder / "cache")
    os.umask(0o022)
    layerstore.open(f"file://{folder}/bucket").close()
    become_nobody()
    return attempt(lambda: layerstore.open(f"file://{folder}/bucket"))


@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_cache_of_another_user_is_refused(pinned: Store, tmp_path: Path) -> None:
    """At once, and it is said how to name another one."""
    pinned.push(f"file://{tmp_path}/bucket")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    failure = in_child(_opened_by_two, tmp_path).needed()
    assert failure is not None
    assert (failure.exit_code, failure.hint) == (12, "set LAYERSTORE_CACHE_DIR to a folder of your own")


def test_what_is_closed_fetches_no_more(
    pinned: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what waits for its turn, nor the rest of what is on its way; nothing half done is left."""
    stream, begun, go_on = Bucket._stream, list[str](), threading.Event()

    def held(self: Bucket, name: str, start: int, end: int, *, is_whole: bool) -> Iterator[bytes]:
        begun.append(name)
        go_on.wait()
        return stream(self, name, start, end, is_whole=is_whole)

    remote = layerstore.open(url)
    refs = list(dict.fromkeys(tensor_objects(pinned)))
    monkeypatch.setattr(Bucket, "_stream", held)
    shutdown = ThreadPoolExecutor.shutdown

    def shut_down(pool: ThreadPoolExecutor, *args: bool, **options: bool) -> None:
        go_on.set()  # the remote is closed by now, and waits for what is on its way
        shutdown(pool, *args, **options)

    with remote.repo.objects.expected(refs):
        while len(begun) < REMOTE_REQUESTS_MAX:
            time.sleep(0.001)
        monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shut_down)
        remote.close()
        remote.close()
    assert len(begun) == REMOTE_REQUESTS_MAX < len(refs)
    assert not [*remote.path.glob("objects/*/*"), *remote.path.glob("tmp/*"), *remote.path.glob("locks/fetch-*")]
    with pytest.raises(InvalidInput, match="was closed"):
        remote.repo.objects.verify(refs[-1])


def test_only_mirrors_make_room(
    pinned: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Checkpoints
) -> None:
    """A store that lies in the cache's folder is none of its business."""
    with layerstore.init(tmp_path / "cache" / "mirrors" / "mine") as mine:
        saved.into(mine, 2)
        monkeypatch.setenv("LAYERSTORE_CACHE_SIZE", "10kB")
        with layerstore.open(url) as remote:
            remote.compose("r@6").write(tmp_path / "out")
        assert mine.verify(read_data=True).ok


def test_a_fetch_that_failed_is_tried_again(
    pinned: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same open store reads on once the network is back."""
    with layerstore.open(url) as remote:
        with monkeypatch.context() as away:
            away.setattr("layerstore.remote.bucket.REMOTE_TRIES", 1)

            def cut(*_: object, **__: object) -> Iterator[bytes]:
                raise ConnectionError("no route to host")

            away.setattr(Bucket, "_stream", cut)
            with pytest.raises(StorageIO, match="no route"):
                remote.compose("r@6").write(tmp_path / "first")
        remote.compose("r@6").write(tmp_path / "second")


def test_the_command_line_bounds_the_cache_too(pinned: Store, tmp_path: Path) -> None:
    """``--cache`` goes before the environment; a size that is none is refused."""
    pinned.push(f"file://{tmp_path}/bucket")
    command = [sys.executable, "-m", "layerstore.cli", "--store", f"file://{tmp_path}/bucket", "--cache", "much"]
    done = subprocess.run([*command, "show", "r@2"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: 'much' is not a size")


def test_two_processes_fetch_each_object_once(
    pinned: Store, url: str, tmp_path: Path, read: list[tuple[str, int]]
) -> None:
    """Ranks of one host share the mirror: who comes second waits for the first."""
    with ThreadPoolExecutor() as pool:

        def compose(number: int) -> None:
            with layerstore.open(url) as remote:  # of its own, as a process has it
                remote.compose("r@6").write(tmp_path / f"out{number}")

        list(pool.map(compose, range(4)))
    names = [name for name, _ in read]
    assert len(names) == len(set(names))
    assert not list((tmp_path / "cache").rglob("locks/fetch-*"))


def test_a_flipped_bit_there_is_found(pinned: Store, bucket: Bucket, tmp_path: Path) -> None:
    """By name, before a byte of it is handed out; healing puts it back."""
    damage(bucket, pinned)
    with layerstore.open(bucket.url) as remote, pytest.raises(IntegrityError, match="is damaged"):
        remote.compose("r@6").write(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    [found] = layerstore.open(bucket.url).verify(read_data=True).damaged
    assert found.kind == "object"
    assert found.needed_by == ("r@6",)
    assert layerstore.open(bucket.url).verify().ok

    planned = pinned.repair(remote="origin", read_data=True, dry_run=True)
    assert not layerstore.open(bucket.url).verify(read_data=True).ok
    assert pinned.repair(remote="origin", read_data=True) == planned

    assert layerstore.open(bucket.url).verify(read_data=True).ok


def damage(bucket: Bucket, store: Store) -> str:
    """Flip a bit of a tensor of the last step; return its object's name in *bucket*."""
    record = store.repo.catalog.commit(store.repo.records.names("r")[-1]).record
    name = f"objects/{(found := store.repo.version_of(record.layers[1]).objects[0].id)[:2]}/{found}"
    data = bytearray(bucket.read(name, size_bytes_max=10**9) or b"")
    data[-1] ^= 1
    bucket.write(name, lambda: [bytes(data)])
    return name


def test_what_is_damaged_here_comes_from_a_remote(pinned: Store) -> None:
    """By its name, as by its URL."""
    name = next(pinned.repo.objects.ids())
    path = pinned.repo.layout.object(name)
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(InvalidInput, match="neither a store nor a remote"):
        pinned.repair(read_data=True, sources=["orign"])

    [fetched] = pinned.repair(read_data=True, sources=["origin"]).fetched

    assert fetched.source == pinned.remotes.url("origin")
    assert path.read_bytes() == sound


@pytest.mark.parametrize("folder", ["objects", "commits", "pins"])
def test_what_is_lost_there_is_put_back(pinned: Store, bucket: Bucket, folder: str) -> None:
    """An object, a blob with all that it names, a pin; a record that is gone is simply pushed."""
    before = {each.name: each.size_bytes for each in bucket.listed(folder)}
    bucket.remove(list(before))
    if folder == "objects":
        assert not layerstore.open(bucket.url).verify().ok

    pinned.repair(remote="origin")
    pinned.push()

    assert {each.name: each.size_bytes for each in bucket.listed(folder)} == before
    assert layerstore.open(bucket.url).verify(read_data=True).ok


def test_what_changes_there_shows(pinned: Store, saved: Checkpoints, url: str) -> None:
    """A new commit, and one that is gone."""
    with layerstore.open(url) as remote:
        assert [entry.step for entry in remote.log()] == [6, 4, 2]
    saved.into(pinned, 8)
    pinned.push()
    Bucket(url).remove([each.name for each in Bucket(url).listed("commits") if "/2." in each.name])
    with layerstore.open(url) as remote:
        assert [entry.step for entry in remote.log()] == [8, 6, 4]


@pytest.mark.parametrize("write", ["remotes", "reindex"])
def test_a_remote_takes_saves_and_nothing_else(pinned: Store, url: str, write: str) -> None:
    """Every verb that changes other files says so, and how to."""
    verbs: dict[str, Callable[[Store], object]] = {
        "remotes": lambda store: store.remotes.add("far", "s3://bucket/prefix"),
        "reindex": lambda store: store.reindex(),
    }
    with layerstore.open(url) as remote, pytest.raises(Unsupported, match="only saves, pins"):
        verbs[write](remote)


def test_no_store_there(url: str, tmp_path: Path) -> None:
    """One line, and nothing is made."""
    with pytest.raises(NoStore, match=r"there is no (store|folder)"):
        layerstore.open(url)
    with pytest.raises(NoStore, match=r"there is no (store|folder)"):
        layerstore.clone(url, tmp_path / "clone")
    assert not (tmp_path / "clone").exists()


# -- trouble on the way ------------------------------------------------------------------------------------------------


def test_what_fails_for_a_moment_is_repeated_and_told(
    pinned: Store, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A download goes on where it was cut."""
    monkeypatch.setattr("layerstore.remote.bucket.REMOTE_PAUSE_SECONDS", 0.001)
    stream = Bucket._stream
    cuts: list[str] = []

    def cut(self: Bucket, name: str, start: int, end: int, *, is_whole: bool) -> Iterator[bytes]:
        for piece in stream(self, name, start, end, is_whole=is_whole):
            if len(cuts) < 10:
                cuts.append(name)
                yield bytes(piece)[:100]
                raise ConnectionError("the connection was cut")
            yield piece

    monkeypatch.setattr(Bucket, "_stream", cut)
    with layerstore.open(url) as remote, pytest.warns(RemoteNotice, match="trying again"):
        remote.compose("r@6").write(tmp_path / "out")
    assert len(cuts) == 10


def test_what_fails_for_long_is_given_up(pinned: Store, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a bounded number of tries, in one line."""
    monkeypatch.setattr("layerstore.remote.bucket.REMOTE_PAUSE_SECONDS", 0.001)

    def never(self: Bucket, name: str, start: int, end: int, *, is_whole: bool) -> Iterator[bytes]:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(Bucket, "_stream", never)
    with layerstore.open(url) as remote, pytest.warns(RemoteNotice), pytest.raises(StorageIO, match="no route") as told:
        remote.show("r@6")
    assert told.value.hint is not None


@pytest.mark.fault(114)
def test_answers_that_end_early_are_no_damage(pinned: Store, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is asked for again; if that does not help the network is blamed, and no object."""
    monkeypatch.setattr("layerstore.remote.bucket.REMOTE_PAUSE_SECONDS", 0.001)
    stream, chance = Bucket._stream, random.Random(1)

    def cut(self: Bucket, name: str, start: int, end: int, *, is_whole: bool) -> Iterator[bytes]:
        data = b"".join(map(bytes, stream(self, name, start, end, is_whole=is_whole)))
        yield data[: chance.randrange(1, len(data) + 1)]

    def cut_at_once(self: Bucket, name: str, start: int, end: int, *, is_whole: bool) -> Iterator[bytes]:
        yield from ()

    warnings.simplefilter("ignore", RemoteNotice)
    with layerstore.open(url) as remote:
        monkeypatch.setattr(Bucket, "_stream", cut)
        assert remote.verify(read_data=True).ok
        monkeypatch.setattr(Bucket, "_stream", cut_at_once)
        with pytest.raises(StorageIO, match="ends early"):
            remote.verify(read_data=True)


@pytest.mark.fault(114)
def test_what_no_server_tells_is_no_damage(pinned: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial clone is not verified without its bucket, but nothing is reported as lost."""
    monkeypatch.setattr("layerstore.remote.bucket.REMOTE_TRIES", 1)

    def away(*_: object, **__: object) -> object:
        raise ConnectionError("no route to host")

    pinned.push(f"file://{tmp_path}/bucket")
    with layerstore.clone(f"file://{tmp_path}/bucket", tmp_path / "clone", records=True) as clone:
        monkeypatch.setattr("layerstore.remote.bucket._interruptible", away)
        with pytest.raises(StorageIO, match="no route"):
            clone.verify()
