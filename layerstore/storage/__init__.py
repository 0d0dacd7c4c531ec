"""The disk: files, objects, records, the index, locks and trash of one store."""

from layerstore.storage.catalog import IndexNotice, RunView
from layerstore.storage.commits import RecordName, RecordStore, hinted, read_identity, stated_ids
from layerstore.storage.environment import engine_version, index_problem
from layerstore.storage.files import Files, Mount, WeakDurability, mount_of
from layerstore.storage.handles import Hook, NewFile, OpenFile, Stream, mapped_errors, no_hook
from layerstore.storage.locks import lock, open_lock_file, try_flock
from layerstore.storage.manifest import MANIFEST_DIR_VARIABLE, RecordRow, manifest_directory, row_of
from layerstore.storage.objects import ObjectStore, ObjectWriter
from layerstore.storage.repository import Repository, make_store, open_repository
from layerstore.storage.trash import Trash

__all__ = [
    "MANIFEST_DIR_VARIABLE",
    "Files",
    "Hook",
    "IndexNotice",
    "Mount",
    "NewFile",
    "ObjectStore",
    "ObjectWriter",
    "OpenFile",
    "RecordName",
    "RecordRow",
    "RecordStore",
    "Repository",
    "RunView",
    "Stream",
    "Trash",
    "WeakDurability",
    "engine_version",
    "hinted",
    "index_problem",
    "lock",
    "make_store",
    "manifest_directory",
    "mapped_errors",
    "mount_of",
    "no_hook",
    "open_lock_file",
    "open_repository",
    "read_identity",
    "row_of",
    "stated_ids",
    "try_flock",
]
