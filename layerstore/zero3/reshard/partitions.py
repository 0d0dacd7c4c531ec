"""
Convert rank states of stages 1 and 2 to another number of ranks, or to the form that stage 3 saves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from layerstore.errors import LayoutMismatch
from layerstore.filenames import FIRST_SHARD
from layerstore.states import FlatContent, FragmentContent, RankState, TreeFile
from layerstore.tree import Inert, OrderedMap, Size, Storage, Tensor, Tree, changed
from layerstore.zero3.reshard.sub_groups import path_of_rank, resized, sub_group_size
from layerstore.zero3.trees import (
    PartitionSharding,
    TreeView,
    dealt,
    gathered_again,
    inner_optimizer,
    is_dealt,
    masters_in,
    outer_optimizer,
    sharding_in,
    sub_group_shapes,
    with_optimizer,
)

_ADDRESS = "deepspeed.utils.tensor_fragment.fragment_address"
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
_SCALER = "deepspeed.runtime.fp16.loss_scaler.LossScaler"

_OF_PARTITIONS = frozenset(
    {
        *("base_optimizer_state", "single_partition_of_fp32_groups", "zero_stage", "partition_count", "clip_grad"),
        *("group_paddings", "param_alignment_paddings", "param_slice_mappings", "ds_version"),
    }
)
"""The keys of DeepSpeed's optimizer state under stages 1 and 2 that stage 3 lacks, or keeps in another form."""


def repartitioned(template: RankState, *, rank: int, world_size: int) -> RankState:
    """Return the state of *rank* among *world_size* ranks, made from *template*; only the two trees are changed."""
    model, outer, inner = TreeView.of(template.model), outer_optimizer(template), inner_optimizer(template)
    before = sharding_in(template)
    assert isinstance(before, PartitionSharding)
    groups, paddings = before.groups, before.paddings
    if is_dealt(model, outer):
        orders = [dealt(gathered_again(list(group), before.world_size), world_size) for group in groups]
        groups = [{name: group[name] for name in order} for group, order in zip(groups, orders, strict=True)]
        if any(map(any, paddings)):
            raise LayoutMismatch(
                "with round_robin_gradients, the order of parameters depends on the number of ranks, and "
                "parameter_alignment puts padding between them: where that would be is not known",
                hint=f"compose at the base's world size, {before.world_size}, or --format zero3",
            )
    after = PartitionSharding(groups, world_size, paddings)
    numbers = range(len(groups))
    masters = masters_in(outer)
    is_lean = outer.get("zero_stage") is not None  # the optimizer without this key pads its masters too
    flats: list[Tree] = [
        resized(
            masters[group].tensor(),
            after.lean(group, rank) if is_lean else after.elements(group, rank),
            FlatContent(state="", group=group),
        )
        for group in numbers
    ]
    states: dict[Tree, Tree] = {
        group: {key: _state(value, after.elements(group, rank)) for key, value in kept.mapping().items()}
        for group, kept in inner["state"].children()
        if isinstance(group, int)
    }
    mappings: list[Tree] = [
        OrderedMap(
            (fragment.name, _address(fragment.elements, fragment.start)) for fragment in after.fragments(group, rank)
        )
        for group in numbers
    ]
    tree = with_optimizer(
        template,
        outer={
            "single_partition_of_fp32_groups": flats,
            # One count for each group; stage 3 has a single count.
            "partition_count": [world_size for _ in numbers],
            "group_paddings": [after.elements(group, rank) - after.lean(group, rank) for group in numbers],
            "param_slice_mappings": mappings,
        },
        inner={"state": states},
    )
    shapes: list[Tree] = [OrderedMap((name, Size(shape)) for name, shape in group.items()) for group in groups]
    return replace(
        template,
        rank=rank,
        model=replace(
            template.model, tree=changed(model.mapping(), {"dp_world_size": world_size, "param_shapes": shapes})
        ),
        optimizer=TreeFile(path=path_of_rank(template.optimizer.path, rank), tree=tree),
    )


def _state(value: Tree, elements: int) -> Tree:
    is_flat = isinstance(value, Tensor) and isinstance(value.storage.content, FlatContent)
    return resized(value, elements) if isinstance(value, Tensor) and is_flat else value


def _address(elements: int, start: int) -> Inert:
    return Inert(name=_ADDRESS, made_by_new=True, state={"numel": elements, "start": start}, has_state=True)


# -- as stage 3 ------------------------------------------------------------------------------------------------------


def as_stage_3(state: RankState) -> RankState:
    """
    Return *state* as a single rank would save it under stage 3; each param group becomes one sub-group.

    The parameters of a group have the order in which the optimizer was given them. Flat buffers keep the
    lengths that they have in *state*: `regrouped` sets the new lengths.
    """
    model, outer, inner = TreeView.of(state.model), outer_optimizer(state), inner_optimizer(state)
    groups = sub_group_shapes(model)
    if is_dealt(model, outer):
        world_size = model["dp_world_size"].integer()
        groups = [{name: group[name] for name in gathered_again(list(group), world_size)} for group in groups]
    of_all = {key: value for key, value in outer.mapping().items() if key not in _OF_PARTITIONS}
    # DeepSpeed's optimizer that accumulates in fp32 keeps none of these three, but stage 3's loader requires them.
    scaler = Inert(name=_SCALER, made_by_new=True, state={"cur_scale": 1.0, "dynamic": False}, has_state=True)
    tree: dict[Tree, Tree] = {
        "zero_stage": Inert(name=_STAGE, arguments=(3,)),
        **({} if "loss_scaler" in of_all else {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False}),
        **of_all,
        "partition_count": 1,
        "optimizer_state_dict": inner.mapping(),
        "fp32_flat_groups": masters_in(outer).sequence(),
    }
    optimizer = changed(TreeView.of(state.optimizer).mapping(), {"optimizer_state_dict": tree})
    folder = state.model.path.rpartition("/")[0]
    return replace(
        state,
        model=TreeFile(path=f"{folder}/{FIRST_SHARD}", tree=_model(model, groups)),
        optimizer=replace(state.optimizer, tree=optimizer),
    )


def conversion_note(first: RankState) -> str:
    """Return the note on the setting that training needs to continue under stage 3."""
    size = sub_group_size(TreeView.of(first.model))
    return (
        f"converted to ZeRO-3 with sub_group_size {size:.0f}: set the same sub_group_size in the config you train with"
    )


def _model(model: TreeView, groups: Sequence[Mapping[str, Size]]) -> Tree:
    """Return the tree of ``model_states``: placeholders in the module, and frozen parameters outside it."""
    module = model["module"].mapping()
    trained = {name for group in groups for name in group}
    buffers = model["buffer_names"].sequence()
    frozen: dict[Tree, Tree] = {}
    shapes: dict[Tree, Tree] = {}
    placeholders: dict[Storage, Storage] = {}
    for name, tensor in module.items():
        content = tensor.storage.content if isinstance(tensor, Tensor) else None
        if isinstance(tensor, Tensor) and isinstance(content, FragmentContent):
            if name == content.parameter and name not in trained:
                frozen[name], shapes[name] = resized(tensor, tensor.elements, content), tensor.shape
            # One placeholder for each storage, so that names that share memory still do.
            placeholders.setdefault(tensor.storage, replace(tensor.storage, elements=0, content=b""))
        elif isinstance(tensor, Tensor) and not tensor.elements and name not in buffers:
            frozen[name], shapes[name] = resized(tensor, 0), tensor.shape  # a parameter without elements
    emptied: dict[Tree, Tree] = {
        name: replace(tensor, storage=placeholders[tensor.storage], shape=Size((0,)), stride=(1,), offset=0)
        if isinstance(tensor, Tensor) and tensor.storage in placeholders
        else tensor
        for name, tensor in module.items()
    }
    values: dict[Tree, Tree] = {
        "module": changed(module, emptied),
        "param_shapes": [OrderedMap(group) for group in groups],
        "dp_world_size": 1,
    }
    stated = model.get("frozen_param_shapes")
    if shapes or (stated is not None and stated.value is not None):  # else the save left them out, or none exist
        values |= {"frozen_param_shapes": OrderedMap(shapes), "frozen_param_fragments": OrderedMap(frozen)}
    return changed(model.mapping(), values)
