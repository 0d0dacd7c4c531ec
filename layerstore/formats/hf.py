"""``hf``: weights for Transformers and PEFT."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from layerstore.arguments import check_fields
from layerstore.dtypes import DTypeName, dtype_code
from layerstore.formats.format import FilesFormat
from layerstore.limits import SHARD_SIZE
from layerstore.setting import Setting
from layerstore.units import size_in_bytes

if TYPE_CHECKING:
    from layerstore.assemble import ExportPlan
    from layerstore.compose import Composition
    from layerstore.storage import Repository

WeightType = Annotated[DTypeName | None, Setting("the element type", default="as trained")]


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFace(FilesFormat):
    """The weights, as Transformers' ``from_pretrained`` loads them."""

    name: ClassVar[str] = "hf"
    about: ClassVar[str] = "weights for from_pretrained"

    dtype: WeightType = None
    max_shard_size: Annotated[int | str, Setting("the largest file", metavar="SIZE", read=str)] = SHARD_SIZE

    def __post_init__(self) -> None:
        check_fields(self)
        dtype_code(self.dtype)
        size_in_bytes(self.max_shard_size)

    def plan(self, repo: "Repository", composition: "Composition") -> "ExportPlan":
        """Return what would be written, without writing it."""
        from layerstore.hf import plan_export

        return plan_export(repo, composition, dtype=self.dtype, max_shard_size=self.max_shard_size)
