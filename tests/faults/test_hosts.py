"""
Two hosts use every verb on one store at once, over two mounts that keep what they have seen; each is killed at times.

Each has its own index. Whatever one of them was told is saved is there in the end, for both.
"""

from __future__ import annotations

import json
import os
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from layerstore import Keep
from layerstore.disk import open_files
from layerstore.errors import Conflict, IntegrityError, Locked, NotFound
from layerstore.storage import IndexNotice
from layerstore.store import Store, init
from tests.faults.harness import begun, composed, in_child, problems, seeded, tiny_checkpoint
from tests.hosts import KINDS, two_mounts

STEPS = (1, 2, 3, 4)
THROWN = "thrown"
"""The run of what is dropped and collected."""
QUIET_SECONDS_MAX = 90.0
GRACE_SECONDS = 5.0
"""Of the collections meanwhile: longer than anybody takes from touching a thing to naming it."""


@dataclass(frozen=True, slots=True)
class Host:
    """One of the two, as a process of it needs it."""

    number: int
    mount: str
    own: str
    """Its own disk: index, journal, what it composes."""
    sources: str
    """The checkpoints, by step."""
    others: str
    """Where both have their disks."""

    @property
    def store(self) -> Path:
        """The store, as this host sees it."""
        return Path(self.mount, "store")


@pytest.fixture(scope="module")
def sources(fast_module_path: Path) -> Path:
    """Return a folder with checkpoints, by step."""
    for step in STEPS:
        tiny_checkpoint(fast_module_path / f"step{step}", step=step, seed=step)
    return fast_module_path


def settle(host: Host) -> None:
    """Be a process of *host*; its index is its own."""
    os.environ["LAYERSTORE_MANIFEST_DIR"] = f"{host.own}/index"
    os.environ["LAYERSTORE_LOCK_TIMEOUT"] = "20"
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".* no longer there", IndexNotice)


class _Worker:
    """A process of one host: it does this and that until it is killed."""

    def __init__(self, host: Host, seed: int) -> None:
        self._host = host
        self._chance = random.Random(seed)
        self._journal = os.open(f"{host.own}/journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(self, *words: object) -> None:
        """Write something down; one line is written whole."""
        os.write(self._journal, json.dumps(words).encode() + b"\n")

    def live(self) -> None:
        """Go on for ever."""
        verbs = [self.save, self.save, self.save_for_both, self.save_to_throw, self.compose, self.collect]
        verbs += [self.drop, self.undrop, self.verify]
        with Store(self._host.store) as store:
            while True:
                verb = self._chance.choice(verbs)
                try:
                    verb(store)
                except (Locked, Conflict, NotFound) as error:
                    self.say("refused", verb.__name__, str(error))
                else:
                    self.say("did", verb.__name__)

    def _saved(self, store: Store, run: str) -> None:
        step = self._chance.choice(STEPS)
        store.ingest(f"{self._host.sources}/step{step}", run=run)
        self.say("saved", f"{run}@{step}", step)

    def save(self, store: Store) -> None:
        """Save a step of this host's own run."""
        self._saved(store, f"host{self._host.number}")

    def save_for_both(self, store: Store) -> None:
        """Save a step of the run that both save."""
        self._saved(store, "both")

    def save_to_throw(self, store: Store) -> None:
        """Save what is dropped and collected."""
        store.ingest(f"{self._host.sources}/step{self._chance.choice(STEPS)}", run=THROWN)

    def drop(self, store: Store) -> None:
        """Drop one of these."""
        store.drop(THROWN)

    def undrop(self, store: Store) -> None:
        """Bring one of these back."""
        dropped = store.dropped(THROWN)
        if dropped:
            store.undrop(self._chance.choice(dropped).commit.id)

    def compose(self, store: Store) -> None:
        """Compose what either host was told is saved; what the other one has just saved may be seen late."""
        said = list(saved(self._host.others))
        if said:
            store.compose(self._chance.choice(said)).write(Path(self._host.own, "composed"), force=True, durable=False)

    def collect(self, store: Store) -> None:
        """Collect what may go."""
        store.gc(Keep(last=1), runs=[THROWN], grace_seconds=GRACE_SECONDS, empty_trash=self._chance.random() < 0.5)

    def verify(self, store: Store) -> None:
        """Look for damage: only what is being thrown away may not be whole when it is looked at."""
        for damage in store.verify(read_data=self._chance.random() < 0.5).damaged:
            if not all(name.startswith(THROWN) for name in damage.needed_by) or not damage.needed_by:
                self.say("wrong", f"{damage.kind} {damage.path}: {damage.reason}, needed by {damage.needed_by}")


def _live(host: Host, seed: int) -> None:
    settle(host)
    worker = _Worker(host, seed)
    try:
        worker.live()
    except BaseException:  # noqa: BLE001  # told, whatever it is
        worker.say("wrong", traceback.format_exc())


def journals(folder: str | Path) -> Iterator[list[object]]:
    """Yield all that both hosts wrote down."""
    for journal in sorted(Path(folder).glob("disk*/journal")):
        yield from map(json.loads, journal.read_text().splitlines())


def saved(folder: str | Path) -> dict[str, int]:
    """Return the commits that somebody was told are saved, with their steps."""
    return {str(words[1]): int(str(words[2])) for words in journals(folder) if words[0] == "saved"}


def _seen(host: Host, expected: dict[str, str]) -> list[str]:
    """Return what is wrong, as *host* sees it, once all is quiet."""
    settle(host)
    found = problems(host.store, Path(host.own), expected)
    with Store(host.store) as store:
        found += [f"{entry.run}@{entry.step}: {entry.damage}" for entry in store.log() if entry.damage is not None]
        index = [path.name for path in Path(host.own, "index").iterdir()]
        found += [] if len(index) == 1 and index[0].startswith(store.id) else [f"the index: {index}"]
    return found + (["an index in the store"] if (host.store / "manifest").exists() else [])


def _at_peace(host: Host, expected: dict[str, str]) -> list[str]:
    """Return what is wrong before a last collection, and after it."""
    found = _seen(host, expected)
    with Store(host.store) as store:
        store.gc(grace_seconds=0.0, empty_trash=True)
    return found + _seen(host, expected)


@pytest.mark.full
@pytest.mark.fault(47, 106)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("juicefs", 5.0),
        *(pytest.param(kind, 120.0, marks=pytest.mark.exhaustive) for kind in KINDS),
    ],
)
def test_two_hosts_at_once_lose_nothing(kind: str, seconds: float, fast_path: Path, sources: Path) -> None:
    """They ingest, compose, drop, undrop, collect and verify, and each is killed every few seconds."""
    chance = seeded("hosts")
    with two_mounts(fast_path, kind) as mounts:
        hosts = []
        for number, mount in enumerate(mounts):
            own = fast_path / f"disk{number}"
            own.mkdir()
            hosts.append(Host(number, str(mount), str(own), str(sources), str(fast_path)))
        with init(fast_path / "alone") as store:
            digests = {}
            for step in STEPS:
                store.ingest(sources / f"step{step}", run="alone")
                digests[step] = composed(store, f"alone@{step}", fast_path)
        init(hosts[0].store).close()

        end = time.monotonic() + seconds
        processes = [begun(_live, host, chance.randrange(10**9)) for host in hosts]
        while time.monotonic() < end:
            time.sleep(min(1 + 2 * chance.random(), max(0.1, end - time.monotonic())))
            killed = chance.randrange(2)
            processes[killed].kill()
            processes[killed].join()
            processes[killed] = begun(_live, hosts[killed], chance.randrange(10**9))
        deadline = time.monotonic() + QUIET_SECONDS_MAX
        while {"host0", "host1"} - {ref.partition("@")[0] for ref in saved(fast_path)}:
            assert time.monotonic() < deadline, "a host waits for ever"
            time.sleep(0.1)
        for process in processes:
            process.kill()
            process.join()

        done = Counter(f"{words[0]} {words[1]}" for words in journals(fast_path) if words[0] in ("did", "refused"))
        print(f"{len(saved(fast_path))} commits reported; {dict(sorted(done.items()))}")
        wrong = [words for words in journals(fast_path) if words[0] == "wrong"]
        assert not wrong, "\n".join(str(words[1]) for words in wrong)
        expected = {ref: digests[step] for ref, step in saved(fast_path).items()}
        for host, look in zip(hosts, (_seen, _at_peace), strict=True):
            assert in_child(look, host, expected, timeout_seconds=600.0).needed() == []
        assert in_child(_seen, hosts[0], expected, timeout_seconds=600.0).needed() == []


@pytest.mark.full
@pytest.mark.fault(106)
@pytest.mark.parametrize("kind", ["bindfs", pytest.param("juicefs", marks=pytest.mark.exhaustive)])
def test_what_a_host_has_looked_for_too_early_is_found(
    kind: str, fast_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its mount says for a while that nothing is there: a command waits for that, and does not call it missing."""
    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", str(fast_path / "index"))
    with two_mounts(fast_path, kind, late_seconds=3.0) as (one, two):
        with init(one / "store") as store:
            store.ingest(sources / "step1", run="run")
            expected = composed(store, "run", fast_path)
        for late_seconds in (0.0, 10.0):
            monkeypatch.setattr(open_files, "LATE_SECONDS", late_seconds)
            (one / "store" / "objects").rename(one / "hidden")
            time.sleep(3.1)  # until the second host has forgotten what it saw
            assert not any((two / "store" / "objects" / f"{prefix:02x}").exists() for prefix in range(256))
            (one / "hidden").rename(one / "store" / "objects")
            with Store(two / "store") as store:
                if late_seconds:
                    assert composed(store, "run", fast_path) == expected
                else:
                    with pytest.raises(IntegrityError, match="is missing"):
                        composed(store, "run", fast_path)
    assert "looking again for up to 10 s" in caplog.text
