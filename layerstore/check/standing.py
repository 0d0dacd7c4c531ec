"""What still stands where something is damaged: which composites avoid it, at the hurt steps and at others."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from layerstore.check.damage import Holder
from layerstore.errors import LayerstoreError
from layerstore.gc import ASKED_FOR, versions_by
from layerstore.history import Resolved, references_to
from layerstore.model import BlobRef, Kind, ObjectId
from layerstore.policy import Latest
from layerstore.storage.rooms import Rooms
from layerstore.storage.runview import RunView

# The newest hurt commits of a run are asked what else they can give; each costs some milliseconds.
_COMMITS_MAX = 20
WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurt:
    """A commit or pin that has lost something, and what it can still be asked for."""

    reference: str
    layers: tuple[str, ...]
    """Those that it has lost."""
    everything: bool
    """Whether what is no layer is lost too."""
    stands: tuple[str, ...] | None
    """Policies that compose on top of it without the damage; ``weights``: only moments are lost. None: not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is hurt, and what stands."""

    hurt: tuple[Hurt, ...]
    whole: dict[str, str | None]
    """Of every run that is hurt, the newest step that is whole as it is; None where there is none."""


def standing(
    rooms: Rooms,
    holders: Mapping[str, Holder],
    blobs: Mapping[BlobRef, Collection[ObjectId]],
) -> Standing:
    """
    Return what of *holders* stands.

    *blobs* are the version and state blobs that are hurt, each with what it has lost: objects, or itself.
    """
    asked: dict[str, int] = {}
    hurt = []
    for name, holder in sorted(holders.items(), key=lambda item: (item[1].row.run, -item[1].row.step)):
        if not holder.is_shown:
            continue
        asked[holder.row.run] = asked.get(holder.row.run, 0) + 1
        stands = _stands(rooms, holder, blobs) if asked[holder.row.run] <= _COMMITS_MAX else None
        hurt.append(Hurt(reference=name, layers=holder.layers, everything=holder.has_lost_state, stands=stands))
    runs = sorted({holder.row.run for holder in holders.values() if holder.is_shown})
    lost = {holder.row.id for holder in holders.values() if holder.pin is None}
    return Standing(hurt=tuple(hurt), whole={run: _newest_whole(rooms, run, lost) for run in runs})


def _stands(rooms: Rooms, holder: Holder, blobs: Mapping[BlobRef, Collection[ObjectId]]) -> tuple[str, ...]:
    if holder.has_lost_state:
        return ()
    found = []
    try:
        resolved = (
            Resolved.of_commit(rooms.catalog.commit(holder.row.name))
            if holder.pin is None
            else Resolved.of_pin(rooms.records.read_pin(holder.pin))
        )
    except LayerstoreError:
        return ()  # removed meanwhile
    view = rooms.catalog.find(holder.row.run)
    for policy in (Latest(), *ASKED_FOR):
        try:
            versions = versions_by(rooms, resolved, policy, view)
        except LayerstoreError:
            continue  # damaged records below it: what the policy would take is not known
        if not any(version in blobs for version in versions.values()):
            found.append(policy.name)
    if all(_only_moments(rooms, resolved, blob, blobs[blob]) for blob in holder.lost):
        found.append(WEIGHTS)
    return tuple(found)


def _only_moments(rooms: Rooms, resolved: Resolved, blob: BlobRef, lost: Collection[ObjectId]) -> bool:
    """Whether of a version only moments are lost, so that its weights can be exported."""
    entry = next(entry for entry in resolved.record.layers if entry.version == blob)
    try:
        version = rooms.version_of(entry)
    except LayerstoreError:
        return False
    return all(stored.kind is Kind.OPTIMIZER for stored in version.objects if stored.id in lost)


def _newest_whole(rooms: Rooms, run: str, lost: Collection[str]) -> str | None:
    view: RunView | None = rooms.catalog.find(run)
    if view is None or not view.attempts:
        return None
    unreadable = max((name.step for name in view.damaged), default=-1)
    for row in view.history(view.attempts[-1]):
        # At the step of a record that cannot be read nobody knows what is meant.
        if row.id not in lost and row.step != unreadable:
            return references_to(rooms, [row])[0]
    return None
