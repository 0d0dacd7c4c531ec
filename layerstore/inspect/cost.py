"""
A training run, and what storing its saves costs.

The model: every save is pushed to a bucket, from which gc deletes every hour if there are retention rules. Requests
are not counted: how many a push makes depends on what the bucket already holds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, isfinite
from typing import ClassVar, Self

from layerstore.errors import InvalidInput
from layerstore.policy import Keep
from layerstore.precision import EXACT_EVERY, PrecisionName, keyframes

MONTH_SECONDS = 365.25 * 86400 / 12
GB = 10**9
COLLECTED_SECONDS = 3600.0
"""How often gc runs on a bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The prices of storage and of GPUs in dollars, in the units of price lists."""

    gb_month: float
    """Per GB stored for a month."""
    gpu_hour: float
    """Per GPU for an hour."""

    def __post_init__(self) -> None:
        for price in (self.gb_month, self.gpu_hour):
            if not (isfinite(price) and price >= 0):
                raise InvalidInput(f"a price cannot be {price}", hint=_PRICES)

    @classmethod
    def parse(cls, text: str) -> Self:
        """
        Read ``GB-month,GPU-hour``.

        >>> Prices.parse("0.023,2.5").gpu_hour
        2.5
        """
        words = text.split(",")
        try:
            gb_month, gpu_hour = map(float, words)
        except ValueError as exc:
            what = f"{len(words)} instead of two values" if len(words) != 2 else "not all of them are numbers"
            raise InvalidInput(f"invalid --price {text!r}: {what}", hint=_PRICES) from exc
        return cls(gb_month=gb_month, gpu_hour=gpu_hour)


_PRICES = "dollars for a GB-month and a GPU-hour: --price 0.023,2.50"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveGroup:
    """Files that the same saves write, such as the files of layers that are due together."""

    size_bytes: int
    """What each of these saves writes."""
    due: Sequence[int] = ()
    """The saves' positions in a cycle, from 0. The run's first save, exact and full, is before the first cycle."""
    cycle: int = 1
    is_in_first: bool = True

    def saves(self, count: int) -> Iterator[int]:
        """Yield the numbers of the saves, out of *count*, that write these files."""
        if self.is_in_first:
            yield 0
        for begin in range(1, count, self.cycle):
            yield from (begin + at for at in self.due if begin + at < count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model will be trained and saved."""

    _JSON: ClassVar = (
        "world_size steps every saves interval_seconds bytes_per_second disk_bytes dtype movement "
        "copy_bytes_per_second keep_last keep_every prices precision exact_every"
    )

    world_size: int
    steps: int
    """Steps in the whole run."""
    every: int
    """Steps from one save to the next."""
    step_seconds: float
    bytes_per_second: float
    """The write rate of all ranks together."""
    copy_bytes_per_second: float
    """The rate at which one rank copies a save while training is held up."""
    disk_bytes: int
    dtype: str = "BF16"
    """Code of the weights' element type."""
    trainable: Fraction = Fraction(1)
    """The fraction of the parameters that is trained; the rest is frozen."""
    movement: float | None = None
    """The relative L2 distance that each layer moves from save to save, for policies that measure it."""
    keep_last: int | None = None
    """How many of the newest saves are kept; if neither this nor *keep_every* is set, all saves are kept."""
    keep_every: int | None = None
    """Saves whose step is a multiple of this are kept."""
    prices: Prices | None = None
    precision: PrecisionName = "exact"
    """The precision of layers between exact saves."""
    exact_every: int | None = EXACT_EVERY
    """Every Nth version of a layer is exact; None if only the first is."""

    def __post_init__(self) -> None:
        if self.steps < self.every:
            raise InvalidInput(
                f"a run of {self.steps:,} steps ends before step {self.every:,}, its first save",
                hint="raise --steps, or lower --save-every",
            )
        if not 0 < self.trainable <= 1:
            raise InvalidInput(f"the trained share cannot be {self.trainable}", hint="a share like 0.5% or 1")
        if self.movement is not None and not (isfinite(self.movement) and self.movement >= 0):
            raise InvalidInput(f"layers cannot move by {self.movement}", hint="a share of their length, like 0.004")
        rates = self.bytes_per_second, self.copy_bytes_per_second
        if not (isfinite(self.step_seconds) and self.step_seconds > 0 and min(rates) > 0):
            raise InvalidInput(
                "step time and write rates must be above 0, and the step time finite",
                hint="correct --step-seconds, --bandwidth or --copy-rate",
            )
        Keep(last=self.keep_last, every=self.keep_every)  # raises InvalidInput for invalid rules
        keyframes(self.precision, self.exact_every)  # raises InvalidInput, too

    @property
    def saves(self) -> int:
        """The number of saves in the run."""
        return self.steps // self.every

    @property
    def interval_seconds(self) -> float:
        """The time from one save to the next."""
        return self.every * self.step_seconds

    @property
    def has_rules(self) -> bool:
        """Whether anything is ever removed."""
        return self.keep_last is not None or self.keep_every is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The amount of storage used."""

    byte_seconds: float
    """Summed over the run."""
    end_bytes: int
    """The bytes in use when the run ends."""


def stored(groups: Sequence[SaveGroup], training: Training, *, lingers_seconds: float) -> Stored:
    """Return the storage used: each version stays until no kept save has it, plus *lingers_seconds*."""
    byte_seconds, end_bytes = 0.0, 0
    run_seconds, interval_seconds = training.steps * training.step_seconds, training.interval_seconds
    newest = training.keep_last or 1  # the newest save stays under any rule
    # The smallest number of saves after which the step is a multiple of the rule's steps.
    keeper = training.keep_every and training.keep_every // gcd(training.keep_every, training.every)
    for group in groups:
        begins = list(group.saves(training.saves))
        for begin, end in zip(begins, [*begins, training.saves][1:], strict=True):
            # Counted from 1, saves *begin* + 1 to *end* have this version: it stays if one is a multiple of *keeper*.
            stays = not training.has_rules or bool(keeper and end // keeper > begin // keeper)
            # Save *end*, so counted, is the last of these; *newest* saves later, it is no longer among the newest.
            goes_seconds = (end + newest) * interval_seconds + lingers_seconds
            until_seconds = run_seconds if stays else min(goes_seconds, run_seconds)
            byte_seconds += group.size_bytes * (until_seconds - (begin + 1) * interval_seconds)
            if stays or goes_seconds > run_seconds:
                end_bytes += group.size_bytes
    return Stored(byte_seconds=byte_seconds, end_bytes=end_bytes)
