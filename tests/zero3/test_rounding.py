"""Promises of the rounding: bit for bit what torch does, so that derived weights need not be stored."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from layerstore.zero3 import can_derive, convert

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16}
HALVES = pytest.mark.parametrize("weights", ["BF16", "F16"])

# Lower halves of a float32's 16 mantissa bits: exact, just above it, just below, at and above the tie of either type.
LOWER_HALVES = [
    0x0000,
    0x0001,
    0x0FFF,
    0x1000,
    0x1001,
    0x2000,
    0x3000,
    0x7FFF,
    0x8000,
    0x8001,
    0xEFFF,
    0xF000,
    0xF001,
    0xFFFF,
]

Words = npt.NDArray[np.uint32]


def all_words(lower: int) -> Words:
    """Return a float32 for each of the 2^16 upper halves, with one lower half."""
    upper = np.arange(1 << 16, dtype=np.uint32)
    return (upper << np.uint32(16)) | np.uint32(lower)


def ours(words: Words, weights: str) -> Words:
    """Round with layerstore."""
    rounded = convert(words.astype("<u4").tobytes(), source="F32", target=weights)
    return np.frombuffer(rounded, dtype="<u2").astype(np.uint32)


def torchs(words: Words, weights: str) -> Words:
    """Round with torch."""
    values = torch.from_numpy(words.view(np.int32).copy()).view(torch.float32)
    return values.to(TORCH[weights]).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)


def is_nan(words: Words) -> npt.NDArray[np.bool_]:
    """Tell which words are NaNs."""
    return (words & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)


@HALVES
@pytest.mark.parametrize("lower", LOWER_HALVES, ids=hex)
def test_every_number_rounds_as_in_torch(weights: str, lower: int) -> None:
    """All signs, exponents and upper mantissa bits, with every kind of rest; denormals, ties, infinities included."""
    words = all_words(lower)
    words = words[~is_nan(words)]

    assert np.array_equal(torchs(words, weights), ours(words, weights))


@HALVES
def test_random_numbers_round_as_in_torch(weights: str) -> None:
    """A million random bit patterns."""
    words = np.random.default_rng(7).integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    words = words[~is_nan(words)]

    assert np.array_equal(torchs(words, weights), ours(words, weights))


@HALVES
@pytest.mark.parametrize("lower", LOWER_HALVES, ids=hex)
def test_a_nan_stays_a_nan(weights: str, lower: int) -> None:
    """NaNs become NaNs, never infinities or numbers; which payload they get is not promised, ingest compares bits."""
    words = all_words(lower)
    words = words[is_nan(words)]
    found = ours(words, weights)

    exponent, mantissa = (0x7F80, 0x007F) if weights == "BF16" else (0x7C00, 0x03FF)
    assert np.all((found & exponent) == exponent)
    assert np.all((found & mantissa) != 0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0x3F808000, 0x3F80),  # a tie: down to the even one
        (0x3F818000, 0x3F82),  # a tie: up to the even one
        (0x3F808001, 0x3F81),  # just above a tie
        (0x3F807FFF, 0x3F80),  # just below a tie
        (0x3FFFFFFF, 0x4000),  # carries into the exponent
        (0x7F7FFFFF, 0x7F80),  # the largest float becomes infinity
        (0xFF7FFFFF, 0xFF80),
        (0x7F800000, 0x7F80),  # infinity stays
        (0x80000000, 0x8000),  # minus zero stays
        (0x00000001, 0x0000),  # the smallest denormal
        (0x00008001, 0x0001),  # a denormal rounds up
        (0x007FFFFF, 0x0080),  # the largest denormal becomes normal
        (0x7F800001, 0x7FC0),  # a signalling NaN becomes the quiet one
        (0xFFFFFFFF, 0x7FC0),  # and so does every other NaN
    ],
)
def test_bfloat16_is_pinned(value: int, expected: int) -> None:
    """The rounding itself, by hand: what was derived on one machine must be rebuilt on every other."""
    assert expected == ours(np.array([value], dtype=np.uint32), "BF16")[0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0x477FEFFF, 0x7BFF),  # just below the tie above the largest half
        (0x477FF000, 0x7C00),  # the tie goes to infinity
        (0x33000000, 0x0000),  # half of the smallest denormal: a tie, to the even zero
        (0x33000001, 0x0001),  # just above it
        (0x387FE000, 0x0400),  # rounds up out of the denormals
        (0x80000000, 0x8000),
        (0x7F800000, 0x7C00),
    ],
)
def test_float16_is_pinned(value: int, expected: int) -> None:
    """Overflow to infinity, ties at both ends of the range, denormals."""
    assert expected == ours(np.array([value], dtype=np.uint32), "F16")[0]


def test_what_needs_no_rounding_is_passed_on() -> None:
    """Masters and weights of one type have the same bytes, NaN payloads included."""
    data = bytes(range(256))

    assert bytes(convert(data, source="F32", target="F32")) == data
    assert bytes(convert(data, source="BF16", target="BF16")) == data


@HALVES
def test_nothing_gives_nothing(weights: str) -> None:
    """An empty slice rounds to nothing."""
    assert bytes(convert(b"", source="F32", target=weights)) == b""


def test_only_known_pairs_are_derived() -> None:
    """Weights are derived from a float32 master, or from one of their own type, and from nothing else."""
    pairs = {
        (master, weights) for master in ("F64", "F32", "F16", "BF16") for weights in ("F32", "F16", "BF16", "F8_E4M3")
    }

    found = {pair for pair in pairs if can_derive(*pair)}

    assert found == {("F32", "BF16"), ("F32", "F16"), ("F32", "F32"), ("F16", "F16"), ("BF16", "BF16")}
