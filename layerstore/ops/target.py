"""
The folder that a verb writes: it appears whole or not at all, and never costs what it does not renew.

All is written to a folder beside it, which is renamed once it is complete.
"""

import os
import secrets
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from layerstore.errors import AlreadyExists, InvalidInput, StorageIO
from layerstore.storage.kernel import mapped_errors
from layerstore.storage.rooms import Rooms


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """What a verb writes, as far as ``--force`` has to recognise an older one."""

    what: str
    """With its article: ``a checkpoint``."""
    signs: tuple[str, ...]
    """Files of which every such folder has at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a folder is to be, and what it may replace there."""

    path: Path
    older: tuple[int, ...] | None
    """The identity of the folder that is there; None where nothing is."""
    is_empty: bool
    """Whether that folder has nothing in it."""


def checked_target(rooms: Rooms, out: Path, product: Product, *, force: bool) -> Target:
    """
    Return where *out* is, if it may be written.

    Raises:
        InvalidInput: It is in the store, around the store, or no path for a folder.
        AlreadyExists: Something is there that may not be replaced.
    """
    with understood(out):
        target = placed(rooms, out, what="folder")
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise AlreadyExists(f"{out} is there and is not a folder; nothing was changed", hint="choose another -o")
        older = rooms.files.identity(target)
        is_empty = older is None or not any(target.iterdir())
        if not is_empty:
            _check_replaceable(target, product, force=force)
        return Target(path=target, older=older, is_empty=is_empty)


@contextmanager
def understood(out: Path) -> Generator[None, None, None]:
    """Say of what goes wrong while *out* is looked at that it is about that path."""
    try:
        with mapped_errors(out, doing="look at"):
            yield
    except ValueError as exc:
        if isinstance(exc, InvalidInput):
            raise
        raise InvalidInput(f"{out} is no path: {exc}", hint="choose another -o") from exc  # a NUL


def placed(rooms: Rooms, out: Path, *, what: str) -> Path:
    """
    Return where *out* is, which is to be a *what*.

    Raises:
        InvalidInput: It is in the store, around the store, or below something that is no folder.
    """
    target = Path.cwd() / out  # not resolved: a link at the target itself must be seen
    real, store = target.resolve(), rooms.layout.root
    if real == store or store in real.parents:
        raise InvalidInput(f"{out} is inside the store {store}", hint=f"choose a {what} elsewhere with -o")
    if real in store.parents:
        raise InvalidInput(f"{out} contains the store {store}", hint=f"choose a {what} elsewhere with -o")
    above = next(folder for folder in target.parents if folder.exists())
    if not above.is_dir():
        raise InvalidInput(f"{out} cannot be made: {above} is not a folder", hint="choose another -o")
    return target


def _check_replaceable(target: Path, product: Product, *, force: bool) -> None:
    # A slip of the pen must not cost a home folder.
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
def appearing(
    rooms: Rooms, target: Target, *, what: str, is_older_form: Callable[[Path], bool]
) -> Generator[Path, None, None]:
    """
    Lend a folder beside *target*, which becomes *target* at the end, or goes again where anything fails.

    Raises:
        AlreadyExists: *target* also holds what *what* does not replace, by *is_older_form*; or something has come to
            be there since it was checked, which stays as it is.
    """
    partial = target.path.with_name(f"{target.path.name}.partial-{secrets.token_hex(4)}")

    def check(aside: Path) -> None:
        """Look at what was there, now that nobody finds it any more."""
        if rooms.files.identity(aside) != target.older or (target.is_empty and any(aside.iterdir())):
            raise _came_meanwhile(target.path)
        _check_nothing_else_is_lost(target.path, aside, partial, what=what, is_older_form=is_older_form)

    try:
        rooms.files.make_directories(partial)
        yield partial
        _move_into_place(rooms, partial, target, check)
    except BaseException:
        rooms.files.remove_tree(partial)
        raise


def _check_nothing_else_is_lost(
    target: Path, aside: Path, partial: Path, *, what: str, is_older_form: Callable[[Path], bool]
) -> None:
    """Raise if *target*, which lies at *aside* by now, holds anything but *what*, in an older form."""
    for folder, folders, files in os.walk(aside):
        for name in sorted([*folders, *files]):
            path = Path(folder, name).relative_to(aside)
            if not is_older_form(path) and not (partial / path).exists():
                raise AlreadyExists(
                    f"{target} also holds {str(path)!r}, which {what} does not replace; nothing was changed",
                    hint="choose another folder with -o, or move it away by hand",
                )


def _came_meanwhile(path: Path) -> AlreadyExists:
    return AlreadyExists(
        f"{path} has come to be there meanwhile; it was left as it is, and nothing was written",
        hint="choose another folder with -o, or move that one away and repeat the command",
    )


def _move_into_place(rooms: Rooms, partial: Path, target: Target, check: Callable[[Path], None]) -> None:
    """Let *partial*, which is complete, become *target*; what was there, if *check* agrees, is gone afterwards."""
    files, path = rooms.files, target.path
    aside = None
    if target.older is not None and files.exists(path):
        aside = path.with_name(f"{path.name}.replaced-{secrets.token_hex(4)}")
        files.rename(path, aside)
    try:
        if aside is not None:
            check(aside)
        if not files.move_folder(partial, path):
            raise _came_meanwhile(path)
        files.sync_directory(path.parent)
    except BaseException:
        _move_back(rooms, partial, path, aside)
        raise
    if aside is not None:
        files.remove_tree(aside)


def _move_back(rooms: Rooms, partial: Path, path: Path, aside: Path | None) -> None:
    """Put back what was there; where even that fails it stays whole, under the name of *aside*."""
    with suppress(StorageIO):
        if not partial.exists():
            rooms.files.rename(path, partial)
        if aside is not None and not rooms.files.move_folder(aside, path):
            rooms.files.remove_empty(aside)
            if rooms.files.exists(aside):
                warnings.warn(f"what was at {path} is whole at {aside}", stacklevel=2)
