"""Where the tests are, and where they may write fast."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def memory() -> Path | None:
    """Return the folder that lies in memory, where there is one to be written to."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else None


def processor_seconds(start: Callable[[], object]) -> float:
    """
    Return what the processes that *start* starts and waits for take of the processor.

    On a machine with nothing else to do that is what a user waits; other work only makes it wait for longer.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
