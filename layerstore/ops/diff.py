"""
Diff: what two commits have in common, layer by layer and kind by kind.

Equal ids are equal bytes, so this reads version blobs only.
With *stat* also how far the masters moved, read chunk by chunk from objects that are verified first.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, TypeAlias

from layerstore.history.references import Resolved, reference_to
from layerstore.model import BlobRef, Kind, LayerEntry, StoredObject
from layerstore.ops.distance import Distance, nothing_between
from layerstore.ops.measure import measure
from layerstore.progress import Progress
from layerstore.storage.rooms import Rooms

Status: TypeAlias = Literal["same", "changed", "re-sliced", "only in a", "only in b"]
"""``re-sliced``: cut for another world size, so that ids tell nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two that are compared."""

    run: str
    step: int
    commit: str
    pin: str | None
    reference: str
    """What means the commit."""
    world_size: int

    @property
    def name(self) -> str:
        """What a user calls it."""
        return self.pin or self.reference


@dataclass(frozen=True, slots=True, kw_only=True)
class KindDiff:
    """One kind of one layer."""

    status: Status
    bytes_a: int
    bytes_b: int
    bytes_changed: int
    """Of objects that B has and A has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDiff:
    """One layer."""

    layer: str
    status: Status
    kinds: dict[str, KindDiff]
    """The kinds that at least one of the two has."""
    distance: Distance | None = None
    """None unless it was asked for, and where there is nothing to compare."""

    @property
    def bytes_a(self) -> int:
        """Its size in A."""
        return sum(kind.bytes_a for kind in self.kinds.values())

    @property
    def bytes_b(self) -> int:
        """Its size in B."""
        return sum(kind.bytes_b for kind in self.kinds.values())

    @property
    def bytes_changed(self) -> int:
        """The size of what B has and A has not."""
        return sum(kind.bytes_changed for kind in self.kinds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """The answer."""

    a: Side
    b: Side
    layers: tuple[LayerDiff, ...]
    """In A's order, then those that only B has."""
    same_state: bool
    """Whether all that is not a layer is equal too."""

    def count(self, status: Status) -> int:
        """Return how many layers are so."""
        return sum(layer.status == status for layer in self.layers)

    @property
    def bytes_same(self) -> int:
        """The size of what both have."""
        return sum(layer.bytes_b - layer.bytes_changed for layer in self.layers)

    @property
    def bytes_changed(self) -> int:
        """The size of what B has otherwise than A, in layers that both have."""
        return sum(layer.bytes_changed for layer in self.layers if layer.status != "only in b")

    @property
    def bytes_only_a(self) -> int:
        """The size of the layers that only A has."""
        return sum(layer.bytes_a for layer in self.layers if layer.status == "only in a")

    @property
    def bytes_only_b(self) -> int:
        """The size of the layers that only B has."""
        return sum(layer.bytes_b for layer in self.layers if layer.status == "only in b")


def diff(rooms: Rooms, a: Resolved, b: Resolved, *, stat: bool = False, progress: Progress) -> Diff:
    """
    Compare *a* with *b*.

    Raises:
        IntegrityError: A version, or with *stat* an object that is to be measured, is damaged or missing.
    """
    ours = {entry.layer: entry for entry in a.record.layers}
    theirs = {entry.layer: entry for entry in b.record.layers}
    # Both orders are the models' own; what only B has comes last.
    pairs = [(ours.get(layer), theirs.get(layer)) for layer in dict.fromkeys([*ours, *theirs])]
    layers = [_layer(rooms, before, after) for before, after in pairs]
    if stat:
        layers = _measured(rooms, layers, pairs, progress)
    return Diff(
        a=_side(rooms, a), b=_side(rooms, b), layers=tuple(layers), same_state=a.record.states == b.record.states
    )


def _side(rooms: Rooms, resolved: Resolved) -> Side:
    record = resolved.record
    return Side(
        run=record.run,
        step=record.step,
        commit=resolved.commit,
        pin=resolved.pin,
        reference=reference_to(rooms, record),
        world_size=record.world_size,
    )


# -- by ids --------------------------------------------------------------------------------------------------------


def _layer(rooms: Rooms, a: LayerEntry | None, b: LayerEntry | None) -> LayerDiff:
    entry = a or b
    assert entry is not None, "a layer of one of them"
    of_a = () if a is None else rooms.version_of(a).objects
    if a is not None and b is not None and a.version.id == b.version.id:
        of_b = of_a
    else:
        of_b = () if b is None else rooms.version_of(b).objects
    kinds = {kind.value: _kind(_of_kind(of_a, kind), _of_kind(of_b, kind)) for kind in Kind}
    return LayerDiff(
        layer=entry.layer,
        status=_status(a, b),
        kinds={name: found for name, found in kinds.items() if found.bytes_a or found.bytes_b},
    )


def _status(a: LayerEntry | None, b: LayerEntry | None) -> Status:
    if a is None:
        return "only in b"
    if b is None:
        return "only in a"
    return "same" if a.version.id == b.version.id else "changed"


def _of_kind(objects: Iterable[StoredObject], kind: Kind) -> list[StoredObject]:
    """Return those of *objects* that hold *kind*."""
    return [stored for stored in objects if stored.kind is kind]


def _kind(a: list[StoredObject], b: list[StoredObject]) -> KindDiff:
    ids_a, ids_b = ({stored.id for stored in side} for side in (a, b))
    status: Status = "changed"
    if ids_a == ids_b:
        status = "same"
    elif not b:
        status = "only in a"
    elif not a:
        status = "only in b"
    elif {stored.shards for stored in a} != {stored.shards for stored in b}:
        status = "re-sliced"
    return KindDiff(
        status=status,
        bytes_a=sum(stored.size_bytes for stored in a),
        bytes_b=sum(stored.size_bytes for stored in b),
        bytes_changed=sum(stored.size_bytes for stored in b if stored.id not in ids_a),
    )


# -- by numbers --------------------------------------------------------------------------------------------------------


def _measured(
    rooms: Rooms,
    layers: list[LayerDiff],
    pairs: list[tuple[LayerEntry | None, LayerEntry | None]],
    progress: Progress,
) -> list[LayerDiff]:
    """Return *layers* with their distances; a layer is measured, told and forgotten before the next."""
    progress.start("compare", sum(_size_to_read(layer) for layer in layers if layer.status == "changed"))
    verified: set[BlobRef] = set()
    found = []
    for layer, (a, b) in zip(layers, pairs, strict=True):
        if a is None or b is None:
            found.append(layer)
            continue
        version = rooms.version_of(a)
        if layer.status == "same":
            elements = sum(prod(parameter.shape) for parameter in version.parameters)
            found.append(replace(layer, distance=nothing_between(elements) if elements else None))
        else:
            distance = measure(rooms, version, rooms.version_of(b), verified=verified, progress=progress)
            found.append(replace(layer, distance=distance))
    return found


def _size_to_read(layer: LayerDiff) -> int:
    masters = layer.kinds.get(Kind.MASTER.value) or layer.kinds.get(Kind.WEIGHTS.value)
    return masters.bytes_a + masters.bytes_b if masters else 0
