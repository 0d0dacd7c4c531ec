"""
Layer versions and rank states -> DeepSpeed's files, as plans: which bytes of which object go where.

The loader checks little, so all lengths are made here and nothing is taken from the source's files but their trees.
Padding is written as zeros.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath

from layerstore.dtypes import by_code
from layerstore.errors import IntegrityError, LayoutMismatch
from layerstore.format.hashing import combine_crc32, crc32, crc32_of_zeros
from layerstore.model import (
    BufferContent,
    FlatContent,
    FragmentContent,
    Kind,
    ObjectContent,
    RankState,
    SourceFile,
    TreeFile,
)
from layerstore.tree import Size, Storage
from layerstore.zero3.places import Literals, OutputFile, Part, Piece, Slices, merged, whole
from layerstore.zero3.ptfile import PtLayout, layout_pt
from layerstore.zero3.slices import elements_of, slice_length, valid_elements
from layerstore.zero3.trees import TreeView, sub_group_shapes


def plan_rank(
    state: RankState, slices: Slices, *, world_size: int, plan_file: Callable[[SourceFile], OutputFile]
) -> Iterator[OutputFile]:
    """
    Yield the files of one rank of *world_size*, gathered weights left out: many ranks supply those.

    *plan_file* says what becomes of a file beside the trees.
    """
    groups = sub_group_shapes(TreeView(state.model.tree, path=PurePosixPath(state.model.path)))
    for file in (state.model, state.optimizer):
        yield _plan_tree_file(file, slices, groups, rank=state.rank, world_size=world_size)
    yield from map(plan_file, state.files)


def _plan_tree_file(
    file: TreeFile, slices: Slices, groups: Sequence[Mapping[str, Size]], *, rank: int, world_size: int
) -> OutputFile:
    layout = layout_pt(file.tree, name=PurePosixPath(file.path).stem)
    checksums: dict[Storage, int] = {}
    unknown: dict[Storage, tuple[int, list[Part]]] = {}
    literals: list[tuple[int, bytes]] = []
    pieces: list[Piece] = []
    for storage, offset in layout.storages:
        content = storage.content
        if isinstance(content, bytes):
            checksums[storage] = crc32(content)
            literals.append((offset, content))
        elif isinstance(content, ObjectContent):
            checksums[storage] = content.crc32
            pieces.append(whole(content, offset))
        else:
            filling = filling_of(storage, slices, groups, rank=rank, world_size=world_size, path=file.path)
            pieces += _placed(filling, offset)
            if any(part.checksum is None for part in filling):
                unknown[storage] = offset, filling
            else:
                checksums[storage] = _combined(filling, offset, {})
    if not unknown:
        literals += layout.skeleton(checksums)
    return OutputFile(
        path=file.path,
        size_bytes=layout.size_bytes,
        executable=False,
        literals=tuple(literals),
        pieces=tuple(merged(pieces)),
        finish=partial(_skeleton, layout, checksums, unknown) if unknown else None,
    )


def _skeleton(
    layout: PtLayout,
    known: Mapping[Storage, int],
    unknown: Mapping[Storage, tuple[int, list[Part]]],
    cut: Mapping[int, int],
) -> Literals:
    """Return all that surrounds the payloads, given the checksums of the *cut* pieces by offset in the file."""
    found = {storage: _combined(filling, offset, cut) for storage, (offset, filling) in unknown.items()}
    return tuple(layout.skeleton({**known, **found}))


def _combined(filling: list[Part], offset: int, cut: Mapping[int, int]) -> int:
    parts = []
    for part in filling:
        parts.append((cut[offset] if part.checksum is None else part.checksum, part.size_bytes))
        offset += part.size_bytes
    return combine_crc32(parts)


def filling_of(
    storage: Storage,
    slices: Slices,
    groups: Sequence[Mapping[str, Size]],
    *,
    rank: int,
    world_size: int,
    path: str,
) -> list[Part]:
    """
    Return what fills *storage*, in order: stretches of objects, and padding.

    Raises:
        LayoutMismatch: The chosen layers do not have just that many bytes for it.
    """
    filling = list(_filling(storage, slices, groups, rank=rank, world_size=world_size))
    expected = storage.elements * by_code(storage.dtype).bytes
    found = sum(part.size_bytes for part in filling)
    if found != expected:
        raise LayoutMismatch(f"{path}: the chosen layers fill {found} bytes of a buffer of {expected}")
    return filling


def _filling(
    storage: Storage, slices: Slices, groups: Sequence[Mapping[str, Size]], *, rank: int, world_size: int
) -> Iterator[Part]:
    match storage.content:
        case FlatContent(state=state, group=group):
            kind = Kind.OPTIMIZER if state else Kind.MASTER
            for name in groups[group]:
                yield from _padded_slice(storage, slices, kind, name, state=state, rank=rank, world_size=world_size)
        case FragmentContent(parameter=name):
            yield from _padded_slice(storage, slices, Kind.WEIGHTS, name, state="", rank=rank, world_size=world_size)
        case BufferContent(buffer=name):
            # Where every rank saved its own, those beyond them take the first one's.
            shard = rank if rank < slices.shards(Kind.BUFFERS, name) else 0
            yield slices.find(Kind.BUFFERS, name, shard=shard).part()
        case content:
            raise IntegrityError(f"a storage has content that cannot be written: {type(content).__name__}")


def _padded_slice(
    storage: Storage, slices: Slices, kind: Kind, name: str, *, state: str, rank: int, world_size: int
) -> Iterator[Part]:
    elements = elements_of(slices.parameter(name).shape)
    length, valid = slice_length(elements, world_size), valid_elements(elements, world_size, rank)
    if valid:
        begin = rank * length
        yield from slices.parts(kind, name, state=state, dtype=storage.dtype, begin=begin, end=begin + valid)
    padding = (length - valid) * by_code(storage.dtype).bytes
    if padding:
        yield Part(size_bytes=padding, checksum=crc32_of_zeros(padding), source=None)


def _placed(filling: list[Part], offset: int) -> Iterator[Piece]:
    for part in filling:
        if part.source is not None:
            ref, start = part.source
            yield Piece(
                object=ref,
                object_offset=start,
                size_bytes=part.size_bytes,
                offset=offset,
                is_cut=part.checksum is None,
            )
        offset += part.size_bytes


def plan_source_file(file: SourceFile) -> OutputFile:
    """Return the plan of a file that is kept byte for byte."""
    content = file.content
    literal, pieces, size_bytes = (
        (((0, content),), (), len(content))
        if isinstance(content, bytes)
        else ((), (whole(content, 0),), content.size_bytes)
    )
    return OutputFile(
        path=file.path, size_bytes=size_bytes, executable=file.executable, literals=literal, pieces=pieces
    )
