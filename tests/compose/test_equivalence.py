"""
A policy has one meaning: over full checkpoints it composes what saving under it would have left.

Random histories, each saved twice: whole, and selectively. After every event ``latest`` over the one and the policy
over the other must name the same versions.
"""

import random
import tempfile
from collections.abc import Collection
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
