"""Promises of the zip reader and the zip layout, checked against Python's and torch's own zip code."""

import errno
import io
import os
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from layerstore.errors import SourceCheckpoint, StorageIO
from layerstore.source import open_source, read_source_file
from layerstore.tree import Located
from layerstore.zero3.pt.ziparchive import ZipLayout, layout_archive, read_archive

NAMES = st.text("abcdefgh0123456789._-é雪", min_size=1, max_size=20).filter(lambda name: name not in (".", ".."))


def listing(path: Path) -> dict[str, Located]:
    """Return the records of the archive at *path*."""
    with open_source(path) as source:
        return read_archive(source)[1]


def assembled(layout: ZipLayout, payloads: list[bytes]) -> bytes:
    """Return the whole file, and check that its pieces neither overlap nor leave a gap."""
    pieces = [(record.offset_bytes, raw) for record, raw in zip(layout.records, payloads, strict=True) if raw]
    whole = b""
    for offset, raw in sorted(pieces + layout.framing([isal_zlib.crc32(raw) for raw in payloads])):
        assert len(whole) == offset
        whole += raw
    assert layout.size_bytes == len(whole)
    return whole


@given(
    records=st.dictionaries(NAMES, st.tuples(st.binary(max_size=200), st.sampled_from([1, 64, 4096]))),
    root=NAMES,
)
def test_a_layout_is_a_zip_that_others_and_we_read(
    tmp_path_factory: pytest.TempPathFactory, records: dict[str, tuple[bytes, int]], root: str
) -> None:
    """Every layout is read back by Python's zipfile and by us: same names, bytes, CRCs and alignments."""
    wanted = {"data.pkl": (b"pickle", 64)} | records
    layout = layout_archive(
        [(name, len(raw), alignment) for name, (raw, alignment) in wanted.items()],
        root=root,
    )
    raw = assembled(layout, [payload for payload, _ in wanted.values()])
    path = tmp_path_factory.mktemp("zip") / "file.pt"
    path.write_bytes(raw)

    entries = listing(path)
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        assert archive.testzip() is None
        read = {name: archive.read(f"{root}/{name}") for name in wanted}

    assert {name: payload for name, (payload, _) in wanted.items()} == read
    assert list(wanted) == list(entries)
    for name, (payload, alignment) in wanted.items():
        entry = entries[name]
        assert payload == raw[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        assert isal_zlib.crc32(payload) == entry.crc32
        assert entry.offset_bytes % alignment == 0


@pytest.mark.exhaustive
def test_many_entries_take_the_zip64_form(tmp_path: Path) -> None:
    """More entries than 16 bits count are announced in the ZIP64 record, and found again."""
    layout = layout_archive([(f"data/{number}", 0, 1) for number in range(70_000)], root="a")
    path = tmp_path / "many.pt"
    path.write_bytes(assembled(layout, [b""] * 70_000))

    assert len(listing(path)) == 70_000
    with zipfile.ZipFile(path) as archive:
        assert len(archive.namelist()) == 70_000


@pytest.mark.parametrize("size_bytes", [2**32 - 2, 2**32 - 1, 2**32, 2**33 + 5])
def test_sizes_and_offsets_around_four_gigabytes(tmp_path: Path, size_bytes: int) -> None:
    """A record of about 4 GiB, and one behind it, are found by us and by Python's zipfile."""
    records = [(name, size, 1) for name, size in (("data/0", size_bytes), ("data/1", 5))]
    layout = layout_archive(records, root="a")
    path = tmp_path / "large.pt"
    with path.open("wb") as file:
        for offset, raw in [
            *layout.framing([7, isal_zlib.crc32(b"after")]),
            (layout.records[1].offset_bytes, b"after"),
        ]:
            file.seek(offset)
            file.write(raw)

    entries = listing(path)

    assert layout.size_bytes == path.stat().st_size
    assert (layout.records[0].offset_bytes, size_bytes, 7) == (
        entries["data/0"].offset_bytes,
        entries["data/0"].size_bytes,
        entries["data/0"].crc32,
    )
    assert entries["data/1"].offset_bytes == layout.records[1].offset_bytes
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("a/data/0").file_size == size_bytes
        assert archive.read("a/data/1") == b"after"


def test_every_flipped_bit_is_refused_or_harmless(tmp_path: Path) -> None:
    """A flipped bit in any header never leads to another error than ours, nor outside the file."""
    layout = layout_archive([("data.pkl", 9, 1), ("v", 1, 1)], root="a")
    whole = assembled(layout, [b"some data", b"3"])
    path = tmp_path / "flipped.pt"
    for bit in range(len(whole) * 8):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)

        try:
            entries = listing(path).values()
        except SourceCheckpoint:
            continue

        assert all(entry.offset_bytes + entry.size_bytes <= len(whole) for entry in entries)


def test_what_is_not_a_file_is_refused_at_once(tmp_path: Path) -> None:
    """Nothing, a folder, a pipe without a writer and a device are told apart from files, without waiting."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reasons = {}
    for path in (tmp_path / "nothing", tmp_path / "nothing" / "below", tmp_path, pipe, Path("/dev/zero")):
        with pytest.raises(SourceCheckpoint) as caught:
            listing(path)
        reasons[path.name] = caught.value.facts["reason"]

    assert reasons == {
        "nothing": "missing",
        "below": "missing",
        tmp_path.name: "not_regular",
        "pipe": "not_regular",
        "zero": "not_regular",
    }


def test_a_refusal_of_the_disk_keeps_its_errno(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the disk is not the checkpoint's fault: it stays an OSError with errno and file."""

    path = tmp_path / "file.pt"
    path.write_bytes(b"PK\x03\x04" + bytes(100))

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StorageIO) as caught:
        listing(path)

    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))


@pytest.mark.full
def test_a_small_file_is_read_within_its_bound(tmp_path: Path) -> None:
    """A small file comes back whole; one above the bound is refused unread."""
    path = tmp_path / "latest"
    path.write_bytes(b"global_step2")

    assert read_source_file(path, size_bytes_max=12) == b"global_step2"
    with pytest.raises(SourceCheckpoint, match="12 bytes, where 11 are enough"):
        read_source_file(path, size_bytes_max=11)
