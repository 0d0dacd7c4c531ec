"""A checkpoint of many files costs time, and never more descriptors than a process has."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from layerstore.store import Store, init
from tests.faults.harness import in_child, snapshot, tiny_checkpoint

pytestmark = pytest.mark.full

DESCRIPTORS = 128


@pytest.mark.fault(25)
@pytest.mark.known_fault("llmtailor 17")
def test_a_checkpoint_of_more_files_than_descriptors_is_composed(fast_path: Path) -> None:
    """Files that wait for their fsync are bounded, however many there are."""
    source = tiny_checkpoint(fast_path / "checkpoint-2", layout="hf")
    for number in range(300):
        (source / f"extra_{number}.txt").write_text(f"{number}")
    with init(fast_path / "store") as store:
        store.ingest(source, run="run")

    in_child(_compose_with_few_descriptors, fast_path / "store", fast_path / "out").needed()

    expected, found = snapshot(source), snapshot(fast_path / "out")
    assert sorted([*expected, "layerstore.json"]) == sorted(found)
    assert [expected[f"extra_{number}.txt"] for number in range(300)] == [
        found[f"extra_{number}.txt"] for number in range(300)
    ]


@pytest.mark.fault(25)
def test_a_checkpoint_of_more_files_than_descriptors_is_ingested(fast_path: Path) -> None:
    """Sources are closed as soon as they are read."""
    source = tiny_checkpoint(fast_path / "checkpoint-2", layout="hf")
    for number in range(300):
        (source / f"extra_{number}.txt").write_text(f"{number}" * 10_000)
    init(fast_path / "store").close()

    in_child(_ingest_with_few_descriptors, fast_path / "store", source).needed()

    with Store(fast_path / "store") as store:
        assert store.verify(read_data=True).ok


def _limit_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


def _compose_with_few_descriptors(store: Path, out: Path) -> None:
    _limit_descriptors()
    with Store(store) as opened:
        opened.compose("run@2").write(out)


def _ingest_with_few_descriptors(store: Path, source: Path) -> None:
    _limit_descriptors()
    with Store(store) as opened:
        opened.ingest(source, run="run")
