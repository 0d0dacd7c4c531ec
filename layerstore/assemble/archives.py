"""
Plan files of ``torch.save``: one archive, or several one after another, filled from objects.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from layerstore.assemble.assemble import Literals, OutputFile, checksum, merged, whole
from layerstore.hashing import crc32
from layerstore.limits import PAGE_BYTES
from layerstore.model import ObjectContent
from layerstore.slices import Piece
from layerstore.tree import Storage, Tree
from layerstore.zero3.pt import PtLayout, WrittenPickles, layout_pt

Fill = Callable[[Storage, int], Iterable[Piece]]
"""Returns what fills a storage that starts at an offset of the file, in order; gaps are zeros."""


@dataclass(slots=True)
class Archives:
    """One file on its way."""

    path: str
    size_bytes: int = 0
    _literals: list[tuple[int, bytes]] = field(default_factory=list)
    _pieces: list[Piece] = field(default_factory=list)
    _archives: list[tuple[int, PtLayout, dict[Storage, int], dict[Storage, tuple[int, list[Piece]]]]] = field(
        default_factory=list
    )
    """Start and layout of each, the checksums that are known, and the pieces that make up the others."""

    def add(
        self,
        tree: Tree,
        fill: Fill | None = None,
        *,
        name: str = "archive",
        alignment_bytes: int = PAGE_BYTES,
        pickles: WrittenPickles | None = None,
    ) -> tuple[int, int]:
        """
        Add *tree*, with *fill* for the storages whose bytes are slices, and return where it starts and its size.

        Large payloads want an alignment of whole pages, which the kernel can copy or share; *name* is that of the
        folder in the archive.
        """
        layout = layout_pt(tree, name=name, alignment_bytes=alignment_bytes, pickles=pickles)
        begin = self.size_bytes + -self.size_bytes % alignment_bytes
        known: dict[Storage, int] = {}
        filled: dict[Storage, tuple[int, list[Piece]]] = {}
        for storage, at in layout.storages:
            content, offset = storage.content, begin + at
            if isinstance(content, bytes):
                known[storage] = crc32(content)
                self._literals.append((offset, content))
            elif isinstance(content, ObjectContent):
                known[storage] = content.crc32
                self._pieces.append(whole(content, offset))
            else:
                assert fill is not None, "only files of ranks have slices in them"
                filled[storage] = offset, [_measured(piece) for piece in fill(storage, offset)]
                self._pieces += filled[storage][1]
        self._archives.append((begin, layout, known, filled))
        self.size_bytes = begin + layout.size_bytes
        return begin, layout.size_bytes

    def output(self) -> OutputFile:
        """Return the plan of the file."""
        is_measured = any(piece.is_measured for piece in self._pieces)
        return OutputFile(
            path=self.path,
            size_bytes=self.size_bytes,
            literals=(*self._literals, *(() if is_measured else self._skeletons({}))),
            pieces=merged(self._pieces),
            finish=self._skeletons if is_measured else None,
        )

    def _skeletons(self, measured: Mapping[int, int]) -> Literals:
        """Return the bytes around the payloads, given the *measured* checksums of pieces by offset in the file."""
        found: list[tuple[int, bytes]] = []
        for begin, layout, known, filled in self._archives:
            measured_now = {
                storage: checksum(pieces, measured, offset=offset, size_bytes=storage.size_bytes)
                for storage, (offset, pieces) in filled.items()
            }
            found += ((begin + at, data) for at, data in layout.skeleton({**known, **measured_now}))
        return tuple(found)


def _measured(piece: Piece) -> Piece:
    return piece if piece.crc32 is not None else replace(piece, is_measured=True)
