"""
What compact saves cost and spare: how far their verbs keep what was promised, and the bytes of a long run.

The numbers of a made-up checkpoint change altogether from one save to the next. Codes have a fixed width, so that
times and bytes are those of a training all the same.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import layerstore
from layerstore.precision import PrecisionName
from tests.bench.generate import generate_size
from tests.bench.measure import Timing, disk_bytes, median_seconds
from tests.bench.report import Bar, Table
from tests.bench.shapes import shape_of_size
from tests.bench.verbs import COMPACT_COMPOSE, COMPACT_INGEST, DURABLE_COPY, RUN

PRECISION: PrecisionName = "delta8"
"""That of the verbs that are timed."""

DEEPSPEED_BYTES = 12
"""What DeepSpeed keeps of a parameter: its master and two moments."""

LONG_RUN = 100
LONG_RUN_GIB = 0.12
"""The size of each save of a run that is really made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A way to save a long run."""

    precision: PrecisionName
    exact_every: int | None
    fewer: float
    """How many times fewer bytes than DeepSpeed's it has to take at least, over `LONG_RUN` saves."""

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.precision}, {f'every {self.exact_every}th' if self.exact_every else 'only the first'} exact"

    def bytes_of(self, saves: int, *, exact: float, compact: float) -> float:
        """
        Return what *saves* take whose sizes are these.

        >>> Series(precision="delta8", exact_every=10, fewer=3.0).bytes_of(100, exact=12, compact=3)
        390
        """
        exactly = 1 if self.exact_every is None else -(-saves // self.exact_every)
        return exactly * exact + (saves - exactly) * compact


SERIES = (
    Series(precision="delta8", exact_every=10, fewer=3.0),
    Series(precision="delta4", exact_every=10, fewer=4.4),
    Series(precision="delta4", exact_every=20, fewer=5.5),
    Series(precision="delta4", exact_every=None, fewer=7.0),
)


def bars(timings: Mapping[str, Sequence[Timing]]) -> Iterator[Bar]:
    """Yield what ingest and compose were promised to take of a copy's time."""
    copy = median_seconds(timings[DURABLE_COPY])
    for name, most in ((COMPACT_INGEST, 1.0), (COMPACT_COMPOSE, 1.5)):
        yield Bar(what=f"{name} / {DURABLE_COPY}", value=median_seconds(timings[name]) / copy, most=most)


def show_bytes(folder: Path, older: Path, newer: Path, *, parameters: int) -> None:
    """Print what a long run takes: computed from two saves of *parameters* parameters, then really made, of few."""
    whole = LONG_RUN * DEEPSPEED_BYTES
    found = {name: sizes(folder / name, older, newer, name) for name in {series.precision: 0 for series in SERIES}}
    for name, (exact, compact) in found.items():
        print(f"{name}: {compact / parameters:.2f} bytes a parameter; exact {exact / parameters:.2f}", flush=True)
    made = make(folder / "made", gib=LONG_RUN_GIB, saves=LONG_RUN)
    lines, checks = [], []
    for series, taken in zip(SERIES, made, strict=True):
        exact, compact = found[series.precision]
        computed = whole / (series.bytes_of(LONG_RUN, exact=exact, compact=compact) / parameters)
        lines.append((series.name, f"{computed:.2f} x", f"{whole / taken:.2f} x"))
        checks.append(Bar(what=series.name, value=min(computed, whole / taken), least=series.fewer))
    title = f"{LONG_RUN} saves, the first included: bytes on disk, compared with DeepSpeed's {DEEPSPEED_BYTES}"
    table = Table(title=title, header=("", "computed, fewer", f"made, {LONG_RUN_GIB:g} GiB"), lines=tuple(lines))
    print("\n".join(["", *table.text(), "", *(bar.text() for bar in checks)]), flush=True)


def sizes(store: Path, older: Path, newer: Path, precision: PrecisionName) -> tuple[int, int]:
    """Return what an exact save takes on disk, and then one in *precision*."""
    with layerstore.init(store) as opened:
        opened.ingest(older, run=RUN)
        first = disk_bytes(store)
        opened.ingest(newer, run=RUN, precision=precision)
    both = disk_bytes(store)
    shutil.rmtree(store)
    return first, both - first


def make(folder: Path, *, gib: float, saves: int) -> list[float]:
    """Save a run with each of `SERIES`; return what each of them takes on disk, in bytes a parameter."""
    for number in range(len(SERIES)):
        layerstore.init(folder / str(number)).close()
    for step in range(1, saves + 1):
        source = generate_size(folder / "source", gib, step=step)
        for number, series in enumerate(SERIES):
            with layerstore.open(folder / str(number)) as store:
                store.ingest(source, run=RUN, precision=series.precision, exact_every=series.exact_every)
        shutil.rmtree(source)
    parameters = parameters_of(gib)
    return [disk_bytes(folder / str(number)) / parameters for number in range(len(SERIES))]


def parameters_of(gib: float, *, is_gathered: bool = False, is_odd: bool = False) -> int:
    """Return how many parameters `generate_size` makes."""
    shape = shape_of_size(gib, is_gathered=is_gathered, is_odd=is_odd)
    return sum(parameter.elements for parameter in shape.parameters())
