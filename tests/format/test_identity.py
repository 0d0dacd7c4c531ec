"""Promises of ``store.json``: readable by people, and no byte of it changes unseen."""

import json

import pytest

from layerstore.errors import IntegrityError, LayerstoreError, Unsupported
from layerstore.format import FORMAT, StoreIdentity, format_of, stated_flags

IDENTITY = StoreIdentity(format=FORMAT, store_id="5e" * 16, hash="xxh3_128", created="2026-01-01T00:00:00+0000")


def test_an_identity_is_read_back() -> None:
    """What init wrote is what every open reads."""
    assert StoreIdentity.decode(IDENTITY.encode(), what="store.json") == IDENTITY


def test_people_can_read_it() -> None:
    """It is indented JSON with a last newline, and says format, id, hash and time."""
    text = IDENTITY.encode().decode()

    assert text.endswith("}\n")
    assert json.loads(text).keys() == {"format", "store_id", "hash", "created", "flags", "checksum"}


@pytest.mark.full
@pytest.mark.fault(43)
def test_every_changed_byte_is_found() -> None:
    """Every byte replaced by every other value: each is refused, none passes."""
    data = IDENTITY.encode()
    for position in range(len(data)):
        for value in range(256):
            hurt = data[:position] + bytes([value]) + data[position + 1 :]
            if hurt != data:
                with pytest.raises(LayerstoreError):
                    StoreIdentity.decode(hurt, what="store.json")


def test_every_truncation_and_extension_is_found() -> None:
    """Any other length is refused, a missing last newline included."""
    data = IDENTITY.encode()
    for hurt in [*(data[:end] for end in range(len(data))), data + b"\n", b" " + data]:
        with pytest.raises(IntegrityError):
            StoreIdentity.decode(hurt, what="store.json")


@pytest.mark.parametrize("text", ["", "null", "[]", "7", "{}", "{", "\0", '{"format": true}', "[" * 100_000])
def test_something_else_is_damage(text: str) -> None:
    """A file that is not an identity is damage, with the way to heal it."""
    with pytest.raises(IntegrityError, match=r"store\.json is damaged") as caught:
        StoreIdentity.decode(text.encode(), what="store.json")

    assert caught.value.hint


@pytest.mark.fault(80)
def test_a_newer_format_is_recognised_first() -> None:
    """A store of a later format is named so, even if everything else in the file has changed."""
    with pytest.raises(Unsupported, match="format 999; this layerstore reads format 2") as caught:
        StoreIdentity.decode(b'{"format": 999, "unheard": "of"}', what="store.json")

    assert caught.value.hint == "use a newer layerstore"


@pytest.mark.fault(82)
def test_an_older_format_names_the_command() -> None:
    """A store of an earlier format is for ``migrate``."""
    with pytest.raises(Unsupported, match="format 0") as caught:
        StoreIdentity.decode(b'{"format": 0}', what="store.json")

    assert caught.value.hint == "layerstore migrate"


def test_unknown_flags_are_reported_not_refused() -> None:
    """A flag that this version does not know leaves the store readable; whoever writes must ask."""
    flagged = StoreIdentity(format=FORMAT, store_id="5e" * 16, hash="xxh3_128", created="now", flags=("packs",))

    assert StoreIdentity.decode(flagged.encode(), what="store.json").unknown_flags == ["packs"]


@pytest.mark.fault(43, 80, 82)
@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_in_the_format_is_damage_and_no_other_format(bit: int) -> None:
    """Nobody is sent for a newer layerstore, or to migrate, by a store whose checksum says that it is of this one."""
    data = bytearray(IDENTITY.encode())
    data[data.index(b'"format": 2') + len(b'"format": ')] ^= 1 << bit

    for read in (StoreIdentity.decode, format_of):
        with pytest.raises(IntegrityError, match=r"store\.json is damaged"):
            read(bytes(data), what="store.json")


@pytest.mark.fault(81)
@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (b'{"format": 3, "flags": ["packs", "more"]}', ("packs", "more")),
        (b'{"format": 3, "flags": ["packs", 7]}', ("packs",)),
        (b'{"flags": []}', ()),
        (b'{"flags": "packs"}', None),
        (b"{}", None),
        (b'{"flags": ["packs"]', None),
    ],
)
def test_flags_are_read_from_what_is_damaged(text: bytes, flags: tuple[str, ...] | None) -> None:
    """A flag that is not known keeps an older layerstore from writing, also once ``store.json`` is written again."""
    assert stated_flags(text) == flags
