"""
Launch a training program on several CPU ranks of this machine, and follow its events while it runs.

All output of the ranks goes to one log file; events are lines in it that start with a mark. So no pipe can fill up, and
everything can be read afterwards. Only the ranks import torch.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from layerstore.errors import LayerstoreError

MARK = "@layerstore "

POLL_SECONDS = 0.1

TAIL_LINES = 15

_CRASH, _AFTER_STACKS = "Fatal Python error", "\nExtension modules: "
"""What Python's faulthandler writes around the stacks of a process that is aborted."""

_STACKS_MAX = 20_000

Event = dict[str, Any]
"""A rank's message: its ``kind``, and facts that JSON can hold."""


def tell(kind: str, **facts: object) -> None:
    """Report an event to the parent; called by the ranks."""
    # Other ranks' output cannot tear a single write to a file in append mode; the first newline ends any line that they
    # have begun.
    os.write(1, f"\n{MARK}{json.dumps({'kind': kind, **facts})}\n".encode())


def run_ranks(
    module: str, arguments: Sequence[str], *, count: int, folder: Path, log: Path, hear: Callable[[Event], object]
) -> None:
    """
    Run a training program on *count* ranks to its end; *hear* gets their events. However it ends, no rank is left
    running.

    Raises:
        LayerstoreError: It failed. The last lines of its log are in ``facts["tail"]``.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", module, *arguments]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=cpu_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Its own session, so that only we get Ctrl-C, and torchrun ends the ranks cleanly.
            start_new_session=True,
        )
    try:
        status = _follow(process, log, hear)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun terminates its ranks, and kills those that do not exit
            process.wait()
    if status != 0:
        reason = f"was killed by signal {-status}" if status < 0 else f"failed with exit status {status}"
        raise LayerstoreError(
            f"the training on {count} ranks {reason}; its log is {log}", log=str(log), tail=_tail(log)
        )


def _follow(process: "subprocess.Popen[bytes]", log: Path, hear: Callable[[Event], object]) -> int:
    """Pass on events until *process* ends; return its exit status."""
    with log.open("rb") as output:
        rest = b""
        while True:
            status = process.poll()  # polled before reading, so that the last output is read below
            *lines, rest = (rest + output.read()).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace")
                if text.startswith(MARK):
                    hear(json.loads(text.removeprefix(MARK)))
            if status is not None:
                return status
            time.sleep(POLL_SECONDS)


def _tail(log: Path) -> list[str]:
    """Return the ranks' last lines, without torchrun's failure report."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line and not line.startswith(MARK)]
    for index, line in enumerate(lines):
        if "torch/distributed/elastic" in line or "failed (exitcode" in line:
            return lines[max(0, index - TAIL_LINES) : index] or lines[-TAIL_LINES:]
    return lines[-TAIL_LINES:]


def end_of(log: Path, chars: int = 6000) -> str:
    """Return the end of *log* and, if a rank was aborted before, its stacks, which much that others say may follow."""
    text = log.read_text(errors="replace")
    _, crash, stacks = text.partition(_CRASH)
    end = text[-chars:]
    if not crash or crash in end:
        return end
    return f"{crash}{stacks.partition(_AFTER_STACKS)[0][:_STACKS_MAX]}\n[…]\n{end}"


def cpu_environment() -> dict[str, str]:
    """Return the environment of ranks on the CPU."""
    return {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        # One thread, since the order of a sum changes its bits.
        "OMP_NUM_THREADS": "1",
        # gloo would resolve the host's name, which fails without a network.
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "PATH": search_path(),
    }


def search_path() -> str:
    """Return a PATH on which DeepSpeed finds ninja, even if the environment is not activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def free_port() -> int:
    """Return a port that is free now; another program may still take it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
