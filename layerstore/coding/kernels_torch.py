"""
The arithmetic of the codings, for tensors on any device: the same bytes as `kernels`, operation by operation.

Nothing here waits for the device. Divisors are always tensors: torch may multiply by the inverse of a plain number.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from layerstore.coding.kernels import INFINITY, LARGEST, SMALLEST_SCALE
from layerstore.coding.spec import BLOCK, Spec

_PIECE = 1 << 24
"""Elements processed at once: enough to keep a GPU busy, few enough that the temporaries fit next to a model."""
_NAN = 0x7FC00000


def encode(spec: Spec, values: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of *values*."""
    assert (reference is not None) == spec.needs_reference
    codes, scales = (
        torch.empty(part.elements, dtype=kind, device=values.device)
        for part, kind in zip(spec.parts(values.numel()), (torch.uint8, torch.int16), strict=True)
    )
    for start in range(0, values.numel(), _PIECE):
        end = min(start + _PIECE, values.numel())
        piece = values[start:end] if reference is None else values[start:end] - reference[start:end]
        blocks = pad(piece, (0, -piece.numel() % BLOCK)).view(-1, BLOCK)
        small, ends = _ENCODE[spec.kind](blocks, spec.top_code)
        first = start // BLOCK * spec.scales_per_block
        scales[first : first + ends.numel()] = ends.reshape(-1)
        target = codes[start * spec.bits // 8 : -(-end * spec.bits // 8)]
        target.copy_(_packed(small.view(-1), spec.bits)[: target.numel()])
    return codes, scales.view(torch.bfloat16)


def _packed(small: Tensor, bits: int) -> Tensor:
    return (small[0::2] & 15) | (small[1::2] << 4) if bits == 4 else small


def _nearest_scale(exact: Tensor) -> Tensor:
    bits = (exact.view(torch.int32) & 0x7FFFFFFF).clamp_max(_NAN)  # rounding up larger ones would overflow
    return ((bits + 0x8000) >> 16).clamp_min(SMALLEST_SCALE >> 16)


def _inverse(scales: Tensor) -> Tensor:
    floats = (scales << 16).view(torch.float32)
    return torch.ones_like(floats) / floats


def _encode_linear(blocks: Tensor, top: int) -> tuple[Tensor, Tensor]:
    scales = _nearest_scale(blocks.abs().amax(1, keepdim=True) * (1 / top))
    return (blocks * _inverse(scales)).round_().to(torch.int8).view(torch.uint8), scales


def _encode_companded(blocks: Tensor, top: int) -> tuple[Tensor, Tensor]:
    work = blocks.abs()
    scales = _nearest_scale(work.amax(1, keepdim=True) * (1 / top**2))
    work = work.mul_(_inverse(scales)).sqrt_().round_().to(torch.int8)
    return torch.where(blocks < 0, -work, work).view(torch.uint8), scales


def _encode_logarithmic(blocks: Tensor, top: int) -> tuple[Tensor, Tensor]:
    images = blocks.view(torch.int32)
    high = images.amax(1, keepdim=True)
    low = images.masked_fill(images == 0, 0x7FFFFFFF).amin(1, keepdim=True).masked_fill_(high == 0, 0)
    is_wrong = (high >= INFINITY) | (low < 0)
    down = torch.maximum(low >> 16, (high > 0).int())
    up = (high.clamp_max(LARGEST) + 0xFFFF) >> 16
    span = ((up - down) << 16).float()
    factor = torch.full_like(span, top - 1) / span.clamp_min(1)
    work = images.float().sub_((down << 16).float()).mul_(factor).round_().clamp_(0, top - 1)
    small = (work.to(torch.uint8) + 1) * (images != 0)
    # An infinite scale tells `check` on the host: raising here would have to wait for the device.
    return small, torch.cat([down, up.masked_fill_(is_wrong, INFINITY >> 16)], dim=1)


_ENCODE: Mapping[str, Callable[[Tensor, int], tuple[Tensor, Tensor]]] = {
    "companded": _encode_companded,
    "logarithmic": _encode_logarithmic,
    "difference": _encode_linear,
}
