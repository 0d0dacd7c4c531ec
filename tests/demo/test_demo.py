"""The demo, once with real training, and how it refuses, without."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore.cli.app import main
from layerstore.demo import STEPS, STEPS_MIN, run, run_demo
from layerstore.demo.launch import Event
from layerstore.demo.run import MARKER, loss_of, problems_of
from layerstore.demo.stores import resized, same_layers
from layerstore.errors import AlreadyExists, InvalidInput
from tests.docs.pages import README
from tests.docs.reference import commands
from tests.generated import generate
from tests.inspect.test_page import facts_in

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


def test_what_it_waits_for_is_said_once_with_the_whole_path_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And why the losses of a mixture are others than those before."""
    lines: list[str] = []

    def trained(module: str, arguments: list[str], *, hear: Callable[[Event], object], **_: object) -> None:
        begin, resumed = (11, ["exact", "parity"]) if "--resume" in arguments else (1, [None])
        for number, checkpoint in enumerate(resumed):
            if checkpoint is not None:
                hear({"kind": "resumed", "checkpoint": number})
            for step in range(begin, 21):
                hear({"kind": "step", "step": step, "loss": (2.5).hex()})

    monkeypatch.setattr(run, "run_ranks", trained)
    demo = run._Demo(tmp_path, steps=20, keep=False, say=lines.append)

    demo._train()
    demo._resume()

    text = "\n".join(lines)
    assert text.count("compiles") == 1
    assert f"the log: {tmp_path}/logs/training.log" in text
    assert lines[lines.index("  DeepSpeed has loaded composites/parity") + 1].startswith("  a mixture is another model")


@pytest.mark.timeout(DEMO_SECONDS_MAX + 60)
def test_every_loss_after_the_resume_is_the_uninterrupted_runs(tmp_path: Path) -> None:
    """Real training resumes from the store bit for bit, and the JSON says what was measured."""
    folder = tmp_path / "demo with a space"

    finished = demo_command("--dir", str(folder), "--steps", "10", "--json")

    assert finished.returncode == 0, finished.stderr
    measured = json.loads(finished.stdout.splitlines()[-1])
    assert (measured["schema"], measured["identical"], measured["resumed_from"]) == (1, True, 5)
    assert measured["problems"] == []
    assert [loss["step"] for loss in measured["losses"]] == [6, 7, 8, 9, 10]
    for loss in measured["losses"]:
        assert loss["identical"]
        assert loss["uninterrupted"].hex() == loss["resumed"].hex()
    assert len(measured["layers"]) > 6
    assert all(measured["layers"].values())
    # Bytes at random have log(256) = 5.5: the model has learned, and so the losses mean something.
    assert measured["losses"][-1]["resumed"] < 5
    assert all(measured["sizes"][what] > 1_000_000 for what in ("checkpoints", "store", "composite"))
    assert measured["seconds"] >= sum(measured["seconds_by_part"].values())
    assert {MARKER, "logs", "store", "report.html"} == {path.name for path in folder.iterdir()}
    check_policies(measured)
    check_other_ranks_and_gc(measured)
    check_report(measured)
    with layerstore.open(measured["store"]) as store:
        assert {run: [entry.step for entry in store.log(run)] for run in store.runs()} == {
            "demo": [10, 9, 8, 5],
            "demo-filter": [10, 9, 8, 7, 6, 5, 4, 3, 2, 1],
            "on-one-rank": [5],
            "resumed": [10],
        }
        assert store.compose("parity").layers.keys() == measured["layers"].keys()
        assert store.verify(read_data=True).ok


def check_policies(measured: dict[str, Any]) -> None:
    """Selective saves are smaller, and what they left is what the policy composes of full ones."""
    saved = {each["saved_by"]: each for each in measured["saved"]}
    assert list(saved) == ["DeepSpeed", "full", "parity", "filter"]
    later = {name: each["later_bytes"] / saved["DeepSpeed"]["later_bytes"] for name, each in saved.items()}
    assert 0.95 < later["full"] < 1.05
    assert 0.45 < later["parity"] < 0.55
    assert 0.25 < later["filter"] < 0.45
    assert measured["sizes"]["checkpoints"] >= saved["DeepSpeed"]["total_bytes"]
    mixture = measured["mixture"]
    assert mixture["same"] == mixture["layers"] == sum(mixture["steps"].values()) == len(measured["layers"])
    assert set(mixture["steps"]) == {"5", "4"}
    # Another training, and not far from the first one.
    assert measured["losses"][-1]["uninterrupted"] != mixture["loss"]
    assert abs(measured["losses"][-1]["uninterrupted"] - mixture["loss"]) < 0.5


def check_other_ranks_and_gc(measured: dict[str, Any]) -> None:
    """One rank has loaded what two have saved; the collection removed what no rule keeps, and freed space."""
    other, collected = measured["other_ranks"], measured["gc"]
    # Of each parameter a master and two moments: nine in a block, and three beside the blocks.
    assert other == {"ranks": 1, "tensors": 3 * (9 * 6 + 3), "same": 3 * (9 * 6 + 3)}
    assert (collected["removed"], collected["kept"], collected["is_sound"]) == (6, 16, True)
    assert collected["after_bytes"] < 0.8 * collected["before_bytes"]


def check_report(measured: dict[str, Any]) -> None:
    """The page was made after all else, and opens on the run by filter; of that alone more would go."""
    assert list(measured["seconds_by_part"])[-1] == "report"
    shown = facts_in(Path(measured["report"]).read_bytes())
    assert {run["run"]: run["commits"] for run in shown["runs"]} == {
        "demo": 4,
        "demo-filter": 10,
        "on-one-rank": 1,
        "resumed": 1,
    }
    plan = shown["retention"]
    assert (plan["commits_kept"], plan["commits_removed"]) == (measured["gc"]["kept"] - 6, 6)
    filtered = shown["runs"][1]
    assert filtered["saves"]["layers_saved"][0] > max(filtered["saves"]["layers_saved"][1:])
    assert filtered["metrics"]["loss"][-1] == pytest.approx(measured["losses"][-1]["uninterrupted"], rel=1e-5)
    assert [pin["mixture"] is None for pin in shown["pins"]] == [False]


def test_how_long_it_takes_is_said_once_the_same_way() -> None:
    """README and the command's help say the same."""
    sentence = (
        "It takes about a minute and a half on two cores; the first time, DeepSpeed compiles for a minute or more"
    )

    for text in (README.read_text(), commands()["demo"].help or ""):
        assert sentence in text
        assert len(re.findall(r"(?i)\bminutes?\b", text.partition("## Measured")[0])) == 2


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


def test_a_missing_compiler_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The compiler is checked before anything is written or started; the hint says what to install."""
    monkeypatch.setenv("CXX", "no-such-compiler")

    code = main(["demo", "--dir", str(tmp_path / "demo"), "--json"])

    assert code == 16
    error = json.loads(capsys.readouterr().err.splitlines()[-1])["error"]
    assert "no-such-compiler" in error["message"]
    assert "g++" in error["hint"]
    assert not (tmp_path / "demo").exists()


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    """Every save needs a step."""
    with pytest.raises(InvalidInput, match="too few"):
        run_demo(tmp_path / "demo", steps=STEPS_MIN - 1)


def test_the_command_has_the_librarys_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """The command repeats default and bound, so that ``--help`` need not import the library."""
    main(["demo", "--help"])

    assert f"[default: {STEPS}; {STEPS_MIN} to" in " ".join(capsys.readouterr().out.split())


def facts(**changed: Any) -> dict[str, Any]:
    """Return the facts of a demo in which all went well, but for what is *changed*."""
    usage = {"saves": 2, "total_bytes": 2, "first_bytes": 1, "later_bytes": 1.0}
    found: dict[str, Any] = {
        "resumed_from": 1,
        "saved": [{"saved_by": name, **usage} for name in "ab"],
        "losses": [loss_of(2, uninterrupted=2.5, resumed=2.5)],
        "layers": {"norm": True},
        "mixture": {"policy": "parity", "step": 1, "steps": {1: 1}, "layers": 1, "same": 1, "loss": 2.0},
        "other_ranks": {"ranks": 1, "tensors": 3, "same": 3},
        "gc": {"removed": 1, "kept": 1, "before_bytes": 2, "after_bytes": 1, "is_sound": True},
        "dir": Path("demo"),
        "store": Path("demo/store"),
        "report": Path("demo/report.html"),
        "seconds": 2.0,
        "seconds_by_part": {"training": 1.0},
    }
    for name, value in changed.items():
        found[name] = found[name] | value if isinstance(found[name], dict) else value
    return found | {"problems": problems_of(found)}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"losses": [loss_of(2, uninterrupted=2.5, resumed=2.6)]}, "1 of 1 losses after the resume"),
        ({"layers": {"norm": False, "head": True}}, "1 of 2 layers at the last step"),
        ({"mixture": {"same": 0}}, "1 of 1 layers of the mixture"),
        ({"other_ranks": {"same": 1}}, "2 of 3 tensors"),
        ({"gc": {"is_sound": False}}, "is damaged"),
    ],
)
def test_any_difference_fails_the_demo(
    changed: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The difference is named, and all measurements are still printed."""
    monkeypatch.setattr("layerstore.demo.run_demo", lambda *_, **__: facts(**changed))

    assert main(["demo"]) == 1
    printed = capsys.readouterr()
    assert problem in printed.err
    assert "bit for bit" not in printed.out
    assert facts()["problems"] == []


def test_losses_are_identical_to_the_last_bit_only() -> None:
    """One unit in the last place is a difference, and NaN is never identical."""
    for one, other, expected in ((2.5, 2.5, True), (2.5, math.nextafter(2.5, 3), False), (math.nan, math.nan, False)):
        assert loss_of(1, uninterrupted=one, resumed=other)["identical"] is expected


def test_every_bit_of_every_array_is_compared_whatever_the_ranks(tmp_path: Path) -> None:
    """Equal arrays are found equal, others are not; layers sharded for other ranks are other versions."""
    numbers: dict[str, dict[str, Any]] = {
        "same": {"seed": 1, "world_size": 1},
        "two": {"seed": 1, "world_size": 2},
        "other": {"seed": 2},
    }
    with layerstore.init(tmp_path / "store") as store:
        for run, options in numbers.items():
            source = generate(tmp_path / run, step=1, layers=6, hidden=32, vocab=32, **options)
            store.ingest(source, run=run)
        two, same, other = (store.compose(run) for run in ("two", "same", "other"))
        different = resized(two, other)

        assert resized(two, same) == {"ranks": 1, "tensors": 3 * (9 * 6 + 3), "same": 3 * (9 * 6 + 3)}
        assert different["same"] < different["tensors"] == 3 * (9 * 6 + 3)
        assert set(same_layers(two, two).values()) == {True}
        assert set(same_layers(two, other).values()) == {False}
