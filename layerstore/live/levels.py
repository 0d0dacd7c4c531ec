"""
Levels: each save goes to the first level, and soon after to the others.

    levels = ["/dev/shm/sft", "/shared/sft", "s3://checkpoints/sft"]
    layerstore.resume(engine, levels, run="sft")
    saver = layerstore.attach(engine, levels, run="sft", keep=Keep(last=3))

Every level is the same store, with the same id, and can be used by itself. Later levels are filled from the first; a
resume uses the newest step in any level, and reads it from the nearest level that has it.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import permutations
from os import PathLike
from pathlib import Path

from layerstore.disk import Files
from layerstore.errors import Conflict, InvalidInput, StorageIO
from layerstore.layout import is_url, place, url_of
from layerstore.live.log import LOG
from layerstore.live.nodes import first_ranks, forget_unsent, has_whole, newest, open_nodes, send_commits
from layerstore.live.ranks import Exchange, make_together, open_together, store_if_there
from layerstore.live.saver import Near
from layerstore.storage import RecordRow, make_store
from layerstore.store import Store, StrPath


@dataclass(frozen=True, slots=True)
class Levels:
    """Where a run is kept, nearest first."""

    first: Store | StrPath
    others: tuple[str, ...] = ()
    """Folders, as absolute paths, and URLs."""


def levels_of(store: Store | StrPath | Iterable[StrPath]) -> Levels:
    """
    Return the levels of *store*: several if it is a list, otherwise one.

    Raises:
        InvalidInput: A level is not a path or URL, is listed twice or is inside another; or the first of several levels
            is a bucket.
    """
    if isinstance(store, Store | str | PathLike):
        return Levels(store)
    named = list(store)
    if not named or not all(isinstance(level, str | PathLike) for level in named):
        raise InvalidInput(
            f"the levels are {named!r}", hint='list paths or URLs, nearest first: ["/dev/shm/sft", "s3://bucket/sft"]'
        )
    first, *others = map(place, named)
    if others and is_url(first):
        raise InvalidInput(f"{first} is the first level, and a bucket", hint="list a folder first, or only the bucket")
    # As URLs, so that a folder compares equal to its file:// URL.
    resolved = [level if is_url(level) else Path(level).resolve().as_uri() for level in (first, *others)]
    for (one, here), (other, there) in permutations(zip((first, *others), resolved, strict=True), 2):
        if here == there:
            raise InvalidInput(f"level {one} comes twice", hint="list each level once, nearest first")
        if here.startswith(f"{there.rstrip('/')}/"):
            raise InvalidInput(f"level {one} is inside level {other}", hint="use separate paths")
    return Levels(first, tuple(others))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLevels:
    """The levels of a run, opened on one rank."""

    store: Store | None
    """The level where commits are made: the first, or the second if each node has a first level of its own."""
    near: Near | None = None
    """This node's own first level, if each has one."""
    firsts: tuple[int, ...] = ()
    """By rank, the first rank of its node, if each node has a first level of its own."""

    @property
    def depth(self) -> int:
        """How many levels come before *store*."""
        return bool(self.firsts)


def open_levels(exchange: Exchange, levels: Levels, run: str, *, makes: bool = False) -> OpenLevels:
    """
    Open *levels* on every rank, after bringing *run* in the first level up to date with the others. Collective.

    If no level holds a store, one is made if *makes* is True; otherwise, the result's store is None.
    """
    near = Path(str(levels.first))
    firsts = first_ranks(exchange, near) if levels.others else []
    if not any(firsts):  # all ranks see the same folder as rank 0
        if levels.others:
            with exchange.raise_on_all():
                if exchange.rank == 0:
                    _take_over(levels, run)
        store = open_together(exchange, levels.first)
        return OpenLevels(store=make_together(exchange, str(levels.first)) if store is None and makes else store)
    behind, *further = levels.others
    with exchange.raise_on_all():
        if further and is_url(behind):
            raise InvalidInput(
                f"{further[0]} cannot come after {behind}, a bucket",
                hint="as each node has its own first level, end the list with the bucket",
            )
        if further and exchange.rank == 0:
            _take_over(Levels(behind, tuple(further)), run)
    store = open_together(exchange, behind)
    if store is None:
        with exchange.raise_on_all():
            _check_new(near, behind, run)
    if store is None and makes:
        store = make_together(exchange, behind)
    if store is None:
        return OpenLevels(store=None, firsts=tuple(firsts))
    store, own = open_nodes(exchange, store, near, behind, run, firsts=firsts)
    return OpenLevels(store=store, near=own, firsts=tuple(firsts))


def _check_new(near: Path, behind: str, run: str) -> None:
    """Raise Conflict if *near* has commits of *run*: they were made in *behind*, which no longer has a store."""
    opened = store_if_there(near)
    if opened is None:
        return
    with opened:
        mine = newest(opened, run)
    if mine is not None:
        raise Conflict(
            f"{near} has {run}@{mine.step}, but there is no store at {behind}, where commits are made",
            hint="mount it; if it is gone for good, list a new folder as the first level",
        )


def _take_over(levels: Levels, run: str) -> None:
    """Bring *run* in the first level up to date with the later levels, and log it."""
    from layerstore.remote import Bucket, Remote, check_same_store, take_over

    near = Path(str(levels.first))
    with ExitStack() as stack:
        opened = store_if_there(near)
        mine = None if opened is None else newest(stack.enter_context(opened), run)
        if opened is not None and mine is not None and not has_whole(opened, mine):
            mine = _completed(opened, mine, levels.others[0], run)
        # Nearest first: if several levels have a step, it is read from the nearest of them.
        for level in levels.others:
            there = _open_if_there(level, near)
            if there is None:
                continue
            theirs = newest(stack.enter_context(there), run)
            # Checked before anything is copied: two stores that were mixed up cannot be separated again.
            if opened is not None:
                check_same_store(there.repo, opened.repo.identity)
            if opened is None or (theirs is not None and there.repo.catalog.view(run).newer_than(mine)):
                with Remote(Bucket(url_of(level)), Files()) as remote:
                    take_over(remote, near, run=run)
                opened, mine = stack.enter_context(Store(near)), theirs
                if theirs is not None:
                    LOG.info("%s@%d is read from %s: %s does not have it", run, theirs.step, level, near)


def _completed(near: Store, mine: RecordRow, behind: str, run: str) -> RecordRow | None:
    """
    Return the newest commit in *near* that is not lost; *mine*, the newest of all, has only some of its objects there.

    The level *behind* may have the other objects. If it does not, *mine* is lost: *near* belonged to one of several
    nodes, and the other nodes are gone. If there is no store at *behind*, *mine* is returned anyway.
    """
    store = store_if_there(behind)
    if store is None:
        return mine
    with store:
        if near.repo.catalog.view(run).newer_than(newest(store, run)):
            send_commits(near, behind, run)
            store.repo.records.refresh()
            forget_unsent(near, store, run)
    return newest(near, run)


def _open_if_there(level: str, near: Path) -> Store | None:
    try:
        return store_if_there(level)
    except StorageIO as exc:
        # Never skip such a level: training would continue from an older step, and silently fork the run.
        raise StorageIO(
            f"{level} may have newer steps than {near}, and cannot be read: {exc}",
            errno=exc.errno,
            filename=exc.filename,
            hint="try again; or leave this level out, to continue from what the others have",
        ) from exc


def make_levels(store: Store, others: Iterable[str]) -> None:
    """
    Make sure that each of the *others* can receive the saves of *store*; create a store in a folder without one.

    Raises:
        Conflict: One of them is a different store.
        StorageIO: A bucket does not answer, or refuses the key.
    """
    from layerstore.remote import check_same_store

    for level in others:
        if is_url(level):
            store.check_remote(level)
            continue
        there = store_if_there(level)
        if there is None:
            make_store(Path(level), Files(), identity=store.repo.identity)
            continue
        with there:
            check_same_store(there.repo, store.repo.identity)
