"""
The optimizer's state for each parameter, as PyTorch keeps it; DeepSpeed keeps one state for each sub-group.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from layerstore.errors import LayoutMismatch
from layerstore.model import LayerEntry, LayerVersion
from layerstore.states import FlatContent, RankState
from layerstore.tree import Size, Storage, Tensor, Tree
from layerstore.zero3.trees import (
    STEP,
    TreeView,
    config_of,
    count_of,
    inner_optimizer,
    members_of,
    sub_group_shapes,
)

# The settings of torch's Adam and AdamW in each group. DeepSpeed's optimizers have fewer, but a reader needs them all.
_SETTINGS_OF_ADAM: dict[str, Tree] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
_SECOND_MOMENT = "exp_avg_sq"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """A param group."""

    settings: dict[str, Tree]
    parameters: tuple[str, ...]
    """In the order in which the optimizer was given them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """What the optimizer keeps, apart from the slices."""

    groups: tuple[ParamGroup, ...]
    sliced: Mapping[str, tuple[str, ...]]
    """By parameter: the states that are as large as the parameter."""
    scalars: Mapping[str, Mapping[str, Tree]]
    """By parameter: its other states, such as the step."""
    torch_settings: Mapping[str, Tree]
    """The per-group settings of torch's Adam, some of which DeepSpeed's may lack; empty for other optimizers."""
    notes: tuple[str, ...]

    def alike(self) -> Iterator[tuple[str, Tree, list[str]]]:
        """Yield each scalar state once for each of its values, with that value and the parameters that have it."""
        by_value: dict[tuple[str, object], tuple[Tree, list[str]]] = {}
        for name, states in self.scalars.items():
            for state, value in states.items():
                same = value.storage.content if isinstance(value, Tensor) else repr(value)
                by_value.setdefault((state, same), (value, []))[1].append(name)
        for (state, _), (value, names) in by_value.items():
            yield state, value, names


def optimizer_of(
    state: RankState, versions: Sequence[LayerVersion], *, entries: Mapping[str, LayerEntry]
) -> OptimizerState:
    """
    Return the optimizer in *state* (the first rank's, in stage 3's form); *versions* are the versions of all layers.

    Each parameter in *entries* gets the counter of its entry, all others the counter in *state*.

    Raises:
        LayoutMismatch: A layer, or *state*, has no counter of its own.
    """
    model, inner = TreeView.of(state.model), inner_optimizer(state)
    shapes = sub_group_shapes(model)
    is_adam = any(_SECOND_MOMENT in entry.mapping() for _, entry in inner["state"].children())
    groups: list[ParamGroup] = []
    scalars: dict[str, dict[str, Tree]] = {}
    groups_of = inner["param_groups"].children()
    for number, sub_groups in members_of(state):
        settings = groups_of[number][1].mapping()
        own = {str(key): value for key, value in settings.items() if key != "params"}
        names = tuple(name for group in sub_groups for name in shapes[group])
        groups.append(ParamGroup(settings=own, parameters=names))
        for group in sub_groups:
            state_of = inner["state"].get(group)
            if state_of is not None:
                of_group = state_of.mapping()
                scalars |= {name: _scalars(of_group, entries.get(name)) for name in shapes[group]}
    # From the layers, not from *state*: a mixture's layers come from other saves, with moments that *state* may lack.
    sliced = {name: tuple(sorted(states)) for name, states in _sliced(versions).items()}
    notes = [] if sliced else ["the optimizer has made no step yet: it has no moments"]
    if (
        is_adam
        and config_optimizer(model) is None
        and not all("decoupled_weight_decay" in param_group.settings for param_group in groups)
    ):
        notes.append(
            "the base's optimizer does not say whether its weight decay is decoupled: assumed decoupled, as in AdamW"
        )
    return OptimizerState(
        groups=tuple(groups),
        sliced=sliced,
        scalars=scalars,
        torch_settings=_settings(model) if is_adam else {},
        notes=tuple(notes),
    )


def _sliced(versions: Iterable[LayerVersion]) -> dict[str, list[str]]:
    sliced: dict[str, list[str]] = {}
    for version in versions:
        for name, state in version.optimizer_states:
            sliced.setdefault(name, []).append(state)
    return sliced


def _scalars(kept: Mapping[Tree, Tree], entry: LayerEntry | None) -> dict[str, Tree]:
    """Return a sub-group's states other than slices; the counter becomes a tensor, with *entry*'s count if given."""
    scalars: dict[str, Tree] = {}
    for key, value in kept.items():
        if key == STEP:
            scalars[STEP] = _counter(value, entry)
        elif not (isinstance(value, Tensor) and isinstance(value.storage.content, FlatContent)):
            scalars[str(key)] = value
    return scalars


def _counter(value: Tree, entry: LayerEntry | None) -> Tensor:
    count = count_of(value) if entry is None else entry.optimizer_step
    if count is None:
        holder = "the base" if entry is None else f"layer {entry.layer!r}"
        raise LayoutMismatch(f"{holder} has no optimizer step of its own", hint="compose with --adam-step unify")
    storage = Storage(dtype="F32", elements=1, device="cpu", content=struct.pack("<f", count))
    return Tensor(storage=storage, offset=0, shape=Size(()), stride=())


def config_optimizer(model: TreeView) -> dict[Tree, Tree] | None:
    """Return the optimizer that DeepSpeed's config asks for; None if the training script makes it."""
    optimizer = (config_of(model) or {}).get("optimizer")
    return optimizer if isinstance(optimizer, dict) else None


def _settings(model: TreeView) -> dict[str, Tree]:
    """Return the settings of torch's Adam; its weight decay is decoupled unless DeepSpeed's config states otherwise."""
    chosen = (config_optimizer(model) or {}).get("params")
    is_decoupled = chosen.get("adam_w_mode", True) if isinstance(chosen, dict) else True
    return {**_SETTINGS_OF_ADAM, "decoupled_weight_decay": is_decoupled}
