"""
Mark: what is needed, found from records, pins, open parts and the trash themselves, never from the index.

Whatever cannot be read stops it: what that needs is not known.
"""

import contextlib
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from pathlib import Path

from layerstore.errors import IntegrityError, LayerstoreError, NotFound
from layerstore.format import STATE_MAGIC, VERSION_MAGIC
from layerstore.history import Needs, references_to
from layerstore.layers import typed
from layerstore.limits import BLOB_BYTES_MAX
from layerstore.model import BlobRef, CommitId, CommitRecord, ObjectId, Pin, Saving
from layerstore.progress import Progress
from layerstore.storage import RecordName, Repository, missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Unneeded:
    """An object that nothing needs, or only what is too young to go."""

    ref: BlobRef
    path: Path
    is_young: bool
    """Whether somebody may be about to name it."""


_NAMED, _SPARED = 0, 1
"""Why something is needed: a record, pin or part names it, or only a young blob does."""


class Marks:
    """What is needed, as far as has been looked; looking again finds what has come since."""

    def __init__(self, repo: Repository, *, old_before_ns: int, dead_before_ns: int, trash_before_ns: int) -> None:
        self._repo = repo
        self._seen: set[RecordName] = set()
        self._old_before_ns = old_before_ns
        self._dead_before_ns = dead_before_ns
        self._trash_before_ns = trash_before_ns
        self.needs = Needs(repo)
        self.dead_sessions: list[str] = []
        """Those in which nothing was done for so long that nobody will join their parts."""

    def look(
        self, progress: Progress, *, without: Set[RecordName] = frozenset(), has_to_be_whole: bool = False
    ) -> None:
        """
        Note what is needed by all that is there and was not seen yet, but for the records *without*.

        In the order in which a save goes from one to the next, so that what moves on meanwhile is seen all the same:
        parts, records, pins; and the trash last, into which records move, and out of which they are published again.

        Raises:
            IntegrityError: Something cannot be read, or, where it *has_to_be_whole*, is missing or cut short.
        """
        self._mark_parts()
        self._mark_records(progress, without, has_to_be_whole=has_to_be_whole)
        for pin in readable_pins(self._repo):
            with named(f"pin {pin.name!r}", gives_up=_deletes(pin.name)):
                new = self.needs.add_record(pin.record)
            if has_to_be_whole:
                self.check_whole(new, of=pin)
        self._mark_trash(without)

    def check_whole(self, refs: Iterable[BlobRef], *, of: Saving | Pin) -> None:
        """
        Make sure that *refs*, which *of* needs, are there with all their bytes; one that lies aside is.

        If what is to stay is hurt, the others must not go for its sake. Parts are not looked at: whoever wrote one has
        only just seen to its objects.

        Raises:
            IntegrityError: One is missing, or of another size.
        """
        for ref in refs:
            try:
                if self._repo.objects.find(ref) is None:
                    raise missing(ref)
            except IntegrityError as exc:
                if isinstance(of, Pin):
                    called, command = f"pin {of.name!r}", _deletes(of.name)
                else:
                    called = references_to(self._repo, [of])[0]
                    command = f"layerstore drop {typed(called)}"
                raise IntegrityError(
                    f"{called} is to stay and is not whole: {exc}",
                    hint=f"layerstore repair --from COPY may heal it; {command} gives it up",
                ) from exc

    def _mark_parts(self) -> None:
        self.dead_sessions.clear()  # one may have come to life again
        for session in self._repo.parts.sessions():
            if self._repo.parts.modified_ns(session) < self._dead_before_ns:
                self.dead_sessions.append(session)
                continue
            for part in self._repo.parts.of_session(session):
                with named(f"save {part.save} of session {session[:12]}"):
                    self.needs.add_part(part)

    def _mark_records(self, progress: Progress, without: Set[RecordName], *, has_to_be_whole: bool) -> None:
        for run in self._repo.records.runs():
            for name in self._repo.records.names(run):
                if name in self._seen or name in without:
                    continue
                called = f"{name.run}@{name.step}"
                with named(called, gives_up=f"layerstore drop {typed(called)}"):
                    record = self._repo.records.read(name).record
                    new = self.needs.add_record(record)
                if has_to_be_whole:
                    self.check_whole(new, of=record)
                self._seen.add(name)
                progress.advance(1)

    def _mark_trash(self, without: Set[RecordName]) -> None:
        for name in self._repo.trash.records():
            if name in self._seen or name in without or self._repo.trash.modified_ns(name) < self._trash_before_ns:
                continue
            # What rotted in the trash, or has lost an object there, holds nobody back: it was dropped.
            with contextlib.suppress(IntegrityError, NotFound):
                self.needs.add_record(self._repo.trash.read_record(name).record)
                self._seen.add(name)

    # -- what is not -----------------------------------------------------------------------------------------------

    def unneeded(self) -> Iterator[Unneeded]:
        """Yield what nothing needs of all objects at their places, folder by folder; what young blobs name is young."""
        for each in self._loose():  # all of them first: what one names may come before it
            if each.is_young:
                self.spare(each.ref)
        yield from self._loose()

    def doomed(self) -> Iterator[Unneeded]:
        """Yield those of them that are old; what was touched since they were listed last is young by now."""
        for each in self._loose():
            if each.is_young:
                self.spare(each.ref)
            else:
                yield each

    def _loose(self) -> Iterator[Unneeded]:
        for object_id, path in self._repo.objects.ids():
            if self.needs.number(object_id) != _NAMED and (found := self._look_at(object_id, path)):
                yield found

    def aside(self) -> Iterator[Unneeded]:
        """Yield what lies aside and nothing needs."""
        for object_id, path in self._repo.aside.objects():
            if object_id not in self.needs and (found := self._look_at(object_id, path)):
                yield found

    def is_needed(self, object_id: ObjectId, path: Path) -> bool:
        """Whether what lies aside at *path* is to go back to its place: what was touched since is, too."""
        return object_id in self.needs or (self._repo.files.modified_ns(path) or 0) >= self._old_before_ns

    def _look_at(self, object_id: ObjectId, path: Path) -> Unneeded | None:
        state = self._repo.files.state(path)
        if state is None:
            return None  # gone meanwhile
        return Unneeded(
            ref=BlobRef(id=object_id, size_bytes=state.size_bytes),
            path=path,
            is_young=state.modified_ns >= self._old_before_ns or object_id in self.needs,
        )

    def spare(self, ref: BlobRef) -> None:
        """
        Note what *ref* names, if it is a version or state blob.

        A young one stands for a record that is about to name it: its writer has only touched the blob.

        Raises:
            StorageIO: It cannot be read just now, so what it names would be taken for unneeded.
        """
        if ref.id in self.needs:
            return
        try:
            magic = blob_magic(self._repo, ref)
            if magic == VERSION_MAGIC:
                self.needs.add_version(ref, number=_SPARED)
            elif magic == STATE_MAGIC:
                self.needs.add_state(ref, number=_SPARED)
        except IntegrityError:
            return  # damaged, and named by nothing: nobody can be about to commit it


def blob_magic(repo: Repository, ref: BlobRef) -> bytes:
    """Return how the object *ref* begins if it may be a blob."""
    if ref.size_bytes > BLOB_BYTES_MAX:
        return b""
    with repo.objects.open(ref) as file:
        return file.read_at(0, min(len(VERSION_MAGIC), ref.size_bytes))


def bytes_of_only(repo: Repository, record: CommitRecord, *, commit: str) -> int:
    """Return at most how many bytes only *record*, that of *commit*, keeps: versions and states of no other commit."""
    others: set[BlobRef] = set()
    kept = [pin.record for pin in repo.records.readable_pins()]
    for name in repo.records.names(record.run):
        if name.id != commit:
            with contextlib.suppress(LayerstoreError):  # damaged: then it counts for nothing here
                kept.append(repo.catalog.commit(name).record)
    for other in kept:
        others.update(entry.version for entry in other.layers)
        others.update(other.states)
    needs = Needs(repo)
    own = [entry for entry in record.layers if entry.version not in others]
    with contextlib.suppress(IntegrityError):  # what it has lost already frees nothing
        needs_of = replace(record, layers=tuple(own), states=tuple(ref for ref in record.states if ref not in others))
        return sum(ref.size_bytes for ref in needs.add_record(needs_of))
    return 0


def pinned_commits(repo: Repository) -> dict[CommitId, str]:
    """Return the commits that pins name as they stand; a pinned composite keeps its own layers, not its base."""
    found = {}
    for pin in readable_pins(repo):
        name = RecordName(pin.record.run, pin.record.step, pin.base)
        called = f"{name.run}@{name.step}"
        with named(called, gives_up=f"layerstore drop {typed(called)}"):
            if name in repo.records.names(name.run) and repo.records.read(name).record.layers == pin.record.layers:
                found[pin.base] = pin.name
    return found


def readable_pins(repo: Repository) -> Iterator[Pin]:
    """Yield every pin; raises IntegrityError at one that is damaged."""
    for name in repo.records.pin_names():
        with contextlib.suppress(NotFound), named(f"pin {name!r}", gives_up=_deletes(name)):
            yield repo.records.read_pin(name)


def _deletes(pin: str) -> str:
    return f"layerstore pin --delete {typed(pin)}"


@contextlib.contextmanager
def named(called: str, *, gives_up: str | None = None) -> Iterator[None]:
    """Say of a damage whose it is, and the two ways on: heal it, or give it up by name."""
    try:
        yield
    except IntegrityError as exc:
        hint = "layerstore repair --from COPY may heal it" + (f"; {gives_up} gives it up" if gives_up else "")
        raise IntegrityError(f"what {called} needs is not known: {exc}", hint=hint) from exc


@contextlib.contextmanager
def concluding(outcome: str) -> Iterator[None]:
    """Say of a damage what it means for the collection that found it."""
    try:
        yield
    except IntegrityError as exc:
        exc.message = f"{exc.message}; {outcome}"
        raise
