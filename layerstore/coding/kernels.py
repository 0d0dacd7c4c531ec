"""
The arithmetic of the codings, for numpy.

The bytes must be the same on every machine, so the code uses only single operations that IEEE 754 rounds correctly, and
reductions whose order does not matter. Arrays are processed in pieces, which reuse their thread's scratch memory.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from layerstore.coding.spec import BLOCK, Error, NotCodable, Spec
from layerstore.limits import SOURCE_CHUNK_BYTES

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Scales = npt.NDArray[np.uint16]
Images = npt.NDArray[np.int32]
_Encode = Callable[[Floats, int, Floats, Bytes, Scales], np.int32]
_Decode = Callable[[Bytes, Floats, int, Scales, Floats], None]

_PIECE = SOURCE_CHUNK_BYTES // 4
"""Elements processed at once."""

# An image is the bits of a float as an integer. Its upper half is a bfloat16.
_INFINITY = 0x7F80_0000
_LARGEST = 0x7F7F_0000
_SMALLEST = 0x0001_0000
# A scale is at least 2^-120, so its inverse is finite, and subnormal numbers are coded as zero anyway: it does not
# matter that some libraries make a whole process flush them to zero.
_SMALLEST_SCALE = 0x0380_0000
_UPPER = -0x1_0000

_ONE = np.float32(1)

_BLOCK_STARTS = np.arange(0, _PIECE, BLOCK)


class _Scratch(threading.local):
    """Each thread's scratch memory for one piece: new memory costs more than the work."""

    def __init__(self) -> None:
        self.coded, self.work, self.decoded = np.empty((3, _PIECE), np.float32)
        self.small = np.empty(_PIECE, np.uint8)


_SCRATCH = _Scratch()


def encode(spec: Spec, values: Floats, reference: Floats | None, out: Floats) -> tuple[Bytes, Scales, Error]:
    """Return the codes and the scales of *values*, and the error; fill *out* with the decoded numbers."""
    assert (reference is not None) == spec.needs_reference
    codes, scales = (np.empty(part.elements, kind) for part, kind in zip(spec.parts(values.size), _KINDS, strict=True))
    lost = Error()
    with np.errstate(all="ignore"):  # numbers that are not finite raise NotCodable instead
        for span, code_span, scale_span in _pieces(spec, values.size):
            referred = None if reference is None else reference[span]
            lost += _encode_piece(spec, values[span], referred, out[span], (codes[code_span], scales[scale_span]))
    return codes, scales, lost


def decode(spec: Spec, codes: Bytes, scales: Scales, reference: Floats | None, out: Floats) -> None:
    """Decode *codes* and *scales* into *out*."""
    assert (reference is not None) == spec.needs_reference
    assert [codes.size, scales.size] == [part.elements for part in spec.parts(out.size)]
    with np.errstate(all="ignore"):
        for span, code_span, scale_span in _pieces(spec, out.size):
            referred = None if reference is None else reference[span]
            _decode_piece(spec, codes[code_span], scales[scale_span], referred, out[span])


def _pieces(spec: Spec, elements: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield for each piece the slices of its elements, of its codes, and of its scales."""
    for start in range(0, elements, _PIECE):
        end = min(start + _PIECE, elements)
        yield (
            slice(start, end),
            slice(start * spec.bits // 8, -(-end * spec.bits // 8)),
            slice(start // BLOCK * spec.scales_per_block, -(-end // BLOCK) * spec.scales_per_block),
        )


def _encode_piece(
    spec: Spec, values: Floats, reference: Floats | None, out: Floats, parts: tuple[Bytes, Scales]
) -> Error:
    (codes, scales), size = parts, values.size
    coded = values if reference is None else np.subtract(values, reference, out=_SCRATCH.coded[:size])
    blocks = _whole_blocks(coded, _SCRATCH.coded)
    work = _SCRATCH.work[: blocks.size]
    small = codes if spec.bits == 8 and size == blocks.size else _SCRATCH.small[: blocks.size]
    try:
        greatest = _ENCODE[spec.kind](blocks, spec.top_code, work.reshape(-1, BLOCK), small.reshape(-1, BLOCK), scales)
    except NotCodable as error:
        raise NotCodable(_reason(values, has_reference=reference is not None)) from error
    if small is not codes:
        codes[:] = (_packed(small) if spec.bits == 4 else small)[: codes.size]
    # From here on *reference* may be overwritten, since *out* may be the same memory: the error is taken from *coded*.
    _decode_piece(spec, codes, scales, reference, out)
    return _error(values, coded, greatest, out, work[:size])


def _decode_piece(spec: Spec, codes: Bytes, scales: Scales, reference: Floats | None, out: Floats) -> None:
    small = _unpacked(codes, spec, -(-out.size // BLOCK) * BLOCK)
    is_direct = reference is None and small.size == out.size
    decoded = out if is_direct else _SCRATCH.decoded[: small.size]
    work = _SCRATCH.work[: small.size].reshape(-1, BLOCK)
    _DECODE[spec.kind](small.reshape(-1, BLOCK), work, spec.top_code, scales, decoded.reshape(-1, BLOCK))
    if reference is not None:
        np.add(reference, decoded[: out.size], out=out)
    elif not is_direct:
        out[:] = decoded[: out.size]


def _error(values: Floats, coded: Floats, greatest: np.int32, decoded: Floats, scratch: Floats) -> Error:
    """Return how far *decoded* is from *values*; *greatest* is the image of the largest magnitude in *coded*."""
    greatest_value = float(greatest.view(np.float32))
    # The squares of second moments may be too small for fp32, those of other numbers too large: so scale the numbers.
    exponent = math.frexp(greatest_value)[1]
    exponent = 0 if -48 < exponent < 48 else min(max(exponent, -120), 120)
    errors = np.subtract(values, decoded, out=scratch)
    return Error(
        greatest=max(float(errors.max()), -float(errors.min())),
        squares=_sum_of_squares(errors, exponent, scratch),
        greatest_value=greatest_value,
        value_squares=_sum_of_squares(coded, exponent, scratch),
    )


def _sum_of_squares(numbers: Floats, exponent: int, scratch: Floats) -> float:
    """Return the sum of the squares of *numbers*, which are scaled by 2**-exponent meanwhile so that fp32 holds it."""
    if exponent:
        numbers = np.multiply(numbers, np.float32(2.0**-exponent), out=scratch)
    # The sum's last digits depend on the machine, but the sum is only shown: it is hashed into no name.
    return float(np.dot(numbers, numbers)) * 4.0**exponent


def _reason(values: Floats, *, has_reference: bool) -> str:
    """Return why *values* are refused."""
    if np.isnan(values).any():
        return "NaN among the values"
    if np.isinf(values).any():
        return "infinity among the values"
    if has_reference:
        return "a reference that is not finite, or too far away"
    return "a negative value, or a negative zero"


def _whole_blocks(piece: Floats, scratch: Floats) -> Floats:
    """Return *piece* as rows of one block each; a partial last block is padded with zeros, in *scratch*."""
    if piece.size % BLOCK:
        whole = scratch[: -(-piece.size // BLOCK) * BLOCK]
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


def _unpacked(codes: Bytes, spec: Spec, elements: int) -> Bytes:
    """Return *elements* codes, one in each byte; zeros fill up the last block."""
    if spec.bits == 8 and codes.size == elements:
        return codes
    small = _SCRATCH.small[:elements]
    if spec.bits == 8:
        small[: codes.size] = codes
        small[codes.size :] = 0
        return small
    pairs = small.view("<u2")
    pairs[: codes.size] = codes
    pairs[codes.size :] = 0
    pairs |= pairs << 4
    pairs &= 0x0F0F
    if spec.kind != "logarithmic":  # extend the sign in two's complement
        small ^= 8
        small -= 8
    return small


# -- linear and companded ----------------------------------------------------------------------------------------------


def _set_scales(magnitudes: Floats, share: float, scales: Scales) -> tuple[np.int32, Floats]:
    """
    Set the scale of each block to its largest magnitude times *share*.

    Return the image of the largest magnitude of all blocks, and the inverse scales as a column.
    """
    largest = _by_block(np.maximum, magnitudes.view(np.int32))
    greatest: np.int32 = largest.max()
    if greatest >= _INFINITY:
        raise NotCodable
    exact = largest.view(np.float32)
    exact *= np.float32(share)
    # Rounded to nearest, half up, so that the largest magnitude gets exactly the largest code, and decoded numbers,
    # if they are coded again, get the same scale and codes.
    largest += 0x8000
    largest &= _UPPER
    np.maximum(largest, _SMALLEST_SCALE, out=largest)
    scales[:] = largest.view(np.uint16)[1::2]
    inverse: Floats = np.divide(_ONE, exact, out=exact)
    return greatest, inverse[:, None]


def _by_block(function: np.ufunc, images: npt.NDArray[np.int32 | np.uint32]) -> Images:
    """Reduce each block; reducing along an axis would take twice as long."""
    reduced: Images = function.reduceat(images.reshape(-1), _BLOCK_STARTS[: len(images)])
    return reduced


def _column(scales: Scales) -> Floats:
    return (scales.astype(np.uint32) << 16).view(np.float32)[:, None]


def _encode_linear(blocks: Floats, top: int, work: Floats, small: Bytes, scales: Scales) -> np.int32:
    greatest, inverse = _set_scales(np.abs(blocks, out=work), 1 / top, scales)
    np.multiply(blocks, inverse, out=work)
    np.rint(work, out=work)
    np.copyto(small.view(np.int8), work, casting="unsafe")
    return greatest


def _decode_linear(small: Bytes, work: Floats, top: int, scales: Scales, out: Floats) -> None:
    del work, top
    np.copyto(out, small.view(np.int8))
    np.multiply(out, _column(scales), out=out)


def _encode_companded(blocks: Floats, top: int, work: Floats, small: Bytes, scales: Scales) -> np.int32:
    greatest, inverse = _set_scales(np.abs(blocks, out=work), 1 / top**2, scales)
    np.multiply(work, inverse, out=work)
    np.sqrt(work, out=work)
    np.rint(work, out=work)
    signed = small.view(np.int8)
    np.copyto(signed, work, casting="unsafe")
    is_negative = np.less(blocks, 0).view(np.int8)
    np.negative(is_negative, out=is_negative)
    signed ^= is_negative  # in two's complement, -n is ~n + 1
    signed -= is_negative
    return greatest


def _decode_companded(small: Bytes, work: Floats, top: int, scales: Scales, out: Floats) -> None:
    del top
    square, magnitude = work.reshape(-1).view(np.int16).reshape(2, *small.shape)
    np.copyto(square, small.view(np.int8))
    np.abs(square, out=magnitude)
    np.multiply(square, magnitude, out=square)
    np.copyto(out, square)
    np.multiply(out, _column(scales), out=out)  # exact, too: at most 127 squared, times a bfloat16


# -- logarithmic -------------------------------------------------------------------------------------------------------


def _encode_logarithmic(blocks: Floats, top: int, work: Floats, small: Bytes, scales: Scales) -> np.int32:
    images = blocks.view(np.int32)  # nearly linear in the logarithm of a positive number
    low, high = _by_block(np.minimum, images), _by_block(np.maximum, images)
    least: np.int32 = low.min()
    greatest: np.int32 = high.max()
    if least < 0 or greatest >= _INFINITY:
        raise NotCodable
    is_plain = least >= _SMALLEST and greatest <= _LARGEST
    if not is_plain:  # there are zeros, or numbers beyond the range of bfloat16
        low = np.where(high, np.maximum(_least_positive(images), _SMALLEST), 0)
        np.minimum(high, _LARGEST, out=high)
    low &= _UPPER
    high += 0xFFFF
    high &= _UPPER
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
    return greatest


def _least_positive(images: Images) -> Images:
    """Return the smallest nonzero image of each block; zero if all are zero."""
    # Unsigned, 0 - 1 is the largest number, so zeros never win.
    least = _by_block(np.minimum, images.view(np.uint32) - np.uint32(1))
    return least.view(np.int32) + np.int32(1)


def _decode_logarithmic(small: Bytes, work: Floats, top: int, scales: Scales, out: Floats) -> None:
    ends = scales.reshape(-1, 2).astype(np.float32)
    ends *= np.float32(0x10000)
    low, high = ends[:, :1], ends[:, 1:]
    span = high - low
    step = span / np.float32(top - 1)
    # If the step were rounded up, the largest code could decode to a number beyond the high end.
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
