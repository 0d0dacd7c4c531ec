"""What one save is asked for. It is checked on each rank, and all ranks hear of a problem before any begins."""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from layerstore.errors import InvalidInput
from layerstore.limits import GIB
from layerstore.live.engine import ENGINE_KEYS, FOLDER
from layerstore.publish import check_pin_free, check_pin_name
from layerstore.storage import Repository
from layerstore.store import StrPath
from layerstore.zero3 import read_source_file

_STEP_END = 10**18
"""Records are named with 18 digits."""

FILE_BYTES_MAX = 2 * GIB
"""Files beside the shards are held in memory, up to this size each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """A file to be kept beside the shards."""

    name: str
    executable: bool
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """One rank's request for a save."""

    step: int
    client_state: dict[str, object]
    folder: Path
    """The folder that the checkpoint would be in if it were files."""
    tag: str
    files: tuple[FoundFile, ...] = ()
    """The user's extra files."""
    pin: str | None = None
    """The pin for the commit."""
    is_complete: bool
    """Whether no more files come: a trainer that saves to *folder* may still write beside the shards."""
    mistyped: str = ""
    """What in client_state cannot be kept."""
    problem: str = ""
    """The first thing that is wrong otherwise."""


def read_request(
    repo: Repository,
    *,
    run: str,
    tag: str,
    step: object,
    engine_step: int,
    client_state: object,
    extra_files: object,
    pin: object,
) -> SaveRequest:
    """Return what ``save`` was called with. Nothing is raised here: the other ranks wait to hear from this one."""
    number, problems = (engine_step, []) if step is None else _whole(step, otherwise=engine_step)
    kept: dict[str, object] = {}
    mistyped = ""
    if isinstance(client_state, Mapping):
        kept = dict(client_state)
    elif client_state is not None:
        mistyped = f"client_state is a {type(client_state).__name__}, no dictionary"
    taken = sorted(ENGINE_KEYS & kept.keys())
    if taken:
        problems.append(f"client_state has the key {taken[0]!r}, under which the engine saves state of its own")
    files: tuple[FoundFile, ...] = ()
    if extra_files is None or isinstance(extra_files, Mapping):
        try:
            files = tuple(read_files({_below(name): Path(path) for name, path in (extra_files or {}).items()}))
        except Exception as exc:  # noqa: BLE001  # whatever the user passed: the other ranks wait to hear of it
            problems.append(str(exc))
    else:
        problems.append(f"extra_files is a {type(extra_files).__name__}; it maps names to paths")
    problems += _pin_problems(repo, pin, run=run, step=number)
    return SaveRequest(
        step=number,
        client_state=kept,
        folder=FOLDER,
        tag=tag,
        files=files,
        pin=pin if isinstance(pin, str) else None,
        is_complete=True,
        mistyped=mistyped,
        problem=next(iter(problems), ""),
    )


def read_files(named: Mapping[str, StrPath]) -> Iterator[FoundFile]:
    """Read the files *named*, sorted by name."""
    for name, path in sorted((name, Path(path)) for name, path in named.items()):
        data = read_source_file(path, size_bytes_max=FILE_BYTES_MAX)
        executable = path.suffix == ".py" or bool(path.stat().st_mode & 0o100)
        yield FoundFile(name=name, executable=executable, data=data)


def _below(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise InvalidInput(f"extra_files names {name!r}, which is not below the checkpoint's folder")
    return str(path)


def _whole(step: object, *, otherwise: int) -> tuple[int, list[str]]:
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # whatever counts: numpy's numbers too
    except TypeError:
        return otherwise, [f"step= is {step!r}, no whole number"]
    if not 0 <= number < _STEP_END:
        return otherwise, [f"step= is {number}; steps are counted from 0, and have at most 18 digits"]
    return number, []


def _pin_problems(repo: Repository, name: object, *, run: str, step: int) -> list[str]:
    if name is not None and not isinstance(name, str):
        return [f"pin= is {name!r}, no name"]
    try:
        if name is not None:
            check_pin_name(repo, name)
            check_pin_free(repo, name, run=run, step=step)
    except Exception as exc:  # noqa: BLE001  # the other ranks wait to hear of it
        return [str(exc)]
    return []
