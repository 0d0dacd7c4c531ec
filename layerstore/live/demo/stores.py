"""
What the demo does with stores and measures of them, without torch.

Every figure is of bytes written, or of arrays compared element by element, in this very run.
"""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from layerstore.composite import Composite
from layerstore.live.demo.training import tag_of
from layerstore.policy import Filter, Keep, Latest, Parity, Policy
from layerstore.store import Store, init, open_store

POLICIES: dict[str, Policy] = {"full": Latest(), "parity": Parity(), "filter": Filter(first=1, last=1)}
"""The policies by name. The model has six blocks: filter's usual two at each end would be most of them."""

DEEPSPEED = "DeepSpeed"
_KINDS = ("master", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The disk space of the same saves, saved in one way."""

    saved_by: str
    """DeepSpeed, or a policy."""
    saves: int
    total_bytes: int
    """Of all files in the checkpoints' folder, or in the store."""
    first_bytes: int
    later_bytes: float
    """The average of all saves after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A composite by a policy over full saves, compared with the run that saved under that policy."""

    policy: str
    step: int
    """The step of its base."""
    steps: dict[int, int]
    """The number of its layers that come from each step."""
    oldest_steps: int | None
    """The age of its oldest layer."""
    layers: int
    same: int
    """Layers with the same version as in the run that saved under the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """A composite for another number of ranks, after DeepSpeed loaded it and saved it again."""

    ranks: int
    tensors: int
    """Whole masters and moments."""
    same: int
    """Those with the same bits as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection did."""

    removed: int
    kept: int
    """Commits of all runs."""
    before_bytes: int
    after_bytes: int
    """Of the store."""
    is_sound: bool
    """Whether every byte that is left was read and verified."""


def size_bytes(folder: Path) -> int:
    """Return the total size of the files below *folder*."""
    return sum((Path(parent) / name).stat().st_size for parent, _, names in os.walk(folder) for name in names)


def usage_of_deepspeed(checkpoints: Path, steps: list[int]) -> Usage:
    """Return the disk space of DeepSpeed's own saves of *steps*."""
    sizes = [size_bytes(checkpoints / tag_of(step)) for step in steps]
    return Usage(
        saved_by=DEEPSPEED,
        saves=len(sizes),
        total_bytes=sum(sizes),
        first_bytes=sizes[0],
        later_bytes=sum(sizes[1:]) / len(sizes[1:]),
    )


def usage_under(name: str, checkpoints: Path, steps: list[int], *, store: Path, run: str) -> Usage:
    """Ingest the saves of *steps* into the new store *store*, under the policy *name*; return the disk space."""
    with init(store) as made:
        new = [made.ingest(checkpoints, run=run, tag=tag_of(step), policy=POLICIES[name]).bytes_new for step in steps]
    return Usage(
        saved_by=name,
        saves=len(new),
        total_bytes=size_bytes(store),
        first_bytes=new[0],
        later_bytes=sum(new[1:]) / len(new[1:]),
    )


def mixture_of(composite: Composite, name: str, *, saved: Path) -> Mixture:
    """Compare *composite*, by the policy *name*, with the store *saved* that was filled under that policy."""
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
    """Return for every layer whether both have the same version: the same weights and moments, bit for bit."""
    found = actual.layers
    return {
        layer: layer in found and found[layer].version == choice.version for layer, choice in expected.layers.items()
    }


def resized(expected: Composite, actual: Composite) -> Resized:
    """Compare masters and moments of two commits for different numbers of ranks, array by array."""
    same = tensors = 0
    for kind in _KINDS:
        ours, theirs = expected.tensors(kind), actual.tensors(kind)
        tensors += len(ours.keys() | theirs.keys())
        for name in ours.keys() & theirs.keys():
            one, other = ours[name], theirs[name]
            same += one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return Resized(ranks=actual.world_size, tensors=tensors, same=same)


def collect(store: Store, keep: Keep) -> Collected:
    """Collect what *keep* does not name, and verify every byte that is left."""
    before = size_bytes(store.path)
    outcome = store.gc(keep, grace_seconds=0)  # nobody else writes here
    verdict = store.verify(read_data=True)
    return Collected(
        removed=len(outcome.removed),
        kept=len(outcome.commits) - len(outcome.removed),
        before_bytes=before,
        after_bytes=size_bytes(store.path),
        is_sound=verdict.ok,
    )
