"""
Find out which gathered weights need not be stored: those that equal their rounded master.

Weights and masters are compared bit for bit, tensor by tensor, while the masters are being read anyway. Gathered frozen
weights and buffers are compared with their own slices in the same way.
"""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from layerstore.dtypes import by_code
from layerstore.model import Kind, Parameter
from layerstore.numbers import can_derive, convert, equal_bytes
from layerstore.source import GatheredSource
from layerstore.staging import SourceReader, Witness
from layerstore.zero3 import Checkpoint, ObjectSource, SliceSource


@dataclass(frozen=True, slots=True)
class Gathered:
    """The parameters of a checkpoint, and its gathered tensors by the parameter or buffer that they should equal."""

    parameters: Mapping[str, Parameter]
    by_supplier: Mapping[str, tuple[GatheredSource, ...]]
    whole: tuple[GatheredSource, ...]
    """The gathered tensors that are in the model's file."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Gathered":
        """Return the parameters and gathered tensors of *checkpoint*."""
        by_supplier: dict[str, tuple[GatheredSource, ...]] = {}
        in_files = (tensor for file in checkpoint.gathered for tensor in file.tensors if tensor.supplier)
        # Tensors of the model's file come first; `weights_to_store` relies on that order.
        for tensor in (*checkpoint.whole, *in_files):
            by_supplier[tensor.supplier] = (*by_supplier.get(tensor.supplier, ()), tensor)
        parameters = {parameter.name: parameter for layer in checkpoint.layers for parameter in layer.parameters}
        return cls(parameters, by_supplier, checkpoint.whole)

    def only(self, names: Collection[str]) -> "Gathered":
        """Return only the entries of the parameters and buffers *names*."""
        return Gathered(
            {name: self.parameters[name] for name in names if name in self.parameters},
            {name: self.by_supplier[name] for name in names if name in self.by_supplier},
            tuple(tensor for tensor in self.whole if tensor.supplier in names),
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of a comparison so far."""

    alike: Mapping[GatheredSource, int]
    """How many elements were found to be derivable."""
    unlike: frozenset[GatheredSource]


class GatheredCheck:
    """Finds the gathered tensors that can be derived from what is stored anyway; shared by threads."""

    def __init__(self, gathered: Gathered, reader: SourceReader) -> None:
        self._parameters = gathered.parameters
        self._by_supplier = gathered.by_supplier
        self._whole = frozenset(gathered.whole)
        self._reader = reader
        """A reader for gathered weights alone, since the slices' reader is in use during the comparison."""
        self._unlike: set[GatheredSource] = set()
        self._alike: dict[GatheredSource, int] = {}
        self._guard = threading.Lock()

    @property
    def compared(self) -> Compared:
        """Return the result so far."""
        return Compared(self._alike, frozenset(self._unlike))

    def join(self, compared: Compared) -> None:
        """Add what another process *compared*: elements that this process did not compare."""
        # Without the lock: this process's own threads are done.
        self._unlike |= compared.unlike
        for tensor, elements in compared.alike.items():
            self._alike[tensor] = self._alike.get(tensor, 0) + elements

    def is_derived(self, tensor: GatheredSource) -> bool:
        """Whether every element of *tensor* can be derived."""
        # Elements are counted, since slices come in any order, from several threads and processes.
        return tensor not in self._unlike and self._alike.get(tensor, 0) == tensor.elements

    @property
    def bytes_derived(self) -> int:
        """The size of all derived gathered tensors."""
        tensors = [tensor for parts in self._by_supplier.values() for tensor in parts]
        return sum(tensor.size_bytes for tensor in tensors if self.is_derived(tensor))

    def weights_to_store(self, names: Iterable[str]) -> Iterator[GatheredSource]:
        """
        Yield the gathered tensors that become the stored weights of their layer.

        They belong to trained parameters and differ from the rounded master. A parameter must have only one gathered
        tensor or, under stages 1 and 2, one in the model's file.
        """
        for name in sorted(self._by_supplier.keys() & set(names)):
            tensors = self._by_supplier[name]
            parameter = self._parameters.get(name)
            is_the_one = len(tensors) == 1 or tensors[0] in self._whole
            if parameter and not parameter.frozen and is_the_one and not self.is_derived(tensors[0]):
                yield tensors[0]

    def witness(self, source: ObjectSource) -> Witness | None:
        """Return a callback that compares the slices of *source* with gathered tensors; None if none can match."""
        is_of_rank_0 = source.shard == 0  # rank 0 did the gathering
        # Gathered weights never include moments; where ranks' buffers differ, they include the first rank's.
        if source.kind is Kind.OPTIMIZER or (source.kind is Kind.BUFFERS and not is_of_rank_0):
            return None

        def look(part: SliceSource, start_element: int, data: memoryview) -> None:
            for tensor in self._by_supplier.get(part.name, ()):
                if tensor not in self._unlike:  # without the lock: comparing once too often does no harm
                    self._compare(tensor, part.begin + start_element, part.dtype, data)

        return look if self._by_supplier else None

    def _compare(self, tensor: GatheredSource, first: int, dtype: str, data: memoryview) -> None:
        """Compare *data*, elements of the type *dtype*, with those of *tensor* from *first*."""
        is_alike = can_derive(dtype, tensor.dtype) and self._is_equal(
            tensor, first, convert(data, source=dtype, target=tensor.dtype)
        )
        with self._guard:
            if is_alike:
                self._alike[tensor] = self._alike.get(tensor, 0) + len(data) // by_code(dtype).bytes
            else:
                self._unlike.add(tensor)

    def _is_equal(self, tensor: GatheredSource, first: int, expected: memoryview) -> bool:
        offset = tensor.offset_bytes + first * by_code(tensor.dtype).bytes
        for chunk in self._reader.chunks(tensor.file, offset, len(expected)):
            if not equal_bytes(chunk, expected[: len(chunk)]):
                return False
            expected = expected[len(chunk) :]
        return True
