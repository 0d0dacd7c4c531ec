"""
One LMDB environment, guarded against misuse. Only this module uses lmdb.

LMDB maps its file and trusts it. Pages have no checksums: a truncated file, or an offset that points outside its page,
kills the process with a signal instead of raising an error. So we check every page that the trees reach before opening
the file (``lmdb_file.py``).

An environment must not be opened twice in a process, nor used across a fork. LMDB would wait forever for another
writer. On network filesystems, mapped files differ between nodes, so the index is then kept on a disk of this node.
``index.py`` defines what the values mean.
"""

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb

from layerstore.errors import Internal, LayerstoreError, Locked, StorageIO
from layerstore.limits import INDEX_MAP_BYTES, INDEX_MAP_BYTES_MAX, PAGE_BYTES
from layerstore.storage.lmdb_file import METAS, problem_in
from layerstore.storage.locks import lock

_LOCK_FILE_BYTES = 2 * PAGE_BYTES
# Only a commit of another process spoils a try.
_PREFLIGHT_TRIES = 20
# LMDB itself would wait forever for another writer, even a suspended one.
_WRITER_DEADLINE_SECONDS = 10.0


def engine_version() -> str:
    """Return the version of LMDB that makes new indexes."""
    return ".".join(map(str, lmdb.version(lib_version=0)))


class IndexUnusable(LayerstoreError):
    """The index cannot be used as it is; the records still can."""


class IndexTransaction:
    """One transaction on the index, reading or writing."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def get(self, key: bytes) -> bytes | None:
        """Return the value at *key*."""
        data: bytes | None = self._inner.get(key)
        return data

    def put(self, key: bytes, data: bytes) -> None:
        """Set the value at *key*."""
        # Append if possible: LMDB then fills its pages, and an index has half as many.
        if not self._inner.put(key, data, append=True):
            self._inner.put(key, data)

    def delete(self, key: bytes) -> bool:
        """Remove *key*; return whether it was there."""
        found: bool = self._inner.delete(key)
        return found

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the entries whose keys start with *prefix*, in order."""
        with self._inner.cursor() as cursor:
            if not cursor.set_range(prefix):
                return
            for key, data in cursor:
                if not key.startswith(prefix):
                    return
                yield key, data


class Environment:
    """The LMDB environment in a folder; all users in this process share it."""

    def __init__(self, directory: Path) -> None:
        """
        Open the environment in *directory*, making it if there is none.

        Raises:
            IndexUnusable: It is damaged, or cannot be opened here.
        """
        self._directory = directory
        self._shared: _Shared | None = _acquire(directory)
        self.read_only = self._shared.read_only
        """Whether the folder is not writable, so that the index is read as it stands."""

    def close(self) -> None:
        """Release the environment; calling it twice is harmless."""
        shared, self._shared = self._shared, None
        if shared is not None:
            _release(shared)

    @contextlib.contextmanager
    def reading(self) -> Iterator[IndexTransaction]:
        """Yield a consistent read transaction."""
        with self._transaction(write=False) as inner:
            yield IndexTransaction(inner)

    def change(self, work: Callable[[IndexTransaction], None]) -> None:
        """
        Run *work* in a transaction: all of its changes are durable once this returns; none is made if it fails.

        If the map is full, it grows and *work* is called once more.
        """
        try:
            self._change_once(work)
        except lmdb.MapFullError:
            self._grow()
            self._change_once(work)

    def _change_once(self, work: Callable[[IndexTransaction], None]) -> None:
        with self._turn(), self._transaction(write=True) as inner:
            work(IndexTransaction(inner))

    def _grow(self) -> None:
        environment = self.environment()
        size_bytes = environment.info()["map_size"] * 2
        if size_bytes > INDEX_MAP_BYTES_MAX:
            raise IndexUnusable(f"the index has reached its limit of {INDEX_MAP_BYTES_MAX} bytes")
        environment.set_mapsize(size_bytes)

    def environment(self) -> Any:
        """Return LMDB's own object; raises Internal if it is closed, or was opened before a fork."""
        shared = self._shared
        if shared is None:
            raise Internal("the index was used after it was closed")
        if shared.pid != os.getpid():
            raise Internal(
                f"this store was opened in process {shared.pid} and is used in its child {os.getpid()}",
                hint="open the store again after the fork, or start workers with 'spawn'",
            )
        return shared.environment

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait a while for other writers; if one is stuck, the others make a new index."""
        try:
            with lock(self._directory / "writer.lock", what="the index", deadline_seconds=_WRITER_DEADLINE_SECONDS):
                yield
        except (Locked, StorageIO) as exc:
            raise IndexUnusable(f"the index cannot be written: {exc}") from exc

    @contextlib.contextmanager
    def _transaction(self, *, write: bool) -> Iterator[Any]:
        environment = self.environment()
        try:
            try:
                transaction = environment.begin(write=write)
            except lmdb.MapResizedError:  # another process grew the map
                environment.set_mapsize(0)
                transaction = environment.begin(write=write)
            with transaction:
                yield transaction
        except lmdb.MapFullError:
            raise
        except lmdb.Error as exc:
            # After a failed commit the environment is suspect, whatever LMDB says next time.
            raise IndexUnusable(f"the index failed: {exc}") from exc


def index_problem(folder: Path) -> str | None:
    """Try to make, write and read an index in *folder*; return what fails, None if nothing does."""
    try:
        environment = Environment(folder / "index")
        try:
            environment.change(lambda transaction: transaction.put(b"key", b"value"))
            with environment.reading() as transaction:
                return None if transaction.get(b"key") == b"value" else "what was written is not read back"
        finally:
            environment.close()
    except IndexUnusable as exc:
        return str(exc)


# LMDB forbids opening a file twice in one process: the first close would drop its locks.
_open_environments: dict[tuple[int, int], "_Shared"] = {}
_registry_guard = threading.Lock()


@dataclass(slots=True)
class _Shared:
    environment: Any
    read_only: bool
    users: int = 0
    pid: int = field(default_factory=os.getpid)


def _acquire(directory: Path) -> _Shared:
    with _registry_guard:
        try:
            if directory.is_symlink():
                raise IndexUnusable(f"{directory} is a link, which is not followed")
            directory.mkdir(parents=True, exist_ok=True)
            state = directory.stat()
        except OSError as exc:
            raise IndexUnusable(f"the index folder cannot be used: {exc}") from exc
        identity = (state.st_dev, state.st_ino)
        shared = _open_environments.get(identity)
        if shared is None or shared.pid != os.getpid():
            read_only = not os.access(directory, os.W_OK)
            shared = _Shared(_open_environment(directory, read_only=read_only), read_only)
            _open_environments[identity] = shared
        shared.users += 1
        return shared


def _release(shared: _Shared) -> None:
    with _registry_guard:
        shared.users -= 1
        if shared.users or shared.pid != os.getpid():
            return
        shared.environment.close()
        for identity, other in list(_open_environments.items()):
            if other is shared:
                del _open_environments[identity]


def _open_environment(directory: Path, *, read_only: bool) -> Any:
    _preflight(directory)
    try:
        if not read_only:
            _preallocate_lock_file(directory / "lock.mdb")
        environment = lmdb.open(
            str(directory),
            map_size=INDEX_MAP_BYTES,
            subdir=True,
            readonly=read_only,
            create=not read_only,
            metasync=True,
            sync=True,
            map_async=False,
            writemap=False,
            lock=True,
            max_dbs=0,
            mode=0o666,
            lib_version=0,
        )
        if not read_only:
            environment.reader_check()
    except (lmdb.Error, OSError) as exc:
        raise IndexUnusable(f"the index cannot be opened: {exc}") from exc
    return environment


def _preflight(directory: Path) -> None:
    """Refuse a data file that could crash LMDB; a missing or empty one is fine, LMDB makes its own."""
    path = directory / "data.mdb"
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise IndexUnusable("the index is not a regular file")
        for _ in range(_PREFLIGHT_TRIES):
            before = _meta_pages(path)
            problem = problem_in(path)
            if problem is None:
                return
            # Trust the verdict only if no other process has committed meanwhile: pages are reused only after that.
            if _meta_pages(path) == before:
                raise IndexUnusable(f"the index is damaged: {problem}")
    except FileNotFoundError:
        return
    except OSError as exc:
        raise IndexUnusable(f"the index cannot be read: {exc}") from exc


def _meta_pages(path: Path) -> bytes:
    """Return LMDB's first two pages; every commit changes one of them."""
    with path.open("rb") as file:
        return file.read(METAS * PAGE_BYTES)


def _preallocate_lock_file(path: Path) -> None:
    """Allocate the lock file's blocks: on a full disk, LMDB would be killed by a signal instead of getting an error."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        if os.fstat(fd).st_size < _LOCK_FILE_BYTES:
            os.posix_fallocate(fd, 0, _LOCK_FILE_BYTES)
    finally:
        os.close(fd)
