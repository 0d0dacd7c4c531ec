"""
Inert trees: the content of a ``.pt`` file, with nothing in it that could run.

A tree is made of None, bool, int, float, str, bytes, list, tuple, dict, set and the nodes below.
Class names from the source are only data here; nothing is imported, looked up or called.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import is_
from pathlib import Path
from typing import Any, TypeAlias, Union

from layerstore.dtypes import by_code

Tree: TypeAlias = Union[
    bool, int, float, str, bytes, "list[Tree]", "tuple[Tree, ...]", "dict[Tree, Tree]", "set[Tree]",
    "OrderedMap", "Size", "Global", "Inert", "Tensor", None,
]  # fmt: skip


class OrderedMap(dict["Tree", "Tree"]):
    """A ``collections.OrderedDict``; *attributes* is its instance ``__dict__`` (torch keeps ``_metadata`` there)."""

    __slots__ = ("attributes",)

    def __init__(self, items: object = (), attributes: "dict[Tree, Tree] | None" = None) -> None:
        super().__init__(items)  # type: ignore[call-overload]  # any form that dict takes
        self.attributes = attributes


class Size(tuple[int, ...]):
    """A ``torch.Size``."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Global:
    """A global that the source refers to but does not call, such as ``torch.bfloat16``."""

    name: str


@dataclass(slots=True, kw_only=True)
class Inert:
    """An object of the source, kept as its class name and arguments; it is never constructed."""

    name: str
    """Dotted module path and class or function name."""
    arguments: tuple[Tree, ...] = ()
    """The arguments of the callable."""
    made_by_new: bool = False
    """Whether the pickle calls ``cls.__new__(cls, *arguments)`` instead of ``callable(*arguments)``."""
    state: Tree = None
    """The argument of BUILD: attributes, or whatever ``__setstate__`` takes."""
    has_state: bool = False
    """Distinguishes a missing BUILD from ``BUILD None``."""
    appended: list[Tree] = field(default_factory=list)
    """Elements added by APPENDS, for subclasses of list."""
    items: dict[Tree, Tree] = field(default_factory=dict)
    """Entries added by SETITEMS, for subclasses of dict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """The position of a storage's bytes in a ``.pt`` file."""

    path: Path
    offset_bytes: int
    size_bytes: int
    crc32: int
    """The checksum that the zip's directory states; not yet checked."""


@dataclass(eq=False, slots=True, kw_only=True)
class Storage:
    """
    The memory that one or more tensors view; two tensors share memory exactly when they share this object.

    *content* is the source of the storage's bytes: ``Located`` if read from a ``.pt`` file, ``bytes`` if in memory.
    Higher-level packages use their own types of content.
    """

    dtype: str
    """Code of the element type (see ``layerstore.dtypes``)."""
    elements: int
    """Length of the whole storage."""
    device: str
    """The device that it was saved on, such as ``cpu`` or ``cuda:3``."""
    content: object = None

    @property
    def size_bytes(self) -> int:
        """The size of all elements."""
        return self.elements * by_code(self.dtype).bytes


@dataclass(slots=True, kw_only=True)
class Tensor:
    """A strided view of a storage."""

    storage: Storage
    offset: int
    """In elements."""
    shape: Size
    stride: tuple[int, ...]
    """In elements."""
    requires_grad: bool = False
    attributes: dict[Tree, Tree] | None = None
    """Python attributes set on the tensor (DeepSpeed's ``ds_id``)."""
    is_parameter: bool = False
    """Whether it was a ``torch.nn.Parameter``."""

    @property
    def elements(self) -> int:
        """Count the elements of the view."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are adjacent and in order."""
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if extent != 1 and stride != expected:
                return self.elements == 0
            expected *= extent
        return True


_LEAVES = frozenset({bool, int, float, str, bytes, Size, Global, type(None)})


def replace_tensors(tree: Tree, replacement: Callable[[Tensor], Tensor]) -> Tree:
    """Return a copy of *tree* in which each tensor is replaced by what *replacement* returns for it."""
    if isinstance(tree, Tensor):
        return replacement(tree)
    # An OrderedMap's attributes are not searched for tensors: they only describe a module, and would double the time.
    apart = tree.attributes if isinstance(tree, OrderedMap) else None
    parts = [
        part if type(part) in _LEAVES or part is apart else replace_tensors(part, replacement) for part in _parts(tree)
    ]
    made: Tree = _with_parts(tree, iter(parts), {}) if parts or type(tree) is list else tree
    return made


def changed(tree: dict[Tree, Tree], values: Mapping[Tree, Tree]) -> dict[Tree, Tree]:
    """Return a copy of *tree* in which *values* replace the values of the same keys; no key is added."""
    items = {key: values.get(key, value) for key, value in tree.items()}
    return OrderedMap(items, tree.attributes) if isinstance(tree, OrderedMap) else items


def with_content(tensor: Tensor, content: object) -> Tensor:
    """Return a tensor like *tensor* in its own storage with *content*."""
    storage = Storage(
        dtype=tensor.storage.dtype, elements=tensor.elements, device=tensor.storage.device, content=content
    )
    return replace(tensor, storage=storage, offset=0)


class Template:
    """A tree that is reused many times with different storages, for example for all ranks of one save."""

    def __init__(self, tree: Tree, storages: Sequence[Storage]) -> None:
        self._tree = tree
        self._storages = storages
        """All storages that tensors in *tree* view."""
        self._has_tensors: dict[int, bool] = {}
        self._look(tree)

    def filled(self, storages: Sequence[Storage]) -> Tree:
        """Return the tree with *storages* in place of its own; parts without tensors are shared, not copied."""
        made: Tree = self._copy(self._tree, dict(zip(self._storages, storages, strict=True)), {})
        return made

    def storages_of(self, tree: Tree) -> list[Storage] | None:
        """Return the storages that replace the template's in *tree*; None if *tree* is not a copy made by `filled`."""
        copies: dict[Storage, Storage] = {}
        if not self._is_copy(self._tree, tree, copies, {}) or len(set(copies.values())) != len(self._storages):
            return None
        return [copies[storage] for storage in self._storages]

    def _look(self, node: Tree) -> bool:
        """Whether *node* contains a tensor; records the answer for *node* and all its parts."""
        parts = _parts(node)
        if parts and id(node) not in self._has_tensors:
            answers = [self._look(part) for part in parts]
            self._has_tensors[id(node)] = isinstance(node, Tensor) or any(answers)
        return self._has_tensors.get(id(node), False)

    def _copy(self, node: Any, storages: Mapping[Storage, Storage], made: dict[int, Any]) -> Any:
        """Return *node* with other *storages*; a part that occurs twice is *made* once."""
        key = id(node)
        if not self._has_tensors.get(key, False):
            return node
        if key not in made:
            parts = iter([part if type(part) in _LEAVES else self._copy(part, storages, made) for part in _parts(node)])
            made[key] = _with_parts(node, parts, storages)
        return made[key]

    def _is_copy(self, node: Any, other: Any, copies: dict[Storage, Storage], seen: dict[int, Any]) -> bool:
        """Whether *other* is *node* with different storages; notes these storages in *copies*."""
        key = id(node)
        if not self._has_tensors.get(key, False) or type(node) is not type(other):
            # `filled` shares the parts without tensors: any other object belongs to another tree.
            return node is other
        if key in seen:
            return seen[key] is other
        seen[key] = other
        if isinstance(node, Tensor):
            ours, theirs = node.storage, copies.setdefault(node.storage, other.storage)
            alike = (ours.dtype, ours.elements, ours.device) == (theirs.dtype, theirs.elements, theirs.device)
            if theirs is not other.storage or not alike:
                return False
        parts, others = _parts(node), _parts(other)
        if len(parts) != len(others) or not all(map(is_, _facts(node), _facts(other))):
            return False
        pairs = zip(parts, others, strict=True)
        inner = [pair for pair in pairs if type(pair[0]) not in _LEAVES or pair[0] is not pair[1]]
        return all(self._is_copy(one, another, copies, seen) for one, another in inner)


def _parts(node: Any) -> list[Tree]:
    """Return the parts of *node* that may hold tensors; empty for a leaf."""
    kind = type(node)
    if kind is Tensor:
        return [node.attributes]
    if kind is Inert:
        return [node.arguments, node.state, node.appended, node.items]
    if kind is dict or kind is OrderedMap:  # keys are never tensors
        return [*node.values(), node.attributes if kind is OrderedMap else None]
    return list(node) if kind in {list, tuple} else []


def _facts(node: Any) -> list[object]:
    """Return everything in *node* except its storage and the parts that `_parts` returns."""
    kind = type(node)
    if kind is Tensor:
        return [node.offset, node.shape, node.stride, node.requires_grad, node.is_parameter]
    if kind is Inert:
        return [node.name, node.made_by_new, node.has_state]
    return list(node) if kind is dict or kind is OrderedMap else []


def _with_parts(node: Any, parts: Iterator[Any], storages: Mapping[Storage, Storage]) -> Any:
    """Return a node like *node* with other *parts* and *storages*."""
    if isinstance(node, Tensor):
        return Tensor(
            storage=storages[node.storage],
            offset=node.offset,
            shape=node.shape,
            stride=node.stride,
            requires_grad=node.requires_grad,
            attributes=next(parts),
            is_parameter=node.is_parameter,
        )
    if isinstance(node, Inert):
        names = ("arguments", "state", "appended", "items")
        return replace(node, **dict(zip(names, parts, strict=True)))
    if isinstance(node, dict):
        items = dict(zip(node, parts, strict=False))  # attributes come after the values
        return OrderedMap(items, next(parts)) if isinstance(node, OrderedMap) else items
    return type(node)(parts)


def new_tensor(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return a contiguous tensor with its own storage, whose content is still to be set."""
    storage = Storage(dtype=dtype, elements=prod(shape), device="cpu")
    stride = tuple(prod(shape[number + 1 :]) for number in range(len(shape)))
    return Tensor(storage=storage, offset=0, shape=Size(shape), stride=stride)
