"""
The framing of objects and exported weights: safetensors files with a layout that is fixed to the byte.

The header is padded with spaces so that the payload starts on a page. In an object, slices that fill whole pages come
first, so that they are page-aligned whatever else is in the file; the others follow. Both groups are sorted by key.
Nothing that could vary between equal contents is included.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import attrgetter
from typing import TypeVar

from layerstore.coding import CODINGS
from layerstore.dtypes import by_code
from layerstore.errors import IntegrityError
from layerstore.limits import PAGE_BYTES
from layerstore.model import Slice, StoredTensor, key_of

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


# All ranks of a save have the same few hundred lists of slices, so each list is sorted and laid out only once.
_ALIKE_MAX = 1024
_Facts = tuple[tuple[str, str, str, int], ...]
_facts = attrgetter("name", "state", "dtype", "elements")


def canonical_order(tensors: Iterable[AnySlice]) -> list[AnySlice]:
    """Return *tensors* in the order of an object file."""
    unordered = list(tensors)
    return [unordered[number] for number in _order_of(tuple(map(_facts, unordered)))]


@lru_cache(_ALIKE_MAX)
def _order_of(tensors: _Facts) -> list[int]:
    def place(number: int) -> tuple[bool, str]:
        name, state, dtype, elements = tensors[number]
        # Whole pages first: each of those tensors then begins on a page, as the payload does.
        return elements * by_code(dtype).bytes % PAGE_BYTES != 0, key_of(name, state)

    return sorted(range(len(tensors)), key=place)


def frame(tensors: Iterable[Slice]) -> Frame:
    """Lay out *tensors*, which must be in canonical order."""
    return _frame_of(tuple(map(_facts, tensors)))


@lru_cache(_ALIKE_MAX)
def _frame_of(tensors: _Facts) -> Frame:
    return framed((key_of(name, state), dtype, (elements,)) for name, state, dtype, elements in tensors)


def coded_frame(tensors: Iterable[StoredTensor], *, reference: str) -> tuple[Frame, list[int]]:
    """
    Lay out an object of *tensors* in their given order; a coded tensor is laid out as the parts of its coding, in turn.

    Return the layout of all parts, and the number of the first part of each tensor. The id of the *reference* is
    written to the file, so equal differences from different references make different objects.
    """
    parts: list[tuple[str, str, tuple[int]]] = []
    first = []
    for tensor in tensors:
        first.append(len(parts))
        if tensor.coding:
            key = f"{tensor.key}:{tensor.coding}"
            parts += [
                (key + part.suffix, part.dtype, (part.elements,))
                for part in CODINGS[tensor.coding].parts(tensor.elements)
            ]
        else:
            parts.append((tensor.key, tensor.dtype, (tensor.elements,)))
    return framed(parts, metadata={"reference": reference} if reference else None), first


def framed(tensors: Iterable[tuple[str, str, Sequence[int]]], *, metadata: Mapping[str, str] | None = None) -> Frame:
    """
    Lay out *tensors*, given as (key, element type, shape); the header starts with *metadata*.

    Raises:
        IntegrityError: Two tensors have one key.
    """
    begin, offsets = 0, []
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    for key, dtype, shape in tensors:
        end = begin + prod(shape) * by_code(dtype).bytes
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        offsets.append(begin)
        begin = end
    if len(entries) != len(offsets) + (metadata is not None):
        raise IntegrityError("two slices have one name")
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # The payload begins on a page, so that the kernel can copy or share it.
    padding = -(8 + len(text)) % PAGE_BYTES
    header = (len(text) + padding).to_bytes(8, "little") + text + b" " * padding
    return Frame(
        header=header,
        offsets=tuple(len(header) + offset for offset in offsets),
        size_bytes=len(header) + begin,
    )
