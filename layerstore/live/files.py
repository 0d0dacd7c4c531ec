"""Files that a save keeps byte for byte: DeepSpeed's own scripts, and what the user names."""

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from layerstore.errors import InvalidInput
from layerstore.limits import GIB
from layerstore.live.inert import Memory
from layerstore.live.randomness import random_state
from layerstore.live.seams import Engine
from layerstore.ops.shares import KeptFile
from layerstore.store import StrPath
from layerstore.zero3.sourcefile import read_source_file

_FILE_BYTES_MAX = 2 * GIB


def kept_files(engine: Engine, memory: Memory, extra: Mapping[str, StrPath]) -> tuple[KeptFile, ...]:
    """
    Read the files that lie beside the shards; their bytes go to *memory*.

    Every rank has its random state, the first one all else.
    """
    named = {_checked(name): Path(path) for name, path in extra.items()}
    if engine.rank == 0:
        named = {path.name: path for path in engine.scripts} | named
    files = {file.name: file for file in _kept(named, memory)}
    own = random_state(memory, rank=engine.rank, world_size=engine.world_size)
    return tuple(sorted(({own.name: own} | files).values(), key=lambda file: file.name))


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
