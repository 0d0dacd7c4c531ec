"""
Measure how far two versions of a layer are apart, in memory that does not grow with the model.

They are compared by position in the whole parameter, so any two world sizes can be compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod

from layerstore.dtypes import by_code
from layerstore.limits import IO_CHUNK_BYTES, WORKERS_MAX
from layerstore.model import BlobRef, Kind, LayerVersion, Parameter
from layerstore.numbers import Distance, Meter, can_measure
from layerstore.progress import Progress
from layerstore.slices import Slices, StoredSlice
from layerstore.storage import Repository
from layerstore.threads import Threads


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Elements that are contiguous in one slice of each side."""

    a: StoredSlice
    b: StoredSlice
    start_a: int
    start_b: int
    elements: int


def distance_between(
    repo: Repository, a: LayerVersion, b: LayerVersion, verified: set[BlobRef], progress: Progress
) -> Distance | None:
    """
    Return how far *b*'s masters are from *a*'s; None where neither has any.

    A frozen parameter has no master, so its weights are compared. Objects are verified once, before they are measured;
    *verified* holds those that were.
    """
    left, right = Slices([a]), Slices([b])
    found: list[_Stretch] = []
    left_out: list[str] = []
    for name in sorted(left.parameters.keys() | right.parameters.keys()):
        of_parameter = _stretches_of(name, left, right)
        if of_parameter is None:
            left_out.append(name)
        else:
            found += of_parameter
    if not found and not left_out:
        return None
    refs = {side.object.ref for each in found for side in (each.a, each.b)} - verified

    def check(ref: BlobRef) -> None:
        repo.verify_object(ref)
        progress.advance(ref.size_bytes)

    with Threads(WORKERS_MAX) as pool:
        list(pool.map(check, refs))
    verified |= refs
    return _read_in_step(repo, found).distance(left_out=tuple(left_out))


def _stretches_of(name: str, a: Slices, b: Slices) -> list[_Stretch] | None:
    """Return where the elements of the parameter *name* are on both sides; None if they cannot be compared."""
    ours, theirs = a.parameters.get(name), b.parameters.get(name)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return None
    kind_a, kind_b = _numbers_of(a, ours), _numbers_of(b, theirs)
    if kind_a is None or kind_b is None:
        return None if prod(ours.shape) else []
    found = list(_stretches(a, b, ours, kind_a, kind_b))
    return found if all(can_measure(side.tensor.dtype) for each in found for side in (each.a, each.b)) else None


def _numbers_of(slices: Slices, parameter: Parameter) -> Kind | None:
    """Return the kind that holds the parameter's numbers: its master, or its weights if it is frozen."""
    return next((kind for kind in (Kind.MASTER, Kind.WEIGHTS) if slices.shards(kind, parameter.name)), None)


def _stretches(a: Slices, b: Slices, parameter: Parameter, kind_a: Kind, kind_b: Kind) -> Iterator[_Stretch]:
    """Yield the pieces of *parameter* that no slice boundary of either side splits."""
    name, begin = parameter.name, 0
    for slice_a, start_a, count in a.stretches(kind_a, name, begin=0, end=prod(parameter.shape)):
        end, at = begin + count, start_a
        for slice_b, start_b, elements in b.stretches(kind_b, name, begin=begin, end=end):
            yield _Stretch(a=slice_a, b=slice_b, start_a=at, start_b=start_b, elements=elements)
            at += elements
        begin = end


def _read_in_step(repo: Repository, stretches: list[_Stretch]) -> Meter:
    """Measure all *stretches*, chunk by chunk, in sorted order, so that each object is opened about once."""
    meter = Meter()
    buffer_a, buffer_b = (memoryview(bytearray(IO_CHUNK_BYTES)) for _ in range(2))
    stretches = sorted(stretches, key=lambda each: (each.a.object.id, each.b.object.id, each.a.offset, each.start_a))
    for (ref_a, ref_b), group in groupby(stretches, key=lambda each: (each.a.object.ref, each.b.object.ref)):
        with repo.open_object(ref_a) as file_a, repo.open_object(ref_b) as file_b:
            for each in group:
                dtype_a, dtype_b = each.a.tensor.dtype, each.b.tensor.dtype
                bytes_a, bytes_b = by_code(dtype_a).bytes, by_code(dtype_b).bytes
                step = IO_CHUNK_BYTES // max(bytes_a, bytes_b)
                for done in range(0, each.elements, step):
                    count = min(step, each.elements - done)
                    data_a, data_b = buffer_a[: count * bytes_a], buffer_b[: count * bytes_b]
                    file_a.read_into(data_a, each.a.offset + (each.start_a + done) * bytes_a)
                    file_b.read_into(data_b, each.b.offset + (each.start_b + done) * bytes_b)
                    meter.add(data_a, data_b, dtype_a=dtype_a, dtype_b=dtype_b)
    return meter
