"""Read the bytes of pieces into memory, for readers that write no file and for pieces made from several objects."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

from layerstore.disk import OpenFile
from layerstore.errors import IntegrityError
from layerstore.hashing import crc32
from layerstore.limits import IO_CHUNK_BYTES
from layerstore.model import BlobRef
from layerstore.numbers import convert, mean
from layerstore.slices import Addend, Piece
from layerstore.storage import Hashing, Repository, Stretch, read_chunks

# How much of each object in a mean is read at a time: so little that sum and parts stay in a processor's cache.
_MEAN_BYTES = IO_CHUNK_BYTES // 2

# With more objects than this, each is reopened for every chunk, to save descriptors: a coded object takes two.
_MEAN_OPEN_MAX = 64


def read_mean(repo: Repository, piece: Piece, hashing: Hashing | None = None) -> Iterator[memoryview]:
    """Yield *piece*, a mean of up to thousands of objects, as fp32; *hashing* hashes what is read."""
    assert piece.rounding is not None
    dtype, _ = piece.rounding
    buffer = memoryview(bytearray(min(_MEAN_BYTES, piece.size_bytes)))
    # To hash an object, all of it is needed; otherwise, a partial clone fetches only the stretch that is read.
    is_hashed, hashing = hashing is not None, hashing or Hashing(())

    def opened(part: Addend) -> AbstractContextManager[OpenFile]:
        stretch = part.object_offset, part.object_offset + piece.size_bytes
        return repo.open_object(part.object, None if is_hashed else [stretch])

    with ExitStack() as stack:
        are_few = len(piece.mean_of) <= _MEAN_OPEN_MAX
        held = [stack.enter_context(opened(part)) for part in piece.mean_of if are_few]

        def parts(start: int, into: memoryview) -> Iterator[tuple[memoryview, float]]:
            for number, part in enumerate(piece.mean_of):
                with nullcontext(held[number]) if are_few else opened(part) as file:
                    hashing.read_into(part.object, file, into, part.object_offset + start)
                yield into, part.weight

        for start in range(0, piece.size_bytes, _MEAN_BYTES):
            yield mean(parts(start, buffer[: piece.size_bytes - start]), dtype=dtype)


def check_decoded(piece: Piece, checksum: int) -> None:
    """Raise IntegrityError if *checksum* differs from the checksum that *piece*, a whole slice, was saved with."""
    if piece.crc32 not in {None, checksum}:
        raise IntegrityError(
            f"object {piece.object.id} is whole, but decodes to other bytes than when it was saved",
            hint="a different numpy or processor may compute differently: compose on the machine that saved it",
            object_id=piece.object.id,
        )


def fill_pieces(
    repo: Repository, pieces: Iterable[Piece], target: memoryview, verified: set[BlobRef] | None, *, begin: int = 0
) -> None:
    """
    Fill *target*, the bytes of a file from *begin*, with *pieces* in order, and zeros between them.

    Objects are verified first, except those already in *verified*; if *verified* is None, no object is. What is decoded
    is always compared with its checksum.

    Raises:
        IntegrityError: An object is damaged or missing.
    """
    pieces = tuple(pieces)
    if verified is not None:
        repo.verify_stretches(_stretches(pieces), verified)
    end = 0
    for piece in pieces:
        offset = piece.offset - begin
        target[end:offset] = bytes(offset - end)
        end = offset + piece.written_bytes
        if piece.rounding is not None:
            _convert(repo, piece, target[offset:end])
            continue
        _read_stretch(repo, piece.object, piece.object_offset, target[offset:end])
        if piece.is_coded:
            check_decoded(piece, crc32(target[offset:end]))
    target[end:] = bytes(len(target) - end)


def _stretches(pieces: Iterable[Piece]) -> dict[BlobRef, list[Stretch]]:
    stretches: dict[BlobRef, list[Stretch]] = {}
    for piece in pieces:
        for part in piece.mean_of or (piece,):
            stretches.setdefault(part.object, []).append((part.object_offset, part.object_offset + piece.size_bytes))
    return stretches


def _read_stretch(repo: Repository, ref: BlobRef, start: int, into: memoryview) -> None:
    with repo.open_object(ref, [(start, start + len(into))]) as file:
        for at in range(0, len(into), IO_CHUNK_BYTES):
            file.read_into(into[at : at + IO_CHUNK_BYTES], start + at)


def _convert(repo: Repository, piece: Piece, target: memoryview) -> None:
    """Fill *target* with *piece*, which is stored as another type, or is a mean."""
    assert piece.rounding is not None
    source, target_dtype = piece.rounding
    offset = 0
    is_mean = bool(piece.mean_of)
    for data in read_mean(repo, piece) if is_mean else _stored_chunks(repo, piece):
        converted = convert(data, source="F32" if is_mean else source, target=target_dtype)
        target[offset : offset + len(converted)] = converted
        offset += len(converted)


def _stored_chunks(repo: Repository, piece: Piece) -> Iterator[memoryview]:
    # Request only the piece's stretch: otherwise, the whole object would be fetched from a remote.
    stretch = (piece.object_offset, piece.object_offset + piece.size_bytes)
    with repo.open_object(piece.object, [stretch]) as file:
        yield from chunks_of(file, piece)


def chunks_of(source: OpenFile, piece: Piece) -> Iterator[memoryview]:
    """Yield the bytes of *piece* in its object, in order; a chunk is valid until the next one is requested."""
    return read_chunks(source, piece.object_offset, piece.size_bytes)
