"""``layerstore diff`` and ``layerstore stats`` print what the library found, for people and for programs."""

import json
import math
import re
import struct
from pathlib import Path

import pytest

from layerstore.hashing import crc32
from layerstore.tree import Located
from layerstore.zero3.pt import read_pt
from layerstore.zero3.trees import TreeView
from tests.cli.conftest import Run
from tests.cli.test_commands import LAYERS
from tests.generated import generate


def test_diff_lists_layers_and_a_total(run: Run, store: Path) -> None:
    """Who is compared, one line per layer, how many changed; and no failure."""
    outcome = run("diff", "best", "sft", "--store", store)
    lines = outcome.out.splitlines()

    assert outcome.code == 0
    assert lines[0].startswith("a  sft@2 (commit ")
    assert "pin best" in lines[0]
    assert lines[1].startswith("b  sft@4 (commit ")
    assert lines[3].split() == ["LAYER", "MASTER", "OPTIMIZER", "CHANGED"]
    assert [[name, "changed", "changed"] for name in LAYERS] == [line.split()[:3] for line in lines[4:9]]
    assert lines[10].startswith("5 layers: 0 same, 5 changed; 0 B same, ")


def test_diff_stat_adds_distance_and_angle(run: Run, store: Path) -> None:
    """Two more columns, with numbers in them; equal commits are at 0 and 1."""
    lines = run("diff", "sft@2", "sft@4", "--stat", "--store", store).out.splitlines()
    same = run("diff", "sft@2", "sft@2", "--stat", "--store", store, "--json").fields

    assert lines[3].split()[-3:] == ["REL", "L2", "COSINE"]
    assert all(float(line.split()[-2]) > 0 and -1 <= float(line.split()[-1]) <= 1 for line in lines[4:9])
    assert all(re.search(r" (\d\.\d{6}|\d\.\d\de-\d\d) +(-|-?\d\.\d{6})$", line) for line in lines[4:9])
    assert [(layer["relative_l2"], layer["cosine"], layer["nonfinite_a"]) for layer in same["layers"]] == [
        (0.0, 1.0, None)
    ] * 5


def test_diff_of_other_world_sizes_points_at_stat(run: Run, store: Path, tmp_path: Path) -> None:
    """Ids of re-sliced layers tell nothing, which is said with the option that does."""
    generate(tmp_path / "three", hidden=16, vocab=32, world_size=3)
    run("ingest", tmp_path / "three", "--store", store)

    outcome = run("diff", "sft@2", "three", "--store", store)

    assert "re-sliced" in outcome.out
    assert (
        outcome.out.splitlines()[-1]
        == "re-sliced: 2 ranks of stage 3 in a, 3 ranks of stage 3 in b; --stat compares the numbers"
    )


def test_diff_warns_of_numbers_that_are_none(run: Run, store: Path, tmp_path: Path) -> None:
    """A NaN in a master is a warning with its layer, and null in JSON, which has no word for it."""
    source = generate(tmp_path / "sft", hidden=16, vocab=32, step=6)
    _spoil(source / "global_step6")
    run("ingest", source, "--store", store)

    people = run("diff", "sft@2", "sft@6", "--stat", "--store", store)
    programs = run("diff", "sft@2", "sft@6", "--stat", "--store", store, "--json")

    spoilt = [layer for layer in programs.fields["layers"] if layer["nonfinite_b"]]
    assert people.code == 0
    assert [(layer["nonfinite_a"], layer["nonfinite_b"], layer["relative_l2"]) for layer in spoilt] == [(0, 1, None)]
    assert f"warning: {spoilt[0]['layer']} of sft@6 has NaN or infinity in 1 number" in people.err
    assert "NaN" not in json.dumps(programs.fields)


def test_diff_of_a_layer_lists_its_parameters(run: Run, store: Path) -> None:
    """Names inside the layer, a column for each state, a total, the largest first if asked, and the same in JSON."""
    words = ("diff", "sft@2", "sft@4", "model.layers.0", "--sort", "exp_avg", "--store", store)
    outcome, fields = run(*words), run(*words, "--json").fields
    lines = outcome.out.splitlines()

    assert outcome.code == 0
    assert lines[0].startswith("a  sft@2 (commit ")
    assert lines[3].split() == ["PARAMETER", "ELEMENTS", "MASTER", "EXP_AVG", "EXP_AVG_SQ", "COSINE"]
    rows = [line.split() for line in lines[4:13]]
    assert [row[0] for row in rows] == [
        each["parameter"].removeprefix("model.layers.0.") for each in fields["parameters"]
    ]
    assert [float(row[3]) for row in rows] == sorted((float(row[3]) for row in rows), reverse=True)
    assert lines[13].split()[0] == "total"
    assert float(lines[13].split()[2]) == pytest.approx(fields["totals"]["master"]["relative_l2"], abs=1e-6)
    assert re.fullmatch(r"model\.layers\.0: master changed, optimizer changed; .+ only in b", lines[15])


def test_diff_of_a_layer_says_what_is_identical(run: Run, store: Path, tmp_path: Path) -> None:
    """One version in both is said to be that; a parameter of another shape is a warning."""
    generate(tmp_path / "wide", hidden=32, vocab=32, frozen=("model.norm",))
    run("ingest", tmp_path / "wide", "--store", store)

    same = run("diff", "sft@2", "best", "model.norm", "--store", store).out.splitlines()
    other = run("diff", "sft@2", "wide", "model.norm", "--store", store)

    assert same[4].split() == ["weight", "16", "identical", "identical", "identical", "1.000000"]
    assert same[-1] == "model.norm: same, one version in both; nothing was read"
    assert "only in a" in other.out
    assert other.err == "warning: model.norm.weight is not comparable: shape [16] in a, [32] in b\n"


def test_diff_of_a_layer_warns_of_numbers_that_are_none(run: Run, store: Path, tmp_path: Path) -> None:
    """With the parameter, and where: a NaN sorts before every number."""
    source = generate(tmp_path / "sft", hidden=16, vocab=32, step=6)
    _spoil(source / "global_step6")
    run("ingest", source, "--store", store)

    layer = LAYERS[0]
    outcome = run("diff", "sft@2", "sft@6", layer, "--store", store, "--sort", "master")

    assert f"warning: master of {layer}.weight in sft@6 has NaN or infinity in 1 number" in outcome.err
    assert outcome.out.splitlines()[4].split()[2] == "nan"


def _spoil(tag: Path) -> None:
    """Make the first master of rank 0 a NaN, in a way that its archive agrees with."""
    path = tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    tree = TreeView(read_pt(path).tree, path=path)
    masters = tree["optimizer_state_dict"]["fp32_flat_groups"][0].tensor().storage.content
    assert isinstance(masters, Located)
    data = bytearray(path.read_bytes())
    data[masters.offset_bytes : masters.offset_bytes + 4] = struct.pack("<f", math.nan)
    payload = data[masters.offset_bytes : masters.offset_bytes + masters.size_bytes]
    before, after = (struct.pack("<I", checksum) for checksum in (masters.crc32, crc32(payload)))
    assert data.count(before) == 2, "in the directory, and beside the payload"
    path.write_bytes(data.replace(before, after))


def test_a_pin_and_an_object_that_nobody_needs_are_counted_in_words(run: Run, store: Path) -> None:
    """A mixture takes what its commits have, and a stranger's bytes are on the disk."""
    run("compose", "sft@4", "--policy", "parity", "--pin", "mix", "--store", store)
    before = run("stats", "--store", store).out.splitlines()
    (store / "objects" / "ab").mkdir(exist_ok=True)
    (store / "objects" / "ab" / ("ab" + "0" * 30)).write_bytes(b"orphan")

    after = run("stats", "--store", store).out.splitlines()

    assert before[0] == "commits   2 in 1 run; also 1 pin of mixtures or hidden commits"
    assert re.fullmatch(r"unique    .+ with each object counted once: \d+\.\d% less", before[2])
    assert before[4] == "unneeded  nothing: every object belongs to a visible commit or a pin"
    assert re.fullmatch(r"unneeded  .+ on disk, in 1 object that no visible commit and no pin needs", after[4])


def test_stats_adds_up(run: Run, store: Path) -> None:
    """A summary, then runs, kinds and layers."""
    outcome = run("stats", "--store", store)
    lines = outcome.out.splitlines()

    assert outcome.code == 0
    assert [line.split()[0] for line in lines[:5]] == ["commits", "logical", "unique", "physical", "unneeded"]
    heads = [line.split() for line in lines if line.split()[:1] in (["RUN"], ["KIND"], ["LAYER"])]
    assert heads == [
        ["RUN", "COMMITS", "LOGICAL", "UNIQUE", "OWN"],
        ["KIND", "OBJECTS", "LOGICAL", "UNIQUE"],
        ["LAYER", "VERSIONS", "LOGICAL", "UNIQUE"],
    ]
    assert [line.split()[0] for line in lines[-5:]] == LAYERS


@pytest.mark.parametrize("damage", ["object", "version"])
def test_stats_counts_what_is_left(run: Run, store: Path, damage: str) -> None:
    """Damage is a warning, not a failure: verify is what judges."""
    layer = run("ls", "sft", "--store", store, "--json").fields["layers"][0]
    path = store / "objects" / layer["version"][:2] / layer["version"]
    if damage == "object":
        path = max(
            (path for path in (store / "objects").rglob("*") if path.is_file()), key=lambda at: at.stat().st_size
        )
    path.unlink()

    outcome = run("stats", "--store", store)

    assert outcome.code == 0
    assert "warning: " in outcome.err
    assert "missing" in outcome.err
