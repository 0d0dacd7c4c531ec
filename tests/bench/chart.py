"""Charts as SVG text: axes with round ticks, lines, bands, dots and cells, legible on light and on dark pages."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 760
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a8f98")
"""Told apart by colour-blind readers, too."""

_STYLE = """
    text { font: 12px system-ui, "Segoe UI", sans-serif; fill: #1f2328 }
    .strong { font-size: 14px; font-weight: 600 }
    .middle { text-anchor: middle }
    .end { text-anchor: end }
    .paper { fill: #ffffff }
    .axis { stroke: #57606a; fill: none }
    .grid { stroke: #d0d7de; fill: none }
    .band { fill: #8a8f98; opacity: 0.25; stroke: none }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f3f6 }
      .paper { fill: #161b22 }
      .axis { stroke: #9aa5b1 }
      .grid { stroke: #2d333b }
    }
"""

_TICK_PIXELS = 40
"""Numbers of an axis do not stand closer."""
_POWERS_ALONE = 1e4
"""A logarithmic axis of so many times or more has only the powers of ten."""
_LETTER_PIXELS = 6.6

Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Values to pixels."""

    low: float
    high: float
    begin: float
    """The pixel of the lowest value."""
    end: float
    is_logarithmic: bool = False

    def at(self, value: float) -> float:
        """
        Return the pixel of *value*.

        >>> Scale(low=0, high=10, begin=100, end=0).at(2.5)
        75.0
        """
        low, high, value = (self._number(each) for each in (self.low, self.high, value))
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """
        Return some round values within.

        >>> Scale(low=0, high=0.9, begin=0, end=1).ticks()
        [0.0, 0.2, 0.4, 0.6, 0.8]
        >>> Scale(low=1, high=150, begin=0, end=1, is_logarithmic=True).ticks()
        [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
        >>> Scale(low=0.001, high=20, begin=0, end=1, is_logarithmic=True).ticks()
        [0.001, 0.01, 0.1, 1.0, 10.0]
        """
        if self.is_logarithmic:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            factors = (1, 2, 5) if self.high / self.low < _POWERS_ALONE else (1,)
            found = [float(f"{factor}e{power}") for power in powers for factor in factors]
            return [tick for tick in found if self.low <= tick <= self.high]
        size = 10.0 ** math.floor(math.log10((self.high - self.low) / 4))
        step = next(size * factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (size * factor) <= 6)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(number * step, 10) for number in range(first, last + 1)]

    def _number(self, value: float) -> float:
        return math.log10(value) if self.is_logarithmic else value


def spanning(
    values: Iterable[float], *, begin: float, end: float, is_logarithmic: bool = False, with_zero: bool = True
) -> Scale:
    """Return a scale that has room for all *values*, and for zero if that is wanted and not logarithmic."""
    found = [value for value in values if math.isfinite(value)]
    if is_logarithmic:
        low, high = min(found), max(found)
        return Scale(low=low / 1.3, high=high * 1.3, begin=begin, end=end, is_logarithmic=True)
    found += [0.0] if with_zero else []
    low, high = min(found), max(found)
    margin = (high - low or 1.0) / 20
    return Scale(low=low - margin, high=high + margin, begin=begin, end=end)


class Chart:
    """One picture."""

    def __init__(self, *, title: str, description: str, height: float) -> None:
        self._title, self._description, self._height = title, description, height
        self._parts: list[str] = []
        self.text(20, 24, title, css="strong")

    def axes(self, x: Scale, y: Scale, *, across: str, upwards: str) -> None:
        """Draw the axes, a grid, and what they mean."""
        for tick in x.ticks():
            self._line([(x.at(tick), y.begin), (x.at(tick), y.end)], css="grid")
            self.text(x.at(tick), y.begin + 16, _number(tick), css="middle")
        for tick in y.ticks():
            self._line([(x.begin, y.at(tick)), (x.end, y.at(tick))], css="grid")
            self.text(x.begin - 6, y.at(tick) + 4, _number(tick), css="end")
        self._line([(x.begin, y.end), (x.begin, y.begin), (x.end, y.begin)], css="axis")
        self.text((x.begin + x.end) / 2, y.begin + 34, across, css="middle")
        self.text(x.begin, y.end - 8, upwards)

    def across(self, x: Scale, *, top: float, bottom: float, label: str) -> None:
        """Draw a horizontal axis alone, with a grid up to *top*: for a line of dots by name."""
        last = -math.inf
        for tick in x.ticks():
            self._line([(x.at(tick), bottom), (x.at(tick), top)], css="grid")
            if x.at(tick) - last >= _TICK_PIXELS:
                self.text(x.at(tick), bottom + 16, _number(tick), css="middle")
                last = x.at(tick)
        self._line([(x.begin, bottom), (x.end, bottom)], css="axis")
        self.text((x.begin + x.end) / 2, bottom + 34, label, css="middle")

    def text(self, x: float, y: float, words: str, *, css: str = "") -> None:
        """Write *words*; they end or have their middle at *x* if *css* says so."""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{css}">{escape(words)}</text>')

    def line(self, points: Sequence[Point], colour: str, *, is_dashed: bool = False) -> None:
        """Draw a line through *points*."""
        dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')

    def area(self, upper: Sequence[Point], lower: Sequence[Point], colour: str) -> None:
        """Fill what lies between two lines."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *reversed(lower)])
        self._parts.append(f'<polygon points="{path}" fill="{colour}" opacity="0.18"/>')

    def band(self, x: float, y: float, width: float, height: float) -> None:
        """Shade a range that means nothing."""
        self._parts.append(f'<rect class="band" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>')

    def cell(self, x: float, y: float, width: float, height: float, *, share: float) -> None:
        """Fill a cell of a map, the more the larger its *share* of the largest value."""
        self._parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{COLOURS[0]}" '
            f'opacity="{0.04 + 0.96 * share:.3f}"/>'
        )

    def dot(self, x: float, y: float, colour: str) -> None:
        """Draw a dot."""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')

    def labels(self, named: Mapping[str, Point]) -> None:
        """Write each name by its dot, where neither a dot nor another name is; to its right if nowhere is room."""
        taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in named.values()]
        for name, (x, y) in sorted(named.items(), key=lambda of: of[1]):
            width = _LETTER_PIXELS * len(name)
            starts = {"": x + 9, "end": x - 9 - width, "middle": x - width / 2}
            places = [(css, down) for down in (4, -8, 16, -20, 28) for css in ("", "end")]
            boxes = {
                (css, down): (starts[css], y + down - 10, starts[css] + width, y + down + 2)
                for css, down in [*places, ("middle", -10), ("middle", 18)]
            }
            within = (place for place, box in boxes.items() if box[2] <= WIDTH)
            free = (place for place in within if not any(_meet(boxes[place], it) for it in taken))
            css, down = next(free, ("", 4))
            taken.append(boxes[css, down])
            self.text({"": x + 9, "end": x - 9, "middle": x}[css], y + down, name, css=css)

    def legend(self, names: Sequence[str], colours: Sequence[str], *, y: float) -> None:
        """Say which colour is whose, in as many lines as it takes."""
        x = 20.0
        for name, colour in zip(names, colours, strict=True):
            width = 30 + 6.5 * len(name)
            if x + width > WIDTH and x > 20:
                x, y = 20.0, y + 18
            self.dot(x + 5, y - 4, colour)
            self.text(x + 14, y, name)
            x += width

    def svg(self) -> str:
        """Return the whole picture."""
        body = "\n  ".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height:g}" role="img" '
            f'aria-labelledby="title desc">\n  <title id="title">{escape(self._title)}</title>\n'
            f'  <desc id="desc">{escape(self._description)}</desc>\n  <style>{_STYLE}  </style>\n'
            f'  <rect class="paper" width="{WIDTH}" height="{self._height:g}"/>\n  {body}\n</svg>\n'
        )

    def _line(self, points: Sequence[Point], *, css: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" class="{css}"/>')


def _number(tick: float) -> str:
    """
    Return a number of an axis, without a power of ten.

    >>> _number(1e-05), _number(20.0)
    ('0.00001', '20')
    """
    return f"{tick:.9f}".rstrip("0").rstrip(".")


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
