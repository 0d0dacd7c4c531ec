"""What a saver asks after each commit: whether its rules remove anything. Its cost does not grow with the history."""

import json
from collections import Counter
from pathlib import Path

import pytest

from layerstore import Keep, Store
from layerstore.gc import Facts, has_work
from layerstore.storage import RecordName, RecordStore, Repository
from tests.unit.checkpoints import Checkpoints

RULES = [
    Keep(last=100, every=10),
    Keep(last=100, within="100d"),
    Keep(last=100, best="eval_loss"),
    Keep(last=100, drop_optimizer_older_than=1000),
    Keep(last=1),
    Keep(every=20, best="eval_loss"),
    Keep(last=100, drop_optimizer_older_than=15),
]


def logged(saved: Checkpoints, step: int, *losses: tuple[int, float]) -> Path:
    """Return a checkpoint of the Trainer whose log has *losses*, each with its step."""
    source = saved(step, layout="hf")
    state = json.loads((source / "trainer_state.json").read_text())
    state["log_history"] = [{"step": at, "eval_loss": loss} for at, loss in losses]
    (source / "trainer_state.json").write_text(json.dumps(state))
    return source


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often the records and pins of each step and name are read."""
    found: Counter[str] = Counter()
    record, pin = RecordStore.read, RecordStore.read_pin
    state = Repository.state

    def counted(self: RecordStore, name: RecordName) -> object:
        found[str(name.step)] += 1
        return record(self, name)

    monkeypatch.setattr(RecordStore, "read", counted)
    monkeypatch.setattr(RecordStore, "read_pin", lambda self, name: (found.update([name]), pin(self, name))[1])
    monkeypatch.setattr(Repository, "state", lambda self, ref: (found.update(["states"]), state(self, ref))[1])
    return found


@pytest.mark.parametrize("keep", RULES, ids=repr)
def test_what_was_read_once_is_not_read_again(store: Store, saved: Checkpoints, read: Counter[str], keep: Keep) -> None:
    """After a commit only that one is read, if any; the answer is that of one who has read everything."""
    facts = Facts(store.repo, keep)
    for step in (10, 20, 30):
        store.ingest(logged(saved, step, (step, step / 10)), run="r")
        store.pin(f"at {step}", f"r@{step}") if step == 20 else None
        has_work(facts, "r")
    store.ingest(logged(saved, 40, (40, 4.0)), run="r")
    read.clear()

    found = has_work(facts, "r")

    assert set(read) <= {"40", "states"}
    assert sum(read.values()) <= 2
    read.clear()
    assert has_work(facts, "r") == found
    assert not read
    assert has_work(Facts(store.repo, keep), "r") == found
    plan = store.gc(keep, dry_run=True)
    assert found == bool(plan.removed or plan.trimmed)


def test_a_value_that_the_next_log_has_counts(store: Store, saved: Checkpoints) -> None:
    """A Trainer may save a step before it logs it: then a known commit is looked at once more."""
    keep = Keep(best="eval_loss:2")
    facts = Facts(store.repo, keep)
    losses = [(10, 3.0), (20, 1.0), (30, 2.0), (40, 4.0)]
    answers = []
    for number, (step, _) in enumerate(losses):
        store.ingest(logged(saved, step, *losses[:number]), run="r")  # each log ends before its own step
        answers.append((has_work(facts, "r"), has_work(Facts(store.repo, keep), "r")))

    assert all(known == anew for known, anew in answers)
    assert [fate.step for fate in store.gc(keep, dry_run=True).removed] == [10]
    assert answers[-1] == (True, True)


def test_pins_that_come_and_go_are_seen(store: Store, saved: Checkpoints) -> None:
    """A pin keeps its commit from the moment when it is made until it is deleted; another of its name is another."""
    saved.into(store, 10, 20)
    facts = Facts(store.repo, Keep(last=1))
    found = [has_work(facts, "r")]
    store.pin("kept", "r@10")
    found.append(has_work(facts, "r"))
    store.delete_pin("kept")
    store.pin("kept", "r@20")
    found.append(has_work(facts, "r"))

    assert found == [True, False, True]


def test_what_is_gone_is_forgotten(store: Store, saved: Checkpoints) -> None:
    """A run of months takes no more memory than the commits that it keeps."""
    facts = Facts(store.repo, Keep(last=100, within="1d"))
    for step in (10, 20, 30):
        saved.into(store, step)
        has_work(facts, "r")
    store.gc(Keep(last=1))

    has_work(facts, "r")

    assert len(facts._known) == 1
