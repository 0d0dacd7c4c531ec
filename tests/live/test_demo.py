"""The demo, once with real training, and how it refuses, without."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import layerstore
from layerstore.cli.app import main
from layerstore.errors import AlreadyExists, InvalidInput, Unsupported
from layerstore.live.demo import MARKER, STEPS, STEPS_MIN, StepLoss, run_demo

DEMO_SECONDS_MAX = 600
"""Half a minute is usual; on a fresh machine DeepSpeed first compiles, and the machine may be busy."""

CONTENT = "precious"


@pytest.fixture
def someone_elses(tmp_path: Path) -> Path:
    """Return a folder with names that the demo uses, too, but not made by it."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "file").write_text(CONTENT)
    return tmp_path


def demo_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``layerstore demo`` in a process of its own."""
    command = [sys.executable, "-m", "layerstore.cli", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEMO_SECONDS_MAX, check=False)


@pytest.mark.timeout(DEMO_SECONDS_MAX + 60)
def test_every_loss_after_the_resume_is_the_uninterrupted_runs(tmp_path: Path) -> None:
    """Real training resumes from the store bit for bit, and the JSON says what was measured."""
    folder = tmp_path / "demo with a space"

    finished = demo_command("--dir", str(folder), "--steps", "9", "--json")

    assert finished.returncode == 0, finished.stderr
    measured = json.loads(finished.stdout.splitlines()[-1])
    assert (measured["schema"], measured["identical"], measured["resumed_from"]) == (1, True, 4)
    assert [loss["step"] for loss in measured["losses"]] == [5, 6, 7, 8, 9]
    for loss in measured["losses"]:
        assert loss["identical"]
        assert loss["uninterrupted"].hex() == loss["resumed"].hex()
    assert len(measured["layers"]) > 6
    assert all(measured["layers"].values())
    # Bytes at random have log(256) = 5.5: the model has learned, and so the losses mean something.
    assert measured["losses"][-1]["resumed"] < 5
    assert all(measured["sizes"][what] > 1_000_000 for what in ("checkpoints", "store", "composite"))
    assert measured["seconds"] >= sum(measured["seconds_by_part"].values())
    assert {MARKER, "logs", "store"} == {path.name for path in folder.iterdir()}
    with layerstore.open(measured["store"]) as store:
        assert [entry.step for entry in store.log("demo")] == [9, 6, 4, 2]
        assert [entry.step for entry in store.log("resumed")] == [9]


def test_a_folder_of_someone_else_is_refused_even_with_force(someone_elses: Path) -> None:
    """Only what a demo made is ever removed."""
    for force in (False, True):
        with pytest.raises(AlreadyExists, match="not a demo's folder"):
            run_demo(someone_elses, force=force)

    assert (someone_elses / "store" / "file").read_text() == CONTENT
    assert [path.name for path in someone_elses.iterdir()] == ["store"]


def test_an_earlier_demo_is_only_replaced_with_force(someone_elses: Path) -> None:
    """The hint says how to replace it, and until then nothing is touched."""
    (someone_elses / MARKER).touch()

    with pytest.raises(AlreadyExists, match="earlier demo") as raised:
        run_demo(someone_elses)

    assert "--force" in str(raised.value.hint)
    assert (someone_elses / "store" / "file").read_text() == CONTENT


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    """The command says so with its own exit code."""
    file = tmp_path / "file"
    file.write_text(CONTENT)

    assert main(["demo", "--dir", str(file), "--force"]) == 14
    assert file.read_text() == CONTENT


def test_a_missing_compiler_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is looked for before anything is written or started, and the hint says what to install."""
    monkeypatch.setenv("CXX", "no-such-compiler")

    code = main(["demo", "--dir", str(tmp_path / "demo"), "--json"])

    assert code == 16
    error = json.loads(capsys.readouterr().err.splitlines()[-1])["error"]
    assert "no-such-compiler" in error["message"]
    assert "g++" in error["hint"]
    assert not (tmp_path / "demo").exists()


def test_missing_packages_are_all_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint is the command that installs them."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # how the import system itself notes that it is not there
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(Unsupported, match="deepspeed, transformers") as raised:
        run_demo(tmp_path / "demo")

    assert "pip install" in str(raised.value.hint)


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    """Every save needs a step."""
    with pytest.raises(InvalidInput, match="too few"):
        run_demo(tmp_path / "demo", steps=STEPS_MIN - 1)


def test_the_command_has_the_librarys_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Default and bound stand in the command, too, so that ``--help`` need not import the library."""
    main(["demo", "--help"])

    assert f"[default: {STEPS}; {STEPS_MIN}<=x" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("resumed", "identical"),
    [(2.5, True), (math.nextafter(2.5, 3), False), (math.nan, False), (-2.5, False)],
)
def test_losses_are_identical_to_the_last_bit_only(resumed: float, *, identical: bool) -> None:
    """One unit in the last place is a difference, and what is not a number proves nothing."""
    assert identical is StepLoss(step=1, uninterrupted=2.5, resumed=resumed).identical
    assert not StepLoss(step=1, uninterrupted=math.nan, resumed=math.nan).identical
