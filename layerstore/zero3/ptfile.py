"""
The one door to ``.pt`` files: their trees in and out, their payloads as extents.

Reading takes milliseconds and costs no import of torch: the pickle becomes an inert tree, each storage
the place where its bytes lie. Writing is a layout: the tree says where every payload goes and which
bytes surround them, and those who own the disk put both there.
Reads no payload and writes nothing. The format: one zip archive, as ``torch.save`` makes it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from layerstore.dtypes import by_code
from layerstore.errors import InvalidInput, Unsupported
from layerstore.format.hashing import crc32 as crc32_of
from layerstore.limits import PAGE_BYTES, PICKLE_BYTES_MAX
from layerstore.tree import Located, Storage, Tree
from layerstore.zero3.pickletree import read_pickle
from layerstore.zero3.picklewrite import write_pickle
from layerstore.zero3.sourcefile import SourceFile, damaged, open_source, untrusted
from layerstore.zero3.ziparchive import Archive, Entry, read_archive
from layerstore.zero3.ziplayout import Record, ZipLayout, layout_archive

_PICKLE = "data.pkl"
_BYTE_ORDER = "byteorder"
_STORAGE_FOLDER = "data/"

# torch's own alignment, for all that is not a payload.
_RECORD_ALIGNMENT_BYTES = 64

# The padding lies in an extra field, whose length has 16 bits.
_ALIGNMENT_BYTES_MAX = 32 * 1024

# The length that torch gives its own serialization ids.
_ID_DIGITS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PtFile:
    """What a ``.pt`` file describes."""

    path: Path
    """Where it was read."""
    tree: Tree
    """Inert; each tensor's storage holds a `Located` as its content."""
    size_bytes: int
    """Size of the whole file when it was opened."""
    storages: tuple[Storage, ...]
    """Every storage that a tensor views, in order of first use."""
    root: str
    """The folder inside the archive: the stem of the name that the file was saved under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PtLayout:
    """Where everything of a ``.pt`` file goes."""

    size_bytes: int
    """Size of the whole file."""
    storages: tuple[tuple[Storage, int], ...]
    """Each storage with the absolute offset of its payload, in file order; empty ones included."""
    _records: tuple["_Planned", ...]
    """All records, in file order."""
    _zip: ZipLayout
    """Their places."""

    def skeleton(self, crc32: Mapping[Storage, int]) -> list[tuple[int, bytes]]:
        """
        Return all bytes but the storages' payloads, as (absolute offset, bytes), in file order.

        *crc32* holds the CRC of each storage's payload; empty ones may be left out.
        Skeleton and payloads together cover the file, without gap or overlap,
        and are the same bytes for the same tree, name and payloads.

        Raises:
            InvalidInput: The CRC of a storage is missing.
        """
        contents = [record.content(crc32) for record in self._records]
        identity = _serialization_id(contents[0].payload, [content.crc32 for content in contents])
        contents.append(_Content(payload=identity, crc32=crc32_of(identity)))
        framing = self._zip.framing([content.crc32 for content in contents])
        placed = zip(self._zip.records, contents, strict=True)
        payloads = [(record.offset_bytes, content.payload) for record, content in placed if content.payload]
        return sorted(framing + payloads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """What a record holds, and its CRC."""

    payload: bytes
    """Empty for storages: others put those bytes in place."""
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A record of the file to be: a storage, or bytes that are known already."""

    name: str
    payload: bytes = b""
    storage: Storage | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.payload) if self.storage is None else _size_bytes(self.storage)

    def content(self, crc32: Mapping[Storage, int]) -> _Content:
        if self.storage is None:
            return _Content(payload=self.payload, crc32=crc32_of(self.payload))
        if self.size_bytes == 0:
            return _Content(payload=b"", crc32=0)
        if self.storage not in crc32:
            raise InvalidInput(f"the CRC of the record {self.name} is missing")
        return _Content(payload=b"", crc32=crc32[self.storage])


def read_pt(path: Path, *, allowed_globals: frozenset[str] = frozenset()) -> PtFile:
    """
    Return what *path* describes, without reading any tensor's bytes and without running anything.

    The layout, the pickle and its CRC are checked; the payloads' CRCs are only passed on.
    Globals in *allowed_globals* become inert objects.

    Raises:
        SourceCheckpoint: Missing, cut short, damaged, of another format, or untrusted.
        Unsupported: A tensor of a kind or element type that has no place here; big-endian bytes.
        StorageIO: The disk refused.
    """
    with open_source(path) as source:
        archive = read_archive(source)
        _check_byte_order(source, archive)
        payload = _read_record(source, archive, _PICKLE)
    read = read_pickle(
        payload,
        path=path,
        records={
            name.removeprefix(_STORAGE_FOLDER): _located(path, entry)
            for name, entry in archive.entries.items()
            if name.startswith(_STORAGE_FOLDER)
        },
        allowed_globals=allowed_globals,
    )
    return PtFile(path=path, tree=read.tree, size_bytes=source.size_bytes, storages=read.storages, root=archive.root)


def layout_pt(tree: Tree, *, name: str, alignment_bytes: int = PAGE_BYTES) -> PtLayout:
    """
    Lay *tree* out as a ``.pt`` file whose archive folder is *name*: the file's stem, as torch does it.

    Every payload that is not empty starts at a multiple of *alignment_bytes*, so that whole pages can be
    copied or shared by the kernel.

    Raises:
        InvalidInput: A tree, name or alignment that cannot be written.
    """
    if not name or name in (".", "..") or any(sign in name for sign in "/\\\0"):
        raise InvalidInput(f"{name!r} is not the stem of a file name")
    if not 1 <= alignment_bytes <= _ALIGNMENT_BYTES_MAX:
        raise InvalidInput(f"payloads cannot be aligned to {alignment_bytes} bytes")
    written = write_pickle(tree)
    planned = _plan_records(written.payload, written.storages)
    identity = Record(name=".data/serialization_id", size_bytes=_ID_DIGITS, alignment_bytes=_RECORD_ALIGNMENT_BYTES)
    placed = layout_archive([*(_record(item, alignment_bytes) for item in planned), identity], root=name)
    pairs = zip(planned, placed.records, strict=False)  # the identity has a place, and is no planned record
    return PtLayout(
        size_bytes=placed.size_bytes,
        storages=tuple((item.storage, at.offset_bytes) for item, at in pairs if item.storage is not None),
        _records=planned,
        _zip=placed,
    )


def _plan_records(payload: bytes, storages: Sequence[Storage]) -> tuple[_Planned, ...]:
    # torch's order. Its .format_version and .storage_alignment are left out: they promise that offsets
    # can be computed from sizes the way torch pads, and then some loaders would not look at our headers.
    return (
        _Planned(name=_PICKLE, payload=payload),
        _Planned(name=_BYTE_ORDER, payload=b"little"),
        *(_Planned(name=f"{_STORAGE_FOLDER}{key}", storage=storage) for key, storage in enumerate(storages)),
        _Planned(name="version", payload=b"3\n"),
    )


def _record(item: _Planned, alignment_bytes: int) -> Record:
    is_payload = item.storage is not None and item.size_bytes > 0
    return Record(
        name=item.name,
        size_bytes=item.size_bytes,
        alignment_bytes=alignment_bytes if is_payload else _RECORD_ALIGNMENT_BYTES,
    )


def _serialization_id(pickle: bytes, crcs: Sequence[int]) -> bytes:
    """Return what torch puts there by chance and time, made from the contents instead."""
    digest = hashlib.blake2b(pickle, digest_size=16)
    digest.update(b"".join(crc.to_bytes(4, "little") for crc in crcs))
    return str(int.from_bytes(digest.digest(), "big")).zfill(_ID_DIGITS).encode()


def _size_bytes(storage: Storage) -> int:
    return storage.elements * by_code(storage.dtype).bytes


def _check_byte_order(source: SourceFile, archive: Archive) -> None:
    if _BYTE_ORDER not in archive.entries:
        return  # files older than torch 2.1 have none, and torch reads them as little-endian
    order = _read_record(source, archive, _BYTE_ORDER)
    if order == b"big":
        raise Unsupported(f"{source.path}: its tensors are big-endian", path=str(source.path))
    if order != b"little":
        raise damaged(source.path, f"its byte order is {order[:20]!r}")


def _read_record(source: SourceFile, archive: Archive, name: str) -> bytes:
    entry = archive.entries.get(name)
    if entry is None:
        raise damaged(source.path, f"the record {name} is missing")
    if entry.size_bytes > PICKLE_BYTES_MAX:
        raise untrusted(source.path, f"the record {name} has {entry.size_bytes} bytes")
    payload = source.read_at(entry.offset_bytes, entry.size_bytes)
    found = crc32_of(payload)
    if found != entry.crc32:
        raise damaged(source.path, f"the record {name} has the CRC {found:08x}, its directory says {entry.crc32:08x}")
    return payload


def _located(path: Path, entry: Entry) -> Located:
    return Located(path=path, offset_bytes=entry.offset_bytes, size_bytes=entry.size_bytes, crc32=entry.crc32)
