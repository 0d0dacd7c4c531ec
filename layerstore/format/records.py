"""
Commit records, pins and parts, the envelope around each of them, and the blobs that commits refer to.

A record's id is the xxh3_128 of its body. Mere observations of the commit are stored outside the body, so that the same
content saved twice has one id. A part is one rank's share of a save, left for the rank that commits.

The envelope holds the store's id and the file's name, with a checksum over everything:

    bytes  0-7    magic  89 'L' 'S' 'R' 0D 0A 1A 0A
           8-9    schema, big-endian
          10-25   store id
          26-27   length n of the name, big-endian
          28-     name, UTF-8, n bytes
           …      length m of the payload, 8 bytes big-endian
           …      payload, m bytes
           last   xxh3_128 of everything before, 16 bytes

The name is the file's path in the store: ``commits/RUN/STEP.ID``, ``pins/NAME``.
As in PNG, the line-ending bytes in the magic reveal a transfer in text mode.
"""

import struct
from collections.abc import Sequence
from typing import TypeVar, cast

from layerstore.coding import CODINGS
from layerstore.errors import DAMAGED_HINT, IntegrityError, Unsupported
from layerstore.format.canonical import (
    Plain,
    check_containers,
    pack,
    pack_in_order,
    pack_list,
    pack_map,
    unpack,
)
from layerstore.format.fields import from_plain, to_plain
from layerstore.hashing import DIGEST_BYTES, digest, object_id
from layerstore.limits import RECORD_BYTES_MAX, RECORD_CONTAINERS_MAX
from layerstore.model import (
    CUTS,
    DCP,
    BlobRef,
    Commit,
    CommitId,
    CommitRecord,
    LayerVersion,
    ObjectId,
    Observed,
    Pin,
    StoredObject,
)
from layerstore.parts import PackedObject, Part
from layerstore.precision import COMPACT
from layerstore.states import RankState

WITHOUT_MOMENTS = "without-moments"
"""The optimizer's moments are removed, but not its masters, so training cannot resume from the commit."""

# Records with other flags need a newer layerstore.
KNOWN_FLAGS: frozenset[str] = frozenset({COMPACT, DCP, WITHOUT_MOMENTS})

MAGIC = b"\x89LSR\r\n\x1a\n"
SCHEMA = 2

_HEAD = struct.Struct(">8sH16sH")
_LENGTH = struct.Struct(">Q")


# -- the envelope --------------------------------------------------------------------------------------------------


def seal(payload: bytes, *, name: str, store_id: str) -> bytes:
    """Put *payload* into an envelope."""
    encoded_name = name.encode()
    head = _HEAD.pack(MAGIC, SCHEMA, bytes.fromhex(store_id), len(encoded_name))
    body = head + encoded_name + _LENGTH.pack(len(payload)) + payload
    assert len(body) + DIGEST_BYTES <= RECORD_BYTES_MAX, "records name blobs so that they stay small"
    check_containers(payload, what=name, containers_max=RECORD_CONTAINERS_MAX)  # otherwise nobody could read it
    return body + digest(body)


def unseal(data: bytes, *, name: str, store_id: str) -> bytes:
    """
    Check *data*, found under *name* in the store *store_id*, and return its payload.

    Raises:
        IntegrityError: A byte has changed, or the data belongs to another file or store.
        Unsupported: The data is intact, but has a newer schema.
    """
    if not _is_envelope(data):
        raise IntegrityError(f"{name} is not a record: it is empty, cut short or something else", path=name)
    # Checked before the schema: a flipped bit in the schema is damage, not a newer format.
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
        raise IntegrityError(
            f"{name} was written as {found_name!r} and has been moved or renamed",
            hint=f"give it back its name, {found_name}, if nothing is there, or move it out of the store",
            path=name,
            written_as=found_name,
        )
    return payload


def stated_store(data: bytes) -> str | None:
    """Return the id of the store that an intact envelope belongs to; None if *data* is not an intact envelope."""
    if not (_is_envelope(data) and _is_whole(data)):
        return None
    store: bytes = _HEAD.unpack_from(data)[2]
    return store.hex()


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


# -- commits -------------------------------------------------------------------------------------------------------


def commit_id(record: CommitRecord) -> CommitId:
    """Return the id of *record*."""
    return CommitId(digest(pack(to_plain(record))).hex())


def make_commit(record: CommitRecord, observed: Observed) -> Commit:
    """Return the commit of *record*, with its id."""
    return Commit(id=commit_id(record), record=record, observed=observed)


def seal_commit(commit: Commit, *, name: str, store_id: str) -> bytes:
    """Return the bytes of *commit*'s file, named *name*."""
    payload = pack({"body": to_plain(commit.record), "observed": to_plain(commit.observed)})
    return seal(payload, name=name, store_id=store_id)


def unseal_commit(data: bytes, *, name: str, store_id: str) -> Commit:
    """
    Decode the commit whose file is named *name*.

    Raises:
        IntegrityError: The file is damaged, misplaced, or does not match its name.
        Unsupported: The record needs a newer layerstore.
    """
    payload = _payload(data, name, store_id, "body", "observed")
    body = payload["body"]
    _check_flags(body, name)
    return Commit(
        id=CommitId(digest(pack_in_order(body)).hex()),
        record=from_plain(CommitRecord, body, what=name),
        observed=from_plain(Observed, payload["observed"], what=name),
    )


# -- pins and parts ------------------------------------------------------------------------------------------------


def seal_pin(pin: Pin, *, name: str, store_id: str) -> bytes:
    """Return the bytes of *pin*'s file, named *name*."""
    return seal(pack({"pin": to_plain(pin)}), name=name, store_id=store_id)


def unseal_pin(data: bytes, *, name: str, store_id: str) -> Pin:
    """Decode the pin whose file is named *name*; raises as ``unseal_commit`` does."""
    plain = _payload(data, name, store_id, "pin")["pin"]
    _check_flags(plain.get("record") if isinstance(plain, dict) else None, name)
    return from_plain(Pin, plain, what=name)


def part_name(session: str, save: int, rank: int) -> str:
    """Return the path of a part inside the store."""
    return f"parts/{session}/{save}.{rank}"


def seal_part(part: Part, *, store_id: str) -> bytes:
    """Return the bytes of *part*'s file."""
    return seal(pack({"part": to_plain(part)}), name=part_name(part.session, part.save, part.rank), store_id=store_id)


def unseal_part(data: bytes, *, name: str, store_id: str) -> Part:
    """Decode the part whose file is named *name*; raises IntegrityError if the part is damaged or misplaced."""
    plain = _payload(data, name, store_id, "part")["part"]
    part = from_plain(Part, plain, what=name)
    if part_name(part.session, part.save, part.rank) != name:
        raise IntegrityError(f"{name} holds another rank's part, or another save's", path=name)
    return part


# -- blobs ---------------------------------------------------------------------------------------------------------

# Version blobs and state blobs are small content-addressed files: eight bytes of magic, which give the kind, then one
# canonical value. A blob's name is its checksum.

VERSION_MAGIC = b"\x89LSV\r\n\x1a\n"
STATE_MAGIC = b"\x89LSS\r\n\x1a\n"

Blob = TypeVar("Blob", LayerVersion, RankState)


def encode_blob(
    blob: LayerVersion | RankState,
    objects: Sequence[PackedObject] = (),
    references: Sequence[PackedObject] = (),
) -> bytes:
    """Return the bytes of *blob*; a version without objects gets *objects* and *references*, already packed."""
    assert not (objects or references) or (isinstance(blob, LayerVersion) and objects and not blob.named)
    if objects:
        whole = {name: pack_in_order(value) for name, value in cast("dict[str, Plain]", to_plain(blob)).items()}
        named = {"objects": objects, "references": references} if references else {"objects": objects}
        data = pack_map(whole | {name: pack_list(list(map(_pack_whole, packed))) for name, packed in named.items()})
    else:
        data = pack_in_order(to_plain(blob))
    check_containers(data, what=f"a {type(blob).__name__}")  # otherwise nobody could read it
    return (VERSION_MAGIC if isinstance(blob, LayerVersion) else STATE_MAGIC) + data


def pack_object(stored: StoredObject) -> PackedObject:
    """Return *stored* with its tensors encoded, as a part holds it and a version blob takes it over."""
    return PackedObject(
        id=stored.id,
        size_bytes=stored.size_bytes,
        kind=stored.kind,
        shard=stored.shard,
        shards=stored.shards,
        tensors=pack_in_order(to_plain(stored.tensors)),
        chunks=stored.chunks,
        reference=stored.reference,
    )


def _pack_whole(packed: PackedObject) -> bytes:
    """Return the encoding of the StoredObject from which *packed* was made."""
    whole = {name: pack_in_order(value) for name, value in cast("dict[str, Plain]", to_plain(packed)).items()}
    return pack_map(whole | {"tensors": packed.tensors})


def decode_version(data: bytes, *, ref: BlobRef) -> LayerVersion:
    """Decode the version *ref*; raises IntegrityError if it is damaged, Unsupported if it needs a newer layerstore."""
    version = _decode(data, ref, VERSION_MAGIC, LayerVersion)
    _check_cut(version, ref)
    codings = {tensor.coding for stored in version.named for tensor in stored.tensors} - {""}
    for name in sorted(codings - CODINGS.keys()):
        raise Unsupported(
            f"version {ref.id} has slices coded as {name!r}, which this layerstore does not know",
            hint="use a newer layerstore",
        )
    if (codings or version.references) and (problem := _misfit_of_coded(version)) is not None:
        raise IntegrityError(f"object {ref.id}: {problem}", object_id=ref.id)
    return version


def _check_cut(version: LayerVersion, ref: BlobRef) -> None:
    if version.cut not in CUTS:
        raise Unsupported(
            f"version {ref.id} is cut into slices by {version.cut!r}, which this layerstore does not know",
            hint="use a newer layerstore",
        )


def named_in_version(data: bytes, *, ref: BlobRef) -> list[BlobRef]:
    """
    Return the objects needed to read the version *ref*; raises as `decode_version` does.

    A collection calls this for every version, so it skips the tensors, which are nearly all of a version.
    """
    _check_blob(data, ref, VERSION_MAGIC, LayerVersion)
    plain = unpack(data[len(VERSION_MAGIC) :], what=f"object {ref.id}")
    for row in [row for name in ("objects", "references") for row in _items(plain, name)]:
        if isinstance(row, dict) and _items(row, "tensors"):
            row["tensors"] = []
    version = from_plain(LayerVersion, plain, what=f"object {ref.id}")
    _check_cut(version, ref)
    if {stored.reference for stored in version.objects} - {""} != {stored.id for stored in version.references}:
        decode_version(data, ref=ref)  # raises the error that describes the problem
    return [stored.ref for stored in version.named]


def _items(plain: Plain, name: str) -> list[Plain]:
    items = plain.get(name) if isinstance(plain, dict) else None
    return items if isinstance(items, list) else []


def _misfit_of_coded(version: LayerVersion) -> str | None:
    """Return what is wrong with the coded objects or their references; None if nothing is."""
    references = {stored.id: stored for stored in version.references}
    for stored in version.objects:
        codings = [CODINGS[tensor.coding] for tensor in stored.tensors if tensor.coding]
        if any(tensor.coding and tensor.dtype != "F32" for tensor in stored.tensors):
            return f"object {stored.id} has coded slices that are not fp32"
        if bool(stored.reference) != any(coding.needs_reference for coding in codings):
            return f"object {stored.id} refers to {stored.reference or 'nothing'}, contradicting its slices' coding"
        if not stored.reference:
            continue
        older = references.get(ObjectId(stored.reference))
        if older is None:
            return f"object {stored.id} refers to {stored.reference}, which its version does not name"
        if older.is_coded or _plain_slices(older) != _plain_slices(stored):
            return f"object {stored.id} refers to {older.id}, which has coded or different slices"
    unused = references.keys() - {stored.reference for stored in version.objects}
    return f"it names {min(unused)}, which none of its objects refers to" if unused else None


def _plain_slices(stored: StoredObject) -> list[tuple[str, str, int]]:
    return [(tensor.key, tensor.dtype, tensor.elements) for tensor in stored.tensors]


def decode_state(data: bytes, *, ref: BlobRef) -> RankState:
    """Decode the rank state *ref*; raises IntegrityError if the bytes do not match."""
    return _decode(data, ref, STATE_MAGIC, RankState)


def ref_of(data: bytes) -> BlobRef:
    """Return the id and size of *data*."""
    return BlobRef(id=object_id(data), size_bytes=len(data))


def _decode(data: bytes, ref: BlobRef, magic: bytes, cls: type[Blob]) -> Blob:
    _check_blob(data, ref, magic, cls)
    return from_plain(cls, unpack(data[len(magic) :], what=f"object {ref.id}"), what=f"object {ref.id}")


def _check_blob(data: bytes, ref: BlobRef, magic: bytes, cls: type[Blob]) -> None:
    actual = ref_of(data)
    if actual != ref:
        length = (
            "" if actual.size_bytes == ref.size_bytes else f"{actual.size_bytes} bytes, not {ref.size_bytes}, that "
        )
        raise IntegrityError(
            f"object {ref.id} is damaged: it holds {length or 'bytes that '}hash to {actual.id}",
            hint=DAMAGED_HINT,
            object_id=ref.id,
        )
    if not data.startswith(magic):
        raise IntegrityError(f"object {ref.id} is whole, but not a {cls.__name__}", object_id=ref.id)


# ------------------------------------------------------------------------------------------------------------------


def _payload(data: bytes, name: str, store_id: str, *expected: str) -> dict[str, Plain]:
    packed = unseal(data, name=name, store_id=store_id)
    payload = unpack(packed, what=name, containers_max=RECORD_CONTAINERS_MAX)
    if not isinstance(payload, dict) or payload.keys() != set(expected):
        raise IntegrityError(f"{name} does not hold {' and '.join(expected)}", path=name)
    return payload


def _check_flags(body: Plain, name: str) -> None:
    """Check the flags before any other field: an unknown flag may announce unknown fields."""
    flags = body.get("flags") if isinstance(body, dict) else None
    unknown = sorted({str(flag) for flag in flags} - KNOWN_FLAGS) if isinstance(flags, list) else []
    if unknown:
        raise Unsupported(
            f"{name} uses {', '.join(unknown)}, which this layerstore does not know", hint="use a newer layerstore"
        )
