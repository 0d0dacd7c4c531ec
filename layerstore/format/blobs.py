"""
Version blobs and state blobs: small content-addressed files.

A blob is eight bytes of magic, which state its kind, then one canonical value. Its name is its checksum.
"""

from typing import TypeVar

from layerstore.errors import DAMAGED_HINT, IntegrityError, Unsupported
from layerstore.format.canonical import check_containers, pack_in_order, unpack
from layerstore.format.fields import from_plain, to_plain
from layerstore.hashing import object_id
from layerstore.model import CUTS, BlobRef, LayerVersion, RankState

VERSION_MAGIC = b"\x89LSV\r\n\x1a\n"
STATE_MAGIC = b"\x89LSS\r\n\x1a\n"

Blob = TypeVar("Blob", LayerVersion, RankState)


def encode_blob(blob: LayerVersion | RankState) -> bytes:
    """Return the bytes of *blob*."""
    data = pack_in_order(to_plain(blob))
    check_containers(data, what=f"a {type(blob).__name__}")  # or nobody could read it again
    return (VERSION_MAGIC if isinstance(blob, LayerVersion) else STATE_MAGIC) + data


def decode_version(data: bytes, *, ref: BlobRef) -> LayerVersion:
    """Decode the layer version named *ref*; raises IntegrityError if the bytes do not match."""
    version = _decode(data, ref, VERSION_MAGIC, LayerVersion)
    if version.cut not in CUTS:
        raise Unsupported(
            f"version {ref.id} is cut into slices by {version.cut!r}, which this layerstore does not know",
            hint="use a newer layerstore",
        )
    return version


def decode_state(data: bytes, *, ref: BlobRef) -> RankState:
    """Decode the rank state named *ref*; raises IntegrityError if the bytes do not match."""
    return _decode(data, ref, STATE_MAGIC, RankState)


def ref_of(data: bytes) -> BlobRef:
    """Return the name and size of *data*."""
    return BlobRef(id=object_id(data), size_bytes=len(data))


def _decode(data: bytes, ref: BlobRef, magic: bytes, cls: type[Blob]) -> Blob:
    found = ref_of(data)
    if found != ref:
        length = "" if found.size_bytes == ref.size_bytes else f"{found.size_bytes} bytes, not {ref.size_bytes}, that "
        raise IntegrityError(
            f"object {ref.id} is damaged: it holds {length or 'bytes that '}hash to {found.id}",
            hint=DAMAGED_HINT,
            object_id=ref.id,
        )
    if not data.startswith(magic):
        raise IntegrityError(f"object {ref.id} is whole, but not a {cls.__name__}", object_id=ref.id)
    return from_plain(cls, unpack(data[len(magic) :], what=f"object {ref.id}"), what=f"object {ref.id}")
