"""
The calls of a checkpoint's pickle, as tree nodes: tensors, storages and inert objects.

No call is ever made. A call's arguments are checked against what torch emits, and a node describes the result.
An unsupported call becomes an `Unreadable`, so that the check of the finished tree can report the call's key path.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

from layerstore.dtypes import DType, by_code, by_storage_class, by_torch_name
from layerstore.errors import Unsupported
from layerstore.limits import TENSOR_DIMENSIONS_MAX, TENSOR_REPEATED_BYTES_MAX
from layerstore.tree import Global, Inert, Located, OrderedMap, Size, Storage, Tensor
from layerstore.zero3.pt import allowlist as names
from layerstore.zero3.pt.allowlist import MalformedPickleError, Unreadable, check_key, view_end

# Early releases of Python 3.11 (including 3.11.2) pickle an enum by member name, all other releases by value.
_MEMBERS = {
    names.ZERO_STAGE: {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3},
    names.MEMORY_FORMAT: {"TORCH_CONTIGUOUS_FORMAT": 0, "TORCH_CHANNELS_LAST": 1, "TORCH_PRESERVE_FORMAT": 2},
}

# torch counts in signed 64-bit integers.
_TORCH_INT_MAX = 2**63 - 1


class DamagedPickleError(Exception):
    """The pickle contradicts itself or the archive's records."""


@dataclass(frozen=True, slots=True)
class StorageReference(Unreadable):
    """A pickle's reference to a storage. Outside a tensor, a storage cannot be represented."""

    key: str = ""
    """KEY in the name of the record, ``data/KEY``."""
    storage_class: str = ""
    """The dotted name of the storage's class, which implies the element type unless the storage is untyped."""
    device: str = ""
    elements: int = 0
    """The number of elements, or of bytes if the storage is untyped."""


class Calls:
    """Turns calls into nodes and keeps the storages that they share."""

    def __init__(self, records: Mapping[str, Located], *, inert: frozenset[str] = frozenset()) -> None:
        self._records = records
        self._inert = inert
        """Globals that the caller allows beyond the lists."""
        self._references: dict[str, StorageReference] = {}
        self.storages: dict[str, Storage] = {}
        """Storages by key, in order of first use."""

    def call(self, name: str, arguments: tuple[object, ...]) -> object:
        """Return the node for ``name(*arguments)``. An unknown *name* is refused later."""
        if name in names.REBUILDS:
            return self._rebuilt(name, arguments)
        if name in names.CALLED:
            return _value(name, arguments)
        if names.is_unsupported(name) and name not in self._inert:
            return Unreadable(name)
        if name in names.VALUES:
            raise MalformedPickleError(f"it calls {name}")
        return Inert(name=name, arguments=arguments)  # type: ignore[arg-type]  # check_tree looks at every part

    def refer(self, persistent_id: object) -> StorageReference:
        """Return the storage that *persistent_id* refers to."""
        match persistent_id:
            case ("storage", Global(storage_class), str(key), str(device), elements) if _is_count(elements):
                reference = StorageReference("a storage without a tensor", key, storage_class, device, elements)
            case _:
                raise MalformedPickleError("it has a persistent id that is not a storage")
        if self._references.setdefault(key, reference) != reference:
            raise DamagedPickleError(f"two descriptions of the storage data/{key} contradict each other")
        return reference

    def _rebuilt(self, name: str, arguments: tuple[object, ...]) -> Tensor | Unreadable:  # noqa: PLR0911  # one line a case
        """Return the tensor that ``name(*arguments)`` describes."""
        for part in arguments:
            if isinstance(part, Unreadable) and not isinstance(part, StorageReference):
                return part  # more specific than the call around it
        match name, arguments:
            case names.REBUILD_TENSOR, (StorageReference() as storage, *view, hooks) if _is_empty(hooks):
                return self._view(storage, by_storage_class, storage.storage_class, view)
            case names.REBUILD_TENSOR_UNTYPED, (StorageReference() as storage, *view, hooks, Global(dtype)) if (
                _is_empty(hooks) and storage.storage_class == names.UNTYPED_STORAGE
            ):
                return self._view(storage, by_torch_name, dtype, view)
            case ((names.REBUILD_TENSOR | names.REBUILD_TENSOR_UNTYPED), (*_, dict() as metadata)) if metadata:
                return Unreadable("a conjugated or negated view")
            case (
                (names.REBUILD_PARAMETER | names.REBUILD_PARAMETER_WITH_STATE),
                (
                    Tensor(is_parameter=False, attributes=None) as data,
                    bool(requires_grad),
                    hooks,
                    *state,
                ),
            ) if _is_empty(hooks) and len(state) <= 1:
                parameter = replace(data, requires_grad=requires_grad, is_parameter=True)
                return _with_attributes(parameter, state[0]) if state else parameter
            case names.REBUILD_FROM_TYPE, (Global(function), Global(kind), tuple() as inner, state):
                if kind not in (names.TENSOR, names.PARAMETER):
                    return Unreadable(f"a tensor of the class {kind}")
                plain = self._rebuilt(function, inner)
                if isinstance(plain, Unreadable):
                    return plain
                return _with_attributes(replace(plain, is_parameter=kind == names.PARAMETER), state)
        raise DamagedPickleError("a tensor is malformed")

    def _view(
        self, reference: StorageReference, find: Callable[[str], DType], dtype: str, view: list[object]
    ) -> Tensor | Unreadable:
        name = dtype.removeprefix("torch.")
        try:
            storage = self._storage(reference, find(name))
        except Unsupported:
            return Unreadable(f"a tensor of the element type {name}")
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
                    storage=storage, offset=offset, shape=Size(shape), stride=stride, requires_grad=requires_grad
                )
                return _checked(tensor, reference)
        raise DamagedPickleError("a tensor's offset, shape or stride is malformed")

    def _storage(self, reference: StorageReference, dtype: DType) -> Storage | Unreadable:
        """Return the storage that *reference* refers to, checked against its record; one object for each key."""
        key = reference.key
        known = self.storages.get(key)
        if known is not None:
            if known.dtype != dtype.code:
                return Unreadable(f"the storage data/{key} viewed as {known.dtype} and as {dtype.code}")
            return known
        record = self._records.get(key)
        if record is None:
            raise DamagedPickleError(f"the entry data/{key} is missing")
        unit_bytes = 1 if reference.storage_class == names.UNTYPED_STORAGE else dtype.bytes
        if record.size_bytes != reference.elements * unit_bytes or record.size_bytes % dtype.bytes:
            expected = f"{reference.elements} elements of {unit_bytes} bytes"
            raise DamagedPickleError(f"the entry data/{key} holds {record.size_bytes} bytes instead of {expected}")
        storage = self.storages[key] = Storage(
            dtype=dtype.code, elements=record.size_bytes // dtype.bytes, device=reference.device, content=record
        )
        return storage


def _value(name: str, arguments: tuple[object, ...]) -> object:  # noqa: PLR0911  # one line a case
    """Return the value that a call makes: protocol 2 spells some values of Python and torch as calls."""
    match name, arguments:
        case names.ORDERED_DICT, ():
            return OrderedMap()
        case names.SIZE, (tuple() as extents,) if _are_counts(extents):
            return Size(extents)
        case names.SET, ():
            return set()
        case names.SET, ((list() | tuple()) as elements,):
            for element in elements:
                check_key(element)
            return set(elements)
        case names.BYTES, ():
            return b""
        case names.ENCODE, (str(text), "latin1" | "latin-1"):
            try:
                return text.encode("latin-1")
            except UnicodeEncodeError as exc:
                raise MalformedPickleError("it has bytes that are not latin-1 text") from exc
        case names.GETATTR, (Global(kind), str(member)) if member in _MEMBERS.get(kind, ()):
            return Inert(name=kind, arguments=(_MEMBERS[kind][member],))
    raise MalformedPickleError(f"it calls {name} with arguments that torch.save does not write")


def _checked(tensor: Tensor, reference: StorageReference) -> Tensor | Unreadable:
    """Return *tensor*, or an `Unreadable` if it repeats too many elements; raises if it exceeds its storage."""
    end, elements, available = view_end(tensor), tensor.elements, tensor.storage.elements
    if end > available:
        raise DamagedPickleError(f"a tensor needs {end} elements of data/{reference.key}, which has {available}")
    size_bytes = elements * by_code(tensor.storage.dtype).bytes
    if elements > available and size_bytes > TENSOR_REPEATED_BYTES_MAX:
        return Unreadable(f"an expanded tensor of {elements} elements over {available} stored ones")
    return tensor


def _with_attributes(tensor: Tensor, state: object) -> Tensor | Unreadable:
    if tensor.attributes is not None:
        raise DamagedPickleError("a tensor has two sets of attributes")
    if type(state) is not dict:
        return Unreadable("a tensor with slots")  # (dict, slots): a subclass that declares __slots__
    return replace(tensor, attributes=state)


def _is_empty(value: object) -> bool:
    # A tensor's hooks: torch.save always writes an empty OrderedDict in their place.
    return isinstance(value, dict) and not value and not getattr(value, "attributes", None)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _TORCH_INT_MAX


def _are_counts(values: tuple[object, ...]) -> TypeGuard[tuple[int, ...]]:
    return all(map(_is_count, values))
