"""
Write an inert tree as the pickle that ``torch.save`` would write: protocol 2, torch's own names.

Loading it with torch gives live objects of the original classes. Equal trees give equal bytes:
only texts and globals are memorised, by value; storages are numbered by first use; sets are sorted.
The ``pickle`` module is not used. A list or dict that occurs twice in a tree is written twice.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from layerstore.dtypes import by_code
from layerstore.errors import InvalidInput
from layerstore.tree import Global, Inert, OrderedMap, Size, Storage, Tensor, Tree
from layerstore.zero3.pt import picklenames as names
from layerstore.zero3.pt.treecheck import TreeReport, UnsafeTreeError, check_tree, view_end

_UINT8_MAX = 0xFF
_UINT16_MAX = 0xFFFF
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1

_MARK = b"("
_NONE = b"N"
_TRUE = b"\x88"
_FALSE = b"\x89"
_EMPTY_TUPLE = b")"
_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}
_TUPLE = b"t"
_EMPTY_LIST = b"]"
_APPENDS = b"e"
_EMPTY_DICT = b"}"
_SET_ITEMS = b"u"
_REDUCE = b"R"
_NEW = b"\x81"
_BUILD = b"b"
_PERSISTENT = b"Q"
_STOP = b"."


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPickle:
    """A pickle and the storages that it names."""

    payload: bytes
    """The bytes of ``data.pkl``."""
    storages: tuple[Storage, ...]
    """By key: the first lies in ``data/0``."""


def write_pickle(tree: Tree) -> WrittenPickle:
    """
    Return *tree* as a pickle.

    Raises:
        InvalidInput: The tree contains itself, or a part that cannot be written; names the key path.
    """
    _check(tree)
    writer = _Writer()
    writer.write(tree)
    return WrittenPickle(payload=b"\x80\x02" + writer.payload() + _STOP, storages=tuple(writer.storages))


def _check(tree: Tree) -> None:
    try:
        found: TreeReport = check_tree(tree)
    except UnsafeTreeError as exc:
        raise InvalidInput(f"the tree cannot be written: {exc}") from exc
    for place, unreadable in found.unreadable:
        raise InvalidInput(f"the tree cannot be written: {unreadable.what} at {place}")
    for name, place in found.names.items():
        if names.dotted(*names.module_and_name(name)) is None:
            raise InvalidInput(f"the tree cannot be written: {name!r} at {place} is not the name of a global")


class _Writer:
    """Appends the opcodes of one node after another."""

    def __init__(self) -> None:
        self.storages: dict[Storage, int] = {}
        """Key numbers, in order of first use."""
        self._pieces: list[bytes] = []
        self._memo: dict[str | Global, int] = {}

    def payload(self) -> bytes:
        """Return the opcodes written so far."""
        return b"".join(self._pieces)

    def write(self, node: Tree) -> None:
        """Write one node of any type."""
        _WRITERS[type(node)](self, node)

    def _emit(self, *pieces: bytes) -> None:
        self._pieces += pieces

    # Scalars

    def _none(self, _: Tree) -> None:
        self._emit(_NONE)

    def _boolean(self, node: Tree) -> None:
        self._emit(_TRUE if node else _FALSE)

    def _integer(self, node: Tree) -> None:
        value = cast(int, node)
        if 0 <= value <= _UINT8_MAX:
            self._emit(b"K", value.to_bytes(1, "little"))
        elif 0 <= value <= _UINT16_MAX:
            self._emit(b"M", value.to_bytes(2, "little"))
        elif _INT32_MIN <= value <= _INT32_MAX:
            self._emit(b"J", value.to_bytes(4, "little", signed=True))
        else:
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            head = b"\x8a" + bytes([len(raw)]) if len(raw) <= _UINT8_MAX else b"\x8b" + struct.pack("<i", len(raw))
            self._emit(head, raw)

    def _real(self, node: Tree) -> None:
        self._emit(struct.pack(">cd", b"G", node))

    def _text(self, node: Tree) -> None:
        text = cast(str, node)
        if not self._recall(text):
            raw = text.encode("utf-8", "surrogatepass")
            self._emit(b"X", struct.pack("<I", len(raw)), raw)
            self._memorise(text)

    def _binary(self, node: Tree) -> None:
        # Protocol 2 has no bytes; latin-1 maps each of them to the character of its number.
        text = cast(bytes, node).decode("latin-1")
        self._call(names.ENCODE, lambda: self.write(text), lambda: self.write("latin1"))

    # Containers

    def _tuple(self, node: Tree) -> None:
        items = cast("tuple[Tree, ...]", node)
        if not items:
            self._emit(_EMPTY_TUPLE)
            return
        if len(items) not in _TUPLES:
            self._emit(_MARK)
        for item in items:
            self.write(item)
        self._emit(_TUPLES.get(len(items), _TUPLE))

    def _list(self, node: Tree) -> None:
        self._emit(_EMPTY_LIST)
        self._appends(cast("list[Tree]", node))

    def _dict(self, node: Tree) -> None:
        self._emit(_EMPTY_DICT)
        self._set_items(cast("dict[Tree, Tree]", node))

    def _set(self, node: Tree) -> None:
        # The order of a set changes from process to process, so its elements are sorted by their own pickles.
        elements = sorted(cast("set[Tree]", node), key=_sort_key)
        self._call(names.SET, lambda: self._list(elements))

    def _ordered_map(self, node: Tree) -> None:
        mapping = cast(OrderedMap, node)
        self._call(names.ORDERED_DICT)
        self._set_items(mapping)
        if mapping.attributes is not None:
            self._dict(mapping.attributes)
            self._emit(_BUILD)

    def _size(self, node: Tree) -> None:
        extents = tuple(cast(Size, node))
        self._call(names.SIZE, lambda: self._tuple(extents))

    def _appends(self, items: "list[Tree]") -> None:
        if items:
            self._emit(_MARK)
            for item in items:
                self.write(item)
            self._emit(_APPENDS)

    def _set_items(self, items: "dict[Tree, Tree]") -> None:
        if items:
            self._emit(_MARK)
            for key, value in items.items():
                self.write(key)
                self.write(value)
            self._emit(_SET_ITEMS)

    # Names and objects

    def _name(self, node: Tree) -> None:
        if not self._recall(cast(Global, node)):
            module, name = names.module_and_name(cast(Global, node).name)
            self._emit(f"c{module}\n{name}\n".encode())
            self._memorise(cast(Global, node))

    def _inert(self, node: Tree) -> None:
        item = cast(Inert, node)
        self._name(Global(item.name))
        self._tuple(item.arguments)
        self._emit(_NEW if item.made_by_new else _REDUCE)
        self._appends(item.appended)
        self._set_items(item.items)
        if item.has_state:
            self.write(item.state)
            self._emit(_BUILD)

    def _call(self, function: str, *arguments: Callable[[], None]) -> None:
        """Write ``function(*arguments)``; each argument writes itself."""
        self._name(Global(function))
        self._emit(_EMPTY_TUPLE if not arguments else b"")
        self._emit(_MARK if len(arguments) > 3 else b"")
        for argument in arguments:
            argument()
        self._emit(_TUPLES.get(len(arguments), _TUPLE) if arguments else b"", _REDUCE)

    # Tensors

    def _tensor(self, node: Tree) -> None:
        item = cast(Tensor, node)
        if item.is_parameter:
            self._parameter(item)
        elif item.attributes is not None:
            function, arguments = self._view(item, requires_grad=item.requires_grad)
            self._call(
                names.REBUILD_FROM_TYPE,
                lambda: self._name(Global(function)),
                lambda: self._name(Global(names.TENSOR)),
                lambda: self._arguments(arguments),
                lambda: self._dict(item.attributes),
            )
        else:
            function, arguments = self._view(item, requires_grad=item.requires_grad)
            self._call(function, *arguments)

    def _parameter(self, item: Tensor) -> None:
        """Write a parameter around its plain data, which never requires a gradient itself."""
        function, arguments = self._view(item, requires_grad=False)
        parts: list[Callable[[], None]] = [
            lambda: self._call(function, *arguments),
            lambda: self._boolean(item.requires_grad),
            self._no_hooks,
        ]
        if item.attributes is None:
            self._call(names.REBUILD_PARAMETER, *parts)
        else:
            self._call(names.REBUILD_PARAMETER_WITH_STATE, *parts, lambda: self._dict(item.attributes))

    def _view(self, item: Tensor, *, requires_grad: bool) -> "tuple[str, list[Callable[[], None]]]":
        """Return the function that rebuilds a plain tensor, and its arguments."""
        dtype = by_code(item.storage.dtype)
        if view_end(item) > item.storage.elements:
            raise InvalidInput(f"a tensor of shape {tuple(item.shape)} reaches beyond its storage")
        arguments: list[Callable[[], None]] = [
            lambda: self._storage(item.storage),
            lambda: self._integer(item.offset),
            lambda: self._tuple(tuple(item.shape)),
            lambda: self._tuple(item.stride),
            lambda: self._boolean(requires_grad),
            self._no_hooks,
        ]
        if dtype.storage_class is not None:
            return names.REBUILD_TENSOR, arguments
        return names.REBUILD_TENSOR_UNTYPED, [
            *arguments,
            lambda: self._name(Global(f"torch.{dtype.torch_name}")),
        ]

    def _arguments(self, arguments: "list[Callable[[], None]]") -> None:
        self._emit(_MARK)
        for argument in arguments:
            argument()
        self._emit(_TUPLE)

    def _storage(self, storage: Storage) -> None:
        key = self.storages.setdefault(storage, len(self.storages))
        dtype = by_code(storage.dtype)
        is_typed = dtype.storage_class is not None
        self._emit(_MARK)
        self._text("storage")
        self._name(Global(f"torch.{dtype.storage_class}" if is_typed else names.UNTYPED_STORAGE))
        self._text(str(key))
        self._text(storage.device)
        self._integer(storage.elements if is_typed else storage.elements * dtype.bytes)
        self._emit(_TUPLE, _PERSISTENT)

    def _no_hooks(self) -> None:
        self._call(names.ORDERED_DICT)

    # Memo

    def _recall(self, value: "str | Global") -> bool:
        index = self._memo.get(value)
        if index is None:
            return False
        self._emit(b"h" + bytes([index]) if index <= _UINT8_MAX else b"j" + struct.pack("<I", index))
        return True

    def _memorise(self, value: "str | Global") -> None:
        index = self._memo[value] = len(self._memo)
        self._emit(b"q" + bytes([index]) if index <= _UINT8_MAX else b"r" + struct.pack("<I", index))


def _sort_key(element: Tree) -> bytes:
    writer = _Writer()
    writer.write(element)
    return writer.payload()


_WRITERS: Final[dict[type, Callable[[_Writer, Tree], None]]] = {
    type(None): _Writer._none,
    bool: _Writer._boolean,
    int: _Writer._integer,
    float: _Writer._real,
    str: _Writer._text,
    bytes: _Writer._binary,
    tuple: _Writer._tuple,
    list: _Writer._list,
    dict: _Writer._dict,
    set: _Writer._set,
    OrderedMap: _Writer._ordered_map,
    Size: _Writer._size,
    Global: _Writer._name,
    Inert: _Writer._inert,
    Tensor: _Writer._tensor,
}
