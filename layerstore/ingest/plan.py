"""Plan an ingest: read and check the source; nothing is written."""

from dataclasses import dataclass
from pathlib import Path

from layerstore.errors import Conflict, InvalidInput, SourceCheckpoint, Unsupported
from layerstore.layers import check_name, compile_pattern
from layerstore.policy import Latest, Policy
from layerstore.publish import check_pin_free, check_pin_name
from layerstore.storage import Repository
from layerstore.zero3 import Checkpoint, discover, read_checkpoint, refuse_pointer, undivided


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestPlan:
    """What would be ingested."""

    checkpoint: Checkpoint
    run: str
    replace: bool
    layer_pattern: str | None
    policy: Policy
    rollback: bool
    """Training went back to an earlier step."""
    resumed_from: str | None
    """The commit or composite that training resumed from, if the commit opens an attempt."""
    pin: str | None
    """The pin that the commit gets."""
    trust_store: bool
    """Reuse what the store has without reading it."""

    @property
    def opens_attempt(self) -> bool:
        """Whether the commit opens an attempt."""
        return self.rollback or self.resumed_from is not None

    @property
    def step(self) -> int:
        """The step of the commit to be."""
        return self.checkpoint.step


def plan_ingest(
    repo: Repository,
    path: Path,
    *,
    run: str | None = None,
    tag: str | None = None,
    replace: bool = False,
    layer_pattern: str | None = None,
    allowed_globals: frozenset[str] = frozenset(),
    follow: bool = False,
    policy: Policy | None = None,
    rollback: bool = False,
    resumed_from: str | None = None,
    pin: str | None = None,
    trust_store: bool = False,
) -> IngestPlan:
    """Read and check the checkpoint at *path*; nothing is written."""
    if rollback and resumed_from is not None:
        raise InvalidInput("--rollback and --resumed-from were both given", hint="the second says it all")
    if pin is not None:
        check_pin_name(repo, pin)
    repo.prepare_writing()
    pattern = compile_pattern(layer_pattern)
    found = discover(path, tag=tag, follow=follow)
    refuse_pointer(found.ranks[0].model)
    name = check_name(found.run_name if run is None else run, what="the run's name")
    if name in repo.records.pin_names():
        raise Conflict(
            f"{name!r} is the name of a pin; runs and pins share their names", hint="choose another name with --run"
        )
    checkpoint = read_checkpoint(found, layer_pattern=pattern, allowed_globals=allowed_globals)
    if not checkpoint.layers:
        raise SourceCheckpoint(f"{path} holds no parameters: there is nothing to keep", hint="is it the right folder?")
    policy = policy or Latest()
    kept = undivided(checkpoint.states[0])
    if kept and not isinstance(policy, Latest):
        raise Unsupported(
            f"policy {policy.name} saves some layers at a time, but the optimizer of {path} keeps {kept}, "
            "which cannot be cut into layers",
            hint="ingest it with policy full",
        )
    if pin is not None:
        check_pin_free(repo, pin, run=name, step=checkpoint.step)
    return IngestPlan(
        checkpoint=checkpoint,
        run=name,
        replace=replace,
        layer_pattern=layer_pattern,
        policy=policy,
        rollback=rollback,
        resumed_from=resumed_from,
        pin=pin,
        trust_store=trust_store,
    )
