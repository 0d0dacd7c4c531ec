"""
What a checkpoint's pickle may hold: the globals that it may name, and the tree that it may describe.

The globals are only names; nothing is imported or called, and those that are not on a list are refused. The lists have
DeepSpeed's loss scalers, stages and fragment addresses; torch's functions that rebuild tensors; the containers of
learning-rate schedulers; and what numpy's generator states need, since DeepSpeed's data sampler keeps such states.

A few bytes of pickle can describe a tree that contains itself, is nested deeper than the stack, or expands to
gigabytes. `check_tree` refuses such trees, both after reading and before writing; it visits each shared part once. It
also reports the key paths of globals and of parts that cannot be represented.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from layerstore.dtypes import DTYPES
from layerstore.limits import PICKLE_DEPTH_MAX, PICKLE_EXPANDED_BYTES_MAX, PICKLE_INT_BYTES_MAX
from layerstore.tree import Global, Inert, OrderedMap, Size, Storage, Tensor

TENSOR = "torch.Tensor"
PARAMETER = "torch.nn.parameter.Parameter"
UNTYPED_STORAGE = "torch.storage.UntypedStorage"

ORDERED_DICT = "collections.OrderedDict"
SIZE = "torch.Size"
SET = "builtins.set"
BYTES = "builtins.bytes"
ENCODE = "_codecs.encode"
GETATTR = "builtins.getattr"
REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
REBUILD_TENSOR_UNTYPED = "torch._utils._rebuild_tensor_v3"
REBUILD_PARAMETER = "torch._utils._rebuild_parameter"
REBUILD_PARAMETER_WITH_STATE = "torch._utils._rebuild_parameter_with_state"
REBUILD_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"

ZERO_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
MEMORY_FORMAT = "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING"
FRAGMENT_ADDRESS = "deepspeed.utils.tensor_fragment.fragment_address"

# These rebuild a tensor.
REBUILDS: Final = frozenset(
    {
        REBUILD_TENSOR,
        REBUILD_TENSOR_UNTYPED,
        REBUILD_PARAMETER,
        REBUILD_PARAMETER_WITH_STATE,
        REBUILD_FROM_TYPE,
    }
)

# Calls to these become tree nodes; without a call, these names are refused.
CALLED: Final = REBUILDS | {ORDERED_DICT, SIZE, SET, BYTES, ENCODE, GETATTR}

# collections.defaultdict is left out: it carries a function to call, and no known writer uses it.
INERT: Final = frozenset(
    {
        ZERO_STAGE,
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        FRAGMENT_ADDRESS,
        "_io.BytesIO",  # a trainer's own values, such as losses, that torch.distributed.checkpoint saved
        "collections.Counter",  # the milestones of torch's MultiStepLR
        "builtins.complex",
        "torch.device",
        "numpy.dtype",
        *(
            f"numpy.{room}.multiarray.{function}"
            for room in ("core", "_core")  # numpy 1 and 2
            for function in ("_reconstruct", "scalar")
        ),
    }
)

STORAGE_CLASSES: Final = frozenset(
    {*(f"torch.{row.storage_class}" for row in DTYPES if row.storage_class), UNTYPED_STORAGE}
)

# Element types of torch that are not supported.
_OTHER_DTYPES = (
    *("complex128", "complex32", "quint8", "qint8", "qint32", "quint4x2", "quint2x4"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
)

# Call arguments that may also stand alone, such as a dtype in a loss scaler.
VALUES: Final = frozenset(
    {
        *(TENSOR, PARAMETER, "numpy.ndarray", *STORAGE_CLASSES),
        *(f"torch.{name}" for name in (*(row.torch_name for row in DTYPES), *_OTHER_DTYPES)),
    }
)

KNOWN: Final = CALLED | INERT | VALUES

# torch's names that occur only for tensors: element types, storages, quantization schemes, rebuild functions.
_OF_TENSORS = re.compile(
    r"torch\.((complex|float|q?u?int)[0-9]\w*|per_\w+|\w+Storage|_utils\._rebuild_\w+|serialization\._get_layout)"
)

# Pickle protocol 2 uses the names that modules had in Python 2.
_RENAMED_MODULES = {"__builtin__": "builtins"}


def dotted(module: str, name: str) -> str | None:
    """Return a global's canonical name; None if its two parts cannot be names."""
    module = _RENAMED_MODULES.get(module, module)
    parts = (*module.split("."), name)
    return f"{module}.{name}" if all(part.isidentifier() for part in parts) else None


def is_unsupported(name: str) -> bool:
    """Whether *name* is harmless but has no node, because it makes an unsupported kind of tensor."""
    return name not in KNOWN and _OF_TENSORS.fullmatch(name) is not None


def module_and_name(dotted_name: str) -> tuple[str, str]:
    """Split *dotted_name* into module and name, as a pickle spells them."""
    module, _, name = dotted_name.rpartition(".")
    return module, name


# -- the tree that a pickle may describe ---------------------------------------------------------------------------

_Path: TypeAlias = "tuple[_Path, object] | None"
"""A key path as a chain from the leaf up; only reported paths are rendered."""

# What every node adds to the expanded size, besides its contents.
_NODE_BYTES = 16

# Tuples as keys are rare and flat; hashing deep ones would recurse in C, without Python's own guard.
_KEY_DEPTH_MAX = 8

_KEY_SHOWN_MAX = 200
_STEPS_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands in for a part of a tree that cannot be represented, so that errors can report its key path."""

    what: str
    """A description for the user."""


@dataclass(slots=True)
class TreeReport:
    """The globals and the unreadable parts of a tree."""

    names: dict[str, str] = field(default_factory=dict)
    """Each global's first key path, by its dotted name."""
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    """Key path and description of each part that cannot be represented."""


class MalformedPickleError(Exception):
    """A pickle or a tree that ``torch.save`` does not write."""


def check_tree(root: object, *, expanded_bytes_max: int = PICKLE_EXPANDED_BYTES_MAX) -> TreeReport:
    """
    Walk *root* once; report its globals and the parts that cannot be represented.

    Raises:
        MalformedPickleError: *root* contains itself, is nested too deeply or is too large once expanded.
    """
    walk = _Walk()
    _, size_bytes = walk.measure(root, None, 0)
    if size_bytes > expanded_bytes_max:
        raise MalformedPickleError(f"expands to more than {expanded_bytes_max} bytes by repeating its own parts")
    return walk.found


def check_key(key: object) -> None:
    """
    Raise unless *key* may be the key of a dict or an element of a set; call it before hashing *key*.

    Raises:
        MalformedPickleError: *key* is mutable, or a deeply nested tuple.
    """
    if type(key) not in _PLAIN_KEYS:
        _check_composed_key(key, 0)


def view_end(tensor: Tensor) -> int:
    """Return the minimum number of elements that the storage of *tensor* must have."""
    if tensor.elements == 0:
        return 0  # an empty view touches nothing, wherever it starts
    steps = zip(tensor.shape, tensor.stride, strict=True)
    return tensor.offset + sum((extent - 1) * stride for extent, stride in steps) + 1


_PLAIN_KEYS = frozenset({str, int, bool, float, bytes, type(None), Global})


def _check_composed_key(key: object, depth: int) -> None:
    if type(key) in _PLAIN_KEYS:
        return
    if not isinstance(key, tuple) or depth > _KEY_DEPTH_MAX:
        raise MalformedPickleError(f"a {type(key).__name__} of that kind cannot be a key")
    for part in key:
        _check_composed_key(part, depth + 1)


class _Walk:
    """One walk of a tree. Heights and expanded sizes are kept by identity, so that shared parts are visited once."""

    def __init__(self) -> None:
        self.found = TreeReport()
        self._measured: dict[int, tuple[int, int] | None] = {}

    def measure(self, node: object, path: _Path, depth: int) -> tuple[int, int]:
        """Return the height of *node* and its size once expanded."""
        leaf_bytes = self._leaf_size(node, path)
        if leaf_bytes is not None:
            return 0, leaf_bytes
        key = id(node)  # the root keeps every node alive, so ids stay unique during the walk
        if key not in self._measured:
            self._measured[key] = None  # in progress; a node that is met again now contains itself
            self._measured[key] = self._measure_children(node, path, depth)
        known = self._measured[key]
        if known is None:
            raise MalformedPickleError(f"{path_in_words(path)} contains itself")
        if depth + known[0] > PICKLE_DEPTH_MAX:
            raise _too_deep(path)
        return known

    def _measure_children(self, node: object, path: _Path, depth: int) -> tuple[int, int]:
        if depth >= PICKLE_DEPTH_MAX:
            raise _too_deep(path)
        height, size_bytes = 0, _NODE_BYTES
        for label, child in _children(node):
            child_height, child_bytes = self.measure(child, path if label is None else (path, label), depth + 1)
            height = max(height, child_height)
            size_bytes += child_bytes
        return height + 1, size_bytes

    def _leaf_size(self, node: object, path: _Path) -> int | None:
        """Return the size of a leaf, None for a container; note what must be reported."""
        kind = type(node)  # the exact type: an IntEnum could not be written as an int
        if kind in _LEAF_SIZES:
            return _NODE_BYTES + _LEAF_SIZES[kind](node)
        if isinstance(node, Global | Inert):
            if node.name not in self.found.names:
                self.found.names[node.name] = path_in_words(path)
        elif kind not in _CONTAINERS:
            kind_name = "storage without a tensor" if isinstance(node, Storage) else kind.__name__
            what = node.what if isinstance(node, Unreadable) else f"a {kind_name}"
            self.found.unreadable.append((path_in_words(path), what))
        return None if kind in _CONTAINERS else _NODE_BYTES


def _int_size(value: int) -> int:
    size_bytes = value.bit_length() // 8 + 1
    if size_bytes > PICKLE_INT_BYTES_MAX:
        raise MalformedPickleError(f"it holds an integer of {size_bytes} bytes")
    return size_bytes


def _no_size(_: object) -> int:
    return 0


_LEAF_SIZES: dict[type, Callable[[Any], int]] = {
    type(None): _no_size,
    bool: _no_size,
    float: _no_size,
    int: _int_size,
    str: len,
    bytes: len,
}
_CONTAINERS = frozenset({list, tuple, dict, set, OrderedMap, Size, Tensor, Inert})


def _children(node: object) -> Iterator[tuple[object, object]]:
    """Yield the parts of *node*, each after its step in the key path; the step is None if the path does not change."""
    match node:
        case dict():
            yield from _dict_children(node)
            if isinstance(node, OrderedMap) and node.attributes is not None:
                yield None, node.attributes
        case list() | tuple():
            yield from enumerate(node)
        case Set():
            for element in node:
                check_key(element)
                yield None, element
        case Tensor():
            yield from ((None, node.shape), (None, node.stride))
            if node.attributes is not None:
                yield None, node.attributes
        case Inert():
            yield from ((None, part) for part in (node.arguments, node.state, node.appended))
            yield from _dict_children(node.items)
        case _:
            raise AssertionError(type(node))


def _dict_children(node: Mapping[Any, object]) -> Iterator[tuple[object, object]]:
    for key, value in node.items():
        check_key(key)
        yield None, key
        yield key, value


def _too_deep(path: _Path) -> MalformedPickleError:
    return MalformedPickleError(f"{path_in_words(path)} is nested more than {PICKLE_DEPTH_MAX} deep")


def path_in_words(path: _Path) -> str:
    """Format a key path for people, such as ``optimizer_state_dict.state[0].exp_avg``."""
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(f".{_readable(step)}" if isinstance(step, str) else f"[{_short(step)}]")
    if len(steps) > _STEPS_SHOWN_MAX:
        steps[_STEPS_SHOWN_MAX // 2 : -_STEPS_SHOWN_MAX // 2] = ["…"]
    return "".join(reversed(steps)).removeprefix(".") or "the top level"


def _short(step: object) -> str:
    # Show only the types of other keys: they may be huge, and a long integer's decimal form costs quadratic time.
    return repr(step) if isinstance(step, int) and step.bit_length() < 64 else type(step).__name__


def _readable(text: str) -> str:
    # The key is shown in a terminal, so allow no control characters and limit its length.
    shown = text if len(text) <= _KEY_SHOWN_MAX else text[:_KEY_SHOWN_MAX] + "…"
    return shown if shown.isprintable() else ascii(shown)
