"""``delta``: what has changed in the weights since a commit."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from layerstore.arguments import check_fields
from layerstore.dtypes import dtype_code
from layerstore.errors import InvalidInput
from layerstore.formats.format import Plan
from layerstore.formats.hf import WeightType
from layerstore.setting import Setting

if TYPE_CHECKING:
    from layerstore.assemble import Exported, Writing
    from layerstore.compose import Composition
    from layerstore.progress import Progress
    from layerstore.storage import Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The changes since a commit, for a server that holds that commit's export."""

    name: ClassVar[str] = "delta"
    about: ClassVar[str] = "what changed in hf's weights since a commit"

    since: Annotated[str | None, Setting("the base commit; see apply", metavar="REF")] = None
    dtype: WeightType = None
    encoding: Annotated[Literal["xor", "sparse"], Setting("how changes are written")] = "xor"

    def __post_init__(self) -> None:
        check_fields(self)
        dtype_code(self.dtype)
        if self.since is None:
            raise InvalidInput("a delta needs a base commit, and none was given", hint="pass since, or --since REF")

    def plan(self, repo: "Repository", composition: "Composition") -> Plan:
        """Raise InvalidInput: a delta has no plan."""
        raise self.unplanned()

    @staticmethod
    def unplanned() -> InvalidInput:
        """Return the error that explains why there is no plan."""
        return InvalidInput("a delta cannot be planned", hint="the changes are known only after reading both: write it")

    def write(
        self, repo: "Repository", composition: "Composition", out: Path, how: "Writing", progress: "Progress"
    ) -> "Exported":
        """Write what changed to the folder *out*, which appears whole or not at all."""
        from layerstore.delta import write_delta

        assert self.since is not None, "it was checked"
        return write_delta(
            repo,
            composition,
            out,
            how,
            since=self.since,
            dtype=self.dtype,
            encoding=self.encoding,
            progress=progress,
        )
