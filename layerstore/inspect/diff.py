"""
Diff: compare two commits, layer by layer and kind by kind.

Equal ids mean equal bytes, so a plain diff reads only version blobs. With *stat*, it also measures how far the masters
moved.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, isnan, prod
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from layerstore.errors import InvalidInput, NotFound
from layerstore.history import Resolved, reference_to
from layerstore.inspect.measure import MASTER, Tally, distance_between, places_in, tallies_between
from layerstore.inspect.show import unknown_layer
from layerstore.layers import layer_of
from layerstore.model import BlobRef, Kind, LayerEntry, LayerVersion, StoredObject
from layerstore.nearest import did_you_mean, nearest
from layerstore.numbers import Distance, nothing_between
from layerstore.progress import Progress
from layerstore.storage import Repository
from layerstore.tables import data_frame
from layerstore.units import size

if TYPE_CHECKING:
    from pandas import DataFrame

LayerStatus: TypeAlias = Literal["same", "changed", "re-sliced", "only in a", "only in b"]
"""``re-sliced``: cut for a different world size or stage, so ids cannot show whether anything changed."""

StateStatus: TypeAlias = Literal["identical", "changed", "only in a", "only in b", "not comparable"]
"""``identical``: bit for bit. ``not comparable``: shapes differ, or the values are not numbers."""


_NAME, _ELEMENTS = "name", "elements"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffSide:
    """One of the two commits."""

    _JSON: ClassVar = "run step commit pin world_size stage"

    run: str
    step: int
    commit: str
    pin: str | None
    reference: str
    """A reference to this commit."""
    world_size: int
    stage: int
    """The ZeRO stage."""

    @property
    def name(self) -> str:
        """The pin that the user gave, otherwise the reference."""
        return self.pin or self.reference


@dataclass(frozen=True, slots=True, kw_only=True)
class KindDiff:
    """How one kind of one layer differs."""

    status: LayerStatus
    bytes_a: int
    bytes_b: int
    bytes_changed: int
    """Size of the objects that only B has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDiff:
    """How one layer differs between A and B."""

    _JSON: ClassVar = "layer same=is_same status kinds bytes_changed"

    layer: str
    status: LayerStatus
    kinds: dict[str, KindDiff]
    """The kinds that at least one side has."""
    distance: Distance | None = None
    """None if not requested, or if there is nothing to compare."""

    @property
    def is_same(self) -> bool:
        """Whether both sides have the same version."""
        return self.status == "same"

    @property
    def bytes_a(self) -> int:
        """The layer's size in A."""
        return sum(kind.bytes_a for kind in self.kinds.values())

    @property
    def bytes_b(self) -> int:
        """The layer's size in B."""
        return sum(kind.bytes_b for kind in self.kinds.values())

    @property
    def bytes_changed(self) -> int:
        """Size of the objects that only B has."""
        return sum(kind.bytes_changed for kind in self.kinds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """Two commits, compared."""

    _JSON: ClassVar = "a b layers same_state bytes_same bytes_changed bytes_only_a bytes_only_b"

    a: DiffSide
    b: DiffSide
    layers: tuple[LayerDiff, ...]
    """In A's order, then those that only B has."""
    same_state: bool
    """Whether everything that is not a layer is equal too."""

    def __repr__(self) -> str:
        counted = Counter(layer.status for layer in self.layers)
        layers = ", ".join(f"{count} {status}" for status, count in counted.items()) or "none"
        changed = self.bytes_changed + self.bytes_only_b
        sizes = f"{size(changed)} only in {self.b.name}"
        return f"<Diff {self.a.name} -> {self.b.name}: layers {layers}; {sizes}{self._movement()}>"

    def _movement(self) -> str:
        """Describe which layer moved most; empty if movement was not measured."""
        moved = [(layer.distance.relative_l2, layer.layer) for layer in self.layers if layer.distance is not None]
        return f"; moved most: {max(moved)[1]} by {max(moved)[0]:.2g} of its norm" if moved else ""

    def to_pandas(self) -> "DataFrame":
        """Return a frame with a row for each layer; raises Unsupported if pandas is not installed."""
        return data_frame(self._rows())

    def _rows(self) -> Iterator[dict[str, object]]:
        for layer in self.layers:
            sizes = {"bytes_a": layer.bytes_a, "bytes_b": layer.bytes_b, "bytes_changed": layer.bytes_changed}
            moved = (
                {"relative_l2": layer.distance.relative_l2, "cosine": layer.distance.cosine} if layer.distance else {}
            )
            yield {"layer": layer.layer, "status": layer.status, **sizes, **moved}

    def count(self, status: LayerStatus) -> int:
        """Count the layers with this status."""
        return sum(layer.status == status for layer in self.layers)

    @property
    def bytes_same(self) -> int:
        """Size of what both commits have."""
        return sum(layer.bytes_b - layer.bytes_changed for layer in self.layers)

    @property
    def bytes_changed(self) -> int:
        """Size of what differs in B, in layers that both have."""
        return sum(layer.bytes_changed for layer in self.layers if layer.status != "only in b")

    @property
    def bytes_only_a(self) -> int:
        """Size of the layers that only A has."""
        return sum(layer.bytes_a for layer in self.layers if layer.status == "only in a")

    @property
    def bytes_only_b(self) -> int:
        """Size of the layers that only B has."""
        return sum(layer.bytes_b for layer in self.layers if layer.status == "only in b")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDiff:
    """How far A and B are apart in the masters, or in one state of the optimizer."""

    status: StateStatus
    elements: int = 0
    """How many elements were compared."""
    relative_l2: float | None = None
    """L2 norm of the difference, divided by A's L2 norm; None if there is nothing to compare."""
    cosine: float | None = None
    """Cosine of the angle between the two; None if there is nothing to compare."""
    nonfinite_a: int | None = None
    """NaNs and infinities in A; None if they were not read."""
    nonfinite_b: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterDiff:
    """One parameter of a layer."""

    parameter: str
    shape_a: tuple[int, ...] | None
    """None if A has no such parameter."""
    shape_b: tuple[int, ...] | None
    frozen: bool
    """Whether neither side trains it; then its weights are compared instead of masters."""
    tied: tuple[str, ...]
    """Other parameter names for the same numbers."""
    states: dict[str, StateDiff]
    """``master``, and each state of the optimizer that at least one side has: ``exp_avg``, ``exp_avg_sq``."""

    @property
    def elements(self) -> int:
        """The number of elements; in A, if A has the parameter, otherwise in B."""
        shape = self.shape_b if self.shape_a is None else self.shape_a
        return prod(shape or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersDiff:
    """One layer of two commits, compared parameter by parameter."""

    a: DiffSide
    b: DiffSide
    layer: LayerDiff
    parameters: tuple[ParameterDiff, ...]
    """In the requested order; by default A's, then the parameters that only B has."""
    totals: dict[str, StateDiff]
    """Each state over all parameters that were compared."""

    def __repr__(self) -> str:
        head = f"<ParametersDiff {self.a.name} -> {self.b.name}: {self.layer.layer} {self.layer.status}"
        apart = ", ".join(
            state if diff.relative_l2 is None else f"{state} {diff.relative_l2:.2g}"
            for state, diff in self.totals.items()
        )
        return f"{head}, parameters {len(self.parameters)}; {apart or 'nothing to compare'}>"

    def to_pandas(self) -> "DataFrame":
        """Return a frame with a row for each parameter; raises Unsupported if pandas is not installed."""
        return data_frame(self._rows())

    def _rows(self) -> Iterator[dict[str, object]]:
        for parameter in self.parameters:
            row: dict[str, object] = {"parameter": parameter.parameter, "elements": parameter.elements}
            for state, diff in parameter.states.items():
                row |= {state: diff.status, f"{state}_relative_l2": diff.relative_l2}
            yield row


def compare(repo: Repository, a: Resolved, b: Resolved, *, stat: bool = False, progress: Progress) -> Diff:
    """Compare *a* with *b*; with *stat*, also measure how far B's masters are from A's."""
    ours = {entry.layer: entry for entry in a.record.layers}
    theirs = {entry.layer: entry for entry in b.record.layers}
    pairs = [(ours.get(layer), theirs.get(layer)) for layer in dict.fromkeys([*ours, *theirs])]
    layers = [_layer(repo, before, after) for before, after in pairs]
    if stat:
        layers = list(_measured(repo, layers, pairs, progress))
    return Diff(a=_side(repo, a), b=_side(repo, b), layers=tuple(layers), same_state=a.record.states == b.record.states)


def _side(repo: Repository, resolved: Resolved) -> DiffSide:
    record = resolved.record
    return DiffSide(
        run=record.run,
        step=record.step,
        commit=resolved.commit,
        pin=resolved.pin,
        reference=reference_to(repo, record),
        world_size=record.world_size,
        stage=record.stage,
    )


def compare_layer(
    repo: Repository, a: Resolved, b: Resolved, layer: str, *, sort: str, progress: Progress
) -> ParametersDiff:
    """Compare *layer* in *a* and *b*, parameter by parameter; no tensor is read if both have the same version."""
    sides = _side(repo, a), _side(repo, b)
    before, after = (next((entry for entry in side.record.layers if entry.layer == layer), None) for side in (a, b))
    if before is None and after is None:
        raise _no_layer(repo, layer, [*a.record.layers, *b.record.layers], where=f"{sides[0].name} or {sides[1].name}")
    layer_diff = _layer(repo, before, after)
    version_a, version_b = (None if entry is None else repo.version_of(entry) for entry in (before, after))
    _check_sort(sort, [version for version in (version_a, version_b) if version is not None])
    tallies = {}
    if version_a is not None and version_b is not None and layer_diff.status != "same":
        tallies = tallies_between(repo, version_a, version_b, progress)
    parameters = _parameters(version_a, version_b, tallies, is_same=layer_diff.status == "same")
    return ParametersDiff(
        a=sides[0],
        b=sides[1],
        layer=layer_diff,
        parameters=_sorted(parameters, sort),
        totals=_totals(parameters, tallies),
    )


def _no_layer(repo: Repository, layer: str, entries: list[LayerEntry], *, where: str) -> NotFound:
    """Return the error for a *layer* that neither side has; for tied weights, hint at the layer that holds them."""
    problem = unknown_layer(layer, list(dict.fromkeys(entry.layer for entry in entries)), where=where)
    for entry in entries:
        for parameter in repo.version_of(entry).parameters:
            if layer in {layer_of(alias) for alias in parameter.aliases}:
                return NotFound(problem.message, hint=f"its weights are tied to {parameter.name}: see {entry.layer}")
    return problem


# -- by ids --------------------------------------------------------------------------------------------------------


def _layer(repo: Repository, a: LayerEntry | None, b: LayerEntry | None) -> LayerDiff:
    entry = a or b
    assert entry is not None, "a layer of one of them"
    status: LayerStatus = "changed"
    if a is None or b is None:
        status = "only in b" if a is None else "only in a"
    elif a.version.id == b.version.id:
        status = "same"
    version_a = None if a is None else repo.version_of(a)
    # A shared blob is read once: most layers of two neighbouring saves may be the same.
    version_b = version_a if status == "same" else None if b is None else repo.version_of(b)
    is_cut_alike = version_a is None or version_b is None or version_a.cut == version_b.cut
    kinds = {
        kind.value: _kind(_of_kind(version_a, kind), _of_kind(version_b, kind), is_cut_alike=is_cut_alike)
        for kind in Kind
    }
    return LayerDiff(
        layer=entry.layer,
        status=status,
        kinds={name: diff for name, diff in kinds.items() if diff.bytes_a or diff.bytes_b},
    )


def _of_kind(version: LayerVersion | None, kind: Kind) -> list[StoredObject]:
    return [] if version is None else [stored for stored in version.objects if stored.kind is kind]


def _kind(a: list[StoredObject], b: list[StoredObject], *, is_cut_alike: bool) -> KindDiff:
    ids_a, ids_b = ({stored.id for stored in side} for side in (a, b))
    status: LayerStatus = "changed"
    if ids_a == ids_b:
        status = "same"
    elif not b:
        status = "only in a"
    elif not a:
        status = "only in b"
    # If cut differently, the same numbers are in other objects, so ids cannot show whether anything changed.
    elif not is_cut_alike or {stored.shards for stored in a} != {stored.shards for stored in b}:
        status = "re-sliced"
    return KindDiff(
        status=status,
        bytes_a=sum(stored.size_bytes for stored in a),
        bytes_b=sum(stored.size_bytes for stored in b),
        bytes_changed=sum(stored.size_bytes for stored in b if stored.id not in ids_a),
    )


# -- by numbers ----------------------------------------------------------------------------------------------------


def _measured(
    repo: Repository,
    layers: list[LayerDiff],
    pairs: list[tuple[LayerEntry | None, LayerEntry | None]],
    progress: Progress,
) -> Iterator[LayerDiff]:
    """Yield *layers* with their distances, measuring one at a time."""
    progress.start("compare", sum(_size_to_read(layer) for layer in layers if layer.status == "changed"))
    verified: set[BlobRef] = set()
    for layer, (a, b) in zip(layers, pairs, strict=True):
        if a is None or b is None:
            yield layer
            continue
        version = repo.version_of(a)
        distance: Distance | None
        if layer.status == "same":
            elements = sum(prod(parameter.shape) for parameter in version.parameters)
            distance = nothing_between(elements) if elements else None
        else:
            distance = distance_between(repo, version, repo.version_of(b), verified, progress)
        yield replace(layer, distance=distance)


def _size_to_read(layer: LayerDiff) -> int:
    masters = layer.kinds.get(Kind.MASTER.value) or layer.kinds.get(Kind.WEIGHTS.value)
    return masters.bytes_a + masters.bytes_b if masters else 0


# -- by parameter --------------------------------------------------------------------------------------------------


def _parameters(
    a: LayerVersion | None,
    b: LayerVersion | None,
    tallies: Mapping[tuple[str, str], Tally],
    *,
    is_same: bool,
) -> tuple[ParameterDiff, ...]:
    ours, theirs = (
        {} if side is None else {parameter.name: parameter for parameter in side.parameters} for side in (a, b)
    )
    places_a, places_b = ({} if side is None else places_in(side) for side in (a, b))
    diffs = []
    for name in dict.fromkeys([*ours, *theirs]):
        sides = [parameter for parameter in (ours.get(name), theirs.get(name)) if parameter is not None]
        in_a, in_b = places_a.get(name, {}), places_b.get(name, {})
        states = {}
        for state in sorted(in_a.keys() | in_b.keys(), key=_column):
            if is_same:
                states[state] = _unread(prod(sides[0].shape))
            elif state in in_a and state in in_b:
                states[state] = _state(tallies.get((name, state)))
            else:
                states[state] = StateDiff(status="only in a" if state in in_a else "only in b")
        diffs.append(
            ParameterDiff(
                parameter=name,
                shape_a=ours[name].shape if name in ours else None,
                shape_b=theirs[name].shape if name in theirs else None,
                frozen=all(parameter.frozen for parameter in sides),
                tied=tuple(dict.fromkeys(alias for parameter in sides for alias in parameter.aliases)),
                states=states,
            )
        )
    return tuple(diffs)


def _totals(parameters: Iterable[ParameterDiff], tallies: Mapping[tuple[str, str], Tally]) -> dict[str, StateDiff]:
    """Return the total of each state over all *parameters*, masters first."""
    by_state: dict[str, list[tuple[str, StateDiff]]] = {}
    for parameter in parameters:
        for state, diff in parameter.states.items():
            by_state.setdefault(state, []).append((parameter.parameter, diff))
    totals = {}
    for state, parts in sorted(by_state.items(), key=lambda item: _column(item[0])):
        statuses = {diff.status for _, diff in parts}
        status: StateStatus = statuses.pop() if len(statuses) == 1 else "changed"
        read = [tallies[name, state] for name, _ in parts if (name, state) in tallies]
        if read:
            whole = Tally()
            for tally in read:
                whole.meter.include(tally.meter)
            totals[state] = replace(_state(whole), status=status)
        elif status == "identical":
            totals[state] = _unread(sum(diff.elements for _, diff in parts))
        else:
            totals[state] = StateDiff(status=status)
    return totals


def _check_sort(column: str, versions: Iterable[LayerVersion]) -> None:
    """Raise InvalidInput if parameters have no such *column*, before any tensor is read."""
    states = {state for version in versions for places in places_in(version).values() for state in places}
    columns = [_NAME, _ELEMENTS, *sorted(states, key=_column)]
    if column not in columns:
        hint = did_you_mean(nearest(column, columns), else_=f"choose one of {', '.join(columns)}")
        raise InvalidInput(f"parameters of this layer cannot be sorted by {column!r}", hint=hint)


def _column(state: str) -> tuple[bool, str]:
    """Return the key that sorts *state* into column order: masters first, then by name."""
    return state != MASTER, state


def _sorted(parameters: tuple[ParameterDiff, ...], column: str) -> tuple[ParameterDiff, ...]:
    """Return *parameters* by *column*, largest first: NaN before all, missing last; ``name`` keeps their order."""

    def rank(parameter: ParameterDiff) -> float:
        state = parameter.states.get(column)
        number = parameter.elements if column == _ELEMENTS else None if state is None else state.relative_l2
        return -1.0 if number is None else inf if isnan(number) else number

    return parameters if column == _NAME else tuple(sorted(parameters, key=rank, reverse=True))


def _unread(elements: int) -> StateDiff:
    """Return the result for numbers that need not be read, since both sides have the same object."""
    return StateDiff(status="identical", elements=elements, relative_l2=0.0, cosine=1.0)


def _state(tally: Tally | None) -> StateDiff:
    if tally is None:
        return StateDiff(status="not comparable")
    distance = tally.meter.distance()
    return StateDiff(
        status="identical" if tally.is_identical else "changed",
        elements=distance.elements,
        relative_l2=distance.relative_l2,
        cosine=distance.cosine,
        nonfinite_a=distance.nonfinite_a,
        nonfinite_b=distance.nonfinite_b,
    )
