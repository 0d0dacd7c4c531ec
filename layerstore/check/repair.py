"""
Repair: what is damaged moves to the trash, and the same name is fetched from another store that has it sound.

Nothing is guessed, proved from remains, or put together. What no source has stays reported: ingesting the checkpoint
again puts objects back, and `drop` or `pin --delete` gives up a record or pin by name.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from layerstore.check.damage import Cost, Costs, Damage, holders_of
from layerstore.check.verify import verify_store
from layerstore.errors import (
    PROCESS_ERRNOS,
    IntegrityError,
    InvalidInput,
    LayerstoreError,
    NotFound,
    Overtaken,
    StorageIO,
    Unsupported,
)
from layerstore.history import objects_of_state, objects_of_version, references_to
from layerstore.model import BlobRef, Commit, CommitRecord, ObjectId, Part
from layerstore.progress import Progress
from layerstore.publish import Transaction, republish
from layerstore.storage import Files, RecordName, Repository, open_repository, read_chunks

_OF_OBJECTS = frozenset({"version", "state", "object"})
# A blob that is fetched names objects that nobody could look at before; what they lack is found by the next look.
_LOOKS_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A damaged file that is in the trash, or would be."""

    path: str
    """Where it was, below the store."""
    kind: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A record or object that is whole again, or would be."""

    kind: str
    path: str
    source: str
    """The store that has it."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PinElsewhere:
    """A damaged pin, as a source has it; ours may have been moved since."""

    name: str
    reference: str
    """What it means there, as RUN@STEP; of a mixture its base."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What a repair did, or would do."""

    moved: tuple[Moved, ...] = ()
    fetched: tuple[Fetched, ...] = ()
    lost: tuple[Cost, ...] = ()
    """What commits and pins lack that no source has."""
    unreadable: tuple[str, ...] = ()
    """Commits and pins whose record no source has: a collection stops at them."""
    reingest: tuple[str, ...] = ()
    """The saves that wrote what is lost: ingesting their checkpoints again puts it back."""
    pins_elsewhere: tuple[PinElsewhere, ...] = ()
    newer: tuple[str, ...] = ()
    """What only a newer layerstore can read; it is left as it is."""
    reindexed: bool = False

    @property
    def has_done(self) -> bool:
        """Whether there was anything to do."""
        return bool(self.moved or self.fetched or self.reindexed)

    @property
    def has_lost(self) -> bool:
        """Whether something is still missing."""
        return bool(self.lost or self.unreadable)


@contextlib.contextmanager
def opened_sources(repo: Repository, paths: Iterable[Path]) -> Iterator[tuple[Repository, ...]]:
    """
    Open the stores at *paths*, which are only read, until the block is left.

    Raises:
        InvalidInput: One is no store, or the very store that is to be repaired.
    """
    with contextlib.ExitStack() as stack:
        found = []
        for path in paths:
            try:
                other = open_repository(path, Files())
            except NotFound as exc:
                raise InvalidInput(
                    f"{path} is no store, and copies are taken from stores",
                    hint="to heal from a checkpoint, ingest it again",
                ) from exc
            stack.callback(other.catalog.close)
            if other.layout.root == repo.layout.root:
                raise InvalidInput(f"{path} is the store that is to be repaired", hint="name another one")
            found.append(other)
        yield tuple(found)


def plan_repair(repo: Repository, sources: Sequence[Repository], *, read_data: bool, progress: Progress) -> Repaired:
    """Find out what would be done; nothing is written."""
    return _Repair(repo, sources, read_data=read_data, dry_run=True).look(progress)


def execute_repair(repo: Repository, sources: Sequence[Repository], *, read_data: bool, progress: Progress) -> Repaired:
    """
    Do what `plan_repair` finds.

    Stopped at any moment, it can be run again: what moved lies in the trash, what was fetched is whole.

    Raises:
        Locked: A collection or another repair is under way.
    """
    repo.prepare_writing()
    with repo.lock_gc() as hold:
        done = Repaired()
        for _ in range(_LOOKS_MAX):
            hold.check()
            found = _Repair(repo, sources, read_data=read_data, dry_run=False).look(progress)
            done = replace(
                found,
                moved=(*done.moved, *found.moved),
                fetched=(*done.fetched, *found.fetched),
                reindexed=done.reindexed or found.reindexed,
            )
            if not found.fetched:
                break
        return done


class _Repair:
    """One look at the store, and what follows from it."""

    def __init__(self, repo: Repository, sources: Sequence[Repository], *, read_data: bool, dry_run: bool) -> None:
        self._repo = repo
        self._sources = sources
        self._read_data = read_data
        self._dry_run = dry_run
        self._moved: dict[str, Moved] = {}
        self._fetched: dict[str, Fetched] = {}

    def look(self, progress: Progress) -> Repaired:
        verdict = verify_store(self._repo, read_data=self._read_data, progress=progress)
        lost: list[Damage] = []
        unreadable: list[str] = []
        newer: list[str] = []
        pins: list[PinElsewhere] = []
        reindexed = False
        for damage in verdict.damaged:
            if damage.kind in _OF_OBJECTS:
                if not self._object(damage):
                    lost.append(damage)
            elif self._is_newer(damage):
                newer.append(damage.path)
            elif damage.kind == "record":
                if not self._record(damage):
                    unreadable += damage.needed_by
            elif damage.kind == "pin":
                unreadable.append(damage.id)
                pins += self._pins_elsewhere(damage.id)
            elif damage.kind == "index":
                reindexed = True
            elif not self._is_readable_part(damage):
                self._take_away(self._repo.layout.root / damage.path, damage)
        if reindexed and not self._dry_run:
            with self._repo.lock_index():
                self._repo.catalog.rebuild()
        blobs = {blob for damage in lost for blob in damage.blobs}
        holders = holders_of(self._repo, blobs) if blobs else {}
        origins = {origin for holder in holders.values() for origin in holder.origins}
        return Repaired(
            moved=tuple(self._moved.values()),
            fetched=tuple(self._fetched.values()),
            lost=Costs(holders)(blobs),
            unreadable=tuple(dict.fromkeys(unreadable)),
            reingest=tuple(dict.fromkeys(references_to(self._repo, sorted(origins, key=lambda of: (of.run, of.step))))),
            pins_elsewhere=tuple(pins),
            newer=tuple(newer),
            reindexed=reindexed,
        )

    def _is_newer(self, damage: Damage) -> bool:
        repo = self._repo
        try:
            if damage.kind == "pin":
                repo.records.read_pin(damage.id)
            elif damage.kind == "part":
                return isinstance(dict(repo.parts.all()).get(repo.layout.root / damage.path), Unsupported)
            elif damage.kind == "record" and (name := repo.records.name_at(repo.layout.root / damage.path)):
                repo.records.read(name)
        except Unsupported:
            return True
        except LayerstoreError:
            return False
        return False

    def _is_readable_part(self, damage: Damage) -> bool:
        """
        Whether *damage* is of a part that can be read by now: its save goes on.

        Raises:
            StorageIO: There are too few descriptors, say, which says nothing of the part.
        """
        found = dict(self._repo.parts.all()).get(self._repo.layout.root / damage.path)
        if isinstance(found, StorageIO) and found.errno in PROCESS_ERRNOS:
            raise found
        return isinstance(found, Part)

    def _take_away(self, path: Path, damage: Damage) -> None:
        if not self._dry_run and self._repo.trash.take_damaged(path) is None:
            return  # gone meanwhile
        self._note_moved(path, damage)

    def _note_moved(self, path: Path, damage: Damage) -> None:
        name = self._repo.layout.name(path)
        self._moved[name] = Moved(path=name, kind=damage.kind, reason=damage.reason)

    # -- objects -------------------------------------------------------------------------------------------------

    def _object(self, damage: Damage) -> bool:
        """Move what lies at its place to the trash and fetch it; return whether a source has it."""
        assert damage.size_bytes is not None, "verify says the size of every object"
        ref = BlobRef(id=ObjectId(damage.id), size_bytes=damage.size_bytes)
        home = self._repo.layout.object(ref.id)
        if self._repo.objects.is_whole(home, ref.id):
            # Whole, and not what a record takes it for: no source has a better one.
            return False
        source = self._source_of(ref)
        if self._repo.files.exists(home):
            self._take_away(home, damage)
        if source is not None:
            self._fetch(ref, source, kind=damage.kind)
        return source is not None or self._repo.objects.is_sound(self._repo.layout.aside / ref.id, ref)

    def _source_of(self, ref: BlobRef) -> Repository | None:
        found = (each for each in self._sources if each.objects.is_sound(each.layout.object(ref.id), ref))
        return next(found, None)

    def _fetch(self, ref: BlobRef, source: Repository, *, kind: str) -> None:
        path = self._repo.layout.object_name(ref.id)
        if not self._dry_run:
            with Transaction(self._repo) as tx, source.files.open(source.layout.object(ref.id)) as file:
                tx.objects.stage(ref, read_chunks(file))
                tx.objects.publish()
        self._fetched[path] = Fetched(kind=kind, path=path, source=str(source.layout.root), size_bytes=ref.size_bytes)

    # -- records -------------------------------------------------------------------------------------------------

    def _record(self, damage: Damage) -> bool:
        """Put back a record that a source has, with what it needs; return whether one does. Else it stays in place."""
        repo = self._repo
        path = repo.layout.root / damage.path
        name = repo.records.name_at(path)
        if name is None:
            return False
        for source in self._sources:
            with contextlib.suppress(IntegrityError, NotFound):  # it lacks it, too, or has it damaged
                commit = source.records.read(name)
                self._fetch_needs(commit.record, source)
                self._put_back(name, commit, source, damage)
                return True
        return False

    def _put_back(self, name: RecordName, commit: Commit, source: Repository, damage: Damage) -> None:
        repo = self._repo
        path = repo.layout.record(name.run, name.step, name.id)
        # It keeps its place until it is replaced: whoever repeats a killed repair would not know of one that is gone.
        if self._dry_run or not self._repo.trash.keep_damaged(path):
            self._take_away(path, damage)
        else:
            self._note_moved(path, damage)
        if not self._dry_run:
            try:
                republish(repo, commit)
            except Overtaken as exc:
                raise IntegrityError(f"{name.run}@{name.step} cannot be put back: {exc}") from exc
        called = repo.layout.name(path)
        size_bytes = len(repo.records.encode(commit))
        self._fetched[called] = Fetched(
            kind="record", path=called, source=str(source.layout.root), size_bytes=size_bytes
        )

    def _fetch_needs(self, record: CommitRecord, source: Repository) -> None:
        """
        Fetch what *record* needs and is not here.

        Raises:
            IntegrityError: *source* lacks it, too, or has it damaged.
        """
        for entry in record.layers:
            self._fetch_missing(entry.version, source, objects_of_version(source.version(entry.version)))
        for state in record.states:
            self._fetch_missing(state, source, objects_of_state(source.state(state)))

    def _fetch_missing(self, blob: BlobRef, source: Repository, named: Iterable[BlobRef]) -> None:
        for ref in (*named, blob):
            if self._repo.objects.find(ref) is None:
                source.objects.verify(ref)
                self._fetch(ref, source, kind="object")

    def _pins_elsewhere(self, name: str) -> Iterator[PinElsewhere]:
        for source in self._sources:
            with contextlib.suppress(LayerstoreError):  # none there, or as damaged
                record = source.records.read_pin(name).record
                yield PinElsewhere(name=name, reference=f"{record.run}@{record.step}", source=str(source.layout.root))
