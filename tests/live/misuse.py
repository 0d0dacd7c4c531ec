"""What training programs do wrong, and what disks do to them; used by the launched programs."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from layerstore.errors import StorageIO
from layerstore.live.saver.results import Saved
from layerstore.live.saver.saver import Saver

Facts = dict[str, Any]


class Gatekeeper:
    """Stands before one rank's disk: lets everything pass, holds it up, or refuses it."""

    def __init__(self) -> None:
        """Let everything pass."""
        self.is_open = threading.Event()
        self.is_open.set()
        self.refuses_next = False

    def hook(self, operation: str, path: Path) -> None:
        """Do so with one change of the disk."""
        self.is_open.wait()
        if self.refuses_next:
            self.refuses_next = False
            raise StorageIO(f"cannot {operation}: made up", errno=errno.EIO, filename=str(path), hint="none")


def attempt(action: Callable[[], Saved]) -> Facts:
    """Return what *action* gives, or how it is refused."""
    try:
        return saved(action())
    except Exception as exc:  # noqa: BLE001  # which one it is, is what the test wants to know
        return {"error": type(exc).__name__, "message": str(exc)}


def saved(of: Saved) -> Facts:
    """Return what a save has begun, for a file."""
    return asdict(of)


def try_misuse(kind: str, step: int, savers: dict[str, Saver], facts: Facts, gatekeeper: Gatekeeper) -> None:
    """Do what is wrong in the way of *kind*, after the update of *step*."""
    saver = next(iter(savers.values()))
    if dist.get_world_size() == 1:
        return  # all of it is about ranks that differ
    if kind == "refused" and step == 2:
        facts["refused"] = {name: attempt(action) for name, action in refusals(saver).items()}
    if kind == "given_up" and step == 1:
        saver.wait()
        if dist.get_rank() == 1:
            gatekeeper.is_open.clear()  # so that the next save begins before it is known that this one fails
    if kind == "given_up" and step in {1, 2}:
        facts["saves"]["parity"][step] = saved(saver.save())
    if kind == "given_up" and step == 2:
        gatekeeper.refuses_next = dist.get_rank() == 1
        gatekeeper.is_open.set()
        saver.wait()
        facts["status_given_up"] = asdict(saver.status())


def refusals(saver: Saver) -> dict[str, Callable[[], Saved]]:
    """Return saves that no rank may begin, each of them wrong on the last rank or on all."""
    rank = dist.get_rank()
    is_wrong = rank == dist.get_world_size() - 1
    odd = {"epoch": {"best": [1, object()]}}
    return {
        "object": lambda: saver.save(client_state=odd if is_wrong else {}),
        "steps": lambda: saver.save(100 + rank),
        "extra_files": lambda: saver.save(extra_files={"tokenizer.json": "no/such/file"}),
        "going_back": lambda: saver.save(0),
        "pin": lambda: saver.save(pin=7 if is_wrong else None),  # type: ignore[arg-type]
        "twice": lambda: twice(saver),
    }


def twice(saver: Saver) -> Saved:
    """Save the same step two times; return what the second one says if it is what the first one said."""
    first, second = saver.save(), saver.save()
    assert first == second, f"{first} is not {second}"
    return second
