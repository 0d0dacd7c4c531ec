"""``layerstore drop`` says what goes to the trash, what stays, and how it comes back."""

import re
from pathlib import Path

import pytest

import layerstore
from tests.cli.conftest import Run


def test_drop_hides_one_commit(run: Run, store: Path) -> None:
    """The commit, the pin that keeps it, and the run's new meaning; the log is shorter by one."""
    outcome = run("drop", "sft@2", "--store", store)

    assert outcome.code == 0
    assert outcome.out.startswith("dropped sft@2 (commit ")
    assert "kept by 1 pin: best" in outcome.out
    assert "sft still refers to sft@4" in outcome.out
    assert [commit["step"] for commit in run("log", "--json", "--store", store).fields["commits"]] == [4]
    assert run("drop", "sft@2", "--store", store).code == 13


def test_drop_dry_run_changes_nothing(run: Run, store: Path) -> None:
    """The same fields as the deed, and the commit is still there."""
    planned = run("drop", "sft", "--dry-run", "--json", "--store", store)

    assert planned.fields["is_tip"] is True
    assert (planned.fields["step"], planned.fields["tip"], planned.fields["dry_run"]) == (4, "sft@2", True)
    people = run("drop", "sft", "--dry-run", "--store", store).out
    assert people.startswith("would drop sft@4 ")
    assert "gc then frees up to " in people.splitlines()[-1]
    done = run("drop", "sft", "--json", "--store", store)
    assert planned.fields | {"dry_run": False} == done.fields


def test_dropping_the_newest_moves_the_name(run: Run, store: Path) -> None:
    """The run then means what was saved before it."""
    assert "sft then refers to sft@2" in run("drop", "sft", "--store", store).out


def test_a_pin_is_refused_and_the_last_commit_is_not(run: Run, store: Path) -> None:
    """The hint for a pin is what to do instead; a run may be dropped to the last."""
    of_a_pin = run("drop", "best", "--store", store)
    run("drop", "sft@4", "--store", store)
    of_the_last = run("drop", "sft@2", "--store", store)

    assert (of_a_pin.code, of_the_last.code) == (2, 0)
    assert "pin --delete best" in of_a_pin.err
    assert "sft has no other commit" in of_the_last.out
    assert run("show", "sft", "--store", store).code == 13


def test_undrop_brings_it_back(run: Run, store: Path) -> None:
    """By the command that drop names; `log --dropped` lists it until then, with its times, and log leaves it out."""
    empty = run("log", "--dropped", "--store", store)
    dropped = run("drop", "sft@4", "--store", store)
    people = run("log", "--dropped", "--store", store).out.splitlines()
    [fields] = run("log", "sft", "--dropped", "--store", store, "--json").fields["dropped"]
    command = dropped.out.splitlines()[-1].partition("to bring it back: ")[2].split()

    assert empty.out == "the trash holds no commit\n"
    assert people[0].split() == ["RUN", "STEP", "COMMIT", "SAVED", "DROPPED"]
    assert people[1].split()[:3] == ["sft", "4", command[-1]]
    assert people[2] == f"layerstore --store {store} undrop RUN@STEP brings one back, with --run RUN a whole run"
    assert fields["commit"].startswith(command[-1])
    assert fields["time"] < fields["dropped"]
    assert run(*command[1:]).code == 0
    assert [commit["step"] for commit in run("log", "--json", "--store", store).fields["commits"]] == [4, 2]
    assert run("undrop", "sft@4", "--store", store).code == 13


def test_several_are_dropped_at_once(run: Run, store: Path) -> None:
    """The plan and the bytes stand there once, for all; a REF that is named twice, in two ways, is one commit."""
    words = ("drop", "sft@2", "sft", "sft@4", "--store", store)
    people = run(*words, "--dry-run").out.splitlines()
    planned = run(*words, "--dry-run", "--json").fields
    done = run(*words, "--json").fields

    assert people[:3] == [
        "would drop 2 commits: sft@2, sft@4; nothing was changed",
        "kept by 1 pin: best",
        "sft has no other commit",
    ]
    assert people[3].startswith("gc then frees up to ")
    assert [commit["step"] for commit in planned["commits"]] == [2, 4]
    assert planned["bytes"] == sum(commit["bytes"] for commit in planned["commits"]) > 0
    assert planned | {"dry_run": False} == done
    assert run("log", "--json", "--store", store).fields["commits"] == []


@pytest.mark.parametrize("bad", ["sft@3", "other@2", "best", "sft/4"])
def test_one_bad_name_among_several_drops_none(run: Run, store: Path, bad: str) -> None:
    """The same with a dry run; the error is that of the bad one alone."""
    alone = run("drop", bad, "--store", store)
    for words in (["sft@4", bad], [bad, "sft@4"], ["sft@4", bad, "--dry-run"], ["--run", "sft", bad]):
        outcome = run("drop", *words, "--store", store)
        assert (outcome.code, outcome.err) == (alone.code, alone.err)
    assert run("drop", "--run", "sft", "--run", "best", "--store", store).code == 13
    assert [commit["step"] for commit in run("log", "--json", "--store", store).fields["commits"]] == [4, 2]


def test_a_whole_run_is_dropped_by_its_name(run: Run, store: Path) -> None:
    """Only with --run: its name alone means the newest commit; without either nothing is dropped."""
    nothing = run("drop", "--store", store)
    planned = run("drop", "--run", "sft", "--dry-run", "--store", store)
    dropped = run("drop", "--run", "sft", "--store", store)
    again = run("drop", "--run", "sft", "--store", store)

    assert (nothing.code, planned.code, dropped.code, again.code) == (2, 0, 0, 13)
    assert "--run RUN" in nothing.err
    assert planned.out.startswith("would drop 2 commits: sft@2, sft@4; nothing was changed\n")
    assert dropped.out.splitlines()[-1].endswith(f"to bring them back: layerstore --store {store} undrop --run sft")
    assert run("undrop", "sft@2", "--store", store).code == 0


def test_a_run_that_a_job_saves_is_dropped_with_a_warning(run: Run, store: Path) -> None:
    """In the plan too; not if a commit of the run stays, and not once the job has ended."""
    words = ("drop", "--run", "sft", "--store", store)
    with layerstore.open(store) as opened, opened.repo.lock_attempt("sft", 1):
        one = run("drop", "sft@4", "--dry-run", "--store", store)
        planned, dropped = run(*words, "--dry-run"), run(*words)
    run("undrop", "--run", "sft", "--store", store)
    ended = run(*words)

    warning = "warning: a job seems to be saving sft now: its next save restores the run; end the job, or drop again\n"
    assert [outcome.err for outcome in (one, planned, dropped, ended)] == ["", warning, warning, ""]


def test_several_come_back_as_they_went(run: Run, store: Path) -> None:
    """By REFs or by the run; if one of them cannot, none does. Only the JSON of a single REF has no list."""
    run("drop", "--run", "sft", "--store", store)
    bad = [run("undrop", *words, "--store", store) for words in ([], ["sft@2", "sft@9"], ["sft@2", "--run", "best"])]
    empty = run("log", "--json", "--store", store).fields["commits"]
    both = run("undrop", "sft@2", "sft@4", "sft@2", "--json", "--store", store).fields["commits"]
    run("drop", "--run", "sft", "--store", store)
    people = run("undrop", "--run", "sft", "--store", store)
    again = run("undrop", "--run", "sft", "--store", store)
    run("drop", "sft@4", "--store", store)
    one = run("undrop", "sft@4", "--json", "--store", store).fields

    assert ([outcome.code for outcome in bad], empty) == ([2, 13, 13], [])
    assert [commit["step"] for commit in both] == [2, 4]
    assert people.out == "2 commits are back: sft@2, sft@4\nsft now refers to sft@4\n"
    assert (again.code, again.err.splitlines()[0]) == (13, "error: no commit of 'sft' is in the trash")
    assert list(one) == ["schema", "run", "step", "attempt", "commit"]
    assert {"schema": 1, **both[1]} == one


def test_a_dropped_run_says_so(run: Run, store: Path) -> None:
    """To whoever asks for it, with the commands that list it and bring it back; runs and log name it too."""
    run("pin", "--delete", "best", "--store", store)
    run("drop", "--run", "sft", "--store", store)
    at_store = f"layerstore --store {store}"
    ways = f"{at_store} log sft --dropped lists them, {at_store} undrop --run sft brings them back"

    for words in (["log", "sft"], ["show", "sft"], ["compose", "sft@4", "--dry-run"], ["gc", "sft", "--dry-run"]):
        outcome = run(*words, "--store", store)
        assert (outcome.code, outcome.err.splitlines()[-1]) == (13, f"hint: its commits were dropped: {ways}"), words
    by_name = run("undrop", "sft", "--store", store)
    assert (by_name.code, f"{at_store} undrop --run sft brings" in by_name.err) == (13, True)
    assert f"{at_store} log --dropped lists" in run("show", "--store", store).err
    assert run("runs", "--store", store).out == f"dropped: sft; {at_store} log --dropped lists their commits\n"
    assert run("runs", "--json", "--store", store).fields["runs"] == []
    none = f"all commits were dropped: {at_store} log --dropped lists them\n"
    assert run("log", "--store", store).out == none


def test_a_dropped_step_says_so(run: Run, store: Path) -> None:
    """To whoever asks for it, with the command that brings it back; a step that never was is answered as ever."""
    dropped = run("drop", "sft@4", "--store", store).out
    command = dropped.partition("to bring it back: ")[2].strip()

    for words in (["show", "sft@4"], ["compose", "sft@4", "--dry-run"], ["drop", "sft@4"], ["estimate", "sft@4"]):
        outcome = run(*words, "--store", store)
        assert (outcome.code, outcome.err.splitlines()[-1]) == (13, f"hint: it was dropped: {command} brings it back")
    assert "did you mean sft@2?" in run("show", "sft@3", "--store", store).err


def test_attempts_of_a_dropped_step_are_told_apart(run: Run, store: Path, checkpoints: Path) -> None:
    """The list has a column; ~1 counts the attempts that have commits, and where that names none, the ids stand."""
    run("ingest", checkpoints / "global_step4", "--run", "sft", "--resumed-from", "sft@2", "--store", store)
    first, second = (run("show", ref, "--json", "--store", store).fields["commit"][:12] for ref in ("sft~1@4", "sft@4"))
    run("drop", "sft@4", "sft~1@4", "--store", store)
    people = run("log", "--dropped", "--store", store).out.splitlines()
    asked = run("show", "sft@4", "--store", store)
    either = run("undrop", "sft@4", "--store", store)
    neither = run("undrop", "sft~1@4", "--store", store)
    back = run("undrop", second, "--store", store)
    other = run("undrop", "sft~1@4", "--store", store)

    assert people[0].split() == ["RUN", "ATTEMPT", "STEP", "COMMIT", "SAVED", "DROPPED"]
    assert {tuple(line.split()[1:4]) for line in people[1:3]} == {("1", "4", first), ("2", "4", second)}
    assert "2 commits of sft@4 are in the trash: " in either.err
    assert f"2 commits of it were dropped: layerstore --store {store} log sft --dropped lists them" in asked.err
    assert (neither.code, neither.err.splitlines()[0]) == (13, "error: sft~1@4 is not in the trash")
    assert {f"{first} of attempt 1", f"{second} of attempt 2"} <= set(re.split(": |, |; ", neither.err.splitlines()[1]))
    assert (back.code, other.code) == (0, 0)
    assert other.out == f"sft~1@4 is back (commit {first})\nsft now refers to sft@4\n"


def test_what_cannot_be_read_is_given_up_by_its_name_alone(run: Run, store: Path) -> None:
    """With others too; a whole run is refused, with the command that removes it first."""
    [record] = (store / "commits" / "sft").glob("4.*")
    record.chmod(0o644)
    record.write_bytes(b"damaged")

    refused = run("drop", "--run", "sft", "--store", store)
    planned = run("drop", "sft@2", "sft@4", "--dry-run", "--json", "--store", store).fields
    done = run("drop", "sft@2", "sft@4", "--store", store)

    assert (refused.code, " drop sft@4 removes it" in refused.err) == (20, True), refused.err
    assert [commit["step"] for commit in planned["commits"]] == [2]
    assert planned["given_up"] == [record.name.removeprefix("4.")]
    assert done.out.startswith("gave up sft@4 ")
    assert "dropped sft@2 " in done.out
    assert not any((store / "commits" / "sft").iterdir())
