"""
Find the records of a zip archive that ``torch.save`` wrote, without reading any of them.

Everything is checked before the first payload byte is touched, against what ``torch.save`` can produce:
all records stored as they are, one root folder, plain names, no overlap, sizes that the file can hold.
So memory and time follow the directory's size, never what a crooked archive promises.
Does not verify CRCs and does not know what the records mean. Writing is `layerstore.zero3.ziplayout`.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from layerstore.errors import SourceCheckpoint
from layerstore.limits import ZIP_DIRECTORY_BYTES_MAX, ZIP_ENTRIES_MAX, ZIP_NAME_BYTES_MAX
from layerstore.zero3.sourcefile import SourceFile, damaged, truncated, untrusted

LOCAL_MAGIC = 0x04034B50
CENTRAL_MAGIC = 0x02014B50
END_MAGIC = 0x06054B50
END64_MAGIC = 0x06064B50
LOCATOR64_MAGIC = 0x07064B50

# magic, version needed, flags, method, time, date, crc32, stored size, size, name length, extra length
LOCAL_HEADER = struct.Struct("<IHHHHHIIIHH")
# magic, version made by, then as above, comment length, disk, internal and external attributes, header offset
CENTRAL_HEADER = struct.Struct("<IHHHHHHIIIHHHHHII")
# magic, disk, disk of directory, entries on disk, entries, directory size, directory offset, comment length
END_RECORD = struct.Struct("<IHHHHIIH")
# magic, size of the rest, versions made by and needed, disks (2), entries (2), directory size and offset
END64_RECORD = struct.Struct("<IQHHIIQQQQ")
# magic, disk, offset of the END64 record, disks
LOCATOR64 = struct.Struct("<IIQI")

MAX16 = 0xFFFF
MAX32 = 0xFFFFFFFF
"""A field with all bits set says: look for the 64-bit form."""

ZIP64_TAG = 0x0001
FLAG_DESCRIPTOR = 1 << 3
"""CRC and sizes of the local header are zero and follow the data."""
FLAG_UTF8 = 1 << 11

_LEGACY_HINT = (
    'save again without "checkpoint": {"checkpoint_serialization": false} in the DeepSpeed configuration: '
    "only the zip format carries checksums and can be read without running a pickle"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One record of an archive."""

    name: str
    """Below the root folder, such as ``data/0``."""
    offset_bytes: int
    """Where its bytes start, from the beginning of the file."""
    size_bytes: int
    """Length of its bytes."""
    crc32: int
    """As the directory states it; not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """The directory of an archive whose layout passed every check."""

    root: str
    """The one folder that all records lie in."""
    entries: Mapping[str, Entry]
    """Records by name, in the directory's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Directory:
    """Where the central directory lies."""

    offset_bytes: int
    size_bytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """One entry as the central directory states it."""

    raw_name: bytes
    flags: int
    method: int
    crc32: int
    stored_bytes: int
    size_bytes: int
    header_offset: int


def read_archive(source: SourceFile) -> Archive:
    """
    Return the records of *source*, after checking the whole layout.

    Raises:
        SourceCheckpoint: Not a zip, cut short, or not something that ``torch.save`` writes.
        StorageIO: The disk refused.
    """
    _refuse_other_formats(source)
    directory = _find_directory(source)
    listed = _list_entries(source, directory)
    root, names = _check_names(source.path, listed)
    _check_claims(source, listed)
    entries = [_locate(source, item, name) for item, name in zip(listed, names, strict=True)]
    _check_overlap(source.path, listed, entries, directory)
    return Archive(root=root, entries=MappingProxyType({entry.name: entry for entry in entries}))


def _refuse_other_formats(source: SourceFile) -> None:
    if source.size_bytes < 4:
        raise truncated(source.path, f"it holds {source.size_bytes} bytes")
    head = source.read_at(0, 4)
    if head == LOCAL_MAGIC.to_bytes(4, "little"):
        return
    # The legacy stream starts with a pickled magic number: PROTO 2 and nothing else can stand there.
    found = "the legacy stream of torch.save" if head[:2] == b"\x80\x02" else "not a file of torch.save"
    raise SourceCheckpoint(
        f"{source.path}: {found}, where its zip format is needed",
        hint=_LEGACY_HINT,
        path=str(source.path),
        reason="legacy" if head[:2] == b"\x80\x02" else "not_torch",
    )


def _find_directory(source: SourceFile) -> _Directory:
    """Read the end records; torch.save writes no comment, so they are the file's very last bytes."""
    end_offset = source.size_bytes - END_RECORD.size
    end = _read_struct(source, END_RECORD, end_offset) if end_offset > 0 else None
    if end is None or end[0] != END_MAGIC or end[7] != 0:
        raise truncated(source.path, "the zip directory at its end is missing")
    _, disk, start_disk, count_here, count, size_bytes, offset_bytes, _ = end
    if (disk, start_disk) != (0, 0) or count_here != count:
        raise untrusted(source.path, "the archive claims to span several disks")
    directory = _Directory(offset_bytes=offset_bytes, size_bytes=size_bytes, count=count)
    locator_offset = end_offset - LOCATOR64.size
    locator = _read_struct(source, LOCATOR64, locator_offset) if locator_offset > 0 else None
    if locator is not None and locator[0] == LOCATOR64_MAGIC:
        end_offset = locator_offset - END64_RECORD.size
        directory = _read_end64(source, directory, record_offset=locator[2], expected_offset=end_offset)
    return _check_directory(source.path, directory, end_offset=end_offset)


def _read_end64(source: SourceFile, narrow: _Directory, *, record_offset: int, expected_offset: int) -> _Directory:
    if record_offset != expected_offset or record_offset < 0:
        raise untrusted(source.path, "the ZIP64 end record is not where the archive ends")
    end64 = _read_struct(source, END64_RECORD, record_offset)
    magic, rest_bytes, _, _, disk, start_disk, count_here, count, size_bytes, offset_bytes = end64
    if magic != END64_MAGIC or rest_bytes != END64_RECORD.size - 12:
        raise untrusted(source.path, "the ZIP64 end record is malformed")
    if (disk, start_disk) != (0, 0) or count_here != count:
        raise untrusted(source.path, "the archive claims to span several disks")
    # Two directories in one file, one for each kind of reader, is how crooked archives show two faces.
    faces = (
        (narrow.count, count, MAX16),
        (narrow.size_bytes, size_bytes, MAX32),
        (narrow.offset_bytes, offset_bytes, MAX32),
    )
    if any(short not in (long, full) for short, long, full in faces):
        raise untrusted(source.path, "its two end records contradict each other")
    return _Directory(offset_bytes=offset_bytes, size_bytes=size_bytes, count=count)


def _check_directory(path: Path, directory: _Directory, *, end_offset: int) -> _Directory:
    if directory.count > ZIP_ENTRIES_MAX or directory.size_bytes > ZIP_DIRECTORY_BYTES_MAX:
        raise untrusted(path, f"{directory.count} entries are more than the {ZIP_ENTRIES_MAX} that are ever needed")
    if directory.offset_bytes + directory.size_bytes != end_offset:
        raise untrusted(path, "the zip directory does not lie right before the archive's end")
    return directory


def _list_entries(source: SourceFile, directory: _Directory) -> list[_Listed]:
    raw = source.read_at(directory.offset_bytes, directory.size_bytes)
    listed: list[_Listed] = []
    position = 0
    while position < len(raw):
        entry, position = _parse_central(source.path, raw, position)
        listed.append(entry)
    if len(listed) != directory.count:
        raise damaged(source.path, f"{len(listed)} entries are listed, {directory.count} announced")
    return listed


def _parse_central(path: Path, raw: bytes, position: int) -> tuple[_Listed, int]:
    names_start = position + CENTRAL_HEADER.size
    if names_start > len(raw):
        raise damaged(path, "the zip directory ends inside an entry")
    fields = CENTRAL_HEADER.unpack_from(raw, position)
    name_bytes, extra_bytes, comment_bytes = fields[10:13]
    extra_start = names_start + name_bytes
    end = extra_start + extra_bytes + comment_bytes
    if fields[0] != CENTRAL_MAGIC or end > len(raw):
        raise damaged(path, f"the zip directory is malformed at its byte {position}")
    size_bytes, stored_bytes, header_offset = _widen(
        path, (fields[9], fields[8], fields[16]), raw[extra_start : extra_start + extra_bytes]
    )
    entry = _Listed(
        raw_name=raw[names_start:extra_start],
        flags=fields[3],
        method=fields[4],
        crc32=fields[7],
        stored_bytes=stored_bytes,
        size_bytes=size_bytes,
        header_offset=header_offset,
    )
    return entry, end


def _widen(path: Path, narrow: tuple[int, int, int], extra: bytes) -> tuple[int, int, int]:
    """Replace each full 32-bit field by its 64-bit form; the ZIP64 extra field has those, in this order."""
    if MAX32 not in narrow:
        return narrow
    wide = _find_extra(extra, ZIP64_TAG)
    wanted = narrow.count(MAX32)
    if len(wide) < 8 * wanted:
        raise damaged(path, "a ZIP64 field of the zip directory is missing")
    values = iter(struct.unpack_from(f"<{wanted}Q", wide))
    size_bytes, stored_bytes, offset = (next(values) if field == MAX32 else field for field in narrow)
    return size_bytes, stored_bytes, offset


def _find_extra(extra: bytes, wanted: int) -> bytes:
    position = 0
    while position + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, position)
        if tag == wanted:
            return extra[position + 4 : position + 4 + length]
        position += 4 + length
    return b""


def _check_names(path: Path, listed: list[_Listed]) -> tuple[str, list[str]]:
    """Return the root folder and the names below it; every name has exactly one meaning on every system."""
    roots: dict[str, None] = {}
    names: dict[str, None] = {}
    for item in listed:
        root, name = _split_name(path, item.raw_name)
        if name in names:
            raise untrusted(path, f"two entries are called {name!r}")
        roots[root] = names[name] = None
        if len(roots) > 1:
            raise untrusted(path, f"its entries lie in several folders: {', '.join(map(repr, roots))}")
    if not roots:
        raise damaged(path, "the archive is empty")
    return next(iter(roots)), list(names)


def _split_name(path: Path, raw_name: bytes) -> tuple[str, str]:
    if len(raw_name) > ZIP_NAME_BYTES_MAX:
        raise untrusted(path, f"an entry's name has {len(raw_name)} bytes")
    try:
        name = raw_name.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise untrusted(path, f"the entry name {raw_name!r} is not UTF-8") from exc
    root, *rest = name.split("/")
    # An empty part means an absolute name, a folder entry or a doubled slash.
    if "\0" in name or "\\" in name or not rest or any(part in ("", ".", "..") for part in (root, *rest)):
        raise untrusted(path, f"the entry name {name!r} is not one that torch.save writes")
    return root, "/".join(rest)


def _check_claims(source: SourceFile, listed: list[_Listed]) -> None:
    for item in listed:
        if item.method != 0 or item.stored_bytes != item.size_bytes:
            raise untrusted(source.path, f"the entry {item.raw_name!r} is compressed; torch.save never does that")
        if item.flags & ~(FLAG_DESCRIPTOR | FLAG_UTF8):
            raise untrusted(source.path, f"the entry {item.raw_name!r} is encrypted or patched")
    total_bytes = sum(item.size_bytes for item in listed)
    if total_bytes > source.size_bytes:
        raise untrusted(source.path, f"its entries claim {total_bytes} bytes, the file holds {source.size_bytes}")


def _locate(source: SourceFile, item: _Listed, name: str) -> Entry:
    """Find the data of *item* behind its local header, whose extra field differs from the directory's."""
    header_end = item.header_offset + LOCAL_HEADER.size + len(item.raw_name)
    if header_end > source.size_bytes:
        raise damaged(source.path, f"the entry {name!r} lies beyond the file's end")
    raw = source.read_at(item.header_offset, LOCAL_HEADER.size + len(item.raw_name))
    fields = LOCAL_HEADER.unpack_from(raw)
    if fields[0] != LOCAL_MAGIC or fields[9] != len(item.raw_name) or raw[LOCAL_HEADER.size :] != item.raw_name:
        raise damaged(source.path, f"the local header of the entry {name!r} is not there")
    if (fields[2], fields[3]) != (item.flags, item.method) or not _same_numbers(item, fields):
        raise damaged(source.path, f"the two headers of the entry {name!r} contradict each other")
    return Entry(name=name, offset_bytes=header_end + fields[10], size_bytes=item.size_bytes, crc32=item.crc32)


def _same_numbers(item: _Listed, local_fields: tuple[int, ...]) -> bool:
    if item.flags & FLAG_DESCRIPTOR:
        return True  # the local numbers are zero then, and the descriptor after the data is never needed
    crc32, stored_bytes, size_bytes = local_fields[6:9]
    sizes_agree = {stored_bytes, size_bytes} <= {item.size_bytes, MAX32}
    return crc32 == item.crc32 and sizes_agree


def _check_overlap(path: Path, listed: list[_Listed], entries: list[Entry], directory: _Directory) -> None:
    spans = sorted(
        (item.header_offset, entry.offset_bytes + entry.size_bytes, entry.name)
        for item, entry in zip(listed, entries, strict=True)
    )
    spans.append((directory.offset_bytes, directory.offset_bytes, "the zip directory"))
    for (_, end, name), (start, _, next_name) in pairwise(spans):
        if end > start:
            raise untrusted(path, f"the entries {name!r} and {next_name!r} overlap")


def _read_struct(source: SourceFile, layout: struct.Struct, offset_bytes: int) -> tuple[int, ...]:
    return layout.unpack(source.read_at(offset_bytes, layout.size))
