"""
Requests to a bucket that are retried while a saver saves.

Outside of savers, each retry is a warning. In a saver, rank 0 logs its first retry at once, which explains a slow save,
and the total over all ranks once they have exchanged reports.
"""

import threading

from layerstore.live.log import LOG
from layerstore.storage import Repository


class Retries:
    """Counts the retries of one rank, in all its threads; a store on a disk has none."""

    def __init__(self, repo: Repository, *, is_first: bool) -> None:
        self._repo = repo
        self._is_first = is_first
        self._guard = threading.Lock()
        self._count = 0
        """Retries since the last report."""
        self._logged = 0
        """How many of these retries were logged already: 0 or 1."""
        repo.report_retries(self._note)

    def _note(self, retry: str) -> None:
        with self._guard:
            self._count += 1
            is_logged = self._is_first and not self._logged
            self._logged += is_logged
        if is_logged:
            LOG.warning("%s", retry)

    def taken(self) -> int:
        """Return the number of retries since the last call."""
        with self._guard:
            count, self._count = self._count, 0
        return count

    def log(self, count: int) -> None:
        """Log *count*, the total of retries on all ranks, unless all of them were logged already."""
        with self._guard:
            logged, self._logged = self._logged, 0
        if self._is_first and count > logged:
            LOG.warning("%s: requests retried, total of all ranks: %d", self._repo.name, count)

    def close(self) -> None:
        """Stop counting: each retry is a warning again."""
        self._repo.report_retries(None)
