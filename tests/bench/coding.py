"""
How fast one processor codes fp32 numbers and decodes them, beside a copy of them.

A processor's own time is counted, not the clock's: others may use the machine meanwhile.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from layerstore.coding import CODINGS
from tests.bench.values import EXP_AVG, EXP_AVG_SQ, MASTER, words

_STATES = {"companded": EXP_AVG, "logarithmic": EXP_AVG_SQ, "difference": MASTER}


def run(*, gb: float, rounds: int) -> None:
    """Print the table; *gb* is the size of what is coded at once."""
    elements = int(gb * 1e9 / 4)
    out = np.empty(elements, np.float32)
    print(f"{'':<14}{'encode':>8}{'decode':>8}  GB/s of fp32; encoding decodes again, and measures", flush=True)
    for coding in CODINGS.values():
        values = _numbers(_STATES[coding.kind], elements)
        reference = (values - _numbers(EXP_AVG, elements)).data if coding.needs_reference else None
        coded = coding.encode(values.data, reference, out.data)
        calls = (
            partial(coding.encode, values.data, reference, out.data),
            partial(coding.decode, coded[:2], reference, out.data),
        )
        speeds = [_speed(call, out.nbytes, rounds) for call in calls]
        print(f"{coding.name:<14}{speeds[0]:>8.2f}{speeds[1]:>8.2f}", flush=True)
    print(f"{'copy':<14}{_speed(partial(np.copyto, out, np.ones_like(out)), out.nbytes, rounds):>8.2f}", flush=True)


def _numbers(state: str, elements: int) -> npt.NDArray[np.float32]:
    chunks = words(seed=0, step=0, name="bench", state=state, start=0, elements=elements)
    return np.concatenate([np.frombuffer(chunk, np.float32) for chunk in chunks])


def _speed(call: Callable[[], object], size_bytes: int, rounds: int) -> float:
    """Return the median of GB for each second of a processor, once everything is warm."""
    call()
    seconds = []
    for _ in range(rounds):
        started = time.thread_time()
        call()
        seconds.append(time.thread_time() - started)
    return size_bytes / 1e9 / statistics.median(seconds)
