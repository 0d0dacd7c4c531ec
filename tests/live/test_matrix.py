"""Every way to build an engine: what savers write while it trains is what DeepSpeed's own checkpoints hold."""

import json
from typing import Any

import pytest

from layerstore.model import CommitRecord
from tests.live.cases import (
    ACCUMULATED,
    BEFORE_FIRST,
    CASE_OF,
    CASES,
    CHANGED_AT,
    DRIFT,
    EXCLUDED,
    FROZEN,
    GIVEN_UP,
    OVERFLOW,
    POLICIES,
    Case,
)
from tests.live.launched import (
    DEVICES,
    Launched,
    Launcher,
    facts_of,
    ingested,
    records,
    seen,
    seen_by_all,
    skip_on_one_rank,
    states_of,
)

LAUNCH_SECONDS_MAX = 800

pytestmark = pytest.mark.timeout(LAUNCH_SECONDS_MAX + 100)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """Return what trains all cases once."""
    return Launcher(tmp_path_factory.mktemp("matrix"), "training")


@pytest.fixture(params=DEVICES)
def trained(launcher: Launcher, request: pytest.FixtureRequest) -> Launched:
    """Return the training of all cases, on each device that there is."""
    return launcher.on(request.param)


def of_ranks(trained: Launched, name: str) -> list[dict[str, Any]]:
    """Return what each rank has seen of the case *name*; skip where there are no two ranks to differ."""
    skip_on_one_rank(trained)
    return seen_by_all(trained, CASE_OF[name])


def saved_of(trained: Launched, name: str) -> list[CommitRecord]:
    """Return the commits of the case *name*."""
    case = CASE_OF[name]
    seen(trained, case)
    return records(trained, name, list(case.steps))


def without_movements(facts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """Return what a record says without how far layers have moved, and that."""
    decisions = dict(facts["policy"]["decisions"])
    moved = {
        f"{measure} of {layer}": movement
        for measure in ("movements", "weighted_movements")
        for layer, movement in decisions.pop(measure, {}).items()
    }
    return facts | {"policy": facts["policy"] | {"decisions": decisions}}, moved


@pytest.mark.parametrize("case", [each for each in CASES if each.misuse != "given_up"], ids=lambda case: case.name)
def test_savers_write_what_deepspeed_saves(trained: Launched, case: Case) -> None:
    """Layers, origins, counters, states, policies and numbers are those of the ingested checkpoints."""
    found, steps = saved_of(trained, case.name), list(case.steps)
    run, policy = f"{case.name}-ingested", POLICIES[case.policy]

    expected = ingested(trained, case.folder(trained.root), run=run, steps=steps, policy=policy)

    for one, other in zip(found, expected, strict=True):
        (mine, moved), (theirs, as_ingested) = (without_movements(facts_of(trained.store, of)) for of in (one, other))
        assert mine == theirs
        assert moved == pytest.approx(as_ingested, rel=1e-6)
    assert trained.store.verify(f"{case.name}@{steps[-1]}", read_data=True).ok


def test_nothing_fails_and_nothing_is_left(trained: Launched) -> None:
    """Every save of every saver is on disk, on every rank, and no parts are left behind; all decided alike."""
    for case in CASES:
        of_ranks = []
        for rank in range(trained.world_size):
            facts = json.loads(case.facts(trained.root, rank).read_text())
            of_ranks.append({step: (of["number"], of["layers_due"]) for step, of in facts["saves"].items()})
            if facts["unavailable"]:
                continue
            # What could be written and did not become visible counts, too, on every rank.
            failed = 2 if case.misuse == "given_up" and trained.world_size > 1 else 0
            status = facts["status"]
            assert (status["queued"], status["failed"]) == (0, failed), case.name
            assert status["saved"] == len(facts["saves"]) - failed, case.name
        assert of_ranks == of_ranks[:1] * trained.world_size
    parts = trained.store.path / "parts"
    assert not parts.exists() or list(parts.iterdir()) == []


def test_the_first_save_after_moments_have_begun_is_full(trained: Launched) -> None:
    """A layer without moments and one with them do not make a checkpoint."""
    facts = seen(trained, CASE_OF[BEFORE_FIRST])["saves"]
    full = set(facts["0"]["layers_due"])

    first, second, *_ = saved_of(trained, BEFORE_FIRST)

    assert {entry.optimizer_step for entry in first.layers} == {None}
    trained_layers = {entry.layer for entry in second.layers if entry.optimizer_step == 1}
    assert trained_layers == full - {"shift"}  # a buffer has no moments
    assert set(facts["1"]["layers_due"]) >= trained_layers
    assert 0 < len(facts["2"]["layers_due"]) < len(full)


def test_overflow_skips_updates_and_not_saves(trained: Launched) -> None:
    """While updates are skipped there are no moments, and nothing new is stored."""
    facts = seen(trained, CASE_OF[OVERFLOW])
    commits = saved_of(trained, OVERFLOW)

    counts = [{entry.optimizer_step for entry in commit.layers if entry.layer != "shift"} for commit in commits]
    skipped = counts.count({None})
    assert 0 < skipped <= facts["skipped_steps"] < len(commits)
    assert counts == [{None}] * skipped + [{of} for of in sorted(next(iter(c)) or 0 for c in counts[skipped:])]
    masters = [[entry.version for entry in commit.layers] for commit in commits[:skipped]]
    assert masters == masters[:1] * skipped  # nothing was updated, so nothing new is stored


def test_frozen_weights_are_read_once(trained: Launched) -> None:
    """Later saves name the same objects, but for a weight that was changed by hand; excluded ones are never read."""
    staged = seen(trained, CASE_OF[FROZEN])["staged"]
    commits = saved_of(trained, FROZEN)

    found = [{entry.layer: entry.version.id for entry in commit.layers} for commit in commits]
    embeds = [versions["embed"] for versions in found]
    assert len({versions["layers.0"] for versions in found}) == 1
    assert embeds[CHANGED_AT - 2] != embeds[CHANGED_AT - 1]
    assert embeds[CHANGED_AT:] == embeds[CHANGED_AT - 1 : -1]
    assert staged["weights"] == 3
    assert staged["master"] == len(commits) * 4  # layers.1, layers.2, norm, head
    assert "weights" not in seen(trained, CASE_OF[EXCLUDED])["staged"]
    assert all({"embed", "layers.0"}.isdisjoint(of.layer for of in each.layers) for each in saved_of(trained, EXCLUDED))


def test_drift_measures_layers_from_its_own_saves(trained: Launched) -> None:
    """Some layers are due, frozen ones do not move; after a resume all are due once."""
    seen(trained, CASE_OF[DRIFT])
    first, *later, resumed = records(trained, DRIFT, [1, 2, 3, 4])

    layers = [entry.layer for entry in first.layers]
    assert first.policy.decisions["due"] == resumed.policy.decisions["due"] == layers
    for record in later:
        due, moved = record.policy.decisions["due"], record.policy.decisions["movements"]
        assert isinstance(due, list)
        assert isinstance(moved, dict)
        assert moved.keys() == set(layers)
        assert moved["model.layers.0"] == 0
        # One layer has its turn; at the first save after the full one the budget has room for another.
        assert (1 if record is later[0] else 0) < len(due) < len(layers)


def test_off_the_boundary_no_rank_saves(trained: Launched) -> None:
    """Gradients that wait for their update are in no checkpoint; after the update saving works."""
    for rank in range(trained.world_size):
        facts = seen(trained, CASE_OF[ACCUMULATED], rank=rank)
        assert [refused["error"] for refused in facts["off_boundary"]] == ["InvalidInput"] * 3
        assert all("accumulated" in refused["message"] for refused in facts["off_boundary"])
        assert list(facts["saves"]) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("object", "TypeError", "client_state.epoch.best[1] is a builtins.object (on rank 1)"),
        ("steps", "Conflict", "at step 100, save … at step 101"),
        ("extra_files", "InvalidInput", "no/such/file: no such file (on rank 0)"),
        ("going_back", "Conflict", "step 0 is not after step 1"),
        ("pin", "InvalidInput", "pin= is 7, not a name (on rank 1)"),
    ],
)
def test_what_one_rank_cannot_save_every_rank_refuses(trained: Launched, what: str, error: str, words: str) -> None:
    """All say the same, and the saves after it are as if nothing had been asked."""
    refusals = [facts["refused"][what] for facts in of_ranks(trained, ACCUMULATED)]

    assert refusals == refusals[:1] * len(refusals)
    assert refusals[0]["error"] == error
    assert all(part in refusals[0]["message"] for part in words.split(" … "))


def test_the_same_save_twice_is_one_commit(trained: Launched) -> None:
    """Trainers save twice at the end of training; the second save says what the first one said."""
    for facts in of_ranks(trained, ACCUMULATED):
        assert facts["refused"]["twice"] == facts["saves"]["2"]
    assert [entry.step for entry in trained.store.log(ACCUMULATED)] == [3, 2, 1]


def test_layers_of_a_save_that_one_rank_could_not_write_are_due_again(trained: Launched) -> None:
    """No commit mixes layers from before and after the first update; the next save has all that was lost."""
    first, second = of_ranks(trained, GIVEN_UP)
    case = CASE_OF[GIVEN_UP]

    # The save after the failed one, half of the layers, was begun before the failure was known.
    due = {step: set(save["layers_due"]) for step, save in first["saves"].items()}
    assert due["2"] < due["1"]
    assert [entry.step for entry in trained.store.log(GIVEN_UP)] == [4, 3, 0]
    assert "made up" in second["status_given_up"]["errors"][0]
    assert due["3"] >= due["1"]
    expected = ingested(
        trained, case.folder(trained.root), run="given-up-ingested", steps=[0, 3], policy=POLICIES["latest"]
    )
    for found, other in zip(records(trained, GIVEN_UP, [0, 3]), expected, strict=True):
        assert [(of.layer, of.version, of.optimizer_step) for of in found.layers] == [
            (of.layer, of.version, of.optimizer_step) for of in other.layers
        ]
        assert states_of(trained.store, found) == states_of(trained.store, other)
