"""
``store.json`` on disk: what a store is when it is opened, and whether it still is that.

A store may be migrated while somebody has it open. So a writer looks at ``store.json`` again after it has published
something, and fails if the format is another one by then.
"""

import errno as errnos
import itertools
import os
import re
from collections import Counter
from pathlib import Path

from layerstore.errors import IntegrityError, LayerstoreError, NoStore, StorageIO, Unsupported
from layerstore.format import StoreIdentity, decode_identity, stated_store
from layerstore.layers import typed
from layerstore.layout import Layout
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.storage.files import Files

# Enough records to tell whose they are.
_ASKED = 16


def read_identity(layout: Layout, files: Files, *, path: Path) -> bytes:
    """
    Return the unchecked text of ``store.json``; *path* is how the user called the store.

    Raises:
        NoStore: There is none.
        IntegrityError: There was one, which has lost its ``store.json``.
    """
    try:
        present = files.exists(layout.identity)
    except StorageIO as exc:
        if exc.errno in {errnos.ENOTDIR, errnos.ENAMETOOLONG, errnos.ELOOP}:
            raise NoStore(f"there is no store at {path}: {os.strerror(exc.errno)}", hint="name a folder") from exc
        present = True  # reading it raises what is really wrong
    if not present:
        sign = sign_of_a_store(layout, files)
        if sign is not None:
            raise lost_identity(path, sign)
        raise NoStore(
            f"there is no store at {path}", hint=f"layerstore init {typed(str(path))}, or name yours with --store"
        )
    return files.read(layout.identity, size_bytes_max=RECORD_BYTES_MAX)


def sign_of_a_store(layout: Layout, files: Files) -> str | None:
    """Return what shows that there was a store although ``store.json`` is missing; None if nothing does."""
    signs = (
        (layout.commits, "", "commits"),
        (layout.objects, "[0-9a-f]{2}$", "objects"),
        (layout.pins, "", "pins"),
        (layout.migrating, "", "a migration under way"),
        (layout.backups, "format-", "backups of a migration"),
    )
    for folder, pattern, what in signs:
        if any(re.match(pattern, name) for name in files.names_in_folder(folder)):
            return what
    return None


def lost_identity(path: Path, sign: str) -> IntegrityError:
    """Return the error for a store at *path* without ``store.json``; *sign* shows that there was one."""
    return IntegrityError(
        f"{path} holds {sign}, but its store.json is missing; nothing was changed",
        hint="put back a copy of store.json; it never changes after init, but by a migration",
    )


def check_unchanged(layout: Layout, files: Files, *, store_id: str) -> StoreIdentity:
    """
    Return the identity of the store *store_id*, opened earlier, as it is now.

    Raises:
        Unsupported: It has been migrated since.
        IntegrityError: It is damaged or gone, or another store is in its place.
    """
    data = read_identity(layout, files, path=layout.root)
    identity = decode_identity(data, what=str(layout.identity))
    if identity.store_id != store_id:
        raise IntegrityError(
            f"{layout.root} was store {store_id} when it was opened and is store {identity.store_id} now",
            hint="open it again",
        )
    return identity


def check_still_writable(layout: Layout, files: Files, *, store_id: str) -> None:
    """
    Make sure that the store *store_id*, opened earlier, still is what it was, and that this layerstore may write to it.

    Raises:
        Unsupported: It has been migrated since, or uses something that this layerstore might destroy unknowingly.
        IntegrityError: It is damaged or gone, or another store is in its place.
    """
    identity = check_unchanged(layout, files, store_id=store_id)
    if identity.unknown_flags:
        raise Unsupported(
            f"the store uses {', '.join(identity.unknown_flags)}, which this layerstore does not know; "
            "it can be read, not written",
            hint="use a newer layerstore",
        )


def stated_ids(layout: Layout, files: Files, *, limit: int | None = None) -> Counter[str]:
    """Return the stores that the readable records and pins say they belong to, each with how many say so."""
    folders = [*(layout.commits / run for run in files.names_in_folder(layout.commits)), layout.pins]
    paths = (folder / name for folder in folders for name in files.names_in_folder(folder))
    stated = (found for path in paths if (found := _stated(files, path)) is not None)
    return Counter(itertools.islice(stated, limit))


def _stated(files: Files, path: Path) -> str | None:
    try:
        return stated_store(files.read(path, size_bytes_max=RECORD_BYTES_MAX))
    except LayerstoreError:
        return None


def hinted(problem: IntegrityError, layout: Layout, files: Files) -> IntegrityError:
    """Return *problem* with a damaged or missing ``store.json``, and the command that writes it again, if one can."""
    if files.exists(layout.migrating):
        return problem  # in the middle of a migration nothing but a copy will do
    stated = stated_ids(layout, files, limit=_ASKED)
    if not stated:
        return problem
    command = f"layerstore repair --store-id {stated.most_common(1)[0][0]}"
    return IntegrityError(str(problem), hint=f"{command}, or put back a copy of store.json")
