"""What is told of saves that were not kept bit for bit: how finely, what they refer to, what they lost, their bytes."""

from pathlib import Path

import pytest

from layerstore import Store
from layerstore.json_fields import json_fields
from tests.unit.checkpoints import Checkpoints


@pytest.fixture
def saved(store: Store, tmp_path: Path) -> Store:
    """Return a store whose run has exact saves at steps 1 and 4, and compact ones between and after."""
    Checkpoints(tmp_path / "source").into(store, 1, 2, 3, 4, 5, precision="delta8", exact_every=3)
    return store


def test_the_log_says_how_finely_each_commit_is_kept(saved: Store, tmp_path: Path) -> None:
    """A keyframe is exact, whatever was asked; a commit that only inherits compact layers is mixed."""
    saved.ingest(Checkpoints(tmp_path / "more")(6), run="r", policy="parity", precision="exact")

    told = {entry.step: json_fields(entry)["precision"] for entry in saved.log("r")}

    assert told == {1: "exact", 2: "delta8", 3: "delta8", 4: "exact", 5: "delta8", 6: "mixed"}


def test_show_says_what_each_layer_refers_to_and_has_lost(saved: Store) -> None:
    """The keyframe's step, and the error relative to the movement since; of exact layers nothing."""
    view = saved.show("r@3")
    compact = [line for line in view.layers if not line.is_exact]

    assert view.precision == "delta8"
    assert {line.refers_to for line in compact} == {"r@1"}
    for line in compact:
        assert {loss.state for loss in line.losses} == {"master", "exp_avg", "exp_avg_sq"}
        assert all(0 < loss.relative_rms < 0.05 for loss in line.losses)
        assert all(0 < loss.relative_greatest < 0.1 for loss in line.losses)
    assert [loss.state for loss in view.losses] == ["master", "exp_avg", "exp_avg_sq"]
    assert {line.refers_to for line in saved.show("r@5").layers if not line.is_exact} == {"r@4"}
    assert [line.losses for line in saved.show("r@4").layers] == [()] * len(view.layers)


def test_what_no_save_has_any_more_is_told_as_an_object(saved: Store) -> None:
    """The keyframe was dropped, so that no step names it; the differences still refer to its bytes."""
    saved.drop("r@1")

    assert all(str(line.refers_to).startswith("object ") for line in saved.ls("r@2") if not line.is_exact)


def test_a_pinned_mixture_tells_each_layers_own_save(saved: Store) -> None:
    """Its layers are of several saves, each with its own keyframe and its own loss."""
    saved.compose("r", policy="parity").pin("mixed")
    lines = saved.show("mixed").layers

    assert {(line.step, line.refers_to) for line in lines} == {(5, "r@4"), (4, None)}
    assert all(bool(line.losses) is not line.is_exact for line in lines)


def test_what_differences_refer_to_is_counted_once(saved: Store) -> None:
    """Every file is counted in ``unique`` once, and everything on the disk is needed."""
    found = saved.stats()
    files = sum(path.stat().st_size for path in (saved.path / "objects").rglob("*") if path.is_file())

    assert found.unneeded is not None
    assert found.unneeded.objects == found.missing == 0
    assert found.unique_bytes - found.kinds["record"].unique_bytes == files


def test_two_compact_saves_are_compared_by_their_numbers(saved: Store) -> None:
    """A compact save is near the one that it was made from; its distance to the keyframe is the movement."""
    far, near = saved.diff("r@1", "r@3", stat=True), saved.diff("r@3", "r@3", stat=True)

    assert all(layer.distance is not None for layer in far.layers)
    assert {layer.distance.relative_l2 for layer in near.layers if layer.distance} == {0.0}
    assert max(layer.distance.relative_l2 for layer in far.layers if layer.distance) > 0.01


def test_a_report_has_precisions_only_of_runs_with_compact_saves(saved: Store, tmp_path: Path) -> None:
    """Of each save what `log` says, of each layer in it how its own save kept it; of other runs no field more."""
    Checkpoints(tmp_path / "exact").into(saved, 1, 2, run="plain")
    plain, run = saved.report()["runs"]
    kept = dict(zip(run["saves"]["step"], run["composites"]["latest"], strict=True))

    assert run["saves"]["precision"] == [entry.precision for entry in reversed(saved.log("r"))]
    for step, origins in kept.items():
        told = [run["origins"]["precision"][index] for index in origins]
        assert told == ["exact" if line.is_exact else "delta8" for line in saved.ls(f"r@{step}")]
    assert "precision" not in {*plain["saves"], *plain["origins"]}
    assert {**run["saves"], **plain["saves"]}.keys() - plain["saves"].keys() == {"precision"}


def test_a_report_tells_the_precision_of_each_version_that_a_policy_takes(saved: Store, tmp_path: Path) -> None:
    """A save whose layers are exact in part is two origins; nobody can tell the name of a save that is gone."""
    saved.ingest(Checkpoints(tmp_path / "more")(6), run="r", policy="parity", precision="delta4", exact_every=3)
    saved.drop("r@5")
    [run] = saved.report()["runs"]
    origins = run["origins"]

    told = {(origins["step"][index], origins["precision"][index]) for index in run["composites"]["latest"][-1]}

    assert run["saves"]["precision"] == ["exact", "delta8", "delta8", "exact", "delta4"]
    assert told == {(5, None), (6, "delta4")}
    parity = run["composites"]["parity"][2]
    assert {(origins["step"][index], origins["precision"][index]) for index in parity} == {(2, "delta8"), (3, "delta8")}
