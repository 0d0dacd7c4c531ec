"""
Read boxes of a composite's tensors into memory: only the boxes that a rank needs.

Bytes are verified in chunks of 16 MiB. Each chunk is read once: straight into its target if it lies within one piece.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from layerstore.assemble import fill_pieces
from layerstore.distcp.write import held_pieces
from layerstore.dtypes import by_code
from layerstore.handover import Held
from layerstore.hashing import check_chunk
from layerstore.limits import VERIFY_CHUNK_BYTES, WORKERS_MAX
from layerstore.model import BlobRef, LayerVersion, StoredObject
from layerstore.numbers import box_runs
from layerstore.slices import Piece, Slices
from layerstore.storage import Repository
from layerstore.threads import Threads, run_all

_Wanted = tuple[Piece, memoryview]
"""A piece, and the memory that it fills."""


class Boxes:
    """The boxes to read; `read` reads them all."""

    def __init__(self, repo: Repository, versions: Iterable[LayerVersion], slices: Slices) -> None:
        self._repo = repo
        self._slices = slices
        self._objects = {stored.ref: stored for version in versions for stored in version.objects}
        self._wanted: dict[BlobRef, list[_Wanted]] = {}
        self._others: list[_Wanted] = []
        """Pieces that must be computed, because they are converted, averaged or coded."""

    def add(
        self,
        held: Held,
        target: memoryview,
        *,
        dtype: str,
        shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        """Add a box, at *offsets* in a tensor of *shape*; `read` fills *target* with it, in the box's own order."""
        at, item_bytes = 0, by_code(dtype).bytes
        for first, elements in box_runs(shape, offsets, sizes):
            for piece in held_pieces(self._slices, held, dtype=dtype, offset=at, begin=first, end=first + elements):
                wanted = piece, target[piece.offset : piece.offset + piece.written_bytes]
                if piece.rounding is None and not piece.is_coded:
                    self._wanted.setdefault(piece.object, []).append(wanted)
                else:
                    self._others.append(wanted)
            at += elements * item_bytes

    def read(self) -> None:
        """
        Read all boxes.

        Raises:
            IntegrityError: An object is damaged or missing.
        """
        with Threads(WORKERS_MAX, thread_name_prefix="read") as pool:
            run_all(pool, partial(_read_object, self._repo), self._boxes_by_object())
        verified: set[BlobRef] = set()
        for piece, target in self._others:
            fill_pieces(self._repo, [piece], target, verified, begin=piece.offset)

    def _boxes_by_object(self) -> Iterator[tuple[StoredObject, list[_Wanted]]]:
        for ref, wanted in self._wanted.items():
            yield self._objects[ref], sorted(wanted, key=lambda box: box[0].object_offset)


def _read_object(repo: Repository, work: tuple[StoredObject, list[_Wanted]]) -> None:
    """Read the wanted pieces of an object, in order."""
    stored, wanted = work
    numbers = sorted({number for piece, _ in wanted for number in _chunks_of(piece)})
    stretches = [_bounds(stored, number) for number in numbers]
    buffer = memoryview(bytearray(min(stored.size_bytes, VERIFY_CHUNK_BYTES)))
    first = 0
    with repo.open_object(stored.ref, stretches) as file:
        for number, (begin, end) in zip(numbers, stretches, strict=True):
            # Pieces and chunks come in order: skip the pieces that end before this chunk.
            while wanted[first][0].object_offset + wanted[first][0].size_bytes <= begin:
                first += 1
            piece, target = wanted[first]
            skipped = begin - piece.object_offset
            is_within = skipped >= 0 and end <= piece.object_offset + piece.size_bytes
            # Read into the target before the check: if the chunk is damaged, the whole load fails.
            chunk = target[skipped : skipped + end - begin] if is_within else buffer[: end - begin]
            file.read_into(chunk, begin)
            check_chunk(stored.ref, stored.chunks, number, [chunk])
            if not is_within:
                _scatter(chunk, begin, wanted, first)


def _scatter(chunk: memoryview, begin: int, wanted: Sequence[_Wanted], first: int) -> None:
    """Copy the *chunk* at *begin* into the *wanted* pieces that it overlaps; no piece before index *first* does."""
    end = begin + len(chunk)
    for piece, target in wanted[first:]:
        if piece.object_offset >= end:
            break
        low, high = max(piece.object_offset, begin), min(piece.object_offset + piece.size_bytes, end)
        if low < high:
            target[low - piece.object_offset : high - piece.object_offset] = chunk[low - begin : high - begin]


def _chunks_of(piece: Piece) -> range:
    end = piece.object_offset + piece.size_bytes
    return range(piece.object_offset // VERIFY_CHUNK_BYTES, -(-end // VERIFY_CHUNK_BYTES))


def _bounds(stored: StoredObject, number: int) -> tuple[int, int]:
    begin = number * VERIFY_CHUNK_BYTES
    return begin, min(begin + VERIFY_CHUNK_BYTES, stored.size_bytes)
