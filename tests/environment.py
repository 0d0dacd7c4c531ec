"""The environment of programs that train on the CPU."""

import os
import socket
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def environment() -> dict[str, str]:
    """Return the environment for programs that use DeepSpeed on the CPU alone."""
    return {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        # One thread: sums in another order would be other sums, and the ranks share two cores.
        "OMP_NUM_THREADS": "1",
        # gloo resolves the host's name otherwise, which a machine without a network cannot.
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "PATH": search_path(),
    }


def search_path() -> str:
    """Return a path on which DeepSpeed finds ninja, even if pytest was started by its full name."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def memory() -> Path | None:
    """Return the folder that lies in memory, where there is one to be written to."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else None


def free_port() -> int:
    """Return a port that is free now; that another program takes it within the second is not excluded."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
