"""Make a store, and open the rooms of one."""

import errno as errnos
import os
import time
from pathlib import Path

from layerstore.errors import AlreadyExists, IntegrityError, InvalidInput, NoStore, StorageIO
from layerstore.format.identity import StoreIdentity, decode_identity, encode_identity, new_identity
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.ops.rooms import Rooms
from layerstore.storage.catalog import Catalog
from layerstore.storage.commits import RecordStore
from layerstore.storage.files import Files
from layerstore.storage.garbage import Garbage
from layerstore.storage.layout import Layout
from layerstore.storage.objects import ObjectStore
from layerstore.storage.parts import PartStore
from layerstore.storage.placement import manifest_directory


def make_store(path: Path, files: Files) -> StoreIdentity:
    """
    Make the folder *path* a store.

    ``store.json`` comes last: until it is there, it is no store, and ``init`` may be repeated.

    Raises:
        AlreadyExists: There is a store already, or a folder with something else in it.
        IntegrityError: There was a store: its commits or objects are there, and ``store.json`` is not.
    """
    layout = _layout(path)
    if files.exists(layout.identity):
        raise AlreadyExists(f"{path} is a store already; nothing was changed", hint=f"layerstore log --store {path}")
    if files.exists(layout.root) and not files.is_directory(layout.root):
        raise AlreadyExists(f"{path} is there and is not a folder", hint="choose another path")
    strangers = sorted(set(files.names(layout.root)) - {folder.name for folder in (*layout.folders, layout.manifest)})
    if strangers:
        raise AlreadyExists(f"{path} is not empty: it holds {strangers[0]!r}", hint="choose an empty or new folder")
    if any(files.names(folder) for folder in (layout.commits, layout.pins, layout.objects)):
        raise _lost_identity(path)
    files.make_directories(layout.root.parent)
    for folder in (layout.root, *layout.folders):
        files.make_directory(folder)
    identity = new_identity(created=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    with files.temporary(layout.tmp) as file:
        file.write_at(0, encode_identity(identity))
        file.sync()
        if not files.link_exclusive(file.path, layout.identity):
            raise AlreadyExists(f"{path} was made a store by somebody else just now", hint="use it")
    files.sync_directory(layout.root)
    Garbage(layout, files, store_id=identity.store_id).make_reserve(records=0)
    return identity


def _layout(path: Path) -> Layout:
    try:
        return Layout(Path(os.path.realpath(path)))
    except ValueError as exc:  # a NUL
        raise InvalidInput(f"{path} is no path: {exc}", hint="name the folder of a store") from exc


def open_rooms(path: Path, files: Files) -> Rooms:
    """
    Open the store at *path*; nothing is written, not even an index, before a question needs one.

    Raises:
        NoStore: There is none.
        Unsupported: It is of another format.
        IntegrityError: ``store.json`` is damaged, or a folder is a link to elsewhere.
    """
    layout = _layout(path)
    identity = _read_identity(layout, files, path)
    _check_folders(layout, files)
    records = RecordStore(layout, files, store_id=identity.store_id)
    garbage = Garbage(layout, files, store_id=identity.store_id)
    return Rooms(
        identity=identity,
        layout=layout,
        files=files,
        objects=ObjectStore(layout, files),
        records=records,
        parts=PartStore(layout, files, store_id=identity.store_id),
        garbage=garbage,
        catalog=Catalog(
            records,
            garbage,
            directory=manifest_directory(layout, store_id=identity.store_id),
            store_id=identity.store_id,
        ),
    )


def _read_identity(layout: Layout, files: Files, path: Path) -> StoreIdentity:
    try:
        present = files.exists(layout.identity)
    except StorageIO as exc:
        if exc.errno in {errnos.ENOTDIR, errnos.ENAMETOOLONG, errnos.ELOOP}:
            raise NoStore(f"there is no store at {path}: {os.strerror(exc.errno)}", hint="name a folder") from exc
        present = True  # so that reading it raises what is really wrong
    if not present:
        if files.names(layout.commits) if files.is_directory(layout.commits) else False:
            raise _lost_identity(path)
        raise NoStore(f"there is no store at {path}", hint=f"layerstore init {path}, or name yours with --store")
    data = files.read(layout.identity, size_bytes_max=RECORD_BYTES_MAX)
    return decode_identity(data, what=str(layout.identity))


def _lost_identity(path: Path) -> IntegrityError:
    return IntegrityError(
        f"{path} holds commits or objects, but its store.json is missing; nothing was changed",
        hint="put back a copy of store.json; it never changes after init",
    )


def _check_folders(layout: Layout, files: Files) -> None:
    device = files.device(layout.root)
    for folder in layout.folders:
        if not files.exists(folder):
            continue  # made again by the first writer; a missing commits/ is reported by whoever lists it
        if not files.is_directory(folder):
            raise IntegrityError(
                f"{folder} is not a folder of the store but a link or file; nothing was read or changed",
                hint="remove it, or put the folder back",
            )
        if files.device(folder) != device:
            raise InvalidInput(
                f"{folder} is on another filesystem than {layout.root}; they must be on the same filesystem",
                hint="unmount it: new files are linked from tmp/ into their places",
            )
