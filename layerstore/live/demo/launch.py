"""
Launch a training program on several CPU ranks of this machine, and follow its events while it runs.

All output of the ranks goes to one log file; events are lines of it that begin with a mark. So no pipe can fill up,
and everything can still be read afterwards. Only the ranks import torch.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from layerstore.errors import LayerstoreError

MARK = "@layerstore "

POLL_SECONDS = 0.1

STOP_SECONDS_MAX = 5.0
"""How long ranks may take to terminate before they are killed."""

SILENCE_SECONDS_MAX = 900.0
"""Ranks that say nothing for so long hang; compiling DeepSpeed's operator takes minutes at most."""

TAIL_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a rank told."""

    kind: str
    """``rank`` (it has started), ``resumed``, ``step`` or ``saved``."""
    number: int
    """The step; for ``rank`` the process id, for ``resumed`` the checkpoint's position."""
    loss: str
    """For ``step``: the loss, as `float.hex` writes it."""


def tell(kind: str, *, number: int | None = None, loss: str = "") -> None:
    """Tell the parent of an event; called by the ranks. *number* is the process id by default."""
    line = json.dumps({"kind": kind, "number": os.getpid() if number is None else number, "loss": loss})
    # A single write to a file in append mode is not torn by the other ranks' output; the first line end finishes
    # whatever line they have begun.
    os.write(1, f"\n{MARK}{line}\n".encode())


class Ranks:
    """A training program on *count* ranks. A context manager that leaves no process behind."""

    def __init__(self, module: str, arguments: Sequence[str], *, count: int, folder: Path, log: Path) -> None:
        self.log = log
        self._command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
        self._command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", module, *arguments]
        self._folder = folder
        self._count = count
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Ranks":
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=cpu_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Its own session: Ctrl-C reaches us alone, and we end the ranks in order.
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS_MAX)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                self._signal_sessions(signal.SIGKILL)
                self._process.kill()
                self._process.wait()
        if self._process.returncode != 0:
            # Compilers outlive their ninja; on SIGTERM they remove their temporary files.
            self._signal_sessions(signal.SIGTERM)

    def _signal_sessions(self, number: signal.Signals) -> None:
        """Send *number* to all ranks and their children: torchrun makes every rank a session leader."""
        # From the log, since a rank may have started after the last event.
        events = filter(None, map(_parse, self.log.read_bytes().split(b"\n")))
        leaders = {event.number for event in events if event.kind == "rank"}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError, PermissionError):  # it has ended, or is not ours
                if os.getsid(int(process.name)) in leaders:
                    os.kill(int(process.name), number)

    def events(self) -> Iterator[Event]:
        """
        Yield events until the program ends.

        Raises:
            LayerstoreError: It failed or hangs. The last lines of its log are in ``facts["tail"]``.
        """
        assert self._process is not None
        heard = time.monotonic()
        with self.log.open("rb") as output:
            rest = b""
            while True:
                status = self._process.poll()  # before reading, so that the last output is read below
                *lines, rest = (rest + output.read()).split(b"\n")
                for event in filter(None, map(_parse, lines)):
                    heard = time.monotonic()
                    yield event
                if status is not None:
                    break
                if time.monotonic() - heard > SILENCE_SECONDS_MAX:
                    raise self._silent()
                time.sleep(POLL_SECONDS)
        if status != 0:
            raise self._failed(status)

    def _failed(self, status: int) -> LayerstoreError:
        reason = f"was killed by signal {-status}" if status < 0 else f"failed with exit status {status}"
        return LayerstoreError(
            f"the training on {self._count} ranks {reason}; its log is {self.log}",
            log=str(self.log),
            tail=_tail(self.log),
        )

    def _silent(self) -> LayerstoreError:
        cache = os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")
        return LayerstoreError(
            f"the training has said nothing for {SILENCE_SECONDS_MAX:.0f} s and was ended; its log is {self.log}",
            hint=f"if an earlier compile was killed, remove the files named lock below {cache}",
            log=str(self.log),
            tail=_tail(self.log),
        )


def _parse(line: bytes) -> Event | None:
    text = line.decode(errors="replace")
    if not text.startswith(MARK):
        return None
    told = json.loads(text.removeprefix(MARK))
    return Event(kind=str(told["kind"]), number=int(told["number"]), loss=str(told["loss"]))


def _tail(log: Path) -> list[str]:
    """Return the last lines that a rank wrote, without torchrun's report of the failure."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line and not line.startswith(MARK)]
    for index, line in enumerate(lines):
        if "torch/distributed/elastic" in line or "failed (exitcode" in line:
            return lines[max(0, index - TAIL_LINES) : index] or lines[-TAIL_LINES:]
    return lines[-TAIL_LINES:]


def cpu_environment() -> dict[str, str]:
    """Return the environment of ranks on the CPU."""
    return {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        # One thread: the order of sums changes their bits.
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
