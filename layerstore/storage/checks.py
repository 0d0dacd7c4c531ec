"""What makes a file the object that its name says: its size, and the hash of its bytes."""

from collections.abc import Iterator
from pathlib import Path

from layerstore.errors import DAMAGED_HINT, IntegrityError
from layerstore.format.hashing import NameHasher
from layerstore.limits import IO_CHUNK_BYTES
from layerstore.model import BlobRef
from layerstore.storage.handles import OpenFile


def read_chunks(file: OpenFile) -> Iterator[memoryview]:
    """Yield the bytes of *file* in order; each chunk is valid until the next one is asked for."""
    buffer = memoryview(bytearray(min(IO_CHUNK_BYTES, max(file.size_bytes, 1))))
    for offset in range(0, file.size_bytes, len(buffer)):
        chunk = buffer[: min(len(buffer), file.size_bytes - offset)]
        file.read_into(chunk, offset)
        yield chunk


def check_bytes(ref: BlobRef, file: OpenFile) -> None:
    """Read all of *file*; raise IntegrityError unless it is *ref*."""
    hasher = NameHasher()
    for data in read_chunks(file):
        hasher.update(data)
    check_hash(ref, hasher)


def check_hash(ref: BlobRef, hasher: NameHasher) -> None:
    """Raise IntegrityError unless what *hasher* saw is *ref*."""
    if hasher.id() != ref.id or hasher.size_bytes != ref.size_bytes:
        raise IntegrityError(
            f"object {ref.id} is damaged: its bytes hash to {hasher.id()}",
            hint=DAMAGED_HINT,
            object_id=ref.id,
        )


def missing(ref: BlobRef) -> IntegrityError:
    """Return the error for an object that is nowhere."""
    return IntegrityError(
        f"object {ref.id} ({ref.size_bytes} bytes) is missing",
        hint="ingest the same checkpoint again, or look at layerstore verify",
        object_id=ref.id,
    )


def check_size(ref: BlobRef, size_bytes: int, path: Path) -> None:
    """Raise IntegrityError unless *path*, which has *size_bytes*, can be *ref*."""
    if size_bytes != ref.size_bytes:
        raise IntegrityError(
            f"object {ref.id} is damaged: {path} has {size_bytes} bytes, expected {ref.size_bytes}",
            hint=DAMAGED_HINT,
            object_id=ref.id,
            expected=ref.size_bytes,
            actual=size_bytes,
        )
