"""Files that a save keeps byte for byte: DeepSpeed's scripts, the user's own, and those a trainer puts beside."""

import threading
from collections.abc import Iterator
from pathlib import Path

from layerstore.errors import LayerstoreError
from layerstore.layers import ADAPTER_WEIGHTS
from layerstore.live.engine import Engine, Memory, random_state
from layerstore.live.log import LOG
from layerstore.live.saver.request import FILE_BYTES_MAX, FoundFile, SaveRequest, read_files
from layerstore.model import SourceLayout
from layerstore.publish import KeptFile
from layerstore.zero3 import beside_shards, flavour_of, rank_of_file


class SaveFiles:
    """The files of one save. They are complete once they are sealed."""

    def __init__(self, engine: Engine, memory: Memory, request: SaveRequest) -> None:
        self._engine = engine
        self._memory = memory
        self._request = request
        # Now, not when the folder is complete: training goes on drawing random numbers.
        self._random = random_state(memory, rank=engine.rank, world_size=engine.world_size)
        self._kept: tuple[KeptFile, ...] = ()
        self._flavour = "raw"
        self._is_sealed = threading.Event()

    def wait(self) -> tuple[KeptFile, ...]:
        """Return the files once they are sealed."""
        self._is_sealed.wait()
        return self._kept

    def layout(self, *, layer_pattern: str | None) -> SourceLayout:
        """Return the folder's layout as of the seal: a trainer may have removed the folder since."""
        self._is_sealed.wait()
        return SourceLayout(flavour=self._flavour, tag=self._request.tag, layer_pattern=layer_pattern)

    def seal(self) -> None:
        """Read the files as they are now. The main thread calls it before training goes on."""
        if self._is_sealed.is_set():
            return
        try:
            found = {self._random.name: self._random} | {file.name: self._kept_file(file) for file in self._read()}
            self._kept = tuple(sorted(found.values(), key=lambda file: file.name))
        finally:
            self._is_sealed.set()  # in any case: a thread waits for it

    def _read(self) -> list[FoundFile]:
        """Return this rank's files; rank 0 has those that belong to no rank."""
        is_first = self._engine.rank == 0
        beside: list[FoundFile] = []
        try:
            self._flavour = flavour_of(self._request.folder, self._request.tag)
            scripts = {path.name: path for path in self._engine.scripts} if is_first else {}
            beside = list(read_files(scripts | ({} if self._request.is_complete else dict(self._beside()))))
        except (LayerstoreError, OSError) as exc:
            LOG.warning("files beside the shards are not kept: %s", exc)
        return [*beside, *(self._request.files if is_first else ())]

    def _beside(self) -> Iterator[tuple[str, Path]]:
        for path in beside_shards(self._request.folder, self._request.tag):
            owner = rank_of_file(path.name)
            if (owner if owner is not None and owner < self._engine.world_size else 0) != self._engine.rank:
                continue
            if path.name == ADAPTER_WEIGHTS and path.stat().st_size > FILE_BYTES_MAX:
                LOG.warning("%s is not kept: it is too large to be held in memory; --format hf makes it", path)
            else:
                yield path.relative_to(self._request.folder).as_posix(), path

    def _kept_file(self, file: FoundFile) -> KeptFile:
        place = self._memory.put(file.name, file.data)
        return KeptFile(name=file.name, executable=file.executable, place=place, size_bytes=len(file.data))
