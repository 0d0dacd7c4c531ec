"""
The seam to the operating system: every byte of a composite, and of a store's own data, goes through this module.

The index and the courtesy locks handle their own files, since losing those files loses no data.

There is one way to write durably: create a new file, write it, fsync it, link it to its final name, fsync the folder.
In place, only data that may be lost or torn is written: timings, logs, and fetched chunks, which are checked when read.
Tests inject their faults at this seam.
"""

import contextlib
import errno as errnos
import os
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from layerstore.disk.open_files import (
    LOG,
    READ_FLAGS,
    Hook,
    NewFile,
    OpenFile,
    Room,
    again_if_stale,
    mapped_errors,
    no_hook,
    pauses,
    rename_exclusive,
    room_at,
)
from layerstore.errors import IntegrityError, StorageIO
from layerstore.limits import LATE_SECONDS, NOT_LATE_SECONDS

# Some network and FUSE filesystems cannot sync a folder.
_FOLDER_SYNC_UNSUPPORTED = {errnos.EINVAL, errnos.ENOTSUP, errnos.EBADF}

# Errors from filesystems without hard links, and from kernels that forbid links to other users' files.
_NO_HARD_LINKS = {errnos.EPERM, errnos.ENOTSUP, errnos.ENOSYS}

# Errors from a kernel or filesystem without a no-replace rename.
_NO_EXCLUSIVE_RENAME = {errnos.EINVAL, errnos.ENOSYS, errnos.ENOTSUP}

# Two changes of a folder within one tick of the filesystem's clock have the same time. The coarsest clock ticks every
# two seconds, so if the last change is older than that, the next change will have a new time.
_SETTLED_AFTER_NS = 3 * 10**9

# The names that NFS and FUSE give a removed file while somebody still has it open.
_REMOVED_WHILE_OPEN = re.compile(r"\.(nfs|fuse_hidden)[0-9a-f]+")

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK_FILESYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "smb3"}
)


class WeakDurability(UserWarning):
    """The filesystem cannot fsync a folder: a power cut may undo what was reported as saved."""


class Files:
    """File operations; each either takes full effect or raises StorageIO."""

    def __init__(self, hook: Hook = no_hook) -> None:
        self._hook = hook
        self._nothing_late_before = 0.0

    # -- reading -------------------------------------------------------------------------------------------------

    def again(self, path: Path) -> Iterator[bool]:
        """
        Look for *path*, which ought to exist, again and again; yield each time whether its folder lists it.

        Stops after `LATE_SECONDS`. Yields nothing on a local disk, nor for a while after a fruitless search.
        """
        kind = network_filesystem(path)
        if kind is None or time.monotonic() < self._nothing_late_before:
            return
        LOG.warning(
            "%s is not there, or %s does not show it yet; looking again for up to %g s", path, kind, LATE_SECONDS
        )
        for _ in pauses():
            # Opening a folder makes the NFS client revalidate it and forget which names were missing.
            self.names_unsorted(path.parent.parent)
            yield path.name in self.names_unsorted(path.parent)
        self._nothing_late_before = time.monotonic() + NOT_LATE_SECONDS

    @again_if_stale
    def open(self, path: Path) -> OpenFile:
        """
        Open the regular file *path*; does not follow links or block on a fifo.

        Raises:
            IntegrityError: *path* is not a regular file.
            StorageIO: The system's error; *errno* is ENOENT if *path* does not exist.
        """
        try:
            fd = os.open(path, READ_FLAGS)
        except OSError as exc:
            if exc.errno == errnos.ELOOP:
                raise _not_regular(path) from exc
            with mapped_errors(path, doing="open"):
                raise
        # Check the descriptor: the path may refer to something else now.
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            os.close(fd)
            raise _not_regular(path)
        return OpenFile(path, fd, state.st_size)

    def read(self, path: Path, *, size_bytes_max: int) -> bytes:
        """Return the content of *path*; raises IntegrityError if it is larger than *size_bytes_max*."""
        with self.open(path) as file:
            if file.size_bytes > size_bytes_max:
                raise IntegrityError(f"{path} has {file.size_bytes} bytes, at most {size_bytes_max} were expected")
            return file.read_at(0, file.size_bytes)

    def read_if_there(self, path: Path, *, size_bytes_max: int) -> bytes | None:
        """Return the content of *path* as `read` does, None if it does not exist."""
        try:
            return self.read(path, size_bytes_max=size_bytes_max)
        except StorageIO as exc:
            if exc.errno == errnos.ENOENT:
                return None
            raise

    @again_if_stale
    def look(self, path: Path) -> os.stat_result | None:
        """Return the stat of *path*, None if it does not exist; does not follow links."""
        try:
            return os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None  # NotADirectoryError: a parent is a file, so *path* cannot exist
        except OSError:
            with mapped_errors(path, doing="look at"):
                raise

    def on_disk(self, path: Path) -> tuple[tuple[int, int], int] | None:
        """Return the identity of the file *path* and the bytes that it takes on disk; None if it does not exist."""
        status = self.look(path)
        # `st_blocks` counts blocks of 512 bytes, whatever the filesystem's block size.
        return None if status is None else ((status.st_dev, status.st_ino), status.st_blocks * 512)

    def size(self, path: Path) -> int | None:
        """Return the size of the regular file *path*, None if it does not exist."""
        state = self.state(path)
        return None if state is None else state.st_size

    def modified_ns(self, path: Path) -> int | None:
        """Return when *path* was last written or touched, by the filesystem's clock; None if it does not exist."""
        state = self.look(path)
        return None if state is None else state.st_mtime_ns

    def state(self, path: Path) -> os.stat_result | None:
        """Return the stat of the regular file *path*, None if it does not exist."""
        state = self.look(path)
        if state is not None and not stat.S_ISREG(state.st_mode):
            raise _not_regular(path)
        return state

    def identity(self, path: Path) -> tuple[int, ...] | None:
        """
        Return a fingerprint that changes when *path* is replaced; None if it does not exist.

        A new file may reuse the inode number of a removed file, but not its modification time.
        """
        state = self.look(path)
        return None if state is None else (state.st_dev, state.st_ino, state.st_mtime_ns)

    def is_directory(self, path: Path) -> bool:
        """Whether *path* is a folder, and not a link to one."""
        state = self.look(path)
        return state is not None and stat.S_ISDIR(state.st_mode)

    def is_file(self, path: Path) -> bool:
        """Whether *path* is a regular file, and not a link to one."""
        state = self.look(path)
        return state is not None and stat.S_ISREG(state.st_mode)

    def exists(self, path: Path) -> bool:
        """Whether anything, even a dangling link, exists at *path*."""
        return self.look(path) is not None

    def names(self, directory: Path) -> list[str]:
        """Return the names in *directory*, sorted; empty if it does not exist."""
        return sorted(self.names_unsorted(directory))

    @again_if_stale
    def names_unsorted(self, directory: Path) -> list[str]:
        """Return the names in *directory*, unsorted; empty if it does not exist."""
        with mapped_errors(directory, doing="list"):
            try:
                return os.listdir(directory)  # noqa: PTH208  # names, not paths
            except FileNotFoundError:
                return []

    def names_there(self, directory: Path) -> list[str]:
        """Return `names` of *directory*, without files that were removed while somebody had them open."""
        return [
            name
            for name in self.names(directory)
            if not (_REMOVED_WHILE_OPEN.fullmatch(name) and self.is_file(directory / name))
        ]

    def names_in_folder(self, path: Path) -> list[str]:
        """Return the names in the folder *path*, sorted; empty if it is not a folder, or is a link to one."""
        return self.names(path) if self.is_directory(path) else []

    def stamp(self, directory: Path) -> tuple[int, ...] | None:
        """
        Return a fingerprint that changes whenever the names in *directory* do.

        None if *directory* does not exist, or changed so recently that another change might not show.
        """
        state = self.look(directory)
        if state is None or time.time_ns() - max(state.st_mtime_ns, state.st_ctime_ns) <= _SETTLED_AFTER_NS:
            return None
        return state.st_dev, state.st_ino, state.st_mtime_ns, state.st_ctime_ns

    def device(self, path: Path) -> int:
        """Return the number of the filesystem that *path* is on."""
        with mapped_errors(path, doing="look at"):
            return path.stat().st_dev

    def room(self, path: Path) -> Room:
        """Return the free space on the filesystem of *path*."""
        with mapped_errors(path, doing="look at the filesystem of"):
            return room_at(path)

    # -- writing -------------------------------------------------------------------------------------------------

    def make_directory(self, path: Path, *, durable: bool = True) -> bool:
        """
        Make the folder *path*; return whether it was new.

        Syncs the parent even if the folder existed: its creator may have died before the fsync. To make many folders,
        pass ``durable=False`` and sync the parent once.
        """
        self._hook("mkdir", path)
        with mapped_errors(path, doing="make the folder"):
            try:
                path.mkdir()
            except FileExistsError:
                if not self.is_directory(path):
                    raise IntegrityError(f"{path} is not a folder", hint="remove it by hand", path=str(path)) from None
                is_new = False
            else:
                is_new = True
        if durable:
            self.sync_directory(path.parent)
        return is_new

    def make_directories(self, path: Path) -> None:
        """Make the folder *path* and its missing parents, all durable."""
        with mapped_errors(path, doing="look at"):
            is_there = path.is_dir()
        if not is_there:
            self.make_directories(path.parent)
            self.make_directory(path)

    def create(self, path: Path, *, sync_ahead: bool = False) -> NewFile:
        """Create the file *path*, which must not exist; with *sync_ahead*, the disk starts writing before `sync`."""
        self._hook("create", path)
        with mapped_errors(path, doing="create"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        return NewFile(path, fd, self._hook, sync_ahead=sync_ahead)

    def overwrite(self, path: Path) -> NewFile:
        """Open the file *path* to write to it in place; only for data that may be lost or torn."""
        with mapped_errors(path, doing="write to"):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        return NewFile(path, fd, self._hook)

    def append(self, path: Path, data: bytes) -> None:
        """Append *data* to the file *path*, creating it if needed; only for data that may be lost or torn."""
        self._hook("append", path)
        with mapped_errors(path, doing="append to"):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                os.write(fd, data)
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def temporary(self, directory: Path, data: bytes) -> Iterator[Path]:
        """Yield the path of a synced file with *data* in *directory*; this name is removed afterwards, if it exists."""
        path = directory / secrets.token_hex(16)
        file = self.create(path)
        try:
            with file:
                file.write_at(0, data)
                file.sync()
            yield path
        finally:
            self.discard(path)

    def link_exclusive(self, source: Path, target: Path) -> bool:
        """
        Hard-link the file *source* as *target*; return whether *target* was free.

        A plain rename would silently replace a file that another writer published first. If the filesystem lacks hard
        links, *source* is moved instead, with a no-replace rename.
        """
        self._hook("link", target)
        with mapped_errors(target, doing="link"):
            is_new = self._linked(source, target)
            return _renamed(source, target) if is_new is None else is_new

    def _linked(self, source: Path, target: Path) -> bool | None:
        """Hard-link *source* as *target*; return whether *target* was free, None if hard links are not supported."""
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as exc:
            # Over a network, a link may be made although the reply is lost or an error: both names are then one file.
            one, other = self.look(source), self.look(target)
            if one is not None and other is not None and os.path.samestat(one, other):
                return True
            if exc.errno in _NO_HARD_LINKS:
                return None
            if exc.errno != errnos.EEXIST:
                raise
            return False
        return True

    def rename(self, source: Path, target: Path) -> None:
        """Move *source* to *target*, atomically replacing an existing file."""
        self._hook("rename", target)
        with mapped_errors(target, doing="rename to"):
            source.rename(target)

    def move_folder(self, source: Path, target: Path) -> bool:
        """
        Move the folder *source* to *target* unless *target* exists; return whether *target* was free.

        If the filesystem lacks a no-replace rename, *target* is first made as an empty folder: an ordinary rename
        replaces an empty folder, but fails if somebody has put something into it in the meantime.
        """
        self._hook("rename", target)
        with mapped_errors(target, doing="rename to"):
            try:
                return rename_exclusive(source, target)
            except OSError as exc:
                if exc.errno not in _NO_EXCLUSIVE_RENAME:
                    raise
            try:
                target.mkdir()
            except FileExistsError:
                return False
            try:
                source.rename(target)
            except OSError as exc:
                # *target* stays if somebody has put something into it: it is no longer ours.
                with contextlib.suppress(OSError):
                    target.rmdir()
                if exc.errno not in {errnos.EEXIST, errnos.ENOTEMPTY, errnos.ENOTDIR}:
                    raise
                return False
            return True

    def unlink(self, path: Path) -> None:
        """Remove the file *path*, if it exists."""
        self._hook("unlink", path)
        with mapped_errors(path, doing="remove"):
            path.unlink(missing_ok=True)

    def discard(self, path: Path) -> None:
        """
        Remove a temporary file; if that fails, leave it to a later collection.

        Nothing refers to the file, and a failure to remove it must not mask the error that is being handled.
        """
        with contextlib.suppress(StorageIO):
            self.unlink(path)

    def remove_tree(self, directory: Path) -> None:
        """Remove *directory* and its content, not following links; leaves what cannot be removed."""
        self._hook("rmtree", directory)
        shutil.rmtree(directory, ignore_errors=True)

    def remove_empty(self, directory: Path) -> None:
        """Remove the folder *directory* if it exists and is empty."""
        self._hook("rmdir", directory)
        with mapped_errors(directory, doing="remove"):
            try:
                directory.rmdir()
            except OSError as exc:
                if exc.errno not in {errnos.ENOTEMPTY, errnos.EEXIST, errnos.ENOENT}:
                    raise

    @again_if_stale
    def touch(self, path: Path, *, time_ns: int | None = None) -> bool:
        """Set the modification time of *path* to *time_ns*, or to now; return whether the file existed."""
        self._hook("touch", path)
        with mapped_errors(path, doing="refresh the time of"):
            try:
                if time_ns is None:
                    os.utime(path, follow_symlinks=False)
                else:
                    os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)
            except FileNotFoundError:
                return False
        return True

    def sync_directory(self, directory: Path) -> None:
        """Make the names in *directory* durable; warns with `WeakDurability` if the filesystem cannot."""
        self._hook("fsync", directory)
        with mapped_errors(directory, doing="fsync the folder"):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            except OSError as exc:
                if exc.errno not in _FOLDER_SYNC_UNSUPPORTED:
                    raise
                warnings.warn(f"{directory}: this filesystem cannot fsync folders", WeakDurability, stacklevel=2)
            finally:
                os.close(fd)


def _renamed(source: Path, target: Path) -> bool:
    """Move *source* to *target* as `rename_exclusive` does; raise a clear error if the filesystem cannot."""
    try:
        return rename_exclusive(source, target)
    except OSError as exc:
        if exc.errno not in _NO_EXCLUSIVE_RENAME:
            raise
        raise StorageIO(
            f"cannot create {target}: this filesystem has no hard links, and no rename that refuses to replace",
            errno=errnos.ENOTSUP,
            filename=str(target),
            hint="a store needs one of them: choose another filesystem; layerstore doctor shows what it supports",
        ) from exc


def _not_regular(path: Path) -> IntegrityError:
    return IntegrityError(
        f"{path} is not a regular file; it is never followed or read", hint="remove it by hand", path=str(path)
    )


# -- filesystems -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mount:
    """The filesystem of a path, as the system lists it."""

    point: Path
    kind: str
    options: tuple[str, ...]
    how: tuple[str, ...] = ()
    """The filesystem's own mount options, such as those of NFS."""

    @property
    def is_network(self) -> bool:
        """Whether other hosts may share the filesystem, judging by its kind; FUSE counts, since it may be anything."""
        return self.kind in _NETWORK_FILESYSTEMS or self.kind.startswith("fuse.")


def network_filesystem(path: Path) -> str | None:
    """Return the kind of network filesystem that *path* is on, None if it is local or unknown."""
    mount = mount_of(path)
    return mount.kind if mount is not None and mount.is_network else None


def mount_of(path: Path) -> Mount | None:
    """Return the filesystem that *path* is on, or will be on once it exists; None if unknown."""
    try:
        mounts = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return None  # not Linux, or no /proc; LMDB still checks for itself
    real = Path(os.path.realpath(path))
    above = {str(place): len(place.parts) for place in (real, *real.parents)}
    best, depth = None, 0
    for line in mounts:
        fields, _, tail = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        # >=, not >: of two filesystems mounted at one point, the later one hides the earlier.
        if point in above and above[point] >= depth:
            kind, *_, how = tail.split()
            options = fields.split()[5]
            best, depth = Mount(Path(point), kind, tuple(options.split(",")), tuple(how.split(","))), above[point]
    return best
