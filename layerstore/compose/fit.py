"""Whether a layer of one save can take the place of the same layer of another, whoever trained."""

from typing import Protocol

from layerstore.model import Buffer, LayerVersion, Parameter
from layerstore.numbers import can_convert


class Described(Protocol):
    """What says which parameters and buffers a layer has."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters."""

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Its buffers."""


def difference(base: LayerVersion, other: LayerVersion, *, states: bool = True) -> str | None:
    """Say how the version *other* of a layer does not fit *base*; None if it fits. *states* are the optimizer's."""
    if (found := mismatch(base, other)) is not None:
        return found
    for name, state in sorted(base.optimizer_states ^ other.optimizer_states) if states else ():
        has_it = "only the base has" if (name, state) in base.optimizer_states else "the base has no"
        return f"{has_it} the optimizer state {state!r} of {name!r}"
    return None


def mismatch(base: Described, other: Described) -> str | None:
    """Say how the parameters and buffers of *other* do not fit those of *base*; None if they do."""
    ours, theirs = _by_name(base), _by_name(other)
    for name in sorted(ours.keys() ^ theirs.keys()):
        return f"{_kind(ours.get(name) or theirs[name])} {name!r} is {'missing' if name in ours else 'not in the base'}"
    for name, mine in ours.items():
        if not _are_alike(mine, theirs[name]):
            return f"{_kind(mine)} {name!r} is {_facts(theirs[name])}, in the base {_facts(mine)}"
    return None


def _are_alike(mine: Parameter | Buffer, theirs: Parameter | Buffer) -> bool:
    """
    Whether one can take the place of the other: FSDP2 trains fp32 parameters, DeepSpeed bf16 ones with fp32 masters.

    FSDP2 keeps buffers as it keeps frozen parameters, and DCP's own saves do not say what is tied.
    """
    types = {mine.dtype, theirs.dtype}
    is_type_alike = len(types) == 1 or ("F32" in types and all(can_convert("F32", dtype) for dtype in types))
    tied = [_tied_with(mine), _tied_with(theirs)]
    is_tied_alike = tied[0] == tied[1] or not all(tied)
    return mine.shape == theirs.shape and _is_trained(mine) == _is_trained(theirs) and is_type_alike and is_tied_alike


def _is_trained(of: Parameter | Buffer) -> bool:
    return isinstance(of, Parameter) and not of.frozen


def _tied_with(of: Parameter | Buffer) -> tuple[str, ...]:
    return of.aliases if isinstance(of, Parameter) else ()


def _by_name(version: Described) -> dict[str, Parameter | Buffer]:
    parameters = {item.name: item for item in version.parameters}
    return {**parameters, **{item.name: item for item in version.buffers}}


def _kind(item: Parameter | Buffer) -> str:
    return "parameter" if isinstance(item, Parameter) else "buffer"


def _facts(item: Parameter | Buffer) -> str:
    facts = f"{item.dtype} {'×'.join(map(str, item.shape)) or 'a scalar'}"
    if isinstance(item, Parameter) and item.frozen:
        facts += ", frozen"
    if isinstance(item, Parameter) and item.aliases:
        facts += f", tied with {', '.join(item.aliases)}"
    return facts
