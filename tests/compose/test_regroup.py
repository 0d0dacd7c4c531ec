"""Promises of the trees for another number of ranks: sub-groups by DeepSpeed's rule, and nothing shared by mistake."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import pytest

from layerstore.compose.world_size import plan_sub_groups, regrouped, with_own_steps
from layerstore.errors import LayoutMismatch
from layerstore.model import FlatContent, RankState
from layerstore.tree import OrderedMap, Size, Storage, Tensor, Tree
from layerstore.zero3 import TreeView, slice_length
from tests.unit import samples

# Two param groups of one-dimensional parameters.
WIDTHS = {"a": 15, "b": 12, "c": 7, "d": 3, "e": 5}
GROUPS = (("a", "b", "c"), ("d", "e"))

# As DeepSpeed splits them at sub_group_size 10.
SPLIT = {2: (("a", "b"), ("c",), ("d", "e")), 3: (("a", "b", "c"), ("d", "e"))}


def flat(names: Sequence[str], *, world_size: int, state: str, group: int) -> Tensor:
    """Return the flat buffer of some parameters on one rank."""
    elements = sum(slice_length(WIDTHS[name], world_size) for name in names)
    made = samples.tensor(FlatContent(state=state, group=group), elements=elements)
    made.attributes = None if state else {"ds_id": "0_1"}  # DeepSpeed's mark on a master
    return made


def counter(step: float) -> Tensor:
    """Return a step counter as torch keeps it."""
    storage = Storage(dtype="F32", elements=1, device="cpu", content=struct.pack("<f", step))
    return Tensor(storage=storage, offset=0, shape=Size(()), stride=())


def state_of(
    *,
    world_size: int = 2,
    size: float | None = 10,
    steps: Sequence[Tree] | None = None,
    split: Sequence[Sequence[str]] | None = None,
) -> RankState:
    """Return rank 0's state of a base that was saved by *world_size* ranks."""
    own = SPLIT[world_size] if split is None else split
    states: dict[Tree, Tree] = {
        group: {
            "step": counter(4) if steps is None else steps[group],
            "exp_avg": flat(names, world_size=world_size, state="exp_avg", group=group),
        }
        for group, names in enumerate(own)
    }
    zero: dict[Tree, Tree] = {"stage": 3}
    if size is not None:
        zero["sub_group_size"] = size
    model: dict[Tree, Tree] = {
        "module": OrderedMap({name: samples.tensor(b"", elements=0) for name in WIDTHS}),
        "buffer_names": [],
        "param_shapes": [OrderedMap({name: Size((WIDTHS[name],)) for name in names}) for names in own],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {"tied": "a"},
        "dp_world_size": world_size,
        "ds_config": {"zero_optimization": zero},
    }
    optimizer: dict[Tree, Tree] = {
        "partition_count": world_size,
        "optimizer_state_dict": {
            "state": states,
            "param_groups": [
                {"lr": lr, "params": [index for index, names in enumerate(own) if set(names) <= set(members)]}
                for lr, members in zip((0.1, 0.2), GROUPS, strict=True)
            ],
        },
        "fp32_flat_groups": [
            flat(names, world_size=world_size, state="", group=group) for group, names in enumerate(own)
        ],
    }
    base = samples.state()
    return replace(
        base,
        model=replace(base.model, path="tag/zero_pp_rank_0_mp_rank_00_model_states.pt", tree=model),
        optimizer=replace(
            base.optimizer,
            path="tag/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
            tree={"optimizer_state_dict": optimizer},
        ),
    )


def at(state: RankState, *keys: str | int) -> Any:
    """Return a part of the optimizer's tree."""
    view = TreeView(state.optimizer.tree, path=PurePosixPath("optimizer"))["optimizer_state_dict"]
    for key in keys:
        view = view[key]
    return view.value


def test_no_two_sub_groups_count_in_one_counter() -> None:
    """Where a sub-group becomes two, each has a step counter of its own: optimizers count in place."""
    base = state_of(world_size=3)

    made = regrouped(base, plan_sub_groups(base, world_size=2), rank=0, world_size=2)

    storages = [at(made, "optimizer_state_dict", "state", group, "step").storage for group in range(3)]
    assert len({id(storage) for storage in storages}) == 3
    assert len({storage.content for storage in storages}) == 1


@pytest.mark.parametrize(("size", "split"), [(None, GROUPS), (1e9, GROUPS), (0, tuple((name,) for name in WIDTHS))])
def test_the_size_of_sub_groups_is_the_configs(size: float | None, split: Sequence[Sequence[str]]) -> None:
    """Without one it is DeepSpeed's default; JSON may have made a float of it; 0 gives each parameter its own."""
    base = state_of(size=size, split=split)

    found = [tuple(group.shapes) for group in plan_sub_groups(base, world_size=5)]

    assert [tuple(names) for names in split] == found


def test_sub_groups_that_the_config_does_not_explain_are_refused() -> None:
    """Then the engine's own split for other ranks could not be foreseen either."""
    with pytest.raises(
        LayoutMismatch, match=r"param group 0 was saved in 2 sub-groups, but sub_group_size 1000 makes 1"
    ):
        plan_sub_groups(state_of(size=1000), world_size=3)


@pytest.mark.parametrize("steps", [(counter(4), counter(5), counter(4)), (4, 5, 4), (4, counter(4), 4)])
def test_sub_groups_that_count_differently_are_not_put_together(steps: Sequence[Tree]) -> None:
    """One counter cannot say both, nor be an int and a tensor."""
    with pytest.raises(LayoutMismatch, match="sub-groups 0 and 1 of param group 0 differ in 'step'"):
        plan_sub_groups(state_of(steps=steps), world_size=3)


def test_a_state_before_the_first_update_stays_empty() -> None:
    """No moments are made up."""
    base = state_of()
    at(base, "optimizer_state_dict")["state"] = {}

    made = regrouped(base, plan_sub_groups(base, world_size=3), rank=0, world_size=3)

    assert at(made, "optimizer_state_dict", "state") == {}


def test_param_groups_that_do_not_share_the_sub_groups_are_refused() -> None:
    """A sub-group of no param group would get no hyperparameters."""
    base = state_of()
    at(base, "optimizer_state_dict")["param_groups"][1]["params"] = []

    with pytest.raises(LayoutMismatch, match="do not share the 3 sub-groups"):
        plan_sub_groups(base, world_size=3)


# -- step counters -------------------------------------------------------------------------------------------------


def own_steps(**steps: int | None) -> dict[str, tuple[str, int | None]]:
    """Return what is known of each parameter's layer, which has the parameter's name here."""
    return {name: (f"layer {name}", steps.get(name, 4)) for name in WIDTHS}


def images(counters: Sequence[Tree]) -> list[object]:
    """Return step counters as something that can be compared."""
    return [
        (step.shape, step.storage.dtype, step.storage.content) if isinstance(step, Tensor) else step
        for step in counters
    ]


@pytest.mark.parametrize(
    ("old", "expected"),
    [((4, 4, 4), [6, 6, 2]), ((counter(4), counter(4), counter(4)), [counter(6), counter(6), counter(2)])],
)
def test_counters_are_set_to_the_layers_own_and_keep_their_type(old: Sequence[Tree], expected: list[Tree]) -> None:
    """An int stays one, a scalar tensor stays one; each sub-group has its own."""
    made = with_own_steps(state_of(steps=old), own_steps(a=6, b=6, c=6, d=2, e=2))

    found = [at(made, "optimizer_state_dict", "state", group, "step") for group in range(3)]
    assert images(expected) == images(found)
    assert len({id(step.storage) for step in found if isinstance(step, Tensor)}) in {0, 3}


def test_a_layer_without_a_count_cannot_set_a_counter() -> None:
    """Where its version was saved, its parameters counted differently."""
    with pytest.raises(LayoutMismatch, match="layer 'layer d' has no optimizer step of its own"):
        with_own_steps(state_of(), own_steps(d=None, e=None))


def test_an_optimizer_without_counters_needs_none() -> None:
    """Plain momentum counts nothing: there is nothing to set, whatever the layers say."""
    base = state_of()
    for group in at(base, "optimizer_state_dict", "state").values():
        del group["step"]

    made = with_own_steps(base, own_steps(a=1, b=2))

    assert all("step" not in group for group in at(made, "optimizer_state_dict", "state").values())
