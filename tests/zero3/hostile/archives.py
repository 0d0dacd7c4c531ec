"""Archives that are not what they seem. Each generator's first line says what it tries."""

import io
import struct
import zipfile
from collections.abc import Callable, Mapping

HARMLESS_PICKLE = b"\x80\x02N."

HOSTILE_ARCHIVES: list[Callable[[], bytes]] = []


def _hostile(make: Callable[[], bytes]) -> Callable[[], bytes]:
    HOSTILE_ARCHIVES.append(make)
    return make


def archive_of(records: Mapping[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a plain zip archive of *records*."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, payload in records.items():
            archive.writestr(zipfile.ZipInfo(name), payload, compress_type=compression)
    return buffer.getvalue()


def torch_like(pickle: bytes = HARMLESS_PICKLE, **others: bytes) -> bytes:
    """Return an archive as torch.save lays it out, with *pickle* inside."""
    return archive_of({"a/data.pkl": pickle, "a/byteorder": b"little", "a/version": b"3\n"} | others)


def _patched(raw: bytes, *, at: int, layout: str, value: int) -> bytes:
    changed = bytearray(raw)
    struct.pack_into(layout, changed, at, value)
    return bytes(changed)


def _central(raw: bytes, name: bytes) -> int:
    """Return where the directory's entry for *name* starts."""
    return raw.rindex(name) - 46


def _local(raw: bytes, name: bytes) -> int:
    return raw.index(name) - 30


def _end(raw: bytes) -> int:
    return len(raw) - 22


@_hostile
def deflate_bomb() -> bytes:
    """Inflate 300 kilobytes to 300 megabytes."""
    return archive_of({"a/data.pkl": HARMLESS_PICKLE, "a/data/0": bytes(300_000_000)}, compression=zipfile.ZIP_DEFLATED)


@_hostile
def compressed_pickle() -> bytes:
    """Compress the pickle, so that it can be larger than the file."""
    return archive_of({"a/data.pkl": HARMLESS_PICKLE + bytes(1000)}, compression=zipfile.ZIP_DEFLATED)


@_hostile
def climbing_name() -> bytes:
    """Lie outside the folder with ``..``."""
    return torch_like(**{"a/../../x": b""})


@_hostile
def climbing_root() -> bytes:
    """Use ``..`` as the folder itself."""
    return archive_of({"../data.pkl": HARMLESS_PICKLE})


@_hostile
def absolute_name() -> bytes:
    """Lie at an absolute place."""
    return archive_of({"/etc/data.pkl": HARMLESS_PICKLE})


@_hostile
def backslash_name() -> bytes:
    """Use the separator of another system."""
    return torch_like(**{"a/data\\..\\x": b""})


@_hostile
def name_with_nul() -> bytes:
    """Have a name that ends elsewhere for C programs."""
    return torch_like(**{"a/data/0?": b""}).replace(b"a/data/0?", b"a/data/0\0")


@_hostile
def name_not_unicode() -> bytes:
    """Have a name that is not UTF-8."""
    return torch_like(**{"a/data/0?": b""}).replace(b"a/data/0?", b"a/data/0\xff")


@_hostile
def endless_name() -> bytes:
    """Have a name of sixty thousand bytes."""
    return torch_like(**{"a/" + "x" * 60_000: b""})


@_hostile
def folder_entry() -> bytes:
    """Hold an entry that is a folder."""
    return torch_like(**{"a/data/": b""})


@_hostile
def name_without_folder() -> bytes:
    """Hold an entry beside the folder."""
    return torch_like(**{"data.pkl": system_pickle()})


@_hostile
def two_folders() -> bytes:
    """Hold two checkpoints, one for each kind of reader."""
    return torch_like(**{"b/data.pkl": system_pickle()})


@_hostile
def duplicate_names() -> bytes:
    """Hold two pickles of the same name, one for each kind of reader."""
    return torch_like(**{"a/data.pkX": system_pickle()}).replace(b"a/data.pkX", b"a/data.pkl")


@_hostile
def overlapping_entries() -> bytes:
    """Quote one entry inside another, so that both own the same bytes: a bomb without compression."""
    name = b"a/data/1"
    quoted = struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 0, 0, 33, 0, 0, 0, len(name), 0) + name
    raw = torch_like(**{"a/data/0": quoted, "a/data/1": b""})
    return _patched(raw, at=_central(raw, name) + 42, layout="<I", value=raw.index(name) - 30)


@_hostile
def entry_over_directory() -> bytes:
    """Let an entry reach into the directory."""
    raw = torch_like()
    return _with_size(raw, b"a/version", 60)


@_hostile
def more_than_the_file() -> bytes:
    """Claim a record of four gigabytes in a file of one kilobyte."""
    return _with_size(torch_like(), b"a/version", 0xFFFFFFF0)


@_hostile
def exabyte_record() -> bytes:
    """Ask for a ZIP64 size that is not there."""
    return _with_size(torch_like(), b"a/version", 0xFFFFFFFF)


@_hostile
def entry_beyond_end() -> bytes:
    """Place an entry behind the file's end."""
    raw = torch_like()
    return _patched(raw, at=_central(raw, b"a/version") + 42, layout="<I", value=0x7FFFFFFF)


@_hostile
def other_local_name() -> bytes:
    """Call an entry differently in its local header, for readers that look there."""
    return torch_like(**{"a/data/0": b"x"}).replace(b"a/data/0", b"a/data/9", 1)


@_hostile
def other_local_size() -> bytes:
    """State another size in the local header."""
    raw = torch_like()
    return _patched(raw, at=_local(raw, b"a/version") + 22, layout="<I", value=1)


@_hostile
def encrypted_entry() -> bytes:
    """Claim to be encrypted."""
    raw = torch_like()
    return _patched(raw, at=_central(raw, b"a/version") + 8, layout="<H", value=1)


@_hostile
def announced_entries() -> bytes:
    """Announce more entries than there are."""
    raw = torch_like()
    counted = _patched(raw, at=_end(raw) + 8, layout="<H", value=60_000)
    return _patched(counted, at=_end(raw) + 10, layout="<H", value=60_000)


@_hostile
def million_entries() -> bytes:
    """Hold a million entries, a small one each."""
    name = b"a/data/000000000"
    local = struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 0, 0, 33, 0, 0, 0, len(name), 0) + name
    central = struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, 0, 0, 33, 0, 0, 0, len(name), 0, 0, 0, 0, 0, 0)
    directory = (central + name) * 1_000_000
    return local + zip64_end(count=1_000_000, size_bytes=len(directory), offset_bytes=len(local), body=directory)


@_hostile
def several_disks() -> bytes:
    """Claim to be the second of several disks."""
    raw = torch_like()
    return _patched(raw, at=_end(raw) + 4, layout="<H", value=1)


@_hostile
def comment() -> bytes:
    """Carry a comment, in which a second directory could hide."""
    raw = torch_like()
    return _patched(raw, at=_end(raw) + 20, layout="<H", value=4) + b"more"


@_hostile
def two_directories() -> bytes:
    """Have a ZIP64 end record that names another directory than the old one."""
    raw = torch_like()
    directory = raw[_central(raw, b"a/data.pkl") : _end(raw)]
    start = _end(raw)
    return raw[:start] + zip64_end(
        count=3, size_bytes=len(directory), offset_bytes=start, body=directory, narrow_offset=17
    )


@_hostile
def misplaced_zip64_record() -> bytes:
    """Have a ZIP64 locator that points into a payload."""
    raw = torch_like()
    locator = struct.pack("<IIQI", 0x07064B50, 0, 4, 1)
    return raw[: _end(raw)] + locator + raw[_end(raw) :]


@_hostile
def gap_before_end() -> bytes:
    """Hide bytes between the directory and its end record."""
    raw = torch_like()
    return raw[: _end(raw)] + b"hidden" + raw[_end(raw) :]


@_hostile
def leading_bytes() -> bytes:
    """Start with something else, such as a program that unpacks the rest."""
    return b"#!/bin/sh\n" + torch_like()


@_hostile
def no_entries() -> bytes:
    """Be an archive of nothing behind a local header's magic."""
    return b"PK\x03\x04" + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0, 0, 0, 4, 0)


@_hostile
def no_pickle() -> bytes:
    """Hold no pickle."""
    return archive_of({"a/version": b"3\n"})


@_hostile
def wrong_byte_order() -> bytes:
    """Claim a byte order that does not exist."""
    return archive_of({"a/data.pkl": HARMLESS_PICKLE, "a/byteorder": b"middle"})


@_hostile
def empty_file() -> bytes:
    """Be empty."""
    return b""


@_hostile
def zeros() -> bytes:
    """Be a file whose blocks never reached the disk."""
    return bytes(4096)


def system_pickle() -> bytes:
    """Return a pickle that no reader may even look at."""
    return b"\x80\x02cos\nsystem\n)R."


def zip64_end(*, count: int, size_bytes: int, offset_bytes: int, body: bytes, narrow_offset: int = 0xFFFFFFFF) -> bytes:
    """Return the directory *body* with all three end records behind it."""
    end64_offset = offset_bytes + size_bytes
    end64 = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, size_bytes, offset_bytes)
    locator = struct.pack("<IIQI", 0x07064B50, 0, end64_offset, 1)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, narrow_offset, 0)
    return body + end64 + locator + end


def _with_size(raw: bytes, name: bytes, size_bytes: int) -> bytes:
    """State *size_bytes* in both headers of *name*."""
    for at in (_central(raw, name) + 20, _local(raw, name) + 18):
        for field in (at, at + 4):
            raw = _patched(raw, at=field, layout="<I", value=size_bytes)
    return raw
