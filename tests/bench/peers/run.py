"""The whole comparison: saves and loads on two ranks, then what composes checkpoints, then loads on one rank."""

import os
import platform
import shutil
import tempfile
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from layerstore.disk.files import mount_of
from tests.bench.peers.compose import compose_all
from tests.bench.peers.page import write
from tests.bench.peers.plots import draw
from tests.bench.peers.table import Findings, lines
from tests.bench.ranked import RANKS
from tests.bench.rows import Rows
from tests.ranks.launch import run_ranks

OTHER_RANKS = 1
COMMITTED = Path(__file__).with_name("rows.jsonl")
"""The rows that docs/benchmarks.md is made of."""

_ROOT = Path(__file__).parents[3]
_PACKAGES = ("layerstore", "torch", "deepspeed", "safetensors", "transformers", "moonclip", "torchsnapshot")


def run(
    folder: Path | None,
    *,
    gb: float,
    saves: int,
    rounds: int,
    is_patient: bool = True,
    rows: Path | None = None,
    plots: Path | None = None,
    llmtailor: Path | None = None,
) -> None:
    """
    Run everything in a new folder below *folder*, append to *rows*, print the table, and draw the *plots*.

    Unless *is_patient*, nothing waits until the machine is quiet: the figures mean nothing then.
    """
    work = Path(tempfile.mkdtemp(prefix="layerstore-peers-", dir=folder)).absolute()
    try:
        found = Rows((rows or work / "rows.jsonl").absolute())
        found.add(_machine(work) | {"gb": gb, "saves": saves, "rounds": rounds})
        stores = work / "stores"
        stores.mkdir()
        launch = partial(_launch, stores, found, work, gb=gb, is_patient=int(is_patient))
        launch(RANKS, saves=saves, rounds=rounds)
        compose_all(
            stores, found, rounds=rounds, gb=gb, is_patient=is_patient, llmtailor=llmtailor and llmtailor.absolute()
        )
        launch(OTHER_RANKS, saves=0, rounds=0)
        show(found.path, plots=plots)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def show(rows: Path, *, plots: Path | None = None) -> None:
    """Print the table of *rows*, and draw the *plots*."""
    found = Findings(Rows(rows).find())
    print("\n".join(["", *lines(found)]), flush=True)
    if plots is not None:
        draw(found, plots)


def write_page(rows: Path | None = None, *, docs: Path = _ROOT / "docs") -> None:
    """Write the table of *rows* into the page benchmarks.md of *docs*, and its plots beside it."""
    write(Findings(Rows(rows or COMMITTED).find()), docs=docs)


def _launch(stores: Path, rows: Rows, work: Path, ranks: int, **options: float) -> None:
    arguments = ["--out", str(rows.path), "--data", str(stores)]
    for name, value in options.items():
        arguments += [f"--{name}", str(value)]
    run_ranks(
        "tests.bench.peers.job",
        arguments,
        count=ranks,
        folder=_ROOT,
        log=work / f"{ranks}-ranks.log",
        hear=lambda event: print(f"  {event['what']}", flush=True),
    )


def _machine(folder: Path) -> dict[str, object]:
    mount = mount_of(folder)
    return {
        "kind": "machine",
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "filesystem": mount.kind if mount else "unknown",
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
