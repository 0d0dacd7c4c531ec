"""
For torch.distributed.checkpoint: its own ``save``, ``async_save`` and ``load``, to and from a store.

    from torch.distributed.checkpoint import load, save
    from layerstore.dcp import StoreReader, StoreWriter

    save(state, storage_writer=StoreWriter("runs/store", run="sft", step=100, policy="parity"))
    load(state, storage_reader=StoreReader("runs/store", "sft@100"))
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerstore.live.dcp.reader import StoreReader
    from layerstore.live.dcp.writer import StoreWriter

__all__ = ["StoreReader", "StoreWriter"]

# Loaded on first use: these modules import torch.
_HOMES = {"StoreReader": "reader", "StoreWriter": "writer"}

if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"layerstore.live.dcp.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
