"""The small files that a store keeps about its remotes: what processes change at once is all there afterwards."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from layerstore.errors import InvalidInput, NotFound
from layerstore.history import note_pushed, pushed_to
from layerstore.model import CommitId
from layerstore.remote import Bucket
from tests.remote.conftest import watch_writes
from tests.unit.checkpoints import Checkpoints

PROCESSES = 8
_PROGRAM = """
import sys
import layerstore
from layerstore.history import note_pushed
with layerstore.open(sys.argv[1]) as store:
    store.remotes.urls()
    print("ready", flush=True)
    sys.stdin.readline()
    exec(sys.argv[2])
"""


def at_once(store: Store, programs: Iterable[str]) -> None:
    """Run *programs* in a process each, which begin together with the open *store*."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(store.path), program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for program in programs
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0


@pytest.mark.full
@pytest.mark.fault(120)
def test_remotes_that_are_added_and_removed_at_once_are_all_right(store: Store) -> None:
    """Eight processes add a remote each, several times over, and then each removes some of its own."""
    numbers = range(PROCESSES)
    expected = {f"r{number}-{turn}": f"s3://b/{number}" for number in numbers for turn in range(5)}

    at_once(
        store,
        (f"for turn in range(5): store.remotes.add(f'r{number}-{{turn}}', 's3://b/{number}')" for number in numbers),
    )
    assert store.remotes.urls() == expected

    at_once(store, (f"for turn in range(4): store.remotes.remove(f'r{number}-{{turn}}')" for number in numbers))
    assert store.remotes.urls() == {f"r{number}-4": f"s3://b/{number}" for number in numbers}


@pytest.mark.full
@pytest.mark.fault(120)
def test_what_several_pushes_note_at_once_is_all_noted(store: Store) -> None:
    """To remotes of their own, and to the same one."""
    ids = [f"{number:032x}" for number in range(PROCESSES)]

    at_once(
        store,
        (
            f"for url in ('memory://{number}', 'memory://all'): note_pushed(store.repo, url, ['{ids[number]}'])"
            for number in range(PROCESSES)
        ),
    )

    assert pushed_to(store.repo) == {
        "memory://all": frozenset(ids),
        **{f"memory://{number}": frozenset([ids[number]]) for number in range(PROCESSES)},
    }


@pytest.mark.fault(120)
def test_a_push_notes_what_is_gone_and_keeps_what_another_has_noted(
    store: Store, saved: Checkpoints, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the bucket no longer has is taken back; a push that began later may already have noted its own."""
    saved.into(store, 2, 4)
    store.push(bucket.url)
    [gone, left] = [name.id for name in store.repo.records.names("r")]
    bucket.remove([f"commits/r/2.{gone}"])
    store.drop("r@2")
    saved.into(store, 6)
    other, once = CommitId("f" * 32), list[None]()

    def meanwhile(bucket: Bucket, name: str) -> None:
        if name.startswith("commits/") and not once:
            once.append(None)
            note_pushed(store.repo, bucket.url, [*pushed_to(store.repo)[bucket.url], other])

    watch_writes(monkeypatch, after=meanwhile)
    store.push(bucket.url)

    newest = store.repo.records.names("r")[-1].id
    assert pushed_to(store.repo) == {bucket.url: {left, newest, other}}


def test_a_push_that_changes_no_note_writes_none(store: Store, saved: Checkpoints, bucket: Bucket) -> None:
    """A push that follows a run looks every few seconds."""
    saved.into(store, 2)
    store.push(bucket.url)
    before = store.repo.files.identity(store.repo.layout.pushed)

    store.push(bucket.url)

    assert store.repo.files.identity(store.repo.layout.pushed) == before
    assert json.loads(Path(store.repo.layout.pushed).read_text()).keys() == {bucket.url}


def test_a_whole_pull_notes_what_is_gone(store: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """And what is there and was dropped here; a pull of one run notes that alone."""
    url = f"file://{tmp_path}/bucket"
    saved.into(store, 2, 4)
    store.push(url)
    there = {entry.step: entry.commit for entry in store.log("r")}
    store.drop("r@4")
    with layerstore.open(url) as remote:
        remote.drop("r@2")

    store.pull(url, refs=["r@4"])
    assert pushed_to(store.repo)[url] == {*there.values()}
    store.drop("r@4")
    store.pull(url)
    assert pushed_to(store.repo)[url] == {there[4]}


def test_what_was_pushed_is_forgotten_with_its_remote(store: Store) -> None:
    """By its name or, of a bucket that was never named, by its URL; a bucket with another name keeps its note."""
    commit = CommitId("0" * 32)
    for url in ("s3://b/one", "s3://b/two", "s3://b/tow"):
        note_pushed(store.repo, url, [commit])
    for name, url in {"one": "s3://b/one", "two": "s3://b/two", "again": "s3://b/two"}.items():
        store.remotes.add(name, url)

    assert store.remotes.remove("one") == "s3://b/one"
    assert store.remotes.remove("two") == "s3://b/two"
    assert store.remotes.remove("s3://b/tow") == "s3://b/tow"

    assert pushed_to(store.repo) == {"s3://b/two": {commit}}
    assert store.remotes.urls() == {"again": "s3://b/two"}
    with pytest.raises(NotFound, match="nothing was pushed to s3://b/tow"):
        store.remotes.remove("s3://b/tow")
    with pytest.raises(InvalidInput, match="s3://b/two is remote 'again'"):
        store.remotes.remove("s3://b/two/")
    assert pushed_to(store.repo) == {"s3://b/two": {commit}}
