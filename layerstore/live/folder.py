"""
A folder that leads to a commit: pointers instead of shards, and the small files that a Trainer reads for itself.

So ``trainer.train(resume_from_checkpoint=…)``, which wants a folder, takes a reference.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from layerstore.compose import Composition, RankStates, content_of, plan_ranks
from layerstore.errors import Conflict, NotFound
from layerstore.layers import parse_reference
from layerstore.live.exchange import Exchange
from layerstore.live.following import pointer_to
from layerstore.live.log import LOG
from layerstore.live.pointers import write_pointer, write_whole
from layerstore.live.scratch import lasting_scratch
from layerstore.policy import Policy
from layerstore.storage.files import Files
from layerstore.storage.rooms import Rooms
from layerstore.store import Store, StrPath, as_store
from layerstore.zero3 import LATEST, TRAINER_STATE, Pointer


def checkpoint(
    store: Store | StrPath,
    ref: str,
    *,
    folder: StrPath | None = None,
    policy: str | Policy = "latest",
) -> str | None:
    """
    Return a folder that ``resume_from_checkpoint`` takes, for the commit *ref*: ``RUN@STEP``, ``RUN`` or a pin.

    None where *ref* is just a run that has no commit yet: so one script serves the first launch and every later one.
    Every rank calls it. The folder is for as many ranks as there are now, whatever number has saved. It is one of
    this process alone and is removed at its end, or *folder*. *policy* says which version of each layer is taken.

    Raises:
        NotFound: There is no such commit, or it is none of a Trainer.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        found = _found(as_store(store), ref, policy)
        return None if found is None else _written(found, folder)
    exchange = Exchange()
    try:
        with exchange.together():
            found = _found(as_store(store), ref, policy)
        if not exchange.is_same("" if found is None else found.composition.commit):
            raise Conflict("the ranks see different commits", hint="name the step; is somebody else still saving?")
        with exchange.together():
            return None if found is None else _written(found, folder)
    finally:
        exchange.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a folder is to lead to."""

    rooms: Rooms
    composition: Composition
    pointer: Pointer


def _found(store: Store, ref: str, policy: str | Policy) -> _Found | None:
    """Return what *ref* means, None where it is just a run that has no commit yet."""
    rooms = store.rooms
    reference = parse_reference(ref)
    is_pin = reference.name in rooms.records.pin_names()
    if not is_pin and reference.step is None and not reference.back:
        view = rooms.catalog.find(reference.name)
        if view is None or not view.rows:
            LOG.warning("run %s has no commit yet: training begins from nothing", reference.name)
            return None
    composition = store.compose(ref, policy=policy).composition
    pointer = pointer_to(store, composition, pin=reference.name if is_pin and policy == "latest" else None)
    return _Found(rooms=rooms, composition=composition, pointer=pointer)


def _written(found: _Found, folder: StrPath | None) -> str:
    """Write this rank's folder; return its path."""
    rooms, composition, pointer = found.rooms, found.composition, found.pointer
    ranks = plan_ranks(rooms, composition, world_size=_world_size())
    for note in ranks.notes:
        LOG.warning("%s: %s", pointer.name, note)
    target = lasting_scratch() if folder is None else Path(folder)
    tag = _tag_for_trainer(composition)
    if not _write_files(rooms, ranks, target, tag=composition.base.layout.tag):
        raise NotFound(
            f"{pointer.name} has no {TRAINER_STATE}: no Trainer has saved it",
            hint="fill the engine with layerstore.resume(engine, store, run=…)",
        )
    for state in ranks:
        for path in (state.model.path, state.optimizer.path):
            place = target / tag / Path(path).name
            rooms.files.make_directories(place.parent)
            write_pointer(rooms.files, place, pointer)
    _write(rooms.files, target / LATEST, tag.encode())
    return str(target)


def _tag_for_trainer(composition: Composition) -> str:
    """Return the base's tag, or one like it that a Trainer looks for."""
    tag = composition.base.layout.tag
    return tag if tag.startswith("global_step") else f"global_step{composition.base.step}"


def _write_files(rooms: Rooms, ranks: RankStates, folder: Path, *, tag: str) -> bool:
    """Write what lies beside the shards; return whether a Trainer can resume from it."""
    names = set()
    for state in ranks:
        for file in state.files:
            if not file.path.startswith(f"{tag}/"):
                _write(rooms.files, folder / file.path, content_of(rooms, file.content))
                names.add(file.path)
    return TRAINER_STATE in names


def _write(files: Files, path: Path, data: bytes) -> None:
    files.make_directories(path.parent)
    write_whole(files, path, data)


def _world_size() -> int:
    import torch.distributed as dist

    return int(dist.get_world_size()) if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
