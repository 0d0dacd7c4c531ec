"""
Work in shares among the processes that a launcher started: the lead's questions and the others' answers, over TCP.

Both are small, and pickled, which is safe: every process runs the same code for the same user, as the ranks of a
training job do. They meet where the launcher says, as those would; the connections are our own, because gloo can wait
for ever for a process that dies while it sends or receives.
"""

import os
import platform
import re
import secrets
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection as connections
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from layerstore.errors import Internal, InvalidInput, JobLost, LayerstoreError, StorageIO
from layerstore.shares import Answer, Repository, Shares, Work
from layerstore.threads import start

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_MEETING = timedelta(minutes=5)
"""How long the processes wait for each other at the start."""
_MEETING_WARNS_AFTER = timedelta(seconds=20)
"""How long until the lead says that it is waiting."""
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

Result = TypeVar("Result")


class JobNotice(UserWarning):
    """The first process is waiting for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    store: str
    session: str
    """A folder that the lead made in the store, to prove to the others that theirs is the same; may be empty."""
    cache_size: str | None
    work: Work[Any]
    part: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    result: Any = None
    problem: LayerstoreError | None = None
    warned: tuple[tuple[type[Warning], str], ...] = ()


class Led(Shares):
    """The processes of a job, as the lead sees them."""

    def __init__(self, *, count: int) -> None:
        self.count = count
        self._line = _Line(0, count)

    @contextmanager
    def scatter_work(
        self, repo: Repository, work: Work[Answer], parts: Sequence[Any]
    ) -> Iterator[Callable[[], list[Answer]]]:
        """Have every other process do *work* on one of *parts*; yield a function that waits for the answers."""
        cache_size = os.environ.get("LAYERSTORE_CACHE_SIZE")
        with _seen_by_all(repo) as session:
            answers = self._line.ask(
                [
                    _Question(store=repo.name, session=session, cache_size=cache_size, work=work, part=part)
                    for part in parts
                ]
            )
            try:
                yield lambda: list(_results_of(_result_of(answers)))
            finally:
                # Also after an error: the others listen for the next question only once they have answered this one.
                if not answers.done():
                    with suppress(JobLost):  # our own error says more
                        _result_of(answers)

    def end(self) -> None:
        """Make the others end."""
        self._line.dismiss()
        self._line.close()


@contextmanager
def _seen_by_all(repo: Repository) -> Iterator[str]:
    """Yield a new session, whose folder no copy of the store has; empty if the store is not writable."""
    session = ""
    if repo.remote is None:
        with suppress(StorageIO):  # it cannot be written to: without a session, nobody compares the stores
            repo.parts.open_session(named := secrets.token_hex(16))
            session = named
    try:
        yield session
    finally:
        if session:
            repo.parts.close_session(session, is_over=True)


def _results_of(answers: list[_Answered]) -> Iterator[Any]:
    """Yield the others' answers; raise the first error, and pass on warnings."""
    for number, answer in enumerate(answers, 1):
        for kind, words in answer.warned:
            warnings.warn(words, kind, stacklevel=2)
        if answer.problem is not None:
            answer.problem.locate(f"process {number}")
            raise answer.problem
        yield answer.result


def serve_lead(number: int, count: int, opened: Callable[[str], AbstractContextManager[Repository]]) -> None:
    """Serve the lead as process *number* of *count* until it ends; *opened* opens a store by its name."""
    line = _Line(number, count)
    with ExitStack() as stores:
        repos: dict[str, Repository] = {}
        question = line.listen()
        while question is not None:
            if question.cache_size is not None:
                os.environ["LAYERSTORE_CACHE_SIZE"] = question.cache_size
            # The work's resources are released when the next question comes.
            with ExitStack() as held, warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                result, problem = None, None
                try:
                    if question.store not in repos:
                        repos[question.store] = stores.enter_context(opened(question.store))
                    repo = repos[question.store]
                    _check_same(repo, question.session)
                    result = held.enter_context(question.work(repo, question.part))
                except LayerstoreError as exc:
                    problem = exc
                except Exception as exc:  # noqa: BLE001  # the lead reports it
                    problem = _as_ours(exc)
                line.answer(_Answered(result=result, problem=problem, warned=_recorded(warned)))
                question = line.listen()
    line.close()


def _check_same(repo: Repository, session: str) -> None:
    if session and not repo.parts.sees_session(session):
        raise InvalidInput(
            f"{repo.name} on {platform.node()} is not the store that the first process has under this path",
            hint="all processes must see one store: put it on a disk that they share",
        )


def _as_ours(exc: Exception) -> LayerstoreError:
    if isinstance(exc, MemoryError):
        return LayerstoreError(f"memory ran out on {platform.node()}", hint="start fewer processes on each host")
    if isinstance(exc, OSError):
        return StorageIO(f"{exc.filename}: {exc.strerror or exc}", errno=exc.errno, filename=str(exc.filename))
    traceback.print_exc()
    return Internal(f"unexpected {type(exc).__name__}: {exc}")


def _recorded(warned: Sequence[warnings.WarningMessage]) -> tuple[tuple[type[Warning], str], ...]:
    return tuple({(warning.category, str(warning.message)): None for warning in warned})


# -- messages ------------------------------------------------------------------------------------------------------


class _Line:
    """
    The connections between the lead, process 0, and the others.

    A single thread uses them and works through its requests in order. So signals are handled even while it waits, and
    no matter what a signal interrupts, a question and its answers are finished before the others are told to end.
    """

    def __init__(self, number: int, count: int) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        start(threading.Thread(target=self._run_calls, name="shares", daemon=True))
        _name_meeting_point()
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        meeting = self._start_call(lambda: _connect_all(number, count))
        if number == 0 and not wait([meeting], _MEETING_WARNS_AFTER.total_seconds()).done:
            warnings.warn(f"waiting for the {count} processes of this job at {where}", JobNotice, stacklevel=3)
        try:
            self._peers = meeting.result()
            """The others, in order; of another process, the lead alone."""
        except (EOFError, OSError, RuntimeError) as exc:
            raise JobLost(
                f"the {count} processes of this job do not meet at {where} ({_words(exc)})",
                hint="have all been started? MASTER_ADDR and MASTER_PORT say where, LAYERSTORE_SHARES=0 works alone",
            ) from exc

    def ask(self, questions: Sequence[_Question]) -> "Future[list[_Answered]]":
        """Send each of *questions* to its process; return a future of the answers."""

        def exchange() -> list[_Answered]:
            self._send(questions)
            answers: dict[Connection, _Answered] = {}
            while len(answers) < len(self._peers):
                # Whichever is ready, so that the end of any process is seen at once.
                for peer in connections.wait(set(self._peers) - answers.keys()):
                    assert isinstance(peer, Connection)
                    answers[peer] = peer.recv()
            return [answers[peer] for peer in self._peers]

        return self._start_call(exchange)

    def dismiss(self) -> None:
        """Tell all others to end."""
        self._call_and_wait(lambda: self._send([None] * len(self._peers)))

    def listen(self) -> _Question | None:
        """Return the lead's next question; None at the end."""
        question: _Question | None = self._call_and_wait(self._peers[0].recv)
        return question

    def answer(self, answer: _Answered) -> None:
        """Send *answer* to the lead."""
        self._call_and_wait(lambda: self._send([answer]))

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers:
            peer.close()

    def _send(self, messages: Sequence[Any]) -> None:
        for peer, message in zip(self._peers, messages, strict=True):
            peer.send(message)

    def _call_and_wait(self, call: Callable[[], Result]) -> Result:
        return _result_of(self._start_call(call))

    def _start_call(self, call: Callable[[], Result]) -> "Future[Result]":
        """Run *call* on the thread; return a future of its result."""
        result: Future[Result] = Future()
        self._calls.put((result, call))
        return result

    def _run_calls(self) -> None:
        while True:
            result, call = self._calls.get()
            try:
                result.set_result(call())
            except BaseException as exc:  # noqa: BLE001  # raised where the result is awaited
                result.set_exception(exc)


def _result_of(result: "Future[Result]") -> Result:
    try:
        return result.result()
    except (EOFError, OSError) as exc:
        raise JobLost(
            f"another process of this job has ended, or cannot be reached ({_words(exc)})",
            hint="repeat the command; if a process was killed, its host's log says why",
        ) from exc


def _words(exc: Exception) -> str:
    """Return the message without its number, its source location and its advice."""
    return str(exc).partition(". ")[0].rpartition("] ")[2] or "its connection was closed"


def _connect_all(number: int, count: int) -> list[Connection]:
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


def _name_meeting_point() -> None:
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


def first_host(nodes: str) -> str:
    """
    Return the first of Slurm's list of *nodes*.

    >>> first_host("node[007-009,012],gpu1"), first_host("gpu1,gpu2"), first_host("r[1-2]n[3-4],x")
    ('node007', 'gpu1', 'r1n3')
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0] if match else nodes)
