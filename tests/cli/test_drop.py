"""``layerstore drop`` says what goes to the trash, what stays, and how it comes back."""

from pathlib import Path

from tests.cli.conftest import Run


def test_drop_hides_one_commit(run: Run, store: Path) -> None:
    """The commit, the pin that keeps it, and the run's new meaning; the log is shorter by one."""
    outcome = run("drop", "sft@2", "--store", store)

    assert outcome.code == 0
    assert outcome.out.startswith("dropped sft@2 (commit ")
    assert "kept by 1 pin: best" in outcome.out
    assert "sft still means sft@4" in outcome.out
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
    assert "sft then means sft@2" in run("drop", "sft", "--store", store).out


def test_a_pin_is_refused_and_the_last_commit_is_not(run: Run, store: Path) -> None:
    """The hint for a pin is what to do instead; a run may be dropped to the last."""
    of_a_pin = run("drop", "best", "--store", store)
    run("drop", "sft@4", "--store", store)
    of_the_last = run("drop", "sft@2", "--store", store)

    assert (of_a_pin.code, of_the_last.code) == (2, 0)
    assert "pin --delete best" in of_a_pin.err
    assert "the run has no other commit" in of_the_last.out
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
    assert people[2] == f"layerstore --store {store} undrop RUN@STEP brings one back"
    assert fields["commit"].startswith(command[-1])
    assert fields["time"] < fields["dropped"]
    assert run(*command[1:]).code == 0
    assert [commit["step"] for commit in run("log", "--json", "--store", store).fields["commits"]] == [4, 2]
    assert run("undrop", "sft@4", "--store", store).code == 13
