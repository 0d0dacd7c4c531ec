"""
Assemble a checkpoint's files from objects: the moving of bytes, without a word on which or where.

One thread copies while another verifies ahead of it and a third syncs what is complete:
two copying threads would only fight for the disk. Memory does not grow with the model.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from layerstore.errors import IntegrityError
from layerstore.format.hashing import combine_crc32, crc32
from layerstore.limits import IO_CHUNK_BYTES
from layerstore.model import BlobRef, GatheredFile, RankState, SourceFile
from layerstore.ops.ranks import Ranks
from layerstore.progress import Progress
from layerstore.storage.handles import NewFile, OpenFile
from layerstore.storage.rooms import Rooms
from layerstore.zero3 import (
    LATEST,
    OutputFile,
    Piece,
    Slices,
    convert,
    derived_checks,
    gathered_pieces,
    merged,
    plan_gathered,
    plan_rank,
)

# How many objects may be verified ahead of the copy: enough to keep both threads busy.
_AHEAD_MAX = 4

# Files written at a time, and files that may wait for their fsync: a folder of thousands must not exhaust descriptors.
_OPEN_MAX = 16
_CLOSING_MAX = 64


@dataclass(frozen=True, slots=True)
class _Task:
    """One object, and every place its bytes go."""

    object: BlobRef
    copies: tuple[tuple[NewFile, Piece], ...]
    roundings: tuple[tuple[NewFile, Piece], ...]


@dataclass(slots=True, kw_only=True)
class Assembly:
    """One checkpoint on its way into *folder*."""

    rooms: Rooms
    folder: Path
    tag: str
    """DeepSpeed's folder, for ``latest``."""
    ranks: Ranks
    """Supplies all that is not a layer."""
    slices: Slices
    own_parameters: frozenset[str]
    """Parameters whose chosen version is the one that the base itself saved: of these even derived bytes are known."""
    plan_file: Callable[[SourceFile], OutputFile]
    """Says what becomes of a file beside the trees."""
    verify: bool
    durable: bool
    progress: Progress
    bytes_written: int = 0
    _verified: set[str] = field(default_factory=set)
    _rounded: dict[Path, dict[int, tuple[int, int]]] = field(default_factory=dict)
    """Checksum and size of what was rounded, by file and offset."""
    _cut: dict[Path, dict[int, int]] = field(default_factory=dict)
    """Checksum of each part of a slice that was copied, likewise."""

    def run(self) -> None:
        """
        Write all files, ``latest`` last.

        Raises:
            IntegrityError: An object is damaged or missing; the folder is of no use then.
        """
        self.progress.start("compose", self.slices.size_bytes)
        with (
            # Hashing fills the memory bus with one thread; where only rounding is left, two share it.
            ThreadPoolExecutor(1 if self.verify else 2, thread_name_prefix="verify") as ahead,
            _Closing(durable=self.durable) as closing,
            ExitStack() as stack,
        ):
            gathered: list[tuple[GatheredFile, NewFile]] = []
            for state in self.ranks.states():
                # Every rank supplies slices of these, so they stay open until the last one has.
                gathered += [(of, self._create(plan_gathered(of), stack)) for of in state.gathered]
                self._write_rank(state, gathered, ahead, closing)
            for of, file in gathered:
                self._check_derived(of, file)
            stack.pop_all()
            closing.take(file for _, file in gathered)
        self._write_latest()
        self._sync_folders()

    def _write_rank(
        self,
        state: RankState,
        gathered: list[tuple[GatheredFile, NewFile]],
        ahead: ThreadPoolExecutor,
        closing: "_Closing",
    ) -> None:
        """Write the files of one rank, and its share of the gathered weights beside the first of them."""
        world_size = self.ranks.world_size
        outputs = plan_rank(state, self.slices, world_size=world_size, plan_file=self.plan_file)
        shared = [
            (file, tuple(merged(gathered_pieces(of, self.slices, rank=state.rank, world_size=world_size))))
            for of, file in gathered
        ]
        while batch := list(islice(outputs, _OPEN_MAX)):
            with ExitStack() as stack:
                own = [(self._create(output, stack), output.pieces) for output in batch]
                self._move(_tasks([*own, *shared]), ahead)
                for (file, _), output in zip(own, batch, strict=True):
                    self._finish(file, output)
                stack.pop_all()  # whoever closes them has to sync them first
            closing.take(file for file, _ in own)
            shared = []

    def _check_derived(self, of: GatheredFile, file: NewFile) -> None:
        """Raise if a tensor that was rounded again is not, bit for bit, what it was when its masters were saved."""
        rounded = self._rounded.get(file.path, {})
        for check in derived_checks(of, self.slices, unchanged=self.own_parameters.__contains__) if self.verify else ():
            parts = sorted(start for start in rounded if check.offset <= start < check.offset + check.size_bytes)
            if parts and combine_crc32(rounded[start] for start in parts) != check.crc32:
                raise IntegrityError(
                    f"{of.path}: {check.name!r}, rounded from its master, is not what it was when it was saved",
                    hint="another numpy or processor may round NaNs differently: compose on the machine that saved it",
                )

    def _create(self, output: OutputFile, stack: ExitStack) -> NewFile:
        path = self.folder / _inside(output.path)
        self.rooms.files.make_directories(path.parent)
        file = stack.enter_context(self.rooms.files.create(path, sync_ahead=self.durable))
        file.set_size(output.size_bytes)
        for offset, data in output.literals:
            file.write_at(offset, data)
        if output.executable:
            file.make_executable()
        self.bytes_written += output.size_bytes
        return file

    def _finish(self, file: NewFile, output: OutputFile) -> None:
        """Write what depends on the checksums of bytes that had to be moved first."""
        cut = self._cut.pop(file.path, {})
        for offset, data in () if output.finish is None else output.finish(cut):
            file.write_at(offset, data)

    def _move(self, tasks: Iterable[_Task], ahead: ThreadPoolExecutor) -> None:
        """Copy every task's bytes; raise if an object turns out to be damaged, before or after its copy."""
        waiting: deque[tuple[_Task, Future[None]]] = deque()
        try:
            for task in tasks:
                waiting.append((task, ahead.submit(self._prepare, task)))
                if len(waiting) > _AHEAD_MAX:
                    self._copy(*waiting.popleft())
            while waiting:
                self._copy(*waiting.popleft())
        finally:
            for _, future in waiting:
                future.cancel()

    def _prepare(self, task: _Task) -> None:
        """Verify the object, and round what is to be rounded while its pages are warm."""
        if self.verify and task.object.id not in self._verified:
            self.rooms.objects.verify(task.object)
            self._verified.add(task.object.id)
        if task.roundings:
            with self.rooms.objects.open(task.object) as source:
                for file, piece in task.roundings:
                    assert piece.rounding is not None
                    master, weights = piece.rounding
                    offset, checksum = piece.offset, 0
                    for start in range(0, piece.size_bytes, IO_CHUNK_BYTES):
                        size_bytes = min(IO_CHUNK_BYTES, piece.size_bytes - start)
                        data = source.read_at(piece.object_offset + start, size_bytes)
                        rounded = convert(data, source=master, target=weights)
                        file.write_at(offset, rounded)
                        offset, checksum = offset + len(rounded), crc32(rounded, checksum)
                    self._rounded.setdefault(file.path, {})[piece.offset] = checksum, offset - piece.offset

    def _copy(self, task: _Task, prepared: Future[None]) -> None:
        with self.rooms.objects.open(task.object) as source:
            for file, piece in task.copies:
                if piece.is_cut:
                    self._copy_cut(source, file, piece)
                else:
                    file.copy_from(source, piece.object_offset, piece.offset, piece.size_bytes)
                self.progress.advance(piece.size_bytes)
        prepared.result()

    def _copy_cut(self, source: OpenFile, file: NewFile, piece: Piece) -> None:
        """Copy a part of a slice through memory: its checksum is stored nowhere, so its bytes must be seen."""
        checksum = 0
        for start in range(0, piece.size_bytes, IO_CHUNK_BYTES):
            data = source.read_at(piece.object_offset + start, min(IO_CHUNK_BYTES, piece.size_bytes - start))
            file.write_at(piece.offset + start, data)
            checksum = crc32(data, checksum)
        self._cut.setdefault(file.path, {})[piece.offset] = checksum

    def _write_latest(self) -> None:
        data = self.tag.encode()
        with self.rooms.files.create(self.folder / LATEST) as file:
            file.write_at(0, data)
            if self.durable:
                file.sync()
        self.bytes_written += len(data)

    def _sync_folders(self) -> None:
        if self.durable:
            for folder, _, _ in os.walk(self.folder):
                self.rooms.files.sync_directory(Path(folder))


class _Closing:
    """Syncs and closes finished files in the background; leaving it waits for all of them."""

    def __init__(self, *, durable: bool) -> None:
        self._durable = durable
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fsync")
        self._pending: deque[Future[None]] = deque()

    def take(self, files: Iterable[NewFile]) -> None:
        """Take over *files*, which are complete; wait if too many are open."""
        self._pending.extend(self._pool.submit(self._finish, file) for file in files)
        while len(self._pending) > _CLOSING_MAX:
            self._pending.popleft().result()

    def _finish(self, file: NewFile) -> None:
        with file:
            if self._durable:
                file.sync()

    def __enter__(self) -> "_Closing":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._pool.shutdown(wait=True)
        if error is None:
            for done in self._pending:
                done.result()


def _inside(path: str) -> str:
    """Return *path*, which a state blob gave, if it stays inside the folder that it is relative to."""
    if "\0" in path or not all(part not in {"", ".", ".."} for part in path.split("/")):
        raise IntegrityError(f"a commit's state names the file {path!r}, which would not be inside the checkpoint")
    return path


def _tasks(outputs: Iterable[tuple[NewFile, tuple[Piece, ...]]]) -> Iterator[_Task]:
    """Gather the pieces of all files by object: each is opened, verified and read once."""
    copies: dict[BlobRef, list[tuple[NewFile, Piece]]] = {}
    roundings: dict[BlobRef, list[tuple[NewFile, Piece]]] = {}
    for file, pieces in outputs:
        for piece in pieces:
            (copies if piece.rounding is None else roundings).setdefault(piece.object, []).append((file, piece))
    for ref in dict.fromkeys([*copies, *roundings]):
        yield _Task(ref, tuple(copies.get(ref, ())), tuple(roundings.get(ref, ())))
