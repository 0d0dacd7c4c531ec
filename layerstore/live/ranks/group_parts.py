"""Parts of ranks that share no disk: stored in each node's store, and exchanged through the job's rendezvous."""

from typing import TYPE_CHECKING

from layerstore.disk import Files
from layerstore.format import part_name, seal_part, unseal_part
from layerstore.layout import Layout
from layerstore.parts import Part
from layerstore.storage import PartStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Rendezvous


class GroupParts(PartStore):
    """
    The parts of a job's saves.

    In the node's own store, a part is at its usual path, so that collections there keep the objects it refers to. Other
    ranks read the part from the key-value store through which the process group was formed. Requests to that store are
    not collectives, so background threads may make them, and they need no bucket or disk.
    """

    def __init__(self, layout: Layout, files: Files, *, store_id: str, group: "Rendezvous", world_size: int) -> None:
        super().__init__(layout, files, store_id=store_id)
        self._group = group
        self._world_size = world_size

    def sees_session(self, session: str) -> bool:
        """Return True: each rank makes the session's folder in its node's store."""
        return True

    def ranks(self, session: str, save: int) -> set[int]:
        """Return all ranks once every rank has left a part of *save*, and until then none; takes a single request."""
        # Adding 0 reads the count; a get would block until the count exists.
        is_complete = self._group.add(self._count(session, save), 0) >= self._world_size
        return set(range(self._world_size)) if is_complete else set()

    def confirm(self, part: Part) -> None:
        """Make the draft of *part* a part that all ranks see; raises StorageIO if a collection has removed it."""
        super().confirm(part)
        self._pass_on(part)

    def publish(self, part: Part) -> None:
        """Let all ranks see *part*, the report that this rank failed, unless they already see a part of this rank."""
        # Not in the node's store: a failure refers to no objects that collections would have to keep.
        if not self._group.check([part_name(part.session, part.save, part.rank)]):
            self._pass_on(part)

    def _pass_on(self, part: Part) -> None:
        data = seal_part(part, store_id=self._store_id)
        # The part before the count: a rank that sees the full count reads every part at once.
        self._group.set(part_name(part.session, part.save, part.rank), data)  # type: ignore[arg-type] # it takes bytes
        self._group.add(self._count(part.session, part.save), 1)

    def find(self, session: str, save: int, rank: int) -> Part | None:
        """Return a part, None if it does not exist; raises IntegrityError if it is damaged."""
        name = part_name(session, save, rank)
        if not self._group.check([name]):  # a get would block until the part exists
            return None
        return unseal_part(self._group.get(name), name=name, store_id=self._store_id)

    def remove(self, session: str, save: int, *, world_size: int) -> None:
        """Forget the parts of a save that was committed or given up; each rank removes its own from its node."""
        for rank in range(world_size):
            self._group.delete_key(part_name(session, save, rank))
        self._group.delete_key(self._count(session, save))

    def forget(self, session: str, save: int, rank: int) -> None:
        """Remove this rank's own part from its node's store, once the next level has all objects of the part."""
        self._files.discard(self._path(session, save, rank))

    def _count(self, session: str, save: int) -> str:
        return f"parts/{session}/{save}/count"
