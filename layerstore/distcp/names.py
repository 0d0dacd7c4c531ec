"""
The keys of a composite's tensors and values in a distributed checkpoint.

A commit saved by DCP keeps its keys. A commit saved by DeepSpeed gets the keys of
``torch.distributed.checkpoint.state_dict.get_state_dict``, nested and flattened, below ``model`` and ``optim``, and
the keys that torchtitan and the HF Trainer use for the same tensors; the fp32 masters are written as the weights.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from layerstore.assemble import export_notes
from layerstore.compose import Composition
from layerstore.errors import LayoutMismatch
from layerstore.handover import DcpState, Held, KeyPath
from layerstore.layers import unwrapped
from layerstore.model import Buffer, Kind, LayerVersion, Parameter
from layerstore.rank_options import AdamStep
from layerstore.shards import check_has_moments, plan_optimizer
from layerstore.slices import Slices
from layerstore.storage import Repository
from layerstore.tree import Tensor, Tree
from layerstore.zero3.reshard import OptimizerState
from layerstore.zero3.trees import counter_like

_MODEL, _OPTIMIZER = "model", "optim"
_MODEL_ALIASES = ("",)
"""torchtitan puts a model's tensors at the top level."""
_OPTIMIZER_ALIASES = ("optimizer",)
"""The optimizer's key in torchtitan, Accelerate and the Trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A tensor or a value, with its path and keys."""

    path: KeyPath
    """The path of the tensor or value in the nested state."""
    keys: tuple[str, ...]
    """The keys that readers ask for: several for tied parameters, or if trainers use different keys."""
    dtype: str | None
    """Code of the element type; None for a value that is not a tensor."""
    shape: tuple[int, ...]
    layer: str = ""
    """The layer that holds it; empty for a value."""
    held: Held | None = None
    value: Tree = None

    @classmethod
    def of_value(cls, path: KeyPath, keys: tuple[str, ...], value: Tree) -> "Named":
        """Return *value*, which no layer holds, under *keys*."""
        if isinstance(value, Tensor):
            return cls(path=path, keys=keys, dtype=value.storage.dtype, shape=tuple(value.shape), value=value)
        return cls(path=path, keys=keys, dtype=None, shape=(), value=value)


def names_of(
    repo: Repository,
    composition: Composition,
    versions: Sequence[LayerVersion],
    slices: Slices,
    *,
    adam_step: AdamStep,
) -> tuple[list[Named], list[str]]:
    """
    Return everything in *composition*, whose layers are *versions*, and notes on what is left out.

    *adam_step* decides whether step counters come from the base or from each layer.

    Raises:
        LayoutMismatch: The base has no moments, or moments that belong to no single parameter; or a layer has no step
            of its own.
    """
    base = composition.base
    check_has_moments(base)
    state = repo.state(base.states[0])
    if base.is_dcp:
        own = DcpState.read(state)
        return list(_of_dcp(own, composition, versions, slices, adam_step)), []
    optimizer = plan_optimizer(repo, composition, versions, adam_step=adam_step)
    named = [*_of_layers(versions, slices, optimizer), *_of_optimizer(optimizer)]
    return named, [*optimizer.notes, *export_notes(state, list(versions), slices)]


def _of_dcp(
    state: DcpState,
    composition: Composition,
    versions: Sequence[LayerVersion],
    slices: Slices,
    adam_step: AdamStep,
) -> Iterator[Named]:
    layers = {parameter.name: version.layer for version in versions for parameter in version.parameters}
    steps = {entry.layer: entry.optimizer_step for entry in composition.layers}
    layers |= {buffer.name: version.layer for version in versions for buffer in version.buffers}
    described: dict[str, Parameter | Buffer] = {}
    for version in versions:
        described |= {entry.name: entry for entry in version.parameters} | {
            entry.name: entry for entry in version.buffers
        }
    for key, saved in state.tensors.items():
        tensor, held = described[saved.held.name], saved.held
        if isinstance(tensor, Buffer):  # in a layer that DeepSpeed saved
            held = replace(held, kind=Kind.BUFFERS)
        elif held.kind is not Kind.OPTIMIZER:  # one save may freeze a parameter that another trains
            held = replace(held, kind=Kind.MASTER if slices.shards(Kind.MASTER, tensor.name) else Kind.WEIGHTS)
        dtype = _dtype(slices, held, tensor.shape, default=tensor.dtype)
        yield Named(path=saved.path, keys=(key,), dtype=dtype, shape=tensor.shape, layer=layers[tensor.name], held=held)
    counted = {key: name for name, key in state.counters.items()} if adam_step == "per-layer" else {}
    for key, value in state.values.items():
        tree = value.tree
        if key in counted:
            layer = layers[counted[key]]
            if (step := steps[layer]) is None:
                raise LayoutMismatch(f"{layer} has no step counter of its own", hint="leave --adam-step at unify")
            tree = counter_like(tree, step)
        yield Named.of_value(value.path, (key,), tree)


def _dtype(slices: Slices, held: Held, shape: tuple[int, ...], *, default: str) -> str:
    """Return the element type of a tensor; *default* is for a tensor without elements."""
    return slices.dtype(held.kind, held.name, state=held.state) if prod(shape) else default


# -- from DeepSpeed ----------------------------------------------------------------------------------------------------


def _of_layers(versions: Iterable[LayerVersion], slices: Slices, optimizer: OptimizerState) -> Iterator[Named]:
    """Yield every parameter, its moments, and every buffer."""
    for version in versions:
        for parameter in version.parameters:
            kind = Kind.MASTER if slices.shards(Kind.MASTER, parameter.name) else Kind.WEIGHTS
            path, keys = _model_names(parameter.name, parameter.aliases)
            yield _named_tensor(slices, version.layer, path, keys, Held(kind=kind, name=parameter.name), parameter)
            for state in optimizer.sliced.get(parameter.name, ()):
                path, keys = _optimizer_names("state", unwrapped(parameter.name), state)
                held = Held(kind=Kind.OPTIMIZER, name=parameter.name, state=state)
                yield _named_tensor(slices, version.layer, path, keys, held, parameter, default="F32")
        for buffer in version.buffers:
            path, keys = _model_names(buffer.name)
            yield _named_tensor(slices, version.layer, path, keys, Held(kind=Kind.BUFFERS, name=buffer.name), buffer)


def _named_tensor(  # noqa: PLR0917  # all of one tensor
    slices: Slices,
    layer: str,
    path: KeyPath,
    keys: tuple[str, ...],
    held: Held,
    tensor: Any,
    *,
    default: str | None = None,
) -> Named:
    dtype = _dtype(slices, held, tensor.shape, default=default or tensor.dtype)
    return Named(path=path, keys=keys, dtype=dtype, shape=tensor.shape, layer=layer, held=held)


def _of_optimizer(optimizer: OptimizerState) -> Iterator[Named]:
    """Yield all optimizer state that is not as large as a parameter."""
    for state, value, names in optimizer.alike():
        for name in names:
            yield Named.of_value(*_optimizer_names("state", unwrapped(name), state), value)
    for index, group in enumerate(optimizer.groups):
        settings: Mapping[str, Tree] = {**optimizer.torch_settings, **group.settings}
        for key, value in settings.items():
            flat = [f"param_groups.{unwrapped(name)}.{key}" for name in group.parameters]
            yield Named.of_value(*_optimizer_names("param_groups", index, key, flat=flat), value)
        members: list[Tree] = [unwrapped(name) for name in group.parameters]
        yield Named.of_value(*_optimizer_names("param_groups", index, "params"), members)


def _model_names(name: str, tied: Iterable[str] = ()) -> tuple[KeyPath, tuple[str, ...]]:
    names = [unwrapped(alias) for alias in (name, *tied)]
    prefixes = [_MODEL, *_MODEL_ALIASES]
    return (_MODEL, names[0]), tuple(".".join(filter(None, (prefix, alias))) for alias in names for prefix in prefixes)


def _optimizer_names(*path: str | int, flat: Iterable[str] = ()) -> tuple[KeyPath, tuple[str, ...]]:
    """Return the path below the optimizer, and all keys; *flat* are the keys after flattening."""
    keys = [".".join(map(str, path)), *flat]
    return (_OPTIMIZER, *path), tuple(f"{prefix}.{key}" for key in keys for prefix in (_OPTIMIZER, *_OPTIMIZER_ALIASES))
