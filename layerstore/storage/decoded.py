"""
Coded objects, read as if they were plain: every read decodes the blocks that it touches.

Offsets refer to the plain object with the same tensors, so readers need not know that an object is coded. Nothing
decoded is kept, and the bytes of a coded object are checked against its name, as for any object.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from layerstore.coding import BLOCK, CODINGS
from layerstore.disk import OpenFile
from layerstore.dtypes import by_code
from layerstore.errors import IntegrityError
from layerstore.framing import coded_frame, frame
from layerstore.limits import IO_CHUNK_BYTES
from layerstore.model import BlobRef, LayerVersion, StoredObject, StoredTensor
from layerstore.storage.objects import ObjectStore, Stretch

_ITEM_BYTES = 4  # only fp32 is coded


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the parts of one coded tensor are in the file, and where its bytes would be in a plain file."""

    tensor: StoredTensor
    begin: int
    parts: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.begin + self.tensor.size_bytes

    def stretches(self, first: int, last: int) -> Iterator[Stretch]:
        """Yield the stretches of the file that hold the elements *first* to *last*."""
        item_bytes = by_code(self.tensor.dtype).bytes
        if not self.tensor.coding:
            yield self.parts[0] + first * item_bytes, self.parts[0] + last * item_bytes
            return
        coding = CODINGS[self.tensor.coding]
        for offset, before, part in zip(self.parts, coding.parts(first), coding.parts(last - first), strict=True):
            item_bytes = by_code(part.dtype).bytes
            start = offset + before.elements * item_bytes
            yield start, start + part.elements * item_bytes


# Without slots: a cached property needs a __dict__.
@dataclass(frozen=True)
class CodedObject:
    """A coded object, and the object to which its differences are added."""

    stored: StoredObject
    reference: StoredObject | None

    @cached_property
    def layouts(self) -> "list[_Layout]":
        """Where each of the object's tensors is, in order."""
        plain = frame(self.stored.tensors)
        # The reference has the same slices, uncoded, so it must be as large as the plain form of this object.
        if self.reference is not None and self.reference.size_bytes != plain.size_bytes:
            raise IntegrityError(f"object {self.reference.id} is listed with a size that its tensors do not have")
        file, first = coded_frame(self.stored.tensors, reference=self.stored.reference)
        bounds = pairwise((*first, len(file.offsets)))
        return [
            _Layout(tensor, begin, file.offsets[start:end])
            for tensor, begin, (start, end) in zip(self.stored.tensors, plain.offsets, bounds, strict=True)
        ]

    def stretches(self, plain: Iterable[Stretch]) -> dict[BlobRef, list[Stretch]]:
        """Return, by object, the stretches to read for the stretches *plain* of the plain object."""
        stretches: dict[BlobRef, list[Stretch]] = {self.stored.ref: []}
        for begin, end in plain:
            for layout in self.layouts:
                first, last = _blocks(layout, begin, end)
                if first < last:
                    stretches[self.stored.ref] += layout.stretches(first, last)
            if self.reference is not None:
                stretches.setdefault(self.reference.ref, []).append((begin, end))
        return stretches

    def open(self, objects: ObjectStore, stretches: Iterable[Stretch] | None) -> "DecodedFile":
        """Open the object for reading *stretches* of the plain object, or all of it."""
        needed_stretches = None if stretches is None else self.stretches(stretches)
        with ExitStack() as stack:
            ref = self.stored.ref
            file = stack.enter_context(objects.open(ref, None if needed_stretches is None else needed_stretches[ref]))
            reference = None
            if self.reference is not None:
                ref = self.reference.ref
                reference = stack.enter_context(
                    objects.open(ref, None if needed_stretches is None else needed_stretches[ref])
                )
            decoded = DecodedFile(self, file, reference)
            stack.pop_all()
        return decoded


def coded_objects(version: LayerVersion) -> dict[BlobRef, CodedObject]:
    """Return the coded objects of *version*, each with its reference, which *version* lists too."""
    references: dict[str, StoredObject] = {stored.id: stored for stored in version.references}
    return {
        stored.ref: CodedObject(stored, references[stored.reference] if stored.reference else None)
        for stored in version.objects
        if stored.is_coded
    }


def _blocks(layout: _Layout, begin: int, end: int) -> tuple[int, int]:
    """Return the range of elements of *layout*, in whole blocks, that covers the bytes *begin* to *end*."""
    begin, end = max(begin, layout.begin), min(end, layout.end)
    if begin >= end:
        return 0, 0
    item_bytes = by_code(layout.tensor.dtype).bytes
    first, last = (begin - layout.begin) // item_bytes, -(-(end - layout.begin) // item_bytes)
    return first // BLOCK * BLOCK, min(-(-last // BLOCK) * BLOCK, layout.tensor.elements)


class DecodedFile(OpenFile):
    """An open coded object that reads as if it were plain."""

    def __init__(self, coded: CodedObject, file: OpenFile, reference: OpenFile | None) -> None:
        # No descriptor: callers then read from this object, instead of letting the kernel copy the coded bytes.
        super().__init__(file.path, -1, frame(coded.stored.tensors).size_bytes)
        self._file = file
        self._reference = reference
        self._layouts = coded.layouts
        self._begins = [layout.begin for layout in self._layouts]

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill *buffer* from *offset*, which is within the payload."""
        view = buffer.cast("B")
        at = bisect_right(self._begins, offset) - 1
        while view:
            layout = self._layouts[at]
            count = min(len(view), layout.end - offset, IO_CHUNK_BYTES)
            if layout.tensor.coding:
                self._decode(layout, view[:count], offset)
            else:
                self._file.read_into(view[:count], layout.parts[0] + offset - layout.begin)
            view, offset = view[count:], offset + count
            at += offset == layout.end

    def _decode(self, layout: _Layout, view: memoryview, offset: int) -> None:
        """Fill *view* from *offset*, which lies in the tensor of *layout*."""
        first, last = _blocks(layout, offset, offset + len(view))
        start = offset - layout.begin - first * _ITEM_BYTES
        size_bytes = (last - first) * _ITEM_BYTES
        parts = [self._file.read_at(begin, end - begin) for begin, end in layout.stretches(first, last)]
        # A reader may ask for part of a block, but scales apply to whole blocks: decode the blocks, copy the part out.
        is_whole = len(view) == size_bytes
        out = view if is_whole else memoryview(bytearray(size_bytes))
        coding = CODINGS[layout.tensor.coding]
        if coding.needs_reference:
            assert self._reference is not None, "a version lists the references of its differences"
            # Read the reference into the output: decoding adds the differences in place.
            self._reference.read_into(out, layout.begin + first * _ITEM_BYTES)
        coding.decode(parts, out if coding.needs_reference else None, out)
        if not is_whole:
            view[:] = out[start : start + len(view)]

    def close(self) -> None:
        """Close the underlying files; calling this twice is harmless."""
        self._file.close()
        if self._reference is not None:
            self._reference.close()
