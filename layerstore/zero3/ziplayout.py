"""
Lay out a zip archive that ``torch.load`` reads, so that its payloads can be put in place by others.

The size and place of everything follow from names and sizes alone. So whoever writes can copy large
payloads with the kernel, in any order, and add the headers once the CRCs are known.
Equal input gives equal bytes: timestamps are fixed, CRCs and sizes stand in the local headers.
Pure: opens no file. Reading is `layerstore.zero3.ziparchive`, which accepts all that comes from here.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from layerstore.errors import InvalidInput
from layerstore.limits import ZIP_ENTRIES_MAX, ZIP_NAME_BYTES_MAX
from layerstore.zero3.ziparchive import (
    CENTRAL_HEADER,
    CENTRAL_MAGIC,
    END64_MAGIC,
    END64_RECORD,
    END_MAGIC,
    END_RECORD,
    FLAG_UTF8,
    LOCAL_HEADER,
    LOCAL_MAGIC,
    LOCATOR64,
    LOCATOR64_MAGIC,
    MAX16,
    MAX32,
    ZIP64_TAG,
)

# The tag that torch itself uses for padding; readers skip extra fields they do not know.
_PADDING_TAG = int.from_bytes(b"FB", "little")
_EXTRA_HEAD_BYTES = 4
_ZIP64_LOCAL_BYTES = _EXTRA_HEAD_BYTES + 16

# Versions of the format that a reader needs: 2.0, and 4.5 for ZIP64.
_VERSION = 20
_VERSION_ZIP64 = 45

# 1980-01-01 00:00, the earliest that the format can say: outputs differ only where contents do.
_DOS_TIME = 0
_DOS_DATE = (1 << 5) | 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What shall lie in the archive."""

    name: str
    """Below the root folder."""
    size_bytes: int
    """Length of its payload."""
    alignment_bytes: int = 1
    """The payload starts at a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A record and its place."""

    raw_name: bytes
    """The whole name, root folder included."""
    size_bytes: int
    """Length of its payload."""
    header_offset: int
    """Where its local header starts."""
    offset_bytes: int
    """Where its payload starts."""

    @property
    def end_bytes(self) -> int:
        """Tell where its payload ends."""
        return self.offset_bytes + self.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipLayout:
    """The places of all records and the size of the whole."""

    records: tuple[Placed, ...]
    """In file order."""
    directory_offset: int
    """Where the payloads end and the directory begins."""
    size_bytes: int
    """Size of the whole file."""

    def framing(self, crc32: Sequence[int]) -> list[tuple[int, bytes]]:
        """
        Return all bytes that are not payload, as (absolute offset, bytes), in file order.

        *crc32* holds one CRC per record, in the records' order.
        Framing and payloads together cover the file, without gap or overlap.
        """
        pairs = list(zip(self.records, crc32, strict=True))
        pieces = [(record.header_offset, _local_header(record, crc)) for record, crc in pairs]
        directory = b"".join(_central_header(record, crc) for record, crc in pairs)
        tail = directory + _end_records(count=len(pairs), size_bytes=len(directory), offset_bytes=self.directory_offset)
        assert self.directory_offset + len(tail) == self.size_bytes
        return [*pieces, (self.directory_offset, tail)]


def layout_archive(records: Sequence[Record], *, root: str) -> ZipLayout:
    """
    Place *records* in the folder *root*, in their order.

    Raises:
        InvalidInput: A name that is too long, or more records than a reader accepts.
    """
    if len(records) > ZIP_ENTRIES_MAX:
        raise InvalidInput(f"{len(records)} records are more than one file may hold ({ZIP_ENTRIES_MAX})")
    placed: list[Placed] = []
    position = 0
    for record in records:
        placed.append(_place(record, root=root, header_offset=position))
        position = placed[-1].end_bytes
    directory_bytes = sum(len(_central_header(record, 0)) for record in placed)
    end_bytes = len(_end_records(count=len(placed), size_bytes=directory_bytes, offset_bytes=position))
    return ZipLayout(
        records=tuple(placed),
        directory_offset=position,
        size_bytes=position + directory_bytes + end_bytes,
    )


def _place(record: Record, *, root: str, header_offset: int) -> Placed:
    raw_name = f"{root}/{record.name}".encode()
    if len(raw_name) > ZIP_NAME_BYTES_MAX:
        raise InvalidInput(f"the archive name {root!r} is too long: at most {ZIP_NAME_BYTES_MAX} bytes")
    # Room for the padding's own head is always left, so that any remainder can be padded away.
    earliest = header_offset + LOCAL_HEADER.size + len(raw_name) + _EXTRA_HEAD_BYTES
    earliest += _ZIP64_LOCAL_BYTES if record.size_bytes >= MAX32 else 0
    return Placed(
        raw_name=raw_name,
        size_bytes=record.size_bytes,
        header_offset=header_offset,
        offset_bytes=earliest + -earliest % record.alignment_bytes,
    )


def _local_header(record: Placed, crc32: int) -> bytes:
    is_wide = record.size_bytes >= MAX32
    wide = struct.pack("<HHQQ", ZIP64_TAG, 16, record.size_bytes, record.size_bytes) if is_wide else b""
    used = LOCAL_HEADER.size + len(record.raw_name) + len(wide) + _EXTRA_HEAD_BYTES
    padding_bytes = record.offset_bytes - record.header_offset - used
    extra = wide + struct.pack("<HH", _PADDING_TAG, padding_bytes) + bytes(padding_bytes)
    size_field = min(record.size_bytes, MAX32)
    head = LOCAL_HEADER.pack(
        LOCAL_MAGIC,
        _VERSION_ZIP64 if is_wide else _VERSION,
        FLAG_UTF8,
        0,  # stored
        _DOS_TIME,
        _DOS_DATE,
        crc32,
        size_field,
        size_field,
        len(record.raw_name),
        len(extra),
    )
    return head + record.raw_name + extra


def _central_header(record: Placed, crc32: int) -> bytes:
    size_field, offset_field = min(record.size_bytes, MAX32), min(record.header_offset, MAX32)
    # Exactly the full fields get a 64-bit form, in this order.
    values = [record.size_bytes] * 2 * (size_field == MAX32) + [record.header_offset] * (offset_field == MAX32)
    extra = struct.pack(f"<HH{len(values)}Q", ZIP64_TAG, 8 * len(values), *values) if values else b""
    version = _VERSION_ZIP64 if values else _VERSION
    head = CENTRAL_HEADER.pack(
        CENTRAL_MAGIC,
        version,
        version,
        FLAG_UTF8,
        0,  # stored
        _DOS_TIME,
        _DOS_DATE,
        crc32,
        size_field,
        size_field,
        len(record.raw_name),
        len(extra),
        0,  # comment
        0,  # disk
        0,  # internal attributes
        0,  # external attributes
        offset_field,
    )
    return head + record.raw_name + extra


def _end_records(*, count: int, size_bytes: int, offset_bytes: int) -> bytes:
    end = END_RECORD.pack(
        END_MAGIC,
        0,
        0,
        min(count, MAX16),
        min(count, MAX16),
        min(size_bytes, MAX32),
        min(offset_bytes, MAX32),
        0,
    )
    if count < MAX16 and size_bytes < MAX32 and offset_bytes < MAX32:
        return end
    end64 = END64_RECORD.pack(
        END64_MAGIC,
        END64_RECORD.size - 12,  # what follows this field
        _VERSION_ZIP64,
        _VERSION_ZIP64,
        0,
        0,
        count,
        count,
        size_bytes,
        offset_bytes,
    )
    return end64 + LOCATOR64.pack(LOCATOR64_MAGIC, 0, offset_bytes + size_bytes, 1) + end
