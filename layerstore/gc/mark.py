"""
Mark: find what is needed, from the records, pins, parts of unfinished saves and trash themselves, not from the index.

Anything unreadable outside the trash stops the collection, because what it needs is unknown.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from layerstore.errors import IntegrityError, LayerstoreError, NotFound
from layerstore.format import STATE_MAGIC, VERSION_MAGIC
from layerstore.history import Needs, references_to
from layerstore.layers import typed
from layerstore.limits import BLOB_BYTES_MAX
from layerstore.model import BlobRef, Commit, ObjectId, Pin, Saving
from layerstore.progress import Progress
from layerstore.storage import RecordName, RecordRow, Repository, RunView
from layerstore.units import short_id

Listed = TypeVar("Listed", RecordName, str)

_BY_STEP = attrgetter("step")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnneededObject:
    """An object that nothing needs, as far as is known."""

    ref: BlobRef
    path: Path
    is_young: bool
    """Whether a writer may be about to refer to the object, or something refers to it now."""


_NAMED, _SPARED = 0, 1
"""Why an object is needed: a record, pin or part refers to it, or only a young blob does."""


class Marks:
    """The set of needed objects; each further look adds what is new."""

    def __init__(self, repo: Repository, *, old_before_ns: int, dead_before_ns: int, trash_before_ns: int) -> None:
        self._repo = repo
        self._seen: set[RecordName] = set()
        self.old_before_ns = old_before_ns
        self.dead_before_ns = dead_before_ns
        self.trash_before_ns = trash_before_ns
        self.needs = Needs(repo)
        self.dead_sessions: list[str] = []
        """Sessions idle for so long that nobody will join their parts."""

    def look(
        self, progress: Progress, *, without: Set[RecordName] = frozenset(), has_to_be_whole: bool = False
    ) -> None:
        """
        Mark what is needed by everything not seen before, except for the records *without*.

        Looks at parts, records, pins, then the trash: saves move in this order, so none is missed while moving.

        Raises:
            IntegrityError: Something cannot be read, or, with *has_to_be_whole*, an object is missing.
        """
        self._mark_parts()
        self._mark_records(progress, without, has_to_be_whole=has_to_be_whole)
        # Reread each time: unlike a record, a pin may hold a different commit now.
        for pin in readable_pins(self._repo):
            with named(f"pin {pin.name!r}", gives_up=_deletes(pin.name)):
                new = self.needs.add_record(pin.record)
            if has_to_be_whole:
                self.check_present(new, holder=pin)
        self._mark_trash(without)

    def check_present(self, refs: Iterable[BlobRef], *, holder: Saving | Pin) -> None:
        """
        Make sure that *refs*, which *holder* is the first to need, exist, in ``objects/`` or aside.

        While a commit that stays is incomplete, no other commit may go: its objects might be the only replacement for
        what is missing. Parts are not checked: their writer has just checked them. An object is looked up
        individually only if the store's listing lacks it, since there may be millions.

        Raises:
            IntegrityError: An object is missing.
        """
        for ref in refs:
            if ref.id in self._listed:
                self._listed.remove(ref.id)  # checked only once; frees memory, as there may be millions
                continue
            try:
                self._repo.objects.check_there(ref)
            except IntegrityError as exc:
                if isinstance(holder, Pin):
                    holder_name, command = f"pin {holder.name!r}", _deletes(holder.name)
                else:
                    holder_name = references_to(self._repo, [holder])[0]
                    command = f"layerstore drop {typed(holder_name)}"
                raise IntegrityError(
                    f"{holder_name} stays, but is incomplete: {exc}",
                    hint=f"layerstore repair --from COPY may heal it; {command} removes it",
                ) from exc

    @cached_property
    def _listed(self) -> set[ObjectId]:
        """The objects that the store had at the first check, except those already checked."""
        return {*self._repo.objects.ids(), *self._repo.aside.ids()}

    def _mark_parts(self) -> None:
        self.dead_sessions.clear()  # a session may have become active again
        for session in _by_name(self._repo, self._repo.parts.listed()):
            if self._repo.parts.modified_ns(session) < self.dead_before_ns:
                self.dead_sessions.append(session)
                continue
            with named(f"session {short_id(session)}", gives_up="layerstore repair"):
                for part in self._repo.parts.of_session(session):
                    self.needs.add_part(part)

    def _mark_records(self, progress: Progress, without: Set[RecordName], *, has_to_be_whole: bool) -> None:
        listed = list(_by_name(self._repo, self._repo.records.listed()))
        names = [name for name in listed if name not in self._seen and name not in without]
        # Records dropped or replaced since they were listed are marked later, with the trash.
        for name, commit in self._repo.records.each(names):
            with commit_named(name):
                if isinstance(commit, LayerstoreError):
                    raise commit
                new = self.needs.add_record(commit.record)
            if has_to_be_whole:
                self.check_present(new, holder=commit.record)
            self._seen.add(name)
            progress.advance(1)

    def _mark_trash(self, without: Set[RecordName]) -> None:
        for name in _by_name(self._repo, self._repo.trash.listed()):
            if name in self._seen or name in without or self._repo.trash.modified_ns(name) < self.trash_before_ns:
                continue
            # Damage in the trash must not stop the collection: the commit was dropped.
            with contextlib.suppress(IntegrityError, NotFound):
                self.needs.add_readable(self._repo.trash.read_record(name).record)
                self._seen.add(name)

    # -- what is not needed ----------------------------------------------------------------------------------------

    def unneeded(self) -> Iterator[UnneededObject]:
        """Yield the unneeded objects in ``objects/``; those that a young blob refers to count as young."""
        for unneeded in self._loose():  # two passes: an object may come before its blob
            if unneeded.is_young:
                self.protect_named(unneeded.ref)
        yield from self._loose()

    def unmarked_old(self) -> Iterator[UnneededObject]:
        """Yield the old unneeded objects; an object that was touched since it was listed is young now."""
        for unneeded in self._loose():
            if unneeded.is_young:
                self.protect_named(unneeded.ref)
            else:
                yield unneeded

    def _loose(self) -> Iterator[UnneededObject]:
        for object_id in self._repo.objects.ids():
            # An object that only a young blob protects is yielded, as young: it is not needed yet.
            if self.needs.number(object_id) == _NAMED:
                continue
            if unneeded := self.look_at(object_id, self._repo.layout.object(object_id)):
                yield unneeded

    def aside(self, ids: Iterable[ObjectId]) -> Iterator[UnneededObject]:
        """Yield the objects *ids* that lie aside; objects needed now count as young."""
        for object_id in ids:
            if unneeded := self.look_at(object_id, self._repo.layout.aside / object_id):
                yield unneeded

    def look_at(self, object_id: ObjectId, path: Path) -> UnneededObject | None:
        """Look at the object at *path*; None if it is gone."""
        state = self._repo.files.state(path)
        if state is None:
            return None
        return UnneededObject(
            ref=BlobRef(id=object_id, size_bytes=state.st_size),
            path=path,
            is_young=state.st_mtime_ns >= self.old_before_ns or object_id in self.needs,
        )

    def protect_named(self, ref: BlobRef) -> None:
        """
        If *ref* is a version or state blob, count the objects that it refers to as needed.

        A writer that inherits a layer touches only the layer's blob, so a young blob means that a record may follow.

        Raises:
            StorageIO: The blob cannot be read just now; its objects would wrongly count as unneeded.
        """
        if ref.id in self.needs:
            return
        try:
            if is_blob(self._repo, ref):
                self.needs.add_blob(ref, number=_SPARED)
        except IntegrityError:
            return  # damaged: no writer can be about to refer to it


def is_blob(repo: Repository, ref: BlobRef) -> bool:
    """Whether the object *ref* exists, has the magic of a version or state blob, and is small enough for a blob."""
    if ref.size_bytes > BLOB_BYTES_MAX:
        return False
    try:
        with repo.objects.open(ref) as file:
            return file.read_at(0, min(len(VERSION_MAGIC), ref.size_bytes)) in {VERSION_MAGIC, STATE_MAGIC}
    except IntegrityError:
        return False  # gone in the meantime


def bytes_of_only(repo: Repository, going: Sequence[Commit]) -> list[int]:
    """
    Return, for each of *going*, at most how many bytes it frees if all of them go; shared bytes count for the first.

    Objects that a pin needs do not count, nor do those that a commit shortly before or after one of *going* needs, in
    any attempt. All other commits have too many blobs to read: of what they need, only versions that *going* have too,
    and states of the same step, are left out. So an object still counts if another version of theirs needs it.
    """
    ids = {commit.id for commit in going}
    others = Needs(repo)
    for pin in repo.records.readable_pins():
        others.add_readable(pin.record)
    # Commits of nearby steps first: they share the most blobs, and a blob that is already known is not read again.
    for run in dict.fromkeys(commit.run for commit in going):
        rows = sorted((row for row in repo.catalog.view(run).rows.values() if row.id not in ids), key=_BY_STEP)
        near: dict[RecordName, None] = {}
        for commit in going:
            if commit.run == run:
                after = bisect_right(rows, commit.step, key=_BY_STEP)
                near |= dict.fromkeys(row.name for row in rows[max(after - 2, 0) : after + 2])
        for name in near:
            with contextlib.suppress(LayerstoreError):  # a damaged commit excludes nothing
                record = repo.catalog.commit(name).record
                others.add_readable(record)
                others.add(record.blobs)
    for blob in _shared_with_others(repo, going):
        with contextlib.suppress(IntegrityError, NotFound):
            others.add_blob(blob)
    needs, sizes_bytes = Needs(repo, besides=others), []
    for commit in going:
        size_bytes = 0
        with contextlib.suppress(IntegrityError):  # lost objects free nothing
            size_bytes = sum(ref.size_bytes for ref in needs.add_record(commit.record))
        sizes_bytes.append(size_bytes)
    return sizes_bytes


def _shared_with_others(repo: Repository, going: Sequence[Commit]) -> Iterator[BlobRef]:
    """Yield the blobs of *going* that other commits in the index need too: inherited layers, forks, retries, copies."""
    versions = {bytes.fromhex(entry.version.id): entry.version for commit in going for entry in commit.record.layers}
    ids, own_runs, steps = {commit.id for commit in going}, {commit.run for commit in going}, {c.step for c in going}
    for run in repo.catalog.runs():
        view = repo.catalog.find(run)
        for row in () if view is None else view.rows.values():
            if row.id in ids:
                continue
            shared = versions.keys() & row.version_ids
            yield from (versions[version] for version in shared)
            # The index does not list states; only records do. A retry of a step may share states, but not weights.
            if row.step in steps and (shared or run in own_runs):
                with contextlib.suppress(LayerstoreError):
                    yield from repo.catalog.commit(row.name).record.states


def notes_on_exact(repo: Repository, view: RunView, going: Set[str]) -> tuple[str, ...]:
    """Return a note if *going* has the last exact saves of *view*, no pin keeps an exact one, and other saves stay."""
    stay = [row for row in view.visible if row.id not in going]
    goes = any(row.is_exact for row in view.visible if row.id in going)
    pinned = (pin.record for pin in repo.records.readable_pins() if pin.record.run == view.run)
    if not (stay and goes) or any(row.is_exact for row in stay) or any(record.is_exact for record in pinned):
        return ()
    [newest], others = references_to(repo, stay[-1:]), len(stay) - 1
    were = f"and {others} other{'s' if others > 1 else ''} were" if others else "was"
    return (f"no exact save of {view.run} is left: {newest} {were} not kept bit for bit",)


def pin_names(repo: Repository) -> Iterator[str]:
    """Yield the names of all pins; raise IntegrityError if anything else lies in ``pins/``."""
    return _by_name(repo, repo.records.listed_pins())


def readable_pins(repo: Repository, names: Iterable[str] | None = None) -> Iterator[Pin]:
    """Yield all pins, or the pins *names*; raise IntegrityError if a pin is damaged, or if anything else is listed."""
    for name, pin in repo.records.pins(pin_names(repo) if names is None else names):
        with named(f"pin {name!r}", gives_up=_deletes(name), copy_helps="shows what the pin refers to in that copy"):
            if isinstance(pin, LayerstoreError):
                raise pin
        yield pin


def _by_name(repo: Repository, listed: Iterable[Listed | Path]) -> Iterator[Listed]:
    """Yield the names of *listed*; raise IntegrityError at a path, as it may be a renamed record, pin or part."""
    for entry in listed:
        if isinstance(entry, Path):
            raise stranger(repo.layout.name(entry))
        yield entry


def stranger(name: str, *, remote: str | None = None) -> IntegrityError:
    """Return the error for the file or folder *name* among records, pins or parts, in the store or in a *remote*."""
    place, lists = ("the store", "verify") if remote is None else ("the bucket", f"verify --remote {typed(remote)}")
    return IntegrityError(
        f"{name} is not named like a record, pin or part, so what it needs is unknown",
        hint=f"give it back its name, or move it out of {place}; layerstore {lists} lists all such files",
    )


def _deletes(pin: str) -> str:
    return f"layerstore pin --delete {typed(pin)}"


@contextlib.contextmanager
def named(called: str, *, gives_up: str | None = None, copy_helps: str = "may heal it") -> Iterator[None]:
    """Add to an IntegrityError what is damaged, and the remedies: rename it back, use a copy, or give it up."""
    try:
        yield
    except IntegrityError as exc:
        remedies = (
            # A renamed record needs only its old name; if the rename overwrote another record, that one needs a copy.
            exc.hint if "written_as" in exc.facts else None,
            f"layerstore repair --from COPY {copy_helps}",
            gives_up and f"{gives_up} removes it{' if it is a copy' if 'written_as' in exc.facts else ''}",
        )
        hint = "; ".join(filter(None, remedies))
        raise IntegrityError(f"cannot tell what {called} needs: {exc}", hint=hint) from exc


def commit_named(commit: RecordName | RecordRow) -> contextlib.AbstractContextManager[None]:
    """Add *commit*, and the remedies, to the message of an IntegrityError."""
    reference = f"{commit.run}@{commit.step}"
    return named(reference, gives_up=f"layerstore drop {typed(reference)}")


@contextlib.contextmanager
def concluding(outcome: str) -> Iterator[None]:
    """Add *outcome* to the message of an IntegrityError."""
    try:
        yield
    except IntegrityError as exc:
        exc.message = f"{exc.message}; {outcome}"
        raise
