"""Archives that are not what they seem, each with what it tries."""

import io
import struct
import zipfile
from collections.abc import Callable, Mapping

HARMLESS_PICKLE = b"\x80\x02N."


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


def deflate_bomb() -> bytes:
    """Inflate 300 kilobytes to 300 megabytes."""
    return archive_of({"a/data.pkl": HARMLESS_PICKLE, "a/data/0": bytes(300_000_000)}, compression=zipfile.ZIP_DEFLATED)


def overlapping_entries() -> bytes:
    """Quote one entry inside another, so that both own the same bytes: a bomb without compression."""
    name = b"a/data/1"
    quoted = struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 0, 0, 33, 0, 0, 0, len(name), 0) + name
    raw = torch_like(**{"a/data/0": quoted, "a/data/1": b""})
    return _patched(raw, at=_central(raw, name) + 42, layout="<I", value=raw.index(name) - 30)


def entry_over_directory() -> bytes:
    """Let an entry reach into the directory."""
    raw = torch_like()
    return _with_size(raw, b"a/version", 60)


def entry_beyond_end() -> bytes:
    """Place an entry behind the file's end."""
    raw = torch_like()
    return _patched(raw, at=_central(raw, b"a/version") + 42, layout="<I", value=0x7FFFFFFF)


def other_local_size() -> bytes:
    """State another size in the local header."""
    raw = torch_like()
    return _patched(raw, at=_local(raw, b"a/version") + 22, layout="<I", value=1)


def encrypted_entry() -> bytes:
    """Claim to be encrypted."""
    raw = torch_like()
    return _patched(raw, at=_central(raw, b"a/version") + 8, layout="<H", value=1)


def announced_entries() -> bytes:
    """Announce more entries than there are."""
    raw = torch_like()
    counted = _patched(raw, at=_end(raw) + 8, layout="<H", value=60_000)
    return _patched(counted, at=_end(raw) + 10, layout="<H", value=60_000)


def million_entries() -> bytes:
    """Hold a million entries, a small one each."""
    name = b"a/data/000000000"
    local = struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 0, 0, 33, 0, 0, 0, len(name), 0) + name
    central = struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, 0, 0, 33, 0, 0, 0, len(name), 0, 0, 0, 0, 0, 0)
    directory = (central + name) * 1_000_000
    return local + zip64_end(count=1_000_000, size_bytes=len(directory), offset_bytes=len(local), body=directory)


def several_disks() -> bytes:
    """Claim to be the second of several disks."""
    raw = torch_like()
    return _patched(raw, at=_end(raw) + 4, layout="<H", value=1)


def comment() -> bytes:
    """Carry a comment, in which a second directory could hide."""
    raw = torch_like()
    return _patched(raw, at=_end(raw) + 20, layout="<H", value=4) + b"more"


def two_directories() -> bytes:
    """Have a ZIP64 end record that names another directory than the old one."""
    raw = torch_like()
    directory = raw[_central(raw, b"a/data.pkl") : _end(raw)]
    start = _end(raw)
    return raw[:start] + zip64_end(
        count=3, size_bytes=len(directory), offset_bytes=start, body=directory, narrow_offset=17
    )


def misplaced_zip64_record() -> bytes:
    """Have a ZIP64 locator that points into a payload."""
    raw = torch_like()
    locator = struct.pack("<IIQI", 0x07064B50, 0, 4, 1)
    return raw[: _end(raw)] + locator + raw[_end(raw) :]


def gap_before_end() -> bytes:
    """Hide bytes between the directory and its end record."""
    raw = torch_like()
    return raw[: _end(raw)] + b"hidden" + raw[_end(raw) :]


SLOW_ARCHIVES = {deflate_bomb, million_entries}

HOSTILE_ARCHIVES: dict[str, Callable[[], bytes]] = {
    "Inflate 300 kilobytes to 300 megabytes": deflate_bomb,
    "Compress the pickle, so that it can be larger than the file": lambda: archive_of(
        {"a/data.pkl": HARMLESS_PICKLE + bytes(1000)}, compression=zipfile.ZIP_DEFLATED
    ),
    "Lie outside the folder with ``..``": lambda: torch_like(**{"a/../../x": b""}),
    "Lie at an absolute place": lambda: archive_of({"/etc/data.pkl": HARMLESS_PICKLE}),
    "Use the separator of another system": lambda: torch_like(**{"a/data\\..\\x": b""}),
    "Have a name that ends elsewhere for C programs": lambda: torch_like(**{"a/data/0?": b""}).replace(
        b"a/data/0?", b"a/data/0\0"
    ),
    "Have a name that is not UTF-8": lambda: torch_like(**{"a/data/0?": b""}).replace(b"a/data/0?", b"a/data/0\xff"),
    "Hold an entry that is a folder": lambda: torch_like(**{"a/data/": b""}),
    "Hold two checkpoints, one for each kind of reader": lambda: torch_like(**{"b/data.pkl": system_pickle()}),
    "Hold two pickles of the same name, one for each kind of reader": lambda: torch_like(
        **{"a/data.pkX": system_pickle()}
    ).replace(b"a/data.pkX", b"a/data.pkl"),
    "Quote one entry inside another, so that both own the same bytes: a bomb without compression": overlapping_entries,
    "Let an entry reach into the directory": entry_over_directory,
    "Claim a record of four gigabytes in a file of one kilobyte": lambda: _with_size(
        torch_like(), b"a/version", 0xFFFFFFF0
    ),
    "Place an entry behind the file's end": entry_beyond_end,
    "Call an entry differently in its local header, for readers that look there": lambda: torch_like(
        **{"a/data/0": b"x"}
    ).replace(b"a/data/0", b"a/data/9", 1),
    "State another size in the local header": other_local_size,
    "Claim to be encrypted": encrypted_entry,
    "Announce more entries than there are": announced_entries,
    "Hold a million entries, a small one each": million_entries,
    "Claim to be the second of several disks": several_disks,
    "Carry a comment, in which a second directory could hide": comment,
    "Have a ZIP64 end record that names another directory than the old one": two_directories,
    "Have a ZIP64 locator that points into a payload": misplaced_zip64_record,
    "Hide bytes between the directory and its end record": gap_before_end,
    "Start with something else, such as a program that unpacks the rest": lambda: b"#!/bin/sh\n" + torch_like(),
    "Claim a byte order that does not exist": lambda: archive_of(
        {"a/data.pkl": HARMLESS_PICKLE, "a/byteorder": b"middle"}
    ),
    "Be empty": lambda: b"",
    "Be a file whose blocks never reached the disk": lambda: bytes(4096),
}
