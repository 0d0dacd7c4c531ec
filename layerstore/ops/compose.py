"""
Compose: a commit, or any choice of layer versions, becomes a ZeRO-3 checkpoint on disk.

Everything is written beside the target and renamed to it when it is whole, verified and durable.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from layerstore.ops.adapters import plan_beside
from layerstore.ops.assemble import Assembly
from layerstore.ops.composition import Composition
from layerstore.ops.ranks import AdamStep, Ranks, plan_composite
from layerstore.ops.summary import summary, summary_bytes
from layerstore.ops.target import Product, appearing, checked_target
from layerstore.progress import Progress
from layerstore.storage.rooms import Rooms
from layerstore.zero3 import LATEST, LATEST_BYTES_MAX, RANDOM_STATE, SHARD_STEM, SUMMARY


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


def notes_of(
    rooms: Rooms, composition: Composition, *, world_size: int | None = None, adam_step: AdamStep = "unify"
) -> tuple[str, ...]:
    """Return what would not carry over; raises LayoutMismatch where *composition* cannot be had that way."""
    return plan_composite(rooms, composition, world_size=world_size, adam_step=adam_step).ranks.notes


def execute_compose(
    rooms: Rooms,
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
    Write *composition* to the folder *out*, which appears whole or not at all.

    It is for *world_size* ranks, by default as many as the base has. The optimizer's step counters are the base's;
    with *adam_step* ``per-layer`` each layer's own, where the optimizer's groups allow that.
    Without *verify* only sizes are checked. Without *durable* a power cut may tear the folder.
    With *force* a folder that is there is replaced once the new one is complete.

    Raises:
        AlreadyExists: *out* is there and *force* was not given.
        IntegrityError: An object is damaged or missing; nothing is left at *out*.
        LayoutMismatch: A layer does not fit the base, or the base cannot be had for *world_size* ranks.
    """
    started = time.monotonic()
    target = checked_target(rooms, out, _CHECKPOINT, force=force)
    base = composition.base
    planned = plan_composite(rooms, composition, world_size=world_size, adam_step=adam_step)
    ranks = planned.ranks
    own = composition.own_parameters(planned.versions)
    is_older_form = _older_form(rooms, target.path, tag=base.layout.tag)
    with appearing(rooms, target, what="the composite", is_older_form=is_older_form) as partial:
        assembly = Assembly(
            rooms=rooms,
            folder=partial,
            tag=base.layout.tag,
            ranks=ranks,
            slices=planned.slices,
            own_parameters=own,
            plan_file=lambda file: plan_beside(rooms, file, planned.slices, own=own),
            verify=verify,
            durable=durable,
            progress=progress,
        )
        assembly.run()
        fields = _summary(composition, ranks, adam_step)
        summary_size = _write_summary(rooms, fields, partial / SUMMARY, durable=durable)
    return Written(
        run=base.run,
        step=base.step,
        policy=composition.policy,
        world_size=ranks.world_size,
        out=target.path,
        bytes_written=assembly.bytes_written + summary_size,
        seconds=time.monotonic() - started,
        notes=ranks.notes,
    )


def _summary(composition: Composition, ranks: Ranks, adam_step: AdamStep) -> dict[str, object]:
    return {
        **summary(composition),
        "world_size": ranks.world_size,
        "adam_step": adam_step,
        "notes": [*composition.notes, *ranks.notes],
    }


def _write_summary(rooms: Rooms, fields: Mapping[str, object], path: Path, *, durable: bool) -> int:
    """Write what the composite is made of beside its shards; return how many bytes that took."""
    data = summary_bytes(fields)
    with rooms.files.create(path) as file:
        file.write_at(0, data)
        if durable:
            file.sync()
            rooms.files.sync_directory(path.parent)
    return len(data)


# -- the target ----------------------------------------------------------------------------------------------------

_CHECKPOINT = Product(what="a checkpoint", signs=(LATEST,))


def _older_form(rooms: Rooms, target: Path, *, tag: str) -> Callable[[Path], bool]:
    """Return what knows the files of a checkpoint that is there, which may be of another step, or of more ranks."""
    latest = target / LATEST
    named = rooms.files.read(latest, size_bytes_max=LATEST_BYTES_MAX) if latest.exists() else b""
    tags = {tag, named.decode(errors="replace").strip()}

    def is_older_form(path: Path) -> bool:
        is_shard = path.parts[0] in tags and (len(path.parts) == 1 or bool(SHARD_STEM.fullmatch(path.stem)))
        return is_shard or bool(RANDOM_STATE.fullmatch(str(path)))

    return is_older_form
