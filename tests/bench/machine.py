"""What this machine can do at best, in the same minutes as the benchmark: its numbers mean little without."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from layerstore.format import ObjectHasher, crc32
from layerstore.limits import IO_CHUNK_BYTES, MIB, WRITE_BYTES
from layerstore.zero3 import convert

_FILE_BYTES = 512 * MIB
_TRIES = 3


def limits(folder: Path) -> Iterator[tuple[str, float]]:
    """Yield what was done with half a GiB in *folder*, and how many GB a second it did at best."""
    source, target = folder / "limits-source", folder / "limits-target"
    chunk = np.random.default_rng(0).standard_normal(IO_CHUNK_BYTES // 4, dtype=np.float32).tobytes()
    buffer = bytearray(IO_CHUNK_BYTES)
    hasher = ObjectHasher()
    yield "write to the page cache", _rate(lambda: _write(target, chunk, durable=False), target)
    yield "write and fsync", _rate(lambda: _write(target, chunk, durable=True), target)
    _write(source, chunk, durable=True)
    yield "read from the page cache", _rate(lambda: _read(source, buffer))
    yield "copy_file_range", _rate(lambda: _copy(source, target, durable=False), target)
    yield "copy_file_range and fsync", _rate(lambda: _copy(source, target, durable=True), target)
    yield "xxh3_128 and xxh3_64", _rate(lambda: _repeat(lambda: hasher.update(chunk)))
    yield "crc32", _rate(lambda: _repeat(lambda: crc32(chunk)))
    yield "rounding to bf16", _rate(lambda: _repeat(lambda: convert(chunk, source="F32", target="BF16")))
    source.unlink()


def _rate(work: Callable[[], object], written: Path | None = None) -> float:
    """Return the best rate of some tries; *written* is removed after each."""
    seconds = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
        if written is not None:
            written.unlink()
    return _FILE_BYTES / min(seconds) / 1e9


def _repeat(work: Callable[[], object]) -> None:
    for _ in range(_FILE_BYTES // IO_CHUNK_BYTES):
        work()


def _write(path: Path, chunk: bytes, *, durable: bool) -> None:
    pieces = [chunk[start : start + WRITE_BYTES] for start in range(0, len(chunk), WRITE_BYTES)]
    with path.open("xb", buffering=0) as file:
        _repeat(lambda: [file.write(piece) for piece in pieces])
        if durable:
            os.fsync(file.fileno())


def _read(path: Path, buffer: bytearray) -> None:
    with path.open("rb", buffering=0) as file:
        _repeat(lambda: file.readinto(buffer))


def _copy(source: Path, target: Path, *, durable: bool) -> None:
    with source.open("rb") as reader, target.open("xb") as writer:
        done = 0
        while done < _FILE_BYTES:
            done += os.copy_file_range(reader.fileno(), writer.fileno(), _FILE_BYTES - done)
        if durable:
            os.fsync(writer.fileno())
