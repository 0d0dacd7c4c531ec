"""Load one rank of a composite into memory: what fills each of its buffers, read from the objects and verified."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from layerstore.compose.choose import Composition
from layerstore.compose.world_size import AdamStep, plan_ranks
from layerstore.limits import IO_CHUNK_BYTES, WORKERS_MAX
from layerstore.model import BlobRef, ObjectContent, RankState, SourceFile
from layerstore.storage import Repository
from layerstore.tree import Storage
from layerstore.zero3 import StoragePart, TreeView, filling_of, read_header, sub_group_shapes, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """What one rank loads."""

    state: RankState
    notes: tuple[str, ...]
    """What does not carry over to this many ranks."""
    fill: Callable[[Storage, memoryview], None]
    """Reads the bytes of a storage of the state's trees into a buffer."""
    content: Callable[[bytes | ObjectContent], bytes]
    """Returns what a file beside the trees holds."""


def plan_load(
    repo: Repository, composition: Composition, *, rank: int, world_size: int, adam_step: AdamStep = "unify"
) -> RankLoad:
    """
    Decide what *rank* of *world_size* loads of *composition*.

    Raises:
        LayoutMismatch: Its layers do not fit together, or it cannot be had for so many ranks.
    """
    ranks = plan_ranks(repo, composition, world_size=world_size, adam_step=adam_step)
    state = ranks.state(rank)
    groups = sub_group_shapes(TreeView.of(state.model))
    verified: set[str] = set()

    def fill(storage: Storage, target: memoryview) -> None:
        content, path = storage.content, state.optimizer.path
        if isinstance(content, bytes):
            target[:] = content
            return
        if isinstance(content, ObjectContent):
            repo.objects.verify(content.object)
            _read_stretch(repo, content.object, whole(content, 0).object_offset, target)
            return
        parts = filling_of(storage, ranks.slices, groups, rank=rank, world_size=world_size, path=path)
        _verify(repo, parts, verified)
        offset = 0
        for part in parts:
            into = target[offset : offset + part.size_bytes]
            if part.source is None:
                into[:] = bytes(part.size_bytes)
            else:
                _read_stretch(repo, *part.source, into)
            offset += part.size_bytes

    return RankLoad(state=state, notes=ranks.notes, fill=fill, content=partial(content_of, repo))


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


def _verify(repo: Repository, parts: Iterable[StoragePart], verified: set[str]) -> None:
    objects = dict.fromkeys(part.source[0] for part in parts if part.source is not None)
    new = [ref for ref in objects if ref.id not in verified]
    with ThreadPoolExecutor(WORKERS_MAX) as pool:
        for _ in pool.map(repo.objects.verify, new):
            pass  # raises where one is damaged
    verified.update(ref.id for ref in new)


def _read_stretch(repo: Repository, ref: BlobRef, start: int, into: memoryview) -> None:
    with repo.objects.open(ref) as file:
        for at in range(0, len(into), IO_CHUNK_BYTES):
            file.read_into(into[at : at + IO_CHUNK_BYTES], start + at)
