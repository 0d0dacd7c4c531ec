"""Requests that are retried while a saver saves: two lines of the log at most, of rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest

import layerstore
from layerstore.live.saver.background import Retries
from layerstore.remote import Bucket, RemoteNotice


def test_rank_0_logs_the_first_and_the_sum(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are; the next save begins anew."""
    with layerstore.init(f"file://{tmp_path}/bucket") as store:
        retries = Retries(store.repo, is_first=True)
        _fail_twice(store, monkeypatch)
        assert len(caplog.messages) == 1
        assert "cannot list commits (busy); trying again in" in caplog.messages[0]
        assert retries.taken() == 2

        retries.log(2 + 3)  # of another rank
        retries.log(0)
        assert caplog.messages[1:] == [f"{store.repo.name}: requests retried, total of all ranks: 5"]

        retries.close()
        with pytest.warns(RemoteNotice):
            _fail_twice(store, monkeypatch)
        assert retries.taken() == 0


def test_other_ranks_only_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand ranks would write a thousand lines."""
    with layerstore.init(f"file://{tmp_path}/bucket") as store:
        retries = Retries(store.repo, is_first=False)
        _fail_twice(store, monkeypatch)
        assert retries.taken() == 2
        retries.log(5)
    assert caplog.messages == []


def _fail_twice(store: layerstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """List commits in the bucket, which works the third time."""
    monkeypatch.setattr("layerstore.remote.bucket.REMOTE_PAUSE_SECONDS", 0.0)
    bucket: Bucket = store.repo.objects.source.bucket  # type: ignore[attr-defined] # of a mirror
    found, problems = bucket._client.list, [OSError("busy"), OSError("busy")]

    def listed(folder: str) -> object:
        if problems:
            raise problems.pop()
        return found(folder)

    with monkeypatch.context() as patch:
        patch.setattr(bucket._client, "list", listed)
        bucket.listed("commits")
