"""
The file ``.metadata`` of a PyTorch distributed checkpoint: its tensors, their chunks, and where the chunks lie.

It is a pickle of torch's own classes, which this module reads and writes as an inert tree. Each chunk, and each value
that is not a tensor, is a small archive of ``torch.save`` inside a data file.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from layerstore.dtypes import by_code, by_torch_name
from layerstore.errors import SourceCheckpoint, Unsupported
from layerstore.filenames import DCP_METADATA
from layerstore.handover import KeyPath
from layerstore.limits import DCP_METADATA_BYTES_MAX
from layerstore.source import damaged, read_source_file
from layerstore.tree import Global, Inert, Size, Tree
from layerstore.zero3.pt import MEMORY_FORMAT, OF_DCP_METADATA, read_pickle, write_pickle

DATA_SUFFIX = ".distcp"
"""The suffix of files with tensors."""

_CLASSES = "torch.distributed.checkpoint.metadata"
_METADATA = f"{_CLASSES}.Metadata"
_TENSOR = f"{_CLASSES}.TensorStorageMetadata"
_BYTES = f"{_CLASSES}.BytesStorageMetadata"
_PROPERTIES = f"{_CLASSES}.TensorProperties"
_CHUNK = f"{_CLASSES}.ChunkStorageMetadata"
_INDEX = f"{_CLASSES}.MetadataIndex"
_STORAGE_META = f"{_CLASSES}.StorageMeta"
_PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"
_GET_LAYOUT = "torch.serialization._get_layout"
_DICT = "builtins.dict"
"""We write the map of storage locations as a call with pairs: its keys are objects, which no tree can have as keys."""

_KNOWN = frozenset(
    {
        *(
            _METADATA,
            _TENSOR,
            _BYTES,
            _PROPERTIES,
            _CHUNK,
            _INDEX,
            _STORAGE_META,
            MEMORY_FORMAT,
            _PLACE,
            _GET_LAYOUT,
            _DICT,
        ),
        # A checkpoint's id may be a path; since Python 3.13, path classes come from pathlib._local.
        *("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath", "pathlib._local.WindowsPath"),
    }
)
# The version that torch's own writer writes: CURRENT_DCP_VERSION.
_VERSION = "1.0.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor's elements, or a value that is not a tensor, and its archive."""

    offsets: tuple[int, ...]
    """The index of the chunk's first element, by dimension."""
    sizes: tuple[int, ...]
    file: str
    """The file's path below the checkpoint's folder."""
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor, or one value that is not a tensor."""

    key: str
    """The key that readers ask for."""
    path: KeyPath
    """The entry's path in the nested state that was saved."""
    dtype: str | None
    """Code of the element type; None for a value that is not a tensor, which is one chunk without sizes."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


# -- writing -------------------------------------------------------------------------------------------------------


def metadata_bytes(entries: Iterable[Entry]) -> bytes:
    """Return the content of ``.metadata`` for *entries*; several entries may refer to the same archive."""
    described: dict[Tree, Tree] = {}
    paths: dict[Tree, Tree] = {}
    places: list[Tree] = []
    for entry in entries:
        described[entry.key] = _described(entry)
        paths[entry.key] = entry.path
        places += ((_index(entry, number), _place(chunk)) for number, chunk in enumerate(entry.chunks))
    whole = _instance(
        _METADATA,
        state_dict_metadata=described,
        planner_data=paths,
        storage_data=Inert(name=_DICT, arguments=(places,)),
        # torch's reader makes its own storage_meta.
        storage_meta=None,
        version=_VERSION,
    )
    return write_pickle(whole, protocol=OF_DCP_METADATA.protocol)[0]


def _described(entry: Entry) -> Inert:
    if entry.dtype is None:
        return Inert(name=_BYTES, made_by_new=True)
    is_pinned = requires_grad = False
    layout = Inert(name=_GET_LAYOUT, arguments=("torch.strided",))
    contiguous = Inert(name=MEMORY_FORMAT, arguments=(0,))
    dtype = Global(f"torch.{by_code(entry.dtype).torch_name}")
    properties = Inert(
        name=_PROPERTIES,
        made_by_new=True,
        # In the order of torch's own TensorProperties.__getstate__.
        state=(dtype, layout, requires_grad, contiguous, is_pinned),
        has_state=True,
    )
    chunks: list[Tree] = [
        _instance(_CHUNK, offsets=Size(chunk.offsets), sizes=Size(chunk.sizes)) for chunk in entry.chunks
    ]
    return _instance(_TENSOR, properties=properties, size=Size(entry.shape), chunks=chunks)


def _index(entry: Entry, number: int) -> Inert:
    offset = None if entry.dtype is None else Size(entry.chunks[number].offsets)
    return _instance(_INDEX, fqn=entry.key, index=None if entry.dtype is None else number, offset=offset)


def _place(chunk: Chunk) -> Inert:
    return _instance(_PLACE, relative_path=chunk.file, offset=chunk.offset_bytes, length=chunk.size_bytes)


def _instance(name: str, **fields: Tree) -> Inert:
    return Inert(name=name, made_by_new=True, state=dict(fields.items()), has_state=True)


# -- reading -------------------------------------------------------------------------------------------------------


def read_metadata(folder: Path) -> dict[str, Entry]:
    """
    Return all entries of the checkpoint in *folder*, by key.

    Raises:
        SourceCheckpoint: The file is missing, damaged, or not torch's.
        Unsupported: A tensor has an unsupported element type, or the archives are compressed.
    """
    path = folder / DCP_METADATA
    payload = read_source_file(path, size_bytes_max=DCP_METADATA_BYTES_MAX)
    tree, _ = read_pickle(payload, path=path, records={}, allowed_globals=_KNOWN, form=OF_DCP_METADATA)
    return {entry.key: entry for entry in _MetadataReader(path).entries(tree)}


_Box = tuple[Size, Size]
"""Offsets and sizes of a chunk."""


def _steps(path: Tree) -> KeyPath:
    """Return *path* if it is a path, otherwise an empty path."""
    steps = path if isinstance(path, tuple) else ()
    return tuple(step for step in steps if isinstance(step, str | int))


class _MetadataReader:
    """Turns the tree into entries, and checks each part on the way."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def entries(self, tree: Tree) -> Iterator[Entry]:
        whole = self._fields(tree, _METADATA)
        paths = whole.get("planner_data")
        places = dict(self._places(whole.get("storage_data")))
        # Tensors come rank by rank, but paths come in the order of the nested state.
        order = {key: number for number, key in enumerate(paths)} if isinstance(paths, dict) else {}
        described_by = self._map(whole.get("state_dict_metadata"))
        for key, described in sorted(described_by.items(), key=lambda item: order.get(item[0], len(order))):
            if not isinstance(key, str):
                raise self._unlike("a name")
            path = paths.get(key) if isinstance(paths, dict) else None
            dtype, shape, boxes = self._tensor(described)
            chunks = []
            for box in boxes:
                place = places.get((key, None if box is None else box[0]))
                if place is None:
                    raise damaged(self._path, f"it does not say where {key!r} is")
                chunks.append(self._chunk(box, place))
            yield Entry(key=key, path=_steps(path) or (key,), dtype=dtype, shape=shape, chunks=tuple(chunks))

    def _tensor(self, node: Tree) -> "tuple[str | None, tuple[int, ...], list[_Box | None]]":
        """Return the element type, the shape and the boxes of a tensor; any other value has one box, None."""
        if isinstance(node, Inert) and node.name == _BYTES:
            return None, (), [None]
        fields = self._fields(node, _TENSOR)
        properties, chunks = fields.get("properties"), fields.get("chunks")
        match properties:
            case Inert(name=name, state=(Global(dtype), *_)) if name == _PROPERTIES and isinstance(chunks, list):
                code = by_torch_name(dtype.removeprefix("torch.")).code
            case _:
                raise self._unlike("a tensor's properties")
        shape = self._size(fields.get("size"))
        boxes: list[_Box | None] = []
        for chunk in chunks:
            inner = self._fields(chunk, _CHUNK)
            box = self._size(inner.get("offsets")), self._size(inner.get("sizes"))
            if not len(box[0]) == len(box[1]) == len(shape):
                raise self._unlike("a chunk's box")
            boxes.append(box)
        return code, shape, boxes

    def _places(self, node: Tree) -> Iterator[tuple[tuple[str, Size | None], dict[Tree, Tree]]]:
        """Yield the fields of each archive's location, by key and offsets."""
        match node:
            case Inert(name=name, arguments=(list(pairs),)) if name == _DICT:
                items = [(pair[0], pair[1]) for pair in pairs if isinstance(pair, tuple) and len(pair) == 2]
            case _:
                items = list(self._map(node).items())
        for key, value in items:
            index = self._index(key)
            offset, tensor_name = index.get("offset"), index.get("fqn")
            if not isinstance(tensor_name, str) or not isinstance(offset, Size | None):
                raise self._unlike("an index")
            # The number in an index is only a hint for torch's own search: the name and the offset identify the chunk.
            yield (tensor_name, offset), self._fields(value, _PLACE)

    def _index(self, node: Tree) -> dict[Tree, Tree]:
        """Return the fields of an index; an index that is a map's key is read as a tuple of class and attributes."""
        match node:
            case (name, *pairs) if name == _INDEX:
                return {pair[0]: pair[1] for pair in pairs if isinstance(pair, tuple) and len(pair) == 2}
            case _:
                return self._fields(node, _INDEX)

    def _chunk(self, box: _Box | None, place: dict[Tree, Tree]) -> Chunk:
        file, offset, length = (place.get(name) for name in ("relative_path", "offset", "length"))
        if place.get("transform_descriptors"):
            raise Unsupported(
                f"{self._path}: its tensors are compressed ({place['transform_descriptors']!r})",
                hint="save it without extensions",
            )
        if not (
            isinstance(file, str) and isinstance(offset, int) and isinstance(length, int) and offset >= 0 <= length
        ):
            raise self._unlike("a place")
        # Refuse `..` as a path component, and NUL anywhere.
        if PurePosixPath(file).is_absolute() or {"..", "\0"} & {*PurePosixPath(file).parts, *file}:
            raise SourceCheckpoint(
                f"{self._path} names the file {file!r}, which is not below its folder",
                hint="if layerstore wrote it, name the folder above this one",
            )
        offsets, sizes = (Size(), Size()) if box is None else box
        return Chunk(offsets=offsets, sizes=sizes, file=file, offset_bytes=offset, size_bytes=length)

    def _fields(self, node: Tree, name: str) -> dict[Tree, Tree]:
        if not isinstance(node, Inert) or node.name != name or not isinstance(node.state, dict):
            raise self._unlike(f"a {name.rpartition('.')[2]}")
        return node.state

    def _map(self, node: Tree) -> dict[Tree, Tree]:
        if not isinstance(node, dict):
            raise self._unlike("a map")
        return node

    def _size(self, node: Tree) -> Size:
        if not isinstance(node, Size):
            raise self._unlike("a size")
        return node

    def _unlike(self, expected: str) -> SourceCheckpoint:
        return damaged(self._path, f"where torch writes {expected}, it has something else")
