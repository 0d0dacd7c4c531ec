"""
The envelope of records, pins and index rows: who wrote it, what it is called, and a checksum over all of it.

    bytes  0-7    magic  89 'L' 'S' 'R' 0D 0A 1A 0A
           8-9    schema, big-endian
          10-25   store id
          26-27   length n of the name, big-endian
          28-     name, UTF-8, n bytes
           …      length m of the payload, 8 bytes big-endian
           …      payload, m bytes
           last   xxh3_128 of everything before, 16 bytes

The line-ending bytes in the magic make a transfer in text mode visible, as PNG's do.
"""

import struct
from dataclasses import dataclass

from layerstore.errors import IntegrityError, Unsupported
from layerstore.format.hashing import DIGEST_BYTES, digest
from layerstore.limits import RECORD_BYTES_MAX

MAGIC = b"\x89LSR\r\n\x1a\n"
SCHEMA = 2
STORE_ID_BYTES = 16

_HEAD = struct.Struct(">8sH16sH")
_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A payload and what was written on its envelope."""

    store_id: str
    """32 hex digits."""
    name: str
    """Where it belongs: ``commits/RUN/STEP.ID``, ``pins/NAME``."""
    payload: bytes


def seal(envelope: Envelope) -> bytes:
    """Return the bytes of *envelope*."""
    name = envelope.name.encode()
    head = _HEAD.pack(MAGIC, SCHEMA, bytes.fromhex(envelope.store_id), len(name))
    body = head + name + _LENGTH.pack(len(envelope.payload)) + envelope.payload
    assert len(body) + DIGEST_BYTES <= RECORD_BYTES_MAX, "records name blobs so that they stay small"
    return body + digest(body)


def unseal(data: bytes, *, name: str, store_id: str) -> Envelope:
    """
    Check *data*, found under *name* in the store *store_id*, and return what it holds.

    Raises:
        IntegrityError: A byte is not as written, or it belongs elsewhere.
        Unsupported: It is whole, but of a newer schema.
    """
    body, checksum = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if len(body) < _HEAD.size + _LENGTH.size or not body.startswith(MAGIC):
        raise IntegrityError(f"{name} is not a record: it is empty, cut short or something else", path=name)
    if digest(body) != checksum:
        raise IntegrityError(f"{name} is damaged: its checksum does not match its bytes", path=name)
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
    return Envelope(store_id=store_id, name=name, payload=payload)


def stated_store(data: bytes) -> str | None:
    """Return the id of the store that a whole envelope says it belongs to; None where *data* is none."""
    body, checksum = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if len(body) < _HEAD.size + _LENGTH.size or not body.startswith(MAGIC) or digest(body) != checksum:
        return None
    found: bytes = _HEAD.unpack_from(body)[2]
    return found.hex()


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
