"""The benchmark on one GPU: how large its model is, what its rows say, and a tiny run on the CPU."""

from pathlib import Path

import pytest

from tests.bench import gpu
from tests.bench.gpu import PARAMETERS_MAX, PARAMETERS_MIN, SYSTEMS, fitting
from tests.bench.rows import Row, Rows
from tests.deepspeed.launch import train

GB = 10**9
PARAMETERS = 1_200_000_000


def job(system: str, *, seconds: float, size: float) -> Row:
    """Return the row of a job of two saves beside 20 s of training."""
    return {
        "kind": "job",
        "system": system,
        "parameters": PARAMETERS,
        "bare": 20.0,
        "steps": 60,
        "first": 12.0,
        "first_bytes": 12 * PARAMETERS,
        "seconds": seconds,
        "blocked": [0.010, 0.014],
        "beside": 0.5,
        "durable": [3.0, 5.0],
        "bytes": int(size * PARAMETERS),
        "device_bytes": 10**8,
    }


@pytest.mark.parametrize(
    ("device", "host", "disk", "speed", "expected"),
    [
        (80 * GB, 10_000 * GB, 10_000 * GB, 100 * GB, PARAMETERS_MAX),
        (66 * GB, 10_000 * GB, 10_000 * GB, 100 * GB, 2_500_000_000),
        (80 * GB, 72 * GB, 10_000 * GB, 100 * GB, 2_000_000_000),
        (80 * GB, 10_000 * GB, 60 * GB, 100 * GB, 1_500_000_000),
        (80 * GB, 10_000 * GB, 10_000 * GB, GB, 1_200_000_000),
        (24 * GB, 10 * GB, 10 * GB, GB // 10, PARAMETERS_MIN),
    ],
)
def test_the_model_is_as_large_as_memory_disk_and_time_allow(
    device: int, host: int, disk: int, speed: int, expected: int
) -> None:
    """Between one and three billion parameters: whichever is scarcest decides."""
    assert fitting(device=device, host=host, disk=disk, disk_bytes_per_second=speed) == expected


@pytest.mark.parametrize("wanted", [PARAMETERS_MIN, PARAMETERS, PARAMETERS_MAX])
def test_the_model_has_about_as_many_parameters_as_wanted(wanted: int) -> None:
    """Whole blocks, so to within half of one."""
    assert sum(each.elements for each in gpu.shape_of(wanted).parameters()) == pytest.approx(wanted, rel=0.03)


def test_rows_become_a_table_with_bars(tmp_path: Path) -> None:
    """A system that could not run has its reason; once it has run, it has not."""
    rows = Rows(tmp_path / "rows.jsonl")
    absent = {"kind": "absent", "system": "DeepSpeed", "parameters": PARAMETERS, "reason": "no"}
    rows.add(absent, absent | {"system": "DCP, async"})
    rows.add(job("DeepSpeed", seconds=36.0, size=12.0), job("layerstore, delta8", seconds=21.0, size=3.06))

    printed = "\n".join(gpu.lines(rows, PARAMETERS))

    assert "not run: DCP, async: no" in printed
    assert "not run: DeepSpeed: no" not in printed
    assert "layerstore, delta8: job / none: 1.05 x, at most 1.1 x: holds" in printed
    [line] = [line.split() for line in printed.splitlines() if line.startswith("  DeepSpeed ")]
    assert line[-7:] == ["1.800", "4.00", "s", "12.00", "12.00", "100", "MB"]


@pytest.mark.exhaustive
def test_a_tiny_run_on_the_cpu_goes_on_where_it_was(tmp_path: Path) -> None:
    """Every system has its row: a job, or why there is none; a second run does only what is missing."""
    rows, arguments = Rows(tmp_path / "rows.jsonl"), ["gpu", "--tiny", "--dir", str(tmp_path)]
    arguments += ["--rows", str(rows.path)]
    train("tests.bench.__main__", arguments, log=tmp_path / "first.log", world_size=1)

    found = {row["system"]: row for row in rows.find(kind="job")}
    assert {kind.name for kind in SYSTEMS} == {*found, *(row["system"] for row in rows.find(kind="absent"))}
    assert {"layerstore, exact", "layerstore, delta8", "layerstore, delta4", "DeepSpeed", "DCP, async"} <= {*found}
    assert found["layerstore, delta4"]["bytes"] < found["layerstore, delta8"]["bytes"] < found["DeepSpeed"]["bytes"] / 3
    assert found["layerstore, exact"]["bytes"] == pytest.approx(found["DeepSpeed"]["bytes"], rel=0.1)
    assert all(len(row["blocked"]) == len(row["durable"]) == gpu.SAVES for row in found.values())
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "nothing is left"
