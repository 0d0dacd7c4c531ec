"""
Turn live objects into an inert tree: the same tree as read from the ``.pt`` file that ``torch.save`` would write.

Nothing is written and no tensor is copied: storages point at the memory that holds their bytes.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, Self, cast

from layerstore.dtypes import by_torch_name, knows_torch_name
from layerstore.errors import LayerstoreError, Unsupported
from layerstore.limits import INLINE_BYTES_MAX
from layerstore.tree import Global, Inert, Located, OrderedMap, Size, Storage, Tensor, Tree
from layerstore.zero3.pt import INERT, VALUES

if TYPE_CHECKING:
    import torch

_PROTOCOL = 2  # torch.save's pickle protocol
_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})


class NotPlain(TypeError):
    """A value that no checkpoint can keep: neither plain, nor a tensor, nor a numpy value."""

    @classmethod
    def at(cls, where: str, value: object, trait: str = "") -> Self:
        """Return the error for *value*; *trait* is the reason, unless the reason is the class of *value*."""
        kind = type(value)
        return cls(f"{where or 'it'} is a {kind.__module__}.{kind.__qualname__}{trait}")


class Memory:
    """The storages that trees point to, and the memory that holds the bytes of each now."""

    def __init__(self, name: str) -> None:
        self._folder = Path(name)
        self._storages: dict[int, Storage] = {}
        self._held: dict[Path, torch.UntypedStorage] = {}
        self._replaced: list[torch.UntypedStorage] = []
        """Storages replaced by copies; still held, so that no other storage gets their addresses."""
        self._marks: dict[Path, Hashable] = {}

    def storage(self, tensor: "torch.Tensor") -> Storage:
        """Return the node of *tensor*'s storage, the same node each time."""
        untyped = tensor.untyped_storage()
        dtype = by_torch_name(_dtype_name(tensor))
        node = self._storages.get(untyped._cdata)
        if node is not None:
            if node.dtype != dtype.code:
                raise Unsupported(f"one storage of {self._folder} is viewed as {node.dtype} and as {dtype.code}")
            return node
        place = self._folder / str(len(self._storages))
        node = Storage(
            dtype=dtype.code,
            elements=untyped.nbytes() // dtype.bytes,
            device=str(untyped.device),
            content=Located(path=place, offset_bytes=0, size_bytes=untyped.nbytes(), crc32=0),
        )
        self._storages[untyped._cdata] = node
        self._held[place] = untyped  # while we hold it, no other storage can get its address
        # torch counts the in-place changes of a tensor; inference tensors have no count.
        self._marks[place] = untyped.data_ptr(), 0 if tensor.is_inference() else tensor._version
        return node

    @property
    def storages(self) -> tuple[Storage, ...]:
        """Every storage, in order of first use."""
        return tuple(self._storages.values())

    def bytes_of(self, path: Path) -> "torch.Tensor":
        """Return the current memory at *path* as bytes, without a copy."""
        import torch

        untyped = self._held[path]
        return torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped)

    def mark_of(self, path: Path) -> Hashable:
        """Return a key that changes with the content of *path*: the address, and torch's count of changes."""
        return self._marks[path]

    def put(self, name: str, data: bytes) -> Path:
        """Add *data*; return its path."""
        import torch

        place = self._folder / "files" / name
        held = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        self._held[place] = held.untyped_storage()
        return place

    def keep_copy(self, path: Path) -> None:
        """Replace the memory at *path* with our own copy on the host."""
        copy = self.bytes_of(path).to("cpu", copy=True)
        self._replaced.append(self._held[path])
        self._held[path] = copy.untyped_storage()
        # A mark that equals no other: torch does not count every change, such as those to a norm's averages.
        self._marks[path] = object()

    def settle(self, storage: Storage) -> None:
        """Copy the content of *storage*, into the node itself if it is small."""
        place = place_of(storage)
        if storage.size_bytes > INLINE_BYTES_MAX:
            self.keep_copy(place)
        else:
            storage.content = bytes(self.bytes_of(place).cpu().numpy().data) if storage.size_bytes else b""
            self._held.pop(place, None)

    def holds(self, path: Path) -> bool:
        """Whether *path* is in this memory."""
        return path in self._held


def place_of(storage: Storage) -> Path:
    """Return the path of the bytes of *storage* in a `Memory`."""
    assert isinstance(storage.content, Located), "live trees point at memory"
    return storage.content.path


def inert(value: object, memory: Memory, *, where: str = "") -> Tree:  # noqa: PLR0911  # one line a type
    """
    Return the tree of *value*, whose tensors stay in *memory*.

    Raises:
        NotPlain: *value* holds an object of a class that no checkpoint may contain.
    """
    import torch

    kind = type(value)
    if kind in _PLAIN:
        return cast(Tree, value)
    if isinstance(value, torch.Tensor):
        return _tensor(value, memory, where)
    if kind is dict:
        return _pairs(value, memory, where)
    if kind is OrderedDict:
        attributes = _pairs(vars(value), memory, where) if vars(value) else None
        return OrderedMap(_pairs(value, memory, where), attributes)
    if kind is list:
        return [inert(item, memory, where=f"{where}[{at}]") for at, item in enumerate(cast("list[object]", value))]
    if kind is torch.Size:
        return Size(cast("tuple[int, ...]", value))
    if kind is tuple:
        items = cast("tuple[object, ...]", value)
        return tuple(inert(item, memory, where=f"{where}[{at}]") for at, item in enumerate(items))
    if kind is set:
        return {inert(item, memory, where=where) for item in cast("set[object]", value)}
    if kind is torch.dtype:
        return Global(str(value))
    return _object(value, memory, where)


def _pairs(value: object, memory: Memory, where: str) -> dict[Tree, Tree]:
    items = cast("dict[object, object]", value).items()
    return {
        inert(key, memory, where=where): inert(item, memory, where=f"{where}.{key}" if where else str(key))
        for key, item in items
    }


def _tensor(value: "torch.Tensor", memory: Memory, where: str) -> Tensor:
    import torch

    is_parameter = type(value) is torch.nn.Parameter
    if not (is_parameter or type(value) is torch.Tensor):
        raise NotPlain.at(where, value)
    if trait := _strange_trait(value):
        raise NotPlain.at(where, value, trait)
    attributes = vars(value)
    return Tensor(
        storage=memory.storage(value),
        offset=int(value.storage_offset()),
        shape=Size(value.shape),
        stride=tuple(value.stride()),
        requires_grad=value.requires_grad,
        attributes=_pairs(attributes, memory, where) if attributes else None,
        is_parameter=is_parameter,
    )


def _strange_trait(value: "torch.Tensor") -> str:
    """Return the property of a tensor that no tree can express; empty if a tree can express the tensor."""
    import torch

    if value.device.type == "meta":
        return " on the meta device"
    if value.layout is not torch.strided or value.is_quantized:
        return f" of {value.dtype} in layout {value.layout}"
    if value.is_conj() or value.is_neg():
        return " that is conjugated or negated lazily"
    return "" if knows_torch_name(_dtype_name(value)) else f" of {value.dtype}"


def _dtype_name(value: "torch.Tensor") -> str:
    return str(value.dtype).removeprefix("torch.")


def _object(value: object, memory: Memory, where: str) -> Tree:
    """Decompose an object of a class that checkpoints may contain, as pickling would."""
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        raise NotPlain.at(where, value)
    name = _name_of(type(value))
    if name not in INERT and not name.startswith("numpy."):
        raise NotPlain.at(where, value)
    if isinstance(value, complex):
        return Inert(name=name, arguments=(value.real, value.imag))
    if isinstance(value, Enum):  # early releases of Python 3.11 would reduce it to a call of getattr
        return Inert(name=name, arguments=(value.value,))
    call, arguments, *rest = cast("tuple[Any, ...]", value.__reduce_ex__(_PROTOCOL))
    state, listed, mapped = (*rest, None, None, None)[:3]
    made_by_new = call.__name__ == "__newobj__"
    maker, arguments = (arguments[0], arguments[1:]) if made_by_new else (call, arguments)
    maker_name = _name_of(maker)
    if maker_name not in INERT:
        raise NotPlain.at(where, value)
    return Inert(
        name=maker_name,
        arguments=tuple(_argument(item, memory, where) for item in arguments),
        made_by_new=made_by_new,
        state=None if state is None else inert(state, memory, where=where),
        has_state=state is not None,
        appended=[inert(item, memory, where=where) for item in listed or ()],
        items={inert(key, memory): inert(item, memory, where=where) for key, item in mapped or ()},
    )


def _argument(value: object, memory: Memory, where: str) -> Tree:
    if isinstance(value, type) and _name_of(value) in VALUES:
        return Global(_name_of(value))
    return inert(value, memory, where=where)


def _name_of(named: object) -> str:
    module, name = getattr(named, "__module__", None), getattr(named, "__qualname__", None)
    return f"{module}.{name}"


def check_client_state(client_state: Mapping[str, object]) -> None:
    """
    Make sure that *client_state* can be kept: plain trees, tensors and numpy's values.

    Raises:
        NotPlain: *client_state* holds something else.
    """
    try:
        inert(dict(client_state), Memory("client_state"), where="client_state")
    except (LayerstoreError, RecursionError) as exc:
        raise NotPlain(f"client_state cannot be kept: {exc}") from exc
