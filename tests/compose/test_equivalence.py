"""
A policy has one meaning: over full checkpoints it composes what saving under it would have left.

Random histories, each saved twice: whole, and selectively. After every event ``latest`` over the one and the policy
over the other must name the same versions.
"""

import random
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TypedDict, Unpack

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import layerstore
from layerstore import Composite, Filter, Latest, Parity, Store
from layerstore.inspect import LogEntry
from layerstore.policy import Policy
from layerstore.policy.due import Save
from layerstore.tree import Tree
from tests.generated import generate
from tests.report.test_facts import fields_of

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


class How(TypedDict, total=False):
    """What a save may be told besides."""

    rollback: bool
    replace: bool


@dataclass
class Twice:
    """One history, saved whole and selectively."""

    store: Store
    policy: Policy
    folder: Path
    step: int = 0
    content: int = 0
    changed: set[tuple[int, int]] = field(default_factory=set)
    """Attempt and step of what was hidden or replaced below later saves: these go on from what was there."""

    def save(self, *, resumed_from: str | None = None, **how: Unpack[How]) -> None:
        """Save a checkpoint nobody has seen before, of the present step."""
        attempt = self._save(self.step, resumed_from=resumed_from, **how)
        self.changed.discard((attempt, self.step))

    def _save(self, step: int, *, resumed_from: str | None = None, **how: Unpack[How]) -> int:
        self.content += 1
        source = generate(self.folder / str(self.content), layers=4, hidden=4, vocab=4, step=step, seed=self.content)
        for run, policy in ((FULL, Latest()), (SELECTIVE, self.policy)):
            pin = None if resumed_from is None else f"{resumed_from}-{run}"
            attempt = self.store.ingest(source, run=run, policy=policy, resumed_from=pin, **how).attempt
        return attempt

    def go_back(self, share: float) -> None:
        """Train on from an earlier step, and save; a step above all that is visible is no way back."""
        self.step = max(1, int(self.step * share))
        self.save(rollback=self.step <= self.store.compose(FULL).step)

    def resume(self, chance: random.Random) -> None:
        """Train on from a composite of any step that the newest attempt can see, and save."""
        base = chance.choice([entry.step for entry in self.own])
        name = f"mix-{self.content}"
        self.composed(f"{FULL}@{base}").pin(f"{name}-{FULL}")
        self.store.compose(f"{SELECTIVE}@{base}").pin(f"{name}-{SELECTIVE}")
        self.step = base + chance.randrange(1, 4)
        self.save(resumed_from=name)

    def replace(self, chance: random.Random) -> None:
        """Save a step of the newest attempt once more, with other content."""
        entry = chance.choice(self.own)
        self._save(entry.step, replace=True)
        if entry.step < self.own[0].step:
            self.changed.add((entry.attempt, entry.step))

    def drop(self, back: int) -> None:
        """Hide one of the newest commits of the present attempt, but never its last one."""
        if len(self.own) > 1:
            entry = self.own[min(back, len(self.own) - 2)]
            for run in (FULL, SELECTIVE):
                self.store.drop(f"{run}@{entry.step}")
            self.changed.add((entry.attempt, entry.step))
            self.step = max(entry.step, self.step)

    def composed(self, ref: str) -> Composite:
        """Ask the policy over full checkpoints. Saves count a phase from the first one, composites from their base."""
        policy = self.policy
        if isinstance(policy, Parity) and policy.fresh and self.store.show(ref).save_number % 2:
            policy = Parity(fresh="even" if policy.fresh == "odd" else "odd")
        return self.store.compose(ref, policy=policy)

    @property
    def own(self) -> list[LogEntry]:
        """The commits of the newest attempt, newest first."""
        entries = list(self.store.log(FULL))
        newest = max(entry.attempt for entry in entries)
        return sorted((entry for entry in entries if entry.attempt == newest), key=lambda entry: -entry.step)

    def check(self) -> None:
        """
        Compare the two faces of the policy.

        What a selective save had inherited from a commit that was dropped or replaced afterwards, it keeps:
        over full checkpoints that commit is out of reach, and a newer one stands in.
        """
        composed = self.composed(FULL)
        latest = self.store.compose(SELECTIVE)
        assert composed.step == latest.step
        # The attempts that layers were saved in are on no face.
        for ours, theirs in zip(composed._composition.layers, latest._composition.layers, strict=True):
            assert ours.layer == theirs.layer
            if ours.version == theirs.version:
                continue
            origins = [(entry.origin.attempt, entry.origin.step) for entry in (ours, theirs)]
            assert self.changed.intersection(origins), ours.layer
            assert ours.origin.step >= theirs.origin.step


EVENTS = (*["save"] * 6, "skip", "back", "drop", "replace", "resume")


def live(policy: Policy, seed: int, folder: Path) -> None:
    """Let a random history happen, and compare after every event."""
    chance = random.Random(seed)  # nothing secret
    by_number = getattr(policy, "by_number", False)
    with layerstore.init(folder / "store") as store:
        twice = Twice(store, policy, folder / "source", step=1)
        twice.save()
        for _ in range(chance.randrange(2, 14)):
            match chance.choice(EVENTS):
                case "save":
                    twice.step += chance.randrange(1, 4)
                    twice.save()
                case "skip":  # a save that came to nothing: its number is spent
                    twice.step += 1
                    twice.save()
                    twice.drop(0)
                case "back":
                    twice.go_back(chance.random())
                case "replace":
                    twice.replace(chance)
                case "resume":
                    twice.resume(chance)
                case "drop":
                    twice.drop(chance.randrange(3) if by_number else 0)
            twice.check()
        assert store.verify().ok


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(policy=st.sampled_from(POLICIES), seed=st.integers(0, 2**32))
@example(policy=Parity(), seed=2200)  # dropped, something saved below, and saved there again
def test_composing_is_what_saving_would_have_left(policy: Policy, seed: int) -> None:
    """A sample of histories: saves, skipped saves, rollbacks, dropped commits."""
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


# -- checkpoints that are found in any order -----------------------------------------------------------------------

STEPS = (10, 20, 30, 40)
ORDERS = [(40, 10, 20, 30), (30, 10, 40, 20)]
ORDERED_POLICIES: list[Policy] = [Parity(), Parity(fresh="odd"), Filter(first=0, last=1, every=2), Waiting()]


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


def told(store: Store) -> dict[str, object]:
    """Return what a report tells of the same."""
    (run,) = fields_of(store)["runs"]
    keys = ("attempt", "step", "turn", "layers_saved", "oldest_layer", "oldest_steps", "oldest_saves")
    return {key: run["saves"][key] for key in keys} | {key: run[key] for key in ("layers", "composites", "versions")}


def answers(store: Store, step: int) -> list[object]:
    """Return what each policy composes at *step*: where every layer is from, and how old it is."""
    composites = [store.compose(f"sft@{step}", policy=policy) for policy in ORDERED_POLICIES]
    return [[(age.layer, age.step, age.steps, age.saves) for age in each.staleness.layers] for each in composites]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_order_of_arrival_changes_no_composite(
    source: Path, in_order: Store, tmp_path: Path, order: tuple[int, ...]
) -> None:
    """Nor which layers the next save stores; and no layer of a composite is newer than its base."""
    with ingested(source, tmp_path / "store", order) as store:
        assert [answers(store, step) for step in STEPS] == [answers(in_order, step) for step in STEPS]
        assert told(store) == told(in_order)
        assert all(age.saves >= 0 for age in store.compose("sft", policy="parity").staleness.layers if age.saves)
        assert [store.show(f"sft@{step}").turn for step in STEPS] == [0, 1, 2, 3]
        numbers = [store.show(f"sft@{step}").save_number for step in order]
        assert numbers == [0, 1, 2, 3]  # the record's own, which never changes
        after = store.ingest(source / "50", run="sft", policy="parity")
        assert len(after.layers_saved) < len(after.layers)
        ages = store.compose("sft").staleness.layers
        assert {(age.step, age.saves) for age in ages} == {(50, 0), (40, 1)}
        assert not after.notes


def test_a_save_that_a_policy_decided_keeps_its_number(source: Path, tmp_path: Path) -> None:
    """By that number its layers were chosen; full ones before it are counted by step, those after it as they came."""
    with ingested(source, tmp_path / "store", (40, 20)) as store:
        late = store.ingest(source / "30", run="sft", policy="parity")

        assert [store.show(f"sft@{step}").turn for step in (20, 30, 40)] == [0, 2, 1]
        assert late.notes[-1].startswith("sft@30 was filled in below sft@40: policy parity counted it as the newest")
        assert {age.step for age in store.compose("sft@30").staleness.layers} == {20, 30}
        ages = store.compose("sft@40", policy=Parity(fresh="odd")).staleness.layers
        assert {(age.step, age.steps, age.saves) for age in ages} == {(40, 0, 0), (30, 10, None)}
        before = answers(store, 40)[:3]  # of what goes by numbers
        store.ingest(source / "10", run="sft")
        assert [store.show(f"sft@{step}").turn for step in (10, 20, 30, 40)] == [3, 0, 2, 1]
        assert answers(store, 40)[:3] == before


def test_an_attempt_counts_on_from_where_it_left_another(source: Path, tmp_path: Path) -> None:
    """From the place of that step among the others, not from the number that it happened to get."""
    with ingested(source, tmp_path / "store", (40, 10, 20)) as store:
        generate(tmp_path / "30", layers=4, hidden=4, vocab=4, step=30, seed=99)
        back = store.ingest(tmp_path / "30", run="sft", rollback=True)

        assert (back.attempt, store.show("sft").save_number) == (2, 2)
        picks = {name: choice.step for name, choice in store.compose("sft", policy="parity").layers.items()}
        assert (picks["model.layers.0"], picks["model.layers.1"]) == (30, 20)
