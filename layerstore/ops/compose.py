"""
Compose: a commit, or any choice of layer versions, becomes a ZeRO-3 checkpoint on disk.

Everything is written beside the target and renamed to it when it is whole, verified and durable.
One thread moves bytes while another verifies ahead of it: two movers would only fight for the disk.
"""

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from layerstore.errors import AlreadyExists, IntegrityError, InvalidInput, StorageIO
from layerstore.limits import IO_CHUNK_BYTES
from layerstore.model import BlobRef, CommitRecord, GatheredFile, LayerEntry, RankState
from layerstore.ops.progress import Progress
from layerstore.ops.refs import Resolved
from layerstore.ops.rooms import Rooms
from layerstore.policy import selector
from layerstore.storage.files import NewFile, mapped_errors
from layerstore.zero3.discover import LATEST
from layerstore.zero3.rounding import round_master
from layerstore.zero3.write import OutputFile, Piece, Slices, gathered_pieces, merged, plan_gathered, plan_rank

# How many objects may be verified ahead of the copy: enough to keep both threads busy.
_AHEAD_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """A composite before it is written: pure data."""

    base: CommitRecord
    """Supplies all that is not a layer."""
    commit: str
    """The base's id."""
    policy: str
    layers: tuple[LayerEntry, ...]
    """The chosen version of every layer, in the model's order."""


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


def plan_compose(resolved: Resolved, *, policy: str = "latest") -> Composition:
    """Choose a version for each layer; raises as the policy does."""
    return Composition(
        base=resolved.record,
        commit=resolved.commit,
        policy=policy,
        layers=selector(policy)(resolved.record),
    )


def execute_compose(
    rooms: Rooms,
    composition: Composition,
    out: Path,
    *,
    verify: bool = True,
    durable: bool = True,
    force: bool = False,
    progress: Progress,
) -> Written:
    """
    Write *composition* to the folder *out*, which appears whole or not at all.

    Without *verify* only sizes are checked. Without *durable* a power cut may tear the folder.
    With *force* a folder that is there is replaced once the new one is complete.

    Raises:
        AlreadyExists: *out* is there and *force* was not given.
        IntegrityError: An object is damaged or missing; nothing is left at *out*.
    """
    started = time.monotonic()
    target = _checked_target(rooms, out, force=force)
    partial = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
    base = composition.base
    slices = Slices(rooms.version_of(entry) for entry in composition.layers)
    try:
        _make_folders(rooms, partial)
        writer = _Writer(rooms, partial, slices, base, verify=verify, durable=durable, progress=progress)
        bytes_written = writer.run()
        _move_into_place(rooms, partial, target)
    except BaseException:
        rooms.files.remove_tree(partial)
        raise
    return Written(
        run=base.run,
        step=base.step,
        policy=composition.policy,
        world_size=base.world_size,
        out=target,
        bytes_written=bytes_written,
        seconds=time.monotonic() - started,
    )


# -- the target ----------------------------------------------------------------------------------------------------


def _checked_target(rooms: Rooms, out: Path, *, force: bool) -> Path:
    try:
        with mapped_errors(out, doing="look at"):
            return _suitable_target(rooms, out, force=force)
    except ValueError as exc:
        if isinstance(exc, InvalidInput):
            raise
        raise InvalidInput(f"{out} is no path: {exc}", hint="choose another -o") from exc  # a NUL


def _suitable_target(rooms: Rooms, out: Path, *, force: bool) -> Path:
    target = Path.cwd() / out  # not resolved: a link at the target itself must be seen
    real, store = target.resolve(), rooms.layout.root
    if real == store or store in real.parents:
        raise InvalidInput(f"{out} is inside the store {store}", hint="choose a folder elsewhere with -o")
    if real in store.parents:
        raise InvalidInput(f"{out} contains the store {store}", hint="choose a folder elsewhere with -o")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise AlreadyExists(f"{out} is there and is not a folder; nothing was changed", hint="choose another -o")
    if target.exists() and any(target.iterdir()):
        _check_replaceable(target, force=force)
    return target


def _check_replaceable(target: Path, *, force: bool) -> None:
    if not force:
        raise AlreadyExists(
            f"{target} exists and is not empty; nothing was changed",
            hint="choose another folder with -o, or replace a checkpoint with --force",
        )
    # A slip of the pen must not cost a home folder.
    if not (target / LATEST).is_file():
        raise AlreadyExists(
            f"{target} is not a checkpoint (it has no file {LATEST!r}), so it is not replaced; nothing was changed",
            hint="choose another folder with -o, or remove it by hand",
        )


def _make_folders(rooms: Rooms, path: Path) -> None:
    """Make *path* and the parents that it lacks."""
    lacking = [path, *(parent for parent in path.parents if not parent.exists())]
    for folder in reversed(lacking):
        rooms.files.make_directory(folder)


def _move_into_place(rooms: Rooms, partial: Path, target: Path) -> None:
    files = rooms.files
    aside = None
    if target.exists():
        aside = target.with_name(f"{target.name}.replaced-{secrets.token_hex(4)}")
        files.rename(target, aside)
    try:
        files.rename(partial, target)
        files.sync_directory(target.parent)
    except BaseException:
        _move_back(rooms, partial, target, aside)
        raise
    if aside is not None:
        files.remove_tree(aside)


def _move_back(rooms: Rooms, partial: Path, target: Path, aside: Path | None) -> None:
    """Put back what was there; where even that fails it stays whole, under the name of *aside*."""
    with suppress(StorageIO):
        if not partial.exists():
            rooms.files.rename(target, partial)
        if aside is not None:
            rooms.files.rename(aside, target)


# -- writing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Task:
    """One object, and every place its bytes go."""

    object: BlobRef
    copies: tuple[tuple[NewFile, Piece], ...]
    roundings: tuple[tuple[NewFile, Piece], ...]


class _Writer:
    """One composite on its way to disk."""

    def __init__(
        self,
        rooms: Rooms,
        folder: Path,
        slices: Slices,
        base: CommitRecord,
        *,
        verify: bool,
        durable: bool,
        progress: Progress,
    ) -> None:
        self._rooms = rooms
        self._folder = folder
        self._slices = slices
        self._base = base
        self._verify = verify
        self._durable = durable
        self._progress = progress
        self._verified: set[str] = set()
        self._buffer = threading.local()
        self._bytes_written = 0

    def run(self) -> int:
        """Write all files, ``latest`` last; return their size."""
        rooms, base = self._rooms, self._base
        self._progress.start("compose", self._slices.size_bytes)
        with ExitStack() as stack:
            ahead = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="verify"))
            syncs = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="fsync"))
            pending: list[Future[None]] = []
            gathered: list[tuple[GatheredFile, NewFile]] = []
            for rank, ref in enumerate(base.states):
                state = rooms.state(ref)
                gathered += [(file, self._create(plan_gathered(file), stack)) for file in state.gathered]
                self._write_rank(state, rank, gathered, ahead, syncs, pending)
            for _, file in gathered:
                pending.append(syncs.submit(self._finish, file))
            for done in pending:
                done.result()
        self._write_latest()
        self._sync_folders()
        return self._bytes_written

    def _write_rank(  # noqa: PLR0917  # private, and called once
        self,
        state: RankState,
        rank: int,
        gathered: list[tuple[GatheredFile, NewFile]],
        ahead: ThreadPoolExecutor,
        syncs: ThreadPoolExecutor,
        pending: list[Future[None]],
    ) -> None:
        with ExitStack() as stack:
            outputs = [
                (self._create(output, stack), output.pieces)
                for output in plan_rank(state, self._slices, world_size=self._base.world_size)
            ]
            shared = [(file, tuple(merged(gathered_pieces(of, self._slices, rank=rank)))) for of, file in gathered]
            self._move(_tasks([*outputs, *shared]), ahead)
            # Handed over to be synced and closed: from here on the stack must not close them.
            stack.pop_all()
            pending += [syncs.submit(self._finish, file) for file, _ in outputs]

    def _create(self, output: OutputFile, stack: ExitStack) -> NewFile:
        path = self._folder / _inside(output.path)
        _make_folders(self._rooms, path.parent) if not path.parent.exists() else None
        file = stack.enter_context(self._rooms.files.create(path))
        file.set_size(output.size_bytes)
        for offset, data in output.literals:
            file.write_at(offset, data)
        if output.executable:
            file.make_executable()
        self._bytes_written += output.size_bytes
        return file

    def _finish(self, file: NewFile) -> None:
        try:
            if self._durable:
                file.sync()
        finally:
            file.close()

    def _move(self, tasks: Iterable[_Task], ahead: ThreadPoolExecutor) -> None:
        """Copy every task's bytes, each object verified before its bytes are counted as good."""
        waiting: deque[tuple[_Task, Future[None]]] = deque()
        try:
            for task in tasks:
                waiting.append((task, ahead.submit(self._prepare, task)))
                if len(waiting) > _AHEAD_MAX:
                    self._copy(*waiting.popleft())
            while waiting:
                self._copy(*waiting.popleft())
        except BaseException:
            for _, future in waiting:
                future.cancel()
            raise

    def _prepare(self, task: _Task) -> None:
        """Verify the object, and round what is to be rounded while its pages are warm."""
        if self._verify and task.object.id not in self._verified:
            self._rooms.objects.verify(task.object)
            self._verified.add(task.object.id)
        if task.roundings:
            with self._rooms.objects.open(task.object) as source:
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
        with self._rooms.objects.open(task.object) as source:
            for file, piece in task.copies:
                file.copy_from(source, piece.object_offset, piece.offset, piece.size_bytes)
                self._progress.advance(piece.size_bytes)
        prepared.result()

    def _write_latest(self) -> None:
        data = self._base.layout.tag.encode()
        with self._rooms.files.create(self._folder / LATEST) as file:
            file.write_at(0, data)
            if self._durable:
                file.sync()
        self._bytes_written += len(data)

    def _sync_folders(self) -> None:
        if self._durable:
            for folder, _, _ in os.walk(self._folder):
                self._rooms.files.sync_directory(Path(folder))


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
