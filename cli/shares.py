"""
A command under a launcher: ``torchrun --no-python … layerstore``, ``srun layerstore``, ``mpirun layerstore``.

The first process runs the command and prints; the others silently work for it, and end with it.
"""

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from layerstore.shares import ALONE, Shares

if TYPE_CHECKING:
    from layerstore.storage import Repository

# The launchers, and the variables with a process's number and the number of processes: for torchrun, Accelerate
# and DeepSpeed; Open MPI; MPICH and Intel MPI; Slurm.
_LAUNCHERS = {
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed.launcher.launch"),
    *("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.openmpi", "orterun", "prterun", "orted", "prted"),
    *("hydra_pmi_proxy", "hydra_bstrap_proxy", "slurmstepd"),
}
_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)

_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")
"""An argument that DeepSpeed's launcher adds to a command."""

_of_this_process = ALONE


def shares() -> Shares:
    """Return the processes that the command works with."""
    return _of_this_process


def is_follower() -> bool:
    """Whether another process runs the command."""
    place = launched()
    return place is not None and place[0] > 0


@contextmanager
def led(words: list[str]) -> Iterator[list[str]]:
    """Yield *words* without those that the launcher added; lead the other processes that it started, if any."""
    global _of_this_process  # noqa: PLW0603  # a process belongs to one job
    if _is_launcher(os.getppid()):
        words = [word for word in words if not _LOCAL_RANK.fullmatch(word)]
    place = launched()
    if place is None:
        yield words
        return
    from layerstore.shares.processes import Led

    _of_this_process = job = Led(count=place[1])
    try:
        yield words
    finally:
        _of_this_process = ALONE
        job.end()


def work_for_lead() -> None:
    """Work for the process that runs the command, until that process ends."""
    from layerstore.shares.processes import serve_lead

    place = launched()
    assert place is not None, "a launcher has started this"
    serve_lead(*place, _opened)


@contextmanager
def _opened(name: str) -> Iterator["Repository"]:
    from layerstore.store import Store

    with Store(name) as store:
        yield store.repo


@functools.cache
def launched() -> tuple[int, int] | None:
    """
    Return this process's number among those that a launcher started, and their count; None if it is alone.

    Any process that a training rank or a shell starts inherits the launcher's variables. So these variables count only
    if the launcher is the parent of this process, or if ``LAYERSTORE_SHARES`` is 1, which states that the process
    belongs to the job. If ``LAYERSTORE_SHARES`` is 0, they never count.
    """
    setting = os.environ.get("LAYERSTORE_SHARES", "")
    if setting == "0" or not (setting or _is_launcher(os.getppid())):
        return None
    for number, count in _VARIABLES:
        values = os.environ.get(number, ""), os.environ.get(count, "")
        if all(map(str.isdecimal, values)) and int(values[1]) > 1:
            return int(values[0]), int(values[1])
    return None


def _is_launcher(pid: int) -> bool:
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False  # the process has ended, or /proc does not exist
    # Look at the first words: `python -u -m torch.distributed.run` is called python.
    return name in _LAUNCHERS or any(Path(word).name in _LAUNCHERS for word in words[:4])
