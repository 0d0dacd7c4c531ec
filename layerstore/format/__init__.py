"""Convert between bytes and the model; this package is pure and opens no file."""

from layerstore.format.canonical import Plain, pack, unpack
from layerstore.format.fields import from_plain, to_plain
from layerstore.format.records import (
    STATE_MAGIC,
    VERSION_MAGIC,
    WITHOUT_MOMENTS,
    commit_id,
    decode_state,
    decode_version,
    encode_blob,
    make_commit,
    named_in_version,
    pack_object,
    part_name,
    ref_of,
    seal_commit,
    seal_part,
    seal_pin,
    stated_store,
    unseal_commit,
    unseal_part,
    unseal_pin,
)
from layerstore.format.store_json import FORMAT, StoreIdentity, format_of, stated_flags
from layerstore.format.treecodec import encode_tree
