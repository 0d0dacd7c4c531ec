"""``layerstore migrate`` says what it would do, does it, and knows when there is nothing to do."""

import re
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.compat.format0 import as_format_0
from tests.compat.steps import m0000_flags
from tests.faults.harness import snapshot


@pytest.fixture
def old(store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a store of a format before the first, to which a step has been added."""
    monkeypatch.setattr("layerstore.migrations.STEPS", (m0000_flags.STEP,))
    return as_format_0(store)


def test_a_store_of_today_has_nothing_to_do(run: Run, store: Path) -> None:
    """It is said, and no error; a dry run says the same, and nothing is touched."""
    before = snapshot(store)
    for words in (["migrate"], ["migrate", "--dry-run"]):
        outcome = run(*words, "--store", store)

        assert outcome.code == 0
        assert outcome.out == f"nothing to do: {store} is of format 1, which this layerstore writes\n"
    assert snapshot(store) == before


@pytest.mark.parametrize("words", [["migrate"], ["migrate", "--dry-run"], ["log"]])
@pytest.mark.parametrize("content", [None, "{"], ids=["missing", "torn"])
def test_a_damaged_identity_is_refused_with_the_way_out(
    run: Run, store: Path, words: list[str], content: str | None
) -> None:
    """As by every other command: the line that writes store.json again can be typed as it stands."""
    (store / "store.json").unlink()
    if content is not None:
        (store / "store.json").write_text(content)

    outcome = run(*words, "--store", store)

    assert outcome.code == 20
    command = re.escape(f"layerstore --store {store} repair --store-id ")
    assert re.search(rf"^hint: {command}[0-9a-f]{{32}}", outcome.err, re.MULTILINE)


def test_the_list_needs_no_store(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which format this layerstore writes, and each step to it."""
    assert run("migrate", "--list").out.splitlines() == [
        "this layerstore reads and writes format 1",
        "it is the first one, so no step leads there",
    ]
    assert run("migrate", "--list", "--json").fields == {"schema": 1, "format": 1, "steps": []}

    monkeypatch.setattr("layerstore.migrations.STEPS", (m0000_flags.STEP,))

    assert run("migrate", "--list").out.splitlines()[-1].split(maxsplit=3) == [
        "0",
        "to",
        "1",
        "records say which flags they use",
    ]
    assert run("migrate", "--list", "--json").fields["steps"] == [
        {"source": 0, "target": 1, "summary": "records say which flags they use"}
    ]


@pytest.mark.parametrize("words", [["log"], ["ingest", "x"], ["gc"], ["verify"], ["reindex"]])
def test_every_other_command_says_what_to_do(run: Run, old: Path, words: list[str]) -> None:
    """An older format is refused with the command that helps, and nothing is written."""
    before = snapshot(old)

    outcome = run(*words, "--store", old)

    assert outcome.code == 16
    assert outcome.err.splitlines() == [
        f"error: {old}/store.json is a store of format 0; this layerstore reads format 1; nothing was changed",
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

    assert planned[0] == f"would take {old} from format 0 to 1: records say which flags they use"
    assert planned[1].startswith("  3 files to write, ")
    assert planned[1].endswith("; store.json, records/, tags/ would be kept in backups/")
    assert planned[2:] == ["nothing was changed"]
    assert unchanged == before
    assert done == [
        "format 0 to 1: 3 files written",
        f"  what they replace is in {old}/backups/format-0.1",
        f"{old} is of format 1 now",
        f"check it with layerstore --store {old} verify; remove the backup once you are sure",
    ]
    assert again.startswith("nothing to do: ")
    assert run("verify", "--read-data", "--store", old).code == 0
    assert [commit["step"] for commit in run("log", "--json", "--store", old).fields["commits"]] == [4, 2]


def test_programs_get_the_same_fields(run: Run, old: Path) -> None:
    """The plan and the deed name formats and steps alike."""
    planned = run("migrate", "--dry-run", "--json", "--store", old).fields
    done = run("migrate", "--json", "--store", old).fields
    nothing = run("migrate", "--json", "--store", old).fields

    assert list(planned) == ["schema", "path", "found", "format", "dry_run", "unfinished", "steps"]
    assert list(done) == ["schema", "path", "found", "format", "dry_run", "steps"]
    assert (planned["found"], planned["format"], planned["dry_run"]) == (0, 1, True)
    assert list(planned["steps"][0]) == ["source", "target", "summary", "files", "bytes"]
    assert list(done["steps"][0]) == ["source", "target", "summary", "files", "came_meanwhile", "backup"]
    assert (nothing["found"], nothing["format"], nothing["steps"]) == (1, 1, [])


def test_an_index_of_another_format_is_void(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it remembers bears other names by now: it is made anew, and nothing is said to have vanished."""
    shutil.rmtree(store / "manifest")
    with monkeypatch.context() as older:
        older.setattr("layerstore.storage.manifest.FORMAT", 0)
        run("log", "--store", store)
    next((store / "commits" / "sft").glob("4.*")).unlink()

    outcome = run("log", "--json", "--store", store)

    assert outcome.code == 0
    assert [commit["step"] for commit in outcome.fields["commits"]] == [2]
    assert "the index" in outcome.err
    assert "vanished" not in outcome.out + outcome.err
