"""
From format 0, which never was, to format 1: records say which flags they use.

Format 0 is format 1 but for this: records lie in ``records/`` and pins in ``tags/``, and a record has no ``flags``.
So every commit id changes, and with it every mention of one: in what a record supersedes, and in a pin's base.
Objects stay as they are.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from typing import TypeAlias, cast

from layerstore.errors import IntegrityError, Unsupported
from layerstore.format.canonical import Plain, pack, unpack
from layerstore.format.hashing import digest
from layerstore.migrations.step import NewFile, Older, Step

Body: TypeAlias = dict[str, Plain]

_MAGIC = b"\x89LSR\r\n\x1a\n"
_HEAD = struct.Struct(">8sH16sH")
_LENGTH = struct.Struct(">Q")
_DIGEST_BYTES = 16


# -- store.json ----------------------------------------------------------------------------------------------------


def identity_text(fields: Mapping[str, object]) -> bytes:
    """Return the text of a ``store.json``; both formats spell it alike."""
    plain = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return (json.dumps({**fields, "checksum": digest(plain).hex()}, indent=2, sort_keys=True) + "\n").encode()


def identity_fields(data: bytes, *, number: int) -> dict[str, object]:
    """Return the fields of the ``store.json`` *data* of format *number*, without its checksum."""
    fields = json.loads(data)
    fields.pop("checksum", None)
    if fields.get("format") != number or identity_text(fields) != data:
        raise IntegrityError("store.json is damaged", path="store.json")
    if fields["flags"]:
        raise Unsupported(f"store.json has the flags {fields['flags']}, which format {number} does not have")
    return cast("dict[str, object]", fields)


def _identity(data: bytes) -> bytes:
    return identity_text(identity_fields(data, number=0) | {"format": 1})


# -- envelopes -----------------------------------------------------------------------------------------------------


def seal(payload: Plain, *, name: str, store_id: str) -> bytes:
    """Return the envelope of *payload*, which is called *name*."""
    packed = pack(payload)
    head = _HEAD.pack(_MAGIC, 1, bytes.fromhex(store_id), len(name.encode()))
    body = head + name.encode() + _LENGTH.pack(len(packed)) + packed
    return body + digest(body)


def unseal(data: bytes, *, name: str, store_id: str) -> Body:
    """Return what is in the envelope *data*, found as *name*."""
    body, checksum = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if digest(body) != checksum:
        raise IntegrityError(f"{name} is damaged: its checksum does not match its bytes", path=name)
    magic, schema, found_id, name_bytes = _HEAD.unpack_from(body)
    if (magic, found_id.hex()) != (_MAGIC, store_id) or body[_HEAD.size : _HEAD.size + name_bytes] != name.encode():
        raise IntegrityError(f"{name} does not belong here", path=name)
    if schema != 1:
        raise Unsupported(f"{name} has record schema {schema}")
    return cast("Body", unpack(body[_HEAD.size + name_bytes + _LENGTH.size :], what=name))


def id_of(body: Body) -> str:
    """Return the id of a record's *body*, in either format."""
    return digest(pack(body)).hex()


# -- records and pins ----------------------------------------------------------------------------------------------


class _Ids:
    """The new ids of a run's records, worked out as they are asked for: one record may mention another."""

    def __init__(self, bodies: Mapping[str, Body]) -> None:
        self._bodies = bodies
        self._known: dict[str, str] = {}

    def new(self, old: str) -> str:
        """Return the new id of the record *old*; one that is gone keeps its name, and nobody will miss it."""
        if old not in self._known:
            body = self._bodies.get(old)
            self._known[old] = old if body is None else id_of(self.converted(body))
        return self._known[old]

    def converted(self, body: Body) -> Body:
        """Return *body* as format 1 has it."""
        superseded = sorted(self.new(str(old)) for old in cast("list[Plain]", body["supersedes"]))
        return body | {"flags": [], "supersedes": cast("Plain", superseded)}


def _convert(older: Older) -> Iterator[NewFile]:
    if not older.is_folder("records"):
        raise IntegrityError("records/ is missing although this is a store", path="records")
    store_id = str(identity_fields(older.read("store.json"), number=0)["store_id"])
    known: dict[str, str] = {}
    for run in older.names("records"):
        payloads = {}
        for name in older.names(f"records/{run}"):
            called = f"records/{run}/{name}"
            payloads[name] = unseal(older.read(called), name=called, store_id=store_id)
        bodies = {name.partition(".")[2]: cast("Body", payload["body"]) for name, payload in payloads.items()}
        ids = _Ids(bodies)
        for name, payload in payloads.items():
            step, _, old = name.partition(".")
            if id_of(bodies[old]) != old:
                raise IntegrityError(f"records/{run}/{name} does not hold the commit that its name says")
            known[old] = ids.new(old)
            path = f"commits/{run}/{step}.{known[old]}"
            body = ids.converted(bodies[old])
            yield NewFile(path=path, data=seal({**payload, "body": body}, name=path, store_id=store_id))
    for name in older.names("tags"):
        pin = cast("Body", unseal(older.read(f"tags/{name}"), name=f"tags/{name}", store_id=store_id)["pin"])
        record = cast("Body", pin["record"])
        superseded = sorted(known.get(str(old), str(old)) for old in cast("list[Plain]", record["supersedes"]))
        new = pin | {
            "base": known.get(str(pin["base"]), pin["base"]),
            "record": record | {"flags": [], "supersedes": cast("Plain", superseded)},
        }
        yield NewFile(path=f"pins/{name}", data=seal({"pin": new}, name=f"pins/{name}", store_id=store_id))


STEP = Step(
    source=0,
    target=1,
    summary="records say which flags they use",
    leaves=("records", "tags"),
    makes=("commits", "pins"),
    identity=_identity,
    convert=_convert,
)
