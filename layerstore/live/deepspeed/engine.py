"""
The adapter to DeepSpeed's engine: in this package, only this file uses the engine's own attributes and functions.

docs/reference/support.md lists the versions of DeepSpeed that were tested.
"""

import copy
import functools
import gc
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from layerstore.errors import InvalidInput, SourceCheckpoint, Unsupported
from layerstore.live.binding import binding_of
from layerstore.live.deepspeed.capture import SavedStates, capture
from layerstore.live.engine import FOLDER, Captured
from layerstore.live.log import LOG
from layerstore.live.scratch import put, scratch
from layerstore.zero3 import read_latest
from layerstore.zero3.trees import ENGINE_KEYS, STAGE_3

if TYPE_CHECKING:
    import torch

_MODULE_ONLY = (
    "under ZeRO stage 3 DeepSpeed's load_module_only=True loads buffers and frozen weights, but no trained weights; "
    "load_optimizer_states=False loads all weights"
)


class LoadHandler(Protocol):
    """A checkpoint engine that takes part in its engine's loads."""

    def loading(self, *, is_whole: bool, note: str) -> AbstractContextManager[None]:
        """Wrap one load, which omits the optimizer's state unless *is_whole*; log *note* if pointers are loaded."""

    def whole_weights(self, path: Path) -> "dict[str, torch.Tensor] | None":
        """Return all weights of the checkpoint whose ``model_states`` file is *path*; None unless it is a pointer."""


class ZeroEngine:
    """The parts of a DeepSpeed engine under ZeRO that layerstore uses."""

    def __init__(self, engine: Any) -> None:
        """Raise InvalidInput unless *engine* is a DeepSpeed engine, Unsupported if its state cannot be saved."""
        stage = getattr(engine, "zero_optimization_stage", None)
        if not callable(stage) or not hasattr(engine, "checkpoint_engine"):
            raise InvalidInput(
                f"{type(engine).__name__} is not a DeepSpeed engine",
                hint="pass what deepspeed.initialize returns first, or accelerator.prepare",
            )
        if stage() not in {1, 2, 3}:
            raise Unsupported(
                f"the engine trains under ZeRO stage {stage()}; stages 1, 2 and 3 are supported",
                hint="set zero_optimization.stage to 1, 2 or 3",
            )
        self.engine = engine
        self.binding = binding_of(engine)
        self.own_keys = ENGINE_KEYS
        self.stage = int(stage())
        self._zero = engine.optimizer
        swapped = engine.zero_offload_param()
        self._swaps_parameters = swapped is not None and str(getattr(swapped, "device", "none")).endswith("nvme")
        self._check_ranks()
        self._check_optimizer(engine.zero_offload_optimizer())
        # Read now: when the process exits, the process groups may be gone.
        self.rank = self.shard = _rank_in(self._zero.dp_process_group)
        """The number of this rank among the ranks that share the optimizer's state."""

    def _check_ranks(self) -> None:
        """Raise Unsupported unless the whole model's state is divided among all ranks of the job."""
        degree, shared, job = int(self.engine.mp_world_size), _size_of(self._zero.dp_process_group), _size_of(None)
        if getattr(self.engine, "pipeline_parallelism", False):
            raise Unsupported("the engine is a pipeline, which is not supported", hint="train without a PipelineModule")
        if degree > 1:
            raise Unsupported(
                f"the engine trains with tensor parallelism of degree {degree}, which is not supported",
                hint="train without tensor parallelism",
            )
        if shared < job:
            raise Unsupported(
                f"the optimizer's state is shared among {shared} of {job} ranks, so several would save as one rank",
                hint="for sequence parallelism, give deepspeed.initialize an mpu instead of mesh_param (in the config: "
                "data_parallel_size)",
            )

    def _check_optimizer(self, offload: Any) -> None:
        """Raise Unsupported if the optimizer keeps state where `states` does not find it."""
        device, ratio = str(getattr(offload, "device", "none")), getattr(offload, "ratio", 1.0)
        kind = type(self._zero).__name__
        why = hint = ""
        if getattr(self.engine, "has_moe_layers", False):
            why = "for DeepSpeed's own mixture of experts, whose experts are in files of their own"
            hint = "MoE models of Transformers, such as Mixtral, can be saved"
        elif device.endswith("nvme"):
            why = "offloaded to NVMe: its state is in files of its own"
            hint = "set offload_optimizer.device to 'cpu' or 'none'"
        elif ratio < 1.0:
            why = f"offloaded with a ratio of {ratio} (Twin-Flow): DeepSpeed itself saves only a part of its state"
            hint = "set offload_optimizer.ratio to 1"
        elif getattr(self._zero, "zenflow", False) or "ZenFlow" in kind:
            why = "under ZenFlow: another process updates its state at any time"
            hint = "train without zenflow to save while training"
        elif kind.startswith("SuperOffload"):
            why = "under SuperOffload: DeepSpeed itself saves only a part of its state"
            hint = "turn offload_optimizer.super_offload off"
        if why:
            raise Unsupported(f"the optimizer is {why}", hint=hint)

    @property
    def world_size(self) -> int:
        """The number of ranks that share the optimizer's state."""
        count = self._zero.partition_count  # under stages 1 and 2, a list with a count for each param group
        return int(count if self.stage == STAGE_3 else count[0])

    def log(self, message: str, *arguments: object) -> None:
        """Log *message*, on one process only."""
        if self.engine.global_rank == 0:
            LOG.info(message, *arguments)

    def warn(self, what: str, *notes: str) -> None:
        """Log *notes* about *what*, on one process only."""
        for note in notes if self.engine.global_rank == 0 else ():
            LOG.warning("%s: %s", what, note)

    @property
    def step(self) -> int:
        """The engine's own step counter."""
        return int(self.engine.global_steps)

    @property
    def is_at_boundary(self) -> bool:
        """Whether no gradient has been accumulated for an update that is still to come."""
        is_boundary = getattr(self.engine, "_is_gradient_accumulation_boundary", None)
        if is_boundary is not None:
            return bool(is_boundary)  # Accelerate counts batches itself and calls step() once per update
        return int(self.engine.micro_steps) % int(self.engine.gradient_accumulation_steps()) == 0

    @property
    def device(self) -> "torch.device":
        """The device that the engine computes on."""
        import torch

        return torch.device(self.engine.device)

    @property
    def ungated(self) -> str:
        """The reason why updates cannot wait for copies; empty if they can."""
        inner = self._zero.optimizer
        if "Muon" in type(inner).__name__ or getattr(self._zero, "use_muon", False):
            return "Muon changes its momentum before the optimizer's step begins"
        if not hasattr(inner, "register_step_pre_hook"):
            return f"{type(inner).__name__} has no hook before its step"
        return ""

    @property
    def loads_universal(self) -> bool:
        """Whether the engine's config asks for universal checkpoints."""
        return bool(self.engine.load_universal_checkpoint())

    @property
    def checkpoint_engine(self) -> Any:
        """The checkpoint engine that saves and loads the engine's files."""
        return self.engine.checkpoint_engine

    def install(self, checkpoint_engine: LoadHandler) -> Callable[[], None]:
        """Make the engine save and load with *checkpoint_engine*; return a function that undoes this."""
        engine, before = self.engine, self.engine.checkpoint_engine
        engine.checkpoint_engine = checkpoint_engine
        # DeepSpeed's function copies frozen weights to the host at each save; we copy them once, in the background.
        engine._get_param_fragment_func = _fragment
        load, engine.load_checkpoint = vars(engine).get("load_checkpoint"), _wrapped_load(engine, checkpoint_engine)

        def undo() -> None:
            if engine.checkpoint_engine is checkpoint_engine:  # otherwise the program has replaced it since
                engine.checkpoint_engine = before
            vars(engine).pop("_get_param_fragment_func", None)
            vars(engine).pop("load_checkpoint", None)
            if load is not None:
                engine.load_checkpoint = load

        return undo

    def hand_over_model(self) -> Callable[[], None]:
        """
        Make every rank pass the model's state to the checkpoint engine; return a function that undoes this.

        Under stages 1 and 2, DeepSpeed itself passes the state only on the first rank.
        """
        engine, before = self.engine, self.engine.save_non_zero_checkpoint
        engine.save_non_zero_checkpoint = True

        def undo() -> None:
            engine.save_non_zero_checkpoint = before

        return undo

    def before_update(self, action: Callable[[], None]) -> Callable[[], None]:
        """Call *action* before each update of the optimizer; return a function that stops this."""
        if not hasattr(self._zero.optimizer, "register_step_pre_hook"):
            return lambda: None  # `ungated` has the reason
        handle = self._zero.optimizer.register_step_pre_hook(lambda *_: action())
        remove: Callable[[], None] = handle.remove
        return remove

    def check_fully_loaded(self) -> None:
        """Raise Conflict if the last load failed half-way."""
        self.binding.check_fully_loaded()

    def capture(
        self, tag: str, client_state: Mapping[str, object], *, pattern: re.Pattern[str] | None, exclude_frozen: bool
    ) -> Captured:
        """Return this rank's state as it is now, grouped into layers by *pattern*, with paths below `FOLDER`."""
        states = self.states(tag, client_state, exclude_frozen=exclude_frozen)
        return capture(states, rank=self.rank, folder=FOLDER, pattern=pattern)

    def states(self, tag: str, client_state: Mapping[str, object], *, exclude_frozen: bool) -> SavedStates:
        """Return the states that ``engine.save_checkpoint`` would save now."""
        import deepspeed

        catcher = _Catcher()
        engine, real = self.engine, self.engine.checkpoint_engine
        engine.checkpoint_engine = catcher
        is_installed = "_get_param_fragment_func" in vars(engine)
        engine._get_param_fragment_func = _fragment
        undo = self.hand_over_model()
        # DeepSpeed itself assembles the state and passes it to the catcher: so it is complete under any version.
        try:
            with self._settled():
                engine._save_checkpoint(
                    str(FOLDER), tag, client_state=dict(client_state), exclude_frozen_parameters=exclude_frozen
                )
            optimizer = {
                "optimizer_state_dict": self._zero.state_dict(),
                "ds_config": engine.config,
                "ds_version": deepspeed.__version__,
            }
        finally:
            engine.checkpoint_engine = real
            if not is_installed:
                del engine._get_param_fragment_func
            undo()
        self._ungather(catcher.state["module"])
        return SavedStates(
            model=catcher.state,
            model_path=Path(engine._get_ckpt_name(str(FOLDER), tag)),
            optimizer=optimizer,
            optimizer_path=Path(engine._get_zero_ckpt_name(str(FOLDER), tag)),
        )

    def without_frozen(self, states: SavedStates) -> SavedStates:
        """Return *states* as they would be with ``exclude_frozen_parameters``."""
        module = copy.copy(states.model["module"])  # a copy keeps the order and torch's metadata
        for name, parameter in self.engine.module.named_parameters():
            if not parameter.requires_grad:
                module.pop(name, None)
        model = {**states.model, "module": module, "frozen_param_shapes": None, "frozen_param_fragments": None}
        return replace(states, model=model)

    @property
    def frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each frozen parameter, by name."""
        shapes = self.engine._get_zero_frozen_param_attributes(self.engine._get_param_shape_func)
        return {name: tuple(shape) for name, shape in shapes.items()}

    def load(self, handler: LoadHandler, model: Mapping[str, Any], *, tag: str) -> None:
        """Make the engine load the two states that *handler* returns; *model* is the first of them."""
        engine, real = self.engine, self.engine.checkpoint_engine
        with scratch() as folder:
            # Empty files, because the loader checks that the files exist before it calls *handler*.
            put(Path(engine._get_ckpt_name(str(folder), tag)))
            put(Path(engine._get_zero_ckpt_name(str(folder), tag)))
            engine.checkpoint_engine = handler
            try:
                path, _ = engine.load_checkpoint(
                    str(folder),
                    tag=tag,
                    load_module_strict=model.get("frozen_param_fragments") is not None,
                    load_lr_scheduler_states=model.get("lr_scheduler") is not None,
                )
            finally:
                engine.checkpoint_engine = real
        if path is None:
            raise Unsupported(
                "DeepSpeed did not load what it was given",
                hint="use a DeepSpeed that layerstore was tested with",
            )

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """
        Partition all parameters, as the engine's own save does, if slices might be on NVMe.

        Otherwise this does nothing, since slices are in memory even while their parameters are gathered. Partitioning
        and gathering take a collective for each persistent parameter, which would be most of a save's time.
        """
        if not self._swaps_parameters:
            yield
            return
        if self.engine._optimizer_has_ckpt_event_prologue():
            self._zero.checkpoint_event_prologue()
        yield
        if self.engine._optimizer_has_ckpt_event_epilogue():
            self._zero.checkpoint_event_epilogue()

    def _ungather(self, module: dict[str, Any]) -> None:
        """Replace gathered parameters in *module* with empty tensors, as if they were partitioned."""
        gathered = {
            _place(parameter): parameter.new_empty(0)
            for parameter in self.engine.module.parameters()
            if hasattr(parameter, "ds_id") and tuple(parameter.shape) != (0,)
        }
        for name, value in module.items() if gathered else ():
            if hasattr(value, "untyped_storage"):
                module[name] = gathered.get(_place(value), value)

    @property
    def state_bytes(self) -> int:
        """The bytes of this rank's masters and moments; until the optimizer has moments, Adam's are assumed."""
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        flats = next(getattr(self._zero, name) for name in names if hasattr(self._zero, name))
        masters = sum(flat.numel() * flat.element_size() for flat in flats)
        values = (value for state in self._zero.optimizer.state.values() for value in state.values())
        moments = sum(value.numel() * value.element_size() for value in values if hasattr(value, "numel"))
        return int(masters + (moments or 2 * masters))

    @property
    def scripts(self) -> list[Path]:
        """The scripts that DeepSpeed puts next to its shards."""
        import deepspeed

        folder = Path(os.path.dirname(deepspeed.__file__), "utils")  # noqa: PTH120  # as DeepSpeed finds them
        return [path for name in ("zero_to_fp32.py", "zero_to_torch.py") if (path := folder / name).is_file()]


def _wrapped_load(engine: Any, own: LoadHandler) -> Callable[..., Any]:
    """Return *engine*'s ``load_checkpoint``, wrapped so that each load runs inside *own*."""
    load = engine.load_checkpoint
    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_checkpoint(*arguments: Any, **named: Any) -> Any:
        if engine.checkpoint_engine is not own:  # the program has replaced it since
            return load(*arguments, **named)
        given = signature.bind(*arguments, **named).arguments
        has_optimizer = bool(given.get("load_optimizer_states", True))
        is_module_only = bool(given.get("load_module_only", False))
        loads_no_weights = is_module_only and has_optimizer and engine.zero_optimization_stage() == STAGE_3
        note = _MODULE_ONLY if loads_no_weights else ""
        with own.loading(is_whole=has_optimizer and not is_module_only, note=note), _providing_weights(engine, own):
            return load(*arguments, **named)

    return load_checkpoint


@contextmanager
def _providing_weights(engine: Any, own: LoadHandler) -> Iterator[None]:
    """
    Provide whole weights from *own* while *engine* loads.

    To load without the optimizer's state, DeepSpeed assembles the masters from the files of all ranks, with a function
    that reads the files itself. That function is replaced in the engine's module during the load.
    """
    from deepspeed.runtime import engine as module

    real = module.get_fp32_state_dict_from_zero_checkpoint

    def weights(folder: str, tag: str | None = None, *arguments: Any, **named: Any) -> Any:
        with suppress(SourceCheckpoint):
            tag = tag or read_latest(Path(folder))
        # Called even if this rank finds no tag: other ranks may find a tag, and the call is collective.
        whole = own.whole_weights(Path(engine._get_ckpt_name(folder, tag or "")))
        return real(folder, tag, *arguments, **named) if whole is None else whole

    module.get_fp32_state_dict_from_zero_checkpoint = weights
    try:
        yield
    finally:
        module.get_fp32_state_dict_from_zero_checkpoint = real


def engine_of(model: Any, optimizer: Any) -> Any:
    """
    Return the engine that trains *model*: callbacks get only the bare model, which has no link to its engine.

    Earlier engines of *model* may still be alive, so *optimizer*, perhaps in Accelerate's wrapper, tells them apart.

    Raises:
        InvalidInput: No engine trains *model*; or several do, and the optimizer does not identify one of them.
    """
    optimizers = (optimizer, getattr(optimizer, "optimizer", None))
    engines = _engines_where(lambda engine: getattr(engine, "module", None) is model)
    return _only([engine for engine in engines if any(engine.optimizer is own for own in optimizers)] or engines)


def engine_with(checkpoint_engine: Any) -> Any:
    """Return the engine that saves and loads with *checkpoint_engine*, which has no link to its engine."""
    return _only(_engines_where(lambda engine: getattr(engine, "checkpoint_engine", None) is checkpoint_engine))


def _engines_where(matches: Callable[[Any], bool]) -> list[Any]:
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is None:
        return []  # no engine exists if DeepSpeed was never imported
    kind = deepspeed.DeepSpeedEngine
    return [engine for engine in gc.get_objects() if issubclass(type(engine), kind) and matches(engine)]


def _only(engines: list[Any]) -> Any:
    if not engines:
        raise InvalidInput(
            "the Trainer trains under neither DeepSpeed nor FSDP2",
            hint="pass TrainingArguments(deepspeed=CONFIG) with ZeRO stage 1, 2 or 3; or, on a GPU, fsdp=True",
        )
    if len(engines) > 1:
        raise InvalidInput(
            f"there are {len(engines)} DeepSpeed engines of this {type(engines[0].module).__name__}, and it is unclear "
            "which one is the Trainer's",
            hint="delete the others first, or pass the Trainer's own to layerstore.attach",
        )
    return engines[0]


def engines_are_made_with(wrapper: Callable[[Any], Any]) -> None:
    """
    Wrap the checkpoint engine of each new engine with *wrapper* from now on.

    DeepSpeed's config has no key for this, so its factory function is replaced.
    """
    from deepspeed.runtime import engine

    make = getattr(engine, "create_checkpoint_engine", None)
    if make is None:
        raise Unsupported(
            f"DeepSpeed {getattr(engine, 'version', '')} is too old for a Trainer to resume from pointers",
            hint="use DeepSpeed 0.17.1 or newer",
        )
    if getattr(make, "wrapper", None) is wrapper:
        return

    @functools.wraps(make)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return wrapper(make(*arguments, **named))

    wrapped.wrapper = wrapper  # type: ignore[attr-defined]
    engine.create_checkpoint_engine = wrapped


def _size_of(group: Any) -> int:
    import torch.distributed as dist

    return int(dist.get_world_size(group=group))


def _rank_in(group: Any) -> int:
    import torch.distributed as dist

    return int(dist.get_rank(group=group))


class _Catcher:
    """A checkpoint engine that keeps the state instead of writing it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Keep *state_dict*."""
        self.state = state_dict

    def preserves_storage_sharing(self) -> bool:
        """Return False: tensors need not be cloned."""
        return False


def _place(tensor: Any) -> tuple[int, int]:
    """Return a key for the memory of *tensor*."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def _fragment(parameter: Any) -> "torch.Tensor":
    held: torch.Tensor = (parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter).detach()
    return held
