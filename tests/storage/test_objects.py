"""Promises of the object files: content under its name, whole or not at all, reused only after a look."""

import errno
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from layerstore.disk import Files
from layerstore.errors import IntegrityError, InvalidInput, StorageIO
from layerstore.format import ref_of
from layerstore.limits import SYNCING_MAX
from layerstore.model import BlobRef, ObjectId
from layerstore.storage import Hashing, ObjectStore, ObjectWriter, Repository
from tests.faults.harness import Call, Refuser, descriptors, flip
from tests.unit import samples

DATA = b"layer" * 1000
REF = ref_of(DATA)


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    """Return the repository of a new store."""
    return samples.repo(tmp_path / "store")


def writer(repo: Repository) -> ObjectWriter:
    """Return a writer."""
    return ObjectWriter(repo.layout, repo.files, repo.objects)


def publish(repo: Repository, data: bytes = DATA) -> BlobRef:
    """Put *data* into the store."""
    ref = ref_of(data)
    with writer(repo) as objects:
        objects.put(data, ref)
        objects.publish()
    return ref


def leftovers(repo: Repository) -> list[str]:
    """Return what lies in ``tmp/``."""
    return repo.files.names(repo.layout.tmp)


def test_what_was_staged_is_not_visible(repo: Repository) -> None:
    """Before publication nothing is found, and a writer that gives up leaves nothing behind."""
    with writer(repo) as objects:
        objects.put(DATA, REF)

        assert repo.objects.find(REF) is None
        assert len(leftovers(repo)) == 1
    assert leftovers(repo) == []
    assert list(repo.objects.ids()) == []


def test_one_content_from_many_threads_is_staged_once(repo: Repository) -> None:
    """Equal layers that arrive at once are one object."""
    with writer(repo) as objects:
        threads = [threading.Thread(target=objects.stage, args=(REF, [DATA])) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert (objects.count_new, objects.bytes_new, len(leftovers(repo))) == (1, len(DATA), 1)
        objects.publish()
    repo.objects.verify(REF)


@pytest.mark.parametrize("chunks", [[DATA, b"more"], [DATA[:-1]]])
def test_bytes_that_changed_since_they_were_hashed_are_refused(repo: Repository, chunks: list[bytes]) -> None:
    """A source that changes between the two readings is noticed, and leaves nothing."""
    with writer(repo) as objects, pytest.raises(IntegrityError, match="is damaged"):
        objects.stage(REF, chunks)

    assert leftovers(repo) == []


def test_a_reused_object_is_young_again(repo: Repository) -> None:
    """Its time is refreshed, so that a collection running beside sees that it is wanted."""
    publish(repo)
    path = repo.layout.object(REF.id)
    os.utime(path, (0, 0))
    with writer(repo) as objects:
        assert objects.reuse(REF)

    assert path.stat().st_mtime > 0


class CountingStore(ObjectStore):
    """Counts how often an object is read to see whether it is sound."""

    reads = 0

    def is_sound(self, path: Path, ref: BlobRef) -> bool:
        """Count, and look."""
        self.reads += 1
        return super().is_sound(path, ref)


@pytest.mark.fault(35)
@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_is_reused_is_read_once(repo: Repository, is_damaged: bool) -> None:
    """However often it is put; a sound one is counted as reused, a damaged one as new and replaced."""
    path = repo.layout.object(publish(repo).id)
    if is_damaged:
        flip(path)
    store = CountingStore(repo.layout, repo.files)
    with ObjectWriter(repo.layout, repo.files, store, reads_reused=True) as objects:
        for _ in range(3):
            objects.put(DATA, REF)
        objects.publish()

        assert store.reads == 1
        assert (objects.count_new, objects.count_reused) == ((1, 0) if is_damaged else (0, 1))
        assert objects.damaged == ([REF] if is_damaged else [])
    repo.objects.verify(REF)


def test_what_is_put_too_late_is_not_kept(repo: Repository) -> None:
    """By a thread that nobody waits for: a signal came while it was being started."""
    with writer(repo) as objects:
        objects.put(DATA, REF)
    objects.put(DATA, REF)
    assert leftovers(repo) == []


def test_a_writer_that_trusts_the_store_reads_nothing(repo: Repository) -> None:
    """What saves while it trains looks at sizes alone: it has no time to read."""
    publish(repo)
    store = CountingStore(repo.layout, repo.files)
    with ObjectWriter(repo.layout, repo.files, store) as objects:
        objects.put(DATA, REF)

        assert (store.reads, objects.count_reused) == (0, 1)


@pytest.mark.fault(34)
@pytest.mark.parametrize("size_bytes", [0, len(DATA) + 1])
def test_an_object_of_another_size_is_damage(repo: Repository, size_bytes: int) -> None:
    """A truncated or grown object is neither read nor reused; the error tells both sizes."""
    publish(repo)
    os.truncate(repo.layout.object(REF.id), size_bytes)
    attempts: list[Callable[[], object]] = [
        lambda: repo.objects.find(REF),
        lambda: repo.objects.read(REF),
        lambda: repo.objects.verify(REF),
        lambda: writer(repo).reuse(REF),
    ]

    for attempt in attempts:
        with pytest.raises(IntegrityError, match=f"has {size_bytes} bytes, expected {len(DATA)}") as caught:
            attempt()
        assert caught.value.facts["object_id"] == REF.id


def move_aside(repo: Repository) -> Path:
    """Do to the object what a running collection does."""
    repo.aside.make_folder()
    repo.aside.take(REF.id)
    return repo.layout.aside / REF.id


@pytest.mark.fault(12, 36, 50)
def test_an_object_that_was_moved_aside_is_found(repo: Repository) -> None:
    """A reader finds what a collection has moved aside for a moment."""
    publish(repo)
    aside = move_aside(repo)

    assert repo.objects.find(REF) == aside
    assert repo.objects.read(REF) == DATA
    repo.objects.verify(REF)


@pytest.mark.fault(12, 51)
def test_a_writer_links_back_what_was_moved_aside(repo: Repository) -> None:
    """A committer that needs an object puts it back in its place, even where its folder has gone."""
    publish(repo)
    move_aside(repo)
    repo.layout.object(REF.id).parent.rmdir()
    with writer(repo) as objects:
        assert objects.reuse(REF)

    assert repo.layout.object(REF.id).read_bytes() == DATA


def test_the_second_look_finds_what_is_gone(repo: Repository) -> None:
    """After the record is visible, reused objects are looked at again: linked back, or reported as lost."""
    publish(repo)
    with writer(repo) as objects:
        objects.reuse(REF)
        objects.publish()
        assert objects.look_again() == []

        aside = move_aside(repo)
        assert objects.look_again() == []
        assert repo.layout.object(REF.id).exists()

        aside.unlink()
        repo.layout.object(REF.id).unlink()
        assert objects.look_again() == [REF]


def test_a_faster_writer_is_no_conflict(repo: Repository) -> None:
    """When another writer publishes the same content first, both succeed and one file remains."""
    with writer(repo) as slow:
        slow.stage(REF, [DATA])
        publish(repo)
        slow.publish()

    repo.objects.verify(REF)
    assert repo.layout.object(REF.id).stat().st_nlink == 1


def test_damage_under_the_name_is_not_replaced(repo: Repository) -> None:
    """Something of another size under the name is reported, never overwritten."""
    with writer(repo) as objects:
        objects.stage(REF, [DATA])
        path = repo.layout.object(REF.id)
        path.parent.mkdir()
        path.write_bytes(b"other")
        with pytest.raises(IntegrityError, match="has 5 bytes"):
            objects.publish()

    assert path.read_bytes() == b"other"
    assert leftovers(repo) == []


def test_publication_syncs_files_before_folders(tmp_path: Path) -> None:
    """Bytes are durable before they are linked, names before publication returns, also those of reused objects."""
    calls: list[tuple[str, Path]] = []
    repo = samples.repo(tmp_path / "store", hook=lambda operation, path: calls.append((operation, path)))
    reused = publish(repo, b"reused")
    calls.clear()
    with writer(repo) as objects:
        objects.put(DATA, REF)
        objects.reuse(reused)
        objects.publish()

    operations = [operation for operation, _ in calls]
    home, folder = repo.layout.object(REF.id), repo.layout.object(REF.id).parent
    assert operations.index("fsync") < operations.index("link")
    synced = [path for operation, path in calls[operations.index("link") :] if operation == "fsync"]
    assert {folder, repo.layout.object(reused.id).parent} == set(synced)
    assert calls.index(("fsync", repo.layout.objects)) < calls.index(("link", home))


@pytest.mark.parametrize("name", ["", "A" * 32, "../" + "a" * 29, "a" * 31 + "\n"])
def test_what_is_no_id_never_becomes_a_path(repo: Repository, name: str) -> None:
    """Ids that are too short, too long, in capitals or with other signs are refused before the disk is asked."""
    ref = BlobRef(id=ObjectId(name), size_bytes=1)
    with pytest.raises(InvalidInput, match="is not an object id"):
        repo.objects.find(ref)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """If the disk refuses what was staged, the error comes through and tmp/ is empty again."""

    def refuse(operation: str, path: Path) -> None:
        if operation == "fsync" and path.parent.name == "tmp":
            raise StorageIO("planted", errno=28, filename=str(path))

    repo = samples.repo(tmp_path / "store", hook=refuse)
    with pytest.raises(StorageIO) as caught:
        publish(repo)

    assert caught.value.exit_code == 23
    assert leftovers(repo) == []


@pytest.mark.fault(23)
def test_nothing_is_linked_where_a_draft_could_not_be_synced(repo: Repository) -> None:
    """Drafts are synced behind their writer; publishing waits for all of them, and leaves no file open or behind."""
    before, payloads = descriptors(), [bytes([number]) * 100 for number in range(SYNCING_MAX)]
    hook = Refuser(Call("fsync", SYNCING_MAX // 2), errno.EIO)
    objects = ObjectWriter(repo.layout, Files(hook), repo.objects)
    with objects, pytest.raises(StorageIO):  # noqa: PT012  # whichever call finds out
        for data in payloads:
            objects.put(data, ref_of(data))
        objects.publish()

    assert list(repo.objects.ids()) == []
    assert leftovers(repo) == []
    assert descriptors() == before


@pytest.mark.parametrize("starts", [[0, 1000], [3000, 1000], [1000, 1000], [4000], []])
@pytest.mark.parametrize("place", [None, 0, 2999, -1])
def test_what_is_hashed_while_it_is_read(repo: Repository, starts: list[int], place: int | None) -> None:
    """Whatever is read of it, in any order: what was asked for comes, and a flipped bit anywhere is found."""
    ref, buffer = publish(repo), memoryview(bytearray(1000))
    hashing, path = Hashing([ref]), repo.layout.object(ref.id)
    if place is not None:
        path.chmod(0o644)
        flip(path, place)
    with repo.objects.open(ref) as file:
        for start in starts:
            hashing.read_into(ref, file, buffer, start)
            assert buffer == path.read_bytes()[start : start + 1000]
    with nullcontext() if place is None else pytest.raises(IntegrityError, match="is damaged"):
        hashing.check(repo.objects)
