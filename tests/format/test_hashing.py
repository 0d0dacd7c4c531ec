"""Promises of the checksums, against other implementations and across every way of splitting the bytes."""

import zlib

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from layerstore.hashing import DIGEST_BYTES, ObjectHasher, combine_crc32, crc32, crc32_of_zeros, digest, object_id
from layerstore.limits import VERIFY_CHUNK_BYTES


def test_the_algorithms_are_those_of_the_format() -> None:
    """Published values of XXH3 with seed 0 and of CRC-32: another algorithm would be another format."""
    assert object_id(b"") == "99aa06d3014798d86001c324468d497f"
    assert xxhash.xxh3_64_hexdigest(b"") == "2d06800538d394c2"
    assert crc32(b"123456789") == 0xCBF43926
    assert digest(b"x") == bytes.fromhex(object_id(b"x"))
    assert len(digest(b"")) == DIGEST_BYTES


@given(st.binary(), st.binary())
def test_crc32_is_zlibs(first: bytes, second: bytes) -> None:
    """The checksum is zlib's, in one piece or continued, over any kind of buffer."""
    assert zlib.crc32(first) == crc32(first) == crc32(memoryview(first)) == crc32(bytearray(first))
    assert zlib.crc32(first + second) == crc32(second, crc32(first))


@given(st.lists(st.binary(max_size=100)))
def test_checksums_of_parts_combine(parts: list[bytes]) -> None:
    """The checksum of a whole follows from those of its parts, empty ones included."""
    assert zlib.crc32(b"".join(parts)) == combine_crc32((crc32(part), len(part)) for part in parts)


@given(st.integers(0, 100_000))
def test_the_checksum_of_zeros_needs_no_zeros(size_bytes: int) -> None:
    """Padding has the checksum that its bytes would have."""
    assert zlib.crc32(bytes(size_bytes)) == crc32_of_zeros(size_bytes)


def test_terabytes_of_zeros_are_combined_at_once() -> None:
    """The checksum of a huge stretch of zeros equals that of its halves, and takes no time."""
    half = 1 << 43

    assert crc32_of_zeros(2 * half) == combine_crc32([(crc32_of_zeros(half), half)] * 2)


@given(st.lists(st.binary(max_size=100)))
def test_an_object_has_one_name_however_it_streams(parts: list[bytes]) -> None:
    """Name, size and chunk digests do not depend on how the bytes were cut."""
    header = b"h" * 241  # objects are never shorter
    whole = b"".join([header, *parts])
    hasher = ObjectHasher()
    for part in [header, *parts]:
        hasher.update(part)

    assert (object_id(whole), len(whole)) == (hasher.id(), hasher.size_bytes)
    assert xxhash.xxh3_64_digest(whole) == hasher.chunks()


@pytest.mark.parametrize("size_bytes", [VERIFY_CHUNK_BYTES + extra for extra in (-1, 0, 1)] + [2 * VERIFY_CHUNK_BYTES])
@pytest.mark.parametrize("step", [(1 << 20) + 7, 1 << 30])
def test_every_chunk_has_its_own_witness(size_bytes: int, step: int) -> None:
    """Each 16 MiB, and the rest, has an xxh3_64 of its own, at every edge and for every length of the reads."""
    data = (b"layerstore" * (size_bytes // 10 + 1))[:size_bytes]
    hasher = ObjectHasher()
    for start in range(0, size_bytes, step):
        hasher.update(memoryview(data)[start : start + step])

    expected = [
        xxhash.xxh3_64_digest(data[start : start + VERIFY_CHUNK_BYTES])
        for start in range(0, size_bytes, VERIFY_CHUNK_BYTES)
    ]

    assert b"".join(expected) == hasher.chunks()
    assert object_id(data) == hasher.id()
