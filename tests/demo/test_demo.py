"""The demo, once with real training, and how it refuses, without."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore.cli.app import main
from layerstore.demo import run, run_demo
from layerstore.demo.run import same_arrays, same_layers
from layerstore.errors import AlreadyExists
from tests.docs.pages import README
from tests.docs.reference import commands
from tests.generated import generate
from tests.inspect.test_page import facts_in

DEMO_SECONDS_MAX = 600
"""A minute is usual; on a fresh machine DeepSpeed first compiles, and the machine may be busy."""


@pytest.mark.timeout(DEMO_SECONDS_MAX + 60)
def test_every_loss_after_the_resume_is_the_uninterrupted_runs(tmp_path: Path) -> None:
    """Real training resumes from the store bit for bit, and the JSON says what was measured."""
    folder = tmp_path / "demo with a space"

    command = [sys.executable, "-m", "layerstore.cli", "demo", "--dir", str(folder), "--json"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=DEMO_SECONDS_MAX, check=False)

    assert finished.returncode == 0, finished.stderr
    measured = json.loads(finished.stdout.splitlines()[-1])
    assert (measured["schema"], measured["identical"], measured["resumed_from"]) == (1, True, 10)
    assert measured["problems"] == []
    assert [loss["step"] for loss in measured["losses"]] == list(range(11, 21))
    for loss in measured["losses"]:
        assert loss["identical"]
        assert loss["uninterrupted"].hex() == loss["resumed"].hex()
    assert len(measured["layers"]) > 6
    assert all(measured["layers"].values())
    # Bytes at random have log(256) = 5.5: the model has learned, and so the losses mean something.
    assert measured["losses"][-1]["resumed"] < 5
    assert all(measured["sizes"][what] > 1_000_000 for what in ("checkpoints", "store", "composite"))
    assert measured["seconds"] >= sum(measured["seconds_by_part"].values())
    assert {"logs", "store", "report.html"} == {path.name for path in folder.iterdir()}
    check_policies(measured)
    check_other_ranks_and_gc(measured)
    check_report(measured)
    with layerstore.open(measured["store"]) as store:
        assert {run: [entry.step for entry in store.log(run)] for run in store.runs()} == {
            "demo": [20, 18, 16, 10],
            "demo-filter": [20, 18, 16, 14, 12, 10, 8, 6, 4, 2],
            "on-one-rank": [10],
            "resumed": [20],
        }
        assert store.compose("parity").layers.keys() == measured["layers"].keys()
        assert store.verify(read_data=True).ok


@pytest.mark.timeout(DEMO_SECONDS_MAX + 60)
def test_an_interrupt_leaves_no_rank(tmp_path: Path) -> None:
    """SIGINT reaches the command alone, as from a terminal; it ends when all that it started has ended."""
    # Whoever runs the tests in the background may have it ignored.
    words = ["env", "--default-signal=INT", sys.executable, "-m", "layerstore.cli"]
    command = [*words, "demo", "--dir", str(tmp_path / "demo")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + DEMO_SECONDS_MAX
    while len(started_for(tmp_path)) < 4 and time.monotonic() < end:  # the command, torchrun, and two ranks
        time.sleep(0.05)

    process.send_signal(signal.SIGINT)

    assert process.wait(DEMO_SECONDS_MAX) == 130
    assert started_for(tmp_path) == []


def started_for(folder: Path) -> list[str]:
    """Return the command lines of processes that have to do with *folder*."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if str(folder) in line]


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
    assert set(mixture["steps"]) == {"10", "8"}
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
        words = re.sub(r"\]\([^)]*\)", "", text.partition("## Measured")[0])  # no names of pictures
        assert len(re.findall(r"(?i)\bminutes?\b", words)) == 2


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    """Nothing in it is touched; an empty one will do."""
    (tmp_path / "precious").touch()

    with pytest.raises(AlreadyExists, match="not empty"):
        run_demo(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


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


LOSS = {"step": 2, "uninterrupted": 2.5, "resumed": 2.5, "identical": True}


def facts(**changed: Any) -> dict[str, Any]:
    """Return what a demo measured in which all went well, but for what is *changed*."""
    usage = {"saves": 2, "total_bytes": 2, "first_bytes": 1, "later_bytes": 1.0}
    measured: dict[str, Any] = {
        "resumed_from": 1,
        "saved": [{"saved_by": name, **usage} for name in "ab"],
        "losses": [LOSS],
        "layers": {"norm": True},
        "mixture": {"policy": "parity", "step": 1, "steps": {1: 1}, "layers": 1, "same": 1, "loss": 2.0},
        "other_ranks": {"ranks": 1, "tensors": 3, "same": 3},
        "gc": {"removed": 1, "kept": 1, "before_bytes": 2, "after_bytes": 1, "is_sound": True},
        "dir": Path("demo"),
        "report": Path("demo/report.html"),
    }
    for name, value in changed.items():
        measured[name] = measured[name] | value if isinstance(measured[name], dict) else value
    return measured


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, ""),
        ({"losses": [LOSS, LOSS | {"identical": False}]}, "losses after the resume"),
        ({"layers": {"norm": False, "head": True}}, "layers at the last step"),
        ({"mixture": {"same": 0}}, "layers of the mixture"),
        ({"other_ranks": {"same": 1}}, "masters and moments on one rank"),
        ({"gc": {"is_sound": False}}, "bytes that the collection left"),
    ],
)
def test_any_difference_fails_the_demo(
    changed: dict[str, Any],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The difference is named, all measurements are still printed, and what was compared stays."""

    def measured(folder: Path, say: object) -> dict[str, Any]:
        (folder / "work").mkdir()
        return facts(**changed)

    monkeypatch.setattr(run, "_run", measured)

    assert main(["demo", "--dir", str(tmp_path)]) == (1 if problem else 0)
    printed = capsys.readouterr()
    assert "2.5" in printed.out
    assert (f"the demo found a difference: {problem}" in printed.err) is bool(problem)
    assert ("bit for bit" in printed.out) is not bool(problem)
    assert (f"next: layerstore --store {tmp_path}/store log" in printed.out) is not bool(problem)
    assert (tmp_path / "work").exists() is bool(problem)


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
        different = same_arrays(two, other)

        assert same_arrays(two, same) == {"ranks": 1, "tensors": 3 * (9 * 6 + 3), "same": 3 * (9 * 6 + 3)}
        assert different["same"] < different["tensors"] == 3 * (9 * 6 + 3)
        assert set(same_layers(two, two).values()) == {True}
        assert set(same_layers(two, other).values()) == {False}
