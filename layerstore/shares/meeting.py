"""
The meeting of the processes that a launcher started, and the connections between them.

They use the same meeting point as the ranks of a training job. The connections are our own, because gloo can wait
forever for a process that dies while it sends or receives.
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

_MEETING_SECONDS = 300.0
"""How long the processes wait for each other at the start."""
_HELLO_SECONDS = 20.0
"""How long a connection may take, and how long the lead waits for a caller's first message."""
_HELLO_BYTES = 40
"""A token of 32 hexadecimal digits, and the process's number."""
# A process that dies closes its connections. A host that dies does not: we give up on it after three silent minutes.
_LIVENESS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 180_000),  # how long sent data may stay unacknowledged, in ms
)
_PORTS = range(20_000, 32_000)
"""The ports to choose from: all below the range that systems use for outgoing connections."""

# Variables with the number of local processes and of all processes; if the two are equal, all processes are on this
# host. The first pair is Open MPI's, the second that of MPICH and Intel MPI.
_LOCAL_COUNTS = (("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"), ("MPI_LOCALNRANKS", "PMI_SIZE"))


def name_meeting_point() -> None:
    """Set the variables in which torch looks for the lead's address, unless the launcher has set them."""
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return
    # Open MPI starts its daemons as Slurm steps, so its processes inherit Slurm variables that describe the daemons.
    is_slurms = "SLURM_PROCID" in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ
    if is_slurms and "SLURM_STEP_NODELIST" in os.environ:
        host = first_host(os.environ["SLURM_STEP_NODELIST"])
        # Consecutive jobs, and the steps of one job, get different ports.
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
    """
    Meet the others; return the lead's connections to them, in order, or another process's connection to the lead.

    Raises:
        OSError, RuntimeError, ValueError: The processes do not meet, or the variables with the address are invalid.
    """
    # torchrun may already run a server at the meeting point, and only torch can query that server.
    from torch.distributed.rendezvous import rendezvous

    until = time.monotonic() + _MEETING_SECONDS
    meeting, _, _ = next(rendezvous("env://", number, count, timeout=timedelta(seconds=_MEETING_SECONDS)))
    # torchrun's server outlives us, so each command, and each restart of a job, stores its port under its own key.
    job = f"layerstore {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    key = f"{job} lead {meeting.add(f'{job} process {number}', 1)}"
    if number == 0:
        return _accept_others(meeting, key, count, until)
    port, _, token = meeting.get(key).decode().partition(" ")
    lead = socket.create_connection((os.environ["MASTER_ADDR"], int(port)), _HELLO_SECONDS)
    lead.sendall(_hello(token, number))
    return [_connection(lead)]


def _accept_others(meeting: "Store", key: str, count: int, until: float) -> list[Connection]:
    token = secrets.token_hex(16)
    hellos = {_hello(token, number): number for number in range(1, count)}
    others: dict[int, Connection] = {}
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=count, dualstack_ipv6=is_dual) as server:
        port = server.getsockname()[1]
        meeting.set(key, f"{port} {token}")
        while hellos:
            server.settimeout(max(until - time.monotonic(), 0.001))  # 0 would make it non-blocking
            try:
                caller, _ = server.accept()
            except TimeoutError as exc:
                missing = min(hellos.values())
                raise TimeoutError(f"process {missing} has not connected to port {port}") from exc
            number = _heard_number(caller, hellos)
            if number is None:
                caller.close()
            else:
                others[number] = _connection(caller)
    return [others[number] for number in range(1, count)]


def _hello(token: str, number: int) -> bytes:
    return f"{token}{number:08}".encode()


def _heard_number(caller: socket.socket, hellos: dict[bytes, int]) -> int | None:
    """Return the number of the calling process; None if it does not send the token. Unpickles nothing."""
    caller.settimeout(_HELLO_SECONDS)
    heard = b""
    with suppress(OSError):  # the caller is silent, or gone
        while len(heard) < _HELLO_BYTES and (piece := caller.recv(_HELLO_BYTES - len(heard))):
            heard += piece
    return hellos.pop(heard, None)


def _connection(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    for level, option, value in _LIVENESS:
        connected.setsockopt(level, option, value)
    return Connection(connected.detach())


def first_host(nodes: str) -> str:
    """
    Return the first host in *nodes*, a list in Slurm's notation.

    >>> first_host("node[007-009,012],gpu1"), first_host("gpu1,gpu2"), first_host("r[1-2]n[3-4],x")
    ('node007', 'gpu1', 'r1n3')
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0] if match else nodes)
