"""What ranks report to each other and conclude from it: without any process group."""

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerstore.errors import Conflict, IntegrityError, InvalidInput
from layerstore.live.ranks.agreement import Agreed, RankReport, agree_on_save, exchange_reports
from layerstore.live.ranks.exchange import Exchange, Message, _packed, _unpacked

numbers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8).map(tuple)


class Heard:
    """An exchange in which the others have said *reports* already."""

    def __init__(self, *reports: RankReport) -> None:
        """Let them say so, each to itself."""
        self._messages: list[Message] = []
        for report in reports:
            exchange_reports(cast(Exchange, self), report)

    def all(self, message: Message) -> Sequence[Message]:
        """Return what everybody has said, over the wire and back."""
        self._messages.append(_unpacked(_packed(message), values=len(message.values)))
        return self._messages


def report(*, number: int = 5, step: int = 7, outcomes: dict[int, bool] | None = None, **rest: object) -> RankReport:
    """Return what a rank at ease says."""
    return RankReport(number=number, step=step, outcomes=outcomes or {}, **rest)  # type: ignore[arg-type]  # it checks


def agreed(*reports: RankReport) -> Agreed:
    """Return what the last rank learns from all *reports*."""
    *others, last = reports
    return agree_on_save(cast(Exchange, Heard(*others)), last)


@given(numbers, st.lists(st.floats(allow_nan=False), max_size=5).map(tuple), st.text(max_size=80))
def test_messages_arrive_as_they_were_sent(sent: tuple[int, ...], values: tuple[float, ...], text: str) -> None:
    """Numbers to the last bit; a text up to its first zero at the end."""
    found = _unpacked(_packed(Message(numbers=sent, values=values, text=text)), values=len(values))

    assert found.numbers[: len(sent)] == sent
    assert set(found.numbers[len(sent) :]) <= {0}
    assert found.values == values
    if len(text.encode()) < 240:
        assert found.text == text.rstrip("\0")


def test_a_long_text_is_cut_between_its_signs() -> None:
    """A sign that takes several bytes is there as a whole or not at all."""
    for shift in range(4):
        found = _unpacked(_packed(Message(text="x" * shift + "☃" * 200)), values=0)
        assert found.text.strip("x") == "☃" * len(found.text.strip("x"))
        assert 230 < len(found.text.encode()) <= 240


def test_messages_of_different_models_are_told_apart() -> None:
    """A rank that speaks of more layers than this one saves another model."""
    with pytest.raises(IntegrityError, match="different models"):
        _unpacked(_packed(Message(values=(1.0, 2.0))), values=3)
    assert _packed(Message()).dtype == torch.uint8


def test_all_ranks_learn_what_the_committing_one_knows() -> None:
    """The fates of the newest saves, failures of any rank, and the least of their free memory."""
    facts = agreed(
        report(outcomes={2: True, 3: False, 4: True}, free_bytes=100),
        report(failed=(3, 4), free_bytes=50, is_pressed=True),
    )

    assert {number: facts.outcomes[number] for number in (2, 3, 4)} == {2: True, 3: False, 4: True}
    assert max(facts.outcomes) == 4
    assert facts.failed == {3, 4}
    assert facts.is_pressed
    assert facts.free_bytes == 50


@given(st.dictionaries(st.integers(0, 200), st.booleans(), max_size=40))
def test_the_newest_thirty_two_outcomes_are_told(outcomes: dict[int, bool]) -> None:
    """More saves are never on their way."""
    facts = agreed(report(outcomes=outcomes), report())

    newest = max(outcomes, default=-1)
    assert len(facts.outcomes) == min(32, newest + 1)
    for number, outcome in outcomes.items():
        if number > newest - 32:
            assert facts.outcomes[number] is outcome


def test_ranks_at_different_steps_or_saves_do_not_save() -> None:
    """They would leave parts of different states for one commit."""
    with pytest.raises(Conflict, match="they are at step 7, 8"):
        agreed(report(step=7), report(step=8))
    with pytest.raises(Conflict, match="not at the same save"):
        agreed(report(number=5), report(number=6))


def test_one_rank_off_the_boundary_stops_all() -> None:
    """The rank that is on it hears of it too."""
    with pytest.raises(InvalidInput, match=r"step 7 .* accumulated"):
        agreed(report(is_at_boundary=False), report())


def test_what_one_rank_cannot_keep_stops_all() -> None:
    """A wrong type is a TypeError; anything else that was asked for is wrong input; the first rank's words count."""
    with pytest.raises(TypeError, match=r"client_state\.a is a b\.C \(on rank 0\); only plain"):
        agreed(report(mistyped="client_state.a is a b.C"), report(problem="no such file"))
    with pytest.raises(InvalidInput, match=r"step 7 cannot be saved: no such file \(on rank 1\)"):
        agreed(report(), report(problem="no such file"))
