"""Numbers as an optimizer holds them, and what to do with a coding."""

import numpy as np
import numpy.typing as npt

from layerstore.coding import Coding

Floats = npt.NDArray[np.float32]
Parts = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16]]


def numbers_for(coding: Coding, elements: int, *, seed: int = 0) -> tuple[Floats, Floats | None]:
    """Return numbers that *coding* is for, over 16 decades, some of them zero; and a reference if it needs one."""
    random = np.random.default_rng([seed, elements])
    values = random.standard_normal(elements) * 10 ** random.uniform(-9, -1, elements)
    values[random.random(elements) < 0.05] = 0
    if coding.kind == "logarithmic":
        return (values**2).astype(np.float32), None
    if not coding.needs_reference:
        return values.astype(np.float32), None
    reference = random.standard_normal(elements).astype(np.float32) * np.float32(0.02)
    return reference + values.astype(np.float32) * np.float32(1e-3), reference


def decoded(coding: Coding, values: Floats, reference: Floats | None = None) -> Floats:
    """Return *values* once coded and decoded."""
    return decode(coding, encode(coding, values, reference), values.size, reference)


def encode(coding: Coding, values: Floats, reference: Floats | None = None) -> Parts:
    """Return the codes and scales of *values*; what they are said to decode to is what they do decode to."""
    out = np.full(values.size, np.nan, np.float32)
    coded = coding.encode(values.data, None if reference is None else reference.data, out.data)
    parts = np.frombuffer(coded.codes, np.uint8), np.frombuffer(coded.scales, np.uint16)
    assert out.tobytes() == decode(coding, parts, values.size, reference).tobytes()
    return parts


def decode(coding: Coding, parts: Parts, elements: int, reference: Floats | None) -> Floats:
    """Return the *elements* numbers of *parts*."""
    out = np.full(elements, np.nan, np.float32)
    coding.decode([part.data for part in parts], None if reference is None else reference.data, out.data)
    return out
