"""
A golden store with a history in it, and what it answered when it was made.

Saves by a policy, an attempt that was left, commits that were replaced, dropped, dropped and saved again, and trimmed,
a mixture that is pinned: one of each thing that a record can say.

``dropped-1`` was made once by layerstore 0.1, for the migration from format 1: an attempt of which only a record
without layers is left, between two others; a replaced commit, one that was saved again where it had been dropped, one
that was dropped twice, a pin that outlived its commit, and an object that an interrupted collection had moved aside.

``python -m tests.compat.history`` writes the store and its answers where there are none. A store that is there is never
written again, because it stands for those that people have; then only the digests of composites are taken afresh,
which may change with the writer, if that is meant.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import layerstore
from layerstore import Keep, Store
from layerstore.errors import LayerstoreError
from layerstore.format import FORMAT
from layerstore.policy import Policy
from tests.compat import goldens
from tests.generated import generate

REFERENCES = ("sft", "sft@2", "sft@4", "sft@5", "sft@8", "sft@10", "sft~1", "sft~1@6", "base", "mixed", "plain")
POLICIES: dict[str, str | Policy] = {
    "latest": "latest",
    "exact": "exact",
    "parity, even fresh": layerstore.Parity(fresh="even"),
    "parity, odd fresh": layerstore.Parity(fresh="odd"),
}


def make(path: Path, scratch: Path) -> None:
    """Make the store at *path*; checkpoints are built below *scratch*."""

    def checkpoint(step: int, *, seed: int = 0) -> Path:
        folder = scratch / f"checkpoint-{step}-{seed}"
        return generate(folder, layers=1, hidden=4, vocab=4, step=step, seed=seed, layout="hf", tied=True)

    with layerstore.init(path) as store:
        store.ingest(checkpoint(2, seed=1), run="base")
        store.ingest(checkpoint(2), run="sft")
        for step in (4, 6):
            store.ingest(checkpoint(step), run="sft", policy="parity")
        store.ingest(checkpoint(5), run="sft", rollback=True, policy="parity")
        store.ingest(checkpoint(5, seed=1), run="sft", policy="parity", replace=True)
        store.ingest(checkpoint(7), run="sft", policy="parity")
        store.drop("sft@7")
        store.ingest(checkpoint(8), run="sft")
        store.drop("sft@8")
        store.ingest(scratch / "checkpoint-8-0", run="sft")
        store.ingest(checkpoint(10), run="sft", policy="parity")
        store.compose("sft@5", policy=layerstore.Parity(fresh="odd")).pin("mixed")
        store.pin("plain", "sft@5")
        store.gc(Keep(within=timedelta(days=1), drop_optimizer_older_than=7), runs=["sft"], grace_seconds=0)


def answers(store: Store, scratch: Path, references: Iterable[str] = REFERENCES) -> dict[str, object]:
    """Return what *store* answers: its log, each of *references*, and every composite of each, byte for byte."""
    return {
        "log": [[entry.run, entry.attempt, entry.step, entry.commit, entry.layers_saved] for entry in store.log()],
        "pins": [[pin.name, pin.base] for pin in store.pins()],
        "references": {ref: _shown(store, ref) for ref in references},
        "composites": {
            f"{ref} {name}": _composed(store, ref, policy, scratch)
            for ref in references
            for name, policy in POLICIES.items()
        },
    }


def _shown(store: Store, ref: str) -> object:
    try:
        view = store.show(ref)
    except LayerstoreError as error:
        return error.kind
    return {
        "commit": view.commit,
        "place": [view.run, view.attempt, view.step, view.save_number, view.fork],
        "supersedes": list(view.supersedes),
        "layers": [[line.layer, line.run, line.attempt, line.step, line.version] for line in view.layers],
    }


def _composed(store: Store, ref: str, policy: str | Policy, scratch: Path) -> str:
    target = scratch / "composed"
    try:
        store.compose(ref, policy=policy).write(target, durable=False)
    except LayerstoreError as error:
        return error.kind
    files = [(path.relative_to(target).as_posix(), path.read_bytes()) for path in sorted(target.rglob("*.*"))]
    shutil.rmtree(target)
    kept = [(name, hashlib.blake2b(data).hexdigest()) for name, data in files if name != "layerstore.json"]
    return hashlib.blake2b(repr(kept).encode(), digest_size=16).hexdigest()


def main() -> int:
    """Write the store if there is none, and what it answers; return 0."""
    archive = goldens.STORES / f"history-{FORMAT}.zip"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if archive.exists():
            told = json.loads(archive.with_suffix(".json").read_text())
            goldens.unpack_store(archive, folder / "store")
        else:
            told = {}
            make(folder / "store", folder)
            goldens.pack_store(folder / "store", archive)
        with layerstore.open(folder / "store") as store:
            now = answers(store, folder)
    archive.with_suffix(".json").write_text(json.dumps(now | told | {"composites": now["composites"]}, indent=1) + "\n")
    sys.stdout.write(f"wrote the answers of {archive} ({archive.stat().st_size} bytes)\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
