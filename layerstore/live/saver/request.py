"""The request for one save, and the files that the save keeps byte for byte: the user's, DeepSpeed's, a trainer's."""

import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from layerstore.errors import InvalidInput, LayerstoreError
from layerstore.filenames import owner_of_file
from layerstore.history import METRICS
from layerstore.layers import ADAPTER_WEIGHTS
from layerstore.limits import GIB, STEP_MAX
from layerstore.live.engine import FOLDER, Engine, Memory, NotPlain, random_state
from layerstore.live.log import LOG
from layerstore.model import DCP, SourceLayout
from layerstore.precision import Keyframes
from layerstore.publish import check_pin_free, check_pin_name
from layerstore.source import read_source_file
from layerstore.staging import KeptFile
from layerstore.storage import Repository
from layerstore.zero3 import beside_shards, flavour_of

FILE_BYTES_MAX = 2 * GIB
"""Files next to the shards are held in memory, up to this size each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """One rank's request for a save."""

    step: int
    client_state: dict[str, object]
    folder: Path = FOLDER
    """The folder that the checkpoint would be written to as files."""
    tag: str
    files: dict[str, Path] = field(default_factory=dict)
    """The user's extra files, by their names in the folder."""
    pin: str | None = None
    keyframes: Keyframes = field(default_factory=Keyframes)
    is_complete: bool
    """Whether no more files will come: a trainer that saves to *folder* may still write next to the shards."""


def read_request(
    repo: Repository,
    *,
    engine_keys: frozenset[str],
    run: str,
    tag: str,
    step: object,
    client_state: object,
    extra_files: object,
    pin: object,
    keyframes: Callable[[], Keyframes] = Keyframes,
    metrics: object = None,
) -> SaveRequest:
    """
    Return the checked arguments of ``save``.

    Raises:
        NotPlain: *client_state* is not a mapping.
        Exception: Another argument is wrong; the caller reports it to the other ranks.
    """
    if not isinstance(client_state, Mapping | None):
        raise NotPlain(f"client_state is a {type(client_state).__name__}, not a dictionary")
    taken = sorted(engine_keys & (client_state or {}).keys())
    if taken:
        raise InvalidInput(f"client_state has the key {taken[0]!r}, which the engine uses for its own state")
    if not isinstance(extra_files, Mapping | None):
        raise InvalidInput(f"extra_files is a {type(extra_files).__name__}, not a mapping of names to paths")
    kept_state = dict(client_state or {})
    if metrics is not None:
        # These replace metrics that a resume returned in client_state, which belong to an older step.
        kept_state[METRICS] = _metrics(metrics)
    files = {_below(name): Path(path) for name, path in (extra_files or {}).items()}
    number = _step(step)
    if pin is not None:
        if not isinstance(pin, str):
            raise InvalidInput(f"pin= is {pin!r}, not a name")
        check_pin_name(repo, pin)
        check_pin_free(repo, pin, run=run, step=number)
    return SaveRequest(
        step=number, client_state=kept_state, tag=tag, files=files, pin=pin, keyframes=keyframes(), is_complete=True
    )


def _metrics(metrics: object) -> dict[str, float]:
    """Return *metrics* as plain numbers; numpy's numbers and tensors of one element are accepted, too."""
    if not isinstance(metrics, Mapping):
        raise InvalidInput(f"metrics= is a {type(metrics).__name__}, not a mapping of names to numbers")
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as exc:
            raise InvalidInput(f"metrics= has {name!r}: {value!r}, which is not a number") from exc
    return numbers


def _below(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise InvalidInput(f"extra_files has the name {name!r}, which is not below the checkpoint's folder")
    return str(path)


def _step(step: object) -> int:
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # integers of numpy, too
    except TypeError as exc:
        raise InvalidInput(f"step= is {step!r}, not a whole number") from exc
    if not 0 <= number < STEP_MAX:
        raise InvalidInput(f"step= is {number}; steps are counted from 0, and have at most 18 digits")
    return number


class SaveFiles:
    """The files of one save on this rank, complete once they are sealed."""

    def __init__(self, engine: Engine, memory: Memory, request: SaveRequest) -> None:
        """Read the user's extra files, on the first rank."""
        self._engine = engine
        self._memory = memory
        self.request = request
        # Captured now, not when the folder is complete: training keeps drawing random numbers.
        self._random = random_state(memory, rank=engine.rank, world_size=engine.world_size)
        extra = request.files.items() if engine.rank == 0 else ()
        self._extra = [self._read(name, path) for name, path in extra]
        self._kept: tuple[KeptFile, ...] = ()
        self._flavour = "raw"
        self._is_sealed = threading.Event()

    def wait(self) -> tuple[KeptFile, ...]:
        """Wait until the files are sealed; return them."""
        self._is_sealed.wait()
        return self._kept

    def layout(self, *, layer_pattern: str | None, is_dcp: bool) -> SourceLayout:
        """Return the folder's layout as it was when sealed; a trainer may have removed the folder since."""
        self._is_sealed.wait()
        if is_dcp:
            return SourceLayout(flavour=DCP, tag=DCP, layer_pattern=layer_pattern)
        return SourceLayout(flavour=self._flavour, tag=self.request.tag, layer_pattern=layer_pattern)

    def seal(self) -> None:
        """Read the files as they are now. The main thread calls it before training continues."""
        if self._is_sealed.is_set():
            return
        try:
            by_name = {file.name: file for file in (self._random, *self._files_beside(), *self._extra)}
            self._kept = tuple(sorted(by_name.values(), key=lambda file: file.name))
        finally:
            self._is_sealed.set()  # always: a thread waits for it

    def _files_beside(self) -> list[KeptFile]:
        """Return DeepSpeed's scripts and the folder's files; the first rank keeps files that belong to no rank."""
        try:
            self._flavour = flavour_of(self.request.folder, self.request.tag)
            named = {path.name: path for path in self._engine.scripts} if self._engine.rank == 0 else {}
            if not self.request.is_complete:
                named |= self._own_files()
            return [self._read(name, path) for name, path in named.items()]
        except (LayerstoreError, OSError) as exc:
            # Not a reason to lose the save: the state is complete without these files.
            LOG.warning("files next to the shards are not kept: %s", exc)
            return []

    def _own_files(self) -> Iterator[tuple[str, Path]]:
        for path in beside_shards(self.request.folder, self.request.tag):
            if owner_of_file(path.name, world_size=self._engine.world_size) != self._engine.rank:
                continue
            if path.name == ADAPTER_WEIGHTS and path.stat().st_size > FILE_BYTES_MAX:
                LOG.warning("%s is not kept: too large for memory; layerstore compose --format hf recreates it", path)
            else:
                yield path.relative_to(self.request.folder).as_posix(), path

    def _read(self, name: str, path: Path) -> KeptFile:
        data = read_source_file(path, size_bytes_max=FILE_BYTES_MAX)
        executable = path.suffix == ".py" or bool(path.stat().st_mode & 0o100)
        return KeptFile(name=name, executable=executable, place=self._memory.put(name, data), size_bytes=len(data))
