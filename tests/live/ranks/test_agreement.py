"""What ranks report to each other and conclude from it, without a process group."""

import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerstore.errors import Conflict, InvalidInput, StorageIO
from layerstore.live.ranks import exchange
from layerstore.live.ranks.exchange import (
    SAVES_MAX,
    TEXT_BYTES_MAX,
    Exchange,
    RankReport,
    agree_on_save,
    as_text,
    exchange_reports,
)


class Heard(Exchange):
    """An exchange that speaks for all ranks: each call is the next rank's, and hears those before it."""

    def __init__(self) -> None:
        self.rank = 0
        self._tensors: list[torch.Tensor] = []

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        self._tensors.append(mine)
        return self._tensors


def report(*, number: int = 5, step: int = 7, outcomes: dict[int, bool] | None = None, **rest: object) -> RankReport:
    """Return the report of a rank that is ready to save."""
    return RankReport(number=number, step=step, outcomes=outcomes or {}, **rest)  # type: ignore[arg-type]  # it checks


def agreed(*reports: RankReport) -> RankReport:
    """Return what the last rank learns from all *reports*."""
    ranks = Heard()
    for each in reports[:-1]:
        exchange_reports(ranks, each)
    return agree_on_save(ranks, reports[-1])


class Kept(Heard):
    """An exchange whose other ranks come only once the log has a line."""

    def __init__(self, lines: Sequence[object]) -> None:
        super().__init__()
        self._lines = lines

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        while not self._lines:
            time.sleep(0.01)
        return super()._gathered(mine)


def test_a_rank_that_saves_alone_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where only rank 0 calls save, it waits for ever; after a while a line says for whom."""
    monkeypatch.setattr(exchange, "_LATE_SECONDS", 0.01)
    agree_on_save(Kept(caplog.records), report())
    assert caplog.messages == ["rank 0 has waited 0 s in save() for the other ranks: every rank must call it"]


@given(st.text(max_size=80))
def test_texts_arrive_as_they_were_sent(text: str) -> None:
    """A short text arrives whole, but for zeros at its end."""
    assert Heard().texts(text) == [text.rstrip("\0")]


def test_a_long_text_is_cut_between_characters() -> None:
    """A character of several bytes arrives whole or not at all."""
    for shift in range(4):
        (found,) = Heard().texts("x" * shift + "☃" * TEXT_BYTES_MAX)
        assert found.strip("x") == "☃" * len(found.strip("x"))
        assert TEXT_BYTES_MAX - 4 < len(found.encode()) <= TEXT_BYTES_MAX


def test_all_ranks_learn_what_any_rank_knows() -> None:
    """The outcomes of saves, the failures of any rank, and the smallest free memory."""
    facts = agreed(
        report(outcomes={2: True, 3: False, 4: True}, free_bytes=100, retries=2),
        report(failed=(3, 4), free_bytes=50, is_pressed=True, retries=3),
    )

    assert facts.outcomes == {2: True, 3: False, 4: True}
    assert set(facts.failed) == {3, 4}
    assert facts.is_pressed
    assert facts.free_bytes == 50
    assert facts.retries == 5


def test_outcomes_of_as_many_saves_as_may_be_open_fit_into_a_report() -> None:
    """With numbers of a long training, and a problem whose end is cut."""
    numbers = range(10**7, 10**7 + SAVES_MAX)
    outcomes = dict.fromkeys(numbers, False)
    large = report(
        outcomes=outcomes, failed=tuple(numbers), step=10**18, free_bytes=10**12, precision="moments8", retries=10**6
    )

    assert agreed(large, large).outcomes == large.outcomes
    with pytest.raises(InvalidInput, match="problem problem"):
        agreed(report(step=10**18, problem=as_text(InvalidInput("problem " * 1000))), large)


def test_ranks_at_different_steps_or_saves_do_not_save() -> None:
    """They would leave parts of different states for one commit."""
    with pytest.raises(Conflict, match="save 5 at step 7, save 5 at step 8"):
        agreed(report(step=7), report(step=8))
    with pytest.raises(Conflict, match="the ranks are at different saves: save 5 at step 7, save 6 at step 7"):
        agreed(report(number=5), report(number=6))


def test_ranks_that_want_different_precisions_do_not_save() -> None:
    """One commit has one precision."""
    with pytest.raises(Conflict, match="the ranks save step 7 in different precisions: delta8, exact"):
        agreed(report(precision="exact"), report(precision="delta8"))


def test_one_rank_off_the_boundary_stops_all() -> None:
    """The ranks at a boundary raise as well."""
    with pytest.raises(InvalidInput, match=r"step 7 .* accumulated"):
        agreed(report(is_at_boundary=False), report())


def test_what_one_rank_cannot_keep_stops_all() -> None:
    """A wrong type is a TypeError, everything else InvalidInput; the lowest rank's problem is reported."""
    no_file = report(problem=as_text(InvalidInput("no such file", hint="give another")))
    mistyped = report(problem=as_text(TypeError("client_state.a is a b.C")), is_mistyped=True)
    with pytest.raises(TypeError, match=r"client_state\.a is a b\.C \(on rank 0\); only plain"):
        agreed(mistyped, no_file)
    with pytest.raises(InvalidInput, match=r"step 7 cannot be saved: no such file \(on rank 1\)") as told:
        agreed(report(), no_file)
    assert told.value.hint == "give another"


def test_an_error_of_one_rank_is_an_error_of_its_class_on_all() -> None:
    """The other ranks' message names the rank, and their hint is the failed rank's."""
    ranks = Heard()
    with pytest.raises(StorageIO, match="disk"), ranks.raise_on_all():
        raise StorageIO("the disk is gone", errno=5, filename="store", hint="plug it in")
    with pytest.raises(StorageIO, match=r"rank 0: .*the disk is gone") as told, ranks.raise_on_all():
        pass
    assert told.value.hint == "plug it in"
