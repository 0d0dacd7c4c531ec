"""
Fill the files of an export from objects, one file after another.

One thread verifies objects ahead of the one that moves their bytes. What stays as it is moves in the kernel;
what gets another element type passes through a chunk at a time, so memory does not grow with the model.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from layerstore.errors import IntegrityError
from layerstore.export.hf import ShardFile, member_bytes
from layerstore.format.hashing import combine_crc32, crc32
from layerstore.limits import IO_CHUNK_BYTES
from layerstore.model import BlobRef
from layerstore.progress import Progress
from layerstore.storage.handles import NewFile, OpenFile
from layerstore.storage.rooms import Rooms
from layerstore.zero3 import OutputFile, Piece, convert, newly_infinite

# How many objects may be verified ahead of the copy: enough to keep both threads busy.
_AHEAD_MAX = 4


@dataclass(slots=True, kw_only=True)
class Filling:
    """One export on its way into *folder*."""

    rooms: Rooms
    folder: Path
    verify: bool
    durable: bool
    progress: Progress
    _verified: set[str] = field(default_factory=set)
    _infinite: dict[str, int] = field(default_factory=dict)
    """How many values left the range of their new type, by tensor."""

    def run(self, files: Sequence[OutputFile], shards: Iterable[ShardFile]) -> None:
        """
        Write *files*, of which *shards* are those whose bytes may have to be converted.

        Raises:
            IntegrityError: An object is damaged or missing; the folder is of no use then.
        """
        self.progress.start("export", sum(piece.size_bytes for file in files for piece in file.pieces))
        by_name = {shard.name: shard for shard in shards}
        with ThreadPoolExecutor(1, thread_name_prefix="verify") as ahead:
            for file in files:
                self._write(file, by_name.get(file.path), ahead)
        if self.durable:
            for folder in {self.folder, *((self.folder / file.path).parent for file in files)}:
                self.rooms.files.sync_directory(folder)

    def notes(self, dtype: str) -> Iterator[str]:
        """Yield what only the numbers themselves could tell."""
        if self._infinite:
            name, count = next(iter(self._infinite.items()))
            rest = f", and others of {len(self._infinite) - 1} more tensors," if len(self._infinite) > 1 else ""
            yield f"{count} values of {name!r}{rest} are beyond the range of {dtype} and became infinite"

    def _write(self, output: OutputFile, shard: ShardFile | None, ahead: ThreadPoolExecutor) -> None:
        path = self.folder / _inside(output.path)
        self.rooms.files.make_directories(path.parent)
        with self.rooms.files.create(path, sync_ahead=self.durable) as file:
            file.set_size(output.size_bytes)
            for offset, data in output.literals:
                file.write_at(offset, data)
            if output.executable:
                file.make_executable()
            checksums = self._move(output, shard, file, ahead)
            if shard is not None and self.verify:
                _check_derived(shard, checksums)
            if self.durable:
                file.sync()

    def _move(
        self, output: OutputFile, shard: ShardFile | None, file: NewFile, ahead: ThreadPoolExecutor
    ) -> dict[int, tuple[int, int]]:
        """Move every piece of *output*; return checksum and size of what was converted, by offset."""
        by_object: dict[BlobRef, list[Piece]] = {}
        for piece in output.pieces:
            by_object.setdefault(piece.object, []).append(piece)
        checksums = {}
        # Closed by hand: after an error nothing more is to be verified.
        with closing(self._verified_ahead(by_object, ahead)) as refs:
            for ref in refs:
                with self.rooms.objects.open(ref) as source:
                    for piece in by_object[ref]:
                        if piece.rounding is None:
                            file.copy_from(source, piece.object_offset, piece.offset, piece.size_bytes)
                        else:
                            assert shard is not None, "only weights are converted"
                            checksums[piece.offset] = self._convert(piece, shard, source, file)
                        self.progress.advance(piece.size_bytes)
        return checksums

    def _verified_ahead(self, refs: Iterable[BlobRef], ahead: ThreadPoolExecutor) -> Generator[BlobRef, None, None]:
        """Yield each of *refs* once it is known to be sound, while the next ones are being verified."""
        waiting: deque[tuple[BlobRef, Future[None]]] = deque()
        try:
            for ref in refs:
                waiting.append((ref, ahead.submit(self._check, ref)))
                if len(waiting) > _AHEAD_MAX:
                    yield _sound(*waiting.popleft())
            while waiting:
                yield _sound(*waiting.popleft())
        finally:
            for _, future in waiting:
                future.cancel()

    def _check(self, ref: BlobRef) -> None:
        if self.verify and ref.id not in self._verified:
            self.rooms.objects.verify(ref)
            self._verified.add(ref.id)

    def _convert(self, piece: Piece, shard: ShardFile, source: OpenFile, file: NewFile) -> tuple[int, int]:
        assert piece.rounding is not None
        of, target = piece.rounding
        offset, checksum = piece.offset, 0
        for start in range(0, piece.size_bytes, IO_CHUNK_BYTES):
            data = source.read_at(piece.object_offset + start, min(IO_CHUNK_BYTES, piece.size_bytes - start))
            converted = convert(data, source=of, target=target)
            lost = newly_infinite(data, converted, source=of, target=target)
            if lost:
                name = shard.tensor_at(piece.offset).name
                self._infinite[name] = self._infinite.get(name, 0) + lost
            file.write_at(offset, converted)
            offset, checksum = offset + len(converted), crc32(converted, checksum)
        return checksum, offset - piece.offset


def _sound(ref: BlobRef, checked: Future[None]) -> BlobRef:
    checked.result()
    return ref


def _check_derived(shard: ShardFile, checksums: dict[int, tuple[int, int]]) -> None:
    """Raise if a tensor that was rounded is not, bit for bit, what the base's own weights file had."""
    starts = sorted(checksums)
    for tensor, offset in zip(shard.tensors, shard.offsets, strict=True):
        first, end = (bisect_left(starts, place) for place in (offset, offset + member_bytes(tensor)))
        parts = [checksums[start] for start in starts[first:end]] if tensor.crc32 is not None else []
        if parts and combine_crc32(parts) != tensor.crc32:
            raise IntegrityError(
                f"{tensor.name!r}, rounded from its master, is not what it was when it was saved",
                hint="another numpy or processor may round NaNs differently: export on the machine that saved it",
            )


def _inside(path: str) -> str:
    """Return *path*, which a state blob gave, if it stays inside the folder that it is relative to."""
    if "\0" in path or not all(part not in {"", ".", ".."} for part in path.split("/")):
        raise IntegrityError(f"a commit's state names the file {path!r}, which would not be inside the export")
    return path
