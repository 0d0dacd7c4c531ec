"""A plain job shows the lines of layerstore's log, and a job that has configured logging shows what it wants."""

import subprocess
import sys

import pytest

LINES = "from layerstore.live.log import LOG; LOG.info('saving to %s', 'x'); LOG.warning('slow')"
BOTH = "layerstore: saving to x\nlayerstore: slow\n"
SET_UP = "import logging; logging.basicConfig(format='%(levelname)s %(message)s')"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "", BOTH),
        (SET_UP, "", "INFO saving to x\nWARNING slow\n"),
        ("", SET_UP, "INFO saving to x\nWARNING slow\n"),
        ("import logging; logging.getLogger('layerstore').setLevel('WARNING')", "", "layerstore: slow\n"),
        ("import logging; logging.getLogger('layerstore').addHandler(logging.NullHandler())", "", ""),
    ],
    ids=["plain", "configured", "configured_later", "level", "handler"],
)
def test_lines_are_shown_by_default_and_once(before: str, after: str, expected: str) -> None:
    """On stderr, as Python shows warnings; with the program's own handlers or level, those decide."""
    program = "\n".join([before, "import layerstore.live.log", after, LINES])

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert ended.stderr == expected
