"""A store of format 1 being migrated: what may be wrong with it at any moment."""

from __future__ import annotations

import json
import os
from pathlib import Path

import layerstore
from layerstore.errors import Unsupported
from layerstore.format import FORMAT
from layerstore.migrations import Migration, migrate
from layerstore.storage import Files, Hook
from tests.faults.harness import snapshot, truth


def migrate_hooked(store: Path, hook: Hook) -> Migration:
    """Take *store* to today's format."""
    return migrate(store, Files(hook))


def unmigrated_problems(store: Path, old: Path, *, is_done: bool) -> list[str] | None:
    """Return what is wrong with a store that has not come through from the format of *old* yet; None if it has."""
    if json.loads((store / "store.json").read_bytes())["format"] != FORMAT:
        now = snapshot(store)
        found = [f"{name} has changed" for name, content in truth(old).items() if now.get(name) != content]
        return [*found, *(["the store is not migrated"] if is_done else [])]
    try:
        layerstore.open(store).close()
    except Unsupported as error:
        return [] if "interrupted" in str(error) and not is_done else [f"it does not open: {error}"]
    litter = [name for name in os.listdir(store) if name.startswith("migrating")]
    return [f"left behind: {litter}"] if is_done and litter else None
