"""
Assemble a checkpoint's files from objects: the moving of bytes, without a word on which or where.

One thread copies while another verifies ahead of it and a third syncs what is complete:
two copying threads would only fight for the disk. Memory does not grow with the model.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from layerstore.errors import IntegrityError
from layerstore.limits import IO_CHUNK_BYTES
from layerstore.model import BlobRef, CommitRecord, GatheredFile, RankState
from layerstore.ops.progress import Progress
from layerstore.ops.rooms import Rooms
from layerstore.storage.files import NewFile
from layerstore.zero3.discover import LATEST
from layerstore.zero3.rounding import round_master
from layerstore.zero3.write import OutputFile, Piece, Slices, gathered_pieces, merged, plan_gathered, plan_rank

# How many objects may be verified ahead of the copy: enough to keep both threads busy.
_AHEAD_MAX = 4


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
    base: CommitRecord
    """Supplies all that is not a layer."""
    slices: Slices
    verify: bool
    durable: bool
    progress: Progress
    bytes_written: int = 0
    _verified: set[str] = field(default_factory=set)

    def run(self) -> None:
        """
        Write all files, ``latest`` last.

        Raises:
            IntegrityError: An object is damaged or missing; the folder is of no use then.
        """
        self.progress.start("compose", self.slices.size_bytes)
        with (
            ThreadPoolExecutor(1, thread_name_prefix="verify") as ahead,
            _Closing(durable=self.durable) as closing,
            ExitStack() as stack,
        ):
            gathered: list[tuple[GatheredFile, NewFile]] = []
            for ref in self.base.states:
                state = self.rooms.state(ref)
                # Every rank supplies slices of these, so they stay open until the last one has.
                gathered += [(of, self._create(plan_gathered(of), stack)) for of in state.gathered]
                closing.take(self._write_rank(state, gathered, ahead))
            stack.pop_all()
            closing.take(file for _, file in gathered)
        self._write_latest()
        self._sync_folders()

    def _write_rank(
        self, state: RankState, gathered: list[tuple[GatheredFile, NewFile]], ahead: ThreadPoolExecutor
    ) -> list[NewFile]:
        """Write the files of one rank and its share of the gathered weights; return the former, still open."""
        with ExitStack() as stack:
            own = [
                (self._create(output, stack), output.pieces)
                for output in plan_rank(state, self.slices, world_size=self.base.world_size)
            ]
            shared = [(file, tuple(merged(gathered_pieces(of, self.slices, rank=state.rank)))) for of, file in gathered]
            self._move(_tasks([*own, *shared]), ahead)
            stack.pop_all()  # whoever closes them has to sync them first
        return [file for file, _ in own]

    def _create(self, output: OutputFile, stack: ExitStack) -> NewFile:
        path = self.folder / _inside(output.path)
        self.rooms.files.make_directories(path.parent)
        file = stack.enter_context(self.rooms.files.create(path))
        file.set_size(output.size_bytes)
        for offset, data in output.literals:
            file.write_at(offset, data)
        if output.executable:
            file.make_executable()
        self.bytes_written += output.size_bytes
        return file

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
                    offset = piece.offset
                    for start in range(0, piece.size_bytes, IO_CHUNK_BYTES):
                        size_bytes = min(IO_CHUNK_BYTES, piece.size_bytes - start)
                        data = source.read_at(piece.object_offset + start, size_bytes)
                        rounded = round_master(data, master=master, weights=weights)
                        file.write_at(offset, rounded)
                        offset += len(rounded)

    def _copy(self, task: _Task, prepared: Future[None]) -> None:
        with self.rooms.objects.open(task.object) as source:
            for file, piece in task.copies:
                file.copy_from(source, piece.object_offset, piece.offset, piece.size_bytes)
                self.progress.advance(piece.size_bytes)
        prepared.result()

    def _write_latest(self) -> None:
        data = self.base.layout.tag.encode()
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
        self._pending: list[Future[None]] = []

    def take(self, files: Iterable[NewFile]) -> None:
        """Take over *files*, which are complete."""
        self._pending += [self._pool.submit(self._finish, file) for file in files]

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
