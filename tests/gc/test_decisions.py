"""What a collection removes because of what it keeps, while somebody changes that; and what it cannot do just now."""

import contextlib
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from layerstore.publish.hiding import hiding_commit

import layerstore
from layerstore import Keep, Store
from layerstore.errors import Conflict, IntegrityError, StorageIO
from layerstore.history.references import resolve
from layerstore.model import Commit, CommitId
from layerstore.ops import claims, collecting, drop, trims
from layerstore.storage.files import Files
from layerstore.storage.rooms import Rooms
from tests.gc.test_gc import collect, steps
from tests.gc.test_meanwhile import once
from tests.unit.checkpoints import Checkpoints

NEWEST = Keep(last=1)
WEIGHTS = Keep(drop_optimizer_older_than=5)


@pytest.fixture
def three(store: Store, saved: Checkpoints) -> Store:
    """Return a store with steps 10, 20 and 30 of one run."""
    for step in (10, 20, 30):
        store.ingest(saved(step), run="r")
    return store


def between(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let *act* happen once, when a collection has made its plan and has changed nothing."""
    acted = list[object]()

    def trim_all(*given: Any, **more: Any) -> trims.Trimming:
        if not acted:
            acted.append(None)
            acted.append(act())
        return trims.trim_all(*given, **more)

    monkeypatch.setattr(collecting, "trim_all", trim_all)


def moments(store: Store) -> dict[int, bool]:
    """Return which steps have moments."""
    return {entry.step: entry.has_moments for entry in store.log()}


# -- what is kept is hidden meanwhile ------------------------------------------------------------------------------


def test_who_drops_what_a_plan_keeps_makes_it_plan_again(three: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 10 and 20 were to go because 30 stays."""
    with Store(three.path) as other:
        between(monkeypatch, lambda: other.drop("r@30"))
        collect(three, NEWEST)

    assert steps(three) == [20]
    assert three.verify(read_data=True).ok


def test_who_drops_while_all_else_is_removed_is_refused(three: Store) -> None:
    """The collection has looked by then; so the drop takes itself back."""
    refused: list[Conflict] = []

    def drop_the_newest() -> None:
        with Store(three.path) as other, pytest.raises(Conflict, match="removes all other commits") as caught:
            other.drop("r@30")
        refused.append(caught.value)

    with Store(three.path, hook=once("unlink", "commits", drop_the_newest)) as collecting_store:
        collect(collecting_store, NEWEST)

    assert len(refused) == 1
    assert "r@30 was not dropped" in str(refused[0])
    assert steps(three) == [30]
    assert three.verify(read_data=True).ok
    assert three.drop("r@30", last=True).tip is None


def test_a_whole_collection_may_pass_while_a_drop_is_under_way(three: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its decision and its one link: what was left is not there any more."""
    real = drop._publish

    def publish(rooms: Rooms, hiding: Commit) -> None:
        if hiding.record.step == 30 and steps(three) != [30]:
            with Store(three.path) as other:
                collect(other, NEWEST)
        real(rooms, hiding)

    monkeypatch.setattr(drop, "_publish", publish)
    with pytest.raises(Conflict, match="removes all other commits"):
        three.drop("r@30")

    assert steps(three) == [30]


def test_only_what_was_shown_goes(three: Store, saved: Checkpoints) -> None:
    """Whoever has said yes to a plan has not said yes to the next one."""
    shown = collect(three, NEWEST, dry_run=True)
    three.ingest(saved(40), run="r")

    with pytest.raises(Conflict, match=r"r@30 was to stay when the plan was shown"):
        collect(three, NEWEST, confirmed=shown)
    assert steps(three) == [40, 30, 20, 10]

    collect(three, Keep(last=2), confirmed=shown)
    assert steps(three) == [40, 30]


def test_what_was_to_lose_its_moments_does_not_go_altogether(three: Store, saved: Checkpoints) -> None:
    """Weights that somebody has seen to stay, stay."""
    shown = collect(three, Keep(last=2, drop_optimizer_older_than=5), dry_run=True)
    three.ingest(saved(33), run="r")

    with pytest.raises(Conflict, match=r"r@20 was to stay"):
        collect(three, Keep(last=2, drop_optimizer_older_than=5), confirmed=shown)
    assert steps(three) == [33, 30, 20, 10]


def test_a_run_does_not_lose_its_last_commit_to_a_drop_of_an_attempts_last(store: Store, saved: Checkpoints) -> None:
    """Whoever says --last means the attempt, and is told what the run means then: that is going, too."""
    for step in (10, 20):
        store.ingest(saved(step), run="r")
    store.ingest(saved(20, seed=5), run="r", rollback=True)
    refused: list[str] = []

    def drop_the_newest() -> None:
        with Store(store.path) as other, pytest.raises(Conflict) as caught:
            other.drop("r@20", last=True)
        refused.append(str(caught.value))

    with Store(store.path, hook=once("unlink", "commits", drop_the_newest)) as collecting_store:
        collect(collecting_store, NEWEST)

    assert "removes all other commits of run 'r'" in refused[0]
    assert 20 in steps(store)
    assert store.verify(read_data=True).ok


def test_a_refused_drop_writes_nothing(three: Store) -> None:
    """What can be seen beforehand costs no record, however often it is tried while a stopped collection waits."""

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Store(three.path, hook=once("unlink", "commits", stop)) as stopped:
        collect(stopped, NEWEST)
    before = sorted(path.name for path in (three.path / "commits" / "r").iterdir())

    for _ in range(2):
        with Store(three.path) as other, pytest.raises(Conflict, match="was stopped while it did"):
            other.drop("r@30")
    assert sorted(path.name for path in (three.path / "commits" / "r").iterdir()) == before
    collect(three)
    assert steps(three)[0] == 30


# -- moments -------------------------------------------------------------------------------------------------------


def test_what_was_dropped_meanwhile_does_not_come_back_without_moments(
    three: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at again before anything takes its place."""
    with Store(three.path) as other:
        between(monkeypatch, lambda: other.drop("r@10"))
        collect(three, WEIGHTS)

    assert moments(three) == {30: True, 20: False}


def test_moments_stay_where_what_is_newer_has_gone(three: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is newest decides: without it the one before keeps its moments, or nothing could be resumed."""
    with Store(three.path) as other:
        between(monkeypatch, lambda: other.drop("r@30"))
        collect(three, WEIGHTS)

    assert moments(three) == {20: True, 10: False}


def test_what_is_dropped_at_that_very_moment_stays_dropped(three: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever needs no lock: both have hidden the commit, and each looks for the other."""

    def publish(rooms: Rooms, writer: Any, commit: Commit) -> bool:
        if commit.record.step == 10:
            hidden = resolve(rooms, "r@10")
            rooms.records.link(hiding_commit(hidden.record, CommitId(hidden.commit), policy="drop"))
        return claims.publish(rooms, writer, commit)

    monkeypatch.setattr(trims, "publish", publish)
    collect(three, WEIGHTS)

    assert moments(three) == {30: True, 20: False}
    assert three.verify(read_data=True).ok


def test_a_drop_takes_along_what_has_just_lost_its_moments(three: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has decided about the commit that was there before."""
    real = drop._publish

    def publish(rooms: Rooms, hiding: Commit) -> None:
        if hiding.record.step == 10 and moments(three)[10]:
            with Store(three.path) as other, pytest.MonkeyPatch.context() as patched:
                patched.setattr(type(other.rooms), "lock_run", lambda *_: contextlib.nullcontext())
                collect(other, WEIGHTS)
        real(rooms, hiding)

    monkeypatch.setattr(drop, "_publish", publish)
    three.drop("r@10")

    assert moments(three) == {30: True, 20: False}


def test_what_was_replaced_meanwhile_stands_alone(
    three: Store,
    saved: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two commits of one step would be a conflict for good; the new one is as old, and loses its moments."""
    replaced = three.show("r@10").commit
    with Store(three.path) as other:
        between(monkeypatch, lambda: other.ingest(saved(10, seed=5), run="r", replace=True))
        collect(three, WEIGHTS)

    with layerstore.init(three.path.with_name("alone")) as alone:
        alone.ingest(saved(10, seed=5), run="r")
        alone.ingest(saved(30), run="r")
        collect(alone, WEIGHTS)
        expected = [line.version for line in alone.ls("r@10")]
    assert three.show("r@10").commit != replaced
    assert [line.version for line in three.ls("r@10")] == expected
    assert moments(three) == {30: True, 20: False, 10: False}


def test_without_room_moments_stay_and_all_else_goes(three: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so; what was kept is believed to be there, and is missed when it is lost."""
    monkeypatch.setattr(Files, "free_bytes", lambda self, path: 0)
    with pytest.raises(StorageIO, match=r"no room to drop the moments of r@20.*all else was collected") as caught:
        collect(three, Keep(every=20, drop_optimizer_older_than=5))

    assert caught.value.errno == errno.ENOSPC
    assert moments(three) == {30: True, 20: True}
    assert three.verify(read_data=True).ok
    monkeypatch.undo()
    collect(three, WEIGHTS)
    assert moments(three) == {30: True, 20: False}


def test_a_kept_commit_that_is_lost_is_missed(three: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a collection that was to drop its moments, and could not: its plan does not excuse that."""
    monkeypatch.setattr(Files, "free_bytes", lambda self, path: 0)
    with pytest.raises(StorageIO):
        collect(three, Keep(every=20, drop_optimizer_older_than=5))
    monkeypatch.undo()
    [record] = (three.path / "commits" / "r").glob("20.*")
    record.unlink()

    with Store(three.path) as opened:
        assert not opened.verify().ok


def test_a_run_that_is_being_saved_to_keeps_its_moments_for_now(three: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingest holds it; the rest is collected, and the command says what was not done."""
    monkeypatch.setenv("LAYERSTORE_LOCK_TIMEOUT", "0")
    with (
        three.rooms.lock_run("r"),
        Store(three.path) as other,
        pytest.raises(Conflict, match="moments were kept there"),
    ):
        collect(other, Keep(every=20, drop_optimizer_older_than=5))

    assert moments(three) == {30: True, 20: True}


# -- rules are per run ---------------------------------------------------------------------------------------------


def measured(source: Path, metric: str, value: float) -> Path:
    """Let *source* say what was measured at its step."""
    state = json.loads((source / "trainer_state.json").read_text())
    state["log_history"] = [{"step": state["global_step"], metric: value}]
    (source / "trainer_state.json").write_text(json.dumps(state))
    return source


@pytest.mark.parametrize("odd", [3, None, "step", [], {"step": "20"}])
def test_odd_entries_of_the_history_hide_no_others(store: Store, saved: Checkpoints, odd: object) -> None:
    """The best commit must not go because of what somebody else has written into the Trainer's list."""
    for step in (10, 20, 30):
        source = measured(saved(step, layout="hf"), "eval_loss", step)
        state = json.loads((source / "trainer_state.json").read_text())
        state["log_history"] = [odd, *state["log_history"], odd]
        (source / "trainer_state.json").write_text(json.dumps(state))
        store.ingest(source, run="sft")

    collect(store, Keep(best="eval_loss"))

    assert steps(store, "sft") == [30, 10]


def test_a_run_without_the_metric_keeps_what_it_has(store: Store, saved: Checkpoints) -> None:
    """It has no best commit, and so no worse ones either."""
    for run, metric in (("sft", "eval_loss"), ("dpo", "eval_rewards")):
        for step in (10, 20, 30):
            store.ingest(measured(saved(step, layout="hf", seed=step + len(metric)), metric, step), run=run)

    outcome = collect(store, Keep(best="eval_loss"))

    assert steps(store, "sft") == [30, 10]
    assert steps(store, "dpo") == [30, 20, 10]
    assert not any(
        fate.loses_moments
        for fate in collect(store, Keep(best="eval_loss", drop_optimizer_older_than=5)).commits
        if fate.run == "dpo"
    )
    collect(store, Keep(best="eval_loss", last=2))
    assert steps(store, "dpo") == [30, 20]
    assert {fate.kept_by for fate in outcome.commits if (fate.run, fate.step) == ("dpo", 10)} == {
        ("no commit has eval_loss",)
    }


def test_what_a_trim_cannot_read_is_named(three: Store) -> None:
    """Whose it is, and that nothing was removed."""
    version = resolve(three.rooms, "r@10").record.layers[0].version
    three.rooms.layout.object(version.id).unlink()

    with pytest.raises(IntegrityError, match=r"what r@10 needs is not known: .*; nothing was removed"):
        collect(three, WEIGHTS)
