"""
What all ranks agree on at a save: that it is the same save, that it can be made, and how earlier saves ended.

One all-gather of a few numbers. Every rank draws the same conclusions from the same messages.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layerstore.errors import Conflict, InvalidInput
from layerstore.format import object_id
from layerstore.live.ranks.exchange import Exchange, Message
from layerstore.policy import Policy, is_ours
from layerstore.storage import Repository

# The numbers of a message.
_STEP, _NUMBER, _FLAGS, _FREE, _FAILED_FROM, _FAILED, _UPTO, _VISIBLE = range(8)
_AT_BOUNDARY, _PRESSED, _MISTYPED, _BASE_LOST = 1, 2, 4, 8
SAVES_MAX = 32
"""How many saves may be unresolved at once: their outcomes are the bits of one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank reports to the others."""

    step: int = 0
    number: int
    """The number of the next save."""
    is_at_boundary: bool = True
    """Whether no gradients are accumulated for an update to come."""
    is_pressed: bool = False
    """Whether so much is still to be written that another save would hold training up."""
    free_bytes: int = 0
    """Free space in this rank's host buffer."""
    failed: tuple[int, ...] = ()
    """Numbers of saves that this rank could not write."""
    outcomes: dict[int, bool]
    """From the rank that commits: whether each resolved save became visible."""
    has_lost_base: bool = False
    """From the rank that commits: whether a layer was collected that the next commits would inherit."""
    mistyped: str = ""
    """What in client_state cannot be kept."""
    problem: str = ""
    """Any other reason why this save cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks know after an exchange of reports."""

    outcomes: dict[int, bool]
    """Of resolved saves: whether each became visible."""
    failed: frozenset[int]
    """Saves that some rank could not write."""
    is_pressed: bool
    """Whether any rank is."""
    free_bytes: int
    """What every rank has free in its host buffer."""
    has_lost_base: bool
    """Whether every layer has to be saved again before there can be another commit."""


def exchange_reports(exchange: Exchange, report: RankReport) -> Agreed:
    """Send *report* to all ranks and learn theirs."""
    return _agreed(exchange.all(_message(report)))


def agree_on_save(exchange: Exchange, report: RankReport) -> Agreed:
    """
    Make sure that all ranks want the same save, and that it can be made.

    Raises:
        TypeError: A rank's client_state cannot be kept.
        InvalidInput: A rank has another problem, or gradients are being accumulated.
        Conflict: The ranks are at different steps.
    """
    messages = exchange.all(_message(report))
    for rank, message in enumerate(messages):
        if message.text and message.numbers[_FLAGS] & _MISTYPED:
            raise TypeError(f"{message.text} (on rank {rank}); only plain values, tensors and numpy's can be kept")
        if message.text:
            raise InvalidInput(f"step {report.step} cannot be saved: {message.text} (on rank {rank})")
    if len({(message.numbers[_STEP], message.numbers[_NUMBER]) for message in messages}) > 1:
        steps = ", ".join(map(str, sorted({message.numbers[_STEP] for message in messages})))
        raise Conflict(f"the ranks are not at the same save: they are at step {steps}")
    if not all(message.numbers[_FLAGS] & _AT_BOUNDARY for message in messages):
        raise InvalidInput(
            f"step {report.step} cannot be saved: gradients are being accumulated for an update that is still to come",
            hint="save after the engine.step() that updates the parameters",
        )
    return _agreed(messages)


def agreed_layers(exchange: Exchange, policy: Policy, due: Callable[[], frozenset[str]]) -> frozenset[str]:
    """
    Return the layers that are *due* under *policy*, the same on every rank.

    Our own policies decide alike everywhere; the answers of a user's policy are compared.

    Raises:
        Conflict: The policy says different things on different ranks.
    """
    if is_ours(policy):
        return due()
    with exchange.together():
        found = due()
    if not exchange.is_same(object_id("\n".join(sorted(found)).encode())):
        raise Conflict(
            f"policy {policy.name!r} says on one rank that other layers are due than on another; nothing is saved",
            hint="let due(save) decide from what it is given alone",
        )
    return found


def open_session(exchange: Exchange, repo: Repository) -> str:
    """Agree on a session, the name under which the ranks leave their parts; check that all see the same store."""
    session = exchange.first(secrets.token_hex(16) if exchange.rank == 0 else "")
    with exchange.together():
        if exchange.rank == 0:
            repo.parts.open_session(session)
    with exchange.together():
        if not repo.parts.has_session(session):
            raise InvalidInput(f"{repo.layout.root} is not the store that rank 0 has under this path")
    return session


def _message(report: RankReport) -> Message:
    upto = 1 + max(report.outcomes, default=-1)
    failed_from = min(report.failed, default=0)
    numbers = {
        _STEP: report.step,
        _NUMBER: report.number,
        _FLAGS: _AT_BOUNDARY * report.is_at_boundary
        | _PRESSED * report.is_pressed
        | _MISTYPED * bool(report.mistyped)
        | _BASE_LOST * report.has_lost_base,
        _FREE: report.free_bytes,
        _FAILED_FROM: failed_from,
        _FAILED: sum(1 << ahead for ahead in range(SAVES_MAX) if failed_from + ahead in report.failed),
        _UPTO: upto,
        _VISIBLE: sum(1 << back for back in range(SAVES_MAX) if report.outcomes.get(upto - 1 - back)),
    }
    return Message(numbers=tuple(numbers[at] for at in range(len(numbers))), text=report.mistyped or report.problem)


def _agreed(messages: Sequence[Message]) -> Agreed:
    # Only the rank that commits reports outcomes.
    upto = max(message.numbers[_UPTO] for message in messages)
    visible = max(message.numbers[_VISIBLE] for message in messages)
    return Agreed(
        outcomes={upto - 1 - back: bool(visible >> back & 1) for back in range(min(SAVES_MAX, upto))},
        failed=frozenset(
            message.numbers[_FAILED_FROM] + ahead
            for message in messages
            for ahead in range(SAVES_MAX)
            if message.numbers[_FAILED] >> ahead & 1
        ),
        is_pressed=any(message.numbers[_FLAGS] & _PRESSED for message in messages),
        free_bytes=min(message.numbers[_FREE] for message in messages),
        has_lost_base=any(message.numbers[_FLAGS] & _BASE_LOST for message in messages),
    )
