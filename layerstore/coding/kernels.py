"""
The arithmetic of the codings, for numpy.

The bytes must be the same on every machine: only operations that IEEE 754 rounds correctly, one at a time, are used,
and reductions whose order does not matter. Work is done in pieces that stay in a processor's caches.
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

_PIECE = 1 << 17
"""Elements that are worked on at once. With fewer, calls of numpy would take longer than their work."""

# Images are the bits of a float as an integer. The upper half of them is a bfloat16.
INFINITY = 0x7F80_0000
LARGEST = 0x7F7F_0000
SMALLEST = 0x0001_0000
# A scale is at least 2^-120. Then subnormal numbers are coded as zero anyway, and it makes no difference that some
# libraries switch them off for a whole process; and the inverse of a scale is finite.
SMALLEST_SCALE = 0x0380_0000
UPPER = -0x1_0000

_ONE = np.float32(1)


def encode(spec: Spec, values: Floats, reference: Floats | None) -> tuple[Bytes, Scales]:
    """Return the codes and the scales of *values*."""
    assert (reference is not None) == spec.needs_reference
    codes, scales = (np.empty(part.elements, kind) for part, kind in zip(spec.parts(values.size), _KINDS, strict=True))
    scratch = _Scratch(values.size)
    with np.errstate(all="ignore"):  # what is not finite is refused
        for start in range(0, values.size, _PIECE):
            end = min(start + _PIECE, values.size)
            piece = values[start:end]
            if reference is not None:
                piece = np.subtract(piece, reference[start:end], out=scratch.moved[: end - start])
            blocks = _whole_blocks(piece, scratch.moved)
            work, small = scratch.work[: blocks.size].reshape(-1, BLOCK), scratch.small[: blocks.size]
            try:
                _ENCODE[spec.kind](blocks, spec.top_code, work, small.reshape(-1, BLOCK), scales[_of(spec, start, end)])
            except NotCodable as error:
                raise NotCodable(_reason(values[start:end], None if reference is None else piece)) from error
            target = codes[start * spec.bits // 8 : -(-end * spec.bits // 8)]
            target[:] = (_packed(small) if spec.bits == 4 else small)[: target.size]
    return codes, scales


def decode(spec: Spec, codes: Bytes, scales: Scales, out: Floats, reference: Floats | None) -> None:
    """Fill *out* with what *codes* and *scales* stand for."""
    assert (reference is not None) == spec.needs_reference
    assert [codes.size, scales.size] == [part.elements for part in spec.parts(out.size)]
    scratch = _Scratch(out.size)
    with np.errstate(all="ignore"):
        for start in range(0, out.size, _PIECE):
            end = min(start + _PIECE, out.size)
            scales_here = scales[_of(spec, start, end)]
            small = scratch.small[: -(-(end - start) // BLOCK) * BLOCK]
            _unpack(codes[start * spec.bits // 8 : -(-end * spec.bits // 8)], small, spec)
            is_direct = reference is None and small.size == end - start
            found = out[start:end] if is_direct else scratch.moved[: small.size]
            work = scratch.work[: small.size].reshape(-1, BLOCK)
            _DECODE[spec.kind](small.reshape(-1, BLOCK), spec.top_code, work, scales_here, found.reshape(-1, BLOCK))
            if reference is not None:
                np.add(reference[start:end], found[: end - start], out=out[start:end])
            elif not is_direct:
                out[start:end] = found[: end - start]


def check(spec: Spec, scales: Scales) -> None:
    """Refuse the *scales* of numbers that cannot be coded."""
    if scales.size and int(scales.max()) >= INFINITY >> 16:
        sign = " or a negative value" if spec.kind == "logarithmic" else " among the values or the reference"
        raise NotCodable(f"NaN, infinity{sign}")


def _reason(values: Floats, moved: Floats | None) -> str:
    """Return why *values* are refused, which have *moved* so far if they have a reference."""
    if np.isnan(values).any():
        return "NaN among the values"
    if np.isinf(values).any():
        return "infinity among the values"
    return (
        "a negative value, or zero with a sign" if moved is None else "a reference that is not finite, or too far away"
    )


class _Scratch:
    """Room for the work on one piece."""

    def __init__(self, elements: int) -> None:
        size = min(-(-elements // BLOCK) * BLOCK, _PIECE)
        self.work = np.empty(size, np.float32)
        self.moved = np.empty(size, np.float32)
        self.small = np.empty(size, np.uint8)


def _of(spec: Spec, start: int, end: int) -> slice:
    """Return where the scales of the elements from *start* to *end* are."""
    return slice(start // BLOCK * spec.scales_per_block, -(-end // BLOCK) * spec.scales_per_block)


def _whole_blocks(piece: Floats, room: Floats) -> Floats:
    """Return *piece* as rows of one block each; zeros fill up the last, in *room*."""
    if piece.size % BLOCK:
        whole = room[: -(-piece.size // BLOCK) * BLOCK]
        whole[: piece.size] = piece
        whole[piece.size :] = 0
        piece = whole
    return piece.reshape(-1, BLOCK)


def _packed(small: Bytes) -> Bytes:
    """Return pairs of codes as one byte each, the first in its low half."""
    pairs = small.view("<u2")
    pairs &= 0x0F0F
    pairs |= pairs >> 4
    return pairs.astype(np.uint8)


def _unpack(codes: Bytes, small: Bytes, spec: Spec) -> None:
    """Fill *small* with the codes, one in each byte, and zeros."""
    if spec.bits == 8:
        small[: codes.size] = codes
        small[codes.size :] = 0
        return
    pairs = small.view("<u2")
    pairs[: codes.size] = codes
    pairs[codes.size :] = 0
    pairs |= pairs << 4
    pairs &= 0x0F0F
    if spec.kind != "logarithmic":  # in two's complement
        small ^= 8
        small -= 8


# -- linear and companded ----------------------------------------------------------------------------------------------


def _set_scales(magnitudes: Floats, share: float, scales: Scales) -> Floats:
    """
    Set the scale of each block: *share* of its largest magnitude. Return the inverses as a column.

    It is rounded to nearest, half up: then the largest magnitude has the largest code, neither more nor less, and what
    was decoded has the same scale and codes again.
    """
    largest: Images = np.maximum.reduce(magnitudes.view(np.int32), axis=1)
    if largest.max() >= INFINITY:
        raise NotCodable
    exact = largest.view(np.float32)
    exact *= np.float32(share)
    largest += 0x8000
    largest &= UPPER
    np.maximum(largest, SMALLEST_SCALE, out=largest)
    scales[:] = largest.view(np.uint16)[1::2]
    inverse: Floats = np.divide(_ONE, exact, out=exact)
    return inverse[:, None]


def _column(scales: Scales) -> Floats:
    return (scales.astype(np.uint32) << 16).view(np.float32)[:, None]


def _encode_linear(blocks: Floats, top: int, work: Floats, small: Bytes, scales: Scales) -> None:
    inverse = _set_scales(np.abs(blocks, out=work), 1 / top, scales)
    np.multiply(blocks, inverse, out=work)
    np.rint(work, out=work)
    np.copyto(small.view(np.int8), work, casting="unsafe")


def _decode_linear(small: Bytes, top: int, work: Floats, scales: Scales, out: Floats) -> None:
    del top
    np.copyto(work, small.view(np.int8))
    np.multiply(work, _column(scales), out=out)


def _encode_companded(blocks: Floats, top: int, work: Floats, small: Bytes, scales: Scales) -> None:
    inverse = _set_scales(np.abs(blocks, out=work), 1 / top**2, scales)
    np.multiply(work, inverse, out=work)
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
    np.multiply(out, _column(scales), out=out)


# -- logarithmic -------------------------------------------------------------------------------------------------------


def _encode_logarithmic(blocks: Floats, top: int, work: Floats, small: Bytes, scales: Scales) -> None:
    images = blocks.view(np.int32)  # grow with the logarithm of a positive number, nearly evenly
    low: Images = np.minimum.reduce(images, axis=1)
    high: Images = np.maximum.reduce(images, axis=1)
    least, greatest = low.min(), high.max()
    if least < 0 or greatest >= INFINITY:
        raise NotCodable
    is_plain = least >= SMALLEST and greatest <= LARGEST
    if not is_plain:  # zeros, and what bfloat16 has not
        low = np.where(high, np.maximum(_least_positive(images), SMALLEST), 0)
        np.minimum(high, LARGEST, out=high)
    low &= UPPER
    high += 0xFFFF
    high &= UPPER
    scales[0::2], scales[1::2] = low.view(np.uint16)[1::2], high.view(np.uint16)[1::2]
    span = np.maximum(high - low, 1).astype(np.float32)
    np.copyto(work, images, casting="unsafe")
    np.subtract(work, low.astype(np.float32)[:, None], out=work)
    np.multiply(work, (np.float32(top - 1) / span)[:, None], out=work)
    np.rint(work, out=work)
    if not is_plain:
        np.clip(work, 0, top - 1, out=work)
    np.copyto(small, work, casting="unsafe")
    small += 1
    if not is_plain:
        small *= images != 0


def _least_positive(images: Images) -> Images:
    """Return the least image of each block that is no zero, since zero less 1 is the largest number; or zero."""
    least: Images = np.minimum.reduce(images.view(np.uint32) - np.uint32(1), axis=1).view(np.int32)
    return least + np.int32(1)


def _decode_logarithmic(small: Bytes, top: int, work: Floats, scales: Scales, out: Floats) -> None:
    ends = scales.reshape(-1, 2).astype(np.float32)
    ends *= np.float32(0x10000)
    low, high = ends[:, :1], ends[:, 1:]
    span = high - low
    step = span / np.float32(top - 1)
    # Were it rounded up, the largest code could lie beyond the high end.
    step.view(np.int32)[...] -= step * np.float32(top - 1) > span
    np.copyto(work, small - np.uint8(1))
    np.multiply(work, step, out=work)
    np.add(work, low, out=work)
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
