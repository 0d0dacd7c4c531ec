"""
Read a ``.pt`` file as a tree and the positions of its tensors' bytes. No torch is imported.

Reading takes milliseconds: the pickle becomes an inert tree, and each storage holds the position of its bytes, which
are not read. The format is one zip archive, as ``torch.save`` makes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from layerstore.errors import Unsupported
from layerstore.hashing import crc32 as crc32_of
from layerstore.limits import PICKLE_BYTES_MAX
from layerstore.source import OpenedSource, damaged, open_source, untrusted
from layerstore.tree import Located, Storage, Tree
from layerstore.zero3.pt.ptwrite import BYTE_ORDER, PICKLE, STORAGE_FOLDER
from layerstore.zero3.pt.unpickle import Pickles
from layerstore.zero3.pt.ziparchive import read_archive


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


def read_pt(path: Path, pickles: Pickles | None = None) -> PtFile:
    """
    Return what *path* describes, without reading any tensor's bytes or running anything.

    The layout, the pickle and its CRC are checked; the payloads' CRCs are only passed on. To read many files, pass the
    same *pickles* each time: it recognizes equal pickles and holds the allowed globals.

    Raises:
        SourceCheckpoint: The file is missing, truncated, damaged, of another format, or untrusted.
        Unsupported: The file has a tensor of an unsupported kind or element type, or big-endian bytes.
        StorageIO: The disk could not be read.
    """
    with open_source(path) as source:
        return read_section(source, 0, source.size_bytes, pickles)


def read_section(source: OpenedSource, begin: int, size_bytes: int, pickles: Pickles | None = None) -> PtFile:
    """Return what the *size_bytes* at *begin* of *source* describe, read as a ``.pt`` file; see `read_pt`."""
    section = source.section(begin, size_bytes)
    root, entries = read_archive(section)
    _check_byte_order(section, entries)
    payload = _read_record(section, entries, PICKLE)
    records = {
        name[len(STORAGE_FOLDER) :]: replace(located, offset_bytes=begin + located.offset_bytes) if begin else located
        for name, located in entries.items()
        if name.startswith(STORAGE_FOLDER)
    }
    tree, storages = (pickles or Pickles()).read(payload, path=source.path, records=records)
    return PtFile(path=source.path, tree=tree, storages=storages, root=root)


def _check_byte_order(source: OpenedSource, entries: Mapping[str, Located]) -> None:
    if BYTE_ORDER not in entries:
        return  # files from before torch 2.1 lack this entry; torch reads them as little-endian
    order = _read_record(source, entries, BYTE_ORDER)
    if order == b"big":
        raise Unsupported(f"{source.path}: its tensors are big-endian", path=str(source.path))
    if order != b"little":
        raise damaged(source.path, f"its byte order is {order[:20]!r}")


def _read_record(source: OpenedSource, entries: Mapping[str, Located], name: str) -> bytes:
    located = entries.get(name)
    if located is None:
        raise damaged(source.path, f"the entry {name} is missing")
    if located.size_bytes > PICKLE_BYTES_MAX:
        raise untrusted(source.path, f"the entry {name} has {located.size_bytes} bytes")
    payload = source.read_at(located.offset_bytes, located.size_bytes)
    actual = crc32_of(payload)
    if actual != located.crc32:
        raise damaged(source.path, f"the entry {name} has the CRC {actual:08x}, its directory says {located.crc32:08x}")
    return payload
