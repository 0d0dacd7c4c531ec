"""
Diff: compare two commits, layer by layer and kind by kind.

Equal ids mean equal bytes, so a plain diff reads only version blobs. With *stat*, it also measures how far the masters
moved.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from layerstore.history import Resolved, reference_to
from layerstore.inspect.measure import distance_between
from layerstore.model import BlobRef, Kind, LayerEntry, LayerVersion, StoredObject
from layerstore.numbers import Distance, nothing_between
from layerstore.progress import Progress
from layerstore.storage import Repository
from layerstore.tables import frame, html_table
from layerstore.units import size

if TYPE_CHECKING:
    from pandas import DataFrame

Status: TypeAlias = Literal["same", "changed", "re-sliced", "only in a", "only in b"]
"""``re-sliced``: cut for another world size or stage, so ids say nothing about equality."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffSide:
    """One of the two commits."""

    _JSON: ClassVar = "run step commit pin world_size stage"

    run: str
    step: int
    commit: str
    pin: str | None
    reference: str
    """The reference that means this commit."""
    world_size: int
    stage: int
    """The ZeRO stage."""

    @property
    def name(self) -> str:
        """The user's name for it."""
        return self.pin or self.reference


@dataclass(frozen=True, slots=True, kw_only=True)
class KindDiff:
    """One kind of one layer."""

    status: Status
    bytes_a: int
    bytes_b: int
    bytes_changed: int
    """Size of the objects that only B has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDiff:
    """One layer."""

    _JSON: ClassVar = "layer same=is_same status kinds bytes_changed"

    layer: str
    status: Status
    kinds: dict[str, KindDiff]
    """The kinds that at least one side has."""
    distance: Distance | None = None
    """None unless requested, or if there is nothing to compare."""

    @property
    def is_same(self) -> bool:
        """Whether both sides have the same version."""
        return self.status == "same"

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
        """Return in words which layer moved most; nothing if that was not measured."""
        moved = [(layer.distance.relative_l2, layer.layer) for layer in self.layers if layer.distance is not None]
        return f"; moved most: {max(moved)[1]} by {max(moved)[0]:.2g} of its norm" if moved else ""

    def _repr_html_(self) -> str:
        return html_table(self._rows(), caption=repr(self))

    def to_pandas(self) -> "DataFrame":
        """Return a frame with a line for each layer; raises Unsupported if pandas is not installed."""
        return frame(self._rows())

    def _rows(self) -> Iterator[dict[str, object]]:
        for layer in self.layers:
            sizes = {"bytes_a": layer.bytes_a, "bytes_b": layer.bytes_b, "bytes_changed": layer.bytes_changed}
            moved = (
                {"relative_l2": layer.distance.relative_l2, "cosine": layer.distance.cosine} if layer.distance else {}
            )
            yield {"layer": layer.layer, "status": layer.status, **sizes, **moved}

    def count(self, status: Status) -> int:
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


def compare(repo: Repository, a: Resolved, b: Resolved, *, stat: bool = False, progress: Progress) -> Diff:
    """
    Compare *a* with *b*; with *stat*, also measure how far B's masters are from A's.

    Raises:
        IntegrityError: A version or, with *stat*, an object to measure is damaged or missing.
        LayoutMismatch: A version lists slices that its shapes do not have.
    """
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


# -- by ids --------------------------------------------------------------------------------------------------------


def _layer(repo: Repository, a: LayerEntry | None, b: LayerEntry | None) -> LayerDiff:
    entry = a or b
    assert entry is not None, "a layer of one of them"
    status: Status = "changed"
    if a is None or b is None:
        status = "only in b" if a is None else "only in a"
    elif a.version.id == b.version.id:
        status = "same"
    version_a = None if a is None else repo.version_of(a)
    version_b = version_a if status == "same" else None if b is None else repo.version_of(b)
    is_cut_alike = version_a is None or version_b is None or version_a.cut == version_b.cut
    kinds = {
        kind.value: _kind(_of_kind(version_a, kind), _of_kind(version_b, kind), is_cut_alike=is_cut_alike)
        for kind in Kind
    }
    return LayerDiff(
        layer=entry.layer,
        status=status,
        kinds={name: found for name, found in kinds.items() if found.bytes_a or found.bytes_b},
    )


def _of_kind(version: LayerVersion | None, kind: Kind) -> list[StoredObject]:
    return [] if version is None else [stored for stored in version.objects if stored.kind is kind]


def _kind(a: list[StoredObject], b: list[StoredObject], *, is_cut_alike: bool) -> KindDiff:
    ids_a, ids_b = ({stored.id for stored in side} for side in (a, b))
    status: Status = "changed"
    if ids_a == ids_b:
        status = "same"
    elif not b:
        status = "only in a"
    elif not a:
        status = "only in b"
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
    """Yield *layers* with their distances, one in memory at a time."""
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
