"""What a saver tells of its saves."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from layerstore.live.background import Result


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
    """Of training, in all saves and at all gates."""
    copied_bytes: int
    written_bytes: int
    errors: tuple[str, ...]


def saved_as(step: int, number: int, due: tuple[str, ...], started: float, *, skipped: bool) -> Saved:
    """Return what a ``save`` that *started* then has begun by now."""
    return Saved(step=step, number=number, layers_due=due, skipped=skipped, blocked_seconds=time.monotonic() - started)


def status_of(results: Sequence[Result]) -> Status:
    """Put together what became of one rank's saves."""
    written = [result for result in results if result.durable_seconds is not None]
    return Status(
        queued=len(results) - len(written),
        saved=sum(not result.failure for result in written),
        failed=sum(bool(result.failure) for result in written),
        newest_step=max((result.step for result in written if not result.failure), default=None),
        blocked_seconds=sum(result.blocked_seconds for result in results),
        copied_bytes=sum(result.copied_bytes for result in written),
        written_bytes=sum(result.written_bytes for result in written),
        errors=tuple(f"step {result.step}: {result.failure}" for result in written if result.failure),
    )
