"""Policies, attempts and recipes from the command line."""

import json
from pathlib import Path

import pytest

import layerstore
from layerstore.inspect import Training, estimate_saves, made_up
from tests.cli.conftest import Run
from tests.generated import generate

RECIPE = """
base: 3
layers:
  "model.layers.[even]": 1
rest: base
"""


@pytest.fixture
def saves(run: Run, tmp_path: Path) -> list[Path]:
    """Return three checkpoints of one run, beside an empty store."""
    run("init")
    return [
        generate(tmp_path / "sft" / f"checkpoint-{step}", layers=4, hidden=8, vocab=8, step=step, seed=step)
        for step in (1, 2, 3)
    ]


def test_a_selective_run_is_composed_without_a_policy(run: Run, saves: list[Path]) -> None:
    """And says how much was stored, and how old the layers are."""
    saved = run("ingest", *saves, "--policy", "parity")
    planned = run("compose", "--dry-run", "--json").fields

    assert [line.split(": ")[1].split(",")[0] for line in saved.out.splitlines()] == [
        "7 layers",
        "3 layers of 7",
        "4 layers of 7",
    ]
    assert {layer["step"] for layer in planned["layers"].values()} == {2, 3}
    assert planned["staleness"]["oldest"]["steps"] == 1
    assert planned["staleness"]["optimizer_steps"] == {"2": 3, "3": 4}


def test_a_mixture_says_that_its_model_never_existed(run: Run, saves: list[Path], tmp_path: Path) -> None:
    """Before anything else, to programs too, in the folder, and when a partial save is pinned; a whole one does not."""
    said = "3 of 7 layers are older than step 3: this model never existed during training"
    run("ingest", *saves, "--policy", "parity")

    planned, pinned = run("compose", "sft@3", "--dry-run"), run("pin", "best", "sft@3")
    written = run("compose", "sft@3", "-o", "out", "--json")
    whole = run("compose", "sft@1", "--dry-run")

    for outcome in (planned, pinned, written):
        assert outcome.err.startswith(f"warning: {said}")
    assert "docs/evidence.md" in planned.err
    noted = json.loads((tmp_path / "out" / "layerstore.json").read_text())["notes"]
    assert noted[0].startswith(said)
    assert written.fields["notes"] == noted
    assert (whole.code, whole.err) == (0, "")


def test_settings_reach_their_policy(run: Run, saves: list[Path]) -> None:
    """Each option in its place; one that belongs to another policy is refused."""
    run("ingest", *saves)
    even = run("compose", "--policy", "parity", "--fresh", "even", "--dry-run", "--json").fields
    some = run("compose", "--policy", "filter", "--first", "1", "--last", "0", "--share", "1/3", "--dry-run", "--json")
    wrong = run("compose", "--policy", "parity", "--share", "1/3", "--dry-run")
    share = run("compose", "--policy", "filter", "--share", "a", "--dry-run")

    assert even["layers"]["model.layers.0"]["step"] == 3
    assert even["parameters"] == {"fresh": "even"}
    assert some.fields["parameters"]["share"] == "1/3"
    assert (wrong.code, share.code) == (2, 2)
    assert "no setting 'share'" in wrong.err


def test_a_policy_may_bring_its_settings(run: Run, saves: list[Path]) -> None:
    """In one word, at ingest and compose as for estimate; but not one of them twice."""
    run("ingest", *saves)
    saved = run("ingest", *saves, "--run", "other", "--policy", "filter:first=1,last=0")
    in_one = run("compose", "sft", "--policy", "filter:first=1,last=0,share=1/3", "--dry-run", "--json").fields
    options = ["--first", "1", "--last", "0", "--share", "1/3"]
    apart = run("compose", "sft", "--policy", "filter", *options, "--dry-run", "--json").fields
    twice = run("compose", "sft", "--policy", "filter:first=1", "--first", "1", "--dry-run")

    assert saved.code == 0
    assert in_one["parameters"] == apart["parameters"]
    assert (twice.code, "first was given twice" in twice.err) == (2, True)


def test_python_names_a_policy_as_the_command_line_does(run: Run, saves: list[Path]) -> None:
    """At a save, for a composite and for an estimate: with its settings, which are read alike."""
    run("ingest", *saves)
    policy = "filter:first=1,last=0,share=1/3"
    planned = run("compose", "sft", "--policy", policy, "--dry-run", "--json").fields
    training = Training(
        world_size=2, steps=9, every=1, step_seconds=1, bytes_per_second=1, copy_bytes_per_second=1, disk_bytes=1
    )

    with layerstore.open(".layerstore") as store:
        composed = store.compose("sft", policy=policy)
        store.ingest(saves[0], run="other")
        saved = store.ingest(saves[1], run="other", policy=policy)
        shown = store.show("other")
    lines = estimate_saves(made_up(10**9, 4), training, ["full", policy])["lines"]

    assert composed.summary()["parameters"] == planned["parameters"]
    assert (shown.policy_parameters["first"], shown.policy_parameters["share"]) == ("1", "1/3")
    assert saved.layers_saved == ("model.layers.0", "model.norm")
    assert [line["policy"] for line in lines if line["policy"]] == ["full", policy]


def test_an_old_layer_is_refused_and_nothing_is_written(run: Run, saves: list[Path], tmp_path: Path) -> None:
    """With exit code 15."""
    run("ingest", *saves)
    refused = run("compose", "--policy", "parity", "--max-staleness", "0", "-o", "out", "--pin", "mix")

    assert refused.code == 15
    assert not (tmp_path / "out").exists()
    assert run("pin", "--list", "--json").fields["pins"] == []


def test_what_cannot_be_composed_is_not_pinned(run: Run, store: Path) -> None:
    """Shards want the moments, which gc has dropped; as weights it is kept."""
    run("pin", "--delete", "best", "--store", store)
    run("gc", "--drop-optimizer-older-than", "1", "--yes", "--store", store)

    shards = run("compose", "sft@2", "--pin", "kept", "--store", store)
    pins = run("pin", "--list", "--json", "--store", store).fields["pins"]
    weights = run("compose", "sft@2", "--pin", "kept", "--format", "hf", "--store", store)

    assert (shards.code != 0, "moments" in shards.err, pins) == (True, True, [])
    assert weights.code == 0


def test_a_pinned_composite_is_written_without_its_policy(run: Run, saves: list[Path], tmp_path: Path) -> None:
    """The pin is the composite."""
    run("ingest", *saves)
    pinned = run("compose", "--policy", "parity", "--pin", "mix")
    written = run("compose", "mix", "-o", "out", "--json").fields

    assert pinned.out.splitlines()[-1].endswith("kept as pin mix")
    assert written["policy"] == "parity"
    assert {layer["step"] for layer in written["layers"].values()} == {2, 3}
    assert (tmp_path / "out" / "latest").is_file()


def test_going_back_opens_an_attempt(run: Run, saves: list[Path]) -> None:
    """By the first checkpoint saved since; the others go on from it."""
    run("ingest", *saves)
    again = [
        generate(saves[0].parents[1] / "again" / f"checkpoint-{step}", layers=4, hidden=8, vocab=8, step=step, seed=9)
        for step in (2, 3)
    ]
    several = run("ingest", *again, "--run", "sft", "--rollback")
    back = run("ingest", again[0], "--run", "sft", "--rollback", "--json")
    on = run("ingest", again[1], "--run", "sft", "--json")
    drawn = run("log", "sft", "--graph")

    assert several.code == 2
    assert (back.fields["attempt"], on.fields["attempt"]) == (2, 2)
    assert drawn.code == 0
    assert "|/" in drawn.out
    assert run("compose", "sft~1", "--dry-run", "--json").fields["attempt"] == 1
    assert "attempt" in run("show", "sft").out


@pytest.mark.fault(77)
def test_a_recipe_says_where_each_layer_is_from(run: Run, saves: list[Path], tmp_path: Path) -> None:
    """A dry run prints the plan; a step that is not there is named with its place and the command to run."""
    run("ingest", *saves)
    (tmp_path / "mix.yaml").write_text(RECIPE)
    planned = run("compose", "--recipe", "mix.yaml", "--dry-run")
    (tmp_path / "wrong.yaml").write_text(RECIPE.replace(": 1", ": 7"))
    missing = run("compose", "--recipe", "wrong.yaml", "--dry-run")
    both = run("compose", "sft@1", "--recipe", "mix.yaml", "--dry-run")

    rows = {line.split()[0]: line.split()[1] for line in planned.out.splitlines() if line.startswith("model.")}
    assert (rows["model.layers.0"], rows["model.layers.1"]) == ("sft@1", "sft@3")
    assert (missing.code, both.code) == (13, 2)
    assert "wrong.yaml:4:" in missing.err
    assert "layerstore ingest" in missing.err


def test_a_recipe_that_leaves_its_run_open_is_told_where_to_write_it(
    run: Run, saves: list[Path], tmp_path: Path
) -> None:
    """Its own key, in either grammar, or the option; what the hint says works."""
    run("ingest", *saves)
    run("ingest", *saves, "--run", "other")
    (tmp_path / "ours.yaml").write_text(RECIPE)
    (tmp_path / "better.yaml").write_text(RECIPE.replace("base: 3", "base: other@3"))
    theirs = (
        "slices:\n"
        "  - {sources: [{model: gone/checkpoint-3, layer_range: [0, 0]}]}\n"
        "  - {sources: [{model: gone/checkpoint-3, layer_range: [0, 4]}]}\n"
        "  - {sources: [{model: gone/checkpoint-3, layer_range: [5, 5]}]}\n"
        "  - {sources: [{model: gone/checkpoint-3, layer_range: [6, 6]}]}\n"
        "merge_method: passthrough\n"
    )
    (tmp_path / "theirs.yaml").write_text(theirs)
    (tmp_path / "other.yaml").write_text(theirs.replace("gone", "other"))
    (tmp_path / "bare.yaml").write_text(theirs.replace("gone/", ""))
    ours, gone, bare = (run("compose", "--recipe", f"{name}.yaml", "--dry-run") for name in ("ours", "theirs", "bare"))

    assert ours.err.splitlines() == [
        "error: ours.yaml:2:7: base 3 is a step of which run? the store holds 2 runs: other, sft",
        "hint: write base: RUN@3, or pass --run RUN",
    ]
    assert gone.err.splitlines() == [
        "error: theirs.yaml:2:24: gone/checkpoint-3 belongs to run 'gone', which is not in the store; "
        "the store holds 2 runs: other, sft",
        "hint: pass --run RUN, or write RUN/checkpoint-3 and the like wherever the recipe says model:",
    ]
    assert "checkpoint-3 names no run; the store holds 2 runs" in bare.err
    for name in ("better", "other"):
        assert run("compose", "--recipe", f"{name}.yaml", "--dry-run", "--json").fields["run"] == "other"
    for name in ("ours", "theirs", "bare"):
        assert run("compose", "--recipe", f"{name}.yaml", "--run", "sft", "--dry-run").code == 0
