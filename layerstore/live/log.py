"""The logger of savers, and how an error becomes one line of it."""

import logging

LOG = logging.getLogger("layerstore")


def words_of(exc: BaseException) -> str:
    """Return *exc* and its cause in one line."""
    cause = exc.__cause__
    words = f"{exc}: {cause}" if cause is not None else str(exc)
    return " ".join(words.split()) or type(exc).__name__
