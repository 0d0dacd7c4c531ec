"""Promises of what a run would have stored under another policy: what an ingest under it does store."""

from pathlib import Path
from typing import Any

import pytest

import layerstore
from tests.generated import generate

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


def what_if(store: layerstore.Store, policy: str) -> dict[str, list[int]]:
    """Return what the report says that *policy* would have stored."""
    [run] = store.report()["runs"]
    found: dict[str, list[int]] = run["what_if"][policy]
    return found


@pytest.mark.full
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
        assert set(told["estimated_bytes"]) == {0}
        real.close()
    full.close()


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
