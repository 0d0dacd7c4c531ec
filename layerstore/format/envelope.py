"""
The envelope of records, pins and parts: whose it is, what it is called, and a checksum over all of it.

    bytes  0-7    magic  89 'L' 'S' 'R' 0D 0A 1A 0A
           8-9    schema, big-endian
          10-25   store id
          26-27   length n of the name, big-endian
          28-     name, UTF-8, n bytes
           …      length m of the payload, 8 bytes big-endian
           …      payload, m bytes
           last   xxh3_128 of everything before, 16 bytes

The name is the file's path in the store: ``commits/RUN/STEP.ID``, ``pins/NAME``.
The line-ending bytes in the magic make a transfer in text mode visible, as PNG's do.
"""

import struct

from layerstore.errors import IntegrityError, Unsupported
from layerstore.format.hashing import DIGEST_BYTES, digest
from layerstore.limits import RECORD_BYTES_MAX

MAGIC = b"\x89LSR\r\n\x1a\n"
SCHEMA = 2

_HEAD = struct.Struct(">8sH16sH")
_LENGTH = struct.Struct(">Q")


def seal(payload: bytes, *, name: str, store_id: str) -> bytes:
    """Put *payload* into an envelope."""
    called = name.encode()
    head = _HEAD.pack(MAGIC, SCHEMA, bytes.fromhex(store_id), len(called))
    body = head + called + _LENGTH.pack(len(payload)) + payload
    assert len(body) + DIGEST_BYTES <= RECORD_BYTES_MAX, "records name blobs so that they stay small"
    return body + digest(body)


def unseal(data: bytes, *, name: str, store_id: str) -> bytes:
    """
    Check *data*, found under *name* in the store *store_id*, and return its payload.

    Raises:
        IntegrityError: A byte is not as written, or it belongs elsewhere.
        Unsupported: It is whole, but of a newer schema.
    """
    if not _is_envelope(data):
        raise IntegrityError(f"{name} is not a record: it is empty, cut short or something else", path=name)
    if not _is_whole(data):
        raise IntegrityError(f"{name} is damaged: its checksum does not match its bytes", path=name)
    body = data[:-DIGEST_BYTES]
    _, schema, found_store, name_bytes = _HEAD.unpack_from(body)
    if schema != SCHEMA:
        raise Unsupported(
            f"{name} has record schema {schema}, this layerstore knows {SCHEMA}", hint="use a newer layerstore"
        )
    found_name, payload = _split(body, name_bytes, name)
    if found_store.hex() != store_id:
        raise IntegrityError(f"{name} belongs to another store, {found_store.hex()}", path=name)
    if found_name != name:
        raise IntegrityError(f"{name} was written as {found_name!r} and has been moved or renamed", path=name)
    return payload


def stated_store(data: bytes) -> str | None:
    """Return the id of the store that an intact envelope belongs to; None where *data* is none."""
    if not (_is_envelope(data) and _is_whole(data)):
        return None
    found: bytes = _HEAD.unpack_from(data)[2]
    return found.hex()


def _is_envelope(data: bytes) -> bool:
    return len(data) >= _HEAD.size + _LENGTH.size + DIGEST_BYTES and data.startswith(MAGIC)


def _is_whole(data: bytes) -> bool:
    return digest(data[:-DIGEST_BYTES]) == data[-DIGEST_BYTES:]


def _split(body: bytes, name_bytes: int, name: str) -> tuple[str, bytes]:
    try:
        found_name = body[_HEAD.size : _HEAD.size + name_bytes].decode()
        (size_bytes,) = _LENGTH.unpack_from(body, _HEAD.size + name_bytes)
    except (UnicodeDecodeError, struct.error) as exc:
        raise IntegrityError(f"{name} is damaged: {exc}", path=name) from exc
    payload = body[_HEAD.size + name_bytes + _LENGTH.size :]
    if len(payload) != size_bytes:
        raise IntegrityError(f"{name} is damaged: {len(payload)} bytes of {size_bytes}", path=name)
    return found_name, payload
