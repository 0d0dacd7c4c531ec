"""
Work in shares among the processes that a launcher started: the lead's questions and the others' answers, over TCP.

Questions and answers are small, and pickled, which is safe: every process runs the same code for the same user, as the
ranks of a training job do.
"""

import os
import platform
import secrets
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from layerstore.errors import Internal, InvalidInput, JobLost, LayerstoreError, StorageIO
from layerstore.shares import Answer, Repository, Shares, Work
from layerstore.shares.meeting import connect_all, name_meeting_point
from layerstore.threads import start

_MEETING_WARNS_AFTER_SECONDS = 20.0
"""How long the lead waits for the others before it warns that it is waiting."""

Result = TypeVar("Result")


class JobNotice(UserWarning):
    """The first process is waiting for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    store: str
    session: str
    """The name of a folder that the lead made in its store and the others must see in theirs; if empty, not checked."""
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
                    with suppress(JobLost):  # our own error is more informative
                        _result_of(answers)

    def end(self) -> None:
        """Tell the others to end, and close the connections."""
        self._line.dismiss()
        self._line.close()


@contextmanager
def _seen_by_all(repo: Repository) -> Iterator[str]:
    """Yield a new session, whose folder no copy of the store has; yield "" if the store is remote or not writable."""
    session = ""
    if repo.remote is None:
        with suppress(StorageIO):  # the store is not writable: without a session, nobody compares the stores
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
    """Serve the lead, as process *number* of *count*, until the lead ends; *opened* opens a store by its name."""
    line = _Line(number, count)
    with ExitStack() as stores:
        repos: dict[str, Repository] = {}
        question = line.listen()
        while question is not None:
            if question.cache_size is not None:
                os.environ["LAYERSTORE_CACHE_SIZE"] = question.cache_size
            # The work's resources are released when the next question arrives.
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

    A single thread uses them and works through its requests in order. So the main thread can handle signals while that
    thread waits. If a signal ends a command early, its question is still answered before the others are told to end.
    """

    def __init__(self, number: int, count: int) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        start(threading.Thread(target=self._run_calls, name="shares", daemon=True))
        name_meeting_point()
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        meeting = self._start_call(lambda: connect_all(number, count))
        if number == 0 and not wait([meeting], _MEETING_WARNS_AFTER_SECONDS).done:
            warnings.warn(f"waiting for the {count} processes of this job at {where}", JobNotice, stacklevel=3)
        try:
            self._peers = meeting.result()
            """In the lead, its connections to the others, in order; in the others, the connection to the lead."""
        except (OSError, RuntimeError, ValueError) as exc:
            raise JobLost(
                f"the {count} processes of this job could not connect to each other at {where} ({_words(exc)})",
                hint="check that all were started, MASTER_ADDR and MASTER_PORT; or work alone: LAYERSTORE_SHARES=0",
            ) from exc

    def ask(self, questions: Sequence[_Question]) -> "Future[list[_Answered]]":
        """Send each of *questions* to its process; return a future of the answers."""

        def exchange() -> list[_Answered]:
            self._send(questions)
            answers, lost = [], None
            # Wait for all, even if one is lost: the others must finish before this process releases its resources.
            for number, peer in enumerate(self._peers, 1):
                try:
                    answers.append(peer.recv())
                except (EOFError, OSError) as exc:
                    lost = lost or ConnectionError(f"process {number}: {_words(exc)}")
            if lost is not None:
                raise lost
            return answers

        return self._start_call(exchange)

    def dismiss(self) -> None:
        """Tell all remaining processes to end."""
        self._call_and_wait(lambda: self._send([None] * len(self._peers)))

    def listen(self) -> _Question | None:
        """Return the lead's next question; None at the end."""
        question: _Question | None = self._call_and_wait(self._peers[0].recv)
        return question

    def answer(self, answer: _Answered) -> None:
        """Send *answer* to the lead."""
        self._call_and_wait(lambda: self._peers[0].send(answer))

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers:
            peer.close()

    def _send(self, messages: Sequence[Any]) -> None:
        for peer, message in zip(self._peers, messages, strict=True):
            with suppress(OSError):  # the process is gone, as its missing answer will show
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
    """Return the first sentence of the message, without an errno or torch's source location."""
    return str(exc).partition(". ")[0].rpartition("] ")[2] or "the connection was closed"
