"""Show and ls: everything about one commit, and the sizes of its layers."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from math import prod
from typing import TYPE_CHECKING, ClassVar, Self

from layerstore.errors import LayerstoreError, NotFound
from layerstore.format import WITHOUT_MOMENTS
from layerstore.history import Resolved, metrics_if_sound, objects_of_state, reference_to, saved_at, saves_below
from layerstore.json_fields import json_fields
from layerstore.model import DCP, CodingLoss, Kind, LayerEntry, Origin
from layerstore.nearest import did_you_mean, nearest
from layerstore.storage import Repository
from layerstore.tables import data_frame
from layerstore.units import short_id, size, utc

if TYPE_CHECKING:
    from pandas import DataFrame

# Layers that a hint lists.
_NAMES_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The error that coding made in the masters, or in an optimizer state."""

    state: str
    """``master``, or the state's name."""
    relative_rms: float
    """RMS of the error, divided by the RMS of the movement since the reference or, without one, of the values."""
    relative_greatest: float
    """The greatest error, divided by the greatest movement or value."""

    @classmethod
    def of(cls, losses: Iterable[CodingLoss]) -> tuple[Self, ...]:
        """Return the total of *losses* for each state."""
        by_state: dict[str, CodingLoss] = {}
        for loss in losses:
            by_state[loss.state] = loss + by_state[loss.state] if loss.state in by_state else loss
        return tuple(
            cls(state=state or "master", relative_rms=error.relative, relative_greatest=error.relative_greatest)
            for state, error in sorted(by_state.items())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLine:
    """One layer of a commit, with the size of each kind."""

    _JSON: ClassVar = "layer run attempt step version parameters frozen bytes=bytes_by_kind is_exact refers_to losses"

    layer: str
    run: str
    attempt: int
    step: int
    """The step at which this version was saved."""
    version: str
    parameters: int
    """The number of elements in all its parameters."""
    frozen: bool
    bytes_by_kind: dict[str, int]
    is_exact: bool
    """Whether it is kept bit for bit."""
    refers_to: str | None
    """The exact save that its differences refer to, or an object if no save fits; None if it stores no differences."""
    losses: tuple[Loss, ...]
    """The error that coding made in its masters and in each optimizer state, as measured when it was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitView:
    """Everything about one commit."""

    _JSON: ClassVar = (
        "run step attempt fork save_number commit pin time=time_ns world_size stage flavour tag policy "
        "policy_parameters precision mixture=is_mixture supersedes pins layers_saved size_bytes layers files "
        "beside_bytes has_moments metrics losses"
    )

    run: str
    step: int
    attempt: int
    fork: str | None
    save_number: int
    """Its position in its history, from 0, fixed when it was saved; skipped and given-up saves use up numbers too."""
    commit: str
    pin: str | None
    time_ns: int
    """When it was written, by its writer's clock."""
    world_size: int
    stage: int
    """The ZeRO stage."""
    flavour: str
    tag: str
    policy: str
    policy_parameters: dict[str, str]
    precision: str
    """``exact`` if all layers are, ``mixed`` if only inherited layers are compact, else the save's own precision."""
    is_among_compact: bool
    """Whether some save of its run is not exact, so that this commit's precision is worth showing."""
    losses: tuple[Loss, ...]
    """The error that coding made in all its layers together."""
    is_mixture: bool
    """Whether it is a pinned composite, whose policy chose the layers but did not save them."""
    supersedes: tuple[str, ...]
    """Ids of the commits that it replaced."""
    pins: tuple[str, ...]
    """All pins of exactly this content, including *pin*."""
    layers: tuple[LayerLine, ...]
    files: tuple[str, ...]
    """Files of the checkpoint that are kept byte for byte."""
    beside_bytes: int
    """Size of everything that is not a layer: the ranks' own states, and files."""
    has_moments: bool
    """Whether training can resume from it: gc may have dropped its moments."""
    metrics: dict[str, float] | None
    """The metrics that training measured at its step; None if they are damaged."""

    def __repr__(self) -> str:
        saved = f"{self.layers_saved} of {len(self.layers)} layers saved, {size(self.size_bytes)}"
        when = f"world size {self.world_size}, {self.time:%Y-%m-%d %H:%M} UTC"
        return f"<CommitView {self.run}@{self.step} {short_id(self.commit)}: {saved}, policy {self.policy}, {when}>"

    def to_pandas(self) -> "DataFrame":
        """Return a frame with a row for each layer; raises Unsupported if pandas is not installed."""
        return data_frame(map(json_fields, self.layers))

    @property
    def time(self) -> datetime:
        """When it was written, in UTC."""
        return utc(self.time_ns)

    @property
    def is_dcp(self) -> bool:
        """Whether ``torch.distributed.checkpoint``, not DeepSpeed, saved it."""
        return self.flavour == DCP

    @property
    def layers_saved(self) -> int:
        """How many of its layers were saved at exactly this step."""
        own = (self.run, self.attempt, self.step)
        return sum((line.run, line.attempt, line.step) == own for line in self.layers)

    @property
    def size_bytes(self) -> int:
        """The size of all its layers."""
        return sum(sum(line.bytes_by_kind.values()) for line in self.layers)


def describe_commit(repo: Repository, resolved: Resolved) -> CommitView:
    """Return everything about one commit."""
    record = resolved.record
    states = [repo.state(ref) for ref in record.states]
    beside = {*record.states, *(ref for state in states for ref in objects_of_state(state))}
    gathered = [file.path for state in states for file in state.gathered]
    losses, references = _losses(repo, record.layers), _references(repo, record.layers)
    view = repo.catalog.find(record.run)
    return CommitView(
        run=record.run,
        step=record.step,
        attempt=record.attempt,
        fork=None if record.fork is None else f"attempt {record.fork.attempt} at step {record.fork.step}",
        save_number=record.save_number,
        commit=resolved.commit,
        pin=resolved.pin,
        time_ns=resolved.time_ns,
        world_size=record.world_size,
        stage=record.stage,
        flavour=record.layout.flavour,
        tag=record.layout.tag,
        policy=record.policy.name,
        policy_parameters={str(name): str(value) for name, value in record.policy.parameters.items()},
        precision=record.kept_precision,
        is_among_compact=view is not None and not all(row.is_exact for row in view.visible),
        losses=Loss.of(loss for layer_losses in losses.values() for loss in layer_losses),
        is_mixture=resolved.is_mixture,
        supersedes=record.supersedes,
        pins=tuple(pin.name for pin in repo.records.readable_pins() if pin.record == record),
        layers=tuple(_layer_line(repo, entry, losses, references) for entry in record.layers),
        files=tuple(sorted([file.path for state in states for file in state.files] + gathered)),
        beside_bytes=sum(ref.size_bytes for ref in beside),
        has_moments=WITHOUT_MOMENTS not in record.flags,
        metrics=metrics_if_sound(repo, record),
    )


def layer_lines(repo: Repository, entries: Sequence[LayerEntry], *, layer: str | None = None) -> list[LayerLine]:
    """Return the layers of *entries* with their sizes, or only *layer*; raises NotFound if that is not one of them."""
    chosen = [entry for entry in entries if layer in {None, entry.layer}]
    if layer is not None and not chosen:
        raise unknown_layer(layer, [entry.layer for entry in entries], where="this commit")
    losses, references = _losses(repo, chosen), _references(repo, chosen)
    return [_layer_line(repo, entry, losses, references) for entry in chosen]


def unknown_layer(layer: str, names: Sequence[str], *, where: str) -> NotFound:
    """Return the error for a *layer* that is not among the *names*; its hint suggests similar names, or lists some."""
    shown = ", ".join(names if len(names) <= _NAMES_MAX else [*names[:_NAMES_MAX], "…"])
    owners = [name for name in names if layer.startswith(f"{name}.")]  # *layer* is a parameter's name
    hint = did_you_mean(owners or nearest(layer, names), else_=f"layers: {shown}")
    return NotFound(f"there is no layer {layer!r} in {where}", hint=hint)


def _losses(repo: Repository, entries: Iterable[LayerEntry]) -> dict[str, list[CodingLoss]]:
    """Return the coding losses of each layer whose save still exists and records them."""
    by_layer: dict[str, list[CodingLoss]] = {}
    for origin, layers in _compact_by_origin(entries):
        name = saved_at(repo, origin)
        with suppress(LayerstoreError):  # an unreadable record of losses does not affect the layers
            for loss in () if name is None else repo.catalog.commit(name).observed.losses:
                if loss.layer in layers:
                    by_layer.setdefault(loss.layer, []).append(loss)
    return by_layer


def _references(repo: Repository, entries: Iterable[LayerEntry]) -> dict[str, str]:
    """Return, by layer, what its differences refer to: the newest exact save that has the objects, or an object."""
    references: dict[str, str] = {}
    for origin, layers in _compact_by_origin(entries):
        unnamed = {
            name: {stored.id for stored in version.references}
            for name, entry in layers.items()
            if (version := repo.version_of(entry)).references
        }
        references |= {name: f"object {short_id(min(ids))}" for name, ids in unnamed.items()}
        view = repo.catalog.find(origin.run)
        with suppress(LayerstoreError):  # on an error, such as a damaged record, the object's id is returned
            for row in saves_below(view, attempt=origin.attempt, step=origin.step) if view and unnamed else ():
                exact = {name: entry for name, entry in row.entries(unnamed).items() if not entry.compact}
                for name, entry in exact.items():
                    if unnamed[name] <= {stored.id for stored in repo.version_of(entry).objects}:
                        references[name] = reference_to(repo, entry.origin)
                        del unnamed[name]
                if not unnamed:
                    break
    return references


def _compact_by_origin(entries: Iterable[LayerEntry]) -> Iterable[tuple[Origin, dict[str, LayerEntry]]]:
    """Return the compact *entries*, grouped by the save that wrote them."""
    by_origin: dict[Origin, dict[str, LayerEntry]] = {}
    for entry in entries:
        if entry.compact:
            by_origin.setdefault(entry.origin, {})[entry.layer] = entry
    return by_origin.items()


def _layer_line(
    repo: Repository, entry: LayerEntry, losses: Mapping[str, list[CodingLoss]], references: Mapping[str, str]
) -> LayerLine:
    version = repo.version_of(entry)
    return LayerLine(
        layer=entry.layer,
        run=entry.origin.run,
        attempt=entry.origin.attempt,
        step=entry.origin.step,
        version=entry.version.id,
        parameters=sum(prod(parameter.shape) for parameter in version.parameters),
        frozen=all(parameter.frozen for parameter in version.parameters),
        bytes_by_kind={
            kind.value: sum(stored.size_bytes for stored in version.objects if stored.kind is kind) for kind in Kind
        },
        is_exact=not entry.compact,
        refers_to=references.get(entry.layer),
        losses=Loss.of(losses.get(entry.layer, ())),
    )
