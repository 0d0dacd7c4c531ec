"""Promises of plain reads of a source: what was asked for, or an error that names the file."""

from contextlib import closing
from pathlib import Path

import pytest

from layerstore.errors import SourceCheckpoint
from layerstore.staging import SourceReader

CONTENT = bytes(range(256)) * 4


def read(path: Path, *stretches: tuple[int, int]) -> list[bytes]:
    """Read *stretches* of *path*, given as offset and size, at once."""
    buffers = [bytearray(size_bytes) for _, size_bytes in stretches]
    with closing(SourceReader()) as reader:
        reader.read_into(
            [(path, offset, memoryview(buffer)) for (offset, _), buffer in zip(stretches, buffers, strict=True)]
        )
    return [bytes(buffer) for buffer in buffers]


def test_stretches_are_read_together_whatever_their_order(tmp_path: Path) -> None:
    """Neighbours, gaps and more of them than one call takes: each buffer gets its own bytes."""
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    stretches = [(700, 10), (710, 1), (650, 5), *((offset, 3) for offset in range(600, 0, -3)), (1023, 1)]

    assert read(path, *stretches) == [CONTENT[offset : offset + size] for offset, size in stretches]


def test_a_file_that_ends_in_the_midst_of_stretches_is_truncated(tmp_path: Path) -> None:
    """Whatever was read before its end, the file is named as cut short."""
    path = tmp_path / "source"
    path.write_bytes(CONTENT)

    with pytest.raises(SourceCheckpoint, match="truncated"):
        read(path, (1000, 10), (1010, 20), (1030, 5))
