"""Ranks save a module while training goes on: what is saved, and what a saver's options do."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerstore import Store
from layerstore.model import Kind, StoredObject
from tests.forked import Launch, Nursery
from tests.live.module.launched import launched

pytestmark = pytest.mark.timeout(600)

CASES = [
    pytest.param((2, ("fsdp", "ddp")), id="2"),
    pytest.param((4, ("hsdp", "tensor")), id="4", marks=pytest.mark.full),
]


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, ranks: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Launch, Path, tuple[str, ...]]:
    """Return what the ranks have told, the store, and their forms."""
    count, forms = request.param
    folder = tmp_path_factory.mktemp("saving")
    return launched(ranks, folder, "going_on", count=count, forms=forms), folder / "store", forms


Case = tuple[Launch, Path, tuple[str, ...]]


def test_a_save_holds_the_state_of_its_moment(case: Case) -> None:
    """On every rank, what is resumed is what it had held, and training goes on alike, also from before any update."""
    launch, _, forms = case
    found = launch.events("same")

    assert len(found) == launch.count * len(forms) * 2 * 4
    assert [event for event in found if not event["same"]] == []
    assert all(event["same"] for event in launch.events("losses"))


def test_a_policy_takes_each_layer_from_its_own_save(case: Case) -> None:
    """Weights of a layer are those of the step that is named with it."""
    launch, store, forms = case
    events = launch.events("mixed")
    assert len({event["run"] for event in events}) == sum(2 if form == "tensor" else 3 for form in forms)
    for event in events:
        with Store(store) as opened:
            entries = opened.compose(event["run"]).composition.base.layers
            versions = [opened.repo.version_of(entry) for entry in entries]
        assert len(set(event["layers"].values())) > 1
        for version in versions:
            for of in version.parameters:
                assert event["layers"][version.layer] in event["steps"][of.name], (event["run"], of.name)


def test_buffers_are_those_of_the_first_rank(case: Case) -> None:
    """As DDP's own forward takes them."""
    launch, _, forms = case
    found = launch.events("buffers")

    assert len(found) == (launch.count if "ddp" in forms else 0)
    assert all(not any(event["sums"]) for event in found)


def test_each_rank_keeps_its_own(case: Case) -> None:
    """User's state and generators, the first one also files; pins hold; an older step begins an attempt."""
    launch, store, forms = case
    for form in forms:
        run = f"{form}-options"
        backs = [event for event in launch.events("back") if event["run"] == run]
        assert sorted(event["client_state"]["rank"] for event in backs) == list(range(launch.count))
        assert all(event["client_state"]["rank"] == event["rank"] for event in backs)
        assert all(event["restored"] and event["drawn"] for event in backs)
        assert {event["step"] for event in launch.events("second") if event["run"] == run} == {4}
        assert all(
            not event["errors"] and event["newest"] == 3 for event in launch.events("status") if event["run"] == run
        )
        with Store(store) as opened:
            entries = opened.log(run, metrics=True)
            # The second saver has no metrics; the third one went on from step 3.
            assert [(entry.attempt, entry.step) for entry in entries] == [(2, 4), (1, 4), (1, 3), (1, 2), (1, 1)]
            assert [entry.metrics for entry in entries] == [{}, {}, {"loss": 1.5}, {"loss": 1.0}, {"loss": 0.5}]
            assert entries[-1].pins == (f"{run}-first",)
            states = [opened.repo.state(of) for of in opened.compose(f"{run}@3").composition.base.states]
            files = [{file.path for file in state.files} for state in states]
            assert [sorted(name for name in found if "own" in name) for found in files] == [["own-0.txt"]] + [[]] * (
                launch.count - 1
            )


def test_differences_go_on_in_the_next_saver(case: Case) -> None:
    """Whichever rank writes which shard; every fourth version is exact."""
    launch, store, forms = case
    assert all(event["same"] for event in launch.events("exact"))
    assert not [event for event in launch.events("compact") if event["errors"]]
    for form in forms:
        with Store(store) as opened:
            entries = opened.log(f"{form}-delta8")
            kept = [entry.precision for entry in entries]
            compact = [
                [entry.compact for entry in opened.compose(f"{form}-delta8@{step}").composition.base.layers]
                for step in range(1, 6)
            ]
            layers = opened.compose(f"{form}-delta8@4").composition.base.layers
            objects = [stored for of in layers for stored in opened.repo.version_of(of).objects]
        assert [stored.is_coded for stored in objects if stored.kind is Kind.MASTER and _is_fp32(stored)].count(
            False
        ) == 0
        assert kept == ["exact", "delta8", "delta8", "delta8", "exact"]
        assert [set(counts) - {0} for counts in compact] == [set(), {1}, {2}, {3}, set()]


def _is_fp32(stored: StoredObject) -> bool:
    return {of.dtype for of in stored.tensors} == {"F32"}


def test_the_store_is_sound(case: Case) -> None:
    """All of it."""
    _, store, _ = case
    with Store(store) as opened:
        assert opened.verify(read_data=True).ok
