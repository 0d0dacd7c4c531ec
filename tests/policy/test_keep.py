"""Which commits rules keep: each rule alone, several together, and what is not a rule."""

from datetime import timedelta
from typing import Any

import pytest

from layerstore import Keep
from layerstore.errors import InvalidInput
from layerstore.policy import Best, Candidate, duration

DAY_NS = 86_400 * 10**9


def candidates(*steps: int, left: tuple[int, ...] = (), **metrics: dict[int, float]) -> list[Candidate]:
    """Return commits of *steps*, newest first, a day apart; those that are *left* are not in the history."""
    return [
        Candidate(
            id=str(step),
            step=step,
            time_ns=-index * DAY_NS,
            is_in_history=step not in left,
            metrics={name: values[step] for name, values in metrics.items() if step in values},
        )
        for index, step in enumerate(sorted(steps, reverse=True))
    ]


def kept(keep: Keep, of: list[Candidate]) -> set[int]:
    """Return the steps that *keep* keeps."""
    return {int(name) for name, reasons in keep.reasons(of, now_ns=0).items() if reasons}


def test_without_a_rule_everything_stays() -> None:
    """Then a collection only takes what nothing needs."""
    assert kept(Keep(), candidates(1, 2, 3, left=(2,))) == {1, 2, 3}
    assert not Keep().has_rules


@pytest.mark.parametrize(
    ("keep", "steps"),
    [
        (Keep(last=1), [500]),
        (Keep(last=2), [400, 500]),
        (Keep(every=200), [200, 400, 500]),
        (Keep(within="36h"), [400, 500]),
        (Keep(within=timedelta(hours=1)), [500]),
        (Keep(best="eval_loss"), [150, 500]),
        (Keep(best="eval_loss:2"), [150, 200, 500]),
        (Keep(best="eval_loss:1:max"), [100, 500]),
        (Keep(best="accuracy"), [200, 500]),
        (Keep(last=1, every=200, best="eval_loss"), [150, 200, 400, 500]),
    ],
    ids=str,
)
def test_each_rule_names_its_own(keep: Keep, steps: list[int]) -> None:
    """What any of them names stays, and the newest whatever they say."""
    loss = {100: 3.0, 150: 0.5, 200: 1.0, 400: float("nan")}
    accuracy = {100: 0.1, 200: 0.7}

    assert kept(keep, candidates(100, 150, 200, 400, 500, eval_loss=loss, accuracy=accuracy)) == set(steps)


def test_of_equal_values_the_newest_is_best() -> None:
    """It has been trained for longer."""
    assert kept(Keep(best="loss"), candidates(1, 2, 3, loss={1: 0.5, 2: 0.5, 3: 0.9})) == {2, 3}


def test_what_training_has_left_is_kept_for_its_age_or_its_value_alone() -> None:
    """Counting is along the newest attempt's history; the best commit is the best, wherever it is."""
    of = candidates(100, 200, 300, 400, left=(300, 200), loss={300: 0.1, 400: 1.0})

    assert kept(Keep(last=3), of) == {100, 400}
    assert kept(Keep(every=100), of) == {100, 400}
    assert kept(Keep(within="30h"), of) == {300, 400}
    assert kept(Keep(best="loss"), of) == {300, 400}


@pytest.mark.fault(56)
def test_times_in_the_future_are_young() -> None:
    """Clocks disagree."""
    ahead = Candidate(id="9", step=9, time_ns=5 * DAY_NS, is_in_history=False)

    assert kept(Keep(within="1h"), [ahead]) == {9}


@pytest.mark.parametrize(
    ("text", "best"),
    [
        ("eval_loss", Best(metric="eval_loss", count=1, direction="min")),
        ("f1:3", Best(metric="f1", count=3, direction="max")),
        ("perplexity", Best(metric="perplexity", count=1, direction="min")),
        ("val/PPL", Best(metric="val/PPL", count=1, direction="min")),
        ("eval_rewards:2", Best(metric="eval_rewards", count=2, direction="max")),
        ("grad_norm:min", Best(metric="grad_norm", count=1, direction="min")),
        ("eval_loss:2:max", Best(metric="eval_loss", count=2, direction="max")),
        ("eval:f1:2:max", Best(metric="eval:f1", count=2, direction="max")),
    ],
)
def test_how_the_best_are_named(text: str, best: Best) -> None:
    """By usual names it is known whether small or large is best; in full, as it is printed, any metric can be named."""
    assert Best.parse(text) == Best.parse(str(best)) == best


@pytest.mark.parametrize("metric", ["grad_norm", "epoch", "lossless"])
def test_a_metric_that_may_be_best_either_way(metric: str) -> None:
    """A guess would keep the worst commits and remove the best."""
    with pytest.raises(InvalidInput, match=f"is a small or a large '{metric}' best") as caught:
        Best.parse(f"{metric}:2")

    assert caught.value.hint == f"{metric}:2:min, or {metric}:2:max"


@pytest.mark.parametrize("text", ["", ":3", "loss:0", "loss:min:1", "loss:1:min:max"])
def test_what_does_not_name_the_best(text: str) -> None:
    """One line says how it is written."""
    with pytest.raises(InvalidInput, match="does not name the best"):
        Keep(best=text)


@pytest.mark.parametrize("text", ["", "14", "d", "-1d", "1y", "2 weeks", "9999999999999w"])
def test_what_is_no_duration(text: str) -> None:
    """One line says what is."""
    with pytest.raises(InvalidInput, match="is not a duration"):
        duration(text)


@pytest.mark.parametrize(
    "rule", [{"last": 0}, {"last": -1}, {"every": 0}, {"last": True}, {"every": 1.5}, {"drop_optimizer_older_than": 0}]
)
def test_what_is_no_number(rule: dict[str, Any]) -> None:
    """Zero would mean to keep nothing, which nobody may ask by accident."""
    with pytest.raises(InvalidInput, match="cannot be "):
        Keep(**rule)
