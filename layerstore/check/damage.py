"""What is wrong with a store, which commits and layers are affected, and what can still be composed."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from layerstore.compose import compose_by_policy
from layerstore.errors import LayerstoreError
from layerstore.history import Resolved, references_to
from layerstore.model import BlobRef, Commit, CommitId, Kind, ObjectId, Origin
from layerstore.policy import PREDICTABLE
from layerstore.storage import RecordName, Repository, RunView
from layerstore.units import short_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one commit or pin loses to some damage."""

    _JSON: ClassVar = "commit=holder layers everything"

    holder: str
    """Reference to the commit, or the pin's name."""
    layers: tuple[str, ...]
    """Layers whose versions are lost, in the model's order."""
    everything: bool
    """Whether all of the commit or pin is lost, because its record or a rank's state is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is damaged or missing."""

    _JSON: ClassVar = "kind id path needed_by reason costs"

    kind: str
    """``record``, ``pin``, ``version``, ``state``, ``object``, ``part``, ``index`` or ``stranger``."""
    id: str
    path: str
    reason: str
    error: str = ""
    """The kind of the error that revealed the damage."""
    costs: tuple[Cost, ...] = ()
    """The losses, by commit and pin."""
    size_bytes: int | None = None
    """For objects and blobs: the expected size."""
    blobs: tuple[BlobRef, ...] = ()
    """
    For an object: the version and state blobs that refer to it; for a blob: itself.

    The blobs have the sizes that records state; commits and pins whose records state another size are unaffected.
    """

    @property
    def needed_by(self) -> tuple[str, ...]:
        """The commits and pins that the damage affects."""
        return tuple(cost.holder for cost in self.costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A commit or pin that refers to damaged blobs, held without its record to save memory."""

    save: Origin
    """The save that the commit or pin came from."""
    commit: CommitId
    """The commit's own id, or the id of the pin's base."""
    pin: str | None
    """The name of a pin; None for a commit."""
    is_shown: bool
    """Whether the holder is a pin or a visible commit."""
    lost: dict[BlobRef, str | None]
    """The damaged blobs that it refers to, each with its layer (None for a state blob), in the model's order."""
    origins: dict[BlobRef, Origin]
    """The saves that wrote these blobs."""

    def layers_in(self, blobs: Collection[BlobRef]) -> tuple[str, ...]:
        """Return the layers lost with *blobs*, in the model's order."""
        return tuple(layer for blob, layer in self.lost.items() if layer is not None and blob in blobs)

    @property
    def has_lost_state(self) -> bool:
        """Whether a rank's state is lost, without which nothing can be composed on this base."""
        return None in self.lost.values()


def holders_of(repo: Repository, blobs: Collection[BlobRef], *, only: Resolved | None = None) -> dict[str, Holder]:
    """
    Return the commits and pins that refer to any of the version or state *blobs*, with their references as keys.

    Reads every record, or just the record of *only*.
    """
    holders: list[Holder] = []
    views: dict[str, RunView | None] = {}
    for saved in [only] if only else _all_records(repo):
        record = saved.record
        lost: dict[BlobRef, str | None] = {}
        lost |= {entry.version: entry.layer for entry in record.layers if entry.version in blobs}
        lost |= dict.fromkeys((state for state in record.states if state in blobs), None)
        if not lost:
            continue
        if record.run not in views:
            views[record.run] = repo.catalog.find(record.run)
        view = views[record.run]
        save = Origin(run=record.run, attempt=record.attempt, step=record.step, save_number=record.save_number)
        origins = {entry.version: entry.origin for entry in record.layers if entry.version in lost}
        holders.append(
            Holder(
                save=save,
                commit=saved.commit,
                pin=saved.pin,
                is_shown=saved.pin is not None or view is None or saved.commit not in view.hidden,
                lost=lost,
                # States are always a save's own; only versions are inherited.
                origins=dict.fromkeys(lost, save) | origins,
            )
        )
    return dict(zip(_names_of(repo, holders), holders, strict=True))


def _all_records(repo: Repository) -> Iterator[Resolved]:
    for run in repo.records.runs():
        for _, commit in repo.records.each(repo.records.names(run)):
            if isinstance(commit, Commit):  # verify reports damaged records itself
                yield Resolved.of_commit(commit)
    yield from map(Resolved.of_pin, repo.records.readable_pins())


def _names_of(repo: Repository, holders: Sequence[Holder]) -> list[str]:
    """Return the references of *holders*, with the commit's id if a reference is ambiguous."""
    names = []
    for holder, reference in zip(holders, references_to(repo, [holder.save for holder in holders]), strict=True):
        plain = f"{holder.save.run}@{holder.save.step} (commit {short_id(holder.commit)}, hidden)"
        names.append(holder.pin or (reference if holder.is_shown else plain))
    counts = Counter(names)
    return [
        name if counts[name] == 1 else f"{name} (commit {short_id(holder.commit)})"
        for holder, name in zip(holders, names, strict=True)
    ]


class Costs:
    """What the loss of blobs costs *holders*; build it once, call it often."""

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
            everything = any(holder.lost[blob] is None for blob in lost[number])
            costs.append(Cost(holder=name, layers=holder.layers_in(lost[number]), everything=everything))
        return tuple(costs)


# How many of a run's newest damaged commits are tested for what can still be composed; each takes some milliseconds.
_COMMITS_MAX = 20
WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurt:
    """A damaged commit or pin, and what can still be composed from it."""

    _JSON: ClassVar = "commit=reference layers everything stands"

    reference: str
    layers: tuple[str, ...]
    """The lost layers."""
    everything: bool
    """Whether a rank's state is lost too."""
    stands: tuple[str, ...] | None
    """Policies that avoid the damage, and ``weights`` if only moments are lost; None if no policy was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Which commits and pins are damaged, and what is still intact."""

    hurt: tuple[Hurt, ...]
    whole: dict[str, str | None]
    """For every damaged run, its newest intact step, None if there is none."""


def hurt_by(
    repo: Repository, holders: Mapping[str, Holder], blobs: Mapping[BlobRef, Collection[ObjectId]]
) -> tuple[Hurt, ...]:
    """
    Return, for each of *holders* but hidden commits, what it lost and what can still be composed from it.

    *blobs* are the damaged version and state blobs, each with the objects that it lost, which may include itself.
    """
    counts: dict[str, int] = {}
    hurt = []
    # A run's newest first: only the first `_COMMITS_MAX` are tried.
    for name, holder in sorted(holders.items(), key=lambda item: (item[1].save.run, -item[1].save.step)):
        if not holder.is_shown:
            continue
        counts[holder.save.run] = counts.get(holder.save.run, 0) + 1
        stands = _stands(repo, holder, blobs) if counts[holder.save.run] <= _COMMITS_MAX else None
        hurt.append(
            Hurt(reference=name, layers=holder.layers_in(holder.lost), everything=holder.has_lost_state, stands=stands)
        )
    return tuple(hurt)


def newest_whole(repo: Repository, holders: Collection[Holder]) -> dict[str, str | None]:
    """Return the newest intact step of every damaged run; *holders* must be all damaged commits and pins."""
    lost = {holder.commit for holder in holders if holder.pin is None}
    return {
        run: _newest_whole(repo, run, lost)
        for run in sorted({holder.save.run for holder in holders if holder.is_shown})
    }


def _stands(repo: Repository, holder: Holder, blobs: Mapping[BlobRef, Collection[ObjectId]]) -> tuple[str, ...]:
    if holder.has_lost_state:
        return ()
    intact = []
    try:
        resolved = (
            Resolved.of_commit(repo.catalog.commit(RecordName(holder.save.run, holder.save.step, holder.commit)))
            if holder.pin is None
            else Resolved.of_pin(repo.records.read_pin(holder.pin))
        )
    except LayerstoreError:
        return ()  # removed since it was listed
    view = repo.catalog.find(holder.save.run)
    for policy in PREDICTABLE:
        try:
            layers = compose_by_policy(repo, resolved, policy, view=view).layers
        except LayerstoreError:
            continue  # an earlier record is damaged: which versions the policy would choose is unknown
        if not any(entry.version in blobs for entry in layers):
            intact.append(policy.name)
    if all(_only_moments(repo, resolved, blob, blobs[blob]) for blob in holder.lost):
        intact.append(WEIGHTS)
    return tuple(intact)


def _only_moments(repo: Repository, resolved: Resolved, blob: BlobRef, lost: Collection[ObjectId]) -> bool:
    """Whether the version *blob* has lost nothing but moments, so that its weights can be exported."""
    entry = next(entry for entry in resolved.record.layers if entry.version == blob)
    try:
        version = repo.version_of(entry)
    except LayerstoreError:
        return False  # the version itself is lost
    return all(stored.kind is Kind.OPTIMIZER for stored in version.named if stored.id in lost)


def _newest_whole(repo: Repository, run: str, lost: Collection[str]) -> str | None:
    view: RunView | None = repo.catalog.find(run)
    if view is None or not view.attempts:
        return None
    unreadable = {name.step for name in view.damaged}
    for row in view.history(view.attempts[-1]):
        # If one record of a step cannot be read, it is unknown which commit the step refers to.
        if row.id not in lost and row.step not in unreadable:
            return references_to(repo, [row])[0]
    return None
