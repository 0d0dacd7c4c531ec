"""Ranks that train a module."""

from __future__ import annotations

from pathlib import Path

from tests.forked import Launch, Nursery


def launched(ranks: Nursery, folder: Path, program: str, *, count: int, name: str = "", **more: object) -> Launch:
    """Return what the ranks of *program* have told."""
    options = {"store": str(folder / "store"), "out": str(folder / "plain"), **more}
    name = name or f"{program}-{count}"
    with ranks.launch(
        f"tests.live.module.programs:{program}", options, folder=folder, name=name, count=count
    ) as launch:
        return launch.done()
