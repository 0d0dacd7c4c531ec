"""
A state machine: whatever is done to a store, in whatever order, it holds what a model in plain dictionaries says.

After every step the log and the pins are the model's. Composites are written and read back, and compared with the
numbers that the checkpoints were made from; at the end of a history every composite of every commit is.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from layerstore import Keep
from layerstore.composite import Composite
from layerstore.errors import Conflict, IntegrityError, InvalidInput, LayoutMismatch
from layerstore.format.blobs import decode_version, ref_of
from layerstore.layers import parse_reference
from layerstore.ingest.execute import Ingested
from layerstore.history.references import resolve
from layerstore.check.repaired import Repaired
from layerstore.store import Store, init
from tests.faults.harness import fingerprint, flip
from tests.stateful.harm import Harm, Owed
from tests.stateful.lab import Died, Dying, Lab, anatomy, expected, held
from tests.stateful.model import LAYERS, POLICIES, Commit, Content, IsLost, Layer, Layers, Model, Pin, Saving

Done = TypeVar("Done")

RUNS = st.sampled_from(["a", "b"])
STEPS = st.integers(1, 12)
WHICH = st.integers(0, 10**6)
POLICY = st.sampled_from(sorted(POLICIES))
# Most verbs run to their end; where the others stop, every call of the seam is as likely.
CRASH = st.one_of(st.none(), st.none(), st.none(), st.integers(0, 160))
WORLD_SIZES = st.sampled_from([None, 1, 2, 3])


class StoreMachine(RuleBasedStateMachine):
    """A store and its model."""

    lab: Lab
    """Set by whoever runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = self.lab.new_folder()
        self.path = self.folder / "store"
        self.model = Model(has=self._has)
        self.versions: dict[tuple[str, Layer], str] = {}
        """Ids of the versions of layers, as commits have named them."""
        self.made_from: dict[str, Content] = {}
        """Which checkpoint brought each object first."""
        self.seed = 0
        self.runs_made = 0

    @initialize(step=STEPS)
    def begin(self, step: int) -> None:
        """Make a store with a commit in it."""
        self.store = init(self.path)
        self._save("a", self._content(step, 2, "raw"), "full", Saving(), None)

    def teardown(self) -> None:
        """Look at everything once more."""
        if not self.path.exists():
            return
        self.everything()
        self.store.close()
        shutil.rmtree(self.folder)

    # -- saving --------------------------------------------------------------------------------------------------

    @rule(run=RUNS, step=STEPS, policy=POLICY, world_size=st.sampled_from([1, 2]), hf=st.booleans(), crash=CRASH)
    def save(self, run: str, step: int, policy: str, world_size: int, hf: bool, crash: int | None) -> None:
        """Save what nobody has seen before."""
        self._save(run, self._content(step, world_size, "hf" if hf else "raw"), policy, Saving(), crash)

    @rule(run=RUNS, which=WHICH, policy=POLICY, crash=CRASH)
    def save_again(self, run: str, which: int, policy: str, crash: int | None) -> None:
        """Save what was saved before, in this run or another."""
        commit = self._commit(which)
        if commit is not None:
            self._save(run, commit.content, policy, Saving(), crash)

    @rule(which=WHICH, policy=POLICY, crash=CRASH)
    def replace(self, which: int, policy: str, crash: int | None) -> None:
        """Save a step of the newest attempt once more, with other content."""
        commit = self._commit(which)
        if commit is not None and commit.attempt == self.model.runs[commit.run].newest:
            self._save(commit.run, self._content(commit.step, 2, "raw"), policy, Saving(replace=True), crash)

    @rule(which=WHICH, policy=POLICY, crash=CRASH)
    def go_back(self, which: int, policy: str, crash: int | None) -> None:
        """Go on from an earlier step."""
        commit = self._commit(which)
        if commit is not None:
            tip = self.model.runs[commit.run].of_attempt(self.model.runs[commit.run].newest)[-1]
            if commit.step <= tip.step:
                self._save(commit.run, self._content(commit.step, 2, "raw"), policy, Saving(rollback=True), crash)

    @rule(run=RUNS, which=WHICH, from_pin=st.booleans(), later=st.integers(1, 3), policy=POLICY, crash=CRASH)
    def resume(self, run: str, which: int, from_pin: bool, later: int, policy: str, crash: int | None) -> None:
        """Go on from a commit or from a pinned composite; a run that has commits only from its own."""
        pins = sorted(self.model.pins)
        commit = self._commit(which)
        if from_pin and pins:
            name = pins[which % len(pins)]
            base, reference = self.model.pins[name], name
        elif commit is not None:
            base, reference = Pin(base=commit, layers=commit.layers), self.model.reference(commit)
        else:
            return
        content = self._content(base.base.step + later, 2, "raw")
        if self.model.run(run).commits and base.base.run != run:
            try:
                self.store.ingest(self.lab.source(content), run=run, resumed_from=reference)
            except InvalidInput:
                return
            raise AssertionError("a run that has commits went on from another's")
        self._save(run, content, policy, Saving(resumed_from=base), crash, reference=reference)

    def _save(
        self,
        run: str,
        content: Content,
        policy: str,
        how: Saving,
        crash: int | None,
        *,
        reference: str | None = None,
    ) -> None:
        model, source = self.model, self.lab.source(content)
        known = None if how.replace or how.opens_attempt else model.known(run, content)
        before = {entry.commit for entry in self.store.log()}
        there = self._objects()

        def save(store: Store) -> Ingested:
            return store.ingest(
                source,
                run=run,
                policy=POLICIES[policy],
                replace=how.replace,
                rollback=how.rollback,
                resumed_from=reference,
            )

        try:
            done = self._do(save, crash)
        except Conflict:
            assert known == "conflict", f"{run}@{content.step} was refused"
            return
        finally:
            self.made_from |= dict.fromkeys(self._objects() - there - self.made_from.keys(), content)
        assert known != "conflict" or done is None, "other content was taken for the same"
        new = [entry for entry in self.store.log() if entry.commit not in before]
        if not new:
            assert done is None or (isinstance(known, Commit) and not done.is_new and done.commit == known.id)
            return
        assert known is None
        view = self.store.show(new[0].commit)
        saved = model.saved_layers(run, content, policy, number=view.save_number, how=how)
        if done is not None:
            assert done.is_new
            assert set(done.layers_saved) == saved, (sorted(done.layers_saved), sorted(saved))
        model.save(run, content, saved=saved, number=view.save_number, commit=new[0].commit, how=how)
        self._note_versions(new[0].commit)

    def _objects(self) -> set[str]:
        return {path.name for path in (self.path / "objects").glob("*/*")}

    def _note_versions(self, commit_id: str) -> None:
        layers = next(commit for commit in self.model.commits() if commit.id == commit_id).layers
        for line in self.store.show(commit_id).layers:
            self.versions[line.layer, layers[line.layer]] = line.version

    def _has(self, name: str, layer: Layer) -> bool:
        """Whether the store still has all of a layer, though nothing but a pin may keep it."""
        rooms = self.store.rooms
        places = [rooms.layout.objects, *(rooms.layout.aside(each) for each in rooms.garbage.asides())]
        there = {path.name: path for place in places for path in place.rglob("*") if path.is_file()}
        blob = there.get(self.versions[name, layer])
        if blob is None:
            return False
        version = decode_version(blob.read_bytes(), ref=ref_of(blob.read_bytes()))
        return all(stored.id in there for stored in version.objects)

    def _content(self, step: int, world_size: int, layout: str) -> Content:
        self.seed += 1
        return Content(step, self.seed, world_size, layout)

    # -- names and removals --------------------------------------------------------------------------------------

    @rule(which=WHICH, name=st.sampled_from(["p", "q", "r"]), policy=POLICY, crash=CRASH)
    def pin(self, which: int, name: str, policy: str, crash: int | None) -> None:
        """Name a composite."""
        commit = self._commit(which)
        if commit is None or name in self.model.pins or not (commit.has_moments or policy == "full"):
            return
        reference = self.model.reference(commit)
        done = self._do(lambda store: store.compose(reference, policy=POLICIES[policy]).pin(name), crash)
        if done is not None or name in {pin.name for pin in self.store.pins()}:
            self.model.pins[name] = Pin(base=commit, layers=self.model.composed(commit, policy))

    @rule(which=WHICH, crash=CRASH)
    def unpin(self, which: int, crash: int | None) -> None:
        """Take a name away."""
        if self.model.pins:
            name = sorted(self.model.pins)[which % len(self.model.pins)]
            self._do(lambda store: store.delete_pin(name), crash)
            if name not in {pin.name for pin in self.store.pins()}:
                del self.model.pins[name]

    @rule(which=WHICH, crash=CRASH)
    def drop(self, which: int, crash: int | None) -> None:
        """Hide a commit."""
        commit = self._commit(which)
        if commit is not None:
            self._drop(commit, crash)

    def _drop(self, commit: Commit, crash: int | None) -> None:
        reference = self.model.reference(commit)
        done = self._do(lambda store: store.drop(reference, last=True), crash)
        if done is not None or commit.id not in {entry.commit for entry in self.store.log()}:
            self.model.hide(commit)

    @rule(
        last=st.one_of(st.none(), st.integers(1, 4)),
        every=st.one_of(st.none(), st.integers(2, 4)),
        trim=st.one_of(st.none(), st.none(), st.integers(1, 6)),
        runs=st.one_of(st.none(), st.none(), st.lists(RUNS, unique=True)),
        crash=CRASH,
    )
    def gc(
        self, last: int | None, every: int | None, trim: int | None, runs: list[str] | None, crash: int | None
    ) -> None:
        """Remove what is not to be kept."""
        if runs is not None:
            runs = [run for run in runs if self.model.run(run).commits]
        keep = Keep(last=last, every=every, drop_optimizer_older_than=trim)
        gone, trimmed = self.model.collected(keep, runs)
        time.sleep(0.01)  # what was written in this very tick of the clock is not older than it
        done = self._do(lambda store: store.gc(keep, runs=runs, grace_seconds=0.0), crash)
        there = {(entry.run, entry.attempt, entry.step): entry.commit for entry in self.store.log()}
        for commit in gone:
            if done is not None or there.get((commit.run, commit.attempt, commit.step)) != commit.id:
                self.model.hide(commit)
        for commit in trimmed:
            new_id = there[commit.run, commit.attempt, commit.step]
            if done is not None or new_id != commit.id:
                self.model.trim(commit, new_id)
                self._note_versions(new_id)
        if done is not None:
            assert {fate.commit for fate in done.removed if fate.is_visible} == {commit.id for commit in gone}
            assert {fate.commit for fate in done.trimmed} == {commit.id for commit in trimmed}
            assert self.store.verify().orphans == 0

    # -- composing -----------------------------------------------------------------------------------------------

    @rule(which=WHICH, policy=POLICY, world_size=WORLD_SIZES)
    def compose(self, which: int, policy: str, world_size: int | None) -> None:
        """Write a composite of a commit."""
        commit = self._commit(which)
        if commit is not None and (commit.has_moments or policy == "full"):
            composite = self.store.compose(self.model.reference(commit), policy=POLICIES[policy])
            self._check(composite, commit, self.model.composed(commit, policy), world_size)

    @rule(which=WHICH, world_size=WORLD_SIZES)
    def compose_pin(self, which: int, world_size: int | None) -> None:
        """Write a pinned one."""
        if self.model.pins:
            name = sorted(self.model.pins)[which % len(self.model.pins)]
            pin = self.model.pins[name]
            self._check(self.store.compose(name), pin.base, pin.layers, world_size)

    @rule(base=WHICH, other=WHICH, odd=st.booleans(), world_size=WORLD_SIZES)
    def compose_by_recipe(self, base: int, other: int, odd: bool, world_size: int | None) -> None:
        """Write one whose blocks are of two commits, of any runs."""
        mine, theirs = self._commit(base), self._commit(other)
        if mine is None or theirs is None or not (mine.has_moments and theirs.has_moments):
            return
        recipe = self.folder / "recipe.yaml"
        recipe.write_text(
            f"base: {self.model.reference(mine)}\n"
            f"layers:\n  model.layers.[{'odd' if odd else 'even'}]: {self.model.reference(theirs)}\n"
            "rest: base\n"
        )
        layers = {
            layer: theirs.layers[layer]
            if layer.startswith("model.layers.") and int(layer[-1]) % 2 == odd
            else mine.layers[layer]
            for layer in LAYERS
        }
        self._check(self.store.compose(recipe=recipe), mine, layers, world_size)

    @rule(which=WHICH, crash=st.integers(0, 80))
    def die_composing(self, which: int, crash: int) -> None:
        """Be killed on the way: there is no target, or a whole one."""
        commit = self._commit(which)
        if commit is None or not commit.has_moments:
            return
        out = self.folder / "killed"
        reference = self.model.reference(commit)
        done = self._do(lambda store: store.compose(reference).write(out), crash)
        if done is not None or out.exists():
            assert held(out) == expected(commit.layers)
        for left in self.folder.glob("killed*"):
            shutil.rmtree(left)

    def _check(self, composite: Composite, base: Commit, layers: Layers, world_size: int | None) -> None:
        """Compare what *composite* writes with what the model says."""
        self.lab.counts["composites"] += 1
        assert (composite.run, composite.step, composite.commit) == (base.run, base.step, base.id)
        if not all(layer.has_moments for layer in layers.values()):
            self._check_without_moments(composite, layers)
            return
        out = self.folder / "out"
        composite.write(out, world_size=world_size, durable=False)
        assert held(out) == expected(layers)
        if {layer.content for layer in layers.values()} == {base.content}:
            assert fingerprint(out) == self.lab.fingerprint(base.content, world_size)
        shutil.rmtree(out)

    def _check_without_moments(self, composite: Composite, layers: Layers) -> None:
        """Compare the masters, which are all that is left; shards cannot be had."""
        masters = {(name, "master"): array.tobytes() for name, array in composite.tensors("master").items()}
        assert masters == expected(layers, moments=False)
        try:
            composite.write(self.folder / "out")
        except LayoutMismatch:
            return
        raise AssertionError("a commit without moments was composed")

    # -- the index -----------------------------------------------------------------------------------------------

    @rule()
    def reopen(self) -> None:
        """Close the store, and open it."""
        self.store.close()
        self.store = Store(self.path)

    @rule()
    def reindex(self) -> None:
        """Make the index afresh."""
        self.store.reindex()

    @rule()
    def remember_index(self) -> None:
        """Keep a copy of the index for later."""
        self.store.log()
        self._with_index(lambda index: shutil.copytree(index, self.folder / "old-index", dirs_exist_ok=True))

    @rule(how=st.sampled_from(["lost", "rolled back", "foreign"]))
    def harm_index(self, how: str) -> None:
        """Lose the index, put an old one in its place, or another store's."""
        instead = self.folder / "old-index" if how == "rolled back" else self.lab.foreign_index()

        def harm(index: Path) -> None:
            shutil.rmtree(index, ignore_errors=True)
            if how != "lost" and instead.exists():
                shutil.copytree(instead, index)

        self._with_index(harm)

    @rule(place=WHICH, bit=st.integers(0, 7))
    def flip_in_index(self, place: int, bit: int) -> None:
        """Damage the index."""
        self._with_index(lambda index: flip(index / "data.mdb", place, bit))

    def _with_index(self, work: Callable[[Path], object]) -> None:
        self.store.close()
        if (self.path / "manifest").exists():
            work(self.path / "manifest")
        self.store = Store(self.path)

    # -- damage --------------------------------------------------------------------------------------------------

    @rule(which=WHICH, place=WHICH, bit=st.integers(0, 7), heal=st.sampled_from(["back", "again", "drop"]))
    def flip(self, which: int, place: int, bit: int, heal: str) -> None:
        """Damage what something needs: verify finds it, and nobody is handed a wrong byte."""
        needed = anatomy(self.store).users
        files = [*(self.path / "objects" / name[:2] / name for name in needed), self.path / "store.json"]
        files += [path for folder in ("commits", "pins") for path in (self.path / folder).rglob("*") if path.is_file()]
        file = sorted(files)[which % len(files)]
        flip(file, place, bit)
        self.lab.counts["flips"] += 1
        try:
            with Store(self.path) as store:
                verdict = store.verify(read_data=True)
                assert not verdict.ok or verdict.hidden  # the second where only hidden commits need it
                self._look_at_damaged(store, random.Random(place))
        except IntegrityError:
            assert file.name == "store.json"
        users = needed.get(file.name, set())
        if file.parent.name == "pins" and heal == "drop":
            self.store.delete_pin(file.name)
            del self.model.pins[file.name]
        elif heal == "again" and users and file.name in self.made_from:
            self._heal(file)
        elif heal == "drop" and users and len(users) <= 2:
            self._drop_users(users)
        else:
            flip(file, place, bit)
        assert self.store.verify(read_data=True).ok, (file, heal)

    def _look_at_damaged(self, store: Store, chance: random.Random) -> None:
        """Compose this and that: it is right, or it is refused."""
        commits = sorted(self.model.commits(), key=lambda commit: commit.id)
        for commit in chance.sample(commits, min(4, len(commits))):
            try:
                self._check(store.compose(self.model.reference(commit)), commit, commit.layers, None)
            except IntegrityError:
                self.lab.counts["refused"] += 1
                assert not (self.folder / "out").exists()

    def _heal(self, file: Path) -> None:
        """Do as the error says: have the object taken out of the way, and ingest what it came from."""
        assert self.store.repair(read_data=True).quarantined
        assert not file.exists()
        self.runs_made += 1
        self._save(f"healed{self.runs_made}", self.made_from[file.name], "full", Saving(), None)
        assert file.exists()

    def _drop_users(self, users: set[str]) -> None:
        """Drop all that needs the damaged object, and have it collected."""
        for commit in list(self.model.commits()):
            if commit.id in users:
                self._drop(commit, None)
        for name in users & self.model.pins.keys():
            self.store.delete_pin(name)
            del self.model.pins[name]
        time.sleep(0.01)
        self.store.gc(grace_seconds=0.0)

    # -- repair --------------------------------------------------------------------------------------------------

    @rule(read_data=st.booleans(), fall_back=st.booleans(), crash=CRASH)
    def repair_what_is_sound(self, read_data: bool, fall_back: bool, crash: int | None) -> None:
        """Repair where nothing is damaged, whatever a crash has left: nothing is moved, nothing changes."""
        done = self._do(lambda store: store.repair(read_data=read_data, fall_back=fall_back), crash)
        if done is not None:
            found = (done.quarantined, done.healed, done.fell_back, done.lost, done.lost_records, done.held_back)
            assert not any(found), done

    @rule(
        files=st.lists(st.tuples(WHICH, WHICH, st.booleans()), min_size=1, max_size=4),
        read_data=st.booleans(),
        source=st.sampled_from(["none", "whole", "harmed too"]),
        fall_back=st.booleans(),
        without_index=st.sampled_from([False, False, False, True]),
        crash=CRASH,
        again=st.booleans(),
    )
    def harm_and_repair(
        self,
        files: list[tuple[int, int, bool]],
        read_data: bool,
        source: str,
        fall_back: bool,
        without_index: bool,
        crash: int | None,
        again: bool,
    ) -> None:
        """Flip and lose files, perhaps with the copies of records; repair; then heal what was not to be had."""
        self.store.log()  # the index knows all
        sound = self._copied("sound")
        older = {commit.id: self.model.older(commit) for commit in self.model.commits()}
        harm = self._harmed(files, without_index=without_index)
        copy = None if source == "none" else sound if source == "whole" else self._copied("copy", sound)
        if source == "harmed too" and harm.objects:
            assert copy is not None
            name = min(harm.objects)
            flip(copy / "objects" / name[:2] / name, files[0][1], 0)
        owed = harm.owed(read_data=read_data, source=copy)
        fall_back = fall_back and not owed.records  # what a lost record had hidden would count as an older save
        sources = [] if copy is None else [copy]

        def repair(store: Store) -> Repaired:
            return store.repair(read_data=read_data, sources=sources, fall_back=fall_back)

        if crash is not None:
            self._do(repair, crash)
        with Store(self.path) as store:
            done = repair(store)
            falls = self._fallen_back(store, harm, owed, older) if fall_back else set()
            self._look_at_repaired(store, harm, owed, random.Random(files[0][1]))
            if crash is None:
                self._check_told(done, harm, owed, falls)
        self._heal_all(harm, owed, sound, again=again)
        self._hide_again(harm, owed, done.shown_again if crash is None else None)
        for left in ("sound", "copy"):
            shutil.rmtree(self.folder / left, ignore_errors=True)

    def _copied(self, name: str, source: Path | None = None) -> Path:
        target = self.folder / name
        self.store.close()
        shutil.copytree(source or self.path, target)
        self.store = Store(self.path)
        return target

    def _harmed(self, files: list[tuple[int, int, bool]], *, without_index: bool) -> Harm:
        harm = Harm(self.path, anatomy(self.store))
        self.store.close()
        for which, place, removes in files:
            # A record that is gone, and that no index remembers, nobody can miss.
            harm.do(which, place, removes=removes and which % 4 != 2)
        if without_index:
            shutil.rmtree(self.path / "manifest")
        self.store = Store(self.path)
        self.lab.counts["files harmed"] += len(files)
        return harm

    def _misses(self, harm: Harm, ids: frozenset[str]) -> IsLost:
        """Return what tells whether a layer needs any of *ids*."""

        def misses(name: str, layer: Layer) -> bool:
            version = self.versions[name, layer]
            return bool(ids & {version, *harm.parts.objects.get(version, ())})

        return misses

    def _fallen_back(self, store: Store, harm: Harm, owed: Owed, older: dict[str, list[Layers]]) -> set[str]:
        """Let the model fall back as the store has to; return the commits that are hidden by it."""
        told, lost = self._misses(harm, owed.told), self._misses(harm, owed.lost)
        hidden = set()
        planned = [
            (commit, self.model.fallen_back(commit, older[commit.id], told=told, lost=lost))
            for commit in self.model.commits()
            if not self._states(harm, commit.id) & owed.told
            and any(told(name, layer) for name, layer in commit.layers.items())
        ]
        there = {(entry.run, entry.attempt, entry.step): entry.commit for entry in store.log()}
        for commit, layers in planned:
            now = there[commit.run, commit.attempt, commit.step]
            assert (now == commit.id) == (layers is None), commit
            if layers is not None:
                hidden.add(commit.id)
                harm.parts.records[now] = harm.parts.records[commit.id]  # its states are the other's
                self.model.fall_back(commit, layers, now)
                self.lab.counts["fallen back"] += 1
        return hidden

    def _states(self, harm: Harm, user: str) -> set[str]:
        needed = harm.parts.pins.get(user) or harm.parts.records[user]
        return {name for state in needed.states for name in (state, *harm.parts.objects[state])}

    def _look_at_repaired(self, store: Store, harm: Harm, owed: Owed, chance: random.Random) -> None:
        """What is owed is whole; what is lost is refused; all else composes to the model's bytes."""
        for name in harm.objects:
            assert harm.is_as_it_was(name) == (name in owed.healed), name
        harmed, lost = len(harm.records) + len(harm.pins), len(owed.records) + len(owed.pins)
        self.lab.counts["healed"] += len(owed.healed) + harmed - lost
        self.lab.counts["lost"] += len(owed.lost) + lost
        verdict = store.verify(read_data=True)
        found = [*verdict.damaged, *verdict.hidden]
        assert {damage.id for damage in found} == owed.seen, (found, owed)
        misses = self._misses(harm, owed.lost)
        for commit in self.model.commits():
            if commit.id not in owed.records:
                is_lost = bool(self._states(harm, commit.id) & owed.lost)
                self._whole_or_refused(partial(store.compose, commit.id), commit, commit.layers, misses, is_lost)
        if owed.records or owed.pins:
            return  # what a lost record hid shows again, and so histories are others
        for name, pin in self.model.pins.items():
            is_lost = bool(self._states(harm, name) & owed.lost)
            self._whole_or_refused(partial(store.compose, name), pin.base, pin.layers, misses, is_lost)
        commits = [commit for commit in self.model.commits() if commit.has_moments]
        for commit in chance.sample(commits, min(2, len(commits))):
            reference, policy = self.model.reference(commit), chance.choice(["parity", "filter"])
            layers = self.model.composed(commit, policy)
            is_lost = bool(self._states(harm, commit.id) & owed.lost)
            by_policy = partial(store.compose, reference, policy=POLICIES[policy])
            self._whole_or_refused(by_policy, commit, layers, misses, is_lost)

    def _whole_or_refused(
        self,
        make: Callable[[], Composite],
        base: Commit,
        layers: Layers,
        misses: IsLost,
        is_lost: bool,
    ) -> None:
        is_hurt = is_lost or any(misses(name, layer) for name, layer in layers.items())
        is_trimmed = not all(layer.has_moments for layer in layers.values())
        try:
            self._check(make(), base, layers, None)
        except IntegrityError:
            self.lab.counts["refused"] += 1
            assert is_hurt, base
            assert not (self.folder / "out").exists()
        else:
            assert is_trimmed or not is_hurt, base  # of what is trimmed only the masters can be asked for

    def _check_told(self, done: Repaired, harm: Harm, owed: Owed, fallen: set[str]) -> None:
        """Compare what a repair says it did, and what it says is lost, with what it owes."""
        assert {Path(each.path).name for each in done.healed if each.kind == "object"} == owed.healed
        written_back = {Path(each.path).name.partition(".")[2] for each in done.healed if each.kind == "record"}
        assert written_back == harm.records.keys() - owed.records
        assert {Path(each.path).name for each in done.healed if each.kind == "pin"} == harm.pins.keys() - owed.pins
        assert {each.hurt for each in done.fell_back} == fallen
        # One that a sound one hides is given up already.
        waited_for = [commit for commit in owed.records if harm.parts.hiders.get(commit, set()) <= owed.records]
        paths = [harm.records[commit] for commit in waited_for]
        lost_records = {f"{path.parent.name}@{path.name.partition('.')[0]}" for path in paths}
        assert set(done.held_back) == lost_records | owed.held_back
        if owed.records:
            return  # what these had hidden may show again, and be hurt too
        misses = self._misses(harm, owed.told)
        users = {commit.id: commit.layers for commit in self.model.commits()}
        users |= {name: pin.layers for name, pin in self.model.pins.items() if name not in owed.pins}
        expected = {}
        for user, layers in users.items():
            lost = {name for name, layer in layers.items() if misses(name, layer)}
            everything = bool(self._states(harm, user) & owed.told)
            if lost or everything:
                expected[user] = lost, everything
        meant = {cost.holder: resolve(self.store.rooms, cost.holder) for cost in done.lost}
        costs = {
            meant[cost.holder].pin or meant[cost.holder].commit: (set(cost.layers), cost.everything)
            for cost in done.lost
        }
        assert costs == expected, (costs, expected)

    def _heal_all(self, harm: Harm, owed: Owed, sound: Path, *, again: bool) -> None:
        """Ingest again what is lost, or some of it; take the rest from the sound copy, but for pins nobody misses."""
        if again and not owed.records:
            for name in sorted(owed.told & self.made_from.keys()):
                self.runs_made += 1
                self._save(f"healed{self.runs_made}", self.made_from[name], "full", Saving(), None)
                assert harm.is_as_it_was(name)
        with Store(self.path) as store:
            done = store.repair(read_data=True, sources=[sound])
            left = harm.owed(read_data=True, source=sound)
            assert (done.lost, done.lost_records, frozenset(done.held_back)) == ((), (), left.held_back), done
            for name in left.held_back:
                store.delete_pin(name)
            for name in left.pins:
                del self.model.pins[name]
            verdict = store.verify(read_data=True)
        assert verdict.ok, verdict.damaged
        assert verdict.quarantined == ()
        self.lab.counts["repairs"] += 1

    def _hide_again(self, harm: Harm, owed: Owed, told: tuple[str, ...] | None) -> None:
        """What a lost record alone had hidden shows where that one is hidden itself, since nobody needs it back."""
        seen = {commit.id for commit in self.model.commits()}
        for entry in [entry for entry in self.store.log() if entry.commit not in seen]:
            assert harm.parts.hiders[entry.commit] <= owed.records, entry
            names = None if told is None else {(each.name, each.step) for each in map(parse_reference, told)}
            assert names is None or (entry.run, entry.step) in names, (entry, told)
            self.store.drop(entry.commit, last=True)
            self.lab.counts["shown again"] += 1

    # -- what is always so ---------------------------------------------------------------------------------------

    @invariant()
    def the_log_is_the_models(self) -> None:
        """Nothing is lost, nothing comes back, and no pin changes."""
        self.lab.counts["steps"] += 1
        entries = self.store.log()
        assert [entry.damage for entry in entries if entry.damage] == []
        shown, seen = {(entry.run, entry.attempt, entry.step, entry.commit) for entry in entries}, self.model.seen()
        assert shown == seen, (shown - seen, seen - shown)
        assert {pin.name: pin.base for pin in self.store.pins()} == {
            name: pin.base.id for name, pin in self.model.pins.items()
        }

    @rule()
    def verify(self) -> None:
        """Read every byte."""
        verdict = self.store.verify(read_data=True)
        assert verdict.ok, verdict.damaged

    def everything(self) -> None:
        """Compare every composite of every commit and pin, and do it once more without an index."""
        self.the_log_is_the_models()
        self.verify()
        for commit in self.model.commits():
            for policy in POLICIES if commit.has_moments else ("full",):
                composite = self.store.compose(self.model.reference(commit), policy=POLICIES[policy])
                self._check(composite, commit, self.model.composed(commit, policy), None)
        for name, pin in self.model.pins.items():
            self._check(self.store.compose(name), pin.base, pin.layers, None)
        self._with_index(shutil.rmtree)
        self.the_log_is_the_models()

    # -- tools ---------------------------------------------------------------------------------------------------

    def _commit(self, which: int) -> Commit | None:
        commits = sorted(self.model.commits(), key=lambda commit: (commit.run, commit.attempt, commit.step))
        return commits[which % len(commits)] if commits else None

    def _do(self, work: Callable[[Store], Done], crash: int | None) -> Done | None:
        """Do *work*; None if the process died in it."""
        if crash is None:
            return work(self.store)
        hook = Dying(crash)
        store = Store(self.path, hook=hook)
        try:
            return work(store)
        except Died:
            self.lab.counts["crashes"] += 1
            return None
        finally:
            store.close()
