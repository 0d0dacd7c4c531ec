"""
``.pt`` files: read one as a tree and the positions of its tensors' bytes, or lay one out. No torch is imported.

Reading takes milliseconds: the pickle becomes an inert tree, and each storage holds the position of its bytes. Writing
starts from a layout, which says where each payload goes and which bytes surround them; callers write both. This module
reads no payloads and writes no files. The format is one zip archive, as ``torch.save`` makes it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from layerstore.dtypes import by_code
from layerstore.errors import InvalidInput, Unsupported
from layerstore.hashing import crc32 as crc32_of
from layerstore.limits import NUMBER_MAX, PAGE_BYTES, PICKLE_BYTES_MAX
from layerstore.source import OpenedSource, damaged, open_source, untrusted
from layerstore.tree import Located, Storage, Tree
from layerstore.zero3.pt.picklewrite import WrittenPickles
from layerstore.zero3.pt.unpickle import Pickles
from layerstore.zero3.pt.ziparchive import ZipLayout, layout_archive, read_archive

_PICKLE = "data.pkl"
_BYTE_ORDER = "byteorder"
_STORAGE_FOLDER = "data/"

# torch's own alignment, for everything that is not a payload.
_RECORD_ALIGNMENT_BYTES = 64

# The length that torch gives its own serialization ids.
_ID_DIGITS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PtFile:
    """What a ``.pt`` file describes."""

    path: Path
    """The file that was read."""
    tree: Tree
    """Inert; each tensor's storage holds a `Located` as its content."""
    storages: tuple[Storage, ...]
    """Every storage that a tensor views, in order of first use."""
    root: str
    """The folder inside the archive: the stem of the name that the file was saved under."""


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


def read_pt(path: Path, pickles: Pickles | None = None) -> PtFile:
    """
    Return what *path* describes, without reading any tensor's bytes or running anything.

    The layout, the pickle and its CRC are checked; the payloads' CRCs are only passed on. To read many files, pass the
    same *pickles* each time: it recognizes equal pickles and holds the allowed globals.

    Raises:
        SourceCheckpoint: The file is missing, truncated, damaged, of another format, or untrusted.
        Unsupported: It has a tensor of an unsupported kind or element type, or big-endian bytes.
        StorageIO: The disk refused.
    """
    with open_source(path) as source:
        return read_section(source, 0, source.size_bytes, pickles)


def read_section(source: OpenedSource, begin: int, size_bytes: int, pickles: Pickles | None = None) -> PtFile:
    """Return what *size_bytes* of *source* from *begin*, which are as a ``.pt`` file, describe; see `read_pt`."""
    section = source.section(begin, size_bytes)
    root, entries = read_archive(section)
    _check_byte_order(section, entries)
    payload = _read_record(section, entries, _PICKLE)
    records = {
        name.removeprefix(_STORAGE_FOLDER): replace(located, offset_bytes=begin + located.offset_bytes)
        for name, located in entries.items()
        if name.startswith(_STORAGE_FOLDER)
    }
    tree, storages = (pickles or Pickles()).read(payload, path=source.path, records=records)
    return PtFile(path=source.path, tree=tree, storages=storages, root=root)


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
    # torch's order. We leave out its .format_version and .storage_alignment: they promise that offsets can be computed
    # from sizes the way torch pads, and some loaders would then ignore our headers.
    contents: tuple[bytes | Storage, ...] = (pickled, b"little", *storages, b"3\n")
    keys = (f"{_STORAGE_FOLDER}{key}" for key in range(len(storages)))
    records = [
        _record(record, content, alignment_bytes)
        for record, content in zip((_PICKLE, _BYTE_ORDER, *keys, "version"), contents, strict=True)
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


def _check_byte_order(source: OpenedSource, entries: Mapping[str, Located]) -> None:
    if _BYTE_ORDER not in entries:
        return  # files older than torch 2.1 have none, and torch reads them as little-endian
    order = _read_record(source, entries, _BYTE_ORDER)
    if order == b"big":
        raise Unsupported(f"{source.path}: its tensors are big-endian", path=str(source.path))
    if order != b"little":
        raise damaged(source.path, f"its byte order is {order[:20]!r}")


def _read_record(source: OpenedSource, entries: Mapping[str, Located], name: str) -> bytes:
    located = entries.get(name)
    if located is None:
        raise damaged(source.path, f"the record {name} is missing")
    if located.size_bytes > PICKLE_BYTES_MAX:
        raise untrusted(source.path, f"the record {name} has {located.size_bytes} bytes")
    payload = source.read_at(located.offset_bytes, located.size_bytes)
    found = crc32_of(payload)
    if found != located.crc32:
        raise damaged(source.path, f"the record {name} has the CRC {found:08x}, its directory says {located.crc32:08x}")
    return payload
