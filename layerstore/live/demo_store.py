"""
What the demo does with stores, and what it measures of them: no training, and no torch.

Every figure is of bytes that were written, or of arrays that were compared element by element, in the run at hand.
"""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from layerstore.composite import Composite
from layerstore.live.demo_training import tag_of
from layerstore.policy import Filter, Latest, Parity, Policy
from layerstore.policy.keep import Keep
from layerstore.store import Store, init, open_store

POLICIES: dict[str, Policy] = {"full": Latest(), "parity": Parity(), "filter": Filter(first=1, last=1)}
"""By what the demo calls them. The model has six blocks, of which filter's own two at each end would be most."""

DEEPSPEED = "DeepSpeed"
_KINDS = ("master", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What the same saves took, in one way of saving."""

    saved_by: str
    """DeepSpeed, or a policy."""
    saves: int
    total_bytes: int
    """Of all files: a folder of checkpoints, or a whole store."""
    first_bytes: int
    later_bytes: float
    """A save after the first, on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A composite by a policy over full saves, beside what saving under that policy had left."""

    policy: str
    step: int
    """Of its base."""
    steps: dict[int, int]
    """How many of its layers come from which step."""
    oldest_steps: int | None
    """How old its oldest layer is."""
    layers: int
    same: int
    """Layers that have the very version that the run saved under the policy has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """A composite for another number of ranks, as DeepSpeed loaded it and saved it again."""

    ranks: int
    tensors: int
    """Masters and moments, each whole."""
    same: int
    """Those with the same bits as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection did."""

    removed: int
    kept: int
    """Commits, those of all runs."""
    before_bytes: int
    after_bytes: int
    """Of the store."""
    is_sound: bool
    """Whether every byte of what is left was read and found to be as it was written."""


def size_bytes(folder: Path) -> int:
    """Return the bytes that the files below *folder* have together."""
    return sum((Path(parent) / name).stat().st_size for parent, _, names in os.walk(folder) for name in names)


def saved_as_they_are(checkpoints: Path, steps: list[int]) -> Saved:
    """Return what DeepSpeed's own saves of *steps* took."""
    sizes = [size_bytes(checkpoints / tag_of(step)) for step in steps]
    return Saved(
        saved_by=DEEPSPEED,
        saves=len(sizes),
        total_bytes=sum(sizes),
        first_bytes=sizes[0],
        later_bytes=sum(sizes[1:]) / len(sizes[1:]),
    )


def saved_under(name: str, checkpoints: Path, steps: list[int], *, store: Path, run: str) -> Saved:
    """Make the store *store* and ingest the saves of *steps* under the policy called *name*."""
    with init(store) as made:
        new = [made.ingest(checkpoints, run=run, tag=tag_of(step), policy=POLICIES[name]).bytes_new for step in steps]
    return Saved(
        saved_by=name,
        saves=len(new),
        total_bytes=size_bytes(store),
        first_bytes=new[0],
        later_bytes=sum(new[1:]) / len(new[1:]),
    )


def mixture_of(composite: Composite, name: str, *, saved: Path) -> Mixture:
    """Hold *composite*, by the policy called *name*, against the store *saved* that was filled under it."""
    with open_store(saved) as other:
        expected = other.compose(f"{composite.run}@{composite.step}").layers
    chosen = composite.layers
    return Mixture(
        policy=name,
        step=composite.step,
        steps=dict(sorted(Counter(choice.step for choice in chosen.values()).items(), reverse=True)),
        oldest_steps=composite.staleness.oldest.steps,
        layers=len(expected),
        same=sum(layer in chosen and chosen[layer].version == choice.version for layer, choice in expected.items()),
    )


def same_layers(expected: Composite, actual: Composite) -> dict[str, bool]:
    """Return of every layer whether both have the same version: the same weights and moments, to the last bit."""
    found = actual.layers
    return {
        layer: layer in found and found[layer].version == choice.version for layer, choice in expected.layers.items()
    }


def resized(expected: Composite, actual: Composite) -> Resized:
    """Compare masters and moments of two commits that were cut for different numbers of ranks, array by array."""
    same = tensors = 0
    for kind in _KINDS:
        ours, theirs = expected.tensors(kind), actual.tensors(kind)
        tensors += len(ours.keys() | theirs.keys())
        for name in ours.keys() & theirs.keys():
            one, other = ours[name], theirs[name]
            same += one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return Resized(ranks=actual.world_size, tensors=tensors, same=same)


def collect(store: Store, keep: Keep) -> Collected:
    """Remove what *keep* does not name, and read every byte of what is left."""
    before = size_bytes(store.path)
    outcome = store.gc(keep, grace_seconds=0)  # nobody else has ever written here
    verdict = store.verify(read_data=True)
    return Collected(
        removed=len(outcome.removed),
        kept=len(outcome.commits) - len(outcome.removed),
        before_bytes=before,
        after_bytes=size_bytes(store.path),
        is_sound=verdict.ok,
    )
