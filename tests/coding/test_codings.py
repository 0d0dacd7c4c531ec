"""What the codings of compact saves promise about any numbers, and about their bytes."""

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from layerstore.coding import BLOCK, CODINGS, Coding, Error, NotCodable
from tests.coding.numbers import Floats, Parts, decode, decoded, encode, numbers_for

SIZES = (0, 1, 127, 128, 129, 1000, 70_001)
OF_ALL = pytest.mark.parametrize("coding", CODINGS.values(), ids=CODINGS.keys())
SIGNED = [coding for coding in CODINGS.values() if coding.kind == "companded"]
LOGARITHMIC = [coding for coding in CODINGS.values() if coding.kind == "logarithmic"]
DIFFERENCES = [coding for coding in CODINGS.values() if coding.kind == "difference"]
SMALLEST_SCALE = 2.0**-120


@st.composite
def finite(draw: st.DrawFn) -> Floats:
    """Draw any finite numbers, their exponents in any range; far faster than one by one."""
    words = np.frombuffer(
        draw(st.integers(1, 300).flatmap(lambda count: st.binary(min_size=4 * count, max_size=4 * count))), np.uint32
    )
    first, count = draw(st.integers(0, 254)), draw(st.integers(1, 255))
    exponents = np.minimum(np.uint32(first) + (words >> np.uint32(23)) % np.uint32(count), np.uint32(254))
    numbers: Floats = ((words & np.uint32(0x807FFFFF)) | exponents << np.uint32(23)).view(np.float32)
    return numbers


def _of(codings: list[Coding]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("coding", codings, ids=[coding.name for coding in codings])


def _floats(numbers: list[float]) -> Floats:
    return np.array(numbers, np.float32)


def _steps(coding: Coding) -> int:
    return int(2 ** (coding.bits - 1)) - 1


def _greatest_of_block(values: Floats) -> Floats:
    """Return for each element the greatest magnitude of its block."""
    padded = np.pad(np.abs(values), (0, -values.size % BLOCK)).reshape(-1, BLOCK)
    return np.repeat(padded.max(axis=1), BLOCK)[: values.size]


# -- bounds ------------------------------------------------------------------------------------------------------------


@_of(SIGNED)
@given(values=finite())
def test_a_companded_number_is_off_by_half_a_step_of_its_root(coding: Coding, values: Floats) -> None:
    """With the scale u, |error| <= root of |x| u, and u / 4; u is at most 1/256 more than greatest / top squared."""
    found = decoded(coding, values).astype(np.float64)

    scale = np.maximum(_greatest_of_block(values) / _steps(coding) ** 2 * (1 + 2.0**-8), SMALLEST_SCALE)
    exact = values.astype(np.float64)
    assert (np.abs(found - exact) <= (np.sqrt(np.abs(exact) * scale) + scale / 4) * (1 + 1e-5)).all()
    assert (found * exact >= 0).all()


@_of(DIFFERENCES)
@given(values=finite())
def test_a_difference_is_off_by_half_a_step(coding: Coding, values: Floats) -> None:
    """The step is the block's greatest difference over the largest code, and 1/256 more at most."""
    found = decoded(coding, values, np.zeros_like(values)).astype(np.float64)

    step = np.maximum(_greatest_of_block(values) / _steps(coding) * (1 + 2.0**-8), SMALLEST_SCALE)
    assert (np.abs(found - values.astype(np.float64)) <= step / 2 * (1 + 1e-5)).all()


@_of(LOGARITHMIC)
@given(values=finite())
def test_a_second_moment_is_off_by_half_a_step_of_its_logarithm(coding: Coding, values: Floats) -> None:
    """Zeros are exact, nothing else becomes zero, all stays finite; images are off by half a step of their range."""
    values = np.abs(values)
    found = decoded(coding, values)

    assert ((found == 0) == (values == 0)).all()
    assert np.isfinite(found).all()
    images = values.view(np.int32).astype(np.float64)
    padded = np.pad(images, (0, -values.size % BLOCK)).reshape(-1, BLOCK)
    high, low = padded.max(axis=1), np.where(padded > 0, padded, np.inf).min(axis=1)
    span = np.where(high > 0, high - low, 0) + 2 * 0x10000  # both ends are rounded to 16 bits
    half = np.repeat(span / (2**coding.bits - 2) / 2, BLOCK)[: values.size]
    clipped = 0x10000 if values.max() > 3.38e38 or (values[values > 0].min(initial=1) < 1e-40) else 0
    assert (np.abs(found.view(np.int32) - images) <= half * (1 + 1e-5) + 256 + clipped)[values > 0].all()


@OF_ALL
def test_zeros_stay_zeros(coding: Coding) -> None:
    """Parameters that were never used have moments of zero, and have not moved."""
    zeros = np.zeros(300, np.float32)

    assert not decoded(coding, zeros, zeros if coding.needs_reference else None).any()


@OF_ALL
@pytest.mark.parametrize("number", [1.0, 2.0**-100, 1e-38, 1e-45, 3e38, np.finfo(np.float32).max])
def test_blocks_of_equal_numbers_keep_their_size(coding: Coding, number: float) -> None:
    """However large or small; what is too small for a scale is zero, but for second moments."""
    values = np.full(200, number, np.float32)

    found = decoded(coding, values, np.zeros_like(values) if coding.needs_reference else None)

    if number < SMALLEST_SCALE and coding.kind != "logarithmic":
        assert not found.any()
    elif number == 1e-45:
        assert (found == np.float32(2.0**-133)).all()  # the smallest that bfloat16 has
    else:
        assert np.allclose(found, values, rtol=1 / 128, atol=0)


@_of(LOGARITHMIC)
def test_sixteen_decades_in_one_block_are_told_apart(coding: Coding) -> None:
    """Linear codes would make zeros of all but the largest, and updates a thousand times too large."""
    values = np.geomspace(1e-18, 1e-2, BLOCK, dtype=np.float32)

    ratio = decoded(coding, values) / values

    assert ratio.max() < {8: 1.11, 4: 7}[coding.bits]
    assert ratio.min() > {8: 0.9, 4: 1 / 7}[coding.bits]


# -- what is refused ---------------------------------------------------------------------------------------------------


@OF_ALL
@pytest.mark.parametrize(
    ("number", "word"), [(np.nan, "NaN"), (-np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity")]
)
@pytest.mark.parametrize("place", [0, 40_000])
def test_what_is_not_finite_is_refused(coding: Coding, number: float, word: str, place: int) -> None:
    """By name, wherever it stands."""
    values, reference = numbers_for(coding, 40_001)
    values[place] = number

    with pytest.raises(NotCodable, match=word):
        encode(coding, values, reference)


@_of(LOGARITHMIC)
@pytest.mark.parametrize("number", [-1.0, -1e-45, -0.0])
def test_negative_second_moments_are_refused(coding: Coding, number: float) -> None:
    """They are none: the optimizer is another one."""
    values = _floats([1, 0, number, 2])

    with pytest.raises(NotCodable, match="negative"):
        encode(coding, values)


@_of(DIFFERENCES)
def test_differences_to_what_is_not_finite_are_refused(coding: Coding) -> None:
    """Or those that are too large for fp32."""
    values = _floats([3e38, 1])

    with pytest.raises(NotCodable, match="reference"):
        encode(coding, values, _floats([0, np.nan]))
    with pytest.raises(NotCodable, match="reference"):
        encode(coding, values, -values)


# -- the same bytes ----------------------------------------------------------------------------------------------------


@OF_ALL
def test_cuts_between_blocks_do_not_matter(coding: Coding) -> None:
    """Numbers that come in several calls have the codes and scales of one call, and any blocks decode alone."""
    values, reference = numbers_for(coding, 100_001)
    whole = encode(coding, values, reference)
    found = decode(coding, whole, values.size, reference)

    for first, last in ((0, 128), (128, 33_024), (32_768, 98_304), (99_968, 100_001)):
        of = None if reference is None else reference[first:last]
        codes, scales = encode(coding, values[first:last], of)
        code, scale = first * coding.bits // 8, first // BLOCK * coding.scales_per_block

        assert np.array_equal(codes, whole[0][code : code + codes.size])
        assert np.array_equal(scales, whole[1][scale : scale + scales.size])
        assert np.array_equal(decode(coding, (codes, scales), last - first, of), found[first:last])


@OF_ALL
@pytest.mark.parametrize("elements", SIZES)
def test_parts_have_the_announced_size(coding: Coding, elements: int) -> None:
    """So that a file's header can be written before its numbers are coded."""
    parts = encode(coding, *numbers_for(coding, elements))

    assert [part.elements for part in coding.parts(elements)] == [part.size for part in parts]


@OF_ALL
def test_few_bytes_are_needed(coding: Coding) -> None:
    """Scales included."""
    codes, scales = coding.parts(1 << 20)
    limit = coding.bits / 8 + (0.035 if coding.kind == "logarithmic" else 0.02)

    assert (codes.elements + 2 * scales.elements) / (1 << 20) <= limit


GOLDEN = {
    "companded8": "6fdfbf7813ccd7ec 5b1dd393a870c7ce 8c99137b84c1df7b",
    "companded4": "0af5a10156975e73 9e6379e2a3179069 a7fa760f65c4055a",
    "logarithmic8": "66554adb1f5100c9 f5e6a649bfce1ca1 5d81bf07d2ac722c",
    "logarithmic4": "07df4d42e8fed677 f5e6a649bfce1ca1 4b96093f4331fa4e",
    "difference8": "65d61ae70dfcd35a ba90c19a35b670bb 51d7a7a2ceaf4d9d",
    "difference4": "56126506e9a882af e13dd3368328d0b1 b5b28cd9d4a2fb02",
}
"""Checksums of the codes, the scales, and the decoded numbers."""


@OF_ALL
def test_the_bytes_are_those_of_the_format(coding: Coding) -> None:
    """Every machine and every version makes these, or objects would not have the names that they have elsewhere."""
    values, reference = _golden_numbers(coding, 1000)
    parts = encode(coding, values, reference)
    data = [*_bytes(parts), decode(coding, parts, values.size, reference).tobytes()]

    assert GOLDEN[coding.name] == " ".join(xxhash.xxh3_64_hexdigest(each) for each in data)


@OF_ALL
def test_coding_again_changes_nothing(coding: Coding) -> None:
    """A composite of compact saves that is saved compactly keeps its numbers, and its very codes."""
    values, reference = _golden_numbers(coding, 100_000)
    parts = encode(coding, values, reference)

    assert _bytes(encode(coding, decode(coding, parts, values.size, reference), reference)) == _bytes(parts)


@_of(LOGARITHMIC)
@pytest.mark.parametrize("factor", [1.001, 1.1, 2, 16])
def test_narrow_second_moments_change_at_most_once_more(coding: Coding, factor: float) -> None:
    """Where a step is not a wider than what the ends are rounded to; and by less than half a step."""
    values = np.geomspace(1e-8, 1e-8 * factor, 1280, dtype=np.float32)
    np.random.default_rng(0).shuffle(values)
    first = decoded(coding, values)
    second = decoded(coding, first)

    assert np.abs(second / first - 1).max() <= np.abs(first / values - 1).max()
    assert np.array_equal(decoded(coding, second), second)


@OF_ALL
def test_a_stranger_decodes_what_the_page_says(coding: Coding) -> None:
    """Element by element, from the format page alone: fp32 after each operation."""
    values, reference = _golden_numbers(coding, 301)
    codes, scales = encode(coding, values, reference)
    found = decode(coding, (codes, scales), 301, reference)

    for index in range(301):
        code = int(codes[index]) if coding.bits == 8 else int(codes[index // 2]) >> 4 * (index % 2) & 15
        block = scales[index // BLOCK * coding.scales_per_block :].astype(np.uint32) << np.uint32(16)

        assert found[index] == _by_the_page(coding, code, block, 0 if reference is None else reference[index])


def _by_the_page(coding: Coding, code: int, block: npt.NDArray[np.uint32], reference: float) -> np.float32:
    if coding.kind == "logarithmic":
        low, high, top = np.float32(block[0]), np.float32(block[1]), np.float32(2**coding.bits - 2)
        step = np.float32(high - low) / top
        step = np.nextafter(step, np.float32(0)) if step * top > high - low else step
        image = np.int32(np.float32(code - 1) * step + low)
        return image.view(np.float32) if code else np.float32(0)
    signed = np.float32(code - 2**coding.bits if code >= 2 ** (coding.bits - 1) else code)
    scale = block[:1].view(np.float32)[0]
    if coding.kind == "companded":
        return np.float32(signed * abs(signed) * scale)
    return np.float32(np.float32(reference) + signed * scale)


@OF_ALL
def test_differences_decode_into_their_reference(coding: Coding) -> None:
    """A layer can be decoded in place, without a second array of its size."""
    values, reference = numbers_for(coding, 1000)
    parts = encode(coding, values, reference)
    out = np.zeros(1000, np.float32) if reference is None else reference.copy()

    coding.decode([part.data for part in parts], None if reference is None else out.data, out.data)

    assert np.array_equal(out, decode(coding, parts, 1000, reference))


# -- the error ---------------------------------------------------------------------------------------------------------


@OF_ALL
@pytest.mark.parametrize("elements", SIZES)
def test_the_error_is_that_of_what_is_decoded(coding: Coding, elements: int) -> None:
    """And what it is relative to are the numbers, or their movement where differences were coded."""
    values, reference = numbers_for(coding, elements)
    lost = _lost(coding, values, reference)

    off = (values.astype(np.float64) - decoded(coding, values, reference)).astype(np.float32)
    moved = values if reference is None else values - reference
    assert (lost.greatest, lost.greatest_value) == (np.abs(off).max(initial=0), np.abs(moved).max(initial=0))
    assert lost.squares == pytest.approx((off.astype(np.float64) ** 2).sum(), rel=1e-5)
    assert lost.value_squares == pytest.approx((moved.astype(np.float64) ** 2).sum(), rel=1e-5)


@OF_ALL
def test_errors_of_pieces_add_up(coding: Coding) -> None:
    """To that of the whole."""
    values, reference = numbers_for(coding, 1000)
    first, second = (
        _lost(coding, values[of], None if reference is None else reference[of]) for of in (slice(512), slice(512, 1000))
    )

    both, whole = first + second, _lost(coding, values, reference)
    assert (both.greatest, both.greatest_value) == (whole.greatest, whole.greatest_value)
    assert (both.squares, both.value_squares) == pytest.approx((whole.squares, whole.value_squares), rel=1e-5)


@OF_ALL
@pytest.mark.parametrize("factor", [1e-30, 1e-20, 1, 1e20, 1e30])
def test_errors_of_tiny_and_of_huge_numbers_are_no_less_true(coding: Coding, factor: float) -> None:
    """Squares of second moments are smaller than anything that fp32 has, others larger."""
    values = np.geomspace(0.5, 1, 1000, dtype=np.float32) * np.float32(factor)
    reference = np.zeros(1000, np.float32) if coding.needs_reference else None
    lost = _lost(coding, values, reference)

    exact = values.astype(np.float64)
    off = exact - decoded(coding, values, reference)
    assert lost.squares == pytest.approx((off**2).sum(), rel=1e-5)
    assert lost.value_squares == pytest.approx((exact**2).sum(), rel=1e-5)
    assert lost.greatest == pytest.approx(np.abs(off).max())


def _lost(coding: Coding, values: Floats, reference: Floats | None) -> Error:
    out = np.empty_like(values)
    return coding.encode(values.data, None if reference is None else reference.data, out.data).lost


def _golden_numbers(coding: Coding, elements: int) -> tuple[Floats, Floats | None]:
    """Return numbers that no library draws: over 16 decades, every seventeenth zero."""
    words = np.arange(1, elements + 1, dtype=np.uint32) * np.uint32(2654435761)
    words ^= words >> np.uint32(15)
    words *= np.uint32(2246822519)
    exponents = (np.uint32(70) + (words >> np.uint32(8)) % np.uint32(53)) << np.uint32(23)
    values = ((words & np.uint32(0x807FFFFF)) | exponents).view(np.float32)
    values[::17] = 0
    if coding.kind == "logarithmic":
        return np.abs(values), None
    if not coding.needs_reference:
        return values, None
    return np.float32(1) + values, np.float32(1) + np.roll(values, 1) / np.float32(64)


def _bytes(parts: Parts) -> list[bytes]:
    return [part.tobytes() for part in parts]
