"""
A folder that serves as a bucket: ``file://``. It follows the rules of a store on disk.

The folder's path is resolved once, on opening. Below the folder, reading, writing, listing and removing never follow a
link, but raise an error with the link's path. Writes are durable and atomic.
"""

import errno as errnos
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from layerstore.disk import Files
from layerstore.errors import AlreadyExists, IntegrityError, InvalidInput, NoStore, StorageIO
from layerstore.layout import IDENTITY
from layerstore.limits import IO_CHUNK_BYTES

_UNFINISHED = "gc/unfinished"
"""Where killed writers leave files; a collection of the remote removes them along with the old marks of collections."""

_TOP = ("objects", "commits", "pins", "parts", "trash", "gc")


@dataclass(frozen=True, slots=True)
class Listed:
    """A listing's entry for one name in a bucket."""

    name: str
    size_bytes: int
    modified_ns: int
    """By the server's clock."""


class Folder:
    """The folder at *path*; only `_path` turns names into paths, and `_path` refuses links."""

    part_bytes = IO_CHUNK_BYTES
    """Objects larger than this are written piece by piece."""

    def __init__(self, path: Path, *, url: str, may_make: bool) -> None:
        """
        Open the folder.

        Raises:
            NoStore: The folder does not exist, and *may_make* is not set.
            AlreadyExists: *may_make* is set, but the folder is not empty and holds no store.
            IntegrityError: One of its subfolders is a link.
        """
        self._files = Files()
        self._url = url
        if may_make:
            self._check_free(path)
            self._files.make_directories(path)
        elif not path.is_dir():
            raise NoStore(
                f"there is no folder {path}",
                hint="check its name; layerstore init URL or a push from a store makes one",
                can_be_made=True,
            )
        self._root = path.resolve()
        with self._bucket_errors():
            for name in (*_TOP, "trash/commits"):
                self._check_no_links(name)

    def _check_free(self, path: Path) -> None:
        """Raise AlreadyExists if *path* holds files but no store: nobody could later tell these from a store's."""
        names = set(self._files.names(path))
        if names and names.isdisjoint({*_TOP, IDENTITY}):
            raise AlreadyExists(
                f"{path} is not empty: it holds {min(names)!r}; nothing was sent", hint="name an empty or new folder"
            )

    def get(self, name: str, stretch: tuple[int, int] | None = None) -> tuple[int, Iterator[bytes]]:
        """Return the size of *name*, and its bytes or a *stretch* of them, which is cut at the file's end."""
        with self._bucket_errors():
            path = self._path(name)
            state = self._files.state(path)
        if state is None:
            raise FileNotFoundError(path)
        start, end = stretch or (0, state.st_size)
        return state.st_size, self._pieces(path, start, end)

    def _pieces(self, path: Path, start: int, end: int) -> Iterator[bytes]:
        with self._bucket_errors(), self._files.open(path) as file:
            end = min(end, file.size_bytes)
            for at in range(start, end, IO_CHUNK_BYTES):
                yield file.read_at(at, min(IO_CHUNK_BYTES, end - at))

    def head(self, name: str) -> Listed:
        """Return the size and time of *name*."""
        with self._bucket_errors():
            path = self._path(name)
            state = self._files.state(path)
        if state is None:
            raise FileNotFoundError(path)
        return Listed(name, state.st_size, state.st_mtime_ns)

    def list(self, folder: str) -> Iterator[Listed]:
        """Yield everything below *folder*, except files that were removed while a process had them open."""
        with self._bucket_errors():
            if not self._files.is_directory(self._root):
                raise FileNotFoundError(self._root)
            waiting = [folder]
            while waiting:
                folder = waiting.pop()
                path = self._path(f"{folder}/")
                for name in self._files.names_there(path):
                    state = self._files.look(path / name)
                    if state is None:
                        continue  # removed since it was listed
                    if stat.S_ISDIR(state.st_mode):
                        waiting.append(f"{folder}/{name}")
                    elif stat.S_ISREG(state.st_mode):
                        yield Listed(f"{folder}/{name}", state.st_size, state.st_mtime_ns)
                    else:
                        raise _refused(path / name)

    def check(self) -> None:
        """Raise IntegrityError if there is a link anywhere in the remote's folders."""
        for name in _TOP:
            for _ in self.list(name):
                pass

    def put(self, name: str, body: bytes | bytearray | Iterable[bytes | bytearray]) -> None:
        """Write *body* as *name*."""
        with self._bucket_errors(), self._written(name, body) as (source, path):
            self._files.rename(source, path)

    def use_large_parts(self, are_large: bool) -> None:
        """Do nothing: a folder has no parts."""

    def create(self, name: str, data: bytes) -> None:
        """Write *data* as *name* unless *name* exists."""
        with self._bucket_errors(), self._written(name, data) as (source, path):
            self._files.link_exclusive(source, path)

    @contextmanager
    def _written(self, name: str, body: bytes | bytearray | Iterable[bytes | bytearray]) -> Iterator[tuple[Path, Path]]:
        """Yield the path of a synced file with *body*, and that of *name*; after the block, the new name is durable."""
        path, source = self._path(name), self._path(f"{_UNFINISHED}/{secrets.token_hex(16)}")
        for folder in (source.parent, path.parent):
            self._make(folder)
        self._files.state(path)  # raises if it is a link
        try:
            # Written and synced under a temporary name, so that readers see either the old content or all of the new.
            self._write(source, [body] if isinstance(body, bytes | bytearray) else body)
            yield source, path
        finally:
            self._files.discard(source)
        # This makes the new name durable; only then may a push report its commit as sent.
        self._files.sync_directory(path.parent)

    def _write(self, path: Path, pieces: Iterable[bytes | bytearray]) -> None:
        with self._files.create(path) as file:
            at = 0
            for piece in pieces:
                file.write_at(at, piece)
                at += len(piece)
            file.sync()

    def _make(self, folder: Path) -> None:
        if folder != self._root and not self._files.is_directory(folder):
            self._make(folder.parent)
            self._files.make_directory(folder)

    def delete(self, names: Sequence[str]) -> None:
        """Remove *names*, ignoring missing ones."""
        with self._bucket_errors():
            paths = [path for path in map(self._path, names) if self._files.state(path) is not None]
            for path in paths:
                self._files.unlink(path)
            for folder in {path.parent for path in paths}:
                self._files.sync_directory(folder)

    # -- names and errors ----------------------------------------------------------------------------------------

    def _path(self, name: str) -> Path:
        """Return the path of *name*; raises IntegrityError if one of its parents is not a real folder."""
        *folders, last = name.split("/")
        if not {"", ".", ".."}.isdisjoint(folders) or last in {".", ".."}:
            raise InvalidInput(f"{name!r} is not a name in a remote")
        path = self._root
        for folder in folders:
            path /= folder
            state = self._files.look(path)
            if state is not None and not stat.S_ISDIR(state.st_mode):
                raise _refused(path)
        return path / last

    def _check_no_links(self, folder: str) -> None:
        path = self._path(f"{folder}/")
        for name in self._files.names_unsorted(path):
            state = self._files.look(path / name)
            if state is not None and stat.S_ISLNK(state.st_mode):
                raise _refused(path / name)

    @contextmanager
    def _bucket_errors(self) -> Iterator[None]:
        """Raise the errors that a bucket raises: FileNotFoundError if a name is missing, EIO if a retry may help."""
        try:
            yield
        except StorageIO as exc:
            is_ours = Path(exc.filename).is_relative_to(self._root)  # if not, the bytes to write cannot be read
            if not is_ours or exc.exit_code != StorageIO.exit_code:  # no permission, or a full disk: no retry helps
                raise
            if exc.errno == errnos.ENOENT:
                raise FileNotFoundError(exc.filename) from exc
            raise StorageIO(f"{self._url}: {exc}", errno=errnos.EIO, filename=self._url, hint=exc.hint) from exc


def _refused(path: Path) -> IntegrityError:
    return IntegrityError(
        f"{path} is a link, or neither a file nor a folder; a remote never follows it",
        hint="remove it by hand, and find out who put it there",
        path=str(path),
    )
