"""``ingest --all`` and ``--watch``: every checkpoint below a folder, and one that is not whole hurts no other."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import layerstore
from tests.cli.conftest import Run
from tests.generated import generate

SMALL: dict[str, Any] = {"layers": 1, "hidden": 16, "vocab": 16}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the output folder of a Trainer with steps 9, 10 and 100."""
    for step in (9, 10, 100):
        generate(tmp_path / "job" / f"checkpoint-{step}", layout="hf", step=step, **SMALL)
    return tmp_path / "job"


def steps(run: Run) -> list[int]:
    """Return the steps in the log, oldest first."""
    return [commit["step"] for commit in reversed(run("log", "--json").fields["commits"])]


def test_all_are_saved_in_step_order(run: Run, job: Path) -> None:
    """What is found is said first, then each as if it had been named; again, each is already saved."""
    run("init")

    first = run("ingest", "--all", job)
    second = run("ingest", "--all", job)

    assert (first.code, second.code) == (0, 0)
    assert first.out.splitlines()[0] == "found 3 checkpoints"
    assert [line.split()[:2] for line in first.out.splitlines()[1:]] == [
        ["saved", f"job@{step}"] for step in (9, 10, 100)
    ]
    assert [line.startswith("already saved: job@") for line in second.out.splitlines()[1:]] == [True] * 3
    assert steps(run) == [9, 10, 100]
    assert [run("show", f"job@{step}", "--json").fields["save_number"] for step in steps(run)] == [0, 1, 2]


def test_programs_always_get_a_list(run: Run, tmp_path: Path) -> None:
    """Also of one: the shape does not depend on what is in a folder."""
    generate(tmp_path / "raw", **SMALL)
    run("init")

    fields = run("ingest", "--all", "raw", "--json").fields

    assert list(fields) == ["schema", "commits", "problems"]
    assert fields["problems"] == []


def test_one_that_is_damaged_is_reported_and_the_others_go_on(run: Run, job: Path) -> None:
    """A warning where it happens; at the end the exit code of the first problem."""
    shard = next((job / "checkpoint-9").rglob("*rank_1*optim_states.pt"))
    shard.unlink()
    (job / "checkpoint-10" / "trainer_state.json").unlink()
    run("init")

    people = run("ingest", "--all", job)
    programs = run("ingest", "--all", job, "--json")

    assert (people.code, programs.code) == (21, 21)
    assert [line.startswith("warning: ") for line in people.err.splitlines()] == [True, True, False, False]
    assert people.err.splitlines()[-2].startswith("error: 2 of 3 checkpoints not saved: ")
    assert "rank 1" in programs.error["message"]
    assert [commit["step"] for commit in programs.fields["commits"]] == [100]
    assert {*programs.fields["problems"][0]} == {"path", "kind", "code", "message", "hint"}
    assert "checkpoint-9/" in programs.fields["problems"][0]["path"]
    assert steps(run) == [100]


def test_a_conflict_is_a_problem_like_any_other(run: Run, job: Path) -> None:
    """Other content for a saved step is neither taken for known nor in the way of the others."""
    run("init")
    run("ingest", job / "checkpoint-10")
    shutil.rmtree(job / "checkpoint-10")
    generate(job / "checkpoint-10", layout="hf", step=10, seed=1, **SMALL)

    outcome = run("ingest", "--all", job)

    assert outcome.code == 15
    assert steps(run) == [9, 10, 100]


def test_trouble_with_the_store_ends_it_at_once(run: Run, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A held lock would be waited for three times over."""
    from layerstore.disk import lock

    run("init")
    monkeypatch.setenv("LAYERSTORE_LOCK_TIMEOUT", "0.1")
    with lock(Path(".layerstore/locks/run-job.lock"), what="run 'job'", deadline_seconds=0):
        outcome = run("ingest", "--all", job, "--json")

    assert outcome.code == 11
    assert (outcome.fields["commits"], outcome.fields["problems"]) == ([], [])


@pytest.mark.parametrize("times", [1, 2])
def test_who_is_overtaken_by_a_collection_tries_once_more(
    run: Run, job: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """What it took is written anew; whoever is overtaken again is named, and keeps no other from being saved."""
    from layerstore import Store
    from layerstore.errors import Overtaken

    ingest = Store.ingest
    tried: list[Path] = []

    def overtaken(store: Store, checkpoint: Path, **options: object) -> object:
        tried.append(checkpoint)
        if checkpoint.name == "checkpoint-10" and tried.count(checkpoint) <= times:
            raise Overtaken("an object was removed meanwhile; nothing was saved", hint="repeat the command")
        return ingest(store, checkpoint, **options)  # type: ignore[arg-type]  # passed on as they are

    monkeypatch.setattr(Store, "ingest", overtaken)
    run("init")

    outcome = run("ingest", "--all", job)

    assert outcome.code == (0 if times == 1 else 15)
    assert tried.count(job / "checkpoint-10") == 2
    assert steps(run) == ([9, 10, 100] if times == 1 else [9, 100])


def test_one_that_is_removed_while_it_is_read(run: Run, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was noticed first, the message says that it was removed."""
    from layerstore.ingest.transfer import transfer

    def rotated(*arguments: object, **options: object) -> object:
        shutil.rmtree(job / "checkpoint-9", ignore_errors=True)
        return transfer(*arguments, **options)  # type: ignore[arg-type]  # passed on as they are

    monkeypatch.setattr("layerstore.ingest.sources.transfer", rotated)
    run("init")

    outcome = run("ingest", job / "checkpoint-9")

    assert outcome.code == 21
    assert outcome.err.splitlines()[0] == (
        f"error: {job / 'checkpoint-9'} was removed while it was read; nothing of it was saved"
    )
    assert run("log", "--json").fields["commits"] == []


@pytest.mark.parametrize("words", [("--pin", "best"), ("--tag", "global_step9")])
def test_what_means_one_checkpoint_does_not_go_with_all(run: Run, job: Path, words: tuple[str, str]) -> None:
    """Refused before anything is begun."""
    run("init")

    assert run("ingest", "--all", job, *words).code == 2
    assert run("log", "--json").fields["commits"] == []


def test_without_all_it_is_said_that_there_are_more(run: Run, checkpoints: Path) -> None:
    """`latest` decides, but nobody shall think that the whole folder was taken."""
    run("init")

    by_latest = run("ingest", checkpoints)
    by_tag = run("ingest", checkpoints, "--tag", "global_step2")
    by_path = run("ingest", checkpoints / "global_step2")

    assert by_latest.err.splitlines() == [
        f"warning: took 'global_step4', as 'latest' says; {checkpoints} holds 1 more: global_step2; "
        "use --all for all of them, --tag for another"
    ]
    assert by_tag.err == by_path.err == ""


def test_a_folder_of_many_names_ten_and_counts_the_rest(run: Run, tmp_path: Path) -> None:
    """The hint is what takes all of it."""
    for step in range(1, 13):
        shards = tmp_path / "job" / f"checkpoint-{step}" / f"global_step{step}"
        shards.mkdir(parents=True)
        (shards / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    run("init")

    outcome = run("ingest", "job")

    assert "holds 12 checkpoints: checkpoint-1, checkpoint-2, " in outcome.err
    assert "checkpoint-10 and 2 more\n" in outcome.err
    assert f"layerstore ingest --all {tmp_path / 'job'}" in outcome.err
    assert outcome.code == 2


@pytest.mark.parametrize(
    "folders",
    [
        ("checkpoints/checkpoint_0", "checkpoints/checkpoint_1"),
        ("epoch_0", "step10"),
    ],
)
def test_what_accelerate_saved_of_one_training_is_one_run(run: Run, tmp_path: Path, folders: tuple[str, str]) -> None:
    """Called like the training's folder, and the same whether it is named itself or found by --all."""
    for folder, step in zip(folders, (9, 10), strict=True):
        generate(tmp_path / "sft" / folder, layout="accelerate", step=step, **SMALL)
    run("init")

    outcome = run("ingest", "--all", "sft")
    again = run("ingest", f"sft/{folders[1]}")

    assert [line.split()[:2] for line in outcome.out.splitlines()[1:]] == [["saved", "sft@9"], ["saved", "sft@10"]]
    assert again.out.startswith("already saved: sft@10 ")


def test_trainings_beside_each_other_are_runs_of_their_own(run: Run, tmp_path: Path) -> None:
    """A number at a folder's end need not be a step: histories of two trainings must not become one."""
    for number in (1, 2):
        generate(tmp_path / "sweep" / f"run{number}", layout="accelerate", step=9, seed=number, **SMALL)
        generate(tmp_path / "two" / f"job{number}" / "checkpoints" / "checkpoint_0", layout="accelerate", **SMALL)
    run("init")

    assert run("ingest", "--all", "sweep", "two").code == 0
    assert {commit["run"] for commit in run("log", "--json").fields["commits"]} == {"run1", "run2", "job1", "job2"}


# -- following a job -----------------------------------------------------------------------------------------------


PATIENCE_SECONDS = 60


@pytest.fixture
def watcher(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start the command on the folder of a job that has not begun."""
    layerstore.init(tmp_path / "store").close()
    words = ["ingest", "--watch", str(tmp_path / "watched"), "--store", str(tmp_path / "store"), "--json"]
    command = [sys.executable, "-m", "layerstore.cli", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def generate_step(job: Path, step: int) -> Path:
    """Let the job save *step*; return the folder."""
    folder = job / f"checkpoint-{step}"
    generate(folder, layout="hf", step=step, **SMALL)
    return folder


def at_rest(folder: Path) -> None:
    """Let all of *folder* look as if it had been written a minute ago."""
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 60,) * 2)


def steps_in(store: Path) -> list[int]:
    """Return the steps that *store* has."""
    with layerstore.open(store) as opened:
        return sorted(entry.step for entry in opened.log())


def wait_for(done: Callable[[], bool]) -> None:
    """Wait until *done* is true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.2)


@pytest.mark.full
def test_what_comes_is_saved_once_it_rests(tmp_path: Path, watcher: "subprocess.Popen[str]") -> None:
    """The folder is waited for, what is still being written is left alone; at the end all that was saved is told."""
    store, watched = tmp_path / "store", tmp_path / "watched"
    time.sleep(2)
    assert watcher.poll() is None
    at_rest(generate_step(watched, 10))
    wait_for(lambda: steps_in(store) == [10])
    fresh = generate_step(watched, 20)
    torn = generate_step(watched, 30)
    next(torn.rglob("*rank_1*optim_states.pt")).unlink()
    at_rest(torn)
    time.sleep(3)
    assert steps_in(store) == [10], "step 20 has only just been written, and step 30 lacks a file"

    at_rest(fresh)
    wait_for(lambda: steps_in(store) == [10, 20])
    shutil.copytree(watched / "checkpoint-20", tmp_path / "unrelated")
    watcher.terminate()
    out, err = watcher.communicate(timeout=PATIENCE_SECONDS)

    fields = json.loads(out)
    assert [commit["step"] for commit in fields["commits"]] == [10, 20]
    assert [Path(problem["path"]).parent.name for problem in fields["problems"]] == ["checkpoint-30"]
    assert "checkpoint-30" in err
