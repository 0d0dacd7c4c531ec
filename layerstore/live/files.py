"""Files that a save keeps byte for byte: DeepSpeed's own scripts, what the user names, what a trainer leaves beside."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from layerstore.errors import InvalidInput, LayerstoreError
from layerstore.layers import ADAPTER_WEIGHTS
from layerstore.limits import GIB
from layerstore.live.inert import Memory
from layerstore.live.log import LOG
from layerstore.live.randomness import random_state
from layerstore.live.seams import Engine
from layerstore.model import SourceLayout
from layerstore.publish.shares import KeptFile
from layerstore.store import StrPath
from layerstore.zero3 import beside_shards, flavour_of, rank_of_file, read_source_file

_FILE_BYTES_MAX = 2 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """A file that lies beside the shards."""

    name: str
    executable: bool
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a save would lie if it were files."""

    folder: Path
    tag: str
    files: tuple[FoundFile, ...] = ()
    """What the user wants to be kept with it."""
    pin: str | None = None
    """What the commit is to be called."""
    is_complete: bool
    """Whether nothing more comes into the folder: else whoever saves there may still write beside the shards."""


def find_or_say(extra: Mapping[str, StrPath]) -> tuple[tuple[FoundFile, ...], str]:
    """Read the files that the user names; return them, and what is wrong with them, empty if nothing."""
    try:
        return tuple(_found({_checked(name): Path(path) for name, path in extra.items()})), ""
    except Exception as exc:  # noqa: BLE001  # whatever a user has put there: the others wait to hear of it
        return (), str(exc)


class Files:
    """The files of one save: complete once they are sealed."""

    def __init__(self, engine: Engine, memory: Memory, place: Destination) -> None:
        self._engine = engine
        self._memory = memory
        self._place = place
        # Now, not when the folder is complete: training goes on to draw from it.
        self._random = random_state(memory, rank=engine.rank, world_size=engine.world_size)
        self._kept: tuple[KeptFile, ...] = ()
        self._flavour = "raw"
        self._is_sealed = threading.Event()

    def wait(self) -> tuple[KeptFile, ...]:
        """Return the files once they are all there."""
        self._is_sealed.wait()
        return self._kept

    def layout(self, *, layer_pattern: str | None) -> SourceLayout:
        """Return what the folder was when it was complete: by now whoever saves there may have removed it."""
        self._is_sealed.wait()
        return SourceLayout(flavour=self._flavour, tag=self._place.tag, layer_pattern=layer_pattern)

    @property
    def pin(self) -> str | None:
        """What the commit is to be called."""
        return self._place.pin

    def seal(self) -> None:
        """Read the files as they are now; by the main thread, before training goes on."""
        if self._is_sealed.is_set():
            return
        try:
            found = {self._random.name: self._random} | {file.name: file for file in self._read()}
            self._kept = tuple(sorted(found.values(), key=lambda file: file.name))
        finally:
            self._is_sealed.set()  # whatever happens: a thread waits for it

    def _read(self) -> tuple[KeptFile, ...]:
        """Return this rank's files: on the first rank all that is no rank's own."""
        beside: tuple[FoundFile, ...] = ()
        try:
            self._flavour = flavour_of(self._place.folder, self._place.tag)
            scripts = {path.name: path for path in self._engine.scripts} if self._engine.rank == 0 else {}
            beside = tuple(_found(scripts | ({} if self._place.is_complete else dict(self._beside()))))
        except (LayerstoreError, OSError) as exc:
            LOG.warning("files beside the shards are not kept: %s", exc)
        own = self._place.files if self._engine.rank == 0 else ()
        return _handed_over([*beside, *own], self._memory)

    def _beside(self) -> Iterator[tuple[str, Path]]:
        for path in beside_shards(self._place.folder, self._place.tag):
            owner = rank_of_file(path.name)
            if (owner if owner is not None and owner < self._engine.world_size else 0) != self._engine.rank:
                continue
            if path.name == ADAPTER_WEIGHTS and path.stat().st_size > _FILE_BYTES_MAX:
                LOG.warning("%s is not kept: it is too large to be held in memory; --format hf makes it", path)
            else:
                yield path.relative_to(self._place.folder).as_posix(), path


def _found(named: Mapping[str, Path]) -> Iterator[FoundFile]:
    for name, path in sorted(named.items()):
        data = read_source_file(path, size_bytes_max=_FILE_BYTES_MAX)
        executable = path.suffix == ".py" or bool(path.stat().st_mode & 0o100)
        yield FoundFile(name=name, executable=executable, data=data)


def _handed_over(found: Iterable[FoundFile], memory: Memory) -> tuple[KeptFile, ...]:
    return tuple(
        KeptFile(
            name=file.name,
            executable=file.executable,
            place=memory.put(file.name, file.data),
            size_bytes=len(file.data),
        )
        for file in found
    )


def _checked(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise InvalidInput(f"extra_files names {name!r}, which is not below the checkpoint's folder")
    return str(path)
