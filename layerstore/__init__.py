"""layerstore: a layer-versioned, content-addressed checkpoint store for DeepSpeed ZeRO-3."""

from importlib import import_module
from typing import TYPE_CHECKING

from layerstore import errors
from layerstore.errors import LayerstoreError

if TYPE_CHECKING:
    from layerstore.composite import Composite
    from layerstore.live import Resumed, Saver, attach, resume
    from layerstore.policy import Drift, Filter, Keep, Latest, Parity
    from layerstore.store import Store, clone, doctor, find_checkpoints, init
    from layerstore.store import open_store as open  # noqa: A004  # reads as layerstore.open(path)

__all__ = [
    "Composite",
    "Drift",
    "Filter",
    "Keep",
    "Latest",
    "LayerstoreError",
    "Parity",
    "Resumed",
    "Saver",
    "Store",
    "attach",
    "clone",
    "doctor",
    "errors",
    "find_checkpoints",
    "init",
    "open",
    "resume",
]
__version__ = "0.1.0"

# Loaded on first use: the store imports numpy and lmdb, and ``layerstore --help`` need not wait for those.
_HOMES = {
    "Composite": ("composite", "Composite"),
    "Resumed": ("live", "Resumed"),
    "Saver": ("live", "Saver"),
    "attach": ("live", "attach"),
    "Store": ("store", "Store"),
    "clone": ("store", "clone"),
    "doctor": ("store", "doctor"),
    "find_checkpoints": ("store", "find_checkpoints"),
    "init": ("store", "init"),
    "open": ("store", "open_store"),
    "resume": ("live", "resume"),
    **{policy: ("policy", policy) for policy in ("Drift", "Filter", "Keep", "Latest", "Parity")},
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from layerstore.host import check_host

    check_host()  # before anything loads that might read or write a store
    module, own_name = _HOMES[name]
    value: object = getattr(import_module(f"layerstore.{module}"), own_name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
