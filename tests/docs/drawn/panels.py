"""What the page of a report draws, as a picture by itself: its marks, what they mean, and the style that they use."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from tests.inspect.chromium import Page

_EDGE = 16
_HEADING, _LINE = 24, 18
_LETTER = 5.9
"""So wide are letters of 11 pixels at most."""

# Without what marks the picked step; labels have room for the names that the page had to shorten.
_LOOK = """(() => {
    const text = (node) => new XMLSerializer().serializeToString(node).replace(/ xmlns="[^"]*"/g, "");
    const whole = (node) => {
        const title = node.querySelector("title");
        if (title) node.replaceChildren(title.textContent.replace(/^model\\./, ""));
        return node;
    };
    const marks = (svg) => [...svg.children].filter((node) => !node.matches(".band, .cursor, .compared"))
        .map((node) => text(whole(node)));
    const svg = document.querySelector("#heat svg"), legend = [...document.querySelectorAll("#legend > span")];
    return [marks(svg), svg.width.baseVal.value, svg.height.baseVal.value,
        legend.map((node) => [marks(node.querySelector("svg")), node.innerText])];
})()"""


@dataclass(frozen=True, slots=True)
class Panel:
    """The grid of a run's layers and saves."""

    heading: str
    marks: Sequence[str]
    width: float
    height: float
    legend: Sequence[tuple[Sequence[str], str]]
    """A sample of each kind of mark, and what it means."""


def panel(page: Page, heading: str) -> Panel:
    """Return the grid that *page* shows now."""
    marks, width, height, legend = page.look(_LOOK)
    return Panel(heading, [_rounded(mark) for mark in marks], width, height, legend)


def picture(panels: Sequence[Panel], *, title: str, description: str) -> str:
    """Return *panels* one below the other, and what their marks mean."""
    width = max(each.width for each in panels) + 2 * _EDGE
    y, parts = float(_EDGE), list[str]()
    for each in panels:
        parts.append(f'<text class="strong" x="{_EDGE}" y="{y + 12:g}">{escape(each.heading)}</text>')
        parts += [f'<g transform="translate({_EDGE} {y + _HEADING:g})">', *each.marks, "</g>"]
        y += _HEADING + each.height + 8
    x, seen = float(_EDGE), _classes(parts)
    for sample, words in max((each.legend for each in panels), key=len):
        if not _classes(sample) <= seen:
            continue
        needed = 38 + _LETTER * len(words)
        if x + needed > width and x > _EDGE:
            x, y = float(_EDGE), y + _LINE
        parts += [f'<g transform="translate({x:g} {y:g})">', *sample, f'<text x="26" y="11">{escape(words)}</text></g>']
        x += needed
    y += _LINE + _EDGE / 2
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" viewBox="0 0 {width:g} {y:g}" role="img" '
            'aria-labelledby="title desc">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="desc">{escape(description)}</desc>',
            *["<style>", *_style(_classes(parts)), "</style>"],
            f'<rect class="paper" width="{width:g}" height="{y:g}" rx="6"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _style(used: set[str]) -> list[str]:
    """Return the rules of the page's style for these classes, with its colours for light and for dark."""
    page = files("layerstore.inspect.page").joinpath("page.css").read_text()
    rules = [".paper { fill: var(--panel) }", "text { fill: var(--muted); font: 11px system-ui, sans-serif }"]
    for rule in re.findall(r"(?:text)?\.[\w-]+ \{[^{}]+\}", page):
        if rule.partition(" ")[0].rpartition(".")[2] in used:
            rules.append(rule)
    colours = {name: pair for name, *pair in re.findall(r"(--[\w-]+): light-dark\(([^,]+), ([^)]+)\)", page)}
    named = sorted(set(re.findall(r"var\((--[\w-]+)\)", "".join(rules))))
    light, dark = ("; ".join(f"{name}: {colours[name][index]}" for name in named) for index in (0, 1))
    return [f"svg {{ {light} }}", f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}", *rules]


def _classes(parts: Sequence[str]) -> set[str]:
    return {name for names in re.findall(r'class="([^"]+)"', "".join(parts)) for name in names.split()}


def _rounded(mark: str) -> str:
    """Return *mark* with coordinates of a tenth of a pixel."""
    return re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), mark)
