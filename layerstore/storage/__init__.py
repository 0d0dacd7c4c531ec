"""The disk: files, objects, records, the index, locks and trash of one store."""

from layerstore.storage.catalog import IndexNotice, RunView
from layerstore.storage.commits import RecordName, RecordStore, hinted, name_in, read_identity, stated_ids
from layerstore.storage.files import Files, Mount, WeakDurability, mount_of
from layerstore.storage.handles import Hook, NewFile, OpenFile, Stream, mapped_errors, no_hook, pauses
from layerstore.storage.index import RecordRow, engine_version, index_problem, row_of
from layerstore.storage.locks import alone, host_name, hosts_seen, lock, open_lock_file, try_flock
from layerstore.storage.object_writer import ObjectWriter, Staged
from layerstore.storage.objects import Hashing, ObjectStore, Stretch, check_hash, read_chunks
from layerstore.storage.repository import (
    INDEX_DIR_VARIABLE,
    Repository,
    check_free,
    index_directory,
    make_store,
    open_repository,
)
from layerstore.storage.syncing import Syncing
from layerstore.storage.trash import Trash

__all__ = [
    "INDEX_DIR_VARIABLE",
    "Files",
    "Hashing",
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
    "Staged",
    "Stream",
    "Stretch",
    "Syncing",
    "Trash",
    "WeakDurability",
    "alone",
    "check_free",
    "check_hash",
    "engine_version",
    "hinted",
    "host_name",
    "hosts_seen",
    "index_directory",
    "index_problem",
    "lock",
    "make_store",
    "mapped_errors",
    "mount_of",
    "name_in",
    "no_hook",
    "open_lock_file",
    "open_repository",
    "pauses",
    "read_chunks",
    "read_identity",
    "row_of",
    "stated_ids",
    "try_flock",
]
