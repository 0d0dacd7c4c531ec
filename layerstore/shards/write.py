"""
The formats ``shards`` and ``zero3``: a composite as a ZeRO checkpoint that DeepSpeed resumes from.

Like ``hf``, these formats only plan their files; ``assemble`` and ``target`` write them. Only the trees of the base's
files are used. The engine's loader checks little, so we check every length. Padding is zeros. `RankLoad` fills
the memory of a rank with the same bytes, without files.
"""

import itertools
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from layerstore.assemble import (
    Archives,
    Assembly,
    DerivedCheck,
    Exported,
    OutputFile,
    Writing,
    appearing,
    assembling,
    checked_target,
    files_in,
    fill_pieces,
    merged,
    whole,
)
from layerstore.compose import Composition
from layerstore.dtypes import by_code
from layerstore.errors import IntegrityError, InvalidInput, LayoutMismatch
from layerstore.filenames import LATEST, LATEST_BYTES_MAX, RANDOM_STATE, SHARD_STEM, SUMMARY, is_shard
from layerstore.hf import plan_beside
from layerstore.model import BlobRef, Kind, OwnVersion
from layerstore.progress import Progress, Silent
from layerstore.rank_options import AdamStep, RankOptions
from layerstore.shards.ranks import RankStates, plan_ranks
from layerstore.shares import cut
from layerstore.slices import Piece, Slices, slice_length, valid_elements
from layerstore.states import (
    BufferContent,
    FlatContent,
    FragmentContent,
    GatheredFile,
    GatheredTensor,
    ObjectContent,
    RankState,
    TensorSource,
    TreeFile,
)
from layerstore.storage import Repository
from layerstore.tree import Storage
from layerstore.units import size
from layerstore.zero3.pt import WrittenPickles
from layerstore.zero3.trees import sharding_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Written(Exported):
    """The shards that were written; the notes list what does not carry over to this number of ranks."""

    world_size: int
    stage: int
    """The ZeRO stage."""

    def __repr__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"<Written {self.run}@{self.step}: for {ranks}, {size(self.bytes_written)} in {self.out}>"


def execute_compose(
    repo: Repository,
    composition: Composition,
    out: Path,
    options: RankOptions,
    how: Writing,
    *,
    progress: Progress,
) -> Written:
    """
    Write *composition* to the folder *out*, which appears whole or not at all.

    Raises:
        AlreadyExists: *out* exists, and must not be replaced.
        IntegrityError: An object is damaged or missing; nothing is left at *out*.
        LayoutMismatch: A layer does not fit the base, or the base cannot be adapted to this number of ranks.
    """
    started = time.monotonic()
    base = composition.base
    target = checked_target(repo, out, what="a checkpoint", signs=(LATEST,), force=how.force)
    ranks = plan_ranks(repo, composition, options)
    facts = {"world_size": ranks.world_size, "adam_step": options.adam_step, "moments": options.moments}
    summary = composition.summary_file(ranks.notes, **facts)
    tag = ranks.tag
    # `latest` comes last, because it makes the folder a checkpoint.
    last = {SUMMARY: summary, LATEST: tag.encode()}
    with (
        appearing(repo, target, is_older_form=_older_form(repo, target.path, tag=tag)) as partial,
        assembling(
            repo,
            partial,
            how,
            has_means=composition.mean is not None,
            last=last,
            progress=progress,
        ) as assembly,
    ):
        work = _Work(composition=composition, folder=partial, options=options, how=how)
        mine, *theirs = _shares(ranks, count=repo.shares.count)
        with repo.shares.scatter_work(repo, write_ranks, [(work, part) for part in theirs]) as answers:
            _assemble(assembly, ranks, mine, own=composition.own_parameters(ranks.versions), is_lead=True)
            assembly.bytes_written += sum(answers())
    return Written(
        run=base.run,
        step=base.step,
        policy=composition.policy,
        world_size=ranks.world_size,
        stage=ranks.stage,
        format="zero3" if options.as_zero3 else "shards",
        out=target.path,
        files=files_in(target.path),
        bytes_written=assembly.bytes_written,
        seconds=time.monotonic() - started,
        notes=ranks.notes,
        how_to_load=_how_to_load(ranks.world_size, target.path),
    )


def _how_to_load(ranks: int, folder: Path) -> str:
    named = json.dumps(str(folder), ensure_ascii=False)  # as Python writes it
    load = f"engine.load_checkpoint({named}), or trainer.train(resume_from_checkpoint={named})"
    return f"resume on {ranks} rank{'' if ranks == 1 else 's'}: {load}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What another process needs to know to write some ranks' files."""

    composition: Composition
    folder: Path
    options: RankOptions
    how: Writing


@contextmanager
def write_ranks(repo: Repository, part: tuple[_Work, range]) -> Iterator[int]:
    """Write the files of some ranks for the leading process; yield their size."""
    work, mine = part
    ranks = plan_ranks(repo, work.composition, work.options)
    own = work.composition.own_parameters(ranks.versions)
    if not repo.files.is_directory(work.folder):
        raise InvalidInput(
            f"{work.folder}, which the first process has made, does not exist on {platform.node()}",
            hint="choose a folder with -o that all hosts see",
        )
    with assembling(
        repo,
        work.folder,
        work.how,
        has_means=work.composition.mean is not None,
        progress=Silent(),
    ) as assembly:
        _assemble(assembly, ranks, mine, own=own, is_lead=False)
    yield assembly.bytes_written


def plan_model_states(ranks: RankStates, *, path: str) -> OutputFile:
    """Plan the first rank's ``model_states`` alone, as the file *path*."""
    state = ranks.state(0)
    return _Rank(ranks, state).plan(replace(state.model, path=path), WrittenPickles())


def _shares(ranks: RankStates, *, count: int) -> list[range]:
    """Return the ranks whose files each of *count* processes writes; the first one also writes gathered weights."""
    gathered = sum(_plan_gathered(weights).size_bytes for weights in ranks.state(0).gathered) if count > 1 else 0
    sizes = [gathered] + [ranks.slices.size_bytes // ranks.world_size] * ranks.world_size
    # The first of *sizes* is the gathered weights', so an index is one more than the rank's number.
    return [range(max(share.start - 1, 0), max(share.stop - 1, 0)) for share in cut(sizes, count=count)]


def _assemble(assembly: Assembly, ranks: RankStates, mine: range, *, own: frozenset[str], is_lead: bool) -> None:
    """
    Write the files of the ranks *mine* and, if this process leads, the gathered weights, which all ranks supply.

    *own* are the parameters whose weights the base itself saved.
    """
    slices, count = ranks.slices, ranks.world_size
    assembly.progress.start("compose", slices.size_bytes * len(mine) // count)
    first, pickles = ranks.state(0), WrittenPickles()
    gathered = [(weights, assembly.open_shared(_plan_gathered(weights))) for weights in first.gathered if is_lead]
    for rank in range(count) if gathered else mine:
        # Every rank supplies slices of gathered weights, so these files stay open until the last rank has done so.
        shared = [
            (file, merged(_gathered_pieces(weights, slices, rank=rank, world_size=count))) for weights, file in gathered
        ]
        if rank in mine:
            state = ranks.state(rank) if rank else first
            beside = (plan_beside(ranks.repo, file, slices, own=own) for file in state.files)
            assembly.write(itertools.chain(_Rank(ranks, state).tree_files(pickles), beside), shared)
        else:
            assembly.write((), shared)
    for weights, _ in gathered:
        # Even derived bytes have known checksums, in layers that the base itself saved.
        assembly.check_converted(weights.path, _derived_checks(weights, slices, unchanged=own.__contains__))


def _older_form(repo: Repository, target: Path, *, tag: str) -> Callable[[Path], bool]:
    """Return a test for files of the older checkpoint at *target*, whose step and number of ranks may differ."""
    latest = target / LATEST
    named = repo.files.read(latest, size_bytes_max=LATEST_BYTES_MAX) if latest.exists() else b""
    tags = {tag, named.decode(errors="replace").strip()}

    def is_older_form(path: Path) -> bool:
        is_of_rank = path.parts[0] in tags and (len(path.parts) == 1 or is_shard(path.name))
        return is_of_rank or bool(RANDOM_STATE.fullmatch(str(path)))

    return is_older_form


# -- one rank ------------------------------------------------------------------------------------------------------


class _Rank:
    """One rank of a composite, and what fills the storages of its trees."""

    def __init__(self, ranks: RankStates, state: RankState) -> None:
        self._state = state
        self._slices = ranks.slices
        self._world_size = ranks.world_size
        self._has_moments = ranks.has_moments
        self._sharding = sharding_in(state)
        self._fragments_of = cache(lambda group: list(self._sharding.fragments(group, state.rank)))
        self._has_whole_model = not SHARD_STEM.fullmatch(PurePosixPath(state.model.path).stem)

    def tree_files(self, pickles: WrittenPickles) -> Iterator[OutputFile]:
        """Yield the plans of the rank's two ``.pt`` files; under stages 1 and 2, only rank 0 has the model's."""
        has_model = not self._has_whole_model or self._state.rank == 0
        files = (self._state.model, self._state.optimizer) if has_model else (self._state.optimizer,)
        return (self.plan(file, pickles) for file in files)

    def plan(self, file: TreeFile, pickles: WrittenPickles) -> OutputFile:
        """Return the plan of *file*, one of the rank's two files."""
        archive = Archives(file.path)
        archive.add(
            file.tree,
            lambda storage, offset: self.filling(storage, path=file.path, offset=offset),
            name=PurePosixPath(file.path).stem,
            pickles=pickles,
        )
        return archive.output()

    def filling(self, storage: Storage, *, path: str, offset: int = 0) -> list[Piece]:
        """
        Return the pieces that fill *storage*, which starts at *offset*, in order; gaps are padding and stay zero.

        Raises:
            LayoutMismatch: The chosen layers have more or fewer bytes than *storage*.
        """
        slices, rank, dtype = self._slices, self._state.rank, storage.dtype
        item_bytes = by_code(dtype).bytes
        match storage.content:
            case FlatContent(state=state, group=group):
                lengths = {self._sharding.elements(group, rank)}
                if not state:
                    # Stages 1 and 2 save masters without the padding at their end.
                    lengths.add(self._sharding.lean(group, rank))
                sizes = {length * item_bytes for length in lengths}
                filling = [
                    piece
                    for part in (self._fragments_of(group) if self._has_moments or not state else ())
                    for piece in slices.pieces(
                        Kind.OPTIMIZER if state else Kind.MASTER,
                        part.name,
                        state=state,
                        dtype=dtype,
                        offset=offset + part.start * item_bytes,
                        begin=part.begin,
                        end=part.begin + part.elements,
                        as_stored=True,
                    )
                ]
            case FragmentContent(parameter=name) if not self._has_whole_model:
                elements = prod(slices.parameter(name).shape)
                length = slice_length(elements, self._world_size)
                begin, valid = rank * length, valid_elements(elements, self._world_size, rank)
                sizes = {length * item_bytes}
                # Converted if need be: FSDP2 may keep frozen weights in another type than DeepSpeed, which rounds them.
                filling = slices.pieces(Kind.WEIGHTS, name, dtype=dtype, offset=offset, begin=begin, end=begin + valid)
            case BufferContent(buffer=name) if shards := slices.shards(Kind.BUFFERS, name):
                # If every rank saved its own buffer, additional ranks get a copy of rank 0's.
                buffer = slices.buffer(name, shard=rank if rank < shards else 0)
                sizes, filling = {buffer.size_bytes}, [buffer.piece(offset)]
            case FragmentContent(parameter=name) | BufferContent(buffer=name):
                # FSDP2 keeps a buffer as it keeps a frozen parameter.
                is_buffer = isinstance(storage.content, BufferContent)
                kind = Kind.WEIGHTS if is_buffer else slices.weights_kind(name, dtype)
                sizes = {prod(slices.parameter(name).shape) * item_bytes}
                filling = slices.pieces(kind, name, dtype=dtype, offset=offset)
            case content:
                raise IntegrityError(f"a storage has content that cannot be written: {type(content).__name__}")
        if storage.size_bytes not in sizes:
            raise LayoutMismatch(
                f"{path}: the chosen layers fill {min(sizes)} bytes of a buffer of {storage.size_bytes}"
            )
        return filling


class RankLoad:
    """One rank's share of a composite, for loading."""

    def __init__(
        self,
        repo: Repository,
        composition: Composition,
        *,
        rank: int,
        world_size: int,
        as_zero3: bool = False,
        adam_step: AdamStep = "unify",
        like: str | None = None,
        own_versions: Mapping[BlobRef, OwnVersion] = MappingProxyType({}),
    ) -> None:
        """
        Plan the load; all versions are read except *own_versions*.

        Raises:
            LayoutMismatch: The layers do not fit together, or cannot be adapted to *world_size* ranks.
        """
        # Only in this copy of the repository: own versions lack other ranks' objects, which all else needs.
        repo = replace(repo, own_versions=own_versions)
        options = RankOptions(world_size=world_size, as_zero3=as_zero3, adam_step=adam_step, like=like)
        ranks = plan_ranks(repo, composition, options, is_live=True)
        self.state = ranks.state(rank)
        self.stage = ranks.stage
        self.notes = ranks.notes
        """What does not carry over to this number of ranks."""
        self._rank = _Rank(ranks, self.state)
        self._repo = repo
        self._verified: set[BlobRef] = set()

    def fill(self, storage: Storage, target: memoryview) -> None:
        """Read the bytes of a *storage* of the state's trees into *target*, and verify them."""
        content = storage.content
        if isinstance(content, bytes):
            target[:] = content
            return
        if isinstance(content, ObjectContent):
            pieces = [whole(content, 0)]
        else:
            pieces = self._rank.filling(storage, path=self.state.optimizer.path)
        fill_pieces(self._repo, pieces, target, self._verified)

    def content(self, content: bytes | ObjectContent) -> bytes:
        """Return the content of a file that is not a tree."""
        return self._repo.content_of(content)


# -- gathered weights ----------------------------------------------------------------------------------------------


def _plan_gathered(file: GatheredFile) -> OutputFile:
    """Plan *file* without its tensors, which `_gathered_pieces` supplies rank by rank."""
    return OutputFile(
        path=file.path,
        size_bytes=len(file.header) + sum(_tensor_bytes(tensor) for tensor in file.tensors),
        literals=((0, file.header),),
    )


def _gathered_pieces(file: GatheredFile, slices: Slices, *, rank: int, world_size: int) -> Iterator[Piece]:
    """Yield the pieces that *rank* of *world_size* supplies to *file*; rank 0 supplies unsharded tensors."""
    for tensor, offset in _placed_tensors(file):
        if tensor.source is TensorSource.PARAMETER:
            yield from _slice_pieces(tensor, slices, rank=rank, world_size=world_size, offset=offset)
        elif rank:
            continue
        elif tensor.source is TensorSource.BUFFER:
            yield slices.buffer(tensor.layer_name).piece(offset)
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
    """Yield the slices that *rank* supplies: those that begin in its own share, as that share's objects are cached."""
    name = tensor.layer_name
    kind = slices.weights_kind(name, tensor.dtype)
    bounds = slices.bounds(kind, name) if tensor.elements else (0,)
    count = len(bounds) - 1
    begin, end = (bounds[-(-number * count // world_size)] for number in (rank, rank + 1))
    if begin < end:
        offset += begin * by_code(tensor.dtype).bytes
        yield from slices.pieces(kind, name, dtype=tensor.dtype, offset=offset, begin=begin, end=end)
