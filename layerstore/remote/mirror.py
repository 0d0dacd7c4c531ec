"""
A store opened directly from a bucket: records are fetched on opening, tensor bytes when they are read.

    store = layerstore.open("s3://checkpoints/sft")

The mirror, in the user's cache folder, has the bucket's records and pins, and the objects that were needed so far.
Several processes may share a mirror. Saves go directly to the bucket (`saving.py`), records last.
"""

import contextlib
import errno as errnos
import mmap
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from layerstore.disk import Files, alone
from layerstore.errors import AlreadyExists, IntegrityError, Locked, NoStore, NotFound, StorageIO, Unsupported
from layerstore.format import StoreIdentity, seal_pin
from layerstore.hashing import object_id
from layerstore.layers import is_name, typed
from layerstore.layout import Layout, layout_at
from layerstore.limits import OWN_JSON_BYTES_MAX, RECORD_BYTES_MAX, REMOTE_REQUESTS_MAX
from layerstore.model import BlobRef, Commit, ObjectId, Pin, StoredObject
from layerstore.remote.bucket import OBJECT_FOLDERS, Bucket
from layerstore.remote.cache import FOLDER_VARIABLE, cache_bytes, cache_folder, make_room, trim
from layerstore.remote.fetch import FetchedObjects, Source
from layerstore.remote.folder import Listed
from layerstore.remote.identity import collected_since, identity_of
from layerstore.remote.saving import BucketParts, BucketWriter, Reliance
from layerstore.storage import RecordName, RecordStore, Trash, name_in, open_repository
from layerstore.threads import Threads, run_all

Answer = TypeVar("Answer")


class Remote:
    """A bucket that holds a store, and its mirror; use it in a ``with``."""

    def __init__(self, bucket: Bucket, files: Files) -> None:
        """Open the mirror; raises NoStore if the bucket holds no store."""
        identity = identity_of(bucket)
        if identity is None:
            if bucket.listed("commits"):
                raise IntegrityError(
                    f"{bucket.url} holds commits, but its store.json is missing",
                    hint=f"layerstore repair --remote {typed(bucket.url)}, in a store with all commits, puts it back",
                )
            raise NoStore(
                f"there is no store at {bucket.url}",
                hint=f"layerstore init {typed(bucket.url)} or a push from a store makes one",
                can_be_made=True,
            )
        self.bucket = bucket
        self.url = bucket.url
        cache_bytes()  # raises now if the setting is not a size, before anything is fetched
        path = cache_folder() / object_id(f"{bucket.url} {identity.store_id}".encode())
        layout = layout_at(path)
        _make_mirror(layout, files, identity)
        self.source = Source(bucket.url, layout, bucket=bucket)
        objects = MirroredObjects(layout, files, self.source)
        self._records = MirroredRecords(layout, files, store_id=identity.store_id, bucket=bucket)
        mirror = open_repository(path, files, remote=bucket.url, objects=objects, records=self._records)
        objects.reliance = reliance = Reliance(bucket, mirror, self.refresh)
        self.repo = replace(
            mirror,
            make_writer=partial(BucketWriter, reliance),
            parts=BucketParts(reliance, layout, files, store_id=identity.store_id),
            trash=BucketTrash(reliance, layout, files, self._records),
            report_retries=bucket.report_retries,
        )
        """The mirror; saves go to the bucket."""
        self.listed: frozenset[str] = frozenset()
        """Names of the bucket's records and pins at the last refresh; the mirror has fewer if others have pruned it."""
        self.refresh()

    def __enter__(self) -> "Remote":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.repo.close()

    @property
    def stranger_names(self) -> list[str]:
        """Names in the folders of records and pins, at the last refresh, that are neither records nor pins."""
        return self._records.stranger_names

    def checked(self, ref: BlobRef) -> Iterator[memoryview]:
        """Yield the bytes of *ref*; raises IntegrityError, at the end or before, unless they match the id."""
        return (data for _, data in self.source.checked(ref))

    def refresh(self) -> None:
        """Update the mirror's records and pins from the bucket."""
        self.listed = self._records.refresh()


def _make_mirror(layout: Layout, files: Files, identity: StoreIdentity) -> None:
    """Make the mirror, or make again what a cache cleaner has removed: cleaners remove single files by age."""
    try:
        files.make_directories(layout.root)
        for folder in layout.folders:
            files.make_directory(folder, durable=False)
        data = identity.encode()
        if files.read_if_there(layout.identity, size_bytes_max=OWN_JSON_BYTES_MAX) == data:
            files.touch(layout.identity)
        else:
            with files.temporary(layout.tmp, data) as source:
                files.rename(source, layout.identity)
    except (StorageIO, IntegrityError) as exc:  # IntegrityError: a folder's path belongs to something else
        errno, path = (exc.errno, exc.filename) if isinstance(exc, StorageIO) else (errnos.ENOTDIR, str(layout.root))
        raise StorageIO(
            f"the cache of remotes cannot be written to: {exc}",
            errno=errno,
            filename=path,
            hint=f"set {FOLDER_VARIABLE} to a folder of your own",
        ) from exc


def _write(layout: Layout, files: Files, path: Path, data: bytes, *, modified_ns: int) -> None:
    with files.temporary(layout.tmp, data) as source:
        files.touch(source, time_ns=modified_ns)  # retention uses this time
        files.rename(source, path)


def is_stranger(entry: Listed) -> bool:
    """Whether *entry*, from the folders of records, pins or trash, is neither a record, nor a pin, nor a folder."""
    name = entry.name.removeprefix("trash/")
    return not _is_ours(name) and not _is_folder(name, entry.size_bytes)


def _is_folder(name: str, size_bytes: int) -> bool:
    """Whether *name* is the empty object that consoles and mounts create for a folder."""
    return not size_bytes and (name in {"commits", "pins"} or is_name(name.removeprefix("commits/")))


def _is_ours(name: str) -> bool:
    """Whether *name* is the name of a record or a pin; anything else in the bucket is left alone."""
    folder, *names = name.split("/")
    if folder == "pins":
        return len(names) == 1 and is_name(names[0])
    return len(names) == 2 and is_name(names[0]) and name_in(*names) is not None


class MirroredRecords(RecordStore):
    """The records and pins of a remote; damaged copies are fetched again, so any damage reported is the bucket's."""

    def __init__(self, layout: Layout, files: Files, *, store_id: str, bucket: Bucket) -> None:
        super().__init__(layout, files, store_id=store_id)
        self._bucket = bucket
        self.stranger_names: list[str] = []
        """Names in the bucket's folders of records and pins, at the last refresh, that are neither records nor pins."""

    def refresh(self, *, run: str | None = None, anew: bool = False) -> frozenset[str]:
        """
        Update all records and pins from the bucket, or only the records of *run*; return the names that the bucket has.

        With *anew*, records that the mirror already has are read again, too.
        """
        files, layout = self._files, self._layout
        if run is None:
            folders = [*map(layout.run, files.names_in_folder(layout.commits)), layout.pins]  # glob would follow links
            to_list = [layout.commits, layout.pins]
        else:
            folders = to_list = [layout.run(run)]
        paths = [folder / name for folder in folders for name in files.names_in_folder(folder)]
        here = {layout.name(path): path for path in paths}
        entries = [entry for folder in to_list for entry in self._bucket.listed(layout.name(folder))]
        listed = {entry.name: entry for entry in entries if _is_ours(entry.name)}
        if run is None:
            self.stranger_names = [entry.name for entry in entries if is_stranger(entry)]
        # The mirror shows what the bucket has: what was dropped or collected in the bucket is removed from the mirror.
        for name in here.keys() - listed.keys():
            files.discard(here[name])
        # A pin may refer to something else now; a record never changes.
        is_pin = f"{layout.pins.name}/"
        missing = [entry for name, entry in listed.items() if anew or name not in here or name.startswith(is_pin)]
        gone: list[str] = []

        def fetch(entry: Listed) -> None:
            if not self._fetch(entry):
                gone.append(entry.name)

        with Threads(REMOTE_REQUESTS_MAX, thread_name_prefix="records") as pool:
            run_all(pool, fetch, missing)
        return frozenset(listed).difference(gone)

    def _fetch(self, entry: Listed) -> bool:
        """Fetch a record or pin; return whether the bucket still had it."""
        data = self._bucket.read(entry.name, size_bytes_max=RECORD_BYTES_MAX)
        if data is None:
            return False
        path = self._layout.root / entry.name
        self._files.make_directory(path.parent, durable=False)
        _write(self._layout, self._files, path, data, modified_ns=entry.modified_ns)
        return True

    def strangers(self) -> Iterator[Path]:
        """Yield, as mirror paths, whatever else the bucket's folders of records, pins and trash contain."""
        in_trash = (entry.name for entry in self._bucket.listed("trash/commits") if is_stranger(entry))
        yield from (self._layout.root / name for name in (*self.stranger_names, *in_trash))

    def in_trash(self, run: str) -> bool:
        """Whether commits of *run* are in the bucket's trash."""
        return is_name(run) and bool(self._bucket.listed(f"trash/commits/{run}"))

    def read(self, name: RecordName) -> Commit:
        """Return the commit *name*, checked; raises IntegrityError if it is damaged in the bucket, or gone."""
        return self._read_twice(self._path(name), lambda: super(MirroredRecords, self).read(name))

    def read_pin(self, name: str) -> Pin:
        """Return the pin *name*, checked; raises NotFound if it does not exist, and IntegrityError as `read` does."""
        return self._read_twice(self._layout.pin(name), lambda: super(MirroredRecords, self).read_pin(name))

    def check_store(self) -> None:
        """Make sure that the bucket still holds the store that was opened, and that this layerstore may write to it."""
        actual = identity_of(self._bucket)
        if actual is None or actual.store_id != self._store_id:
            name = "none" if actual is None else f"store {actual.store_id}"
            raise IntegrityError(
                f"{self._bucket.url} held store {self._store_id} when it was opened and holds {name} now",
                hint="open it again",
            )
        if actual.unknown_flags:
            raise Unsupported(
                f"the store uses {', '.join(actual.unknown_flags)}, which this layerstore does not know; "
                "it can be read, not written",
                hint="use a newer layerstore",
            )

    def link(self, commit: Commit) -> tuple[int, ...] | None:
        """Make *commit* visible in the bucket and the mirror; return None if the bucket already had it."""
        self.check_store()
        path = self._path(self.name_of(commit))
        name, data = self._layout.name(path), self.encode(commit)
        # No condition on the write: two writers of one record write the same bytes.
        was_there = self._bucket.size(name) == len(data)
        self._put(path, data)
        return None if was_there else ()

    def _put(self, path: Path, data: bytes) -> None:
        name = self._layout.name(path)
        self._bucket.write(name, lambda: [data])
        # The bucket is written before the mirror, whose copy gets the server's time: a commit's age must not depend on
        # our own clock.
        entry = self._bucket.look(name)
        self._files.make_directory(path.parent, durable=False)
        modified_ns = time.time_ns() if entry is None else entry.modified_ns
        _write(self._layout, self._files, path, data, modified_ns=modified_ns)

    def withdraw(self, commit: Commit, identity: tuple[int, ...]) -> None:
        """Undo `link`: move the record to the trash, since others may rely on the objects that it references."""
        del identity
        path = self._path(self.name_of(commit))
        to_trash(self._bucket, self._layout.name(path))
        self._files.discard(path)

    def link_pin(self, pin: Pin) -> None:
        """Make *pin* visible; raises AlreadyExists if the bucket has a pin of that name."""
        self.check_store()
        path = self._layout.pin(pin.name)
        name = self._layout.name(path)
        # Two writers that make the same pin at the same moment may both find no pin; then the later write wins.
        if self._bucket.size(name) is not None:
            raise AlreadyExists(
                f"somebody else has just made the pin {pin.name!r}; nothing was changed",
                hint=f"layerstore show {typed(pin.name)}",
            )
        self._put(path, seal_pin(pin, name=name, store_id=self._store_id))

    def delete_pin(self, name: str) -> None:
        """
        Delete the pin *name*, readable or not.

        Raises:
            NotFound: The pin does not exist.
        """
        path = self._layout.pin(name)
        if self._bucket.size(self._layout.name(path)) is None:
            raise NotFound(
                f"there is no pin {name!r} in {self._bucket.url}", hint="layerstore pin --list --store URL lists them"
            )
        self._bucket.remove([self._layout.name(path)])
        self._files.discard(path)

    def _read_twice(self, path: Path, read: Callable[[], Answer]) -> Answer:
        try:
            return read()
        except IntegrityError:
            modified_ns = self._files.modified_ns(path)
            data = self._bucket.read(self._layout.name(path), size_bytes_max=RECORD_BYTES_MAX)
            if modified_ns is None or data is None:
                raise  # the record or pin was removed from the mirror or the bucket
            _write(self._layout, self._files, path, data, modified_ns=modified_ns)
        return read()


class MirroredObjects(FetchedObjects):
    """
    The objects of a remote: the bucket's listing decides which exist.

    The local copies are a cache: damaged copies are fetched again, and the least recently used are evicted.
    """

    _is_durable = False
    reliance: Reliance

    def know(self, version: BlobRef, objects: Iterable[StoredObject]) -> None:
        """Remember that *version* references *objects*, and how they can be verified in parts."""
        named = list(objects)
        super().know(version, named)
        self.reliance.know((stored.id for stored in named), version.id)

    def close(self) -> None:
        """Cancel pending downloads; trim the cache to its size."""
        was_closed = self._is_closed
        super().close()
        if self.bytes_fetched and not was_closed:
            trim(self._files)

    def find(self, ref: BlobRef) -> Path | None:
        """Return the path of *ref*, whether or not it is already fetched."""
        return self._layout.object(ref.id)

    def is_there(self, ref: BlobRef) -> bool:
        """Whether the bucket lists *ref*, in whatever size."""
        return ref.id in self.source.listed(ref.id[:2])

    def check_there(self, ref: BlobRef) -> None:
        """Raise IntegrityError unless the bucket lists *ref* in full size."""
        self.source.check_there(ref)

    def check_bytes(self, ref: BlobRef) -> None:
        """Read all of *ref* from the bucket, not the local copy, and compare its hash with the id."""
        self.source.check_bytes(ref)

    def read(self, ref: BlobRef) -> bytes:
        """Return the bytes of the small object *ref*, verified first: a damaged copy is fetched again."""
        self.verify(ref)
        return super().read(ref)

    def map(self, ref: BlobRef, *, verify: bool) -> mmap.mmap:
        """Map the bytes of *ref* as read-only memory, verified as in any store."""
        try:
            return super().map(ref, verify=verify)
        except IntegrityError:  # the local copy is damaged
            self.verify(ref)
            return super().map(ref, verify=verify)

    def _verify_or_fetch(self, ref: BlobRef) -> None:
        home = self._layout.object(ref.id)
        if not self.is_sound(home, ref):
            # One process downloads it while the others wait. Without flock, each downloads a copy: slower, but correct.
            with alone(self._layout.locks / f"fetch-{ref.id}"):
                if not self.is_sound(home, ref):
                    self._download(ref)
        self._files.touch(home)  # the least recently used are evicted first

    def _make_room(self, size_bytes: int) -> None:
        make_room(self._files, size_bytes)

    def on_disk(self, object_id: ObjectId) -> tuple[Hashable, int] | None:
        """Return an object's identity, which is its id, and its size in the bucket; None if the bucket lacks it."""
        size_bytes = self.source.listed(object_id[:2]).get(object_id)
        return None if size_bytes is None else (object_id, size_bytes)

    def ids(self) -> Iterator[ObjectId]:
        """Yield every object in the bucket, by id."""
        with Threads(REMOTE_REQUESTS_MAX, thread_name_prefix="list") as pool:
            yield from chain.from_iterable(pool.map(self.ids_in, [name.rpartition("/")[2] for name in OBJECT_FOLDERS]))

    def ids_in(self, prefix: str) -> list[ObjectId]:
        """Return the objects in the bucket whose ids begin with the two digits *prefix*, by id."""
        return sorted(self.source.listed(prefix))


class BucketTrash(Trash):
    """The trash of a bucket, which keeps dropped, replaced and collected records for a day."""

    def __init__(self, reliance: Reliance, layout: Layout, files: Files, records: RecordStore) -> None:
        super().__init__(layout, files, records)
        self._reliance = reliance
        self._bucket = reliance.bucket

    def take_record(self, name: RecordName) -> bool:
        """Move the record *name* to the trash; return whether it existed."""
        path = self._layout.record(name.run, name.step, name.id)
        is_there = to_trash(self._bucket, self._layout.name(path))
        self._files.discard(path)
        return is_there

    def take_damaged(self, path: Path) -> Path | None:
        """Move the damaged record *path* to the trash; return its new path, None if it was gone."""
        name = self._layout.name(path)
        is_there = to_trash(self._bucket, name, target=f"trash/damaged/{name}")
        self._files.discard(path)
        return self._layout.trash / "damaged" / name if is_there else None

    def listed(self) -> Iterator[RecordName | Path]:
        """Yield the name of every record in the trash; `MirroredRecords.strangers` yields everything else in it."""
        for entry in self._bucket.listed("trash/commits"):
            *_, run, file_name = entry.name.split("/")
            if is_name(run) and (name := name_in(run, file_name)) is not None:
                yield name

    def read_record(self, name: RecordName) -> Commit:
        """Return the commit of the record *name*, checked; raises NotFound if it is no longer in the trash."""
        data = self._bucket.read(self._name_in_trash(name), size_bytes_max=RECORD_BYTES_MAX)
        if data is None:
            raise self._gone(name)
        return self._records.decode(data, name)

    def modified_ns(self, name: RecordName) -> int:
        """Return when the record *name* was moved to the trash, 0 if it is gone."""
        entry = self._bucket.look(self._name_in_trash(name))
        return 0 if entry is None else entry.modified_ns

    def _name_in_trash(self, name: RecordName) -> str:
        return self._layout.name(self._record(name))

    @contextlib.contextmanager
    def restoring(self, commit: Commit) -> Iterator[None]:
        """
        Keep what *commit* needs while the block makes its record visible; then remove the record from the trash.

        The record is first written to the trash again: every collection that begins after that write keeps, for another
        day, the objects that the record needs. A collection that had already begun may have found the record expired.
        """
        name = self._records.name_of(commit)
        data = self._records.encode(commit)
        self._bucket.write(self._name_in_trash(name), lambda: [data])
        renewed_ns = self.modified_ns(name)
        # Look for marks after the write: a collection that began before the write may have found the record expired.
        if collected_since(self._bucket, renewed_ns):
            raise Locked(
                f"a collection of {self._bucket.url} is at work, has just ended, or was killed less than half a day "
                "ago, and may be removing what that commit needs; nothing was changed",
                hint="repeat the command when it has ended, or in a few seconds",
            )
        # The trash now keeps these blobs and their objects for a day, so the block may rely on them.
        self._reliance.note_named(commit.record.blobs)
        yield
        # A collection that has begun since may have listed the records before the block made this record visible. That
        # collection lists the trash later, so the record must stay in the trash as well.
        if not collected_since(self._bucket, renewed_ns):
            self._bucket.remove([self._name_in_trash(name)])


def to_trash(bucket: Bucket, name: str, check: Callable[[], None] = lambda: None, *, target: str | None = None) -> bool:
    """
    Move the record *name* to the trash of *bucket*, or to another *target*; return False if it was gone.

    The record is first copied, so that it always exists at least once, and removed only after *check*, which may raise.
    """
    data = bucket.read(name, size_bytes_max=RECORD_BYTES_MAX)
    if data is None:
        return False  # another process has moved it
    bucket.write(target or f"trash/{name}", lambda: [data])
    check()
    bucket.remove([name])
    return True
