"""
Pointer files, which replace DeepSpeed's or FSDP's files in a checkpoint folder whose state is in a store.

Saves write pointers, loads follow them, and `checkpoint` makes a folder of pointers for any commit, because
``trainer.train(resume_from_checkpoint=…)`` wants a folder, not a reference.
"""

import os
import secrets
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import cast

from layerstore.compose import Composition, compose_latest
from layerstore.disk import Files
from layerstore.errors import Conflict, IntegrityError, NoStore, NotFound
from layerstore.filenames import (
    DCP_METADATA,
    FSDP_FOLDERS,
    FSDP_MODEL,
    FSDP_OPTIMIZER,
    LATEST,
    MODEL_STATES,
    TRAINER_STATE,
)
from layerstore.format import Plain, from_plain, to_plain
from layerstore.history import Resolved, reference_to
from layerstore.layers import parse_reference
from layerstore.live.log import LOG
from layerstore.live.ranks import Exchange, log_nothing_yet, store_if_there
from layerstore.live.saver import Saver
from layerstore.live.scratch import lasting_scratch
from layerstore.model import LayerEntry
from layerstore.policy import Policy
from layerstore.rank_options import RankOptions
from layerstore.shards import plan_ranks
from layerstore.states import RankState
from layerstore.storage import RunView
from layerstore.store import Store, StrPath, open_store
from layerstore.tree import Tree
from layerstore.zero3 import Pointer, pointer_bytes


def write_pointer(files: Files, path: Path, pointer: Pointer) -> None:
    """Make *path* a pointer file."""
    _write(files, path, pointer_bytes(pointer, path))


def first_shard_of(rank: int) -> str:
    """Return the name of *rank*'s model file under ZeRO stage 3."""
    return f"zero_pp_rank_{rank}_{MODEL_STATES}"


def write_fsdp_pointers(files: Files, folder: Path, pointer: Pointer) -> None:
    """Write pointers under all of FSDP's names for model and optimizer: FSDP's settings decide which names it loads."""
    for name in (FSDP_MODEL, FSDP_OPTIMIZER, *(f"{inner}/{DCP_METADATA}" for inner in FSDP_FOLDERS)):
        write_pointer(files, folder / name, pointer)


def pointer_to(store: Store, composition: Composition, *, pin: str | None) -> Pointer:
    """Return a pointer to *composition*, whose base is the pin *pin* if one is given."""
    base = composition.base
    is_mixture = pin is None and composition.policy != "latest"
    return Pointer(
        store=store.repo.name,
        store_id=store.id,
        name=pin or reference_to(store.repo, base),
        run=base.run,
        attempt=base.attempt,
        step=base.step,
        is_pin=pin is not None,
        policy=composition.policy,
        layers=[cast(Tree, to_plain(entry)) for entry in composition.layers] if is_mixture else None,
    )


def pointer_to_next(saver: Saver) -> Pointer:
    """Return the pointer to the next save of *saver*."""
    step = saver.step_of()
    return Pointer(
        store=saver.store.repo.name,
        store_id=saver.store.id,
        name=f"{saver.run}@{step}",
        run=saver.run,
        attempt=saver.attempt,
        step=step,
    )


def store_of(pointer: Pointer, saver: Saver | None) -> Store:
    """
    Return the store that *pointer* refers to: *saver*'s own if the ids match, as the store may have moved since.

    Raises:
        NoStore: There is no store at the pointer's path.
        Conflict: A different store is at the pointer's path.
    """
    if saver is not None and saver.store.id == pointer.store_id:
        return saver.store
    try:
        store = open_store(pointer.store)
    except NoStore as exc:
        if type(exc) is not NoStore:
            raise  # a bucket is missing
        raise NoStore(
            f"the pointer leads to {pointer.name} in the store at {pointer.store}, which does not exist",
            hint="if the store moved, make its old path a link, or use layerstore.transformers.checkpoint",
        ) from exc
    if store.id != pointer.store_id:
        raise Conflict(
            f"the pointer leads to {pointer.name}, but {pointer.store} is now a different store",
            hint="attach a saver to the right store first",
        )
    return store


def check_same(exchange: Exchange, folder: Path, content: str) -> None:
    """Raise IntegrityError on all ranks unless they all see the same *content* in *folder*."""
    texts = exchange.texts(content)
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise IntegrityError(
                f"the ranks cannot load {folder}: rank 0 finds {texts[0]} there, rank {rank} {text}",
                hint="use a folder that all hosts see; layerstore.transformers.checkpoint makes one",
            )


def composition_of(store: Store, pointer: Pointer) -> Composition:
    """
    Return the composition that *pointer* refers to.

    Raises:
        NotFound: The commit is not in *store*.
    """
    composition = compose_latest(_resolved(store, pointer))
    if pointer.layers is None:
        return composition
    what = f"the pointer to {pointer.name}"
    if not isinstance(pointer.layers, list):
        raise IntegrityError(f"{what} has an unknown format", hint="create the pointer again")
    layers = tuple(from_plain(LayerEntry, cast(Plain, entry), what=what) for entry in pointer.layers)
    return replace(composition, layers=layers, policy=pointer.policy)


def _resolved(store: Store, pointer: Pointer) -> Resolved:
    repo = store.repo
    repo.records.refresh()
    if pointer.is_pin:
        return Resolved.of_pin(repo.records.read_pin(pointer.name))
    view = repo.catalog.find(pointer.run)
    own = [] if view is None else view.of_attempt(pointer.attempt)
    row = next((row for row in own if row.step == pointer.step), None)
    if row is None:
        raise NotFound(
            f"the pointer leads to {pointer.name} (attempt {pointer.attempt}), which is not in the store",
            hint=_newest_instead(store, view, pointer),
        )
    return Resolved.of_commit(repo.catalog.commit(row.name))


def _newest_instead(store: Store, view: RunView | None, pointer: Pointer) -> str:
    """Return the hint for a dangling pointer: usually the job was killed before the save was complete."""
    if store.repo.attempts_being_saved(pointer.run, [pointer.attempt]):
        return f"a job is still saving attempt {pointer.attempt}: the pointer's save is incomplete or failed; try later"
    if view is None or not view.visible:
        return f"the save was incomplete when the job ended, or was removed; {pointer.run} has no other commit"
    newest = f"{pointer.run}@{next(view.history(view.attempts[-1])).step}"
    return (
        f"the save was incomplete when the job ended, or was removed; {newest} exists: "
        f'layerstore.transformers.checkpoint("{pointer.store}", "{newest}")'
    )


# -- a folder of pointers for a Trainer ------------------------------------------------------------------------------


def checkpoint(
    store: Store | StrPath,
    ref: str,
    *,
    folder: StrPath | None = None,
    policy: str | Policy = "latest",
) -> str | None:
    """
    Return a folder for ``resume_from_checkpoint``, whose pointers lead to commit *ref*: ``RUN@STEP``, ``RUN`` or a pin.

    Return None, and log a line, if *ref* is a run without a commit, or *store* a path without a store: so one script
    serves the first launch and every later one. Every rank calls this. The pointers are for the current number of
    ranks, however many ranks saved the commit. They are written to *folder*, or to a temporary folder that is removed
    when this process exits. *policy* chooses the version of each layer.

    Raises:
        NotFound: The commit does not exist, or was not saved by a Trainer.
    """
    with closing(Exchange()) as exchange:
        with exchange.raise_on_all():
            opened = store_if_there(store)
            composite = None if opened is None else _composite_of(opened, ref, policy)
        if not exchange.is_same("" if composite is None else composite[0].commit):
            raise Conflict("the ranks see different commits", hint="use RUN@STEP: another job may still be saving")
        if opened is None or composite is None:
            if exchange.rank == 0:
                log_nothing_yet(opened or store, ref)
            return None
        with exchange.raise_on_all():
            return _written(opened, *composite, folder)


def _composite_of(store: Store, ref: str, policy: str | Policy) -> tuple[Composition, Pointer] | None:
    """Return the composition of *ref* and a pointer to it; None if *ref* is a run that has no commit yet."""
    repo = store.repo
    repo.records.refresh()
    reference = parse_reference(ref)
    is_pin = reference.name in repo.records.pin_names()
    if not is_pin and reference.step is None and not reference.back:
        view = repo.catalog.find(reference.name)
        if view is None or not view.rows:
            return None
    composition = store.compose(ref, policy=policy).composition
    return composition, pointer_to(store, composition, pin=reference.name if is_pin and policy == "latest" else None)


def _written(store: Store, composition: Composition, pointer: Pointer, folder: StrPath | None) -> str:
    """Write this rank's folder; return its path."""
    repo, base = store.repo, composition.base
    states = [repo.state(ref) for ref in base.states] if base.is_dcp else _states_here(store, composition, pointer.name)
    target = lasting_scratch() if folder is None else Path(folder)
    if not _write_files(store, states, target, tag=base.layout.tag):
        raise NotFound(
            f"{pointer.name} has no {TRAINER_STATE}: the commit was not saved by a Trainer",
            hint="load it with layerstore.resume(engine, store, run=…)",
        )
    # It is not known yet which trainer will load, under which stage: write pointers for all; loads refuse a mismatch.
    write_fsdp_pointers(repo.files, target, pointer)
    if not base.is_dcp:
        # A Trainer looks only for folders named global_step….
        tag = base.layout.tag if base.layout.tag.startswith("global_step") else f"global_step{base.step}"
        for state in states:
            for name in (MODEL_STATES, first_shard_of(state.rank), Path(state.optimizer.path).name):
                write_pointer(repo.files, target / tag / name, pointer)
        _write(repo.files, target / LATEST, tag.encode())
    return str(target)


def _states_here(store: Store, composition: Composition, name: str) -> list[RankState]:
    """Return the states of DeepSpeed's ranks, re-sliced for the current number of ranks."""
    ranks = plan_ranks(store.repo, composition, RankOptions(world_size=_world_size()), is_live=True)
    for note in ranks.notes:
        LOG.warning("%s: %s", name, note)
    return list(ranks)


def _write_files(store: Store, states: list[RankState], folder: Path, *, tag: str) -> bool:
    """Write the small files next to the shards; return whether a Trainer can resume from them."""
    names = set()
    for state in states:
        for file in state.files:
            if not file.path.startswith(f"{tag}/"):
                _write(store.repo.files, folder / file.path, store.repo.content_of(file.content))
                names.add(file.path)
    return TRAINER_STATE in names


def _write(files: Files, path: Path, data: bytes) -> None:
    """Write *path* with a rename, so that the file is never torn: other ranks may be writing it, too."""
    files.make_directories(path.parent)
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    with files.create(partial) as file:
        file.write_at(0, data)
    files.rename(partial, path)


def _world_size() -> int:
    import torch.distributed as dist

    return int(dist.get_world_size()) if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
