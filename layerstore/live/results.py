"""What a saver tells of its saves."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from layerstore.live.background import Result
from layerstore.live.clock import Hold

RESULTS_MAX = 256
"""How many saves that are over are told of one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What ``save`` has begun."""

    step: int
    number: int
    layers_due: tuple[str, ...]
    skipped: bool
    blocked_seconds: float
    """Inside ``save``; the gate comes later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a saver is doing, on this rank."""

    queued: int
    """Saves that are not on disk yet."""
    saved: int
    """Saves of this rank that are."""
    failed: int
    newest_step: int | None
    """That this rank has written."""
    blocked_seconds: float
    """Of training, in all saves and at all gates; on CUDA by the device's clock."""
    copied_bytes: int
    written_bytes: int
    errors: tuple[str, ...]
    """Of the newest that failed."""


def saved_as(step: int, number: int, due: tuple[str, ...], held: Hold, *, skipped: bool) -> Saved:
    """Return what a ``save`` has begun by now, for which training was *held*."""
    return Saved(step=step, number=number, layers_due=due, skipped=skipped, blocked_seconds=held.seconds)


class Results:
    """What became of one rank's saves that are over: of the newest ones each, of all before them the sums."""

    def __init__(self) -> None:
        self.newest: deque[Result] = deque()
        self._before = Status(
            queued=0,
            saved=0,
            failed=0,
            newest_step=None,
            blocked_seconds=0.0,
            copied_bytes=0,
            written_bytes=0,
            errors=(),
        )

    def add(self, result: Result) -> None:
        """Note what became of the next one: a job has any number of saves, and only so much memory."""
        self.newest.append(result)
        if len(self.newest) > RESULTS_MAX:
            self._before = _status(self._before, [self.newest.popleft()])

    def status(self, running: Iterable[Result]) -> Status:
        """Put all of them together with those that are still *running*."""
        return _status(self._before, [*self.newest, *running])


def _status(before: Status, results: Sequence[Result]) -> Status:
    written = [result for result in results if result.durable_seconds is not None]
    steps = [result.step for result in written if not result.failure]
    known = steps if before.newest_step is None else [before.newest_step, *steps]
    errors = tuple(f"step {result.step}: {result.failure}" for result in written if result.failure)
    return Status(
        queued=before.queued + len(results) - len(written),
        saved=before.saved + len(steps),
        failed=before.failed + len(errors),
        newest_step=max(known, default=None),
        blocked_seconds=before.blocked_seconds + sum(result.blocked_seconds for result in results),
        copied_bytes=before.copied_bytes + sum(result.copied_bytes for result in written),
        written_bytes=before.written_bytes + sum(result.written_bytes for result in written),
        errors=(*before.errors, *errors)[-RESULTS_MAX:],
    )
