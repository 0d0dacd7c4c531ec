"""Take the ids and digests that the golden files pin: used to check them, and to write them."""

import hashlib
import zipfile
from pathlib import Path

from layerstore import Store
from layerstore.history import resolve
from layerstore.storage import Files, open_repository

STORES = Path(__file__).parent / "stores"


def object_ids(path: Path, ref: str) -> dict[str, str]:
    """Return every object of the layers of *ref* in the store at *path*, by layer, kind and shard."""
    repo = open_repository(path, Files())
    try:
        return {
            f"{version.layer} {stored.kind} {stored.shard}/{stored.shards}": stored.id
            for entry in resolve(repo, ref).record.layers
            for version in [repo.version(entry.version)]
            for stored in version.objects
        }
    finally:
        repo.catalog.close()


def version_ids(path: Path, ref: str) -> dict[str, str]:
    """Return every layer's version."""
    repo = open_repository(path, Files())
    try:
        return {entry.layer: entry.version.id for entry in resolve(repo, ref).record.layers}
    finally:
        repo.catalog.close()


def state_ids(path: Path, ref: str) -> dict[str, str]:
    """Return every rank's state blob."""
    repo = open_repository(path, Files())
    try:
        return {f"rank {rank}": state.id for rank, state in enumerate(resolve(repo, ref).record.states)}
    finally:
        repo.catalog.close()


def composed(store: Store, ref: str, out: Path) -> dict[str, str]:
    """Compose *ref* to *out* and return the digest of every file."""
    store.compose(ref).write(out, durable=False)
    return {
        path.relative_to(out).as_posix(): hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name != "layerstore.json"  # what a composite says of itself may grow
    }


def pack_store(path: Path, archive: Path) -> None:
    """Write the truth of the store at *path* to *archive*: no index, no locks, no empty folders."""
    archive.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path).as_posix()
            if file.is_file() and name.split("/")[0] in {"objects", "commits", "pins", "trash", "store.json"}:
                packed.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), file.read_bytes(), zipfile.ZIP_DEFLATED)


def unpack_store(archive: Path, path: Path) -> Path:
    """Unpack *archive* into the new folder *path*."""
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(path)
    return path
