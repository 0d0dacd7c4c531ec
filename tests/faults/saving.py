"""
What ranks do that save while they train, in one process and without an engine.

Each rank's share is read from a checkpoint on disk; where all have left their parts, these become one commit.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerstore.history import NextCommit, resolve
from layerstore.model import Commit, LayerVersion, PolicyUse, SourceLayout
from layerstore.parts import Part
from layerstore.precision import PRECISIONS
from layerstore.publish.rank_parts import JointCommit, join, parts_of, write_share
from layerstore.staging import SourceReader, referable
from layerstore.store import Store
from layerstore.zero3 import discover, share_of
from layerstore.zero3.rank_files import read_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One save: what each rank has of it, and what it is to become."""

    store: Store
    works: tuple[JointCommit, ...]
    """By rank."""
    older: tuple[dict[str, LayerVersion], ...]
    """By rank, what its differences refer to."""

    @property
    def joint(self) -> JointCommit:
        """What the rank that joins knows."""
        return self.works[0]

    def write(self, rank: int) -> None:
        """Write the share of *rank*, and leave its part."""
        with contextlib.closing(SourceReader()) as reader:
            write_share(self.store.repo, self.works[rank], reader, frozen={}, older=self.older[rank])

    def write_all(self) -> None:
        """Write the shares of all ranks."""
        for rank in range(len(self.works)):
            self.write(rank)

    def parts(self) -> list[Part]:
        """Return the parts, which are all there."""
        found = parts_of(self.store.repo, self.joint, {})
        assert found is not None, "a rank has left no part"
        return found

    def join(self) -> Commit:
        """Make them one commit."""
        return join(self.store.repo, self.joint, self.parts(), inherited=self.joint.place.inherited, own=set())

    def finish(self) -> Commit:
        """Do that, and clear the parts and their session away."""
        commit, work = self.join(), self.joint
        self.store.repo.parts.remove(work.session, work.save, world_size=len(self.works))
        self.store.repo.parts.close_session(work.session, is_over=True)
        return commit


def begun(
    store: Store,
    checkpoint: Path,
    *,
    session: str,
    place: NextCommit,
    run: str = "run",
    step: int,
    save: int = 0,
    half: bool = False,
    precision: str = "exact",
) -> Save:
    """
    Begin the save numbered *save* of a *session*: of what *checkpoint* has, or of *half* of its layers.

    All of them are kept in *precision*, as differences to what *place* inherits.
    """
    repo, found = store.repo, discover(checkpoint)
    repo.prepare_saving()
    repo.parts.open_session(session)
    held = [share_of(rank, folder=found.folder, pattern=None) for rank in read_ranks(found.ranks, frozenset())]
    layers = [layer.layer for layer in held[0].layers]
    due = layers[::2] if half else layers
    older = [referable(repo, place, shard=share.rank, world_size=len(held))[0] for share in held]
    joint = JointCommit(
        session=session,
        save=save,
        share=held[0],
        due=frozenset(due),
        files=tuple,
        mark=lambda source: source,
        run=run,
        place=place,
        step=step,
        save_number=place.save_number + save,
        policy=PolicyUse(name="latest", parameters={}, decisions={"due": list(due)} if half else {}),
        layout=lambda: SourceLayout(flavour="raw", tag=found.tag, layer_pattern=None),
        precision=PRECISIONS[precision],
        compact=frozenset(due) if precision != "exact" else frozenset(),
    )
    return Save(store=store, works=tuple(replace(joint, share=share) for share in held), older=tuple(older))


def begun_after(store: Store, checkpoint: Path, *, session: str | None = None, **options: Any) -> Save:
    """Begin a session that goes on from the newest commit of ``run``, two steps later."""
    base = resolve(store.repo, "run")
    view = store.repo.catalog.find("run")
    place = NextCommit.resumed(view, base.record, of_commit=base.commit, is_as_it_stands=True)
    session = session or secrets.token_hex(16)
    return begun(store, checkpoint, session=session, place=place, step=base.record.step + 2, **options)
