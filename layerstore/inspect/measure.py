"""
Measure how far apart two versions of a layer are, in memory that does not grow with the model.

Numbers are compared by position in the whole parameter, so any two world sizes can be compared.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

from layerstore.dtypes import by_code
from layerstore.limits import IO_CHUNK_BYTES, WORKERS_MAX
from layerstore.model import BlobRef, Kind, LayerVersion, Parameter
from layerstore.numbers import Distance, Meter, can_measure, equal_bytes
from layerstore.progress import Progress
from layerstore.slices import Slices, StoredSlice
from layerstore.storage import Repository
from layerstore.threads import Threads

MASTER = "master"
"""The name of a parameter's own numbers, next to the names of the optimizer's states."""

Place = tuple[Kind, str]
"""Where numbers are: their kind, and the name of the optimizer state; empty for other kinds."""


@dataclass(slots=True)
class Tally:
    """Adds up how far apart numbers are."""

    meter: Meter = field(default_factory=Meter)
    is_identical: bool = True
    """Whether every bit so far is equal."""

    def add(self, a: memoryview, b: memoryview, *, dtype_a: str, dtype_b: str) -> None:
        """Add the next numbers of both sides."""
        self.meter.add(a, b, dtype_a=dtype_a, dtype_b=dtype_b)
        # Equal numbers may differ in bits, such as 0 and -0, and NaNs with equal bits do not compare equal.
        self.is_identical = self.is_identical and dtype_a == dtype_b and equal_bytes(a, b)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Elements that are contiguous in one slice of each side."""

    tally: Tally
    """The tally that the elements are added to."""
    a: StoredSlice
    b: StoredSlice
    start_a: int
    start_b: int
    elements: int


class _Side:
    """A version, and the locations of its numbers."""

    def __init__(self, version: LayerVersion) -> None:
        self.slices = Slices([version])
        self.places = places_in(version)


def distance_between(
    repo: Repository, a: LayerVersion, b: LayerVersion, verified: set[BlobRef], progress: Progress
) -> Distance | None:
    """
    Return how far *b*'s masters are from *a*'s; None if there is nothing to compare.

    A frozen parameter has no master, so its weights are compared. Objects are verified once, before they are measured;
    *verified* collects them.
    """
    ours, theirs, tally = _Side(a), _Side(b), Tally()
    stretches: list[_Stretch] = []
    left_out: list[str] = []
    for name in sorted(ours.places.keys() | theirs.places.keys()):
        of_parameter = _stretches(name, MASTER, ours, theirs, tally)
        if of_parameter is None:
            left_out.append(name)
        else:
            stretches += of_parameter
    if not stretches and not left_out:
        return None
    _verify(repo, stretches, verified, progress)
    _read_in_step(repo, stretches)
    return tally.meter.distance(left_out=tuple(left_out))


def tallies_between(
    repo: Repository, a: LayerVersion, b: LayerVersion, progress: Progress
) -> dict[tuple[str, str], Tally]:
    """Return, by parameter and state, tallies of the masters and optimizer states that both versions have."""
    ours, theirs = _Side(a), _Side(b)
    tallies: dict[tuple[str, str], Tally] = {}
    all_stretches: list[_Stretch] = []
    for name in ours.places.keys() & theirs.places.keys():
        for state in ours.places[name].keys() & theirs.places[name].keys():
            tally = Tally()
            stretches = _stretches(name, state, ours, theirs, tally)
            if stretches is not None:
                tallies[name, state] = tally
                all_stretches += stretches
    progress.start("compare", sum(ref.size_bytes for ref in _refs(all_stretches)))
    _verify(repo, all_stretches, set(), progress)
    _read_in_step(repo, all_stretches)
    return tallies


def places_in(version: LayerVersion) -> Mapping[str, Mapping[str, Place]]:
    """Return the locations of each parameter's numbers; ``master`` stands for its weights if it has no master."""
    places_by_name: dict[str, dict[str, Place]] = {parameter.name: {} for parameter in version.parameters}
    for stored in version.objects:
        for tensor in stored.tensors:
            places = places_by_name.get(tensor.name, {})
            if stored.kind is Kind.OPTIMIZER:
                places[tensor.state] = stored.kind, tensor.state
            elif stored.kind is Kind.MASTER or (stored.kind is Kind.WEIGHTS and MASTER not in places):
                places[MASTER] = stored.kind, ""
    return places_by_name


def _refs(stretches: Iterable[_Stretch]) -> set[BlobRef]:
    return {side.object.ref for stretch in stretches for side in (stretch.a, stretch.b)}


def _verify(repo: Repository, stretches: list[_Stretch], verified: set[BlobRef], progress: Progress) -> None:
    """Verify the objects of *stretches* that are not yet in *verified*, and add them to it."""
    refs = _refs(stretches) - verified

    def check(ref: BlobRef) -> None:
        repo.verify_object(ref)
        progress.advance(ref.size_bytes)

    with Threads(WORKERS_MAX) as pool:
        list(pool.map(check, refs))
    verified |= refs


def _stretches(name: str, state: str, a: _Side, b: _Side, tally: Tally) -> list[_Stretch] | None:
    """Return the stretches of a parameter's *state* on both sides; None if they cannot be compared."""
    ours, theirs = a.slices.parameters.get(name), b.slices.parameters.get(name)
    # Numbers are compared by position, which is meaningless if the shapes differ.
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return None
    if state not in a.places[name] or state not in b.places[name]:
        # A parameter without elements is in no object, so it is equal on both sides.
        return None if prod(ours.shape) else []
    stretches = list(_unsplit(ours, state, a, b, tally))
    return (
        stretches
        if all(can_measure(side.tensor.dtype) for stretch in stretches for side in (stretch.a, stretch.b))
        else None
    )


def _unsplit(parameter: Parameter, state: str, a: _Side, b: _Side, tally: Tally) -> Iterator[_Stretch]:
    """Yield the longest pieces of *parameter* that no slice boundary of either side splits."""
    name, begin = parameter.name, 0
    (kind_a, state_a), (kind_b, state_b) = a.places[name][state], b.places[name][state]
    whole = a.slices.stretches(kind_a, name, state=state_a, begin=0, end=prod(parameter.shape))
    for slice_a, start_a, count in whole:
        end, at = begin + count, start_a
        for slice_b, start_b, elements in b.slices.stretches(kind_b, name, state=state_b, begin=begin, end=end):
            yield _Stretch(tally=tally, a=slice_a, b=slice_b, start_a=at, start_b=start_b, elements=elements)
            at += elements
        begin = end


def _read_in_step(repo: Repository, stretches: list[_Stretch]) -> None:
    """Measure all *stretches*, chunk by chunk, in sorted order, so that each object is opened about once."""
    buffer_a, buffer_b = (memoryview(bytearray(IO_CHUNK_BYTES)) for _ in range(2))
    stretches = sorted(
        stretches, key=lambda stretch: (stretch.a.object.id, stretch.b.object.id, stretch.a.offset, stretch.start_a)
    )
    for (ref_a, ref_b), group in groupby(stretches, key=lambda stretch: (stretch.a.object.ref, stretch.b.object.ref)):
        with repo.open_object(ref_a) as file_a, repo.open_object(ref_b) as file_b:
            for stretch in group:
                dtype_a, dtype_b = stretch.a.tensor.dtype, stretch.b.tensor.dtype
                bytes_a, bytes_b = by_code(dtype_a).bytes, by_code(dtype_b).bytes
                step = IO_CHUNK_BYTES // max(bytes_a, bytes_b)
                for start in range(0, stretch.elements, step):
                    count = min(step, stretch.elements - start)
                    data_a, data_b = buffer_a[: count * bytes_a], buffer_b[: count * bytes_b]
                    file_a.read_into(data_a, stretch.a.offset + (stretch.start_a + start) * bytes_a)
                    file_b.read_into(data_b, stretch.b.offset + (stretch.start_b + start) * bytes_b)
                    stretch.tally.add(data_a, data_b, dtype_a=dtype_a, dtype_b=dtype_b)
