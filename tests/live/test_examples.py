"""The examples of the documentation train, and started again they go on as if they had never ended."""

from __future__ import annotations

from pathlib import Path

import pytest

import layerstore
from tests.live.run_examples import FOLDER, NAMES
from tests.zero3.launch import LAUNCH_SECONDS_MAX, torchrun

pytestmark = pytest.mark.timeout(3 * LAUNCH_SECONDS_MAX)

RUN_OF = {"with_deepspeed": "plain", "with_trainer": "trainer", "with_accelerate": "accelerate"}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what the examples left after four steps and, started again, four more."""
    out = tmp_path_factory.mktemp("left")
    layerstore.init(out / "store").close()
    for steps in ("4", "8"):
        launch(out, steps)
    return out


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what eight steps without a pause leave."""
    out = tmp_path_factory.mktemp("uninterrupted")
    layerstore.init(out / "store").close()
    launch(out, "8")
    return out


def launch(out: Path, steps: str) -> None:
    """Run all examples for *steps* steps."""
    torchrun("tests.live.run_examples", ["--out", str(out), "--steps", steps], log=out / f"{steps}.log")


def printed(out: Path, name: str) -> list[str]:
    """Return the lines that the example *name* printed about its steps, each once: some print older ones again."""
    lines = (out / f"{name}.txt").read_text().splitlines()
    return list(dict.fromkeys(line for line in lines if line.startswith("step ")))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_goes_on_when_it_is_started_again(left: Path, name: str) -> None:
    """Eight steps, each trained once; every second one is in the store, and the run has one attempt."""
    with layerstore.open(left / "store") as store:
        entries = store.log(RUN_OF[name])

    assert [line.split(":")[0] for line in printed(left, name)] == [f"step {step}" for step in range(1, 9)]
    assert [entry.step for entry in entries] == [8, 6, 4, 2]
    assert {entry.attempt for entry in entries} == {1}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_an_example_that_was_left_learns_the_same(left: Path, uninterrupted: Path, name: str) -> None:
    """Every loss is that of the example that was never left."""
    assert printed(left, name) == printed(uninterrupted, name)


def test_examples_mark_what_is_layerstores() -> None:
    """Each is a training script with a handful of lines marked, and no other line of it knows layerstore."""
    assert {path.stem for path in FOLDER.glob("*.py")} == set(NAMES)
    for name in NAMES:
        lines = (FOLDER / f"{name}.py").read_text().splitlines()
        marked = [line for line in lines if "# layerstore" in line]
        code = [line for line in lines if "layerstore" in line.split("#")[0] and "layerstore init" not in line]
        assert 3 <= len(marked) <= 4, name
        assert set(code) <= set(marked), name
