"""Records without layers: they hide others, and stand for an attempt of which nothing else is left."""

import time
from collections.abc import Mapping

from layerstore.format.records import make_commit
from layerstore.model import Commit, CommitId, CommitRecord, Observed, PolicyUse
from layerstore.storage.rooms import Rooms
from layerstore.tree import Tree

WITHDRAWN = "withdrawn"
"""Among the decisions of what hides a commit that failed as it was published: what that one had hidden is not lost."""


def withdraw(rooms: Rooms, commit: Commit) -> None:
    """Hide *commit*, which was just published and turned out not to be whole."""
    rooms.records.publish(hiding_commit(commit.record, commit.id, policy="drop"))


def hiding_commit(
    record: CommitRecord, commit: CommitId, *, policy: str, decisions: Mapping[Tree, Tree] | None = None
) -> Commit:
    """
    Return the commit that hides *commit*, whose record is *record*, and is called by what hides it, *policy*.

    It has the other's place and number, so that what is saved there again has them too.
    """
    return make_commit(
        CommitRecord(
            run=record.run,
            attempt=record.attempt,
            fork=record.fork,
            step=record.step,
            save_number=record.save_number,
            world_size=record.world_size,
            layers=(),
            states=(),
            layout=record.layout,
            policy=PolicyUse(name=policy, parameters={}, decisions=dict(decisions or {})),
            supersedes=(commit,),
        ),
        Observed(time_ns=time.time_ns(), bytes_new=0, bytes_reused=0),
    )
