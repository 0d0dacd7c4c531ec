"""The benchmark of other tools: what its rows say, the page, the recipe for LLMTailor, and one tiny run of it all."""

import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.bench.measure import FamilyPeak
from tests.bench.peers import run as peers
from tests.bench.peers.compose import TO_UNIVERSAL, parity_recipe
from tests.bench.peers.page import BEGIN, section
from tests.bench.peers.plots import draw
from tests.bench.peers.systems import IMPOSSIBLE, SYSTEMS
from tests.bench.peers.table import BASE, OURS, Findings, lines, losses, tables
from tests.bench.report import END, filled
from tests.bench.rows import Row, Rows
from tests.bench.shapes import ModelShape, group_parameters
from tests.policy.recipes import llama, plan, steps

MACHINE: Row = {
    "kind": "machine",
    "cores": 2,
    "memory": 2**34,
    "platform": "Linux",
    "python": "3.11",
    "filesystem": "ext4",
    "versions": {"torch": "2.13.0", "moonclip": None},
    "saves": 2,
    "rounds": 2,
}
STATE: Row = {"kind": "state", "bytes": 10**9, "parameters": 83_000_000, "ranks": 2}


def saves(system: str, *, blocked: list[float], durable: float, size: int) -> list[Row]:
    """Return the rows of one system's saves: one in the first round, the others in the second."""
    return [
        {
            "kind": "save",
            "system": system,
            "round": min(number, 1),
            "blocked": each,
            "durable": durable,
            "bytes": size * max(number, 1),
        }
        for number, each in enumerate(blocked)
    ]


def load(system: str, *, ranks: int, seconds: float) -> Row:
    """Return the row of a load."""
    return {"kind": "load", "system": system, "ranks": ranks, "seconds": seconds, "is_same": True}


ROWS: list[Row] = [
    MACHINE,
    *saves(OURS, blocked=[9.0], durable=9.0, size=9),  # an earlier run
    MACHINE,
    STATE,
    *saves(BASE, blocked=[3.0, 1.0, 2.0], durable=4.0, size=10**9),
    *saves(OURS, blocked=[0.04, 0.05, 0.03], durable=6.0, size=10**9),
    *({"kind": "memory", "system": name, "round": 0, "bytes": 10**8} for name in (BASE, OURS)),
    load(BASE, ranks=2, seconds=0.5),
    load(BASE, ranks=1, seconds=1.0),
    load(OURS, ranks=2, seconds=1.0),
    load(OURS, ranks=1, seconds=2.0),
    {"kind": "flip", "system": BASE, "outcome": "loaded"},
    {"kind": "flip", "system": OURS, "outcome": "noticed", "says": "IntegrityError"},
    *(
        {"kind": "compose", "tool": tool, "round": 0, "seconds": seconds, "memory": 10**7, "bytes": 10**9}
        for tool, seconds in (("cp -r", 1.0), (TO_UNIVERSAL, 20.0), ("layerstore compose", 1.5))
    ),
    {"kind": "absent", "system": "moonclip, async, lossless", "reason": "not installed: pip install moonclip"},
]


def test_the_newest_run_counts_with_medians_of_all_rounds() -> None:
    """What an earlier run left in the file does not; bytes are those of the longest round."""
    found = Findings(ROWS)

    assert found.systems() == [BASE, OURS]
    assert (found.blocked(OURS), found.durable(OURS)) == (0.04, 6.0)
    assert (found.blocked(BASE), found.sizes(BASE)) == (2.0, [10**9, 2 * 10**9])


def test_ratios_are_to_deepspeed_and_to_a_copy() -> None:
    """The first table has those of time and bytes, the last one those of composing."""
    saving, resuming, composing = tables(Findings(ROWS))

    assert saving.lines[1] == (*(OURS, "40 ms", "0.020", "6.00 s", "1.50", "100 MB", "1,000 MB", "2,000 MB", "1.00"),)
    assert resuming.lines[1] == (OURS, "1.00 s", "2.00", "yes", "2.00 s", "yes", "noticed")
    assert [line[:3] for line in composing.lines][1:] == [
        (TO_UNIVERSAL, "20.00 s", "20.00"),
        ("layerstore compose", "1.50 s", "1.50"),
    ]


def test_deepspeeds_resume_on_other_ranks_includes_the_conversion() -> None:
    """It cannot do without; layerstore needs none."""
    found = Findings(ROWS)

    assert (found.resume_elsewhere(BASE), found.resume_elsewhere(OURS)) == (21.0, 2.0)


def test_where_another_is_better_the_report_says_so() -> None:
    """For each measure, with the ratio; equal bytes are no loss."""
    told = list(losses(Findings(ROWS)))

    assert f"seconds until durable: {OURS} 6.00 s; better: {BASE} 4.00 s (0.67 ×)" in told
    assert f"seconds blocked: {OURS} 40 ms; nothing is better" in told
    assert f"bytes after one save: {OURS} 1,000 MB; nothing is better" in told
    assert "composing, seconds: layerstore compose 1.50 s; better: cp -r 1.00 s (0.67 ×)" in told
    assert "not run: moonclip, async, lossless (not installed: pip install moonclip)" in lines(Findings(ROWS))


def test_a_system_that_cannot_load_has_its_line() -> None:
    """It is one of the things that a reader wants to know."""
    rows = [row for row in ROWS if row["kind"] != "load" or row["system"] != BASE]
    rows.append({"kind": "load", "system": BASE, "ranks": 2, "problem": "RuntimeError: no"})

    [_, resuming, _] = tables(Findings(rows))

    assert resuming.lines[0] == (BASE, "fails", "", "", "-", "", "loaded")


def test_the_page_is_filled_between_its_marks_again_and_again() -> None:
    """What is around them stays."""
    once = filled(f"# Title\n\n{BEGIN}\n{END}\n\nThe end.\n", section(Findings(ROWS)), begin=BEGIN)

    assert once.startswith("# Title\n\n")
    assert once.endswith("\n\nThe end.\n")
    assert f"| {OURS} | 40 ms | 0.020 |" in once
    assert once == filled(once, section(Findings(ROWS)), begin=BEGIN)


def test_the_page_has_its_marks() -> None:
    """Else nothing could be written into it."""
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()

    assert f"| {OURS} |" in filled(page, section(Findings(ROWS)), begin=BEGIN)


def test_plots_are_whole_pictures(tmp_path: Path) -> None:
    """Each says in words what it shows."""
    draw(Findings(ROWS), tmp_path)

    pictures = sorted(tmp_path.glob("*.svg"))
    assert [picture.stem for picture in pictures] == ["peers-bytes", "peers-saving"]
    for picture in pictures:
        description = ElementTree.fromstring(picture.read_text()).findtext("{*}desc") or ""
        assert OURS in description
        assert len(description) > 100


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
