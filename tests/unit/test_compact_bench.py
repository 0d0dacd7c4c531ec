"""The benchmark of compact saves: what it computes, what it promises, and a tiny run of it."""

from pathlib import Path

import pytest

from tests.bench import compact
from tests.bench.compact import SERIES, Series
from tests.bench.generate import generate_size
from tests.bench.measure import Timing
from tests.bench.report import Bar
from tests.bench.verbs import COMPACT_COMPOSE, COMPACT_INGEST, DURABLE_COPY, Workplace

TINY_GIB = 0.002


def timing(seconds: float) -> Timing:
    """Return a run that took so long."""
    return Timing(seconds=seconds, cpu_seconds=0.0, anonymous_bytes=0, others_share=0.0)


def test_a_bar_holds_up_to_its_bound() -> None:
    """Both ways, the bound itself included."""
    assert Bar(what="time", value=1.0, most=1.0).holds
    assert not Bar(what="time", value=1.01, most=1.0).holds
    assert Bar(what="bytes", value=3.0, least=3.0).text() == "bytes: 3.00 x, at least 3 x: holds"
    assert Bar(what="bytes", value=2.9, least=3.0).text().endswith("MISSED")


@pytest.mark.parametrize(("exact_every", "expected"), [(10, 10 * 12 + 90 * 3), (20, 5 * 12 + 95 * 3), (None, 12 + 297)])
def test_the_first_save_and_every_nth_are_counted_as_exact(exact_every: int | None, expected: int) -> None:
    """A hundred saves of twelve bytes or three."""
    series = Series(precision="delta8", exact_every=exact_every, fewer=1.0)

    assert series.bytes_of(100, exact=12, compact=3) == expected


def test_a_run_that_ends_between_exact_saves_has_one_more_of_them() -> None:
    """The first save is exact."""
    assert Series(precision="delta8", exact_every=10, fewer=1.0).bytes_of(11, exact=12, compact=3) == 2 * 12 + 9 * 3


def test_times_are_compared_with_a_durable_copy() -> None:
    """By medians."""
    timings = {
        DURABLE_COPY: [timing(2.0), timing(1.0), timing(9.0)],
        COMPACT_INGEST: [timing(1.0)],
        COMPACT_COMPOSE: [timing(4.0)],
    }

    assert [(bar.value, bar.holds) for bar in compact.bars(timings)] == [(0.5, True), (2.0, False)]


@pytest.mark.exhaustive
def test_a_tiny_run_of_the_verbs_and_the_bytes(tmp_path: Path) -> None:
    """A long run takes what is computed from two of its saves, to within what their records take."""
    older, newer = (generate_size(tmp_path / f"checkpoint-{step}", TINY_GIB, step=step) for step in (1, 2))
    place = Workplace(tmp_path, newer, older=older, precision="delta8")

    for contender in place.contenders("compact"):
        contender.prepare()
        contender.run()
    sizes = {name: compact.sizes(tmp_path / name, older, newer, name) for name in {of.precision for of in SERIES}}
    place.close()
    made = compact.make(tmp_path / "made", gib=TINY_GIB, saves=12)

    parameters = compact.parameters_of(TINY_GIB)
    assert sizes["delta4"][1] < sizes["delta8"][1] < sizes["delta8"][0] / 2
    for series, taken in zip(SERIES, made, strict=True):
        exact, of_compact = sizes[series.precision]
        expected = series.bytes_of(12, exact=exact, compact=of_compact) / parameters
        assert taken == pytest.approx(expected, rel=0.1), series.name
