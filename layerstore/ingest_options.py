"""How a checkpoint is read, and what commit it makes: the options of ``ingest``."""

from dataclasses import dataclass, field
from typing import Annotated

from layerstore.policy import Latest, Policy
from layerstore.precision import EXACT_EVERY, PRECISIONS, Keyframes, PrecisionName, count_or_none, keyframes
from layerstore.setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestOptions:
    """How to read a checkpoint, and what commit to make of it."""

    run: Annotated[
        str | None,
        Setting("the run's name", metavar="R", default="the save folder's; for checkpoint-N or the like, its parent's"),
    ] = None
    tag: Annotated[str | None, Setting("DeepSpeed's tag", metavar="T", default="what `latest` names")] = None
    step: Annotated[
        int | None,
        Setting("the step of a torch.distributed.checkpoint folder that does not state it", metavar="N", read=int),
    ] = None
    pin: Annotated[str | None, Setting("pin the commit under this name", metavar="NAME")] = None
    replace: Annotated[bool, Setting("other content saved for this step goes to the trash")] = False
    policy: Policy = field(default_factory=Latest)
    precision: Annotated[
        PrecisionName,
        Setting(
            f"how finely layers are kept. {'; '.join(f'{known.name}: {known.help}' for known in PRECISIONS.values())}"
        ),
    ] = "exact"
    exact_every: Annotated[
        int | None,
        Setting(
            "with another precision, every Nth version of a layer is still exact, N at least 1; none: only the first",
            metavar="N",
            read=count_or_none,
        ),
    ] = EXACT_EVERY
    rollback: Annotated[bool, Setting("training went back to an earlier step: a new attempt begins")] = False
    resumed_from: Annotated[
        str | None, Setting("the commit or pinned composite that training resumed from", metavar="REF")
    ] = None
    layer_pattern: Annotated[
        str | None,
        Setting(
            "finds the layer in a parameter's name: group 'layer', or the first group, or the match", metavar="REGEX"
        ),
    ] = None
    onto: Annotated[
        str | None,
        Setting("for a torch.distributed.checkpoint folder: a DeepSpeed commit to complete it from", metavar="REF"),
    ] = None
    allowed_globals: frozenset[str] = frozenset()
    """Classes of foreign pickles that are kept as inert objects."""
    follow: Annotated[bool, Setting("follow links to files inside the checkpoint")] = False
    trust_store: Annotated[bool, Setting("do not read objects already in the store; check only their size")] = False

    def __post_init__(self) -> None:
        keyframes(self.precision, self.exact_every)

    @property
    def keyframes(self) -> Keyframes:
        """The precision, and when a layer is kept exactly."""
        return keyframes(self.precision, self.exact_every)

    @property
    def opens_attempt(self) -> bool:
        """Whether the commit opens an attempt."""
        return self.rollback or self.resumed_from is not None
