"""Promises of histories: whatever happened to a run, its view says what the records alone say."""

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layerstore
from layerstore import Store
from layerstore.disk import Files
from layerstore.errors import InvalidInput, LayerstoreError, NotFound
from layerstore.history import resolve
from layerstore.history.references import find_row
from layerstore.inspect import LogPage
from layerstore.inspect.graph import draw_graph
from layerstore.layers import parse_reference
from layerstore.model import Commit, CommitId, CommitRecord, Fork
from layerstore.storage import (
    IndexNotice,
    RecordName,
    RecordRow,
    RecordStore,
    Repository,
    RunView,
    open_repository,
    row_of,
)
from layerstore.storage.index import packed_versions
from tests.faults.harness import flip
from tests.unit import samples

RUN = "sft"


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """Return the repository of a new store."""
    made = samples.repo(tmp_path / "store")
    yield made
    made.catalog.close()


def publish(repo: Repository, step: int, *, attempt: int = 1, fork: Fork | None = None, tag: str = "t") -> Commit:
    """Publish one commit, and do not tell the index."""
    commit = samples.commit(samples.record(run=RUN, step=step, attempt=attempt, fork=fork, tag=tag))
    repo.records.link(commit)
    return commit


# -- a slow reference, from records alone --------------------------------------------------------------------------


@dataclasses.dataclass
class Reference:
    """What a run should look like, worked out in the most obvious way from its records."""

    records: dict[CommitId, CommitRecord]
    damaged: set[RecordName]

    def visible(self) -> list[tuple[int, int, CommitId]]:
        """Return attempt, step and id of what no other commit hides, in order."""
        hidden = {gone for record in self.records.values() for gone in record.supersedes}
        return sorted((record.attempt, record.step, key) for key, record in self.records.items() if key not in hidden)

    def history(self, attempt: int) -> list[tuple[int, int, CommitId]]:
        """Return step, attempt and id of all that *attempt* came from, newest first."""
        own = [(step, of, key) for of, step, key in self.visible() if of == attempt]
        mine = sorted((record.step, key) for key, record in self.records.items() if record.attempt == attempt)
        lineage = self.records[mine[0][1]].lineage if mine else ()
        below = [found for fork in lineage[:1] for found in self.history(fork.attempt) if found[0] <= fork.step]
        return sorted(own + below, reverse=True)

    def meant(self, back: int, step: int | None) -> str:
        """Return the commit that a reference means, or the kind of error that it ends in."""
        attempts = sorted({attempt for attempt, _, _ in self.visible()})
        if self.damaged and (back or not attempts):
            return "damaged"  # who knows how many attempts there were
        if back >= len(attempts):
            return "not_found"
        found = self.history(attempts[-1 - back])
        at = found[0][0] if step is None else step
        if any(name.step == at or (step is None and name.step > at) for name in self.damaged):
            return "damaged"
        here = [(attempt, key) for of_step, attempt, key in found if of_step == at]
        newest = [key for attempt, key in here if attempt == max(here)[0]]
        if not newest:
            return "damaged" if self.damaged else "not_found"
        return newest[0] if len(newest) == 1 else "conflict"


STEPS = st.integers(0, 6)


@st.composite
def happenings(draw: st.DrawFn) -> list[tuple[str, int, int, int, int]]:
    """Return what happens to a run, in order: each with an attempt, a fork, a step and which earlier commit it hits."""
    kinds = st.sampled_from(["commit"] * 6 + ["replace", "damage", "remove", "reopen", "lose index", "look"])
    return draw(
        st.lists(st.tuples(kinds, st.integers(1, 4), STEPS, STEPS, st.integers(0, 30)), min_size=1, max_size=25)
    )


class Run:
    """A store, and beside it what has been done to it."""

    def __init__(self, path: Path) -> None:
        self.repo = samples.repo(path)
        self.commits: dict[CommitId, Commit] = {}
        self.damaged: set[CommitId] = set()
        self.gone: set[CommitId] = set()
        self.remembered: set[CommitId] = set()

    def happen(self, what: str, attempt: int, fork: int, step: int, which: int) -> None:
        """Do one thing."""
        there = [key for key in self.commits if key not in self.gone]
        hit = there[which % len(there)] if there else None
        if what in {"commit", "replace"}:
            self._publish(what, attempt, fork, step, hit, which)
        elif what == "reopen":
            self.repo.catalog.close()
            self.repo = open_repository(self.repo.layout.root, Files())
        elif what == "lose index":
            self.repo.catalog.close()
            shutil.rmtree(self.repo.layout.index, ignore_errors=True)
            self.repo = open_repository(self.repo.layout.root, Files())
            self.remembered.clear()
        elif what == "look":
            self.look()
        elif hit is not None:
            self._harm(hit, removes=what == "remove")

    def _publish(self, what: str, attempt: int, fork: int, step: int, hit: CommitId | None, which: int) -> None:
        record = samples.record(
            run=RUN,
            step=step,
            attempt=attempt,
            fork=Fork(attempt=1 + which % (attempt - 1), step=fork) if attempt > 1 and which % 5 else None,
            tag=f"{which % 3}",
            supersedes=[hit] if hit is not None and what == "replace" else [],
        )
        commit = samples.commit(record)
        if commit.id not in self.commits:
            self.repo.records.link(commit)
            self.commits[commit.id] = commit

    def _harm(self, key: CommitId, *, removes: bool) -> None:
        record = self.commits[key].record
        path = self.repo.layout.record(record.run, record.step, key)
        if removes:
            path.unlink()
            self.gone.add(key)
        elif key not in self.damaged:
            flip(path)
            self.damaged.add(key)

    def look(self) -> RunView | None:
        """Ask for the view; after it the index knows what it could read."""
        try:
            view = self.repo.catalog.view(RUN)
        except NotFound:
            return None
        self.remembered |= self.commits.keys() - self.damaged - self.gone
        return view

    def reference(self) -> Reference:
        """Return what should be seen now: a record that rots once it is in the index is found by who reads it."""
        names = {key: RecordName(RUN, commit.record.step, key) for key, commit in self.commits.items()}
        rotten = self.damaged - self.gone - self.remembered
        readable = self.commits.keys() - self.gone - rotten
        return Reference({key: self.commits[key].record for key in readable}, {names[key] for key in rotten})


@pytest.mark.fault(101)
@pytest.mark.filterwarnings("ignore:.*no longer there:layerstore.storage.IndexNotice")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(happenings())
def test_a_view_says_what_the_records_say(done: list[tuple[str, int, int, int, int]]) -> None:
    """Attempts, forks, what is hidden, damaged or gone: every question has the answer of the slow way."""
    with tempfile.TemporaryDirectory(prefix="history-") as folder:
        run = Run(Path(folder) / "store")
        try:
            for what, *numbers in done:
                run.happen(what, *numbers)
            expected = run.reference()
            view = run.look()
            if view is None:
                assert not expected.records
                assert not expected.damaged
                return
            _check(view, expected)
        finally:
            run.repo.catalog.close()


def _check(view: RunView, expected: Reference) -> None:
    assert set(view.damaged) == expected.damaged
    assert [(row.attempt, row.step, row.id) for row in view.visible] == expected.visible()
    assert {key: row_of(samples.commit(record)) for key, record in expected.records.items()} == view.rows
    for attempt in range(6):
        found = [(row.step, row.attempt, row.id) for row in view.history(attempt)]
        assert found == expected.history(attempt)
        for step in range(8):
            below = [(row.step, row.attempt, row.id) for row in view.history(attempt, step=step)]
            assert below == [row for row in found if row[0] <= step]
    for back in range(5):
        for step in [None, *range(7)]:
            assert _meant(view, back, step) == expected.meant(back, step), (back, step)
    drawn = [line.row for line in draw_graph(view) if line.row is not None]
    assert sorted(row.id for row in drawn) == sorted(row.id for row in view.visible)


def _meant(view: RunView, back: int, step: int | None) -> str:
    text = f"{RUN}~{back}" if step is None else f"{RUN}~{back}@{step}"
    try:
        return find_row(view, parse_reference(text)).id
    except LayerstoreError as exc:
        return exc.kind


# -- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_long_chain_of_attempts_ends_in_no_recursion(repo: Repository) -> None:
    """Training that went back a thousand times, each time further, is still followed and drawn."""
    count, versions = 1200, packed_versions([samples.entry("layer")])
    rows = [
        RecordRow(RUN, 10 * count - number, CommitId(f"{number:032x}"), number, fork, number, (), ("layer",), versions)
        for number in range(1, count + 1)
        for fork in [(Fork(attempt=number - 1, step=10 * count),) if number > 1 else ()]
    ]
    view = RunView(run=RUN, rows={row.id: row for row in rows}, damaged={})

    assert sum(1 for _ in view.history(count)) == count
    assert sum(line.row is not None for line in draw_graph(view)) == count


# -- what is known again -------------------------------------------------------------------------------------------


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let folders seem to have rested for a minute."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 60 * 10**9)


def a_tick() -> None:
    """Wait until the clock that gives files their times has gone on."""
    time.sleep(0.02)


class Listings:
    """Counts how often a run is listed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = RecordStore.listing

        def listing(records: RecordStore, run: str) -> list[str]:
            self.count += 1
            return original(records, run)

        monkeypatch.setattr(RecordStore, "listing", listing)


@pytest.mark.usefixtures("settled")
def test_a_folder_at_rest_is_listed_once(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing can have changed nothing is looked at again, and every change is seen."""
    publish(repo, 2)
    listings = Listings(monkeypatch)
    first = repo.catalog.view(RUN)
    a_tick()
    assert repo.catalog.view(RUN) is first
    assert listings.count == 1

    other = open_repository(repo.layout.root, Files())
    commit = publish(other, 4)
    assert [row.step for row in repo.catalog.view(RUN).visible] == [2, 4]
    a_tick()
    other.layout.record(RUN, 4, commit.id).unlink()
    with pytest.warns(IndexNotice, match="no longer there"):
        assert [row.step for row in repo.catalog.view(RUN).visible] == [2]


@pytest.mark.fault(106)
@pytest.mark.usefixtures("settled")
def test_a_network_filesystem_is_always_listed(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine's clock, or a cache of attributes, proves nothing."""
    publish(repo, 2)
    monkeypatch.setattr(RecordStore, "is_on_network", True)
    listings = Listings(monkeypatch)
    repo.catalog.view(RUN)
    repo.catalog.view(RUN)

    assert listings.count == 2


@pytest.mark.usefixtures("settled")
def test_a_record_that_is_repaired_in_place_is_seen(repo: Repository) -> None:
    """A folder does not show that a file in it was written to, so what is damaged is looked at every time."""
    commit = publish(repo, 2)
    publish(repo, 4)
    path = repo.layout.record(RUN, 2, commit.id)
    sound = path.read_bytes()
    path.write_bytes(b"")
    assert [name.step for name in repo.catalog.view(RUN).damaged] == [2]
    path.write_bytes(sound)

    assert repo.catalog.view(RUN).damaged == {}
    assert resolve(repo, f"{RUN}@2").commit == commit.id


# -- pages ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(repo: Repository) -> Iterator[Store]:
    """Return a store in which training went back once: attempt 1 to step 1000, attempt 2 from 800 to 900."""
    for step in (100, 800, 1000):
        publish(repo, step)
    for step in (850, 900):
        publish(repo, step, attempt=2, fork=Fork(attempt=1, step=800))
    with layerstore.open(repo.layout.root) as opened:
        yield opened


def shown(page: LogPage) -> list[str]:
    """Return a page's lines as the drawing, attempt and step."""
    return [
        f"{line.drawing} {line.entry.attempt}@{line.entry.step}" if line.entry else line.drawing for line in page.lines
    ]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("limit", [1, 3, 5])
def test_pages_make_up_the_whole_log(store: Store, limit: int, graph: bool) -> None:
    """Page after page shows what one long page shows, and each says how many commits follow."""
    whole = store.log_page(RUN, graph=graph)
    assert whole.more == ()

    found, before, left = [], None, 5
    while left:
        page = store.log_page(RUN, limit=limit, before=before, graph=graph)
        found += shown(page)
        left -= len(page.entries)
        assert [(more.run, more.commits) for more in page.more] == ([(RUN, left)] if left else [])
        before = page.more[0].after if left else None

    assert found == shown(whole)


def test_every_run_has_its_page(store: Store, repo: Repository) -> None:
    """The limit is for each run, and a commit names its run for the next page."""
    for step in (1, 2):
        repo.records.link(samples.commit(samples.record(run="other", step=step)))

    page = store.log_page(limit=1)
    assert [(entry.run, entry.step) for entry in page.entries] == [("other", 2), (RUN, 900)]
    assert [(more.run, more.commits) for more in page.more] == [("other", 1), (RUN, 4)]
    assert [entry.step for entry in store.log(before=page.more[0].after[:8])] == [1]
    with pytest.raises(InvalidInput, match="a page cannot have"):
        store.log(limit=0)


# -- drawings ------------------------------------------------------------------------------------------------------


def drawn(repo: Repository) -> list[str]:
    """Return the drawing of the run, with attempt and step of each commit."""
    lines = draw_graph(repo.catalog.view(RUN))
    return [line.drawing + (f" {line.row.attempt}@{line.row.step}" if line.row else "") for line in lines]


def test_what_was_abandoned_may_have_been_left_itself(repo: Repository) -> None:
    """An attempt that left another above where the newest one did is drawn inside what that abandoned."""
    for step in (100, 800, 900, 1000):
        publish(repo, step)
    publish(repo, 950, attempt=2, fork=Fork(attempt=1, step=900))
    publish(repo, 850, attempt=3, fork=Fork(attempt=1, step=800))
    publish(repo, 810, attempt=4, fork=Fork(attempt=1, step=800))

    assert drawn(repo) == [
        "* 4@810",
        "| * 3@850",
        "|/",
        "| * 2@950",
        "| | * 1@1000",
        "| |/",
        "| * 1@900",
        "|/",
        "* 1@800",
        "* 1@100",
    ]


def test_a_fresh_start_is_a_line_of_its_own(repo: Repository) -> None:
    """An attempt that forks nowhere joins nothing: below it the drawing begins anew, under an empty line."""
    publish(repo, 100)
    publish(repo, 50, attempt=2, tag="new")
    publish(repo, 75, attempt=3, fork=Fork(attempt=2, step=50))

    assert drawn(repo) == ["* 3@75", "* 2@50", "", "* 1@100"]
