"""Promises of a report's facts: they are what log, show, stats, compose and gc say, and never more than is known."""

import json
import math
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import NotFound
from tests.bench.histories import OBJECT_BYTES
from tests.inspect.made_up import History, build
from tests.unit.checkpoints import Checkpoints, checkpoint


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


def test_a_picked_save_is_what_the_other_verbs_say(store: Store) -> None:
    """Every commit is shown as `log` has it, and its composites as `show` and `compose` do."""
    report = store.report()

    assert [run["run"] for run in report["runs"]] == store.runs()
    assert not report["is_sampled"]
    assert report["runs"][1]["saves"]["pins"] == [[], [], ["best"], []]
    for run in report["runs"]:
        saves, origins = run["saves"], run["origins"]
        log = {entry.commit: entry for entry in store.log(run["run"])}
        assert set(saves["commit"]) == log.keys()
        assert sorted(zip(saves["attempt"], saves["step"], strict=True)) == list(
            zip(saves["attempt"], saves["step"], strict=True)
        )
        for column, reference in enumerate(saves["reference"]):
            entry, shown = log[saves["commit"][column]], store.show(reference)
            assert shown.commit == entry.commit
            for name in ("attempt", "step", "layers_saved", "has_moments"):
                assert saves[name][column] == getattr(entry, name)
            assert run["versions"][column] == "".join(line.version[:8] for line in shown.layers)
            latest = run["composites"]["latest"][column]
            assert saves["time"][column] in {origins["time"][number] for number in latest}
            for policy in ("latest", "parity", "filter"):
                composite = store.compose(reference, policy=policy)
                numbers = run["composites"].get(policy, {column: None})[column] or latest
                assert [(origins["run"][number], origins["step"][number]) for number in numbers] == [
                    (composite.layers[name].run, composite.layers[name].step) for name in run["layers"]
                ]
                ages = [saves["save_number"][column] - origins["save_number"][number] for number in numbers]
                assert ages == [age.saves for age in composite.staleness.layers]
            oldest = store.compose(reference).staleness.oldest
            told = tuple(saves[f"oldest_{name}"][column] for name in ("layer", "steps", "saves"))
            assert told == (oldest.layer, oldest.steps, oldest.saves)


def test_a_layer_of_a_dropped_save_is_told_without_its_time(store: Store) -> None:
    """What is not in the log any more is still where the version is from; nobody can say when that was."""
    store.drop("sft~1@4")

    [run] = store.report(run="sft")["runs"]
    column = run["saves"]["step"].index(6)
    numbers = run["composites"]["latest"][column]
    told = {(run["origins"]["step"][number], run["origins"]["time"][number] is None) for number in numbers}

    assert told == {(4, True), (6, False)}


def test_sizes_of_layers_are_those_of_ls(store: Store) -> None:
    """Of every save that is shown; told once where the next has the same."""
    for run in store.report()["runs"]:
        sizes: Any = None
        for reference, told in zip(run["saves"]["reference"], run["layer_bytes"], strict=True):
            assert told != sizes
            sizes = told or sizes
            assert sizes == [sum(line.bytes_by_kind.values()) for line in store.ls(reference)]
        assert None in run["layer_bytes"][1:] or run["commits"] == 1


def test_every_pin_is_told_and_mixtures_layer_by_layer(store: Store) -> None:
    """What it points at, and the words of the command line; layers only where no save that is shown has them."""
    store.compose("sft~1@6", policy="filter").pin("mixed")
    store.pin("later", "other")
    store.drop("other@8")

    report = store.report()
    pins = {pin["pin"]: pin for pin in report["pins"]}
    mixed, best, later = pins["mixed"], pins["best"], pins["later"]
    composite = store.compose("mixed")

    assert (list(pins), report["pins_left_out"]) == (["best", "later", "mixed"], 0)
    assert (best["taken"], best["reference"], best["commit"]) == (None, "sft~1@6", store.show("sft~1@6").commit)
    assert (mixed["policy"], mixed["policy_parameters"]["every"]) == ("filter", "5")
    others, layers, _ = mixed["mixture"]
    assert str(composite.composition.mixture).startswith(f"{others} of {layers} layers ")
    assert best["mixture"] == report["runs"][0]["mixtures"]["latest"][2]
    assert later["taken"]["layers"] == list(store.compose("later").layers)
    taken = mixed["taken"]
    assert taken["layers"] is None
    assert [taken["origins"]["step"][index] for index in taken["origin"]] == [
        layer.step for layer in composite.layers.values()
    ]
    assert taken["version"] == "".join(layer.version[:8] for layer in composite.layers.values())
    assert taken["bytes"] == [sum(line.bytes_by_kind.values()) for line in store.ls("mixed")]
    assert [pin["pin"] for pin in store.report(run="sft")["pins"]] == ["best", "mixed"]


def test_a_mixture_is_told_as_compose_tells_it(store: Store) -> None:
    """By policy and as saved: how many layers are from other saves, and whether all of them are older."""
    for run in store.report()["runs"]:
        for policy, told in run["mixtures"].items():
            for reference, mixed in zip(run["saves"]["reference"], told, strict=True):
                expected = store.compose(reference, policy=policy).composition.mixture
                if expected is None:
                    assert mixed is None
                else:
                    others, layers, are_older = mixed
                    assert expected.startswith(f"{others} of {layers} layers ")
                    assert ("older than" in expected) == are_older


def test_storage_adds_up_to_what_stats_count(store: Store) -> None:
    """Logical and unique bytes of all saves are those of the run, without records; each save adds its own."""
    for run in store.report()["runs"]:
        alone = store.stats(run["run"])
        objects = [amount for kind, amount in alone.kinds.items() if kind != "record"]

        assert run["total"]["logical_bytes"] == sum(amount.logical_bytes for amount in objects)
        assert run["total"]["unique_bytes"] == sum(amount.unique_bytes for amount in objects)
        assert run["total"]["written_bytes"] == sum(entry.bytes_new for entry in store.log(run["run"]))
        assert run["saves"]["total_bytes"][-1] == list(run["total"].values())
        assert [sum(column) for column in zip(*run["saves"]["bytes"], strict=True)] == list(run["total"].values())


def test_derived_bytes_are_what_ingest_did_not_store(tmp_path: Path) -> None:
    """Of a full checkpoint, frozen layers in it or not."""
    for number, frozen in enumerate([(), ("model.layers.0",)]):
        with layerstore.init(tmp_path / f"store-{number}") as store:
            ingested = store.ingest(checkpoint(tmp_path / str(number), layout="hf", frozen=frozen))
            [run] = store.report()["runs"]

            assert ingested.bytes_derived > 0
            assert run["total"]["derived_bytes"] == ingested.bytes_derived


def test_inherited_layers_are_counted_as_such(store: Store) -> None:
    """A save by parity has the bytes of the layers that it left out; a full one has none."""
    [run] = store.report(run="sft")["runs"]
    saved = [dict(zip(run["total"], amounts, strict=True)) for amounts in run["saves"]["bytes"]]
    left_out = [line for line in store.show("sft~1@6").layers if line.step != 6]

    assert [own["inherited_bytes"] for own in saved[:2]] == [0, 0]
    assert left_out
    third = saved[2]
    assert third["inherited_bytes"] > sum(sum(line.bytes_by_kind.values()) for line in left_out)
    assert third["unique_bytes"] < third["logical_bytes"] - third["inherited_bytes"] + third["derived_bytes"]


def test_retention_is_the_plan_of_gc(store: Store) -> None:
    """The fate of every save, and the sums; steps are counted once, with the policies beside them."""
    for step in (10, 12, 14):
        store.ingest(checkpoint(store.path.parent, step=step, layout="hf"), run="sft")
    keep = Keep(every=4)
    plan = store.gc(keep, dry_run=True)

    report = store.report(keep=keep)
    told = report["retention"]

    fates = {
        commit: fate[0]
        for run in report["runs"]
        for commit, fate in zip(run["saves"]["commit"], run["saves"]["fate"], strict=True)
    }
    assert fates == {fate.commit: "keep" if fate.kept_by else "remove" for fate in plan.commits}
    assert (told["commits_removed"], told["bytes_freed"]) == (len(plan.removed), plan.bytes_freed)
    assert (told["rules"], told["refusal"]) == ("--keep-every 4", None)
    assert len(store.log()) == len(fates)
    assert store.report()["retention"] is None


def test_where_a_collection_would_refuse_that_is_told(store: Store) -> None:
    """An object is missing: everything else is told all the same."""
    [entry, *_] = store.repo.records.read(store.repo.records.names("other")[0]).record.layers
    store.repo.layout.object(store.repo.version_of(entry).objects[0].id).unlink()

    report = store.report(keep=Keep(last=1))

    assert report["stats"]["missing"] == 1
    assert "is missing" in report["retention"]["refusal"]
    assert report["runs"][0]["saves"]["fate"] == [None]


def test_what_is_damaged_is_left_out_and_named(store: Store) -> None:
    """A version that cannot be read takes its bytes out of the figures, a record its whole save."""
    version = store.repo.records.read(store.repo.records.names("other")[0]).record.layers[0].version
    store.repo.layout.object(version.id).write_bytes(b"x" * version.size_bytes)
    name = store.repo.records.names("sft")[0]
    store.repo.layout.record(name.run, name.step, name.id).write_bytes(b"x")

    report = store.report()

    assert any(version.id in problem for problem in report["left_out"])
    assert any(f"sft@{name.step}" in problem for problem in report["left_out"])
    assert [run["commits"] for run in report["runs"]] == [1, 3]
    assert report["runs"][0]["total"]["logical_bytes"] > 0


def test_one_run_alone_and_none_at_all(store: Store, tmp_path: Path) -> None:
    """Only what that run needs; a run that is not there is not found; an empty store is a report too."""
    alone, stats = store.report(run="other"), store.stats("other")

    assert [run["run"] for run in alone["runs"]] == [alone["run"]] == ["other"]
    assert alone["stats"]["unique_bytes"] == stats.unique_bytes
    with pytest.raises(NotFound, match="no run 'nope'"):
        store.report(run="nope")
    with layerstore.init(tmp_path / "empty") as empty:
        assert (empty.report()["runs"], empty.report()["stats"]["commits"]) == ([], 0)


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


def test_timings_are_in_order_whatever_a_line_of_their_file_says(drifting: Path, tmp_path: Path) -> None:
    """A line that gives no number for its place is skipped."""
    path = shutil.copytree(drifting, tmp_path / "store")
    file = next((path / "stats" / "drift").iterdir())
    known, edited = file.read_text(), json.loads(file.read_text().splitlines()[0]) | {"step": "first"}
    file.write_text(f"{json.dumps(edited)}\n{known}")

    with layerstore.open(path) as store, layerstore.open(drifting) as unchanged:
        found = store.timings("drift")

        assert found == unchanged.timings("drift") != []
    assert found == sorted(found, key=lambda each: (each.attempt, each.step))


def test_drift_and_timings_are_what_was_recorded(drifting: Path) -> None:
    """Where nothing was recorded there is nothing; what is not a number any more is a word."""
    with layerstore.open(drifting) as store:
        drift, plain = store.report()["runs"]
        took = {(of.attempt, of.step): of for of in store.timings("drift")}
        untimed = store.timings("plain")
        names = store.repo.records.names("drift")
        decided = {name.id: store.repo.records.read(name).record.policy.decisions["movements"] for name in names}

    assert all(moved is None for moved in plain["drift"])
    assert plain["timings"] is None
    assert repr(untimed) == "[]  # only saves made during training are timed"
    saves = drift["saves"]
    for column, moved in enumerate(drift["drift"]):
        recorded: Any = decided[saves["commit"][column]]
        for name, told in zip(drift["layers"], moved, strict=True):
            expected = recorded[name]
            assert told == pytest.approx(expected, rel=1e-3) if math.isfinite(expected) else told == "inf"
        timing = took[saves["attempt"][column], saves["step"][column]]
        assert saves["timing"][column][0] == pytest.approx(timing.blocked_seconds, rel=1e-3)
    assert any(told == "inf" for moved in drift["drift"] for told in moved)
    assert drift["timings"]["saves"] == len(took) == 30
    assert drift["timings"]["blocked"]["max"] == pytest.approx(
        max(each.blocked_seconds for each in took.values()), rel=1e-3
    )


def test_metrics_are_what_training_measured(tmp_path: Path) -> None:
    """By name, losses first, those of most saves; only finite numbers count, and there are a few names."""
    names = ("accuracy", "eval_loss", "loss", "x" * 200, *(f"score-{number}" for number in range(9)))
    build(tmp_path / "store", History(run="sft", saves=9, layers=4, metrics=names), History(run="other", saves=2))
    with layerstore.open(tmp_path / "store") as store:
        other, sft = store.report()["runs"]
        expected = [entry.metrics or {} for entry in reversed(store.log("sft", metrics=True))]

    assert list(sft["metrics"]) == ["loss", "eval_loss", "score-0", "score-1", "score-2", "score-3"]
    for name, told in sft["metrics"].items():
        assert [value for value in told if value is not None] == [
            pytest.approx(each[name], rel=1e-5) for each in expected if math.isfinite(each[name])
        ]
    assert None in sft["metrics"]["loss"]
    assert other["metrics"] == {}


def logged(checkpoint: Path, losses: dict[int, float]) -> Path:
    """Have the Trainer of *checkpoint* logged these *losses* by step; return the checkpoint."""
    state = checkpoint / "trainer_state.json"
    entries = [{"step": step, "loss": loss, "epoch": 1.0} for step, loss in losses.items()]
    state.write_text(json.dumps({**json.loads(state.read_text()), "log_history": entries}))
    return checkpoint


def test_a_curve_has_all_that_a_trainer_logged(tmp_path: Path) -> None:
    """Also where nothing was saved; of each attempt what is its own; other runs have no curves."""
    checkpoints = Checkpoints(tmp_path / "source", layout="hf")
    first = {2: 4.0, 4: math.nan, 6: 3.0, 10: 2.5, 14: 2.25}
    back = {2: 4.0, 4: math.nan, 6: 3.125, 12: 2.125}
    with layerstore.init(tmp_path / "store") as store:
        store.ingest(logged(checkpoints(5), {step: first[step] for step in (2, 4)}), run="sft")
        store.ingest(logged(checkpoints(15), first), run="sft")
        store.ingest(logged(checkpoints(12), back), run="sft", rollback=True)
        store.ingest(checkpoints(1), run="other")
        other, sft = store.report()["runs"]

    assert sft["curves"]["loss"] == [
        (1, 2, 4.0),
        (1, 6, 3.0),
        (1, 10, 2.5),
        (1, 14, 2.25),
        (2, 6, 3.125),
        (2, 12, 2.125),
    ]
    assert sft["metrics"]["loss"] == [None, None, 2.125]
    assert "curves" not in other


def test_a_single_point_is_a_curve(tmp_path: Path) -> None:
    """What was logged once, and at no save, is still a number to draw: the page draws every metric that is named."""
    checkpoints = Checkpoints(tmp_path / "source", layout="hf")
    with layerstore.init(tmp_path / "store") as store:
        store.ingest(logged(checkpoints(15), {10: 4.0}), run="sft")
        [sft] = store.report()["runs"]

    assert (sft["metrics"]["loss"], sft["curves"]["loss"]) == ([None], [(1, 10, 4.0)])


@pytest.mark.full
def test_a_line_of_timings_that_somebody_else_wrote_harms_nothing(drifting: Path) -> None:
    """A line with texts, infinities or huge numbers in place of seconds is no timing."""
    with layerstore.open(drifting) as store:
        [path] = (store.path / "stats" / "drift").iterdir()
        before = path.read_bytes()
        line = before.splitlines()[0].decode()
        for value in ('"</script>"', "NaN", "1e999", "1" + "0" * 400, "-1", "true"):
            first = line.replace('"blocked_seconds": 0.02,', f'"blocked_seconds": {value},')
            assert first != line
            path.write_text(first + "\n")
            [run] = store.report(run="drift")["runs"]
            assert run["timings"] is None
            assert run["saves"]["timing"][0] is None
        path.write_bytes(before)


@pytest.mark.full
def test_a_long_run_is_sampled_and_counted_whole(tmp_path: Path) -> None:
    """The ends of attempts and pins are among what is shown, and the totals are those of every save."""
    path = tmp_path / "store"
    build(path, History(run="long", saves=400, layers=4, policy="parity", goes_back=(200,), has_objects=False))
    with layerstore.open(path) as store:
        middle = store.log("long")[100]
        store.pin("kept", f"long@{middle.step}")
        [run] = store.report()["runs"]
        log = store.log("long")

    saves = run["saves"]
    shown = list(zip(saves["attempt"], saves["step"], strict=True))
    first = [step for attempt, step in shown if attempt == 1]
    assert (run["commits"], len(shown)) == (400, 360)
    assert {(1, 50), (1, 10_000), (middle.attempt, middle.step)} <= set(shown)
    assert shown[-1] == (2, max(entry.step for entry in log))
    assert max(b - a for a, b in pairwise(first)) <= 3 * 50
    assert run["total"]["written_bytes"] == sum(entry.bytes_new for entry in log)
    assert saves["total_bytes"][-1] == list(run["total"].values())
    assert run["total"]["logical_bytes"] > 400 * 4 * OBJECT_BYTES
