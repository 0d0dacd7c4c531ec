"""
The framing of tensor objects, and of weights that compose writes: safetensors files with every byte determined here.

The header is padded with spaces so that the payload starts on a page. Slices that fill whole pages come first, then the
rest, both by key, so whole-page slices stay page-aligned whatever else is in the file. Nothing that could vary between
equal contents is included.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeVar

from layerstore.dtypes import by_code
from layerstore.limits import PAGE_BYTES


class Slice(Protocol):
    """What the framing needs to know about a tensor."""

    @property
    def key(self) -> str:
        """Its name in the file."""

    @property
    def dtype(self) -> str:
        """Code of its element type."""

    @property
    def elements(self) -> int:
        """Its length."""


AnySlice = TypeVar("AnySlice", bound=Slice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The layout of one object file."""

    header: bytes
    """All bytes of the file before the payload."""
    offsets: tuple[int, ...]
    """Where each tensor starts in the file, in the given order."""
    size_bytes: int
    """Size of the whole file."""


def slice_bytes(tensor: Slice) -> int:
    """Return the size of *tensor*."""
    return tensor.elements * by_code(tensor.dtype).bytes


def canonical_order(tensors: Iterable[AnySlice]) -> list[AnySlice]:
    """Return *tensors* in the order of an object file."""
    return sorted(tensors, key=lambda tensor: (slice_bytes(tensor) % PAGE_BYTES != 0, tensor.key))


def frame(tensors: Iterable[Slice]) -> Frame:
    """Lay out *tensors*, which must be in canonical order."""
    return framed((tensor.key, tensor.dtype, (tensor.elements,)) for tensor in tensors)


def framed(tensors: Iterable[tuple[str, str, Sequence[int]]], *, metadata: Mapping[str, str] | None = None) -> Frame:
    """Lay out *tensors*, given as (key, element type, shape); the header starts with *metadata*."""
    begin, offsets = 0, []
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    for key, dtype, shape in tensors:
        end = begin + prod(shape) * by_code(dtype).bytes
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        offsets.append(begin)
        begin = end
    assert len(entries) == len(offsets) + (metadata is not None), "keys are unique within a file"
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    padding = -(8 + len(text)) % PAGE_BYTES
    header = (len(text) + padding).to_bytes(8, "little") + text + b" " * padding
    return Frame(
        header=header,
        offsets=tuple(len(header) + offset for offset in offsets),
        size_bytes=len(header) + begin,
    )
