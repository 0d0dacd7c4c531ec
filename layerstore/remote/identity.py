"""
Whose a bucket is, and which records it has.

A bucket becomes a remote of a store by that store's ``store.json``, which the first push writes there.
"""

from layerstore.errors import Conflict, IntegrityError
from layerstore.format import StoreIdentity, decode_identity, encode_identity
from layerstore.layers import typed
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.remote.bucket import Bucket
from layerstore.storage import RecordName, Repository, name_in

IDENTITY = "store.json"


def claim(bucket: Bucket, identity: StoreIdentity) -> bool:
    """
    Make *bucket* a remote of the store *identity* if it holds no store yet; return whether it held none.

    Raises:
        Conflict: It belongs to another store.
    """
    found, made = identity_of(bucket), False
    if found is None:
        made = True
        for folder in ("commits", "objects"):
            if bucket.listed(folder):
                raise IntegrityError(
                    f"{bucket.url} holds {folder}, but its store.json is missing; nothing was sent",
                    hint=f"layerstore repair --remote {typed(bucket.url)} puts it back, if that is this store's; "
                    "else name another prefix",
                )
        bucket.create(IDENTITY, encode_identity(identity))
        found = identity_of(bucket) or identity
    check_own(bucket, found, identity)
    return made


def identity_of(bucket: Bucket) -> StoreIdentity | None:
    """Return the identity of the store that *bucket* holds, None if it holds none."""
    data = bucket.read(IDENTITY, size_bytes_max=RECORD_BYTES_MAX)
    return None if data is None else decode_identity(data, what=f"{bucket.url}/{IDENTITY}")


def records_in(bucket: Bucket) -> dict[RecordName, int]:
    """Return the sizes of the records in *bucket*, by run and step."""
    paths = ((each.name.split("/"), each.size_bytes) for each in bucket.listed("commits"))
    found = {name: size for path, size in paths if len(path) == 3 and (name := name_in(path[1], path[2])) is not None}
    return dict(sorted(found.items()))


def pushed_records(repo: Repository, bucket: Bucket) -> set[RecordName]:
    """Return the records of *repo* that its remote *bucket* has in full size."""
    return {name for name, size_bytes in records_in(bucket).items() if _size_here(repo, name) == size_bytes}


def _size_here(repo: Repository, name: RecordName) -> int | None:
    return repo.files.size(repo.layout.record(name.run, name.step, name.id))


def check_own(
    bucket: Bucket, found: StoreIdentity, identity: StoreIdentity, *, outcome: str = "nothing was sent"
) -> None:
    """Raise Conflict unless *found*, the store in *bucket*, is the store *identity*."""
    if found.store_id != identity.store_id:
        raise Conflict(
            f"{bucket.url} is a remote of another store ({found.store_id}); {outcome}",
            hint="name another prefix",
        )
