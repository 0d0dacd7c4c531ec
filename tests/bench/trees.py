"""
The trees of a made-up checkpoint: every key that DeepSpeed 0.19.8 writes, with recipes where bytes belong.

Nothing is read or written here.
"""

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from layerstore.slices import slice_length, valid_elements
from layerstore.tree import Global, Inert, OrderedMap, Size, Storage, Tensor, Tree
from tests.bench.shapes import Group, ModelShape, Parameter
from tests.bench.values import EXP_AVG, EXP_AVG_SQ, MASTER

Precision = Literal["bf16", "fp16", "fp32"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp32")

HALF_OF: dict[str, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""The element type of the weights."""

_VERSION = "0.19.8"
_LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What one rank holds of one tensor."""

    parameter: Parameter
    state: str
    start: int
    elements: int
    padding: int
    """Elements that follow and mean nothing."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What fills a storage."""

    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, how, and by how many."""

    shape: ModelShape
    trained: tuple[Parameter, ...]
    frozen: tuple[Parameter, ...]
    groups: tuple[Group, ...]
    sub_group_size: int
    precision: Precision
    stage: int
    step: int
    owns_scheduler: bool
    """Whether the engine has the learning rate scheduler: else the Trainer."""
    client_state: dict[Tree, Tree]

    @property
    def sub_groups(self) -> list[tuple[Parameter, ...]]:
        """Return the sub-groups in the order of their numbers."""
        return [sub_group for group in self.groups for sub_group in group.sub_groups]


def stretch(parameter: Parameter, state: str, *, rank: int, world_size: int) -> Stretch:
    """Return the slice of *parameter* that *rank* holds."""
    length = slice_length(parameter.elements, world_size)
    valid = valid_elements(parameter.elements, world_size, rank)
    return Stretch(parameter=parameter, state=state, start=rank * length, elements=valid, padding=length - valid)


def flat_tensor(dtype: str, elements: int, content: object, *, attributes: dict[Tree, Tree] | None = None) -> Tensor:
    """Return a flat tensor that fills a storage of its own."""
    storage = Storage(dtype=dtype, elements=elements, device="cpu", content=content)
    is_leaf = attributes is not None
    return Tensor(
        storage=storage, offset=0, shape=Size((elements,)), stride=(1,), requires_grad=is_leaf, attributes=attributes
    )


# -- model_states --------------------------------------------------------------------------------------------------


def model_states(job: Job, *, rank: int) -> Tree:
    """Return the tree of *rank*'s ``model_states`` file."""
    is_tied, world_size = job.shape.tied, job.shape.world_size
    frozen_shapes: dict[Tree, Tree] = {parameter.name: Size(parameter.shape) for parameter in job.frozen}
    fragments: dict[Tree, Tree] = {parameter.name: _fragment(job, parameter, rank) for parameter in job.frozen}
    tree: dict[Tree, Tree] = {
        "module": _module(job),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [
            OrderedMap({parameter.name: Size(parameter.shape) for parameter in sub_group})
            for sub_group in job.sub_groups
        ],
        "frozen_param_shapes": OrderedMap(frozen_shapes),
        "shared_params": {"lm_head.weight": "model.embed_tokens.weight"} if is_tied and rank == 0 else {},
        "frozen_param_fragments": OrderedMap(fragments),
        "lr_scheduler": scheduler(job) if job.owns_scheduler else None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": job.step,
        "global_samples": job.step * 2 * world_size,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": _config(job),
        "ds_version": _VERSION,
    }
    return tree | job.client_state


def _module(job: Job) -> OrderedMap:
    names = [parameter.name for parameter in job.shape.parameters()]
    names += ["lm_head.weight"] if job.shape.tied else []
    modules = dict.fromkeys(prefix for name in names for prefix in _prefixes(name))
    metadata: dict[Tree, Tree] = {module: {"version": 1} for module in modules}
    dtype = HALF_OF[job.precision]
    return OrderedMap(
        {name: flat_tensor(dtype, 0, Recipe(())) for name in names}, attributes={"_metadata": OrderedMap(metadata)}
    )


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(len(parts)))


def _fragment(job: Job, parameter: Parameter, rank: int) -> Tensor:
    held = stretch(parameter, MASTER, rank=rank, world_size=job.shape.world_size)
    return flat_tensor(HALF_OF[job.precision], held.elements + held.padding, Recipe((held,)))


def scheduler(job: Job) -> dict[Tree, Tree]:
    """Return the state of torch's scheduler."""
    rates: list[Tree] = [_LEARNING_RATE] * len(job.groups)
    return {
        "base_lrs": rates,
        "last_epoch": job.step,
        "_step_count": job.step + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": list(rates),
        "lr_lambdas": [None] * len(job.groups),
    }


def _config(job: Job) -> dict[Tree, Tree]:
    zero: dict[Tree, Tree] = {
        "stage": job.stage,
        "sub_group_size": job.sub_group_size,
        "stage3_gather_16bit_weights_on_model_save": not job.owns_scheduler,
    }
    half: dict[Tree, Tree] = {} if job.precision == "fp32" else {job.precision: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        **half,
    }


# -- optim_states --------------------------------------------------------------------------------------------------


def optim_states(job: Job, *, rank: int) -> Tree:
    """Return the tree of *rank*'s ``optim_states`` file."""
    sub_groups = job.sub_groups
    states: dict[Tree, Tree] = {
        number: adam(job, _flat(job, sub_group, EXP_AVG, rank), _flat(job, sub_group, EXP_AVG_SQ, rank))
        for number, sub_group in enumerate(sub_groups)
    }
    optimizer: dict[Tree, Tree] = {
        "zero_stage": Inert(name="deepspeed.runtime.zero.config.ZeroStageEnum", arguments=(3,)),
        "loss_scaler": _loss_scaler(job),
        "dynamic_loss_scale": job.precision == "fp16",
        "overflow": False,
        "partition_count": job.shape.world_size,
        "optimizer_state_dict": {"state": states, "param_groups": list(_param_groups(job.groups))},
        "fp32_flat_groups": [
            _flat(job, sub_group, MASTER, rank, attributes={"ds_id": f"{sub_group[0].id}_{sub_group[-1].id}"})
            for sub_group in sub_groups
        ],
    }
    return {"optimizer_state_dict": optimizer, "ds_config": _config(job), "ds_version": _VERSION}


def adam(job: Job, exp_avg: Tensor, exp_avg_sq: Tensor) -> dict[Tree, Tree]:
    """Return what Adam keeps of a flat buffer."""
    step = Storage(dtype="F32", elements=1, device="cpu", content=struct.pack("<f", job.step))
    return {
        "step": Tensor(storage=step, offset=0, shape=Size(()), stride=()),
        EXP_AVG: exp_avg,
        EXP_AVG_SQ: exp_avg_sq,
    }


def _flat(
    job: Job,
    sub_group: Collection[Parameter],
    state: str,
    rank: int,
    *,
    attributes: dict[Tree, Tree] | None = None,
) -> Tensor:
    stretches = tuple(stretch(item, state, rank=rank, world_size=job.shape.world_size) for item in sub_group)
    elements = sum(part.elements + part.padding for part in stretches)
    return flat_tensor("F32", elements, Recipe(stretches), attributes=attributes)


def _loss_scaler(job: Job) -> Inert:
    name = "deepspeed.runtime.fp16.loss_scaler."
    if job.precision != "fp16":
        state: dict[Tree, Tree] = {"cur_scale": 1.0, "dynamic": False}
        return Inert(name=f"{name}LossScaler", made_by_new=True, state=state, has_state=True)
    state = {
        "cur_scale": 32768.0,
        "dynamic": True,
        "cur_iter": job.step,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "min_scale": 1,
        "delayed_shift": 2,
        "cur_hysteresis": 2,
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": True,
        "dtype": Global("torch.float16"),
    }
    return Inert(name=f"{name}DynamicLossScaler", made_by_new=True, state=state, has_state=True)


def _param_groups(groups: Collection[Group]) -> Iterator[dict[Tree, Tree]]:
    first = 0
    for group in groups:
        yield {
            "weight_decay": 0.1 if group.decays else 0.0,
            "lr": _LEARNING_RATE,
            "betas": (0.9, 0.999),
            "eps": 1e-08,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": True,
            "initial_lr": _LEARNING_RATE,
            "params": list(range(first, first + len(group.sub_groups))),
        }
        first += len(group.sub_groups)
