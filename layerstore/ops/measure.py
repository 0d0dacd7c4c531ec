"""
Measure: how far the numbers of two versions of a layer are from each other.

By global element intervals, so it does not matter for how many ranks each was cut.
Memory does not grow with the layer.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod

from layerstore.dtypes import by_code
from layerstore.errors import IntegrityError
from layerstore.limits import IO_CHUNK_BYTES, WORKERS_MAX
from layerstore.model import BlobRef, Kind, LayerVersion, Parameter
from layerstore.ops.distance import Distance, Meter, can_measure
from layerstore.progress import Progress
from layerstore.storage.handles import OpenFile
from layerstore.storage.rooms import Rooms
from layerstore.zero3 import Slices, slice_length, valid_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Elements that lie side by side in one object of each side."""

    ref_a: BlobRef
    ref_b: BlobRef
    offset_a: int
    offset_b: int
    elements: int
    dtype_a: str
    dtype_b: str


def measure(
    rooms: Rooms, a: LayerVersion, b: LayerVersion, *, verified: set[BlobRef], progress: Progress
) -> Distance | None:
    """
    Return how far *b*'s masters are from *a*'s, frozen weights in place of masters; None where neither has any.

    Objects that are not among *verified* are verified first, and added to it.

    Raises:
        IntegrityError: One of them is damaged or missing.
    """
    left, right = Slices([a]), Slices([b])
    runs: list[_Run] = []
    left_out: list[str] = []
    for name in sorted(left.parameters.keys() | right.parameters.keys()):
        of_one = _runs_of(name, left, right)
        if of_one is None:
            left_out.append(name)
        else:
            runs += of_one
    if not runs and not left_out:
        return None
    _verify(rooms, {ref for run in runs for ref in (run.ref_a, run.ref_b)} - verified, progress)
    verified.update(ref for run in runs for ref in (run.ref_a, run.ref_b))
    return _measure(rooms, runs).distance(left_out=tuple(left_out))


def _verify(rooms: Rooms, refs: Iterable[BlobRef], progress: Progress) -> None:
    """Read each object whole: no number of a damaged one may be told."""

    def check(ref: BlobRef) -> None:
        rooms.objects.verify(ref)
        progress.advance(ref.size_bytes)

    with ThreadPoolExecutor(WORKERS_MAX) as pool:
        list(pool.map(check, refs))


def _runs_of(name: str, a: Slices, b: Slices) -> list[_Run] | None:
    """Return where the elements of the parameter *name* lie in both; None if they cannot be compared."""
    ours, theirs = a.parameters.get(name), b.parameters.get(name)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return None
    kind_a, kind_b = _numbers_of(a, ours), _numbers_of(b, theirs)
    if kind_a is None or kind_b is None:
        return None if prod(ours.shape) else []
    runs = list(_runs(a, b, ours, kind_a, kind_b))
    return runs if all(can_measure(run.dtype_a) and can_measure(run.dtype_b) for run in runs) else None


def _numbers_of(slices: Slices, parameter: Parameter) -> Kind | None:
    """Return where the parameter's numbers are: in its master, or where it is frozen in its weights."""
    return next((kind for kind in (Kind.MASTER, Kind.WEIGHTS) if slices.shards(kind, parameter.name)), None)


def _runs(a: Slices, b: Slices, parameter: Parameter, kind_a: Kind, kind_b: Kind) -> Iterator[_Run]:
    """Yield the pieces that both cuts leave whole, by position: so any two world sizes can be compared."""
    elements = prod(parameter.shape)
    length_a = slice_length(elements, a.shards(kind_a, parameter.name))
    length_b = slice_length(elements, b.shards(kind_b, parameter.name))
    start = 0
    while start < elements:
        shard_a, shard_b = start // length_a, start // length_b
        end = min(elements, (shard_a + 1) * length_a, (shard_b + 1) * length_b)
        ref_a, offset_a, dtype_a = _place(a, kind_a, parameter, shard_a, start - shard_a * length_a)
        ref_b, offset_b, dtype_b = _place(b, kind_b, parameter, shard_b, start - shard_b * length_b)
        yield _Run(
            ref_a=ref_a,
            ref_b=ref_b,
            offset_a=offset_a,
            offset_b=offset_b,
            elements=end - start,
            dtype_a=dtype_a,
            dtype_b=dtype_b,
        )
        start = end


def _place(slices: Slices, kind: Kind, parameter: Parameter, shard: int, skipped: int) -> tuple[BlobRef, int, str]:
    """Return the object, the offset in it, and the element type of a slice from its element *skipped* on."""
    place = slices.find(kind, parameter.name, shard=shard)
    shards = slices.shards(kind, parameter.name)
    if place.tensor.elements != valid_elements(prod(parameter.shape), shards, shard):
        raise IntegrityError(f"object {place.object.id} has a slice of {parameter.name!r} that is of no such cut")
    piece = place.piece(0)
    return piece.object, piece.object_offset + skipped * by_code(place.tensor.dtype).bytes, place.tensor.dtype


def _measure(rooms: Rooms, runs: list[_Run]) -> Meter:
    """Read all *runs* in step; each object is opened once as long as its neighbours are asked for."""
    meter = Meter()
    with _Reader(rooms) as of_a, _Reader(rooms) as of_b:
        for run in sorted(runs, key=lambda run: (run.ref_a.id, run.ref_b.id, run.offset_a)):
            sizes = by_code(run.dtype_a).bytes, by_code(run.dtype_b).bytes
            step = IO_CHUNK_BYTES // max(sizes)
            for done in range(0, run.elements, step):
                count = min(step, run.elements - done)
                meter.add(
                    of_a.read(run.ref_a, run.offset_a + done * sizes[0], count * sizes[0]),
                    of_b.read(run.ref_b, run.offset_b + done * sizes[1], count * sizes[1]),
                    dtype_a=run.dtype_a,
                    dtype_b=run.dtype_b,
                )
    return meter


class _Reader:
    """Reads ranges of objects into one buffer; keeps the last object open."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._buffer = memoryview(bytearray(IO_CHUNK_BYTES))
        self._stack = ExitStack()
        self._ref: BlobRef | None = None
        self._file: OpenFile | None = None

    def read(self, ref: BlobRef, offset: int, size_bytes: int) -> memoryview:
        """Return bytes of *ref*, valid until the next call."""
        if self._file is None or self._ref != ref:
            self._stack.close()
            self._file, self._ref = self._stack.enter_context(self._rooms.objects.open(ref)), ref
        data = self._buffer[:size_bytes]
        self._file.read_into(data, offset)
        return data

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
