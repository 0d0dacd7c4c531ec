"""Two jobs that do not see each other's locks save one run to one bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import layerstore
from layerstore import Store
from layerstore.errors import Conflict
from layerstore.format import commit_id
from layerstore.model import CommitRecord
from tests.live.module.alone import new, raw
from tests.live.module.models import Optimizers, other, train


class Job:
    """A job on a host of its own, which has a cache of its own."""

    def __init__(self, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Resume from the newest step, if there is one, and attach."""
        monkeypatch.setenv("LAYERSTORE_CACHE_DIR", str(folder / name))
        self.store = Store(f"file://{folder}/bucket")
        self.model: nn.Module
        self.optimizers: Optimizers
        self._seed = 1000 * len(name)
        """Two jobs that compute the same make the same commits, and do not disturb each other."""
        self.model, self.optimizers = new()
        layerstore.resume(self.model, self.optimizers, self.store, run="sft")
        self.saver = layerstore.attach(self.model, self.optimizers, self.store, run="sft")

    def save(self, step: int) -> str:
        """Train and save; return what went wrong."""
        train(self.model, self.optimizers, self._seed + step, self._seed + step + 1)
        before = len(self.saver.status().errors)
        self.saver.save(step)
        self.saver.wait()
        return "".join(self.saver.status().errors[before:])


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what starts a job on another host."""
    monkeypatch.setenv("LAYERSTORE_CACHE_DIR", str(tmp_path / "first"))
    layerstore.init(f"file://{tmp_path}/bucket").close()
    return lambda name: Job(name, tmp_path, monkeypatch)


def steps(job: Job) -> list[int]:
    """Return the steps of the run, as a host sees them that opens it anew."""
    with Store(job.store.repo.name) as store:
        return sorted(entry.step for entry in store.log("sft"))


@pytest.mark.parametrize("first", ["the older", "the younger"])
def test_who_saves_second_saves_nothing_more(hosts: Any, first: str) -> None:
    """It says which commit it has met; the other one does not notice, and a job that resumes goes on from there."""
    older = hosts("older")
    assert older.save(1) == ""
    younger = hosts("younger")
    ahead, behind = (older, younger) if first == "the older" else (younger, older)

    assert ahead.save(2) == ""
    words = [behind.save(step) for step in (2, 3)]
    assert ahead.save(4) == ""

    met = "another job is also saving attempt 1 of run 'sft', and has saved step 2 (commit "
    assert [f"step {step}: {met}" in said for step, said in zip((2, 3), words, strict=True)] == [True, True]
    assert steps(older) == [1, 2, 4]
    for job in (ahead, behind):
        job.saver.close()
    resumed = hosts("third")
    assert other(raw(resumed.model, resumed.optimizers), raw(ahead.model, ahead.optimizers)) == []
    assert resumed.save(5) == ""
    resumed.saver.close()


def test_two_that_begin_the_run(hosts: Any) -> None:
    """Neither was resumed from anything."""
    one, two = hosts("one"), hosts("another")

    assert two.save(1) == ""
    assert "has saved step 1" in one.save(1)
    for job in (one, two):
        job.saver.close()


def test_one_that_was_brought_back_is_nobody_elses(hosts: Any) -> None:
    """A commit from before this job began does not mean that another job saves."""
    first = hosts("first")
    assert [first.save(step) for step in (1, 2)] == ["", ""]
    first.saver.close()
    first.store.drop("sft@1")
    second = hosts("second")
    with Store(first.store.repo.name) as store:
        store.undrop("sft@1")

    assert second.save(3) == ""
    second.saver.close()
    assert steps(second) == [1, 2, 3]


def test_both_in_the_same_moment(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both records are there; both jobs find out at the next step, and a drop makes the run clear again."""
    one, two = hosts("one"), hosts("another")

    def note(_: object, record: CommitRecord, own: set[str], **__: object) -> None:
        own.add(commit_id(record))

    with monkeypatch.context() as patch:
        patch.setattr("layerstore.publish.rank_parts._check_alone", note)
        assert [job.save(1) for job in (one, two)] == ["", ""]
    assert all("has saved step 1" in job.save(2) for job in (one, two))
    for job in (one, two):
        job.saver.close()
    with Store(one.store.repo.name) as store:
        with pytest.raises(Conflict, match="sft@1 is ambiguous"):
            store.show("sft@1")
        store.drop(store.log("sft")[0].commit)
        assert store.show("sft@1").attempt == 1
