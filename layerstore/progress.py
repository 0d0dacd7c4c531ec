"""How a long verb tells how far it is; what is shown is for the command line to decide."""

from typing import Protocol


class Progress(Protocol):
    """Receives what a verb has done; called from several threads."""

    def start(self, what: str, total_bytes: int) -> None:
        """Begin the phase *what*, which will move *total_bytes*; one called ``records`` or so counts these instead."""

    def advance(self, size_bytes: int) -> None:
        """Note that *size_bytes* more are done."""


class Silent:
    """Shows nothing."""

    def start(self, what: str, total_bytes: int) -> None:
        """Ignore the phase."""

    def advance(self, size_bytes: int) -> None:
        """Ignore the bytes."""
