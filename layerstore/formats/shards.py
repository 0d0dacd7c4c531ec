"""``shards`` and ``zero3``: a ZeRO checkpoint that DeepSpeed resumes from."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from layerstore.rank_options import RankOptions

if TYPE_CHECKING:
    from layerstore.assemble import Writing
    from layerstore.compose import Composition
    from layerstore.progress import Progress
    from layerstore.shards import RankStates, Written
    from layerstore.storage import Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards(RankOptions):
    """Shards under the ZeRO stage that the base was saved under."""

    name: ClassVar[str] = "shards"
    about: ClassVar[str] = "to resume from, as they were saved"

    def plan(self, repo: "Repository", composition: "Composition") -> "RankStates":
        """Return the states of all ranks, without writing them."""
        from layerstore.shards import plan_ranks

        return plan_ranks(repo, composition, self)

    def write(
        self, repo: "Repository", composition: "Composition", out: Path, how: "Writing", progress: "Progress"
    ) -> "Written":
        """Write *composition* to the folder *out*, which appears whole or not at all."""
        from layerstore.shards import execute_compose

        return execute_compose(repo, composition, out, self, how, progress=progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero3(Shards):
    """Shards under stage 3, whatever stage the base was saved under."""

    name: ClassVar[str] = "zero3"
    about: ClassVar[str] = "to resume from under stage 3, whatever stage saved them"

    as_zero3: bool = True
