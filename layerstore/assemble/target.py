"""
The folder or file that a command writes: it appears whole or not at all, and replaces only an older version of itself.

Everything is written under another name in the same folder, and renamed once it is complete.
"""

import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from layerstore.disk import mapped_errors
from layerstore.errors import AlreadyExists, InvalidInput
from layerstore.filenames import SUMMARY
from layerstore.layers import typed
from layerstore.storage import Repository

_WRITTEN_SECONDS = 10.0
"""How much later than the summary the last file of a folder may be written."""

Force = bool | Literal["foreign"]
"""Which older folder may be replaced: none (False), one unchanged since layerstore wrote it (True), or any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The path that a folder or file will have, and what it may replace at that path."""

    path: Path
    older: tuple[int, ...] | None
    """The identity of what is at *path* now; None if nothing exists at *path*."""
    is_empty: bool = False
    """Whether there is an empty folder at *path* now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How a folder is written, whatever its format."""

    verify: bool = True
    """Whether every byte that is read is checked."""
    durable: bool = True
    """Whether the result is safe from a power cut once the write ends."""
    force: Force = False
    """Whether an older folder is replaced: if True, only one that layerstore wrote; if ``foreign``, any."""


def checked_target(repo: Repository, out: Path, *, what: str, signs: tuple[str, ...], force: Force) -> Target:
    """
    Check that a folder may be written at *out*, and return its target; *what* names its kind in messages.

    Every folder of this kind has at least one of the files *signs*. With *force*, an older folder of this kind is
    replaced if layerstore wrote it; with *force* ``foreign``, whoever wrote it.

    Raises:
        InvalidInput: *out* is inside the store, contains the store, or is not a path for a folder.
        AlreadyExists: Something exists at *out* that must not be replaced.
    """
    if force not in (False, True, "foreign"):
        raise InvalidInput(f"force cannot be {force!r}", hint="choose one of: False, True, 'foreign'")
    with _looking_at(out):
        path = _placed(repo, out)
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise AlreadyExists(f"{out} exists and is not a folder; nothing was changed", hint="choose another -o")
        older = repo.files.identity(path)
        is_empty = older is not None and not any(path.iterdir())
        if older is not None and not is_empty:
            _check_replaceable(path, what, signs, force=force)
        return Target(path=path, older=older, is_empty=is_empty)


def checked_file(repo: Repository, out: Path, *, what: str, begins: bytes) -> Target:
    """
    Check that a file may be written at *out*, and return its target; the first bytes *begins* identify an older *what*.

    Raises:
        InvalidInput: *out* is inside the store, contains the store, or its folder is missing, which may be a typo.
        AlreadyExists: Something else exists at *out*.
    """
    with _looking_at(out):
        path = _placed(repo, out)
        if not path.parent.exists():
            raise InvalidInput(
                f"there is no folder {out.parent} for {what}; nothing was written",
                hint=f"mkdir -p {typed(str(out.parent))}, or choose another -o",
            )
        older = repo.files.identity(path)
        if older is not None and (path.is_symlink() or not path.is_file() or not _begins(repo, path, begins)):
            raise AlreadyExists(
                f"{out} exists and is not {what}; nothing was changed",
                hint="choose another -o, or remove it by hand",
            )
        return Target(path=path, older=older)


@contextmanager
def _looking_at(out: Path) -> Iterator[None]:
    """Make errors state the path *out*."""
    try:
        with mapped_errors(out, doing="look at"):
            yield
    except ValueError as exc:
        if isinstance(exc, InvalidInput):
            raise
        raise InvalidInput(f"{out} is not a path: {exc}", hint="choose another -o") from exc  # a NUL


def _placed(repo: Repository, out: Path) -> Path:
    path = Path.cwd() / out  # not resolved: a link at the target itself must be seen
    real, store = path.resolve(), repo.layout.root
    if real == store or store in real.parents:
        raise InvalidInput(f"{out} is inside the store {store}", hint="choose a path outside the store with -o")
    if real in store.parents:
        raise InvalidInput(f"{out} contains the store {store}", hint="choose another path with -o")
    above = next(folder for folder in path.parents if folder.exists())
    if not above.is_dir():
        raise InvalidInput(f"{out} cannot be made: {above} is not a folder", hint="choose another -o")
    return path


def _check_replaceable(path: Path, what: str, signs: tuple[str, ...], *, force: Force) -> None:
    # A typo must not cost a home folder, with --force or without.
    if not any((path / sign).is_file() for sign in signs):
        named = " or ".join(map(repr, signs))
        raise AlreadyExists(
            f"{path} is not empty, and is not {what} (it has no file {named}), so it is not replaced; "
            "nothing was changed",
            hint="choose another folder with -o, or remove it by hand",
        )
    is_ours = _is_ours(path, signs)
    if not force and is_ours:
        raise AlreadyExists(
            f"{path} exists and is not empty; nothing was changed",
            hint=f"choose another folder with -o, or replace {what} with --force",
        )
    if force != "foreign" and not is_ours:
        raise AlreadyExists(
            f"{path} is {what} that layerstore did not write, or that has changed since (see {SUMMARY!r}); nothing was "
            "changed",
            hint="choose another folder with -o, or replace it all the same with --force-foreign",
        )


def _is_ours(path: Path, signs: tuple[str, ...]) -> bool:
    """Whether layerstore wrote the folder, and nobody has saved into it since: a save would leave a younger *sign*."""
    summary = path / SUMMARY
    if not summary.is_file():
        return False
    latest = summary.stat().st_mtime + _WRITTEN_SECONDS
    return all((path / sign).stat().st_mtime <= latest for sign in signs if (path / sign).is_file())


def _begins(repo: Repository, path: Path, begins: bytes) -> bool:
    with repo.files.open(path) as file:
        return file.size_bytes >= len(begins) and file.read_at(0, len(begins)) == begins


def _named_like(path: Path, what: str) -> Path:
    return path.with_name(f"{path.name}.{what}-{secrets.token_hex(4)}")


# -- making it appear ----------------------------------------------------------------------------------------------


@contextmanager
def appearing(repo: Repository, target: Target, *, is_older_form: Callable[[Path], bool]) -> Iterator[Path]:
    """
    Yield a folder that becomes *target* at the end, or is removed if anything fails.

    Files at *target* are replaced if the new folder has them too, or if they belong to an older form of the folder.

    Raises:
        AlreadyExists: *target* holds other files too, or something was put there since the check.
    """
    partial = _named_like(target.path, "partial")
    try:
        repo.files.make_directories(partial)
        yield partial
        _move_into_place(repo, partial, target, is_older_form)
    except BaseException:
        repo.files.remove_tree(partial)
        raise


def _move_into_place(repo: Repository, partial: Path, target: Target, is_older_form: Callable[[Path], bool]) -> None:
    """Rename the complete folder *partial* to *target*, and remove the older folder at *target* if that is allowed."""
    files, path = repo.files, target.path
    aside = None
    if target.is_empty:
        # If the folder is no longer empty, it stays, and the move below finds the name taken.
        files.remove_empty(path)
    elif target.older is not None:
        aside = _named_like(path, "replaced")
        files.rename(path, aside)
    try:
        if aside is not None:
            # Checked only now that the folder has a name under which nobody else changes it.
            if files.identity(aside) != target.older:
                raise _came_meanwhile(path)
            _check_nothing_else_is_lost(path, aside, partial, is_older_form)
        if not files.move_folder(partial, path):
            raise _came_meanwhile(path)
        try:
            files.sync_directory(path.parent)
        except BaseException:
            # It is unknown whether the new folder would survive a power cut: put the older one back.
            files.move_folder(path, partial)
            raise
    except BaseException:
        if aside is not None and not files.move_folder(aside, path):
            warnings.warn(f"what was at {path} is intact at {aside}", stacklevel=2)
        raise
    if aside is not None:
        # Last: until now, the older folder could be put back.
        files.remove_tree(aside)


def _check_nothing_else_is_lost(path: Path, aside: Path, partial: Path, is_older_form: Callable[[Path], bool]) -> None:
    """Raise if *aside*, the folder that was at *path*, holds anything that *partial* does not replace."""
    for folder, folders, files in os.walk(aside):
        for name in sorted([*folders, *files]):
            inner = Path(folder, name).relative_to(aside)
            if not is_older_form(inner) and not (partial / inner).exists():
                raise AlreadyExists(
                    f"{path} also holds {str(inner)!r}, which the new folder does not replace; nothing was changed",
                    hint="choose another folder with -o, or move it away by hand",
                )


def _came_meanwhile(path: Path) -> AlreadyExists:
    return AlreadyExists(
        f"{path} appeared while we were writing; it was left alone",
        hint="choose another path with -o, or move that one away and repeat the command",
    )


def write_file(repo: Repository, target: Target, data: bytes) -> None:
    """
    Write *data* to *target*; until the end, readers find the older file whole.

    Raises:
        AlreadyExists: Something was put there since it was checked.
    """
    files, path = repo.files, target.path
    partial = _named_like(path, "partial")
    try:
        with files.create(partial) as file:
            file.write_at(0, data)
            file.sync()
        if target.older is not None and files.identity(path) == target.older:
            files.rename(partial, path)
        elif not files.link_exclusive(partial, path):
            raise _came_meanwhile(path)
        files.sync_directory(path.parent)
    finally:
        # A rename has removed this name already; a link leaves it behind.
        files.discard(partial)


def files_in(folder: Path) -> tuple[str, ...]:
    """Return the files below *folder*, with ``/``, by name."""
    paths = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return tuple(sorted(path.relative_to(folder).as_posix() for path in paths))
