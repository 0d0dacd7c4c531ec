"""
Three tiers of tests: ``pytest`` for a slow laptop, ``pytest -m full`` for the rest, and ``pytest -m exhaustive``.

The usual run has one real training, saved, composed and resumed, and a sample of everything else. What takes longer is
marked ``full``: by itself, or here, where whole files do.
"""

import resource
from functools import cache
from pathlib import Path

import pytest

# Below tests/: files and folders whose tests are full.
FULL = (
    "bisect/test_bisect.py",
    "cli/test_process.py",
    "cli/test_serve.py",
    "cli/test_startup.py",
    "compose/test_delta.py",
    "compose/test_llmtailor_faults.py",
    "deepspeed",
    "demo/test_demo.py",
    "faults/test_at_once.py",
    "faults/test_repair.py",
    "gc/test_drop.py",
    "gc/test_interleavings.py",
    "hf/test_meta_model.py",
    "hf/test_saved_names.py",
    "ingest/test_selective.py",
    "inspect/test_browser.py",
    "inspect/test_estimate.py",
    "inspect/test_precision.py",
    "inspect/test_served.py",
    "live/dcp/test_meshes.py",
    "live/deepspeed/test_engines.py",
    "live/module/test_every_mesh.py",
    "live/module/test_kills.py",
    "live/module/test_two_jobs.py",
    "live/ranks/test_attempt.py",
    "live/saver/test_collector.py",
    "live/test_adapters.py",
    "live/test_asynchronous.py",
    "live/test_bucket.py",
    "live/test_eight_bit.py",
    "live/test_examples.py",
    "live/test_families.py",
    "live/test_hosts.py",
    "live/test_hugging_face.py",
    "live/test_live_alone.py",
    "live/test_live_disks.py",
    "live/test_live_faults.py",
    "live/test_loads.py",
    "live/test_matrix.py",
    "live/test_nodes.py",
    "live/test_parallel.py",
    "live/test_resume.py",
    "precision/test_again.py",
    "precision/test_keeping.py",
    "ranks",
    "remote/test_fetch.py",
    "remote/test_folder.py",
    "remote/test_lost.py",
    "remote/test_partial.py",
    "remote/test_trust.py",
    "shares/test_verbs.py",
    "unit/test_fault_cases.py",
    "unit/test_one_file.py",
    "unit/test_packaging.py",
    "unit/test_quality.py",
    "unit/test_sampling.py",
)

_FULL = {Path(__file__).parent / part for part in FULL}


def pytest_configure(config: pytest.Config) -> None:
    """Let ``-m full`` leave out what is exhaustive: a file's mark is on all of its tests."""
    if config.option.markexpr == "full":
        config.option.markexpr = "full and not exhaustive"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is full as a whole, before pytest deselects by marks."""
    for item in items:
        if _is_full(item.path):
            item.add_marker("full")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what the usual run leaves out as a whole, unless it is named: every process would."""
    if "not full" not in config.option.markexpr or not _is_full(collection_path):
        return None
    named = (Path(argument.partition("::")[0]).absolute() for argument in config.args)
    return None if any(_is_full(path) for path in named) else True


@cache
def _is_full(path: Path) -> bool:
    return not _FULL.isdisjoint((path, *path.parents))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Say what the run took of a processor, whatever else the machine did: its own processes, and all of theirs."""
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        used = (resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        print(f"processor time: {sum(each.ru_utime + each.ru_stime for each in used):.0f} s")
