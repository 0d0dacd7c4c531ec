"""What is wrong with a store, which commits and layers are affected, and what can still be composed."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from layerstore.compose import compose_by_policy
from layerstore.errors import LayerstoreError
from layerstore.gc import ASKED_FOR
from layerstore.history import Resolved, references_to
from layerstore.model import BlobRef, Commit, CommitId, CommitRecord, Kind, ObjectId, Observed, Origin
from layerstore.policy import Latest
from layerstore.storage import RecordRow, Repository, RunView, row_of

_SHORT_ID_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one commit or pin loses by a damage."""

    holder: str
    """Reference to the commit, or the pin's name."""
    layers: tuple[str, ...]
    """Layers whose versions are lost, in the model's order."""
    everything: bool
    """Whether all of it is lost: its record, or a rank's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is not as it was written."""

    kind: str
    """``record``, ``pin``, ``version``, ``state``, ``object``, ``part``, ``collection``, ``index`` or ``stranger``."""
    id: str
    path: str
    reason: str
    error: str = ""
    """The kind of error that showed it."""
    costs: tuple[Cost, ...] = ()
    """What that costs, by commit and pin."""
    size_bytes: int | None = None
    """For objects and blobs: the expected size."""
    blobs: tuple[BlobRef, ...] = ()
    """
    For an object: the version and state blobs that name it; for a blob: itself.

    With the sizes that records name; holders that name another size are unaffected.
    """

    @property
    def needed_by(self) -> tuple[str, ...]:
        """The commits and pins that it affects."""
        return tuple(cost.holder for cost in self.costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A commit or pin that names damaged blobs; without its record, for memory's sake."""

    row: RecordRow
    pin: str | None
    """Its name, if it is a pin."""
    is_shown: bool
    """Whether it is a pin or a visible commit."""
    lost: dict[BlobRef, tuple[str, ...]]
    """The damaged blobs that it names, each with its layers; a state blob has none."""
    origins: frozenset[Origin]
    """The saves that wrote these blobs, whose checkpoints have what is lost."""

    @property
    def layers(self) -> tuple[str, ...]:
        """The lost layers, in the model's order."""
        return self.layers_in(self.lost)

    def layers_in(self, blobs: Collection[BlobRef]) -> tuple[str, ...]:
        """Return the layers lost with *blobs*, in the model's order."""
        gone = {layer for blob in blobs for layer in self.lost.get(blob, ())}
        return tuple(layer for layer in self.row.layer_names if layer in gone)

    @property
    def has_lost_state(self) -> bool:
        """Whether a rank's state is lost, without which nothing can be composed on this base."""
        return not all(self.lost.values())


def holders_of(repo: Repository, blobs: Collection[BlobRef], *, only: Resolved | None = None) -> dict[str, Holder]:
    """
    Return the commits and pins, by reference, that name one of these version or state *blobs*: all, or *only* one.

    Reads every record.
    """
    found: list[Holder] = []
    views: dict[str, RunView | None] = {}
    shared: dict[tuple[str, ...], tuple[str, ...]] = {}
    for row, record, pin in [_as_holder(only)] if only else _all_records(repo):
        lost = _lost(record, blobs)
        if not lost:
            continue
        if row.run not in views:
            views[row.run] = repo.catalog.find(row.run)
        view = views[row.run]
        is_shown = pin is not None or view is None or row.id not in view.hidden
        slim = row._replace(layer_names=shared.setdefault(row.layer_names, row.layer_names))
        found.append(Holder(row=slim, pin=pin, is_shown=is_shown, lost=lost, origins=_origins(record, lost)))
    return dict(zip(_called(repo, found), found, strict=True))


def _all_records(repo: Repository) -> Iterator[tuple[RecordRow, CommitRecord, str | None]]:
    for run in repo.records.runs():
        for _, commit in repo.records.each(repo.records.names(run)):
            if isinstance(commit, Commit):  # verify reports a damaged one by itself
                yield _as_holder(Resolved.of_commit(commit))
    for pin in repo.records.readable_pins():
        yield _as_holder(Resolved.of_pin(pin))


def _as_holder(resolved: Resolved) -> tuple[RecordRow, CommitRecord, str | None]:
    observed = Observed(time_ns=resolved.time_ns, bytes_new=0, bytes_reused=0)
    row = row_of(Commit(id=CommitId(resolved.commit), record=resolved.record, observed=observed))
    return row, resolved.record, resolved.pin


def _lost(record: CommitRecord, blobs: Collection[BlobRef]) -> dict[BlobRef, tuple[str, ...]]:
    lost: dict[BlobRef, tuple[str, ...]] = {state: () for state in record.states if state in blobs}
    for entry in record.layers:
        if entry.version in blobs:
            lost[entry.version] = (*lost.get(entry.version, ()), entry.layer)
    return lost


def _origins(record: CommitRecord, lost: Collection[BlobRef]) -> frozenset[Origin]:
    own = Origin(run=record.run, attempt=record.attempt, step=record.step, save_number=record.save_number)
    pairs = [*((entry.origin, entry.version) for entry in record.layers), *((own, state) for state in record.states)]
    return frozenset(origin for origin, blob in pairs if blob in lost)


def _called(repo: Repository, holders: Sequence[Holder]) -> list[str]:
    """Return the references of *holders*, with the commit's id if a reference is ambiguous."""
    names = []
    for holder, reference in zip(holders, references_to(repo, [holder.row for holder in holders]), strict=True):
        plain = f"{holder.row.run}@{holder.row.step} (commit {holder.row.id[:_SHORT_ID_DIGITS]}, hidden)"
        names.append(holder.pin or (reference if holder.is_shown else plain))
    counts = Counter(names)
    return [
        name if counts[name] == 1 else f"{name} (commit {holder.row.id[:_SHORT_ID_DIGITS]})"
        for holder, name in zip(holders, names, strict=True)
    ]


class Costs:
    """Answer what the loss of blobs costs *holders*; made once for many questions."""

    def __init__(self, holders: Mapping[str, Holder]) -> None:
        self._holders = list(holders.items())
        self._having: dict[BlobRef, list[int]] = {}
        for number, holder in enumerate(holders.values()):
            for blob in holder.lost:
                self._having.setdefault(blob, []).append(number)

    def __call__(self, blobs: Collection[BlobRef]) -> tuple[Cost, ...]:
        """Return what the loss of *blobs* costs, in the holders' order."""
        lost: dict[int, list[BlobRef]] = {}
        for blob in blobs:
            for number in self._having.get(blob, ()):
                lost.setdefault(number, []).append(blob)
        costs = []
        for number in sorted(lost):
            name, holder = self._holders[number]
            everything = any(not holder.lost[blob] for blob in lost[number])
            costs.append(Cost(holder=name, layers=holder.layers_in(lost[number]), everything=everything))
        return tuple(costs)


# So many of a run's newest damaged commits are asked what still stands; each costs some milliseconds.
_COMMITS_MAX = 20
WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurt:
    """A damaged commit or pin, and what can still be composed on it."""

    reference: str
    layers: tuple[str, ...]
    """The lost layers."""
    everything: bool
    """Whether a rank's state is lost too."""
    stands: tuple[str, ...] | None
    """Policies that avoid the damage, and ``weights`` if only moments are lost; None if that was not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Which commits and pins are damaged, and what is still intact."""

    hurt: tuple[Hurt, ...]
    whole: dict[str, str | None]
    """For every damaged run, its newest intact step, None if there is none."""


def standing(
    repo: Repository,
    holders: Mapping[str, Holder],
    blobs: Mapping[BlobRef, Collection[ObjectId]],
) -> Standing:
    """
    Return what is still intact of *holders*.

    *blobs* are the damaged version and state blobs, each with the objects that it lost, or itself.
    """
    asked: dict[str, int] = {}
    hurt = []
    for name, holder in sorted(holders.items(), key=lambda item: (item[1].row.run, -item[1].row.step)):
        if not holder.is_shown:
            continue
        asked[holder.row.run] = asked.get(holder.row.run, 0) + 1
        stands = _stands(repo, holder, blobs) if asked[holder.row.run] <= _COMMITS_MAX else None
        hurt.append(Hurt(reference=name, layers=holder.layers, everything=holder.has_lost_state, stands=stands))
    runs = sorted({holder.row.run for holder in holders.values() if holder.is_shown})
    lost = {holder.row.id for holder in holders.values() if holder.pin is None}
    return Standing(hurt=tuple(hurt), whole={run: _newest_whole(repo, run, lost) for run in runs})


def _stands(repo: Repository, holder: Holder, blobs: Mapping[BlobRef, Collection[ObjectId]]) -> tuple[str, ...]:
    if holder.has_lost_state:
        return ()
    found = []
    try:
        resolved = (
            Resolved.of_commit(repo.catalog.commit(holder.row.name))
            if holder.pin is None
            else Resolved.of_pin(repo.records.read_pin(holder.pin))
        )
    except LayerstoreError:
        return ()  # removed meanwhile
    view = repo.catalog.find(holder.row.run)
    for policy in (Latest(), *ASKED_FOR):
        try:
            layers = compose_by_policy(repo, resolved, policy, view=view).layers
        except LayerstoreError:
            continue  # a damaged record below it: what the policy would take is unknown
        if not any(entry.version in blobs for entry in layers):
            found.append(policy.name)
    if all(_only_moments(repo, resolved, blob, blobs[blob]) for blob in holder.lost):
        found.append(WEIGHTS)
    return tuple(found)


def _only_moments(repo: Repository, resolved: Resolved, blob: BlobRef, lost: Collection[ObjectId]) -> bool:
    """Whether the version has lost nothing but moments, so that its weights can be exported."""
    entry = next(entry for entry in resolved.record.layers if entry.version == blob)
    try:
        version = repo.version_of(entry)
    except LayerstoreError:
        return False
    return all(stored.kind is Kind.OPTIMIZER for stored in version.objects if stored.id in lost)


def _newest_whole(repo: Repository, run: str, lost: Collection[str]) -> str | None:
    view: RunView | None = repo.catalog.find(run)
    if view is None or not view.attempts:
        return None
    unreadable = max((name.step for name in view.damaged), default=-1)
    for row in view.history(view.attempts[-1]):
        # What this step means is unknown if one of its records cannot be read.
        if row.id not in lost and row.step != unreadable:
            return references_to(repo, [row])[0]
    return None
