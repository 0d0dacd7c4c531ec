"""
The seam to the operating system's files: every byte of a store's truth and of a composite goes through here.

The index and the courtesy locks look after their own files: nothing is lost with them.

Durable writing has one form: create a new file, write it, fsync it, link it under its name, fsync the folder.
Nothing is ever written in place. Tests put their faults at this seam.
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

from layerstore.errors import IntegrityError, StorageIO
from layerstore.limits import LATE_SECONDS, NOT_LATE_SECONDS
from layerstore.storage.handles import (
    LOG,
    READ_FLAGS,
    Hook,
    NewFile,
    OpenFile,
    again_if_stale,
    mapped_errors,
    no_hook,
    pauses,
    rename_exclusive,
)

# Some network and FUSE filesystems cannot sync a folder.
_FOLDER_SYNC_UNSUPPORTED = {errnos.EINVAL, errnos.ENOTSUP, errnos.EBADF}

# Errors of filesystems without hard links, and of a kernel that forbids links to other users' files.
_NO_HARD_LINKS = {errnos.EPERM, errnos.ENOTSUP, errnos.ENOSYS}

# Errors of a kernel or filesystem that has no rename that refuses to replace.
_NO_EXCLUSIVE_RENAME = {errnos.EINVAL, errnos.ENOSYS, errnos.ENOTSUP}

# Two changes of a folder within one tick of the filesystem's clock have the same time. The coarsest clock ticks every
# two seconds: a folder whose last change is older than that will show the next one.
_SETTLED_AFTER_NS = 3 * 10**9

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK_FILESYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "smb3"}
)


class WeakDurability(UserWarning):
    """The filesystem cannot fsync a folder: a power cut may undo what was reported as saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a filesystem has left for an ordinary user."""

    total_bytes: int
    free_bytes: int
    free_files: int | None
    """How many more files there may be; None where there is no such bound."""


class Files:
    """The operations, each of which either has its whole effect or raises StorageIO."""

    def __init__(self, hook: Hook = no_hook) -> None:
        self._hook = hook
        self._nothing_late_before = 0.0

    # -- reading -------------------------------------------------------------------------------------------------

    def again(self, path: Path) -> Iterator[bool]:
        """
        Yield as long as *path*, which must be there, may be seen late; say each time whether its folder lists it.

        On a disk of this host nothing is late, nor is it for a while after a search in vain.
        """
        kind = network_filesystem(path)
        if kind is None or time.monotonic() < self._nothing_late_before:
            return
        LOG.warning(
            "%s is not there, which %s may say too long; looking again for up to %g s", path, kind, LATE_SECONDS
        )
        for _ in pauses():
            # NFS asks its server about a folder that is opened, and forgets what it knew to be missing there.
            self.names_unsorted(path.parent.parent)
            yield path.name in self.names_unsorted(path.parent)
        self._nothing_late_before = time.monotonic() + NOT_LATE_SECONDS

    @again_if_stale
    def open(self, path: Path) -> OpenFile:
        """
        Open the regular file *path*; a link is not followed and a fifo does not block.

        Raises:
            IntegrityError: It is something else than a regular file.
            StorageIO: As the system says; *errno* is ENOENT where nothing is there.
        """
        try:
            fd = os.open(path, READ_FLAGS)
        except OSError as exc:
            if exc.errno == errnos.ELOOP:
                raise _not_regular(path) from exc
            with mapped_errors(path, doing="open"):
                raise
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
        """Return the content of *path* as `read` does, None where nothing is there."""
        try:
            return self.read(path, size_bytes_max=size_bytes_max)
        except StorageIO as exc:
            if exc.errno == errnos.ENOENT:
                return None
            raise

    @again_if_stale
    def look(self, path: Path) -> os.stat_result | None:
        """Return the stat of *path*, None where nothing is there; links are not followed."""
        try:
            return os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            with mapped_errors(path, doing="look at"):
                raise

    def on_disk(self, path: Path) -> tuple[tuple[int, int], int] | None:
        """Return which file *path* is, and the bytes that it takes on the disk; None where nothing is there."""
        found = self.look(path)
        # POSIX counts blocks of 512 bytes here, whatever the filesystem's own are.
        return None if found is None else ((found.st_dev, found.st_ino), found.st_blocks * 512)

    def size(self, path: Path) -> int | None:
        """Return the size of the regular file *path*, None where nothing is there."""
        state = self.state(path)
        return None if state is None else state.st_size

    def modified_ns(self, path: Path) -> int | None:
        """Return when *path* was last written or touched, by the filesystem's clock; None where nothing is there."""
        state = self.look(path)
        return None if state is None else state.st_mtime_ns

    def state(self, path: Path) -> os.stat_result | None:
        """Return the stat of the regular file *path*, None where nothing is there."""
        state = self.look(path)
        if state is not None and not stat.S_ISREG(state.st_mode):
            raise _not_regular(path)
        return state

    def identity(self, path: Path) -> tuple[int, ...] | None:
        """
        Return a fingerprint that changes when *path* is replaced; None where nothing is there.

        A new one may reuse the inode of a removed one, but not the time of its last change.
        """
        state = self.look(path)
        return None if state is None else (state.st_dev, state.st_ino, state.st_mtime_ns)

    def is_directory(self, path: Path) -> bool:
        """Whether *path* is a folder; a link to one is not."""
        state = self.look(path)
        return state is not None and stat.S_ISDIR(state.st_mode)

    def is_file(self, path: Path) -> bool:
        """Whether *path* is a regular file; a link to one is not."""
        state = self.look(path)
        return state is not None and stat.S_ISREG(state.st_mode)

    def exists(self, path: Path) -> bool:
        """Whether anything at all is at *path*."""
        return self.look(path) is not None

    def names(self, directory: Path) -> list[str]:
        """Return the names in *directory*, sorted; none where it is not there."""
        return sorted(self.names_unsorted(directory))

    @again_if_stale
    def names_unsorted(self, directory: Path) -> list[str]:
        """Return the names in *directory* as they come; none where it is not there."""
        with mapped_errors(directory, doing="list"):
            try:
                return os.listdir(directory)  # noqa: PTH208  # names, not paths
            except FileNotFoundError:
                return []

    def names_in_folder(self, path: Path) -> list[str]:
        """Return the names in the folder *path*, sorted; none where it is no folder, or a link to one."""
        return self.names(path) if self.is_directory(path) else []

    def stamp(self, directory: Path) -> tuple[int, ...] | None:
        """
        Return a fingerprint that changes when a name in *directory* does.

        None where it is not there, or changed so recently that another change might not show.
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
        """Return what the filesystem of *path* has left."""
        with mapped_errors(path, doing="look at the filesystem of"):
            state = os.statvfs(path)
        return Room(
            total_bytes=state.f_blocks * state.f_frsize,
            free_bytes=state.f_bavail * state.f_frsize,
            free_files=state.f_favail if state.f_files else None,
        )

    # -- writing -------------------------------------------------------------------------------------------------

    def make_directory(self, path: Path, *, durable: bool = True) -> bool:
        """
        Make the folder *path*; return whether it was new.

        Its parent is synced, also if the folder was there: its maker may have died before its own fsync. Who makes many
        folders passes ``durable=False`` and syncs once.
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
        """Make the folder *path* and the parents that it lacks, all durable."""
        if not path.is_dir():
            self.make_directories(path.parent)
            self.make_directory(path)

    def create(self, path: Path, *, sync_ahead: bool = False) -> NewFile:
        """Create the file *path*, which must not exist; with *sync_ahead* the disk begins to write before `sync`."""
        self._hook("create", path)
        with mapped_errors(path, doing="create"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        return NewFile(path, fd, self._hook, sync_ahead=sync_ahead)

    def overwrite(self, path: Path) -> NewFile:
        """Open the file *path* to write to it in place."""
        with mapped_errors(path, doing="write to"):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        return NewFile(path, fd, self._hook)

    def append(self, path: Path, data: bytes) -> None:
        """Append *data* to the file *path*, made if needed; only for data that may be lost or torn."""
        self._hook("append", path)
        with mapped_errors(path, doing="append to"):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                os.write(fd, data)
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def temporary(self, directory: Path, data: bytes) -> Iterator[Path]:
        """Yield a synced file with *data* in *directory* that is gone afterwards, unless it was linked or renamed."""
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
        Link the file *source* as *target*, too; return whether *target* was free.

        Not rename: that would silently replace what another writer published first. Where there are no hard links,
        *source* is moved, by the one kind of rename that replaces nothing.
        """
        self._hook("link", target)
        with mapped_errors(target, doing="link"):
            is_new = self._linked(source, target)
            return _renamed(source, target) if is_new is None else is_new

    def _linked(self, source: Path, target: Path) -> bool | None:
        """Give the file *source* a second name; return whether it was free, None where there are no hard links."""
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as exc:
            # On a network a link may work and its reply be lost, or be an error: then both names are one file.
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
        """Move *source* to *target*, atomically replacing a file there."""
        self._hook("rename", target)
        with mapped_errors(target, doing="rename to"):
            source.rename(target)

    def move_folder(self, source: Path, target: Path) -> bool:
        """
        Move the folder *source* to *target* unless something is there; return whether that was free.

        A filesystem may have no rename that replaces nothing. There *target* is made first: an ordinary rename replaces
        an empty folder, and fails once somebody has put something into it.
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
                with contextlib.suppress(OSError):
                    target.rmdir()
                if exc.errno not in {errnos.EEXIST, errnos.ENOTEMPTY, errnos.ENOTDIR}:
                    raise
                return False
            return True

    def unlink(self, path: Path) -> None:
        """Remove the file *path*; gone already is as good."""
        self._hook("unlink", path)
        with mapped_errors(path, doing="remove"):
            path.unlink(missing_ok=True)

    def discard(self, path: Path) -> None:
        """
        Remove a temporary file, or leave it to a later collection.

        Nothing names the file, and an error here must not hide the one that led here.
        """
        with contextlib.suppress(StorageIO):
            self.unlink(path)

    def remove_tree(self, directory: Path) -> None:
        """Remove *directory* with all that is in it, not following links; what cannot be removed stays."""
        self._hook("rmtree", directory)
        shutil.rmtree(directory, ignore_errors=True)

    def remove_empty(self, directory: Path) -> None:
        """Remove the folder *directory* if it is there and empty."""
        self._hook("rmdir", directory)
        with mapped_errors(directory, doing="remove"):
            try:
                directory.rmdir()
            except OSError as exc:
                if exc.errno not in {errnos.ENOTEMPTY, errnos.EEXIST, errnos.ENOENT}:
                    raise

    @again_if_stale
    def touch(self, path: Path, *, time_ns: int | None = None) -> bool:
        """Set the modification time of *path* to *time_ns* or to now; return whether it was there."""
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
        """Make the names in *directory* durable."""
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
    """Move *source* to *target* as `rename_exclusive` does; say so where the filesystem cannot do that either."""
    try:
        return rename_exclusive(source, target)
    except OSError as exc:
        if exc.errno not in _NO_EXCLUSIVE_RENAME:
            raise
        raise StorageIO(
            f"cannot name a file {target}: this filesystem has no hard links, and no rename that refuses to replace",
            errno=errnos.ENOTSUP,
            filename=str(target),
            hint="a store needs one of them; layerstore doctor tells what a filesystem has: choose another one",
        ) from exc


def _not_regular(path: Path) -> IntegrityError:
    return IntegrityError(
        f"{path} is not a regular file; it is never followed or read", hint="remove it by hand", path=str(path)
    )


# -- filesystems -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mount:
    """The filesystem that a path is on, as the system lists it."""

    point: Path
    kind: str
    options: tuple[str, ...]
    how: tuple[str, ...] = ()
    """The filesystem's own options, such as those of NFS."""

    @property
    def is_network(self) -> bool:
        """Whether other hosts may have it too: so far as its kind tells, and FUSE may be anything."""
        return self.kind in _NETWORK_FILESYSTEMS or self.kind.startswith("fuse.")


def network_filesystem(path: Path) -> str | None:
    """Return the kind of network filesystem that *path* is on, None for a local one or where nobody can tell."""
    mount = mount_of(path)
    return mount.kind if mount is not None and mount.is_network else None


def mount_of(path: Path) -> Mount | None:
    """Return the filesystem that *path* is on, or will be if it is not there yet; None where nobody can tell."""
    try:
        mounts = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return None  # not Linux, or no /proc: LMDB's own checks remain
    real = Path(os.path.realpath(path))
    above = {str(place): len(place.parts) for place in (real, *real.parents)}
    best, depth = None, 0
    for line in mounts:
        fields, _, tail = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        if point in above and above[point] >= depth:
            kind, *_, how = tail.split()
            options = fields.split()[5]
            best, depth = Mount(Path(point), kind, tuple(options.split(",")), tuple(how.split(","))), above[point]
    return best
