"""Promises of ``repair``, and of an ingest that finds damage: sound copies are fetched, the rest is told."""

import contextlib
import dataclasses
import errno
import itertools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.check.repair import Repaired, execute_repair
from layerstore.disk import Files, OpenFile
from layerstore.errors import Conflict, IntegrityError, InvalidInput, Locked, StorageIO, Unsupported
from layerstore.format import make_commit, pack, unpack
from layerstore.format.records import seal, unseal
from layerstore.hashing import digest
from layerstore.history import resolve
from layerstore.model import ObjectId, Observed
from layerstore.parts import Part
from layerstore.progress import Silent
from layerstore.storage import IndexNotice, open_repository
from layerstore.storage.objects import ObjectStore
from layerstore.store import restore_identity
from tests.faults.harness import composed, flip, masters, object_of, snapshot, truth
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
    version = store.compose(ref).layers[layer].version
    return store.path / "objects" / version[:2] / version


def state_of(store: Store, ref: str, layer: str = "") -> Path:
    """Return the file of rank 0's state, which is not a layer's."""
    return store.repo.layout.object(resolve(store.repo, ref).record.states[0].id)


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
    elsewhere = path.parents[4] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def become_fifo(path: Path) -> None:
    """Put a fifo in its place, at which a careless reader would wait for ever."""
    path.unlink()
    os.mkfifo(path)


HARMS: list[Callable[[Path], None]] = [flip, truncate, remove, become_folder, become_link, become_fifo]


def in_trash(store: Store) -> set[str]:
    """Return the damaged files that lie in the trash, by where they were."""
    folder = store.path / "trash" / "damaged"
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}


def assert_held_back(store: Store, *ways: str) -> None:
    """Assert that a collection refuses, says *ways* on, and has removed nothing."""
    before = truth(store.path)
    with pytest.raises(IntegrityError, match="nothing was removed") as caught:
        store.gc(Keep(last=1), grace_seconds=0)
    assert [way for way in ways if way not in (caught.value.hint or "")] == []
    assert truth(store.path) == before


# -- objects -------------------------------------------------------------------------------------------------------


@pytest.mark.fault(34, 35, 36, 37, 38, 44)
@pytest.mark.parametrize(
    ("what", "harm"),
    [
        *((object_of, harm) for harm in HARMS),
        *((what, harm) for what in (version_of, state_of) for harm in (flip, truncate, remove)),
    ],
    ids=lambda each: each.__name__,
)
@pytest.mark.sample(4)
def test_an_object_is_fetched_from_a_copy_of_the_store(
    store: Store, folder: Path, harm: Callable[[Path], None], what: Callable[..., Path]
) -> None:
    """Whatever became of it: verify names commit and layers, repair moves it to the trash and takes the copy's."""
    shutil.copytree(store.path, folder / "copy")
    sound = masters(store, "r@20")
    path = what(store, "r@20", "model.layers.0")
    before = path.read_bytes()
    harm(path)

    with pytest.raises(IntegrityError):
        store.compose("r@20").write(folder / "out")
    assert not (folder / "out").exists()
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
    assert planned == done
    assert [(each.path, each.source) for each in done.fetched] == [(damage.path, str(folder / "copy"))]
    assert [each.path for each in done.moved] == ([] if harm is remove else [damage.path])
    assert (damage.path in in_trash(store)) == (harm not in (remove, become_folder))
    assert path.read_bytes() == before
    assert store.verify(read_data=True).ok
    assert masters(store, "r@20") == sound
    assert not store.repair(read_data=True).has_done
    for _ in range(2):  # whatever it is that lies there, a collection empties the trash, and finds it empty
        store.gc(grace_seconds=0, empty_trash=True)
        assert in_trash(store) == set()


@pytest.mark.fault(37)
def test_swapped_objects_are_both_put_right(store: Store, folder: Path) -> None:
    """Each is whole, and not what its name says."""
    shutil.copytree(store.path, folder / "copy")
    one, other = object_of(store, "r@20", "model.layers.0"), object_of(store, "r@20", "model.layers.1")
    one.rename(one.with_name("x"))
    other.rename(one)
    one.with_name("x").rename(other)

    with pytest.raises(IntegrityError):
        store.compose("r@20").write(folder / "out")
    assert len(store.repair(read_data=True, sources=[folder / "copy"]).fetched) == 2
    assert store.verify(read_data=True).ok


@pytest.mark.fault(36, 44)
@pytest.mark.parametrize(("saved_under", "steps", "origin"), [("full", (10, 20), 10), ("parity", (10, 20, 30), 20)])
def test_what_no_copy_has_is_told_with_the_save_that_puts_it_back(
    folder: Path, saved_under: str, steps: tuple[int, ...], origin: int
) -> None:
    """Whoever has it by now, a composite or a later commit: only the checkpoint that wrote it has its bytes."""
    policy = layerstore.Parity(fresh="odd")
    with layerstore.init(folder / "other") as store:
        for step in steps:
            store.ingest(folder / str(step), run="r", policy="full" if saved_under == "full" else policy)
        composite = store.compose("r", policy=policy)
        composite.pin("mix")
        lost = object_of(store, "mix", "model.layers.0")
        flip(lost)

        done = store.repair(read_data=True)

        assert composite.layers["model.layers.0"].step == origin < composite.step
        assert ("mix", ("model.layers.0",)) in {(cost.holder, cost.layers) for cost in done.lost}
        assert done.reingest == (f"r@{origin}",)
        assert done.has_lost
        assert not lost.exists()
        again = store.repair(read_data=True)
        assert (again.has_done, again.lost) == (False, done.lost)
        assert store.ingest(folder / str(origin), run="r", policy=saved_under).objects_new == 1
        assert store.verify(read_data=True).ok
        assert not store.repair(read_data=True).has_lost


@pytest.mark.fault(36)
def test_of_saves_that_refer_to_what_is_lost_only_the_one_that_wrote_it_is_told(folder: Path) -> None:
    """Compact saves lose it, too, but their checkpoints do not have its bytes."""
    with layerstore.init(folder / "compact") as store:
        for step in (10, 20, 30):
            store.ingest(folder / str(step), run="r", precision="delta8")
        record = resolve(store.repo, "r@30").record
        [entry] = [entry for entry in record.layers if entry.layer == "model.layers.0"]
        flip(store.repo.layout.object(store.repo.version_of(entry).references[0].id))

        done = store.repair(read_data=True)

        assert [cost.holder for cost in done.lost] == ["r@10", "r@20", "r@30"]
        assert done.reingest == ("r@10",)
        assert store.ingest(folder / "10", run="r").objects_new == 1
        assert store.verify(read_data=True).ok


@pytest.mark.fault(36)
@pytest.mark.parametrize("policy", ["full", "filter"])
def test_what_lies_below_a_fork_is_healed_by_its_checkpoint_under_any_policy(
    store: Store, folder: Path, policy: str
) -> None:
    """So is a save of the attempt that was left; what the policy would leave out is written, and no commit is added."""
    generate(folder / "15", layers=2, hidden=8, vocab=8, step=15, seed=15)
    store.pin("kept", "r@20")
    store.ingest(folder / "15", run="r", rollback=True)
    for ref, layer in itertools.product(("r@10", "kept"), ("model.layers.0", "model.layers.1", "lm_head")):
        object_of(store, ref, layer).unlink()
    commits = [entry.commit for entry in store.log()]

    named = store.repair(dry_run=True).reingest
    healed = [store.ingest(folder / step, run="r", policy=policy) for step in ("10", "20")]

    assert named == ("r@10", "r~1@20")
    assert [(each.is_new, each.objects_new) for each in healed] == [(False, 3), (False, 3)]
    assert store.verify(read_data=True).ok
    assert commits == [entry.commit for entry in store.log()]


@pytest.mark.fault(44)
def test_a_copy_that_is_damaged_too_is_passed_over(store: Store, folder: Path) -> None:
    """The next one is asked; what all have lost is told as lost."""
    path, both = object_of(store, "r@20", "lm_head"), object_of(store, "r@10", "lm_head")
    for name in ("bad", "good"):
        shutil.copytree(store.path, folder / name)
        flip(folder / name / both.relative_to(store.path))
    flip(folder / "bad" / path.relative_to(store.path))
    path.unlink()
    both.unlink()

    done = store.repair(sources=[folder / "bad", folder / "good"])

    assert [each.source for each in done.fetched] == [str(folder / "good")]
    assert [cost.holder for cost in done.lost] == ["r@10"]
    assert not both.exists()


@pytest.mark.parametrize("at_its_place", [None, b"?"], ids=["nothing", "something else"])
def test_what_lies_aside_is_not_lost(store: Store, at_its_place: bytes | None) -> None:
    """A collection was stopped after it had moved the object: it is found there, whatever got its name meanwhile."""
    path = object_of(store, "r@20", "lm_head")
    aside = store.path / "gc" / "aside"
    aside.mkdir(parents=True, exist_ok=True)
    path.rename(aside / path.name)
    if at_its_place is not None:
        path.write_bytes(at_its_place)

    assert [damage.id for damage in store.verify().damaged] == ([] if at_its_place is None else [path.name])
    done = store.repair()
    assert (done.has_done, done.has_lost) == (at_its_place is not None, False)
    assert store.verify(read_data=True).ok


def test_a_fetched_blob_may_name_more_that_is_lost(store: Store, folder: Path) -> None:
    """That shows only once it can be read: repair looks again, and takes both."""
    shutil.copytree(store.path, folder / "copy")
    lost = object_of(store, "r@20", "lm_head")
    flip(version_of(store, "r@20", "lm_head"))
    lost.unlink()
    assert len(store.verify().damaged) == 1

    done = store.repair(sources=[folder / "copy"])

    assert {Path(each.path).name for each in done.fetched} >= {lost.name}
    assert store.verify(read_data=True).ok


# -- what still stands ---------------------------------------------------------------------------------------------


def test_verify_tells_which_policies_avoid_the_damage(store: Store, folder: Path) -> None:
    """Parity takes half of the layers from the save before: damage in that half leaves it whole."""
    store.ingest(folder / "30", run="r")
    steps = {layer: choice.step for layer, choice in store.compose("r@30", policy="parity").layers.items()}
    older = next(layer for layer, step in steps.items() if step == 20)
    own = next(layer for layer, step in steps.items() if step == 30)
    object_of(store, "r@30", older, "optimizer").unlink()

    (hurt,) = store.verify().standing.hurt
    object_of(store, "r@30", own, "optimizer").unlink()
    (more,) = store.verify().standing.hurt

    assert (hurt.reference, hurt.layers) == ("r@30", (older,))
    assert "parity" in (hurt.stands or ())
    assert "latest" not in (hurt.stands or ())
    assert masters(store, "r@30", policy="parity")
    assert "parity" not in (more.stands or ())
    assert "weights" in (more.stands or ()), "an export needs no optimizer"
    assert set(more.layers) == {older, own}


def test_what_is_said_to_stand_is_composed_without_the_bases_own_version(
    store: Store, folder: Path, tmp_path: Path
) -> None:
    """To hold the older version against it would need it; where the older one is another run's, that is refused."""
    store.ingest(folder / "30", run="r")
    store.ingest(folder / "20", run="other")
    choices = store.compose("r@30", policy="parity").layers
    older = next(layer for layer, choice in choices.items() if choice.step == 20)
    version_of(store, "r@30", older).unlink()

    (hurt,) = store.verify().standing.hurt

    assert "parity" in (hurt.stands or ())
    store.compose("r@30", policy="parity").write(tmp_path / "resume")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base: r@30\nlayers:\n  {older}: other@20\nrest: base\n")
    with pytest.raises(IntegrityError):
        store.compose(recipe=recipe).write(tmp_path / "mixed")


# -- records -------------------------------------------------------------------------------------------------------


@pytest.mark.fault(44, 91)
@pytest.mark.parametrize("harm", [harm for harm in HARMS if harm is not remove], ids=lambda harm: harm.__name__)
@pytest.mark.sample(2)
def test_a_record_is_fetched_bit_for_bit(store: Store, folder: Path, harm: Callable[[Path], None]) -> None:
    """With all that it needs; until then gc refuses, and other commits are there as ever."""
    shutil.copytree(store.path, folder / "copy")
    path, lost = record_of(store, "r@20"), object_of(store, "r@20", "lm_head")
    before, sound = path.read_bytes(), masters(store, "r@20")
    harm(path)
    lost.unlink()
    with layerstore.open(store.path) as fresh:
        assert [damage.kind for damage in fresh.verify().damaged] == ["record"]
        assert [entry.step for entry in fresh.log() if entry.damage is None] == [10]
        if harm is flip:
            assert_held_back(fresh, "layerstore repair --from COPY may heal it", "layerstore drop r@20 removes it")

        done = fresh.repair(sources=[folder / "copy"])

        assert {Path(each.path).name for each in done.fetched} == {path.name, lost.name}
        assert path.read_bytes() == before
        assert masters(fresh, "r@20") == sound
        assert fresh.verify(read_data=True).ok
        assert not fresh.repair(read_data=True).has_done
        fresh.gc(grace_seconds=0)
        assert masters(fresh, "r@20") == sound


def test_a_record_is_fetched_though_an_object_of_it_is_cut_short(store: Store, folder: Path) -> None:
    """No readable record names the object, so nothing else would find it."""
    shutil.copytree(store.path, folder / "copy")
    path, cut = record_of(store, "r@20"), object_of(store, "r@20", "lm_head")
    before = cut.read_bytes()
    flip(path)
    cut.chmod(0o644)
    cut.write_bytes(before[:-1])

    with layerstore.open(store.path) as fresh:
        done = fresh.repair(sources=[folder / "copy"])

        assert {Path(each.path).name for each in done.fetched} == {path.name, cut.name}
        assert cut.read_bytes() == before
        assert fresh.verify(read_data=True).ok


def test_what_an_ingest_puts_back_meanwhile_is_not_taken_away(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair reads a damaged object for seconds; the sound one that is in its place by then stays."""
    lost = object_of(store, "r@20", "lm_head")
    before = lost.read_bytes()
    flip(lost)
    is_whole = ObjectStore.is_whole
    beside: list[Path] = []

    def slow(objects: ObjectStore, path: Path, object_id: ObjectId) -> bool:
        found = is_whole(objects, path, object_id)
        if path == lost and not beside:
            beside.append(path)
            with layerstore.open(store.path) as other:
                other.ingest(folder / "20", run="r")
        return found

    monkeypatch.setattr(ObjectStore, "is_whole", slow)

    assert not store.repair(read_data=True).moved
    assert lost.read_bytes() == before
    assert store.verify(read_data=True).ok


@pytest.mark.fault(91)
def test_a_record_comes_from_any_store_that_has_the_commit(store: Store, folder: Path) -> None:
    """Its name says that it is the same; one that has it damaged, or lacks what it needs, is passed over."""
    path = record_of(store, "r@10")
    for name in ("flipped", "gaping", "good"):
        shutil.copytree(store.path, folder / name)
    flip(folder / "flipped" / path.relative_to(store.path))
    gone = object_of(store, "r@10", "lm_head")
    (folder / "gaping" / gone.relative_to(store.path)).unlink()
    gone.unlink()
    path.write_bytes(b"")

    with layerstore.open(store.path) as fresh:
        without = fresh.repair(sources=[folder / "flipped", folder / "gaping"])
        assert (without.unreadable, path.read_bytes()) == (("r@10",), b"")

        done = fresh.repair(sources=[folder / "flipped", folder / "gaping", folder / "good"])

        assert {each.source for each in done.fetched} == {str(folder / "good")}
        assert fresh.verify(read_data=True).ok


@pytest.mark.fault(91)
def test_an_ingest_at_a_damaged_step_refuses_all_but_the_very_save(store: Store, folder: Path) -> None:
    """The same checkpoint makes the same record, and heals it; another one may not take its place."""
    path = record_of(store, "r@20")
    sound = path.read_bytes()
    flip(path)
    other = generate(folder / "other", layers=2, hidden=8, vocab=8, step=20, seed=7)
    with layerstore.open(store.path) as fresh:
        for replace in (False, True):
            with pytest.raises(IntegrityError, match="nothing was changed") as caught:
                fresh.ingest(other, run="r", replace=replace)
            assert "layerstore repair --from COPY may heal it" in (caught.value.hint or "")
            assert "layerstore drop r@20 removes it" in (caught.value.hint or "")

        assert fresh.ingest(folder / "20", run="r").record_healed

        assert fresh.verify(read_data=True).ok
        assert [entry.step for entry in fresh.log()] == [20, 10]
        assert path.name in {each.name for each in path.parent.iterdir()}
        assert len(path.read_bytes()) == len(sound)
        fresh.gc(grace_seconds=0)


@pytest.mark.fault(91)
def test_nothing_is_saved_above_a_record_that_cannot_be_read(store: Store, folder: Path) -> None:
    """A policy would inherit from it, or from what it hides: that is refused until it is healed or given up."""
    record_of(store, "r@20").write_bytes(b"rot")
    with layerstore.open(store.path) as fresh:
        with pytest.raises(IntegrityError):
            fresh.ingest(folder / "30", run="r", policy="parity")
        fresh.give_up("r@20")
        fresh.ingest(folder / "30", run="r", policy="parity")
        assert fresh.verify(read_data=True).ok


@pytest.mark.fault(93)
def test_a_record_that_vanished_is_simply_not_there(store: Store, folder: Path) -> None:
    """It is told once, and nothing else changes: its objects may go, and its checkpoint can be saved once more."""
    others = {name: masters(store, name) for name in ("r@10",)}
    record_of(store, "r@20").unlink()
    with layerstore.open(store.path) as fresh:
        with pytest.warns(IndexNotice, match="r@20 .* is no longer there"):
            assert [entry.step for entry in fresh.log()] == [10]
        assert fresh.verify(read_data=True).ok
        assert not fresh.repair(read_data=True).has_lost
        assert fresh.gc(grace_seconds=0).orphans.count
        assert {name: masters(fresh, name) for name in others} == others
        assert fresh.ingest(folder / "20", run="r").is_new
        assert fresh.verify(read_data=True).ok


@pytest.mark.fault(96)
def test_a_misplaced_record_is_damage_that_can_be_given_up(store: Store) -> None:
    """Under a wrong name a whole record is not believed; the right one is not touched."""
    own = record_of(store, "r@20")
    for place in (own.with_name(f"21.{own.name[3:]}"), own.with_name(f"20.{'0' * 32}")):
        shutil.copy(own, place)
    with layerstore.open(store.path) as fresh:
        done = fresh.repair()

        assert (set(done.unreadable), done.moved) == ({"r@20", "r@21"}, ())
        assert_held_back(fresh, "layerstore drop r@20 removes it")
        assert fresh.give_up("r@20") == ("0" * 32,)
        assert_held_back(fresh, "layerstore drop r@21 removes it")
        fresh.give_up("r@21")
        assert [entry.step for entry in fresh.log()] == [20, 10]
        assert fresh.verify(read_data=True).ok
        fresh.gc(grace_seconds=0)
        assert own.exists()


@pytest.mark.fault(96)
def test_a_record_whose_run_was_renamed_is_not_given_up(store: Store) -> None:
    """It is the only one, and sound once the folder has its name again."""
    folder = record_of(store, "r@20").parent
    folder.rename(folder.with_name("renamed"))
    with layerstore.open(store.path) as fresh:
        with pytest.warns(IndexNotice, match="no longer there"):
            assert fresh.runs() == ["renamed"]
        assert_held_back(fresh, "give it back its name, commits/r/10.")
        assert fresh.give_up("renamed@20") == ()
        with pytest.raises(IntegrityError, match="moved or renamed") as caught:
            fresh.drop("renamed@20")
        assert "give it back its name, commits/r/" in (caught.value.hint or "")
        folder.with_name("renamed").rename(folder)
        shutil.copytree(folder, folder.with_name("copied"))
        fresh.drop("r@20")
        assert len(fresh.give_up("copied@20")) == len(fresh.give_up("copied@10")) == 1
        fresh.undrop("r@20")
        assert [entry.step for entry in fresh.log()] == [20, 10]
        assert fresh.verify(read_data=True).ok


@pytest.mark.fault(85)
def test_a_record_for_a_newer_layerstore_is_left_as_it_is(store: Store) -> None:
    """It is sound: taking it away would be the damage."""
    path = record_of(store, "r@20")
    payload = unpack(
        unseal(path.read_bytes(), name=path.relative_to(store.path).as_posix(), store_id=store.id), what="x"
    )
    assert isinstance(payload, dict)
    payload["body"]["flags"] = ["from-the-future"]  # type: ignore[index,call-overload]  # a record is a map of maps
    name = f"commits/r/20.{digest(pack(payload['body'])).hex()}"
    (store.path / name).write_bytes(seal(pack(payload), name=name, store_id=store.id))
    with layerstore.open(store.path) as fresh:
        done = fresh.repair()

        assert (done.newer, done.moved, done.has_done) == ((name,), (), False)
        with pytest.raises((IntegrityError, Unsupported)):
            fresh.gc(grace_seconds=0)


@pytest.mark.fault(46)
def test_a_copy_made_while_live_names_what_it_lacks(store: Store, folder: Path) -> None:
    """Its newest record came over before its objects; repair takes these from where it was copied."""
    there = set(snapshot(store.path / "objects"))
    store.ingest(folder / "30", run="r")
    shutil.copytree(store.path, folder / "copy", ignore=shutil.ignore_patterns("manifest"))
    for name in set(snapshot(store.path / "objects")) - there:
        if (folder / "copy" / "objects" / name).is_file():
            (folder / "copy" / "objects" / name).unlink()
    with layerstore.open(folder / "copy") as copy:
        verdict = copy.verify()
        assert {name for damage in verdict.damaged for name in damage.needed_by} == {"r@30"}
        assert verdict.standing.whole == {"r": "r@20"}
        copy.repair(sources=[store.path])
        assert copy.verify(read_data=True).ok


@pytest.mark.parametrize("steps", [(20,), (20, 30)], ids=str)
def test_no_step_with_a_record_that_cannot_be_read_counts_as_intact(
    store: Store, folder: Path, steps: tuple[int, ...]
) -> None:
    """However many steps have one: what such a step means is unknown."""
    store.ingest(folder / "30", run="r")
    flip(object_of(store, "r@30", "model.layers.0"))
    for step in steps:
        (store.path / "commits" / "r" / f"{step}.{digest(b'unread').hex()}").write_bytes(b"unread")

    assert store.verify(read_data=True).standing.whole == {"r": "r@10"}


# -- pins and all else ---------------------------------------------------------------------------------------------


@pytest.mark.fault(103)
def test_a_damaged_pin_holds_gc_back_until_it_is_deleted(store: Store, folder: Path) -> None:
    """What it kept is not known. A copy tells what it means there; ours may have been moved since, so it stays."""
    shutil.copytree(store.path, folder / "copy")
    with layerstore.open(folder / "copy") as copy:
        copy.pin("best", "r@10")
    for deed in ("delete", "rewrite"):
        store.pin("best", "r@20")
        flip(store.path / "pins" / "best")
        rotten = (store.path / "pins" / "best").read_bytes()

        done = store.repair(sources=[folder / "copy"])

        assert (done.unreadable, done.has_done, done.fetched) == (("best",), False, ())
        assert [(pin.name, pin.reference, pin.source) for pin in done.pins_elsewhere] == [
            ("best", "r@10", str(folder / "copy"))
        ]
        assert (store.path / "pins" / "best").read_bytes() == rotten
        assert list(store.damaged_pins()) == ["best"]
        assert_held_back(store, "layerstore pin --delete best removes it")
        if deed == "rewrite":
            with pytest.raises(IntegrityError) as caught:
                store.pin("best", "r@20")
            assert caught.value.hint == "layerstore pin --delete best removes it"
        store.delete_pin("best")
        store.gc(grace_seconds=0)
        assert store.verify().ok


def test_torn_parts_are_taken_away_and_strangers_stay(store: Store) -> None:
    """A torn part's save is given up; a stranger may be a record under another name, and blocks collections."""
    stranger = store.path / "commits" / "r" / "notes.txt"
    stranger.write_text("?")
    part = store.path / "parts" / ("a" * 32) / "0.1"
    part.parent.mkdir()
    part.write_bytes(b"torn")
    assert {damage.kind for damage in store.verify().damaged} == {"stranger", "part"}

    done = store.repair()

    assert [file.kind for file in done.moved] == ["part"]
    assert in_trash(store) == {part.relative_to(store.path).as_posix()}
    assert (done.strangers, stranger.exists()) == (("commits/r/notes.txt",), True)
    stranger.unlink()
    assert store.verify().ok
    store.gc(grace_seconds=0, empty_trash=True)
    assert in_trash(store) == set()


def test_what_nfs_leaves_of_a_removed_file_is_no_stranger(store: Store) -> None:
    """Somebody has it open; it goes by itself."""
    for folder in (store.path / "commits", store.path / "commits" / "r"):
        (folder / ".nfs000000000123").write_text("x")

    assert store.verify().ok
    assert not store.repair().has_done


@pytest.mark.fault(43)
@pytest.mark.parametrize("harm", [flip, remove, become_folder])
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
    with pytest.raises(InvalidInput, match="not a store's id"):
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
    """Whose the records are, they say themselves; the other's goes to the trash."""
    layerstore.init(folder / "other").close()
    shutil.copy(folder / "other" / "store.json", store.path / "store.json")

    restored = restore_identity(store.path, store.id)

    assert restored is not None
    assert restored.is_assumed
    with layerstore.open(store.path) as fresh:
        assert fresh.verify(read_data=True).ok
        assert in_trash(fresh) == {"store.json"}


def test_an_identity_of_a_newer_format_is_not_replaced(store: Store) -> None:
    """It is not damage."""
    text = (store.path / "store.json").read_text().replace('"format": 2', '"format": 9')
    (store.path / "store.json").write_text(text.replace('"checksum": "', '"checksum": "of another kind '))

    with pytest.raises(Unsupported):
        restore_identity(store.path, store.id)


# -- beside others -------------------------------------------------------------------------------------------------


def test_a_repair_and_a_collection_take_turns(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is moved while the other marks would be missing in both."""
    monkeypatch.setenv("LAYERSTORE_LOCK_TIMEOUT", "0.05")

    with store.repo.lock_gc(), pytest.raises(Locked), layerstore.open(store.path) as other:
        other.repair()


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

    with Store(store.path, hook=meanwhile) as ingesting, pytest.raises(Conflict, match="removed") as raised:
        ingesting.ingest(source, run="other", trust_store=True)

    assert seen[: len(moment)] == moment
    assert str(raised.value.hint).startswith("try again")
    with layerstore.open(store.path) as fresh:
        assert "other" not in {entry.run for entry in fresh.log()}
        fresh.ingest(source, run="other")
        fresh.ingest(source, run="r")
        assert fresh.verify(read_data=True).ok


def test_a_source_has_to_be_another_store(store: Store, folder: Path) -> None:
    """A checkpoint is ingested, not repaired from."""
    for path, message in (
        (folder / "10", "is neither a store nor a remote"),
        (store.path, "is the store that is to be repaired"),
    ):
        with pytest.raises(InvalidInput, match=message):
            store.repair(sources=[path])


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


def test_repairing_a_sound_store_does_nothing(store: Store, folder: Path) -> None:
    """Not even a folder, whatever another store has besides."""
    shutil.copytree(store.path, folder / "copy")
    with layerstore.open(folder / "copy") as copy:
        copy.ingest(folder / "30", run="r")
    store.verify()
    before = truth(store.path)

    done = store.repair(read_data=True, sources=[folder / "copy"])

    assert done == Repaired()
    assert truth(store.path) == before
    assert not (store.path / "trash").exists() or not list((store.path / "trash").iterdir())


class _Meanwhile:
    """A progress that does something once, as a phase begins."""

    def __init__(self, phase: str, deed: Callable[[], object]) -> None:
        self._deeds = {phase: deed}

    def start(self, what: str, total_bytes: int) -> None:
        """Do it, if this is the phase."""
        self._deeds.pop(what, lambda: None)()

    def advance(self, size_bytes: int) -> None:
        """Ignore the bytes."""

    @property
    def is_done(self) -> bool:
        """Whether it was done."""
        return not self._deeds


@pytest.mark.parametrize("phase", ["records of r", "version blobs", "verify"])
def test_a_collection_beside_a_verify_is_no_damage(store: Store, phase: str) -> None:
    """What goes meanwhile, goes with all that needed it."""

    def collect() -> None:
        with layerstore.open(store.path) as other:
            other.drop("r@10")
            time.sleep(0.02)
            assert other.gc(grace_seconds=0, empty_trash=True).objects.count

    time.sleep(0.02)  # nothing that goes has the time of this very tick
    meanwhile = _Meanwhile(phase, collect)

    assert store.verify(read_data=True, progress=meanwhile).damaged == ()
    assert meanwhile.is_done


# -- what has passed -----------------------------------------------------------------------------------------------


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


def repaired_failing(store: Store, failing: Files) -> Repaired:
    """Repair *store* with these files."""
    repo = open_repository(store.path, failing)
    try:
        return execute_repair(repo, (), read_data=False, progress=Silent())
    finally:
        repo.catalog.close()


@pytest.fixture
def part(store: Store) -> Path:
    """Return a part of a save under way."""
    made = Part(
        session="5" * 32, save=0, rank=0, agreement="", layers=(), state=None, bytes_new=0, bytes_reused=0, failure=""
    )  # fmt: skip
    store.repo.parts.open_session(made.session)
    store.repo.parts.publish(made)
    return store.path / "parts" / made.session / "0.0"


@pytest.mark.parametrize(
    ("what", "number", "times"), [("blob", errno.EIO, 2), ("part", errno.EIO, 1), ("part", errno.EMFILE, 1)]
)
def test_what_could_not_be_read_for_the_moment_stays(
    store: Store, part: Path, what: str, number: int, times: int
) -> None:
    """It fails, and then it does not: nothing is moved. Who is out of descriptors is told, and takes nothing either."""
    path = part if what == "part" else version_of(store, "r@20", "lm_head")
    failing, before = _Failing(path, number, times=times), path.read_bytes()

    with pytest.raises(StorageIO) if number == errno.EMFILE else contextlib.nullcontext():
        assert repaired_failing(store, failing).moved == ()
    assert failing.left == 0
    assert path.read_bytes() == before


@pytest.mark.fault(85)
def test_a_part_of_a_newer_layerstore_is_left_alone(store: Store, part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sound, and whoever waits for it can read it."""
    before = part.read_bytes()

    def newer(*_: object, **__: object) -> Part:
        raise Unsupported("it is of tomorrow")

    monkeypatch.setattr("layerstore.storage.parts.unseal_part", newer)

    done = store.repair()

    assert (done.newer, done.moved) == ((part.relative_to(store.path).as_posix(),), ())
    assert part.read_bytes() == before


@pytest.mark.fault(103)
def test_a_pin_on_a_bad_sector_does_not_keep_repair_from_the_rest(store: Store, part: Path) -> None:
    """It is told, and stays where it is."""
    store.pin("best", "r@10")
    part.write_bytes(b"torn")

    done = repaired_failing(store, _Failing(store.path / "pins" / "best", errno.EIO, times=100))

    assert [each.path for each in done.moved] == [part.relative_to(store.path).as_posix()]
    assert done.unreadable == ("best",)
    assert (store.path / "pins" / "best").exists()


def test_a_record_that_is_wrong_about_a_size_costs_no_object(store: Store) -> None:
    """The object's bytes are what its name says: the record is the damage, and all others keep what they have."""
    record = resolve(store.repo, "r@20").record
    first = record.layers[0]
    wrong = dataclasses.replace(
        first, version=dataclasses.replace(first.version, size_bytes=first.version.size_bytes + 1)
    )
    odd = dataclasses.replace(record, run="odd", layers=(wrong, *record.layers[1:]))
    store.repo.records.link(make_commit(odd, Observed(time_ns=1, bytes_new=0, bytes_reused=0)))
    sound, objects = masters(store, "r@20"), snapshot(store.path / "objects")

    verdict = store.verify(read_data=True)
    done = store.repair(read_data=True)

    assert {name for damage in verdict.damaged for name in damage.needed_by} == {"odd@20"}
    assert [hurt.reference for hurt in verdict.standing.hurt] == ["odd@20"]
    assert {cost.holder for cost in done.lost} == {"odd@20"}
    assert (done.moved, done.fetched, done.has_lost) == ((), (), True)
    assert snapshot(store.path / "objects") == objects
    assert masters(store, "r@20") == sound

    flip(version_of(store, "r@20", first.layer))  # who names it rightly has lost it then, and is told
    verdict = store.verify(read_data=True)
    assert {name for damage in verdict.damaged for name in damage.needed_by} == {"odd@20", "r@20"}


@pytest.mark.fault(54)
def test_a_repair_that_has_lost_its_lock_stops(store: Store, folder: Path) -> None:
    """It was suspended, and a collection may be under way by now: it looks no second time, and can be repeated."""
    shutil.copytree(store.path, folder / "copy")
    path, lost = version_of(store, "r@20", "lm_head"), object_of(store, "r@20", "lm_head")
    flip(path)
    lost.unlink()

    def lose(operation: str, path: Path) -> None:
        if operation == "link" and path.parent.parent.name == "objects":
            (store.path / "locks" / "gc.lock").unlink(missing_ok=True)

    with Store(store.path, hook=lose) as repairing, pytest.raises(Locked, match="lost"):
        repairing.repair(read_data=True, sources=[folder / "copy"])

    assert composed(store, "r@10", folder)
    store.repair(read_data=True, sources=[folder / "copy"])
    assert store.verify(read_data=True).ok


# -- what an ingest heals ------------------------------------------------------------------------------------------


@pytest.mark.fault(35, 36)
@pytest.mark.parametrize("run", ["r", "other"])
@pytest.mark.parametrize("harm", [flip, truncate, remove], ids=lambda harm: harm.__name__)
def test_rot_that_is_reused_is_replaced(store: Store, folder: Path, harm: Callable[[Path], None], run: str) -> None:
    """Every object and blob, whichever run asks: the bytes in hand take its place, that is told, and it ends there."""
    files = [path for path in (store.path / "objects").rglob("*") if path.is_file()]
    for path in files:
        harm(path)

    healed, again = ([store.ingest(folder / step, run=run) for step in ("10", "20")] for _ in range(2))

    assert all(each.reused_read for each in healed) or harm is remove
    assert sum(each.objects_new for each in healed) == len(files)
    assert sum(each.objects_healed for each in healed) == (0 if harm is remove else len(files))
    assert any("in the store were damaged" in note for note in healed[1].notes) or harm is remove
    assert [(each.objects_new, each.objects_healed, each.notes) for each in again] == [(0, 0, ())] * 2
    assert store.verify(read_data=True).ok
    store.compose(f"{run}@10").write(folder / "out")
    assert not list((store.path / "tmp").iterdir())


@pytest.mark.fault(35)
def test_a_trusted_store_is_not_read(store: Store, folder: Path) -> None:
    """The size has to do: rot stays where it is, and whoever asked for that is told that nothing was read."""
    flip(object_of(store, "r@20", "lm_head"))

    ingested = store.ingest(folder / "20", run="other", trust_store=True)

    assert (ingested.objects_healed, ingested.reused_read) == (0, False)
    with pytest.raises(IntegrityError, match="is damaged"):
        store.compose("other@20").write(folder / "out")


@pytest.mark.fault(38)
def test_a_link_in_the_place_of_an_object_is_refused(store: Store, folder: Path) -> None:
    """It is nobody's rot: it is neither followed nor replaced."""
    path = object_of(store, "r@20", "lm_head")
    become_link(path)

    with pytest.raises(IntegrityError, match="is not a regular file"):
        store.ingest(folder / "20", run="other")
    assert path.is_symlink()


@pytest.mark.fault(49)
def test_what_a_repair_takes_away_meanwhile_is_written_all_the_same(store: Store, folder: Path) -> None:
    """The ingest has found the rot before it, and has the bytes: nothing of it is missing afterwards."""
    damaged = object_of(store, "r@20", "lm_head")
    flip(damaged)

    def meanwhile(operation: str, path: Path) -> None:
        if (operation, path) == ("mkdir", damaged.parent):
            with layerstore.open(store.path) as repairing:
                repairing.repair(read_data=True)

    with Store(store.path, hook=meanwhile) as ingesting:
        ingesting.ingest(folder / "20", run="other")

    assert damaged.is_file()
    assert store.verify(read_data=True).ok
