"""Promises of a report's facts: they are what log, show, stats, compose and gc say, and never more than is known."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import NotFound
from layerstore.inspect import report_fields
from layerstore.inspect.report import RunReport
from layerstore.inspect.stats import Amounts
from tests.inspect.made_up import LAYER_BYTES, History, build
from tests.unit.checkpoints import checkpoint


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with a real run of three saves, one of them by parity, another run, a pin and a way back."""
    folder = tmp_path_factory.mktemp("pristine")
    with layerstore.init(folder / "store") as made:
        for step in (2, 4):
            made.ingest(checkpoint(folder, step=step, layout="hf", frozen=("model.layers.0",)))
        made.ingest(checkpoint(folder, step=6, layout="hf", frozen=("model.layers.0",)), policy="parity", pin="best")
        made.ingest(checkpoint(folder / "back", step=4, layout="hf"), run="sft", rollback=True)
        made.ingest(checkpoint(folder, step=8), run="other")
    return folder / "store"


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Iterator[Store]:
    """Return a copy of it."""
    with layerstore.open(shutil.copytree(pristine, tmp_path / "store")) as copied:
        yield copied


def fields_of(store: Store, **options: Any) -> dict[str, Any]:
    """Return what a report tells programs."""
    return report_fields(store.report(**options))


def test_saves_are_those_of_the_log(store: Store) -> None:
    """Every commit of a small store is shown, as the log has it, with the reference that means it."""
    report = store.report()

    assert [run.run for run in report.runs] == store.runs
    assert not report.is_sampled
    for run in report.runs:
        told = {save.entry.commit: save.entry for save in run.saves}
        assert told == {entry.commit: entry for entry in store.log(run.run)}
        assert [(save.entry.attempt, save.entry.step) for save in run.saves] == sorted(
            (entry.attempt, entry.step) for entry in store.log(run.run)
        )
        for save in run.saves:
            assert store.show(save.reference).commit == save.entry.commit
    assert [save.entry.pins for save in report.runs[1].saves] == [(), (), ("best",), ()]


def test_a_picked_save_is_the_composite_of_that_step(store: Store) -> None:
    """By what was saved and by every policy: the same versions of the same saves, and the same ages."""
    for run in store.report().runs:
        for save in run.saves:
            latest = store.compose(save.reference)
            assert latest.staleness == save.staleness
            assert {name: layer.version for name, layer in latest.layers.items()} == {
                name: entry.version.id for name, entry in save.layers.items()
            }
            for policy in ("parity", "filter"):
                taken = save.asked.get(policy, save.layers)
                assert {
                    name: layer.version for name, layer in store.compose(save.reference, policy=policy).layers.items()
                } == {name: entry.version.id for name, entry in taken.items()}


def test_the_words_name_the_same_origins(store: Store) -> None:
    """What programs are told by number and column leads back to each layer's save, version and age."""
    found = fields_of(store)
    for run in found["runs"]:
        origins = run["origins"]
        for column, reference in enumerate(run["saves"]["reference"]):
            for policy, columns in run["composites"].items():
                numbers = columns[column] if columns[column] is not None else run["composites"]["latest"][column]
                composite = store.compose(reference, policy=policy)
                assert [(origins["run"][number], origins["step"][number]) for number in numbers] == [
                    (composite.layers[name].run, composite.layers[name].step) for name in run["layers"]
                ]
                ages = [run["saves"]["turn"][column] - origins["turn"][number] for number in numbers]
                assert ages == [age.saves for age in composite.staleness.layers]
            versions = run["versions"][column]
            shown = store.show(reference)
            assert [versions[place : place + 8] for place in range(0, len(versions), 8)] == [
                line.version[:8] for line in shown.layers
            ]
            assert run["saves"]["time"][column] in {
                origins["time"][number] for number in run["composites"]["latest"][column]
            }


def test_a_layer_of_a_dropped_save_is_told_without_its_time(store: Store) -> None:
    """What is not in the log any more is still where the version is from; nobody can say when that was."""
    store.drop("sft~1@4")

    run = fields_of(store, run="sft")["runs"][0]
    column = run["saves"]["step"].index(6)
    numbers = run["composites"]["latest"][column]
    told = {(run["origins"]["step"][number], run["origins"]["time"][number] is None) for number in numbers}

    assert told == {(4, True), (6, False)}


def test_storage_adds_up_to_what_stats_count(store: Store) -> None:
    """Logical and unique bytes of all saves are those of the run, without records; each save adds its own."""
    for run in store.report().runs:
        alone = store.stats(run.run)
        objects = [amount for kind, amount in alone.kinds.items() if kind != "record"]

        assert run.total.logical_bytes == sum(amount.logical_bytes for amount in objects)
        assert run.total.unique_bytes == sum(amount.unique_bytes for amount in objects)
        assert run.total.written_bytes == sum(entry.bytes_new for entry in store.log(run.run))
        assert run.saves[-1].total == run.total
        assert sum((save.own for save in run.saves), Amounts()) == run.total


def test_derived_bytes_are_what_ingest_did_not_store(tmp_path: Path) -> None:
    """Of a full checkpoint, frozen layers in it or not."""
    for number, frozen in enumerate([(), ("model.layers.0",)]):
        with layerstore.init(tmp_path / f"store-{number}") as store:
            ingested = store.ingest(checkpoint(tmp_path / str(number), layout="hf", frozen=frozen))
            [run] = store.report().runs

            assert ingested.bytes_derived > 0
            assert run.total.derived_bytes == ingested.bytes_derived


def test_inherited_layers_are_counted_as_such(store: Store) -> None:
    """A save by parity has the bytes of the layers that it left out; a full one has none."""
    run = store.report(run="sft").runs[0]
    third = run.saves[2]
    left_out = [line for line in store.show("sft~1@6").layers if line.step != 6]

    assert [save.own.inherited_bytes for save in run.saves[:2]] == [0, 0]
    assert left_out
    assert third.own.inherited_bytes > sum(sum(line.bytes_by_kind.values()) for line in left_out)
    assert third.own.unique_bytes < third.own.logical_bytes - third.own.inherited_bytes + third.own.derived_bytes


def test_retention_is_the_plan_of_gc(store: Store) -> None:
    """The fate of every save, and the sums; nothing is removed."""
    keep = Keep(last=1)
    plan = store.gc(keep, dry_run=True)

    report = store.report(keep=keep)
    told = report_fields(report)["retention"]

    assert report.retention is not None
    fates = {save.entry.commit: save.fate for run in report.runs for save in run.saves}
    assert fates == {fate.commit: fate for fate in plan.commits}
    assert isinstance(told, dict)
    assert (told["commits_removed"], told["bytes_freed"]) == (len(plan.removed), plan.bytes_freed)
    assert told["rules"] == "--keep-last 1"
    assert len(store.log()) == len(fates)
    assert store.report().retention is None


def test_a_kept_step_that_lacks_two_policies_is_one_step(store: Store) -> None:
    """The number is of steps, as the page says; the policies are named beside it."""
    for step in (10, 12, 14):
        store.ingest(checkpoint(store.path.parent, step=step, layout="hf"), run="sft")
    keep = Keep(every=4)
    lost = store.gc(keep, dry_run=True, grace_seconds=0).unserved

    told = fields_of(store, keep=keep)["retention"]

    assert len({each.policy for each in lost}) == 2
    assert told["unserved"] == len({each.reference for each in lost}) < len(lost)
    assert sorted(told["unserved_policies"]) == ["filter", "parity"]


def test_where_a_collection_would_refuse_that_is_told(store: Store) -> None:
    """An object is missing: everything else is told all the same."""
    line = store.show("other@8").layers[0]
    [entry, *_] = store.repo.records.read(store.repo.records.names("other")[0]).record.layers
    assert entry.layer == line.layer
    victim = store.repo.version_of(entry).objects[0].id
    store.repo.layout.object(victim).unlink()

    report = store.report(keep=Keep(last=1))

    assert report.stats.missing == 1
    assert report.retention is not None
    assert report.retention.outcome is None
    assert "is missing" in report.retention.refusal
    assert [save.fate for save in report.runs[0].saves] == [None]


def test_what_is_damaged_is_left_out_and_named(store: Store) -> None:
    """A version that cannot be read takes its bytes out of the figures, a record its whole save."""
    version = store.repo.records.read(store.repo.records.names("other")[0]).record.layers[0].version
    store.repo.layout.object(version.id).write_bytes(b"x" * version.size_bytes)
    name = store.repo.records.names("sft")[0]
    store.repo.layout.record(name.run, name.step, name.id).write_bytes(b"x")

    report = store.report()

    assert any(version.id in problem for problem in report.left_out)
    assert any(f"sft@{name.step}" in problem for problem in report.left_out)
    assert [run.commits for run in report.runs] == [1, 3]
    assert report.runs[0].total.logical_bytes > 0


def test_one_run_alone_and_none_at_all(store: Store, tmp_path: Path) -> None:
    """Only what that run needs; a run that is not there is not found; an empty store is a report too."""
    alone = store.report(run="other")

    assert [run.run for run in alone.runs] == ["other"]
    assert alone.stats == store.stats("other")
    with pytest.raises(NotFound, match="no run 'nope'"):
        store.report(run="nope")
    with layerstore.init(tmp_path / "empty") as empty:
        assert (empty.report().runs, empty.report().stats.commits) == ((), 0)


@pytest.fixture(scope="module")
def drifting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a made-up store of a run in two attempts, saved by drift while training, and a plain one."""
    path = tmp_path_factory.mktemp("made-up") / "store"
    build(
        path,
        History(run="drift", saves=30, policy="drift", goes_back=(20,), is_live=True),
        History(run="plain", saves=3, layers=8),
    )
    return path


def test_drift_and_timings_are_what_was_recorded(drifting: Path) -> None:
    """Where nothing was recorded there is nothing; what is no number any more is a word."""
    with layerstore.open(drifting) as store:
        found = fields_of(store)
        took = store.timings("drift")
        report = store.report()
    drift, plain = found["runs"]

    assert all(moved is None for moved in plain["drift"])
    assert plain["timings"] is None
    for save, moved in zip(report.runs[0].saves, drift["drift"], strict=True):
        for name, told in zip(drift["layers"], moved, strict=True):
            recorded = save.movements[name]
            assert told == pytest.approx(recorded, rel=1e-3) if math.isfinite(recorded) else told == "inf"
        assert save.timing == took[save.entry.attempt, save.entry.step]
    assert drift["timings"]["saves"] == len(took) == 30
    assert drift["timings"]["blocked"]["max"] == pytest.approx(
        max(each.blocked_seconds for each in took.values()), rel=1e-3
    )
    assert any(told == "inf" for moved in drift["drift"] for told in moved)


@pytest.mark.full
def test_a_line_of_timings_that_somebody_else_wrote_harms_nothing(drifting: Path) -> None:
    """Texts, infinities and huge numbers in place of seconds are no seconds."""
    with layerstore.open(drifting) as store:
        [path] = (store.path / "stats" / "drift").iterdir()
        before = path.read_bytes()
        line = before.splitlines()[0].decode()
        for value in ('"</script>"', "NaN", "1e999", "1" + "0" * 400, "-1", "true"):
            first = line.replace('"blocked_seconds": 0.02,', f'"blocked_seconds": {value},')
            assert first != line
            path.write_text(first + "\n")
            [run] = fields_of(store, run="drift")["runs"]
            assert run["timings"]["blocked"] is None
            assert run["saves"]["timing"][0][0] is None
        path.write_bytes(before)


@pytest.mark.full
def test_a_long_run_is_sampled_and_counted_whole(tmp_path: Path) -> None:
    """The ends of attempts and pins are among what is shown, and the totals are those of every save."""
    path = tmp_path / "store"
    build(path, History(run="long", saves=400, layers=4, policy="parity", goes_back=(200,), has_objects=False))
    with layerstore.open(path) as store:
        middle = store.log("long")[100]
        store.pin("kept", f"long@{middle.step}")
        [run] = store.report().runs
        log = store.log("long")

    steps = [(save.entry.attempt, save.entry.step) for save in run.saves]
    assert (run.commits, len(run.saves)) == (400, 360)
    assert {(1, 50), (1, 10_000)} <= set(steps)
    assert (2, max(entry.step for entry in log)) == steps[-1]
    assert (middle.attempt, middle.step) in steps
    assert max(b - a for a, b in zip(steps_of(run, 1), steps_of(run, 1)[1:], strict=False)) <= 3 * 50
    assert run.total.written_bytes == sum(entry.bytes_new for entry in log) == run.saves[-1].total.written_bytes
    assert run.total.logical_bytes > 400 * 4 * LAYER_BYTES


def steps_of(run: RunReport, attempt: int) -> list[int]:
    """Return the steps of one attempt that are shown."""
    return [save.entry.step for save in run.saves if save.entry.attempt == attempt]
