"""What ingest and compose are compared with: copies of the same bytes, and other ways to ask for the same."""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import layerstore
from layerstore.precision import PrecisionName
from tests.bench.measure import Contender

Verb = Literal["ingest", "reingest", "compose", "dcp", "universal", "compact"]
VERBS: tuple[Verb, ...] = ("ingest", "reingest", "compose", "dcp", "universal")
"""Those of a single save; ``compact`` wants an older one too."""

COPY = "cp -r"
DURABLE_COPY = "cp -r + sync"

INGEST, COMPACT_INGEST = "ingest", "ingest, compact"
COMPACT_REINGEST, COMPACT_COMPOSE = "ingest, compact, again", "compose, compact"

RUN = "bench"

LATEST_UNIVERSAL = "latest_universal"


Saved: TypeAlias = tuple[Path, PrecisionName]
"""A checkpoint that a store holds, and in which precision."""


class Workplace:
    """A source checkpoint, and a folder where copies, stores and composites come and go."""

    def __init__(
        self,
        folder: Path,
        source: Path,
        *,
        older: Path | None = None,
        policy: str = "latest",
        precision: PrecisionName = "exact",
    ) -> None:
        self.source = source
        self._older = older
        self._policy = policy
        self._precision = precision
        self.size_bytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
        self._away = folder / "away"
        self._copy = folder / "copy"
        self._out = folder / "out"
        self._dcp = folder / "dcp"
        self._store_path = folder / "store"
        self._store: layerstore.Store | None = None
        self._saved: list[Saved] = []
        """What the store holds, in the order of its ingests."""

    def contenders(self, verb: Verb) -> list[Contender]:
        """Return what takes turns in the benchmark of *verb*."""
        self._clear()
        self._drop_store()
        self._put_away(self._dcp)
        if verb not in ("ingest", "compact"):
            exact: list[Saved] = [(saved, "exact") for saved in (self._older, self.source) if saved is not None]
            self._hold(*exact)
        copies = [
            Contender(COPY, self._run_copy, self._clear),
            Contender(DURABLE_COPY, self._run_durable_copy, self._clear),
        ]
        ours = {
            "ingest": self._ingests,
            "reingest": self._reingests,
            "compose": self._composes,
            "dcp": self._to_pytorch,
            "universal": self._to_universal,
            "compact": self._compacts,
        }
        return copies + ours[verb]()

    def close(self) -> None:
        """Remove everything but the source."""
        self._clear()
        self._drop_store()
        self._put_away(self._dcp)
        shutil.rmtree(self._away, ignore_errors=True)

    # -- contenders ------------------------------------------------------------------------------------------------

    def _ingests(self) -> list[Contender]:
        return [
            Contender(INGEST, self._ingest, self._hold),
            Contender("the whole command", lambda: self._command("ingest", str(self.source), "--run", RUN), self._hold),
        ]

    def _reingests(self) -> list[Contender]:
        return [
            Contender("ingest again", self._ingest, self._clear),
            Contender("ingest again, store trusted", lambda: self._ingest(trust_store=True), self._clear),
            Contender(
                "the whole command", lambda: self._command("ingest", str(self.source), "--run", RUN), self._clear
            ),
        ]

    def _composes(self) -> list[Contender]:
        return [
            Contender("compose", lambda: self._compose(verify=True, durable=True), self._clear),
            Contender("compose, not durable", lambda: self._compose(verify=True, durable=False), self._clear),
            Contender(
                "compose, not durable or verified", lambda: self._compose(verify=False, durable=False), self._clear
            ),
            Contender(
                "the whole command",
                lambda: self._command("compose", RUN, "--policy", self._policy, "-o", str(self._out)),
                self._clear,
            ),
        ]

    def _compacts(self) -> list[Contender]:
        """A save that refers to an exact older one, beside an exact one."""
        assert self._older is not None
        older: Saved = (self._older, "exact")
        both = (older, (self.source, self._precision))
        compact = partial(self._ingest, precision=self._precision)
        return [
            Contender(INGEST, self._ingest, self._hold),
            Contender(COMPACT_INGEST, compact, partial(self._hold, older)),
            Contender(COMPACT_REINGEST, compact, partial(self._hold, *both)),
            Contender(COMPACT_COMPOSE, partial(self._compose, verify=True, durable=True), partial(self._hold, *both)),
        ]

    def _to_pytorch(self) -> list[Contender]:
        """To a distributed checkpoint, and back onto the commit that it is of."""
        assert self._store is not None
        self._store.compose(RUN).export(self._dcp, format="dcp")
        return [
            Contender("compose --format dcp", self._write_dcp, self._clear),
            Contender("ingest --onto, of known bytes", self._ingest_dcp, self._clear),
        ]

    def _to_universal(self) -> list[Contender]:
        return [
            Contender("compose --format universal", self._write_universal, self._clear),
            Contender("ds_to_universal, not durable", self._convert, self._clear),
        ]

    # -- what they do ----------------------------------------------------------------------------------------------

    def _run_copy(self) -> None:
        subprocess.run(["cp", "-r", "--reflink=never", self.source, self._copy], check=True)

    def _run_durable_copy(self) -> None:
        self._run_copy()
        # The filesystem of the copy, not the machine: what others have written elsewhere is not waited for.
        subprocess.run(["sync", "--file-system", self._copy], check=True)

    def _ingest(self, *, trust_store: bool = False, precision: PrecisionName = "exact") -> None:
        assert self._store is not None
        self._store.ingest(self.source, run=RUN, trust_store=trust_store, precision=precision)
        if self._saved[-1:] != [(self.source, precision)]:
            self._saved.append((self.source, precision))

    def _compose(self, *, verify: bool, durable: bool) -> None:
        assert self._store is not None
        self._store.compose(RUN, policy=self._policy).write(self._out, verify=verify, durable=durable)

    def _write_dcp(self) -> None:
        assert self._store is not None
        self._store.compose(RUN).export(self._out, format="dcp")

    def _ingest_dcp(self) -> None:
        assert self._store is not None
        self._store.ingest(self._dcp, onto=RUN)

    def _write_universal(self) -> None:
        assert self._store is not None
        self._store.compose(RUN).export(self._out, format="universal")

    def _convert(self) -> None:
        """Convert the checkpoint itself, with as many processes as there are processors."""
        tag = self.source / (self.source / "latest").read_text()
        workers = str(os.cpu_count() or 1)
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(tag)]
        command += ["--output_folder", str(self._out), "--num_extract_workers", workers, "--num_merge_workers", workers]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        (self.source / LATEST_UNIVERSAL).unlink(missing_ok=True)  # it is left beside its source
        assert not done.returncode, done.stderr[-2000:]

    def _command(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "layerstore.cli", *arguments, "--store", str(self._store_path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    # -- before and after ------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        for path in (self._copy, self._out):
            self._put_away(path)

    def _drop_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        self._put_away(self._store_path)
        self._saved = []

    def _hold(self, *saves: Saved) -> None:
        """Leave a store with the ingests of *saves*, in that order, and nothing else."""
        self._clear()
        if saves and self._saved == list(saves):
            return
        store = self._fresh_store()
        for source, precision in saves:
            store.ingest(source, run=RUN, precision=precision)
        self._saved = list(saves)

    def _put_away(self, path: Path) -> None:
        """
        Give the space of the folder *path* back; its files are removed at the end.

        For a minute ext4 passes over each inode that was freed, one after the other: after thousands of removals a new
        file takes a millisecond, and whoever makes the most of them pays for what the round before has left.
        """
        if not path.exists():
            return
        self._away.mkdir(exist_ok=True)
        away = path.rename(self._away / secrets.token_hex(8))
        for file in away.rglob("*"):
            if file.is_file() and not file.is_symlink():
                file.chmod(0o600)
                os.truncate(file, 0)

    def _fresh_store(self) -> layerstore.Store:
        self._drop_store()
        self._store = layerstore.init(self._store_path)
        return self._store


def warm_up(folder: Path, make_source: Callable[[Path], Path], *, verbs: Sequence[Verb] = VERBS) -> None:
    """Do everything once with a tiny checkpoint: imports, first calls and caches are not part of the times."""
    older = make_source(folder / "older") if "compact" in verbs else None
    tiny = Workplace(folder, make_source(folder / "source"), older=older, precision="delta8")
    for verb in verbs:
        for contender in tiny.contenders(verb):
            contender.prepare()
            contender.run()
    tiny.close()
    shutil.rmtree(folder)
