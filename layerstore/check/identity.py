"""Write a lost or damaged ``store.json`` again, with the store id that most records state."""

import re
import time
from dataclasses import dataclass

from layerstore.errors import IntegrityError, InvalidInput, LayerstoreError
from layerstore.format import FORMAT, HASH, StoreIdentity, decode_identity, encode_identity, stated_flags
from layerstore.layout import Layout
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.storage import Files, RecordStore, Trash, stated_ids

_STORE_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredIdentity:
    """A ``store.json`` that was written again, or would be."""

    flags: tuple[str, ...]
    """Features that readers and writers of the store must know."""
    is_assumed: bool
    """Whether its flags were unknown, and are assumed to be none."""


def restore_identity(layout: Layout, files: Files, store_id: str, *, dry_run: bool = False) -> RestoredIdentity | None:
    """
    Write ``store.json`` again for the store *store_id*; return None if the present one is intact.

    More records have to state this id than any other. The old file goes to the trash; flags that can still be read in
    it are kept, for an older layerstore must not write there.

    Raises:
        InvalidInput: *store_id* is malformed, or not the one that most records state.
        Unsupported: ``store.json`` is of another format.
    """
    if not _STORE_ID.fullmatch(store_id):
        raise InvalidInput(f"{store_id!r} is no store's id", hint="ids are 32 lower-case hex digits")
    if files.exists(layout.migrating):
        raise InvalidInput(
            f"a migration of {layout.root} was interrupted, and which format it has now store.json alone knew; "
            "nothing was changed",
            hint="put back a copy of store.json, then layerstore migrate",
        )
    is_there = files.exists(layout.identity)
    if is_there and _is_sound(layout, files, store_id):
        return None
    stated = stated_ids(layout, files)
    if not stated:
        raise InvalidInput(
            f"no record or pin under {layout.root} can be read, so nothing says whose they are; nothing was changed",
            hint="put back a copy of store.json",
        )
    most, count = stated.most_common(1)[0]
    if most != store_id:
        raise InvalidInput(
            f"{count} records under {layout.root} are of store {most}, {stated[store_id]} of {store_id}; "
            "nothing was changed",
            hint=f"layerstore repair --store-id {most}",
        )
    flags = _flags_left(layout, files)
    restored = RestoredIdentity(flags=flags or (), is_assumed=flags is None)
    if not dry_run:
        _write(layout, files, store_id, restored.flags, is_there=is_there)
    return restored


def _is_sound(layout: Layout, files: Files, store_id: str) -> bool:
    try:
        data = files.read(layout.identity, size_bytes_max=RECORD_BYTES_MAX)
        return decode_identity(data, what=str(layout.identity)).store_id == store_id
    except IntegrityError:
        return False


def _flags_left(layout: Layout, files: Files) -> tuple[str, ...] | None:
    """Return the flags in the damaged file; None if it is gone, unreadable, or another store's."""
    what = str(layout.identity)
    try:
        data = files.read(layout.identity, size_bytes_max=RECORD_BYTES_MAX)
    except LayerstoreError:
        return None
    try:
        decode_identity(data, what=what)
    except IntegrityError:
        return stated_flags(data)
    return None


def _write(layout: Layout, files: Files, store_id: str, flags: tuple[str, ...], *, is_there: bool) -> None:
    for folder in (layout.tmp, layout.locks):
        files.make_directory(folder)
    if is_there:
        Trash(layout, files, RecordStore(layout, files, store_id=store_id)).take_damaged(layout.identity)
    # When the store was made is unknown; this is for people only.
    created = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    identity = StoreIdentity(format=FORMAT, store_id=store_id, hash=HASH, created=created, flags=flags)
    with files.temporary(layout.tmp, encode_identity(identity)) as source:
        files.link_exclusive(source, layout.identity)
    files.sync_directory(layout.root)
