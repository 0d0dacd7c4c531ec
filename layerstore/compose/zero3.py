"""
The format ``zero3``: a composite as a ZeRO-3 checkpoint that DeepSpeed resumes from, for any number of ranks.

A sibling of ``hf``; an output format plans its files, and ``assemble`` and ``target`` do the rest. Only the trees of
the base's files are used. The engine's loader checks little, so every length is checked here. Padding is zeros.
`RankLoad` fills the memory of a rank with the same bytes, without files.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path, PurePosixPath

from layerstore.compose.assemble import (
    Assembly,
    DerivedCheck,
    Literals,
    OutputFile,
    assembling,
    content_of,
    merged,
    read_stretch,
    whole,
)
from layerstore.compose.choose import Composition
from layerstore.compose.peft import plan_beside
from layerstore.compose.target import appearing, checked_target
from layerstore.compose.world_size import AdamStep, RankStates, plan_ranks
from layerstore.dtypes import by_code
from layerstore.errors import IntegrityError, LayoutMismatch
from layerstore.format import combine_crc32, crc32, crc32_of_zeros
from layerstore.limits import WORKERS_MAX
from layerstore.model import (
    BlobRef,
    BufferContent,
    FlatContent,
    FragmentContent,
    GatheredFile,
    GatheredTensor,
    Kind,
    ObjectContent,
    RankState,
    TensorSource,
    TreeFile,
)
from layerstore.progress import Progress
from layerstore.storage import Repository
from layerstore.tree import Storage
from layerstore.zero3 import (
    LATEST,
    LATEST_BYTES_MAX,
    RANDOM_STATE,
    SHARD_STEM,
    SUMMARY,
    Piece,
    Slices,
    TreeView,
    slice_length,
    sub_group_shapes,
    valid_elements,
)
from layerstore.zero3.pt import layout_pt

_SUMMARY_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a compose wrote."""

    run: str
    step: int
    policy: str
    world_size: int
    out: Path
    bytes_written: int
    seconds: float
    notes: tuple[str, ...]
    """What does not carry over to this world size, in plain sentences."""


def execute_compose(
    repo: Repository,
    composition: Composition,
    out: Path,
    *,
    world_size: int | None = None,
    adam_step: AdamStep = "unify",
    verify: bool = True,
    durable: bool = True,
    force: bool = False,
    progress: Progress,
) -> Written:
    """
    Write *composition* to the folder *out*, which appears whole or not at all; the options are `Composite.write`'s.

    Raises:
        AlreadyExists: *out* is there and *force* was not given.
        IntegrityError: An object is damaged or missing; nothing is left at *out*.
        LayoutMismatch: A layer does not fit the base, or the base cannot be had for *world_size* ranks.
    """
    started = time.monotonic()
    base, tag = composition.base, composition.base.layout.tag
    target = checked_target(repo, out, what="a checkpoint", signs=(LATEST,), force=force)
    ranks = plan_ranks(repo, composition, world_size=world_size, adam_step=adam_step)
    summary = {
        "schema": _SUMMARY_SCHEMA,
        **composition.summary(),
        "world_size": ranks.world_size,
        "adam_step": adam_step,
        "notes": [*composition.notes, *ranks.notes],
    }
    last = {SUMMARY: json.dumps(summary, indent=2, ensure_ascii=False).encode() + b"\n", LATEST: tag.encode()}
    with (
        appearing(repo, target, is_older_form=_older_form(repo, target.path, tag=tag)) as partial,
        assembling(repo, partial, verify=verify, durable=durable, last=last, progress=progress) as assembly,
    ):
        _assemble(assembly, ranks, own=composition.own_parameters(ranks.versions))
    return Written(
        run=base.run,
        step=base.step,
        policy=composition.policy,
        world_size=ranks.world_size,
        out=target.path,
        bytes_written=assembly.bytes_written,
        seconds=time.monotonic() - started,
        notes=ranks.notes,
    )


def _assemble(assembly: Assembly, ranks: RankStates, *, own: frozenset[str]) -> None:
    """Write the files of all ranks; *own* are the parameters that the base itself saved."""
    slices, count = ranks.slices, ranks.world_size
    assembly.progress.start("compose", slices.size_bytes)
    gathered = []
    for state in ranks:
        # Every rank supplies slices of gathered weights, so these files stay open until the last one has.
        gathered += [(of, assembly.open_shared(_plan_gathered(of))) for of in state.gathered]
        shared = [
            (file, merged(_gathered_pieces(of, slices, rank=state.rank, world_size=count))) for of, file in gathered
        ]
        beside = (plan_beside(assembly.repo, file, slices, own=own) for file in state.files)
        assembly.write(itertools.chain(_Rank(ranks, state).tree_files(), beside), shared)
    for of, _ in gathered:
        # Of a layer that the base saved itself, even the derived bytes are known.
        assembly.check_converted(of.path, _derived_checks(of, slices, unchanged=own.__contains__))


def _older_form(repo: Repository, target: Path, *, tag: str) -> Callable[[Path], bool]:
    """Return a test for files of the older checkpoint at *target*, whose step and number of ranks may differ."""
    latest = target / LATEST
    named = repo.files.read(latest, size_bytes_max=LATEST_BYTES_MAX) if latest.exists() else b""
    tags = {tag, named.decode(errors="replace").strip()}

    def is_older_form(path: Path) -> bool:
        is_shard = path.parts[0] in tags and (len(path.parts) == 1 or bool(SHARD_STEM.fullmatch(path.stem)))
        return is_shard or bool(RANDOM_STATE.fullmatch(str(path)))

    return is_older_form


# -- one rank ------------------------------------------------------------------------------------------------------


class _Rank:
    """One rank of a composite: what fills the storages of its trees."""

    def __init__(self, ranks: RankStates, state: RankState) -> None:
        self._state = state
        self._slices = ranks.slices
        self._world_size = ranks.world_size
        self._groups = sub_group_shapes(TreeView.of(state.model))

    def tree_files(self) -> Iterator[OutputFile]:
        """Yield the plans of the rank's two ``.pt`` files."""
        return map(self._plan, (self._state.model, self._state.optimizer))

    def _plan(self, file: TreeFile) -> OutputFile:
        layout = layout_pt(file.tree, name=PurePosixPath(file.path).stem)
        known: dict[Storage, int] = {}
        fillings: dict[Storage, tuple[int, list[Piece]]] = {}
        literals: list[tuple[int, bytes]] = []
        pieces: list[Piece] = []
        for storage, offset in layout.storages:
            content = storage.content
            if isinstance(content, bytes):
                known[storage] = crc32(content)
                literals.append((offset, content))
            elif isinstance(content, ObjectContent):
                known[storage] = content.crc32
                pieces.append(whole(content, offset))
            else:
                filling = self.filling(storage, path=file.path)
                pieces += (
                    replace(part, offset=offset + part.offset, is_measured=part.crc32 is None) for part in filling
                )
                fillings[storage] = offset, filling

        def skeleton(measured: Mapping[int, int]) -> Literals:
            """Return the bytes around the payloads, given the *measured* checksums of pieces by offset in the file."""
            found = {of: _combined(of, filling, offset, measured) for of, (offset, filling) in fillings.items()}
            return tuple(layout.skeleton({**known, **found}))

        is_measured = any(piece.is_measured for piece in pieces)
        return OutputFile(
            path=file.path,
            size_bytes=layout.size_bytes,
            literals=(*literals, *(() if is_measured else skeleton({}))),
            pieces=merged(pieces),
            finish=skeleton if is_measured else None,
        )

    def filling(self, storage: Storage, *, path: str) -> list[Piece]:
        """
        Return what fills *storage*, in order, each piece with its offset in it; the bytes between are padding: zeros.

        Raises:
            LayoutMismatch: The chosen layers have more or fewer bytes for it.
        """
        filling: list[Piece] = []
        end, rank, world_size, slices = 0, self._state.rank, self._world_size, self._slices
        for kind, name, state in self._members(storage):
            if kind is Kind.BUFFERS:
                # Where every rank saved its own buffer, additional ranks get a copy of rank 0's.
                shard = rank if rank < slices.shards(kind, name) else 0
                filling.append(slices.find(kind, name, shard=shard).piece(end))
                end += filling[-1].size_bytes
                continue
            elements = prod(slices.parameter(name).shape)
            length, valid = slice_length(elements, world_size), valid_elements(elements, world_size, rank)
            if valid:
                filling += slices.pieces(
                    kind,
                    name,
                    state=state,
                    dtype=storage.dtype,
                    offset=end,
                    begin=rank * length,
                    end=rank * length + valid,
                    as_stored=True,
                )
            end += length * by_code(storage.dtype).bytes
        if end != _size_bytes(storage):
            raise LayoutMismatch(f"{path}: the chosen layers fill {end} bytes of a buffer of {_size_bytes(storage)}")
        return filling

    def _members(self, storage: Storage) -> Iterator[tuple[Kind, str, str]]:
        """Yield the slices in *storage*, in order, by kind, name and optimizer state."""
        match storage.content:
            case FlatContent(state=state, group=group):
                yield from ((Kind.OPTIMIZER if state else Kind.MASTER, name, state) for name in self._groups[group])
            case FragmentContent(parameter=name):
                yield Kind.WEIGHTS, name, ""
            case BufferContent(buffer=name):
                yield Kind.BUFFERS, name, ""
            case content:
                raise IntegrityError(f"a storage has content that cannot be written: {type(content).__name__}")


def _combined(storage: Storage, filling: list[Piece], offset: int, measured: Mapping[int, int]) -> int:
    """Return the checksum of a *storage* at *offset* in its file."""
    parts, end = [], 0
    for piece in filling:
        parts.append(_zeros(piece.offset - end))
        parts.append((measured[offset + piece.offset] if piece.crc32 is None else piece.crc32, piece.size_bytes))
        end = piece.offset + piece.size_bytes
    return combine_crc32([*parts, _zeros(_size_bytes(storage) - end)])


def _zeros(size_bytes: int) -> tuple[int, int]:
    return crc32_of_zeros(size_bytes), size_bytes


def _size_bytes(storage: Storage) -> int:
    return storage.elements * by_code(storage.dtype).bytes


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
        self._rank = _Rank(ranks, self.state)
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
            read_stretch(self._repo, content.object, whole(content, 0).object_offset, target)
            return
        pieces = self._rank.filling(storage, path=self.state.optimizer.path)
        self._verify({piece.object.id: piece.object for piece in pieces})
        end = 0
        for piece in pieces:
            target[end : piece.offset] = bytes(piece.offset - end)
            end = piece.offset + piece.size_bytes
            read_stretch(self._repo, piece.object, piece.object_offset, target[piece.offset : end])
        target[end:] = bytes(len(target) - end)

    def _verify(self, objects: Mapping[str, BlobRef]) -> None:
        with ThreadPoolExecutor(WORKERS_MAX) as pool:
            for _ in pool.map(self._repo.objects.verify, (objects[key] for key in objects.keys() - self._verified)):
                pass  # raises where one is damaged
        self._verified |= objects.keys()

    def content(self, content: bytes | ObjectContent) -> bytes:
        """Return what a file beside the trees holds."""
        return content_of(self._repo, content)


# -- gathered weights ----------------------------------------------------------------------------------------------


def _plan_gathered(file: GatheredFile) -> OutputFile:
    """Return the plan of *file* without its tensors, which `_gathered_pieces` supplies rank by rank."""
    return OutputFile(
        path=file.path,
        size_bytes=len(file.header) + sum(_tensor_bytes(tensor) for tensor in file.tensors),
        literals=((0, file.header),),
    )


def _gathered_pieces(file: GatheredFile, slices: Slices, *, rank: int, world_size: int) -> Iterator[Piece]:
    """Yield the pieces that *rank* of *world_size* supplies to *file*; rank 0 supplies tensors that are not cut."""
    for tensor, offset in _placed_tensors(file):
        if tensor.source is TensorSource.PARAMETER:
            yield from _slice_pieces(tensor, slices, rank=rank, world_size=world_size, offset=offset)
        elif rank:
            continue
        elif tensor.source is TensorSource.BUFFER:
            yield slices.find(Kind.BUFFERS, tensor.layer_name, shard=0).piece(offset)
        else:
            assert tensor.stored is not None
            yield whole(tensor.stored, offset)


def _derived_checks(file: GatheredFile, slices: Slices, *, unchanged: Callable[[str], bool]) -> Iterator[DerivedCheck]:
    """Yield the derived tensors whose checksums are known: those of parameters that are *unchanged* since the save."""
    for tensor, offset in _placed_tensors(file):
        if tensor.source is not TensorSource.PARAMETER or not tensor.elements or not unchanged(tensor.layer_name):
            continue
        if slices.weights_kind(tensor.layer_name, tensor.dtype) is Kind.MASTER:
            yield DerivedCheck(name=tensor.name, offset=offset, size_bytes=_tensor_bytes(tensor), crc32=tensor.crc32)


def _placed_tensors(file: GatheredFile) -> Iterator[tuple[GatheredTensor, int]]:
    offset = len(file.header)
    for tensor in file.tensors:
        yield tensor, offset
        offset += _tensor_bytes(tensor)


def _tensor_bytes(tensor: GatheredTensor) -> int:
    return tensor.elements * by_code(tensor.dtype).bytes


def _slice_pieces(
    tensor: GatheredTensor, slices: Slices, *, rank: int, world_size: int, offset: int
) -> Iterator[Piece]:
    """Yield the slices that *rank* supplies: those that its own files start with, whose objects are still cached."""
    name = tensor.layer_name
    kind = slices.weights_kind(name, tensor.dtype)
    shards = slices.shards(kind, name) or 1
    length = slice_length(tensor.elements, shards)
    first, last = (-(-number * shards // world_size) for number in (rank, rank + 1))
    begin, end = min(first * length, tensor.elements), min(last * length, tensor.elements)
    if begin < end:
        offset += begin * by_code(tensor.dtype).bytes
        yield from slices.pieces(kind, name, dtype=tensor.dtype, offset=offset, begin=begin, end=end)
