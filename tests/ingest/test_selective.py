"""Saving only the layers that are due, and going back: what a run's history is afterwards."""

from pathlib import Path
from typing import Any

import pytest

from layerstore import Drift, Filter, Parity, Store
from layerstore.errors import Conflict, InvalidInput, LayoutMismatch
from layerstore.model import LayerEntry
from layerstore.policy import Save
from layerstore.tree import Tree
from tests.unit.checkpoints import Checkpoints, checkpoint


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    """Return where checkpoints come from."""
    return Checkpoints(tmp_path / "source", layers=4, layout="hf")


def steps(store: Store, ref: str, **options: Any) -> dict[str, int]:
    """Return the step that each layer of a composite comes from."""
    return {layer: choice.step for layer, choice in store.compose(ref, **options).layers.items()}


def versions(store: Store, ref: str, **options: Any) -> dict[str, str]:
    """Return the version of each layer of a composite."""
    return {layer: choice.version for layer, choice in store.compose(ref, **options).layers.items()}


def entries(store: Store, ref: str) -> tuple[LayerEntry, ...]:
    """Return what the record of *ref* says of its layers."""
    return store.compose(ref)._composition.layers  # what the record says and no face shows


class AllBut:
    """A policy under which one layer is never due again."""

    name = "all-but"

    def __init__(self, layer: str) -> None:
        self.parameters: dict[Tree, Tree] = {"layer": layer}

    def due(self, save: Save) -> set[str]:
        """Return the others."""
        return set(save.layers) - {str(self.parameters["layer"])}


def test_a_frozen_layer_of_an_older_save_makes_no_mixture(store: Store, tmp_path: Path) -> None:
    """It is the same at every save; one that is trained is not, and the composite says so."""
    for run, layer in (("frozen", "model.layers.0"), ("trained", "model.layers.1")):
        for step in (1, 2):
            source = checkpoint(tmp_path / run, step=step, frozen=("model.layers.0",))
            store.ingest(source, run=run, policy=AllBut(layer))

    assert steps(store, "frozen")["model.layers.0"] == steps(store, "trained")["model.layers.1"] == 1
    assert store.compose("frozen").mixture is None
    assert str(store.compose("trained").mixture).startswith("1 of 5 layers is older than step 2")


# -- saving what is due --------------------------------------------------------------------------------------------


@pytest.mark.known_fault("llmtailor 8")
def test_the_first_save_is_full_and_later_ones_hold_their_half(store: Store, saved: Checkpoints) -> None:
    """And say how much that was; the composite says which optimizer counts it mixes."""
    first, second, third = (store.ingest(saved(step), run="r", policy="parity") for step in (1, 2, 3))

    assert first.layers_saved == first.layers
    assert second.layers_saved == ("model.embed_tokens", "model.layers.1", "model.layers.3")
    assert third.layers_saved == ("model.layers.0", "model.layers.2", "model.norm", "lm_head")
    assert second.bytes_new < first.bytes_new * 0.7
    assert steps(store, "r") == {layer: 3 if layer in third.layers_saved else 2 for layer in third.layers}
    assert store.compose("r").staleness.optimizer_steps == {2: 3, 3: 4}


@pytest.mark.known_fault("llmtailor 18")
def test_a_selective_history_needs_no_policy_to_compose(store: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """Its newest commit is the composite that the policy makes of full checkpoints, to the last byte."""
    for step in (1, 2, 3, 4):
        store.ingest(saved(step), run="full")
        store.ingest(saved(step), run="half", policy="parity")
    store.compose("full", policy=Parity(fresh="odd")).write(tmp_path / "full")
    store.compose("half").write(tmp_path / "half")
    full, half = (
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()}
        for name in ("full", "half")
    )

    assert full.pop("layerstore.json") != half.pop("layerstore.json")
    assert full == half


def test_the_same_again_writes_nothing(store: Store, saved: Checkpoints) -> None:
    """A step is saved once; what another policy would have stored is said, and is stored with replace."""
    saved.into(store, 1, 2, 3, policy="parity")
    again = [store.ingest(saved(2), run="r", policy=policy) for policy in ("parity", "full", "filter")]

    assert not any(ingested.is_new for ingested in again)
    assert [ingested.layers_saved for ingested in again] == [again[0].layers_saved] * 3
    assert not again[0].notes
    assert any("3 of its 7 layers" in note for note in again[1].notes)
    assert store.ingest(saved(3), run="r", replace=True).is_new
    assert set(steps(store, "r").values()) == {3}
    assert len(store.log("r")) == 3


def test_layers_that_were_due_at_a_dropped_save_are_due_again(store: Store, saved: Checkpoints) -> None:
    """The next save has the dropped one's number, so that half of the model is not put off for another round."""
    third = [store.ingest(saved(step), run="r", policy="parity") for step in (1, 2, 3)][-1]
    store.drop("r@3")
    fourth = store.ingest(saved(4), run="r", policy="parity")

    assert fourth.layers_saved == third.layers_saved
    assert store.show("r@4").save_number == 2


@pytest.mark.fault(70)
def test_a_layer_that_changed_its_shape_is_due(store: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """It cannot be inherited; a composite of both names the layer and the difference, and is not written."""
    store.ingest(saved(1), run="r", policy="parity")
    grown = store.ingest(saved(2, vocab=16), run="r", policy="parity")
    assert "lm_head" in grown.layers_saved
    assert "model.layers.0" not in grown.layers_saved

    for step, options in ((1, {}), (2, {"vocab": 16})):
        store.ingest(saved(step, **options), run="full")
    with pytest.raises(LayoutMismatch, match=r"lm_head of full@1 does not fit full@2.*8×8.*16×8"):
        store.compose("full", policy=Parity(fresh="odd")).write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_old_layer_can_be_refused(store: Store, saved: Checkpoints) -> None:
    """With its age."""
    saved.into(store, 1, 2, 3, 4, policy=Filter(first=0, last=0, every=100))
    plan = store.compose("r")

    assert plan.staleness.oldest.steps == 3
    plan.check(max_staleness=3)
    with pytest.raises(Conflict, match="3 steps before"):
        plan.check(max_staleness=2)


def test_a_layer_that_was_due_but_not_written_is_reported(store: Store, saved: Checkpoints) -> None:
    """Over a history that was saved under another policy."""
    saved.into(store, 1, 2, 3, policy=Filter(first=0, last=0, every=100))
    plan = store.compose("r", policy="parity")

    assert "lm_head" in plan.older_than_due
    assert "model.norm" not in plan.older_than_due  # always written


# -- going back ----------------------------------------------------------------------------------------------------


@pytest.mark.known_fault("llmtailor 15")
def test_after_going_back_the_run_means_the_new_attempt_from_its_first_save(store: Store, saved: Checkpoints) -> None:
    """No layer of the abandoned one enters its composites."""
    saved.into(store, 100, 200, 300, policy="parity")
    store.ingest(saved(250, seed=7), run="r", policy="parity", rollback=True)

    assert store.compose("r").step == 250
    assert set(steps(store, "r").values()) == {200, 250}
    assert set(steps(store, "r", policy="parity").values()) == {200, 250}
    assert store.compose("r~1").step == 300
    assert {entry.origin.attempt for entry in entries(store, "r") if entry.origin.step == 250} == {2}


def test_a_step_of_both_attempts_is_the_new_ones(store: Store, saved: Checkpoints) -> None:
    """The old one keeps its name with a tilde."""
    saved.into(store, 100, 200, 300)
    store.ingest(saved(200, seed=7), run="r", rollback=True)
    store.ingest(saved(300, seed=7), run="r")

    assert versions(store, "r@300") != versions(store, "r~1@300")
    assert steps(store, "r@300", policy="parity") == steps(store, "r~1@300", policy="parity")
    assert not set(versions(store, "r@300", policy="parity").values()) & set(versions(store, "r~1@300").values())


def test_going_back_below_the_first_save_begins_anew(store: Store, saved: Checkpoints) -> None:
    """The attempt forks nowhere, and its first save is full."""
    store.ingest(saved(100), run="r", policy="parity")
    anew = store.ingest(saved(50, seed=7), run="r", policy="parity", rollback=True)

    assert anew.layers_saved == anew.layers
    assert store.show("r").fork is None


def test_a_step_after_the_tip_is_no_rollback(store: Store, saved: Checkpoints) -> None:
    """Somebody left the option in."""
    store.ingest(saved(100), run="r")

    with pytest.raises(InvalidInput, match="did not go back"):
        store.ingest(saved(200), run="r", rollback=True)


# -- going on from a composite -------------------------------------------------------------------------------------


def test_what_follows_a_composite_inherits_its_layers(store: Store, saved: Checkpoints) -> None:
    """Not its base's: training went on from what was composed."""
    saved.into(store, 100, 200)
    composite = store.compose("r@200", policy="parity")
    composite.pin("mix")
    after = store.ingest(saved(250, seed=7), run="r", policy=Filter(first=0, last=0, every=100), resumed_from="mix")
    found = versions(store, "r@250")

    assert after.attempt == 2
    assert found["model.embed_tokens"] == composite.layers["model.embed_tokens"].version
    assert steps(store, "r@250")["model.embed_tokens"] == 100
    assert steps(store, "r@250")["model.norm"] == 250


def test_a_run_may_begin_from_another_ones_commit(store: Store, saved: Checkpoints) -> None:
    """A fork shares what it has not changed."""
    store.ingest(saved(100), run="base")
    store.ingest(saved(10, seed=7), run="tuned", policy=Filter(first=0, last=0, every=100), resumed_from="base@100")
    plan = store.compose("tuned")

    assert {choice.run for choice in plan.layers.values()} == {"base", "tuned"}
    assert plan.staleness.oldest.steps is None
    with pytest.raises(Conflict, match="another run"):
        plan.check(max_staleness=10_000)


@pytest.mark.parametrize(("step", "ref"), [(100, "r@200"), (200, "r@200"), (300, "other@1")])
def test_going_on_from_what_cannot_be_is_refused(store: Store, saved: Checkpoints, step: int, ref: str) -> None:
    """A step that is not after it, or another run's commit."""
    for run, at in (("r", 200), ("other", 1)):
        store.ingest(saved(at), run=run)

    with pytest.raises(InvalidInput):
        store.ingest(saved(step, seed=7), run="r", resumed_from=ref)
    assert len(store.log("r")) == 1


# -- pins ----------------------------------------------------------------------------------------------------------


def test_a_pinned_composite_is_written_again(store: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """Byte for byte, whatever becomes of what it was made from."""
    saved.into(store, 1, 2)
    plan = store.compose("r", policy="parity")
    plan.pin("mix")
    plan.write(tmp_path / "first")
    store.ingest(saved(2, seed=9), run="r", replace=True)
    store.compose("mix").write(tmp_path / "second")
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()}
        for name in ("first", "second")
    )

    assert first == second
    assert store.compose("mix").policy == "parity"


# -- drift ---------------------------------------------------------------------------------------------------------


def nudged(source: Path, target: Path, block: int) -> Path:
    """Copy a checkpoint with the masters of one block moved, and its step one further."""
    import shutil

    import torch

    shutil.copytree(source, target)
    for path in target.rglob("*optim_states.pt"):
        tree = torch.load(path, weights_only=False)
        shapes = torch.load(next(path.parent.glob(path.name.replace("bf16_", "").replace("optim", "model"))))
        offset = 0
        for flat, group in zip(tree["optimizer_state_dict"]["fp32_flat_groups"], shapes["param_shapes"], strict=True):
            offset = 0
            for name, shape in group.items():
                length = -(-shape.numel() // 2)
                if f"layers.{block}." in name:
                    flat.data[offset : offset + length] *= 1.5
                offset += length
        torch.save(tree, path)
    return target


def test_drift_stores_what_moved_and_records_why(store: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """The composite over the recorded history is what was saved."""
    first = saved(1, layout="raw")
    second = nudged(first, tmp_path / "nudged" / "checkpoint-1", block=2)
    store.ingest(first, run="r", policy=Drift(stalest=100))
    moved = store.ingest(second, run="other", resumed_from="r", policy=Drift(threshold=0.1, stalest=100, by="norm"))
    decisions = store.compose("other")._composition.base.policy.decisions

    # The first layer because at the first of a hundred saves it is its turn.
    assert moved.layers_saved == ("model.embed_tokens", "model.layers.2")
    assert isinstance(decisions["movements"], dict)
    assert decisions["movements"]["model.layers.2"] == pytest.approx(0.5)
    assert decisions["movements"]["model.layers.1"] == 0
    assert versions(store, "other", policy="drift") == versions(store, "other")


def test_drift_over_recorded_history_is_what_was_saved(store: Store, saved: Checkpoints) -> None:
    """All layers of these checkpoints move: the budget spreads them over the saves."""
    for step in range(1, 7):
        store.ingest(saved(step), run="r", policy=Drift(budget=4000, stalest=5))
    stored = [len(entry_steps) for entry_steps in (set(steps(store, f"r@{step}").values()) for step in range(1, 7))]

    assert max(stored) > 2
    assert versions(store, "r", policy=Drift()) == versions(store, "r")
    assert versions(store, "r@4", policy=Drift()) == versions(store, "r@4")


@pytest.mark.parametrize("other", [1, 3])
def test_movement_is_the_same_at_any_world_size(store: Store, saved: Checkpoints, other: int) -> None:
    """The sample is by position in the whole parameter."""
    store.ingest(saved(1, layout="raw"), run="a")
    store.ingest(saved(2, layout="raw"), run="a", policy=Drift(threshold=1e9, stalest=100))
    store.compose("a@1").write(saved.folder / "cut" / "checkpoint-1", world_size=other)
    store.ingest(saved.folder / "cut" / "checkpoint-1", run="b")
    store.ingest(saved(2, layout="raw"), run="b", policy=Drift(threshold=1e9, stalest=100))
    decisions = [store.compose(run)._composition.base.policy.decisions for run in ("a", "b")]

    assert decisions[0]["movements"] == decisions[1]["movements"]
    assert decisions[0]["movements"]


# -- what is stored again, and what is known ------------------------------------------------------------------------


def test_a_lost_object_of_an_inherited_layer_is_stored_again(store: Store, saved: Checkpoints) -> None:
    """Success is not reported over a hole."""
    store.ingest(saved(1), run="r", policy="parity")
    (kept,) = {
        stored.id
        for entry in entries(store, "r")
        if entry.layer == "model.layers.0"
        for stored in store._repo.version_of(entry).objects
        if stored.kind == "master" and stored.shard == 0
    }
    (store.path / "objects" / kept[:2] / kept).unlink()
    second = store.ingest(saved(2), run="r", policy="parity")

    assert "model.layers.0" in second.layers_saved
    assert "model.layers.2" not in second.layers_saved
    store.compose("r").check()


def test_checkpoints_that_training_has_left_do_not_come_back(store: Store, saved: Checkpoints) -> None:
    """Ingesting a whole folder again after going back: all of it is known, and nothing enters the new attempt."""
    saved.into(store, 100, 200, 300)
    store.ingest(saved(250, seed=7), run="r", rollback=True)

    again = [store.ingest(saved(step), run="r") for step in (100, 200, 300)]

    assert [(each.is_new, each.attempt) for each in again] == [(False, 1)] * 3
    assert store.compose("r").step == 250


def test_a_left_checkpoint_is_known_by_layers_that_are_not_due_now(store: Store, saved: Checkpoints) -> None:
    """Where its own attempt saved one half and this one would save the other: told by the half that was saved."""
    saved.into(store, 100, 200, 300, policy="parity")
    store.ingest(saved(250, seed=7), run="r", policy="parity", rollback=True)
    before = store.stats()

    again = store.ingest(saved(300), run="r", policy="parity")

    assert (again.is_new, again.attempt) == (False, 1)
    assert store.compose("r").step == 250
    assert store.stats() == before
    assert not list((store.path / "tmp").iterdir())


@pytest.mark.parametrize("layout", ["raw", "hf"])
def test_a_new_checkpoint_is_not_taken_for_a_left_one(store: Store, saved: Checkpoints, layout: str) -> None:
    """Of the same step, with the same counters and schedule, and other weights: it is of the attempt that goes on."""
    for step in (100, 200, 300):
        store.ingest(saved(step, layout=layout), run="r", policy="parity")
    left = {entry.layer for entry in entries(store, "r@300") if entry.origin.step == 300}
    store.ingest(saved(250, seed=7, layout=layout), run="r", policy="parity", rollback=True)
    new = store.ingest(saved(300, seed=7, layout=layout), run="r", policy="parity")
    states = [store.compose(ref)._composition.base.states for ref in ("r~1@300", "r@300")]

    assert (new.is_new, new.attempt) == (True, 2)
    assert not left & set(new.layers_saved)
    assert (states[0] == states[1]) is (layout == "raw")


def test_the_same_bits_again_are_another_attempt_all_the_same(store: Store, saved: Checkpoints) -> None:
    """Training that goes back may well come to the same checkpoint: what came after it is abandoned."""
    saved.into(store, 100, 200, 300, 400)
    again = store.ingest(saved(300), run="r", rollback=True)

    assert (again.is_new, again.attempt) == (True, 2)
    assert store.compose("r").step == 300
    assert not store.ingest(saved(300), run="r", rollback=True).is_new


def test_an_abandoned_layer_of_the_same_step_is_not_exact(store: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """A step alone does not say which attempt saved it."""
    saved.into(store, 100, 200)
    store.ingest(saved(200, seed=7), run="r", rollback=True)
    (tmp_path / "mix.yaml").write_text("base: r@200\nlayers:\n  lm_head: r~1@200\nrest: base\n")
    plan = store.compose(recipe=tmp_path / "mix.yaml")
    plan.pin("mix")

    assert plan.staleness.is_mixed
    with pytest.raises(LayoutMismatch):
        store.compose("mix", policy="exact")


def test_a_recipe_says_when_it_gets_an_older_layer(store: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """A selective save has not every layer."""
    saved.into(store, 1, 2, policy="parity")
    (tmp_path / "mix.yaml").write_text("base: 2\nlayers:\n  lm_head: 2\nrest: base\n")

    (note,) = store.compose(recipe=tmp_path / "mix.yaml").recipe_notes
    assert "lm_head was not saved at r@2" in note
    assert "mix.yaml:3:" in note
