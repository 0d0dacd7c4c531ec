"""
Load one rank's share of a composite as live objects, and check that it fits the engine.

Everything is checked before the engine's loader changes anything. DeepSpeed's loader would notice a mismatch only with
half of the engine filled, or never, because it copies only as many flat buffers as both sides have.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from layerstore.arrays import Tensors
from layerstore.compose import Composition
from layerstore.composite import Composite
from layerstore.dtypes import by_code
from layerstore.errors import InvalidInput, LayoutMismatch, Unsupported
from layerstore.live.deepspeed.capture import SavedStates
from layerstore.live.deepspeed.engine import ZeroEngine
from layerstore.live.engine import Maker, bytes_of, empty, revive
from layerstore.live.ranks import Exchange, OwnVersions, own_versions, versions_to_load
from layerstore.rank_options import AdamStep
from layerstore.shards import RankLoad
from layerstore.store import Store
from layerstore.tree import Storage
from layerstore.zero3.trees import STAGE_3

if TYPE_CHECKING:
    import torch

_MODEL_HINT = "resume into the model that was saved"
_GROUPS_HINT = "build the optimizer's param groups as they were, and keep sub_group_size"
_PRECISION_HINT = "train in the same precision"


class Loaded:
    """One rank's ``model_states`` and ``optim_states`` of a composite as live objects, made on first use."""

    def __init__(
        self,
        store: Store,
        composition: Composition,
        *,
        rank: int,
        world_size: int,
        stage: int | None = None,
        adam_step: AdamStep = "unify",
        like: str | None = None,
        own_versions: OwnVersions = MappingProxyType({}),
    ) -> None:
        """
        Plan the load for *rank* of *world_size* under ZeRO *stage*; None means the stage that saved the composite.

        Versions are read from the store, except those in *own_versions*.

        Raises:
            Unsupported: The composite cannot be loaded under *stage*.
        """
        base = composition.base
        if stage not in {None, STAGE_3} and base.stage == STAGE_3 and not base.is_dcp:
            raise Unsupported(
                f"{base.run}@{base.step} was saved under ZeRO stage 3, but the engine trains under stage {stage}",
                hint="set zero_optimization.stage to 3; or compose --format universal, which every stage loads",
            )
        self.store = store
        self.composition = composition
        self.name = f"{composition.base.run}@{composition.base.step}"
        self.load = RankLoad(
            store.repo,
            composition,
            rank=rank,
            world_size=world_size,
            as_zero3=stage == STAGE_3,
            adam_step=adam_step,
            like=like,
            own_versions=own_versions,
        )
        if base.is_dcp and stage not in {None, self.load.stage}:
            raise Unsupported(
                f"{self.name} continues as ZeRO stage {self.load.stage}, but the engine trains under stage {stage}",
                hint=f"set zero_optimization.stage to {self.load.stage}, or to 3",
            )

    def model(self) -> dict[str, Any]:
        """Return the content of ``model_states`` in a new dict; the tensors have their own memory."""
        return dict(self._model)

    def optimizer(self) -> dict[str, Any]:
        """Return the content of ``optim_states`` in a new dict."""
        return dict(self._optimizer)

    @cached_property
    def _model(self) -> dict[str, Any]:
        made: dict[str, Any] = revive(self.load.state.model.tree, self._filled, zero_makers())
        return made

    @cached_property
    def _optimizer(self) -> dict[str, Any]:
        made: dict[str, Any] = revive(self.load.state.optimizer.tree, self._filled, zero_makers())
        return made

    def _filled(self, storage: Storage) -> "torch.Tensor":
        made = empty(storage)
        if storage.elements:
            self.load.fill(storage, bytes_of(made))
        return made

    def check_fits(self, engine: ZeroEngine, *, is_whole: bool = True) -> tuple[str, ...]:
        """
        Read and verify everything to be loaded, and compare it with *engine*; return notes on what does not carry over.

        Unless *is_whole*, the optimizer's state is not loaded, and nothing is compared.

        Raises:
            InvalidInput: Gradients are being accumulated for an update that is still to come.
            LayoutMismatch: The composite belongs to a different model, optimizer or precision.
            IntegrityError: Part of the composite is damaged.
        """
        if not engine.is_at_boundary:
            raise InvalidInput(
                "cannot resume: gradients are being accumulated for an update that is still to come",
                hint="resume after engine.step() at the end of an accumulation, best before training",
            )
        notes = self.load.notes
        if not is_whole:
            self.model()
            return notes
        states = engine.states("resumed", {}, exclude_frozen=True)
        self._check_precision(states.optimizer_path.name)
        check_fits(self.model(), self.optimizer(), states, frozen=engine.frozen_shapes)
        return (*notes, *schedule_notes(self.model(), states))

    def _check_precision(self, name: str) -> None:
        """Raise LayoutMismatch unless *name*, the engine's own optimizer file, has the same precision."""
        saved = PurePosixPath(self.load.state.optimizer.path).name
        words = ["with" if file_name.startswith("bf16_") else "without" for file_name in (saved, name)]
        if words[0] != words[1]:
            raise LayoutMismatch(
                f"the checkpoint was saved {words[0]} bf16, but the engine trains {words[1]} it",
                hint=_PRECISION_HINT,
            )


def read_for(
    engine: ZeroEngine,
    exchange: Exchange,
    store: Store,
    composition: Composition,
    *,
    is_whole: bool = True,
    adam_step: AdamStep = "unify",
    like: str | None = None,
) -> tuple[Loaded, tuple[str, ...]]:
    """
    Return *composition* as *engine* loads it, and the notes of `Loaded.check_fits`. Collective.

    Raises the errors of `Loaded` and `Loaded.check_fits`, perhaps on one rank alone.
    """
    own: OwnVersions = {}
    if is_whole and _needs_own_slices(engine, composition):
        # This collective comes first: if one rank had failed before it, the others would wait in it.
        own = own_versions(exchange, store.repo, versions_to_load(composition))
    loaded = Loaded(
        store,
        composition,
        rank=engine.rank,
        world_size=engine.world_size,
        stage=engine.stage,
        adam_step=adam_step,
        like=like,
        own_versions=own,
    )
    return loaded, loaded.check_fits(engine, is_whole=is_whole)


def _needs_own_slices(engine: ZeroEngine, composition: Composition) -> bool:
    """Whether each rank of *engine* needs only the slices of *composition* that it saved itself."""
    base = composition.base
    # Under stages 1 and 2 every rank needs all weights.
    is_stage_3 = base.stage == engine.stage == STAGE_3 and not base.is_dcp
    return is_stage_3 and 1 < base.world_size == engine.world_size and composition.mean is None


def zero_makers() -> dict[str, Maker]:
    """Return the makers of the few DeepSpeed classes that DeepSpeed's states hold."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return {
        "deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStageEnum,
        "deepspeed.runtime.fp16.loss_scaler.LossScaler": lambda *_: LossScaler.__new__(LossScaler),
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": lambda *_: DynamicLossScaler.__new__(DynamicLossScaler),
        "deepspeed.utils.tensor_fragment.fragment_address": lambda *_: fragment_address.__new__(fragment_address),
    }


def whole_weights(store: Store, composition: Composition) -> "dict[str, torch.Tensor]":
    """
    Return the masters, frozen weights and buffers of *composition* by name, each whole and verified.

    The result equals that of DeepSpeed's ``zero_to_fp32``, in the same order: DeepSpeed's loader uses it in place of
    that result if the optimizer's state is not requested. Buffers are rank 0's, converted to float32 if floating-point.
    """
    composite = Composite(store.repo, composition)
    masters, frozen = composite.tensors("master"), composite.tensors("weights")
    # Stage 3, because DeepSpeed loads whole weights only under that stage.
    model = Loaded(store, composition, rank=0, world_size=composition.base.world_size, stage=STAGE_3).model()
    weights = {
        name: value.float() if value.is_floating_point() else value
        for name, value in model["module"].items()
        if name in model["buffer_names"]
    }
    for name, shape in (model["frozen_param_shapes"] or {}).items():
        # A parameter without elements is not stored, so make an empty tensor for it.
        weights[name] = (
            _tensor(frozen, name) if name in frozen else model["frozen_param_fragments"][name].new_empty(shape)
        )
    weights |= {name: _tensor(masters, name) for group in model["param_shapes"] for name in group}
    weights |= {alias: weights[name] for alias, name in model["shared_params"].items() if name in weights}
    return weights


def _tensor(tensors: Tensors, name: str) -> "torch.Tensor":
    import torch

    made = torch.empty(tensors.shape(name), dtype=getattr(torch, by_code(tensors.dtype(name)).torch_name))
    target, offset = bytes_of(made.view(-1)), 0
    for part in tensors.parts(name):
        target[offset : offset + part.nbytes] = part.data.cast("B")
        offset += part.nbytes
    return made


# -- comparing a checkpoint with an engine ---------------------------------------------------------------------------


def check_fits(
    model: Mapping[str, Any], optimizer: Mapping[str, Any], states: SavedStates, *, frozen: Mapping[str, Iterable[int]]
) -> None:
    """
    Compare a checkpoint's *model* and *optimizer* states with the engine's own *states*.

    *frozen* are the shapes of the engine's frozen parameters, which are not in *states*.

    Raises:
        LayoutMismatch: Parameters, buffers, types or the optimizer's groups differ.
    """
    saved_frozen = model.get("frozen_param_shapes")
    if saved_frozen is None:  # under stage 1, they are only in the module
        saved_frozen = {name: model["module"][name].shape for name in frozen if name in model["module"]} or None
    # Frozen parameters that were not saved are not compared: the engine keeps its own.
    saved = _facts(model, optimizer, frozen=saved_frozen or {})
    own = _facts(states.model, states.optimizer, frozen={} if saved_frozen is None else frozen)
    for (what, hint), ours in own.items():
        theirs = saved[what, hint]
        different = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
        if different:
            first, more = different[0], f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise LayoutMismatch(
                f"{what} {first}{more}: {_short(theirs.get(first, 'absent'))} in the checkpoint, "
                f"{_short(ours.get(first, 'absent'))} in the engine",
                hint=hint,
            )


def schedule_notes(model: Mapping[str, Any], states: SavedStates) -> tuple[str, ...]:
    """Return a note if a learning rate schedule does not carry over."""
    saved, own = (state.get("lr_scheduler") is not None for state in (model, states.model))
    if saved and not own:
        return ("the engine has no learning rate schedule: the checkpoint's is left out",)
    if own and not saved:
        return ("the checkpoint has no learning rate schedule: the engine's starts over",)
    return ()


def _facts(
    model: Mapping[str, Any], optimizer: Mapping[str, Any], *, frozen: Mapping[str, Iterable[int]]
) -> dict[tuple[str, str], Mapping[Any, object]]:
    """Return the facts that must be the same on both sides, by name, each with the hint for a mismatch."""
    module, groups = model["module"], model["param_shapes"]
    outer = optimizer["optimizer_state_dict"]
    is_stage_3 = "fp32_flat_groups" in outer
    flats = outer["fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"]
    inner = outer["optimizer_state_dict" if is_stage_3 else "base_optimizer_state"]
    trained = {name: list(shape) for group in groups for name, shape in group.items()}
    buffers = {name: list(module[name].shape) for name in model["buffer_names"] if name in module}
    counts = [len(group["params"]) for group in inner["param_groups"]]
    return {
        ("parameter", _MODEL_HINT): {name: list(shape) for name, shape in frozen.items()} | trained,
        ("trained parameter", _MODEL_HINT): trained,
        ("buffer", _MODEL_HINT): buffers,
        ("the type of", _PRECISION_HINT): {name: module[name].dtype for name in trained if name in module},
        ("the sub-groups of param group", _GROUPS_HINT): dict(enumerate(counts)),
        ("the parameters of sub-group", _GROUPS_HINT): dict(enumerate(map(list, groups))),
        # Only under stage 3: under 1 and 2 equal parameters make equal partitions, but some optimizers pad masters.
        ("the elements of sub-group", _GROUPS_HINT): dict(enumerate(flat.numel() for flat in flats if is_stage_3)),
        ("the type of sub-group", _PRECISION_HINT): dict(enumerate(flat.dtype for flat in flats)),
    }


def _short(value: object) -> str:
    text = str(value).removeprefix("torch.")
    return text if len(text) <= 60 else f"{text[:60]}…"
