"""A resumed training is, to the last bit, the uninterrupted one; what cannot be resumed from changes nothing."""

import json
import math
import re
import shutil
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore.layers import layer_of
from layerstore.model import CommitRecord, Fork
from tests.deepspeed.compare import checkpoint_differences, full_tensors, tree_differences
from tests.deepspeed.launch import train
from tests.deepspeed.scenarios import WORLD_SIZE
from tests.live.cases import (
    COMPOSITE,
    DAMAGED,
    FP16,
    FROM_CLONE,
    LAST,
    MISFITS,
    ODD,
    RANK_BUFFERS,
    RESIZED,
    RESUMPTION_OF,
    RESUMPTIONS,
    TO_STAGE_3,
    WHOLE,
    Resumption,
)
from tests.live.launched import DEVICES, Launched, Launcher, records, seen, skip_on_one_rank

LAUNCH_SECONDS_MAX = 800

pytestmark = pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX + 100)


class Trainings:
    """A training of all cases, and what resumes it at several world sizes: each launched once, when it is needed."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        """Start nothing yet."""
        self._folder = folder
        self._arguments = arguments
        (folder / "first").mkdir()
        self.first = Launcher(folder / "first", "resuming", *arguments).on
        self.resumed = cache(self._resume)

    def _resume(self, device: str, world_size: int, *more: str) -> Launched:
        """Resume what was trained on *device* with *world_size* ranks, in a copy of its store or a partial clone."""
        first = self.first(device)
        root = self._folder / f"{device}-{world_size}"
        if world_size > WORLD_SIZE:
            first.store.push(f"file://{root}/bucket")
            layerstore.clone(f"file://{root}/bucket", root / "store", records=True).close()
            more = (*more, "--from-bucket")
        else:
            shutil.copytree(first.root / "store", root / "store")
        train(
            "tests.live.resuming",
            ["--out", str(root), "--resume", *more, *self._arguments],
            log=self._folder / f"{device}-{world_size}.log",
            world_size=world_size,
            on_cuda=device == "cuda",
        )
        return Launched(root=root, world_size=world_size, store=layerstore.open(root / "store"))

    def again(self, device: str) -> tuple[Launched, Launched]:
        """Return the first training, and what went on from it with as many ranks."""
        first = self.first(device)
        return first, self.resumed(device, first.world_size, *() if self._arguments else ("--go-wrong",))


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """Return what trains the usual cases."""
    return Trainings(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def all_trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """Return what trains all cases."""
    return Trainings(tmp_path_factory.mktemp("resume-all"), "--all")


@pytest.fixture(params=DEVICES)
def both(trainings: Trainings, request: pytest.FixtureRequest) -> tuple[Launched, Launched]:
    """Return the first training and the resumed one, on each device that there is."""
    return trainings.again(request.param)


@pytest.fixture
def ranks(both: tuple[Launched, Launched]) -> tuple[Launched, Launched]:
    """Return them where ranks can differ."""
    skip_on_one_rank(both[0])
    return both


def of_all(launched: Launched, name: str) -> list[dict[str, Any]]:
    """Return what each rank has left in the file *name*."""
    return [json.loads((launched.root / f"{name}.{rank}.json").read_text()) for rank in range(launched.world_size)]


def check_the_same(first: Launched, second: Launched, each: Resumption) -> None:
    """Compare two trainings from the step resumed at on: what decided each step, all that DeepSpeed saves, commits."""
    for rank in range(first.world_size):
        trace = seen(first, each, rank=rank)["trace"]
        assert len(trace) == LAST
        assert seen(second, each, rank=rank)["trace"] == trace[each.at :]
        resumed = seen(second, each, rank=rank)["resumed"]
        assert (resumed["step"], resumed["global_steps"]) == (each.at, each.at)
        assert resumed["random_state_restored"]
        assert resumed["notes"] == []
        before = trace[each.at - 1] if each.at else {"samples": 0, "skipped": 0}
        assert (resumed["global_samples"], resumed["skipped_steps"]) == (before["samples"], before["skipped"])
        assert set(resumed["layers"].values()) == {each.at}
    for step in (each.at, LAST):
        assert not checkpoint_differences(each.shards(first.root, step), each.shards(second.root, step))
    old, new = (records(launched, each.name, list(range(each.at + 1, LAST + 1))) for launched in (first, second))
    assert [versions(record) for record in new] == [versions(record) for record in old]
    assert {record.attempt for record in new} == {2}
    assert {record.fork for record in new} == {Fork(attempt=1, step=each.at)}


def versions(record: CommitRecord) -> dict[str, str]:
    """Return the version of each layer."""
    return {entry.layer: entry.version.id for entry in record.layers}


@pytest.mark.parametrize("each", WHOLE, ids=lambda each: each.name)
def test_a_resumed_training_is_the_uninterrupted_one(both: tuple[Launched, Launched], each: Resumption) -> None:
    """Losses, norms, masters, moments, buffers, scaler, counters, schedule, random numbers and the user's own state."""
    check_the_same(*both, each)

    first, _ = both
    traces = [seen(first, each, rank=rank)["trace"] for rank in range(first.world_size)]
    if each.name == ODD:  # without the generators' states the comparison would fail
        assert len({entry["loss"] for trace in traces for entry in trace}) == LAST * first.world_size
    if each.name == FP16:
        assert traces[0][each.at - 1]["skipped"] > 0


@pytest.mark.parametrize("each", WHOLE, ids=lambda each: each.name)
def test_each_version_is_read_by_one_rank(both: tuple[Launched, Launched], each: Resumption) -> None:
    """Under stage 3, where a rank needs its own slices; under stages 1 and 2 every rank needs all."""
    first, second = both
    [record] = records(first, each.name, [each.at])
    read = Counter(name for rank in range(first.world_size) for name in seen(second, each, rank=rank)["read"])
    times = 1 if record.stage == 3 else first.world_size

    assert {read[name] for name in versions(record).values()} == {times}


@pytest.mark.exhaustive
@pytest.mark.parametrize("each", [each for each in RESUMPTIONS if not each.is_usual], ids=lambda each: each.name)
def test_every_other_training_is_resumed_as_well(all_trainings: Trainings, each: Resumption) -> None:
    """The same holds for every scenario of the DeepSpeed tests."""
    check_the_same(*all_trainings.again("cpu"), each)


# -- other world sizes ---------------------------------------------------------------------------------------------


def resized(trainings: Trainings, device: str, world_size: int) -> tuple[Launched, Launched]:
    """Return the first training and what *world_size* ranks made of it; skip where there are not so many devices."""
    if device == "cuda":
        import torch

        if torch.cuda.device_count() < max(world_size, WORLD_SIZE):
            pytest.skip("too few CUDA devices here: the same launch on the CPU stands for it")
    return trainings.first(device), trainings.resumed(device, world_size)


def check_resized(first: Launched, second: Launched, each: Resumption) -> None:
    """Compare what the engine holds after the resume with what was saved; it trains on and saves what it trains."""
    source, taken_up = (full_tensors(each.shards(of.root, each.at)) for of in (first, second))
    assert source
    assert not tree_differences(source, taken_up)
    for rank in range(second.world_size):
        found = seen(second, each, rank=rank)
        resumed = found["resumed"]
        assert not resumed["random_state_restored"]
        notes = " ".join(resumed["notes"])
        assert "the random states of 2 ranks are left out" in notes
        assert f"with {second.world_size} rank" in notes or f"for {second.world_size} rank" in notes
        assert ("differed between the 2 ranks" in notes) == (each.name == RANK_BUFFERS)
        assert [entry["step"] for entry in found["trace"]] == list(range(each.at + 1, LAST + 1))
        assert all(math.isfinite(float.fromhex(entry["loss"])) for entry in found["trace"])
        assert resumed["global_steps"] == each.at
    (record,) = records(second, each.name, [LAST])
    assert (record.world_size, record.attempt, record.fork) == (second.world_size, 2, Fork(attempt=1, step=each.at))
    assert second.store.verify(f"{each.name}@{LAST}", read_data=True).ok


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
@pytest.mark.parametrize("name", RESIZED)
def test_masters_and_moments_are_the_same_at_other_world_sizes(
    trainings: Trainings, device: str, world_size: int, name: str
) -> None:
    """
    Every parameter's master and moments, put together from all ranks; what does not carry over is told.

    More ranks than were are filled from a bucket.
    """
    check_resized(*resized(trainings, device, world_size), RESUMPTION_OF[name])


def test_what_was_trained_elsewhere_comes_back(trainings: Trainings, tmp_path: Path) -> None:
    """More ranks went on in a partial clone and push it; whoever pulls has both attempts whole, for as many as ever."""
    first, second = resized(trainings, "cpu", 3)
    bucket = f"file://{second.root}/bucket"
    second.store.push(bucket)

    with layerstore.clone(bucket, tmp_path / "back") as back:
        assert back.verify(read_data=True).ok
        for name in RESIZED:
            attempts = [{entry.step for entry in back.log(name) if entry.attempt == attempt} for attempt in (1, 2)]
            at = RESUMPTION_OF[name].at
            assert attempts == [{entry.step for entry in first.store.log(name)}, set(range(at + 1, LAST + 1))]
        written = back.compose(f"{FROM_CLONE}@{LAST}").write(tmp_path / "out", world_size=WORLD_SIZE)
    assert written.world_size == WORLD_SIZE


# -- composites ----------------------------------------------------------------------------------------------------


def composite_facts(both: tuple[Launched, Launched]) -> tuple[Resumption, dict[str, int], list[CommitRecord]]:
    """Return the case, the step of each layer that was resumed, and the records of the saves after it."""
    _, second = both
    each = RESUMPTION_OF[COMPOSITE]
    layers: dict[str, int] = seen(second, each)["resumed"]["layers"]
    return each, layers, records(second, each.name, [each.at + 1, each.at + 2])


def test_an_engine_holds_each_layer_of_the_step_that_the_plan_names(both: tuple[Launched, Launched]) -> None:
    """Master and moments of every parameter are those that DeepSpeed saved at that step, bit for bit."""
    first, second = both
    each, layers, _ = composite_facts(both)
    saved = {step: full_tensors(each.shards(first.root, step)) for step in (each.at - 1, each.at)}

    held = full_tensors(each.shards(second.root, each.at))

    assert set(layers.values()) == {each.at - 1, each.at}
    expected = {name: saved[layers[layer_of(name)]][name] for name in held}
    assert not tree_differences(expected, held)
    assert tree_differences(saved[each.at], held)


def test_saves_after_a_composite_inherit_its_own_layers(both: tuple[Launched, Launched]) -> None:
    """What a selective save leaves out is the composite's version of it, not its base's."""
    _, second = both
    each, layers, (after, _) = composite_facts(both)
    (due, _) = (set(save["layers_due"]) for save in seen(second, each)["saves"])

    assert 0 < len(due) < len(layers)
    assert (after.attempt, after.fork) == (2, Fork(attempt=1, step=each.at))
    origins = {entry.layer: (entry.origin.attempt, entry.origin.step) for entry in after.layers}
    assert origins == {layer: (2, each.at + 1) if layer in due else (1, layers[layer]) for layer in layers}


# -- what cannot be resumed from -----------------------------------------------------------------------------------


def said(launched: Launched) -> list[dict[str, str]]:
    """Return what each rank was told when its engine was to resume from what it cannot."""
    return [found["said"] for found in of_all(launched, "wrong")]


def test_an_engine_trains_on_as_if_nothing_had_been_asked(both: tuple[Launched, Launched]) -> None:
    """After all that failed, losses, norms and scales are those of the undisturbed training."""
    first, second = both

    for rank, found in enumerate(of_all(second, "wrong")):
        assert found["trace"] == seen(first, RESUMPTION_OF[ODD], rank=rank)["trace"]
        assert "resumed" not in found["said"].values()


def test_what_is_not_there_is_told(both: tuple[Launched, Launched]) -> None:
    """An empty run is None, and so is a store that is not there yet, so that a job can start with it; a step is not."""
    for words in said(both[1]):
        assert words["empty"] == "None"
        assert words["must exist"] == "NotFound: run 'none-such' has no commit to resume from"
        assert words["unknown step"] == f"NotFound: run {ODD!r} has no step 77"
        assert words["unknown policy"] == "InvalidInput: unknown policy 'none-such'"
        assert words["no store"] == "None"


@pytest.mark.parametrize("run", MISFITS)
def test_what_does_not_fit_is_told(ranks: tuple[Launched, Launched], run: str) -> None:
    """Another model, other groups or another precision: every rank says which."""
    first, *others = [found[f"run {run}"] for found in said(ranks[1])]

    assert first.startswith(f"LayoutMismatch: {MISFITS[run]}")
    assert others == [first] * (WORLD_SIZE - 1)


@pytest.mark.parametrize("name", TO_STAGE_3)
def test_what_stages_1_and_2_saved_goes_on_under_stage_3(both: tuple[Launched, Launched], name: str) -> None:
    """With the losses that it would have had."""
    first, second = both
    each = RESUMPTION_OF[name]

    for rank, found in enumerate(of_all(second, "stages")):
        trace = seen(first, each, rank=rank)["trace"]
        assert found[name] == [entry["loss"] for entry in trace[each.at :]]


def test_what_stage_3_saved_does_not_go_on_under_stage_2(both: tuple[Launched, Launched]) -> None:
    """It is refused, and the hint says which form of it would do."""
    for found in of_all(both[1], "stages"):
        assert found[ODD] == f"Unsupported: {ODD}@2 was saved under ZeRO stage 3, but the engine trains under stage 2"


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_an_error_on_every_rank(ranks: tuple[Launched, Launched], damage: str) -> None:
    """Only the last rank needs the object, but all refuse to resume; the layer is named."""
    first, last = (found[damage] for found in said(ranks[1]))

    assert re.match(r"IntegrityError: \S+ of \S+@1: object ", last), last
    assert "is damaged" in last
    assert first == last.replace("IntegrityError: ", "IntegrityError: rank 1: ")


# -- under a saver -------------------------------------------------------------------------------------------------
