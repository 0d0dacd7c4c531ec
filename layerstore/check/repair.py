"""
Repair: move damaged files to the trash, and fetch intact copies from another store.

If asked to, it rewrites ``store.json``, with the store id that most records state.

Nothing else is inferred. What no source has stays lost, and is reported: ingesting the checkpoint again puts objects
back; `drop` or `pin --delete` gives up a record or pin by name.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from layerstore.check.damage import Cost, Costs, Damage, holders_of
from layerstore.check.verify import verify_store
from layerstore.disk import Files
from layerstore.errors import (
    IntegrityError,
    InvalidInput,
    LayerstoreError,
    NotFound,
    Overtaken,
    Unsupported,
)
from layerstore.format import StoreIdentity, stated_flags
from layerstore.history import named_by, references_to
from layerstore.layout import Layout
from layerstore.limits import OWN_JSON_BYTES_MAX
from layerstore.model import BlobRef, Commit, CommitRecord, ObjectId
from layerstore.progress import Progress
from layerstore.publish import Transaction, republish
from layerstore.storage import RecordName, RecordStore, Repository, Trash, stated_ids

_OF_OBJECTS = frozenset({"version", "state", "object"})
# A fetched blob refers to objects that could not be checked before, so the store is verified again, up to this often.
_LOOKS_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A damaged file that was moved to the trash, or would be."""

    path: str
    """Relative to the store's folder."""
    kind: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A record or object that was fetched, or would be."""

    _JSON: ClassVar = "kind path from=source bytes=size_bytes"

    kind: str
    path: str
    source: str
    """The store that it comes from."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PinElsewhere:
    """A source's copy of a damaged pin, which may be older than the damaged one."""

    _JSON: ClassVar = "pin=name reference store=source"

    name: str
    reference: str
    """The RUN@STEP that the pin refers to in the source; for a composite, the base's."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What a repair did, or would do."""

    moved: tuple[Moved, ...] = ()
    fetched: tuple[Fetched, ...] = ()
    lost: tuple[Cost, ...] = ()
    """What commits and pins still lack, because no source has it."""
    unreadable: tuple[str, ...] = ()
    """Commits and pins whose record no source has; they block gc."""
    reingest: tuple[str, ...] = ()
    """The saves whose checkpoints, ingested again, put back what is lost."""
    pins_elsewhere: tuple[PinElsewhere, ...] = ()
    strangers: tuple[str, ...] = ()
    """Files and folders among records, pins and parts whose names fit none of these; they stay, and block gc."""
    newer: tuple[str, ...] = ()
    """Files that only a newer layerstore can read, left as they are."""
    reindexed: bool = False

    @property
    def has_done(self) -> bool:
        """Whether anything was done."""
        return bool(self.moved or self.fetched or self.reindexed)

    @property
    def has_lost(self) -> bool:
        """Whether something is still missing."""
        return bool(self.lost or self.unreadable or self.strangers)


@contextlib.contextmanager
def opened_sources(
    repo: Repository, sources: Mapping[str, Callable[[], Repository]]
) -> Iterator[tuple[Repository, ...]]:
    """
    Open *sources* for reading until the block ends; their keys are the user's names for them.

    Raises:
        InvalidInput: A source is not a store, or is the store to be repaired.
    """
    with contextlib.ExitStack() as stack:
        repos = []
        for name, opened in sources.items():
            try:
                other = opened()
            except NotFound as exc:
                raise InvalidInput(
                    f"{name} is neither a store nor a remote of this store, as --from requires",
                    hint="to heal from a checkpoint, ingest it again",
                ) from exc
            stack.callback(other.close)
            if other.layout.root == repo.layout.root:
                raise InvalidInput(f"{name} is the store that is to be repaired", hint="name another one")
            repos.append(other)
        yield tuple(repos)


def plan_repair(repo: Repository, sources: Sequence[Repository], *, read_data: bool, progress: Progress) -> Repaired:
    """Return what `execute_repair` would do, without writing."""
    return _Repair(repo, sources, read_data=read_data, dry_run=True).look(progress)


def execute_repair(repo: Repository, sources: Sequence[Repository], *, read_data: bool, progress: Progress) -> Repaired:
    """
    Move damaged files to the trash, and fetch what *sources* have intact.

    If it is killed, repeat it: moved files are in the trash, fetched ones are complete.

    Raises:
        Locked: A collection or another repair is running.
    """
    repo.prepare_writing()
    with repo.lock_gc() as hold:
        total = Repaired()
        for _ in range(_LOOKS_MAX):
            hold.check()
            repaired = _Repair(repo, sources, read_data=read_data, dry_run=False).look(progress)
            total = replace(
                repaired,
                moved=(*total.moved, *repaired.moved),
                fetched=(*total.fetched, *repaired.fetched),
                reindexed=total.reindexed or repaired.reindexed,
            )
            if not repaired.fetched:
                break
        return total


class _Repair:
    """One verify of the store, and the repairs that follow from it."""

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
        strangers: list[str] = []
        newer: list[str] = []
        pins: list[PinElsewhere] = []
        reindexed = False
        for damage in verdict.damaged:
            if damage.kind in _OF_OBJECTS:
                if not self._object(damage):
                    lost.append(damage)
            elif damage.error == Unsupported.kind:
                newer.append(damage.path)
            elif damage.kind == "record":
                if not self._record(damage):
                    unreadable += damage.needed_by
            elif damage.kind == "pin":
                unreadable.append(damage.id)
                pins += self._pins_elsewhere(damage.id)
            elif damage.kind == "index":
                reindexed = True
            elif damage.kind == "stranger":  # it may be a renamed record: in the trash, it would protect nothing
                strangers.append(damage.path)
            elif damage.error in {"", IntegrityError.kind}:  # a part that cannot be read just now may be intact
                self._take_away(self._repo.layout.root / damage.path, damage)
        if reindexed and not self._dry_run:
            with self._repo.lock_index():
                self._repo.catalog.rebuild()
        blobs = {blob for damage in lost for blob in damage.blobs}
        holders = holders_of(self._repo, blobs) if blobs else {}
        own = {blob for damage in lost for blob in damage.blobs if not self._only_refers(blob, damage.id)}
        origins = {saved for holder in holders.values() for blob, saved in holder.origins.items() if blob in own}
        return Repaired(
            moved=tuple(self._moved.values()),
            fetched=tuple(self._fetched.values()),
            lost=Costs(holders)(blobs),
            unreadable=tuple(dict.fromkeys(unreadable)),
            reingest=tuple(
                dict.fromkeys(references_to(self._repo, sorted(origins, key=lambda origin: (origin.run, origin.step))))
            ),
            pins_elsewhere=tuple(pins),
            strangers=tuple(strangers),
            newer=tuple(newer),
            reindexed=reindexed,
        )

    def _take_away(self, path: Path, damage: Damage) -> None:
        if not self._dry_run and self._repo.trash.take_damaged(path) is None:
            return  # gone since the verify
        self._note_moved(path, damage)

    def _note_moved(self, path: Path, damage: Damage) -> None:
        name = self._repo.layout.name(path)
        self._moved[name] = Moved(path=name, kind=damage.kind, reason=damage.reason)

    # -- objects -------------------------------------------------------------------------------------------------

    def _object(self, damage: Damage) -> bool:
        """Move the damaged file to the trash, and fetch a sound copy; return False if the object stays lost."""
        assert damage.size_bytes is not None, "verify says the size of every object"
        ref = BlobRef(id=ObjectId(damage.id), size_bytes=damage.size_bytes)
        home = self._repo.layout.object(ref.id)
        before = self._repo.files.identity(home)
        if self._repo.objects.is_whole(home, ref.id):
            return self._repo.objects.is_sound(home, ref)  # if unsound, a record states a wrong size for it
        if self._repo.files.identity(home) != before:
            return True  # just rewritten, as by an ingest; if it is still damaged, the next repair finds it
        source = self._source_of(ref)
        if self._repo.files.exists(home):
            self._take_away(home, damage)
        if source is not None:
            self._fetch(ref, source, kind=damage.kind)
        # An object that gc has moved aside is not lost: readers also look for it in ``gc/aside/``.
        return source is not None or self._repo.objects.is_sound(self._repo.layout.aside / ref.id, ref)

    def _only_refers(self, blob: BlobRef, object_id: str) -> bool:
        """Whether *blob* is a version that needs the object only as the reference from which differences are coded."""
        try:
            version = self._repo.version(blob)
        except IntegrityError:  # *blob* is a state, or is lost itself
            return False
        return object_id in {stored.id for stored in version.references} - {stored.id for stored in version.objects}

    def _source_of(self, ref: BlobRef) -> Repository | None:
        for source in self._sources:
            with contextlib.suppress(IntegrityError):  # missing or damaged in *source* too
                source.objects.verify(ref)
                return source
        return None

    def _fetch(self, ref: BlobRef, source: Repository, *, kind: str) -> None:
        path = self._repo.layout.object_name(ref.id)
        if not self._dry_run:
            with Transaction(self._repo) as tx:
                tx.objects.copy(ref, source.objects)
                # Published without a record: a record already in the store, or put back next, refers to the object.
                tx.objects.publish()
        self._fetched[path] = Fetched(kind=kind, path=path, source=source.name, size_bytes=ref.size_bytes)

    # -- records -------------------------------------------------------------------------------------------------

    def _record(self, damage: Damage) -> bool:
        """Replace a record and fetch what it needs, if a source has both; otherwise leave it and return False."""
        name = self._repo.records.name_at(self._repo.layout.root / damage.path)
        if name is None:
            return False
        for source in self._sources:
            try:
                commit = source.records.read(name)
                self._fetch_needs(commit.record, source)
            except (IntegrityError, NotFound):  # missing or damaged in *source* too
                continue
            self._put_back(name, commit, source, damage)
            return True
        return False

    def _put_back(self, name: RecordName, commit: Commit, source: Repository, damage: Damage) -> None:
        repo = self._repo
        path = repo.layout.record(name.run, name.step, name.id)
        # The damaged record stays in place until it is replaced, so that a repeated repair finds it again.
        if self._dry_run or not self._repo.trash.keep_damaged(path):
            self._take_away(path, damage)
        else:
            self._note_moved(path, damage)
        if not self._dry_run:
            try:
                republish(repo, commit)
            except (IntegrityError, Overtaken) as exc:
                raise IntegrityError(f"{name.run}@{name.step} cannot be put back: {exc}") from exc
        record_name = repo.layout.name(path)
        size_bytes = len(repo.records.encode(commit))
        self._fetched[record_name] = Fetched(kind="record", path=record_name, source=source.name, size_bytes=size_bytes)

    def _fetch_needs(self, record: CommitRecord, source: Repository) -> None:
        """
        Fetch what *record* needs and this store lacks.

        Raises:
            IntegrityError: Something needed is missing or damaged in *source* too.
        """
        for blob in record.blobs:
            # The blob last: once in place, it promises that everything it refers to is present.
            for ref in (*named_by(source, blob), blob):
                if self._is_there(ref):
                    continue
                source.objects.verify(ref)
                home = self._repo.layout.object(ref.id)
                if self._repo.files.exists(home):
                    path = self._repo.layout.name(home)
                    self._take_away(home, Damage(kind="object", id=ref.id, path=path, reason="it has another size"))
                self._fetch(ref, source, kind="object")

    def _is_there(self, ref: BlobRef) -> bool:
        """Whether the store has *ref* at its full size."""
        try:
            return self._repo.objects.find(ref) is not None
        except IntegrityError:
            return False  # of another size

    def _pins_elsewhere(self, name: str) -> Iterator[PinElsewhere]:
        for source in self._sources:
            with contextlib.suppress(LayerstoreError):  # missing or damaged in *source* too
                record = source.records.read_pin(name).record
                yield PinElsewhere(name=name, reference=f"{record.run}@{record.step}", source=source.name)


# -- store.json -------------------------------------------------------------------------------------------------------

_STORE_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredIdentity:
    """A ``store.json`` that was rewritten, or would be."""

    flags: tuple[str, ...]
    """Features that a layerstore must know to write to the store."""
    is_assumed: bool
    """Whether its flags were unknown, and are assumed to be none."""


def restore_identity(layout: Layout, files: Files, store_id: str, *, dry_run: bool = False) -> RestoredIdentity | None:
    """
    Rewrite ``store.json`` for the store *store_id*; return None if the present one is intact.

    More records must state this id than any other. The old file goes to the trash; flags that are still legible in it
    are kept, because an older layerstore must not write to a store with flags that it does not know.

    Raises:
        InvalidInput: *store_id* is malformed, or not the one that most records state.
        Unsupported: ``store.json`` states another format.
    """
    if not _STORE_ID.fullmatch(store_id):
        raise InvalidInput(f"{store_id!r} is not a store's id", hint="ids are 32 lower-case hex digits")
    if files.exists(layout.migrating):
        raise InvalidInput(
            f"a migration of {layout.root} was interrupted, and only store.json said which format it has now; "
            "nothing was changed",
            hint="put back a copy of store.json, then layerstore migrate",
        )
    what, data, flags = str(layout.identity), None, None
    with contextlib.suppress(IntegrityError):  # a link or a folder: replaced as if the file were missing
        data = files.read_if_there(layout.identity, size_bytes_max=OWN_JSON_BYTES_MAX)
    if data is not None:
        try:
            if StoreIdentity.decode(data, what=what).store_id == store_id:
                return None
        except IntegrityError:
            flags = stated_flags(data)  # damaged, but its flags may still be legible
    stated = stated_ids(layout, files)
    if not stated:
        raise InvalidInput(
            f"no record or pin under {layout.root} can be read, so the store that they belong to is unknown; "
            "nothing was changed",
            hint="put back a copy of store.json",
        )
    most, count = stated.most_common(1)[0]
    if most != store_id:
        raise InvalidInput(
            f"{count} records under {layout.root} belong to store {most}, {stated[store_id]} to {store_id}; "
            "nothing was changed",
            hint=f"layerstore repair --store-id {most}",
        )
    restored = RestoredIdentity(flags=flags or (), is_assumed=flags is None)
    if not dry_run:
        _write_identity(layout, files, store_id, restored.flags)
    return restored


def _write_identity(layout: Layout, files: Files, store_id: str, flags: tuple[str, ...]) -> None:
    for folder in (layout.tmp, layout.locks):
        files.make_directory(folder)
    if files.exists(layout.identity):
        Trash(layout, files, RecordStore(layout, files, store_id=store_id)).take_damaged(layout.identity)
    # The store's true time of creation is unknown; this time is for people only.
    created = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    identity = replace(StoreIdentity.new(created=created), store_id=store_id, flags=flags)
    with files.temporary(layout.tmp, identity.encode()) as source:
        files.link_exclusive(source, layout.identity)  # if somebody has just put a store.json there, that file stays
    files.sync_directory(layout.root)
