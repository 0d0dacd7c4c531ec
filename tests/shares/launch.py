"""Starting the processes of one command as launchers do."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Variables = Callable[[int, int, int], dict[str, str]]
"""Returns what a launcher sets, given the process's number, how many there are, and a free port."""


def torchrun(number: int, count: int, port: int) -> dict[str, str]:
    """Return what torchrun and DeepSpeed's launcher set."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(number), "WORLD_SIZE": str(count), "LOCAL_RANK": str(number), **meeting}


def slurm(number: int, count: int, port: int) -> dict[str, str]:
    """Return what srun sets."""
    of_job = {"SLURM_JOB_ID": str(port), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    return {"SLURM_PROCID": str(number), "SLURM_STEP_NUM_TASKS": str(count), "SLURM_NTASKS": str(count), **of_job}


def open_mpi(number: int, count: int, port: int) -> dict[str, str]:
    """Return what mpirun of Open MPI sets on one host."""
    name = "OMPI_COMM_WORLD"
    return {f"{name}_RANK": str(number), f"{name}_SIZE": str(count), f"{name}_LOCAL_SIZE": str(count)}


def mpich(number: int, count: int, port: int) -> dict[str, str]:
    """Return what mpirun of MPICH sets on one host."""
    return {"PMI_RANK": str(number), "PMI_SIZE": str(count), "MPI_LOCALNRANKS": str(count)}


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process has ended."""

    code: int
    out: str
    err: str


class Job:
    """The processes of one command."""

    def __init__(
        self,
        *words: str | Path,
        count: int,
        variables: Variables = torchrun,
        elsewhere: tuple[Path, Path] | None = None,
        module: str = "layerstore.cli",
    ) -> None:
        """With *elsewhere* all but the first process see one folder under the name of another."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", module, *map(str, words)]
        other = command
        if elsewhere is not None:
            script = 'mount --bind "$0" "$1"; shift; exec "$@"'
            other = ["unshare", "-m", "sh", "-c", script, *map(str, elsewhere), *command]
        self.processes = [
            subprocess.Popen(
                other if number else command,
                env=os.environ | {"LAYERSTORE_SHARES": "1"} | variables(number, count, port),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(count)
        ]

    def wait(self) -> list[Ended]:
        """Return how each process has ended; each has two minutes."""
        found = []
        try:
            for process in self.processes:
                out, err = process.communicate(timeout=120)
                found.append(Ended(process.returncode, out, err))
        finally:
            for process in self.processes:
                process.kill()
        return found

    def end_one(self, number: int, how: signal.Signals, *, once: Callable[[], bool]) -> None:
        """Send process *number* the signal *how* as soon as *once* says so."""
        until = time.monotonic() + 60
        while not once():
            assert time.monotonic() < until, "it never began"
            time.sleep(0.005)
        self.processes[number].send_signal(how)
