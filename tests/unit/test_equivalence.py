"""
A policy has one meaning: over full checkpoints it composes what saving under it would have left.

Random histories, each saved twice: whole, and selectively. After every event ``latest`` over the one and the policy
over the other must name the same versions.
"""

import random
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layerstore
from layerstore import Filter, Latest, Parity, Store
from layerstore.policy import Policy
from layerstore.policy.due import Save
from layerstore.tree import Tree
from tests.bench.generate import generate

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
    step: int = 0
    content: int = 0
    dropped: set[tuple[int, int]] = field(default_factory=set)
    """Attempt and step of what was hidden."""

    def save(self, *, rollback: bool = False) -> None:
        """Save a checkpoint nobody has seen before, of the present step."""
        self.content += 1
        source = generate(
            self.folder / str(self.content), layers=4, hidden=4, vocab=4, step=self.step, seed=self.content
        )
        for run, policy in ((FULL, Latest()), (SELECTIVE, self.policy)):
            attempt = self.store.ingest(source, run=run, policy=policy, rollback=rollback).attempt
        self.dropped.discard((attempt, self.step))

    def go_back(self, share: float) -> None:
        """Train on from an earlier step, and save; a step above all that is visible is no way back."""
        self.step = max(1, int(self.step * share))
        self.save(rollback=self.step <= self.store.compose(FULL).step)

    def drop(self, back: int) -> None:
        """Hide one of the newest commits of the present attempt, but never its last one."""
        own = [entry for entry in self.store.log(FULL) if entry.attempt == self.attempt]
        if len(own) > 1:
            entry = own[min(back, len(own) - 2)]
            for run in (FULL, SELECTIVE):
                self.store.drop(f"{run}@{entry.step}")
            self.dropped.add((entry.attempt, entry.step))
            self.step = max(entry.step, self.step)

    @property
    def attempt(self) -> int:
        """The newest."""
        return max(entry.attempt for entry in self.store.log(FULL))

    def check(self) -> None:
        """
        Compare the two faces of the policy.

        What a selective save had inherited from a commit that was dropped afterwards, it keeps:
        over full checkpoints that commit is out of reach, and a newer one stands in.
        """
        composed = self.store.compose(FULL, policy=self.policy)
        latest = self.store.compose(SELECTIVE)
        assert composed.step == latest.step
        entries = latest._composition.layers  # the attempts that layers were saved in are on no face
        kept = {entry.layer for entry in entries if (entry.origin.attempt, entry.origin.step) in self.dropped}
        for layer, choice in latest.layers.items():
            if layer in kept:
                assert composed.layers[layer].step >= choice.step
            else:
                assert composed.layers[layer].version == choice.version, layer


EVENTS = ("save", "save", "save", "save", "skip", "back", "drop")


def live(policy: Policy, seed: int, folder: Path) -> None:
    """Let a random history happen, and compare after every event."""
    chance = random.Random(seed)  # nothing secret
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
                case "drop":
                    # What looks at ages would have decided otherwise from there on; no record says what it knew.
                    twice.drop(chance.randrange(3) if getattr(policy, "by_number", False) else 0)
            twice.check()
        assert store.verify().ok


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(policy=st.sampled_from(POLICIES), seed=st.integers(0, 2**32))
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
