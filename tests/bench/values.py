"""
The numbers in a made-up checkpoint: any stretch of any tensor, at the speed of memory.

Each follows from the seed, the step, the tensor's name and the place in it alone: not from the number of ranks
nor from the optimizer's grouping, so that the same layers hold the same bytes in every layout.
No two stretches are alike, and none compresses.
"""

import hashlib
from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

_Words = npt.NDArray[np.uint32]

MASTER = "master"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"

# Of random numbers only so many are drawn; the rest are these, from another place and with other low bits.
_CHUNK_ELEMENTS = 1 << 18

# Sign and exponent stay as drawn: whatever is done to the rest, a weight stays a weight.
_MANTISSA = 0x007F_FFFF

# What memory that nobody wrote may hold: a NaN with a payload, told apart by rank.
_JUNK = 0x7FA0_0BAD


def words(*, seed: int, step: int, name: str, state: str, start: int, elements: int) -> Iterator[memoryview]:
    """Yield the bytes of float32 numbers from element *start* of the tensor *name* on, in chunks."""
    end = start + elements
    while start < end:
        number, skipped = divmod(start, _CHUNK_ELEMENTS)
        count = min(_CHUNK_ELEMENTS - skipped, end - start)
        place, mask = _place_and_mask(f"{seed}/{step}/{name}/{state}/{number}")
        drawn = _pool(seed, state)[place + skipped : place + skipped + count]
        yield (drawn ^ mask).data.cast("B")
        start += count


def junk(elements: int, *, rank: int) -> bytes:
    """Return what lies in the padding of *rank*: nothing that anybody meant."""
    return np.full(elements, _JUNK ^ rank << 4, dtype=np.uint32).tobytes()


def _place_and_mask(key: str) -> tuple[int, np.uint32]:
    digest = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    return digest % _CHUNK_ELEMENTS, np.uint32(digest >> 32 & _MANTISSA)


@cache
def _pool(seed: int, state: str) -> _Words:
    generator = np.random.default_rng([seed, *state.encode()])
    drawn = generator.standard_normal(2 * _CHUNK_ELEMENTS, dtype=np.float32)
    scaled = {MASTER: drawn * 0.02, EXP_AVG: drawn * 1e-4, EXP_AVG_SQ: drawn * drawn * 1e-8}[state]
    return scaled.astype(np.float32).view(np.uint32)
