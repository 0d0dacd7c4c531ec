"""
One LMDB environment, guarded against misuse. Only this module uses lmdb.

LMDB maps its file and trusts it. Pages have no checksums: a truncated file, or an offset that points outside its page,
kills the process with a signal instead of raising an error. So we check every page that the trees reach before opening
the file. ``lmdb.verify`` checks the same and more, but takes ten times as long; tests compare the two.

An environment must not be opened twice in a process, nor used across a fork. LMDB would wait forever for another
writer. On network filesystems, mapped files differ between nodes, so the index is then kept on a disk of this node.
``manifest.py`` defines what the values mean.
"""

import contextlib
import mmap
import os
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from layerstore.errors import Internal, LayerstoreError, Locked, StorageIO
from layerstore.limits import MANIFEST_MAP_BYTES, MANIFEST_MAP_BYTES_MAX, PAGE_BYTES
from layerstore.storage.locks import lock

_LOCK_FILE_BYTES = 2 * PAGE_BYTES
# Only a commit of another process spoils a try.
_PREFLIGHT_TRIES = 20
# LMDB itself would wait forever for another writer, even a suspended one.
_WRITER_DEADLINE_SECONDS = 10.0


def engine_version() -> str:
    """Return the version of LMDB that makes new indexes."""
    return ".".join(map(str, lmdb.version(lib_version=0)))


class ManifestUnusable(LayerstoreError):
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
            ManifestUnusable: It is damaged, or cannot be opened here.
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
        if size_bytes > MANIFEST_MAP_BYTES_MAX:
            raise ManifestUnusable(f"the index has reached its limit of {MANIFEST_MAP_BYTES_MAX} bytes")
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
            raise ManifestUnusable(f"the index cannot be written: {exc}") from exc

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
            raise ManifestUnusable(f"the index failed: {exc}") from exc


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
    except ManifestUnusable as exc:
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
                raise ManifestUnusable(f"{directory} is a link, which is not followed")
            directory.mkdir(parents=True, exist_ok=True)
            state = directory.stat()
        except OSError as exc:
            raise ManifestUnusable(f"the index folder cannot be used: {exc}") from exc
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
            map_size=MANIFEST_MAP_BYTES,
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
        raise ManifestUnusable(f"the index cannot be opened: {exc}") from exc
    return environment


def _preflight(directory: Path) -> None:
    """Refuse a data file that could crash LMDB; a missing or empty one is fine, LMDB makes its own."""
    path = directory / "data.mdb"
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ManifestUnusable("the index is not a regular file")
        for _ in range(_PREFLIGHT_TRIES):
            before = _meta_pages(path)
            problem = problem_in(path)
            if problem is None:
                return
            # Trust the verdict only if no other process has committed meanwhile: pages are reused only after that.
            if _meta_pages(path) == before:
                raise ManifestUnusable(f"the index is damaged: {problem}")
    except FileNotFoundError:
        return
    except OSError as exc:
        raise ManifestUnusable(f"the index cannot be read: {exc}") from exc


def _meta_pages(path: Path) -> bytes:
    """Return LMDB's first two pages; every commit changes one of them."""
    with path.open("rb") as file:
        return file.read(_METAS * PAGE_BYTES)


def _preallocate_lock_file(path: Path) -> None:
    """Allocate the lock file's blocks: on a full disk, LMDB would be killed by a signal instead of getting an error."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        if os.fstat(fd).st_size < _LOCK_FILE_BYTES:
            os.posix_fallocate(fd, 0, _LOCK_FILE_BYTES)
    finally:
        os.close(fd)


# -- the structure of its file ---------------------------------------------------------------------------------------

_METAS = 2
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_NO_ROOT = 2**64 - 1
_DEPTH_MAX = 32
_NODE_IS_LARGE = 1
# Flags of LMDB's table of free pages, whose keys are integers, and of our table: no duplicate keys, no named tables.
_FREE_FLAGS, _MAIN_FLAGS = 8, 0

_HEADER = struct.Struct("=QHHHH")  # number, padding, flags, end of the offsets, start of the nodes
_NODE = struct.Struct("=HHHH")  # size or page in two or three parts, flags, size of the key
_NUMBER = struct.Struct("=Q")
_TREE = "IHHQQQQQ"
_META_PAGE = struct.Struct(f"={_HEADER.format[1:]}IIQQ{_TREE}{_TREE}QQ")
_HALVES = PAGE_BYTES // 2
_NODE_BEGINS_MAX = PAGE_BYTES - _NODE.size


class Tree(NamedTuple):
    """An entry of LMDB's meta page about one of its two tables."""

    padding: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int


class _Unsound(Exception):
    """Something is not the way LMDB leaves it."""


def problem_in(path: Path) -> str | None:
    """Return what is wrong with the file *path*, None if LMDB can open it; an empty file is fine."""
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if not size_bytes:
            return None
        pages = size_bytes // PAGE_BYTES
        if pages < _METAS:
            return "it was cut short"
        # Map it, as LMDB will: reading a long index would take longer than checking it.
        with (
            mmap.mmap(file.fileno(), pages * PAGE_BYTES, prot=mmap.PROT_READ) as data,
            memoryview(data) as view,
            view.cast("H") as halves,
            view.cast("Q") as numbers,
        ):
            try:
                _Check(data, halves, numbers, pages).run()
            except _Unsound as problem:
                return str(problem)
    return None


class _Check:
    """One check of all pages in use."""

    def __init__(self, data: mmap.mmap, halves: memoryview, numbers: memoryview, pages: int) -> None:
        self._data = data
        self._halves = halves
        # One list per header field, over all pages.
        self._numbers: list[int] = numbers[:: PAGE_BYTES // 8].tolist()
        self._flags: list[int] = halves[5::_HALVES].tolist()
        self._lower: list[int] = halves[6::_HALVES].tolist()
        self._upper: list[int] = halves[7::_HALVES].tolist()
        self._end = pages
        self._is_taken = bytearray(pages)

    def run(self) -> None:
        """Raise _Unsound if anything is wrong."""
        last_page, _, free, main = max(map(self._meta, range(_METAS)), key=lambda meta: meta[1])
        if not _METAS - 1 <= last_page < self._end:
            raise _Unsound("it was cut short")
        self._end = last_page + 1
        lists: list[bytes] = []
        self._walk(free, is_free=True, lists=lists)
        self._walk(main, is_free=False, lists=[])
        for listed in lists:
            self._take(_pages_listed(listed))
        if sum(self._is_taken) != self._end - _METAS:
            raise _Unsound("a page is neither used nor free")

    def _meta(self, page: int) -> tuple[int, int, Tree, Tree]:
        fields = _META_PAGE.unpack_from(self._data, page * PAGE_BYTES)
        free, main = Tree(*fields[9:17]), Tree(*fields[17:25])
        last_page, txn = fields[25:]
        is_sound = (
            (fields[0], fields[2]) == (page, _META)
            and fields[5:7] == (_MAGIC, _VERSION)
            and (free.padding, free.flags) == (PAGE_BYTES, _FREE_FLAGS)
            and (main.padding, main.flags) == (0, _MAIN_FLAGS)
            and (not txn or txn % _METAS == page)
        )
        if not is_sound:
            raise _Unsound("it was cut short or overwritten")
        return last_page, txn, free, main

    def _take(self, pages: Iterable[int]) -> None:
        """Mark *pages* as used or free; raise if one was marked before."""
        for page in pages:
            if not _METAS <= page < self._end or self._is_taken[page]:
                raise _Unsound(f"page {page} is used twice, or is not there")
            self._is_taken[page] = 1

    def _walk(self, tree: Tree, *, is_free: bool, lists: list[bytes]) -> None:
        """Check all pages of *tree*; add the values of the table of free pages to *lists*."""
        level = [] if tree.root == _NO_ROOT else [tree.root]
        if tree.depth > _DEPTH_MAX or bool(tree.depth) != bool(level):
            raise _Unsound("a table's depth is wrong")
        branches = 0
        for _ in range(tree.depth - 1):
            branches += len(level)
            self._take(level)
            level = [child for page in level for child in self._children(page, is_free=is_free)]
        self._take(level)
        entries, overflows, before = 0, 0, b""
        for page in level:
            for at, value_bytes, flags, key in self._nodes(page, _LEAF, is_free=is_free):
                if entries and key <= before:
                    raise _Unsound(f"the keys on page {page} are out of order")
                before = key
                entries += 1
                begin = at + _NODE.size + len(key)
                if flags:
                    begin, taken = self._large(page, begin, value_bytes, flags)
                    overflows += taken
                elif begin + value_bytes > (page + 1) * PAGE_BYTES:
                    raise _Unsound(f"a value on page {page} reaches outside of it")
                if is_free:
                    lists.append(self._data[begin : begin + value_bytes])
        if (branches, len(level), overflows, entries) != tree[3:7]:
            raise _Unsound("a table has other pages or entries than it says")

    def _nodes(self, page: int, kind: int, *, is_free: bool) -> list[tuple[int, int, int, bytes]]:
        """Return each node on *page*, which is of *kind*: its position, size of the value, flags and key."""
        lower, upper, start = self._lower[page], self._upper[page], page * PAGE_BYTES
        if self._numbers[page] != page or self._flags[page] != kind:
            raise _Unsound(f"page {page} is not what it is used as")
        if not _HEADER.size < lower <= upper <= PAGE_BYTES or lower % 2:
            raise _Unsound(f"page {page} has bounds that cannot be")
        found = []
        for place in range((start + _HEADER.size) // 2, (start + lower) // 2):
            offset = self._halves[place]
            if not upper <= offset <= _NODE_BEGINS_MAX:
                raise _Unsound(f"a node of page {page} lies outside of it")
            at = start + offset
            low, high, flags, key_bytes = _NODE.unpack_from(self._data, at)
            if offset + key_bytes > _NODE_BEGINS_MAX:
                raise _Unsound(f"a key on page {page} reaches outside of it")
            key = self._data[at + _NODE.size : at + _NODE.size + key_bytes]
            if is_free and sys.byteorder == "little":
                key = key[::-1]  # an integer in native byte order
            found.append((at, low | high << 16, flags, key))
        return found

    def _children(self, page: int, *, is_free: bool) -> Iterator[int]:
        before = b""
        for place, (_, low, high, key) in enumerate(self._nodes(page, _BRANCH, is_free=is_free)):
            if place > 1 and key <= before:  # the first node has no key
                raise _Unsound(f"the keys on page {page} are out of order")
            before = key
            yield low | high << 32

    def _large(self, page: int, at: int, value_bytes: int, flags: int) -> tuple[int, int]:
        """Return where the large value of the node before *at* starts, and how many pages it fills."""
        if flags != _NODE_IS_LARGE or at + _NUMBER.size > (page + 1) * PAGE_BYTES:
            raise _Unsound(f"a node of page {page} is of a kind that is not used here")
        (first,) = _NUMBER.unpack_from(self._data, at)
        count = (_HEADER.size + value_bytes - 1) // PAGE_BYTES + 1
        self._take(range(first, first + count))
        stated = self._lower[first] | self._upper[first] << 16
        if (self._numbers[first], self._flags[first], stated) != (first, _OVERFLOW, count):
            raise _Unsound(f"page {first} is not what it is used as")
        return first * PAGE_BYTES + _HEADER.size, count


def _pages_listed(data: bytes) -> Iterator[int]:
    """Yield the pages that *data* lists: a count, then page numbers."""
    if not data or len(data) % 8:
        raise _Unsound("a list of free pages is torn")
    count, *pages = (each for (each,) in _NUMBER.iter_unpack(data))
    if count != len(pages) or sorted(pages, reverse=True) != pages:
        raise _Unsound("a list of free pages is torn")
    yield from pages
