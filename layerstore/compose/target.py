"""
The folder or file that a verb writes: it appears whole or not at all, and never replaces what it does not renew.

Everything is written under another name in the same folder, and renamed once it is complete.
"""

import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from layerstore.errors import AlreadyExists, InvalidInput, StorageIO
from layerstore.storage import Repository, mapped_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """What a verb writes, so that ``--force`` recognises an older one."""

    what: str
    """With its article: ``a checkpoint``."""
    signs: tuple[str, ...]
    """Files of which every such folder has at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a folder will be, and what it may replace there."""

    path: Path
    older: tuple[int, ...] | None
    """The identity of the folder that is there; None where nothing is."""
    is_empty: bool
    """Whether that folder has nothing in it."""


def checked_target(repo: Repository, out: Path, product: Product, *, force: bool) -> Target:
    """
    Return where *out* is, if *product* may be written there.

    Raises:
        InvalidInput: It is in the store, around the store, or no path for a folder.
        AlreadyExists: Something is there that may not be replaced.
    """
    with _looking_at(out):
        target = _placed(repo, out, what="folder")
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise AlreadyExists(f"{out} is there and is not a folder; nothing was changed", hint="choose another -o")
        older = repo.files.identity(target)
        is_empty = older is None or not any(target.iterdir())
        if not is_empty:
            _check_replaceable(target, product, force=force)
        return Target(path=target, older=older, is_empty=is_empty)


@contextmanager
def _looking_at(out: Path) -> Iterator[None]:
    """Let errors name the path *out*."""
    try:
        with mapped_errors(out, doing="look at"):
            yield
    except ValueError as exc:
        if isinstance(exc, InvalidInput):
            raise
        raise InvalidInput(f"{out} is no path: {exc}", hint="choose another -o") from exc  # a NUL


def _placed(repo: Repository, out: Path, *, what: str) -> Path:
    target = Path.cwd() / out  # not resolved: a link at the target itself must be seen
    real, store = target.resolve(), repo.layout.root
    if real == store or store in real.parents:
        raise InvalidInput(f"{out} is inside the store {store}", hint=f"choose a {what} elsewhere with -o")
    if real in store.parents:
        raise InvalidInput(f"{out} contains the store {store}", hint=f"choose a {what} elsewhere with -o")
    above = next(folder for folder in target.parents if folder.exists())
    if not above.is_dir():
        raise InvalidInput(f"{out} cannot be made: {above} is not a folder", hint="choose another -o")
    return target


def _check_replaceable(target: Path, product: Product, *, force: bool) -> None:
    # A typing mistake must not cost a home folder, with --force or without.
    if not any((target / sign).is_file() for sign in product.signs):
        signs = " or ".join(map(repr, product.signs))
        raise AlreadyExists(
            f"{target} is not empty, and is not {product.what} (it has no file {signs}), so it is not replaced; "
            "nothing was changed",
            hint="choose another folder with -o, or remove it by hand",
        )
    if not force:
        raise AlreadyExists(
            f"{target} exists and is not empty; nothing was changed",
            hint=f"choose another folder with -o, or replace {product.what} with --force",
        )


@contextmanager
def appearing(repo: Repository, target: Target, *, is_older_form: Callable[[Path], bool]) -> Iterator[Path]:
    """
    Lend a folder that becomes *target* at the end, or is removed if anything fails.

    Of what is at *target*, files that the new folder has too and paths of an older form of it are replaced.

    Raises:
        AlreadyExists: *target* also holds something else, or something was put there since it was checked; either
            stays as it is.
    """
    partial = _partial(target.path)
    try:
        repo.files.make_directories(partial)
        yield partial
        _move_into_place(repo, partial, target, is_older_form)
    except BaseException:
        repo.files.remove_tree(partial)
        raise


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")


def _move_into_place(repo: Repository, partial: Path, target: Target, is_older_form: Callable[[Path], bool]) -> None:
    """Rename *partial*, which is complete, to *target*, and remove what was there if it may be replaced."""
    files, path = repo.files, target.path
    aside = None
    if target.older is not None and files.exists(path):
        aside = path.with_name(f"{path.name}.replaced-{secrets.token_hex(4)}")
        files.rename(path, aside)
    try:
        if aside is not None:
            # Only now, when nobody finds it under its name any more, does nothing change after the look.
            if files.identity(aside) != target.older or (target.is_empty and any(aside.iterdir())):
                raise _came_meanwhile(path)
            _check_nothing_else_is_lost(path, aside, partial, is_older_form)
        if not files.move_folder(partial, path):
            raise _came_meanwhile(path)
        files.sync_directory(path.parent)
    except BaseException:
        _move_back(repo, partial, path, aside)
        raise
    if aside is not None:
        files.remove_tree(aside)


def _check_nothing_else_is_lost(
    target: Path, aside: Path, partial: Path, is_older_form: Callable[[Path], bool]
) -> None:
    """Raise if *aside*, the folder that was at *target*, holds anything that *partial* does not replace."""
    for folder, folders, files in os.walk(aside):
        for name in sorted([*folders, *files]):
            path = Path(folder, name).relative_to(aside)
            if not is_older_form(path) and not (partial / path).exists():
                raise AlreadyExists(
                    f"{target} also holds {str(path)!r}, which the new folder does not replace; nothing was changed",
                    hint="choose another folder with -o, or move it away by hand",
                )


def _came_meanwhile(path: Path) -> AlreadyExists:
    return AlreadyExists(
        f"{path} has come to be there meanwhile; it was left as it is, and nothing was written",
        hint="choose another folder with -o, or move that one away and repeat the command",
    )


def _move_back(repo: Repository, partial: Path, path: Path, aside: Path | None) -> None:
    """Put back what was there; where even that fails, say under which name it still is."""
    with suppress(StorageIO):
        if not partial.exists():
            repo.files.rename(path, partial)
        if aside is not None and not repo.files.move_folder(aside, path):
            repo.files.remove_empty(aside)
            if repo.files.exists(aside):
                warnings.warn(f"what was at {path} is whole at {aside}", stacklevel=2)


# -- a single file -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTarget:
    """Where a file will be."""

    path: Path
    older: tuple[int, ...] | None
    """The identity of the older file of the same kind that is there; None where nothing is."""


def checked_file(repo: Repository, out: Path, *, what: str, begins: bytes) -> FileTarget:
    """
    Return where *out* is, if a file may be written there; an older one is known as *what* by how it *begins*.

    Raises:
        InvalidInput: It is in the store, around the store, or no path for a file.
        AlreadyExists: Something else is there, which is never replaced.
    """
    with _looking_at(out):
        target = _placed(repo, out, what="place")
        if not target.is_symlink() and not target.exists():
            return FileTarget(path=target, older=None)
        if target.is_symlink() or not target.is_file() or not _begins(repo, target, begins):
            raise AlreadyExists(
                f"{out} is there and is not {what}; nothing was changed",
                hint="choose another -o, or remove it by hand",
            )
        return FileTarget(path=target, older=repo.files.identity(target))


def _begins(repo: Repository, path: Path, begins: bytes) -> bool:
    with repo.files.open(path) as file:
        return file.size_bytes >= len(begins) and file.read_at(0, len(begins)) == begins


def write_file(repo: Repository, target: FileTarget, data: bytes) -> None:
    """
    Write *data* to *target*; until the end, readers find the older file whole.

    Raises:
        AlreadyExists: Something was put there since it was checked.
        StorageIO: The disk refused; what was there is as before.
    """
    files, path = repo.files, target.path
    files.make_directories(path.parent)
    partial = _partial(path)
    try:
        with files.create(partial) as file:
            file.write_at(0, data)
            file.sync()
        if target.older is not None and files.identity(path) == target.older:
            files.rename(partial, path)
        elif not files.link_exclusive(partial, path):
            raise AlreadyExists(
                f"{path} has come to be there meanwhile; nothing was changed", hint="repeat the command"
            )
        files.sync_directory(path.parent)
    finally:
        files.discard(partial)
