"""
Verify: is everything present, and is every byte still as it was written?

Always checked: every record, pin and part by its checksum, every blob by its hash, every object by its size, and the
index against the records. With *read_data*, also the bytes of every object, or of a sample, including objects of
dropped commits, since undrop does not read them. Nothing is changed, and a partial clone does not keep what it fetches.

Memory grows not with the number of records but with that of blobs and objects: each takes about 110 bytes. The records
are read a second time only if something is damaged, to find out what needs it.
"""

import contextlib
import random
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import ClassVar

from layerstore.check.damage import Cost, Costs, Damage, Holder, Standing, holders_of, hurt_by, newest_whole
from layerstore.errors import (
    PERMISSION_ERRNOS,
    PROCESS_ERRNOS,
    IntegrityError,
    InvalidInput,
    LayerstoreError,
    NoStore,
    StorageIO,
)
from layerstore.history import Needs, NumberedRefs, Resolved, objects_of_state
from layerstore.layout import is_url
from layerstore.limits import WORKERS_MAX
from layerstore.model import BlobRef, CommitRecord, ObjectId
from layerstore.progress import Progress, Silent
from layerstore.storage import RecordName, Repository, row_of
from layerstore.threads import Threads
from layerstore.units import short_id

_ALL = 2**32  # as many values as the first eight digits of an id have
_PERCENT = re.compile(r"(?P<percent>[0-9]{1,3}(\.[0-9]{1,6})?)%")
_SLICE = re.compile(r"(?P<number>[0-9]{1,6})/(?P<of>[0-9]{1,6})")
_SEED_MAX = 10**9  # short enough to retype


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSample:
    """The objects whose ids lie in one range of all ids, which may wrap around."""

    begin: int
    """Where the range begins, by the first 32 bits of an id."""
    length: int
    words: str
    """How to ask for the same sample again."""

    def __contains__(self, ref: object) -> bool:
        return isinstance(ref, BlobRef) and (int(ref.id[:8], 16) - self.begin) % _ALL < self.length


def parse_sample(text: str, *, seed: int | None = None) -> ObjectSample:
    """
    Parse ``10%``, a random tenth of the objects, or ``3/10``, the third of ten tenths that together cover all objects.

    *seed* repeats a random choice.

    >>> [sample.begin for sample in (parse_sample("1/4"), parse_sample("4/4"))]
    [0, 3221225472]
    """
    if match := _SLICE.fullmatch(text):
        number, count = int(match["number"]), int(match["of"])
        if seed is not None:
            raise InvalidInput(f"{text} always reads the same objects; a seed is for percentages", hint="leave it out")
        if 1 <= number <= count:
            begin = (number - 1) * _ALL // count
            return ObjectSample(begin=begin, length=number * _ALL // count - begin, words=text)
    if match := _PERCENT.fullmatch(text):
        share = float(match["percent"]) / 100
        if 0 < share <= 1:
            seed = random.randrange(_SEED_MAX) if seed is None else seed
            begin = random.Random(seed).randrange(_ALL)
            return ObjectSample(begin=begin, length=max(1, round(share * _ALL)), words=f"{text}, seed {seed}")
    raise InvalidInput(
        f"{text!r} is not a sample of the objects",
        hint="10% reads any tenth; 1/10 to 10/10 read everything in ten nights",
    )


_EVERYTHING = ObjectSample(begin=0, length=_ALL, words="")

# How many objects a thread is given at a time, and how many such shares are queued.
_SHARE = 64
_SHARES_MAX = 4 * WORKERS_MAX  # enough that no worker waits for a share, few enough that results do not pile up


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a verify found."""

    _JSON: ClassVar = (
        "ok damaged orphans records objects bytes_read objects_read sample hurt=standing.hurt whole=standing.whole"
    )

    damaged: tuple[Damage, ...]
    standing: Standing
    orphans: int
    """Objects that nothing refers to: harmless, collected later."""
    records: int
    """Commits and pins that were read."""
    objects: int
    objects_read: int
    bytes_read: int
    sample: str | None
    """The sample that was read, in words that request the same sample again; None if no sample was requested."""

    def __repr__(self) -> str:
        damage = f"{len(self.damaged)} damaged: {self.damaged[0].path}" if self.damaged else "no damage"
        more = ", …" if len(self.damaged) > 1 else ""
        return f"<Verdict {damage}{more}; records {self.records}, objects {self.objects} ({self.objects_read} read)>"

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damaged


@dataclass(slots=True)
class _Named:
    """Everything that records, pins and parts refer to."""

    versions: NumberedRefs = field(default_factory=NumberedRefs)
    """Each version, and the numbers of the layers that it is a version of, according to the records."""
    states: NumberedRefs = field(default_factory=NumberedRefs)
    objects: NumberedRefs = field(default_factory=NumberedRefs)
    """Each object, and the numbers of the blobs that refer to it."""
    under_way: NumberedRefs = field(default_factory=NumberedRefs)
    """What dropped commits, and the parts of incomplete saves, need: these are not orphans."""
    dropped: dict[BlobRef, Cost] = field(default_factory=dict)
    """What dropped commits need: each blob or object, and what its loss would cost one of these commits."""
    layers: dict[str, int] = field(default_factory=dict)
    blobs: list[BlobRef] = field(default_factory=list)
    """The blobs that refer to objects, by number."""
    faults: list[Damage] = field(default_factory=list)
    records: int = 0


def verify_store(
    repo: Repository,
    *,
    only: Resolved | None = None,
    read_data: bool = False,
    sample: ObjectSample | None = None,
    progress: Progress,
) -> Verdict:
    """
    Check the store, or what *only* needs; read the data of a *sample* of the objects or, with *read_data*, of all.
    """
    named = _Named()
    if only is None:
        _read_records(repo, named, progress)
        _read_pins(repo, named)
        _read_beside(repo, named)
    else:
        _name_all(named, only.record)
    _read_blobs(repo, named, progress)
    reads = sample or (_EVERYTHING if read_data else None)
    counted = _check_objects(repo, named, reads=reads, whole=only is None, progress=progress)
    if reads:
        _read_dropped(repo, named, counted, reads, progress)
    holders = _holders(repo, named, only)
    damaged = _judged(named.faults, holders)
    whole = newest_whole(repo, holders.values()) if only is None else {}  # nothing is known about other commits
    return Verdict(
        damaged=damaged,
        standing=Standing(hurt=hurt_by(repo, holders, _lost_blobs(damaged)), whole=whole),
        orphans=counted.orphans,
        records=named.records,
        objects=counted.objects,
        objects_read=counted.objects_read,
        bytes_read=counted.bytes_read,
        sample=sample.words if sample is not None else None,
    )


# -- what is named -------------------------------------------------------------------------------------------------


def _read_records(repo: Repository, named: _Named, progress: Progress) -> None:
    """Read every record, compare it with the index, and note what it refers to."""
    for run in repo.records.runs():
        # Read the index before the listing: a record that is published in between merely has no row yet.
        indexed = repo.catalog.indexed(run)
        names = repo.records.names(run)
        progress.start(f"records of {run}", len(names))
        for name, commit in repo.records.each(names):
            path = repo.layout.name(repo.layout.record(name.run, name.step, name.id))
            reference = f"{name.run}@{name.step}"
            if isinstance(commit, LayerstoreError):
                named.faults.append(_lost_record("record", name.id, path, commit, reference))
                continue
            progress.advance(1)
            _name_all(named, commit.record)
            row = indexed.get(name.file_name)
            if row is not None and row != row_of(commit):
                problem = f"the index contradicts the record of {reference}"
                named.faults.append(Damage(kind="index", id=run, path="manifest", reason=problem))


def _lost_record(kind: str, name: str, path: str, problem: LayerstoreError, called: str) -> Damage:
    cost = Cost(holder=called, layers=(), everything=True)
    return Damage(kind=kind, id=name, path=path, reason=_reason(problem), costs=(cost,), error=problem.kind)


def _reason(problem: LayerstoreError) -> str:
    """Return why something is damaged; raise *problem* if merely this process or a remote failed to read it."""
    if isinstance(problem, NoStore) or (
        isinstance(problem, StorageIO)
        and (problem.errno in PROCESS_ERRNOS | PERMISSION_ERRNOS or is_url(str(problem.filename)))
    ):
        raise problem
    return str(problem)


def _name_all(named: _Named, record: CommitRecord) -> None:
    named.records += 1
    for entry in record.layers:
        named.versions.add(entry.version, named.layers.setdefault(entry.layer, len(named.layers)))
    for state in record.states:
        named.states.add(state)


def _read_pins(repo: Repository, named: _Named) -> None:
    for name, pin in repo.records.pins():
        path = repo.layout.name(repo.layout.pin(name))
        if isinstance(pin, LayerstoreError):
            named.faults.append(_lost_record("pin", name, path, pin, name))
        else:
            _name_all(named, pin.record)


def _read_beside(repo: Repository, named: _Named) -> None:
    """Check everything but commits and pins: strangers, parts of unfinished saves, and the trash."""
    for stranger in (*repo.records.strangers(), *repo.parts.strangers(), *repo.trash.strangers()):
        problem = IntegrityError("it is not named like a record, pin or part; gc removes nothing while it is there")
        named.faults.append(
            Damage(kind="stranger", id=stranger.name, path=repo.layout.name(stranger), reason=str(problem))
        )
    for path, part in repo.parts.all():
        if isinstance(part, LayerstoreError):
            reason = f"{_reason(part)}; its save will be given up"
            named.faults.append(
                Damage(kind="part", id=path.name, path=repo.layout.name(path), reason=reason, error=part.kind)
            )
            continue
        refs = [stored.ref for layer in part.layers for stored in layer.named]
        for ref in (*refs, *([] if part.state is None else [part.state])):
            named.under_way.add(ref)
    needs = Needs(repo)
    for name in repo.trash.records():
        with contextlib.suppress(LayerstoreError):  # a record that cannot be read cannot come back
            _name_dropped(named, needs, name, repo.trash.read_record(name).record)


def _name_dropped(named: _Named, needs: Needs, name: RecordName, record: CommitRecord) -> None:
    holder = f"{name.run}@{name.step} (commit {short_id(name.id)}, dropped)"
    layers = {entry.version: entry.layer for entry in record.layers}
    for blob in record.blobs:
        cost = Cost(holder=holder, layers=tuple(filter(None, [layers.get(blob)])), everything=blob not in layers)
        refs = [blob]
        with contextlib.suppress(LayerstoreError):  # reported where the blob itself is read
            refs = needs.add_blob(blob)
        for ref in refs:
            named.under_way.add(ref)
            named.dropped[ref] = cost


def _read_blobs(repo: Repository, named: _Named, progress: Progress) -> None:
    """Read every version and state blob once, and note all objects that they refer to."""
    layers = list(named.layers)

    def of_version(ref: BlobRef, numbers: Sequence[int]) -> list[BlobRef]:
        version = repo.version(ref)
        for number in numbers:
            if version.layer != layers[number]:
                raise IntegrityError(
                    f"version {ref.id} is of layer {version.layer!r}, a commit has it as {layers[number]!r}"
                )
        return [stored.ref for stored in version.named]

    def of_state(ref: BlobRef, numbers: Sequence[int]) -> list[BlobRef]:
        return objects_of_state(repo.state(ref))

    for kind, blobs, objects_of in (("version", named.versions, of_version), ("state", named.states, of_state)):
        progress.start(f"{kind} blobs", 0)
        for ref, numbers in blobs:
            number = len(named.blobs)
            named.blobs.append(ref)
            progress.advance(ref.size_bytes)
            try:
                for needed in objects_of(ref, numbers):
                    named.objects.add(needed, number)
            except LayerstoreError as exc:
                named.faults.append(_lost_object(repo, kind, ref, exc, (ref,)))


def _lost_object(
    repo: Repository, kind: str, ref: BlobRef, problem: LayerstoreError, blobs: tuple[BlobRef, ...]
) -> Damage:
    path = repo.layout.object_name(ref.id)
    return Damage(kind=kind, id=ref.id, path=path, reason=_reason(problem), size_bytes=ref.size_bytes, blobs=blobs)


# -- what is present -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Counted:
    objects: int = 0
    objects_read: int = 0
    bytes_read: int = 0
    orphans: int = 0


def _check_objects(
    repo: Repository, named: _Named, *, reads: ObjectSample | None, whole: bool, progress: Progress
) -> _Counted:
    """Check every object in *named*, and read those in the sample *reads*; also count the orphans."""
    counted = _Counted()
    # Blobs that could not be read are reported already.
    known = {(fault.id, fault.size_bytes) for fault in named.faults}
    to_read = [ref.size_bytes for at in range(NumberedRefs.PARTS) for ref in _refs(named, at) if reads and ref in reads]
    counted.objects_read, counted.bytes_read = len(to_read), sum(to_read)
    count = repo.shares.count
    progress.start("verify", counted.bytes_read // count)

    def checked(at: int) -> list[BlobRef]:
        return [ref for ref in _refs(named, at) if (ref.id, ref.size_bytes) not in known]

    parts = [
        ([ref for at in range(rank, NumberedRefs.PARTS, count) for ref in checked(at)], reads)
        for rank in range(1, count)
    ]
    with repo.shares.scatter_work(repo, check_share, parts) as answers:
        lost = list(_lost(repo, map(checked, range(0, NumberedRefs.PARTS, count)), reads, progress))
        for of_another in answers():
            lost += of_another
    # By id: threads and processes answer in any order.
    for ref, problem in sorted(lost, key=lambda lost_object: lost_object[0].id):
        numbers = _refs(named, int(ref.id[:2], 16))[ref]
        blobs = (ref,) if numbers is None else tuple(named.blobs[number] for number in numbers)
        named.faults.append(_lost_object(repo, "object", ref, problem, blobs))
    for at in range(NumberedRefs.PARTS):
        refs = _refs(named, at)
        counted.objects += len(refs)
        if whole:
            ids = {ref.id for ref in (*refs, *named.under_way.part(at))}
            # Objects saved since the records were read count as orphans too: the number is for information only.
            counted.orphans += sum(name not in ids for name in repo.objects.ids_in(f"{at:02x}"))
    return counted


def _read_dropped(repo: Repository, named: _Named, counted: _Counted, reads: ObjectSample, progress: Progress) -> None:
    """Read what only dropped commits need; a missing object is no damage: it only keeps the commits from returning."""
    others = [named.versions, named.states, named.objects]
    kept = {ref for at in {int(ref.id[:2], 16) for ref in named.dropped} for names in others for ref in names.part(at)}
    refs = sorted((ref for ref in named.dropped if ref not in kept and ref in reads), key=lambda ref: ref.id)
    refs = [ref for ref in refs if repo.objects.is_there(ref)]
    counted.objects += len(refs)
    counted.objects_read += len(refs)
    counted.bytes_read += sum(ref.size_bytes for ref in refs)
    lost = list(_lost(repo, [refs], reads, progress))
    if lost:
        repo.objects.look_anew()  # a collection may have removed some since a bucket was listed
    for ref, problem in lost:
        if repo.objects.is_there(ref):
            named.faults.append(replace(_lost_object(repo, "object", ref, problem, ()), costs=(named.dropped[ref],)))


_Lost = tuple[BlobRef, LayerstoreError]
"""An object that is missing or damaged, and the error that shows it."""


@contextlib.contextmanager
def check_share(repo: Repository, part: tuple[list[BlobRef], ObjectSample | None]) -> Iterator[list[_Lost]]:
    """Check some objects for the leading process."""
    refs, reads = part
    yield list(_lost(repo, [refs], reads, Silent()))


def _lost(
    repo: Repository, parts: Iterable[Sequence[BlobRef]], reads: ObjectSample | None, progress: Progress
) -> Iterator[_Lost]:
    """Yield which objects of *parts* are missing or damaged; those in the sample *reads* are read."""

    def check(refs: Sequence[BlobRef]) -> list[_Lost]:
        lost: list[_Lost] = []
        for ref in refs:
            try:
                repo.objects.check_there(ref)
                if reads and ref in reads:
                    repo.objects.check_bytes(ref)
                    progress.advance(ref.size_bytes)
            except LayerstoreError as exc:
                _reason(exc)  # raises if the error proves nothing about the object
                lost.append((ref, exc))
        return lost

    repo.objects.look_anew()
    waiting: deque[Future[list[_Lost]]] = deque()
    # Checking local files takes less time than waking another thread.
    workers = WORKERS_MAX if reads or repo.aside.is_on_network else 1
    with Threads(workers) as pool:
        for refs in parts:
            step = 1 if reads else _SHARE
            for start in range(0, len(refs), step):
                if len(waiting) == _SHARES_MAX:
                    yield from waiting.popleft().result()
                waiting.append(pool.submit(check, refs[start : start + step]))
        for future in waiting:
            yield from future.result()


def _refs(named: _Named, at: int) -> dict[BlobRef, list[int] | None]:
    """
    Return the blobs and other objects whose ids begin with the byte *at*.

    The value of a blob is None; that of any other object, the numbers of the blobs that refer to it.
    """
    # The blobs have just been read for what they refer to; if data is read, they are read again, like other objects.
    own: dict[BlobRef, list[int] | None] = {
        ref: None for blobs in (named.versions, named.states) for ref in blobs.part(at)
    }
    return {**own, **named.objects.part(at)}


# -- what is lost --------------------------------------------------------------------------------------------------


def _holders(repo: Repository, named: _Named, only: Resolved | None) -> dict[str, Holder]:
    blobs = {blob for fault in named.faults for blob in fault.blobs}
    return holders_of(repo, blobs, only=only) if blobs else {}


def _judged(faults: Iterable[Damage], holders: dict[str, Holder]) -> tuple[Damage, ...]:
    """Return *faults* with their costs, but omit faults in blobs that no record refers to now."""
    damaged: list[Damage] = []
    costs_of = Costs(holders)
    known: dict[tuple[BlobRef, ...], tuple[Cost, ...]] = {}
    for fault in faults:
        if not fault.blobs:
            damaged.append(fault)
            continue
        if fault.blobs not in known:
            known[fault.blobs] = costs_of(fault.blobs)
        if known[fault.blobs]:
            damaged.append(replace(fault, costs=known[fault.blobs]))
    return tuple(damaged)


def _lost_blobs(damaged: Iterable[Damage]) -> dict[BlobRef, list[ObjectId]]:
    """Return the damaged blobs, each with the objects that it has lost."""
    lost: dict[BlobRef, list[ObjectId]] = {}
    for damage in damaged:
        for blob in damage.blobs:
            lost.setdefault(blob, []).append(ObjectId(damage.id))
    return lost
