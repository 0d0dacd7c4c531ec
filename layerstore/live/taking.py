"""What one rank alone has to do for a save before all agree on it: everything there that may fail."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from layerstore.live.capture import Captured, capture
from layerstore.live.files import Destination, Files
from layerstore.live.log import LOG, words_of
from layerstore.live.seams import Engine, SavedStates
from layerstore.live.watch import Sample, Watch
from layerstore.zero3 import undivided


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
    in_parts: bool,
) -> tuple[Taken | None, str]:
    """
    Return what *engine* holds, and why that cannot be saved, empty if it can: the others wait to hear.

    *in_parts* says that some saves may have some layers only.
    """
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
    kept = undivided(captured.share.state) if in_parts else ""
    return taken, kept and f"the optimizer keeps {kept}, which cannot be cut into layers: {_WHOLE_SAVES}"


_WHOLE_SAVES = "save all of them, with policy='full' and without on_pressure='degrade'"
