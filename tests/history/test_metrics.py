"""What training measured at a commit's step: from the Trainer's log and from client_state."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from layerstore import Store
from layerstore.errors import IntegrityError
from layerstore.tree import Tree
from tests.generated import generate
from tests.unit.checkpoints import Checkpoints


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    """Return what makes small checkpoints."""
    return Checkpoints(tmp_path)


def logged(source: Path, *entries: object) -> Path:
    """Let the Trainer's log in *source* consist of *entries*."""
    state = json.loads((source / "trainer_state.json").read_text())
    state["log_history"] = list(entries)
    (source / "trainer_state.json").write_text(json.dumps(state))
    return source


def metrics(store: Store, run: str = "r") -> list[Mapping[str, float]]:
    """Return those of all commits of *run*, oldest first."""
    return [entry.metrics or {} for entry in reversed(store.log(run, metrics=True))]


@pytest.mark.parametrize(
    ("client_state", "expected"),
    [
        ({}, {}),
        ({"epoch": 3, "loss": 2.5, "name": "x", "best": True, 7: 1.5}, {"loss": 2.5}),
        ({"metrics": {"loss": 2.5, "tokens": 7, "best": True, "name": "x", 7: 1.5}}, {"loss": 2.5, "tokens": 7.0}),
        ({"metrics": [1.0], "lr": 1e-3}, {"lr": 1e-3}),
        ({"loss": 1.0, "metrics": {"loss": 2.0}}, {"loss": 2.0}),
        ({"metrics": {"large": 10**400, "loss": 2.0}}, {"loss": 2.0}),
    ],
)
def test_numbers_of_client_state(
    store: Store, tmp_path: Path, client_state: dict[Tree, Tree], expected: dict[str, float]
) -> None:
    """All numbers under ``metrics``, and at the top those with a fraction: an epoch or a step is none."""
    store.ingest(generate(tmp_path / "saved", hidden=8, vocab=8, step=2, client_state=client_state), run="r")

    assert metrics(store) == [expected]
    assert store.show("r@2").metrics == expected
    assert store.log("r")[0].metrics == {}  # nobody asked


def test_the_trainers_log_counts_at_the_commits_step(store: Store, saved: Checkpoints) -> None:
    """Whole numbers too; odd entries hide no others."""
    entries = ({"step": 1, "loss": 9.0}, 3, None, {"step": "2"}, {"step": 2, "loss": 7}, {"step": 2, "eval_loss": 6.5})

    store.ingest(logged(saved(2, layout="hf"), *entries), run="r")

    assert metrics(store) == [{"loss": 7.0, "eval_loss": 6.5}]


def test_what_is_logged_after_the_save_is_in_the_next_commit(store: Store, saved: Checkpoints) -> None:
    """The Trainer saves a step before it logs it; another attempt's log says nothing about this one."""
    first, second = {"step": 2, "loss": 7.0}, {"step": 4, "loss": 6.0}
    store.ingest(logged(saved(2, layout="hf")), run="r")
    store.ingest(logged(saved(4, layout="hf"), first), run="r")
    store.ingest(logged(saved(6, layout="hf"), first, second), run="r")
    store.ingest(logged(saved(3, layout="hf"), first, {"step": 3, "loss": math.nan}), run="r", rollback=True)

    shown = {(entry.attempt, entry.step): entry.metrics for entry in store.log("r", metrics=True)}

    assert shown[1, 2] == {"loss": 7.0}
    assert shown[1, 4] == {"loss": 6.0}
    assert shown[1, 6] == {}
    assert math.isnan((shown[2, 3] or {})["loss"])


def test_a_pin_outlives_its_run(store: Store, saved: Checkpoints) -> None:
    """Once every commit is dropped, there is no next one to ask."""
    store.ingest(logged(saved(2, layout="hf"), {"step": 2, "loss": 7.0}), run="r", pin="good")
    store.drop("r@2")

    assert store.show("good").metrics == {"loss": 7.0}


def test_a_damaged_commit_hides_no_others_metrics(store: Store, saved: Checkpoints) -> None:
    """The commit before it has its own; the other's are told as damaged, and its layers are sound."""
    store.ingest(logged(saved(2, layout="hf"), {"step": 2, "loss": 7.0}), run="r")
    store.ingest(logged(saved(4, layout="hf"), {"step": 2, "loss": 8.0}), run="r")
    [state] = store.repo.catalog.commit(store.repo.catalog.view("r").visible[-1].name).record.states[:1]
    path = store.repo.objects.find(state)
    assert path is not None
    path.chmod(0o600)
    path.write_bytes(b"x" * state.size_bytes)

    newest, older = store.log("r", metrics=True)

    assert older.metrics == {"loss": 7.0}
    assert (newest.metrics, newest.damage) == (None, None)
    with pytest.raises(IntegrityError):
        store.show("r@4")
