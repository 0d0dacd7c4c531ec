"""
Ranks that start in a blink: forked from a process that has imported torch, deepspeed and their program already.

Nothing stands between a test and its ranks: who is killed is killed alone, and the others go on as long as they can.
Each rank's output goes to one log file; what it `tell`s are lines of it with a mark in front.

A program with a command line, which torchrun could start as well, is started by `Nursery.run`; there a rank that
fails takes the others along, as under torchrun.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.environment import REPOSITORY
from tests.hosts import Host, enter
from tests.ranks.launch import cpu_environment, end_of, free_port

MARK = "@rank "
POLL_SECONDS = 0.02

LAUNCH_SECONDS_MAX = 150
"""A rank that takes longer writes where it hangs into the log, and ends."""

WARM_SECONDS_MAX = 200

HOSTS_PORT = 29500
"""Where ranks on several hosts meet: in a namespace of their own nobody else listens."""

ENDING_SECONDS_MAX = 30

Event = dict[str, Any]


def tell(kind: str, **facts: object) -> None:
    """Tell the test something; called by the ranks."""
    line = json.dumps({"kind": kind, "rank": int(os.environ["RANK"]), "at": round(time.monotonic(), 2), **facts})
    os.write(1, f"\n{MARK}{line}\n".encode())  # one write to a file opened for appending is not torn


class Launch:
    """Some ranks of one program. A context manager: when it is left, none of them is left."""

    def __init__(self, log: Path, count: int) -> None:
        self.log = log
        self.count = count

    def events(self, kind: str = "") -> list[Event]:
        """Return what the ranks have told so far."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        found = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK) and line.endswith("}")]
        return [event for event in found if not kind or event["kind"] == kind]

    def until(self, kind: str, *, count: int = 1, seconds: float = LAUNCH_SECONDS_MAX) -> list[Event]:
        """Wait until *count* events of *kind* were told; return these."""
        give_up_at = time.monotonic() + seconds
        while len(found := self.events(kind)) < count:
            ended = self.events("ended")
            assert not ended or kind == "ended", f"the ranks ended without {kind!r}: {ended}\n{self.tail()}"
            assert time.monotonic() < give_up_at, f"{kind!r} was not told\n{self.tail()}"
            time.sleep(POLL_SECONDS)
        return found

    def statuses(self) -> list[int]:
        """Wait for the end of all ranks; return how each ended, by rank: negative for a signal."""
        found: list[int] = self.until("ended")[0]["statuses"]
        return found

    def done(self) -> Launch:
        """Wait for the end of all ranks, which must have come to their program's end."""
        assert self.statuses() == [0] * self.count, self.tail()
        return self

    def kill(self, *ranks: int) -> None:
        """Kill some ranks, or all."""
        for event in self.until("started", count=self.count):
            if event["rank"] in (ranks or range(self.count)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(event["pid"], signal.SIGKILL)

    def tail(self) -> str:
        """Return the end of the log, with the stacks of an aborted rank."""
        return end_of(self.log) if self.log.exists() else "(no log)"

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.events("ended"):
            self.kill()
            self.until("ended", seconds=20)


class Nursery:
    """The process that ranks are forked from."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked"],
            cwd=REPOSITORY,
            # Arrow, which Ray brings and DeepSpeed then imports, would start a thread of its allocator.
            env=cpu_environment() | {"JE_ARROW_MALLOC_CONF": "background_thread:false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def launch(
        self, program: str, arguments: object, *, folder: Path, name: str, count: int = 2, hosts: Sequence[Host] = ()
    ) -> Launch:
        """Start *count* ranks of the function *program* (``module:name``); they find *arguments*. Or one a host."""
        log, count = folder / f"{name}.log", len(hosts) or count
        self._order(
            program=program,
            arguments=arguments,
            log=str(log),
            count=count,
            seconds=LAUNCH_SECONDS_MAX,
            hosts=[host.facts for host in hosts],
        )
        return Launch(log, count)

    def run(self, module: str, argv: Sequence[str], *, log: Path, count: int, seconds: float) -> list[int]:
        """Run *module* on *count* ranks as a command line would; return how each has ended, after *seconds* at most."""
        log.unlink(missing_ok=True)
        self._order(
            program=f"{module}:main", argv=list(argv), log=str(log), count=count, seconds=seconds, port=free_port()
        )
        launch = Launch(log, count)
        try:
            found: list[int] = launch.until("ended", seconds=seconds + ENDING_SECONDS_MAX)[0]["statuses"]
        except BaseException:
            launch.kill()
            raise
        return found

    def _order(self, **order: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline(), "the nursery has died"

    def close(self) -> None:
        """End the nursery; ranks that still run are their tests' business."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(WARM_SECONDS_MAX)
        self._process.stdout.close()


@functools.cache
def nursery() -> Nursery:
    """Return the nursery of this process."""
    found = Nursery()
    atexit.register(found.close)
    return found


def _main() -> None:
    """Fork ranks as the lines of the standard input say; what their program imports, the next one finds imported."""
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401 - deepspeed imports it for any optimizer: seconds
    import torch
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    import tests.live.tiny  # noqa: F401

    ShareMemCommBuilder().load(verbose=False)
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # launchers are nobody's zombies
    for line in sys.stdin:
        order = json.loads(line)
        importlib.import_module(order["program"].partition(":")[0])
        gc.freeze()  # deepspeed collects garbage for every engine, and what was imported is none
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
        if os.fork() == 0:
            _launcher(order)
            return  # a rank, whose program has come to its end: the interpreter ends as it always does
        sys.stdout.write("forked\n")
        sys.stdout.flush()


def _launcher(order: dict[str, Any]) -> None:
    """Fork the ranks and wait for them; returns in each rank, once its program is over."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with Path(order["log"]).open("ab", buffering=0) as log, Path(os.devnull).open("rb") as nothing:
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source.fileno(), target)
    pids = []
    for rank in range(order["count"]):
        pid = os.fork()
        if pid == 0:
            _rank(order, rank)
            return
        pids.append(pid)
    os.environ["RANK"] = "-1"
    statuses: dict[int, int] = {}
    while len(statuses) < len(pids):
        pid, status = os.wait()
        statuses[pid] = os.waitstatus_to_exitcode(status)
        if "argv" in order and statuses[pid] != 0:
            for other in set(pids) - statuses.keys():
                os.kill(other, signal.SIGKILL)
    tell("ended", statuses=[statuses[pid] for pid in pids])
    os._exit(0)


def _rank(order: dict[str, Any], rank: int) -> None:
    """Be one rank."""
    faulthandler.dump_traceback_later(order["seconds"], exit=True)
    hosts = [Host(**facts) for facts in order.get("hosts", ())]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": "0" if hosts else str(rank),
        "WORLD_SIZE": str(order["count"]),
        "LOCAL_WORLD_SIZE": "1" if hosts else str(order["count"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(order.get("port", 0)),  # 0 is never used: then the ranks meet in a file
    }
    if hosts:
        enter(hosts[rank])
    tell("started", pid=os.getpid())
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, of deepspeed: many lines
    module, _, name = order["program"].partition(":")
    program = getattr(importlib.import_module(module), name)
    if "argv" in order:
        sys.argv = [module, *order["argv"]]
        program()
        return
    import torch.distributed as dist

    meeting = f"tcp://{hosts[0].address}:{HOSTS_PORT}" if hosts else f"file://{order['log']}.meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=order["count"])
    program(order["arguments"])


if __name__ == "__main__":
    _main()
