"""Make a store, and open the repository of one."""

import os
import time
from pathlib import Path

from layerstore.errors import AlreadyExists, IntegrityError, InvalidInput, Unsupported
from layerstore.format import StoreIdentity, decode_identity, encode_identity, new_identity
from layerstore.layers import typed
from layerstore.layout import Layout, layout_at
from layerstore.storage.aside import Aside
from layerstore.storage.catalog import Catalog
from layerstore.storage.commits import RecordStore
from layerstore.storage.files import Files
from layerstore.storage.identity import hinted, lost_identity, read_identity, sign_of_a_store
from layerstore.storage.locks import open_lock_file
from layerstore.storage.objects import ObjectStore
from layerstore.storage.parts import PartStore
from layerstore.storage.placement import manifest_directory
from layerstore.storage.repository import Repository
from layerstore.storage.trash import Trash

NO_INDEX_VARIABLE = "LAYERSTORE_NO_INDEX"


def make_store(path: Path, files: Files) -> StoreIdentity:
    """
    Make the folder *path* a store.

    ``store.json`` comes last: until it is there, it is no store, and ``init`` may be repeated.

    Raises:
        AlreadyExists: There is a store already, or a folder with something else in it.
        IntegrityError: There was a store: what only a store has is there, and ``store.json`` is not.
    """
    layout = layout_at(path)
    if files.exists(layout.identity):
        raise AlreadyExists(
            f"{path} is a store already; nothing was changed", hint=f"layerstore log --store {typed(str(path))}"
        )
    if files.exists(layout.root) and not files.is_directory(layout.root):
        raise AlreadyExists(f"{path} is there and is not a folder", hint="choose another path")
    sign = sign_of_a_store(layout, files)
    if sign is not None:
        raise hinted(lost_identity(path, sign), layout, files)
    strangers = sorted(set(files.names(layout.root)) - {folder.name for folder in (*layout.folders, layout.manifest)})
    if strangers:
        raise AlreadyExists(f"{path} is not empty: it holds {strangers[0]!r}", hint="choose an empty or new folder")
    files.make_directories(layout.root.parent)
    for folder in (layout.root, *layout.folders):
        files.make_directory(folder)
    # A collection that is to make room finds none for this file.
    os.close(open_lock_file(layout.gc_lock))
    identity = new_identity(created=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    with files.temporary(layout.tmp) as file:
        file.write_at(0, encode_identity(identity))
        file.sync()
        if not files.link_exclusive(file.path, layout.identity):
            raise AlreadyExists(f"{path} was made a store by somebody else just now", hint="use it")
    files.sync_directory(layout.root)
    return identity


def open_repository(path: Path, files: Files) -> Repository:
    """
    Open the store at *path*; nothing is written, not even an index, before a question needs one.

    Raises:
        NoStore: There is none.
        Unsupported: It is of another format, or its migration to this one was interrupted.
        IntegrityError: ``store.json`` is damaged, or a folder is a link to elsewhere.
    """
    layout = layout_at(path)
    try:
        identity = decode_identity(read_identity(layout, files, path=path), what=str(layout.identity))
    except IntegrityError as exc:
        raise hinted(exc, layout, files) from exc
    if files.exists(layout.migrated(identity.format)):
        raise Unsupported(
            f"a migration of {layout.root} was interrupted; nothing was changed", hint="layerstore migrate finishes it"
        )
    _check_folders(layout, files)
    records = RecordStore(layout, files, store_id=identity.store_id)
    catalog = Catalog(
        records,
        directory=manifest_directory(layout, store_id=identity.store_id),
        store_id=identity.store_id,
    )
    if os.environ.get(NO_INDEX_VARIABLE, "0") not in {"", "0"}:
        catalog.index_problem = f"{NO_INDEX_VARIABLE} is set"
    return Repository(
        identity=identity,
        layout=layout,
        files=files,
        objects=ObjectStore(layout, files),
        records=records,
        parts=PartStore(layout, files, store_id=identity.store_id),
        aside=Aside(layout, files),
        trash=Trash(layout, files, records),
        catalog=catalog,
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
