"""Read the checkpoint to ingest: DeepSpeed's, or PyTorch's distributed one, which may be put onto a commit."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from layerstore.distcp import read_dcp, read_standalone
from layerstore.errors import Conflict, InvalidInput, SourceCheckpoint, Unsupported
from layerstore.history import Resolved, resolve
from layerstore.ingest.transfer import transfer
from layerstore.ingest_options import IngestOptions
from layerstore.layers import check_name, compile_pattern, typed
from layerstore.policy import Latest
from layerstore.publish import check_pin_free, check_pin_name
from layerstore.source import real_path
from layerstore.staging import Content
from layerstore.storage import Repository
from layerstore.zero3 import Checkpoint, discover, distributed_at, read_checkpoint, refuse_pointer
from layerstore.zero3.trees import undivided


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestSource:
    """A checkpoint that was read."""

    run: str
    checkpoint: Checkpoint
    transfer: Callable[..., Content]
    """Stages the checkpoint's content: `layerstore.ingest.transfer`, or a distributed checkpoint's own function."""


def read_source(repo: Repository, path: Path, options: IngestOptions) -> IngestSource:
    """
    Read and check the checkpoint at *path*, from any engine. Writes nothing.

    Raises:
        SourceCheckpoint: The checkpoint is damaged, incomplete or missing.
        InvalidInput: Options contradict each other, or do not fit the checkpoint.
        Conflict: The name of the run or of the pin is taken.
    """
    if options.pin is not None:
        check_pin_name(repo, options.pin)
    if options.rollback and options.resumed_from is not None:
        raise InvalidInput("--rollback and --resumed-from were both given", hint="leave --rollback out")
    # Check the store first: if it accepts no saves, refuse before the checkpoint is read, which can take minutes.
    repo.prepare_saving()
    if options.onto is not None:
        source = _onto(repo, path, options)
    else:
        folder = real_path(path)
        is_distributed = folder.is_dir() and distributed_at(folder) is not None
        source = (_standalone if is_distributed else _of_deepspeed)(repo, path, options)
    if not source.checkpoint.layers:
        raise SourceCheckpoint(
            f"{path} holds no parameters: there is nothing to keep", hint="give the folder of a model's checkpoint"
        )
    # Check this once the step is known, but before anything is written.
    if options.pin is not None:
        check_pin_free(repo, options.pin, run=source.run, step=source.checkpoint.step)
    return source


def _of_deepspeed(repo: Repository, path: Path, options: IngestOptions) -> IngestSource:
    if options.step is not None:
        raise InvalidInput(
            f"--step was given, but {path} is not a folder of torch.distributed.checkpoint",
            hint="leave --step out: DeepSpeed's files state the step",
        )
    pattern = compile_pattern(options.layer_pattern)
    found = discover(path, tag=options.tag, follow=options.follow)
    # Refuse a pointer before it is read as a shard: the shard reader would only report what the file lacks.
    refuse_pointer(found.ranks[0].model)
    run = _checked_run(repo, found.run_name if options.run is None else options.run)
    checkpoint = read_checkpoint(found, layer_pattern=pattern, allowed_globals=options.allowed_globals)
    kept = undivided(checkpoint.states[0])
    if kept and not isinstance(options.policy, Latest):
        raise Unsupported(
            f"policy {options.policy.name} saves some layers at a time, but the optimizer of {path} keeps {kept}, "
            "which cannot be split by layer",
            hint="ingest it with policy full",
        )
    return IngestSource(run=run, checkpoint=checkpoint, transfer=partial(transfer, repo, checkpoint))


def _standalone(repo: Repository, path: Path, options: IngestOptions) -> IngestSource:
    if options.tag is not None:
        raise InvalidInput(f"--tag was given, but {path} has none: DeepSpeed did not save it", hint="leave --tag out")
    checkpoint, stage = read_standalone(
        path,
        step=options.step,
        layer_pattern=compile_pattern(options.layer_pattern),
        allowed_globals=options.allowed_globals,
        follow=options.follow,
    )
    run = _checked_run(repo, checkpoint.found.run_name if options.run is None else options.run)
    return IngestSource(run=run, checkpoint=checkpoint, transfer=stage)


def _onto(repo: Repository, path: Path, options: IngestOptions) -> IngestSource:
    given = {
        "--tag": options.tag,
        "--layer-pattern": options.layer_pattern,
        "--allow-global": options.allowed_globals or None,
        "--step": options.step,
    }
    for option in (name for name, value in given.items() if value is not None):
        raise InvalidInput(f"--onto and {option} were both given", hint="leave out the latter: the base decides it")
    base = resolve(repo, options.onto)
    run = _checked_run(repo, base.record.run if options.run is None else options.run)
    checkpoint, stage = read_dcp(repo, path, base, follow=options.follow)
    if run == base.record.run and not options.opens_attempt:
        _check_newest(repo, base, checkpoint.step)
    return IngestSource(run=run, checkpoint=checkpoint, transfer=stage)


def _check_newest(repo: Repository, base: Resolved, step: int) -> None:
    """Raise Conflict if the run has newer saves than *base*, but none at *step*: two histories would be merged."""
    view = repo.catalog.find(base.record.run)
    rows = [] if view is None else list(view.history(view.newest_attempt))
    newest = max((row.step for row in rows), default=0)
    if newest > base.record.step and step not in {row.step for row in rows}:
        run, base_reference = typed(base.record.run), f"{typed(base.record.run)}@{base.record.step}"
        raise Conflict(
            f"{base_reference} is not the newest save of its run, {run}@{newest} is",
            hint=f"use --onto {run}@{newest} if training continued from that save; "
            f"otherwise --resumed-from {base_reference}, or --run NAME",
        )


def _checked_run(repo: Repository, name: str) -> str:
    """Return the run's *name*; raise if it is not valid for a run, or is the name of a pin."""
    run = check_name(name, what="the run's name")
    if run in repo.records.pin_names():
        raise Conflict(
            f"{run!r} is the name of a pin; runs and pins share their names", hint="choose another name with --run"
        )
    return run
