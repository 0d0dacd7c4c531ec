"""What one rank alone has to do for a save before all agree on it: everything there that may fail."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from layerstore.live.capture import Captured, capture
from layerstore.live.files import Destination, Files
from layerstore.live.log import LOG, words_of
from layerstore.live.seams import Engine, SavedStates
from layerstore.live.watch import Sample, Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one rank holds at a save."""

    captured: Captured
    files: Files
    sample: Sample | None
    """What movements are measured by, if they are."""


def take_stock(
    engine: Engine,
    states: Callable[[], SavedStates],
    place: Destination,
    *,
    pattern: re.Pattern[str] | None,
    watch: Watch | None,
) -> tuple[Taken | None, str]:
    """Return what *engine* holds, and why that could not be found out, empty if it could: the others wait to hear."""
    try:
        captured = capture(states(), rank=engine.rank, folder=place.folder, pattern=pattern)
        taken = Taken(
            captured=captured,
            files=Files(engine, captured.model, place),
            sample=None if watch is None else watch.sample(captured),
        )
    except Exception as exc:  # noqa: BLE001  # whatever it is, it is told: no rank saves what another one cannot
        LOG.debug("what the engine holds could not be captured", exc_info=True)
        return None, words_of(exc)
    return taken, ""
