"""
The calls of a checkpoint's pickle, as tree nodes: tensors, storages and inert objects.

A call is never made. Its arguments are checked against what torch emits, and a node describes the result.
A call that contradicts itself or is not supported becomes an `Unreadable`, so that the check of the finished tree
can name its key path.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

from layerstore.dtypes import DType, by_code, by_storage_class, by_torch_name
from layerstore.errors import Unsupported
from layerstore.limits import TENSOR_DIMENSIONS_MAX, TENSOR_REPEATED_BYTES_MAX
from layerstore.tree import Global, Inert, Located, OrderedMap, Size, Storage, Tensor, Tree
from layerstore.zero3.pt import picklenames as names
from layerstore.zero3.pt.treecheck import Unreadable, check_key, view_end

# Early releases of Python 3.11 (3.11.2 among them) pickle an enum by the name of its member, all others by value.
_ZERO_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}

# torch counts in signed 64-bit integers.
_TORCH_INT_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class StorageReference(Unreadable):
    """A storage as the pickle names it. Without a tensor it cannot be represented."""

    key: str = ""
    """The record ``data/KEY``."""
    storage_class: str = ""
    """Dotted name; gives the element type unless untyped."""
    device: str = ""
    """Where it lived."""
    elements: int = 0
    """Length; bytes if untyped."""


class Calls:
    """Turns calls into nodes and keeps the storages that they share."""

    def __init__(self, records: Mapping[str, Located]) -> None:
        self._records = records
        self._references: dict[str, StorageReference] = {}
        self.storages: dict[str, Storage] = {}
        """Storages by key, in order of first use."""

    def call(self, name: str, arguments: tuple[object, ...]) -> object:
        """Return the node for ``name(*arguments)``. An unknown *name* is refused later."""
        if name in _CALLS:
            return _CALLS[name](self, arguments)
        if name in names.UNSUPPORTED:
            return Unreadable(names.UNSUPPORTED[name])
        if name in names.VALUES:
            return _damage(f"a call of {name}")
        return Inert(name=name, arguments=_as_trees(arguments))

    def refer(self, persistent_id: object) -> Unreadable:
        """Return the storage that *persistent_id* refers to."""
        match persistent_id:
            case ("storage", Global(storage_class), str(key), str(device), elements) if _is_count(elements):
                found = StorageReference(
                    "a storage without a tensor",
                    names=(storage_class,),
                    key=key,
                    storage_class=storage_class,
                    device=device,
                    elements=elements,
                )
            case _:
                return _damage("a persistent id that is not a storage")
        if self._references.setdefault(key, found) != found:
            return _damage(f"two descriptions of the storage data/{key} that contradict each other")
        return found

    def ordered_dict(self, arguments: tuple[object, ...]) -> object:
        """Describe ``OrderedDict()``; the entries follow."""
        return OrderedMap() if not arguments else _damage("an OrderedDict made from arguments")

    def size(self, arguments: tuple[object, ...]) -> object:
        """Describe ``torch.Size((1, 2))``."""
        match arguments:
            case (tuple() as extents,) if _are_counts(extents):
                return Size(extents)
        return _damage("a malformed torch.Size")

    def set_of(self, arguments: tuple[object, ...]) -> object:
        """Describe ``set([1, 2])``, as protocol 2 spells it."""
        match arguments:
            case ():
                return set()
            case ((list() | tuple()) as elements,):
                for element in elements:
                    check_key(element)
                return set(elements)
        return _damage("a malformed set")

    def bytes_of(self, arguments: tuple[object, ...]) -> object:
        """Describe ``bytes()``, as protocol 2 spells the empty one."""
        return b"" if not arguments else _damage("bytes made from arguments")

    def encode(self, arguments: tuple[object, ...]) -> object:
        """Describe ``_codecs.encode(text, "latin1")``, as protocol 2 spells bytes."""
        match arguments:
            case (str(text), "latin1" | "latin-1"):
                try:
                    return text.encode("latin-1")
                except UnicodeEncodeError:
                    return _damage("bytes that are not bytes")
        return _damage("an encoded text")

    def attribute(self, arguments: tuple[object, ...]) -> object:
        """Describe ``getattr(ZeroStageEnum, "weights")``, the only attribute that is ever fetched."""
        match arguments:
            case (Global(names.ZERO_STAGE), str(member)) if member in _ZERO_STAGES:
                return Inert(name=names.ZERO_STAGE, arguments=(_ZERO_STAGES[member],))
        involved = tuple(part.name for part in arguments if isinstance(part, Global))
        return Unreadable("an attribute fetched from a class", is_damage=True, names=(names.GETATTR, *involved))

    def tensor(self, arguments: tuple[object, ...]) -> object:
        """Describe a view of a typed storage."""
        match arguments:
            case (StorageReference() as reference, *view, hooks) if _is_empty_map(hooks) and len(view) == 4:
                return self._view(reference, _typed(reference), view)
            case (_, _, _, _, _, _, dict() as metadata) if metadata:
                return Unreadable("a conjugated or negated view")
        return _malformed_tensor(arguments)

    def tensor_untyped(self, arguments: tuple[object, ...]) -> object:
        """Describe a view of an untyped storage, with its element type beside it."""
        match arguments:
            case (StorageReference() as reference, *view, hooks, Global(dtype_name)) if (
                _is_empty_map(hooks) and len(view) == 4
            ):
                return self._view(reference, _untyped(reference, dtype_name), view)
            case (_, _, _, _, _, _, _, dict() as metadata) if metadata:
                return Unreadable("a conjugated or negated view")
        return _malformed_tensor(arguments)

    def parameter(self, arguments: tuple[object, ...]) -> object:
        """Describe ``Parameter(data, requires_grad)``, with attributes if a fourth argument has them."""
        match arguments:
            case (Unreadable() as unreadable, *_):
                return unreadable
            case (
                Tensor(is_parameter=False, attributes=None) as data,
                bool(requires_grad),
                hooks,
                *state,
            ) if _is_empty_map(hooks) and len(state) <= 1:
                made = replace(data, requires_grad=requires_grad, is_parameter=True)
                return _with_attributes(made, state[0]) if state else made
        return _damage("a malformed parameter")

    def from_type(self, arguments: tuple[object, ...]) -> object:
        """Describe a tensor or parameter that carries Python attributes."""
        match arguments:
            case (Global(function), Global(kind), tuple() as inner, state):
                if kind not in (names.TENSOR, names.PARAMETER) or function not in _TENSOR_CALLS:
                    return Unreadable(f"a tensor of the class {kind}", names=(kind, function))
                made = _CALLS[function](self, inner)
                if isinstance(made, Tensor) and made.attributes is None:
                    made = replace(made, is_parameter=kind == names.PARAMETER)
                    return _with_attributes(made, state)
                return made if isinstance(made, Unreadable) else _malformed_tensor(inner)
        return _malformed_tensor(arguments)

    def _view(self, reference: StorageReference, dtype: DType | Unreadable, view: list[object]) -> object:
        storage = dtype if isinstance(dtype, Unreadable) else self._storage(reference, dtype)
        if isinstance(storage, Unreadable):
            return storage
        match view:
            case (offset, tuple() as shape, tuple() as stride, bool(requires_grad)) if (
                _is_count(offset)
                and _are_counts(shape)
                and _are_counts(stride)
                and len(shape) == len(stride) <= TENSOR_DIMENSIONS_MAX
            ):
                tensor = Tensor(
                    storage=storage,
                    offset=offset,
                    shape=Size(shape),
                    stride=tuple(stride),
                    requires_grad=requires_grad,
                )
                return _check_view(tensor, reference)
        return _damage("a tensor whose offset, shape or stride is malformed")

    def _storage(self, reference: StorageReference, dtype: DType) -> Storage | Unreadable:
        """Return the storage behind *reference*, checked against its record, the same one every time."""
        known = self.storages.get(reference.key)
        if known is not None:
            if known.dtype != dtype.code:
                return Unreadable(f"the storage data/{reference.key} viewed as {known.dtype} and as {dtype.code}")
            return known
        record = self._records.get(reference.key)
        if record is None:
            return _damage(f"the record data/{reference.key} is missing")
        unit_bytes = 1 if reference.storage_class == names.UNTYPED_STORAGE else dtype.bytes
        if record.size_bytes != reference.elements * unit_bytes or record.size_bytes % dtype.bytes:
            expected = (
                f"{reference.elements} elements of {dtype.code}" if unit_bytes > 1 else f"{reference.elements} bytes"
            )
            return _damage(f"the record data/{reference.key} holds {record.size_bytes} bytes instead of {expected}")
        made = Storage(
            dtype=dtype.code,
            elements=record.size_bytes // dtype.bytes,
            device=reference.device,
            content=record,
        )
        self.storages[reference.key] = made
        return made


def _check_view(tensor: Tensor, reference: StorageReference) -> Tensor | Unreadable:
    end, elements = view_end(tensor), tensor.elements
    if end > tensor.storage.elements:
        return _damage(
            f"a tensor that needs {end} elements of data/{reference.key}, which has {tensor.storage.elements}"
        )
    size_bytes = elements * by_code(tensor.storage.dtype).bytes
    if elements > tensor.storage.elements and size_bytes > TENSOR_REPEATED_BYTES_MAX:
        return Unreadable(f"an expanded tensor of {elements} elements over {tensor.storage.elements}")
    return tensor


def _typed(reference: StorageReference) -> DType | Unreadable:
    return _dtype(reference, by_storage_class, reference.storage_class.removeprefix("torch."))


def _untyped(reference: StorageReference, dtype_name: str) -> DType | Unreadable:
    if reference.storage_class != names.UNTYPED_STORAGE:
        return _damage("a typed storage where an untyped one belongs")
    return _dtype(reference, by_torch_name, dtype_name.removeprefix("torch."))


def _dtype(reference: StorageReference, find: Callable[[str], DType], name: str) -> DType | Unreadable:
    try:
        return find(name)
    except Unsupported:
        return Unreadable(f"a tensor of the element type {name}", names=reference.names)


def _with_attributes(tensor: Tensor, state: object) -> Tensor | Unreadable:
    if type(state) is not dict:
        return Unreadable("a tensor with slots")  # (dict, slots): a subclass that declares __slots__
    return replace(tensor, attributes=state)


def _malformed_tensor(arguments: tuple[object, ...]) -> Unreadable:
    # An unreadable argument says more than the call around it.
    found = next((part for part in arguments if isinstance(part, Unreadable)), None)
    if found is None or isinstance(found, StorageReference):
        return _damage("a malformed tensor")
    return found


def _damage(what: str) -> Unreadable:
    return Unreadable(what, is_damage=True)


def _is_empty_map(value: object) -> bool:
    return isinstance(value, dict) and not value and not getattr(value, "attributes", None)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _TORCH_INT_MAX


def _are_counts(values: tuple[object, ...]) -> TypeGuard[tuple[int, ...]]:
    return all(map(_is_count, values))


def _as_trees(arguments: tuple[object, ...]) -> tuple[Tree, ...]:
    return arguments  # type: ignore[return-value]  # check_tree looks at every part of the finished tree


_CALLS: dict[str, Callable[[Calls, tuple[object, ...]], object]] = {
    names.ORDERED_DICT: Calls.ordered_dict,
    names.SIZE: Calls.size,
    names.SET: Calls.set_of,
    names.BYTES: Calls.bytes_of,
    names.ENCODE: Calls.encode,
    names.GETATTR: Calls.attribute,
    names.REBUILD_TENSOR: Calls.tensor,
    names.REBUILD_TENSOR_UNTYPED: Calls.tensor_untyped,
    names.REBUILD_PARAMETER: Calls.parameter,
    names.REBUILD_PARAMETER_WITH_STATE: Calls.parameter,
    names.REBUILD_FROM_TYPE: Calls.from_type,
}
_TENSOR_CALLS = frozenset({names.REBUILD_TENSOR, names.REBUILD_TENSOR_UNTYPED, names.REBUILD_PARAMETER})
assert _CALLS.keys() == names.CALLED
