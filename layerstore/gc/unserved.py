"""What a kept step can no longer be asked for, once others are gone."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from layerstore.compose import compose_by_policy
from layerstore.gc.retention import Fate
from layerstore.history import Needs, Resolved, references_to
from layerstore.model import BlobRef
from layerstore.policy import Filter, Parity, Policy
from layerstore.storage import RecordRow, Repository, RunView, packed_versions

# What people ask of full checkpoints. A commit that was saved selectively is a composite itself, and kept as one.
ASKED_FOR: tuple[Policy, ...] = (Parity(), Filter())

# The newest kept steps are looked at; each costs some milliseconds.
_STEPS_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Unserved:
    """A composite that would not be the same any more."""

    reference: str
    """The kept step."""
    policy: str
    layers: int
    """How many layers would come from other saves than now."""


def unserved(
    repo: Repository, planned: Iterable[tuple[RunView, tuple[Fate, ...]]], *, needs: Needs
) -> tuple[Unserved, ...]:
    """Return which composites the newest kept steps of every run would lose with what goes; *needs* is what stays."""
    found: list[Unserved] = []
    for view, fates in planned:
        going = {fate.row.id for fate in fates if fate.goes}
        trimmed = {fate.row.id: _without_moments(fate.row) for fate in fates if fate.loses_moments}
        if not (going or trimmed):
            continue
        rows = {name: row for name, row in view.rows.items() if name not in going} | trimmed
        left = replace(view, rows=rows)
        kept = [fate.row for fate in fates if not (fate.goes or fate.loses_moments) and all(fate.row.saved)]
        kept = kept[:_STEPS_MAX]
        for row, reference in zip(kept, references_to(repo, kept), strict=True):
            found += _lost(repo, row, reference, before=view, after=left, needs=needs)
    return tuple(found)


def versions_by(repo: Repository, resolved: Resolved, policy: Policy, view: RunView | None) -> dict[str, BlobRef]:
    """Return the version of each layer that *policy* takes on top of *resolved*, if its run stands as in *view*."""
    return {entry.layer: entry.version for entry in compose_by_policy(repo, resolved, policy, view=view).layers}


def _without_moments(row: RecordRow) -> RecordRow:
    entries = row.entries().values()
    return row._replace(versions=packed_versions(replace(entry, optimizer_step=None) for entry in entries))


def _lost(
    repo: Repository, row: RecordRow, reference: str, *, before: RunView, after: RunView, needs: Needs
) -> Iterable[Unserved]:
    commit = repo.catalog.commit(row.name)
    resolved = Resolved.of_commit(commit)
    for policy in ASKED_FOR:
        now, then = (versions_by(repo, resolved, policy, view) for view in (before, after))
        # What an attempt was resumed from may go though the save that says so stays.
        changed = sum(then[layer] != version or version.id not in needs for layer, version in now.items())
        if changed:
            yield Unserved(reference=reference, policy=policy.name, layers=changed)
