"""The logger of savers, and how an error becomes one line of it."""

import logging

LOG = logging.getLogger("layerstore")


def words_of(exc: BaseException) -> str:
    """Return *exc* and its cause in one line."""
    words, cause = str(exc), str(exc.__cause__ or "")
    if cause not in words:
        words = f"{words}: {cause}"
    return " ".join(words.split()) or type(exc).__name__
