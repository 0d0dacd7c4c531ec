"""
The folder ``quarantine/``: what repairs have taken out of the way, each under its own path, and why.

Nothing here is ever removed by us. A quarantined record or pin says that something is needed of which nobody knows
what: it holds collections back until there is a sound one of its name again, or until a user gives it up
(docs/reference/format.md, section 6.13).
"""

import errno as errnos
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from layerstore.errors import LayerstoreError, StorageIO
from layerstore.format.quarantine import log_name, seal_log, unseal_log
from layerstore.layers import is_name
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.model import ObjectId, Quarantined, QuarantineLog
from layerstore.storage.commits import RecordName, name_in
from layerstore.storage.files import Files
from layerstore.storage.layout import Layout

_ID = re.compile(r"[0-9]{8}-[0-9a-f]{8}")
_GIVEN_UP = "given-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPin:
    """A pin in quarantine."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRecord:
    """A record in quarantine."""

    name: RecordName
    path: Path


class Quarantine:
    """What repairs have taken out of the way."""

    def __init__(self, layout: Layout, files: Files, *, store_id: str) -> None:
        self._layout = layout
        self._files = files
        self._store_id = store_id

    def ids(self) -> list[str]:
        """Return the repairs that have taken something out of the way, oldest first."""
        return [name for name in self._files.names(self._layout.quarantine) if _ID.fullmatch(name)]

    def next_id(self) -> str:
        """Return a name for a new repair, in the order of all that are there."""
        number = max((int(name[:8]) for name in self.ids()), default=0) + 1
        return f"{number:08d}-{secrets.token_hex(4)}"

    def publish(self, log: QuarantineLog) -> None:
        """Make *log* durable: it says what is about to be moved, and why."""
        self.write(self._layout.root / "log", seal_log(log, store_id=self._store_id), quarantine_id=log.id)

    def log(self, quarantine_id: str) -> QuarantineLog | None:
        """Return a repair's log if it can be read: it is for people, and what lies beside it counts without it."""
        try:
            data = self._files.read(self._layout.quarantine_log(quarantine_id), size_bytes_max=RECORD_BYTES_MAX)
            return unseal_log(data, name=log_name(quarantine_id), store_id=self._store_id)
        except LayerstoreError:
            return None

    def begin(self, path: Path, *, kind: str, reason: str) -> str:
        """Write down that *path*, a *kind*, is about to be taken here, and why; return under which id."""
        taken = Quarantined(path=self._layout.name(path), kind=kind, reason=reason)
        log = QuarantineLog(id=self.next_id(), time_ns=time.time_ns(), files=(taken,))
        self.publish(log)
        return log.id

    def move(self, path: Path, *, quarantine_id: str) -> Path:
        """
        Take *path*, whatever it is, out of the way, durably; return where it is now.

        Raises:
            StorageIO: *errno* is ENOENT where nothing is there.
        """
        target = self._layout.quarantine / quarantine_id / self._layout.name(path)
        self._make(target.parent)
        self._files.rename(path, target)
        # The new name first: after a power cut it may be in both places, and never in none.
        self._files.sync_directory(target.parent)
        self._files.sync_directory(path.parent)
        self._files.remove_empty(path.parent)
        return target

    def keep(self, path: Path, *, quarantine_id: str) -> None:
        """Keep the file *path* here too, durably: something sound is about to take its name."""
        target = self._layout.quarantine / quarantine_id / self._layout.name(path)
        self._make(target.parent)
        try:
            self._files.keep_exclusive(path, target, scratch=self._layout.tmp)
        except StorageIO as exc:
            if exc.errno != errnos.EIO:
                raise
            # Where there are no hard links it would have to be read, and cannot be. It lies here, or where it was.
            self.move(path, quarantine_id=quarantine_id)
        else:
            self._files.sync_directory(target.parent)

    def write(self, path: Path, data: bytes, *, quarantine_id: str) -> None:
        """Keep *data*, all that is left of *path*, which is not there any more."""
        target = self._layout.quarantine / quarantine_id / self._layout.name(path)
        self._make(target.parent)
        with self._files.temporary(self._layout.tmp) as file:
            file.write_at(0, data)
            file.sync()
            self._files.link_exclusive(file.path, target)
        self._files.sync_directory(target.parent)

    def _make(self, folder: Path) -> None:
        """Make *folder* and those above it; each is synced, also if whoever made it has died before that."""
        if folder != self._layout.root:
            self._make(folder.parent)
            self._files.make_directory(folder)

    # -- what lies there -----------------------------------------------------------------------------------------

    def records(self) -> list[LostRecord]:
        """Return the records that nobody has given up."""
        found = []
        for quarantine_id in self.ids():
            folder = self._layout.quarantine / quarantine_id / self._layout.commits.name
            for run in self._files.names(folder) if self._files.is_directory(folder) else ():
                names = self._files.names(folder / run) if self._files.is_directory(folder / run) else ()
                for file_name in names:
                    name = name_in(run, file_name)
                    if name is not None:
                        found.append(LostRecord(name=name, path=folder / run / file_name))
        return found

    def pins(self) -> list[LostPin]:
        """Return the pins that nobody has given up."""
        found = []
        for quarantine_id in self.ids():
            folder = self._layout.quarantine / quarantine_id / self._layout.pins.name
            names = self._files.names(folder) if self._files.is_directory(folder) else ()
            found += [LostPin(name=name, path=folder / name) for name in names if is_name(name)]
        return found

    def objects(self, object_id: ObjectId) -> Iterator[Path]:
        """Yield what was taken for a damaged object: a fault may have been the memory's, and have passed."""
        name = self._layout.name(self._layout.object(object_id))
        for quarantine_id in reversed(self.ids()):
            path = self._layout.quarantine / quarantine_id / name
            if self._files.is_file(path):
                yield path

    def contents(self, quarantine_id: str) -> Iterator[tuple[PurePosixPath, Path, bool]]:
        """Yield all that a repair has taken, by where it was, with where it is now, and whether it was given up."""
        folder = self._layout.quarantine / quarantine_id
        for path in self._leaves(folder):
            place = PurePosixPath(path.relative_to(folder))
            if place.parts[0] == _GIVEN_UP:
                yield place.relative_to(_GIVEN_UP), path, True
            elif path != self._layout.quarantine_log(quarantine_id):
                yield place, path, False

    def _leaves(self, folder: Path) -> Iterator[Path]:
        for name in self._files.names(folder):
            path = folder / name
            if self._files.is_directory(path) and self._files.names(path):
                yield from self._leaves(path)
            else:
                yield path

    def give_up(self, path: Path) -> None:
        """Let *path*, a record or pin here, hold nothing back any more; it stays as it is, under another name."""
        quarantine_id, *rest = path.relative_to(self._layout.quarantine).parts
        target = self._layout.quarantine / quarantine_id / _GIVEN_UP / Path(*rest)
        self._make(target.parent)
        self._files.rename(path, target)
        self._files.sync_directory(target.parent)
        self._files.sync_directory(path.parent)
        self._files.remove_empty(path.parent)
