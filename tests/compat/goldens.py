"""
Take the ids and digests that the golden files pin; ``python -m tests.compat.goldens`` writes them and the golden store.

Only for a change of format that is meant, and only before the format is released:
from then on a changed format gets a number and files of its own, and the old ones stay for ever.
"""

import hashlib
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import layerstore
from layerstore import Store
from layerstore.format import FORMAT
from layerstore.history import resolve
from layerstore.storage import Files, open_repository
from tests.compat.checkpoint import build

STORES = Path(__file__).parent / "stores"
TARGET = Path(__file__).parent / "golden_ids.py"


@dataclass(frozen=True, slots=True)
class Ids:
    """The names that a commit consists of."""

    objects: dict[str, str]
    """By layer, kind and shard."""
    versions: dict[str, str]
    states: dict[str, str]


def ids_of(path: Path, ref: str) -> Ids:
    """Return the ids of *ref* in the store at *path*."""
    repo = open_repository(path, Files())
    try:
        record = resolve(repo, ref).record
        objects = {
            f"{version.layer} {stored.kind} {stored.shard}/{stored.shards}": str(stored.id)
            for version in (repo.version(entry.version) for entry in record.layers)
            for stored in version.objects
        }
    finally:
        repo.catalog.close()
    versions = {str(entry.layer): str(entry.version.id) for entry in record.layers}
    return Ids(objects, versions, {f"rank {rank}": str(state.id) for rank, state in enumerate(record.states)})


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
            commit = store.ingest(build(folder / "sft" / "checkpoint-2"), pin="best").commit
            store.ingest(build(folder / "sft" / "checkpoint-4", step=4))
            ids, files = ids_of(path, "sft@2"), composed(store, "sft@2", folder / "out")
        pack_store(path, STORES / f"format-{FORMAT}.zip")
    parts = {"OBJECTS": ids.objects, "VERSIONS": ids.versions, "STATES": ids.states, "COMPOSED": files}
    head = TARGET.read_text().partition("COMMIT = ")[0]
    TARGET.write_text(head + f'COMMIT = "{commit}"\n' + "".join(_literal(*part) for part in parts.items()))


def _literal(name: str, values: dict[str, str]) -> str:
    rows = "".join(f'    "{key}": "{value}",\n' for key, value in values.items())
    return f"\n{name} = {{\n{rows}}}\n"


if __name__ == "__main__":
    main()
