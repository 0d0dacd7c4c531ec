"""Ranks without processes: they take turns to send, and then each hears what all have sent."""

from collections.abc import Sequence

from layerstore.live.ranks import Exchange


class InTurn(Exchange):
    """The exchange of so many ranks; whoever uses it sets *rank*, and *hears* once all have sent."""

    def __init__(self, size: int) -> None:
        """Begin with the first, who sends."""
        self.rank, self.size, self._is_alone = 0, size, True
        self.sent: dict[int, Sequence[bytes]] = {}
        self.hears = False

    def deal(self, messages: Sequence[bytes]) -> list[bytes]:
        """Keep *messages*, or return what was sent to the rank."""
        if self.hears:
            return [of_rank[self.rank] for of_rank in self.sent.values()]
        self.sent[self.rank] = messages
        return []
