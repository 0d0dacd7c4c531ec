"""
Pull: fetch the commits and pins that a remote has and a store lacks, each in its own transaction.

Every object is checked against its id before anything references it. Locally dropped commits stay dropped.

A partial clone has all records and blobs of its origin, but only the tensors that were needed so far; ``partial.json``
holds the URL of the remote that has the rest. New saves in such a store are complete.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from layerstore.disk import Files
from layerstore.errors import AlreadyExists, Conflict, IntegrityError, InvalidInput, NotFound
from layerstore.format import StoreIdentity
from layerstore.history import named_by, note_pushed, pushed_to, references_to, resolve
from layerstore.json_text import parse_json
from layerstore.layers import typed
from layerstore.layout import layout_at
from layerstore.limits import OWN_JSON_BYTES_MAX, REMOTE_REQUESTS_MAX
from layerstore.model import BlobRef, Commit, CommitId, CommitRecord, Pin
from layerstore.progress import Progress, Silent
from layerstore.publish import Transaction, check_pin_means
from layerstore.remote.fetch import FetchedObjects, Source
from layerstore.remote.mirror import Remote
from layerstore.remote.push import Failures, chunks_of, raise_failures
from layerstore.remote.remotes import Remotes, check_elsewhere, checked_url, folder_at
from layerstore.shares import ALONE, Shares, cut
from layerstore.storage import (
    ObjectWriter,
    RecordName,
    Repository,
    Staged,
    make_store,
    open_repository,
)
from layerstore.threads import Threads, run_all

_PUBLISHED_BYTES = 128 << 20
_PUBLISHED_TIMES_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """The result of a pull."""

    _JSON: ClassVar = "url commits pins objects bytes_received"

    url: str
    commits: tuple[str, ...]
    """References of the commits that the store did not have before."""
    pins: tuple[str, ...]
    objects: int
    bytes_received: int
    """The size of the objects and blobs that were fetched."""
    dropped: tuple[str, ...] = ()
    """The ids of commits that were not fetched, because they are in the local trash."""


class OnDisk:
    """An open store on a disk as the origin of commits; a partial clone fetches the objects that it lacks."""

    def __init__(self, repo: Repository) -> None:
        self.repo = repo
        self.url = repo.name

    def checked(self, ref: BlobRef) -> Iterator[memoryview]:
        """Yield the bytes of *ref*; raises IntegrityError, at the latest at the end, unless they match its name."""
        return chunks_of(self.repo, ref)


def pull(
    repo: Repository,
    remote: Remote,
    *,
    refs: Iterable[str] | None = None,
    runs: Iterable[str] | None = None,
    progress: Progress,
) -> Pulled:
    """
    Fetch the commits and pins of *remote* that *repo* lacks: those of *runs*, of all runs, or only *refs*.

    *refs* are references in the remote.
    """
    theirs = remote.repo.identity.store_id
    if theirs != repo.identity.store_id:
        raise Conflict(
            f"{remote.url} is a remote of another store ({theirs}); nothing was fetched",
            hint=f"layerstore clone {typed(remote.url)} PATH makes a store of it",
        )
    repo.prepare_writing()
    return _Pull(repo, remote, progress).run(refs, runs)


def send_to_folder(repo: Repository, path: Path, *, run: str, is_whole: bool = True) -> None:
    """
    Copy the commits of *run* that are newer than all of its commits in the store at *path*.

    If that store has no commits of *run*, copy all of them or, unless *is_whole*, only the newest. Pins of *run* that
    the store lacks are copied, too.

    Raises:
        Conflict: *path* holds another store.
        IntegrityError: A commit is damaged in *repo*; the others were copied.
    """
    target = open_repository(path, Files())
    try:
        check_same_store(target, repo.identity)
        target.prepare_writing()
        here = target.records.pin_names()
        pins = [pin for _, pin in repo.records.pins() if isinstance(pin, Pin) and pin.record.run == run]
        pins = [pin for pin in pins if pin.name not in here]
        failures: Failures = {}
        commits = _newer_commits(repo, target, run, failures, is_whole=is_whole)
        _Pull(target, OnDisk(repo), Silent()).fetch(commits, pins, failures)
    finally:
        target.close()


def _newer_commits(
    repo: Repository, target: Repository, run: str, failures: Failures, *, is_whole: bool
) -> list[Commit]:
    """
    Return the commits of *run* in *repo* that are newer than all in *target*.

    If *target* has none, return all or, unless *is_whole*, the newest. Damaged commits are added to *failures*.
    """
    mine, there = repo.catalog.find(run), target.catalog.find(run)
    newest = None if there is None else there.newest
    rows = [] if mine is None else mine.newer_than(newest)
    commits = []
    for row in rows if is_whole or newest is not None else rows[-1:]:
        # NotFound: a collection may remove an old commit in the meantime.
        with _deferring_errors(failures, f"{run}@{row.step}"), suppress(NotFound):
            commits.append(repo.catalog.commit(row.name))
    return commits


def check_same_store(repo: Repository, identity: StoreIdentity) -> None:
    """Raise Conflict unless *repo* is a copy of the store *identity*."""
    if repo.identity.store_id != identity.store_id:
        raise Conflict(
            f"{repo.name} is another store ({repo.identity.store_id}); nothing was changed", hint="name another folder"
        )


def clone(
    remote: Remote, path: Path, *, is_partial: bool = False, shares: Shares = ALONE, progress: Progress
) -> Pulled:
    """
    Make *path* a store with everything that *remote* has, and add the remote to it as ``origin``.

    After a kill, repeat the call. With *is_partial*, tensors are fetched only when they are needed.

    Raises:
        AlreadyExists: *path* holds another store, a clone of the other kind (full or partial), or something else.
    """
    check_elsewhere(remote.url, path)
    identity, files = remote.repo.identity, Files()
    try:
        make_store(path, files, identity=identity)
    except AlreadyExists:
        if not files.exists(layout_at(path).identity):
            raise
    repo = replace(open_repository(path, files), shares=shares)
    try:
        if repo.identity.store_id != identity.store_id:
            raise AlreadyExists(f"{path} is another store; nothing was fetched", hint="choose another path")
        was_partial = partial_of(repo) is not None
        if is_partial and not was_partial and repo.records.runs():
            raise AlreadyExists(
                f"{path} is a clone with all tensors; nothing was changed",
                hint="leave --records out, or choose another path",
            )
        if was_partial and not is_partial:
            raise AlreadyExists(
                f"{path} is a partial clone; nothing was changed",
                hint="choose another path for a full clone, or add --records",
            )
        Remotes(repo).add("origin", remote.url)
        if is_partial:
            _make_partial(repo, remote.url)
        return pull(repo, remote, refs=None, progress=progress)
    finally:
        repo.close()


class _Pull:
    def __init__(self, repo: Repository, remote: Remote | OnDisk, progress: Progress) -> None:
        self._repo = repo
        self._remote = remote
        self._progress = progress
        self._is_partial = partial_of(repo) == remote.url
        self._objects = 0
        self._bytes_received = 0
        self._dropped: tuple[str, ...] = ()
        self._there: list[CommitId] = []
        """The requested commits that the remote has."""

    def run(self, refs: Iterable[str] | None, runs: Iterable[str] | None) -> Pulled:
        """Fetch the requested commits and pins that are missing locally; None requests all."""
        failures: Failures = {}
        is_whole = refs is None and runs is None
        before = pushed_to(self._repo).get(self._remote.url, frozenset()) if is_whole else ()
        commits, pins = self._requested(refs, runs, failures)
        pulled = self.fetch(commits, pins, failures)
        note_pushed(self._repo, self._remote.url, self._there, before=before)
        return pulled

    def fetch(self, commits: Sequence[Commit], pins: Sequence[Pin], failures: Failures) -> Pulled:
        """Fetch *commits* and *pins*; raise at the end if there are *failures*, earlier ones or new ones."""
        with Threads(REMOTE_REQUESTS_MAX, thread_name_prefix="pull") as pool:
            for commit in commits:
                with (
                    _deferring_errors(failures, f"{commit.record.run}@{commit.record.step}"),
                    Transaction(self._repo) as tx,
                ):
                    self._fetch(pool, tx.objects, commit.record)
                    tx.commit(commit.record, observed=commit.observed)
            for pin in pins:
                with _deferring_errors(failures, f"pin {pin.name}"), Transaction(self._repo) as tx:
                    self._fetch(pool, tx.objects, pin.record)
                    tx.objects.publish()  # first, since `pin` expects the record's objects to be in the store
                    tx.pin(pin)
        raise_failures(failures, "fetched")
        return Pulled(
            url=self._remote.url,
            commits=tuple(references_to(self._repo, [commit.record for commit in commits])),
            pins=tuple(pin.name for pin in pins),
            objects=self._objects,
            bytes_received=self._bytes_received,
            dropped=self._dropped,
        )

    def _requested(
        self, refs: Iterable[str] | None, runs: Iterable[str] | None, failures: Failures
    ) -> tuple[list[Commit], list[Pin]]:
        """
        Return the requested commits and pins that are missing locally, commits by step.

        If everything is requested, damaged commits and pins are added to *failures*.
        """
        theirs = self._remote.repo
        if refs is None:
            dropped = set(self._repo.trash.only_here())
            wanted = theirs.catalog.runs() if runs is None else [*runs]
            views = [view for run in wanted if (view := theirs.catalog.find(run)) is not None]
            visible = [row.name for view in views for row in view.visible]
            names = [name for name in visible if name not in dropped]
            self._there = [name.id for name in visible]
            self._dropped = tuple(name.id for name in visible if name in dropped)
            damaged = [item for view in views for item in view.damaged.items() if item[0] not in dropped]
            lost = [(name, error) for name, error in damaged if not self._repo.records.is_there(name)]
            failures |= {f"{name.run}@{name.step}": error for name, error in lost}
            here, pins = self._repo.records.pin_names(), []
            for name, pin in theirs.records.pins():
                if isinstance(pin, Pin):
                    pins += [name] if runs is None or pin.record.run in wanted else []
                elif name not in here and runs is None:
                    failures[f"pin {name}"] = pin
        else:
            resolved = [resolve(theirs, ref) for ref in refs]
            commits = [commit for commit in resolved if commit.pin is None]
            names = [RecordName(commit.record.run, commit.record.step, commit.commit) for commit in commits]
            pins = [ref.pin for ref in resolved if ref.pin is not None]
            self._there = [name.id for name in names]
        lacking = [theirs.catalog.commit(name) for name in sorted(names) if not self._repo.records.is_there(name)]
        missing = []
        for name in pins:
            pin = theirs.records.read_pin(name)
            with _deferring_errors(failures, f"pin {name}"):
                check_pin_means(self._repo, name, pin.base)
            if name not in self._repo.records.pin_names():
                missing.append(pin)
        return lacking, missing

    def _fetch(self, pool: ThreadPoolExecutor, objects: ObjectWriter, record: CommitRecord) -> None:
        """Stage everything that *record* references and the store lacks; blobs come after their objects."""
        blobs = [blob for blob in record.blobs if not objects.claim(blob)]
        with self._remote.repo.objects.expected(blobs) as theirs:
            source = replace(self._remote.repo, objects=theirs)
            # A partial clone gets only the blobs: its source has the objects that they reference.
            described = [] if self._is_partial else blobs
            named = dict.fromkeys(ref for blob in described for ref in named_by(source, blob))
            self._fetch_tensors(pool, objects, record, [ref for ref in named if not objects.reuse(ref)])
            # After their objects: a blob in the store promises that everything it references can be found.
            for blob in blobs:
                objects.copy(blob, theirs)

    def _fetch_tensors(
        self, pool: ThreadPoolExecutor, objects: ObjectWriter, record: CommitRecord, lacking: Sequence[BlobRef]
    ) -> None:
        self._progress.start(f"pull {record.run}@{record.step}", sum(ref.size_bytes for ref in lacking))
        shares = self._repo.shares
        mine, *theirs = (
            lacking[span.start : span.stop] for span in cut([ref.size_bytes for ref in lacking], count=shares.count)
        )
        with shares.scatter_work(self._repo, fetch_share, [(self._remote.url, part) for part in theirs]) as answers:
            self._stage_all(pool, objects, mine)
            for staged in answers():
                objects.join(staged)
                self._objects += len(staged.new)
                self._bytes_received += sum(ref.size_bytes for ref, _ in staged.new)

    def _stage_all(self, pool: ThreadPoolExecutor, objects: ObjectWriter, refs: Sequence[BlobRef]) -> None:
        """
        Stage *refs*, and publish them a few at a time, so that a pull that is cut off need not start over.

        No record references them yet, so a collection may remove them once they are older than its grace. While this
        process lives, its staged files are hard links to them, from which the transaction restores them.
        """
        sizes = [ref.size_bytes for ref in refs]
        for part in filter(None, cut(sizes, count=min(sum(sizes) // _PUBLISHED_BYTES + 1, _PUBLISHED_TIMES_MAX))):
            try:
                run_all(pool, partial(self._stage, objects), refs[part.start : part.stop])
            finally:
                objects.publish()  # after an error, too: objects that have arrived need not be fetched again

    def _stage(self, objects: ObjectWriter, ref: BlobRef) -> None:
        objects.stage(ref, self._counted(ref))
        self._objects += 1

    def _counted(self, ref: BlobRef) -> Iterator[memoryview]:
        for data in self._remote.checked(ref):
            self._bytes_received += len(data)
            self._progress.advance(len(data))
            yield data


@contextmanager
def _deferring_errors(failures: Failures, name: str) -> Iterator[None]:
    """Record damage, or a conflicting pin, in *failures* under *name*, so that the rest can still be fetched."""
    try:
        yield
    except (IntegrityError, AlreadyExists) as exc:
        failures[name] = exc


@contextmanager
def fetch_share(repo: Repository, part: tuple[str, Sequence[BlobRef]]) -> Iterator[Staged]:
    """Stage some objects from the bucket at a URL for the leading process, which publishes them."""
    url, refs = part
    source = Source(url, repo.layout)

    def stage(ref: BlobRef) -> None:
        writer.stage(ref, (data for _, data in source.checked(ref)))

    with ObjectWriter(repo.layout, repo.files, repo.objects) as writer:
        with Threads(REMOTE_REQUESTS_MAX, thread_name_prefix="pull") as pool:
            run_all(pool, stage, refs)
        yield writer.staged


# -- partial clones --------------------------------------------------------------------------------------------------


def completed(repo: Repository) -> Repository:
    """
    Return the partial clone *repo*, with its objects fetched on demand.

    Raises:
        IntegrityError: ``partial.json`` is damaged.
    """
    url = partial_of(repo)
    assert url is not None, "it is one"
    return replace(repo, objects=FetchedObjects(repo.layout, repo.files, _source(repo, url)))


def _source(repo: Repository, url: str) -> Source:
    """Return the source for *repo*: the store at *url* and, if that is itself a partial clone, its own source."""
    rest = None
    if (folder := folder_at(url)) is not None and repo.files.exists(layout_at(folder).partial):
        rest = partial_of(open_repository(folder, repo.files))
    return Source(url, repo.layout, rest=None if rest is None else Source(rest, repo.layout))


def take_over(remote: Remote, path: Path, *, run: str, is_whole: bool = True) -> None:
    """
    Pull *run* from *remote* into the store at *path*, which is made if missing; tensors are fetched when needed.

    Unless *is_whole*, pull only commits newer than those in the store or, if it has none, only the newest.

    Raises:
        Conflict: *path* holds another store.
        AlreadyExists: *path* holds something else.
    """
    make_partial(path, remote.repo.identity, remote.url)
    repo = open_repository(path, Files())
    try:
        if is_whole:
            pull(repo, remote, runs=[run], progress=Silent())
        else:
            failures: Failures = {}
            commits = _newer_commits(remote.repo, repo, run, failures, is_whole=False)
            _Pull(repo, remote, Silent()).fetch(commits, [], failures)
    finally:
        repo.close()


def make_partial(path: Path, identity: StoreIdentity, url: str) -> None:
    """
    Make the store at *path*, new or existing, a partial clone of the remote at *url*, which holds the store *identity*.

    Raises:
        Conflict: *path* holds another store.
        AlreadyExists: *path* holds something else.
    """
    files = Files()
    try:
        make_store(path, files, identity=identity)
    except AlreadyExists:
        if not files.exists(layout_at(path).identity):
            raise
    repo = open_repository(path, files)
    try:
        check_same_store(repo, identity)
        if partial_of(repo) != url:
            _make_partial(repo, url)
    finally:
        repo.close()


def partial_of(repo: Repository) -> str | None:
    """Return the URL of the remote that completes *repo*; None if *repo* is not a partial clone."""
    path = repo.layout.partial
    data = repo.files.read_if_there(path, size_bytes_max=OWN_JSON_BYTES_MAX)
    if data is None:
        return None
    try:
        return checked_url(parse_json(data)["url"])
    except (ValueError, TypeError, KeyError, AttributeError, InvalidInput) as exc:
        raise IntegrityError(
            f"{path} does not say which remote has the rest of this store",
            hint='write {"url": URL} to it, where URL is what this store was cloned from',
        ) from exc


def _make_partial(repo: Repository, url: str) -> None:
    """Record that the remote at *url* has what *repo* lacks."""
    # Synced before the first record is fetched: without this file, a missing tensor would look like damage.
    with repo.files.temporary(repo.layout.tmp, json.dumps({"url": url}).encode() + b"\n") as source:
        repo.files.rename(source, repo.layout.partial)
    repo.files.sync_directory(repo.layout.root)
