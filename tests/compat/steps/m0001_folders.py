"""
From format 1 to format 2, which there is not: records and pins lie in folders of other names.

What a record says stays as it is; only its envelope is new, because that has the record's place in it.
"""

import json
import struct
from collections.abc import Iterator

from layerstore.errors import IntegrityError
from layerstore.format.hashing import digest
from layerstore.migrations.step import NewFile, Older, Step

_HEAD = struct.Struct(">8sH16sH")
_DIGEST_BYTES = 16


def _identity(data: bytes) -> bytes:
    fields = json.loads(data)
    checksum = fields.pop("checksum")
    if digest(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hex() != checksum:
        raise IntegrityError("store.json is damaged", path="store.json")
    return json.dumps(fields | {"format": 2, "needs": "2.0", "checksum": "computed otherwise"}, indent=2).encode()


def _moved(data: bytes, *, old: str, new: str) -> bytes:
    body, checksum = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if digest(body) != checksum:
        raise IntegrityError(f"{old} is damaged: its checksum does not match its bytes", path=old)
    magic, schema, store_id, name_bytes = _HEAD.unpack_from(body)
    if body[_HEAD.size : _HEAD.size + name_bytes] != old.encode():
        raise IntegrityError(f"{old} does not belong here", path=old)
    rest = body[_HEAD.size + name_bytes :]
    moved = _HEAD.pack(magic, schema, store_id, len(new.encode())) + new.encode() + rest
    return moved + digest(moved)


def _convert(older: Older) -> Iterator[NewFile]:
    for run in older.names("commits"):
        for name in older.names(f"commits/{run}"):
            old, new = f"commits/{run}/{name}", f"records-2/{run}/{name}"
            yield NewFile(path=new, data=_moved(older.read(old), old=old, new=new))
    for name in older.names("pins"):
        old, new = f"pins/{name}", f"names-2/{name}"
        yield NewFile(path=new, data=_moved(older.read(old), old=old, new=new))


STEP = Step(
    source=1,
    target=2,
    summary="records and pins move",
    leaves=("commits", "pins"),
    makes=("records-2", "names-2"),
    identity=_identity,
    convert=_convert,
)
