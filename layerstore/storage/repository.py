"""Make and open stores; the repository, through which every command works on an open store."""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from layerstore.disk import Files, HeldLock, OpenFile, lock, network_filesystem, open_lock_file
from layerstore.errors import (
    AlreadyExists,
    IntegrityError,
    InvalidInput,
    LayerstoreError,
    Locked,
    StorageIO,
    Unsupported,
)
from layerstore.format import StoreIdentity, decode_state, decode_version
from layerstore.hashing import digest
from layerstore.layers import typed
from layerstore.layout import MARK_PREFIX, Layout, layout_at
from layerstore.limits import OWN_JSON_BYTES_MAX
from layerstore.model import BlobRef, LayerEntry, LayerVersion, OwnVersion
from layerstore.shares import ALONE, Shares
from layerstore.states import ObjectContent, RankState
from layerstore.storage.catalog import Catalog
from layerstore.storage.commits import RecordStore, hinted, lost_identity, read_identity, sign_of_a_store
from layerstore.storage.decoded import CodedObject, coded_objects
from layerstore.storage.object_writer import ObjectWriter
from layerstore.storage.objects import ObjectStore, Stretch
from layerstore.storage.parts import PartStore
from layerstore.storage.trash import Aside, Trash

NO_INDEX_VARIABLE = "LAYERSTORE_NO_INDEX"
INDEX_DIR_VARIABLE = "LAYERSTORE_MANIFEST_DIR"
_PLACE_DIGITS = 8  # enough to distinguish the copies of one store on a host


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """The storage of one store."""

    identity: StoreIdentity
    layout: Layout
    files: Files
    objects: ObjectStore
    records: RecordStore
    parts: PartStore
    aside: Aside
    trash: Trash
    catalog: Catalog
    remote: str | None = None
    """The URL of the bucket that this repository mirrors; only saves, pins, drops and collections change the bucket."""
    make_writer: Callable[..., ObjectWriter] = ObjectWriter
    """Makes the writer that `writer` returns."""
    report_retries: Callable[[Callable[[str], None] | None], None] = lambda _: None
    """Sets the function to call for each retried request to the bucket; None makes each retry a warning."""
    shares: Shares = ALONE
    """The processes that share the work in this repository."""
    coded: dict[BlobRef, CodedObject] = field(default_factory=dict)
    """The coded objects of the versions that `version_of` has read; `open_object` decodes them."""
    own_versions: Mapping[BlobRef, OwnVersion] = field(default_factory=dict)
    """Versions that another rank has read for this one, cut down to what this rank needs."""
    closed: Event = field(default_factory=Event)
    """Set once the repository is closed; copies of the repository share it."""

    @property
    def name(self) -> str:
        """The name in messages: the store's folder, or the URL of the remote."""
        return self.remote or str(self.layout.root)

    def close(self) -> None:
        """Release everything that is held open, and stop fetching; calling this twice is harmless."""
        self.closed.set()
        self.objects.close()
        self.catalog.close()

    def check_open(self) -> None:
        """Raise InvalidInput if the repository was closed: using it would silently reopen what `close` has closed."""
        if self.closed.is_set():
            raise InvalidInput(
                f"the store {self.name} is closed", hint=f"open it again: layerstore.open({self.name!r})"
            )

    def writer(self, *, past_cache: bool = False, reads_reused: bool = False) -> ObjectWriter:
        """Return a writer of new objects; for *past_cache* and *reads_reused*, see `ObjectWriter`."""
        return self.make_writer(self.layout, self.files, self.objects, past_cache=past_cache, reads_reused=reads_reused)

    def version(self, ref: BlobRef) -> LayerVersion:
        """Read and check a layer version, but not its objects."""
        version = self.own_versions.get(ref) or decode_version(self.objects.read(ref), ref=ref)
        self.objects.know(ref, version.named)
        return version

    def open_object(self, ref: BlobRef, stretches: Iterable[Stretch] | None = None) -> OpenFile:
        """Open an object of a version for reading *stretches* of it, or all of it; a coded object is decoded."""
        coded = self.coded.get(ref)
        return self.objects.open(ref, stretches) if coded is None else coded.open(self.objects, stretches)

    def read_with(self, refs: Iterable[BlobRef]) -> Iterator[BlobRef]:
        """Yield each of *refs*, followed by the object needed to decode it, if any."""
        for ref in refs:
            yield ref
            coded = self.coded.get(ref)
            if coded is not None and coded.reference is not None:
                yield coded.reference.ref

    def verify_object(self, ref: BlobRef) -> None:
        """Make sure that *ref*, which is about to be read, and its reference, if any, are sound."""
        for needed in self.read_with([ref]):
            self.objects.verify(needed)

    def verify_stretches(self, stretches: Mapping[BlobRef, Iterable[Stretch]], verified: set[BlobRef]) -> None:
        """Verify *stretches* of the objects not in *verified*; add to it the objects that were verified as a whole."""
        by_object: dict[BlobRef, list[Stretch]] = {}
        for ref, stretches_of_ref in stretches.items():
            coded = self.coded.get(ref)
            for needed, parts in (
                {ref: stretches_of_ref} if coded is None else coded.stretches(stretches_of_ref)
            ).items():
                by_object.setdefault(needed, []).extend(parts)
        verified |= self.objects.verify_all({ref: parts for ref, parts in by_object.items() if ref not in verified})

    def version_of(self, entry: LayerEntry) -> LayerVersion:
        """Read the version of *entry*, and check that it belongs to the entry's layer; makes its objects readable."""
        version = self.version(entry.version)
        if version.layer != entry.layer:
            raise IntegrityError(
                f"version {entry.version.id} is of layer {version.layer!r}, a commit has it as {entry.layer!r}"
            )
        if not version.is_exact:
            self.coded.update(coded_objects(version))
        return version

    def whole_version_of(self, entry: LayerEntry) -> LayerVersion | None:
        """Read the version of *entry*; None if the store has lost that version or one of its objects."""
        try:
            version = self.version_of(entry)
            return version if all(self.objects.find(stored.ref) for stored in version.named) else None
        except IntegrityError:
            return None

    def state(self, ref: BlobRef) -> RankState:
        """Read and check a rank's state."""
        return decode_state(self.objects.read(ref), ref=ref)

    def content_of(self, content: bytes | ObjectContent) -> bytes:
        """Return the verified content of a file that is not a tree."""
        if isinstance(content, bytes):
            return content
        self.objects.verify(content.object)
        with self.objects.open(content.object, [(content.begin, content.object.size_bytes)]) as file:
            return file.read_at(content.begin, content.size_bytes)

    def lock_run(self, run: str) -> AbstractContextManager[HeldLock]:
        """Hold the courtesy lock of *run*."""
        return lock(self.layout.locks / f"run-{run}.lock", what=f"run {run!r}")

    def lock_attempt(self, run: str, attempt: int, *, at_once: bool = False) -> AbstractContextManager[HeldLock]:
        """Hold the lock of *attempt* of *run*, so that no other job saves that attempt."""
        return lock(
            self.layout.attempt_lock(run, attempt),
            what=f"attempt {attempt} of run {run!r}",
            # Wait a moment: gc holds this lock briefly when it checks which attempts are being saved.
            deadline_seconds=0 if at_once else 1,
        )

    def attempts_being_saved(self, run: str, attempts: Iterable[int]) -> set[int]:
        """Return those of *attempts* that a job is saving, as far as locks can tell."""
        saving = set()
        for attempt in attempts:
            # Without a lock file, no job has ever saved this attempt; taking the lock would make the file.
            if not self.files.exists(self.layout.attempt_lock(run, attempt)):
                continue
            try:
                with self.lock_attempt(run, attempt, at_once=True):
                    pass
            except (Locked, StorageIO):
                saving.add(attempt)  # StorageIO: unknown, so assume that a job is saving it
        return saving

    def lock_gc(self) -> AbstractContextManager[HeldLock]:
        """Hold the lock that prevents two concurrent collections."""
        return lock(self.layout.gc_lock, what="the collection")

    def lock_index(self) -> AbstractContextManager[HeldLock]:
        """Hold the courtesy lock of the index."""
        return lock(self.layout.locks / "index.lock", what="the index")

    def rewrite(self, path: Path, change: Callable[[], bytes | None]) -> None:
        """
        Replace the file *path* in the store's root by what *change* returns; if that is None, leave the file as it is.

        *change* is called under the file's lock and reads the file itself, so no process overwrites another's change.

        Raises:
            Locked: Another process did not finish in time.
        """
        with lock(self.layout.locks / f"{path.name}.lock", what=path.name):
            data = change()
            if data is None:
                return
            with self.files.temporary(self.layout.tmp, data) as source:
                self.files.rename(source, path)
            self.files.sync_directory(path.parent)

    def prepare_saving(self) -> None:
        """
        Make sure that commits and pins can be added, and commits dropped and restored.

        Raises as `prepare_writing` does, but allows a remote.
        """
        if self.remote is None:
            self.prepare_writing()
        else:
            self.records.check_store()

    def prepare_writing(self) -> None:
        """
        Make sure that the store can be written, and make the folders that a copy may lack because they were empty.

        Raises:
            IntegrityError: A folder has become a link to elsewhere since the store was opened.
            Unsupported: The store uses something that this layerstore might destroy unknowingly, was migrated since it
                was opened, or is in a bucket.
        """
        if self.remote is not None:
            raise Unsupported(
                f"{self.remote} is in a bucket: only saves, pins, drop, undrop and gc can change it",
                hint=f"layerstore clone {typed(self.remote)} PATH makes a store on a disk, and pushes there",
            )
        self.records.check_store()
        _check_folders(self.layout, self.files)
        # Never commits/: an empty folder would wrongly mean that there are no commits.
        for folder in self.layout.folders:
            if folder != self.layout.commits and not self.files.exists(folder):
                self.files.make_directory(folder)


def make_store(path: Path, files: Files, *, identity: StoreIdentity | None = None) -> StoreIdentity:
    """
    Make the folder *path* a store; with *identity*, a clone of that store.

    ``store.json`` comes last: until it exists there is no store, and ``init`` can be repeated.

    Raises:
        AlreadyExists: *path* is a store, a file, or a folder that is not empty.
        IntegrityError: *path* was a store, but its ``store.json`` is lost.
        InvalidInput: *path* is inside another store.
    """
    layout = check_free(path, files)
    files.make_directories(layout.root.parent)
    for folder in (layout.root, *layout.folders):
        files.make_directory(folder)
    # Make the lock file now, because gc could not make it on a full disk.
    os.close(open_lock_file(layout.gc_lock))
    identity = identity or StoreIdentity.new(created=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    with files.temporary(layout.tmp, identity.encode()) as source:
        if not files.link_exclusive(source, layout.identity):
            raise AlreadyExists(f"{path} was made a store by somebody else just now", hint="use it")
    files.sync_directory(layout.root)
    return identity


def check_free(path: Path, files: Files) -> Layout:
    """Return the layout of a store to be made at *path*; raises as `make_store` does if none can be made there."""
    layout = layout_at(path)
    if "~" in layout.root.parts:  # rm -r of such a folder, typed by its name, would remove a home
        hint = "write the path out; in Python, os.path.expanduser does"
        raise InvalidInput(f"{path} has a folder called ~, which only a shell expands", hint=hint)
    if files.exists(layout.identity):
        raise AlreadyExists(
            f"{path} is a store already; nothing was changed", hint=f"layerstore log --store {typed(str(path))}"
        )
    if files.exists(layout.root) and not files.is_directory(layout.root):
        raise AlreadyExists(f"{path} exists and is not a folder", hint="choose another path")
    sign = sign_of_a_store(layout, files)
    if sign is not None:
        raise hinted(lost_identity(path, sign), layout, files)
    for above in layout.root.parents:
        if _is_store(above, files):
            raise InvalidInput(f"{path} is inside the store {above}", hint="choose a path elsewhere")
    expected = {folder.name for folder in (*layout.folders, layout.index)}
    strangers = sorted(set(files.names(layout.root)) - expected)
    # Ranks that look for each other leave marks in this folder for a moment (ADR 48).
    if strangers := [name for name in strangers if not name.startswith(MARK_PREFIX)]:
        raise AlreadyExists(f"{path} is not empty: it holds {strangers[0]!r}", hint="choose an empty or new folder")
    return layout


def _is_store(folder: Path, files: Files) -> bool:
    try:
        data = files.read_if_there(layout_at(folder).identity, size_bytes_max=OWN_JSON_BYTES_MAX)
        return data is not None and bool(StoreIdentity.decode(data, what=str(folder)))
    except LayerstoreError:
        return False  # not a readable store


def open_repository(
    path: Path,
    files: Files,
    *,
    remote: str | None = None,
    objects: ObjectStore | None = None,
    records: RecordStore | None = None,
) -> Repository:
    """
    Open the store at *path*; writes nothing, not even an index until a query needs one.

    A mirror of *remote* reads its *objects* and *records* from the remote.

    Raises:
        NoStore: No store is at *path*.
        Unsupported: The store has a different format, or its migration to this format was interrupted.
        IntegrityError: ``store.json`` is damaged, or a folder is a link to elsewhere.
    """
    layout = layout_at(path)
    try:
        identity = StoreIdentity.decode(read_identity(layout, files, path=path), what=str(layout.identity))
    except IntegrityError as exc:
        raise hinted(exc, layout, files) from exc
    # A migration was interrupted after its switch: store.json is new, but folders may still be old (ADR 24).
    if files.exists(layout.migrated(identity.format)):
        raise Unsupported(
            f"a migration of {layout.root} was interrupted; nothing was changed", hint="layerstore migrate finishes it"
        )
    _check_folders(layout, files)
    records = records or RecordStore(layout, files, store_id=identity.store_id)
    catalog = Catalog(
        records,
        directory=index_directory(layout, store_id=identity.store_id),
        store_id=identity.store_id,
        is_mirror=remote is not None,
    )
    if os.environ.get(NO_INDEX_VARIABLE, "0") not in {"", "0"}:
        catalog.index_problem = f"{NO_INDEX_VARIABLE} is set"
    return Repository(
        identity=identity,
        layout=layout,
        files=files,
        objects=objects or ObjectStore(layout, files),
        records=records,
        parts=PartStore(layout, files, store_id=identity.store_id),
        aside=Aside(layout, files),
        trash=Trash(layout, files, records),
        catalog=catalog,
        remote=remote,
    )


def _check_folders(layout: Layout, files: Files) -> None:
    device = files.device(layout.root)
    for folder in layout.folders:
        if not files.exists(folder):
            continue  # the first writer remakes it; a missing commits/ is reported when listed
        if not files.is_directory(folder):
            raise IntegrityError(
                f"{folder} is not a folder of the store but a link or file; nothing was read or changed",
                hint="replace it with the folder itself",
            )
        if files.device(folder) != device:
            raise InvalidInput(
                f"{folder} is on another filesystem than {layout.root}; they must be on the same filesystem",
                hint="unmount it: new files are linked from tmp/ into their places",
            )


# -- where the index is -----------------------------------------------------------------------------------------------


def index_directory(layout: Layout, *, store_id: str) -> Path:
    """
    Return the folder for the index of the store *store_id*.

    It is in LAYERSTORE_MANIFEST_DIR if that is set; otherwise inside the store, or in the user's cache if the store is
    on a network filesystem. Outside the store, the folder is named after both the store's id and its path, because a
    copy of a store has the same id, and two stores must never share an index.

    Raises:
        InvalidInput: LAYERSTORE_MANIFEST_DIR itself is on a network filesystem.
    """
    chosen = os.environ.get(INDEX_DIR_VARIABLE)
    if chosen:
        kind = network_filesystem(Path(chosen))
        if kind is not None:
            raise InvalidInput(
                f"{INDEX_DIR_VARIABLE} is {chosen}, which is on {kind}: an LMDB index must be on a local disk",
                hint="set it to a folder on a disk of this node, such as one in /tmp",
            )
        return Path(chosen).absolute() / _name(layout, store_id)
    if network_filesystem(layout.root) is not None:
        return _local_folder() / _name(layout, store_id)
    return layout.index


def _name(layout: Layout, store_id: str) -> str:
    place = digest(os.fsencode(os.path.realpath(layout.root)))
    return f"{store_id}-{place.hex()[:_PLACE_DIGITS]}"


def _local_folder() -> Path:
    """Return a folder on a local disk: the user's cache, or the temporary folder if the cache is on the network too."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "layerstore" / "manifests"
    temporary = Path(tempfile.gettempdir()) / f"layerstore-{os.getuid()}"
    for folder in (cache, temporary):
        if network_filesystem(folder) is None:
            return folder
    raise InvalidInput(
        "the store, the home folder and the temporary folder are all on network filesystems: no place for the index",
        hint=f"set {INDEX_DIR_VARIABLE} to a folder on a disk of this node",
    )
