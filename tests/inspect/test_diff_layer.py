"""Promises of ``diff`` of one layer: each parameter's numbers are those of plain arithmetic."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import layerstore
from layerstore import Store
from layerstore.errors import InvalidInput, NotFound
from layerstore.json_fields import json_fields
from layerstore.model import BlobRef
from layerstore.storage import ObjectStore
from tests.inspect.test_diff import BLOCK_0, BLOCK_1, master_object
from tests.unit.checkpoints import Checkpoints, checkpoint

STATES = ["master", "exp_avg", "exp_avg_sq"]


def numbers(store: Store, ref: str, state: str) -> dict[str, Any]:
    """Return the masters or a state of every parameter, as arrays."""
    composite = store.compose(ref)
    found = composite.tensors("master") if state == "master" else composite.tensors("optimizer", state=state)
    return {name: found[name].astype(np.float64).ravel() for name in found}


def relative(a: Any, b: Any) -> float:
    """Return how far *b* is from *a*."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


@pytest.mark.parametrize("world_sizes", [(2, 2), (1, 3)])
def test_every_number_is_that_of_plain_arithmetic(store: Store, tmp_path: Path, world_sizes: tuple[int, int]) -> None:
    """Masters and moments of each parameter and of all together, and the total is what ``stat`` has for the layer."""
    for step, world_size in zip((2, 4), world_sizes, strict=True):
        store.ingest(checkpoint(tmp_path, step=step, world_size=world_size))

    found = store.diff_layer("sft@2", "sft@4", BLOCK_1)

    assert len(found.parameters) == 9
    for state in STATES:
        a, b = numbers(store, "sft@2", state), numbers(store, "sft@4", state)
        names = [parameter.parameter for parameter in found.parameters]
        for parameter in found.parameters:
            of = parameter.states[state]
            assert of.status == "changed"
            assert of.elements == parameter.elements == a[parameter.parameter].size
            assert of.relative_l2 == pytest.approx(relative(a[parameter.parameter], b[parameter.parameter]), rel=1e-12)
        whole_a, whole_b = (np.concatenate([side[name] for name in names]) for side in (a, b))
        assert found.totals[state].relative_l2 == pytest.approx(relative(whole_a, whole_b), rel=1e-12)
    whole = next(layer.distance for layer in store.diff("sft@2", "sft@4", stat=True).layers if layer.layer == BLOCK_1)
    assert whole is not None
    assert found.totals["master"].relative_l2 == pytest.approx(whole.relative_l2, rel=1e-12)
    assert found.totals["master"].cosine == pytest.approx(whole.cosine, rel=1e-12)


def test_a_layer_that_is_one_version_is_not_read(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ids are equal, so every parameter is identical, whatever happened to the bytes."""
    store.ingest(checkpoint(tmp_path), pin="best")

    def refuse(_: ObjectStore, ref: BlobRef) -> None:
        raise AssertionError(f"{ref.id} is verified")

    monkeypatch.setattr(ObjectStore, "verify", refuse)
    found = store.diff_layer("sft", "best", BLOCK_0)

    assert found.layer.is_same
    assert {of.status for parameter in found.parameters for of in parameter.states.values()} == {"identical"}
    assert {(of.status, of.relative_l2, of.nonfinite_a) for of in found.totals.values()} == {("identical", 0.0, None)}
    assert found.totals["master"].elements == sum(parameter.elements for parameter in found.parameters)


def test_what_is_cut_for_other_ranks_is_identical_if_its_bits_are(store: Store, tmp_path: Path) -> None:
    """Ids say nothing there; the numbers are read, and compared bit for bit."""
    store.ingest(checkpoint(tmp_path / "a", world_size=2), run="two")
    store.ingest(checkpoint(tmp_path / "b", world_size=3), run="three")

    found = store.diff_layer("two", "three", BLOCK_0)

    assert {kind.status for kind in found.layer.kinds.values()} == {"re-sliced"}
    assert {of.status for parameter in found.parameters for of in parameter.states.values()} == {"identical"}
    assert {(of.status, of.relative_l2, of.nonfinite_a) for of in found.totals.values()} == {("identical", 0.0, 0)}


def test_compact_saves_are_compared_as_they_decode(store: Store, tmp_path: Path) -> None:
    """An exact save with a compact one, and two compact ones: the numbers that a composite would have."""
    Checkpoints(tmp_path / "source").into(store, 1, 2, 3, precision="delta8", exact_every=3)

    for pair in (("r@1", "r@2"), ("r@2", "r@3")):
        found = store.diff_layer(*pair, BLOCK_1)

        for state in STATES:
            a, b = (numbers(store, ref, state) for ref in pair)
            for parameter in found.parameters:
                assert parameter.states[state].relative_l2 == pytest.approx(
                    relative(a[parameter.parameter], b[parameter.parameter]), rel=1e-12
                )


def test_a_layer_that_one_side_lacks_has_parameters_all_the_same(store: Store, tmp_path: Path) -> None:
    """They are only there, which is not a failure and is not measured."""
    store.ingest(checkpoint(tmp_path / "a"), run="shallow")
    store.ingest(checkpoint(tmp_path / "b", layers=3), run="deep")

    found, back = (store.diff_layer(*sides, "model.layers.2") for sides in (("shallow", "deep"), ("deep", "shallow")))

    assert (found.layer.status, back.layer.status) == ("only in b", "only in a")
    assert {of.status for parameter in found.parameters for of in parameter.states.values()} == {"only in b"}
    assert {(of.status, of.relative_l2) for of in back.totals.values()} == {("only in a", None)}
    assert {(parameter.shape_a is None, parameter.shape_b is None) for parameter in found.parameters} == {(True, False)}


def test_frozen_and_trained_parameters_of_one_layer(store: Store, tmp_path: Path) -> None:
    """The frozen one is identical and has no moments; one that is trained later has them on one side only."""
    frozen = f"{BLOCK_0}.mlp.up_proj.weight"
    for step in (2, 4):
        store.ingest(checkpoint(tmp_path, frozen=(frozen,), step=step))
    store.ingest(checkpoint(tmp_path, step=6))

    kept = {each.parameter: each for each in store.diff_layer("sft@2", "sft@4", BLOCK_0).parameters}
    thawed = {each.parameter: each for each in store.diff_layer("sft@4", "sft@6", BLOCK_0).parameters}

    assert [name for name, each in kept.items() if each.frozen] == [frozen]
    assert {state: of.status for state, of in kept[frozen].states.items()} == {"master": "identical"}
    assert {state: of.status for state, of in thawed[frozen].states.items()} == {
        "master": "changed",
        "exp_avg": "only in b",
        "exp_avg_sq": "only in b",
    }
    assert not thawed[frozen].frozen


def test_tied_weights_are_where_their_owner_is(store: Store, tmp_path: Path) -> None:
    """Their other name is told, and whoever asks for it is sent there."""
    for step in (2, 4):
        store.ingest(checkpoint(tmp_path, tied=True, step=step))

    [embedding] = store.diff_layer("sft@2", "sft@4", "model.embed_tokens").parameters

    assert embedding.tied == ("lm_head.weight",)
    with pytest.raises(NotFound, match="no layer 'lm_head' in sft@2 or sft@4") as caught:
        store.diff_layer("sft@2", "sft@4", "lm_head")
    assert caught.value.hint == "its weights are tied to model.embed_tokens.weight: see model.embed_tokens"


def test_without_moments_there_is_nothing_to_compare(store: Store, tmp_path: Path) -> None:
    """A commit whose moments gc has dropped has masters alone."""
    for step in (2, 4):
        store.ingest(checkpoint(tmp_path, step=step))
    store.gc(keep=layerstore.Keep(last=2, drop_optimizer_older_than=1))

    found = store.diff_layer("sft@2", "sft@4", BLOCK_0)

    assert {state: of.status for state, of in found.totals.items()} == {
        "master": "changed",
        "exp_avg": "only in b",
        "exp_avg_sq": "only in b",
    }


def test_parameters_come_by_what_was_asked(store: Store, tmp_path: Path) -> None:
    """By name, or largest first; what cannot be asked for is refused before anything is read."""
    for step in (2, 4):
        store.ingest(checkpoint(tmp_path, step=step))

    def sorted_by(column: str) -> list[Any]:
        return list(store.diff_layer("sft@2", "sft@4", BLOCK_0, sort=column).parameters)

    assert [each.parameter for each in sorted_by("name")] == sorted(each.parameter for each in sorted_by("master"))
    for state in STATES:
        moved = [each.states[state].relative_l2 for each in sorted_by(state)]
        assert moved == sorted(moved, reverse=True)
    assert [each.elements for each in sorted_by("elements")] == sorted(
        (each.elements for each in sorted_by("name")), reverse=True
    )
    master_object(store, "sft@4", BLOCK_0).unlink()
    with pytest.raises(InvalidInput, match="cannot be sorted by 'momentum'"):
        sorted_by("momentum")


def test_it_is_a_line_a_table_and_json(store: Store, tmp_path: Path) -> None:
    """As other results are."""
    for step in (2, 4):
        store.ingest(checkpoint(tmp_path, step=step))
    found = store.diff_layer("sft@2", "sft@4", "model.norm")

    assert repr(found).startswith("<ParametersDiff sft@2 -> sft@4: model.norm changed, parameters 1; master ")
    assert json.loads(json.dumps(json_fields(found)))["totals"].keys() == found.totals.keys()
    pytest.importorskip("pandas")
    assert list(found.to_pandas()["master"]) == ["changed"]
