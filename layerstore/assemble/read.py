"""Read the bytes that pieces are into memory, where no file is written or several objects make one."""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext

from layerstore.errors import IntegrityError
from layerstore.limits import IO_CHUNK_BYTES
from layerstore.model import BlobRef
from layerstore.numbers import mean
from layerstore.slices import Piece
from layerstore.storage import Hashing, Repository

# Of each object that takes part in a mean at a time: sum and parts stay in a processor's cache.
_MEAN_BYTES = IO_CHUNK_BYTES // 2

# With more objects than these, each is opened anew for every chunk; one that is coded takes two files.
_MEAN_OPEN_MAX = 64


def read_mean(repo: Repository, piece: Piece, hashing: Hashing | None = None) -> Iterator[memoryview]:
    """Yield the mean that *piece* is, as fp32; thousands of objects may take part, which *hashing* sees."""
    assert piece.rounding is not None
    hashing = hashing or Hashing(())
    dtype, _ = piece.rounding
    buffer = memoryview(bytearray(min(_MEAN_BYTES, piece.size_bytes)))
    with ExitStack() as stack:
        are_few = len(piece.mean_of) <= _MEAN_OPEN_MAX
        held = [stack.enter_context(repo.open_object(of.object)) for of in piece.mean_of if are_few]

        def parts(start: int, into: memoryview) -> Iterator[tuple[memoryview, float]]:
            for number, of in enumerate(piece.mean_of):
                with nullcontext(held[number]) if are_few else repo.open_object(of.object) as file:
                    hashing.read_into(of.object, file, into, of.object_offset + start)
                yield into, of.weight

        for start in range(0, piece.size_bytes, _MEAN_BYTES):
            yield mean(parts(start, buffer[: piece.size_bytes - start]), dtype=dtype)


def check_decoded(piece: Piece, checksum: int) -> None:
    """Raise IntegrityError if *piece*, a whole slice, has another *checksum* than when it was saved."""
    if piece.crc32 not in {None, checksum}:
        raise IntegrityError(
            f"object {piece.object.id} is whole, but decodes to other bytes than when it was saved",
            hint="another numpy or processor may compute otherwise: compose on the machine that saved it",
            object_id=piece.object.id,
        )


def read_stretch(repo: Repository, ref: BlobRef, start: int, into: memoryview) -> None:
    """Fill *into* with the bytes of an object from *start*, unverified."""
    with repo.open_object(ref, [(start, start + len(into))]) as file:
        for at in range(0, len(into), IO_CHUNK_BYTES):
            file.read_into(into[at : at + IO_CHUNK_BYTES], start + at)
