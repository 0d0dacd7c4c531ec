"""A composite's weights as torch tensors in memory, for ``model.load_state_dict``; imports torch when it is called."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from layerstore.arrays.tensors import Tensors, open_tensors
from layerstore.assemble import fill_pieces
from layerstore.dtypes import FLOATS, by_code, dtype_code
from layerstore.model import BlobRef, Kind, LayerVersion, Parameter
from layerstore.slices import Slices
from layerstore.storage import Repository

if TYPE_CHECKING:
    import torch


def make_state_dict(
    repo: Repository, versions: Sequence[LayerVersion], slices: Slices, *, dtype: str | None, verify: bool
) -> "dict[str, torch.Tensor]":
    """
    Return all weights and buffers of *versions* by name; each is a copy in memory, which tied names share.

    Raises:
        InvalidInput: *dtype* is not an element type.
        IntegrityError: An object is damaged or missing.
    """
    wanted_code = dtype_code(dtype)
    masters, weights, buffers = (
        open_tensors(repo, versions, kind=kind, state=None, verify=verify) for kind in ("master", "weights", "buffers")
    )
    tensors: dict[str, torch.Tensor] = {}
    verified: set[BlobRef] | None = set() if verify else None
    for parameter in (own for version in versions for own in version.parameters):
        name = parameter.name
        code = wanted_code if wanted_code is not None and parameter.dtype in FLOATS else parameter.dtype
        if slices.is_mean(name):
            tensors[name] = _mean(repo, slices, parameter, code, verified=verified)
            tensors |= dict.fromkeys(parameter.aliases, tensors[name])
            continue
        # Stored weights differ from the rounded master, so they are used for their own type. For other types, the
        # master is more precise.
        is_kept = name in weights and (weights.dtype(name) == code or name not in masters)
        if is_kept or name in masters:
            tensors[name] = _tensor(weights if is_kept else masters, name, code)
            tensors |= dict.fromkeys(parameter.aliases, tensors[name])
    return tensors | {name: _tensor(buffers, name, buffers.dtype(name)) for name in buffers}


def _tensor(source: Tensors, name: str, code: str) -> "torch.Tensor":
    """Return a copy of the tensor *name* of *source* as the element type *code*."""
    import torch

    stored: torch.dtype = getattr(torch, by_code(source.dtype(name)).torch_name)
    wanted: torch.dtype = getattr(torch, by_code(code).torch_name)
    return torch.from_numpy(source[name].copy()).view(stored).to(wanted)


def _mean(
    repo: Repository, slices: Slices, parameter: Parameter, code: str, *, verified: set[BlobRef] | None
) -> "torch.Tensor":
    """Return the master of *parameter*, a mean, as the element type *code*; with *verified* None, verify no object."""
    import torch

    pieces = slices.pieces(Kind.MASTER, parameter.name, dtype="F32", offset=0)
    data = bytearray(prod(parameter.shape) * by_code("F32").bytes)
    fill_pieces(repo, pieces, memoryview(data), verified)
    # torch.frombuffer refuses an empty buffer.
    master = torch.frombuffer(data, dtype=torch.float32) if data else torch.empty(0)
    target_type: torch.dtype = getattr(torch, by_code(code).torch_name)
    return master.reshape(parameter.shape).to(target_type)
