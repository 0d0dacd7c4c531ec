"""Bytes that go past the kernel's cache arrive as those that do not, whatever the filesystem can."""

import errno
import fcntl
import random
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from layerstore.disk import Files, NewFile, Stream, stream
from layerstore.errors import StorageIO
from layerstore.format import ref_of
from layerstore.limits import PAGE_BYTES, STREAM_BYTES
from layerstore.storage import ObjectWriter
from tests.unit import samples

SIZES = (
    0,
    PAGE_BYTES,
    STREAM_BYTES - 1,
    STREAM_BYTES,
    2 * STREAM_BYTES + 3 * PAGE_BYTES + 17,
)


def pieces(data: bytes, *, seed: int) -> Iterator[tuple[int, bytes]]:
    """Yield *data* cut anywhere, with where each piece goes."""
    rng, start = random.Random(seed), 0
    while start < len(data):
        count = rng.choice((1, 127, PAGE_BYTES, 1 << 20, 5 << 20))
        yield start, data[start : start + count]
        start += count


def written(file: NewFile, data: bytes, *, seed: int = 0) -> None:
    """Stream *data* into *file*."""
    to = Stream(file)
    for offset, piece in pieces(data, seed=seed):
        to.write_at(offset, piece)
    to.finish()


@pytest.mark.parametrize("size_bytes", SIZES)
def test_every_byte_arrives(tmp_path: Path, size_bytes: int) -> None:
    """At sizes around those of a page and of the buffer, in pieces of any length."""
    data = random.Random(size_bytes).randbytes(size_bytes)

    with Files().create(tmp_path / "file") as file:
        written(file, data, seed=size_bytes)

    assert (tmp_path / "file").read_bytes() == data


def test_large_files_go_past_the_cache_and_small_ones_do_not(tmp_path: Path) -> None:
    """The first full buffer decides; the last piece, no whole page, goes the usual way."""
    seen = {}
    for name, size_bytes in {"small": PAGE_BYTES, "large": 2 * STREAM_BYTES + 1}.items():
        with (
            Files().create(tmp_path / name) as file,
            patch.object(stream, "bypass_cache", return_value=True) as bypass,
        ):
            written(file, bytes(size_bytes))
            seen[name] = [call.args[1] for call in bypass.call_args_list]

    assert seen == {"small": [], "large": [True, False]}


def test_a_filesystem_without_direct_writes_gets_all_of_it_the_usual_way(tmp_path: Path) -> None:
    """The kernel refuses the flag."""
    data = random.Random(2).randbytes(2 * STREAM_BYTES + 5)

    def refuse(fd: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "made up")
        return fcntl.fcntl(fd, command, value)

    with Files().create(tmp_path / "file") as file, patch(f"{stream.__name__}.fcntl") as made_up:
        made_up.fcntl, made_up.F_GETFL, made_up.F_SETFL = refuse, fcntl.F_GETFL, fcntl.F_SETFL
        assert not stream.bypass_cache(file.fd, True)
        written(file, data)

    assert (tmp_path / "file").read_bytes() == data


def test_a_filesystem_that_takes_the_flag_and_refuses_the_write_gets_it_the_usual_way(tmp_path: Path) -> None:
    """Nothing is lost, nothing is written twice in another place."""
    data = random.Random(1).randbytes(3 * STREAM_BYTES + 5)
    refused = []

    class Picky(NewFile):
        def write_at(self, offset: int, data: bytes | bytearray | memoryview, *, at_once: bool = False) -> None:
            if at_once:
                refused.append(offset)
                raise StorageIO("made up", errno=errno.EINVAL, filename=str(self.path))
            super().write_at(offset, data)

    with Files().create(tmp_path / "file") as file:
        written(Picky(file.path, file.fd, lambda operation, path: None), data)

    assert (tmp_path / "file").read_bytes() == data
    assert refused == [0]


@pytest.mark.parametrize(("wanted", "is_streamed"), [("", True), ("1", False)])
def test_drafts_that_nobody_reads_soon_go_past_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, is_streamed: bool
) -> None:
    """New ones are kept, known ones and those that fail leave nothing; unless the user wants the cache."""
    monkeypatch.setenv("LAYERSTORE_PAGE_CACHE", wanted)
    repo = samples.repo(tmp_path / "store")
    data = random.Random(3).randbytes(STREAM_BYTES + 5)
    ref = ref_of(data)

    def draft(objects: ObjectWriter, *, fails: bool = False) -> bool:
        with objects.draft() as made:
            for offset, piece in pieces(data, seed=1):
                made.write_at(offset, piece)
            if fails:
                raise ValueError("made up")
            return objects.keep(made, ref)

    with patch.object(stream, "bypass_cache", side_effect=stream.bypass_cache) as bypass:
        with ObjectWriter(repo.layout, repo.files, repo.objects, past_cache=True) as objects:
            with pytest.raises(ValueError, match="made up"):
                draft(objects, fails=True)
            assert [draft(objects), draft(objects)] == [True, False]
            objects.publish()
        with ObjectWriter(repo.layout, repo.files, repo.objects, past_cache=True) as objects:
            assert not draft(objects)

    assert bypass.called == is_streamed
    repo.objects.verify(ref)
    assert repo.files.names(repo.layout.tmp) == []


def test_buffers_are_used_again_and_not_kept_without_end(tmp_path: Path) -> None:
    """However many files are written at a time."""
    open_files = [Files().create(tmp_path / str(number)) for number in range(5)]
    streams = [Stream(file) for file in open_files]
    for each in streams:
        each.write_at(0, b"a")
    for each, file in zip(streams, open_files, strict=True):
        each.close()
        each.close()
        file.close()

    assert len(stream._spare) <= stream._SPARE_MAX
