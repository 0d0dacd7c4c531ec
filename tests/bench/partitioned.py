"""
The trees of a made-up checkpoint of stages 1 and 2, where the ranks split whole param groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from layerstore.tree import Inert, OrderedMap, Size, Tensor, Tree, changed
from tests.bench.shapes import Parameter
from tests.bench.trees import (
    HALF_OF,
    Job,
    Recipe,
    Stretch,
    adam,
    flat_tensor,
    model_states,
    optim_states,
)
from tests.bench.values import EXP_AVG, EXP_AVG_SQ, MASTER


def whole_model_states(job: Job) -> Tree:
    """Return the tree of the ``model_states`` file that all ranks share."""
    tree = model_states(job, rank=0)
    assert isinstance(tree, dict)
    module = tree["module"]
    assert isinstance(module, OrderedMap)
    weights = dict(_weights(job))
    if job.shape.tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    frozen: dict[Tree, Tree] = {parameter.name: weights[parameter.name] for parameter in job.frozen}
    has_frozen = job.stage == 2
    return tree | {
        "module": OrderedMap({name: weights[str(name)] for name in module}, module.attributes),
        "frozen_param_shapes": tree["frozen_param_shapes"] if has_frozen else None,
        "frozen_param_fragments": OrderedMap(frozen) if has_frozen else None,
    }


def _weights(job: Job) -> Iterator[tuple[str, Tensor]]:
    dtype = HALF_OF[job.precision]
    for members in [*job.sub_groups, *((parameter,) for parameter in job.frozen)]:
        whole = tuple(_stretch(parameter, MASTER, 0, parameter.elements) for parameter in members)
        flat = flat_tensor(dtype, sum(part.elements for part in whole), Recipe(whole))
        start = 0
        for parameter in members:
            strides = [1]
            for extent in reversed(parameter.shape[1:]):
                strides.insert(0, strides[0] * extent)
            yield (
                parameter.name,
                replace(flat, offset=start, shape=Size(parameter.shape), stride=tuple(strides[: len(parameter.shape)])),
            )
            start += parameter.elements


def partition_states(job: Job, *, rank: int) -> Tree:
    """Return the tree of *rank*'s ``optim_states`` file."""
    tree = optim_states(job, rank=rank)
    assert isinstance(tree, dict)
    outer = tree["optimizer_state_dict"]
    assert isinstance(outer, dict)
    inner = outer["optimizer_state_dict"]
    assert isinstance(inner, dict)
    ranks, groups = job.shape.world_size, job.sub_groups
    masters = [_partition(group, MASTER, rank, ranks) for group in groups]
    lean = [sum(part.elements for part in parts) for parts in masters]
    sizes = [_size(group, ranks) for group in groups]
    states: dict[Tree, Tree] = {
        number: adam(
            job,
            _flat(_partition(group, EXP_AVG, rank, ranks), sizes[number]),
            _flat(_partition(group, EXP_AVG_SQ, rank, ranks), sizes[number]),
        )
        for number, group in enumerate(groups)
    }
    optimizer: dict[Tree, Tree] = {
        "loss_scaler": outer["loss_scaler"],
        "dynamic_loss_scale": outer["dynamic_loss_scale"],
        "overflow": False,
        "clip_grad": 1.0,
        "base_optimizer_state": changed(inner, {"state": states}),
        "single_partition_of_fp32_groups": [
            replace(_flat(parts, count), requires_grad=True) for parts, count in zip(masters, lean, strict=True)
        ],
        "zero_stage": Inert(name="deepspeed.runtime.zero.config.ZeroStageEnum", arguments=(job.stage,)),
        "group_paddings": [size - count for size, count in zip(sizes, lean, strict=True)],
        "param_alignment_paddings": [[0] * len(group) for group in groups],
        "partition_count": [ranks] * len(groups),
        "ds_version": tree["ds_version"],
        "param_slice_mappings": [OrderedMap(_addresses(parts)) for parts in masters],
    }
    return tree | {"optimizer_state_dict": optimizer}


def _size(group: Sequence[Parameter], ranks: int) -> int:
    return 2 * ceil(sum(parameter.elements for parameter in group) / (2 * ranks))


def _partition(group: Sequence[Parameter], state: str, rank: int, ranks: int) -> tuple[Stretch, ...]:
    first = rank * _size(group, ranks)
    last = first + _size(group, ranks)
    found, at = [], 0
    for parameter in group:
        begin, end = max(first, at), min(last, at + parameter.elements)
        if begin < end:
            found.append(_stretch(parameter, state, begin - at, end - begin))
        at += parameter.elements
    return tuple(found)


def _stretch(parameter: Parameter, state: str, start: int, elements: int) -> Stretch:
    return Stretch(parameter=parameter, state=state, start=start, elements=elements, padding=0)


def _flat(parts: tuple[Stretch, ...], elements: int) -> Tensor:
    held = sum(part.elements for part in parts)
    if parts and held < elements:
        parts = (*parts[:-1], replace(parts[-1], padding=elements - held))
    return flat_tensor("F32", elements, Recipe(parts) if parts else bytes(4 * elements))


def _addresses(parts: Sequence[Stretch]) -> Iterator[tuple[str, Inert]]:
    start = 0
    for part in parts:
        address: dict[Tree, Tree] = {"numel": part.elements, "start": start}
        name = "deepspeed.utils.tensor_fragment.fragment_address"
        yield part.parameter.name, Inert(name=name, made_by_new=True, state=address, has_state=True)
        start += part.elements
