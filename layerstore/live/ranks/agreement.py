"""
Agreement at a save: all ranks want the same save, can make it, and know how earlier saves ended.

It takes one small all-gather; every rank draws the same conclusions from the same reports.
"""

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from layerstore.errors import Conflict, InvalidInput
from layerstore.hashing import object_id
from layerstore.live.ranks.exchange import TEXT_BYTES_MAX, Exchange
from layerstore.policy import Policy, is_ours
from layerstore.storage import Repository

SAVES_MAX = 32
"""How many saves may be unresolved at once: a report lists them all in one message of `TEXT_BYTES_MAX`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank reports to the others; or, merged, what all of them report."""

    step: int = 0
    number: int
    """The number of the next save."""
    is_at_boundary: bool = True
    """Whether no gradients are being accumulated for a coming update."""
    is_pressed: bool = False
    """Whether so much is still unwritten that another save would hold training up."""
    is_tight: bool = False
    """Whether the next update may have to wait until this save's copies find room in the host buffer."""
    free_bytes: int = 0
    """Free space in the host buffer."""
    failed: tuple[int, ...] = ()
    """Numbers of saves that could not be written."""
    outcomes: dict[int, bool]
    """From the rank that commits: whether each resolved save became visible."""
    has_lost_base: bool = False
    """From the rank that commits: whether a layer that the next commits would inherit was collected."""
    is_mistyped: bool = False
    """Whether *problem* is that client_state holds a type that cannot be kept."""
    problem: str = ""
    """Why this save cannot be made; empty if it can."""


def exchange_reports(exchange: Exchange, report: RankReport) -> RankReport:
    """Send *report* to all ranks; return all reports merged."""
    return _merged(_exchanged(exchange, report))


def agree_on_save(exchange: Exchange, report: RankReport) -> RankReport:
    """
    Make sure that all ranks want the same save and can make it; return all reports merged.

    Raises:
        TypeError: A rank's client_state cannot be kept.
        InvalidInput: A rank has another problem, or gradients are being accumulated.
        Conflict: The ranks are at different steps.
    """
    reports = _exchanged(exchange, report)
    for rank, each in enumerate(reports):
        if each.problem and each.is_mistyped:
            raise TypeError(f"{each.problem} (on rank {rank}); only plain values, tensors and numpy's can be kept")
        if each.problem:
            raise InvalidInput(f"step {report.step} cannot be saved: {each.problem} (on rank {rank})")
    if len({(each.step, each.number) for each in reports}) > 1:
        steps = ", ".join(map(str, sorted({each.step for each in reports})))
        raise Conflict(f"the ranks are not at the same save: they are at step {steps}")
    if not all(each.is_at_boundary for each in reports):
        raise InvalidInput(
            f"step {report.step} cannot be saved: gradients are being accumulated for an update that is still to come",
            hint="save after the engine.step() that updates the parameters",
        )
    return _merged(reports)


def agreed_layers(exchange: Exchange, policy: Policy, due: Callable[[], frozenset[str]]) -> frozenset[str]:
    """
    Return the layers that are *due* under *policy*, the same on every rank.

    Our own policies give every rank the same answer; a user's policy may not, so its answers are compared.

    Raises:
        Conflict: The policy's answers differ.
    """
    if is_ours(policy):
        return due()
    with exchange.together():
        found = due()
    if not exchange.is_same(object_id("\n".join(sorted(found)).encode())):
        raise Conflict(
            f"policy {policy.name!r} chooses different layers on different ranks; nothing is saved",
            hint="let due(save) decide by its argument alone",
        )
    return found


def open_session(exchange: Exchange, repo: Repository) -> str:
    """Agree on a session, the name under which the ranks leave their parts; check that all see the same store."""
    session = exchange.first(secrets.token_hex(16) if exchange.rank == 0 else "")
    with exchange.together():
        if exchange.rank == 0:
            repo.parts.open_session(session)
    with exchange.together():
        if not repo.parts.sees_session(session):
            raise InvalidInput(f"{repo.layout.root} is not the store that rank 0 has under this path")
    return session


def _exchanged(exchange: Exchange, report: RankReport) -> list[RankReport]:
    facts = asdict(report) | {"outcomes": list(report.outcomes.items())}
    problem = facts.pop("problem")
    # The problem comes last, because only it may be truncated. JSON keys are strings, so the outcomes are pairs.
    head = json.dumps(facts)
    assert len(head) < TEXT_BYTES_MAX, "outcomes of so many saves fit"
    return [_parsed(text) for text in exchange.texts(f"{head}\n{problem}")]


def _parsed(text: str) -> RankReport:
    head, _, problem = text.partition("\n")
    facts = json.loads(head)
    return RankReport(**facts | {"outcomes": dict(facts["outcomes"]), "problem": problem})


def _merged(reports: Sequence[RankReport]) -> RankReport:
    return replace(
        reports[0],
        # Only the rank that commits reports outcomes.
        outcomes={number: found for each in reports for number, found in each.outcomes.items()},
        failed=tuple({number for each in reports for number in each.failed}),
        is_pressed=any(each.is_pressed for each in reports),
        is_tight=any(each.is_tight for each in reports),
        free_bytes=min(each.free_bytes for each in reports),
        has_lost_base=any(each.has_lost_base for each in reports),
    )
