"""``layerstore migrate`` says what it would do, does it, and knows when there is nothing to do."""

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.compat.format1 import as_format_1
from tests.faults.harness import snapshot

SUMMARY = "records hold their attempt's whole lineage, and dropped commits lie in trash/"


@pytest.fixture
def old(store: Path) -> Path:
    """Return a store of format 1."""
    return as_format_1(store)


def test_a_store_of_today_has_nothing_to_do(run: Run, store: Path) -> None:
    """It is said, and no error; a dry run says the same, and nothing is touched."""
    before = snapshot(store)
    for words in (["migrate"], ["migrate", "--dry-run"]):
        outcome = run(*words, "--store", store)

        assert outcome.code == 0
        assert outcome.out == f"nothing to do: {store} has format 2, which this layerstore writes\n"
    assert snapshot(store) == before


def test_the_list_needs_no_store(run: Run) -> None:
    """It says which format this layerstore writes, and each step to it."""
    lines = run("migrate", "--list").out.splitlines()

    assert lines[0] == "this layerstore reads and writes format 2"
    assert lines[-1].split(maxsplit=3) == ["1", "to", "2", SUMMARY]
    assert run("migrate", "--list", "--json").fields == {
        "schema": 1,
        "format": 2,
        "steps": [{"source": 1, "target": 2, "summary": SUMMARY}],
    }


@pytest.mark.parametrize("words", [["log"], ["ingest", "x"], ["gc"]])
def test_every_other_command_says_what_to_do(run: Run, old: Path, words: list[str]) -> None:
    """An older format is refused with the command that helps, and nothing is written."""
    before = snapshot(old)

    outcome = run(*words, "--store", old)

    assert outcome.code == 16
    assert outcome.err.splitlines() == [
        f"error: {old}/store.json is a store of format 1; this layerstore reads format 2; nothing was changed",
        f"hint: layerstore --store {old} migrate",
    ]
    assert snapshot(old) == before


def test_people_are_told_what_will_be_done_and_what_was(run: Run, old: Path) -> None:
    """The plan counts, writes nothing, and the deed says where the backup is; then everything works."""
    before = snapshot(old)
    planned = run("migrate", "--dry-run", "--store", old).out.splitlines()
    unchanged = snapshot(old)
    done = run("migrate", "--store", old).out.splitlines()
    again = run("migrate", "--store", old).out

    assert planned[0] == f"would migrate {old} from format 1 to 2: {SUMMARY}"
    assert planned[1].startswith("  3 files to write, ")
    assert planned[2:] == [
        "  if they exist, store.json, commits/, gc/, parts/, pins/, trash/, quarantine/ would move to backups/",
        "nothing was changed",
    ]
    assert unchanged == before
    assert done == [
        "format 1 to 2: 3 files written",
        f"  the replaced files are in {old}/backups/format-1.1",
        f"{old} now has format 2",
        f"check it with layerstore --store {old} verify; remove the backup once you are sure",
    ]
    assert again.startswith("nothing to do: ")
    assert run("verify", "--read-data", "--store", old).code == 0
    assert [commit["step"] for commit in run("log", "--json", "--store", old).fields["commits"]] == [4, 2]


def test_an_interrupted_one_is_finished(run: Run, store: Path) -> None:
    """No other command opens the store; plan and outcome say that the step is only finished."""
    (store / "migrating" / "format-2").mkdir(parents=True)

    refused = run("log", "--store", store)
    planned = run("migrate", "--dry-run", "--store", store).out.splitlines()
    done = run("migrate", "--json", "--store", store).fields

    assert refused.code == 16
    assert refused.err.splitlines() == [
        f"error: a migration of {store} was interrupted; nothing was changed",
        f"hint: layerstore --store {store} migrate finishes it",
    ]
    assert planned == [f"would finish the migration of {store} from format 1 to 2", "nothing was changed"]
    assert (done["unfinished"], done["steps"][0]["files"]) == (True, None)
    assert run("log", "--store", store).code == 0


def test_programs_get_the_same_fields(run: Run, old: Path) -> None:
    """The plan and the deed have the same fields, and so has nothing to do."""
    planned, done, nothing = (
        run("migrate", *more, "--json", "--store", old).fields for more in (["--dry-run"], [], [])
    )

    assert (planned["found"], planned["format"], planned["dry_run"]) == (1, 2, True)
    assert planned["steps"][0].keys() == {"source", "target", "summary", "files", "bytes", "backup"}
    assert done["steps"] == [planned["steps"][0] | {"backup": f"{old}/backups/format-1.1"}]
    assert (nothing["found"], nothing["format"], nothing["steps"]) == (2, 2, [])
    assert planned.keys() == done.keys() == nothing.keys()


def test_an_index_of_another_format_is_void(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it remembers bears other names by now: it is made anew, and nothing is said to have vanished."""
    shutil.rmtree(store / "manifest")
    with monkeypatch.context() as older:
        older.setattr("layerstore.storage.index.FORMAT", 0)
        run("log", "--store", store)
    next((store / "commits" / "sft").glob("4.*")).unlink()

    outcome = run("log", "--json", "--store", store)

    assert outcome.code == 0
    assert [commit["step"] for commit in outcome.fields["commits"]] == [2]
    assert "the index" in outcome.err
    assert "vanished" not in outcome.out + outcome.err
