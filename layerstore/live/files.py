"""Files that a save keeps byte for byte: DeepSpeed's own scripts, and what the user names."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from layerstore.errors import InvalidInput
from layerstore.limits import GIB
from layerstore.live.inert import Memory
from layerstore.live.seams import Engine
from layerstore.ops.shares import KeptFile
from layerstore.store import StrPath
from layerstore.zero3.sourcefile import read_source_file

_FILE_BYTES_MAX = 2 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """A file that lies beside the shards."""

    name: str
    executable: bool
    data: bytes


def find_files(engine: Engine, extra: Mapping[str, StrPath]) -> tuple[FoundFile, ...]:
    """
    Read the files that lie beside the shards.

    Raises:
        LayerstoreError: One of *extra* cannot be read, or its name leads elsewhere.
    """
    named = {path.name: path for path in engine.scripts} | {_checked(name): Path(path) for name, path in extra.items()}
    return tuple(_found(named))


def _found(named: Mapping[str, Path]) -> Iterator[FoundFile]:
    for name, path in sorted(named.items()):
        data = read_source_file(path, size_bytes_max=_FILE_BYTES_MAX)
        executable = path.suffix == ".py" or bool(path.stat().st_mode & 0o100)
        yield FoundFile(name=name, executable=executable, data=data)


def kept_files(found: Iterable[FoundFile], memory: Memory) -> tuple[KeptFile, ...]:
    """Hand the bytes of *found* to *memory*."""
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
