"""The interface by which long operations report progress; the command line decides what to show."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Receives the progress of an operation; called from several threads."""

    def start(self, what: str, total_bytes: int) -> None:
        """Begin the phase *what*, which will move *total_bytes*; a phase such as ``records`` counts records instead."""

    def advance(self, size_bytes: int) -> None:
        """Note that *size_bytes* more are done."""


class Silent:
    """Shows nothing."""

    def start(self, what: str, total_bytes: int) -> None:
        """Ignore the phase."""

    def advance(self, size_bytes: int) -> None:
        """Ignore the bytes."""
