"""Benchmarks that train: how their ranks are started, what each of them does first and last, and what they bring."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.ranks.launch import run_ranks

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


RANKS = 2
_ROOT = Path(__file__).parents[2]


def result_of(module: str, folder: Path, *, ranks: int = RANKS, **options: object) -> dict[str, Any]:
    """Run *module* on all *ranks* with *options*, and its data in *folder*; return what the first rank writes down."""
    (folder / "data").mkdir(parents=True)
    arguments = ["--out", str(folder / "result.json"), "--data", str(folder / "data")]
    for name, value in options.items():
        arguments += [f"--{name}", str(value)]
    run_ranks(module, arguments, count=ranks, folder=_ROOT, log=folder / "log", hear=lambda _: None)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def asked(**kinds: type) -> argparse.Namespace:
    """Return what `result_of` has asked a rank for: its two folders, and options of these *kinds*."""
    parser = argparse.ArgumentParser()
    for name, kind in {"out": Path, "data": Path, **kinds}.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    return parser.parse_args()


def begin() -> None:
    """Join the other ranks."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")


def end(result: "DataclassInstance", out: Path) -> None:
    """Let the first rank write *result* to *out*, and leave."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        out.write_text(json.dumps(asdict(result)))
    leave()


def leave() -> None:
    """End this process, once all ranks have come so far."""
    import torch.distributed as dist

    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # taking down threads of torch and gloo now and then aborts the process
