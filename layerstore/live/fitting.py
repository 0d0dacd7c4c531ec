"""
Whether what was saved is what an engine trains: asked before its loader changes anything.

DeepSpeed's loader would notice late, with half of the engine filled, or not at all: it copies as many flat buffers
as both sides have.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from layerstore.errors import LayoutMismatch
from layerstore.live.seams import SavedStates

Shape = tuple[int, ...]

_MODEL_HINT = "resume into the model that was saved"
_GROUPS_HINT = "build the optimizer's param groups as they were, and keep sub_group_size"


def check_fits(
    model: Mapping[str, Any], optimizer: Mapping[str, Any], states: SavedStates, *, frozen: Mapping[str, Shape]
) -> None:
    """
    Compare a checkpoint's *model* and *optimizer* states with what the engine would save: its *states*.

    *frozen* are the engine's parameters that are in neither.

    Raises:
        LayoutMismatch: Parameters, buffers or types are others, or dealt out to groups in another way.
    """
    _check_model(model, states.model, frozen)
    _check_optimizer(optimizer["optimizer_state_dict"], states.optimizer["optimizer_state_dict"])
    if _order(model) != _order(states.model):
        raise LayoutMismatch(
            "the checkpoint's parameters are in other sub-groups than the engine's, or in another order",
            hint=_GROUPS_HINT,
        )


def schedule_notes(model: Mapping[str, Any], states: SavedStates) -> tuple[str, ...]:
    """Return what is to be said of learning rate schedules: an engine may have another one than the checkpoint."""
    saved, own = (of.get("lr_scheduler") is not None for of in (model, states.model))
    if saved and not own:
        return ("the engine has no learning rate schedule: the checkpoint's is left out",)
    if own and not saved:
        return ("the checkpoint has no learning rate schedule: the engine's begins anew",)
    return ()


def _check_model(model: Mapping[str, Any], engines: Mapping[str, Any], frozen: Mapping[str, Shape]) -> None:
    saved_frozen = model.get("frozen_param_shapes")
    saved_shapes, own_shapes = _shapes(model), _shapes(engines)
    if saved_frozen is not None:  # otherwise they were left out, and the engine keeps its own
        _compare("parameter", saved_shapes | _plain(saved_frozen), own_shapes | dict(frozen))
    _compare("trained parameter", saved_shapes, own_shapes)
    _compare("buffer", _buffer_shapes(model), _buffer_shapes(engines))
    saved, own = model["module"], engines["module"]
    for name in own_shapes:
        if name in saved and name in own:
            _compare_types(name, saved[name], own[name])


def _check_optimizer(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    groups, own_groups = _groups(saved), _groups(own)
    if len(groups) != len(own_groups):
        raise LayoutMismatch(
            f"the checkpoint has {len(groups)} param groups, the engine's optimizer has {len(own_groups)}",
            hint=_GROUPS_HINT,
        )
    flats, own_flats = saved["fp32_flat_groups"], own["fp32_flat_groups"]
    if groups != own_groups or [flat.numel() for flat in flats] != [flat.numel() for flat in own_flats]:
        raise LayoutMismatch(
            f"the checkpoint has {len(flats)} sub-groups, the engine's optimizer {len(own_flats)}, or of other sizes",
            hint=_GROUPS_HINT,
        )
    for one, other in zip(flats, own_flats, strict=True):
        _compare_types("the masters", one, other)


def _compare_types(what: str, saved: Any, own: Any) -> None:
    if saved.dtype != own.dtype:
        words = [str(tensor.dtype).removeprefix("torch.") for tensor in (saved, own)]
        raise LayoutMismatch(
            f"{what} in the checkpoint: {words[0]}; in the engine: {words[1]}", hint="train in the same precision"
        )


def _compare(what: str, saved: Mapping[str, Shape], own: Mapping[str, Shape]) -> None:
    missing = [name for name in own if name not in saved]
    strange = [name for name in saved if name not in own]
    odd = [name for name in own if saved.get(name, own[name]) != own[name]]
    names = missing or strange or odd
    if not names:
        return
    first, more = names[0], f" and {len(names) - 1} more" if len(names) > 1 else ""
    if missing:
        fate = "in the engine and not in the checkpoint"
    elif strange:
        fate = "in the checkpoint and not in the engine"
    else:
        fate = f"of shape {list(saved[first])} in the checkpoint and of {list(own[first])} in the engine"
    raise LayoutMismatch(f"{what} {first}{more}: {fate}", hint=_MODEL_HINT)


def _shapes(model: Mapping[str, Any]) -> dict[str, Shape]:
    return {name: shape for group in model["param_shapes"] for name, shape in _plain(group).items()}


def _plain(shapes: Mapping[str, Iterable[int]]) -> dict[str, Shape]:
    return {name: tuple(shape) for name, shape in shapes.items()}


def _buffer_shapes(model: Mapping[str, Any]) -> dict[str, Shape]:
    module = model["module"]
    return {name: tuple(module[name].shape) for name in model["buffer_names"] if name in module}


def _groups(states: Mapping[str, Any]) -> list[int]:
    """Return how many sub-groups each param group has."""
    return [len(group["params"]) for group in states["optimizer_state_dict"]["param_groups"]]


def _order(model: Mapping[str, Any]) -> list[list[str]]:
    return [list(group) for group in model["param_shapes"]]
