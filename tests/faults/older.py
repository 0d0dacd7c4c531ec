"""A store of an older format being migrated: what may be wrong with it at any moment."""

from __future__ import annotations

import json
import os
from pathlib import Path

from layerstore.format.identity import FORMAT
from layerstore.migrations.runner import Migrated, migrate
from layerstore.storage.files import Files
from layerstore.storage.handles import Hook
from tests.compat.steps import m0000_flags
from tests.faults.harness import snapshot, truth


def migrate_from_0(store: Path, hook: Hook) -> Migrated:
    """Take *store* from format 0, which never was, to today's."""
    return migrate(store, Files(hook), steps=(m0000_flags.STEP,))


def unmigrated_problems(store: Path, old: Path, *, is_done: bool) -> list[str] | None:
    """Return what is wrong with a store that still has the format of *old*; None if it has today's."""
    if json.loads((store / "store.json").read_bytes())["format"] == FORMAT:
        litter = [name for name in os.listdir(store) if name.startswith("migrating")]
        return [f"left behind: {litter}"] if is_done and litter else None
    now = snapshot(store)
    # What the older layerstore reads is as it was; what else is there it does not know.
    found = [f"{name} has changed" for name, content in truth(old).items() if now.get(name) != content]
    return [*found, *(["the store is not migrated"] if is_done else [])]
