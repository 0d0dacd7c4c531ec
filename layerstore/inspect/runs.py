"""
Runs: one line for each run, with its newest save.

No tensor is read, and the only record that is read is the newest save's. So *healthy* means that everything that this
save refers to exists in full size, and that no save has failed since; `verify` reads the bytes.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from layerstore.errors import IntegrityError, LayerstoreError, NotFound
from layerstore.history import metrics_if_sound, pushed_to
from layerstore.json_fields import iso_time
from layerstore.limits import WORKERS_MAX
from layerstore.model import Commit, CommitId, LayerEntry
from layerstore.publish import read_timings
from layerstore.storage import RecordRow, Repository, RunView
from layerstore.threads import Threads
from layerstore.units import size, utc


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedTo:
    """How far a run was pushed to one remote, as of the last push or pull."""

    remote: str
    """Its URL."""
    step: int | None
    """The step of the newest save that the remote has; None if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """One run, and its newest save."""

    _JSON: ClassVar = (
        "run saves attempt step commit time=saved_at size_bytes precision policy pushed metrics healthy=is_healthy "
        "problems"
    )

    run: str
    saves: int
    """The number of visible commits, over all attempts."""
    attempt: int | None = None
    step: int | None = None
    """The step of the newest save of the newest attempt; None if no record can be read."""
    commit: str | None = None
    time_ns: int | None = None
    """When it was committed. This and the other facts from its record are None if the record cannot be read."""
    size_bytes: int | None = None
    """The size of all its layers, including inherited ones."""
    precision: str | None = None
    """The precision of its layers."""
    policy: str | None = None
    """The policy that chose which of its layers were saved."""
    pushed: tuple[PushedTo, ...] = ()
    """One for each known remote."""
    metrics: Mapping[str, float] | None = None
    """The metrics that training measured at its step."""
    problems: tuple[str, ...] = ()
    """The problems of the run that can be seen without reading tensors."""

    def __repr__(self) -> str:
        newest = "no readable save" if self.step is None else f"newest step {self.step}"
        held = "" if self.size_bytes is None else f", {size(self.size_bytes)}, policy {self.policy}"
        problems = "".join(f"; {problem}" for problem in self.problems)
        return f"<RunLine {self.run}: saves {self.saves}, {newest}{held}{problems}>"

    @property
    def is_healthy(self) -> bool:
        """Whether the newest save is whole, and no save has failed since."""
        return not self.problems

    @property
    def time(self) -> datetime | None:
        """When the newest save was committed, in UTC."""
        return None if self.time_ns is None else utc(self.time_ns)

    @property
    def saved_at(self) -> str | None:
        """When the newest save was committed, as ISO 8601."""
        return None if self.time_ns is None else iso_time(self.time_ns)


def run_lines(repo: Repository, *, remotes: Iterable[str]) -> list[RunLine]:
    """Return a line for each run, most recently saved first; *remotes* are the URLs of all named remotes."""
    pushed = {**dict.fromkeys(remotes, frozenset[CommitId]()), **pushed_to(repo)}
    views = [view for run in repo.catalog.runs() if (view := repo.catalog.find(run)) is not None]
    with Threads(WORKERS_MAX) as pool:
        lines = [_line(repo, view, pushed, pool) for view in views]
    return sorted(lines, key=lambda line: line.time_ns or 0, reverse=True)


def _line(repo: Repository, view: RunView, pushed: Mapping[str, Collection[CommitId]], pool: Threads) -> RunLine:
    damaged = tuple(f"the record of step {name.step} is damaged" for name in sorted(view.damaged))
    newest = view.newest
    if newest is None:
        return RunLine(run=view.run, saves=0, problems=damaged)
    failures = tuple(_failures_since(repo, newest))
    remotes = tuple(PushedTo(remote=url, step=_newest_of(view, commits)) for url, commits in pushed.items())
    try:
        commit = repo.catalog.commit(newest.name)
    except (IntegrityError, NotFound) as exc:  # lost but still in the index, or just removed
        return RunLine(
            run=view.run,
            saves=len(view.visible),
            attempt=newest.attempt,
            step=newest.step,
            commit=newest.id,
            pushed=remotes,
            problems=(str(exc), *damaged, *failures),
        )
    size_bytes, missing = _layers(repo, commit, pool)
    return RunLine(
        run=view.run,
        saves=len(view.visible),
        attempt=newest.attempt,
        step=newest.step,
        commit=newest.id,
        time_ns=commit.observed.time_ns,
        size_bytes=size_bytes,
        precision=commit.record.kept_precision,
        policy=commit.record.policy.name,
        pushed=remotes,
        metrics=metrics_if_sound(repo, commit.record, view=view),
        problems=(*missing, *damaged, *failures),
    )


def _newest_of(view: RunView, commits: Collection[CommitId]) -> int | None:
    return next((row.step for row in reversed(view.visible) if row.id in commits), None)


def _layers(repo: Repository, commit: Commit, pool: Threads) -> tuple[int, list[str]]:
    """Return the size of the layers of *commit*, and a problem if layers or rank states are missing or cut short."""

    def size_of(entry: LayerEntry) -> tuple[int, bool]:
        try:
            version = repo.version_of(entry)
            is_whole = all(repo.objects.find(stored.ref) for stored in version.named)
        except LayerstoreError:
            return 0, False  # the caller counts it as lost; verify says what is wrong
        return sum(stored.size_bytes for stored in version.objects), is_whole

    layers = list(pool.map(size_of, commit.record.layers))
    lost = sum(not is_whole for _, is_whole in layers)
    are = "is" if lost == 1 else "are"
    problems = [f"{lost} of {len(layers)} layers of step {commit.step} {are} not intact"] if lost else []
    try:
        states = sum(repo.objects.find(ref) is None for ref in commit.record.states)
    except IntegrityError:  # cut short
        states = 1
    if states:
        problems.append(f"rank states of step {commit.step} are not intact")
    return sum(size_bytes for size_bytes, _ in layers), problems


def _failures_since(repo: Repository, newest: RecordRow) -> Iterator[str]:
    """Yield a problem if saves after *newest* failed, as far as the savers recorded failures."""
    timings = read_timings(repo, newest.run)
    failed = [place for place in sorted(timings) if timings[place].failure and place > (newest.attempt, newest.step)]
    if failed:
        last = timings[failed[-1]]
        count = "a save has" if len(failed) == 1 else f"{len(failed)} saves have"
        yield f"{count} failed since step {newest.step}, the last at step {last.step}: {last.failure}"
