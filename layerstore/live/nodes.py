"""
A first level on each node: the ranks of a node write to the node's store, and commits are made in the next level.

Each node's store is a partial clone of the next level: it has the saves of its own ranks, and fetches everything else
on demand. Saves that a job could not send before it died stay in the node's store; the next job sends them on resume.
"""

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from layerstore.disk import Files
from layerstore.errors import IntegrityError, NotFound
from layerstore.format import STATE_MAGIC, VERSION_MAGIC
from layerstore.hashing import object_id
from layerstore.history import named_by
from layerstore.layout import MARK_PREFIX, is_url, layout_at, url_of
from layerstore.limits import REMOTE_REQUESTS_MAX
from layerstore.live.binding import wait_for_saves
from layerstore.live.log import LOG, one_line
from layerstore.live.ranks import Exchange, GroupParts
from layerstore.live.saver import Near, forget_record
from layerstore.model import BlobRef
from layerstore.storage import RecordRow, Repository
from layerstore.store import Store, store_of
from layerstore.threads import Threads


def first_ranks(exchange: Exchange, folder: Path) -> list[int]:
    """Return, for each rank, the first rank that sees the same *folder*: the first rank of its node. Collective."""
    token = exchange.first(secrets.token_hex(8) if exchange.rank == 0 else "")
    files, places = Files(), (layout_at(folder).tmp, folder, *folder.absolute().parents)
    with exchange.raise_on_all():
        there = next(place for place in places if files.is_directory(place))
    # If the folder does not exist yet, marks are put in a parent; a hash of the path in their names separates folders.
    prefix = f"{MARK_PREFIX}{token}-{object_id(str(folder.absolute()).encode())}."
    with _marked(exchange, files, there / f"{prefix}{exchange.rank}"):
        with exchange.raise_on_all():
            # NFS caches names that were looked up before; these names are new, so the client asks the server.
            first = next(rank for rank in range(exchange.size) if files.exists(there / f"{prefix}{rank}"))
        return [first_rank for (first_rank,) in exchange.integers([first])]


@contextmanager
def _marked(exchange: Exchange, files: Files, mark: Path) -> Iterator[None]:
    """Keep the file *mark*, one per rank, while the block runs."""
    try:
        with exchange.raise_on_all():
            files.create(mark).close()
        yield
    finally:
        files.discard(mark)


def open_nodes(
    exchange: Exchange, store: Store, near: Path, behind: str, run: str, *, firsts: list[int]
) -> tuple[Store, Near]:
    """
    Return *store*, now reading from *near* first, and this node's own store *near*.

    *store* is the next level, at *behind*. Saves of *run* that are in *near* but not in *store* are sent first.
    *firsts* lists, for each rank, the first rank of that rank's node.

    Raises:
        Conflict: *near* holds a different store.
    """
    import torch.distributed as dist

    is_first_here = firsts[exchange.rank] == exchange.rank
    with exchange.raise_on_all():
        wait_for_saves(store.id, run)  # a saver of this process may still be sending from *near*
    with exchange.raise_on_all():
        if is_first_here:
            from layerstore.remote import make_partial

            if not Files().exists(layout_at(near).identity):
                LOG.info("made a new store for the saves of this node's ranks: %s", near)
            make_partial(near, store.repo.identity, url_of(behind))
    with exchange.raise_on_all():
        opened = Store(near)
    # First, so that *store* has everything before this node copies the newest commit from it.
    _send_rest(exchange, opened, store, behind, run, is_first_here=is_first_here)
    with exchange.raise_on_all():
        store.repo.records.refresh()
        if exchange.rank == 0:
            from layerstore.remote import Bucket, Remote, take_over

            with Remote(Bucket(url_of(behind)), Files()) as remote:  # get the commit that the next saves inherit from
                take_over(remote, near, run=run, is_whole=False)
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
    # Reads go to the node's partial clone, which fetches missing objects from the next level.
    return store_of(replace(store.repo, objects=opened.repo.objects)), written_to


def _send_rest(exchange: Exchange, near: Store, store: Store, behind: str, run: str, *, is_first_here: bool) -> None:
    """Send to *store* the saves of *run* that an earlier job wrote only to the nodes."""
    with exchange.raise_on_all():
        mine, there = newest(near, run) if is_first_here else None, newest(store, run)
    newest_by_rank = exchange.integers([-1, -1] if mine is None else [mine.attempt, mine.step])
    owner = max(range(exchange.size), key=lambda rank: (newest_by_rank[rank], -rank))
    after = exchange.integers([-1, -1] if there is None else [there.attempt, there.step])[0]
    if newest_by_rank[owner] > after:
        if exchange.rank == 0:
            LOG.info("%s@%d is not in %s yet: the nodes send it now", run, newest_by_rank[owner][1], behind)
        # All nodes send their objects before one node sends the commits: a commit refers to objects of every node.
        _run_on_all(exchange, lambda: send_objects(near.repo, store.repo) if is_first_here else None)
        _run_on_all(exchange, lambda: send_commits(near, behind, run) if exchange.rank == owner else None)
    with exchange.raise_on_all():
        if is_first_here:
            store.repo.records.refresh()
            forget_unsent(near, store, run)


def _run_on_all(exchange: Exchange, work: Callable[[], None]) -> None:
    """Run *work* on every rank, however long it takes; raise on all ranks if it fails on one."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        exchange.wait(lambda seconds: bool(wait([done], seconds).done))
        with exchange.raise_on_all():
            done.result()


def send_commits(near: Store, behind: str, run: str) -> None:
    """Send the commits of *run* in *near* whose objects are all in *near* or *behind*; log if any cannot be sent."""
    from layerstore.remote import send_to_folder

    try:
        if is_url(behind):
            near.push(behind, runs=[run])
        else:
            send_to_folder(near.repo, Path(behind), run=run)
    except IntegrityError as exc:
        LOG.warning("not all of run %r could be sent to %s: %s", run, behind, one_line(exc))


def forget_unsent(near: Store, store: Store, run: str) -> None:
    """
    Remove the records of *run* that are in *near* but not in *store*.

    Records newer than all commits in *store* can never be sent: a node that had parts of them is gone. The other
    records were removed from *store* by a collection.
    """
    view, there = near.repo.catalog.find(run), store.repo.catalog.find(run)
    if view is None:
        return
    lost = {row.id for row in view.newer_than(newest(store, run))}
    for row in view.visible:
        # If the record is damaged in *store*, it stays in *near*, which may have the only sound copy.
        if there is None or (row.id not in there.rows and row.name not in there.damaged):
            if row.id in lost:
                LOG.warning("%s@%d is lost: a node that had a part of it is gone", run, row.step)
            forget_record(near.repo, row.name)


def has_whole(near: Store, row: RecordRow) -> bool:
    """Whether *near* itself has every object of the commit *row*; always True unless *near* is a partial clone."""
    if not near.repo.files.exists(near.repo.layout.partial):
        return True
    record = near.repo.catalog.commit(row.name).record
    with suppress(IntegrityError, NotFound):
        refs = (ref for blob in record.blobs for ref in (blob, *named_by(near.repo, blob)))
        return all(near.repo.objects.find_at_once(ref) is not None for ref in refs)
    return False


def send_objects(near: Repository, repo: Repository) -> None:
    """
    Copy the objects of *near* that *repo* lacks, except version blobs; copy states last.

    Version blobs are left to `send_commits`: they refer to objects of other nodes, which may be gone.
    """
    sizes = ((name, near.files.size(near.layout.object(name))) for name in near.objects.ids())
    refs = [BlobRef(id=name, size_bytes=size) for name, size in sizes if size is not None]
    with repo.writer() as writer:
        with Threads(REMOTE_REQUESTS_MAX, thread_name_prefix="ask") as pool:
            lacking = [ref for ref, is_there in zip(refs, pool.map(writer.reuse, refs), strict=True) if not is_there]
        states = []
        for ref in lacking:
            with near.objects.open(ref) as file:
                magic = file.read_at(0, min(ref.size_bytes, len(STATE_MAGIC)))
            if magic == STATE_MAGIC:
                states.append(ref)
            elif magic != VERSION_MAGIC:
                writer.copy(ref, near.objects)
        writer.publish()
        # States come after their objects: a blob in the store promises that all objects it refers to exist.
        for ref in states:
            writer.copy(ref, near.objects)
        writer.publish()


def newest(store: Store, run: str) -> RecordRow | None:
    """Return the newest commit of *run* in *store*."""
    view = store.repo.catalog.find(run)
    return None if view is None else view.newest
