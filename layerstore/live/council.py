"""
What all ranks agree on before a save: that it is the same one, that it may be made, and what became of earlier ones.

One all-gather of a few numbers. Every rank draws the same conclusions from the same messages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layerstore.errors import Conflict, InvalidInput
from layerstore.format.hashing import object_id
from layerstore.live.exchange import Exchange, Message
from layerstore.policy import Policy, is_ours

# What the numbers of a message are.
_STEP, _NUMBER, _FLAGS, _FREE, _FAILED_FROM, _FAILED, _UPTO, _VISIBLE = range(8)
_AT_BOUNDARY, _PRESSED, _MISTYPED, _BASE_LOST = 1, 2, 4, 8
SAVES_MAX = 32
"""How many saves in a row may have an open fate: as many as one number tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank knows."""

    step: int = 0
    number: int
    """Of the next save."""
    is_at_boundary: bool = True
    is_pressed: bool = False
    """Whether it still has so much to write that another save would hold training up."""
    free_bytes: int = 0
    failed: tuple[int, ...] = ()
    """Numbers of saves that it could not write."""
    fates: dict[int, bool]
    """On the rank that commits: of every save that is resolved, whether it became visible."""
    has_lost_base: bool = False
    """On the rank that commits: whether it has lost a layer that commits were to inherit."""
    mistyped: str = ""
    """What of the client_state cannot be kept."""
    problem: str = ""
    """What else is wrong with what was asked of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What all ranks know."""

    fates: dict[int, bool]
    """Of saves that are resolved: whether each became visible."""
    failed: frozenset[int]
    """Saves that some rank could not write."""
    is_pressed: bool
    """Whether any rank is."""
    free_bytes: int
    """What every rank has free in its pool."""
    has_lost_base: bool
    """Whether no commit can be made before every layer was saved again."""


def meet(exchange: Exchange, report: Report) -> Facts:
    """Tell all ranks *report*, and learn theirs."""
    return _facts(exchange.all(_message(report)))


def agree(exchange: Exchange, report: Report) -> Facts:
    """
    Make sure that all ranks want the same save, and that it can be made.

    Raises:
        TypeError: A rank's client_state cannot be kept.
        InvalidInput: Something else that a rank was given cannot be, or gradients are being accumulated.
        Conflict: They are at different steps.
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
    return _facts(messages)


def decided(exchange: Exchange, policy: Policy, due: Callable[[], frozenset[str]]) -> frozenset[str]:
    """
    Return what is *due* under *policy*. Ours give every rank the same answer; a user's own is held to it.

    Raises:
        Conflict: It says different things on different ranks.
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


def _message(report: Report) -> Message:
    upto = 1 + max(report.fates, default=-1)
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
        _VISIBLE: sum(1 << back for back in range(SAVES_MAX) if report.fates.get(upto - 1 - back)),
    }
    return Message(
        numbers=tuple(numbers[place] for place in range(len(numbers))), text=report.mistyped or report.problem
    )


def _facts(messages: Sequence[Message]) -> Facts:
    # Only the rank that commits has fates to tell.
    upto = max(message.numbers[_UPTO] for message in messages)
    visible = max(message.numbers[_VISIBLE] for message in messages)
    return Facts(
        fates={upto - 1 - back: bool(visible >> back & 1) for back in range(min(SAVES_MAX, upto))},
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
