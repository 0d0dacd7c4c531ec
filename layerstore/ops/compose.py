"""
Compose: a commit, or any choice of layer versions, becomes a ZeRO-3 checkpoint on disk.

Everything is written beside the target and renamed to it when it is whole, verified and durable.
"""

import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from layerstore.errors import AlreadyExists, InvalidInput, StorageIO
from layerstore.ops.assemble import Assembly
from layerstore.ops.composition import Composition, check_members
from layerstore.ops.progress import Progress
from layerstore.ops.ranks import AdamStep, plan_ranks
from layerstore.ops.rooms import Rooms
from layerstore.ops.summary import summary, summary_bytes
from layerstore.storage.files import mapped_errors
from layerstore.zero3.discover import LATEST, LATEST_BYTES_MAX, RANDOM_STATE, SHARD_STEM, SUMMARY
from layerstore.zero3.places import Slices


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
    versions = check_members(rooms, composition)
    layers = list(zip(composition.layers, versions, strict=True))
    slices = Slices(versions)
    return plan_ranks(rooms, composition.base, layers, slices, world_size=world_size, adam_step=adam_step).notes


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
    target = _checked_target(rooms, out, force=force)
    partial = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
    base = composition.base
    versions = check_members(rooms, composition)
    slices = Slices(versions)
    layers = list(zip(composition.layers, versions, strict=True))
    ranks = plan_ranks(rooms, base, layers, slices, world_size=world_size, adam_step=adam_step)
    assembly = Assembly(
        rooms=rooms,
        folder=partial,
        tag=base.layout.tag,
        ranks=ranks,
        slices=slices,
        own_parameters=frozenset(
            parameter.name
            for entry, version in layers
            for parameter in version.parameters
            if entry.layer in composition.own_layers
        ),
        verify=verify,
        durable=durable,
        progress=progress,
    )
    try:
        rooms.files.make_directories(partial)
        assembly.run()
        summary_size = _write_summary(rooms, composition, partial / SUMMARY, durable=durable)
        _check_nothing_else_is_lost(rooms, target, partial, tag=base.layout.tag)
        _move_into_place(rooms, partial, target)
    except BaseException:
        rooms.files.remove_tree(partial)
        raise
    return Written(
        run=base.run,
        step=base.step,
        policy=composition.policy,
        world_size=ranks.world_size,
        out=target,
        bytes_written=assembly.bytes_written + summary_size,
        seconds=time.monotonic() - started,
        notes=ranks.notes,
    )


def _write_summary(rooms: Rooms, composition: Composition, path: Path, *, durable: bool) -> int:
    """Write what the composite is made of beside its shards; return how many bytes that took."""
    data = summary_bytes(summary(composition))
    with rooms.files.create(path) as file:
        file.write_at(0, data)
        if durable:
            file.sync()
            rooms.files.sync_directory(path.parent)
    return len(data)


# -- the target ----------------------------------------------------------------------------------------------------


def _checked_target(rooms: Rooms, out: Path, *, force: bool) -> Path:
    try:
        with mapped_errors(out, doing="look at"):
            return _suitable_target(rooms, out, force=force)
    except ValueError as exc:
        if isinstance(exc, InvalidInput):
            raise
        raise InvalidInput(f"{out} is no path: {exc}", hint="choose another -o") from exc  # a NUL


def _suitable_target(rooms: Rooms, out: Path, *, force: bool) -> Path:
    target = Path.cwd() / out  # not resolved: a link at the target itself must be seen
    real, store = target.resolve(), rooms.layout.root
    if real == store or store in real.parents:
        raise InvalidInput(f"{out} is inside the store {store}", hint="choose a folder elsewhere with -o")
    if real in store.parents:
        raise InvalidInput(f"{out} contains the store {store}", hint="choose a folder elsewhere with -o")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise AlreadyExists(f"{out} is there and is not a folder; nothing was changed", hint="choose another -o")
    if target.exists() and any(target.iterdir()):
        _check_replaceable(target, force=force)
    above = next(folder for folder in target.parents if folder.exists())
    if not above.is_dir():
        raise InvalidInput(f"{out} cannot be made: {above} is not a folder", hint="choose another -o")
    return target


def _check_replaceable(target: Path, *, force: bool) -> None:
    if not force:
        raise AlreadyExists(
            f"{target} exists and is not empty; nothing was changed",
            hint="choose another folder with -o, or replace a checkpoint with --force",
        )
    # A slip of the pen must not cost a home folder.
    if not (target / LATEST).is_file():
        raise AlreadyExists(
            f"{target} is not a checkpoint (it has no file {LATEST!r}), so it is not replaced; nothing was changed",
            hint="choose another folder with -o, or remove it by hand",
        )


def _check_nothing_else_is_lost(rooms: Rooms, target: Path, partial: Path, *, tag: str) -> None:
    """Raise if *target*, which is about to be replaced, holds anything but this checkpoint, in an older form."""
    latest = target / LATEST
    named = rooms.files.read(latest, size_bytes_max=LATEST_BYTES_MAX) if latest.exists() else b""
    tags = {tag, named.decode(errors="replace").strip()}
    for folder, folders, files in os.walk(target):
        for name in sorted([*folders, *files]):
            path = Path(folder, name).relative_to(target)
            # The checkpoint that is there may be of another step, or of more ranks.
            is_older_form = path.parts[0] in tags and (len(path.parts) == 1 or SHARD_STEM.fullmatch(path.stem))
            is_older_form = is_older_form or RANDOM_STATE.fullmatch(str(path))
            if not is_older_form and not (partial / path).exists():
                raise AlreadyExists(
                    f"{target} also holds {str(path)!r}, which the composite does not replace; nothing was changed",
                    hint="choose another folder with -o, or move it away by hand",
                )


def _move_into_place(rooms: Rooms, partial: Path, target: Path) -> None:
    files = rooms.files
    aside = None
    if target.exists():
        aside = target.with_name(f"{target.name}.replaced-{secrets.token_hex(4)}")
        files.rename(target, aside)
    try:
        files.rename(partial, target)
        files.sync_directory(target.parent)
    except BaseException:
        _move_back(rooms, partial, target, aside)
        raise
    if aside is not None:
        files.remove_tree(aside)


def _move_back(rooms: Rooms, partial: Path, target: Path, aside: Path | None) -> None:
    """Put back what was there; where even that fails it stays whole, under the name of *aside*."""
    with suppress(StorageIO):
        if not partial.exists():
            rooms.files.rename(target, partial)
        if aside is not None:
            rooms.files.rename(aside, target)
