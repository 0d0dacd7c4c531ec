"""Bytes to model and back, pure: nothing here opens a file."""

from layerstore.format.blobs import (
    STATE_MAGIC,
    VERSION_MAGIC,
    decode_state,
    decode_version,
    encode_state,
    encode_version,
    ref_of,
)
from layerstore.format.canonical import Plain, pack, pack_again, unpack, unpack_known
from layerstore.format.envelope import stated_store
from layerstore.format.fields import from_plain, to_plain
from layerstore.format.hashing import (
    DIGEST_BYTES,
    Bytes,
    NameHasher,
    ObjectHasher,
    combine_crc32,
    crc32,
    crc32_of_zeros,
    digest,
    object_id,
)
from layerstore.format.identity import (
    FORMAT,
    HASH,
    StoreIdentity,
    decode_identity,
    encode_identity,
    format_of,
    new_identity,
    stated_flags,
)
from layerstore.format.objects import canonical_order, frame, slice_bytes
from layerstore.format.parts import part_name, seal_part, unseal_part
from layerstore.format.records import (
    WITHOUT_MOMENTS,
    commit_id,
    make_commit,
    seal_commit,
    seal_pin,
    unseal_commit,
    unseal_entries,
    unseal_pin,
)
from layerstore.format.treecodec import encode_tree

__all__ = [
    "DIGEST_BYTES",
    "FORMAT",
    "HASH",
    "STATE_MAGIC",
    "VERSION_MAGIC",
    "WITHOUT_MOMENTS",
    "Bytes",
    "NameHasher",
    "ObjectHasher",
    "Plain",
    "StoreIdentity",
    "canonical_order",
    "combine_crc32",
    "commit_id",
    "crc32",
    "crc32_of_zeros",
    "decode_identity",
    "decode_state",
    "decode_version",
    "digest",
    "encode_identity",
    "encode_state",
    "encode_tree",
    "encode_version",
    "format_of",
    "frame",
    "from_plain",
    "make_commit",
    "new_identity",
    "object_id",
    "pack",
    "pack_again",
    "part_name",
    "ref_of",
    "seal_commit",
    "seal_part",
    "seal_pin",
    "slice_bytes",
    "stated_flags",
    "stated_store",
    "to_plain",
    "unpack",
    "unpack_known",
    "unseal_commit",
    "unseal_entries",
    "unseal_part",
    "unseal_pin",
]
