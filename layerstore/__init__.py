"""layerstore: a layer-versioned, content-addressed checkpoint store for DeepSpeed ZeRO-3."""

from typing import TYPE_CHECKING

from layerstore import errors
from layerstore.errors import LayerstoreError

if TYPE_CHECKING:
    from layerstore.store import Composite, Store, init
    from layerstore.store import open_store as open  # noqa: A004  # reads as layerstore.open(path)

__all__ = ["Composite", "LayerstoreError", "Store", "errors", "init", "open"]
__version__ = "0.1.0"

# Loaded at first use: the store brings numpy and lmdb along, which ``layerstore --help`` need not wait for.
_FROM_STORE = {"Composite": "Composite", "Store": "Store", "init": "init", "open": "open_store"}


def __getattr__(name: str) -> object:
    if name not in _FROM_STORE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from layerstore import store

    value: object = getattr(store, _FROM_STORE[name])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM_STORE})
