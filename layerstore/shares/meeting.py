"""
Where the processes of a launcher meet, and the connections that they then have.

They meet where the launcher says, as the ranks of a training do. The connections are our own, because gloo can wait for
ever for a process that dies while it sends or receives.
"""

import os
import re
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from layerstore.errors import InvalidInput

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_MEETING = timedelta(minutes=5)
"""How long the processes wait for each other at the start."""
_HELLO = timedelta(seconds=20)
"""How long the lead waits for the first words of whoever connects to it."""
_LEAD = "layerstore lead"
"""Where the processes meet, this names the lead's port, and what the others say to it first."""
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 6))
"""A process that dies closes its connections; a host that dies is given up after three minutes without a sign of it."""
_PORTS = range(20_000, 32_000)
"""Below the range that systems use for outgoing connections."""

# These say whether all processes are on this host: Open MPI; MPICH and Intel MPI.
_LOCAL_COUNTS = (("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"), ("MPI_LOCALNRANKS", "PMI_SIZE"))


def name_meeting_point() -> None:
    """Set where torch looks for the lead, unless the launcher has done so."""
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return
    # Open MPI starts its daemons as Slurm steps, and the variables that they pass on name the daemons' hosts.
    is_slurms = "SLURM_PROCID" in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ
    if is_slurms and "SLURM_STEP_NODELIST" in os.environ:
        host = first_host(os.environ["SLURM_STEP_NODELIST"])
        # Jobs that follow each other, and steps of one job, get ports of their own.
        number = int(os.environ["SLURM_JOB_ID"]) * 7 + int(os.environ.get("SLURM_STEP_ID", "0"))
    elif all(os.environ.get(here) == os.environ.get(everywhere) for here, everywhere in _LOCAL_COUNTS):
        host, number = "127.0.0.1", os.getppid()  # the launcher's pid
    else:
        raise InvalidInput(
            "these processes are on several hosts, and their launcher does not say where the first one is",
            hint="set MASTER_ADDR to its host and MASTER_PORT to a free port: mpirun -x MASTER_ADDR=HOST -x ...",
        )
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", str(_PORTS[number % len(_PORTS)]))


def connect_all(number: int, count: int) -> list[Connection]:
    """Meet the others; return the lead's connections to them in order, or another process's to the lead."""
    # Under torchrun its own server is there, which only torch can ask.
    from torch.distributed.rendezvous import rendezvous

    meeting, _, _ = next(rendezvous("env://", number, count, timeout=_MEETING))
    if number == 0:
        return _accept_others(meeting, count)
    port, _, token = meeting.get(_LEAD).decode().partition(" ")
    lead = _open_connection(socket.create_connection((os.environ["MASTER_ADDR"], int(port)), _MEETING.total_seconds()))
    lead.send_bytes(f"{token} {number}".encode())
    return [lead]


def _accept_others(meeting: "Store", count: int) -> list[Connection]:
    until = time.monotonic() + _MEETING.total_seconds()
    token = secrets.token_hex(16)
    hellos = {f"{token} {number}".encode(): number for number in range(1, count)}
    others: dict[int, Connection] = {}
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=count, dualstack_ipv6=is_dual) as server:
        meeting.set(_LEAD, f"{server.getsockname()[1]} {token}")
        while len(others) < count - 1:
            server.settimeout(max(until - time.monotonic(), 0.001))
            caller = _open_connection(server.accept()[0])
            number = _heard_number(caller, hellos)
            if number is None:
                caller.close()
            else:
                others[number] = caller
    return [others[number] for number in range(1, count)]


def _heard_number(caller: Connection, hellos: dict[bytes, int]) -> int | None:
    """Return the number of the process that calls; None if it is a stranger, of whom nothing is unpickled."""
    with suppress(EOFError, OSError):  # it has gone, or says more than a hello
        if caller.poll(_HELLO.total_seconds()):
            return hellos.pop(caller.recv_bytes(maxlength=64), None)
    return None


def _open_connection(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Connection(connected.detach())


def first_host(nodes: str) -> str:
    """
    Return the first of Slurm's list of *nodes*.

    >>> first_host("node[007-009,012],gpu1"), first_host("gpu1,gpu2"), first_host("r[1-2]n[3-4],x")
    ('node007', 'gpu1', 'r1n3')
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0] if match else nodes)
