"""
Trees as plain values: every container is a list that starts with its tag.

Maps keep their order (a msgpack map would be sorted). Tensors that share memory still share it, because storages are in
their own table and are referred to by position. For the tags, see docs/reference/format.md.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from typing import TypeVar, cast

from layerstore.dtypes import by_code
from layerstore.errors import IntegrityError, InvalidInput
from layerstore.format.canonical import Plain, pack, pack_in_order, unpack
from layerstore.limits import NUMBER_MAX
from layerstore.states import ObjectContent
from layerstore.tree import Global, Inert, OrderedMap, Size, Storage, Template, Tensor, Tree

Value = TypeVar("Value")

_INT64 = range(-(1 << 63), 1 << 64)  # what msgpack can hold; random seeds have 128 bits

ContentToPlain = Callable[[object], Plain]
ContentFromPlain = Callable[[Plain, str], object]


def encode_tree(tree: Tree, *, content_to_plain: ContentToPlain) -> Plain:
    """Turn *tree* into ``[storages, root]``; *content_to_plain* encodes a storage's content."""
    return _Encoder(lambda storage: content_to_plain(storage.content)).image(tree)


class _Encoder:
    def __init__(self, content_of: Callable[[Storage], Plain]) -> None:
        self._table: list[Plain] = []
        self._positions: dict[Storage, int] = {}
        self._content_of = content_of

    def image(self, tree: Tree) -> list[Plain]:
        root = self.node(tree)
        return [self._table, root]

    def node(self, tree: Tree) -> Plain:  # noqa: PLR0911, PLR0912  # one line per node type
        match tree:
            case str():
                return _encode_text(tree)
            case None | bool() | float() | bytes():
                return tree
            case int():
                return tree if tree in _INT64 else ["I", str(tree)]
            case Size():
                return ["z", *tree]
            case OrderedMap():
                attributes = None if tree.attributes is None else self.node(tree.attributes)
                return ["o", attributes, *self._pairs(tree)]
            case Tensor():
                return self._tensor(tree)
            case Global():
                return ["g", tree.name]
            case Inert():
                return self._inert(tree)
            case dict():
                return ["d", *self._pairs(tree)]
            case list():
                return ["l", *map(self.node, tree)]
            case tuple():
                return ["t", *map(self.node, tree)]
            case set():
                return ["s", *sorted(map(self.node, tree), key=pack)]  # a set has no stable order
            case _:
                raise InvalidInput(f"a {type(tree).__name__} cannot be part of a tree")

    def _pairs(self, tree: dict[Tree, Tree]) -> list[Plain]:
        parts = chain.from_iterable(tree.items())
        return [_encode_text(part) if type(part) is str else self.node(part) for part in parts]

    def _tensor(self, tensor: Tensor) -> Plain:
        attributes = None if tensor.attributes is None else self.node(tensor.attributes)
        return [
            "T",
            self._position(tensor.storage),
            tensor.offset,
            list(tensor.shape),
            list(tensor.stride),
            tensor.requires_grad,
            tensor.is_parameter,
            attributes,
        ]

    def _position(self, storage: Storage) -> int:
        if storage not in self._positions:
            self._positions[storage] = len(self._table)
            self._table.append([storage.dtype, storage.elements, storage.device, self._content_of(storage)])
        return self._positions[storage]

    def _inert(self, inert: Inert) -> Plain:
        return [
            "i",
            inert.name,
            inert.made_by_new,
            self.node(inert.arguments),
            self.node(inert.state),
            inert.has_state,
            self.node(inert.appended),
            self.node(inert.items),
        ]


@lru_cache(1 << 12)  # mostly names, which are identical in the trees of all ranks
def _encode_text(value: str) -> Plain:
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, which Python and pickle allow
        return ["u", value.encode("utf-8", "surrogatepass")]
    return value


def decode_tree(value: Plain, *, content_from_plain: ContentFromPlain, what: str) -> Tree:
    """Turn the result of ``encode_tree`` back into a tree; raises IntegrityError if *value* is not such a result."""
    try:
        rows, root = _typed(list, value)
        # Only lists, though Python would also unpack other types: an empty map would be a second spelling of [].
        storages = [_storage(_typed(list, row), content_from_plain, what) for row in _typed(list, rows)]
        template = _template(pack_in_order(root), len(storages))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError) as exc:
        raise IntegrityError(f"{what} is not a tree: {exc}") from exc
    if template is None:
        raise IntegrityError(f"{what} is not a tree in canonical form")
    return template.filled(storages)


# The two trees of a rank's state are identical in all ranks of a save, except for the storages.
@lru_cache(maxsize=2)
def _template(packed: bytes, count: int) -> Template | None:
    """Return the tree with the root *packed*, which views *count* storages; None if we would encode it differently."""
    root = unpack(packed, what="it", is_canonical=True)
    storages = [Storage(dtype="", elements=0, device="") for _ in range(count)]
    tree = _Decoder(storages).node(root)
    table, again = _Encoder(lambda storage: None).image(tree)
    is_canonical = pack_in_order(again) == packed and len(cast("list[Plain]", table)) == count
    return Template(tree, storages) if is_canonical else None


def _storage(row: list[Plain], content_from_plain: ContentFromPlain, what: str) -> Storage:
    dtype, elements, device, content = row
    storage = Storage(
        dtype=_typed(str, dtype),
        elements=_number(elements),
        device=_typed(str, device),
        content=content_from_plain(content, what),
    )
    size_bytes = _size_of(storage.content)
    if size_bytes is not None and size_bytes != storage.elements * by_code(storage.dtype).bytes:
        raise ValueError(f"a storage has {storage.elements} elements in {size_bytes} bytes")
    return storage


def _size_of(content: object) -> int | None:
    """Return the size of *content*; None if *content* is made of slices, whose sizes only their layers hold."""
    if isinstance(content, bytes):
        return len(content)
    return content.size_bytes if isinstance(content, ObjectContent) else None


class _Decoder:
    def __init__(self, table: list[Storage]) -> None:
        self._table = table

    def node(self, value: Plain) -> Tree:
        if not isinstance(value, list):
            if isinstance(value, dict):
                raise TypeError("a map has no place in a tree")
            return value
        tag, *rest = value
        return self._tagged(_typed(str, tag), rest)

    def _tagged(self, tag: str, rest: list[Plain]) -> Tree:  # noqa: PLR0911  # one line per tag
        match tag:
            case "z":
                return Size(_integers(rest))
            case "o":
                attributes = None if rest[0] is None else _typed(dict, self.node(rest[0]))
                return OrderedMap(self._pairs(rest[1:]), attributes)
            case "T":
                return self._tensor(rest)
            case "g":
                return Global(_typed(str, rest[0]))
            case "i":
                return self._inert(rest)
            case "d":
                return self._pairs(rest)
            case "l":
                return [self.node(item) for item in rest]
            case "t":
                return tuple(self.node(item) for item in rest)
            case "s":
                return {self.node(item) for item in rest}
            case "u":
                return _typed(bytes, rest[0]).decode("utf-8", "surrogatepass")
            case "I":
                return int(_typed(str, rest[0]))
            case _:
                raise ValueError(f"unknown tag {tag!r}")

    def _pairs(self, rest: list[Plain]) -> dict[Tree, Tree]:
        parts = [self.node(part) for part in rest]
        return dict(zip(parts[::2], parts[1::2], strict=True))

    def _tensor(self, rest: list[Plain]) -> Tensor:
        position, offset, shape, stride, requires_grad, is_parameter, attributes = rest
        if len(_integers(shape)) != len(_integers(stride)):
            raise ValueError("a tensor does not have one stride for each dimension")
        return Tensor(
            storage=self._table[_number(position)],
            offset=_number(offset),
            shape=Size(map(_number, _integers(shape))),
            stride=tuple(map(_number, _integers(stride))),
            requires_grad=_typed(bool, requires_grad),
            is_parameter=_typed(bool, is_parameter),
            attributes=None if attributes is None else _typed(dict, self.node(attributes)),
        )

    def _inert(self, rest: list[Plain]) -> Inert:
        name, made_by_new, arguments, state, has_state, appended, items = rest
        return Inert(
            name=_typed(str, name),
            made_by_new=_typed(bool, made_by_new),
            arguments=_typed(tuple, self.node(arguments)),
            state=self.node(state),
            has_state=_typed(bool, has_state),
            appended=_typed(list, self.node(appended)),
            items=_typed(dict, self.node(items)),
        )


def _typed(cls: type[Value], value: object) -> Value:
    # Not isinstance: True is not an int here, nor a Size a tuple.
    if type(value) is not cls:
        raise TypeError(f"found {type(value).__name__} where {cls.__name__} belongs")
    return value


def _number(value: Plain) -> int:
    number = _typed(int, value)
    if not 0 <= number <= NUMBER_MAX:
        raise ValueError(f"{number} is not a size or position")
    return number


def _integers(values: Plain) -> list[int]:
    return [_typed(int, value) for value in _typed(list, values)]
