"""
A policy has one meaning: over full checkpoints it composes what saving under it would have left, in any order of steps.

Random histories, each saved twice: whole, and selectively. After every event ``latest`` over the one and the policy
over the other must name the same versions.
"""

import random
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layerstore
from layerstore import Filter, Latest, Parity, Store
from layerstore.policy import Policy, Save
from layerstore.tree import Tree
from tests.generated import generate

FULL, SELECTIVE = "full", "selective"


class Waiting:
    """A user's policy that looks at ages: layers take turns by how long they have waited."""

    name = "waiting"
    parameters: dict[Tree, Tree] = {}  # noqa: RUF012  # as a user would write it

    def due(self, save: Save) -> Collection[str]:
        """Return what has waited long enough, each layer with another patience."""
        return [layer for index, layer in enumerate(save.layers) if save.ages.get(layer, 99) >= 1 + index % 3]


POLICIES: list[Policy] = [
    Latest(),
    Parity(),
    Parity(fresh="odd"),
    Filter(first=1, last=1, every=2),
    Filter(first=0, last=0, share=Fraction(1, 3), every=3, aux="always"),
    Waiting(),
]


@dataclass
class Twice:
    """One history, saved whole and selectively."""

    store: Store
    policy: Policy
    folder: Path
    step: int = 1
    content: int = 0

    def save(self, *, rollback: bool = False) -> None:
        """Save a checkpoint nobody has seen before, of the present step."""
        self.content += 1
        folder = self.folder / str(self.content)
        source = generate(folder, layers=4, hidden=4, vocab=4, step=self.step, seed=self.content)
        for run, policy in ((FULL, Latest()), (SELECTIVE, self.policy)):
            self.store.ingest(source, run=run, policy=policy, rollback=rollback)

    def go_back(self, share: float) -> None:
        """Train on from an earlier step, and save."""
        self.step = max(1, int(self.step * share))
        self.save(rollback=True)

    def check(self) -> None:
        """Compare the two faces of the policy; parity's with the half fresh that the newest save has by its turn."""
        policy = self.policy
        if isinstance(policy, Parity):
            first = policy.fresh == "odd"
            policy = Parity(fresh="odd" if (self.store.show(FULL).save_number + first) % 2 else "even")
        composed, latest = self.store.compose(FULL, policy=policy), self.store.compose(SELECTIVE)

        assert composed.step == latest.step
        assert [(name, choice.version) for name, choice in composed.layers.items()] == [
            (name, choice.version) for name, choice in latest.layers.items()
        ]


def live(policy: Policy, seed: int, folder: Path) -> None:
    """Let a random history happen, and compare after every event."""
    chance = random.Random(seed)  # nothing secret
    with layerstore.init(folder / "store") as store:
        twice = Twice(store, policy, folder / "source")
        twice.save()
        for _ in range(chance.randrange(2, 14)):
            if chance.randrange(4):
                twice.step += chance.randrange(1, 4)
                twice.save()
            else:
                twice.go_back(chance.random())
            twice.check()
        assert store.verify().ok


@pytest.mark.full
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(policy=st.sampled_from(POLICIES), seed=st.integers(0, 2**32))
def test_composing_is_what_saving_would_have_left(policy: Policy, seed: int) -> None:
    """A sample of histories of saves and rollbacks."""
    with tempfile.TemporaryDirectory() as folder:
        live(policy, seed, Path(folder))


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.name} {sorted(policy.parameters)}")
@pytest.mark.parametrize("block", range(5))
def test_composing_is_what_saving_would_have_left_in_many_histories(policy: Policy, block: int) -> None:
    """Forty histories of each policy, five times."""
    for seed in range(40 * block, 40 * block + 40):
        with tempfile.TemporaryDirectory() as folder:
            live(policy, seed, Path(folder))


# -- checkpoints may be found in any order ---------------------------------------------------------------------------

STEPS = (10, 20, 30, 40)
NUMBERS = {(40, 10, 20, 30): [0, 0, 1, 2], (30, 10, 40, 20): [0, 0, 1, 1]}
"""Orders of arrival, and the number that each save gets: one more than that of the save below it."""
ORDERED: list[Policy] = [Parity(), Parity(fresh="odd"), Filter(first=0, last=1, every=2), Waiting()]


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
    composites = [store.compose(f"sft@{step}", policy=policy) for policy in ORDERED]
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


def test_saves_in_another_order_than_their_steps_are_not_counted(source: Path, tmp_path: Path) -> None:
    """The newest step went in first: how many saves lie between is not known."""
    with ingested(source, tmp_path / "store", (40, 20, 30)) as store:
        ages = store.compose("sft", policy="parity").staleness.layers

        assert {(age.step, age.steps, age.saves) for age in ages} == {(40, 0, 0), (30, 10, None)}


def test_a_save_that_a_policy_decided_keeps_its_number(source: Path, tmp_path: Path) -> None:
    """By that number its layers were chosen, and later saves inherit nothing from it."""
    with ingested(source, tmp_path / "store", (40, 20)) as store:
        late = store.ingest(source / "30", run="sft", policy="parity")

        assert [store.show(f"sft@{step}").save_number for step in (20, 30, 40)] == [0, 1, 0]
        assert late.notes[-1].startswith("sft@30 was ingested after sft@40: policy parity counted it as the newest")
        assert {age.step for age in store.compose("sft@30").staleness.layers} == {20, 30}


def test_an_attempt_counts_on_from_where_it_left_another(source: Path, tmp_path: Path) -> None:
    """From the place of that step among the others, not from the number that it happened to get."""
    with ingested(source, tmp_path / "store", (40, 10, 20)) as store:
        generate(tmp_path / "30", layers=4, hidden=4, vocab=4, step=30, seed=99)
        back = store.ingest(tmp_path / "30", run="sft", rollback=True)

        assert (back.attempt, store.show("sft").save_number) == (2, 2)
        picks = {name: choice.step for name, choice in store.compose("sft", policy="parity").layers.items()}
        assert (picks["model.layers.0"], picks["model.layers.1"]) == (30, 20)
