"""
What a composite consists of: a version for each layer, and the base commit that supplies all else.

Pure data until it is written. Which layer comes from where is a policy's or a recipe's word;
whether they fit together is checked here.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from layerstore.errors import IntegrityError, LayoutMismatch
from layerstore.history.past import Past
from layerstore.history.references import Resolved, references_to
from layerstore.history.staleness import Staleness, staleness_of
from layerstore.model import CommitRecord, LayerEntry, LayerVersion, PolicyUse
from layerstore.policy import EXACT, Latest, Policy
from layerstore.policy.due import anchored
from layerstore.policy.replay import replay
from layerstore.storage.rooms import Rooms
from layerstore.storage.runview import RunView
from layerstore.tree import Tree
from layerstore.zero3 import undivided


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """A composite before it is written: pure data."""

    base: CommitRecord
    """Supplies all that is not a layer."""
    commit: str
    """The base's id."""
    time_ns: int
    """When the base was written."""
    policy: str
    parameters: dict[Tree, Tree]
    """The policy's settings."""
    layers: tuple[LayerEntry, ...]
    """The chosen version of every layer, in the model's order."""
    older_than_due: tuple[str, ...] = ()
    """Layers that were due at the save they are taken from but not written there: what it had inherited is used."""
    notes: tuple[str, ...] = ()
    """What a recipe leaves to defaults, and what of it has no meaning here."""

    @property
    def staleness(self) -> Staleness:
        """How old each layer is, seen from the base."""
        return staleness_of(self.base, self.layers)

    def own_parameters(self, versions: Iterable[LayerVersion]) -> frozenset[str]:
        """Return the parameters of the layers that the base itself saved; *versions* are those of all layers."""
        return frozenset(
            parameter.name
            for entry, version in zip(self.layers, versions, strict=True)
            if entry.saved_by(self.base)
            for parameter in version.parameters
        )


def compose_latest(resolved: Resolved) -> Composition:
    """Take the commit's own layers, each as new as the commit has it; of a pinned composite those that were chosen."""
    record = resolved.record
    is_chosen = resolved.pin is not None and record.policy.name != Latest.name
    return Composition(
        base=record,
        commit=resolved.commit,
        time_ns=resolved.time_ns,
        policy=record.policy.name if is_chosen else "latest",
        parameters=record.policy.parameters if is_chosen else {},
        layers=record.layers,
    )


def compose_exact(rooms: Rooms, resolved: Resolved) -> Composition:
    """
    Take every layer from this very step.

    Raises:
        LayoutMismatch: Some layers were not saved at this step; the message names one.
    """
    record = resolved.record
    older = [entry for entry in record.layers if not entry.saved_by(record)]
    if older:
        first = older[0]
        this, other = references_to(rooms, [record, first.origin])
        raise LayoutMismatch(
            f"{len(older)} of {len(record.layers)} layers were not saved at {this}: {first.layer} is from {other}",
            hint="--policy latest takes each layer's newest version",
        )
    return replace(compose_latest(resolved), policy=EXACT, parameters={})


def compose_by_policy(rooms: Rooms, resolved: Resolved, policy: Policy, *, view: RunView | None = None) -> Composition:
    """
    Take each layer from its newest save, up to the base, at which it was due under *policy*.

    As the run stands, or as it would with *view*.
    """
    base = resolved.record
    if isinstance(policy, Latest):
        return compose_latest(resolved)
    view = rooms.catalog.find(base.run) if view is None else view
    past = Past(rooms, resolved, view=view)
    saves = past.saves()
    newest = next(saves)
    phased = anchored(policy, newest.save_number, past.decided(0, policy))
    picks = replay(phased, itertools.chain([newest], saves), recorded=lambda position: past.decided(position, policy))
    wanted: dict[int, list[str]] = {}
    for layer, position in picks.items():
        wanted.setdefault(position, []).append(layer)
    found: dict[str, LayerEntry] = {}
    for position, names in wanted.items():
        found |= past.entries(position, names)
    layers = tuple(found[entry.layer] for entry in base.layers)
    return Composition(
        base=base,
        commit=resolved.commit,
        time_ns=resolved.time_ns,
        policy=policy.name,
        parameters=policy.parameters,
        layers=layers,
        older_than_due=tuple(entry.layer for entry in layers if past.is_older(entry, picks[entry.layer])),
    )


def as_resolved(composition: Composition) -> Resolved:
    """Return *composition* as the commit that it would be: its base, with its own layers."""
    base = composition.base
    return Resolved(
        record=replace(
            base,
            layers=composition.layers,
            policy=PolicyUse(
                name=composition.policy,
                parameters=composition.parameters,
                decisions={},
            ),
        ),
        commit=composition.commit,
        pin=None,
        time_ns=composition.time_ns,
    )


# -- whether they fit together -------------------------------------------------------------------------------------


def check_members(rooms: Rooms, composition: Composition) -> list[LayerVersion]:
    """
    Return the chosen version of every layer.

    Raises:
        LayoutMismatch: A version is not of the same parameters and buffers as the base's, or has no optimizer state
            where that has (or has, where it has none).
    """
    versions = [rooms.version_of(entry) for entry in composition.layers]
    own = {entry.layer: entry for entry in composition.base.layers}
    for entry, version in zip(composition.layers, versions, strict=True):
        if own[entry.layer].version != entry.version:
            base = _version_of_base(rooms, own[entry.layer], taken=entry)
            problem = None if base is None else difference(base, version)
            if problem is not None:
                theirs, ours = references_to(rooms, [entry.origin, composition.base])
                raise LayoutMismatch(
                    f"{entry.layer} of {theirs} does not fit {ours}: {problem}",
                    hint="take this layer from a save of the same model and optimizer",
                )
    return versions


def check_whole(rooms: Rooms, composition: Composition, *, world_size: int | None = None) -> None:
    """
    Make sure that nothing has to be cut that cannot be: the state of an optimizer that belongs to no layer.

    Raises:
        LayoutMismatch: The base has such a state, and layers are of other saves or *world_size* is another.
    """
    base = composition.base
    count = base.world_size if world_size is None else world_size
    older = [entry for entry in composition.layers if not entry.saved_by(base)]
    if count == base.world_size and not older:
        return
    kept = undivided(rooms.state(base.states[0]))
    if kept:
        ours, *others = references_to(rooms, [base, *(entry.origin for entry in older[:1])])
        wish = f"be mixed with layers of {others[0]}" if older else f"be had for {count} ranks"
        raise LayoutMismatch(
            f"{ours} cannot {wish}: its optimizer keeps {kept}, which cannot be cut into layers",
            hint=f"only --policy exact at world size {base.world_size}, without --recipe",
        )


def _version_of_base(rooms: Rooms, own: LayerEntry, *, taken: LayerEntry) -> LayerVersion | None:
    """
    Return what the base itself has of a layer; None where that is lost and an older save of its run is *taken*.

    A training has one model: the composite stands without it, and lengths that do not fit are found in assembly.
    """
    try:
        return rooms.version_of(own)
    except IntegrityError:
        if taken.origin.run != own.origin.run:
            raise
        return None


def difference(base: LayerVersion, other: LayerVersion) -> str | None:
    """Return in words how the version *other* of a layer does not fit *base*; None where it does."""
    for what, ours, theirs in (
        ("parameter", base.parameters, other.parameters),
        ("buffer", base.buffers, other.buffers),
    ):
        found = _named_difference(what, {each.name: each for each in ours}, {each.name: each for each in theirs})
        if found is not None:
            return found
    missing = sorted(base.optimizer_states ^ other.optimizer_states)
    if missing:
        name, state = missing[0]
        has_it = "only the base has" if missing[0] in base.optimizer_states else "the base has no"
        return f"{has_it} the optimizer state {state!r} of {name!r}"
    return None


def _named_difference(what: str, ours: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    for name in sorted(ours.keys() ^ theirs.keys()):
        return f"{what} {name!r} is {'missing' if name in ours else 'not in the base'}"
    for name, mine in ours.items():
        if mine != theirs[name]:
            return f"{what} {name!r} is {_facts(theirs[name])}, in the base {_facts(mine)}"
    return None


def _facts(item: object) -> str:
    shape = "×".join(map(str, getattr(item, "shape", ()))) or "a scalar"
    aliases: Sequence[str] = getattr(item, "aliases", ())
    tied = f", tied with {', '.join(aliases)}" if aliases else ""
    return f"{getattr(item, 'dtype', '')} {shape}{', frozen' if getattr(item, 'frozen', False) else ''}{tied}"
