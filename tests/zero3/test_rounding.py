"""Promises of the rounding: bit for bit what torch does, so that derived weights need not be stored."""

import numpy as np
import pytest
import torch

from layerstore.numbers import can_derive, convert
from layerstore.numbers.rounding import can_convert, newly_infinite

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Lower halves of a float32's 16 mantissa bits: exact, just above it, just below, at and above the tie of either type.
LOWER_HALVES = np.array(
    [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xEFFF, 0xF000, 0xF001, 0xFFFF], np.uint32
)


def test_only_known_pairs_are_derived() -> None:
    """Weights are derived from a float32 master, or from one of their own type, and from nothing else."""
    pairs = {
        (master, weights) for master in ("F64", "F32", "F16", "BF16") for weights in ("F32", "F16", "BF16", "F8_E4M3")
    }

    found = {pair for pair in pairs if can_derive(*pair)}

    assert found == {("F32", "BF16"), ("F32", "F16"), ("F32", "F32"), ("F16", "F16"), ("BF16", "BF16")}


def test_every_nan_rounds_to_one_bfloat16() -> None:
    """Whatever its sign and payload: stores hold weights as derived that were rounded so."""
    nans = np.array([0x7FC0_0000, 0xFFC0_0000, 0x7F80_0001, 0xFF80_0001, 0x7FFF_FFFF, 0xFFFF_FFFF], "<u4")

    rounded = convert(nans.tobytes(), source="F32", target="BF16")

    assert [0x7FC0] * len(nans) == np.frombuffer(rounded, "<u2").tolist()


# -- conversions for exports ----------------------------------------------------------------------------------------

BITS = {"F64": torch.int64, "F32": torch.int32, "F16": torch.int16, "BF16": torch.int16}
PAIRS = [(source, target) for source in DTYPES for target in ("F32", "F16", "BF16") if source != target]


def numbers(dtype: str) -> torch.Tensor:
    """Return every value of a small type; of fp32 all upper halves with every kind of rest; a sample of fp64."""
    if dtype in {"F16", "BF16"}:
        bits = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
        return torch.from_numpy(bits).view(DTYPES[dtype])
    if dtype == "F32":
        upper = np.repeat(np.arange(1 << 16, dtype=np.uint32), len(LOWER_HALVES)) << np.uint32(16)
        words = upper | np.tile(LOWER_HALVES, 1 << 16)
        return torch.from_numpy(words.view(np.int32)).view(torch.float32)
    chance = np.random.default_rng(0)
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
