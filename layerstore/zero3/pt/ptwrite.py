"""
Lay out an inert tree as the ``.pt`` file that ``torch.save`` would write: a pickle in protocol 2, with torch's own
names, and one zip archive around it.

Loading it with torch gives live objects of the original classes. Equal trees give equal bytes: only texts and globals
are memoized, by value; storages are numbered by first use; sets are sorted. The ``pickle`` module is not used. A list
or dict that occurs twice in a tree is written twice.

A layout holds the position of each payload and the bytes between the payloads; callers write both.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from layerstore.dtypes import by_code
from layerstore.errors import InvalidInput
from layerstore.hashing import crc32 as crc32_of
from layerstore.limits import NUMBER_MAX, PAGE_BYTES
from layerstore.tree import Global, Inert, OrderedMap, Size, Storage, Template, Tensor, Tree
from layerstore.zero3.pt import allowlist as names
from layerstore.zero3.pt.allowlist import MalformedPickleError, check_tree, view_end
from layerstore.zero3.pt.ziparchive import ZipLayout, layout_archive

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


def write_pickle(tree: Tree, *, protocol: int = 2) -> tuple[bytes, tuple[Storage, ...]]:
    """
    Return *tree* as a pickle, and the storages that it refers to: ``data/0``, ``data/1`` and so on.

    *protocol* changes only the header, since each protocol includes the opcodes of the lower ones.

    Raises:
        InvalidInput: The tree contains itself, or a part that cannot be written; the message states the key path.
    """
    _check(tree)
    writer = _Writer()
    writer.write(tree)
    return bytes([0x80, protocol]) + writer.payload() + _STOP, tuple(writer.storages)


class WrittenPickles:
    """Writes trees; a tree that equals a recent one, such as another rank's, reuses its pickle."""

    def __init__(self) -> None:
        self._latest: list[tuple[Template, bytes]] = []

    def write(self, tree: Tree) -> tuple[bytes, tuple[Storage, ...]]:
        """Return and raise what `write_pickle` does."""
        for template, pickled in self._latest:
            storages = template.storages_of(tree)
            if storages is not None:
                return pickled, tuple(storages)
        pickled, written = write_pickle(tree)
        # Keep two, because a rank has two trees.
        self._latest = [(Template(tree, written), pickled), *self._latest[:1]]
        return pickled, written


def _check(tree: Tree) -> None:
    try:
        checked = check_tree(tree)
    except MalformedPickleError as exc:
        raise InvalidInput(f"the tree cannot be written: {exc}") from exc
    for place, what in checked.unreadable:
        raise InvalidInput(f"the tree cannot be written: {what} at {place}")
    for name, place in checked.names.items():
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

    def write(self, node: "Tree | Storage") -> None:  # noqa: PLR0912  # one case a type
        """Write one node of any type."""
        match node:
            case None:
                self._emit(_NONE)
            case bool():
                self._emit(_TRUE if node else _FALSE)
            case int():
                self._integer(node)
            case float():
                self._emit(struct.pack(">cd", b"G", node))
            case str():
                self._text(node)
            case bytes():
                # Protocol 2 has no opcode for bytes; latin-1 maps each byte to the character of that number.
                self._call(names.ENCODE, node.decode("latin-1"), "latin1")
            case Size():
                self._call(names.SIZE, tuple(node))
            case tuple():
                self._tuple(node)
            case list():
                self._emit(_EMPTY_LIST)
                self._appends(node)
            case OrderedMap():
                self._call(names.ORDERED_DICT)
                self._set_items(node)
                if node.attributes is not None:
                    self.write(node.attributes)
                    self._emit(_BUILD)
            case dict():
                self._emit(_EMPTY_DICT)
                self._set_items(node)
            case set():
                # The order of a set differs between processes, so sort its elements by their own pickles.
                self._call(names.SET, sorted(node, key=_sort_key))
            case Global():
                self._global(node)
            case Inert():
                self._inert(node)
            case Tensor():
                self._tensor(node)
            case Storage():
                self._storage(node)

    def _emit(self, *pieces: bytes) -> None:
        self._pieces += pieces

    def _integer(self, value: int) -> None:
        if 0 <= value <= _UINT8_MAX:
            self._emit(b"K", value.to_bytes(1, "little"))
        elif 0 <= value <= _UINT16_MAX:
            self._emit(b"M", value.to_bytes(2, "little"))
        elif _INT32_MIN <= value <= _INT32_MAX:
            self._emit(b"J", value.to_bytes(4, "little", signed=True))
        else:
            # One extra bit, for the sign.
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            head = b"\x8a" + bytes([len(raw)]) if len(raw) <= _UINT8_MAX else b"\x8b" + struct.pack("<i", len(raw))
            self._emit(head, raw)

    def _text(self, text: str) -> None:
        if not self._recall(text):
            # As Python's pickle does: a file name that is not UTF-8 has lone surrogates.
            raw = text.encode("utf-8", "surrogatepass")
            self._emit(b"X", struct.pack("<I", len(raw)), raw)
            self._memorise(text)

    # Containers

    def _tuple(self, items: "tuple[Tree | Storage, ...]") -> None:
        if not items:
            self._emit(_EMPTY_TUPLE)
            return
        if len(items) not in _TUPLES:
            self._emit(_MARK)
        for item in items:
            self.write(item)
        self._emit(_TUPLES.get(len(items), _TUPLE))

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

    def _global(self, node: Global) -> None:
        if not self._recall(node):
            module, name = names.module_and_name(node.name)
            self._emit(f"c{module}\n{name}\n".encode())
            self._memorise(node)

    def _inert(self, item: Inert) -> None:
        self._global(Global(item.name))
        self._tuple(item.arguments)
        self._emit(_NEW if item.made_by_new else _REDUCE)
        self._appends(item.appended)
        self._set_items(item.items)
        if item.has_state:
            self.write(item.state)
            self._emit(_BUILD)

    def _call(self, function: str, *arguments: "Tree | Storage") -> None:
        """Write ``function(*arguments)``."""
        self._global(Global(function))
        self._tuple(arguments)
        self._emit(_REDUCE)

    # Tensors

    def _tensor(self, item: Tensor) -> None:
        if item.is_parameter:
            # A parameter wraps its plain data, which never itself requires a gradient.
            data = replace(item, is_parameter=False, requires_grad=False, attributes=None)
            parts = (data, item.requires_grad, OrderedMap())
            if item.attributes is None:
                self._call(names.REBUILD_PARAMETER, *parts)
            else:
                self._call(names.REBUILD_PARAMETER_WITH_STATE, *parts, item.attributes)
            return
        function, arguments = _view(item)
        if item.attributes is None:
            self._call(function, *arguments)
        else:
            kind = Global(names.TENSOR)
            self._call(names.REBUILD_FROM_TYPE, Global(function), kind, arguments, item.attributes)

    def _storage(self, storage: Storage) -> None:
        key = self.storages.setdefault(storage, len(self.storages))
        dtype = by_code(storage.dtype)
        is_typed = dtype.storage_class is not None
        storage_class = Global(f"torch.{dtype.storage_class}" if is_typed else names.UNTYPED_STORAGE)
        elements = storage.elements if is_typed else storage.elements * dtype.bytes
        self._tuple(("storage", storage_class, str(key), storage.device, elements))
        self._emit(_PERSISTENT)

    # Memo

    def _recall(self, value: str | Global) -> bool:
        index = self._memo.get(value)
        if index is None:
            return False
        self._emit(b"h" + bytes([index]) if index <= _UINT8_MAX else b"j" + struct.pack("<I", index))
        return True

    def _memorise(self, value: str | Global) -> None:
        index = self._memo[value] = len(self._memo)
        self._emit(b"q" + bytes([index]) if index <= _UINT8_MAX else b"r" + struct.pack("<I", index))


def _view(item: Tensor) -> "tuple[str, tuple[Any, ...]]":
    """Return the function that rebuilds a plain tensor, and its arguments, which include the storage."""
    dtype = by_code(item.storage.dtype)
    if view_end(item) > item.storage.elements:
        raise InvalidInput(f"a tensor of shape {tuple(item.shape)} reaches beyond its storage")
    no_hooks = OrderedMap()
    arguments = (item.storage, item.offset, tuple(item.shape), item.stride, item.requires_grad, no_hooks)
    if dtype.storage_class is not None:
        return names.REBUILD_TENSOR, arguments
    return names.REBUILD_TENSOR_UNTYPED, (*arguments, Global(f"torch.{dtype.torch_name}"))


def _sort_key(element: Tree) -> bytes:
    writer = _Writer()
    writer.write(element)
    return writer.payload()


# -- the archive ---------------------------------------------------------------------------------------------------

PICKLE = "data.pkl"
BYTE_ORDER = "byteorder"
STORAGE_FOLDER = "data/"

# torch's own alignment, for everything that is not a payload.
_RECORD_ALIGNMENT_BYTES = 64

# The length that torch gives its own serialization ids.
_ID_DIGITS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PtLayout:
    """The layout of a ``.pt`` file."""

    size_bytes: int
    """Size of the whole file."""
    storages: tuple[tuple[Storage, int], ...]
    """Each storage with the absolute offset of its payload, in file order; empty ones included."""
    _contents: tuple[bytes | Storage, ...]
    """The contents of all records but the last (the serialization id), in file order."""
    _zip: ZipLayout

    def skeleton(self, crc32: Mapping[Storage, int]) -> list[tuple[int, bytes]]:
        """
        Return all bytes but the storages' payloads, as (absolute offset, bytes), in file order.

        *crc32* holds the CRC of each storage's payload; empty ones may be left out.
        Skeleton and payloads together cover the file, without gap or overlap,
        and are the same bytes for the same tree, name and payloads.
        """
        crcs = [
            crc32_of(part) if isinstance(part, bytes) else crc32[part] if part.elements else 0
            for part in self._contents
        ]
        identity = _serialization_id(self._contents, crcs)
        framing = self._zip.framing([*crcs, crc32_of(identity)])
        placed = zip(self._zip.records, (*self._contents, identity), strict=True)
        return sorted([*framing, *((at.offset_bytes, part) for at, part in placed if isinstance(part, bytes))])


def layout_pt(
    tree: Tree, *, name: str, alignment_bytes: int = PAGE_BYTES, pickles: WrittenPickles | None = None
) -> PtLayout:
    """
    Lay out *tree* as a ``.pt`` file whose archive folder is *name*: the file's stem, as in torch.

    Every non-empty payload starts at a multiple of *alignment_bytes*, so that the kernel can copy or share whole pages.
    To lay out many trees, pass the same *pickles* each time.

    Raises:
        InvalidInput: The tree or the name cannot be written.
    """
    pickled, storages = (pickles or WrittenPickles()).write(tree)
    # torch's order of records. We leave out its .format_version and .storage_alignment, which promise torch's padding:
    # some loaders would then compute offsets from sizes, and ignore our headers.
    contents: tuple[bytes | Storage, ...] = (pickled, b"little", *storages, b"3\n")
    keys = (f"{STORAGE_FOLDER}{key}" for key in range(len(storages)))
    records = [
        _record(record, content, alignment_bytes)
        for record, content in zip((PICKLE, BYTE_ORDER, *keys, "version"), contents, strict=True)
    ]
    if sum(size_bytes for _, size_bytes, _ in records) > NUMBER_MAX:
        raise InvalidInput(f"{name} claims tensors that no file can hold", hint="layerstore verify --read-data")
    identity = (".data/serialization_id", _ID_DIGITS, _RECORD_ALIGNMENT_BYTES)
    placed = layout_archive([*records, identity], root=name)
    pairs = zip(contents, placed.records, strict=False)  # the serialization id has a position, but no content yet
    return PtLayout(
        size_bytes=placed.size_bytes,
        storages=tuple((content, at.offset_bytes) for content, at in pairs if isinstance(content, Storage)),
        _contents=contents,
        _zip=placed,
    )


def _record(name: str, content: bytes | Storage, alignment_bytes: int) -> tuple[str, int, int]:
    if isinstance(content, bytes):
        return name, len(content), _RECORD_ALIGNMENT_BYTES
    size_bytes = content.elements * by_code(content.dtype).bytes
    return name, size_bytes, alignment_bytes if size_bytes else _RECORD_ALIGNMENT_BYTES


def _serialization_id(contents: Sequence[bytes | Storage], crcs: list[int]) -> bytes:
    """Return an id derived from the contents; torch's own is random and depends on the time."""
    digest = hashlib.blake2b(next(part for part in contents if isinstance(part, bytes)), digest_size=16)
    digest.update(b"".join(crc.to_bytes(4, "little") for crc in crcs))
    return str(int.from_bytes(digest.digest(), "big")).zfill(_ID_DIGITS).encode()
