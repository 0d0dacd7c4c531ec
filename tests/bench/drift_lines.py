"""What is saved in the benchmark of drift: the lines of its table, one saver and one store for each."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from layerstore.policy import Drift, Filter, Latest, Parity, Policy
from tests.bench.loop_table import DEEPSPEED_BYTES

RUN = "bench"
RARELY = 20
"""A plain full save comes every so manyth time: as few bytes as drift may take."""

THRESHOLD = 0.01
STALEST = 40
"""Every layer's turn comes once in so many saves, which takes half of what drift may take; the budget is the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One way to save."""

    name: str
    policy: Callable[[int], Policy]
    """For a model of so many parameters."""
    is_saved: Callable[[int, int], bool] = lambda number, last: True
    """Whether it saves at the moment of this number, of which there are so many after the first."""


def drift(parameters: int, *, share: Fraction) -> Drift:
    """Return drift with a budget of this *share* of a full save."""
    return Drift(threshold=THRESHOLD, budget=int(parameters * DEEPSPEED_BYTES * share), stalest=STALEST)


DRIFT = Line(name="drift, 1/40", policy=partial(drift, share=Fraction(1, 40)))
"""What is measured."""
CONTROL = Line(name="full", policy=lambda _: Latest(), is_saved=lambda number, last: number == last)
"""Saved in full at the last moment: what resumes from it is the uninterrupted run, to the last bit."""

LINES = (
    CONTROL,
    Line(name="parity", policy=lambda _: Parity()),
    Line(name="filter", policy=lambda _: Filter()),
    DRIFT,
    Line(name="drift, 1/6", policy=partial(drift, share=Fraction(1, 6))),
    # Its turns lie so that the failure comes just before the next one.
    Line(
        name=f"full, every {RARELY}th",
        policy=lambda _: Latest(),
        is_saved=lambda number, last: number == 0 or (number - last) % RARELY == 1 % RARELY,
    ),
)

OTHER_TEXT = "full, other text"
"""No way to save: the control trained on other batches, which says how far apart equally good runs come."""
