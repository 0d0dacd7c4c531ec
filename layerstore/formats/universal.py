"""``universal``: DeepSpeed's Universal Checkpoint."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from layerstore.formats.format import FilesFormat

if TYPE_CHECKING:
    from layerstore.assemble import ExportPlan
    from layerstore.compose import Composition
    from layerstore.storage import Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Universal(FilesFormat):
    """Each parameter's master and moments, whole."""

    name: ClassVar[str] = "universal"
    about: ClassVar[str] = "DeepSpeed's Universal Checkpoint"

    def plan(self, repo: "Repository", composition: "Composition") -> "ExportPlan":
        """Return what would be written, without writing it."""
        from layerstore.shards import plan_universal

        return plan_universal(repo, composition)
