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
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from layerstore import Keep
from layerstore.composite import Composite
from layerstore.errors import Conflict, IntegrityError, InvalidInput, LayoutMismatch, NotFound
from layerstore.ingest import Ingested
from layerstore.store import Store, init
from tests.faults.harness import fingerprint, flip
from tests.stateful.lab import Died, Dying, Lab, expected, held, needed
from tests.stateful.model import LAYERS, POLICIES, Commit, Content, Layers, Model, Pin, Saving

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
        self.model = Model()
        self.seed = 0

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
        assert known != "conflict" or done is None, "other content was taken for the same"
        new = [entry for entry in self.store.log() if entry.commit not in before]
        if not new:
            assert done is None or (isinstance(known, Commit) and not done.is_new and done.commit == known.id)
            return
        assert known is None
        planned = model.planned(run, content, policy, how)
        view = self.store.show(new[0].commit)
        assert (view.attempt, view.save_number) == (planned.attempt, planned.number)
        assert done is None or (done.is_new and set(done.layers_saved) == planned.own), done
        if (again := model.trash.pop(new[0].commit, None)) is not None:
            model.hidden[again.id] = again  # its record is in the trash as well, and is not listed
        replaced = model.save(planned, new[0].commit)
        if replaced is not None:
            (model.trash if done is not None else model.hidden)[replaced.id] = replaced

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
        """Move a commit to the trash."""
        commit = self._commit(which)
        if commit is not None:
            self._drop(commit, crash)

    def _drop(self, commit: Commit, crash: int | None) -> None:
        reference = self.model.reference(commit)
        done = self._do(lambda store: store.drop(reference), crash)
        if done is not None or commit.id not in {entry.commit for entry in self.store.log()}:
            self.model.forget(commit)
            self.model.trash[commit.id] = commit

    @rule(which=WHICH, crash=CRASH)
    def undrop(self, which: int, crash: int | None) -> None:
        """Bring a commit back, if its place is free and its attempt is the one that it was."""
        model = self.model
        if not model.trash:
            return
        commit = model.trash[sorted(model.trash)[which % len(model.trash)]]
        try:
            done = self._do(lambda store: store.undrop(commit.id), crash)
        except (Conflict, NotFound):  # the second where it was saved again
            assert not model.may_come_back(commit)
            return
        if done is not None or commit.id in {entry.commit for entry in self.store.log()}:
            assert model.may_come_back(commit)
            model.run(commit.run).commits.append(commit)
            del model.trash[commit.id]
            if done is None:
                model.hidden[commit.id] = commit  # it may be in the trash still
            self.lab.counts["back from the trash"] += 1

    @rule(
        last=st.one_of(st.none(), st.integers(1, 4)),
        every=st.one_of(st.none(), st.integers(2, 4)),
        trim=st.one_of(st.none(), st.none(), st.integers(1, 6)),
        runs=st.one_of(st.none(), st.none(), st.lists(RUNS, unique=True)),
        empty_trash=st.booleans(),
        crash=CRASH,
    )
    def gc(
        self,
        last: int | None,
        every: int | None,
        trim: int | None,
        runs: list[str] | None,
        empty_trash: bool,
        crash: int | None,
    ) -> None:
        """Remove what is not to be kept."""
        if runs is not None:
            runs = [run for run in runs if self.model.run(run).commits]
        keep = Keep(last=last, every=every, drop_optimizer_older_than=trim)
        gone, trimmed = self.model.collected(keep, runs)
        time.sleep(0.01)  # what was written in this very tick of the clock is not older than it
        done = self._do(lambda store: store.gc(keep, runs=runs, grace_seconds=0.0, empty_trash=empty_trash), crash)
        there = {(entry.run, entry.attempt, entry.step): entry.commit for entry in self.store.log()}
        for commit in gone:
            if done is not None or there.get((commit.run, commit.attempt, commit.step)) != commit.id:
                self.model.forget(commit)
        for commit in trimmed:
            new_id = there[commit.run, commit.attempt, commit.step]
            if done is not None or new_id != commit.id:
                self.model.trim(commit, new_id)
                if done is None:
                    self.model.hidden[commit.id] = commit
        if empty_trash:
            left = {each.commit.id for each in self.store.dropped()}
            assert done is None or not left
            self.model.trash = {name: each for name, each in self.model.trash.items() if name in left}
            self.model.hidden = {} if done is not None else self.model.hidden
        if done is not None:
            assert {fate.commit for fate in done.removed} == {commit.id for commit in gone}
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

    @rule(which=WHICH, place=WHICH, bit=st.integers(0, 7))
    def flip(self, which: int, place: int, bit: int) -> None:
        """Damage what something needs: verify finds it, and nobody is handed a wrong byte."""
        files = [*(self.path / "objects" / name[:2] / name for name in needed(self.store)), self.path / "store.json"]
        files += [path for folder in ("commits", "pins") for path in (self.path / folder).rglob("*") if path.is_file()]
        file = sorted(files)[which % len(files)]
        flip(file, place, bit)
        self.lab.counts["flips"] += 1
        try:
            with Store(self.path) as store:
                assert not store.verify(read_data=True).ok
                self._look_at_damaged(store, random.Random(place))
        except IntegrityError:
            assert file.name == "store.json"
        flip(file, place, bit)
        assert self.store.verify(read_data=True).ok, file

    def _look_at_damaged(self, store: Store, chance: random.Random) -> None:
        """Compose this and that: it is right, or it is refused."""
        commits = sorted(self.model.commits(), key=lambda commit: commit.id)
        for commit in chance.sample(commits, min(4, len(commits))):
            try:
                self._check(store.compose(self.model.reference(commit)), commit, commit.layers, None)
            except IntegrityError:
                self.lab.counts["refused"] += 1
                assert not (self.folder / "out").exists()

    # -- repair --------------------------------------------------------------------------------------------------

    @rule(read_data=st.booleans(), crash=CRASH)
    def repair_what_is_sound(self, read_data: bool, crash: int | None) -> None:
        """Repair where nothing is damaged, whatever a crash has left: nothing is moved, nothing changes."""
        done = self._do(lambda store: store.repair(read_data=read_data), crash)
        assert done is None or not (done.moved or done.fetched or done.has_lost), done

    @rule(
        harms=st.lists(st.tuples(WHICH, WHICH, st.booleans()), min_size=1, max_size=4),
        without_index=st.booleans(),
        crash=CRASH,
    )
    def harm_and_repair(self, harms: list[tuple[int, int, bool]], without_index: bool, crash: int | None) -> None:
        """
        Flip and lose files: without a copy that is told and refused.

        From a copy all comes back but pins, and what these alone had named.
        """
        names = needed(self.store)
        if not names:
            return
        self.store.close()
        sound = Path(shutil.copytree(self.path, self.folder / "sound"))
        harmed = self._harmed(names, harms)
        if without_index:
            shutil.rmtree(self.path / "manifest")
        self.store = Store(self.path)
        pins = {path.name for path in harmed if path.parent.name == "pins"}
        told = self.store.repair(read_data=True)
        assert told.has_lost
        assert pins <= set(told.unreadable)
        assert not told.fetched
        self._look_at_damaged(self.store, random.Random(harms[0][1]))
        if any(path.parent.parent.name != "objects" for path in harmed):
            self._assert_gc_refuses()
        if crash is not None:
            self._do(lambda store: store.repair(read_data=True, sources=[sound]), crash)
        done = self.store.repair(read_data=True, sources=[sound])
        assert (done.lost, set(done.unreadable)) == ((), pins), done
        for name in pins:
            self.store.delete_pin(name)
            del self.model.pins[name]
        still = needed(self.store)  # nobody knows what an unreadable pin alone had named
        for path, data in harmed.items():
            if path.name in still or path.parent.parent.name == "commits":
                assert path.read_bytes() == data
        assert self.store.verify(read_data=True).ok
        self.lab.counts["files healed"] += len(harmed) - len(pins)
        shutil.rmtree(sound)

    def _harmed(self, names: set[str], harms: list[tuple[int, int, bool]]) -> dict[Path, bytes]:
        """Harm as many files, as a rule objects, now and then a record or a pin; return them as they were."""
        aside = {path.name for path in (self.path / "gc" / "aside").glob("*")}
        found: dict[Path, bytes] = {}
        for which, place, removes in harms:
            folder = ("objects", "objects", "commits", "pins")[which % 4]
            files = sorted(path for path in (self.path / folder).rglob("*") if path.is_file() and path not in found)
            if folder == "objects" or not files:
                files = [self.path / "objects" / name[:2] / name for name in sorted(names - aside)]
            file = files[which % len(files)]
            if file in found or not file.exists():
                continue
            found[file] = file.read_bytes()
            if removes and file.parent.parent.name == "objects":
                file.unlink()
            else:
                flip(file, place, place % 8)
        self.lab.counts["files harmed"] += len(found)
        return found

    def _assert_gc_refuses(self) -> None:
        before = {entry.commit for entry in self.store.log()}
        with pytest.raises(IntegrityError) as caught:
            self.store.gc(Keep(last=1), grace_seconds=0.0)
        assert "layerstore repair --from COPY" in (caught.value.hint or "")  # a pin it only explains
        assert before == {entry.commit for entry in self.store.log()}

    # -- what is always so ---------------------------------------------------------------------------------------

    @invariant()
    def the_log_is_the_models(self) -> None:
        """Nothing is lost, nothing comes back, and no pin changes."""
        self.lab.counts["steps"] += 1
        entries = self.store.log()
        assert [entry.damage for entry in entries if entry.damage] == []
        shown, seen = {(entry.run, entry.attempt, entry.step, entry.commit) for entry in entries}, self.model.seen()
        assert shown == seen, (shown - seen, seen - shown)
        self._trash_is_the_models()
        assert {pin.name: pin.base for pin in self.store.pins()} == {
            name: pin.base.id for name, pin in self.model.pins.items()
        }

    def _trash_is_the_models(self) -> None:
        model, there = self.model, {each.commit.id for each in self.store.dropped()}
        shown = {commit.id for commit in model.commits()}
        model.trash |= {name: commit for name, commit in model.hidden.items() if name in there - shown}
        assert there - model.hidden.keys() == model.trash.keys() - model.hidden.keys()

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
