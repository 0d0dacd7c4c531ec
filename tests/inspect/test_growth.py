"""Promises of what a run would have stored under another policy: what an ingest under it does store."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore.format import make_commit
from layerstore.inspect import report
from tests.generated import generate
from tests.inspect.made_up import History, build

STEPS = range(1, 8)


def stored_under(
    folder: Path, policy: str, *, back_at: int | None = None, larger_at: int | None = None, **options: Any
) -> layerstore.Store:
    """
    Return a store of the same saves under *policy*.

    With *back_at*, training then goes back to that step; from the step *larger_at* on, layers are twice as wide.
    """
    store = layerstore.init(folder / policy)
    steps = [(step, step, False) for step in STEPS]
    if back_at is not None:
        steps += [(step, 100 + step, step == back_at) for step in range(back_at, back_at + 3)]
    for step, seed, rollback in steps:
        path = folder / f"checkpoint-{step}-{seed}"
        if not path.exists():
            hidden = 4 if larger_at is None or seed < larger_at else 8
            generate(path, layers=6, hidden=hidden, vocab=4, step=step, seed=seed, **options)
        store.ingest(path, run="sft", policy=policy, rollback=rollback)
    return store


def what_if(store: layerstore.Store, policy: str) -> dict[str, Any]:
    """Return what the report says that *policy* would have stored."""
    [run] = store.report()["runs"]
    found: dict[str, Any] = run["what_if"][policy]
    return found


@pytest.mark.full
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "hf"},
        {"frozen": ("model.layers.1",)},
        {"back_at": 4},
        {"larger_at": 4},
        {"larger_at": 5, "back_at": 3},
    ],
    ids=["hf", "frozen", "back", "larger", "larger and back"],
)
def test_what_a_policy_would_have_stored_is_what_it_stores(tmp_path: Path, options: dict[str, Any]) -> None:
    """To the byte, save by save, of full saves: every version is known."""
    full = stored_under(tmp_path, "full", **options)
    for policy in ("parity", "filter"):
        told, real = what_if(full, policy), stored_under(tmp_path, policy, **options)
        written = {entry.commit: entry.bytes_new for entry in real.log()}
        saves = real.report()["runs"][0]["saves"]

        assert told["bytes"] == [written[commit] for commit in saves["commit"]]
        assert told["total_bytes"][-1] == sum(written.values())
        assert told["bytes"][1] < told["bytes"][0]
        assert told["total"] == {
            "bytes": told["total_bytes"][-1],
            "estimated_bytes": 0,
            "first_bytes": told["bytes"][0],
        }
        assert set(told["estimated_bytes"]) == {0}
        real.close()
    full.close()


@pytest.mark.full
def test_layers_that_nobody_saved_are_estimated(tmp_path: Path) -> None:
    """Of saves by filter, parity would have had others; its own would have been these."""
    full, by_filter = stored_under(tmp_path, "full"), stored_under(tmp_path, "filter")
    known, told, own = what_if(full, "parity"), what_if(by_filter, "parity"), what_if(by_filter, "filter")

    # Layers of equal shapes have equal sizes, so the estimate is right here.
    assert told["total_bytes"] == known["total_bytes"]
    assert 0 < told["estimated_bytes"][-1] < told["total_bytes"][-1]
    assert told["estimated_bytes"] == sorted(told["estimated_bytes"])
    assert own["estimated_bytes"][-1] == 0
    assert own["total_bytes"][-1] == sum(entry.bytes_new for entry in by_filter.log())
    full.close()
    by_filter.close()


def test_one_save_says_nothing_about_a_policy(tmp_path: Path) -> None:
    """The first is full whatever the policy."""
    with layerstore.init(tmp_path / "store") as store:
        store.ingest(generate(tmp_path / "one", step=1, layers=2, hidden=8, vocab=8), run="sft")

        [run] = store.report()["runs"]

    assert run["what_if"] == {}


def test_the_first_save_counts_though_it_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the last save is shown, the sums are those of all."""
    build(tmp_path / "store", History(run="sft", saves=6, layers=4))
    with layerstore.open(tmp_path / "store") as store:
        whole = what_if(store, "parity")
        monkeypatch.setattr(report, "_COLUMNS_MAX", 1)
        one = what_if(store, "parity")

    assert one["total"] == whole["total"]
    assert one["total"]["first_bytes"] == whole["bytes"][0] > one["bytes"][0] == whole["bytes"][-1]


def test_two_commits_of_one_step_are_two_saves(tmp_path: Path) -> None:
    """What-ifs stay with their saves, and the run has all of its commits."""
    build(tmp_path / "store", History(run="sft", saves=4, layers=4))
    with layerstore.open(tmp_path / "store") as store:
        first = store.repo.records.read(store.repo.records.names("sft")[0])
        twin = make_commit(replace(first.record, world_size=4, states=first.record.states * 2), first.observed)
        path = store.repo.layout.record("sft", first.record.step, twin.id)
        path.write_bytes(store.repo.records.encode(twin))
        [run] = store.report()["runs"]

    told = run["what_if"]["parity"]
    assert run["commits"] == len(run["saves"]["commit"]) == len(told["bytes"]) == 5
    assert run["saves"]["step"][:2] == [first.record.step] * 2
    assert told["bytes"][0] == told["total"]["first_bytes"] > told["bytes"][1] == 0
    assert told["total_bytes"][-1] == told["total"]["bytes"]
