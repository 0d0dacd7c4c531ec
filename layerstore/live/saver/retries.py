"""
Requests to a bucket that are retried while a saver saves.

Elsewhere they are warnings. Here rank 0 logs the first one at once, so that it is clear why a save takes long, and once
the ranks have exchanged reports, how many there were on all of them.
"""

import threading

from layerstore.live.log import LOG
from layerstore.storage import Repository


class Retries:
    """Those of one rank, whatever the thread; on a disk there are none."""

    def __init__(self, repo: Repository, *, is_first: bool) -> None:
        self._repo = repo
        self._is_first = is_first
        self._guard = threading.Lock()
        self._count = 0
        """How many there were since the last report."""
        self._logged = 0
        """How many of them, at most one, are in the log already."""
        repo.report_retries(self._note)

    def _note(self, retry: str) -> None:
        with self._guard:
            self._count += 1
            is_logged = self._is_first and not self._logged
            self._logged += is_logged
        if is_logged:
            LOG.warning("%s", retry)

    def taken(self) -> int:
        """Return how many there were since this was last called."""
        with self._guard:
            count, self._count = self._count, 0
        return count

    def log(self, count: int) -> None:
        """Log that there were *count* on all ranks, unless the log says so already."""
        with self._guard:
            logged, self._logged = self._logged, 0
        if self._is_first and count > logged:
            LOG.warning("%s: requests retried on all ranks: %d", self._repo.name, count)

    def close(self) -> None:
        """Let them be warnings again."""
        self._repo.report_retries(None)
