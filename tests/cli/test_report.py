"""``layerstore report`` writes a page, and tells programs the same facts."""

import json
import re
from pathlib import Path

from layerstore.inspect.page import BEGINS
from tests.cli.conftest import Run


def test_a_page_is_written_and_said_in_one_line(run: Run, store: Path, tmp_path: Path) -> None:
    """Where it is, and what it is about; a second time it is replaced."""
    for _ in range(2):
        outcome = run("report", "-o", "report.html", "--store", store)

        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out == "wrote report.html: 2 commits of 1 run\n"
    assert (tmp_path / "report.html").read_bytes().startswith(BEGINS)


def test_with_rules_one_line_says_what_they_would_do(run: Run, store: Path) -> None:
    """What would go and stay, as gc's own plan has it; nothing is removed."""
    before = run("log", "--json", "--store", store).fields["commits"]
    plan = run("gc", "--keep-last", "1", "--dry-run", "--json", "--store", store).fields

    words = ("report", "-o", "report.html", "--keep-last", "1", "--store", store)
    pinned, quiet = run(*words), run(*words, "--quiet")
    run("pin", "--delete", "best", "--store", store)
    for path in store.glob("objects/*/*"):
        path.touch()  # it was copied with its time, and may be older than the grace by now
    free = run(*words)
    for path in store.glob("objects/*/*"):
        path.unlink()
    hurt = run(*words)

    assert (plan["commits_removed"], len(plan["kept"])) == (0, 2)  # one is pinned
    assert pinned.out.splitlines()[1:] == [
        "gc --keep-last 1 would remove no commit and free nothing; 2 commits would stay"
    ]
    assert quiet.out == ""
    assert re.fullmatch(
        "gc --keep-last 1 would remove 1 commit and free nothing at once, and [0-9.]+ kB later, too young now; "
        "1 commit would stay",
        free.out.splitlines()[1],
    )
    assert hurt.code == 0
    assert hurt.out.splitlines()[1].startswith("gc --keep-last 1 would refuse: ")
    assert run("log", "--json", "--store", store).fields["commits"][-1]["commit"] == before[-1]["commit"]


def test_programs_are_told_what_the_page_shows(run: Run, store: Path, tmp_path: Path) -> None:
    """Without a file no page is written; with one both have the same facts."""
    alone = run("report", "--json", "--store", store).fields
    both = run("report", "-o", "report.html", "--json", "--store", store, "--keep-last", "1").fields
    text = (tmp_path / "report.html").read_text().partition('id="facts">')[2].partition("</script>")[0]
    shown = json.loads(text)

    assert (alone["schema"], alone["out"], both["out"]) == (1, None, "report.html")
    assert both["retention"]["rules"] == "--keep-last 1"
    assert {name: value for name, value in both.items() if name in shown} == shown
    assert [run_["saves"]["reference"] for run_ in alone["runs"]] == [["sft@2", "sft@4"]]
    assert alone["runs"][0]["saves"]["pins"] == [["best"], []]
    counted = run("stats", "--json", "--store", store).fields
    assert {name: counted[name] for name in alone["stats"] if name in counted} == {
        name: value for name, value in alone["stats"].items() if name in counted
    }
    log = run("log", "--json", "--store", store).fields["commits"]
    assert [each["commit"] for each in reversed(log)] == alone["runs"][0]["saves"]["commit"]


def test_a_report_without_a_file_is_refused(run: Run, store: Path) -> None:
    """With --json it would need none."""
    outcome = run("report", "--store", store)

    assert outcome.code == 2
    assert outcome.err == (f"error: a report needs a file\nhint: layerstore --store {store} report -o report.html\n")


def test_what_is_damaged_is_a_warning(run: Run, store: Path) -> None:
    """The page is written without it, and the exit code is 0."""
    record = next(path for path in (store / "commits" / "sft").iterdir() if path.name.startswith("2."))
    record.write_bytes(b"x")

    outcome = run("report", "-o", "report.html", "--store", store)

    assert outcome.code == 0
    assert "warning: left out: sft@2: " in outcome.err
    assert outcome.out.startswith("wrote report.html: 1 commit of 1 run")
