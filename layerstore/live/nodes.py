"""
A first level in each node: the ranks of a node write to its own store, and commits are made in the level behind it.

Each node's store is a partial clone of that level: it has what its own ranks have written, and fetches whatever else is
needed. What a job could not send before it died lies there, and is sent when the next one resumes.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from layerstore.disk import Files
from layerstore.errors import IntegrityError
from layerstore.format import STATE_MAGIC, VERSION_MAGIC
from layerstore.hashing import object_id
from layerstore.layout import is_url, layout_at, url_of
from layerstore.limits import REMOTE_REQUESTS_MAX
from layerstore.live.binding import wait_for_saves
from layerstore.live.log import LOG, words_of
from layerstore.live.ranks import Exchange, GroupParts
from layerstore.live.saver import Near
from layerstore.model import BlobRef
from layerstore.storage import RecordRow, Repository
from layerstore.store import Store, store_of
from layerstore.threads import Threads


def first_ranks(exchange: Exchange, folder: Path) -> list[int]:
    """Return, by rank, the first of the ranks that see the same *folder* as that one. Collective."""
    token = exchange.first(secrets.token_hex(8) if exchange.rank == 0 else "")
    files, places = Files(), (layout_at(folder).tmp, folder, *folder.absolute().parents)
    there = next(place for place in places if files.is_directory(place))
    # The folder may be yet to be made: its own path tells it from others in the folder that is there.
    prefix = f".layerstore-{token}-{object_id(str(folder.absolute()).encode())}."
    with _marked(exchange, files, there / f"{prefix}{exchange.rank}"):
        # A name that was never asked for is looked up anew, also on NFS.
        first = next(rank for rank in range(exchange.size) if files.exists(there / f"{prefix}{rank}"))
        return [found for (found,) in exchange.integers([first])]


@contextmanager
def _marked(exchange: Exchange, files: Files, mine: Path) -> Iterator[None]:
    """Make the file *mine* on every rank, for a while."""
    with exchange.raise_on_all():
        files.create(mine).close()
    try:
        yield
    finally:
        files.discard(mine)


def open_nodes(
    exchange: Exchange, store: Store, near: Path, behind: str, run: str, *, firsts: list[int]
) -> tuple[Store, Near]:
    """
    Return *store*, the level *behind* the nodes' own, which reads from *near* what is there, and this node's own.

    What *near* has of *run* that *store* lacks is sent first: *firsts* are the first ranks of each rank's node.

    Raises:
        Conflict: *near* is another store.
    """
    import torch.distributed as dist

    is_first_here = firsts[exchange.rank] == exchange.rank
    with exchange.raise_on_all():
        wait_for_saves(store.id, run)
    with exchange.raise_on_all():
        if is_first_here:
            from layerstore.remote import make_partial

            make_partial(near, store.repo.identity, url_of(behind))
    with exchange.raise_on_all():
        opened = Store(near)
    _send_rest(exchange, opened, store, behind, run, is_first_here=is_first_here)
    with exchange.raise_on_all():
        store.repo.records.refresh()
        if exchange.rank == 0:
            from layerstore.remote import Bucket, Remote, take_over

            with Remote(Bucket(url_of(behind)), Files()) as remote:  # what the next saves inherit
                take_over(remote, near, run=run)
    parts = GroupParts(
        opened.repo.layout,
        opened.repo.files,
        store_id=opened.id,
        group=dist.distributed_c10d._get_default_store(),
        world_size=exchange.size,
    )
    written_to = Near(
        store=opened, repo=replace(opened.repo, parts=parts), behind=url_of(behind), is_first_here=is_first_here
    )
    return store_of(replace(store.repo, objects=opened.repo.objects)), written_to


def _send_rest(exchange: Exchange, near: Store, store: Store, behind: str, run: str, *, is_first_here: bool) -> None:
    """Send the saves of *run* that a job which has ended has written to the nodes, but not to *store*."""
    mine = newest(near, run) if is_first_here else None
    found = exchange.integers([-1, -1] if mine is None else [mine.attempt, mine.step])
    owner = max(range(exchange.size), key=lambda rank: (found[rank], -rank))
    there = newest(store, run)
    attempt, step = exchange.integers([-1, -1] if there is None else [there.attempt, there.step])[0]
    if found[owner] <= [attempt, step]:
        return
    if exchange.rank == 0:
        LOG.info("%s@%d is not in %s yet: the nodes send it now", run, found[owner][1], behind)
    with exchange.raise_on_all():
        if is_first_here and exchange.rank != owner:
            send_objects(near.repo, store.repo)
    with exchange.raise_on_all():
        if exchange.rank == owner:
            _send_commits(near, behind, run, after=(attempt, step))


def _send_commits(near: Store, behind: str, run: str, *, after: tuple[int, int]) -> None:
    from layerstore.remote import Bucket, kept_there, send_to_folder

    try:
        if is_url(behind):
            near.push(behind, runs=[run])
        else:
            send_to_folder(near.repo, Path(behind), run=run)
    except IntegrityError as exc:
        there = kept_there(near.repo, Bucket(url_of(behind)))
        rows = near.repo.catalog.view(run).visible
        for row in (row for row in rows if (row.attempt, row.step) > after and row.id not in there):
            LOG.warning("%s@%d is lost with a node that had a part of it: %s", run, row.step, words_of(exc))
            near.repo.trash.take_record(row.name)
            near.repo.catalog.forget([row.name])


def send_objects(near: Repository, repo: Repository) -> None:
    """Copy every object of *near* that *repo* lacks; a version or state blob comes after what it names."""
    sizes = ((name, near.files.size(near.layout.object(name))) for name in near.objects.ids())
    refs = [BlobRef(id=name, size_bytes=size) for name, size in sizes if size is not None]
    with repo.writer() as writer:
        with Threads(REMOTE_REQUESTS_MAX, thread_name_prefix="ask") as pool:
            lacking = [ref for ref, is_there in zip(refs, pool.map(writer.reuse, refs), strict=True) if not is_there]
        blobs = []
        for ref in lacking:
            with near.objects.open(ref) as file:
                is_blob = file.read_at(0, min(ref.size_bytes, len(STATE_MAGIC))) in {STATE_MAGIC, VERSION_MAGIC}
            if is_blob:
                blobs.append(ref)
            else:
                writer.copy(ref, near.objects)
        writer.publish()
        for ref in blobs:
            writer.copy(ref, near.objects)
        writer.publish()


def newest(store: Store, run: str) -> RecordRow | None:
    """Return the newest commit of *run* that *store* has."""
    view = store.repo.catalog.find(run)
    return view.visible[-1] if view is not None and view.visible else None
