"""
The truth of a store on disk: ``store.json``, commit records and pins.

A commit is visible exactly when its record is linked into its run's folder,
and durable once that folder is fsynced: *the* commit point.

A store may be migrated while somebody has it open. So a writer rereads ``store.json`` after publishing,
and fails if the format has changed.
"""

import errno as errnos
import itertools
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from layerstore.disk import Files, network_filesystem
from layerstore.errors import AlreadyExists, IntegrityError, LayerstoreError, NoStore, NotFound, StorageIO, Unsupported
from layerstore.format import (
    StoreIdentity,
    seal_commit,
    seal_pin,
    stated_store,
    unseal_commit,
    unseal_pin,
)
from layerstore.layers import is_name, typed
from layerstore.layout import RECORD_NAME, Layout
from layerstore.limits import OWN_JSON_BYTES_MAX, RECORD_BYTES_MAX
from layerstore.model import Commit, CommitId, Pin
from layerstore.nearest import did_you_mean, nearest
from layerstore.storage.no_store import no_store_at

# How many records are read to find a lost store id: few, since every command on such a store reads them and fails.
_RECORDS_READ_MAX = 16


def read_identity(layout: Layout, files: Files, *, path: Path) -> bytes:
    """
    Return the unchecked text of ``store.json``; *path* is the store's path as the user gave it.

    Raises:
        NoStore: No store is at *path*.
        IntegrityError: There was a store at *path*, but its ``store.json`` is lost.
    """
    try:
        present = files.exists(layout.identity)
    except StorageIO as exc:
        if exc.errno in {errnos.ENOTDIR, errnos.ENAMETOOLONG, errnos.ELOOP}:
            raise NoStore(f"there is no store at {path}: {os.strerror(exc.errno)}", hint="name a folder") from exc
        present = True  # reading it will raise the real error
    if not present:
        sign = sign_of_a_store(layout, files)
        if sign is not None:
            raise lost_identity(path, sign)
        raise no_store_at(path, layout, files)
    return files.read(layout.identity, size_bytes_max=OWN_JSON_BYTES_MAX)


def sign_of_a_store(layout: Layout, files: Files) -> str | None:
    """Return a sign of a store whose ``store.json`` is lost, such as "commits"; None if there is no sign."""
    signs = (
        (layout.commits, "", "commits"),
        (layout.objects, "[0-9a-f]{2}$", "objects"),
        (layout.pins, "", "pins"),
        (layout.migrating, "", "a migration under way"),
        (layout.backups, "format-", "backups of a migration"),
    )
    for folder, pattern, what in signs:
        if any(re.match(pattern, name) for name in files.names_in_folder(folder)):
            return what
    return None


def lost_identity(path: Path, sign: str) -> IntegrityError:
    """Return the error for a store at *path* without ``store.json``; *sign* shows that a store was there."""
    return IntegrityError(
        f"{path} holds {sign}, but its store.json is missing; nothing was changed",
        hint="put back a copy of store.json; only a migration changes it after init",
    )


def stated_ids(layout: Layout, files: Files, *, limit: int | None = None) -> Counter[str]:
    """Count how often each store id appears in the readable records and pins, or in the first *limit* of them."""
    folders = [*(layout.commits / run for run in files.names_in_folder(layout.commits)), layout.pins]
    paths = (folder / name for folder in folders for name in files.names_in_folder(folder))
    stated = (store_id for path in paths if (store_id := _stated(files, path)) is not None)
    return Counter(itertools.islice(stated, limit))


def _stated(files: Files, path: Path) -> str | None:
    try:
        return stated_store(files.read(path, size_bytes_max=RECORD_BYTES_MAX))
    except LayerstoreError:
        return None  # damaged, or not a record: the other files decide


def hinted(problem: IntegrityError, layout: Layout, files: Files) -> IntegrityError:
    """Return *problem*, a damaged or missing ``store.json``, with a hint at the command that rewrites it, if any."""
    if files.exists(layout.migrating):
        return problem  # in the middle of a migration only a copy helps
    stated = stated_ids(layout, files, limit=_RECORDS_READ_MAX)
    if not stated:
        return problem
    command = f"layerstore repair --store-id {stated.most_common(1)[0][0]}"
    return IntegrityError(str(problem), hint=f"{command}, or put back a copy of store.json")


@dataclass(frozen=True, slots=True, order=True)
class RecordName:
    """Identifies a record: the names of its folder and file."""

    run: str
    step: int
    id: CommitId

    @property
    def file_name(self) -> str:
        """The name of the record's file."""
        return f"{self.step}.{self.id}"


def name_in(run: str, file_name: str) -> RecordName | None:
    """Parse *file_name* as a record of *run*; None if it is not a record."""
    match = RECORD_NAME.fullmatch(file_name)
    return None if match is None else RecordName(run, int(match["step"]), CommitId(match["id"]))


class RecordStore:
    """The folders ``commits/`` and ``pins/``."""

    def __init__(self, layout: Layout, files: Files, *, store_id: str) -> None:
        self._layout = layout
        self._files = files
        self._store_id = store_id
        self._seen: tuple[bytes, list[str]] | None = None
        """The text of ``store.json`` as it was last checked, and its unknown flags."""

    def refresh(self, *, run: str | None = None, anew: bool = False) -> frozenset[str]:
        """Fetch the records of *run*, or of all runs, from the bucket that this store mirrors, if any."""
        del run, anew
        return frozenset()

    def runs(self) -> list[str]:
        """Return the runs that have a folder, by name."""
        self._check_folder()
        folders = self._files.names(self._layout.commits)
        return [name for name in folders if is_name(name) and self._files.is_directory(self._layout.run(name))]

    def _check_folder(self) -> None:
        if self._files.is_directory(self._layout.commits):
            return
        self._check_identity()  # a migration may have moved the folder
        raise IntegrityError(
            f"{self._layout.commits} is missing although this is a store",
            hint="put the folder back from a copy of the store; 'no commits' would be a wrong answer",
        )

    def names(self, run: str) -> list[RecordName]:
        """Return the records of *run* by step, as the folder lists them now."""
        records = (name_in(run, name) for name in self.listing(run))
        return sorted(name for name in records if name is not None)

    def listing(self, run: str) -> list[str]:
        """
        Return the names of everything in the folder of *run*, records or not, unsorted; empty if there is no folder.

        Raises:
            IntegrityError: The folder of all runs is missing: "no records" would be a wrong answer.
        """
        names = self._files.names_unsorted(self._layout.run(run))
        if not names:
            self._check_folder()
        return names

    def in_trash(self, run: str) -> bool:
        """Whether commits of *run* are in the trash."""
        return is_name(run) and any(name_in(run, name) for name in self._files.names(self._layout.dropped / run))

    def stamp(self, run: str) -> tuple[int, ...] | None:
        """Return a fingerprint that changes with the folder of *run*; None if nothing can prove it unchanged."""
        return None if self.is_on_network else self._files.stamp(self._layout.run(run))

    @cached_property
    def is_on_network(self) -> bool:
        """Whether folder times may come from another machine's clock or from a cache, and so prove nothing."""
        return network_filesystem(self._layout.commits) is not None

    def listed(self) -> Iterator[RecordName | Path]:
        """Yield the name of every record in ``commits/``, as listed now, and the path of everything else in it."""
        self._check_folder()
        yield from self.listed_in(self._layout.commits)

    def listed_in(self, runs: Path) -> Iterator[RecordName | Path]:
        """Yield what `listed` yields, but for *runs*, a folder like ``commits/``; nothing if *runs* is missing."""
        for run in self._files.names_there(runs):
            folder = runs / run
            if is_name(run) and self._files.is_directory(folder):
                yield from (name_in(run, name) or folder / name for name in self._files.names_there(folder))
            elif self._files.exists(folder):
                yield folder

    def strangers(self) -> Iterator[Path]:
        """Yield the path of everything in ``commits/`` and ``pins/`` that is not named like a record or pin."""
        for listed in (*self.listed(), *self.listed_pins()):
            if isinstance(listed, Path):
                yield listed

    def read(self, name: RecordName) -> Commit:
        """
        Return the commit *name*, checked.

        Raises:
            IntegrityError: The record is damaged or gone.
        """
        return self.decode(self.read_bytes(name), name)

    def each(self, names: Iterable[RecordName]) -> Iterator[tuple[RecordName, Commit | LayerstoreError]]:
        """Yield each of *names* with its commit, or the error in reading it; skip records removed in the meantime."""
        for name in names:
            commit: Commit | LayerstoreError
            try:
                commit = self.read(name)
            except LayerstoreError as exc:
                if not self.is_listed(name):
                    continue  # removed in the meantime
                commit = exc
            yield name, commit

    def read_bytes(self, name: RecordName) -> bytes:
        """Return the bytes of the record *name*, unchecked."""
        path = self._path(name)
        data = self._files.read_if_there(path, size_bytes_max=RECORD_BYTES_MAX)
        # On a network filesystem, a record that its folder lists may itself become visible late.
        for is_listed in self._files.again(path) if data is None and self.is_listed(name) else ():
            data = self._files.read_if_there(path, size_bytes_max=RECORD_BYTES_MAX)
            if data is not None or not is_listed:  # no longer listed: the record was removed
                break
        if data is None:
            raise IntegrityError(f"{self._layout.name(path)} is gone", path=str(path))
        return data

    def _path(self, name: RecordName) -> Path:
        return self._layout.record(name.run, name.step, name.id)

    def is_there(self, name: RecordName) -> bool:
        """Whether this host sees a file at the path of the record *name*, which may be out of date; see `is_listed`."""
        return self._files.exists(self._path(name))

    def is_listed(self, name: RecordName) -> bool:
        """
        Whether the folder lists the record *name* now; if so, the record was neither dropped nor collected.

        A client of a network filesystem may see a file for a minute after another host has removed it.
        """
        return name.file_name in self.listing(name.run)

    def decode(self, data: bytes, name: RecordName) -> Commit:
        """Decode and check the commit in *data*, the bytes of the record *name*."""
        envelope_name = self._layout.name(self._path(name))
        commit = unseal_commit(data, name=envelope_name, store_id=self._store_id)
        if self.name_of(commit) != name:
            raise IntegrityError(f"{envelope_name} does not hold the commit that its name says")
        return commit

    def name_of(self, commit: Commit) -> RecordName:
        """Return the name of *commit*."""
        return RecordName(commit.record.run, commit.record.step, commit.id)

    def name_at(self, path: Path) -> RecordName | None:
        """Return the name of the record whose path is *path*; None if *path* is no record's."""
        return name_in(path.parent.name, path.name) if path.parent.parent == self._layout.commits else None

    def encode(self, commit: Commit) -> bytes:
        """Return the bytes of the record of *commit*."""
        envelope_name = self._layout.name(self._path(self.name_of(commit)))
        return seal_commit(commit, name=envelope_name, store_id=self._store_id)

    def link(self, commit: Commit) -> tuple[int, ...] | None:
        """
        Make *commit* visible and durable; return its file's identity for `withdraw`, or None if the file existed.

        Only `layerstore.publish` calls this.

        Everything that *commit* needs must be durable already. Once this returns, a power cut cannot lose the commit.
        If the last fsync fails, the record stays: it is complete, but its durability is not confirmed.

        Raises:
            Unsupported: The store was migrated since it was opened. If that happened just now, the migration may have
                missed the commit.
        """
        # Before anything is written: in a newer format, the record's path may differ.
        self.check_store()
        target = self._path(self.name_of(commit))
        self._files.make_directory(target.parent)
        with self._files.temporary(self._layout.tmp, self.encode(commit)) as source:
            # Taken before others see the file: `withdraw` must not remove a file that another writer links later.
            identity = self._files.identity(source)
            if not self._files.link_exclusive(source, target):
                identity = None
                # The other writer's last fsync may have failed, or its file may have rotted. The name determines the
                # content, so it is safe to replace the file with our bytes.
                self._files.rename(source, target)
        try:
            self._files.sync_directory(target.parent)
        except StorageIO as exc:
            raise StorageIO(
                f"{self._layout.name(target)} is published, but its durability is not confirmed: {exc}",
                errno=exc.errno,
                filename=exc.filename,
                hint="repeat the command once the disk works again",
            ) from exc
        self._look_again(self._layout.name(target))
        return identity

    def withdraw(self, commit: Commit, identity: tuple[int, ...]) -> None:
        """Undo `link`, which returned *identity*, unless another writer has rewritten the same record since."""
        path = self._path(self.name_of(commit))
        if self._files.identity(path) == identity:
            self._files.unlink(path)
            self._files.sync_directory(path.parent)

    def check_store(self) -> None:
        """
        Make sure that the store is still the one that was opened, and that this layerstore may write to it.

        Raises:
            Unsupported: The store was migrated since, or uses something that this layerstore might destroy unknowingly.
            IntegrityError: The store is damaged or gone, or another store is at its path.
        """
        unknown = self._check_identity()
        if unknown:
            raise Unsupported(
                f"the store uses {', '.join(unknown)}, which this layerstore does not know; "
                "it can be read, not written",
                hint="use a newer layerstore",
            )

    def _check_identity(self) -> list[str]:
        """Return the flags that this layerstore does not know; raise if the store is not the one that was opened."""
        layout = self._layout
        text = read_identity(layout, self._files, path=layout.root)
        if self._seen is not None and text == self._seen[0]:
            return self._seen[1]
        identity = StoreIdentity.decode(text, what=str(layout.identity))
        if identity.store_id != self._store_id:
            raise IntegrityError(
                f"{layout.root} was store {self._store_id} when it was opened and is store {identity.store_id} now",
                hint="open it again",
            )
        self._seen = text, identity.unknown_flags
        return self._seen[1]

    def _look_again(self, name: str) -> None:
        """Raise Unsupported if the store was migrated since it was opened: the migration may have missed *name*."""
        try:
            self.check_store()
        except Unsupported as exc:
            raise Unsupported(
                f"the store was migrated while {name} was written; whether the migration included it is not known",
                hint="save it again with the layerstore that reads this store now",
            ) from exc

    def remove(self, names: Collection[RecordName]) -> None:
        """Remove records for good, durably; for collections."""
        self.check_store()
        for name in names:
            self._files.unlink(self._path(name))
        # Sync once per run. A record that a power cut restores is complete: objects are removed only after this sync.
        for run in {name.run for name in names}:
            self._files.sync_directory(self._layout.run(run))

    # -- pins ----------------------------------------------------------------------------------------------------

    def listed_pins(self) -> list[str | Path]:
        """Return the names of all pins, and the path of everything else in ``pins/``."""
        names = self._files.names_there(self._layout.pins)
        if not names:
            # If a copy of the store lacks the empty folder, fine; if a migration moved the folder, this raises.
            self._check_identity()
        return [name if is_name(name) else self._layout.pin(name) for name in names]

    def pin_names(self) -> list[str]:
        """Return the names of all pins."""
        return [name for name in self.listed_pins() if isinstance(name, str)]

    def read_pin(self, name: str) -> Pin:
        """
        Return the pin *name*, checked.

        Raises:
            NotFound: No such pin exists.
            IntegrityError: The pin is damaged.
        """
        path = self._layout.pin(name)
        data = self._files.read_if_there(path, size_bytes_max=RECORD_BYTES_MAX)
        if data is None:
            raise self._no_pin(name)
        pin = unseal_pin(data, name=self._layout.name(path), store_id=self._store_id)
        if pin.name != name:
            raise IntegrityError(f"{self._layout.name(path)} does not hold the pin that its name says")
        return pin

    def _no_pin(self, name: str) -> NotFound:
        meant = nearest(name, self.pin_names())
        return NotFound(f"there is no pin {name!r}", hint=did_you_mean(meant, else_="layerstore pin --list"))

    def pins(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Pin | LayerstoreError]]:
        """Yield all pins, or the pins *names*: each name with the pin or the error in reading it; skip deleted pins."""
        for name in self.pin_names() if names is None else names:
            pin: Pin | LayerstoreError
            try:
                pin = self.read_pin(name)
            except NotFound:
                continue  # deleted in the meantime
            except LayerstoreError as exc:
                pin = exc
            yield name, pin

    def readable_pins(self) -> list[Pin]:
        """Return the readable pins: a damaged pin must not break the log; ``verify`` reports it."""
        return [pin for _, pin in self.pins() if isinstance(pin, Pin)]

    def link_pin(self, pin: Pin) -> None:
        """
        Make *pin* visible and durable.

        Raises:
            AlreadyExists: A pin of that name exists.
            Unsupported: The store was migrated since it was opened.
        """
        self.check_store()
        target = self._layout.pin(pin.name)
        envelope_name = self._layout.name(target)
        data = seal_pin(pin, name=envelope_name, store_id=self._store_id)
        with self._files.temporary(self._layout.tmp, data) as source:
            if not self._files.link_exclusive(source, target):
                # Unlike a record's, a pin's name does not determine its content: an existing pin is never replaced.
                raise AlreadyExists(
                    f"somebody else has just made the pin {pin.name!r}; nothing was changed",
                    hint=f"layerstore show {typed(pin.name)}",
                )
        self._files.sync_directory(target.parent)
        self._look_again(envelope_name)

    def delete_pin(self, name: str) -> None:
        """Delete the pin *name*, readable or not."""
        path = self._layout.pin(name)
        if not self._files.exists(path):
            raise self._no_pin(name)
        self._files.unlink(path)
        self._files.sync_directory(path.parent)
