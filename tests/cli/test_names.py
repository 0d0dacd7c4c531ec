"""What is printed as RUN@STEP means that commit when it is typed, and a mixture is not taken for a commit."""

from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.generated import generate


def save(folder: Path, step: int, *, seed: int) -> Path:
    """Return a checkpoint of *step*."""
    return generate(folder / f"checkpoint-{step}", step=step, seed=seed, layers=2, hidden=8, vocab=8)


@pytest.fixture
def gone_back(run: Run, tmp_path: Path) -> None:
    """Save steps 1 to 3, the last by halves, and 3 again after going back to 2; 3 of before is pinned as old."""
    run("init")
    run("ingest", *(save(tmp_path / "sft", step, seed=step) for step in (1, 2, 3)), "--policy", "parity")
    run("pin", "old", "sft@3")
    assert run("ingest", save(tmp_path / "again", 3, seed=9), "--run", "sft", "--rollback").code == 0


@pytest.mark.usefixtures("gone_back")
def test_a_pin_of_an_abandoned_commit_says_so(run: Run) -> None:
    """In the list, when it is made, when its name is taken, and of the commit itself."""
    listed = run("pin", "--list").out
    made = run("pin", "older", "sft~1").out
    taken = run("pin", "old", "sft")
    shown = run("show", "old").out

    assert listed.splitlines()[1].split()[:2] == ["old", "sft~1@3"]
    assert made.startswith("older is sft~1@3 (commit ")
    assert "already refers to sft~1@3" in taken.err
    assert "run          sft~1@3\n" in shown
    assert {line.split()[1] for line in shown.splitlines() if line.startswith(("model.", "lm_head"))} == {
        "sft@2",
        "sft~1@3",
    }
    assert run("show", "sft~1@3", "--json").fields["commit"] == run("show", "old", "--json").fields["commit"]


@pytest.mark.usefixtures("gone_back")
def test_a_composite_of_an_abandoned_commit_says_so(run: Run) -> None:
    """In the plan's FROM and base, and in what is said once it is written, as shards and for Transformers."""
    plan = run("compose", "old", "--dry-run").out
    written = run("compose", "old", "-o", "out").out
    exported = run("compose", "old", "--format", "hf", "-o", "model").out
    new = run("compose", "sft", "-o", "new").out
    exact = run("compose", "old", "--policy", "exact", "--dry-run").err

    assert {line.split()[1] for line in plan.splitlines() if line.startswith(("model.", "lm_head"))} == {
        "sft@2",
        "sft~1@3",
    }
    assert "base sft~1@3, " in plan
    assert ": sft~1@3, policy" in written
    assert ": sft~1@3, policy" in exported
    assert ": sft@3, policy" in new
    assert "not saved at sft~1@3: " in exact


@pytest.mark.usefixtures("gone_back")
def test_ls_diff_and_drop_tell_attempts_apart(run: Run) -> None:
    """A step alone would be the newest attempt's."""
    layers = run("ls", "old").out
    compared = run("diff", "sft@3", "sft~1@3").out
    dropped = run("drop", "sft~1@3", "--dry-run").out

    assert {line.split()[1] for line in layers.splitlines()[1:-1]} == {"sft@2", "sft~1@3"}
    assert {line.split()[1] for line in run("ls", "sft").out.splitlines()[1:-1]} == {"3"}
    assert [line.split()[1] for line in compared.splitlines()[:2]] == ["sft@3", "sft~1@3"]
    assert dropped.startswith("would drop sft~1@3 (commit ")
    assert {layer["attempt"] for layer in run("ls", "sft", "--json").fields["layers"]} == {2}


def test_one_commit_that_inherits_keeps_and_two_keep(run: Run, tmp_path: Path) -> None:
    """As people say it."""
    run("init")
    run("ingest", *(save(tmp_path / "sft", step, seed=step) for step in (1, 2, 3)), "--policy", "parity")

    assert "1 later commit keeps layers of it: sft@2\n" in run("drop", "sft@1", "--dry-run").out
    run("ingest", save(tmp_path / "sft", 4, seed=4), "--policy", "filter")
    assert "2 later commits keep layers of it: sft@3, sft@4\n" in run("drop", "sft@2", "--dry-run").out


def test_a_pin_of_a_mixture_says_so_with_its_policy(run: Run, tmp_path: Path) -> None:
    """What is not a commit is not shown as one; pins of commits look as ever."""
    run("init")
    run("ingest", *(save(tmp_path / "sft", step, seed=step) for step in (1, 2)))
    run("pin", "plain", "sft")
    run("compose", "--pin", "whole")
    before = run("pin", "--list").out
    run("compose", "--policy", "parity", "--fresh", "even", "--pin", "mix")
    listed = run("pin", "--list").out.splitlines()
    again = run("pin", "second", "mix").out
    shown, plain = run("show", "mix").out, run("show", "plain").out
    fields = {pin["pin"]: pin for pin in run("pin", "--list", "--json").fields["pins"]}

    assert "MIXED BY" not in before
    assert [("MIXED BY" in line, "parity (fresh even)" in line) for line in listed] == [
        (True, False),
        (False, True),
        (False, False),
        (False, False),
    ]
    assert again.startswith("second is a mixture by parity (fresh even) on sft@2 (commit ")
    assert "mixture      parity (fresh even) chose the layers; everything else is from sft@2\n" in shown
    assert "\npolicy " not in shown
    assert "mixture" not in plain
    assert {name: (pin["mixture"], pin["policy"]) for name, pin in fields.items()} == {
        "mix": (True, "parity"),
        "plain": (False, "full"),
        "second": (True, "parity"),
        "whole": (False, "latest"),
    }
    assert [run("show", name, "--json").fields["mixture"] for name in ("mix", "plain", "sft")] == [True, False, False]


def test_a_layer_that_is_newer_than_the_base_is_called_so(run: Run, tmp_path: Path) -> None:
    """No table has a negative age; programs get the number, and no limit of age is ever passed."""
    run("init")
    run("ingest", *(save(tmp_path / "sft", step, seed=step) for step in (10, 20, 30)))
    (tmp_path / "some.yaml").write_text("base: 20\nlayers: {model.norm: 30, lm_head: 10}\nrest: base\n")
    (tmp_path / "all.yaml").write_text("base: 20\nlayers: {lm_head: 20}\nrest: 30\n")
    (tmp_path / "only.yaml").write_text("base: 10\nlayers: {lm_head: 20}\nrest: 30\n")
    table = run("compose", "--recipe", "some.yaml", "--dry-run").out
    fields = run("compose", "--recipe", "some.yaml", "--dry-run", "--json").fields["staleness"]
    newer = run("compose", "--recipe", "only.yaml", "--dry-run", "--max-staleness", "0")

    ages = {line.split()[0]: line.split()[2:4] for line in table.splitlines() if "sft@" in line}
    assert (ages["model.norm"], ages["lm_head"], ages["model.layers.0"]) == (["newer"] * 2, ["10", "1"], ["0", "0"])
    assert "oldest layer: lm_head from sft@10, 10 steps behind the base" in table
    assert fields["layers"]["model.norm"] == {"steps": -10, "saves": -1}
    assert newer.code == 0
    assert "oldest layer: lm_head from sft@20, 10 steps newer than the base" in newer.out
    assert run("compose", "--recipe", "all.yaml", "--dry-run", "--max-staleness", "0").code == 0
    assert run("compose", "--recipe", "some.yaml", "--dry-run", "--max-staleness", "9").code == 15
