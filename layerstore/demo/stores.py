"""
The demo's work on stores, and its measurements of them, without torch.

Every figure comes from bytes written, or arrays compared element by element, in this run. The facts have the names that
``layerstore demo --json`` prints.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from layerstore.composite import Composite
from layerstore.demo.training import tag_of
from layerstore.policy import PREDICTABLE, Keep, Policy, policy_named
from layerstore.store import Store, init, open_store

POLICIES: dict[str, Policy] = {
    policy.name: policy_named(policy.name, getattr(policy, "small", None)) for policy in PREDICTABLE
}
"""The policies by name, with settings for the model's six blocks."""

Facts = dict[str, Any]


def size_bytes(folder: Path) -> int:
    """Return the total size of the files below *folder*."""
    return sum((Path(parent) / name).stat().st_size for parent, _, names in os.walk(folder) for name in names)


def usage_of_deepspeed(checkpoints: Path, steps: list[int]) -> Facts:
    """Return the disk space of DeepSpeed's own saves of *steps*."""
    sizes = [size_bytes(checkpoints / tag_of(step)) for step in steps]
    return _usage("DeepSpeed", sizes, total_bytes=sum(sizes))


def usage_under(name: str, checkpoints: Path, steps: list[int], *, store: Path, run: str) -> Facts:
    """Ingest the saves of *steps* into the new store *store*, under the policy *name*; return the disk space."""
    with init(store) as made:
        new = ingest_under(name, checkpoints, steps, store=made, run=run)
    return _usage(name, new, total_bytes=size_bytes(store))


def ingest_under(name: str, checkpoints: Path, steps: list[int], *, store: Store, run: str) -> list[int]:
    """Ingest the saves of *steps* as *run*, under the policy *name*; return the bytes that each added."""
    return [store.ingest(checkpoints, run=run, tag=tag_of(step), policy=POLICIES[name]).bytes_new for step in steps]


def _usage(saved_by: str, sizes: list[int], *, total_bytes: int) -> Facts:
    first, *later = sizes
    return {
        "saved_by": saved_by,
        "saves": len(sizes),
        "total_bytes": total_bytes,
        "first_bytes": first,
        "later_bytes": sum(later) / len(later),
    }


def mixture_of(composite: Composite, name: str, *, saved: Path) -> Facts:
    """Compare *composite*, made by the policy *name*, with the store *saved*, which was filled under that policy."""
    with open_store(saved) as other:
        same = same_layers(other.compose(f"{composite.run}@{composite.step}"), composite)
    steps = Counter(choice.step for choice in composite.layers.values())
    return {
        "policy": name,
        "step": composite.step,
        "steps": dict(sorted(steps.items(), reverse=True)),
        "oldest_steps": composite.staleness.oldest.steps,
        "layers": len(same),
        "same": sum(same.values()),
    }


def same_layers(expected: Composite, actual: Composite) -> dict[str, bool]:
    """Return for every layer whether both have the same version: the same weights and moments, bit for bit."""
    found = actual.layers
    return {
        layer: layer in found and found[layer].version == choice.version for layer, choice in expected.layers.items()
    }


def resized(expected: Composite, actual: Composite) -> Facts:
    """Compare masters and moments of two commits for different numbers of ranks, array by array."""
    same = tensors = 0
    for kind in ("master", "optimizer"):
        ours, theirs = expected.tensors(kind), actual.tensors(kind)
        tensors += len(ours.keys() | theirs.keys())
        for name in ours.keys() & theirs.keys():
            one, other = ours[name], theirs[name]
            same += one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return {"ranks": actual.world_size, "tensors": tensors, "same": same}


def collect(store: Store, keep: Keep, *, runs: list[str]) -> Facts:
    """Remove the commits of *runs* that *keep* does not name, and verify every byte that is left."""
    before = size_bytes(store.path)
    outcome = store.gc(keep, runs=runs, grace_seconds=0)  # nobody else writes here
    verdict = store.verify(read_data=True)
    return {
        "removed": len(outcome.removed),
        "kept": len(outcome.commits) - len(outcome.removed),
        "before_bytes": before,
        "after_bytes": size_bytes(store.path),
        "is_sound": verdict.ok,
    }
