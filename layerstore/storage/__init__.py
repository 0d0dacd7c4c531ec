"""The storage of one store: its objects, records, parts, index and trash."""

from layerstore.storage.catalog import IndexNotice, RunView, hint_at_dropped
from layerstore.storage.commits import RecordName, RecordStore, hinted, name_in, read_identity, stated_ids
from layerstore.storage.index import RecordRow, engine_version, index_problem, row_of
from layerstore.storage.object_writer import Draft, ObjectWriter, Staged
from layerstore.storage.objects import Hashing, ObjectStore, Stretch, check_hash, read_chunks
from layerstore.storage.parts import PartStore
from layerstore.storage.repository import (
    INDEX_DIR_VARIABLE,
    Repository,
    check_free,
    index_directory,
    make_store,
    open_repository,
)
from layerstore.storage.trash import Trash
