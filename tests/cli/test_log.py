"""``layerstore log --dropped`` lists what is in the trash."""

from pathlib import Path

from tests.cli.conftest import Run


def test_what_was_dropped_is_listed_until_it_is_back(run: Run, store: Path) -> None:
    """With its run, step, commit and times, and with the command that brings it back; log itself leaves it out."""
    empty = run("log", "--dropped", "--store", store)
    commit = run("drop", "sft@4", "--store", store, "--json").fields["commit"]
    people = run("log", "--dropped", "--store", store)
    [fields] = run("log", "sft", "--dropped", "--store", store, "--json").fields["dropped"]
    steps = [each["step"] for each in run("log", "--store", store, "--json").fields["commits"]]
    run("undrop", commit[:12], "--store", store)

    assert empty.out == "the trash holds no commit\n"
    assert people.out.splitlines()[0].split() == ["RUN", "STEP", "COMMIT", "SAVED", "DROPPED"]
    assert people.out.splitlines()[1].split()[:3] == ["sft", "4", commit[:12]]
    assert people.out.splitlines()[2] == f"layerstore --store {store} undrop RUN@STEP brings one back"
    assert (fields["run"], fields["attempt"], fields["step"], fields["commit"]) == ("sft", 1, 4, commit)
    assert fields["time"] < fields["dropped"]
    assert steps == [2]
    assert run("log", "--dropped", "--store", store, "--json").fields["dropped"] == []
