"""The collection behind a saver, without a saver: a helper process that calls the library."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.live.levels import make_levels
from layerstore.live.saver import collector
from layerstore.live.saver.collector import Collector
from layerstore.policy import Best
from tests.generated import generate

RUN = "r"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a store with three commits."""
    with layerstore.init(tmp_path / "a store") as made:
        for step in (10, 20, 30):
            source = generate(tmp_path / str(step), layers=1, hidden=8, vocab=8, step=step, seed=step)
            made.ingest(source, run=RUN)
        yield made


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return what is logged."""
    caplog.set_level(logging.INFO)
    return caplog


def collect(store: Store, keep: Keep | None, *, times: int = 1, push: str | None = None) -> Collector:
    """Collect as behind a saver, after so many commits."""
    behind = Collector(store, keep, run=RUN, places=() if push is None else (push,))
    for _ in range(times - 1):
        behind._collect(is_new=True)
    if push is not None:
        behind.wake()
        behind.wait()
    behind.close(at_once=False)
    return behind


def test_it_collects_what_the_rules_say(
    store: Store, heard: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It logs how much, has a name in ps, ignores modules in the working folder; without work it starts no process."""
    monkeypatch.setattr(collector, "GRACE_SECONDS", 0)
    copy_name = "import shutil; shutil.copyfile('/proc/self/comm', 'name')"
    monkeypatch.setattr(collector, "_PROGRAM", f"{collector._PROGRAM}; {copy_name}")
    for name in ("secrets", "pathlib", "layerstore"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)

    behind = collect(store, Keep(last=1))

    assert [entry.step for entry in store.log(RUN)] == [30]
    assert store.gc(grace_seconds=0).objects.count == 0
    assert "2 commits collected" in heard.text
    assert behind.error == ""
    assert (tmp_path / "name").read_text() == "layerstore-bg\n"
    monkeypatch.setattr(Collector, "_answer", None)
    assert collect(store, Keep(last=1)).error == ""


def test_the_last_exact_save_does_not_go_in_silence(
    store: Store, heard: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Rules that keep fewer saves than there are between two exact ones leave none to resume from bit for bit."""
    source = generate(tmp_path / "40", layers=1, hidden=8, vocab=8, step=40, seed=40)
    store.ingest(source, run=RUN, precision="delta8")

    collect(store, Keep(last=1))

    assert f"no exact save of {RUN} is left: {RUN}@40 was not kept bit for bit" in heard.text


def test_a_collection_under_way_is_no_trouble(
    store: Store, heard: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save tries again."""
    monkeypatch.setenv("LAYERSTORE_LOCK_TIMEOUT", "0.1")
    with store.repo.lock_gc():
        behind = collect(store, Keep(last=1))

    assert "another collection is under way" in heard.text
    assert behind.error == ""
    assert len(store.log(RUN)) == 3


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda store: (store.path / "store.json").write_text("{"), "store.json"),
        (lambda store: next((store.path / "commits" / RUN).glob("20.*")).write_bytes(b"x"), "commits/r/20"),
    ],
    ids=["store", "record"],
)
def test_why_nothing_was_collected_is_logged_once(
    store: Store, heard: pytest.LogCaptureFixture, harm: Callable[[Store], object], why: str
) -> None:
    """And stays in the status; nothing is raised."""
    harm(store)

    behind = collect(store, Keep(last=1), times=3)

    told = [record.message for record in heard.records if "could not collect everything" in record.message]
    assert len(told) == 1
    assert why in told[0]
    assert why in behind.error


def test_a_process_that_fails_is_an_error_in_the_status(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line that it printed says why."""
    monkeypatch.setattr(collector, "_PROGRAM", "raise RuntimeError('no memory')")

    assert collect(store, Keep(last=1)).error == "the collection process exited with 1: RuntimeError: no memory"


@pytest.mark.parametrize(
    "keep",
    [
        Keep(last=3, every=1000, within="14d", best="eval_loss:2", drop_optimizer_older_than=5),
        Keep(within=timedelta(days=9000, microseconds=1), best=Best(metric="f1", count=7, direction="max")),
    ],
)
def test_every_rule_reaches_the_process(store: Store, keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ages and metrics arrive in any form in which they were given."""
    asked: list[dict[str, Any]] = []

    def noted(self: Collector, question: dict[str, Any]) -> dict[str, Any]:
        asked.append(question)
        return {"is_locked": True}

    monkeypatch.setattr(collector, "has_work", lambda *_: True)
    monkeypatch.setattr(Collector, "_answer", noted)
    collect(store, keep)

    (question,) = asked
    found = Keep(**question["keep"])
    for rule in ("last", "every", "drop_optimizer_older_than", "age", "best_of"):
        assert getattr(found, rule) == getattr(keep, rule)
    assert (question["run"], question["store"]) == (RUN, str(store.path))


# -- pushing -------------------------------------------------------------------------------------------------------


def test_it_pushes_and_removes_only_what_was_pushed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run alone; what the remote has is what the store had."""
    monkeypatch.setattr(collector, "GRACE_SECONDS", 0)
    store.ingest(generate(tmp_path / "other", layers=1, hidden=8, vocab=8, step=5, seed=5), run="other")
    url = f"file://{tmp_path}/bucket"

    behind = collect(store, Keep(last=1), push=url)

    assert (behind.pushed_step, behind.error) == (30, "")
    assert [entry.step for entry in store.log(RUN)] == [30]
    with layerstore.open(url) as remote:
        assert {(entry.run, entry.step) for entry in remote.log()} == {(RUN, 10), (RUN, 20), (RUN, 30)}
        assert remote.verify(read_data=True).ok
    assert [entry.pushed for entry in store.log()] == [(), (url,)]


def test_what_is_not_pushed_stays(store: Store, tmp_path: Path, heard: pytest.LogCaptureFixture) -> None:
    """Where the remote cannot be had, nothing is removed, and the status says why."""
    with layerstore.init(tmp_path / "another") as another:
        another.push(f"file://{tmp_path}/bucket")

    behind = collect(store, Keep(last=1), push=f"file://{tmp_path}/bucket")

    assert behind.pushed_step is None
    assert "is a remote of another store" in behind.error
    assert "could not push or collect everything" in heard.text
    assert len(store.log(RUN)) == 3


def test_without_rules_it_only_pushes(store: Store, tmp_path: Path) -> None:
    """Every commit stays."""
    behind = collect(store, None, push=f"file://{tmp_path}/bucket")
    assert (behind.pushed_step, behind.error) == (30, "")
    assert len(store.log(RUN)) == 3


def test_what_was_pushed_is_safe_whatever_a_collection_meets(store: Store, tmp_path: Path) -> None:
    """Damage in another run keeps the collection from going on, and no save from being in the bucket."""
    store.ingest(generate(tmp_path / "other", layers=1, hidden=8, vocab=8, step=5, seed=5), run="other")
    [record] = (store.path / "commits/other").iterdir()
    record.write_bytes(b"rotten")

    behind = collect(store, Keep(last=1), push=f"file://{tmp_path}/bucket")

    assert behind.pushed_step == 30
    assert behind.push_error == ""
    assert behind.error != ""


def moved_pin(store: Store, url: str) -> str:
    """Let a pin mean another commit than in the bucket; return what is said of it."""
    store.pin("best", "r@10")
    store.push(url)
    store.delete_pin("best")
    store.pin("best", "r@20")
    return "not sent: pin best"


def damaged_object(store: Store, url: str) -> str:
    """Damage an object of a commit that the bucket lacks; return what is said of it."""
    [name] = [each for each in store.repo.records.names(RUN) if each.step == 20]
    [stored, *_] = store.repo.version_of(store.repo.records.read(name).record.layers[0]).objects
    path = store.repo.layout.object(stored.id)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return "not sent: r@20"


@pytest.mark.parametrize("harm", [moved_pin, damaged_object])
def test_one_thing_that_cannot_be_sent_keeps_nothing_else(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Store, str], str]
) -> None:
    """The newest save counts as pushed, and what the bucket has is removed here: else the disk would fill up."""
    monkeypatch.setattr(collector, "GRACE_SECONDS", 0)
    url = f"file://{tmp_path}/bucket"
    said = harm(store, url)

    behind = collect(store, Keep(last=1), push=url)

    assert (behind.pushed_step, behind.push_error) == (30, "")
    assert said in behind.error
    assert [entry.step for entry in store.log(RUN)] == [30, 20]
    with layerstore.open(url) as remote:
        assert {entry.step for entry in remote.log()} >= {10, 30}


def test_a_folder_that_begins_with_the_newest_commit_keeps_no_other_here(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the level behind it has may go all the same."""
    monkeypatch.setattr(collector, "GRACE_SECONDS", 0)
    bucket, folder = f"file://{tmp_path}/bucket", tmp_path / "folder"
    store.push(bucket)
    make_levels(store, [str(folder)])
    behind = Collector(store, Keep(last=1), run=RUN, places=[str(folder), bucket])
    behind.wake()
    behind.wait()
    behind.close(at_once=False)

    assert (behind.pushed_step, behind.error) == (30, "")
    assert [entry.step for entry in store.log(RUN)] == [30]
    with layerstore.open(folder) as there:
        assert [entry.step for entry in there.log(RUN)] == [30]


def test_a_run_without_commits_is_not_pushed(store: Store, tmp_path: Path) -> None:
    """All may have been dropped meanwhile."""
    for step in (10, 20, 30):
        store.drop(f"r@{step}")
    behind = collect(store, Keep(last=1), push=f"file://{tmp_path}/bucket")
    assert (behind.pushed_step, behind.error) == (None, "")


def test_a_wait_may_be_short(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saver's other ranks must not wait in silence for an hour of pushing."""
    is_over = threading.Event()
    monkeypatch.setattr(Collector, "_answer", lambda *_: is_over.wait() and {"pushed_step": 30})
    behind = Collector(store, None, run=RUN, places=[f"file://{tmp_path}/bucket"])
    behind.wake()
    assert not behind.wait(0.05)
    is_over.set()
    assert behind.wait(60)
    behind.close(at_once=False)


def test_waiting_tries_again_what_could_not_be_pushed(store: Store, tmp_path: Path) -> None:
    """The bucket may be there by now."""
    (tmp_path / "bucket").write_text("a file, for now")
    behind = Collector(store, None, run=RUN, places=[f"file://{tmp_path}/bucket"])
    behind.wake()
    assert behind.wait()
    assert behind.push_error != ""
    (tmp_path / "bucket").unlink()

    behind.retry()
    assert behind.wait()

    assert (behind.push_error, behind.pushed_step) == ("", 30)
    behind.close(at_once=False)
