"""Promises of records, pins and blobs: strict images of the model, named by their content alone."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest

from layerstore.errors import IntegrityError, Unsupported
from layerstore.format import (
    Plain,
    commit_id,
    decode_state,
    decode_version,
    encode_blob,
    from_plain,
    named_in_version,
    pack,
    pack_object,
    ref_of,
    seal_commit,
    seal_pin,
    to_plain,
    unseal_commit,
    unseal_pin,
)
from layerstore.format.records import seal
from layerstore.model import CommitRecord, Fork, LayerVersion, StoredObject
from layerstore.parts import PackedObject
from layerstore.states import RankState
from tests.unit import samples
from tests.unit.samples import STORE_ID
from tests.zero3.ptfiles import fingerprint

NAME = "commits/sft/4.0"

RECORDS = [
    samples.record(),
    samples.record(attempt=2, fork=Fork(attempt=1, step=2)),
    samples.record(step=0),
    samples.record(supersedes=[samples.commit().id]),
    samples.record(run="ünï 50%", step=10**18),
]


@pytest.mark.parametrize("record", RECORDS, ids=range(len(RECORDS)))
def test_a_commit_is_read_back(record: CommitRecord) -> None:
    """Record, name and what was observed come back equal."""
    commit = samples.commit(record)

    assert commit == unseal_commit(seal_commit(commit, name=NAME, store_id=STORE_ID), name=NAME, store_id=STORE_ID)


def test_the_id_does_not_depend_on_what_was_observed() -> None:
    """Equal content saved at another time, with other bytes new, has the same name and other bytes beside it."""
    first, second = samples.commit(time_ns=1), samples.commit(time_ns=2)

    assert first.id == second.id == commit_id(samples.record())
    assert seal_commit(first, name=NAME, store_id=STORE_ID) != seal_commit(second, name=NAME, store_id=STORE_ID)


CHANGES: dict[str, Any] = {
    "run": "other",
    "attempt": 2,
    "lineage": (Fork(attempt=1, step=3),),
    "step": 5,
    "save_number": 1,
    "world_size": 3,
    "stage": 2,
    "layers": (samples.entry("model.embed"),),
    "states": (),
    "layout": dataclasses.replace(samples.record().layout, tag="other"),
    "policy": dataclasses.replace(samples.record().policy, name="parity"),
    "supersedes": ("0" * 32,),
    "precision": "delta8",
    "flags": ("trimmed",),
    "notes": ("later",),
}


def test_every_field_is_part_of_the_id() -> None:
    """No two records that differ in anything share a name."""
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(CommitRecord)}
    changed = [dataclasses.replace(samples.record(), **{name: value}) for name, value in CHANGES.items()]

    assert len({commit_id(record) for record in [samples.record(), *changed]}) == len(changed) + 1


@pytest.mark.fault(81)
def test_a_record_with_an_unknown_flag_needs_a_newer_layerstore() -> None:
    """A flag that this version does not know is not damage: it asks for a newer version, by the flag's name."""
    commit = samples.commit(samples.record(flags=["trimmed"]))

    with pytest.raises(Unsupported, match="uses trimmed"):
        unseal_commit(seal_commit(commit, name=NAME, store_id=STORE_ID), name=NAME, store_id=STORE_ID)


def test_a_pin_is_read_back() -> None:
    """A pin holds its whole record."""
    pin = samples.pin()

    assert pin == unseal_pin(seal_pin(pin, name="pins/best", store_id=STORE_ID), name="pins/best", store_id=STORE_ID)


def test_a_pin_is_no_commit() -> None:
    """A pin's bytes under a commit's name, and the reverse, are damage."""
    as_pin = seal_pin(samples.pin(), name=NAME, store_id=STORE_ID)
    as_commit = seal_commit(samples.commit(), name=NAME, store_id=STORE_ID)

    with pytest.raises(IntegrityError):
        unseal_commit(as_pin, name=NAME, store_id=STORE_ID)
    with pytest.raises(IntegrityError):
        unseal_pin(as_commit, name=NAME, store_id=STORE_ID)


# Nothing can ride along in a record's file unseen.
MORE: Plain = {"body": to_plain(samples.record()), "observed": to_plain(samples.observed()), "more": 1}


@pytest.mark.parametrize("payload", [None, {}, {"body": None, "observed": None}, {"body": {}, "observed": {}}, MORE])
def test_a_whole_envelope_with_something_else_in_it_is_damage(payload: Plain) -> None:
    """A right checksum does not make a record."""
    data = seal(pack(payload), name=NAME, store_id=STORE_ID)

    with pytest.raises(IntegrityError):
        unseal_commit(data, name=NAME, store_id=STORE_ID)
    with pytest.raises(IntegrityError):
        unseal_pin(data, name=NAME, store_id=STORE_ID)


def test_a_record_without_layers_is_damage() -> None:
    """There is no model without one, and nothing that reads a commit has to think of it."""
    commit = samples.commit(samples.record(layers=()))

    with pytest.raises(IntegrityError, match="it has no layers"):
        unseal_commit(seal_commit(commit, name=NAME, store_id=STORE_ID), name=NAME, store_id=STORE_ID)


@pytest.mark.parametrize("layer", [["head"], {}, None, 1])
def test_an_entry_without_a_name_is_damage(layer: Plain) -> None:
    """No layer can be looked up by anything but a text."""
    plain = cast(dict[str, Any], to_plain(samples.record()))
    plain["layers"][0]["layer"] = layer
    payload = pack({"body": plain, "observed": to_plain(samples.observed())})
    data = seal(payload, name=NAME, store_id=STORE_ID)

    with pytest.raises(IntegrityError, match="should be str"):
        unseal_commit(data, name=NAME, store_id=STORE_ID)


# -- fields --------------------------------------------------------------------------------------------------------


def changed(change: Callable[[dict[str, Any]], object]) -> Plain:
    """Return the image of a record after *change*."""
    image = cast("dict[str, Any]", to_plain(samples.record(fork=Fork(attempt=1, step=2))))
    change(image)
    return image


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image.pop("step"),
        lambda image: image.update(unknown=1),
        lambda image: image.update(step="4"),
        lambda image: image.update(step=4.0),
        lambda image: image.update(step=True),
        lambda image: image.update(step=None),
        lambda image: image.update(run=b"sft"),
        lambda image: image.update(run=None),
        lambda image: image.update(layers={}),
        lambda image: image.update(layers=[None]),
        lambda image: image.update(layers=[{}]),
        lambda image: image.update(lineage=7),
        lambda image: image.update(lineage=[7]),
        lambda image: image["lineage"][0].update(more=1),
        lambda image: image.update(supersedes=[7]),
        lambda image: image["layout"].update(layer_pattern=7),
        lambda image: image["layers"][0]["version"].update(size_bytes="10"),
        lambda image: image["layers"][0]["origin"].pop("run"),
        lambda image: image["policy"].update(parameters={}),
        lambda image: image["policy"].update(parameters=[[], ["?"]]),
        lambda image: image["policy"].update(decisions=None),
    ],
)
def test_what_is_not_exactly_a_record_is_damage(change: Callable[[dict[str, Any]], object]) -> None:
    """A missing, unknown or mistyped field, at any depth, is damage that names the field, never a guess."""
    with pytest.raises(IntegrityError, match=r"^the record: "):
        from_plain(CommitRecord, changed(change), what="the record")


def test_an_unchanged_image_is_a_record() -> None:
    """The image that the changes above start from is sound."""
    expected = samples.record(fork=Fork(attempt=1, step=2))

    assert expected == from_plain(CommitRecord, changed(lambda image: None), what="the record")


def test_unknown_kinds_are_damage() -> None:
    """An object's kind is one of four; a fifth belongs to a newer version."""
    image = cast("dict[str, Any]", to_plain(samples.version()))
    image["objects"][0]["kind"] = "gradients"

    with pytest.raises(IntegrityError, match="'gradients' is not a Kind"):
        from_plain(LayerVersion, image, what="the version")


def test_unknown_contents_are_damage() -> None:
    """A storage's content is bytes or one of four recipes."""
    image = cast("dict[str, Any]", to_plain(samples.state()))
    image["optimizer"]["tree"][0][0][3] = {"surprise": 1}

    with pytest.raises(IntegrityError, match="has no known content"):
        from_plain(RankState, image, what="the state")


# -- blobs ---------------------------------------------------------------------------------------------------------


def test_a_version_is_read_back() -> None:
    """A version blob holds the whole version, under the name of its bytes."""
    data = encode_blob(samples.version())

    assert samples.version() == decode_version(data, ref=ref_of(data))
    assert data.startswith(b"\x89LSV\r\n\x1a\n")


@pytest.mark.parametrize("version", [samples.version(), samples.coded_version()], ids=["exact", "coded"])
def test_packed_objects_make_the_same_version(version: LayerVersion) -> None:
    """What ranks have packed becomes, byte for byte, the blob that one process would make."""
    packed, older = (list(map(pack_object, objects)) for objects in (version.objects, version.references))

    assert encode_blob(version) == encode_blob(dataclasses.replace(version, objects=(), references=()), packed, older)


@pytest.mark.parametrize("version", [samples.version(), samples.coded_version()], ids=["exact", "coded"])
def test_what_a_version_names_is_known_without_its_tensors(version: LayerVersion) -> None:
    """A collection gets the same objects, and what they refer to."""
    data = encode_blob(version)

    assert [stored.ref for stored in version.named] == named_in_version(data, ref=ref_of(data))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda of: of.update(newer=1), "unknown or missing fields: newer"),
        (lambda of: of.update(objects=None), "objects: should be list, found NoneType"),
        (lambda of: of.update(objects=[7]), "is not a map"),
        (lambda of: of.update(references={}), "references: should be list, found dict"),
        (lambda of: of.update(objects=[{"id": "0" * 32, "size_bytes": 1}]), "missing fields: chunks, kind, shard"),
        (lambda of: of.update(cut="elsewhere"), "cut into slices by 'elsewhere'"),
        (lambda of: of["objects"][0].update(id="../../etc/passwd"), "id: it cannot be"),
        (lambda of: of["objects"][0].update(shard=9), "its shard 9, from 0, is not one of 2"),
        (lambda of: of["objects"][0].update(newer=1), "a StoredObject has unknown or missing fields: newer"),
        (lambda of: of["objects"][0].update(reference="0" * 32), "refers to 0{32}, which its version does not name"),
    ],
)
def test_a_version_that_may_name_more_is_refused(change: Callable[[dict[str, Any]], object], reason: str) -> None:
    """By a collection as by a reader: what it cannot read, or what an object refers to, might be needed."""
    plain = cast("dict[str, Any]", to_plain(samples.coded_version()))
    change(plain)
    data = b"\x89LSV\r\n\x1a\n" + pack(plain)

    for read in (decode_version, named_in_version):
        with pytest.raises((IntegrityError, Unsupported), match=reason):
            read(data, ref=ref_of(data))


def test_a_key_that_comes_twice_is_refused_by_collections_too() -> None:
    """The second list of objects would hide the first."""
    data = encode_blob(samples.version())
    twice = data.replace(b"\xa7objects", b"\xa7objects\x90\xa7objects").replace(
        bytes([data[8]]), bytes([data[8] + 1]), 1
    )

    for read in (decode_version, named_in_version):
        with pytest.raises(IntegrityError):
            read(twice, ref=ref_of(twice))


def test_a_packed_object_has_every_field_of_an_object() -> None:
    """A field of the one that the other lacked would be lost on the way into a commit."""
    fields = [{field.name for field in dataclasses.fields(each)} for each in (StoredObject, PackedObject)]

    assert fields[0] == fields[1]


def test_a_state_is_read_back() -> None:
    """A state blob holds trees, files and gathered weights, under the name of its bytes."""
    expected = samples.state()
    data = encode_blob(expected)

    found = decode_state(data, ref=ref_of(data))

    assert data.startswith(b"\x89LSS\r\n\x1a\n")
    assert (expected.rank, expected.files, expected.gathered) == (found.rank, found.files, found.gathered)
    assert encode_blob(found) == data
    expected_model, found_model = cast("dict[Any, Any]", expected.model.tree), cast("dict[Any, Any]", found.model.tree)
    assert expected_model.pop(7).storage.content == found_model.pop(7).storage.content
    assert fingerprint(expected_model) == fingerprint(found_model)


def test_every_flipped_bit_of_a_blob_is_found() -> None:
    """A blob's name is its checksum: no single flip passes."""
    data = encode_blob(samples.version())
    ref = ref_of(data)
    for position in range(len(data)):
        for bit in range(8):
            hurt = bytearray(data)
            hurt[position] ^= 1 << bit
            with pytest.raises(IntegrityError, match="is damaged"):
                decode_version(bytes(hurt), ref=ref)


def test_every_truncation_of_a_blob_is_found() -> None:
    """A blob of another length is damage that tells the length it should have."""
    data = encode_blob(samples.version())
    for hurt in [*(data[:end] for end in range(len(data))), data + b"\0"]:
        with pytest.raises(IntegrityError, match=rf"bytes, not {len(data)}, that"):
            decode_version(hurt, ref=ref_of(data))


def test_one_blob_is_not_taken_for_another() -> None:
    """A whole state blob where a version belongs is damage, and so is any other whole object."""
    for data in (encode_blob(samples.state()), b"any other object"):
        with pytest.raises(IntegrityError, match="is whole, but not a LayerVersion"):
            decode_version(data, ref=ref_of(data))
    version = encode_blob(samples.version())
    with pytest.raises(IntegrityError, match="is whole, but not a RankState"):
        decode_state(version, ref=ref_of(version))
