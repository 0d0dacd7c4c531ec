"""Saves that are copied and written while training goes on hold what a synchronous checkpoint holds, bit for bit."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from layerstore.policy import Latest
from tests.live.cases import DEGRADING, SKIPPING, SLOW, STUCK, UNGATED, Course
from tests.live.launched import DEVICES, Launched, Launcher, facts_of, ingested, records, seen_by_all, states_of

LAUNCH_SECONDS_MAX = 800

pytestmark = pytest.mark.timeout(LAUNCH_SECONDS_MAX + 100)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Return what trains all courses once; hundreds of checkpoints are not left to pytest."""
    folder = tmp_path_factory.mktemp("asynchronous")
    yield Launcher(folder, "asynchronous")
    for checkpoints in folder.glob("*/checkpoints"):
        shutil.rmtree(checkpoints)


@pytest.fixture(params=DEVICES)
def trained(launcher: Launcher, request: pytest.FixtureRequest) -> Launched:
    """Return the training of all courses, on each device that there is."""
    return launcher.on(request.param)


def compared(trained: Launched, course: Course) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what the saver wrote at each step, and what DeepSpeed's checkpoint of that step holds."""
    steps = list(range(1, course.steps + 1))
    folder = course.folder(trained.root)
    expected = ingested(trained, folder, run=f"{course.name}-ingested", steps=steps, policy=Latest())
    found = records(trained, course.name, steps)
    return [facts_of(trained.store, record) for record in found], [
        facts_of(trained.store, record) for record in expected
    ]


def test_fifty_saves_in_a_row_are_deepspeeds_own(trained: Launched) -> None:
    """The disk is slow and memory small: nearly every update finds copies unfinished, and waits for them."""
    found, expected = compared(trained, SLOW)

    assert len(found) == 50
    assert found == expected
    for facts in seen_by_all(trained, SLOW):
        assert facts["held"] >= 45
        assert facts["status"]["blocked_seconds"] > 0
        assert (facts["status"]["failed"], facts["status"]["saved"]) == (0, 50)


def test_without_the_gate_saves_are_torn(trained: Launched) -> None:
    """The comparison can fail: updates that do not wait change what is still to be copied."""
    found, expected = compared(trained, UNGATED)

    assert any(facts["held"] for facts in seen_by_all(trained, UNGATED))
    assert [facts["states"] for facts in found] == [facts["states"] for facts in expected]
    torn = [one["step"] for one, other in zip(found, expected, strict=True) if one["layers"] != other["layers"]]
    assert torn
    assert UNGATED.steps not in torn  # no update follows the last one


def test_saves_are_left_out_under_pressure_and_never_torn(trained: Launched) -> None:
    """Every rank leaves out the same ones; what is saved is DeepSpeed's own."""
    skipped = [facts["skipped"] for facts in seen_by_all(trained, SKIPPING)]
    steps = [step for step in range(1, SKIPPING.steps + 1) if step not in skipped[0]]

    assert skipped == skipped[:1] * trained.world_size
    assert 0 < len(skipped[0]) < SKIPPING.steps
    assert [entry.step for entry in trained.store.log(SKIPPING.name)] == steps[::-1]
    folder = SKIPPING.folder(trained.root)
    expected = ingested(trained, folder, run="skipping-ingested", steps=steps, policy=Latest())
    for found, other in zip(records(trained, SKIPPING.name, steps), expected, strict=True):
        assert [entry.version for entry in found.layers] == [entry.version for entry in other.layers]
        assert states_of(trained.store, found) == states_of(trained.store, other)


def test_saves_have_fewer_layers_under_pressure_and_each_is_of_its_step(trained: Launched) -> None:
    """A layer that is left out stays as an earlier step saved it, and no layer is left out for long."""
    steps = list(range(1, DEGRADING.steps + 1))
    folder = DEGRADING.folder(trained.root)
    ingest = ingested(trained, folder, run="degrading-ingested", steps=steps, policy=Latest())
    versions = {(record.step, entry.layer): entry.version for record in ingest for entry in record.layers}

    found = records(trained, DEGRADING.name, steps)

    assert {len(record.layers) for record in found} == {4}
    assert any(entry.origin.step < record.step for record in found for entry in record.layers)
    for record, other in zip(found, ingest, strict=True):
        assert states_of(trained.store, record) == states_of(trained.store, other)
        for entry in record.layers:
            assert entry.version == versions[entry.origin.step, entry.layer]
            assert record.step - entry.origin.step <= 4


def test_saves_that_pile_up_before_a_stuck_disk_are_bounded_and_none_is_forgotten(trained: Launched) -> None:
    """However much memory there is: what became of each is known on all ranks once the disk goes on."""
    for facts in seen_by_all(trained, STUCK):
        assert facts["unresolved"] == 0
        assert 0 < len(facts["skipped"]) < STUCK.steps
        assert facts["status"]["saved"] == STUCK.steps - len(facts["skipped"])
    steps = [step for step in range(1, STUCK.steps + 1) if step not in seen_by_all(trained, STUCK)[0]["skipped"]]
    assert [entry.step for entry in trained.store.log(STUCK.name)] == steps[::-1]
