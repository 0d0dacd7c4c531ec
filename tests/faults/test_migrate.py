"""
A migration that is killed, or refused by the disk, anywhere: the store is as it was, or a repeat finishes it.

The store has one of each thing that format 1 can say. Kills and power cuts at other places are in test_crash.py and
test_power_cuts.py, with the other verbs.
"""

from __future__ import annotations

import errno as errnos
import json
import os
import signal
from pathlib import Path

import pytest

from layerstore.migrations import migrate
from tests.compat import goldens
from tests.faults.harness import Call, Killer, Recorder, Refuser, attempt, copied, descriptors, refuse_links, truth
from tests.faults.older import migrate_hooked, unmigrated_problems
from tests.faults.test_errors import ANSWERS, EXIT_CODES


@pytest.fixture(scope="module")
def old(fast_module_path: Path) -> Path:
    """Return a store of format 1 with everything in it but most of its objects, which no migration touches."""
    store = goldens.unpack_store(goldens.STORES / "dropped-1.zip", fast_module_path / "old")
    for folder in sorted((store / "objects").iterdir())[3:]:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    return store


@pytest.fixture(scope="module")
def migrated(old: Path, fast_module_path: Path) -> dict[str, str]:
    """Return the truth of that store, migrated without a fault."""
    store = copied(old, fast_module_path / "migrated")
    migrate(store)
    return truth(store)


def calls_of(old: Path, scratch: Path) -> list[Call]:
    """Return calls of the seam that a migration makes: every one from the exchange on, every fifth before it."""
    recorder = Recorder()
    migrate_hooked(copied(old, scratch), recorder)
    exchange = next(place for place, call in enumerate(recorder.calls) if call.operation == "rename")
    return [*recorder.calls[:exchange:5], *recorder.calls[exchange:]]


def killed_at(store: Path, call: Call) -> int:
    """Migrate *store* in a child that kills itself in front of *call*; return the signal that it ended by."""
    child = os.fork()
    if not child:
        try:
            migrate_hooked(store, Killer(call))
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


@pytest.mark.fault(14)
def test_a_kill_at_any_call_is_made_good_by_a_repeat(old: Path, migrated: dict[str, str], fast_path: Path) -> None:
    """The old store is untouched, or the new one opens or refuses; migrated again, it is what it would have been."""
    states = set()
    for call in calls_of(old, fast_path / "dry"):
        store = copied(old, fast_path / "store")

        assert killed_at(store, call) == signal.SIGKILL, str(call)
        found = unmigrated_problems(store, old, is_done=False)
        assert not found, str(call)
        states.add((_number(store), found is None))
        assert _made_good(store) == migrated, str(call)

    # All that may be left: the old store, one that only a migration opens, and the new one.
    assert states == {(1, False), (2, False), (2, True)}


@pytest.mark.fault(14, 30)
def test_a_kill_without_hard_links_is_made_good_too(
    old: Path, migrated: dict[str, str], fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that lay aside has one name only there: it is at one of its two places at any moment."""
    monkeypatch.setattr(os, "link", refuse_links)
    calls = [call for call in calls_of(old, fast_path / "dry") if call.operation in {"link", "unlink"}]
    for call in calls:
        store = copied(old, fast_path / "store")

        assert killed_at(store, call) == signal.SIGKILL, str(call)
        assert _made_good(store) == migrated, str(call)
    assert len(calls) == 3


def _number(store: Path) -> int:
    found: int = json.loads((store / "store.json").read_bytes())["format"]
    return found


def _made_good(store: Path) -> dict[str, str]:
    migrate(store)
    assert unmigrated_problems(store, store, is_done=True) is None
    return truth(store)


@pytest.mark.fault(14, 16)
def test_an_error_at_any_call_is_reported_and_made_good_by_a_repeat(
    old: Path, migrated: dict[str, str], fast_path: Path
) -> None:
    """A disk that refuses once, or is full from then on: the right exit code, nothing left open, and a repeat works."""
    calls = [call for call in calls_of(old, fast_path / "dry") if call.operation in ANSWERS]
    for place, call in enumerate(calls):
        store, before = copied(old, fast_path / "store"), descriptors()
        answers = ANSWERS[call.operation]
        hook = Refuser(call, answers[place % len(answers)])
        if place % 3 == 0:
            hook = Refuser(call, errnos.ENOSPC, lasting=True)

        assert _complaints(store, hook) == [], str(call)
        assert descriptors() == before
        assert not unmigrated_problems(store, old, is_done=False)
        assert _made_good(store) == migrated, str(call)


def _complaints(store: Path, hook: Refuser) -> list[str]:
    failure = attempt(lambda: migrate_hooked(store, hook))
    if failure is None:
        return ["success was reported"]
    if failure.kind != "StorageIO" or failure.exit_code != EXIT_CODES[failure.errno or 0]:
        return [failure.trace]
    if hook.failed[0] == store / "store.json":
        return []  # a network filesystem may have exchanged it, and lost the answer
    return ["left behind: migrating"] if _number(store) == 1 and (store / "migrating").exists() else []
