"""Promises of ``repair``: nothing is removed, what has a copy comes back as it was, and what is lost is told."""

import dataclasses
import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from layerstore.check.fall_back import FELL_BACK, FallBack, execute_fall_backs
from layerstore.check.mending import execute_repair
from layerstore.check.repaired import Repaired, Request
from layerstore.publish.claims import publish
from layerstore.storage.quarantine import Quarantine

import layerstore
from layerstore import Keep, Store
from layerstore.check.damage import Costs, Holder
from layerstore.errors import Conflict, IntegrityError, InvalidInput, Locked, NotFound, StorageIO, Unsupported
from layerstore.format.records import make_commit
from layerstore.model import BlobRef, Commit, LayerVersion, ObjectId, Observed, Part, QuarantineLog
from layerstore.progress import Silent
from layerstore.storage.files import Files
from layerstore.storage.handles import OpenFile
from layerstore.storage.locks import Hold
from layerstore.storage.manifest import RecordRow
from layerstore.storage.objects import ObjectWriter
from layerstore.storage.rooms import Rooms
from layerstore.storage.setup import open_rooms
from layerstore.store import restore_identity
from tests.faults.harness import flip, masters, object_of, snapshot
from tests.generated import generate


@pytest.fixture(scope="module")
def pristine(fast_module_path: Path) -> Path:
    """Return a folder with checkpoints ``10``, ``20`` and ``30``, and a store with r@10 and r@20; to be copied."""
    for step in (10, 20, 30):
        generate(fast_module_path / str(step), layers=2, hidden=8, vocab=8, step=step, seed=step)
    with layerstore.init(fast_module_path / "store") as made:
        for step in (10, 20):
            made.ingest(fast_module_path / str(step), run="r")
    return fast_module_path


def version_of(store: Store, ref: str, layer: str) -> Path:
    """Return the file of the version blob that *ref* has of *layer*."""
    record = next(view for view in [store.compose(ref)]).layers[layer]
    return store.path / "objects" / record.version[:2] / record.version


def state_of(store: Store, ref: str) -> Path:
    """Return the file of rank 0's state."""
    return store.rooms.layout.object(_record(store, ref).states[0].id)


def _record(store: Store, ref: str) -> "layerstore.model.CommitRecord":
    from layerstore.history.references import resolve

    return resolve(store.rooms, ref).record


def _logs(store: Store) -> list[QuarantineLog]:
    """Return what the repairs of *store* have written down."""
    quarantine = store.rooms.quarantine
    return [log for log in map(quarantine.log, quarantine.ids()) if log is not None]


def record_of(store: Store, ref: str) -> Path:
    """Return the file of the record that *ref* means."""
    entry = next(entry for entry in store.log() if f"{entry.run}@{entry.step}" == ref)
    return store.path / "commits" / entry.run / f"{entry.step}.{entry.commit}"


def truncate(path: Path) -> None:
    """Cut the file short."""
    os.truncate(path, path.stat().st_size - 1)


def remove(path: Path) -> None:
    """Remove the file."""
    path.unlink()


def become_folder(path: Path) -> None:
    """Put a folder in its place."""
    path.unlink()
    path.mkdir()


def become_link(path: Path) -> None:
    """Put a link in its place, which leads to the very bytes."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def become_fifo(path: Path) -> None:
    """Put a fifo in its place, at which a careless reader would wait for ever."""
    path.unlink()
    os.mkfifo(path)


HARMS: list[Callable[[Path], None]] = [flip, truncate, remove, become_folder, become_link, become_fifo]


def named(harm: Callable[[Path], None]) -> str:
    """Return the name of a harm."""
    return harm.__name__


def quarantined(store: Store) -> set[str]:
    """Return what lies in quarantine, by where it was."""
    found = (path.relative_to(store.path).parts[2:] for path in (store.path / "quarantine").glob("*/*/**/*"))
    return {"/".join(parts) for parts in found}


def nothing_left(store: Store) -> bool:
    """Whether another repair has nothing to do."""
    before = snapshot(store.path / "quarantine")
    again = store.repair(read_data=True)
    return not again.has_done and before == snapshot(store.path / "quarantine")


# -- objects -------------------------------------------------------------------------------------------------------


@pytest.mark.fault(34, 35, 36, 37, 38)
@pytest.mark.parametrize(
    ("what", "harm"),
    [
        *((object_of, harm) for harm in HARMS),
        *((what, harm) for what in (version_of, state_of) for harm in (flip, truncate, remove)),
    ],
    ids=lambda each: each.__name__,
)
@pytest.mark.sample(5)
def test_an_object_is_healed_by_a_copy_of_the_store(
    store: Store, folder: Path, harm: Callable[[Path], None], what: Callable[..., Path]
) -> None:
    """Whatever became of it: verify names commit and layers, repair moves it aside and takes the other's bytes."""
    shutil.copytree(store.path, folder / "copy")
    sound = masters(store, "r@20")
    path = what(store, "r@20") if what is state_of else what(store, "r@20", "model.layers.0")
    harm(path)

    verdict = store.verify(read_data=True)
    (damage,) = verdict.damaged
    planned = store.repair(read_data=True, sources=[folder / "copy"], dry_run=True)
    after_plan = store.verify(read_data=True).damaged
    done = store.repair(read_data=True, sources=[folder / "copy"])

    assert damage.id == path.name
    assert damage.needed_by == ("r@20",)
    assert damage.costs[0].layers == (() if what is state_of else ("model.layers.0",))
    assert damage.costs[0].everything == (what is state_of)
    assert verdict.standing.whole == {"r": "r@10"}
    assert after_plan == verdict.damaged
    assert [each.path for each in planned.healed] == [each.path for each in done.healed] == [damage.path]
    assert done.healed[0].origin == str(folder / "copy")
    assert (done.lost, done.lost_records) == ((), ())
    assert ({damage.path} <= quarantined(store)) == (harm is not remove)
    assert store.verify(read_data=True).ok
    assert masters(store, "r@20") == sound
    assert nothing_left(store)


@pytest.mark.fault(37)
def test_swapped_objects_are_both_put_right(store: Store, folder: Path) -> None:
    """Each is whole, and not what its name says."""
    shutil.copytree(store.path, folder / "copy")
    one, other = object_of(store, "r@20", "model.layers.0"), object_of(store, "r@20", "model.layers.1")
    one.rename(one.with_name("x"))
    other.rename(one)
    one.with_name("x").rename(other)

    done = store.repair(read_data=True, sources=[folder / "copy"])

    assert len(done.healed) == 2
    assert store.verify(read_data=True).ok


@pytest.mark.fault(36)
def test_what_no_copy_has_is_told_and_comes_back_with_its_checkpoint(store: Store, folder: Path) -> None:
    """Out of the way, a damaged object is one that is missing: an ingest writes it again."""
    flip(object_of(store, "r@20", "lm_head"))

    done = store.repair(read_data=True)

    assert [(cost.holder, cost.layers) for cost in done.lost] == [("r@20", ("lm_head",))]
    assert [(each.reference, each.policy) for each in done.reingest] == [("r@20", None)]
    assert not store.verify().ok
    assert not store.repair().has_done
    store.ingest(folder / "20", run="r")
    assert store.verify(read_data=True).ok
    assert nothing_left(store)


@pytest.mark.fault(36)
@pytest.mark.parametrize(("saved_under", "steps", "origin"), [("full", (10, 20), 10), ("parity", (10, 20, 30), 20)])
def test_the_save_that_wrote_what_is_lost_is_named(
    folder: Path, saved_under: str, steps: tuple[int, ...], origin: int
) -> None:
    """Whoever has it by now, a composite or a later commit: their own checkpoints have other numbers in this layer."""
    policy = layerstore.Parity(fresh="odd")
    with layerstore.init(folder / "other") as store:
        for step in steps:
            store.ingest(folder / str(step), run="r", policy="full" if saved_under == "full" else policy)
        composite = store.compose("r", policy=policy)
        composite.pin("mix")
        remove(object_of(store, "mix", "model.layers.0"))

        done = store.repair()

        assert composite.layers["model.layers.0"].step == origin < composite.step
        assert "mix" in {cost.holder for cost in done.lost}
        named = None if saved_under == "full" else saved_under
        assert [(each.reference, each.policy) for each in done.reingest] == [(f"r@{origin}", named)]
        store.ingest(folder / str(origin), run="r", policy=saved_under)
        assert store.verify(read_data=True).ok


@pytest.mark.fault(36)
def test_a_save_of_an_attempt_that_was_left_is_healed_by_its_checkpoint(store: Store, folder: Path) -> None:
    """Below the fork and above it: what was lost is written again, and no commit is added for that."""
    generate(folder / "15", layers=2, hidden=8, vocab=8, step=15, seed=15)
    store.pin("kept", "r@20")
    store.ingest(folder / "15", run="r", rollback=True)
    remove(object_of(store, "r@10", "lm_head"))
    remove(object_of(store, "kept", "lm_head"))
    commits = [entry.commit for entry in store.log()]

    named = [each.reference for each in store.repair(dry_run=True).reingest]
    healed = [store.ingest(folder / step, run="r") for step in ("10", "20")]

    assert named == ["r@10", "r~1@20"]
    assert [(each.is_new, each.objects_new) for each in healed] == [(False, 1), (False, 1)]
    assert store.verify(read_data=True).ok
    assert commits == [entry.commit for entry in store.log()]
    with pytest.raises(Conflict, match="training has left"):  # whole as it is, it is in the wrong place
        store.ingest(folder / "20", run="r")


def test_a_copy_that_is_damaged_too_is_not_taken(store: Store, folder: Path) -> None:
    """The next one is asked."""
    path = object_of(store, "r@20", "lm_head")
    for name in ("bad", "good"):
        shutil.copytree(store.path, folder / name)
    flip(folder / "bad" / path.relative_to(store.path))
    path.unlink()

    done = store.repair(sources=[folder / "bad", folder / "good"])

    assert [each.origin for each in done.healed] == [str(folder / "good")]
    assert store.verify(read_data=True).ok


def test_what_an_earlier_repair_took_by_mistake_comes_back(store: Store) -> None:
    """A fault of the memory passes: what lies in quarantine is asked too."""
    path = object_of(store, "r@20", "lm_head")
    data = path.read_bytes()
    flip(path)
    store.repair(read_data=True)
    (kept,) = (store.path / "quarantine").glob(f"*/objects/*/{path.name}")
    kept.write_bytes(data)

    done = store.repair()

    assert [each.origin for each in done.healed] == ["an earlier repair's quarantine"]
    assert store.verify(read_data=True).ok


def test_what_lies_aside_heals_what_is_damaged_at_its_place(store: Store) -> None:
    """A collection was stopped after it had moved the object aside; something else got its name."""
    path = object_of(store, "r@20", "lm_head")
    aside = store.path / "gc" / "00000001-00000000" / "aside"
    aside.mkdir(parents=True)
    shutil.copy(path, aside / path.name)
    path.write_bytes(b"?")

    assert [damage.id for damage in store.verify().damaged] == [path.name]
    assert [each.origin for each in store.repair().healed] == ["what a collection had moved aside"]
    assert store.verify(read_data=True).ok


def test_what_lies_aside_is_no_damage(store: Store) -> None:
    """It is found there, by readers as by verify."""
    path = object_of(store, "r@20", "lm_head")
    aside = store.path / "gc" / "00000001-00000000" / "aside"
    aside.mkdir(parents=True)
    path.rename(aside / path.name)

    assert store.verify(read_data=True).ok
    assert not store.repair(read_data=True).has_done


def test_a_healed_blob_may_name_more_that_is_lost(store: Store, folder: Path) -> None:
    """That shows only once it can be read: repair looks again, and takes both."""
    shutil.copytree(store.path, folder / "copy")
    lost = object_of(store, "r@20", "lm_head")
    flip(version_of(store, "r@20", "lm_head"))
    lost.unlink()
    assert len(store.verify().damaged) == 1

    done = store.repair(sources=[folder / "copy"])

    assert {Path(each.path).name for each in done.healed} >= {lost.name}
    assert store.verify(read_data=True).ok


def test_what_only_hidden_commits_need_harms_nothing(store: Store) -> None:
    """Verify says so and does not fail; a collection takes it with them."""
    path = object_of(store, "r@10", "lm_head")
    path.unlink()
    assert not store.verify().ok
    store.drop("r@10")

    verdict = store.verify()

    assert (verdict.ok, [damage.id for damage in verdict.hidden]) == (True, [path.name])
    assert "hidden" in verdict.hidden[0].needed_by[0]
    store.gc(grace_seconds=0)
    assert store.verify(read_data=True).hidden == ()


# -- what still stands ---------------------------------------------------------------------------------------------


def test_verify_tells_which_policies_avoid_the_damage(store: Store, folder: Path) -> None:
    """Parity takes half of the layers from the save before: damage in that half leaves it whole."""
    store.ingest(folder / "30", run="r")
    steps = {layer: choice.step for layer, choice in store.compose("r@30", policy="parity").layers.items()}
    older = next(layer for layer, step in steps.items() if step == 20)
    own = next(layer for layer, step in steps.items() if step == 30)
    object_of(store, "r@30", older).unlink()

    (hurt,) = store.verify().standing.hurt
    object_of(store, "r@30", own, "optimizer").unlink()
    (more,) = store.verify().standing.hurt

    assert (hurt.reference, hurt.layers) == ("r@30", (older,))
    assert "parity" in (hurt.stands or ())
    assert "latest" not in (hurt.stands or ())
    assert masters(store, "r@30", policy="parity")
    assert "parity" not in (more.stands or ())
    assert set(more.layers) == {older, own}


def test_what_is_said_to_stand_is_composed_without_the_bases_own_version(
    store: Store, folder: Path, tmp_path: Path
) -> None:
    """To hold the older version against it would need it; where the older one is another run's, that is refused."""
    store.ingest(folder / "30", run="r")
    store.ingest(folder / "20", run="other")
    choices = store.compose("r@30", policy="parity").layers
    older = next(layer for layer, choice in choices.items() if choice.step == 20)
    lost = store.compose("r@30").layers[older].version
    (store.path / "objects" / lost[:2] / lost).unlink()

    (hurt,) = store.verify().standing.hurt

    assert "parity" in (hurt.stands or ())
    store.compose("r@30", policy="parity").write(tmp_path / "resume")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base: r@30\nlayers:\n  {older}: other@20\nrest: base\n")
    with pytest.raises(IntegrityError):
        store.compose(recipe=recipe).write(tmp_path / "mixed")


def test_lost_moments_leave_the_weights(store: Store) -> None:
    """An export needs no optimizer."""
    object_of(store, "r@20", "lm_head", "optimizer").unlink()

    (hurt,) = store.verify().standing.hurt

    assert "weights" in (hurt.stands or ())


# -- records -------------------------------------------------------------------------------------------------------


def time_to_collect(store: Store) -> None:
    """Collect, which must not be held back."""
    store.gc(grace_seconds=0)


@pytest.mark.fault(44, 91)
def test_a_record_without_a_copy_holds_gc_back_until_it_is_given_up(store: Store) -> None:
    """Its objects stay as long as nobody knows what it needs; what it had hidden shows again, and that is said."""
    objects = snapshot(store.path / "objects")
    path = record_of(store, "r@20")
    path.write_bytes(b"rot")
    shutil.rmtree(store.path / "manifest")
    with layerstore.open(store.path) as fresh:
        done = fresh.repair()

        assert done.lost_records == done.held_back == ("r@20",)
        assert [entry.step for entry in fresh.log()] == [10]
        verdict = fresh.verify()
        assert (verdict.ok, verdict.damaged, verdict.quarantined) == (False, (), ("r@20",))
        with pytest.raises(IntegrityError, match="r@20 needs is not known") as caught:
            fresh.gc(Keep(last=1), grace_seconds=0)
        assert "drop r@20 --quarantined" in (caught.value.hint or "")
        assert snapshot(store.path / "objects") == objects
        assert nothing_left(fresh)
        assert fresh.give_up("r@20", dry_run=True) == fresh.give_up("r@20")
        with pytest.raises(NotFound):
            fresh.give_up("r@20")
        fresh.gc(grace_seconds=0)
        assert fresh.verify().orphans == 0
        assert (fresh.verify().ok, fresh.verify().quarantined) == (True, ())
        assert (
            path.read_bytes()
            if path.exists()
            else b"rot" in {kept.read_bytes() for kept in (store.path / "quarantine").rglob(path.name)}
        )


def _lose(store: Store, ref: str) -> Path:
    """Let the record of *ref* rot where nobody has a copy of it, and repair; return its path."""
    path = record_of(store, ref)
    path.write_bytes(b"rot")
    shutil.rmtree(store.path / "manifest")
    with layerstore.open(store.path) as fresh:
        assert ref in fresh.repair().held_back
    return path


@pytest.mark.fault(44, 91)
def test_the_checkpoint_of_a_lost_record_brings_it_back_among_later_ones(store: Store, folder: Path) -> None:
    """It would have another number today: the id says which it had."""
    store.ingest(folder / "30", run="r")
    sound = masters(store, "r@20")
    path = _lose(store, "r@20")
    with layerstore.open(store.path) as fresh:
        saved = fresh.ingest(folder / "20", run="r")

        assert (saved.commit, saved.record_healed, saved.notes) == (path.name.split(".")[1], True, ())
        assert masters(fresh, "r@20") == sound
        assert (fresh.verify(read_data=True).ok, fresh.verify().quarantined) == (True, ())
        time_to_collect(fresh)
        assert masters(fresh, "r@20") == sound
        assert nothing_left(fresh)


@pytest.mark.fault(44, 91)
def test_a_lost_record_that_had_replaced_another_comes_back_and_hides_it(store: Store, folder: Path) -> None:
    """What it had hidden shows again, and is no rival of its own successor."""
    generate(folder / "other", layers=2, hidden=8, vocab=8, step=20, seed=7)
    store.ingest(folder / "other", run="r", replace=True)
    store.ingest(folder / "30", run="r")
    sound = masters(store, "r@20")
    path = _lose(store, "r@20")
    with layerstore.open(store.path) as fresh:
        assert masters(fresh, "r@20") != sound

        saved = fresh.ingest(folder / "other", run="r")

        assert (saved.commit, saved.record_healed) == (path.name.split(".")[1], True)
        assert masters(fresh, "r@20") == sound
        time_to_collect(fresh)


@pytest.mark.fault(44, 91)
def test_a_lost_record_in_an_earlier_attempt_comes_back_there(store: Store, folder: Path) -> None:
    """Training went back to a later step: both histories have the lost one."""
    store.ingest(folder / "30", run="r")
    generate(folder / "31", layers=2, hidden=8, vocab=8, step=30, seed=31)
    store.ingest(folder / "31", run="r", rollback=True)
    path = _lose(store, "r@10")
    with layerstore.open(store.path) as fresh:
        saved = fresh.ingest(folder / "10", run="r")

        assert (saved.commit, saved.attempt, saved.record_healed) == (path.name.split(".")[1], 1, True)
        time_to_collect(fresh)


@pytest.mark.fault(44, 91)
def test_other_content_takes_the_place_of_a_lost_record_only_if_told_to(store: Store, folder: Path) -> None:
    """What the lost one needed is not known: without the user's word it is kept, with it that is said."""
    generate(folder / "other", layers=2, hidden=8, vocab=8, step=20, seed=7)
    path = _lose(store, "r@20")
    lost_id = path.name.split(".")[1]
    before = set(snapshot(store.path / "objects"))
    with layerstore.open(store.path) as fresh:
        other = fresh.ingest(folder / "other", run="r")

        assert other.record_healed is False
        assert [note for note in other.notes if lost_id[:12] in note and "goes on to hold gc back" in note]
        assert fresh.verify().quarantined == ("r@20",)
        with pytest.raises(IntegrityError, match="r@20 needs is not known"):
            fresh.gc(grace_seconds=0)

        replaced = fresh.ingest(folder / "other", run="r", replace=True)

        assert [note for note in replaced.notes if lost_id[:12] in note and "is replaced" in note]
        assert set(_superseded(fresh)) == {other.commit, lost_id}
        assert [entry.commit for entry in fresh.log() if entry.step == 20] == [replaced.commit]
        assert (fresh.verify().ok, fresh.verify().quarantined) == (True, ())
        assert before <= set(snapshot(store.path / "objects"))
        assert fresh.ingest(folder / "other", run="r", replace=True).is_new is False
        time_to_collect(fresh)
        assert not before <= set(snapshot(store.path / "objects"))
        assert [entry.step for entry in fresh.log()] == [20, 10]


def _superseded(store: Store) -> tuple[str, ...]:
    return _record(store, "r@20").supersedes


@pytest.mark.fault(44, 91)
@pytest.mark.parametrize("how", ["replaced", "dropped"])
def test_a_hidden_record_that_rots_holds_nothing_back(store: Store, folder: Path, how: str) -> None:
    """A collection takes it anyway; once that has taken what hid it, the lost one is not remembered either."""
    path = record_of(store, "r@20")
    if how == "replaced":
        generate(folder / "other", layers=2, hidden=8, vocab=8, step=20, seed=7)
        store.ingest(folder / "other", run="r", replace=True)
    else:
        store.drop("r@20")
    path.write_bytes(b"rot")
    shutil.rmtree(store.path / "manifest")
    with layerstore.open(store.path) as fresh:
        done = fresh.repair()
        assert (done.held_back, done.lost_records, done.has_lost) == ((), (), False)
        assert [file.path for file in done.quarantined] == [path.relative_to(store.path).as_posix()]
        assert fresh.verify().ok
        fresh.ingest(folder / "30", run="r")

        for _ in range(3):
            fresh.gc(Keep(last=1), grace_seconds=0)

        assert [entry.step for entry in fresh.log()] == [30]
        assert (fresh.verify().ok, fresh.verify().quarantined) == (True, ())


@pytest.mark.fault(91)
def test_what_a_lost_record_had_hidden_is_said_to_show_again(store: Store) -> None:
    """It replaced r@20: without it the replaced one is what r@20 means."""
    store.drop("r@20")
    (hiding,) = (
        path for path in (store.path / "commits" / "r").glob("20.*") if path.name.split(".")[1] not in _ids(store, 20)
    )
    copies = store.path / "manifest" / "copies"
    store.close()
    copies.write_bytes(b"")
    hiding.write_bytes(b"rot")
    with layerstore.open(store.path) as fresh:
        done = fresh.repair()

        assert done.shown_again == ("r@20",)
        assert [entry.step for entry in fresh.log()] == [20, 10]


def _ids(store: Store, step: int) -> set[str]:
    view = store.rooms.catalog.view("r")
    return {row.id for row in view.rows.values() if row.step == step and row.layer_names}


def test_a_record_comes_from_another_store_by_its_id(store: Store, folder: Path) -> None:
    """Any store that has the commit will do: its id says that it is the same."""
    with layerstore.init(folder / "other") as other:
        other.ingest(folder / "20", run="r")
        other.ingest(folder / "10", run="r")
    path = record_of(store, "r@10")
    shutil.rmtree(store.path / "manifest")
    with layerstore.open(store.path) as fresh, layerstore.init(folder / "third") as third:
        third.ingest(folder / "10", run="r")
        assert record_of(third, "r@10").name == path.name
        path.write_bytes(b"")

        done = fresh.repair(sources=[folder / "third"])

        assert [each.origin for each in done.healed] == [str(folder / "third")]
        assert fresh.verify(read_data=True).ok


@pytest.mark.fault(96)
def test_a_misplaced_record_goes_to_quarantine(store: Store) -> None:
    """Under a wrong name a whole record is damage; the right one is not touched."""
    own = record_of(store, "r@20")
    for place in (own.with_name(f"21.{own.name[3:]}"), own.with_name(f"20.{'0' * 32}")):
        shutil.copy(own, place)
    with layerstore.open(store.path) as fresh:
        done = fresh.repair()

        assert len(done.quarantined) == 2
        assert [entry.step for entry in fresh.log()] == [20, 10]
        assert fresh.verify(read_data=True).damaged == ()
        with pytest.raises(IntegrityError):
            fresh.gc(grace_seconds=0)
        for ref in ("r@21", "0" * 32):
            fresh.give_up(ref)
        assert fresh.verify().ok
        fresh.gc(grace_seconds=0)


@pytest.mark.fault(85)
def test_a_record_for_a_newer_layerstore_is_left_as_it_is(store: Store) -> None:
    """It is sound: taking it away would be the damage."""
    from layerstore.format.canonical import pack, unpack
    from layerstore.format.envelope import Envelope, seal, unseal
    from layerstore.format.hashing import digest

    path = record_of(store, "r@20")
    payload = unpack(
        unseal(path.read_bytes(), name=path.relative_to(store.path).as_posix(), store_id=store.id).payload, what="x"
    )
    assert isinstance(payload, dict)
    payload["body"]["flags"] = ["from-the-future"]  # type: ignore[index,call-overload]  # a record is a map of maps
    name = f"commits/r/20.{digest(pack(payload['body'])).hex()}"
    (store.path / name).write_bytes(seal(Envelope(store_id=store.id, name=name, payload=pack(payload))))
    with layerstore.open(store.path) as fresh:
        done = fresh.repair()

        assert (done.newer, done.quarantined, done.has_done) == ((name,), (), False)
        with pytest.raises((IntegrityError, Unsupported)):
            fresh.gc(grace_seconds=0)


@pytest.mark.fault(103)
def test_a_damaged_pin_holds_gc_back_until_it_is_rewritten_or_deleted(store: Store) -> None:
    """Nobody knows what it kept."""
    for deed in ("rewrite", "delete"):
        store.pin("best", "r@10")
        flip(store.path / "pins" / "best")

        done = store.repair()

        assert done.lost_records == done.held_back == ("best",)
        verdict = store.verify()
        assert (verdict.ok, verdict.damaged, verdict.quarantined) == (False, (), ("best",))
        with pytest.raises(IntegrityError, match="pin 'best'"):
            store.gc(grace_seconds=0)
        assert nothing_left(store)
        if deed == "rewrite":
            store.pin("best", "r@20")
            store.gc(grace_seconds=0)
        store.delete_pin("best")
        store.gc(grace_seconds=0)
        assert store.verify().quarantined == ()


def test_strangers_logs_and_parts_are_taken_away(store: Store) -> None:
    """What verify complains of is gone from its place, and kept."""
    (store.path / "commits" / "r" / "notes.txt").write_text("?")
    (store.path / "gc" / "plans").mkdir()
    (store.path / "gc" / "plans" / "00000001-00000000").write_bytes(b"rot")
    part = store.path / "parts" / ("a" * 32) / "0.1"
    part.parent.mkdir()
    part.write_bytes(b"torn")
    assert {damage.kind for damage in store.verify().damaged} == {"stranger", "collection", "part"}

    done = store.repair()

    assert {file.kind for file in done.quarantined} == {"stranger", "collection", "part"}
    assert store.verify().ok
    failed = store.rooms.parts.find("a" * 32, 0, 1)
    assert failed is not None
    assert (failed.state, "quarantine" in failed.failure) == (None, True)
    store.gc(grace_seconds=0)


@pytest.mark.fault(41)
def test_a_lost_index_is_no_damage(store: Store) -> None:
    """It is made afresh from the records."""
    shutil.rmtree(store.path / "manifest")

    with layerstore.open(store.path) as fresh:
        assert fresh.verify().ok
        assert not fresh.repair().has_done
        assert [entry.step for entry in fresh.log()] == [20, 10]


@pytest.mark.fault(46)
def test_a_copy_made_while_live_names_what_it_lacks(store: Store, folder: Path) -> None:
    """Its newest record came over before its objects; repair takes these from where it was copied."""
    store.ingest(folder / "30", run="r")
    shutil.copytree(store.path, folder / "copy")
    newest = {path.name for path in (store.path / "objects").rglob("*") if path.is_file()}
    store.drop("r@30")
    store.gc(grace_seconds=0)
    newest -= {path.name for path in (store.path / "objects").rglob("*") if path.is_file()}
    shutil.rmtree(folder / "copy" / "manifest")
    gone = [path for path in (folder / "copy" / "objects").rglob("*") if path.name in newest]
    shutil.copytree(folder / "copy", folder / "live")
    for path in gone:
        path.unlink()
    with layerstore.open(folder / "copy") as copy:
        verdict = copy.verify()
        assert {name for damage in verdict.damaged for name in damage.needed_by} == {"r@30"}
        assert verdict.standing.whole == {"r": "r@20"}
        copy.repair(sources=[folder / "live"])
        assert copy.verify(read_data=True).ok


def test_an_ingest_that_writes_a_damaged_record_again_meets_a_repair(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find it damaged, and the repair is quicker: it lies in quarantine, and the ingest goes on."""
    flip(record_of(store, "r@20"))
    begin, met = Quarantine.begin, list[str]()

    def slow(self: Quarantine, path: Path, *, kind: str, reason: str) -> str:
        begun = begin(self, path, kind=kind, reason=reason)
        monkeypatch.undo()
        with layerstore.open(store.path) as other:
            other.rooms.quarantine.move(path, quarantine_id=other.rooms.quarantine.begin(path, kind=kind, reason=""))
        met.append(begun)
        return begun

    monkeypatch.setattr(Quarantine, "begin", slow)
    with layerstore.open(store.path) as fresh:
        done = fresh.ingest(folder / "20", run="r")

        assert len(met) == 1
        assert done.commit == record_of(fresh, "r@20").name.partition(".")[2]
        assert fresh.repair().lost == ()
        assert fresh.verify(read_data=True).ok


# -- falling back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["full", "parity", "filter"])
def test_a_step_below_a_fork_is_healed_by_its_checkpoint_under_any_policy(folder: Path, policy: str) -> None:
    """What that policy would leave out is written again too: the commit that lacks it had saved it."""
    with layerstore.init(folder / "forked") as store:
        for step in (10, 20, 30):
            store.ingest(folder / str(step), run="r")
        other = generate(folder / "25", layers=2, hidden=8, vocab=8, step=25, seed=77)
        store.ingest(other, run="r", rollback=True)
        for layer in ("model.layers.0", "model.layers.1", "lm_head"):
            object_of(store, "r@20", layer).unlink()

        again = store.ingest(folder / "20", run="r", policy=policy)

        assert not again.is_new
        assert again.objects_new == 3
        assert store.verify(read_data=True).ok


@pytest.mark.fault(44)
def test_a_damaged_layer_falls_back_to_its_previous_version(store: Store, folder: Path) -> None:
    """One new record hides the hurt commit; its bytes are the older version's, and it says how old they are."""
    store.ingest(folder / "30", run="r")
    older, own = masters(store, "r@20"), masters(store, "r@30")
    hurt = object_of(store, "r@30", "model.layers.1")
    flip(hurt)

    planned = store.repair(read_data=True, fall_back=True, dry_run=True)
    done = store.repair(read_data=True, fall_back=True)

    assert [fall.commit.id for fall in planned.fell_back] == [fall.commit.id for fall in done.fell_back]
    (fall,) = done.fell_back
    assert (fall.reference, [(age.layer, age.step, age.steps, age.saves) for age in fall.ages]) == (
        "r@30",
        [("model.layers.1", 20, 10, 1)],
    )
    assert done.lost == ()
    now = masters(store, "r@30")
    changed = {name for name in now if now[name] != own[name]}
    assert changed == {name for name in now if "layers.1." in name}
    assert all(now[name] == older[name] for name in changed)
    record = _record(store, "r@30")
    said = record.policy.decisions[FELL_BACK]
    assert isinstance(said, dict)
    assert said["model.layers.1"]["steps"] == 10  # type: ignore[index,call-overload]  # a tree of maps
    assert record.supersedes == (fall.hurt,)
    verdict = store.verify(read_data=True)
    assert (verdict.ok, len(verdict.hidden)) == (True, 1)
    assert not store.repair(read_data=True, fall_back=True).has_done
    store.gc(grace_seconds=0)
    assert store.verify(read_data=True).hidden == ()
    assert masters(store, "r@30") == now
    assert [entry.step for entry in store.log()] == [30, 20, 10]
    again = store.ingest(folder / "30", run="r")
    assert not again.is_new
    assert any("fall back to older saves; --replace stores them" in note for note in again.notes)
    store.ingest(folder / "30", run="r", replace=True)
    assert masters(store, "r@30") == own


def test_every_commit_that_inherited_the_damage_falls_back(folder: Path) -> None:
    """A layer that later commits had taken over is lost to all of them, and each is told."""
    with layerstore.init(folder / "selective") as store:
        store.ingest(folder / "10", run="r")
        for step in (20, 30):
            store.ingest(folder / str(step), run="r", policy="parity")
        layer = next(name for name, choice in store.compose("r@30").layers.items() if choice.step == 20)
        object_of(store, "r@20", layer).unlink()
        (damage,) = store.verify().damaged
        assert damage.needed_by == ("r@20", "r@30")

        done = store.repair(fall_back=True)

        assert [fall.reference for fall in done.fell_back] == ["r@20", "r@30"]
        assert store.verify(read_data=True).ok
        assert {store.compose(ref).layers[layer].step for ref in ("r@20", "r@30")} == {10}


def test_what_has_no_older_version_is_said(store: Store) -> None:
    """The first save, or a state: there is nothing to fall back to."""
    object_of(store, "r@10", "lm_head").unlink()
    state_of(store, "r@20").unlink()

    done = store.repair(fall_back=True)

    assert done.fell_back == ()
    assert done.cannot_fall_back == {"r@10": ("lm_head",)}
    assert {cost.holder: cost.everything for cost in done.lost} == {"r@10": False, "r@20": True}


def test_a_version_that_is_damaged_too_is_passed_over(store: Store, folder: Path) -> None:
    """Also where nobody has read its bytes yet: what stands in is verified first."""
    store.ingest(folder / "30", run="r")
    object_of(store, "r@30", "lm_head").unlink()
    flip(object_of(store, "r@20", "lm_head"))

    (fall,) = store.repair(fall_back=True).fell_back

    assert [age.step for age in fall.ages] == [10]


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_attempt_falls_back_to_the_composite_that_it_went_on_from_and_no_further(
    store: Store, folder: Path, is_gone: bool
) -> None:
    """Training never had what the run held of a layer where the composite took an older one."""
    composite = store.compose("r@20", policy="parity")
    composite.pin("resumed")
    layer = next(name for name, choice in composite.layers.items() if choice.step == 10)
    store.ingest(folder / "30", run="r", resumed_from="resumed")
    if is_gone:
        object_of(store, "resumed", layer).unlink()
    object_of(store, "r@30", layer).unlink()

    done = store.repair(fall_back=True)

    assert [(fall.reference, [age.step for age in fall.ages]) for fall in done.fell_back] == (
        [] if is_gone else [("r@30", [10])]
    )
    assert ("r@30" in done.cannot_fall_back) == is_gone


# -- store.json ----------------------------------------------------------------------------------------------------


@pytest.mark.fault(43)
@pytest.mark.parametrize("harm", [flip, remove, become_folder, lambda path: path.write_text("")])
def test_store_json_comes_back_when_the_records_agree(store: Store, harm: Callable[[Path], None]) -> None:
    """Only with its id, which the hint names, and only if the records say the same."""
    sound = masters(store, "r@20")
    store.close()
    harm(store.path / "store.json")
    with pytest.raises(IntegrityError) as caught:
        layerstore.open(store.path)
    assert f"layerstore repair --store-id {store.id}" in (caught.value.hint or "")
    with pytest.raises(InvalidInput, match="nothing was changed"):
        restore_identity(store.path, "0" * 32)
    with pytest.raises(InvalidInput, match="no store's id"):
        restore_identity(store.path, "../x")
    assert restore_identity(store.path, store.id, dry_run=True)
    with pytest.raises(IntegrityError):
        layerstore.open(store.path)

    restored = restore_identity(store.path, store.id)
    assert restored is not None
    assert (restored.flags, restored.is_assumed) == ((), True)
    assert restore_identity(store.path, store.id) is None
    with layerstore.open(store.path) as fresh:
        assert fresh.id == store.id
        assert masters(fresh, "r@20") == sound
        assert fresh.verify(read_data=True).ok


@pytest.mark.fault(43)
def test_another_stores_identity_is_replaced(store: Store, folder: Path) -> None:
    """Whose the records are, they say themselves."""
    layerstore.init(folder / "other").close()
    shutil.copy(folder / "other" / "store.json", store.path / "store.json")

    restored = restore_identity(store.path, store.id)
    assert restored is not None
    assert restored.is_assumed
    with layerstore.open(store.path) as fresh:
        assert fresh.verify(read_data=True).ok
        (kept,) = fresh.quarantined()
    assert len(list((store.path / "quarantine").glob("*/store.json"))) == 1
    assert (kept.path, kept.kind, kept.status) == ("store.json", "identity", "kept")


def test_an_identity_of_a_newer_format_is_not_replaced(store: Store) -> None:
    """It is no damage."""
    text = (store.path / "store.json").read_text().replace('"format": 1', '"format": 2')
    (store.path / "store.json").write_text(text.replace('"checksum": "', '"checksum": "of another kind '))

    with pytest.raises(Unsupported):
        restore_identity(store.path, store.id)


@pytest.mark.fault(95)
def test_a_missing_folder_of_records_is_not_repaired_away(store: Store) -> None:
    """Without it nothing is known: it is put back from a copy, by a user."""
    (store.path / "commits").rename(store.path.parent / "elsewhere")

    with pytest.raises(IntegrityError, match="commits"), layerstore.open(store.path) as fresh:
        fresh.repair()


# -- beside others -------------------------------------------------------------------------------------------------


def test_a_repair_and_a_collection_take_turns(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is moved while the other marks would be missing in both."""
    monkeypatch.setenv("LAYERSTORE_LOCK_TIMEOUT", "0.05")

    with store.rooms.lock_gc(), pytest.raises(Locked), layerstore.open(store.path) as other:
        other.repair()


def test_what_is_healed_meanwhile_is_left_alone(store: Store, folder: Path) -> None:
    """Between the plan and the deed the checkpoint is ingested again, or the record comes back."""
    lost, record = object_of(store, "r@20", "lm_head"), record_of(store, "r@10")
    lost.unlink()
    good = record.read_bytes()
    shutil.rmtree(store.path / "manifest")
    record.write_bytes(b"rot")
    seen: list[str] = []

    def heal(operation: str, path: Path) -> None:
        if "quarantine" in path.parts and not seen:
            seen.append(operation)
            with layerstore.open(store.path) as other:
                other.ingest(folder / "20", run="r")
            record.write_bytes(good)

    with Store(store.path, hook=heal) as repairing:
        done = repairing.repair()

    assert seen
    assert (done.lost_records, done.lost) == ((), ())
    assert not (store.path / "quarantine").exists() or not list((store.path / "quarantine").glob("*/objects"))
    with layerstore.open(store.path) as fresh:
        assert fresh.verify(read_data=True).ok
        assert [entry.step for entry in fresh.log()] == [20, 10]


@pytest.mark.fault(49)
@pytest.mark.parametrize("moment", [["touch", "touch"], ["touch", "touch", "link"]], ids=["before it", "with it"])
def test_an_ingest_that_reuses_what_repair_takes_away_does_not_report_success(
    store: Store, folder: Path, moment: list[str]
) -> None:
    """Unread, that is: it looks before its record, where it touches what it reuses once more, and after it."""
    damaged = object_of(store, "r@20", "lm_head")
    flip(damaged)
    source = folder / "20"
    seen: list[str] = []

    def meanwhile(operation: str, path: Path) -> None:
        if (operation, path) == ("touch", damaged) or (operation == "link" and path.parent.name == "other"):
            seen.append(operation)
            if seen == moment:
                with layerstore.open(store.path) as repairing:
                    repairing.repair(read_data=True)

    with Store(store.path, hook=meanwhile) as ingesting, pytest.raises(Conflict, match=r"(was|were) removed") as raised:
        ingesting.ingest(source, run="other", trust_store=True)

    assert seen[: len(moment)] == moment
    assert str(raised.value.hint).startswith("repeat the command")
    with layerstore.open(store.path) as fresh:
        fresh.ingest(source, run="other")
        fresh.ingest(source, run="r")
        assert fresh.verify(read_data=True).ok


def test_a_source_has_to_be_another_store(store: Store, folder: Path) -> None:
    """A checkpoint is ingested, not repaired from."""
    for path, message in ((folder / "10", "is no store"), (store.path, "is the store that is to be repaired")):
        with pytest.raises(InvalidInput, match=message):
            store.repair(sources=[path])


def test_the_log_says_what_was_moved_and_why(store: Store) -> None:
    """For people, and for who wants to undo it by hand."""
    path = object_of(store, "r@20", "lm_head")
    flip(path)

    done = store.repair(read_data=True)

    (log,) = _logs(store)
    assert (log.id, log.files) == (done.quarantine, done.quarantined)
    assert log.files[0].path == path.relative_to(store.path).as_posix()
    assert "hash" in log.files[0].reason
    assert ObjectId(path.name) in log.files[0].reason


def test_what_lies_in_quarantine_can_be_listed(store: Store, folder: Path) -> None:
    """By where it was, why it was taken, and what it does there; with a log or without."""
    assert store.quarantined() == []
    store.pin("best", "r@10")
    flip(object_of(store, "r@20", "lm_head"))
    flip(store.path / "pins" / "best")
    stranger = store.path / "commits" / "r" / "notes"
    stranger.mkdir()
    (stranger / "a").write_text("?")
    (stranger / "b").write_text("?")
    path = _lose(store, "r@20")

    with layerstore.open(store.path) as fresh:
        fresh.repair(read_data=True)
        listed = {each.path: each for each in fresh.quarantined()}
        assert {name: (each.kind, each.status) for name, each in listed.items()} == {
            path.relative_to(store.path).as_posix(): ("record", "holds gc back"),
            "pins/best": ("pin", "holds gc back"),
            "commits/r/notes": ("stranger", "kept"),
        }
        assert "not a record" in listed["commits/r/notes"].reason
        assert all(each.time_ns for each in listed.values())
        fresh.give_up("r@20")
        fresh.pin("best", "r@10")
        for log in (store.path / "quarantine").glob("*/log"):
            log.write_bytes(b"rot")

        assert {each.path: (each.kind, each.status, each.reason) for each in fresh.quarantined()} == {
            path.relative_to(store.path).as_posix(): ("record", "given up", "no log says why"),
            "pins/best": ("pin", "kept", "no log says why"),
            "commits/r/notes/a": ("record", "kept", "no log says why"),
            "commits/r/notes/b": ("record", "kept", "no log says why"),
        }


def test_what_only_another_store_shows_is_listed_and_left_there(store: Store, folder: Path) -> None:
    """Nobody here remembers it: it may have been lost, or never have been here. What was collected is known to be."""
    shutil.copytree(store.path, folder / "copy")
    with layerstore.open(folder / "copy") as copy:
        copy.ingest(folder / "30", run="r")
        copy.ingest(folder / "30", run="elsewhere")
        # Another commit of a step that is here is no loss.
        copy.ingest(generate(folder / "other", layers=2, hidden=8, vocab=8, step=10, seed=99), run="r", replace=True)
        commit = record_of(copy, "r@30").name.split(".")[1]
    gone = record_of(store, "r@20")
    store.gc(Keep(last=1), grace_seconds=0)  # r@10
    gone.unlink()
    with layerstore.open(store.path) as fresh:
        fresh.reindex()
    with layerstore.open(store.path) as fresh:
        before = snapshot(store.path / "commits")

        planned = fresh.repair(sources=[folder / "copy"], dry_run=True)
        done = fresh.repair(sources=[folder / "copy"])

        assert [(each.run, each.step, each.store) for each in done.elsewhere] == []
        assert planned.elsewhere == done.elsewhere
        fresh.ingest(folder / "10", run="r")
        done = fresh.repair(sources=[folder / "copy"])
        assert {(each.run, each.step, each.commit) for each in done.elsewhere} == {
            ("r", 30, commit),
            ("r", 20, gone.name.split(".")[1]),
        }
        assert {each.store for each in done.elsewhere} == {str(folder / "copy")}
        assert (done.has_done, done.has_lost) == (False, False)
        assert snapshot(store.path / "commits").keys() > before.keys()
        assert fresh.repair().elsewhere == ()


def test_another_store_is_only_read_and_may_be_damaged(store: Store, folder: Path) -> None:
    """No index is made in a backup, and one without records still has objects."""
    shutil.copytree(store.path, folder / "copy", ignore=shutil.ignore_patterns("manifest"))
    before = snapshot(folder / "copy")
    gone = next(path for path in (store.path / "objects").glob("*/*") if path.is_file())
    gone.unlink()

    assert store.repair(sources=[folder / "copy"], dry_run=True).has_done
    assert snapshot(folder / "copy") == before

    shutil.rmtree(folder / "copy" / "commits")
    assert store.repair(sources=[folder / "copy"]).has_done
    assert store.verify(read_data=True).ok


def test_all_bytes_or_a_part_of_them(store: Store) -> None:
    """Both at once say nothing."""
    with pytest.raises(InvalidInput, match="all of the data and a part of it"):
        store.verify(read_data=True, read_data_subset="1/2")


def test_repairing_a_sound_store_does_nothing(store: Store) -> None:
    """Not even a folder."""
    store.verify()
    before = snapshot(store.path / "objects") | snapshot(store.path / "commits")

    done = store.repair(read_data=True, fall_back=True)

    assert isinstance(done, Repaired)
    assert (done.has_done, done.has_lost) == (False, False)
    assert not (store.path / "quarantine").exists()
    assert before == snapshot(store.path / "objects") | snapshot(store.path / "commits")


class _Meanwhile:
    """A progress that does something as a phase begins."""

    def __init__(self, phase: str, deed: Callable[[], object]) -> None:
        self._phase = phase
        self._deed = deed
        self.is_done = False

    def start(self, what: str, total_bytes: int) -> None:
        """Do it, once."""
        if what == self._phase and not self.is_done:
            self.is_done = True
            self._deed()

    def advance(self, size_bytes: int) -> None:
        """Ignore the bytes."""


@pytest.mark.parametrize("phase", ["records of r", "version blobs", "verify"])
def test_a_collection_beside_a_verify_is_no_damage(store: Store, phase: str) -> None:
    """What goes meanwhile, goes with all that needed it."""

    def collect() -> None:
        with layerstore.open(store.path) as other:
            other.drop("r@10")
            assert other.gc(grace_seconds=0).removed

    time.sleep(0.02)  # nothing that goes has the time of this very tick
    meanwhile = _Meanwhile(phase, collect)

    verdict = store.verify(read_data=True, progress=meanwhile)

    assert meanwhile.is_done
    assert verdict.damaged == ()


class _AtRecord(_Meanwhile):
    """Does something once so many records were marked."""

    def __init__(self, count: int, deed: Callable[[], object]) -> None:
        super().__init__("", deed)
        self._left = count

    def advance(self, size_bytes: int) -> None:
        """Count one record."""
        self._left -= 1
        if self._left == 0:
            self._deed()


def test_an_index_that_says_otherwise_is_made_afresh(store: Store) -> None:
    """Its rows are held against the records, which are right."""
    rooms = store.rooms
    name = rooms.records.names("r")[-1]
    commit = rooms.records.read(name)
    wrong = dataclasses.replace(commit, record=dataclasses.replace(commit.record, save_number=7))
    rooms.catalog.forget([name])
    rooms.catalog.add(wrong)
    assert [damage.kind for damage in store.verify().damaged] == ["index"]

    done = store.repair()

    assert (done.reindexed, done.quarantined, done.has_lost) == (True, (), False)
    assert store.verify().ok
    assert not store.repair().has_done


# -- what has passed, or comes meanwhile ---------------------------------------------------------------------------


class _Failing(Files):
    """Fails so many times to open *path*, with *errno*, and then no more."""

    def __init__(self, path: Path, errno: int, *, times: int) -> None:
        super().__init__()
        self._path = path
        self._errno = errno
        self.left = times

    def open(self, path: Path) -> OpenFile:
        """Open *path*, unless it fails."""
        if path == self._path and self.left:
            self.left -= 1
            raise StorageIO("cannot open it", errno=self._errno, filename=str(path))
        return super().open(path)


def repaired_failing(store: Store, failing: Files, *, fall_back: bool = False) -> Repaired:
    """Repair *store* with these files."""
    rooms = open_rooms(store.path, failing)
    try:
        return execute_repair(rooms, Request(fall_back=fall_back), progress=Silent())
    finally:
        rooms.catalog.close()


def _heal_by_copy(store: Store, folder: Path) -> None:
    assert store.repair().healed


def _heal_by_ingest(store: Store, folder: Path) -> None:
    shutil.rmtree(store.path / "manifest")
    with layerstore.open(store.path) as fresh:
        assert fresh.repair().lost_records == ("r@20",)
        fresh.ingest(folder / "20", run="r")


def _replace(store: Store, folder: Path) -> None:
    _heal_by_copy(store, folder)
    generate(folder / "other", layers=2, hidden=8, vocab=8, step=20, seed=7)
    store.ingest(folder / "other", run="r", replace=True)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_passing_read_error_hides_no_commit(store: Store, times: int) -> None:
    """A version blob cannot be read, and then it can: nothing falls back, and nothing is moved."""
    blob = version_of(store, "r@20", "lm_head")
    shown = [entry.commit for entry in store.log()]
    failing = _Failing(blob, errno.EIO, times=times)

    done = repaired_failing(store, failing, fall_back=True)

    assert failing.left == 0
    assert (done.fell_back, done.quarantined, done.lost) == ((), (), ())
    assert [entry.commit for entry in store.log()] == shown
    assert store.verify(read_data=True).ok


def test_a_blob_that_is_whole_and_cannot_be_read_does_not_fall_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are what its name says: a newer layerstore may read it."""
    blob = version_of(store, "r@20", "lm_head")
    shown = [entry.commit for entry in store.log()]
    read = Rooms.version

    def version(rooms: Rooms, ref: BlobRef) -> LayerVersion:
        if ref.id == blob.name:
            raise Unsupported("it is of tomorrow")
        return read(rooms, ref)

    monkeypatch.setattr(Rooms, "version", version)

    done = store.repair(read_data=True, fall_back=True)

    assert (done.fell_back, done.quarantined) == ((), ())
    assert [cost.holder for cost in done.lost] == ["r@20"]
    assert [entry.commit for entry in store.log()] == shown
    assert blob.exists()


# The very commit again, right after the deed, is not one beside it: it stays hidden.
@pytest.mark.parametrize(
    ("when", "replaced"), [("before", False), ("before", True), ("after", True)], ids=["again", "replaced", "after"]
)
def test_what_is_saved_beside_a_fall_back_counts(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, when: str, replaced: bool
) -> None:
    """The checkpoint comes back between the plan and the deed, or right after the deed by a saver without the lock."""
    object_of(store, "r@20", "lm_head").unlink()
    generate(folder / "other", layers=2, hidden=8, vocab=8, step=20, seed=7)
    saved: list[str] = []

    def save() -> None:
        with layerstore.open(store.path) as other:
            saved.append(
                other.ingest(folder / "other", run="r", replace=True).commit
                if replaced
                else other.ingest(folder / "20", run="r").commit
            )

    def planned_then(rooms: Rooms, planned: tuple[FallBack, ...], *, hold: Hold) -> tuple[FallBack, ...]:
        save()
        return execute_fall_backs(rooms, planned, hold=hold)

    def published_then(rooms: Rooms, writer: ObjectWriter, commit: Commit) -> bool:
        rival = replace_record(store, commit)
        saved.append(rival.id)
        store.rooms.records.link(rival)
        return publish(rooms, writer, commit)

    if when == "before":
        monkeypatch.setattr("layerstore.check.mending.execute_fall_backs", planned_then)
    else:
        monkeypatch.setattr("layerstore.check.fall_back.publish", published_then)

    done = store.repair(fall_back=True)

    assert done.fell_back == ()
    assert [entry.commit for entry in store.log() if entry.step == 20] == saved


def replace_record(store: Store, commit: Commit) -> Commit:
    """Return what another saver replaces the same commit by."""
    use = dataclasses.replace(commit.record.policy, decisions={"by": "another"})
    return make_commit(dataclasses.replace(commit.record, policy=use), commit.observed)


def test_a_record_that_is_wrong_about_a_size_costs_no_object(store: Store) -> None:
    """The object's bytes are what its name says: the record is the damage, and all others keep what they have."""
    record = _record(store, "r@20")
    first = record.layers[0]
    wrong = dataclasses.replace(
        first, version=dataclasses.replace(first.version, size_bytes=first.version.size_bytes + 1)
    )
    odd = dataclasses.replace(record, run="odd", layers=(wrong, *record.layers[1:]))
    store.rooms.records.link(make_commit(odd, Observed(time_ns=1, bytes_new=0, bytes_reused=0)))
    sound, objects = masters(store, "r@20"), snapshot(store.path / "objects")

    verdict = store.verify(read_data=True)
    done = store.repair(read_data=True, fall_back=True)

    assert {name for damage in verdict.damaged for name in damage.needed_by} == {"odd@20"}
    assert [hurt.reference for hurt in verdict.standing.hurt] == ["odd@20"]
    assert verdict.standing.whole == {"odd": None}
    assert {cost.holder for cost in done.lost} == {"odd@20"}
    assert (done.quarantined, done.healed, done.fell_back, done.has_lost) == ((), (), (), True)
    assert snapshot(store.path / "objects") == objects
    assert masters(store, "r@20") == sound
    assert nothing_left(store)


def test_who_is_wrong_about_a_size_hides_no_damage(store: Store) -> None:
    """The very blob is damaged, too: who names it rightly has lost it, and is told."""
    test_a_record_that_is_wrong_about_a_size_costs_no_object(store)
    blob = version_of(store, "r@20", _record(store, "r@20").layers[0].layer)
    flip(blob)

    verdict = store.verify(read_data=True)

    assert {name for damage in verdict.damaged for name in damage.needed_by} == {"odd@20", "r@20"}


@pytest.fixture
def part(store: Store) -> Path:
    """Return a part of a save under way."""
    made = Part(
        session="5" * 32,
        save=0,
        rank=0,
        agreement="",
        layers=(),
        state=None,
        bytes_new=0,
        bytes_reused=0,
        failure="",
    )
    store.rooms.parts.open_session(made.session)
    store.rooms.parts.publish(made)
    return store.path / "parts" / made.session / "0.0"


@pytest.mark.parametrize(("number", "times"), [(errno.EMFILE, 1), (errno.EIO, 1), (errno.EMFILE, 100)])
def test_a_part_that_could_not_be_read_for_the_moment_stays(store: Store, part: Path, number: int, times: int) -> None:
    """Its save goes on; where there are too few descriptors for good, repair says so and takes nothing."""
    before = part.read_bytes()

    if times == 1:
        assert repaired_failing(store, _Failing(part, number, times=times)).quarantined == ()
    else:
        with pytest.raises(StorageIO):
            repaired_failing(store, _Failing(part, number, times=times))

    assert part.read_bytes() == before


@pytest.mark.fault(85)
def test_a_part_of_a_newer_layerstore_is_left_alone(store: Store, part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sound, and whoever waits for it can read it."""
    before = part.read_bytes()

    def newer(*_: object, **__: object) -> Part:
        raise Unsupported("it is of tomorrow")

    monkeypatch.setattr("layerstore.storage.parts.unseal_part", newer)

    done = store.repair()

    assert (done.newer, done.quarantined) == ((part.relative_to(store.path).as_posix(),), ())
    assert part.read_bytes() == before


@pytest.mark.fault(103)
def test_a_pin_on_a_bad_sector_does_not_keep_repair_from_the_rest(store: Store) -> None:
    """It goes to quarantine like every pin that cannot be read."""
    store.pin("best", "r@10")
    (store.path / "commits" / "r" / "notes.txt").write_text("?")

    done = repaired_failing(store, _Failing(store.path / "pins" / "best", errno.EIO, times=100))

    assert {each.path for each in done.quarantined} == {"pins/best", "commits/r/notes.txt"}
    assert done.lost_records == ("best",)


def test_what_nfs_leaves_of_a_removed_file_is_no_stranger(store: Store) -> None:
    """Somebody has it open; it goes by itself."""
    for folder in (store.path / "commits", store.path / "commits" / "r"):
        (folder / ".nfs000000000123").write_text("x")

    assert store.verify().ok
    assert not store.repair().has_done


def test_a_repair_that_has_lost_its_lock_moves_nothing(store: Store) -> None:
    """It was suspended, and a collection may be under way by now."""
    path = object_of(store, "r@20", "lm_head")
    flip(path)
    before = path.read_bytes()

    def lose(operation: str, path: Path) -> None:
        if operation == "link" and path.name == "log":
            (store.path / "locks" / "gc.lock").unlink()

    with Store(store.path, hook=lose) as repairing, pytest.raises(Locked, match="lost"):
        repairing.repair(read_data=True)

    assert path.read_bytes() == before
    assert store.repair(read_data=True).quarantined


def test_what_damage_costs_is_asked_once_for_each_that_needs_it() -> None:
    """Not of every commit for every object: a hurt store may have very many of both."""

    class Counted(dict[BlobRef, tuple[str, ...]]):
        asked = 0

        def __getitem__(self, key: BlobRef) -> tuple[str, ...]:
            Counted.asked += 1
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            Counted.asked += 1
            return super().__contains__(key)

        def get(self, key: BlobRef, default: object = None) -> tuple[str, ...]:
            Counted.asked += 1
            return super().get(key, ())

    def ref(name: object) -> BlobRef:
        return BlobRef(id=ObjectId(f"{name}"), size_bytes=1)

    count = 1000
    row = RecordRow._make([None] * len(RecordRow._fields))._replace(layer_names=("a", "b"))
    holders = {
        f"r@{number}": Holder(
            row=row,
            pin=None,
            is_shown=True,
            lost=Counted({ref(number): ("b",), ref("all"): ("a",)}),
            origins={},
        )
        for number in range(count)
    }
    costs = Costs(holders)

    each = [costs((ref(number),)) for number in range(count)]
    shared = costs((ref("all"), ref(7)))

    assert [[(cost.holder, cost.layers) for cost in own] for own in each] == [
        [(f"r@{number}", ("b",))] for number in range(count)
    ]
    assert [cost.holder for cost in shared] == list(holders)
    assert {cost.layers for cost in shared} == {("a",), ("a", "b")}
    assert Counted.asked < 10 * count
