"""Compact saves while training: which are, what their bytes are, what it takes to resume, and what may go wrong."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

import layerstore
from layerstore.history import resolve
from layerstore.model import CodingLoss, CommitRecord
from layerstore.store import Store
from tests.forked import Launch, Nursery
from tests.live.compact import EXACT_EVERY, EXACTLY, FROZEN, LAST, RESTARTED_AT, RUNS, SAVES
from tests.live.launched import losses, one

Ran = tuple[Launch, Path]


@pytest.fixture(scope="module")
def saved(ranks: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Return what was saved in each precision, and resumed."""
    return _ran(ranks, tmp_path_factory.mktemp("saved"), "saved")


@pytest.fixture(scope="module")
def disturbed(ranks: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Return the course of saves that were disturbed."""
    return _ran(ranks, tmp_path_factory.mktemp("disturbed"), "disturbed")


def _ran(ranks: Nursery, folder: Path, program: str) -> Ran:
    layerstore.init(folder / "store").close()
    options = {"store": str(folder / "store"), "out": str(folder)}
    with ranks.launch(f"tests.live.compact:{program}", options, folder=folder, name=program) as launch:
        return launch.done(), folder


def compact(launch: Launch, name: str = "") -> dict[int, set[str]]:
    """Return the layers that each save was to keep compactly, on which all ranks agree."""
    found: dict[int, set[str]] = {}
    for event in launch.events("saved"):
        if event["name"] == name:
            assert found.setdefault(event["step"], set(event["compact"])) == set(event["compact"])
    return found


def records(store: Store, run: str, steps: range = range(1, SAVES + 1)) -> list[CommitRecord]:
    """Return the records of *run*."""
    return [resolve(store.repo, f"{run}@{step}").record for step in steps]


def compact_in(record: CommitRecord) -> set[str]:
    """Return the layers that *record* itself keeps compactly."""
    return {entry.layer for entry in record.layers if entry.compact and entry.saved_by(record)}


def test_every_third_save_is_exact_across_a_restart(saved: Ran) -> None:
    """A restart goes on counting where the run stopped."""
    launch, folder = saved
    with Store(folder / "store") as store:
        found = records(store, "delta8")

    counts = [{entry.compact for entry in record.layers} for record in found]
    assert counts == [{0}, {1}, {2}, {0}, {1}, {2}, {0}, {1}]
    assert [compact_in(record) for record in found] == list(compact(launch, "delta8").values())
    assert [record.precision for record in found] == ["exact" if each == {0} else "delta8" for each in counts]
    assert {record.attempt for record in found} == {1}


def test_layers_are_counted_one_by_one(saved: Ran) -> None:
    """Under parity, each layer's third version is exact; a save that was to be exact is, and the count begins anew."""
    launch, folder = saved
    with Store(folder / "store") as store:
        found = records(store, "delta4")

    assert [compact_in(record) for record in found] == list(compact(launch, "delta4").values())
    assert [record.precision for record in found] == ["exact", *["delta4"] * 5, "exact", "delta4"]
    for layer in ("layers.0", "layers.1", "embed"):
        entries = [next(of for of in record.layers if of.layer == layer) for record in found]
        versions = [new.compact for old, new in pairwise(entries) if old != new]
        exactly = [new for old, new in pairwise(entries) if old != new and new.origin.step == EXACTLY]
        assert max(versions) == EXACT_EVERY - 1
        assert [entry.compact for entry in exactly] in ([], [0])


@pytest.mark.parametrize("run", RUNS)
def test_savers_write_what_is_ingested(saved: Ran, run: str) -> None:
    """The same versions, counts and losses, as if DeepSpeed's own checkpoints had been ingested one by one."""
    _, folder = saved
    with Store(folder / "store") as store:
        for step in range(1, SAVES + 1):
            store.ingest(
                folder / run,
                tag=f"global_step{step}",
                run=f"{run}-ingested",
                policy=RUNS[run],
                precision="exact" if run == "delta4" and step == EXACTLY else run,  # type: ignore[arg-type]  # it is one
                exact_every=EXACT_EVERY,
            )
        for mine, theirs in zip(records(store, run), records(store, f"{run}-ingested"), strict=True):
            assert [(of.layer, of.version, of.compact) for of in mine.layers] == [
                (of.layer, of.version, of.compact) for of in theirs.layers
            ]
            assert (mine.precision, mine.flags) == (theirs.precision, theirs.flags)
        lost, as_ingested = (lost_in(store, name, 2) for name in (run, f"{run}-ingested"))
        assert lost.keys() == as_ingested.keys()
        for key, loss in lost.items():
            assert loss.greatest == as_ingested[key].greatest
            assert loss.squares == pytest.approx(as_ingested[key].squares)
        assert store.verify(read_data=True).ok


def lost_in(store: Store, run: str, step: int) -> dict[tuple[str, str], CodingLoss]:
    """Return what a commit lost, by layer and state."""
    name = next(row.name for row in store.repo.catalog.view(run).visible if row.step == step)
    return {(of.layer, of.state): of for of in store.repo.catalog.commit(name).observed.losses}


def test_an_exact_save_resumes_bit_for_bit(saved: Ran) -> None:
    """Whatever was saved compactly before and after it."""
    launch, _ = saved
    whole = losses(launch, "delta8") | losses(launch, "delta8, undisturbed")

    exact = losses(launch, "exact")

    assert exact == {step: whole[step] for step in range(5, LAST + 1)}


@pytest.mark.parametrize(("run", "within"), [("delta8", 0.01), ("delta4", 0.1)])
def test_a_compact_save_resumes_nearly(saved: Ran, run: str, within: float) -> None:
    """The restarted training has almost the losses that it would have had; under parity half of it is older, too."""
    launch, _ = saved
    restarted, whole = losses(launch, run), losses(launch, f"{run}, undisturbed")

    assert sorted(whole) == list(range(RESTARTED_AT + 1, LAST + 1))
    assert [float.fromhex(restarted[step]) for step in whole] == pytest.approx(
        [float.fromhex(loss) for loss in whole.values()], rel=within
    )


def test_a_resume_says_whether_it_is_bit_for_bit(saved: Ran) -> None:
    """On every rank, in its notes and on the first rank in the log: from which save it would be, and how to take it."""
    launch, _ = saved
    said = "this resume is not bit for bit; the newest exact save is delta8@4 (use resume(…, exact=True))"

    for rank in range(2):
        [note] = one(launch, "resumed", name="delta8", asked={}, rank=rank)["notes"]
        assert note.endswith(f"were kept in 8 bits: {said}")
        assert one(launch, "resumed", name="delta8", asked={"exact": True}, rank=rank)["notes"] == []
    assert launch.log.read_text().count(f"delta8@5: {note}") == 1


def test_exact_resumes_from_the_newest_exact_save(saved: Ran) -> None:
    """The run's newest save is compact, the one before it is not."""
    launch, _ = saved
    expected, newest = losses(launch, "delta8"), losses(launch, "newest")

    assert one(launch, "resumed", name="delta8", asked={"exact": True})["step"] == EXACTLY
    assert newest == {step: expected[step] for step in range(EXACTLY + 1, LAST + 1)}


def test_what_there_is_not_is_refused_on_every_rank(saved: Ran) -> None:
    """In one line, the same on all."""
    launch, _ = saved
    raised = {(event["name"], event["rank"]): (event["error"], event["message"]) for event in launch.events("raised")}

    words = {
        "precision": "delta9",
        "exact_every": "exact_every is 0",
        "of a save": "there is no precision 'x'",
        "not the same": "in different precisions: delta8, exact",
    }
    assert {name for name, _ in raised} == set(words)
    for name, part in words.items():
        assert raised[name, 0] == raised[name, 1]
        assert part in raised[name, 0][1]
        assert "\n" not in raised[name, 0][1]


def test_what_follows_a_lost_save_is_exact(disturbed: Ran) -> None:
    """Whether a disk failed, what the differences refer to was damaged, or a number had no code: it costs one save."""
    launch, folder = disturbed
    planned = compact(launch)
    with Store(folder / "store") as store:
        found = {entry.step: resolve(store.repo, f"run@{entry.step}").record for entry in store.log("run")}

    assert {step for step, layers in planned.items() if layers} == {2, 3, 6, 8}
    assert sorted(found) == [1, 2, 5, 7, 9]
    assert {step: compact_in(record) for step, record in found.items()} == {step: planned[step] for step in found}


def test_frozen_layers_are_never_compact(disturbed: Ran) -> None:
    """Their weights are kept as they are, and no save says otherwise."""
    launch, folder = disturbed
    with Store(folder / "store") as store:
        layers = {entry.layer for entry in resolve(store.repo, "run@2").record.layers}

    assert compact(launch)[2] == layers - {FROZEN}


def test_a_damaged_reference_costs_one_save(disturbed: Ran) -> None:
    """One clear line; the next save refers to it no more."""
    launch, folder = disturbed
    (damage,) = [
        error
        for event in launch.events("status")
        for error in event["errors"]
        if "step 6: the reference of layer" in error
    ]
    with Store(folder / "store") as store:
        report = store.verify(read_data=True)

    assert "is damaged" in damage
    assert "run@5" in str(report.damaged)
    assert "run@7" not in str(report.damaged)
    assert losses(launch, "again").keys() == set(range(3, LAST + 1))


def test_a_number_that_has_no_code_costs_one_save(disturbed: Ran) -> None:
    """One clear line on the rank that has it; the next save keeps it as it is."""
    launch, _ = disturbed
    (infinite,) = [error for event in launch.events("status") for error in event["errors"] if "step 8: exp" in error]

    assert "cannot be kept compactly" in infinite
