"""
A composite's tensors as read-only arrays, mapped from the objects if possible; nothing is written.

Mapping objects is safe: they are never truncated or rewritten, and a removed object keeps its pages while it is
mapped. numpy is imported with the first array, since most commands never make one.
"""

import mmap
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args
from weakref import WeakValueDictionary

from layerstore.dtypes import by_code
from layerstore.errors import InvalidInput, LayoutMismatch, NotFound
from layerstore.model import BlobRef, Kind, LayerVersion
from layerstore.nearest import did_you_mean, nearest, unknown
from layerstore.slices import StoredSlice, slices_in
from layerstore.storage import Repository

if TYPE_CHECKING:
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[Any]

TensorKind = Literal["master", "optimizer", "weights", "buffers"]

_WHY_NONE = {
    Kind.MASTER: "no layer here has been trained",
    Kind.OPTIMIZER: "no optimizer state is stored for these layers",
    Kind.WEIGHTS: "all weights here follow from their masters",
    Kind.BUFFERS: "the model has no persistent buffers",
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[StoredSlice]
    """Its slices; for a buffer that differs between ranks, every rank's copy."""

    @property
    def is_whole(self) -> bool:
        """Whether the first part is the whole tensor."""
        return len(self.parts) == 1 or self.parts[0].tensor.elements == prod(self.shape) > 0


class Tensors(Mapping[str, "Array"]):
    """
    Read-only arrays by name, each made on access.

    Each object is verified as a whole, once, before the first of its bytes is returned, unless *verify* is False.
    Arrays and the mapping stay valid after the store is closed. An array whose bytes lie together, uncoded, in one
    object is that object's mapped memory (see `is_mapped`); other arrays are copies, and `parts` returns their slices.
    Types that numpy lacks are returned as bits: bfloat16 as uint16, 8-bit floats as uint8; `dtype` returns the true
    type.
    Safe to share between threads.
    """

    def __init__(self, repo: Repository, entries: dict[str, _Entry], *, kind: Kind, verify: bool) -> None:
        self._repo = repo
        self._kind = kind
        self._entries = entries
        self._verify = verify
        self._verified: set[BlobRef] = set()
        # Weak references: each mapping costs a descriptor until its last array is gone.
        self._maps: WeakValueDictionary[BlobRef, mmap.mmap] = WeakValueDictionary()
        self._guard = threading.Lock()

    def __repr__(self) -> str:
        if not self._entries:
            return f"<Tensors: none of kind {self._kind}: {_WHY_NONE[self._kind]}>"
        return f"<Tensors: {len(self)} of kind {self._kind}, first {next(iter(self))!r}>"

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # the inherited method would make the array

    def __getitem__(self, name: str) -> "Array":
        """
        Return the array *name*.

        Raises:
            NotFound: There is no such tensor; this error is a KeyError.
            IntegrityError: The object is damaged or missing.
        """
        import numpy as np

        entry = self._entry(name)
        if self.is_mapped(name):
            return self._array(entry, entry.parts[0]).reshape(entry.shape)
        # As bytes, so that nobody can make the array writable.
        if entry.parts[0].tensor.box:
            data = self._boxes_together(entry)
        else:
            data = b"".join(self._array(entry, part).data.cast("B") for part in entry.parts)
        return np.frombuffer(data, by_code(entry.dtype).numpy).reshape(entry.shape)

    def _boxes_together(self, entry: _Entry) -> bytes:
        """Return the bytes of a tensor whose parts are boxes of it, as when tensor parallelism cuts columns."""
        import numpy as np

        whole = np.zeros(entry.shape, by_code(entry.dtype).numpy)
        for part in entry.parts:
            offsets, sizes = part.tensor.box[: whole.ndim], part.tensor.box[whole.ndim :]
            place = tuple(slice(first, first + extent) for first, extent in zip(offsets, sizes, strict=True))
            whole[place] = self._array(entry, part).reshape(sizes)
        return whole.tobytes()

    def parts(self, name: str) -> tuple["Array", ...]:
        """
        Return the flat slices of *name*, each of them mapped unless it is stored coded.

        There is one slice for each rank that saved the tensor, in rank order and without padding; for a buffer that
        differs between ranks, each is a rank's own copy.
        Under tensor parallelism, slices are boxes of the tensor, row by row.
        """
        entry = self._entry(name)
        return tuple(self._array(entry, part) for part in entry.parts)

    def dtype(self, name: str) -> str:
        """Return the code of *name*'s element type in safetensors."""
        return self._entry(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of *name*."""
        return self._entry(name).shape

    def is_mapped(self, name: str) -> bool:
        """Whether the array *name* is an object's own memory; otherwise each access copies its slices together."""
        entry = self._entry(name)
        return entry.is_whole and not entry.parts[0].object.is_coded

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is not None:
            return entry
        if not self._entries:
            raise NotFound(f"there is no tensor {name!r} here", hint=_WHY_NONE[self._kind])
        raise unknown("tensor", name, self._entries)

    def _array(self, entry: _Entry, part: StoredSlice) -> "Array":
        import numpy as np

        kind, ref = by_code(entry.dtype).numpy, part.object.ref
        if not part.object.is_coded:
            return np.frombuffer(self._map(ref), kind, part.tensor.elements, part.offset)
        with self._guard:
            if self._verify and ref not in self._verified:
                self._repo.verify_object(ref)
            self._verified.add(ref)
        with self._repo.open_object(ref) as file:  # as bytes, which nobody can change
            return np.frombuffer(file.read_at(part.offset, part.size_bytes), kind)

    def _map(self, ref: BlobRef) -> mmap.mmap:
        with self._guard:
            mapped = self._maps.get(ref)
            if mapped is None:
                mapped = self._repo.objects.map(ref, verify=self._verify and ref not in self._verified)
                self._verified.add(ref)
                self._maps[ref] = mapped
        return mapped


def open_tensors(
    repo: Repository, versions: Iterable[LayerVersion], *, kind: str, state: str | None, verify: bool
) -> Tensors:
    """
    Return the tensors of one *kind* that *versions* hold, by name; none is read yet.

    Without *state*, tensors of the optimizer are called ``STATE/NAME``.

    Raises:
        InvalidInput: There is no such kind, or *state* was given for a kind that has no states.
        NotFound: The optimizer has no such state.
    """
    wanted_kind = _kind(kind, state)
    entries: dict[str, _Entry] = {}
    states: set[str] = set()
    for version in versions:
        shapes = {
            item.name: item.shape for item in (version.buffers if wanted_kind is Kind.BUFFERS else version.parameters)
        }
        for stored in version.objects:
            if stored.kind is not wanted_kind:
                continue
            for part in slices_in(stored):
                tensor = part.tensor
                states.add(tensor.state)
                if state in {None, tensor.state}:
                    name = tensor.key if state is None else tensor.name
                    entries.setdefault(name, _Entry(tensor.dtype, shapes[tensor.name], [])).parts.append(part)
    if state is not None and state not in states:
        known = ", ".join(sorted(states)) or "none at all"
        hint = did_you_mean(nearest(state, states), else_=f"there is {known}")
        raise NotFound(f"the optimizer has no state {state!r} in these layers", hint=hint)
    for name, entry in entries.items():
        entry.parts.sort(key=lambda part: part.object.shard)
        stored_elements, expected = sum(part.tensor.elements for part in entry.parts), prod(entry.shape)
        if stored_elements != expected * (len(entry.parts) if wanted_kind is Kind.BUFFERS else 1):
            raise LayoutMismatch(
                f"{name!r} is stored in slices of {stored_elements} elements, its shape asks for {expected}"
            )
    return Tensors(repo, entries, kind=wanted_kind, verify=verify)


def _kind(kind: str, state: str | None) -> Kind:
    try:
        wanted = Kind(kind)
    except ValueError as exc:
        hint = did_you_mean(nearest(kind, Kind), else_=f"choose one of {', '.join(get_args(TensorKind))}")
        raise InvalidInput(f"{kind!r} is not a kind of tensors", hint=hint) from exc
    if state is not None and wanted is not Kind.OPTIMIZER:
        raise InvalidInput(f"{kind} has no states, {state!r} was asked for", hint="only the optimizer has states")
    return wanted
