"""Checkpoints are found in any order: composites over full saves are what they are in the order of the steps."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore import Filter, Parity, Store
from layerstore.policy import Policy
from tests.compose.test_equivalence import Waiting
from tests.generated import generate

STEPS = (10, 20, 30, 40)
NUMBERS = {(40, 10, 20, 30): [0, 0, 1, 2], (30, 10, 40, 20): [0, 0, 1, 1]}
"""Orders of arrival, and the number that each save gets: one more than that of the save below it."""
POLICIES: list[Policy] = [Parity(), Parity(fresh="odd"), Filter(first=0, last=1, every=2), Waiting()]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint of each step, and one that comes after them."""
    folder = tmp_path_factory.mktemp("source")
    for step in (*STEPS, 50):
        generate(folder / str(step), layers=4, hidden=4, vocab=4, step=step, seed=step)
    return folder


def ingested(source: Path, store: Path, order: tuple[int, ...]) -> Store:
    """Return a new store with the checkpoints in *order*."""
    made = layerstore.init(store)
    for step in order:
        made.ingest(source / str(step), run="sft")
    return made


@pytest.fixture(scope="module")
def in_order(source: Path) -> Iterator[Store]:
    """Return a store with all of them in the order of their steps."""
    with ingested(source, source / "in-order", STEPS) as made:
        yield made


def answers(store: Store, step: int) -> list[object]:
    """Return what each policy composes at *step*: where every layer is from."""
    composites = [store.compose(f"sft@{step}", policy=policy) for policy in POLICIES]
    return [[(age.layer, age.step, age.steps) for age in each.staleness.layers] for each in composites]


@pytest.mark.parametrize("order", NUMBERS, ids=str)
def test_the_order_of_arrival_changes_no_composite(
    source: Path, in_order: Store, tmp_path: Path, order: tuple[int, int, int, int]
) -> None:
    """Nor which layers the next save stores; and no layer of a composite is newer than its base."""
    with ingested(source, tmp_path / "store", order) as store:
        assert [answers(store, step) for step in STEPS] == [answers(in_order, step) for step in STEPS]
        assert all(age.saves >= 0 for age in store.compose("sft", policy="parity").staleness.layers if age.saves)
        assert [store.show(f"sft@{step}").save_number for step in order] == NUMBERS[order]
        after = store.ingest(source / "50", run="sft", policy="parity")
        assert len(after.layers_saved) < len(after.layers)
        ages = store.compose("sft").staleness.layers
        assert {(age.step, age.saves) for age in ages} == {(50, 0), (40, 1)}
        assert not after.notes


def test_a_save_that_a_policy_decided_keeps_its_number(source: Path, tmp_path: Path) -> None:
    """By that number its layers were chosen, and later saves inherit nothing from it."""
    with ingested(source, tmp_path / "store", (40, 20)) as store:
        late = store.ingest(source / "30", run="sft", policy="parity")

        assert [store.show(f"sft@{step}").save_number for step in (20, 30, 40)] == [0, 1, 0]
        assert late.notes[-1].startswith("sft@30 was filled in below sft@40: policy parity counted it as the newest")
        assert {age.step for age in store.compose("sft@30").staleness.layers} == {20, 30}


def test_an_attempt_counts_on_from_where_it_left_another(source: Path, tmp_path: Path) -> None:
    """From the place of that step among the others, not from the number that it happened to get."""
    with ingested(source, tmp_path / "store", (40, 10, 20)) as store:
        generate(tmp_path / "30", layers=4, hidden=4, vocab=4, step=30, seed=99)
        back = store.ingest(tmp_path / "30", run="sft", rollback=True)

        assert (back.attempt, store.show("sft").save_number) == (2, 2)
        picks = {name: choice.step for name, choice in store.compose("sft", policy="parity").layers.items()}
        assert (picks["model.layers.0"], picks["model.layers.1"]) == (30, 20)
