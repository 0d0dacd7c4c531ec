"""
The zip archive format of ``.pt`` files: find an archive's records, or lay out a new archive.

Reading checks the whole layout against what ``torch.save`` writes before it touches a payload: uncompressed records,
one root folder, plain names, no overlap. Memory and time depend on the size of the directory, never on the sizes that a
hostile archive claims. CRCs are passed on, not verified.

A layout depends only on names and sizes, so payloads can be copied into place in any order, and the headers written
once the CRCs are known. Equal input gives equal bytes: timestamps are fixed.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from layerstore.errors import InvalidInput, SourceCheckpoint
from layerstore.limits import ZIP_DIRECTORY_BYTES_MAX, ZIP_ENTRIES_MAX, ZIP_NAME_BYTES_MAX
from layerstore.source import OpenedSource, damaged, truncated, untrusted
from layerstore.tree import Located

_LOCAL_MAGIC = 0x04034B50
_CENTRAL_MAGIC = 0x02014B50
_END_MAGIC = 0x06054B50
_END64_MAGIC = 0x06064B50
_LOCATOR64_MAGIC = 0x07064B50

# magic, version needed, flags, method, time, date, crc32, stored size, size, name length, extra length
_LOCAL_HEADER = struct.Struct("<IHHHHHIIIHH")
# magic, version made by, then as above, comment length, disk, internal and external attributes, header offset
_CENTRAL_HEADER = struct.Struct("<IHHHHHHIIIHHHHHII")
# magic, disk, disk of directory, entries on disk, entries, directory size, directory offset, comment length
_END_RECORD = struct.Struct("<IHHHHIIH")
# magic, size of the rest, versions made by and needed, disks (2), entries (2), directory size and offset
_END64_RECORD = struct.Struct("<IQHHIIQQQQ")
# magic, disk, offset of the END64 record, disks
_LOCATOR64 = struct.Struct("<IIQI")

_MAX16 = 0xFFFF
_MAX32 = 0xFFFFFFFF
"""A field with all bits set: the value is in the 64-bit form of the field."""

_ZIP64_TAG = 0x0001
_FLAG_DESCRIPTOR = 1 << 3
"""CRC and sizes are zero in the local header, and follow the data."""
_FLAG_UTF8 = 1 << 11

# The tag that torch itself uses for padding; readers skip extra fields they do not know.
_PADDING_TAG = int.from_bytes(b"FB", "little")
_EXTRA_HEAD_BYTES = 4
_ZIP64_LOCAL_BYTES = _EXTRA_HEAD_BYTES + 16

# Versions of the format that a reader needs: 2.0, and 4.5 for ZIP64.
_VERSION = 20
_VERSION_ZIP64 = 45

# 1980-01-01 00:00, the earliest time that the format can express, so that outputs differ only if contents do.
_DOS_TIME = 0
_DOS_DATE = (1 << 5) | 1

# Flags, method (stored), time and date of every header that we write.
_COMMON = (_FLAG_UTF8, 0, _DOS_TIME, _DOS_DATE)

_HEADS_BYTES = 4096

_NO_NAMES = frozenset({"", ".", ".."})

_LEGACY_HINT = (
    'save again without "checkpoint": {"checkpoint_serialization": false} in the DeepSpeed configuration: '
    "only the zip format carries checksums and can be read without running a pickle"
)


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


# -- reading --------------------------------------------------------------------------------------------------------


def read_archive(source: OpenedSource) -> tuple[str, dict[str, Located]]:
    """
    Return the root folder of *source*, and the position of each record's bytes by the record's name below that folder.

    The whole layout is checked, the CRCs are not. Records are in the order of the zip directory.

    Raises:
        SourceCheckpoint: *source* is not a zip, is truncated, or is not something that ``torch.save`` writes.
        StorageIO: The disk could not be read.
    """
    _refuse_other_formats(source)
    start, directory, count = _read_directory(source)
    listed = _list_entries(source.path, directory, count)
    root, names = _check_names(source.path, listed)
    _check_sizes(source, listed)
    heads = _Heads(source)
    entries = {name: _locate(heads, item, name) for item, name in zip(listed, names, strict=True)}
    _check_overlap(source.path, listed, entries, directory_offset=start)
    return root, entries


def _refuse_other_formats(source: OpenedSource) -> None:
    if source.size_bytes < 4:
        raise truncated(source.path, f"it holds {source.size_bytes} bytes")
    head = source.read_at(0, 4)
    if head == _LOCAL_MAGIC.to_bytes(4, "little"):
        return
    # The legacy stream starts with a pickled magic number, so with PROTO 2.
    kind = "the legacy stream of torch.save" if head[:2] == b"\x80\x02" else "not a file of torch.save"
    raise SourceCheckpoint(
        f"{source.path}: {kind}, where its zip format is needed",
        hint=_LEGACY_HINT,
        path=str(source.path),
        reason="legacy" if head[:2] == b"\x80\x02" else "not_torch",
    )


def _read_directory(source: OpenedSource) -> tuple[int, bytes, int]:
    """Return the directory's offset, its bytes, and its stated number of entries."""
    # torch.save writes no comment, so the end records are the last bytes of the file.
    end_offset = source.size_bytes - _END_RECORD.size
    end = _read_struct(source, _END_RECORD, end_offset) if end_offset > 0 else None
    if end is None or end[0] != _END_MAGIC or end[7] != 0:
        raise truncated(source.path, "the zip directory at its end is missing")
    fields = end[1:7]
    locator_offset = end_offset - _LOCATOR64.size
    locator = _read_struct(source, _LOCATOR64, locator_offset) if locator_offset > 0 else None
    if locator is not None and locator[0] == _LOCATOR64_MAGIC:
        end_offset = locator_offset - _END64_RECORD.size
        wide = _read_struct(source, _END64_RECORD, end_offset) if locator[2] == end_offset >= 0 else None
        if wide is None or wide[:2] != (_END64_MAGIC, _END64_RECORD.size - 12):
            raise untrusted(source.path, "the ZIP64 end record is malformed, or not where the archive ends")
        # If the records differed, 32-bit and 64-bit readers would see different archives.
        pairs = zip(fields, wide[4:], (0, 0, _MAX16, _MAX16, _MAX32, _MAX32), strict=True)
        if any(short not in (long, full) for short, long, full in pairs):
            raise untrusted(source.path, "its two end records contradict each other")
        fields = wide[4:]
    disk, start_disk, count_here, count, size_bytes, offset_bytes = fields
    if (disk, start_disk) != (0, 0) or count_here != count:
        raise untrusted(source.path, "the archive claims to span several disks")
    if count > ZIP_ENTRIES_MAX or size_bytes > ZIP_DIRECTORY_BYTES_MAX:
        raise untrusted(source.path, f"{count} entries in {size_bytes} bytes are more than are ever needed")
    if offset_bytes + size_bytes != end_offset:
        raise untrusted(source.path, "the zip directory does not lie right before the archive's end")
    return offset_bytes, source.read_at(offset_bytes, size_bytes), count


def _list_entries(path: Path, directory: bytes, count: int) -> list[_Listed]:
    listed: list[_Listed] = []
    position = 0
    while position < len(directory):
        entry, position = _parse_central(path, directory, position)
        listed.append(entry)
    if len(listed) != count:
        raise damaged(path, f"{len(listed)} entries are listed, {count} announced")
    return listed


def _parse_central(path: Path, raw: bytes, position: int) -> tuple[_Listed, int]:
    names_start = position + _CENTRAL_HEADER.size
    if names_start > len(raw):
        raise damaged(path, "the zip directory ends inside an entry")
    fields = _CENTRAL_HEADER.unpack_from(raw, position)
    name_bytes, extra_bytes, comment_bytes = fields[10:13]
    extra_start = names_start + name_bytes
    end = extra_start + extra_bytes + comment_bytes
    if fields[0] != _CENTRAL_MAGIC or end > len(raw):
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
    """Replace each saturated 32-bit field by its 64-bit form, which the ZIP64 extra field lists in the same order."""
    if _MAX32 not in narrow:
        return narrow
    wide = _find_extra(extra, _ZIP64_TAG)
    count = narrow.count(_MAX32)
    if len(wide) < 8 * count:
        raise damaged(path, "a ZIP64 field of the zip directory is missing")
    values = iter(struct.unpack_from(f"<{count}Q", wide))
    size_bytes, stored_bytes, offset = (next(values) if field == _MAX32 else field for field in narrow)
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
    """Return the root folder and the names below it; raises unless they are plain names on every system."""
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
    root, slash, rest = name.partition("/")
    # An empty part means an absolute name, a folder entry or a doubled slash.
    if "\0" in name or "\\" in name or not slash or not _NO_NAMES.isdisjoint(name.split("/")):
        raise untrusted(path, f"the entry name {name!r} is not one that torch.save writes")
    return root, rest


def _check_sizes(source: OpenedSource, listed: list[_Listed]) -> None:
    for item in listed:
        if item.method != 0 or item.stored_bytes != item.size_bytes:
            raise untrusted(source.path, f"the entry {item.raw_name!r} is compressed; torch.save never does that")
        if item.flags & ~(_FLAG_DESCRIPTOR | _FLAG_UTF8):
            raise untrusted(source.path, f"the entry {item.raw_name!r} is encrypted or patched")
    # Overlaps are checked later; without this limit, a small file could claim any size until then.
    total_bytes = sum(item.size_bytes for item in listed)
    if total_bytes > source.size_bytes:
        raise untrusted(source.path, f"its entries claim {total_bytes} bytes, the file holds {source.size_bytes}")


class _Heads:
    """Reads the starts of records; a rank's file has hundreds of empty records in a row, which are read in one call."""

    def __init__(self, source: OpenedSource) -> None:
        self.source = source
        self._begin = 0
        self._data = b""

    def read_at(self, offset_bytes: int, size_bytes: int) -> bytes:
        """Return *size_bytes* from *offset_bytes*, which must be inside the file."""
        start = offset_bytes - self._begin
        if not 0 <= start <= len(self._data) - size_bytes:
            count = min(max(size_bytes, _HEADS_BYTES), self.source.size_bytes - offset_bytes)
            start, self._begin, self._data = 0, offset_bytes, self.source.read_at(offset_bytes, count)
        return self._data[start : start + size_bytes]


def _locate(heads: _Heads, item: _Listed, name: str) -> Located:
    """Find the data of *item* after its local header, whose extra field may differ in length from the directory's."""
    source = heads.source
    header_end = item.header_offset + _LOCAL_HEADER.size + len(item.raw_name)
    if header_end > source.size_bytes:
        raise damaged(source.path, f"the entry {name!r} lies beyond the file's end")
    raw = heads.read_at(item.header_offset, _LOCAL_HEADER.size + len(item.raw_name))
    fields = _LOCAL_HEADER.unpack_from(raw)
    if fields[0] != _LOCAL_MAGIC or fields[9] != len(item.raw_name) or raw[_LOCAL_HEADER.size :] != item.raw_name:
        raise damaged(source.path, f"the local header of the entry {name!r} is missing")
    crc32, stored_bytes, size_bytes = fields[6:9]
    # A saturated field refers to the header's own 64-bit field, which no reader of the directory looks at.
    sizes_agree = {stored_bytes, size_bytes} <= {item.size_bytes, _MAX32}
    # The local numbers are zero if a descriptor follows the data; we do not need the descriptor.
    numbers_agree = item.flags & _FLAG_DESCRIPTOR or (crc32 == item.crc32 and sizes_agree)
    if (fields[2], fields[3]) != (item.flags, item.method) or not numbers_agree:
        raise damaged(source.path, f"the two headers of the entry {name!r} contradict each other")
    return Located(path=source.path, offset_bytes=header_end + fields[10], size_bytes=item.size_bytes, crc32=item.crc32)


def _check_overlap(path: Path, listed: list[_Listed], entries: Mapping[str, Located], *, directory_offset: int) -> None:
    spans = sorted(
        (item.header_offset, entry.offset_bytes + entry.size_bytes, name)
        for item, (name, entry) in zip(listed, entries.items(), strict=True)
    )
    spans.append((directory_offset, directory_offset, "the zip directory"))
    for (_, end, name), (start, _, next_name) in pairwise(spans):
        if end > start:
            raise untrusted(path, f"the entries {name!r} and {next_name!r} overlap")


def _read_struct(source: OpenedSource, layout: struct.Struct, offset_bytes: int) -> tuple[int, ...]:
    return layout.unpack(source.read_at(offset_bytes, layout.size))


# -- writing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A record and its position."""

    raw_name: bytes
    """The full name, including the root folder."""
    size_bytes: int
    header_offset: int
    """Where its local header starts."""
    offset_bytes: int
    """Where its payload starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipLayout:
    """The positions of all records, and the size of the file."""

    records: tuple[Placed, ...]
    """In file order."""
    directory_offset: int
    size_bytes: int
    """Size of the whole file."""

    def framing(self, crc32: Sequence[int]) -> list[tuple[int, bytes]]:
        """
        Return all bytes other than payloads, as (absolute offset, bytes), in file order.

        *crc32* holds one CRC per record, in the records' order.
        Framing and payloads together cover the file, without gap or overlap.
        """
        pairs = list(zip(self.records, crc32, strict=True))
        pieces = [(record.header_offset, _local_header(record, crc)) for record, crc in pairs]
        directory = b"".join(_central_header(record, crc) for record, crc in pairs)
        tail = directory + _end_records(count=len(pairs), size_bytes=len(directory), offset_bytes=self.directory_offset)
        assert self.directory_offset + len(tail) == self.size_bytes
        return [*pieces, (self.directory_offset, tail)]


def layout_archive(records: Sequence[tuple[str, int, int]], *, root: str) -> ZipLayout:
    """
    Lay out *records* in the folder *root*, in order; a record is a name, a size, and its payload's alignment.

    Raises:
        InvalidInput: A name is too long, or there are more records than a reader accepts.
    """
    if len(records) > ZIP_ENTRIES_MAX:
        raise InvalidInput(f"{len(records)} records are more than one file may hold ({ZIP_ENTRIES_MAX})")
    placed: list[Placed] = []
    position = 0
    for name, size_bytes, alignment_bytes in records:
        placed.append(_place(f"{root}/{name}".encode(), size_bytes, alignment_bytes, header_offset=position))
        position = placed[-1].offset_bytes + size_bytes
    directory_bytes = sum([_central_bytes(record) for record in placed])
    end_bytes = len(_end_records(count=len(placed), size_bytes=directory_bytes, offset_bytes=position))
    return ZipLayout(
        records=tuple(placed),
        directory_offset=position,
        size_bytes=position + directory_bytes + end_bytes,
    )


def _place(raw_name: bytes, size_bytes: int, alignment_bytes: int, *, header_offset: int) -> Placed:
    if len(raw_name) > ZIP_NAME_BYTES_MAX:
        raise InvalidInput(f"the archive name {raw_name.decode()!r} is too long: at most {ZIP_NAME_BYTES_MAX} bytes")
    # Always leave room for the padding's own header, so that any remainder can be padded.
    earliest = header_offset + _LOCAL_HEADER.size + len(raw_name) + _EXTRA_HEAD_BYTES
    earliest += _ZIP64_LOCAL_BYTES if size_bytes >= _MAX32 else 0
    return Placed(
        raw_name=raw_name,
        size_bytes=size_bytes,
        header_offset=header_offset,
        offset_bytes=earliest + -earliest % alignment_bytes,
    )


def _local_header(record: Placed, crc32: int) -> bytes:
    is_wide = record.size_bytes >= _MAX32
    # A local header needs both sizes if either is saturated, the directory only the saturated ones.
    wide = struct.pack("<HHQQ", _ZIP64_TAG, 16, record.size_bytes, record.size_bytes) if is_wide else b""
    name_bytes = len(record.raw_name)
    used = _LOCAL_HEADER.size + name_bytes + len(wide) + _EXTRA_HEAD_BYTES
    padding_bytes = record.offset_bytes - record.header_offset - used
    extra = wide + struct.pack("<HH", _PADDING_TAG, padding_bytes) + bytes(padding_bytes)
    size_field = min(record.size_bytes, _MAX32)
    version = _VERSION_ZIP64 if is_wide else _VERSION
    return (
        _LOCAL_HEADER.pack(_LOCAL_MAGIC, version, *_COMMON, crc32, size_field, size_field, name_bytes, len(extra))
        + record.raw_name
        + extra
    )


def _central_bytes(record: Placed) -> int:
    if record.size_bytes >= _MAX32 or record.header_offset >= _MAX32:
        return len(_central_header(record, 0))
    return _CENTRAL_HEADER.size + len(record.raw_name)


def _central_header(record: Placed, crc32: int) -> bytes:
    size_field, offset_field = min(record.size_bytes, _MAX32), min(record.header_offset, _MAX32)
    # Exactly the saturated fields get a 64-bit form, in this order.
    values = [record.size_bytes] * 2 * (size_field == _MAX32) + [record.header_offset] * (offset_field == _MAX32)
    extra = struct.pack(f"<HH{len(values)}Q", _ZIP64_TAG, 8 * len(values), *values) if values else b""
    version = _VERSION_ZIP64 if values else _VERSION
    sizes = (size_field, size_field, len(record.raw_name), len(extra))
    no_comment_disk_or_attributes = (0, 0, 0, 0)
    return (
        _CENTRAL_HEADER.pack(
            _CENTRAL_MAGIC, version, version, *_COMMON, crc32, *sizes, *no_comment_disk_or_attributes, offset_field
        )
        + record.raw_name
        + extra
    )


def _end_records(*, count: int, size_bytes: int, offset_bytes: int) -> bytes:
    short = (min(count, _MAX16), min(count, _MAX16), min(size_bytes, _MAX32), min(offset_bytes, _MAX32))
    end = _END_RECORD.pack(_END_MAGIC, 0, 0, *short, 0)
    if count < _MAX16 and size_bytes < _MAX32 and offset_bytes < _MAX32:
        return end
    rest_bytes = _END64_RECORD.size - 12
    versions, disks, full = (_VERSION_ZIP64, _VERSION_ZIP64), (0, 0), (count, count, size_bytes, offset_bytes)
    end64 = _END64_RECORD.pack(_END64_MAGIC, rest_bytes, *versions, *disks, *full)
    return end64 + _LOCATOR64.pack(_LOCATOR64_MAGIC, 0, offset_bytes + size_bytes, 1) + end
