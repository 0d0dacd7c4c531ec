"""Promises of the canonical encoding: one value has one sequence of bytes, and nothing else is ever read."""

import struct
import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstore.errors import IntegrityError, InvalidInput
from layerstore.format import Plain, pack, unpack
from layerstore.limits import MIB

PLAIN: st.SearchStrategy[Plain] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=30,
)


@given(PLAIN)
def test_every_value_comes_back(value: Plain) -> None:
    """What was packed is read back equal, types included, by us and by any reader of msgpack."""
    again = unpack(pack(value), what="it")

    assert value == again == msgpack.unpackb(pack(value))
    assert pack(value) == pack(again)


@given(st.binary(min_size=8, max_size=8))
def test_every_double_keeps_its_bits(bits: bytes) -> None:
    """Floats come back bit for bit, NaN payloads and minus zero included."""
    (value,) = struct.unpack(">d", bits)
    data = pack(value)

    again = unpack(data, what="it")

    assert isinstance(again, float)
    assert struct.pack(">d", again) == struct.pack(">d", value)
    assert data == pack(again)


@pytest.mark.parametrize(
    "value",
    [
        2**64,
        -(2**63) - 1,
        "\ud800",
        {"\ud800": 1},
        {1: 2},
        (1, 2),
        {3},
        pytest.param(object(), id="an object"),
        {"a": 1, 2: 3},
    ],
    ids=repr,
)
def test_what_cannot_be_said_is_refused(value: Plain) -> None:
    """Nothing is silently turned into something else: not tuples into lists, not odd text into other text."""
    with pytest.raises(InvalidInput, match="cannot be recorded"):
        pack(value)


DEEP = 100_000


@pytest.mark.fault(85)
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "nothing"),
        (b"\xc1", "the code that msgpack never uses"),
        (b"\x01\x01", "a second value behind the first"),
        (b"\xc0\x00", "a trailing byte"),
        (b"\x92\x01", "a list that is cut short"),
        (b"\xa5abc", "text that is cut short"),
        (b"\x82\xa1a\x01\xa1a\x02", "one key twice"),
        (b"\x82\xa1b\x01\xa1a\x02", "keys out of order"),
        (b"\x81\x01\x02", "a key that is not text"),
        (b"\x81\xc4\x01a\x02", "a key of bytes"),
        (b"\xcc\x01", "a small number, written large"),
        (b"\xd9\x01a", "a short text, written long"),
        (b"\xdc\x00\x01\x01", "a short list, written long"),
        (b"\xde\x00\x01\xa1a\x01", "a small map, written long"),
        (b"\xca\x3f\x80\x00\x00", "a single-precision float"),
        (b"\xa1\xff", "text that is not UTF-8"),
        (b"\xa3\xed\xa0\x80", "a lone surrogate"),
        (b"\xd4\x05\x00", "an extension type"),
        (b"\xc7\x00\x05", "an extension type without content"),
        (b"\xd6\xff\x00\x00\x00\x00", "a timestamp"),
        (b"\xdd\xff\xff\xff\xff", "a list of four billion"),
        (b"\xdf\xff\xff\xff\xff", "a map of four billion"),
        (b"\xdb\xff\xff\xff\xff", "a text of four gigabytes"),
        (b"\xc6\xff\xff\xff\xff", "four gigabytes"),
        (b"\xc9\xff\xff\xff\xff\x05", "an extension of four gigabytes"),
        (b"\x91" * DEEP + b"\xc0", "lists in lists in lists"),
        (b"\x81\xa1a" * DEEP + b"\xc0", "maps in maps in maps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_canonical_is_damage(data: bytes, why: str) -> None:
    """Every other spelling is refused as damage, whether or not msgpack itself would take it."""
    with pytest.raises(IntegrityError, match=r"^the record"):
        unpack(data, what="the record")


@pytest.mark.fault(134)
@pytest.mark.parametrize("container", [b"\x80", b"\x90", b"\x81\xa1a\xc0", b"\x91\xc0"])
def test_containers_are_counted_before_they_are_made(container: bytes) -> None:
    """Each takes a byte in a file and 64 or more in memory; what has too many is refused before it costs that."""
    count = 200_000
    data = b"\xdd" + count.to_bytes(4, "big") + container * count
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match="more than 100000 maps and lists"):
            unpack(data, what="the record", containers_max=100_000)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 8 * count + len(data) + MIB


@pytest.mark.fault(134)
def test_a_list_is_as_long_as_its_bytes_allow() -> None:
    """Lists in lists that each claim to be as long as the rest of the file take no room for that."""
    count = 100_000
    data = (b"\xdd" + count.to_bytes(4, "big")) * 400 + b"\xc0" * count
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError):
            unpack(data, what="the record")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < MIB


def test_what_has_many_containers_is_read_if_they_are_few_enough() -> None:
    """Bytes that look like the beginning of one are not reason to refuse."""
    value: Plain = [b"\x80" * 1000, [], {"a": []}]

    assert value == unpack(pack(value), what="it", containers_max=4)
    with pytest.raises(IntegrityError):
        unpack(pack(value), what="it", containers_max=3)


@given(st.binary(max_size=60))
def test_whatever_is_read_is_written_the_same(data: bytes) -> None:
    """Random bytes are damage, or else exactly what packing their value gives."""
    try:
        value = unpack(data, what="it")
    except IntegrityError:
        return

    assert data == pack(value)
