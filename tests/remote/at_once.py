"""Pushers, or hosts that save there, and collectors of one bucket, all at once."""

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import NotFound, Overtaken
from tests.unit.checkpoints import Checkpoints, snapshot


def push_and_collect(
    store: Store, saved: Checkpoints, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, grace_seconds: float
) -> None:
    """
    Push *store* and a clone of it to *url* while both collect that, and a day is *grace_seconds*.

    What shows at the end is whole, and the rest can be pushed.
    """
    for module in ("push", "collect"):
        monkeypatch.setattr(sys.modules[f"layerstore.remote.{module}"], "REMOTE_GRACE_SECONDS", grace_seconds)
        monkeypatch.setattr(sys.modules[f"layerstore.remote.{module}"], "REMOTE_MOMENT_SECONDS", grace_seconds / 12)
    saved.into(store, 2, 4)
    store.push(url)
    other = layerstore.clone(url, folder / "other")
    saved.into(store, 6, 8, 10)
    saved.into(other, 5, 7, 9, run="q")
    began = time.monotonic()
    removed: list[int] = []

    def is_on() -> bool:
        graces = (time.monotonic() - began) / grace_seconds
        return graces < 5 or (graces < 20 and not sum(removed))

    def push(which: Store) -> None:
        chance = random.Random(which.path.name)
        refs = [f"{entry.run}@{entry.step}" for entry in which.log()]
        while is_on():
            which.push(url, refs=[chance.choice(refs)])
            time.sleep(chance.uniform(0, grace_seconds / 4))

    def collect(which: Store, last: int) -> None:
        chance = random.Random(last)
        while is_on():
            # Half a day is half as many seconds; and the other collection may take a commit while this one looks at it.
            with suppress(Overtaken, NotFound):
                removed.append(which.gc(Keep(last=last), remote=url).objects.count)
            time.sleep(chance.uniform(0, grace_seconds / 6))

    with ThreadPoolExecutor() as pool:
        for done in [
            *(pool.submit(push, which) for which in (store, other)),
            *(pool.submit(collect, which, last) for which, last in ((store, 1), (other, 2))),
        ]:
            done.result()

    assert sum(removed), "nothing was old enough: the test has lost its point"
    assert layerstore.open(url).verify(read_data=True).ok
    store.push(url)
    other.push(url)
    other.close()
    with layerstore.clone(url, folder / "all") as everything:
        assert everything.verify(read_data=True).ok
        store.pull(url)
        assert snapshot(everything) == snapshot(store)


def save_and_collect(
    saved: Checkpoints, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, grace_seconds: float
) -> None:
    """
    Save straight to *url* on two hosts, again and again the same objects, while both collect it.

    A save may be overtaken, and says so; what was reported as saved shows at the end, and is whole.
    """
    collect_room, saving = (sys.modules[f"layerstore.remote.{module}"] for module in ("collect", "saving"))
    graces = {"YOUNG": 1 / 2, "STILL_YOUNG": 2 / 3, "WINDOW": 1 / 8}
    for name, share in graces.items():
        monkeypatch.setattr(saving, f"_{name}_SECONDS", grace_seconds * share)
    for module in (collect_room, saving):
        monkeypatch.setattr(module, "REMOTE_GRACE_SECONDS", grace_seconds)
        monkeypatch.setattr(module, "REMOTE_MOMENT_SECONDS", grace_seconds / 12)
    hosts = []
    layerstore.init(url).close()
    for name in ("a", "b"):
        monkeypatch.setenv("LAYERSTORE_CACHE_DIR", str(folder / f"cache-{name}"))
        hosts.append((name, layerstore.open(url)))
    began = time.monotonic()
    removed: list[int] = []
    newest = dict.fromkeys("ab", 0)

    def is_on() -> bool:
        graces = (time.monotonic() - began) / grace_seconds
        return graces < 5 or (graces < 20 and not sum(removed))

    def save(run: str, store: Store) -> None:
        chance, step = random.Random(run), 0
        # The same content as the other host's, in files of its own: one would read what the other is writing.
        own = Checkpoints(saved.folder / f"host-{run}")
        while is_on():
            step += 1
            with suppress(Overtaken):
                store.ingest(own(step, seed=chance.randrange(3)), run=run)
                newest[run] = step
            time.sleep(chance.uniform(0, grace_seconds / 3))

    def collect(store: Store) -> None:
        while is_on():
            with suppress(Overtaken, NotFound):
                removed.append(store.gc(Keep(last=1)).objects.count)
            time.sleep(grace_seconds / 6)

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(save, *host) for host in hosts] + [pool.submit(collect, store) for _, store in hosts]:
            done.result()
    for _, store in hosts:
        store.close()

    assert sum(removed), "nothing was old enough: the test has lost its point"
    assert min(newest.values()) > 3
    monkeypatch.setenv("LAYERSTORE_CACHE_DIR", str(folder / "cache-c"))
    with layerstore.open(url) as store:
        assert store.verify(read_data=True).ok
        assert {run: store.log(run)[0].step for run in store.runs()} == newest
