"""
The arithmetic of the codings, for numpy.

The bytes must be the same on every machine: only operations that IEEE 754 rounds correctly, one at a time, are used,
and reductions whose order does not matter. Work is done in pieces that stay in a processor's cache.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from layerstore.coding.spec import BLOCK, NotCodable, Spec

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Scales = npt.NDArray[np.uint16]
Images = npt.NDArray[np.int32]
_Encode = Callable[[Floats, int, Floats, Bytes, Scales], None]
_Decode = Callable[[Bytes, int, Floats, Scales, Floats], None]

_PIECE = 1 << 15
"""Elements that are worked on at once: they and the scratch beside them fit into the second cache."""

INFINITY16 = 0x7F80
LARGEST16 = 0x7F7F
# A scale is at least 2^-120. Then subnormal numbers are coded as zero anyway, and it makes no difference that some
# libraries switch them off for a whole process; and the inverse of a scale is finite.
SMALLEST16 = 0x0380


def encode(coding: Spec, values: Floats, reference: Floats | None) -> tuple[Bytes, Scales]:
    """Return the codes and the scales of *values*."""
    assert (reference is not None) == coding.needs_reference
    codes, scales = (
        np.empty(part.elements, kind) for part, kind in zip(coding.parts(values.size), _KINDS, strict=True)
    )
    scratch = _Scratch(values.size)
    with np.errstate(all="ignore"):  # what is not finite is found in the scales
        for start in range(0, values.size, _PIECE):
            end = min(start + _PIECE, values.size)
            piece = values[start:end]
            if reference is not None:
                piece = np.subtract(piece, reference[start:end], out=scratch.moved[: end - start])
            blocks = _whole_blocks(piece)
            count = len(blocks) * BLOCK
            work, small = scratch.work[:count].reshape(-1, BLOCK), scratch.small[:count].reshape(-1, BLOCK)
            first = start // BLOCK * coding.scales_per_block
            last = first + len(blocks) * coding.scales_per_block
            _ENCODE[coding.kind](blocks, coding.top_code, work, small, scales[first:last])
            _pack(scratch.small[:count], codes[start * coding.bits // 8 : -(-end * coding.bits // 8)], coding.bits)
    if _is_wrong(scales):
        raise NotCodable(_reason(coding, values, reference))
    return codes, scales


def decode(coding: Spec, codes: Bytes, scales: Scales, out: Floats, reference: Floats | None) -> None:
    """Fill *out* with what *codes* and *scales* stand for."""
    assert (reference is not None) == coding.needs_reference
    assert [codes.size, scales.size] == [part.elements for part in coding.parts(out.size)]
    scratch = _Scratch(out.size)
    with np.errstate(all="ignore"):
        for start in range(0, out.size, _PIECE):
            end = min(start + _PIECE, out.size)
            small = _unpack(codes[start * coding.bits // 8 : -(-end * coding.bits // 8)], coding, scratch)
            count = small.size
            work = scratch.work[:count].reshape(-1, BLOCK)
            first = start // BLOCK * coding.scales_per_block
            last = first + count // BLOCK * coding.scales_per_block
            target = out[start:end]
            if count != end - start or reference is not None:
                target = scratch.moved[:count]
            _DECODE[coding.kind](
                small.reshape(-1, BLOCK), coding.top_code, work, scales[first:last], target.reshape(-1, BLOCK)
            )
            if reference is not None:
                np.add(reference[start:end], target[: end - start], out=out[start:end])
            elif count != end - start:
                out[start:end] = target[: end - start]


def check(coding: Spec, scales: Scales) -> None:
    """Refuse *scales* of numbers that cannot be coded."""
    if _is_wrong(scales):
        sign = " or a negative value" if coding.kind == "logarithmic" else ""
        raise NotCodable(f"NaN, infinity{sign}")


class _Scratch:
    """Room for the work on one piece."""

    def __init__(self, elements: int) -> None:
        size = min(-(-elements // BLOCK) * BLOCK, _PIECE)
        self.work = np.empty(size, np.float32)
        self.moved = np.empty(size, np.float32)
        self.small = np.empty(size, np.uint8)


def _whole_blocks(piece: Floats) -> Floats:
    """Return *piece* as rows of one block each; zeros fill up the last."""
    missing = -piece.size % BLOCK
    return (np.pad(piece, (0, missing)) if missing else piece).reshape(-1, BLOCK)


def _pack(small: Bytes, codes: Bytes, bits: int) -> None:
    if bits == 4:
        pairs = small.view("<u2")
        pairs &= 0x0F0F
        pairs |= pairs >> 4
        small = pairs.astype(np.uint8)
    codes[:] = small[: codes.size]


def _unpack(codes: Bytes, coding: Spec, scratch: _Scratch) -> Bytes:
    if coding.bits == 8:
        return np.pad(codes, (0, -codes.size % BLOCK)) if codes.size % BLOCK else codes
    codes = np.pad(codes, (0, -codes.size % (BLOCK // 2)))
    pairs = codes.astype("<u2")
    pairs |= pairs << 4
    pairs &= 0x0F0F
    small = pairs.view(np.uint8)
    if coding.kind != "logarithmic":
        small ^= 8
        small -= 8
    return small


def _is_wrong(scales: Scales) -> bool:
    """Whether one of *scales* is no finite number without a sign."""
    return bool(scales.size) and int(scales.max()) >= INFINITY16


def _reason(coding: Spec, values: Floats, reference: Floats | None) -> str:
    if np.isnan(values).any():
        return "NaN among the values"
    if np.isinf(values).any():
        return "infinity among the values"
    if reference is not None:
        return "the reference is not finite, or too far away"
    assert coding.kind == "logarithmic"
    return "a negative value (or zero)"


# -- scales ------------------------------------------------------------------------------------------------------------


def _largest(blocks: Floats) -> Floats:
    """Return the largest number of each of *blocks*, which have no sign: their bits are in their order, NaN last."""
    largest: Images = np.maximum.reduce(blocks.view(np.int32), axis=1)
    return largest.view(np.float32)


def _nearest_scale(exact: Floats) -> Scales:
    """Round to bfloat16, ties to even, but not below the smallest scale; NaN stays NaN."""
    bits = np.minimum(exact.view(np.uint32), np.uint32(0x7FC00000))
    bits += ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    rounded: Scales = np.maximum(bits >> np.uint32(16), np.uint32(SMALLEST16)).astype(np.uint16)
    return rounded


def _float(scales: Scales) -> Floats:
    """Return *scales* as a column of fp32."""
    return (scales.astype(np.uint32) << np.uint32(16)).view(np.float32)[:, None]


# -- linear, for differences -------------------------------------------------------------------------------------------


def _encode_linear(blocks: Floats, top: int, work: Floats, small: Bytes, scales: Scales) -> None:
    np.abs(blocks, out=work)
    scales[:] = _nearest_scale(_largest(work) * np.float32(1 / top))
    np.multiply(blocks, np.float32(1) / _float(scales), out=work)
    np.rint(work, out=work)
    np.copyto(small.view(np.int8), work, casting="unsafe")


def _decode_linear(small: Bytes, top: int, work: Floats, scales: Scales, out: Floats) -> None:
    del top
    np.copyto(work, small.view(np.int8))
    np.multiply(work, _float(scales), out=out)


# -- companded ---------------------------------------------------------------------------------------------------------


def _encode_companded(blocks: Floats, top: int, work: Floats, small: Bytes, scales: Scales) -> None:
    np.abs(blocks, out=work)
    scales[:] = _nearest_scale(_largest(work) * np.float32(1 / top**2))
    np.multiply(work, np.float32(1) / _float(scales), out=work)
    np.sqrt(work, out=work)
    np.rint(work, out=work)
    signed = small.view(np.int8)
    np.copyto(signed, work, casting="unsafe")
    is_negative = np.less(blocks, 0).view(np.int8)
    np.negative(is_negative, out=is_negative)
    signed ^= is_negative  # in two's complement, -n is ~n + 1
    signed -= is_negative


def _decode_companded(small: Bytes, top: int, work: Floats, scales: Scales, out: Floats) -> None:
    del top
    np.copyto(work, small.view(np.int8))
    np.abs(work, out=out)
    np.multiply(out, work, out=out)  # at most 127 squared, so that the next product is exact, too
    np.multiply(out, _float(scales), out=out)


# -- logarithmic -------------------------------------------------------------------------------------------------------


def _encode_logarithmic(blocks: Floats, top: int, work: Floats, small: Bytes, scales: Scales) -> None:
    images = blocks.view(np.int32)  # grows with the logarithm of a positive number, nearly evenly
    low, high = np.minimum.reduce(images, axis=1), np.maximum.reduce(images, axis=1)
    is_plain = low.min() >= 0x10000 and high.max() <= LARGEST16 << 16
    if not is_plain:
        low = np.where(low < 0, low, _least_positive(images))
    _set_ends(scales, low, high)
    bottom, span = _ends(scales)
    np.copyto(work, images, casting="unsafe")
    np.subtract(work, bottom, out=work)
    np.multiply(work, np.float32(top - 1) / np.maximum(span, np.float32(1)), out=work)
    np.rint(work, out=work)
    if not is_plain:  # zeros, and numbers beyond the ends that bfloat16 has
        np.clip(work, 0, top - 1, out=work)
    np.copyto(small, work, casting="unsafe")
    small += 1
    if not is_plain:
        small *= images != 0


def _least_positive(images: Images) -> Images:
    """Return the least image of each block that is no zero, which turns into the greatest of all; 0 if all are zero."""
    least: Images = np.minimum.reduce(images.view(np.uint32) - np.uint32(1), axis=1).view(np.int32)
    return least + np.int32(1)


def _set_ends(scales: Scales, low: Images, high: Images) -> None:
    """Round *low* down, but not to zero, and *high* up, but not to infinity unless something is wrong."""
    np.copyto(scales[0::2], np.maximum(low >> 16, high > 0), casting="unsafe")
    up = (np.minimum(high, LARGEST16 << 16) + 0xFFFF) >> 16
    up[(high >= INFINITY16 << 16) | (low < 0)] = INFINITY16
    np.copyto(scales[1::2], up, casting="unsafe")


def _ends(scales: Scales) -> tuple[Floats, Floats]:
    """Return the image of each block's low end, and the distance to that of its high end, as columns."""
    ends = scales.reshape(-1, 2).astype(np.float32)
    ends *= np.float32(0x10000)
    return ends[:, :1], ends[:, 1:] - ends[:, :1]


def _decode_logarithmic(small: Bytes, top: int, work: Floats, scales: Scales, out: Floats) -> None:
    bottom, span = _ends(scales)
    step = span / np.float32(top - 1)
    # Rounded up, the largest code would lie beyond the high end.
    step.view(np.int32)[...] -= step * np.float32(top - 1) > span
    np.copyto(work, small - np.uint8(1))
    np.multiply(work, step, out=work)
    np.add(work, bottom, out=work)
    np.copyto(out.view(np.int32), work, casting="unsafe")
    if not small.all():
        out[small == 0] = 0


_KINDS = (np.uint8, np.uint16)
_ENCODE: Mapping[str, _Encode] = {
    "companded": _encode_companded,
    "logarithmic": _encode_logarithmic,
    "difference": _encode_linear,
}
_DECODE: Mapping[str, _Decode] = {
    "companded": _decode_companded,
    "logarithmic": _decode_logarithmic,
    "difference": _decode_linear,
}
