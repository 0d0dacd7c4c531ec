"""
A commit that has lost layers, once more with older versions of them.

One new record hides the hurt one, as a replacement does; what it says of itself is how old those layers are.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from layerstore.errors import LayerstoreError
from layerstore.format.records import make_commit
from layerstore.model import BlobRef, Commit, LayerEntry, LayerVersion
from layerstore.publish.claims import claim, publish
from layerstore.ops.composition import difference
from layerstore.check.damage import Holder, is_of_bytes
from layerstore.publish.hiding import withdraw
from layerstore.history.past import turns_of
from layerstore.history.references import reference_to
from layerstore.history.resumed import resumed_layers
from layerstore.storage.rooms import Rooms
from layerstore.history.staleness import LayerAge, staleness_of
from layerstore.storage.commits import RecordName
from layerstore.storage.holders import Hold
from layerstore.storage.manifest import RecordRow
from layerstore.storage.objects import ObjectWriter
from layerstore.storage.runview import RunView
from layerstore.tree import Tree

FELL_BACK = "fell_back"
"""Under which a record's decisions say which layers are older than they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallBack:
    """A commit that takes the place of a hurt one."""

    reference: str
    """What means it, before and after."""
    hurt: str
    """Id of the commit that it hides."""
    commit: Commit
    ages: tuple[LayerAge, ...]
    """Of the layers that fell back, how old they are now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallBacks:
    """What can fall back, and what cannot."""

    possible: tuple[FallBack, ...]
    impossible: dict[str, tuple[str, ...]]
    """Hurt commits, as their users call them, with the layers that have no older version that is whole and fits."""


class _Stage(NamedTuple):
    """How far a search has come: what there is still to look at is the same wherever it began."""

    run: str
    begun_in: int
    """The attempt whose history is followed."""
    attempt: int
    """The attempt of the commit that was looked at last."""
    name: RecordName | None
    """The commit to be looked at next; None for the composite that *attempt* went on from."""


class _Choice:
    """Chooses versions; each is read and hashed once, and what many commits have inherited is searched for once."""

    def __init__(self, rooms: Rooms, hurt: Collection[BlobRef]) -> None:
        self._rooms = rooms
        self._hurt = hurt
        self._sound: dict[BlobRef, LayerVersion | None] = {}
        self._found: dict[tuple[_Stage, str, BlobRef, bool], LayerEntry | None] = {}

    def previous(self, commit: Commit, layers: Collection[str]) -> dict[str, LayerEntry]:
        """Return for each of *layers* of *commit*, where there is one, the newest older version that can stand in."""
        lost = {entry.layer: entry for entry in commit.record.layers if entry.layer in layers}
        found: dict[str, LayerEntry | None] = {}
        first: _Stage | None = None
        for stage in self._stages(commit):
            first = first or stage
            wanted = [layer for layer in lost if layer not in found]
            found |= {layer: self._found[key] for layer in wanted if (key := _key(stage, lost[layer])) in self._found}
            entries = self._entries(stage, [layer for layer in wanted if layer not in found])
            found |= {layer: entry for layer, entry in entries.items() if self._fits(entry, lost[layer])}
            if len(found) == len(lost):
                break
        if first is not None:
            self._found |= {_key(first, entry): found.get(layer) for layer, entry in lost.items()}
        return {layer: entry for layer, entry in found.items() if entry is not None}

    def _stages(self, commit: Commit) -> Iterator[_Stage]:
        """
        Yield where to look, the newest save before *commit* first.

        Where an attempt went on from a composite that is the last: training never had what is older.
        """
        run, begun_in = commit.record.run, commit.record.attempt
        view, attempt = self._rooms.catalog.find(run), begun_in
        for row in () if view is None else view.history(attempt, step=commit.record.step - 1):
            if row.attempt != attempt and self._resumed(view, attempt) is not None:
                break
            yield _Stage(run, begun_in, attempt, row.name)
            attempt = row.attempt
        yield _Stage(run, begun_in, attempt, None)

    def _entries(self, stage: _Stage, layers: Collection[str]) -> dict[str, LayerEntry]:
        """Return what is to be found at *stage* of *layers*."""
        if not layers:
            return {}
        if stage.name is None:
            resumed = self._resumed(self._rooms.catalog.find(stage.run), stage.attempt) or []
            return {entry.layer: entry for entry in resumed if entry.layer in layers}
        try:
            return self._rooms.catalog.entries(stage.name, layers)
        except LayerstoreError as exc:
            if not is_of_bytes(exc):
                raise
            return {}  # damaged too: what it has is not known, and older ones may do

    def _resumed(self, view: RunView | None, attempt: int) -> list[LayerEntry] | None:
        """Return the composite that *attempt* went on from, if it was one; nothing where that cannot be told."""
        try:
            found = None if view is None else resumed_layers(self._rooms, view, attempt)
        except LayerstoreError as exc:
            if not is_of_bytes(exc):
                raise
            return []
        return None if found is None else found[1]

    def _fits(self, entry: LayerEntry, lost: LayerEntry) -> bool:
        version = self._whole(entry)
        if version is None or (entry.optimizer_step is None) != (lost.optimizer_step is None):
            return False
        try:
            return difference(self._rooms.version_of(lost), version) is None
        except LayerstoreError:
            return True  # what was lost is not known any more; a composite is checked against it anyway

    def _whole(self, entry: LayerEntry) -> LayerVersion | None:
        """Return the version that *entry* names, if every byte of it is as it was written."""
        if entry.version in self._hurt:
            return None
        if entry.version not in self._sound:
            self._sound[entry.version] = _whole(self._rooms, entry)
        return self._sound[entry.version]


def _key(stage: _Stage, lost: LayerEntry) -> tuple[_Stage, str, BlobRef, bool]:
    """Return what decides what stands in for *lost* from *stage* on."""
    return stage, lost.layer, lost.version, lost.optimizer_step is None


def _whole(rooms: Rooms, entry: LayerEntry) -> LayerVersion | None:
    """Return the version that *entry* names, if every byte is as it was written; what seems lost is read twice."""
    for _ in range(2):
        try:
            version = rooms.version_of(entry)
            for stored in version.objects:
                rooms.objects.verify(stored.ref)
        except LayerstoreError as exc:
            if not is_of_bytes(exc):
                raise
        else:
            return version
    return None


def plan_fall_backs(rooms: Rooms, holders: Mapping[str, Holder], hurt: Set[BlobRef]) -> FallBacks:
    """
    Return what would take the place of the hurt commits among *holders*; *hurt* are the blobs that they lack.

    A commit that has trouble with others too is left alone: those are whole, and a newer layerstore may read them.
    """
    choice = _Choice(rooms, hurt)
    possible = []
    impossible: dict[str, tuple[str, ...]] = {}
    # Oldest first: what an older one has found is what a newer one, that has inherited the same, will find.
    for name, holder in sorted(holders.items(), key=_by_age):
        if not holder.is_shown or holder.pin is not None or holder.has_lost_state or not holder.lost.keys() <= hurt:
            continue
        commit = rooms.catalog.commit(holder.row.name)
        found = choice.previous(commit, holder.layers)
        without = tuple(layer for layer in holder.layers if layer not in found)
        if without:
            impossible[name] = without
        else:
            possible.append(_fall_back(rooms, commit, found))
    return FallBacks(possible=tuple(possible), impossible=impossible)


def _by_age(named: tuple[str, Holder]) -> tuple[str, int, int]:
    row = named[1].row
    return row.run, row.attempt, row.step


def _fall_back(rooms: Rooms, commit: Commit, found: Mapping[str, LayerEntry]) -> FallBack:
    record = commit.record
    turns = turns_of(rooms.catalog.find(record.run))
    ages = {age.layer: age for age in staleness_of(record, list(found.values()), turns=turns).layers}
    lost = {entry.layer: entry.version.id for entry in record.layers if entry.layer in found}
    said: dict[Tree, Tree] = {
        layer: {
            "run": age.run,
            "attempt": age.attempt,
            "step": age.step,
            "steps": age.steps,
            "saves": age.saves,
            "lost": str(lost[layer]),
        }
        for layer, age in ages.items()
    }
    earlier = record.policy.decisions.get(FELL_BACK)
    decisions = {**record.policy.decisions, FELL_BACK: {**(earlier if isinstance(earlier, dict) else {}), **said}}
    made = replace(
        record,
        layers=tuple(found.get(entry.layer, entry) for entry in record.layers),
        policy=replace(record.policy, decisions=decisions),
        supersedes=(commit.id,),
    )
    # Saved when the other was: rules about age go on as before.
    observed = replace(commit.observed, bytes_new=0, bytes_reused=0)
    return FallBack(
        reference=reference_to(rooms, record),
        hurt=commit.id,
        commit=make_commit(made, observed),
        ages=tuple(ages[entry.layer] for entry in record.layers if entry.layer in ages),
    )


def execute_fall_backs(rooms: Rooms, planned: Iterable[FallBack], *, hold: Hold) -> tuple[FallBack, ...]:
    """
    Publish what is *planned*, as far as it is needed still; return that. Each is one link, and hides a hurt commit.

    Raises:
        Conflict: A collection has taken a version meanwhile; those before it are published.
        Locked: Somebody saves to its run, or *hold*, the collections' lock, is lost; those before it are published.
    """
    done = []
    for fall_back in planned:
        with rooms.lock_run(fall_back.commit.record.run):
            if not _is_needed(rooms, fall_back):
                continue
            hold.check()
            with ObjectWriter(rooms.layout, rooms.files, rooms.objects) as writer:
                claim(rooms, writer, fall_back.commit.record.layers, fall_back.commit.record.states)
                publish(rooms, writer, fall_back.commit)
            if len(_shown_at(rooms, fall_back)) > 1:
                # A saver needs no lock: what it has saved at this very step is newer than what falls back.
                withdraw(rooms, fall_back.commit)
            else:
                done.append(fall_back)
    return tuple(done)


def _is_needed(rooms: Rooms, fall_back: FallBack) -> bool:
    """Whether the hurt commit is alone at its place still, and has none of the layers back that are to be replaced."""
    shown = _shown_at(rooms, fall_back)
    if [row.id for row in shown] != [fall_back.hurt]:
        return False
    layers = {age.layer for age in fall_back.ages}
    entries = rooms.catalog.commit(shown[0].name).record.layers
    return not any(_whole(rooms, entry) for entry in entries if entry.layer in layers)


def _shown_at(rooms: Rooms, fall_back: FallBack) -> list[RecordRow]:
    """Return the commits that show at the place of *fall_back*."""
    record = fall_back.commit.record
    view = rooms.catalog.find(record.run)
    rows = [] if view is None else view.of_attempt(record.attempt)
    return [row for row in rows if row.step == record.step]
