"""Without assertions everything is refused and found as with them: no check of the world is one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


def _told(folder: Path, *options: str) -> list[str]:
    """Return what the trials said, but for what is another one each time: ids and places."""
    folder.mkdir()
    command = [sys.executable, *options, "-m", "tests.faults.optimised", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    text = done.stdout.replace(str(folder), "FOLDER")
    return re.sub(r"[0-9a-f]{12,32}", "ID", text).splitlines()


@pytest.mark.fault(89)
@pytest.mark.full
def test_assertions_are_no_checks(fast_path: Path) -> None:
    """The same errors in the same words, over dozens of bad checkpoints and damaged files."""
    on, off = _told(fast_path / "on"), _told(fast_path / "off", "-O")

    assert (on.pop(), off.pop()) == ("assertions are on", "assertions are off")
    assert on == off
    assert len(on) > 60
    assert len([line for line in on if "Error" in line or "Mismatch" in line or "Unsupported" in line]) > 30
