"""
The first minute at a terminal: what commands say, as a picture that types them.

The commands run on made-up checkpoints, and every line is theirs; only the folder that they run in is called /data.
"""

import re
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html import escape
from pathlib import Path

from tests.generated import generate

COMMANDS = (
    "layerstore init",
    "layerstore ingest --all out --run sft",
    "layerstore log",
    "layerstore verify --read-data",
    "layerstore compose sft@100 -o resume",
)

_COLUMNS = 80
_LETTER, _LINE, _EDGE = 7.3, 17, 14
_KEY_SECONDS, _PAUSE_SECONDS, _OUTPUT_SECONDS = 0.04, 0.5, 0.06

# Who wants no motion sees the end of it at once; so does a program that knows nothing of animations.
_STYLE = """
svg { --paper: #fbfbf9; --ink: #1d2126; --muted: #5a636d; --accent: #1f4e9c }
@media (prefers-color-scheme: dark) { svg { --paper: #14171a; --ink: #e4e6e8; --muted: #a0a9b2; --accent: #8ab4ff } }
.paper { fill: var(--paper) }
text { white-space: pre; font: 12px ui-monospace, "DejaVu Sans Mono", Menlo, monospace; fill: var(--muted) }
.typed { fill: var(--ink) }
.prompt { fill: var(--accent) }
.cover { display: none }
@media (prefers-reduced-motion: no-preference) {
.line { animation: show 1ms both }
.cover { display: inline; animation: type both }
}
@keyframes show { from { visibility: hidden } }
@keyframes type { to { transform: translateX(100%); visibility: hidden } }
"""


def first_minute() -> str:
    """Run the commands; return the picture of what they say."""
    width, y, seconds = _COLUMNS * _LETTER + 2 * _EDGE, _EDGE, _PAUSE_SECONDS
    parts = list[str]()
    for command, lines in _session():
        x, long = _EDGE + 2 * _LETTER, len(command) * _LETTER
        typing = _KEY_SECONDS * len(command)
        parts.append(
            _shown(
                f'<text x="{_EDGE}" y="{y + 12}"><tspan class="prompt">$ </tspan><tspan class="typed">'
                f'{escape(command)}</tspan></text><rect class="paper cover" x="{x:g}" y="{y}" width="{long:g}" '
                f'height="{_LINE}" style="animation-delay:{seconds:g}s;animation-duration:{typing:g}s;'
                f'animation-timing-function:steps({len(command)});transform-box:fill-box"/>',
                seconds,
            )
        )
        y, seconds = y + _LINE, seconds + typing + _PAUSE_SECONDS
        for line in lines:
            parts.append(_shown(f'<text x="{_EDGE}" y="{y + 12}">{escape(line)}</text>', seconds))
            y, seconds = y + _LINE, seconds + _OUTPUT_SECONDS
        y, seconds = y + _LINE // 2, seconds + _PAUSE_SECONDS
    height = y + _EDGE - _LINE // 2
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" viewBox="0 0 {width:g} {height}" role="img" '
            'aria-labelledby="title desc">',
            '<title id="title">The first minute with layerstore</title>',
            '<desc id="desc">Five commands at a terminal, and what they say: a store is made, a folder with two '
            "checkpoints of eight ranks is ingested, the log lists both, every byte is read and verified, and step "
            "100 is written as a checkpoint to resume from.</desc>",
            f"<style>{_STYLE}</style>",
            f'<rect class="paper" width="{width:g}" height="{height}" rx="6"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _session() -> Iterator[tuple[str, list[str]]]:
    """Yield each command with what it says, in lines of a terminal."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        for step in (100, 200):
            checkpoint = folder / "out" / f"checkpoint-{step}"
            generate(checkpoint, layers=12, hidden=64, vocab=256, world_size=8, layout="hf", step=step)
        for command in COMMANDS:
            ended = subprocess.run(
                [sys.executable, "-m", "layerstore.cli", *command.split()[1:]],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=True,
            )
            # What a slow machine says of its progress, a terminal overwrites.
            lines = [line for line in ended.stdout.splitlines() if not re.match(r"\w+: +\d+%", line)]
            yield command, [part for line in lines for part in _folded(line.replace(str(folder), "/data"))]


def _folded(line: str) -> list[str]:
    """Return *line* as lines of a terminal; a short one, such as a table's, as it is."""
    return [line] if len(line) <= _COLUMNS else textwrap.wrap(line, _COLUMNS)


def _shown(part: str, seconds: float) -> str:
    return f'<g class="line" style="animation-delay:{seconds:g}s">{part}</g>'


def said(picture: str) -> str:
    """Return what *picture* says, but for what is another at every run: the store's id and the seconds."""
    texts = ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    words = " ".join("".join(text.itertext()) for text in texts)
    return re.sub(r"(id) [0-9a-f]{32}|(in) [\d.]+ m?s", r"\1\2", " ".join(words.split()))
