"""What each policy says is due, and what a composite of a history is made of."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstore.errors import InvalidInput
from layerstore.layers import anatomy, norms
from layerstore.policy import (
    Drift,
    Filter,
    Latest,
    Parity,
    Policy,
    Save,
    anchored,
    chosen_policy,
    policy_named,
    replay_policy,
)
from layerstore.tree import Tree

LLAMA = ("model.embed_tokens", *(f"model.layers.{index}" for index in range(8)), "model.norm", "lm_head")
GPT2 = ("transformer.wte", "transformer.wpe", *(f"transformer.h.{index}" for index in range(4)), "transformer.ln_f")
VISION = (
    "visual.patch_embed",
    *(f"visual.blocks.{index}" for index in range(2)),
    "visual.merger",
    "model.embed_tokens",
    *(f"model.layers.{index}" for index in range(2)),
    "model.norm",
    "lm_head",
)
T5 = (
    "shared",
    *(f"encoder.block.{index}" for index in range(3)),
    "encoder.final_layer_norm",
    *(f"decoder.block.{index}" for index in range(3)),
    "decoder.final_layer_norm",
    "lm_head",
)


def save(number: int, layers: tuple[str, ...] = LLAMA) -> Save:
    """Return the save *number* of a model."""
    return Save(number=number, layers=layers, ages={})


def blocks(*indices: int) -> set[str]:
    """Return blocks of the Llama."""
    return {f"model.layers.{index}" for index in indices}


# -- anatomy -------------------------------------------------------------------------------------------------------


@pytest.mark.known_fault("llmtailor 2")
@pytest.mark.parametrize(
    ("layers", "stacks", "input_side", "output_side"),
    [
        (LLAMA, 1, ("model.embed_tokens",), ("model.norm", "lm_head")),
        (GPT2, 1, ("transformer.wte", "transformer.wpe"), ("transformer.ln_f",)),
        (T5, 2, ("shared",), ("encoder.final_layer_norm", "decoder.final_layer_norm", "lm_head")),
        (("only", "auxiliary"), 0, ("only", "auxiliary"), ()),
        (VISION, 2, ("visual.patch_embed", "model.embed_tokens"), ("visual.merger", "model.norm", "lm_head")),
    ],
)
def test_a_model_is_taken_apart_by_names_and_order(
    layers: tuple[str, ...], stacks: int, input_side: tuple[str, ...], output_side: tuple[str, ...]
) -> None:
    """Any architecture: stacks of blocks, what lies before them and what after."""
    parts = anatomy(layers)

    assert len(parts.stacks) == stacks
    assert (parts.input_side, parts.output_side) == (input_side, output_side)
    assert {*parts.blocks, *parts.auxiliary} == set(layers)


@pytest.mark.parametrize("name", ["model.norm", "ln_f", "encoder.final_layer_norm", "norm_f", "ln_post", "layernorm"])
def test_norms_are_known_by_name(name: str) -> None:
    """Whatever an architecture calls them."""
    assert norms([name, "lm_head", "embed_tokens", "linear", "abnormal_head"]) == {name}


# -- parity --------------------------------------------------------------------------------------------------------


def test_parity_takes_turns() -> None:
    """Even blocks go with norm and head, odd ones with the embeddings."""
    assert Parity().due(save(4)) == blocks(0, 2, 4, 6) | {"model.norm", "lm_head"}
    assert Parity().due(save(7)) == blocks(1, 3, 5, 7) | {"model.embed_tokens"}


def test_parity_takes_turns_where_no_block_is_numbered() -> None:
    """Or one half would be everything, and the other nothing."""
    layers = ("conv1", "conv2", "norm", "fc")

    assert Parity().due(save(4, layers)) == {"conv1", "norm"}
    assert Parity().due(save(7, layers)) == {"conv2", "fc"}


@given(number=st.integers(0, 1000), fresh=st.sampled_from(["even", "odd"]), layers=st.sampled_from([LLAMA, GPT2, T5]))
def test_two_saves_of_parity_hold_everything_once(number: int, fresh: Any, layers: tuple[str, ...]) -> None:
    """Whatever number the base has: it supplies the half that is to be fresh, and the next one the other half."""
    chosen = anchored(Parity(fresh=fresh), number)
    first, second = (set(chosen.due(save(each, layers))) for each in (number, number + 1))

    assert (next(layer for layer in layers if layer.endswith(".0")) in first) == (fresh == "even")
    assert first | second == set(layers)
    assert not first & second


# -- filter --------------------------------------------------------------------------------------------------------


def test_filter_always_takes_the_ends_and_the_norm() -> None:
    """Of every stack; between its turns, nothing else but what an option adds."""
    assert Filter().due(save(3)) == blocks(0, 1, 6, 7) | {"model.norm"}
    assert {"model.embed_tokens", "lm_head"} <= Filter(aux="always").due(save(1))
    due = Filter(first=1, last=0).due(save(1, T5))
    assert {"encoder.block.0", "decoder.block.0"} <= due
    assert "decoder.block.2" not in due


@given(
    share=st.fractions(Fraction(1, 20), 1, max_denominator=20),
    every=st.integers(1, 7),
    first=st.integers(0, 5),
    last=st.integers(0, 5),
    layers=st.sampled_from([LLAMA, GPT2, T5]),
)
def test_filter_leaves_nobody_out(share: Fraction, every: int, first: int, last: int, layers: tuple[str, ...]) -> None:
    """In as many turns as the share needs, every layer was due; at each turn no more than the share."""
    chosen = Filter(first=first, last=last, share=share, every=every)
    always = chosen.due(save(1, layers)) if every > 1 else None
    seen = set[str]()
    for turn in range(-(-share.denominator // share.numerator)):
        due = chosen.due(save(turn * every, layers))
        seen |= due
        if always is not None:
            assert len(due - always) <= -(-(len(layers) - len(always)) * share.numerator // share.denominator)

    assert seen == set(layers)


# -- names ---------------------------------------------------------------------------------------------------------


def test_policies_are_found_by_name() -> None:
    """With their settings."""
    assert policy_named("parity", {"fresh": "odd"}) == Parity(fresh="odd")
    assert policy_named("latest") == policy_named("full") == Latest()


def test_settings_are_part_of_the_name() -> None:
    """Read as the fields of the policy say, whoever names it; more settings may come beside it."""
    assert policy_named("filter:every=2,share=1/3,aux=always") == Filter(every=2, share=Fraction(1, 3), aux="always")
    assert chosen_policy("drift:budget=2GB,threshold=0.5") == Drift(budget=2 * 10**9, threshold=0.5)
    assert policy_named("filter:every=2", {"first": "1"}) == Filter(every=2, first=1)
    with pytest.raises(InvalidInput, match="every was given twice"):
        policy_named("filter:every=2", {"every": 3})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Filter(every="3"), "Filter: every is '3', but must be a whole number"),  # type: ignore[arg-type]
        (lambda: Filter(share=0.5), "Filter: share is 0.5, but must be a Fraction or a whole number"),  # type: ignore[arg-type]
        (lambda: Drift(budget="2GB"), "Drift: budget is '2GB', but must be a whole number or None"),  # type: ignore[arg-type]
        (lambda: Parity(fresh=1), "Parity: fresh is 1, but must be 'even' or 'odd' or None"),  # type: ignore[arg-type]
        (lambda: policy_named("filter:every=x"), "Filter: every is 'x', but must be a whole number"),
        (lambda: policy_named("drift:threshold="), "Drift: threshold is '', but must be a number"),
        (lambda: policy_named("filter:share=1/0"), "invalid filter share '1/0'"),
        (lambda: policy_named("parity:fresh=both"), "Parity: fresh is 'both', but must be 'even' or 'odd' or None"),
    ],
)
def test_a_setting_of_another_kind_is_refused_in_a_line(make: Callable[[], object], said: str) -> None:
    """From Python and from text alike; a whole number is a share, too."""
    with pytest.raises(InvalidInput) as caught:
        make()

    assert str(caught.value) == said
    assert Filter(share=1).due(save(0)) == set(LLAMA)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("halves", {}), ("parity", {"share": 1}), ("latest", {"fresh": "even"}), ("parity", {"shift": 1})],
)
def test_what_is_not_there_is_refused(name: str, settings: dict[str, object]) -> None:
    """An unknown policy, or a setting that belongs to another."""
    with pytest.raises(InvalidInput):
        policy_named(name, settings)


class Everything:
    """A user's policy."""

    name = "everything"
    parameters: dict[Tree, Tree] = {}  # noqa: RUF012  # as a user would write it

    def due(self, save: Save) -> Collection[str]:
        """Return all."""
        return save.layers


class _Installed:
    """An entry point, as importlib.metadata gives it."""

    name, value = "everything", "package:Everything"

    def load(self) -> type[Everything]:
        return Everything


def test_an_installed_policy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the entry point's name."""
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [_Installed()])

    assert policy_named("everything").due(save(0)) == LLAMA


def test_a_policy_that_names_strangers_is_refused() -> None:
    """Rather than that a typing error saves nothing."""

    class Mistaken(Everything):
        def due(self, save: Save) -> Collection[str]:
            return ["model.layer.0"]

    with pytest.raises(InvalidInput, match=r"model\.layer\.0"):
        replay_policy(Mistaken(), [Past(0)])


# -- replay --------------------------------------------------------------------------------------------------------


@dataclass
class Past:
    """A save of the past."""

    save_number: int
    layer_names: tuple[str, ...] = LLAMA
    is_counted: bool = True

    @property
    def counted(self) -> list[bool]:
        """Of every layer the same."""
        return [self.is_counted] * len(self.layer_names)


class Aged:
    """A policy that looks at ages: what is three saves old, or the oldest."""

    name = "aged"
    parameters: dict[Tree, Tree] = {}  # noqa: RUF012

    def due(self, save: Save) -> Collection[str]:
        """Return what has waited long enough."""
        return [layer for position, layer in enumerate(save.layers) if save.ages.get(layer, 99) >= 2 + position % 3]


class ByNumber(Parity):
    """Parity that says nothing of itself, so that it is replayed from the start."""

    by_number = False


def slow(policy: Policy, history: list[Past]) -> dict[str, int]:
    """Return what *replay* should, by keeping a store of layers in mind and saving into it."""
    stored: dict[str, int] = {}
    numbers: dict[str, int] = {}
    oldest_first = list(reversed(list(enumerate(history))))
    for position, past in oldest_first:
        ages = {layer: past.save_number - number for layer, number in numbers.items()}
        due = set(policy.due(Save(number=past.save_number, layers=past.layer_names, ages=ages)))
        for layer in past.layer_names:
            if layer not in stored or layer in due:
                stored[layer], numbers[layer] = position, past.save_number
    return stored


@given(
    gaps=st.lists(st.integers(1, 4), min_size=1, max_size=25),
    chosen=st.sampled_from([Latest(), Parity(), ByNumber(), Filter(), Filter(first=0, last=1, every=2), Aged()]),
)
def test_replay_gives_what_saving_would_have_left(gaps: list[int], chosen: Policy) -> None:
    """The newest-first shortcut and the walk from the start agree with a store that is filled save by save."""
    history: list[Past] = []
    number = -gaps[0]
    for gap in gaps:
        number += gap
        history.insert(0, Past(number))

    assert replay_policy(chosen, history) == slow(chosen, history)


def test_what_was_saved_before_the_first_update_stands_in_for_nothing() -> None:
    """The first save with moments is full."""
    history = [Past(3), Past(2), Past(1, is_counted=False), Past(0, is_counted=False)]

    assert set(replay_policy(Filter(first=0, last=0, every=100), history).values()) <= {0, 1}
    assert set(replay_policy(Parity(), history).values()) == {0, 1}


def test_a_layer_that_an_older_model_lacks_is_as_old_as_it_can_be() -> None:
    """And no older."""
    history = [Past(3), Past(2), Past(1, LLAMA[1:]), Past(0, LLAMA[1:])]
    found = replay_policy(Filter(every=100), history)

    assert found["model.embed_tokens"] == 1
    assert found["model.layers.3"] == 3


def test_a_replay_by_number_looks_no_further_than_needed() -> None:
    """Two saves of parity hold everything, however long the history is."""
    looked_at = []

    def history() -> Any:
        for number in range(10_000, 0, -1):
            looked_at.append(number)
            yield Past(number)

    replay_policy(Parity(), history())

    assert len(looked_at) <= 3


# -- drift ---------------------------------------------------------------------------------------------------------

SIZES = dict.fromkeys(LLAMA, 100)


def moved(number: int, movements: dict[str, float], *, age: int = 1) -> Save:
    """Return a save at which layers have moved, and the others have not; 500 is nobody's turn in a thousand."""
    return Save(
        number=number,
        layers=LLAMA,
        ages=dict.fromkeys(LLAMA, age),
        movements=dict.fromkeys(LLAMA, 0.0) | movements,
        sizes=SIZES,
    )


@pytest.mark.full
def test_drift_takes_what_moved_worst_first_within_its_budget() -> None:
    """Below the threshold nothing is due, above it as much as the budget allows."""
    movements = {"model.layers.0": 0.2, "model.layers.1": 0.5, "model.layers.2": 0.3, "lm_head": 0.001}

    assert Drift(threshold=0.01, stalest=1000).due(moved(500, movements)) == blocks(0, 1, 2)
    assert Drift(threshold=0.01, stalest=1000, budget=200).due(moved(500, movements)) == blocks(1, 2)
    assert Drift(threshold=0.4, stalest=1000).due(moved(500, movements)) == blocks(1)


def test_a_layer_larger_than_the_budget_saves_up_for_its_turn() -> None:
    """It is due once the saves that it sat out could have paid for it."""
    chosen = Drift(budget=30, stalest=1000)
    movements = {"lm_head": 1.0}

    assert chosen.due(moved(500, movements, age=3)) == set()
    assert chosen.due(moved(500, movements, age=4)) == {"lm_head"}


@pytest.mark.parametrize("budget", [30, 40, 100, 250])
def test_layers_do_not_overspend_together_whatever_their_sizes(budget: int) -> None:
    """All of them move, two are small: the budget holds on average, and each comes again and again."""
    sizes = SIZES | {"model.embed_tokens": 25, "lm_head": 25}
    chosen = Drift(budget=budget, stalest=1000)
    written, spent, times = dict.fromkeys(LLAMA, 0), list[int](), dict.fromkeys(LLAMA, 0)
    for number in range(500, 900):  # nobody's turn
        ages = {layer: number - last for layer, last in written.items()}
        movements = {layer: age / 100 for layer, age in ages.items()}
        due = chosen.due(Save(number=number, layers=LLAMA, ages=ages, movements=movements, sizes=sizes))
        written |= dict.fromkeys(due, number)
        spent.append(sum(sizes[layer] for layer in due))
        times |= {layer: times[layer] + 1 for layer in due}

    assert sum(spent) <= budget * len(spent)
    assert max(spent) <= max(100, budget)
    assert min(times.values()) > max(times.values()) / 2 > 1


def test_drift_goes_by_what_the_loss_notices_where_that_is_known() -> None:
    """Or by the layer's own norm, if it is told to; and there is no third way."""
    save = moved(500, {"model.layers.0": 0.5})
    weighted = replace(save, weighted_movements=dict.fromkeys(LLAMA, 0.0) | {"model.layers.1": 0.5})

    assert Drift(stalest=1000).due(save) == blocks(0)
    assert Drift(stalest=1000).due(weighted) == blocks(1)
    assert Drift(stalest=1000, by="norm").due(weighted) == blocks(0)
    with pytest.raises(InvalidInput, match="by is 'length', but must be 'gradient' or 'norm'"):
        Drift(by="length")  # type: ignore[arg-type]


@pytest.mark.parametrize("movement", [float("nan"), float("inf")])
def test_what_is_no_number_is_due(movement: float) -> None:
    """A layer that has gone wrong has moved."""
    assert Drift(stalest=1000).due(moved(500, {"lm_head": movement})) == {"lm_head"}


def test_no_layer_grows_older_than_the_bound_and_none_waits_for_it_with_all_others() -> None:
    """Without any movement, layers are renewed in turns: never nearly all at one save."""
    chosen = Drift(threshold=1e9, stalest=8)
    written = dict.fromkeys(LLAMA, 0)
    for number in range(1, 200):
        ages = {layer: number - last for layer, last in written.items()}
        assert max(ages.values()) <= chosen.stalest
        due = chosen.due(Save(number=number, layers=LLAMA, ages=ages, movements=dict.fromkeys(LLAMA, 0.0), sizes=SIZES))
        assert len(due) <= 2  # eleven layers in eight turns
        written |= dict.fromkeys(due, number)


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (Drift, {"threshold": float("nan")}),
        (Drift, {"budget": 0}),
        (Drift, {"stalest": 0}),
        (Filter, {"first": -1}),
        (Filter, {"share": Fraction(3, 2)}),
        (Filter, {"every": 0}),
        (Filter, {"aux": "sometimes"}),
        (Parity, {"fresh": "both"}),
    ],
)
def test_settings_out_of_range_are_refused(policy: Any, settings: dict[str, Any]) -> None:
    """With the setting and what it may be."""
    with pytest.raises(InvalidInput) as caught:
        policy(**settings)
    assert caught.value.hint or "but must be" in str(caught.value)


def test_drift_goes_by_what_was_recorded() -> None:
    """Saves that it did not decide were full; what came to nothing in between changes nothing."""
    decided = {0: frozenset({"lm_head"}), 1: frozenset({"model.norm"})}
    found = replay_policy(Drift(), [Past(9), Past(5), Past(0)], recorded=decided.get)

    assert (found["lm_head"], found["model.norm"], found["model.layers.0"]) == (0, 1, 2)
