"""
Plan files as pieces of objects, with `OutputFile` and `Archives`, and move the bytes into a new folder.

One thread copies, others verify and convert ahead of it, and others sync complete files. Two copying threads would only
compete for the disk. Memory use does not grow with the model.
"""

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from layerstore.assemble.read import check_decoded, chunks_of, read_mean
from layerstore.assemble.target import Writing
from layerstore.disk import NewFile, Syncing
from layerstore.errors import IntegrityError
from layerstore.hashing import combine_crc32, crc32, crc32_of_zeros
from layerstore.layers import is_inside
from layerstore.limits import PAGE_BYTES
from layerstore.model import BlobRef
from layerstore.numbers import convert, newly_infinite
from layerstore.progress import Progress
from layerstore.slices import Piece
from layerstore.states import ObjectContent, SourceFile
from layerstore.storage import Hashing, Repository
from layerstore.threads import Threads
from layerstore.tree import Storage, Tree
from layerstore.zero3.pt import PtLayout, WrittenPickles, layout_pt

# How many objects may be verified ahead of the copy: enough to keep all threads busy.
_AHEAD_MAX = 4


# Files written at a time: thousands must not exhaust the descriptors.
_OPEN_MAX = 16

_AS_IS = ("U8", "U8")

Literals = tuple[tuple[int, bytes], ...]
"""(offset, bytes)."""


# -- plans of files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One file to write; bytes that neither literals nor pieces cover are zero."""

    path: str
    """Below the checkpoint folder, with ``/``."""
    size_bytes: int
    executable: bool = False
    literals: Literals = ()
    pieces: tuple[Piece, ...] = ()
    finish: Callable[[Mapping[int, int]], Literals] | None = None
    """Returns the literals that depend on measured checksums; called with these checksums, by offset in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedCheck:
    """The checksum of a derived tensor as it was saved: rounding the master again must reproduce it."""

    name: str
    offset: int
    """Where it starts in the file."""
    size_bytes: int
    crc32: int


def literal_file(path: str, data: bytes, *, executable: bool = False) -> OutputFile:
    """Plan a file that consists of *data*."""
    return OutputFile(path=path, size_bytes=len(data), executable=executable, literals=((0, data),))


def plan_source_file(file: SourceFile) -> OutputFile:
    """Plan a file that is kept byte for byte."""
    content = file.content
    if isinstance(content, bytes):
        return literal_file(file.path, content, executable=file.executable)
    pieces = (whole(content, 0),)
    return OutputFile(path=file.path, size_bytes=content.size_bytes, executable=file.executable, pieces=pieces)


def whole(content: ObjectContent, offset: int) -> Piece:
    """Return the piece that copies a stored file or storage to *offset*."""
    return Piece(object=content.object, object_offset=content.begin, size_bytes=content.size_bytes, offset=offset)


def merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Join pieces that are adjacent both in the object and in the file, so that one call moves them."""
    joined: list[Piece] = []
    end = object_end = -1  # where the last piece ends; -1 unless it is plain, since only plain pieces are joined
    for piece in pieces:
        # Conversions, decoding and measured checksums apply to a single piece.
        is_plain = not (piece.rounding or piece.is_coded or piece.is_measured)
        is_next = is_plain and piece.offset == end and piece.object_offset == object_end
        if is_next and piece.object == joined[-1].object:
            joined[-1] = replace(joined[-1], size_bytes=joined[-1].size_bytes + piece.size_bytes, crc32=None)
        else:
            joined.append(piece)
        end = piece.offset + piece.size_bytes if is_plain else -1
        object_end = piece.object_offset + piece.size_bytes
    return tuple(joined)


def checksum(pieces: Iterable[Piece], measured: Mapping[int, int], *, offset: int, size_bytes: int) -> int:
    """
    Return the checksum of the *size_bytes* bytes from *offset*, which *pieces* fill in order; gaps are zeros.

    *measured* has the checksums of pieces that have no stored checksum, by offset in the file.
    """
    parts, end = [], offset
    for piece in pieces:
        if piece.offset > end:
            parts.append(_zeros(piece.offset - end))
        length = piece.size_bytes if piece.rounding is None else piece.written_bytes
        parts.append((measured[piece.offset] if piece.crc32 is None else piece.crc32, length))
        end = piece.offset + length
    return combine_crc32([*parts, _zeros(offset + size_bytes - end)])


def _zeros(size_bytes: int) -> tuple[int, int]:
    return crc32_of_zeros(size_bytes), size_bytes


# -- plans of torch.save's files -----------------------------------------------------------------------------------

Fill = Callable[[Storage, int], Iterable[Piece]]
"""Returns the pieces that fill a storage, in order, given its offset in the file; gaps are zeros."""


@dataclass(slots=True)
class Archives:
    """The plan of a ``torch.save`` file in the making: one archive, or several in sequence, filled from objects."""

    path: str
    size_bytes: int = 0
    _literals: list[tuple[int, bytes]] = field(default_factory=list)
    _pieces: list[Piece] = field(default_factory=list)
    _archives: list[tuple[int, PtLayout, dict[Storage, int], dict[Storage, tuple[int, list[Piece]]]]] = field(
        default_factory=list
    )
    """Start and layout of each archive, the known checksums by storage, and the pieces that fill the other storages."""

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
        Add *tree*, with *fill* for the storages whose bytes are slices; return its archive's start and size.

        Large payloads should be aligned to whole pages, which the kernel can copy or share; *name* is the name of the
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
                filled[storage] = (
                    offset,
                    [
                        piece if piece.crc32 is not None else replace(piece, is_measured=True)
                        for piece in fill(storage, offset)
                    ],
                )
                self._pieces += filled[storage][1]
        self._archives.append((begin, layout, known, filled))
        self.size_bytes = begin + layout.size_bytes
        return begin, layout.size_bytes

    def output(self) -> OutputFile:
        """Return the plan of the file."""
        is_measured = any(map(attrgetter("is_measured"), self._pieces))
        return OutputFile(
            path=self.path,
            size_bytes=self.size_bytes,
            literals=(*self._literals, *(() if is_measured else self._skeletons({}))),
            pieces=merged(self._pieces),
            finish=self._skeletons if is_measured else None,
        )

    def _skeletons(self, measured: Mapping[int, int]) -> Literals:
        """Return the bytes around the payloads, given the *measured* checksums of pieces by offset in the file."""
        literals: list[tuple[int, bytes]] = []
        for begin, layout, known, filled in self._archives:
            measured_now = {
                storage: checksum(pieces, measured, offset=offset, size_bytes=storage.size_bytes)
                for storage, (offset, pieces) in filled.items()
            }
            literals += ((begin + at, data) for at, data in layout.skeleton({**known, **measured_now}))
        return tuple(literals)


# -- writing it ----------------------------------------------------------------------------------------------------

Supply = tuple[NewFile, Sequence[Piece]]
"""A file and the pieces that are moved into it."""


class Converted(NamedTuple):
    """A piece that was written through memory: converted, decoded or only measured."""

    crc32: int
    size_bytes: int
    """In the output file."""
    newly_infinite: int
    """How many finite values were beyond the range of the new type."""


@dataclass(frozen=True, slots=True)
class _Task:
    """One object, or all objects of a mean, and all destinations of their bytes."""

    objects: tuple[BlobRef, ...]
    copies: list[tuple[NewFile, Piece]] = field(default_factory=list)
    conversions: list[tuple[NewFile, Piece]] = field(default_factory=list)
    """The pieces that are computed from the objects' bytes: rounded, averaged or decoded."""


@contextmanager
def assembling(
    repo: Repository,
    folder: Path,
    how: Writing,
    *,
    is_export: bool = False,
    has_means: bool = False,
    last: Mapping[str, bytes] | None = None,
    progress: Progress,
) -> Iterator["Assembly"]:
    """
    Yield an `Assembly` that writes files to *folder*; after the body they are complete, and synced if *how* is durable.

    *last* are small files, in order, that must not appear before all others are complete. In an export, conversions
    are the work itself: they get one more thread and count as progress, and new infinities are counted. Means get
    three more threads.
    """
    # One hashing thread saturates the memory bus; two share the work if bytes are also rounded or decoded. A mean of
    # ten saves reads twenty times what it writes: with four threads, some read while others compute.
    threads = 4 if has_means else 2 if is_export or repo.coded or not how.verify else 1
    with (
        Threads(threads, thread_name_prefix="verify") as ahead,
        closing(Syncing(durable=how.durable)) as syncing,
        ExitStack() as stack,
    ):
        assembly = Assembly(
            repo=repo,
            folder=folder,
            how=how,
            is_export=is_export,
            progress=progress,
            _ahead=ahead,
            _syncing=syncing,
            _stack=stack,
        )
        yield assembly
        stack.pop_all()  # these files must be synced before they are closed
        syncing.add(assembly._shared)
        syncing.wait()
        # Only once all others are on disk: these files mark the folder as complete.
        for path, data in (last or {}).items():
            assembly.bytes_written += len(data)
            with repo.files.create(folder / path) as file:
                file.write_at(0, data)
                if how.durable:
                    file.sync()
        if how.durable:
            syncing.sync_each(repo.files.sync_directory, (Path(directory) for directory, _, _ in os.walk(folder)))


@dataclass(slots=True, kw_only=True)
class Assembly:
    """The files of one folder while they are written."""

    repo: Repository
    folder: Path
    how: Writing
    is_export: bool
    progress: Progress
    bytes_written: int = 0
    converted: dict[Path, dict[int, Converted]] = field(default_factory=dict)
    """By file and offset."""
    _ahead: ThreadPoolExecutor
    _syncing: Syncing
    _stack: ExitStack
    _shared: list[NewFile] = field(default_factory=list)
    """Files that stay open until the end."""
    _claimed: set[BlobRef] = field(default_factory=set)
    """Objects that a task has verified or will verify: a damaged object fails its task and the whole assembly."""

    def open_shared(self, output: OutputFile) -> NewFile:
        """Create a file that is supplied by several calls of `write`; it stays open until the end."""
        file = self._create(output, self._stack)
        self._shared.append(file)
        return file

    def write(self, outputs: Iterable[OutputFile], shared: Sequence[Supply] = ()) -> None:
        """
        Write *outputs*, and the *shared* pieces of files that stay open. Everything that is copied from one object is
        copied together, while the object's pages are warm.

        Raises:
            IntegrityError: An object is damaged or missing; the folder is then useless.
        """
        outputs = iter(outputs)
        while (batch := list(islice(outputs, _OPEN_MAX))) or shared:
            with ExitStack() as stack:
                own = [(self._create(output, stack), output) for output in batch]
                self._move([*((file, output.pieces) for file, output in own), *shared])
                for file, output in own:
                    if output.finish is not None:
                        parts = self.converted.pop(file.path, {})
                        literals = output.finish({offset: part.crc32 for offset, part in parts.items()})
                        for offset, data in _joined(literals):
                            file.write_at(offset, data)
                stack.pop_all()  # complete: they are closed once they are synced
            self._syncing.add(file for file, _ in own)
            shared = ()

    def check_converted(self, path: str, checks: Iterable[DerivedCheck]) -> None:
        """Raise if a tensor of the file *path* was rounded to bits that differ from the saved ones."""
        if not self.how.verify:
            return
        parts = self.converted.get(self.folder / path, {})
        starts = sorted(parts)
        for check in checks:
            begin, end = (bisect_left(starts, at) for at in (check.offset, check.offset + check.size_bytes))
            covered = [parts[start] for start in starts[begin:end]]
            # Nothing is covered if the weights were stored, and so were copied instead of rounded.
            if covered and combine_crc32((part.crc32, part.size_bytes) for part in covered) != check.crc32:
                raise IntegrityError(
                    f"{path}: {check.name!r}, rounded from its master, does not match its saved checksum",
                    hint="another numpy or processor may round NaNs differently: compose on the machine that saved it",
                )

    def _create(self, output: OutputFile, stack: ExitStack) -> NewFile:
        path = self.folder / inside(output.path)
        self.repo.files.make_directories(path.parent)
        file = stack.enter_context(self.repo.files.create(path, sync_ahead=self.how.durable))
        file.set_size(output.size_bytes)
        for offset, data in _joined(output.literals):
            file.write_at(offset, data)
        if output.executable:
            file.make_executable()
        self.bytes_written += output.size_bytes
        return file

    def _move(self, supplies: Iterable[Supply]) -> None:
        """Move the bytes of all *supplies*; raise if an object turns out to be damaged, before or after its copy."""
        tasks = _tasks(supplies)
        with self.repo.objects.expected(ref for task in tasks for ref in self.repo.read_with(task.objects)) as objects:
            self._do(tasks, replace(self.repo, objects=objects))

    def _do(self, tasks: Collection[_Task], repo: Repository) -> None:
        waiting: deque[tuple[_Task, Future[None]]] = deque()
        try:
            for task in tasks:
                waiting.append((task, self._ahead.submit(self._prepare, repo, task)))
                if len(waiting) > _AHEAD_MAX:
                    self._copy(repo, *waiting.popleft())
            while waiting:
                self._copy(repo, *waiting.popleft())
        finally:
            # After an error, tasks that have not begun need not begin.
            for _, future in waiting:
                future.cancel()

    def _prepare(self, repo: Repository, task: _Task) -> None:
        """Verify the objects, and convert the pieces that need conversion while the objects' pages are warm."""
        unverified = {*repo.read_with(task.objects)} - self._claimed if self.how.verify else set()
        # Without a lock: at worst, an object that two tasks claim at once is verified twice.
        self._claimed |= unverified
        if len(task.objects) > 1:
            # Not hashed while read: a coded object, which is decoded on the way, and its reference, read only in part.
            hashing = Hashing(unverified & {*task.objects} - repo.coded.keys())
            for ref in unverified - hashing.refs:
                repo.objects.verify(ref)
            # In the order of the bytes, so that they are hashed as they are read; going back would read them twice.
            for file, piece in sorted(task.conversions, key=lambda conversion: conversion[1].object_offset):
                self._convert(read_mean(repo, piece, hashing), "F32", file, piece)
            hashing.check(repo.objects)
        else:
            for ref in unverified:
                repo.objects.verify(ref)
            if task.conversions:
                with repo.open_object(task.objects[0]) as source:
                    for file, piece in task.conversions:
                        self._convert(chunks_of(source, piece), (piece.rounding or _AS_IS)[0], file, piece)

    def _convert(self, chunks: Iterable[bytes | memoryview], source: str, file: NewFile, piece: Piece) -> None:
        """Write *chunks*, which hold the elements of *piece* as the type *source*."""
        _, target = piece.rounding or _AS_IS
        offset, checksum, infinite = piece.offset, 0, 0
        for data in chunks:
            converted = convert(data, source=source, target=target)
            if self.is_export and piece.rounding is not None:
                infinite += newly_infinite(data, converted, source=source, target=target)
            file.write_at(offset, converted)
            offset, checksum = offset + len(converted), crc32(converted, checksum)
        check_decoded(piece, checksum)
        result = Converted(checksum, offset - piece.offset, infinite)
        self.converted.setdefault(file.path, {})[piece.offset] = result
        # Shards have both masters and their roundings: progress counts the masters' bytes alone.
        if self.is_export or piece.mean_of or piece.rounding is None:
            self.progress.advance(piece.size_bytes)

    def _copy(self, repo: Repository, task: _Task, prepared: Future[None]) -> None:
        if task.copies:
            with repo.objects.open(task.objects[0]) as source:
                for file, piece in task.copies:
                    if piece.is_measured:
                        # Through memory: no stored checksum covers a part of a slice.
                        self._convert(chunks_of(source, piece), _AS_IS[0], file, piece)
                    else:
                        file.copy_from(source, piece.object_offset, piece.offset, piece.size_bytes)
                        self.progress.advance(piece.size_bytes)
        # The object was copied while it was verified: if it is damaged, this raises, and the folder never appears.
        prepared.result()


def _joined(literals: Literals) -> Iterator[tuple[int, bytes]]:
    """Yield *literals*, joining adjacent ones: a file has hundreds of headers and small storages."""
    together: list[bytes] = []
    begin = end = 0
    for offset, data in sorted(literals):
        if offset != end and together:
            yield begin, b"".join(together)
            together = []
        if not together:
            begin = offset
        together.append(data)
        end = offset + len(data)
    if together:
        yield begin, b"".join(together)


def inside(path: str) -> str:
    """Return *path*, from a state blob, if it stays inside the folder that it is relative to; otherwise raise."""
    if not is_inside(path):
        raise IntegrityError(f"a commit's state names the file {path!r}, which would not be inside the folder")
    return path


def _tasks(supplies: Iterable[Supply]) -> Collection[_Task]:
    """Gather the pieces of all files by object, or by all objects of a mean."""
    tasks: dict[tuple[BlobRef, ...], _Task] = {}
    for file, pieces in supplies:
        # Adjacent pieces mostly come from one object; each such group takes one lookup.
        for _, together in groupby(pieces, attrgetter("object", "mean_of")):
            alike = list(together)
            objects = alike[0].objects
            task = tasks.setdefault(objects, _Task(objects))
            for piece in alike:
                is_copied = piece.rounding is None and not piece.is_coded
                (task.copies if is_copied else task.conversions).append((file, piece))
    return tasks.values()
