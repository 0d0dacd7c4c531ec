"""
The format ``zero3``: a composite as a ZeRO-3 checkpoint that DeepSpeed resumes from, for any number of ranks.

A sibling of ``hf``; an output format plans its files, and ``assemble`` and ``target`` do the rest.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from layerstore.compose.assemble import Assembly, assembling
from layerstore.compose.choose import Composition
from layerstore.compose.peft import plan_beside
from layerstore.compose.target import appearing, checked_target
from layerstore.compose.world_size import AdamStep, RankStates, plan_ranks
from layerstore.progress import Progress
from layerstore.storage import Repository
from layerstore.zero3 import (
    LATEST,
    LATEST_BYTES_MAX,
    RANDOM_STATE,
    SHARD_STEM,
    SUMMARY,
    derived_checks,
    gathered_pieces,
    merged,
    plan_gathered,
    plan_rank,
)

_SUMMARY_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a compose wrote."""

    run: str
    step: int
    policy: str
    world_size: int
    out: Path
    bytes_written: int
    seconds: float
    notes: tuple[str, ...]
    """What does not carry over to this world size, in plain sentences."""


def execute_compose(
    repo: Repository,
    composition: Composition,
    out: Path,
    *,
    world_size: int | None = None,
    adam_step: AdamStep = "unify",
    verify: bool = True,
    durable: bool = True,
    force: bool = False,
    progress: Progress,
) -> Written:
    """
    Write *composition* to the folder *out*, which appears whole or not at all; the options are `Composite.write`'s.

    Raises:
        AlreadyExists: *out* is there and *force* was not given.
        IntegrityError: An object is damaged or missing; nothing is left at *out*.
        LayoutMismatch: A layer does not fit the base, or the base cannot be had for *world_size* ranks.
    """
    started = time.monotonic()
    base, tag = composition.base, composition.base.layout.tag
    target = checked_target(repo, out, what="a checkpoint", signs=(LATEST,), force=force)
    ranks = plan_ranks(repo, composition, world_size=world_size, adam_step=adam_step)
    summary = {
        "schema": _SUMMARY_SCHEMA,
        **composition.summary(),
        "world_size": ranks.world_size,
        "adam_step": adam_step,
        "notes": [*composition.notes, *ranks.notes],
    }
    last = {SUMMARY: json.dumps(summary, indent=2, ensure_ascii=False).encode() + b"\n", LATEST: tag.encode()}
    with (
        appearing(repo, target, is_older_form=_older_form(repo, target.path, tag=tag)) as partial,
        assembling(repo, partial, verify=verify, durable=durable, last=last, progress=progress) as assembly,
    ):
        _assemble(assembly, ranks, own=composition.own_parameters(ranks.versions))
    return Written(
        run=base.run,
        step=base.step,
        policy=composition.policy,
        world_size=ranks.world_size,
        out=target.path,
        bytes_written=assembly.bytes_written,
        seconds=time.monotonic() - started,
        notes=ranks.notes,
    )


def _assemble(assembly: Assembly, ranks: RankStates, *, own: frozenset[str]) -> None:
    """Write the files of all ranks; *own* are the parameters that the base itself saved."""
    slices, count = ranks.slices, ranks.world_size
    assembly.progress.start("compose", slices.size_bytes)
    gathered = []
    for state in ranks:
        # Every rank supplies slices of gathered weights, so these files stay open until the last one has.
        gathered += [(of, assembly.open_shared(plan_gathered(of))) for of in state.gathered]
        shared = [
            (file, tuple(merged(gathered_pieces(of, slices, rank=state.rank, world_size=count))))
            for of, file in gathered
        ]
        files = plan_rank(
            state,
            slices,
            world_size=count,
            plan_file=lambda file: plan_beside(assembly.repo, file, slices, own=own),
        )
        assembly.write(files, shared)
    for of, _ in gathered:
        # Of a layer that the base saved itself, even the derived bytes are known.
        assembly.check_converted(of.path, derived_checks(of, slices, unchanged=own.__contains__))


def _older_form(repo: Repository, target: Path, *, tag: str) -> Callable[[Path], bool]:
    """Return what tells the files of the checkpoint at *target*, which may be of another step or of more ranks."""
    latest = target / LATEST
    named = repo.files.read(latest, size_bytes_max=LATEST_BYTES_MAX) if latest.exists() else b""
    tags = {tag, named.decode(errors="replace").strip()}

    def is_older_form(path: Path) -> bool:
        is_shard = path.parts[0] in tags and (len(path.parts) == 1 or bool(SHARD_STEM.fullmatch(path.stem)))
        return is_shard or bool(RANDOM_STATE.fullmatch(str(path)))

    return is_older_form
