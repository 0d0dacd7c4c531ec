"""layerstore: a layer-versioned, content-addressed checkpoint store for DeepSpeed ZeRO-3."""

from layerstore import errors
from layerstore.errors import LayerstoreError
from layerstore.store import Composite, Store, init
from layerstore.store import open_store as open  # noqa: A004  # reads as layerstore.open(path)

__all__ = ["Composite", "LayerstoreError", "Store", "errors", "init", "open"]
__version__ = "0.1.0"
