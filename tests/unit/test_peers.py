"""The benchmark of other tools: what its rows say, the page, the recipe for LLMTailor, and one tiny run of it all."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.measure import FamilyPeak
from tests.bench.peers import run as peers
from tests.bench.peers.compose import parity_recipe
from tests.bench.peers.page import BEGIN
from tests.bench.peers.systems import IMPOSSIBLE, SYSTEMS
from tests.bench.peers.table import BASE, Findings, lines, tables
from tests.bench.report import filled
from tests.bench.rows import Rows
from tests.bench.shapes import ModelShape, group_parameters
from tests.policy.recipes import llama, plan, steps

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_and_its_pictures_are_those_of_the_committed_rows(tmp_path: Path) -> None:
    """Nobody has changed one without the others, by hand or by changing what writes them."""
    page = (DOCS / "benchmarks.md").read_text()
    (tmp_path / "benchmarks.md").write_text(filled(page, ["an older table"], begin=BEGIN))

    peers.write_page(docs=tmp_path)

    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")}
    assert len(written) == 3
    assert {name for name in written if (DOCS / name).read_bytes() != (tmp_path / name).read_bytes()} == set()


def test_rows_of_an_earlier_run_do_not_count() -> None:
    """A file of rows grows with every run, and the report is of the last."""
    rows = Rows(peers.COMMITTED).find()
    earlier = [{**row, "blocked": 2 * row["blocked"]} for row in rows if row["kind"] == "save"]

    report = list(lines(Findings(rows)))

    assert report == list(lines(Findings([rows[0], *earlier, *rows])))
    assert report != list(lines(Findings([*rows, *earlier])))


def test_a_system_that_cannot_load_has_its_line() -> None:
    """It is one of the things that a reader wants to know."""
    rows = [row for row in Rows(peers.COMMITTED).find() if row["kind"] != "load" or row["system"] != BASE]
    rows.append({"kind": "load", "system": BASE, "ranks": 2, "problem": "RuntimeError: no"})

    [_, resuming, _] = tables(Findings(rows))

    assert resuming.lines[0][:6] == (BASE, "fails", "", "", "-", "")


def test_groups_for_llmtailor_are_in_its_order() -> None:
    """It finds layers by the numbers of groups: norm, norms of the blocks, head, embedding, matrices of the blocks."""
    shape = ModelShape(layers=3, hidden=8, intermediate=24, vocab=16)
    groups = group_parameters(shape.parameters(), grouping="llmtailor", sub_group_size=10**9, world_size=2)
    names = [group.sub_groups[0][0].name for group in groups]

    assert names[0] == "model.norm.weight"
    assert names[4:6] == ["lm_head.weight", "model.embed_tokens.weight"]
    assert [name.split(".")[2] for name in names[1:4] + names[6:]] == ["0", "1", "2"] * 2


def test_the_recipe_for_llmtailor_mixes_by_parity() -> None:
    """Our own reader of its grammar understands it."""
    recipe = parity_recipe(Path("run/checkpoint-1"), Path("run/checkpoint-2"), layers=3)

    assert steps(plan(recipe, llama(3))) == {
        "model.embed_tokens": 1,
        "model.layers.0": 2,
        "model.layers.1": 1,
        "model.layers.2": 2,
        "model.norm": 2,
        "lm_head": 2,
    }


def test_memory_of_children_counts() -> None:
    """Once they run a program of their own."""
    command = [sys.executable, "-c", "block = bytearray(100_000_000); print(flush=True); input()"]
    with FamilyPeak() as peak:
        before = peak.size_bytes
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            child.stdout.readline()
            deadline = time.monotonic() + 30
            while peak.size_bytes - before < 100_000_000 and time.monotonic() < deadline:
                time.sleep(0.01)
            child.communicate("\n")

    assert peak.size_bytes - before >= 100_000_000


@pytest.mark.exhaustive
def test_a_tiny_run_of_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every system that is installed resumes bit for bit, also on other ranks; layerstore notices a flipped bit."""
    rows = tmp_path / "rows.jsonl"

    peers.run(tmp_path, gb=0.02, saves=2, rounds=1, is_patient=False, rows=rows, plots=tmp_path / "plots")

    found = Findings(Rows(rows).find())
    missing = {kind.name for kind in SYSTEMS if kind.missing()}
    assert {row["system"] for row in found.all("absent")} == {*IMPOSSIBLE, *missing, "LLMTailor, merge"}
    assert {kind.name for kind in SYSTEMS} - missing == set(found.systems())
    assert all(row.get("is_same") for row in found.all("load")), found.all("load")
    assert {row["system"] for row in found.all("load") if row["ranks"] == peers.OTHER_RANKS} == {
        kind.name for kind in SYSTEMS if kind.is_for_any_world
    }
    assert {found.flip(name) for name in found.systems() if name.startswith("layerstore")} == {"noticed"}
    assert "layerstore compose, parity" in found.tools()
    assert "layerstore, full" in capsys.readouterr().out
