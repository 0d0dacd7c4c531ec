"""What a saver tells of its saves."""

from dataclasses import dataclass


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
