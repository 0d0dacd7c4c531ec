"""Sound copies of what is damaged or gone: from elsewhere in the store, or from another store."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from layerstore.errors import IntegrityError, InvalidInput, LayerstoreError, NotFound
from layerstore.format.blobs import decode_state, decode_version
from layerstore.limits import BLOB_BYTES_MAX, RECORD_BYTES_MAX
from layerstore.model import BlobRef, Commit, CommitRecord, Pin
from layerstore.ops.needs import objects_of_state, objects_of_version
from layerstore.ops.rooms import Rooms
from layerstore.ops.setup import open_rooms
from layerstore.storage.checks import read_chunks
from layerstore.storage.commits import RecordName
from layerstore.storage.files import Files
from layerstore.storage.garbage import names_in
from layerstore.storage.manifest import RecordRow, row_of
from layerstore.storage.objects import ObjectWriter
from layerstore.storage.runview import RunView

ASIDE = "what a collection had moved aside"
QUARANTINE = "an earlier repair's quarantine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A sound copy of an object."""

    path: Path
    origin: str
    """Where it is, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """What a record needs and is not there."""

    to_be_had: tuple[BlobRef, ...]
    """What there is a sound copy of."""
    lost: tuple[BlobRef, ...]
    """Version and state blobs that cannot be whole again: they, or objects that they name, are nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A commit that another store shows, and that we neither have nor miss."""

    run: str
    step: int
    commit: str
    store: str


class Healing:
    """Where sound copies are looked for: in this store *rooms*, then in *others*, in their order."""

    def __init__(self, rooms: Rooms, others: Sequence[Rooms]) -> None:
        self._rooms = rooms
        self._others = others
        self._quarantined: dict[RecordName, list[Path]] = {}
        for lost in rooms.quarantine.records():
            self._quarantined.setdefault(lost.name, []).append(lost.path)

    def object(self, ref: BlobRef) -> Copy | None:
        """Return a copy of *ref* whose every byte has just been checked; None where there is none."""
        for copy in self._candidates(ref):
            if self._rooms.objects.is_sound(copy.path, ref):
                return copy
        return None

    def _candidates(self, ref: BlobRef) -> Iterator[Copy]:
        home = self._rooms.layout.object(ref.id)
        for path in (path for path in self._rooms.objects.places(ref.id) if path != home):
            yield Copy(path=path, origin=ASIDE)
        for path in self._rooms.quarantine.objects(ref.id):
            yield Copy(path=path, origin=QUARANTINE)
        for other in self._others:
            yield Copy(path=other.layout.object(ref.id), origin=str(other.layout.root))

    def put_back(self, ref: BlobRef, copy: Copy) -> None:
        """
        Write *ref* afresh from *copy*, durably.

        Raises:
            IntegrityError: The copy has changed since it was checked.
        """
        rooms = self._rooms
        with ObjectWriter(rooms.layout, rooms.files, rooms.objects) as writer:
            with rooms.files.open(copy.path) as file:
                writer.stage(ref, read_chunks(file))
            writer.publish()

    def record(self, name: RecordName) -> tuple[Commit, str] | None:
        """Return the commit *name* as a copy has it, and which; its id says that it is the same. None without one."""
        for origin, read in self._copies(name):
            try:
                return read(), origin
            except LayerstoreError:
                continue  # none here, or as damaged
        return None

    def _copies(self, name: RecordName) -> "Iterator[tuple[str, _Read]]":
        for path in self._quarantined.get(name, ()):
            yield QUARANTINE, _Read(self._rooms, name, path=path)
        for other in self._others:
            yield str(other.layout.root), _Read(other, name)

    def pins(self, name: str) -> Iterator[tuple[Pin, str]]:
        """Yield the pin *name* as copies of this very store have it, and which. Ours may have been moved since."""
        for other in self._others:
            if other.identity.store_id == self._rooms.identity.store_id:
                with contextlib.suppress(LayerstoreError):  # none there, or as damaged
                    yield other.records.read_pin(name), str(other.layout.root)

    def is_quarantined(self, name: RecordName) -> bool:
        """Whether the record *name* is in quarantine, as whatever it is there."""
        return name in self._quarantined

    def is_kept(self, name: RecordName) -> bool:
        """Whether the record *name* is in quarantine, and readable there."""
        for path in self._quarantined.get(name, ()):
            with contextlib.suppress(LayerstoreError):
                _Read(self._rooms, name, path=path)()
                return True
        return False

    def absent(self, record: CommitRecord) -> Absent:
        """Return what *record* needs and is not there, by whether there is a sound copy of it, every byte read."""
        to_be_had: dict[BlobRef, None] = {}
        lost: dict[BlobRef, None] = {}
        versions = ((entry.version, _objects_of_version) for entry in record.layers)
        for ref, objects_in in dict.fromkeys([*versions, *((state, _objects_of_state) for state in record.states)]):
            is_here, inner = self._blob(ref, objects_in)
            if not is_here:
                (lost if inner is None else to_be_had)[ref] = None
            for each in inner or ():
                if not self._is_here(each):
                    if self.object(each) is None:
                        lost[ref] = None
                    else:
                        to_be_had[each] = None
        return Absent(to_be_had=tuple(to_be_had), lost=tuple(lost))

    def _blob(self, ref: BlobRef, objects_in: "_ObjectsIn") -> tuple[bool, list[BlobRef] | None]:
        """Return whether the blob *ref* is here and sound, and what it names; None where no sound one is anywhere."""
        with contextlib.suppress(LayerstoreError):
            return True, objects_in(self._rooms.objects.read(ref), ref)
        copy = self.object(ref)
        with contextlib.suppress(LayerstoreError):
            if copy is not None:
                return False, objects_in(self._rooms.files.read(copy.path, size_bytes_max=BLOB_BYTES_MAX), ref)
        return False, None

    def elsewhere(self, *, missed: Set[RecordName]) -> Iterator[Elsewhere]:
        """
        Yield what the other stores show of our runs and is neither here nor *missed*, unless a collection removed it.

        Nobody here remembers that there was such a commit, so it may never have been one of ours. At a place where we
        show a commit nothing is missing, whatever the other has there. The other store is only read, record by record:
        asking it for its index would write one. What is damaged there is passed over.
        """
        rooms = self._rooms
        plans = rooms.garbage.plans_after("") if self._others else ()
        known = missed | {name for plan in plans for name in names_in(plan)}
        for other in self._others:
            for run in rooms.catalog.runs():
                here = {*rooms.records.names(run), *known}
                view = rooms.catalog.find(run)
                shown = set() if view is None else {(row.attempt, row.step) for row in view.visible}
                for row in reversed(_visible(other, run, besides=here)):
                    if row.name not in here and (row.attempt, row.step) not in shown:
                        yield Elsewhere(run=run, step=row.step, commit=row.id, store=str(other.layout.root))

    def _is_here(self, ref: BlobRef) -> bool:
        try:
            return self._rooms.objects.find(ref) is not None
        except IntegrityError:
            return False  # something of another size


def _visible(other: Rooms, run: str, *, besides: Set[RecordName]) -> list[RecordRow]:
    """Return what *other* shows of *run*, if it has any record *besides* those."""
    rows = {}
    with contextlib.suppress(LayerstoreError):
        names = other.records.names(run)
        for name in names if not set(names) <= besides else ():
            with contextlib.suppress(LayerstoreError):
                rows[name.id] = row_of(other.records.read(name))
    return RunView(run=run, rows=rows, damaged={}).visible


@dataclass(frozen=True, slots=True)
class _Read:
    """One way to read a record."""

    rooms: Rooms
    name: RecordName
    data: bytes | None = None
    path: Path | None = None

    def __call__(self) -> Commit:
        if self.path is not None:
            data = self.rooms.files.read(self.path, size_bytes_max=RECORD_BYTES_MAX)
            return self.rooms.records.decode(data, self.name)
        return (
            self.rooms.records.read(self.name) if self.data is None else self.rooms.records.decode(self.data, self.name)
        )


_ObjectsIn = Callable[[bytes, BlobRef], list[BlobRef]]


def _objects_of_version(data: bytes, ref: BlobRef) -> list[BlobRef]:
    """Return the objects that the version blob *ref*, whose bytes are *data*, names."""
    return objects_of_version(decode_version(data, ref=ref))


def _objects_of_state(data: bytes, ref: BlobRef) -> list[BlobRef]:
    """Return the objects that the state blob *ref*, whose bytes are *data*, names."""
    return objects_of_state(decode_state(data, ref=ref))


@contextlib.contextmanager
def opened_sources(rooms: Rooms, paths: Iterable[Path]) -> Iterator[tuple[Rooms, ...]]:
    """
    Open the stores at *paths*, which are only read, until the block is left.

    Raises:
        InvalidInput: One is no store, or the very store that is to be healed.
    """
    with contextlib.ExitStack() as stack:
        found = []
        for path in paths:
            try:
                other = open_rooms(path, Files())
            except NotFound as exc:
                raise InvalidInput(
                    f"{path} is no store, and copies are taken from stores",
                    hint="to heal from a checkpoint, repair first and ingest it again then",
                ) from exc
            stack.callback(other.catalog.close)
            if other.layout.root == rooms.layout.root:
                raise InvalidInput(f"{path} is the store that is to be repaired", hint="name another one")
            found.append(other)
        yield tuple(found)
