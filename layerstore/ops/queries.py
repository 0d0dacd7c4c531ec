"""Questions about what is stored: log, show and ls."""

from collections.abc import Iterable
from dataclasses import dataclass

from layerstore.errors import IntegrityError, LayerstoreError, NotFound
from layerstore.model import Kind, LayerEntry, LayerVersion, Pin
from layerstore.ops.refs import Resolved
from layerstore.ops.rooms import Rooms
from layerstore.storage.commits import RecordName
from layerstore.storage.manifest import RecordRow


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One commit in a log."""

    run: str
    attempt: int
    step: int
    commit: str
    time_ns: int
    layers_saved: int
    layers: int
    bytes_new: int
    pins: tuple[str, ...]
    damage: str | None
    """Why the record cannot be read, if it cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLine:
    """One layer of a commit, with the size of each kind."""

    layer: str
    run: str
    step: int
    """Where this version was saved."""
    version: str
    parameters: int
    """Elements of all its parameters."""
    frozen: bool
    bytes_by_kind: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitView:
    """Everything about one commit."""

    run: str
    step: int
    attempt: int
    fork: str | None
    save_number: int
    commit: str
    pin: str | None
    time_ns: int
    """When it was written, by its writer's clock."""
    world_size: int
    flavour: str
    tag: str
    policy: str
    layers: tuple[LayerLine, ...]
    files: tuple[str, ...]
    """What is kept byte for byte, beside the shards."""

    @property
    def size_bytes(self) -> int:
        """The size of all its layers."""
        return sum(sum(line.bytes_by_kind.values()) for line in self.layers)


def log(rooms: Rooms, *, run: str | None = None) -> list[LogEntry]:
    """Return the visible commits of *run*, or of every run, newest step first within each run."""
    if run is not None and run not in rooms.catalog.runs():
        rooms.catalog.view(run)  # raises, and says which runs there are
    pins = rooms.records.readable_pins()
    return [entry for name in ([run] if run else rooms.catalog.runs()) for entry in _log_of(rooms, name, pins)]


def _log_of(rooms: Rooms, run: str, pins: Iterable[Pin]) -> list[LogEntry]:
    view = rooms.catalog.view(run)
    pinned: dict[str, list[str]] = {}
    for pin in pins:
        pinned.setdefault(pin.base, []).append(pin.name)
    entries = [_entry(rooms, row, pinned.get(row.id, [])) for row in reversed(view.visible)]
    return entries + [_damaged_entry(name, problem) for name, problem in view.damaged.items()]


def _damaged_entry(name: RecordName, problem: LayerstoreError) -> LogEntry:
    return LogEntry(
        run=name.run,
        attempt=0,
        step=name.step,
        commit=name.id,
        time_ns=0,
        layers_saved=0,
        layers=0,
        bytes_new=0,
        pins=(),
        damage=str(problem),
    )


def _entry(rooms: Rooms, row: RecordRow, pins: list[str]) -> LogEntry:
    try:
        commit = rooms.catalog.commit(row.name)
    except IntegrityError as exc:  # the index still remembers what its record has lost
        return _damaged_entry(row.name, exc)
    record = commit.record
    return LogEntry(
        run=record.run,
        attempt=record.attempt,
        step=record.step,
        commit=commit.id,
        time_ns=commit.observed.time_ns,
        layers_saved=sum(entry.origin.step == record.step for entry in record.layers),
        layers=len(record.layers),
        bytes_new=commit.observed.bytes_new,
        pins=tuple(pins),
        damage=None,
    )


def show(rooms: Rooms, resolved: Resolved) -> CommitView:
    """Return everything about one commit."""
    record = resolved.record
    files: list[str] = []
    for ref in record.states:
        state = rooms.state(ref)
        files += [file.path for file in state.files]
        files += [file.path for file in state.gathered]
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
        flavour=record.layout.flavour,
        tag=record.layout.tag,
        policy=record.policy.name,
        layers=tuple(layer_lines(rooms, resolved)),
        files=tuple(sorted(files)),
    )


def layer_lines(rooms: Rooms, resolved: Resolved, *, layer: str | None = None) -> list[LayerLine]:
    """Return the layers of one commit with their sizes, or only *layer*."""
    entries = [entry for entry in resolved.record.layers if layer in {None, entry.layer}]
    if layer is not None and not entries:
        names = ", ".join(entry.layer for entry in resolved.record.layers[:10])
        raise NotFound(f"there is no layer {layer!r} in this commit", hint=f"layers: {names} …")
    return [layer_line(rooms, entry) for entry in entries]


def layer_line(rooms: Rooms, entry: LayerEntry) -> LayerLine:
    """Return what is known of one layer's version."""
    version = rooms.version_of(entry)
    return LayerLine(
        layer=entry.layer,
        run=entry.origin.run,
        step=entry.origin.step,
        version=entry.version.id,
        parameters=sum(_elements(parameter.shape) for parameter in version.parameters),
        frozen=all(parameter.frozen for parameter in version.parameters),
        bytes_by_kind=_bytes_by_kind(version),
    )


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _bytes_by_kind(version: LayerVersion) -> dict[str, int]:
    return {kind.value: sum(stored.size_bytes for stored in version.objects if stored.kind is kind) for kind in Kind}
