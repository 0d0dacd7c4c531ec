"""Two jobs that save the same run at once: the second opens an attempt of its own, and nothing of either is lost."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.compose import Composition
from layerstore.disk import open_files
from layerstore.errors import Conflict, StorageIO
from layerstore.history import NextCommit
from layerstore.live.ranks.attempt import AttemptLock, place_resumed
from layerstore.live.ranks.exchange import Exchange
from layerstore.model import Fork
from layerstore.storage import RunView
from tests.generated import generate

RUN = "sft"


class OneRank(Exchange):
    """What the ranks of a job with one of them tell each other."""

    def __init__(self) -> None:
        """Ask nobody."""
        self.rank, self.size = 0, 1

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Do it."""
        yield

    def first(self, text: str) -> str:
        """Hear oneself."""
        return text

    def texts(self, text: str) -> list[str]:
        """Agree."""
        return [text]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a store with two steps of a run."""
    with layerstore.init(tmp_path / "store") as made:
        save(made, 2)
        save(made, 4)
        yield made


def save(store: Store, step: int) -> None:
    """Save *step* of the run."""
    folder = store.path.parent / f"step{step}"
    store.ingest(generate(folder, layers=1, hidden=8, vocab=8, step=step), run=RUN)


def tip(store: Store) -> Composition:
    """Return what a job resumes from."""
    return store.compose(RUN).composition


def attempt_of(store: Store) -> AttemptLock:
    """Return the attempt lock of another job."""
    return AttemptLock(OneRank(), store.repo, run=RUN)


def test_the_second_of_two_jobs_opens_the_next_attempt(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """It forks and inherits from where it was resumed; a warning names the process that saves the wanted attempt."""
    wish = partial(place_resumed, composition=tip(store))
    first, second, third = attempt_of(store), attempt_of(store), attempt_of(store)
    wanted = first.acquire(wish)

    found = second.acquire(wish)

    assert (found.attempt, found.fork) == (2, Fork(attempt=1, step=4))
    assert (found.inherited, found.save_number, found.after) == (wanted.inherited, wanted.save_number, 4)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"attempt 1 of run 'sft' is locked by pid {os.getpid()} on " in warning
    assert third.acquire(wish).attempt == 3


def test_what_was_dropped_comes_back_beside_what_is_trained_instead(store: Store) -> None:
    """Not among its commits: a job that goes on from before it opens an attempt. Earlier steps do not matter."""
    save(store, 6)
    store.drop_commits(["sft@2", "sft@6"])
    place = attempt_of(store).acquire(partial(place_resumed, composition=tip(store)))
    store.drop("sft@4")
    anew = attempt_of(store).acquire(partial(place_resumed, composition=None))
    store.undrop_commits(["sft@4", "sft@6"])

    assert (place.attempt, place.fork, place.save_number) == (2, Fork(attempt=1, step=4), 2)
    assert (anew.attempt, anew.fork) == (2, None)
    assert attempt_of(store).acquire(partial(place_resumed, composition=tip(store))).attempt == 1


def test_what_will_be_saved_is_said_in_one_line(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Where the saves go and what they follow; a warning before the first save if they follow nothing."""
    earlier = store.compose(f"{RUN}@2").composition
    caplog.set_level("INFO", logger="layerstore")

    def said(composition: Composition | None, run: str = RUN) -> str:
        caplog.clear()
        attempt = AttemptLock(OneRank(), store.repo, run=run)
        attempt.acquire(partial(place_resumed, composition=composition))
        attempt.release()
        (record,) = caplog.records
        return f"{record.levelname} {record.getMessage()}"

    assert said(tip(store)) == f"INFO saving to {store.path}, newest sft@4"
    assert said(earlier) == f"INFO saving to {store.path}, newest sft@4; attempt 2 begins"
    assert said(None, run="new") == f"INFO saving to {store.path}: run 'new' begins"
    anew = said(None)
    assert anew.startswith(
        f"WARNING saving to {store.path}: run 'sft' has commits up to step 4, and this engine was not"
    )
    assert "starting attempt 2 from scratch, unless a load comes before the first save" in anew
    assert "layerstore.resume(engine, store, run='sft') continues them" in anew


def test_what_the_last_holder_saved_meanwhile_is_not_overwritten(store: Store) -> None:
    """The holder may commit just before it releases the lock, so the next one looks again under the lock."""
    wish = partial(place_resumed, composition=tip(store))

    def late(view: RunView | None) -> NextCommit:
        found = wish(view)
        if found.attempt == 1:
            save(store, 6)  # between the look and the lock
        return found

    place = attempt_of(store).acquire(late)

    assert (place.attempt, place.fork) == (2, Fork(attempt=1, step=4))
    assert attempt_of(store).acquire(partial(place_resumed, composition=tip(store))).attempt == 1


def test_a_failed_move_keeps_the_attempt(store: Store) -> None:
    """After an error it still holds its lock."""
    first, second = attempt_of(store), attempt_of(store)
    first.acquire(partial(place_resumed, composition=tip(store)))

    def fails(view: RunView | None) -> NextCommit:
        raise StorageIO("made up", errno=errno.EIO, filename="store")

    with pytest.raises(StorageIO, match="made up"):
        first.acquire(fails)

    assert first._held == 1
    assert second.acquire(partial(place_resumed, composition=tip(store))).attempt == 2


def test_ranks_that_see_different_commits_are_told(store: Store) -> None:
    """Nothing stays locked."""

    class Torn(OneRank):
        def texts(self, text: str) -> list[str]:
            return [text, "0another"]

    with pytest.raises(Conflict, match="the ranks see different commits of run 'sft'"):
        AttemptLock(Torn(), store.repo, run=RUN).acquire(partial(place_resumed, composition=None))

    assert attempt_of(store).acquire(partial(place_resumed, composition=None)).attempt == 2


class OneIsLate(OneRank):
    """The second rank sees an old state, so many times."""

    def __init__(self, times: int) -> None:
        """Begin."""
        super().__init__()
        self.left = times

    def texts(self, text: str) -> list[str]:
        """Answer for both."""
        self.left -= 1
        return [text, f"{text[0]}old" if self.left >= 0 else text]


@pytest.mark.fault(106)
def test_ranks_whose_hosts_see_an_old_state_look_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a network, for a while, with a word in the log; on a disk of one host there is nothing to wait for."""
    monkeypatch.setattr(open_files, "LATE_SECONDS", 0.2)
    looks: list[int] = []

    def look() -> int:
        looks.append(len(looks))
        return looks[-1]

    assert OneIsLate(2).agree_on(look, str, may_be_late=True) == (2, ["2", "2"])
    assert "the hosts see different commits so far, looking again: 1; old" in caplog.text
    assert OneIsLate(1000).agree_on(look, str, may_be_late=True)[1][1] == "old"
    assert len(looks) > 5
    before = len(looks)
    assert OneIsLate(1000).agree_on(look, str, may_be_late=False)[1][1] == "old"
    assert len(looks) == before + 1


def test_a_collection_keeps_what_running_jobs_rest_on(store: Store) -> None:
    """The newest commit of each attempt that is being saved stays, whatever the rules say, until the job ends."""
    job = attempt_of(store)
    job.acquire(partial(place_resumed, composition=tip(store)))
    for step in (3, 5, 7):
        folder = store.path.parent / f"back{step}"
        store.ingest(generate(folder, layers=1, hidden=8, vocab=8, step=step), run=RUN, rollback=step == 3)

    store.gc(Keep(last=1))
    assert [(entry.attempt, entry.step) for entry in store.log(RUN)] == [(2, 7), (1, 4)]

    job.release()
    store.gc(Keep(last=1))
    assert [(entry.attempt, entry.step) for entry in store.log(RUN)] == [(2, 7)]


def test_going_back_releases_the_attempt(store: Store) -> None:
    """A saver whose engine was filled from elsewhere releases its attempt."""
    first, second = attempt_of(store), attempt_of(store)
    first.acquire(partial(place_resumed, composition=tip(store)))

    assert first.acquire(partial(place_resumed, composition=store.compose(f"{RUN}@2").composition)).attempt == 2
    assert second.acquire(partial(place_resumed, composition=tip(store))).attempt == 1
