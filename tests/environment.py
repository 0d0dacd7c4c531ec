"""Where the tests are, and where they may write fast."""

import os
import resource
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

REPOSITORY = Path(__file__).parents[1]

_OWN = "PYTEST_FOLDER_IN_MEMORY"
"""Tells workers, and what tests start, where this run's folder in memory is."""


def memory() -> Path | None:
    """Return a folder that lies in memory, where there is one to be written to: a run of the tests has its own."""
    folder = Path(os.environ.get(_OWN, "/dev/shm"))
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else None


def claim_memory() -> Callable[[], None]:
    """
    Make this run's own folder in memory; return what removes it, unless a test failed there.

    Folders of earlier runs go first: one that was killed may have left gigabytes, and nothing else removes them.
    """
    folder = memory()
    if folder is None or _OWN in os.environ:
        return lambda: None
    runs = folder / f"layerstore-tests-{os.getuid()}"
    runs.mkdir(exist_ok=True)
    with FileLock(runs / "lock"):
        for run in runs.glob("*/"):
            with suppress(Timeout), FileLock(run / "lock", blocking=False):  # else it still runs
                shutil.rmtree(run, ignore_errors=True)  # processes of its tests may have outlived it
        own = Path(tempfile.mkdtemp(dir=runs))
        own.chmod(0o755)  # some tests give up the rights of root
        claimed = FileLock(own / "lock")
        claimed.acquire()
    os.environ[_OWN] = str(own)

    def end() -> None:
        del os.environ[_OWN]
        if not any(own.glob("pytest-of-*/pytest-*/*")):  # of tests that failed: the next run removes it
            shutil.rmtree(own)
        claimed.release()

    return end


def processor_seconds(start: Callable[[], object]) -> float:
    """
    Return what the processes that *start* starts and waits for take of the processor.

    On a machine with nothing else to do that is what a user waits; other work only makes it wait for longer.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
