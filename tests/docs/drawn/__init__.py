"""
Pictures of the guides that programs draw: ``python -m tests.docs.drawn`` writes them, and a test draws them again.

None is drawn by hand, so that none shows what the code does not do.
"""

from collections.abc import Callable
from pathlib import Path

from tests.docs.drawn.bisection import bisection
from tests.docs.drawn.grids import policies, precisions
from tests.docs.drawn.recording import first_minute
from tests.docs.pages import DOCS
from tests.inspect.chromium import Browser

PICTURES: dict[str, Callable[[Browser], str]] = {
    "policies": policies,
    "precisions": precisions,
    "bisection": lambda _: bisection(),
    "first-minute": lambda _: first_minute(),
}


def drawn(name: str) -> Path:
    """Return where the picture *name* is."""
    return DOCS / "pictures" / f"{name}.svg"
