"""
Messages between ranks: one small all-gather on the host, called by the main thread of every rank.

The messages have their own gloo group, which does not wait for the accelerator's work.

A save needs one message: all ranks report which save they want, whether they can make it, and how earlier saves ended,
and every rank draws the same conclusions from the same reports. A resume also sends each rank its own data.
"""

import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from layerstore import errors
from layerstore.disk import pauses
from layerstore.errors import Conflict, IntegrityError, InvalidInput, LayerstoreError, StorageIO
from layerstore.hashing import DIGEST_BYTES, digest, object_id
from layerstore.live.log import LOG
from layerstore.policy import Policy, is_ours
from layerstore.storage import Repository

if TYPE_CHECKING:
    import torch

TEXT_BYTES_MAX = 2048

ONE_STORE_HINT = "all hosts must see one store: a bucket, or a folder on a disk that they share"
DIFFERENT_COMMITS_HINT = f"if another job is saving, try again once it has ended; otherwise, {ONE_STORE_HINT}"

_SILENT_SECONDS_MAX = 60.0

_LATE_SECONDS = 120.0
"""How long a rank waits for the others before it logs a warning; must exceed the minute between `wait` messages."""

Answer = TypeVar("Answer")


class Exchange:
    """The process group in which ranks exchange messages about saves."""

    def __init__(self) -> None:
        import torch.distributed as dist

        # A program on one device need not have a process group.
        self._is_alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self._is_alone else dist.get_rank()
        self.size = 1 if self._is_alone else dist.get_world_size()
        with _warning_if_kept_waiting(self.rank, "attach(), resume() or a load"):
            self._group = None if self._is_alone else dist.new_group(backend="gloo")

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Run a block on every rank; if it fails on one rank, raise an error of the same class on all."""
        problem: Exception | None = None
        try:
            yield
        except Exception as exc:  # noqa: BLE001  # raised below: the other ranks need our message first
            problem = exc
        texts = self.texts("" if problem is None else as_text(problem))
        if problem is not None:
            raise problem  # our own error, with its traceback, rather than another rank's report
        for rank, text in enumerate(texts):
            if text:
                raise _error_of_rank(text, rank=rank)

    def texts(self, text: str) -> list[str]:
        """Return every rank's *text*, cut to `TEXT_BYTES_MAX`, by rank."""
        import torch

        # The same size on all ranks: an all-gather needs that, and exchanging lengths would take another message.
        data = text.encode(errors="backslashreplace")[:TEXT_BYTES_MAX].ljust(TEXT_BYTES_MAX, b"\0")
        gathered = self._gathered(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return [tensor.numpy().tobytes().rstrip(b"\0").decode(errors="ignore") for tensor in gathered]

    def agree_on(
        self, look: Callable[[], Answer], describe: Callable[[Answer], str], *, may_be_late: bool
    ) -> tuple[Answer, list[str]]:
        """
        Return the result of *look* on this rank, and, by rank, the text that *describe* returns for each rank's result.

        If the texts differ, and hosts may see changes late (*may_be_late*), all ranks look again for a while.
        """
        again = pauses()
        while True:
            with self.raise_on_all():
                answer = look()
            texts = self.texts(f"{may_be_late:d}{describe(answer)}")
            views = [text[1:] for text in texts]
            if len(set(views)) == 1 or all(text[0] == "0" for text in texts):
                return answer, views
            # Rank 0 alone decides when to stop: with their own clocks, ranks might stop in different rounds.
            if self.first((next(again, "over") or "") if self.rank == 0 else ""):
                return answer, views
            if self.rank == 0:
                LOG.warning("the hosts see different commits so far, looking again: %s", "; ".join(sorted(set(views))))

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each of *values* over all ranks, bit-identical on every rank."""
        import torch

        # Gathered, then added in the order of ranks: gloo's own reduction may differ between ranks in the last bit.
        gathered = self._gathered(torch.tensor(values, dtype=torch.float64))
        return [sum(column) for column in zip(*(tensor.tolist() for tensor in gathered), strict=True)]

    def integers(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's *values*, by rank; all ranks pass the same number of them."""
        import torch

        return [tensor.tolist() for tensor in self._gathered(torch.tensor(values, dtype=torch.int64))]

    def deal(self, messages: Sequence[bytes]) -> list[bytes]:
        """
        Send each rank its message from *messages*, by rank; return the messages that all ranks sent to this rank.

        Raises:
            IntegrityError: A message was damaged in transit.
        """
        import torch

        sizes = torch.tensor([len(data) + DIGEST_BYTES for data in messages], dtype=torch.int64)
        of_one = [1] * len(messages)
        sizes_dealt = self._dealt(sizes, torch.empty_like(sizes), of_one, of_one).tolist()
        with self.raise_on_all():  # otherwise, if a rank lacked the memory, the others would wait for its data
            sealed = bytearray().join(data + digest(data) for data in messages)
            dealt = torch.empty(sum(sizes_dealt), dtype=torch.uint8)
        data = self._dealt(torch.frombuffer(sealed, dtype=torch.uint8), dealt, sizes.tolist(), sizes_dealt)
        received = [part.numpy().tobytes() for part in torch.split(data, sizes_dealt)]
        for rank, part in enumerate(received):
            if digest(part[:-DIGEST_BYTES]) != part[-DIGEST_BYTES:]:
                raise IntegrityError(f"a message from rank {rank} was damaged in transit", hint="try again")
        return [part[:-DIGEST_BYTES] for part in received]

    def wait(self, wait: Callable[[float], bool], *, until: float = math.inf) -> bool:
        """
        Call *wait* on every rank until all calls return True; return False if *until* passes on one rank before that.

        Ranks exchange a message every minute, because gloo aborts after half an hour of silence, and a first push may
        take longer.
        """
        while True:
            is_done = wait(min(max(until - time.monotonic(), 0), _SILENT_SECONDS_MAX))
            # Clocks differ, so each rank reports whether *until* has passed, and all stop in the same round.
            is_late = not is_done and time.monotonic() >= until
            with _warning_if_kept_waiting(self.rank, "wait(), close() or resume()"):
                open_, late = self.sums([float(not is_done), float(is_late)])
            if not open_ or late:
                return not open_

    def is_same(self, text: str) -> bool:
        """Whether all ranks sent the same *text*."""
        return len(set(self.texts(text))) == 1

    def first(self, text: str) -> str:
        """Return rank 0's *text*."""
        return self.texts(text)[0]

    def close(self) -> None:
        """Destroy the group."""
        import torch.distributed as dist

        if not self._is_alone and dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _gathered(self, mine: "torch.Tensor") -> "list[torch.Tensor]":
        import torch.distributed as dist

        if self._is_alone:
            return [mine]
        gathered = [mine.new_empty(len(mine)) for _ in range(self.size)]
        dist.all_gather(gathered, mine, group=self._group)
        return gathered

    def _dealt(
        self, mine: "torch.Tensor", dealt: "torch.Tensor", sizes: list[int], sizes_dealt: list[int]
    ) -> "torch.Tensor":
        """Send *sizes* elements of *mine* to each rank; return *dealt*, filled with what this rank received."""
        import torch.distributed as dist

        if self._is_alone:
            return mine
        dist.all_to_all_single(dealt, mine, sizes_dealt, sizes, group=self._group)
        return dealt


@contextmanager
def _warning_if_kept_waiting(rank: int, call: str) -> Iterator[None]:
    """Log a line if the other ranks are late for *call*: they may never call it, and no other line would say so."""

    def warn() -> None:
        LOG.warning(
            "rank %d has waited %.0f s in %s for the other ranks: every rank must call it", rank, _LATE_SECONDS, call
        )

    timer = threading.Timer(_LATE_SECONDS, warn)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started; an error on only this rank would strand the others
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def as_text(problem: Exception) -> str:
    """Return the lines of *problem* for other ranks: its class, its message and, if there is room, its hint."""
    text = f"{type(problem).__name__}\n{' '.join(str(problem).split()) or type(problem).__name__}"
    with_hint = f"{text}\n{getattr(problem, 'hint', None) or ''}"
    return with_hint if len(with_hint.encode()) <= TEXT_BYTES_MAX else text


def _error_of_rank(text: str, *, rank: int) -> LayerstoreError:
    """Return the error that another *rank* raised and sent as *text*."""
    kind, message, hint = _lines(text)
    if kind == StorageIO.__name__:
        return StorageIO(f"rank {rank}: {message}", errno=None, filename="the store", hint=hint or None)
    error_class = getattr(errors, kind, LayerstoreError)
    is_ours = isinstance(error_class, type) and issubclass(error_class, LayerstoreError)
    return (error_class if is_ours else LayerstoreError)(f"rank {rank}: {message}", hint=hint or None)


# -- agreement at a save -------------------------------------------------------------------------------------------

SAVES_MAX = 32
"""How many saves may be unresolved at once, so that a report on all of them fits into `TEXT_BYTES_MAX`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank's report to the others, or the merged reports of all ranks."""

    step: int = 0
    number: int
    """The number of the next save."""
    is_at_boundary: bool = True
    """Whether no gradients are being accumulated for an update that is still to come."""
    is_pressed: bool = False
    """Whether so many saves or bytes are unwritten that another save would block training."""
    is_tight: bool = False
    """Whether the next update may have to wait until this save's copies find room in the host buffer."""
    free_bytes: int = 0
    """Free space in the host buffer."""
    failed: tuple[int, ...] = ()
    """Numbers of saves that could not be written."""
    outcomes: dict[int, bool]
    """From the rank that commits: whether each resolved save became visible."""
    has_lost_base: bool = False
    """Whether the next commits cannot inherit every layer: a layer was collected, or never reaches the next level."""
    precision: str = ""
    """The precision of this save."""
    retries: int = 0
    """How many requests to a bucket were retried since the last report; merged, the sum over all ranks."""
    is_mistyped: bool = False
    """Whether *problem* is a type in client_state that cannot be kept."""
    problem: str = ""
    """Why this save cannot be made, as `as_text` puts it; empty if it can be made."""


def exchange_reports(exchange: Exchange, report: RankReport) -> RankReport:
    """Send *report* to all ranks; return all reports merged."""
    return _merged(_exchanged(exchange, report))


def agree_on_save(exchange: Exchange, report: RankReport) -> RankReport:
    """
    Make sure that all ranks want the same save, and are able to make it; return all reports merged.

    Raises:
        TypeError: A rank's client_state cannot be kept.
        InvalidInput: A rank has another problem, or gradients are being accumulated.
        Conflict: The ranks are at different steps.
    """
    with _warning_if_kept_waiting(exchange.rank, "save()"):
        reports = _exchanged(exchange, report)
    for rank, other in enumerate(reports):
        _, message, hint = _lines(other.problem)
        if other.problem and other.is_mistyped:
            raise TypeError(f"{message} (on rank {rank}); only plain and numpy values and tensors can be kept")
        if other.problem:
            raise InvalidInput(f"step {report.step} cannot be saved: {message} (on rank {rank})", hint=hint or None)
    if len({(other.step, other.number) for other in reports}) > 1:
        saves = sorted({(other.step, other.number) for other in reports})
        raise Conflict(
            f"the ranks are at different saves: {', '.join(f'save {number} at step {step}' for step, number in saves)}",
            hint="every rank must call save() at the same steps",
        )
    if len(precisions := sorted({other.precision for other in reports})) > 1:
        raise Conflict(
            f"the ranks save step {report.step} in different precisions: {', '.join(precisions)}",
            hint="pass the same precision= on every rank",
        )
    if not all(other.is_at_boundary for other in reports):
        raise InvalidInput(
            f"step {report.step} cannot be saved: gradients are being accumulated for an update that is still to come",
            hint="save after the engine.step() that updates the parameters",
        )
    return _merged(reports)


def agreed_layers(exchange: Exchange, policy: Policy, due: Callable[[], frozenset[str]]) -> frozenset[str]:
    """
    Return the layers that are *due* under *policy*, the same on every rank.

    Our own policies decide alike on every rank; a user's policy may not, so the ranks compare its answers.

    Raises:
        Conflict: The policy's answers differ.
    """
    if is_ours(policy):
        return due()
    with exchange.raise_on_all():
        layers = due()
    if not exchange.is_same(object_id("\n".join(sorted(layers)).encode())):
        raise Conflict(
            f"policy {policy.name!r} chooses different layers on different ranks; nothing is saved",
            hint="let due(save) depend on its argument alone",
        )
    return layers


def open_session(exchange: Exchange, repo: Repository) -> str:
    """Return a new session for the ranks' parts, the same on all ranks; check that all ranks see the same store."""
    session = exchange.first(secrets.token_hex(16) if exchange.rank == 0 else "")
    with exchange.raise_on_all():
        if exchange.rank == 0:
            repo.parts.open_session(session)
    with exchange.raise_on_all():
        if not repo.parts.sees_session(session):
            raise InvalidInput(
                f"{repo.layout.root} is not the store that rank 0 sees at this path", hint=ONE_STORE_HINT
            )
    return session


def _exchanged(exchange: Exchange, report: RankReport) -> list[RankReport]:
    facts = asdict(report) | {"outcomes": list(report.outcomes.items())}
    problem = facts.pop("problem")
    # The problem comes after the facts, which must not be cut off. JSON keys are strings, so the outcomes are pairs.
    head = json.dumps(facts)
    assert len(head) < TEXT_BYTES_MAX, "outcomes of so many saves fit"
    return [_parsed(text) for text in exchange.texts(f"{head}\n{problem}")]


def _lines(text: str) -> tuple[str, str, str]:
    """Return the three lines of *text*; what was cut off is empty."""
    first, _, rest = text.partition("\n")
    second, _, third = rest.partition("\n")
    return first, second, third


def _parsed(text: str) -> RankReport:
    head, _, problem = text.partition("\n")
    facts = json.loads(head)
    return RankReport(**facts | {"outcomes": dict(facts["outcomes"]), "problem": problem})


def _merged(reports: Sequence[RankReport]) -> RankReport:
    return replace(
        reports[0],
        # Only the rank that commits reports outcomes.
        outcomes={number: is_visible for report in reports for number, is_visible in report.outcomes.items()},
        failed=tuple({number for report in reports for number in report.failed}),
        is_pressed=any(report.is_pressed for report in reports),
        is_tight=any(report.is_tight for report in reports),
        free_bytes=min(report.free_bytes for report in reports),
        has_lost_base=any(report.has_lost_base for report in reports),
        retries=sum(report.retries for report in reports),
    )
