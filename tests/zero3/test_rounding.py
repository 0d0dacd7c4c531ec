"""Promises of the rounding: bit for bit what torch does, so that derived weights need not be stored."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from layerstore.zero3 import can_convert, can_derive, convert, newly_infinite

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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
    return values.to(DTYPES[weights]).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)


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


def test_only_known_pairs_are_derived() -> None:
    """Weights are derived from a float32 master, or from one of their own type, and from nothing else."""
    pairs = {
        (master, weights) for master in ("F64", "F32", "F16", "BF16") for weights in ("F32", "F16", "BF16", "F8_E4M3")
    }

    found = {pair for pair in pairs if can_derive(*pair)}

    assert found == {("F32", "BF16"), ("F32", "F16"), ("F32", "F32"), ("F16", "F16"), ("BF16", "BF16")}


# -- conversions for exports ----------------------------------------------------------------------------------------

BITS = {"F64": torch.int64, "F32": torch.int32, "F16": torch.int16, "BF16": torch.int16}
PAIRS = [(source, target) for source in DTYPES for target in ("F32", "F16", "BF16") if source != target]


def numbers(dtype: str) -> torch.Tensor:
    """Return every value of a small type, or a wide sample of a large one: all exponents, ties, denormals."""
    if dtype in {"F16", "BF16"}:
        bits = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
        return torch.from_numpy(bits).view(DTYPES[dtype])
    chance = np.random.default_rng(0)
    if dtype == "F32":
        upper = np.repeat(np.arange(1 << 16, dtype=np.uint32), 2) << np.uint32(16)
        words = upper | chance.choice(np.array([0, 1, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32), len(upper))
        return torch.from_numpy(words.view(np.int32)).view(torch.float32)
    return torch.from_numpy(chance.integers(-(1 << 63), (1 << 63) - 1, 1 << 16)).view(torch.float64)


def as_bytes(values: torch.Tensor, dtype: str) -> bytes:
    """Return the bytes of *values*."""
    return values.view(BITS[dtype]).numpy().tobytes()


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_number_becomes_what_torch_makes_of_it(source: str, target: str) -> None:
    """To the last bit; NaNs stay NaNs, whose payload torch itself does not agree on with itself."""
    values = numbers(source)
    expected = values.to(DTYPES[target])

    actual = torch.frombuffer(
        bytearray(convert(as_bytes(values, source), source=source, target=target)), dtype=DTYPES[target]
    )

    assert can_convert(source, target)
    assert torch.equal(expected.isnan(), actual.isnan())
    kept = ~expected.isnan()
    assert torch.equal(expected[kept].view(BITS[target]), actual[kept].view(BITS[target]))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_what_leaves_the_range_is_counted(source: str, target: str) -> None:
    """Finite numbers that became infinite, and neither those that were nor NaNs."""
    values = numbers(source)
    data = as_bytes(values, source)
    expected = int((values.to(DTYPES[target]).isinf() & values.isfinite()).sum())

    converted = convert(data, source=source, target=target)

    assert expected == newly_infinite(data, converted, source=source, target=target)
    assert (expected > 0) == ((source, target) not in {("F16", "F32"), ("F16", "BF16"), ("BF16", "F32")})


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_type_stays_as_it_is(dtype: str) -> None:
    """NaN payloads included."""
    data = as_bytes(numbers(dtype), dtype)

    assert data == bytes(convert(data, source=dtype, target=dtype))


def test_what_is_no_floating_point_is_not_converted() -> None:
    """Integers have no way to or from a float, only to themselves."""
    assert can_convert("I8", "I8")
    assert not can_convert("I8", "F32")
    assert not can_convert("F32", "F8_E4M3")
