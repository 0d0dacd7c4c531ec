"""
The optimizer's own count of updates, one per sub-group: an int in DeepSpeed's optimizers, a scalar tensor in torch's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from struct import Struct

from layerstore.errors import LayoutMismatch
from layerstore.model import RankState
from layerstore.tree import Storage, Tensor, Tree
from layerstore.zero3.trees import TreeView, changed, sub_group_shapes

STEP = "step"

# How torch keeps a step counter, as struct knows it.
COUNTERS = {"F32": Struct("<f"), "F64": Struct("<d"), "I64": Struct("<q"), "I32": Struct("<i")}

_UNIFY = "compose with --adam-step unify, or train with a param group per layer"


def count_of(data: bytes, dtype: str) -> int | None:
    """Return the number in the bytes of a scalar tensor; None where it is no number of updates."""
    (value,) = COUNTERS[dtype].unpack(data)
    return int(value) if math.isfinite(value) else None


def with_own_steps(state: RankState, steps: Mapping[str, tuple[str, int | None]]) -> RankState:
    """
    Return *state* with each sub-group's counter set to that of its layers.

    *steps* names each parameter's layer and how often the optimizer had updated that.

    Raises:
        LayoutMismatch: The layers of a sub-group were updated more or less often than each other.
    """
    tree = TreeView(state.optimizer.tree, path=PurePosixPath(state.optimizer.path))
    outer = tree["optimizer_state_dict"]
    inner = outer["optimizer_state_dict"]
    groups = sub_group_shapes(TreeView(state.model.tree, path=PurePosixPath(state.model.path)))
    counted: dict[Tree, Tree] = {
        group: changed(values.mapping(), {STEP: _counter(values.mapping()[STEP], _agreed(groups, group, steps))})
        for group, values in inner["state"].children()
        if isinstance(group, int) and STEP in values.mapping()
    }
    states = changed(inner["state"].mapping(), counted)
    within = changed(outer.mapping(), {"optimizer_state_dict": changed(inner.mapping(), {"state": states})})
    return replace(
        state, optimizer=replace(state.optimizer, tree=changed(tree.mapping(), {"optimizer_state_dict": within}))
    )


def _agreed(groups: Sequence[Mapping[str, object]], group: int, steps: Mapping[str, tuple[str, int | None]]) -> int:
    """Return the count of all layers in a sub-group."""
    missing = [name for name in groups[group] if name not in steps]
    if missing:
        raise LayoutMismatch(f"parameter {missing[0]!r} is in none of the chosen layers", name=missing[0])
    found = list(dict.fromkeys(steps[name] for name in groups[group]))
    first, count = found[0]
    if count is None:
        raise LayoutMismatch(f"layer {first!r} has no optimizer step of its own to be set", hint=_UNIFY)
    for layer, other in found:
        if other != count:
            raise LayoutMismatch(
                f"layers {first!r} (optimizer step {count}) and {layer!r} (optimizer step {other}) share sub-group "
                f"{group}, which has one counter: each layer's own step cannot be kept",
                hint=_UNIFY,
            )
    return count


def _counter(old: Tree, count: int) -> Tree:
    """Return *count* as the kind of counter that *old* is."""
    if isinstance(old, Tensor) and old.elements == 1 and old.storage.dtype in COUNTERS:
        storage = Storage(
            dtype=old.storage.dtype,
            elements=1,
            device=old.storage.device,
            content=COUNTERS[old.storage.dtype].pack(count),
        )
        return replace(old, storage=storage, offset=0)
    if isinstance(old, int) and not isinstance(old, bool):
        return count
    raise LayoutMismatch(
        f"the base's optimizer counts its steps in a {type(old).__name__}, which cannot be set",
        hint="compose with --adam-step unify",
    )
