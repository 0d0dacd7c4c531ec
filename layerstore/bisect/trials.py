"""Trials: composites as folders for ``from_pretrained``, one at a time."""

from pathlib import Path

from layerstore.assemble import Exported, ExportPlan, Writing, execute_export
from layerstore.compose import Composition, naming_damage
from layerstore.filenames import SUMMARY
from layerstore.hashing import digest
from layerstore.hf import plan_export
from layerstore.progress import Silent
from layerstore.storage import Repository


class Trials:
    """The folder that holds one trial at a time."""

    def __init__(self, repo: Repository, folder: Path, *, dtype: str | None) -> None:
        self._repo = repo
        self.folder = folder / "trial"
        self._dtype = dtype

    def plan(self, composition: Composition) -> ExportPlan:
        """Return the plan to write *composition* to a folder; raises what an export raises."""
        with naming_damage(self._repo, composition):
            return plan_export(self._repo, composition, dtype=self._dtype)

    def write(self, plan: ExportPlan) -> Exported:
        """Write *plan* to `folder`, in place of the previous trial."""
        self.end()
        with naming_damage(self._repo, plan.composition):
            # Not durable: the folder is judged now, and the next trial removes it.
            return execute_export(self._repo, plan, self.folder, Writing(durable=False), progress=Silent())

    def end(self) -> None:
        """Remove what the previous trial has written."""
        self._repo.files.remove_tree(self.folder)


def key_of_export(plan: ExportPlan) -> str:
    """Return a key for what a judge would see: equal for equal folders, whichever saves they come from."""
    seen = [(file.path, file.size_bytes, file.literals, file.pieces) for file in plan.files if file.path != SUMMARY]
    return digest(repr(sorted(seen, key=lambda planned: planned[0])).encode()).hex()
