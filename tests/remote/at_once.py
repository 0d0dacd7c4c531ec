"""Pushers beside collectors of one bucket."""

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
