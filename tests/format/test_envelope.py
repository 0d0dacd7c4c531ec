"""Promises of the envelope: no byte of a record changes unseen, and no record is taken for another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstore.errors import IntegrityError, Unsupported
from layerstore.format.records import MAGIC, seal, unseal
from layerstore.hashing import digest

STORE = "5e" * 16
NAME = "commits/sft/4.0"
SMALL = seal(b"payload", name=NAME, store_id=STORE)


@given(
    store_id=st.binary(min_size=16, max_size=16).map(bytes.hex),
    name=st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
    payload=st.binary(),
)
def test_what_was_sealed_is_read_back(store_id: str, name: str, payload: bytes) -> None:
    """A payload comes back as it was, whatever it, its name and its store are."""
    data = seal(payload, name=name, store_id=store_id)

    assert payload == unseal(data, name=name, store_id=store_id)


def test_the_layout_is_that_of_the_page() -> None:
    """Every byte is where the table of the format says: a change here is a change of format."""
    expected = b"".join(
        [
            b"\x89LSR\r\n\x1a\n",
            b"\x00\x02",
            bytes.fromhex(STORE),
            b"\x00\x0f",
            b"commits/sft/4.0",
            b"\x00\x00\x00\x00\x00\x00\x00\x07",
            b"payload",
        ]
    )

    assert expected + digest(expected) == SMALL


def test_every_changed_byte_is_found() -> None:
    """Every byte replaced by every other value: each is damage, none passes."""
    data = SMALL
    for position in range(len(data)):
        for value in range(256):
            hurt = data[:position] + bytes([value]) + data[position + 1 :]
            if hurt != data:
                with pytest.raises(IntegrityError):
                    unseal(hurt, name=NAME, store_id=STORE)


def test_every_truncation_and_extension_is_found() -> None:
    """An envelope of any other length is damage, the empty one included."""
    data = SMALL
    for hurt in [data[:end] for end in range(len(data))] + [data[1:], data + b"\0", data + data, b"\0" + data]:
        with pytest.raises(IntegrityError):
            unseal(hurt, name=NAME, store_id=STORE)


def test_a_moved_envelope_is_found() -> None:
    """A record under another name says how it was written."""
    with pytest.raises(IntegrityError, match=r"written as 'commits/sft/4\.0' and has been moved"):
        unseal(SMALL, name="commits/other/4.0", store_id=STORE)


def test_an_envelope_of_another_store_is_found() -> None:
    """A record that was copied from another store is not taken for one of this."""
    with pytest.raises(IntegrityError, match="belongs to another store"):
        unseal(SMALL, name=NAME, store_id="00" * 16)


def resealed(body: bytes) -> bytes:
    """Return *body* under a right checksum."""
    return body + digest(body)


@pytest.mark.fault(85)
def test_a_newer_schema_is_not_called_damage() -> None:
    """A whole envelope of another schema asks for a newer layerstore, and names both schemas."""
    body = SMALL[:-16]

    with pytest.raises(Unsupported, match="has record schema 3, this layerstore knows 2"):
        unseal(resealed(body[:8] + b"\x00\x03" + body[10:]), name=NAME, store_id=STORE)


@pytest.mark.parametrize(
    "body",
    [
        MAGIC + b"\x00\x02" + bytes(16) + b"\xff\xff" + bytes(20),
        MAGIC + b"\x00\x02" + bytes(16) + b"\x00\x01\xff" + bytes(8),
        MAGIC + b"\x00\x02" + bytes(16) + b"\x00\x00" + b"\xff" * 8,
        MAGIC + b"\x00\x02" + bytes(16) + b"\x00\x00" + bytes(8) + b"more",
    ],
    ids=["a name beyond the end", "a name that is not text", "a payload beyond the end", "bytes behind the payload"],
)
def test_lengths_that_lie_are_damage(body: bytes) -> None:
    """A crafted envelope with a right checksum and wrong lengths is damage, not a crash."""
    with pytest.raises(IntegrityError):
        unseal(resealed(body), name="", store_id="00" * 16)
