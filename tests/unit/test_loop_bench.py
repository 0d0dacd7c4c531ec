"""The benchmark of a training that saves: what it prints of each step saved, and a tiny run of that."""

from pathlib import Path

import pytest

from tests.bench import loop, ranked
from tests.bench.loop_job import EACH_STEP, KEPT, NONE, VARIANTS, Job, Result, variants
from tests.deepspeed.launch import train

SAVES = KEPT + 1


def result(seconds: dict[str, float]) -> Result:
    """Return what the ranks would find: a job of every variant, of so many seconds."""
    jobs = [
        Job(
            variant=variant.name,
            seconds=seconds.get(variant.name, 10.0),
            blocked=[] if variant is NONE else [0.02] * SAVES,
            durable=[1.0] * SAVES if variant.name.startswith("delta") else [],
            cpu_seconds=20.0,
            written_bytes=0 if variant is NONE else 25_000_000,
        )
        for variant in EACH_STEP
    ]
    sizes = {variant.name: [12_000_000, 3_000_000] for variant in EACH_STEP}
    return Result(state_bytes=12_000_000, parameters=1_000_000, sizes=sizes, jobs=jobs)


def test_each_way_to_save_each_step_has_a_line_and_each_compact_one_a_bar() -> None:
    """A job is compared with the same one without saves."""
    printed = "\n".join(loop.each_step(result({"delta8, disk": 10.9, "delta4, memory": 11.2}), SAVES))

    assert all(f"\n  {variant.name}  " in printed for variant in EACH_STEP)
    assert "delta8, disk: whole job / none: 1.09 x, at most 1.1 x: holds" in printed
    assert "delta4, memory: whole job / none: 1.12 x, at most 1.1 x: MISSED" in printed
    assert "20.0 ms" in printed
    assert "a step takes 2.50 s" in printed


def test_only_a_job_that_saves_each_step_has_compact_saves() -> None:
    """The others are those whose figures are published."""
    assert variants(3) is VARIANTS
    assert {variant.name.partition(",")[0] for variant in variants(1)} == {
        NONE.name,
        "DeepSpeed",
        "exact",
        "delta8",
        "delta4",
    }


@pytest.mark.exhaustive
def test_a_tiny_run_of_each_step_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compact saves write fewer bytes, to disk and to memory, and nothing is left in memory."""

    def forked(module: str, arguments: list[str], *, count: int, log: Path, **_: object) -> None:
        train(module, arguments, log=log, world_size=count)

    monkeypatch.setattr(ranked, "run_ranks", forked)
    monkeypatch.setattr(loop, "MEMORY", str(tmp_path))

    found = loop.run(tmp_path / "work", gb=0.06, rounds=1, saves=SAVES, every=1, is_patient=False)

    written = {job.variant: job.written_bytes for job in found.jobs}
    for place in ("disk", "memory"):
        assert written[f"delta4, {place}"] < written[f"delta8, {place}"] < 0.6 * written[f"exact, {place}"]
        assert written[f"exact, {place}"] == pytest.approx(written[f"DeepSpeed, {place}"], rel=0.05)
    assert all(len(job.blocked) == SAVES and job.cpu_seconds > 0 for job in found.jobs)
    assert [path.name for path in tmp_path.iterdir()] == ["work"]
