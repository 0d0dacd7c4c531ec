"""``dcp``: a PyTorch distributed checkpoint."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from layerstore.arguments import check_fields
from layerstore.formats.format import FilesFormat
from layerstore.rank_options import AdamSteps

if TYPE_CHECKING:
    from layerstore.assemble import ExportPlan
    from layerstore.compose import Composition
    from layerstore.storage import Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Dcp(FilesFormat):
    """The fp32 masters as the model, and the optimizer."""

    name: ClassVar[str] = "dcp"
    about: ClassVar[str] = "for PyTorch's FSDP2"

    adam_step: AdamSteps = "unify"

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, repo: "Repository", composition: "Composition") -> "ExportPlan":
        """Return what would be written, without writing it."""
        from layerstore.distcp import plan_dcp

        return plan_dcp(repo, composition, adam_step=self.adam_step)
