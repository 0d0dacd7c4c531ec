"""Load one rank of a composite into memory: what fills each of its buffers, read from the objects and verified."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from layerstore.compose.choose import Composition
from layerstore.compose.world_size import AdamStep, plan_ranks
from layerstore.limits import IO_CHUNK_BYTES, WORKERS_MAX
from layerstore.model import BlobRef, ObjectContent, SourceFile
from layerstore.storage import Repository
from layerstore.tree import Storage
from layerstore.zero3 import TreeView, filling_of, read_header, sub_group_shapes, whole


class RankLoad:
    """What one rank loads of a composite."""

    def __init__(
        self,
        repo: Repository,
        composition: Composition,
        *,
        rank: int,
        world_size: int,
        adam_step: AdamStep = "unify",
    ) -> None:
        """Raise LayoutMismatch if the layers do not fit together, or cannot be had for *world_size* ranks."""
        ranks = plan_ranks(repo, composition, world_size=world_size, adam_step=adam_step)
        self.state = ranks.state(rank)
        self.notes = ranks.notes
        """What does not carry over to this many ranks."""
        groups, path = sub_group_shapes(TreeView.of(self.state.model)), self.state.optimizer.path
        self._filling = partial(
            filling_of, slices=ranks.slices, groups=groups, rank=rank, world_size=world_size, path=path
        )
        self._repo = repo
        self._verified: set[str] = set()

    def fill(self, storage: Storage, target: memoryview) -> None:
        """Read the bytes of a *storage* of the state's trees into *target*, verified."""
        content = storage.content
        if isinstance(content, bytes):
            target[:] = content
            return
        if isinstance(content, ObjectContent):
            self._repo.objects.verify(content.object)
            _read_stretch(self._repo, content.object, whole(content, 0).object_offset, target)
            return
        pieces = self._filling(storage)
        self._verify({piece.object.id: piece.object for piece in pieces})
        end = 0
        for piece in pieces:
            target[end : piece.offset] = bytes(piece.offset - end)
            end = piece.offset + piece.size_bytes
            _read_stretch(self._repo, piece.object, piece.object_offset, target[piece.offset : end])
        target[end:] = bytes(len(target) - end)

    def _verify(self, objects: Mapping[str, BlobRef]) -> None:
        with ThreadPoolExecutor(WORKERS_MAX) as pool:
            for _ in pool.map(self._repo.objects.verify, (objects[key] for key in objects.keys() - self._verified)):
                pass  # raises where one is damaged
        self._verified |= objects.keys()

    def content(self, content: bytes | ObjectContent) -> bytes:
        """Return what a file beside the trees holds."""
        return content_of(self._repo, content)


def content_of(repo: Repository, content: bytes | ObjectContent) -> bytes:
    """Return what a file beside the trees holds, verified."""
    if isinstance(content, bytes):
        return content
    data = bytearray(content.size_bytes)
    repo.objects.verify(content.object)
    _read_stretch(repo, content.object, whole(content, 0).object_offset, memoryview(data))
    return bytes(data)


def header_of(repo: Repository, file: SourceFile) -> tuple[bytes, int]:
    """Return the header of a safetensors file that is kept byte for byte, not verified, and the size of the file."""
    content, path = file.content, Path(file.path)
    if isinstance(content, bytes):
        return read_header(path, lambda start, count: content[start : start + count], len(content)), len(content)
    begin = whole(content, 0).object_offset
    with repo.objects.open(content.object) as source:
        header = read_header(path, lambda start, count: source.read_at(begin + start, count), content.size_bytes)
    return header, content.size_bytes


def _read_stretch(repo: Repository, ref: BlobRef, start: int, into: memoryview) -> None:
    with repo.objects.open(ref) as file:
        for at in range(0, len(into), IO_CHUNK_BYTES):
            file.read_into(into[at : at + IO_CHUNK_BYTES], start + at)
