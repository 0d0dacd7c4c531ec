"""``gc``: what is kept stays whole, what goes is freed to the byte, and new data is safe."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.disk import Files, Hook
from layerstore.errors import Conflict, IntegrityError, InvalidInput, LayoutMismatch, NotFound, StorageIO
from layerstore.format import decode_version, ref_of
from layerstore.gc.collect import GcOutcome
from layerstore.model import Kind
from layerstore.storage import IndexNotice, open_repository
from tests.unit.checkpoints import Checkpoints, snapshot


def collect(store: Store, keep: Keep | None = None, *, grace_seconds: float | None = 0.0, **options: Any) -> GcOutcome:
    """Collect what is older than the clock's tick, the trash too: a file's time is only so fine."""
    time.sleep(0.02)
    return store.gc(keep, grace_seconds=grace_seconds, **{"empty_trash": True, **options})


def steps(store: Store, run: str | None = None) -> list[int]:
    """Return the steps that the log shows, newest first."""
    return [entry.step for entry in store.log(run)]


def objects(store: Store) -> dict[str, int]:
    """Return the size of every object."""
    return {path.name: path.stat().st_size for path in (store.path / "objects").rglob("*") if path.is_file()}


class Stopped(Exception):  # no error: a stop
    """Somebody ends here."""


def stop() -> None:
    """Stop whoever is at work."""
    raise Stopped


def once(operation: str, part: str, action: Callable[[], object]) -> Hook:
    """Return a hook that does *action* before the first such operation."""
    done: list[object] = []

    def hook(doing: str, path: Path) -> None:
        if doing == operation and part in path.parts and not done:
            done.append(None)
            done.append(action())

    return hook


def grow_old(store: Store) -> None:
    """Let everything be as old as the clock allows: from here on only a touch protects it."""
    for path in (store.path / "objects").rglob("*"):
        if path.is_file():
            os.utime(path, (1, 1))


def masters(store: Store, ref: str) -> dict[str, bytes]:
    """Return every tensor of a composite."""
    return {name: value.tobytes() for name, value in store.compose(ref).tensors().items()}


@pytest.fixture
def three(store: Store, saved: Checkpoints) -> Store:
    """Return a store with steps 10, 20 and 30 of one run."""
    saved.into(store, 10, 20, 30)
    return store


# -- what goes and what stays --------------------------------------------------------------------------------------


def test_what_is_kept_is_whole_and_the_rest_is_freed_to_the_byte(store: Store, saved: Checkpoints) -> None:
    """The plan says what each commit frees, the deed frees that, and what stays is as it was."""
    saved.into(store, 10, 20, 30)
    before, kept = objects(store), masters(store, "r@30")

    planned = collect(store, Keep(last=1), dry_run=True)
    untouched = objects(store)
    done = collect(store, Keep(last=1))

    after = objects(store)
    assert untouched == before
    assert planned.commits == done.commits
    assert [(fate.step, fate.kept_by) for fate in done.commits] == [(30, ("newest", "last 1")), (20, ()), (10, ())]
    assert done.bytes_freed == sum(before.values()) - sum(after.values()) > 0
    assert sum(fate.bytes_freed for fate in done.removed) == done.objects.size_bytes
    assert done.objects.count == len(before) - len(after)
    assert steps(store) == [30]
    assert masters(store, "r@30") == kept
    verdict = store.verify(read_data=True)
    assert (verdict.ok, verdict.orphans) == (True, 0)


def test_a_commit_keeps_what_it_has_inherited(store: Store, saved: Checkpoints) -> None:
    """Also from commits that are gone, and from the very first, full one."""
    saved.into(store, 10, 20, 30, 40, policy="parity")
    kept, sources = masters(store, "r@40"), {choice.step for choice in store.compose("r@40").layers.values()}

    collect(store, Keep(last=1))

    assert len(sources) > 1
    assert steps(store) == [40]
    assert masters(store, "r@40") == kept
    assert store.verify(read_data=True).ok


def test_without_rules_only_what_is_in_the_trash_goes(store: Store, saved: Checkpoints) -> None:
    """Dropped and replaced commits leave the trash with all that only they needed; nothing that is visible goes."""
    saved.into(store, 10, 20, 30)
    store.drop("r@20")
    store.ingest(saved(10, seed=5), run="r", replace=True)

    kept = collect(store, empty_trash=False)
    emptied = collect(store)

    assert (kept.bytes_freed, kept.trash.count) == (0, 0)
    assert (emptied.removed, emptied.trash.count) == ([], 2)
    assert emptied.bytes_freed == emptied.orphans.size_bytes > 0
    assert (steps(store), store.dropped()) == ([30, 10], [])
    assert store.verify(read_data=True).orphans == 0


def test_the_trash_is_emptied_by_age(store: Store, saved: Checkpoints) -> None:
    """What was dropped a week ago goes, what was dropped since stays whole, also where the commits beside it go."""
    saved.into(store, 10, 20, 30, 40)
    store.drop("r@10")
    store.drop("r@20")
    [old] = (store.path / "trash" / "commits" / "r").glob("10.*")
    os.utime(old, (time.time() - 8 * 24 * 3600,) * 2)

    done = collect(store, Keep(last=1), empty_trash=False)

    assert done.trash.count == 1
    assert [each.commit.record.step for each in store.dropped()] == [20]
    store.undrop("r@20")
    assert steps(store) == [40, 20]
    assert store.verify(read_data=True).ok


def test_what_a_killed_replace_left_hidden_goes_to_the_trash(store: Store, saved: Checkpoints) -> None:
    """Its record stands beside the one that hides it until a collection takes it; it never shows again."""
    saved.into(store, 10, 20)
    replaced = store.show("r@10").commit

    with Store(store.path, hook=once("rename", "trash", stop)) as stopped, pytest.raises(Stopped):
        stopped.ingest(saved(10, seed=3), run="r", replace=True)
    left = {path.name for path in (store.path / "commits" / "r").iterdir()}
    shown = store.show("r@10").commit
    assert f"10.{replaced}" in left
    assert shown != replaced
    collect(store, Keep(every=20))

    assert steps(store) == [20]
    assert [each.commit.id for each in store.dropped()] == [replaced]
    assert len(list((store.path / "commits" / "r").iterdir())) == 1
    assert collect(store).trash.count == 1
    assert store.verify(read_data=True).orphans == 0


@pytest.mark.fault(103)
def test_what_a_killed_replace_left_hidden_stays_hidden_from_the_next_replace(store: Store, saved: Checkpoints) -> None:
    """The second goes in the place of the first, and of what that had replaced."""
    store.ingest(saved(10), run="r")
    with Store(store.path, hook=once("rename", "trash", stop)) as stopped, pytest.raises(Stopped):
        stopped.ingest(saved(10, seed=3), run="r", replace=True)

    store.ingest(saved(10, seed=4), run="r", replace=True)

    assert steps(store) == [10]
    assert len(store.dropped()) == 2
    assert store.show("r@10").step == 10


def test_pins_stay_with_all_that_they_need(store: Store, saved: Checkpoints) -> None:
    """A pinned commit stays in the log; a pinned composite stays, without the commits that it was mixed from."""
    saved.into(store, 10, 20, 30, 40)
    store.pin("release", "r@10")
    store.compose("r@30", policy="parity").pin("mix")
    mixed = masters(store, "mix")

    done = collect(store, Keep(last=1))

    assert steps(store) == [40, 10]
    assert {fate.step: fate.kept_by for fate in done.commits}[10] == ("pin release",)
    assert done.pins == ("mix", "release")
    assert masters(store, "mix") == mixed
    assert store.verify(read_data=True).ok
    store.delete_pin("mix")
    assert collect(store).orphans.count > 0
    assert store.verify().orphans == 0


def test_runs_that_were_not_asked_about_keep_what_they_have(store: Store, saved: Checkpoints) -> None:
    """What two runs share stays for the one; once it goes with both, its bytes are counted once."""
    for step in (10, 20):
        store.ingest(saved(step), run="a")
        store.ingest(saved(step), run="b")
    before = objects(store)

    done = collect(store, Keep(last=1), runs=["a"])
    shared = (done.bytes_freed, steps(store, "a"), steps(store, "b"))
    rest = collect(store, Keep(last=1))

    assert shared == (0, [20], [20, 10])
    assert sum(fate.bytes_freed for fate in rest.removed) == rest.bytes_freed
    assert rest.bytes_freed == sum(before.values()) - sum(objects(store).values()) > 0
    with pytest.raises(NotFound, match="no run 'x'"):
        collect(store, Keep(last=1), runs=["x"])


def test_the_best_by_what_the_trainer_logged(store: Store, saved: Checkpoints) -> None:
    """From trainer_state.json, at the step of the save and no other."""
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 9.0)):
        source = saved(step, layout="hf")
        state = json.loads((source / "trainer_state.json").read_text())
        state["log_history"] = [
            *(3, None, "step", [], {"step": str(step)}),  # odd entries hide no others
            *({"step": at, "eval_loss": 0.0} for at in (5, 15)),
            {"step": step, "eval_loss": loss, "epoch": 1.0},
            {"step": step, "loss": 7},
        ]
        (source / "trainer_state.json").write_text(json.dumps(state))
        store.ingest(source, run="r")

    collect(store, Keep(best="eval_loss:2"))
    assert steps(store) == [40, 30, 20]
    with pytest.raises(InvalidInput, match="no commit has the metric 'f1'"):
        collect(store, Keep(best="f1"))
    assert steps(store) == [40, 30, 20]


def test_a_full_disk_is_made_room_on_without_trimming(
    store: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What replaces a commit without its moments has to be written: a hint says which rules need no room."""
    saved.into(store, 5, 10, 20)

    def full(*_: object) -> None:
        raise StorageIO("cannot write: the disk is full", errno=errno.ENOSPC, filename="x")

    monkeypatch.setattr("layerstore.gc.collect.trim", full)
    with pytest.raises(StorageIO) as caught:
        collect(store, Keep(last=2, drop_optimizer_older_than=5))
    assert "without --drop-optimizer-older-than" in str(caught.value.hint)


# -- moments -------------------------------------------------------------------------------------------------------


def test_old_commits_lose_their_moments_and_keep_their_weights(
    store: Store, saved: Checkpoints, tmp_path: Path
) -> None:
    """Masters and exports are the same bytes; a resume is refused; a pinned commit keeps its moments."""
    saved.into(store, 5, 10, 20, 30)
    store.pin("release", "r@5")
    before, weights = objects(store), masters(store, "r@10")
    listed = [(entry.step, entry.time_ns, entry.layers) for entry in store.log("r")]
    keep = Keep(drop_optimizer_older_than=10)

    planned = collect(store, keep, dry_run=True)
    done = collect(store, keep)

    assert planned.commits == done.commits
    assert [(fate.step, fate.loses_moments) for fate in done.commits] == [
        (30, False),
        (20, False),
        (10, True),
        (5, False),
    ]
    assert done.removed == []
    # New version blobs, and a record, are written for what goes.
    freed = sum(before.values()) - sum(objects(store).values())
    assert 0 <= done.bytes_freed - freed < 10_000
    assert done.trimmed[0].bytes_freed == done.objects.size_bytes > 0.5 * sum(before.values()) / 4
    assert [(entry.step, entry.time_ns, entry.layers) for entry in store.log("r")] == listed
    assert masters(store, "r@10") == weights
    assert store.compose("r@10").export(tmp_path / "hf", dtype="bf16").bytes_written > 0
    with pytest.raises(LayoutMismatch, match="r@10 no longer has optimizer moments"):
        store.compose("r@10").write(tmp_path / "resume")
    store.compose("r@20").write(tmp_path / "resume")
    store.compose("release").write(tmp_path / "pin")
    assert store.verify(read_data=True).orphans == 0
    assert collect(store, keep).trimmed == [], "done once"


def test_composites_take_no_layer_without_moments(store: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """A policy falls to newer saves, as it does where the optimizer had not begun."""
    saved.into(store, 10, 20)
    half = store.compose("r", policy="parity")
    half.pin("half")
    assert {choice.step for choice in half.layers.values()} == {10, 20}

    collect(store, Keep(drop_optimizer_older_than=5))

    composite = store.compose("r", policy="parity")
    assert {choice.step for choice in composite.layers.values()} == {20}
    composite.write(tmp_path / "resume")
    filled = store.ingest(saved(15), run="r", policy="parity")
    assert filled.layers_saved == filled.layers, "a selective ingest inherits no layer without moments"


def test_the_checkpoint_of_a_trimmed_commit_is_known(store: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """Whoever ingests all there is once more meets no conflict; moments come back where they are asked for."""
    saved.into(store, 10, 20, 30, policy="parity")
    collect(store, Keep(drop_optimizer_older_than=5))
    before, there = objects(store), store.show("r@20").commit

    again = store.ingest(saved(20), run="r")
    assert (again.is_new, again.commit, again.objects_new, again.bytes_new) == (False, there, 0, 0)
    assert any("stored without its moments" in note and "--replace" in note for note in again.notes)
    assert objects(store) == before
    with pytest.raises(Conflict, match="saved already, with other content"):
        store.ingest(saved(20, seed=1), run="r")
    assert store.ingest(saved(20), run="r", replace=True).is_new
    store.compose("r@20").write(tmp_path / "resume")
    collect(store)
    assert store.verify(read_data=True).orphans == 0


@pytest.mark.parametrize(("lost", "attempt"), [("version", "newest"), ("master", "abandoned")])
def test_the_checkpoint_of_a_trimmed_commit_heals_it(store: Store, saved: Checkpoints, lost: str, attempt: str) -> None:
    """What is left of it is written again; what a collection took is not."""
    saved.into(store, 10, 20, 30)
    if attempt == "abandoned":
        store.ingest(saved(15), run="r", rollback=True)
    collect(store, Keep(drop_optimizer_older_than=1))
    weights, blob = masters(store, "r@10"), store.compose("r@10").layers["lm_head"].version
    data = (store.path / "objects" / blob[:2] / blob).read_bytes()
    name = blob if lost == "version" else decode_version(data, ref=ref_of(data)).objects[0].ref.id
    (store.path / "objects" / name[:2] / name).unlink()
    assert not store.verify().ok
    time.sleep(0.02)

    healed = store.ingest(saved(10), run="r")

    assert (healed.is_new, healed.objects_new) == (False, 1)
    assert store.verify(read_data=True).ok
    assert masters(store, "r@10") == weights
    assert collect(store).bytes_freed == 0, "nothing lies about"


# -- attempts ------------------------------------------------------------------------------------------------------


def test_a_history_goes_on_below_an_attempt_of_which_nothing_is_left(store: Store, saved: Checkpoints) -> None:
    """Its fork is kept by a record without layers, and so is its number."""
    saved.into(store, 100, 120)
    store.ingest(saved(110), run="r", rollback=True)
    store.ingest(saved(130), run="r")
    store.ingest(saved(125), run="r", rollback=True)
    store.ingest(saved(160), run="r")

    collect(store, Keep(every=100))

    assert sorted(steps(store, "r")) == [100, 160]
    assert store.show("r").attempt == 3
    assert store.show("r@100").attempt == 1, "found along the newest attempt's history"
    assert store.ingest(saved(155), run="r", rollback=True).attempt == 4
    before = sorted(path.name for path in (store.path / "commits" / "r").iterdir())
    collect(store)
    assert sorted(path.name for path in (store.path / "commits" / "r").iterdir()) == before


def test_abandoned_attempts_go_once_they_are_overtaken(store: Store, saved: Checkpoints) -> None:
    """Counting is along the history that goes on; but who forgot to resume has not lost what came further."""
    saved.into(store, 100, 200, 300)
    store.ingest(saved(150), run="r", rollback=True)

    young = collect(store, Keep(within="1h"), dry_run=True)
    first = collect(store, Keep(last=5))
    behind = sorted(steps(store))
    store.ingest(saved(310), run="r")
    second = collect(store, Keep(last=5))

    assert not young.removed
    assert behind == [100, 150, 300]
    assert sorted(steps(store)) == [100, 150, 310]
    assert all("left its attempt" in fate.goes_because for fate in (*first.removed, *second.removed))


# -- what is under way ---------------------------------------------------------------------------------------------


@pytest.mark.fault(51, 56)
@pytest.mark.parametrize("years", [40, -40])
def test_a_clock_that_jumps_changes_neither_the_order_nor_the_grace(
    store: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    """Steps order commits; ages are told by the filesystem's clock; what has a time from the future is young."""
    real_ns, jump_ns = time.time_ns, years * 365 * 24 * 3600 * 10**9
    for step, jump in ((10, 0), (20, jump_ns), (30, 0), (40, jump_ns)):
        monkeypatch.setattr(time, "time_ns", lambda jump=jump: real_ns() + jump)
        monkeypatch.setattr(time, "time", lambda jump=jump: (real_ns() + jump) / 1e9)
        store.ingest(saved(step), run="r")
    assert steps(store) == [40, 30, 20, 10]
    repo = open_repository(store.path, Files())
    ahead = repo.version(store.compose("r@10")._composition.layers[0].version).objects[0].id
    store.drop("r@10")
    before = objects(store)

    first = collect(store, grace_seconds=None)
    assert (first.bytes_freed, objects(store)) == (0, before)
    for path in (store.path / "objects").rglob("*"):
        os.utime(path, (1, 1))
    os.utime(repo.layout.object(ahead), (real_ns() / 1e9 + 10**8,) * 2)
    second = collect(store, grace_seconds=None)

    assert second.bytes_freed == first.young.size_bytes - before[ahead] > 0
    assert ahead in objects(store)
    assert steps(store) == [40, 30, 20]
    assert store.verify(read_data=True).ok


@pytest.mark.fault(56)
def test_a_commit_of_a_node_whose_clock_stands_still_is_young(
    store: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record says 1970, its file says when that was written: the younger of both is its age."""
    with monkeypatch.context() as node:
        node.setattr(time, "time_ns", lambda: 10**9)
        for step in (10, 20, 30):
            store.ingest(saved(step), run="r")
    old = next((store.path / "commits" / "r").glob("20.*"))
    os.utime(old, (1, 1))

    collected = collect(store, Keep(within="1h"))

    assert [fate.step for fate in collected.removed] == [20]
    assert steps(store) == [30, 10]


def test_a_commit_that_lost_its_moments_is_as_old_as_before(
    store: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collection has written a new record for it, and that is not a save."""
    with monkeypatch.context() as earlier:
        earlier.setattr(time, "time_ns", lambda: 10**9)
        for step in (10, 20):
            store.ingest(saved(step), run="r")
    for path in (store.path / "commits" / "r").iterdir():
        os.utime(path, (1, 1))
    store.ingest(saved(30), run="r")
    collect(store, Keep(drop_optimizer_older_than=10))

    collected = collect(store, Keep(within="1h"))

    assert sorted(fate.step for fate in collected.removed) == [10, 20]
    assert steps(store, "r") == [30]


@pytest.mark.fault(49, 51)
@pytest.mark.parametrize(("operation", "policy"), [("rename", "full"), ("unlink", "parity")])
def test_what_is_saved_meanwhile_is_put_back(store: Store, saved: Checkpoints, operation: str, policy: str) -> None:
    """A commit that is published while its objects are being taken has them all, saved or inherited."""
    saved.into(store, 10, 20, 30, policy=policy)
    saved_too: list[int] = []

    def interfere(doing: str, path: Path) -> None:
        if doing == operation and ("aside" in path.parts or "commits" in path.parts) and not saved_too:
            saved_too.append(1)
            with layerstore.open(store.path) as other:
                other.ingest(saved(10), run="again")
                other.ingest(saved(20), run="again", policy=policy)
                other.pin("seen", "r@30")

    with Store(store.path, hook=interfere) as collecting:
        collect(collecting, Keep(last=1), runs=["r"])

    assert saved_too
    assert store.verify(read_data=True).ok
    assert steps(store, "again") == [20, 10]


@pytest.mark.fault(1, 104)
def test_what_writers_left_goes_once_it_is_old(store: Store, saved: Checkpoints) -> None:
    """Temporary files and the parts of dead sessions, with what these alone name."""
    store.ingest(saved(10), run="r")
    left, fresh = store.path / "tmp" / "left", store.path / "tmp" / "fresh"
    left.write_bytes(bytes(1000))
    os.utime(left, (1, 1))
    fresh.write_bytes(bytes(10))
    session = store.path / "parts" / ("a" * 32)
    session.mkdir()
    os.utime(session, (1, 1))

    done = collect(store, grace_seconds=None)

    assert (done.unfinished.count, done.unfinished.size_bytes) == (1, 1000)
    assert (left.exists(), fresh.exists(), session.exists()) == (False, True, False)


def test_a_short_grace_takes_nothing_that_is_being_written(store: Store) -> None:
    """Files in tmp/ and the parts of sessions keep their day; without any grace they go."""
    left = store.path / "tmp" / "left"
    left.write_bytes(bytes(10))
    hours_ago = time.time() - 2 * 3600
    os.utime(left, (hours_ago, hours_ago))

    collect(store, grace_seconds=60.0)
    assert left.exists()
    collect(store, grace_seconds=0.0)
    assert not left.exists()


def test_what_was_written_again_stays_and_what_lay_aside_goes(store: Store, saved: Checkpoints) -> None:
    """A collection was killed while a damaged object lay aside, and an ingest has written that object again."""
    store.ingest(saved(10), run="r")
    sound = max(
        (path for path in (store.path / "objects").rglob("*") if path.is_file()), key=lambda at: at.stat().st_size
    )
    aside = store.path / "gc" / "aside" / sound.name
    aside.parent.mkdir(exist_ok=True)
    aside.write_bytes(sound.read_bytes()[:-1])

    collect(store, grace_seconds=None)

    assert not aside.exists()
    assert store.verify(read_data=True).ok


@pytest.mark.fault(11, 12)
def test_an_interrupted_collection_is_settled_by_the_next(store: Store, saved: Checkpoints) -> None:
    """What it left aside is found there by readers, counted by the next, and goes with that."""
    saved.into(store, 10, 20)
    kept = masters(store, "r@20")

    with Store(store.path, hook=once("unlink", "aside", stop)) as collecting, pytest.raises(Stopped):
        collect(collecting, Keep(last=1))
    aside = sum(path.stat().st_size for path in (store.path / "gc" / "aside").iterdir())
    assert masters(store, "r@20") == kept
    planned, done = collect(store, dry_run=True), collect(store)

    assert planned.bytes_freed == done.bytes_freed == aside > 0
    assert list((store.path / "gc" / "aside").iterdir()) == []
    assert store.verify(read_data=True).orphans == 0


# -- what stops it -------------------------------------------------------------------------------------------------


@pytest.mark.fault(91, 103)
@pytest.mark.parametrize("what", ["record", "version", "state", "pin"])
def test_nothing_is_removed_where_something_cannot_be_read(store: Store, saved: Checkpoints, what: str) -> None:
    """What it needs is not known; the error says whose it is."""
    saved.into(store, 10, 20)
    store.pin("kept", "r@20")
    record = next(pin.record for pin in store.pins())
    victim = {
        "record": next((store.path / "commits" / "r").glob("20.*")),
        "version": store.path / "objects" / record.layers[0].version.id[:2] / record.layers[0].version.id,
        "state": store.path / "objects" / record.states[0].id[:2] / record.states[0].id,
        "pin": store.path / "pins" / "kept",
    }[what]
    data = victim.read_bytes()
    victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    before = objects(store)

    with layerstore.open(store.path) as fresh, pytest.raises(IntegrityError, match="; nothing was removed"):
        collect(fresh, Keep(last=1))

    assert objects(store) == before
    assert len(list((store.path / "commits" / "r").iterdir())) == 2


def lose(store: Store, ref: str, how: str, *, kind: Kind = Kind.MASTER) -> str:
    """Take an object of one of *ref*'s layers away, or a byte of it; return its id."""
    repo = open_repository(store.path, Files())
    version = repo.version_of(store.compose(ref)._composition.layers[0])
    victim = next(stored.ref.id for stored in version.objects if stored.kind is kind)
    path = repo.layout.object(victim)
    if how == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1)
    return victim


@pytest.mark.fault(91, 103)
@pytest.mark.parametrize("dry_run", [True, False])
def test_the_whole_do_not_go_while_what_stays_is_hurt(store: Store, saved: Checkpoints, dry_run: bool) -> None:
    """The newest lacks an object: those before, which are whole, stay with it; once it is given up all goes on."""
    saved.into(store, 10, 20, 30)
    lost = lose(store, "r@30", "missing")
    before = objects(store)

    with pytest.raises(
        IntegrityError, match=rf"^r@30 stays, but is incomplete: object {lost}.*nothing was remov"
    ) as at:
        collect(store, Keep(last=1), dry_run=dry_run)

    assert "layerstore drop r@30 removes it" in str(at.value.hint)
    assert objects(store) == before
    assert steps(store) == [30, 20, 10]
    assert list((store.path / "gc" / "aside").iterdir()) == []
    store.drop("r@30")
    assert [fate.step for fate in collect(store, Keep(last=1)).removed] == [10]
    assert store.verify(read_data=True).ok


@pytest.mark.parametrize("how", ["missing", "cut short", "version"])
def test_what_goes_may_be_hurt(store: Store, saved: Checkpoints, how: str) -> None:
    """Only what stays has to be whole."""
    saved.into(store, 10, 20)
    if how == "version":
        version = store.compose("r@10")._composition.layers[0].version
        (store.path / "objects" / version.id[:2] / version.id).write_bytes(b"rot")
    else:
        lose(store, "r@10", how)

    collect(store, Keep(last=1))

    assert steps(store) == [20]
    assert store.verify(read_data=True).orphans == 0


@pytest.mark.fault(103)
def test_the_whole_do_not_go_while_a_pin_is_hurt(store: Store, saved: Checkpoints) -> None:
    """Also where only the pin needs it; the hint says how to give it up."""
    saved.into(store, 10, 20, 30)
    store.pin("best", "r@10")
    store.drop("r@10")
    lose(store, "best", "missing")
    before = objects(store)

    with pytest.raises(IntegrityError, match=r"^pin 'best' stays, but is incomplete: ") as at:
        collect(store, Keep(last=1))

    assert "layerstore pin --delete best removes it" in str(at.value.hint)
    assert (objects(store), steps(store)) == (before, [30, 20])
    store.delete_pin("best")
    assert len(collect(store, Keep(last=1)).removed) == 1
    assert store.verify(read_data=True).ok


def test_a_sweep_goes_on_beside_a_hurt_commit(store: Store, saved: Checkpoints) -> None:
    """No commit goes, and what nothing names can stand in for nothing."""
    saved.into(store, 10, 20, 30)
    lose(store, "r@30", "missing")
    orphan = store.path / "objects" / "00" / ("0" * 32)
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"left by a killed writer")

    done = collect(store)

    assert (done.removed, done.orphans.count, orphan.exists()) == ([], 1, False)
    with pytest.raises(IntegrityError, match=r"^r@30 stays, but is incomplete"):
        collect(store, Keep(last=1))
    assert [damage.kind for damage in store.verify().damaged] == ["object"]


def test_moments_that_are_to_go_may_be_lost(store: Store, saved: Checkpoints) -> None:
    """Weights that stay may not: the commit without moments will need them."""
    saved.into(store, 10, 20, 30)
    lose(store, "r@10", "missing", kind=Kind.OPTIMIZER)
    lost = lose(store, "r@20", "missing")

    with pytest.raises(IntegrityError, match=f"^r@20 stays, but is incomplete: object {lost}"):
        collect(store, Keep(last=3, drop_optimizer_older_than=5))
    store.ingest(saved(20), run="r")
    done = collect(store, Keep(last=3, drop_optimizer_older_than=5))

    assert [fate.step for fate in done.trimmed] == [20, 10]
    assert store.verify(read_data=True).ok


# -- indexes elsewhere ---------------------------------------------------------------------------------------------


@pytest.mark.fault(93)
def test_another_nodes_index_learns_what_was_collected(
    store: Store, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drops the rows, and says so once."""
    saved.into(store, 10, 20)
    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", str(tmp_path / "node"))
    with layerstore.open(store.path) as node:
        assert steps(node) == [20, 10]
    monkeypatch.delenv("LAYERSTORE_MANIFEST_DIR")
    collect(store, Keep(last=1))

    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", str(tmp_path / "node"))
    with layerstore.open(store.path) as node:
        with pytest.warns(IndexNotice, match=r"the commit r@10 \(.*\) is no longer there \(a collection elsewhere"):
            assert [(entry.step, entry.damage) for entry in node.log()] == [(20, None)]
        assert node.verify().ok


@pytest.mark.fault(93)
def test_a_store_and_its_copy_share_no_index(
    store: Store, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what was collected or dropped in the one, nor what the other still has, is news to the other."""
    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", str(tmp_path / "node"))
    with layerstore.open(store.path) as original:
        for step in (10, 20, 30):
            original.ingest(saved(step), run="r")
        shutil.copytree(store.path, tmp_path / "copy")
        collect(original, Keep(last=2))
        original.drop("r@30")

    with layerstore.open(tmp_path / "copy") as copy, layerstore.open(store.path) as original:
        assert (steps(copy), steps(original)) == ([30, 20, 10], [20])
        assert copy.verify().ok
        assert original.verify().ok
        assert not copy.repair().has_done
        assert collect(original, Keep(last=1)).trash.count == 1  # what was dropped
        assert steps(copy) == [30, 20, 10]


@pytest.mark.fault(107)
def test_a_migration_that_was_begun_holds_collections_back(store: Store, saved: Checkpoints) -> None:
    """Nothing is touched until it is finished; what a dry run finds may be looked at."""
    saved.into(store, 10, 20)
    (store.path / "migrating").mkdir()

    with pytest.raises(Conflict, match="a migration of this store was begun"):
        collect(store, Keep(last=1))

    assert steps(store, "r") == [20, 10]
    assert len(store.gc(Keep(last=1), dry_run=True).removed) == 1
    (store.path / "migrating").rmdir()
    assert len(collect(store, Keep(last=1)).removed) == 1


# -- what was shown, and rules per run ----------------------------------------------------------------------------


def test_only_what_was_shown_goes(three: Store, saved: Checkpoints) -> None:
    """Whoever has said yes to a plan has not said yes to the next one."""
    shown = collect(three, Keep(last=1), dry_run=True)
    three.ingest(saved(40), run="r")

    with pytest.raises(Conflict, match=r"the plan that was shown keeps r@30"):
        collect(three, Keep(last=1), confirmed=shown)
    assert steps(three) == [40, 30, 20, 10]

    collect(three, Keep(last=2), confirmed=shown)
    assert steps(three) == [40, 30]


def test_no_more_leaves_the_trash_than_was_shown(three: Store) -> None:
    """What is dropped after the plan was shown can still be brought back."""
    shown = three.gc(dry_run=True, empty_trash=True)
    three.drop("r@30")
    [dropped] = (three.path / "trash" / "commits" / "r").glob("30.*")
    os.utime(dropped, (1, 1))  # a drop and a gc in the same tick of the disk's clock are told apart by nobody

    with pytest.raises(Conflict, match="more would be deleted from the trash"):
        three.gc(empty_trash=True, confirmed=shown)

    three.undrop("r@30")
    assert steps(three) == [30, 20, 10]


# -- rules are per run ---------------------------------------------------------------------------------------------


def measured(source: Path, metric: str, value: float) -> Path:
    """Let *source* say what was measured at its step."""
    state = json.loads((source / "trainer_state.json").read_text())
    state["log_history"] = [{"step": state["global_step"], metric: value}]
    (source / "trainer_state.json").write_text(json.dumps(state))
    return source


def test_a_run_without_the_metric_keeps_what_it_has(store: Store, saved: Checkpoints) -> None:
    """It has no best commit, and so no worse ones either."""
    for run, metric in (("sft", "eval_loss"), ("dpo", "eval_rewards")):
        for step in (10, 20, 30):
            store.ingest(measured(saved(step, layout="hf", seed=step + len(metric)), metric, step), run=run)

    outcome = collect(store, Keep(best="eval_loss"))

    assert steps(store, "sft") == [30, 10]
    assert steps(store, "dpo") == [30, 20, 10]
    assert not any(
        fate.loses_moments
        for fate in collect(store, Keep(best="eval_loss", drop_optimizer_older_than=5)).commits
        if fate.run == "dpo"
    )
    collect(store, Keep(best="eval_loss", last=2))
    assert steps(store, "dpo") == [30, 20]
    assert {fate.kept_by for fate in outcome.commits if (fate.run, fate.step) == ("dpo", 10)} == {
        ("no commit has eval_loss",)
    }


def test_an_index_that_contradicts_a_record_stops_it(store: Store, saved: Checkpoints) -> None:
    """The way on is a new index: nobody is told to give the sound commit up, and nothing is removed."""
    saved.into(store, 2, 4)
    view = store.repo.catalog.view("r")
    [row] = [row for row in view.rows.values() if row.step == 2]
    view.rows[row.id] = row._replace(save_number=7)
    before = snapshot(store)

    with pytest.raises(IntegrityError, match="the index contradicts the record of r@2") as caught:
        store.gc(Keep(last=1), grace_seconds=0)

    assert caught.value.hint == "layerstore reindex"
    assert snapshot(store) == before
    store.reindex()
    assert len(store.gc(Keep(last=1), grace_seconds=0).removed) == 1
