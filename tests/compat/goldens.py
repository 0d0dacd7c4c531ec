"""
Take the ids and digests that the golden files pin; ``python -m tests.compat.goldens`` writes them and the golden store.

Only for a change of format that is meant, and only before the format is released:
from then on a changed format gets a number and files of its own, and the old ones stay for ever.
"""

import hashlib
import json
import tempfile
import zipfile
from pathlib import Path

import layerstore
from layerstore import Store
from layerstore.disk import Files
from layerstore.format import FORMAT
from layerstore.history import resolve
from layerstore.storage import open_repository

STORES = Path(__file__).parent / "stores"
IDS = STORES / "ids.json"
"""
Of the checkpoint at step 2. Changing one is a change of format: what users have stored would not be recognised.

But for ``composed``, the files of a composite: they may change with the writer, if that is meant.
"""


def ids_of(path: Path, ref: str) -> dict[str, object]:
    """Return the ids of *ref* in the store at *path*: its commit, the objects by layer, kind and shard, all blobs."""
    repo = open_repository(path, Files())
    try:
        found = resolve(repo, ref)
        objects = {
            f"{version.layer} {stored.kind} {stored.shard}/{stored.shards}": stored.id
            for version in (repo.version(entry.version) for entry in found.record.layers)
            for stored in version.objects
        }
    finally:
        repo.catalog.close()
    return {
        "commit": found.commit,
        "objects": objects,
        "versions": {entry.layer: entry.version.id for entry in found.record.layers},
        "states": {f"rank {rank}": state.id for rank, state in enumerate(found.record.states)},
    }


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


def checkpoint(folder: Path, *, step: int = 2) -> Path:
    """
    Unpack the checkpoint of *step*, of which the golden ids are, into the new *folder*; return that.

    A tiny one of two ranks in the Trainer's layout: a block, a frozen and a tied embedding, a norm, a buffer, a file
    of its own, slices that fill a page and slices that do not. It is archived, so that it never changes.
    """
    return unpack_store(STORES / f"checkpoint-{step}.zip", folder)


def collected(path: Path) -> Path:
    """Put back what an interrupted collection of format 1 had moved aside, as the next one did."""
    for aside in path.glob("gc/*/aside/*"):
        place = path / "objects" / aside.name[:2] / aside.name
        place.parent.mkdir(exist_ok=True)
        aside.rename(place)
    return path


def main() -> None:
    """Rewrite the golden ids, and the golden store of today's format."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "store"
        with layerstore.init(path) as store:
            store.ingest(checkpoint(folder / "sft" / "checkpoint-2"), pin="best")
            store.ingest(checkpoint(folder / "sft" / "checkpoint-4", step=4))
            ids = ids_of(path, "sft@2") | {"composed": composed(store, "sft@2", folder / "out")}
        pack_store(path, STORES / f"format-{FORMAT}.zip")
    IDS.write_text(json.dumps(ids, indent=1) + "\n")


if __name__ == "__main__":
    main()
