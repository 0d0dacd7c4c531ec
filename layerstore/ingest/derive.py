"""
Find out which gathered weights need not be stored: those that are their master, rounded.

Checked bit for bit, tensor by tensor, while the masters are read anyway. Frozen weights and buffers are
compared with their own slices in the same way.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from layerstore.dtypes import by_code
from layerstore.model import Kind, Parameter
from layerstore.publish import SourceReader
from layerstore.zero3 import (
    Checkpoint,
    GatheredSource,
    ObjectSource,
    SliceSource,
    can_derive,
    convert,
    equal_bytes,
    slice_length,
)


class GatheredCheck:
    """What is known of each gathered tensor; shared by threads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.parameters: Mapping[str, Parameter] = {
            parameter.name: parameter for layer in checkpoint.layers for parameter in layer.parameters
        }
        self._world_size = checkpoint.world_size
        self._by_supplier: dict[str, list[GatheredSource]] = {}
        for file in checkpoint.gathered:
            for tensor in file.tensors:
                if tensor.supplier:
                    self._by_supplier.setdefault(tensor.supplier, []).append(tensor)
        self._unlike: set[GatheredSource] = set()
        self._seen: dict[GatheredSource, int] = {}
        self._guard = threading.Lock()

    def is_derived(self, tensor: GatheredSource) -> bool:
        """Whether *tensor* was seen to follow, element by element, from what is stored anyway."""
        return tensor not in self._unlike and self._seen.get(tensor, 0) == tensor.elements

    @property
    def bytes_derived(self) -> int:
        """The size of all gathered tensors that follow from what is stored anyway."""
        tensors = [tensor for of in self._by_supplier.values() for tensor in of]
        return sum(tensor.size_bytes for tensor in tensors if self.is_derived(tensor))

    def weights_to_store(self, names: Iterable[str]) -> Iterator[GatheredSource]:
        """
        Yield the gathered tensors that become the stored weights of their layer.

        A trained parameter whose only gathered tensor is not its master, rounded: a composite takes it along.
        """
        for name in sorted(self._by_supplier.keys() & set(names)):
            tensors = self._by_supplier[name]
            parameter = self.parameters.get(name)
            if parameter and not parameter.frozen and len(tensors) == 1 and not self.is_derived(tensors[0]):
                yield tensors[0]

    def witness(self, source: ObjectSource, reader: SourceReader) -> "SliceWitness | None":
        """Return what shall look at the slices of *source*, if anything."""
        if source.kind is Kind.OPTIMIZER or not self._by_supplier:
            return None
        if source.kind is Kind.BUFFERS and source.shard:
            return None  # rank 0 is the one that gathered
        return SliceWitness(self, source, reader)

    def candidates(self, part: SliceSource) -> list[GatheredSource]:
        """Return the gathered tensors that *part* may supply and that are not unlike it already."""
        found = []
        for tensor in self._by_supplier.get(part.name, ()):
            if not can_derive(part.dtype, tensor.dtype):
                self.note_unlike(tensor)
            elif tensor not in self._unlike:
                found.append(tensor)
        return found

    def first_element(self, source: ObjectSource, part: SliceSource) -> int:
        """Return where *part* begins in its whole tensor."""
        if source.kind is Kind.BUFFERS:
            return 0
        return source.shard * slice_length(prod(self.parameters[part.name].shape), source.shards)

    def note_unlike(self, tensor: GatheredSource) -> None:
        """Remember that *tensor* does not follow."""
        with self._guard:
            self._unlike.add(tensor)

    def note_alike(self, tensor: GatheredSource, elements: int) -> None:
        """Remember that *elements* more of *tensor* follow."""
        with self._guard:
            self._seen[tensor] = self._seen.get(tensor, 0) + elements


@dataclass(frozen=True, slots=True)
class SliceWitness:
    """Compares slices with the gathered tensors, as they go by."""

    check: GatheredCheck
    source: ObjectSource
    reader: SourceReader
    """Its own: the slices' reader is in use while this looks."""

    def look(self, part: SliceSource, start_element: int, data: memoryview) -> None:
        """Compare *data*, the elements of *part* from *start_element* on."""
        elements = len(data) // by_code(part.dtype).bytes
        for tensor in self.check.candidates(part):
            first = self.check.first_element(self.source, part) + start_element
            if self._equal(tensor, first, convert(data, source=part.dtype, target=tensor.dtype)):
                self.check.note_alike(tensor, elements)
            else:
                self.check.note_unlike(tensor)

    def _equal(self, tensor: GatheredSource, first: int, expected: memoryview) -> bool:
        offset = tensor.offset_bytes + first * by_code(tensor.dtype).bytes
        for chunk in self.reader.chunks(tensor.file, offset, len(expected)):
            if not equal_bytes(chunk, expected[: len(chunk)]):
                return False
            expected = expected[len(chunk) :]
        return True
