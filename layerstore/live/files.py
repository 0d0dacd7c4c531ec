"""Files that a save keeps byte for byte: DeepSpeed's own scripts, what the user names, what a trainer leaves beside."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from layerstore.errors import InvalidInput, LayerstoreError
from layerstore.limits import GIB
from layerstore.live.inert import Memory
from layerstore.live.log import LOG
from layerstore.live.randomness import random_state
from layerstore.live.seams import Engine
from layerstore.ops.shares import KeptFile
from layerstore.store import StrPath
from layerstore.zero3.beside import beside_shards, rank_of_file
from layerstore.zero3.discover import flavour_of
from layerstore.zero3.sourcefile import read_source_file

_FILE_BYTES_MAX = 2 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a save would lie if it were files."""

    folder: Path
    tag: str
    extra_files: Mapping[str, StrPath]
    is_complete: bool
    """Whether nothing more comes into the folder: else whoever saves there may still write beside the shards."""


@dataclass(slots=True)
class Files:
    """The files of one save, complete once it is sealed."""

    engine: Engine
    memory: Memory
    place: Destination
    _found: tuple[KeptFile, ...] = ()
    _is_sealed: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> tuple[KeptFile, ...]:
        """Return the files once they are all there."""
        self._is_sealed.wait()
        return self._found

    def seal(self) -> None:
        """Read the files as they are now; by the main thread, before training goes on."""
        if not self._is_sealed.is_set():
            try:
                self._found = tuple(sorted(self._read().values(), key=lambda file: file.name))
            except (LayerstoreError, OSError) as exc:
                LOG.warning("files beside the shards are not kept: %s", exc)
            self._is_sealed.set()

    def _read(self) -> dict[str, KeptFile]:
        """Return this rank's files by name: its random state, and on the first rank all that is no rank's own."""
        engine, place = self.engine, self.place
        named = {_checked(name): Path(path) for name, path in place.extra_files.items()}
        named |= {} if place.is_complete else dict(self._beside())
        if engine.rank == 0:
            named = {path.name: path for path in engine.scripts} | named
        files = {file.name: file for file in _kept(named, self.memory)}
        own = random_state(self.memory, rank=engine.rank, world_size=engine.world_size)
        return {own.name: own} | files

    def _beside(self) -> Iterator[tuple[str, Path]]:
        for path in beside_shards(self.place.folder, self.place.tag):
            owner = rank_of_file(path.name)
            if (owner if owner is not None and owner < self.engine.world_size else 0) == self.engine.rank:
                yield path.relative_to(self.place.folder).as_posix(), path


def _kept(named: Mapping[str, Path], memory: Memory) -> Iterator[KeptFile]:
    for name, path in sorted(named.items()):
        data = read_source_file(path, size_bytes_max=_FILE_BYTES_MAX)
        yield KeptFile(
            name=name,
            executable=path.suffix == ".py" or bool(path.stat().st_mode & 0o100),
            place=memory.put(name, data),
            size_bytes=len(data),
        )


def _checked(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise InvalidInput(f"extra_files names {name!r}, which is not below the checkpoint's folder")
    return str(path)


__all__ = ["Destination", "Files", "flavour_of"]
