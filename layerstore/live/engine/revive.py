"""
Turn an inert tree into live objects, for an engine to load.

Only listed classes are ever instantiated: this module lists those that any trainer's state may hold, and each
engine's package lists the few small classes of its own. Everything else is refused; no name in a tree is ever imported.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

from layerstore.dtypes import by_code
from layerstore.errors import Unsupported
from layerstore.tree import Global, Inert, OrderedMap, Size, Storage, Tensor, Tree

if TYPE_CHECKING:
    import torch

_DTYPE = "numpy.dtype"

_BY_THE_TRAINER = "compose a folder, and load it with the trainer's own loader if you trust it"

Fill = Callable[[Storage], "torch.Tensor"]
"""Returns the elements of a storage, in newly allocated memory."""

Maker = Callable[..., Any]
"""Makes an object of a class from the arguments in a tree."""


def revive(tree: Tree, fill: Fill, engine_makers: Mapping[str, Maker] | None = None) -> Any:
    """
    Return the objects that *tree* describes; tensors that share a storage in *tree* share memory.

    *engine_makers* make the engine's own classes, by name.

    Raises:
        Unsupported: *tree* contains a class that is not listed.
    """
    return _Reviver(fill, engine_makers or {}).value(tree)


def revive_kept(tree: Tree, content_of: Callable[[Any], bytes]) -> Any:
    """Return the objects that *tree* describes; *content_of* returns the content of one of its storages."""

    def fill(storage: Storage) -> "torch.Tensor":
        made = empty(storage)
        if storage.elements:
            bytes_of(made)[:] = content_of(storage.content)
        return made

    return revive(tree, fill)


class _Reviver:
    def __init__(self, fill: Fill, engine_makers: Mapping[str, Maker]) -> None:
        self._fill = fill
        self._makers: dict[str, Maker] = {**_makers(), **engine_makers}
        self._filled: dict[int, torch.Tensor] = {}

    def value(self, tree: Tree) -> Any:  # noqa: PLR0911  # one line a type
        match tree:
            case Tensor():
                return self._tensor(tree)
            case OrderedMap():
                return self._ordered(tree)
            case Inert():
                return self._object(tree)
            case Global(name):
                return _named(name)
            case dict():
                return {self.value(key): self.value(item) for key, item in tree.items()}
            case list():
                return [self.value(item) for item in tree]
            case set():
                return {self.value(item) for item in tree}
            case Size():
                return _size(tree)
            case tuple():
                return tuple(self.value(item) for item in tree)
            case _:
                return tree

    def _ordered(self, tree: OrderedMap) -> "OrderedDict[Any, Any]":
        made = OrderedDict((self.value(key), self.value(item)) for key, item in tree.items())
        if tree.attributes:
            vars(made).update(self.value(tree.attributes))
        return made

    def _tensor(self, tree: Tensor) -> "torch.Tensor":
        import torch

        # By identity: the tree keeps its storages alive, and tensors that shared a storage share it again.
        elements = self._filled.get(id(tree.storage))
        if elements is None:
            elements = self._filled[id(tree.storage)] = self._fill(tree.storage)
        made = elements.as_strided(tuple(tree.shape), tree.stride, tree.offset)
        made = torch.nn.Parameter(made, tree.requires_grad) if tree.is_parameter else made
        if tree.requires_grad and not tree.is_parameter:
            made.requires_grad_()
        vars(made).update(self.value(tree.attributes) if tree.attributes else {})
        return made

    def _object(self, tree: Inert) -> Any:
        make = self._makers.get(tree.name)
        if make is None:
            raise Unsupported(
                f"the state refers to {tree.name}, which layerstore does not instantiate",
                hint=_BY_THE_TRAINER,
            )
        made: Any = make(*(self.value(part) for part in tree.arguments))
        if tree.has_state:
            state = self.value(tree.state)
            if hasattr(made, "__setstate__"):
                made.__setstate__(state)
            else:
                vars(made).update(state)
            if tree.name == _DTYPE:
                _check_numpy_type(made)
        if tree.items:
            made.update({self.value(key): self.value(item) for key, item in tree.items.items()})
        return made


def _makers() -> dict[str, Maker]:
    """Return the makers of all classes that any trainer's state may hold; each is called with the tree's arguments."""
    import torch

    return {
        "_io.BytesIO": BytesIO,
        "collections.Counter": Counter,
        "builtins.complex": complex,
        "torch.device": torch.device,
        **_numpy_makers(),
    }


def _numpy_makers() -> dict[str, Maker]:
    """Return the makers of numpy's arrays and numbers; arrays of Python objects are refused."""
    import numpy as np

    def dtype(*arguments: Any) -> Any:
        made = np.dtype(*arguments)
        _check_numpy_type(made)
        return made

    rebuild: Any = np.zeros(0).__reduce__()[0]
    scalar: Any = np.float64(0).__reduce__()[0]
    makers: dict[str, Maker] = {_DTYPE: dtype}
    for room in ("core", "_core"):  # numpy 1 and 2
        makers[f"numpy.{room}.multiarray._reconstruct"] = lambda *_: rebuild(np.ndarray, (0,), b"b")
        makers[f"numpy.{room}.multiarray.scalar"] = scalar
    return makers


def _check_numpy_type(dtype: Any) -> None:
    """Refuse types that would read bytes as pointers, or read outside an element: a forged state could do both."""
    if dtype.hasobject:
        raise Unsupported(
            "the state holds a numpy array of objects, which layerstore does not instantiate", hint=_BY_THE_TRAINER
        )
    for kind, offset, *_ in (dtype.fields or {}).values():
        if not 0 <= offset <= dtype.itemsize - kind.itemsize:
            raise Unsupported(
                "the state holds a numpy array with fields outside of its elements, which layerstore does not "
                "instantiate",
                hint=_BY_THE_TRAINER,
            )


def _named(name: str) -> Any:
    import numpy as np
    import torch

    if name == "numpy.ndarray":
        return np.ndarray
    kind = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype):
        raise Unsupported(f"the state refers to {name}, which layerstore does not instantiate", hint=_BY_THE_TRAINER)
    return kind


def _size(tree: Size) -> "torch.Size":
    import torch

    return torch.Size(tree)


def bytes_of(tensor: "torch.Tensor") -> memoryview:
    """Return *tensor*'s memory, writable."""
    import torch

    memory: memoryview = tensor.view(torch.uint8).numpy().data
    return memory


def empty(storage: Storage) -> "torch.Tensor":
    """Return uninitialized memory for *storage*."""
    import torch

    dtype = getattr(torch, by_code(storage.dtype).torch_name)
    return torch.empty(storage.elements, dtype=dtype)
