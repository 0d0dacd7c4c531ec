"""The scenarios that real DeepSpeed trains, as plain data.

Imports neither torch nor deepspeed: pytest reads it while collecting, the training programs while training.
A scenario is there for one shape of file that the support table in the docs speaks of; its *why* names it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

WORLD_SIZE = 2
"""Ranks of every launch: the smallest number that cuts tensors, and what two cores can bear."""

STEPS = 6
"""Steps of an uninterrupted run."""

SAVE_STEPS = (2, 4)
"""Steps after which a checkpoint is saved: the one resumed from, and the one compared."""

RESUME_STEP = SAVE_STEPS[0]

Model = Literal["llama", "tied_llama", "odd", "empty_parameter", "norm_statistics"]
Grouping = Literal["single", "decay", "blocks_first", "auxiliary_first"]
Precision = Literal["bf16", "fp16", "fp32", "autocast"]
Optimizer = Literal["adamw", "amsgrad", "sgd", "configured"]
Scheduler = Literal["none", "torch", "configured"]
ClientState = Literal["none", "plain", "tensors", "numpy", "lightning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One training job: what is built, how it is grouped, and what is saved beside the tensors."""

    name: str
    """Folder below the launch's output, and the run's name in the store."""

    why: str
    """The shape of checkpoint that only this scenario has."""

    model: Model = "llama"
    """Which tiny module is trained."""

    grouping: Grouping = "decay"
    """How the parameters are dealt out to the optimizer's param groups."""

    precision: Precision = "bf16"
    """Which of DeepSpeed's precision modes is on."""

    optimizer: Optimizer = "adamw"
    """Which optimizer; *configured* lets DeepSpeed build its own from the config."""

    scheduler: Scheduler = "torch"
    """Who makes the learning rate scheduler that the engine owns."""

    clipping: float = 1.0
    """Gradient clipping; 0 where the arithmetic must not depend on the grouping."""

    zero: dict[str, object] = field(default_factory=dict)
    """Keys added to the config's zero_optimization."""

    config: dict[str, object] = field(default_factory=dict)
    """Keys added to the config itself."""

    zero_init: bool = True
    """Partition while the module is built (``zero.Init``), or only in ``initialize``."""

    frozen: tuple[str, ...] = ()
    """Prefixes of the parameters that are not trained."""

    exclude_frozen: bool = False
    """Save without the frozen parameters, as PEFT does."""

    client_state: ClientState = "none"
    """What the user's own state holds."""

    resumes_alike: bool = True
    """Whether DeepSpeed itself, resumed from its own shards, goes on as the training that was never interrupted."""

    @property
    def stage(self) -> object:
        """The ZeRO stage."""
        return self.zero.get("stage", 3)

    def save_dir(self, root: Path, *, step: int) -> Path:
        """Return the folder that ``save_checkpoint`` is given after *step*."""
        if self.client_state == "lightning":
            return root / self.name / f"epoch=0-step={step}.ckpt"
        return root / self.name

    def tag(self, *, step: int) -> str:
        """Return DeepSpeed's tag for the checkpoint saved after *step*."""
        return "checkpoint" if self.client_state == "lightning" else f"global_step{step}"

    def tag_dir(self, root: Path, *, step: int) -> Path:
        """Return the folder that holds the shards saved after *step*."""
        return self.save_dir(root, step=step) / self.tag(step=step)


GROUPINGS: tuple[Grouping, ...] = ("decay", "blocks_first", "auxiliary_first")
"""Groupings of one and the same training: equal weight decay per parameter, no clipping, so equal tensors."""

SCENARIOS: tuple[Scenario, ...] = (
    *(
        Scenario(
            name=f"grouped_{grouping}",
            why="one training under three groupings: the slices lie elsewhere, their bytes are the same",
            grouping=grouping,
            clipping=0.0,
        )
        for grouping in GROUPINGS
    ),
    Scenario(name="tied", why="an alias in shared_params and as a placeholder", model="tied_llama"),
    Scenario(
        name="frozen",
        why="frozen fragments with padding, and a param group without them",
        model="odd",
        frozen=("embed", "layers.0"),
    ),
    Scenario(
        name="frozen_excluded",
        why="frozen_* keys are None and the names leave module",
        model="odd",
        frozen=("embed", "layers.0"),
        exclude_frozen=True,
    ),
    Scenario(
        name="many_sub_groups",
        why="a sub-group per few parameters, closed by the per-rank sum",
        zero={"sub_group_size": 300},
    ),
    Scenario(
        name="odd_sizes",
        why="no size divides by two, and a parameter of one element leaves rank 1 pure padding",
        model="odd",
        zero={"sub_group_size": 10},
    ),
    Scenario(
        name="partitioned_late",
        why="partitioned by initialize, not by zero.Init; nothing persistent; gathered weights asked for",
        model="odd",
        zero_init=False,
        zero={"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True},
    ),
    Scenario(
        name="fp16",
        why="a dynamic loss scaler with counters, an update skipped by overflow, no bf16_ prefix",
        model="odd",
        precision="fp16",
        config={"fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 2, "hysteresis": 1}},
    ),
    Scenario(
        name="fp16_no_update_yet",
        why="saved before the first update that was not skipped: no optimizer state at all",
        model="odd",
        precision="fp16",
        config={"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}},
    ),
    Scenario(
        name="fp32",
        why="no half precision: the masters are the weights, and no bf16_ prefix",
        model="odd",
        precision="fp32",
        zero={"sub_group_size": 10},
    ),
    Scenario(
        name="bf16_master",
        why="masters, and so the moments, in half precision",
        model="odd",
        config={
            "bf16": {
                "enabled": True,
                "bf16_master_weights_and_grads": True,
                "bf16_optimizer_states": True,
            }
        },
    ),
    Scenario(name="autocast", why="fp32 layout under torch_autocast", model="odd", precision="autocast"),
    Scenario(
        name="rank_buffers",
        why="running statistics that differ between the ranks, and an integer buffer",
        model="norm_statistics",
    ),
    Scenario(
        name="client_plain",
        why="a nested tree of the user's own plain values",
        model="odd",
        client_state="plain",
        scheduler="none",
    ),
    Scenario(
        name="empty_parameter",
        why="a trainable parameter without elements, which DeepSpeed files among the frozen ones",
        model="empty_parameter",
    ),
    Scenario(name="client_tensors", why="tensors in the user's own state", model="odd", client_state="tensors"),
    Scenario(name="client_numpy", why="numpy values in the user's own state", model="odd", client_state="numpy"),
    Scenario(
        name="amsgrad",
        why="a third moment, of which only the shape tells that it is sliced",
        optimizer="amsgrad",
    ),
    Scenario(
        name="sgd",
        why="no Adam at all: momentum_buffer without a step counter",
        model="odd",
        optimizer="sgd",
        grouping="single",
    ),
    Scenario(
        name="configured",
        why="DeepSpeed's own optimizer and scheduler: an integer step, last_batch_iteration",
        optimizer="configured",
        scheduler="configured",
        config={
            # The C++ Adam keeps the powers of its betas outside the checkpoint: it multiplies them up
            # while it runs, and calls pow() after a load. With the usual betas the two round differently,
            # so that DeepSpeed's own resume is not bit-exact: `usual_betas`. The powers of these are exact either way.
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.75, 0.875]},
            },
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-3}},
        },
    ),
    Scenario(
        name="stage1",
        why="whole weights in one file, partitions of groups, no frozen_*; a tied head",
        model="tied_llama",
        zero={"stage": 1},
    ),
    Scenario(
        name="stage1_frozen",
        why="frozen weights that only the module has, and partitions that end in padding",
        model="odd",
        zero={"stage": 1},
        frozen=("embed", "layers.0"),
    ),
    Scenario(
        name="stage1_fp32_gradients",
        why="DeepSpeed's own optimizer for bf16: no stage in its state, masters with padding, no loss scaler",
        model="odd",
        zero={"stage": 1},
        config={"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
    Scenario(
        name="stage2_rank_buffers",
        why="running statistics that differ between the ranks, of which the first one's are saved",
        model="norm_statistics",
        zero={"stage": 2},
        precision="fp32",
    ),
    Scenario(
        name="stage2_frozen",
        why="whole frozen weights, twice: in the module and as fragments",
        model="odd",
        zero={"stage": 2},
        frozen=("embed", "layers.0"),
    ),
    Scenario(
        name="stage2_frozen_excluded",
        why="frozen weights that are nowhere",
        model="odd",
        zero={"stage": 2},
        frozen=("embed", "layers.0"),
        exclude_frozen=True,
    ),
    Scenario(
        name="stage2_fp32",
        why="weights that are their masters, and a group of a single element",
        model="odd",
        zero={"stage": 2},
        precision="fp32",
        grouping="blocks_first",
    ),
    Scenario(
        name="stage2_fp16",
        why="a dynamic loss scaler, rounding to fp16",
        model="odd",
        zero={"stage": 2},
        precision="fp16",
        config={"fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 2, "hysteresis": 1}},
    ),
    Scenario(
        name="stage2_round_robin",
        why="parameters dealt out to ranks, in another order for each number of ranks",
        zero={"stage": 2, "round_robin_gradients": True},
    ),
    Scenario(
        name="stage2_aligned",
        why="padding between parameters",
        model="odd",
        zero={"stage": 2, "parameter_alignment": True},
    ),
    Scenario(
        name="stage2_offloaded",
        why="DeepSpeedCPUAdam on partitions, which counts in an integer",
        model="odd",
        optimizer="configured",
        zero={"stage": 2, "offload_optimizer": {"device": "cpu"}},
        config={
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.75, 0.875]}},
        },
    ),
    Scenario(
        name="usual_betas",
        why="DeepSpeedCPUAdam at the betas that everybody has, whose powers it keeps outside the checkpoint",
        model="odd",
        precision="fp32",  # which shows it in the losses at once
        optimizer="configured",
        zero={"offload_optimizer": {"device": "cpu"}},
        config={"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "torch_adam": False}}},
        resumes_alike=False,
    ),
    Scenario(
        name="offloaded",
        why="optimizer and parameters kept on the host by DeepSpeed's offloading",
        model="odd",
        zero={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        config={"zero_force_ds_cpu_optimizer": False},
    ),
    # Synthetic: Lightning's DeepSpeedStrategy insists on CUDA, so the folder is made the way it makes it
    # (tag "checkpoint", the Trainer's state as client_state). The keys are those of Lightning 2.6.6.
    Scenario(
        name="lightning",
        why="Lightning's folder: a fixed tag, Trainer state flat in model_states",
        client_state="lightning",
    ),
)

POKED = ("odd_sizes", "frozen", "fp32", "bf16_master", "rank_buffers")
"""Scenarios whose first checkpoint is also kept with special bit patterns in it, below ``POKED_FOLDER``."""

POKED_FOLDER = "poked"

FROM_SHARDS_FOLDER = "from_shards"
"""Below it is what DeepSpeed makes of its own first checkpoint, where that is another training than the first."""

SCENARIO_OF = {scenario.name: scenario for scenario in SCENARIOS}


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceScenario:
    """One job trained through the Trainer or through Accelerate."""

    name: str
    """Folder below the launch's output, and the run's name in the store."""

    library: Literal["trainer", "accelerate"]
    """Who saves and loads."""

    tied: bool = False
    """Whether the embeddings are tied to the head."""

    stage: int = 3
    """The ZeRO stage."""

    max_shard_size: str = "50GB"
    """Size past which the gathered weights are split into several files."""

    def checkpoint(self, root: Path, *, step: int) -> Path:
        """Return the folder that this library saves after *step*."""
        name = f"checkpoint-{step}" if self.library == "trainer" else f"step{step}"
        return root / self.name / name

    def tag_dir(self, root: Path, *, step: int) -> Path:
        """Return the folder that holds the shards saved after *step*."""
        tag = f"global_step{step}" if self.library == "trainer" else "pytorch_model"
        return self.checkpoint(root, step=step) / tag


HUGGING_FACE_SCENARIOS: tuple[HuggingFaceScenario, ...] = (
    HuggingFaceScenario(name="trainer", library="trainer"),
    HuggingFaceScenario(name="trainer_tied_sharded", library="trainer", tied=True, max_shard_size="8KB"),
    HuggingFaceScenario(name="trainer_stage2", library="trainer", tied=True, stage=2),
    HuggingFaceScenario(name="accelerate", library="accelerate"),
)

HUGGING_FACE_SCENARIO_OF = {scenario.name: scenario for scenario in HUGGING_FACE_SCENARIOS}

RENAMED_FAMILIES = ("mixtral", "qwen3_moe", "vit", "llava")
"""Transformers 5 holds them otherwise in memory than in their files."""

FAMILIES = (
    *("llama", "qwen2", "qwen2_untied", "qwen3", "qwen3_untied", "mistral", "gemma", "gemma2", "phi", "phi3"),
    *("gpt2", "gpt_neox", "bert", "t5", *RENAMED_FAMILIES),
)

FAMILY_VARIANTS = (
    *FAMILIES,
    *(f"{family}-{variant}" for family in RENAMED_FAMILIES for variant in ("loaded", "shards")),
)
"""With the ways in which the renamed ones are trained again."""

FAMILY_STEPS = (1, 2)
"""All steps of such a training; each is saved."""
