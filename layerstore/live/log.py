"""The savers' logger, and errors formatted as one line."""

import logging
import sys

LOG = logging.getLogger("layerstore")


class _UnlessConfigured(logging.StreamHandler):  # type: ignore[type-arg]  # generic only in the type stubs
    """Writes to stderr unless the program has configured logging; Python's default would show only warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write *record*."""
        if len(LOG.handlers) == 1 and not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)


def _show_lines() -> None:
    """Show lines from INFO up, of which a job logs few; a level that the program has already set for LOG stays."""
    if LOG.level == logging.NOTSET:
        LOG.setLevel(logging.INFO)
    handler = _UnlessConfigured()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    LOG.addHandler(handler)


_show_lines()


def one_line(exc: BaseException) -> str:
    """Return *exc* and its cause in one line."""
    words, cause = str(exc), exc.__cause__ or ""
    # Without the errno, because most of our messages already end in the system's text for it.
    cause = (isinstance(cause, OSError) and cause.strerror) or str(cause)
    if cause not in words:
        words = f"{words}: {cause}"
    return " ".join(words.split()) or type(exc).__name__
