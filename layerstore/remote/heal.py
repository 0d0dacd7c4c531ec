"""Repair a remote from a store that has sound copies."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from layerstore.check import Damage, Fetched, Repaired, Verdict, verify_store
from layerstore.errors import IntegrityError, NotFound
from layerstore.format import stated_flags
from layerstore.layout import IDENTITY
from layerstore.limits import OWN_JSON_BYTES_MAX, RECORD_BYTES_MAX
from layerstore.model import BlobRef, ObjectId
from layerstore.progress import Progress
from layerstore.remote.bucket import Bucket, Chunks
from layerstore.remote.identity import identity_of, pushed_records, records_in
from layerstore.remote.mirror import Remote
from layerstore.remote.push import chunks_of
from layerstore.storage import Repository

# More than one pass, because a restored blob references objects that could not be checked before.
_LOOKS_MAX = 4


def heal_identity(repo: Repository, bucket: Bucket, *, dry_run: bool) -> tuple[Fetched, ...]:
    """
    Restore a missing or damaged ``store.json`` in *bucket*, if *repo* has all commits of *bucket*.

    Flags that are still readable in the damaged file are kept, so that a layerstore too old to know these flags still
    refuses to write to the bucket.

    Raises:
        IntegrityError: The bucket has a commit that *repo* lacks; or ``store.json`` is damaged, and no commit shows
            which store the bucket belongs to.
    """
    records, flags = records_in(bucket), frozenset(repo.identity.flags)
    try:
        if identity_of(bucket) is not None or not records:
            return ()
    except IntegrityError:
        if not records:
            raise
        with suppress(IntegrityError):  # too large for a store.json: it has no flags to keep
            flags |= {*(stated_flags(bucket.read(IDENTITY, size_bytes_max=OWN_JSON_BYTES_MAX) or b"") or ())}
    if unknown := records.keys() - pushed_records(repo, bucket):
        first = min(unknown)
        raise IntegrityError(
            f"{bucket.url} lacks an intact store.json, and holds {first.run}@{first.step}, "
            "which this store does not have; nothing was changed",
            hint="repair it from the store that has all of its commits",
        )
    data = replace(repo.identity, flags=tuple(sorted(flags))).encode()
    if not dry_run:
        bucket.write(IDENTITY, lambda: [data])
    return (Fetched(kind="store", path=IDENTITY, source=repo.name, size_bytes=len(data)),)


def heal(repo: Repository, remote: Remote, *, read_data: bool, dry_run: bool, progress: Progress) -> Repaired:
    """
    Send what is missing or damaged in *remote*, if *repo* has a sound copy; nothing else in *remote* changes.

    A concurrent reader sees either the damaged bytes or the sound ones.
    """
    done, before = Repaired(), set[str]()
    for _ in range(_LOOKS_MAX):
        remote.repo.records.refresh(anew=True)
        verdict = verify_store(remote.repo, read_data=read_data, progress=progress)
        new = replace(verdict, damaged=tuple(damage for damage in verdict.damaged if damage.path not in before))
        sent = tuple(_sent(repo, remote, new, dry_run=dry_run))  # not what an earlier pass sent in vain
        paths = {fetched.path for fetched in sent}
        left = [damage for damage in verdict.damaged if damage.path not in paths]
        done = replace(
            done,
            fetched=(*done.fetched, *sent),
            lost=tuple(cost for damage in left if damage.kind not in {"record", "pin"} for cost in damage.costs),
            unreadable=tuple(name for damage in left if damage.kind in {"record", "pin"} for name in damage.needed_by),
            strangers=tuple(damage.path for damage in left if damage.kind == "stranger"),
        )
        before |= paths
        if dry_run or not sent:
            break
    return done


def _sent(repo: Repository, remote: Remote, verdict: Verdict, *, dry_run: bool) -> Iterator[Fetched]:
    """Send everything that is damaged in the bucket and sound in *repo*."""
    for damage in verdict.damaged:
        try:
            chunks, size_bytes = _sound(repo, damage)
        except (IntegrityError, NotFound):  # damaged or missing in *repo* as well: `heal` reports it as not repaired
            continue
        if not dry_run:
            remote.bucket.write(damage.path, chunks)
        yield Fetched(kind=damage.kind, path=damage.path, source=repo.name, size_bytes=size_bytes)


def _sound(repo: Repository, damage: Damage) -> tuple[Chunks, int]:
    """Return the bytes that repair *damage*, and their size; raises if *repo* lacks them."""
    # Verified before they are sent, so that damaged bytes in *repo* never replace anything in the bucket.
    if damage.size_bytes is not None:
        ref = BlobRef(id=ObjectId(damage.id), size_bytes=damage.size_bytes)
        repo.objects.verify(ref)
        return partial(chunks_of, repo, ref), ref.size_bytes
    if damage.kind == "pin":
        repo.records.read_pin(damage.id)
    else:
        name = repo.records.name_at(repo.layout.root / damage.path)
        if name is None:
            raise NotFound(f"{damage.path} is not here")
        repo.records.read(name)
    data = repo.files.read(repo.layout.root / damage.path, size_bytes_max=RECORD_BYTES_MAX)
    return lambda: [data], len(data)
