"""
Slices: how ZeRO-3 cuts parameters, and where a composite's slices are, however they were cut.

Rank r of W holds ``flatten(parameter)[r*k : (r+1)*k]`` with k = ceil(n / W); elements beyond n are padding.
Each layer may have been saved by a different number of ranks. `Slices` finds any elements of any parameter.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from operator import attrgetter
from types import MappingProxyType

from layerstore.dtypes import by_code
from layerstore.errors import IntegrityError, Internal, LayoutMismatch, Unsupported
from layerstore.framing import coded_frame, frame
from layerstore.model import BlobRef, Kind, LayerVersion, OwnVersion, Parameter, StoredObject, StoredTensor
from layerstore.numbers import box_runs, can_convert

# -- the arithmetic ------------------------------------------------------------------------------------------------


def slice_length(elements: int, world_size: int) -> int:
    """
    Return k, the length of every rank's slice, padding included.

    >>> slice_length(9, 8), slice_length(0, 8)
    (2, 0)
    """
    return -(-elements // world_size)


def valid_elements(elements: int, world_size: int, rank: int) -> int:
    """
    Return how many elements of *rank*'s slice are not padding.

    >>> [valid_elements(9, 8, rank) for rank in range(8)]
    [2, 2, 2, 2, 1, 0, 0, 0]
    """
    length = slice_length(elements, world_size)
    return max(0, min(length, elements - rank * length))


# -- where slices are stored ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Addend:
    """Bytes of an object that go into a mean, and their weight."""

    object: BlobRef
    object_offset: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes of an object, or the mean of bytes of several objects, and where in the output they go."""

    object: BlobRef
    object_offset: int
    size_bytes: int
    """In the object."""
    offset: int
    """In the output file."""
    rounding: tuple[str, str] | None = None
    """The source and target element types; None to copy the bytes as they are."""
    crc32: int | None = None
    """The checksum of a whole slice that is copied; no other bytes have a stored checksum."""
    is_coded: bool = False
    """Whether the object needs decoding; *object_offset* is then the offset that the bytes would have if uncoded."""
    is_measured: bool = False
    """Whether its checksum is wanted but unknown, so that the copy must compute it."""
    mean_of: tuple[Addend, ...] = ()
    """If the piece is a mean, all its addends, of *size_bytes* each; the first comes from *object*."""

    def within(self, begin: int, end: int) -> "Iterator[Piece]":
        """Yield the piece's part between two offsets of the output file; a converted piece must lie within them."""
        if self.rounding is not None:
            yield self
            return
        first, last = max(self.offset, begin), min(self.offset + self.size_bytes, end)
        if first < last:
            skipped = first - self.offset
            yield replace(
                self, object_offset=self.object_offset + skipped, size_bytes=last - first, offset=first, crc32=None
            )

    @property
    def written_bytes(self) -> int:
        """The size in the output file."""
        if self.rounding is None:
            return self.size_bytes
        source, target = map(by_code, self.rounding)
        return self.size_bytes // source.bytes * target.bytes

    @property
    def objects(self) -> tuple[BlobRef, ...]:
        """All objects that are read for the piece."""
        return tuple([part.object for part in self.mean_of]) if self.mean_of else (self.object,)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSlice:
    """One slice, and its position in its object."""

    object: StoredObject
    ref: BlobRef
    """The object's name and size."""
    tensor: StoredTensor
    offset: int
    is_coded: bool
    """Whether its object is coded."""

    @property
    def size_bytes(self) -> int:
        """The size of the slice."""
        return self.tensor.size_bytes

    def piece(self, offset: int, *, start: int = 0, elements: int | None = None) -> Piece:
        """Return the piece that writes *elements* of the slice, from *start* on, at *offset*; by default, all."""
        count = self.tensor.elements if elements is None else elements
        item_bytes = by_code(self.tensor.dtype).bytes
        return Piece(
            object=self.ref,
            object_offset=self.offset + start * item_bytes,
            size_bytes=count * item_bytes,
            offset=offset,
            is_coded=self.is_coded,
            crc32=self.tensor.crc32 if count == self.tensor.elements else None,
        )


def slices_in(stored: StoredObject) -> Iterator[StoredSlice]:
    """Yield the slices of an object, as if none were coded; raises IntegrityError if they do not fill it."""
    ref, is_coded = stored.ref, stored.is_coded
    try:
        framing = frame(stored.tensors)
        file = coded_frame(stored.tensors, reference=stored.reference)[0] if is_coded else framing
    except IntegrityError as exc:
        exc.locate(f"object {stored.id} is listed wrongly")
        raise
    if file.size_bytes != stored.size_bytes:
        raise IntegrityError(f"object {stored.id} is listed with a size that its tensors do not have")
    for tensor, offset in zip(stored.tensors, framing.offsets, strict=True):
        yield StoredSlice(object=stored, ref=ref, tensor=tensor, offset=offset, is_coded=is_coded)


@dataclass(frozen=True, slots=True)
class _Row:
    """The slices of a parameter, in order."""

    slices: tuple[StoredSlice, ...]
    """A box appears once for each contiguous stretch of its elements."""
    starts: tuple[int, ...]
    """Where the elements begin in each slice."""
    bounds: tuple[int, ...]
    """Where each slice's elements begin in the parameter, then where the last slice's elements end."""


def _row_of_runs(slices: Iterable[StoredSlice]) -> _Row:
    """Return the row of *slices* that follow each other in the parameter, rank by rank."""
    ordered = tuple(sorted(slices, key=attrgetter("object.shard")))
    return _Row(ordered, (0,) * len(ordered), tuple(accumulate(map(attrgetter("tensor.elements"), ordered), initial=0)))


def _row_of_boxes(slices: Iterable[StoredSlice], shape: Sequence[int]) -> _Row:
    """Return the row of *slices*, boxes of a tensor of *shape*: their contiguous stretches, up to the first gap."""
    runs: list[tuple[int, int, int, StoredSlice]] = []
    for part in slices:
        offsets, sizes = part.tensor.box[: len(shape)], part.tensor.box[len(shape) :]
        start = 0
        for first, elements in box_runs(shape, offsets, sizes):
            runs.append((first, elements, start, part))
            start += elements
    runs.sort(key=lambda run: run[0])
    bounds = [0]
    for first, elements, _, _ in runs:
        if first != bounds[-1]:
            break
        bounds.append(first + elements)
    runs = runs[: len(bounds) - 1]
    return _Row(tuple(run[3] for run in runs), tuple(run[2] for run in runs), tuple(bounds))


def _row_of_one(part: StoredSlice, shape: Sequence[int]) -> _Row:
    """Return a rank's own slice of a tensor of *shape*; raises LayoutMismatch unless it has ZeRO-3's length."""
    stored, tensor = part.object, part.tensor
    begin = stored.shard * slice_length(prod(shape), stored.shards)
    expected = valid_elements(prod(shape), stored.shards, stored.shard)
    if tensor.elements != expected:
        raise _other_length(stored.kind, tensor.name, tensor.state, tensor.elements, expected)
    return _Row((part,), (0,), (begin, begin + expected))


SliceStretch = tuple[StoredSlice, int, int]
"""Adjacent elements of one slice: the first, counted from the start of the slice, and how many."""


def _other_length(kind: Kind, name: str, state: str, elements: int, expected: int) -> LayoutMismatch:
    return LayoutMismatch(
        f"{state or kind} of {name!r} is stored with {elements} elements, its shape asks for {expected}", name=name
    )


def _not_stored(kind: Kind, name: str, state: str, whose: str = "") -> LayoutMismatch:
    what = f"{kind}{f' {state}' if state else ''}"
    return LayoutMismatch(f"no {what} of {name!r}{whose} is stored in the chosen layers", name=name)


_Part = tuple[StoredSlice, int, int, float]
"""Elements of a slice: where they start, how many, and their weight in a mean."""

Means = Mapping[str, Sequence[tuple[LayerVersion, float]]]
"""For each layer, the versions whose masters are averaged, with their weights."""


class Slices:
    """The slices of a composite's layers, by kind, name and rank; masters of some layers may be *means*."""

    def __init__(self, versions: Iterable[LayerVersion], *, means: Means = MappingProxyType({})) -> None:
        self.parameters: dict[str, Parameter] = {}
        self._by_name: dict[tuple[Kind, str, str], list[StoredSlice]] = {}
        self._rows: dict[tuple[Kind, str, str], _Row] = {}
        self._means: dict[str, list[tuple[Slices, float]]] = {}
        for parts in means.values():
            averaged = [(Slices([_masters_of(version)]), weight) for version, weight in parts]
            first = averaged[0][0]
            # Frozen parameters have no master, and so no mean.
            self._means |= {name: averaged for name in first.parameters if first.shards(Kind.MASTER, name)}
        self._buffers: dict[tuple[str, int], StoredSlice] = {}
        self._shards: dict[tuple[Kind, str], int] = {}
        self.size_bytes = 0
        """The size of all slices."""
        for version in versions:
            self.parameters |= {parameter.name: parameter for parameter in version.parameters}
            for stored in version.objects:
                kind, shard, shards = stored.kind, stored.shard, stored.shards
                for part in slices_in(stored):
                    tensor = part.tensor
                    if kind is Kind.BUFFERS:
                        self._buffers[tensor.name, shard] = part
                    self._by_name.setdefault((kind, tensor.name, tensor.state), []).append(part)
                    if isinstance(version, OwnVersion) and shards > 1 and kind is not Kind.BUFFERS:
                        shape = self.parameters[tensor.name].shape
                        self._rows[kind, tensor.name, tensor.state] = _row_of_one(part, shape)
                    self._shards[kind, tensor.name] = shards
                    self.size_bytes += tensor.elements * by_code(tensor.dtype).bytes

    def buffer(self, name: str, *, shard: int = 0) -> StoredSlice:
        """Return a rank's copy of a buffer, by default the first rank's; raises LayoutMismatch if it is not stored."""
        stored = self._buffers.get((name, shard))
        if stored is None:
            raise _not_stored(Kind.BUFFERS, name, "", f" for rank {shard}")
        return stored

    def dtype(self, kind: Kind, name: str, *, state: str = "") -> str:
        """Return the element type of a parameter's slices, or a buffer's; raises LayoutMismatch if there are none."""
        return self._of_ranks(kind, name, state)[0].tensor.dtype

    def bounds(self, kind: Kind, name: str, *, state: str = "") -> tuple[int, ...]:
        """Return where each of a parameter's slices begins, counted in elements, then where the last one ends."""
        return self._row(kind, name, state).bounds

    def _of_ranks(self, kind: Kind, name: str, state: str) -> list[StoredSlice]:
        row = self._by_name.get((kind, name, state))
        if row is None:
            raise _not_stored(kind, name, state)
        return row

    def _row(self, kind: Kind, name: str, state: str) -> "_Row":
        """Return a parameter's slices in order; raises LayoutMismatch if together they are not as long as it."""
        key = kind, name, state
        row = self._rows.get(key)
        if row is None:
            slices, shape = self._of_ranks(kind, name, state), self.parameter(name).shape
            row = _row_of_boxes(slices, shape) if slices[0].tensor.box else _row_of_runs(slices)
            expected = prod(shape)
            if row.bounds[-1] != expected:
                raise _other_length(kind, name, state, row.bounds[-1], expected)
            self._rows[key] = row
        return row

    def pieces(
        self,
        kind: Kind,
        name: str,
        *,
        state: str = "",
        dtype: str,
        offset: int,
        begin: int = 0,
        end: int | None = None,
        as_stored: bool = False,
    ) -> list[Piece]:
        """
        Return the pieces that write the elements *begin* to *end* of a parameter as *dtype*, starting at *offset*.

        Raises:
            LayoutMismatch: The elements are not stored or, with *as_stored*, not as *dtype*.
            Unsupported: The elements are stored as a type that cannot be converted to *dtype*.
        """
        end = prod(self.parameter(name).shape) if end is None else end
        pieces = []
        for stored, start, elements, means in self._parts(kind, name, state=state, begin=begin, end=end):
            source = stored.tensor.dtype
            if as_stored and source != dtype:
                raise LayoutMismatch(
                    f"{state or kind} of {name!r} is stored as {source}, the base has it as {dtype}", name=name
                )
            if source != dtype and not can_convert(source, dtype):
                raise Unsupported(
                    f"{name!r} is stored as {source} and cannot be written as {dtype}", hint="choose another --dtype"
                )
            piece = stored.piece(offset, start=start, elements=elements)
            if source != dtype or means:
                piece = replace(piece, rounding=(source, dtype), crc32=None, mean_of=_addends(means) if means else ())
            pieces.append(piece)
            offset += elements * by_code(dtype).bytes
        return pieces

    def _parts(
        self, kind: Kind, name: str, *, state: str, begin: int, end: int
    ) -> list[tuple[StoredSlice, int, int, Sequence[_Part]]]:
        """Return the stretches of the elements *begin* to *end*, each with its parts if it is a mean of saves."""
        averaged = self._means.get(name) if kind is Kind.MASTER else None
        if averaged is None:
            return [(*stretch, ()) for stretch in self.stretches(kind, name, state=state, begin=begin, end=end)]
        ends = {begin}  # where stretches end; this differs between saves from different numbers of ranks
        for source, _ in averaged:
            lengths = (elements for _, _, elements in source.stretches(kind, name, begin=begin, end=end))
            ends |= set(accumulate(lengths, initial=begin))
        made_of: list[tuple[StoredSlice, int, int, Sequence[_Part]]] = []
        for first, last in pairwise(sorted(ends)):
            parts = [(*source.stretches(kind, name, begin=first, end=last)[0], weight) for source, weight in averaged]
            # The mean over a single save is that save's bytes, which are copied as they are.
            made_of.append((*parts[0][:3], parts if len(parts) > 1 else ()))
        return made_of

    def stretches(self, kind: Kind, name: str, *, state: str = "", begin: int, end: int) -> list[SliceStretch]:
        """
        Return the slices that hold the elements *begin* to *end* of a parameter, and which elements of each slice.

        Raises:
            LayoutMismatch: The elements are not stored.
        """
        if begin == end:
            return []
        row, stretches = self._row(kind, name, state), []
        if not row.bounds[0] <= begin < end <= row.bounds[-1]:  # not asserted: python -O would load wrong bytes
            raise Internal(f"{state or kind} of {name!r}: a rank asks for more than its own slice")
        at = bisect_right(row.bounds, begin) - 1
        while begin < end:
            stop = row.bounds[at + 1] if row.bounds[at + 1] < end else end
            stretches.append((row.slices[at], row.starts[at] + begin - row.bounds[at], stop - begin))
            begin, at = stop, at + 1
        return stretches

    def shards(self, kind: Kind, name: str) -> int:
        """Return the number of slices of *name*; 0 if this kind is not stored."""
        return self._shards.get((kind, name), 0)

    def is_mean(self, name: str) -> bool:
        """Whether the master of the parameter *name* is a mean, which no object stores."""
        return name in self._means

    def weights_kind(self, name: str, dtype: str) -> Kind:
        """Return the kind to take weights of the type *dtype* from."""
        if self.is_mean(name):
            return Kind.MASTER
        # Stored weights are what the trainer itself would have saved. Use them if they have the wanted type, or if a
        # frozen parameter has nothing else; otherwise use the master, which is more precise.
        if not self.shards(Kind.WEIGHTS, name):
            return Kind.MASTER
        is_wanted = self.dtype(Kind.WEIGHTS, name) == dtype
        return Kind.WEIGHTS if is_wanted or not self.shards(Kind.MASTER, name) else Kind.MASTER

    def buffers(self) -> set[str]:
        """Return the names of all buffers."""
        return {name for kind, name in self._shards if kind is Kind.BUFFERS}

    def rank_buffers(self) -> dict[str, int]:
        """Return the buffers that each rank saved for itself, with the number of ranks."""
        return {name: shards for (kind, name), shards in self._shards.items() if kind is Kind.BUFFERS and shards > 1}

    def parameter(self, name: str) -> Parameter:
        """Return the parameter *name*; raises LayoutMismatch if no layer has it."""
        if name not in self.parameters:
            raise LayoutMismatch(f"parameter {name!r} is in none of the chosen layers", name=name)
        return self.parameters[name]


def _masters_of(version: LayerVersion) -> LayerVersion:
    """Return *version* with only its masters, so that an average of a thousand saves needs no memory for the rest."""
    return replace(version, objects=tuple(stored for stored in version.objects if stored.kind is Kind.MASTER))


def _addends(parts: Sequence[_Part]) -> tuple[Addend, ...]:
    """Return *parts* as the addends of a mean; raises LayoutMismatch if their element types differ or have no mean."""
    addends = []
    for stored, start, elements, weight in parts:
        piece = stored.piece(0, start=start, elements=elements)
        addends.append(Addend(object=piece.object, object_offset=piece.object_offset, weight=weight))
        first = parts[0][0].tensor
        # `mean` returns fp32, which is less precise than fp64.
        if stored.tensor.dtype != first.dtype or first.dtype == "F64" or not can_convert(first.dtype, "F32"):
            raise LayoutMismatch(
                f"{first.name!r} is stored as {first.dtype} and as {stored.tensor.dtype}: these have no mean",
                name=first.name,
            )
    return tuple(addends)
