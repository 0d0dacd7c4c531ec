"""Where savers tell what training need not stop for."""

import logging

LOG = logging.getLogger("layerstore")


def words_of(exc: BaseException) -> str:
    """Return what went wrong, with what that came from, in one line."""
    cause = exc.__cause__
    words = f"{exc}: {cause}" if cause is not None else str(exc)
    return " ".join(words.split()) or type(exc).__name__
