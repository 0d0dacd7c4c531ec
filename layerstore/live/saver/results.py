"""The results of saves: how long each blocked training, the overall status, and the timings."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from layerstore.errors import Conflict
from layerstore.live.log import LOG
from layerstore.live.saver.options import SaverOptions
from layerstore.live.saver.request import SaveFiles
from layerstore.live.saver.snapshot import Snapshot
from layerstore.model import Commit
from layerstore.publish import JointCommit, SaveTiming

if TYPE_CHECKING:
    import torch

ERRORS_MAX = 256
"""How many failures a status lists."""


class Hold:
    """A period in which training is blocked, starting now; as a context manager, it ends on exit."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._ended: float | None = None

    def end(self) -> None:
        """End the hold, so that training continues."""
        self._ended = time.monotonic()

    @property
    def seconds(self) -> float:
        """Return how long the hold lasted, or has lasted so far."""
        return (time.monotonic() if self._ended is None else self._ended) - self._begun

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class CudaHold(Hold):
    """A hold measured between two CUDA events on the stream that the engine computes on."""

    def __init__(self, device: "torch.device") -> None:
        super().__init__()
        self._device = device
        self._from = self._mark()
        self._to: torch.cuda.Event | None = None

    def end(self) -> None:
        """End the hold, so that training continues."""
        self._to = self._mark()
        super().end()

    @property
    def seconds(self) -> float:
        """Return the stream's time between the two events; until the stream reaches the second one, the host's time."""
        if self._to is None or not self._to.query():  # type: ignore[no-untyped-call]
            return super().seconds
        return float(self._from.elapsed_time(self._to)) / 1e3

    def _mark(self) -> "torch.cuda.Event":
        import torch

        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._device))
        return mark


def hold_training(device: "torch.device") -> Hold:
    """Begin a hold of training on *device*."""
    return CudaHold(device) if device.type == "cuda" else Hold()


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A save that ``save`` has started."""

    step: int
    number: int
    layers_due: tuple[str, ...]
    skipped: bool
    blocked_seconds: float
    """Time inside ``save``; the wait before the next update is not included."""
    precision: str = "exact"
    """The requested precision; values that cannot be coded, such as states in bf16, are kept exactly anyway."""
    layers_compact: tuple[str, ...] = ()
    """The layers of *layers_due* that are kept in *precision*; the others are kept exactly."""


def saved_as(joint: JointCommit, *, blocked_seconds: float) -> Saved:
    """Return the save that *joint* begins."""
    layers = [layer.layer for layer in joint.share.layers]
    return Saved(
        step=joint.step,
        number=joint.save_number,
        layers_due=tuple(layer for layer in layers if layer in joint.due),
        skipped=False,
        blocked_seconds=blocked_seconds,
        precision=joint.precision.name,
        layers_compact=tuple(layer for layer in layers if layer in joint.compact),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a saver is doing on this rank."""

    queued: int = 0
    """Saves that are not on disk yet."""
    saved: int = 0
    """Saves that this rank has written."""
    failed: int = 0
    newest_step: int | None = None
    """The newest step that this rank has written."""
    blocked_seconds: float = 0.0
    """How long training was blocked, in all saves and before updates; on CUDA by the device's clock."""
    copied_bytes: int = 0
    written_bytes: int = 0
    errors: tuple[str, ...] = ()
    """The errors of the newest saves that failed."""
    pushed_step: int | None = None
    """The newest step that the last level, or the remote of ``push=``, has; only on rank 0."""
    collection_error: str = ""
    """Why the last send or collection in the background failed; empty if it succeeded, or if none has run."""


@dataclass(slots=True, kw_only=True)
class Job:
    """One pending save of this rank."""

    joint: JointCommit
    snapshot: Snapshot
    files: SaveFiles
    queued: int
    """Earlier saves that were still pending when this one began."""
    held: list[Hold] = field(default_factory=list)
    """The periods in which training waited for this save: inside ``save`` and before updates."""
    begun: float = field(default_factory=time.monotonic)
    is_written: threading.Event = field(default_factory=threading.Event)
    is_resolved: threading.Event = field(default_factory=threading.Event)
    """Set on the rank that commits, once the commit is visible or given up."""
    written_bytes: int = 0
    durable_seconds: float | None = None
    """From ``save`` until this rank's share was on disk."""
    visible_seconds: float | None = None
    """From ``save`` until the commit was visible; only on the rank that commits."""
    failure: str = ""
    is_given_up: bool = False
    """Whether a rank has reported that it could not write its share: its part will never come."""
    commit: Commit | None = None
    """Set on the rank that commits."""
    is_visible: bool | None = None
    """Whether the save became a commit; None until all ranks know."""

    @property
    def blocked_seconds(self) -> float:
        """How long training has waited for this save so far."""
        return sum(hold.seconds for hold in self.held)


def with_job(status: Status, job: Job) -> Status:
    """Return *status* updated with the progress of *job* so far."""
    blocked_seconds = status.blocked_seconds + job.blocked_seconds
    if job.durable_seconds is None:
        return replace(status, queued=status.queued + 1, blocked_seconds=blocked_seconds)
    is_saved = not job.failure
    newest = job.joint.step if status.newest_step is None else max(job.joint.step, status.newest_step)
    errors = () if is_saved else (f"step {job.joint.step}: {job.failure}",)
    return replace(
        status,
        saved=status.saved + is_saved,
        failed=status.failed + (not is_saved),
        newest_step=newest if is_saved else status.newest_step,
        blocked_seconds=blocked_seconds,
        copied_bytes=status.copied_bytes + job.snapshot.size_bytes,
        written_bytes=status.written_bytes + job.written_bytes,
        errors=(*status.errors, *errors)[-ERRORS_MAX:],
    )


class LastSave:
    """The last save, or the step that the engine was filled from; the next save must come after it."""

    def __init__(self, after: int | None) -> None:
        self.begin_at(after, updates=0)

    def begin_at(self, after: int | None, *, updates: int) -> None:
        """Continue after the step *after*, which is in the store; None if the store has no earlier step."""
        self._saved: Saved | None = None
        self._after = after
        self._updates = updates
        self._is_lost = False

    def note(self, saved: Saved, *, updates: int) -> None:
        """Record that *saved* has begun, after *updates* updates."""
        self._saved, self._after, self._updates, self._is_lost = saved, saved.step, updates, False

    def note_lost(self, number: int) -> None:
        """Record that the save *number* was given up; if it was the last save, its step may be saved again."""
        self._is_lost |= self._saved is not None and self._saved.number == number

    def same(self, step: int, *, updates: int, pin: str | None, has_extras: bool, precision: str) -> Saved | None:
        """
        Return the last save if the new save would repeat it: trainers save twice at the end of training.

        If the new save has a *pin*, client_state, files or another *precision*, warn that the last save is unchanged.

        Raises:
            Conflict: *step* is not after the last saved step.
        """
        if self._after is None or step > self._after:
            return None
        if step < self._after or updates != self._updates:  # the same step after more updates is a different state
            raise Conflict(
                f"step {step} is not after step {self._after}, which was saved last",
                hint="save a later step; to go back to an earlier one, resume from it",
            )
        if self._is_lost:  # the new save replaces the lost one
            return None
        if pin is not None:
            LOG.warning("step %d was saved already, without a pin; pin it: layerstore pin %s RUN@%d", step, pin, step)
        if has_extras:
            LOG.warning("step %d was saved already; its metrics, client_state and files stay as they are", step)
        if self._saved is not None and self._saved.precision != precision:
            LOG.warning("step %d was saved already, in precision %s: it stays as it is", step, self._saved.precision)
        return self._saved or Saved(step=step, number=-1, layers_due=(), skipped=True, blocked_seconds=0.0)


def note_job(job: Job, options: SaverOptions, *, write: Callable[[SaveTiming], None]) -> None:
    """Pass the timing of the finished *job* to *write* and to the user's hook; on rank 0 only."""
    joint = job.joint
    assert job.durable_seconds is not None
    timing = SaveTiming(
        run=joint.run,
        attempt=joint.place.attempt,
        step=joint.step,
        save_number=joint.save_number,
        blocked_seconds=job.blocked_seconds,
        durable_seconds=job.durable_seconds,
        visible_seconds=job.visible_seconds,
        copied_bytes=job.snapshot.size_bytes,
        written_bytes=job.written_bytes,
        layers_saved=len(joint.due),
        layers=len(joint.share.layers),
        queued=job.queued,
        precision=joint.precision.name,
        failure=job.failure,
        commit="" if job.commit is None else job.commit.id,
    )
    write(timing)
    name, hook = ("on_saved", options.on_saved) if timing.commit else ("on_failed", options.on_failed)
    try:
        if hook is not None:
            hook(timing)
    except Exception as exc:  # noqa: BLE001  # the user's own code, on rank 0 only, while the other ranks wait
        LOG.warning("the hook %s raised at step %d: %s", name, joint.step, exc)
