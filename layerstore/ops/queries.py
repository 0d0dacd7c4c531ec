"""Questions about what is stored: log, show and ls."""

from collections.abc import Iterable
from dataclasses import dataclass

from layerstore.errors import IntegrityError, InvalidInput, LayerstoreError, NotFound
from layerstore.format.records import WITHOUT_MOMENTS
from layerstore.history.graph import GraphLine
from layerstore.history.graph import graph as draw
from layerstore.history.needs import objects_of_state
from layerstore.history.references import Resolved
from layerstore.model import Commit, Kind, LayerEntry, LayerVersion
from layerstore.nearest import did_you_mean, nearest
from layerstore.storage.commits import RecordName
from layerstore.storage.manifest import RecordRow
from layerstore.storage.rooms import Rooms
from layerstore.storage.runview import RunView

# Layers that a hint lists.
_NAMES_MAX = 10


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
    has_moments: bool
    """Whether it can be resumed from: a collection may have dropped its moments."""
    damage: str | None
    """Why the record cannot be read, if it cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLine:
    """One layer of a commit, with the size of each kind."""

    layer: str
    run: str
    attempt: int
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
    """Given in the order of arrival."""
    turn: int
    """The number that policies count it by: full saves in the order of their steps."""
    commit: str
    pin: str | None
    time_ns: int
    """When it was written, by its writer's clock."""
    world_size: int
    flavour: str
    tag: str
    policy: str
    policy_parameters: dict[str, str]
    is_mixture: bool
    """Whether it is a pinned composite: then the policy chose its layers, and did not save them."""
    supersedes: tuple[str, ...]
    """Ids of the commits that this one hides, and of records that hid its step."""
    pins: tuple[str, ...]
    """All pins of this very content, *pin* among them."""
    layers: tuple[LayerLine, ...]
    files: tuple[str, ...]
    """What is kept byte for byte, beside the shards."""
    beside_bytes: int
    """The size of all that is no layer: what ranks have of their own, and files."""
    has_moments: bool
    """Whether it can be resumed from: a collection may have dropped its moments."""

    @property
    def layers_saved(self) -> int:
        """How many of its layers were saved at this very step."""
        own = (self.run, self.attempt, self.step)
        return sum((line.run, line.attempt, line.step) == own for line in self.layers)

    @property
    def size_bytes(self) -> int:
        """The size of all its layers."""
        return sum(sum(line.bytes_by_kind.values()) for line in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a log."""

    drawing: str
    """How the commit hangs together with the others, if that was asked for."""
    entry: LogEntry | None
    """None where two lines of descent meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """What a page leaves out of one run."""

    run: str
    commits: int
    after: str
    """The last commit on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """Some of the commits of some runs."""

    lines: tuple[LogLine, ...]
    more: tuple[More, ...]
    """For each run of which there is more."""

    @property
    def entries(self) -> list[LogEntry]:
        """The commits without the drawing."""
        return [line.entry for line in self.lines if line.entry is not None]


def log(
    rooms: Rooms, *, run: str | None = None, limit: int | None = None, before: str | None = None, graph: bool = False
) -> LogPage:
    """
    Return the visible commits of *run*, or of every run, newest step first within each attempt.

    At most *limit* of each run; only what follows the commit *before*, whose id may be shortened, in its own run.
    With *graph* every attempt is drawn beside the one that it left, the newest one's history first.

    Raises:
        NotFound: There is no such run, or no such commit.
    """
    if limit is not None and limit < 1:
        raise InvalidInput(f"a page of {limit} commits is none", hint="give a limit of 1 or more, or none")
    if run is not None and run not in rooms.catalog.runs():
        rooms.catalog.view(run)  # raises, and says which runs there are
    views = [rooms.catalog.view(name) for name in ([run] if run else rooms.catalog.runs())]
    start = None if before is None else _named(views, before)
    pinned = names_of_pins(rooms)
    lines: list[LogLine] = []
    more = []
    for view in views if start is None else [view for view in views if view.run == start.run]:
        drawn = list(draw(view)) if graph else [GraphLine("", row) for row in reversed(view.visible)]
        shown, left = _page(drawn, start, limit)
        lines += [_line(rooms, line, pinned) for line in shown]
        if left:
            after = next(line.row.id for line in reversed(shown) if line.row is not None)
            more.append(More(run=view.run, commits=left, after=after))
        if start is None:
            damaged = (_damaged_entry(name, problem) for name, problem in view.damaged.items())
            lines += [LogLine(drawing="", entry=entry) for entry in damaged]
    return LogPage(lines=tuple(lines), more=tuple(more))


def _named(views: list[RunView], before: str) -> RecordRow:
    """Return the commit whose id begins with *before*."""
    found = [row for view in views for row in view.visible if row.id.startswith(before.lower())]
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFound(f"there is no commit {before!r} to go on after", hint="name one as `layerstore log` shows it")
    raise InvalidInput(f"{len(found)} commits begin with {before!r}", hint="write more of the id")


def _page(lines: list[GraphLine], start: RecordRow | None, limit: int | None) -> tuple[list[GraphLine], int]:
    """Return the lines after *start* up to *limit* commits, and how many commits follow."""
    if start is not None:
        place = next(place for place, line in enumerate(lines) if line.row is not None and line.row.id == start.id)
        lines = lines[place + 1 :]
    ends = [place for place, line in enumerate(lines, start=1) if line.row is not None]
    if limit is None or limit >= len(ends):
        return lines, 0
    return lines[: ends[limit - 1]], len(ends) - limit


def _line(rooms: Rooms, line: GraphLine, pinned: dict[str, list[str]]) -> LogLine:
    entry = None if line.row is None else _entry(rooms, line.row, pinned.get(line.row.id, []))
    return LogLine(drawing=line.drawing, entry=entry)


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
        has_moments=True,
        damage=str(problem),
    )


def _entry(rooms: Rooms, row: RecordRow, pins: list[str]) -> LogEntry:
    try:
        commit = rooms.catalog.commit(row.name)
    except (IntegrityError, NotFound) as exc:  # lost, and the index still remembers it; or removed just now
        return _damaged_entry(row.name, exc)
    return log_entry(commit, pins)


def log_entry(commit: Commit, pins: Iterable[str]) -> LogEntry:
    """Return what a log says of *commit*, which has *pins*."""
    record = commit.record
    return LogEntry(
        run=record.run,
        attempt=record.attempt,
        step=record.step,
        commit=commit.id,
        time_ns=commit.observed.time_ns,
        layers_saved=sum(entry.saved_by(record) for entry in record.layers),
        layers=len(record.layers),
        bytes_new=commit.observed.bytes_new,
        pins=tuple(pins),
        has_moments=WITHOUT_MOMENTS not in record.flags,
        damage=None,
    )


def names_of_pins(rooms: Rooms) -> dict[str, list[str]]:
    """Return the names of all readable pins, by the commit that each is of."""
    pinned: dict[str, list[str]] = {}
    for pin in rooms.records.readable_pins():
        pinned.setdefault(pin.base, []).append(pin.name)
    return pinned


def show(rooms: Rooms, resolved: Resolved) -> CommitView:
    """Return everything about one commit."""
    record = resolved.record
    files: list[str] = []
    beside = set(record.states)
    for ref in record.states:
        state = rooms.state(ref)
        beside.update(objects_of_state(state))
        files += [file.path for file in state.files]
        files += [file.path for file in state.gathered]
    return CommitView(
        run=record.run,
        step=record.step,
        attempt=record.attempt,
        fork=None if record.fork is None else f"attempt {record.fork.attempt} at step {record.fork.step}",
        save_number=record.save_number,
        turn=record.save_number,
        commit=resolved.commit,
        pin=resolved.pin,
        time_ns=resolved.time_ns,
        world_size=record.world_size,
        flavour=record.layout.flavour,
        tag=record.layout.tag,
        policy=record.policy.name,
        policy_parameters={str(name): str(value) for name, value in record.policy.parameters.items()},
        is_mixture=resolved.is_mixture,
        supersedes=record.supersedes,
        pins=tuple(pin.name for pin in rooms.records.readable_pins() if pin.record == record),
        layers=tuple(layer_lines(rooms, resolved)),
        files=tuple(sorted(files)),
        beside_bytes=sum(ref.size_bytes for ref in beside),
        has_moments=WITHOUT_MOMENTS not in record.flags,
    )


def layer_lines(rooms: Rooms, resolved: Resolved, *, layer: str | None = None) -> list[LayerLine]:
    """Return the layers of one commit with their sizes, or only *layer*."""
    entries = [entry for entry in resolved.record.layers if layer in {None, entry.layer}]
    if layer is not None and not entries:
        names = [entry.layer for entry in resolved.record.layers]
        shown = ", ".join(names if len(names) <= _NAMES_MAX else [*names[:_NAMES_MAX], "…"])
        hint = did_you_mean(nearest(layer, names), else_=f"layers: {shown}")
        raise NotFound(f"there is no layer {layer!r} in this commit", hint=hint)
    return [layer_line(rooms, entry) for entry in entries]


def layer_line(rooms: Rooms, entry: LayerEntry) -> LayerLine:
    """Return what is known of one layer's version."""
    version = rooms.version_of(entry)
    return LayerLine(
        layer=entry.layer,
        run=entry.origin.run,
        attempt=entry.origin.attempt,
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
