"""How a rank ends that can ask the others nothing any more: its own saves come to the disk, theirs only may."""

import time
from collections.abc import Collection

from layerstore.live.background import Job

EXIT_SECONDS_MAX = 600.0
"""How long a process that ends waits for its own saves to become durable."""

PATIENCE_SECONDS = 10.0
"""How long the first rank then waits for the others' parts at least; they write as much as it does, if they live."""


def leave(jobs: Collection[Job], *, is_first: bool) -> None:
    """Return once *jobs* are on disk, and on the first rank visible too, unless the others need far longer than it."""
    end = time.monotonic() + EXIT_SECONDS_MAX
    for job in jobs:
        job.is_written.wait(max(end - time.monotonic(), 0))
    if not is_first:
        return
    slowest = max((job.timing.durable_seconds or 0 for job in jobs), default=0)
    end = time.monotonic() + max(PATIENCE_SECONDS, slowest)
    for job in jobs:
        job.is_resolved.wait(max(end - time.monotonic(), 0))
