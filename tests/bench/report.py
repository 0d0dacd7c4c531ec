"""What a bench has found, for a terminal or between two marks of a page."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

END = "<!-- end -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A figure, and the bound that it was promised to keep."""

    what: str
    value: float
    most: float | None = None
    least: float | None = None

    @property
    def holds(self) -> bool:
        """Whether it keeps it."""
        is_low_enough = self.most is None or self.value <= self.most
        return is_low_enough and (self.least is None or self.value >= self.least)

    def text(self) -> str:
        """
        Return the line that says so.

        >>> print(Bar(what="whole job", value=1.234, most=1.1).text())
        whole job: 1.23 x, at most 1.1 x: MISSED
        """
        bounds = [f"at most {self.most:g} x"] if self.most is not None else []
        bounds += [f"at least {self.least:g} x"] if self.least is not None else []
        return f"{self.what}: {self.value:.2f} x, {', '.join(bounds)}: {'holds' if self.holds else 'MISSED'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table; the first column names the lines."""

    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    def text(self) -> Iterator[str]:
        """Yield it in aligned columns."""
        yield self.title
        rows = [self.header, *self.lines]
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        for name, *cells in rows:
            rest = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            yield f"  {name.ljust(widths[0])}  {rest}".rstrip()

    def markdown(self) -> Iterator[str]:
        """Yield it for a page."""
        yield from [f"**{self.title}**", ""]
        yield f"| {' | '.join(self.header)} |"
        yield "|---" + "|---:" * (len(self.header) - 1) + "|"
        for line in self.lines:
            yield f"| {' | '.join(line)} |"


def filled(text: str, lines: Iterable[str], *, begin: str) -> str:
    """
    Return the page *text* with *lines* between the mark *begin* and the end mark that follows it.

    >>> print(filled("A\\n<!-- b -->\\nold\\n<!-- end -->\\nC", ["new"], begin="<!-- b -->"))
    A
    <!-- b -->
    <BLANKLINE>
    new
    <BLANKLINE>
    <!-- end -->
    C
    """
    before, rest = text.split(f"{begin}\n")
    _, after = rest.split(END, maxsplit=1)
    return f"{before}{begin}\n\n" + "\n".join(lines).strip("\n") + f"\n\n{END}{after}"


def fill(page: Path, lines: Iterable[str], *, begin: str) -> None:
    """Write *lines* between the marks of *page*."""
    page.write_text(filled(page.read_text(), lines, begin=begin))
