"""Processes that do not meet: the first one says that it waits, and gives up."""

from datetime import timedelta

import pytest

from layerstore.errors import JobLost
from layerstore.shares import processes
from tests.remote.servers import free_port


def test_a_lead_alone_says_that_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it gives up."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(processes, "_MEETING", timedelta(seconds=2))
    monkeypatch.setattr(processes, "_MEETING_WARNS_AFTER", timedelta(seconds=0.2))

    with (
        pytest.warns(processes.JobNotice, match=rf"waiting for the 2 processes of this job at 127.0.0.1:{port}"),
        pytest.raises(JobLost, match="do not meet at"),
    ):
        processes.Led(count=2)
