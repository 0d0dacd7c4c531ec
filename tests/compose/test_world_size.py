"""Promises of composites for other numbers of ranks than saved them, end to end on generated checkpoints."""

import struct
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstore import Composite, Store
from layerstore.errors import InvalidInput, LayoutMismatch
from layerstore.format import Plain, encode_tree, pack
from layerstore.storage import Repository
from layerstore.tree import Tensor, Tree, replace_tensors, with_content
from layerstore.zero3.pt import read_pt
from layerstore.zero3.reshard.sub_groups import sub_groups
from tests.compose.test_hf import mixed
from tests.deepspeed.compare import load
from tests.unit.checkpoints import checkpoint, digests

# Every shape of a checkpoint, in sizes that divide by nothing.
SHAPES: dict[str, dict[str, Any]] = {
    "two groups": {"layout": "hf"},
    "many sub-groups": {"sub_group_size": 300},
    "a sub-group per parameter": {"sub_group_size": 1, "groups": "layerwise"},
    "blocks first": {"groups": "layerwise_blocks_first", "sub_group_size": 500},
    "tied": {"tied": True, "layout": "hf"},
    "frozen": {"frozen": ("model.layers.0", "model.norm"), "layout": "hf"},
    "fp16": {"precision": "fp16", "layout": "hf"},
    "fp32": {"precision": "fp32", "layout": "hf"},
    "accelerate": {"layout": "accelerate"},
    "stage 1": {"stage": 1, "tied": True, "precision": "fp32"},
    "stage 2": {"stage": 2, "layout": "hf", "frozen": ("model.layers.0", "model.norm")},
}
SIZES = [(2, 3), (2, 1), (2, 4), (1, 8), (8, 1), (3, 2), (1, 40)]
"""One for another, whole slices put together or halved, and some that leave whole ranks nothing but padding."""

USUAL_SHAPE, USUAL_SIZES = "many sub-groups", (2, 3)

# What the run so far has written down, whatever size it goes on at.
OF_THE_PAST = {"global_samples"}


def odd_checkpoint(folder: Path, **options: Any) -> Path:
    """Write a small checkpoint of run ``sft`` whose sizes divide by nothing."""
    return checkpoint(folder, **{"hidden": 18, "vocab": 37} | options)


def trees(folder: Path, leave_out: Collection[str] = ()) -> dict[str, bytes]:
    """Return every shard's tree below *folder* by path: shapes, scalars and small tensors, but no slices or marks."""

    def small(content: object) -> Plain:
        return content if isinstance(content, bytes) else None

    def image(path: Path) -> bytes:
        tree: Tree = read_pt(path).tree
        assert isinstance(tree, dict)
        kept: Tree = {key: value for key, value in tree.items() if key not in OF_THE_PAST.union(leave_out)}
        # DeepSpeed's ds_id, which nothing reads, is left out at other world sizes; views get memory of their own.
        unmarked = replace_tensors(
            kept, lambda tensor: with_content(replace(tensor, attributes=None), tensor.storage.content)
        )
        return pack(encode_tree(unmarked, content_to_plain=small))

    return {path.relative_to(folder).as_posix(): image(path) for path in sorted(folder.rglob("*_states.pt"))}


def versions(store: Store, ref: str) -> list[tuple[str, str]]:
    """Return the id of each layer's version: equal ones have equal bytes in every slice."""
    return [(line.layer, line.version) for line in store.ls(ref)]


def plain(name: str) -> bool:
    """Whether a file is neither a shard nor a rank's random state."""
    return not name.endswith("_states.pt") and not Path(name).name.startswith(("rng_state", "random_states"))


def every_shape_and_size() -> Iterator[Any]:
    """Yield all pairs; those in which both are unusual only for the full matrix."""
    for (name, shape), sizes in product(SHAPES.items(), SIZES):
        is_sample = name == USUAL_SHAPE or sizes == USUAL_SIZES
        yield pytest.param(
            shape, *sizes, id=f"{name}-{sizes[0]}-{sizes[1]}", marks=() if is_sample else pytest.mark.exhaustive
        )


@pytest.mark.known_fault("llmtailor 11")
@pytest.mark.parametrize(("shape", "before", "after"), list(every_shape_and_size()))
@pytest.mark.sample(6)
def test_a_composite_for_other_ranks_is_what_these_would_have_saved(
    store: Store, tmp_path: Path, shape: dict[str, Any], before: int, after: int
) -> None:
    """
    Every slice, tree, name and gathered weight is that of a run at the new size.

    The numbers of a generated checkpoint do not depend on its ranks, so the same one at the new size tells.
    Ingest checks every storage against the checksum that its archive states.
    """
    expected = odd_checkpoint(tmp_path / "expected", world_size=after, **shape)
    store.ingest(odd_checkpoint(tmp_path, world_size=before, **shape))

    written = store.compose("sft").write(tmp_path / "out" / "sft" / "checkpoint-2", world_size=after)

    assert (after, expected.name) == (written.world_size, written.out.name)
    store.ingest(expected, run="expected")
    store.ingest(written.out, run="composite")
    assert versions(store, "expected") == versions(store, "composite")
    assert trees(expected) == trees(written.out)
    beside = [{name: digest for name, digest in digests(of).items() if plain(name)} for of in (expected, written.out)]
    assert beside[0] == beside[1]


@pytest.mark.parametrize(
    ("shape", "stage", "after"), [("tied", 1, 2), ("frozen", 2, 2), ("fp16", 2, 3), ("fp32", 1, 1)]
)
def test_as_zero3_it_is_what_stage_3_would_have_saved(
    store: Store, tmp_path: Path, shape: str, stage: int, after: int
) -> None:
    """The numbers of a generated checkpoint do not depend on its stage, either."""
    expected = odd_checkpoint(tmp_path / "expected", world_size=after, **SHAPES[shape])
    store.ingest(odd_checkpoint(tmp_path, stage=stage, **SHAPES[shape]))

    written = store.compose("sft").write(tmp_path / "out" / "sft" / "checkpoint-2", world_size=after, as_zero3=True)

    assert "converted to ZeRO-3 with sub_group_size 1000000000" in " ".join(written.notes)
    store.ingest(expected, run="expected")
    store.ingest(written.out, run="composite")
    assert versions(store, "expected") == versions(store, "composite")
    # Stage 1 does not say whether frozen parameters were left out or there are none: the former loads as the latter.
    odd = {"ds_config", *(("frozen_param_shapes", "frozen_param_fragments") if stage == 1 else ())}
    assert trees(expected, odd) == trees(written.out, odd)
    beside = [{name: digest for name, digest in digests(of).items() if plain(name)} for of in (expected, written.out)]
    assert beside[0] == beside[1]
    assert (written.out / "rng_state_1.pth").exists() == (after == 2)


def test_archives_of_cut_slices_state_their_checksums(store: Store, tmp_path: Path) -> None:
    """Whoever unzips a shard finds every byte as its directory says."""
    store.ingest(odd_checkpoint(tmp_path))
    out = store.compose("sft").write(tmp_path / "out", world_size=3).out

    assert [zipfile.ZipFile(path).testzip() for path in sorted(out.rglob("*.pt"))] == [None] * 6


def test_the_bases_own_size_changes_nothing(store: Store, tmp_path: Path) -> None:
    """Asked for or not, it is the same files, random states included, and there is nothing to note."""
    store.ingest(odd_checkpoint(tmp_path, layout="hf", sub_group_size=300))
    composite = store.compose("sft")

    by_default, asked = composite.write(tmp_path / "a"), composite.write(tmp_path / "b", world_size=2)

    assert digests(by_default.out) == digests(asked.out)
    assert () == by_default.notes == asked.notes == composite.plan().notes
    assert (by_default.out / "rng_state_1.pth").exists()


# -- layers that were stored by different numbers of ranks ---------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_layers_may_come_from_different_world_sizes(store: Store, tmp_path: Path, world_size: int) -> None:
    """One composite has layers that two ranks have saved and layers that three have, at any size."""
    store.ingest(odd_checkpoint(tmp_path / "a", step=4, layout="hf", frozen=("model.layers.1",)), run="two")
    older = odd_checkpoint(tmp_path / "b", step=2, world_size=3, layout="hf", frozen=("model.layers.1",))
    store.ingest(older, run="three")

    written = mixed(store, "two", "three").write(tmp_path / "out", world_size=world_size, durable=False)

    store.ingest(written.out, run="composite")
    for step, run in ((4, "two"), (2, "three")):
        again = odd_checkpoint(
            tmp_path / run, step=step, world_size=world_size, layout="hf", frozen=("model.layers.1",)
        )
        store.ingest(again, run=f"{run}-again")
    newer, older_ones = dict(versions(store, "two-again")), dict(versions(store, "three-again"))
    expected = [
        (layer, older_ones[layer] if "layers" in layer else newer[layer]) for layer, _ in versions(store, "composite")
    ]
    assert expected == versions(store, "composite")


@pytest.mark.parametrize(
    ("layer", "ours", "theirs", "match"),
    [
        ("model.norm", {}, {"hidden": 20}, r"model\.norm of three@2 does not fit two@2: .* is BF16 20, .* BF16 18"),
        (
            "model.layers.0",
            {"frozen": ("model.layers.0",)},
            {"frozen": ("model.layers.0",), "precision": "fp16"},
            r"model\.layers\.0 .* is F16 .*, in the base BF16",
        ),
    ],
)
def test_layers_of_another_model_are_named(
    store: Store, tmp_path: Path, layer: str, ours: dict[str, Any], theirs: dict[str, Any], match: str
) -> None:
    """Of another shape, or of another type of as many bytes: the parameter is named and nothing is left behind."""
    store.ingest(odd_checkpoint(tmp_path / "a", **ours), run="two")
    store.ingest(odd_checkpoint(tmp_path / "b", world_size=3, **theirs), run="three")

    with pytest.raises(LayoutMismatch, match=match):
        mixed(store, "two", "three", lambda each: each == layer).write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- what is said, and what is refused -----------------------------------------------------------------------------


def change_states(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Let every rank's state be read as *change* leaves it."""
    read = Repository.state
    monkeypatch.setattr(Repository, "state", lambda self, ref: change(read(self, ref)))


def test_random_states_are_left_out_and_named(store: Store, tmp_path: Path) -> None:
    """None of them is kept for some ranks only: the composite can be ingested as any whole checkpoint."""
    store.ingest(odd_checkpoint(tmp_path, layout="hf"))
    written = store.compose("sft").write(tmp_path / "out", world_size=3)

    assert not list(written.out.glob("rng_state*"))
    assert [note for note in written.notes if note.startswith("the random states of 2 ranks are left out")]
    assert store.ingest(written.out, run="again").is_new


def test_the_factor_of_the_global_batch_is_noted(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where DeepSpeed was given a path instead of a config, which a note of its own says."""
    store.ingest(odd_checkpoint(tmp_path))
    with_config = store.compose("sft").plan(world_size=3).notes

    def with_path(state: Any) -> Any:
        return replace(state, model=replace(state.model, tree={**state.model.tree, "ds_config": "config.json"}))

    change_states(monkeypatch, with_path)
    with_path_only = store.compose("sft").plan(world_size=3).notes

    assert "with 3 ranks instead of 2 it is 1.5 times what it was" in with_config[-1]
    assert with_config[-1] == with_path_only[-1]
    assert [note for note in with_path_only if note.startswith("DeepSpeed's config is not in the checkpoint")]


def test_values_that_differ_between_ranks_are_noted(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New ranks get rank 0's, dropped ranks' own are gone; the GPU that each rank saved from is not a difference."""
    store.ingest(odd_checkpoint(tmp_path))

    def with_own_values(state: Any) -> Any:
        def moved(tensor: Tensor) -> Tensor:
            return replace(tensor, storage=replace(tensor.storage, device=f"cuda:{state.rank}"))

        model, optimizer = (replace_tensors(file.tree, moved) for file in (state.model, state.optimizer))
        assert isinstance(model, dict)
        return replace(
            state,
            model=replace(state.model, tree={**model, "mine": f"of rank {state.rank}"}),
            optimizer=replace(state.optimizer, tree=optimizer),
        )

    change_states(monkeypatch, with_own_values)
    composite = store.compose("sft")

    noted = [[note for note in composite.plan(world_size=size).notes if "different" in note] for size in (1, 3)]
    assert noted == [
        ["the ranks saved different values of 'mine': the values of ranks 1 and up are left out"],
        ["the ranks saved different values of 'mine': ranks 2 and up get the values of rank 0"],
    ]
    assert composite.write(tmp_path / "out", world_size=3).world_size == 3


@pytest.mark.parametrize(
    ("options", "match"),
    [({"world_size": 0}, "0 ranks"), ({"world_size": 1_000_000}, "1000000 ranks"), ({"adam_step": "mine"}, "'mine'")],
)
def test_what_cannot_be_meant_is_refused(store: Store, tmp_path: Path, options: Any, match: str) -> None:
    """A wrong argument is an error before anything is written."""
    store.ingest(odd_checkpoint(tmp_path))

    with pytest.raises(InvalidInput, match=match):
        store.compose("sft").write(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


# -- sub-groups ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(0, 60))
def test_sub_groups_are_closed_as_soon_as_they_are_full(lengths: list[int], size: int) -> None:
    """They follow each other; only the last may hold less than the limit, and no other holds one parameter too many."""
    found = list(sub_groups(lengths, size=size))

    assert [index for chosen in found for index in chosen] == list(range(len(lengths)))
    held = [sum(lengths[index] for index in chosen) for chosen in found]
    if sum(lengths) <= size:
        assert len(found) <= 1
    else:
        assert all(total >= size for total in held[:-1])
        assert all(sum(lengths[index] for index in chosen[:-1]) < size for chosen in found if len(chosen) > 1)


Change = Callable[[dict[Any, Any], dict[Any, Any]], object]
"""Alters the tree of a rank's model_states, and the optimizer's own state in the other file."""


def change_trees(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Let every rank's trees be read as *change* leaves them."""

    def changed(state: Any) -> Any:
        change(state.model.tree, state.optimizer.tree["optimizer_state_dict"]["optimizer_state_dict"])
        return state

    change_states(monkeypatch, changed)


def count_apart(model: dict[Any, Any], optimizer: dict[Any, Any]) -> None:
    """Let the second sub-group have counted more updates."""
    optimizer["state"][1]["step"] = with_content(optimizer["state"][1]["step"], struct.pack("<f", 9))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda model, optimizer: model["ds_config"]["zero_optimization"].update(sub_group_size=1e9),
            "param group 0 was saved in .* sub-groups, but sub_group_size 1000000000 makes 1",
        ),
        (count_apart, "sub-groups 0 and 1 of param group 0 differ in 'step'"),
        (lambda model, optimizer: optimizer["state"][1].update(step=4), "sub-groups 0 and 1 .* differ in 'step'"),
        (lambda model, optimizer: optimizer["param_groups"][-1].update(params=[]), "the param groups do not share"),
    ],
)
def test_sub_groups_that_cannot_be_made_anew_are_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, match: str
) -> None:
    """The config does not explain them, their counters differ in value or type, or they belong to no param group."""
    store.ingest(odd_checkpoint(tmp_path, sub_group_size=300))
    change_trees(monkeypatch, change)

    with pytest.raises(LayoutMismatch, match=match):
        store.compose("sft").write(tmp_path / "out", world_size=3)
    assert not (tmp_path / "out").exists()


def test_a_state_before_the_first_update_stays_empty(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No moments are made up."""
    store.ingest(odd_checkpoint(tmp_path))
    change_trees(monkeypatch, lambda model, optimizer: optimizer["state"].clear())

    out = store.compose("sft").write(tmp_path / "out", world_size=3).out

    trees = [load(path)["optimizer_state_dict"]["optimizer_state_dict"] for path in out.rglob("*optim_states.pt")]
    assert [tree["state"] for tree in trees] == [{}] * 3


# -- each layer's own optimizer step -------------------------------------------------------------------------------


def steps_of(folder: Path) -> dict[str, float]:
    """Return the counter of each parameter's sub-group, as torch reads it."""
    optimizer, model = (load(next(folder.rglob(f"*rank_0_*{what}_states.pt"))) for what in ("optim", "model"))
    states, shapes = optimizer["optimizer_state_dict"]["optimizer_state_dict"]["state"], model["param_shapes"]
    return {name: float(states[group]["step"]) for group, names in enumerate(shapes) for name in names}


@pytest.mark.known_fault("llmtailor 8")
def test_each_layer_keeps_its_own_step_where_groups_allow(store: Store, tmp_path: Path) -> None:
    """With a param group per layer, a layer of step 2 in a composite of step 4 counts from 2 on; unify says 4."""
    store.ingest(odd_checkpoint(tmp_path / "a", step=4, groups="layerwise"), run="two")
    store.ingest(odd_checkpoint(tmp_path / "b", step=2, groups="layerwise", world_size=3), run="three")
    composite = mixed(store, "two", "three", lambda layer: layer == "model.layers.1")

    composite.write(tmp_path / "unify", world_size=3, durable=False)
    composite.write(tmp_path / "own", world_size=3, durable=False, adam_step="per-layer")

    assert {4.0} == set(steps_of(tmp_path / "unify").values())
    own = steps_of(tmp_path / "own")
    assert own == {name: 2.0 if "layers.1" in name else 4.0 for name in own}


def test_a_counter_keeps_its_type_and_an_optimizer_without_one_needs_none(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An int stays one; plain momentum counts nothing; a version that was counted differently has no count to set."""
    store.ingest(odd_checkpoint(tmp_path / "a", step=4, groups="layerwise"), run="two")
    store.ingest(odd_checkpoint(tmp_path / "b", step=2, groups="layerwise"), run="three")
    composite = mixed(store, "two", "three", lambda layer: layer == "model.layers.1")
    layers = tuple(replace(entry, optimizer_step=None) for entry in composite.composition.layers)

    with pytest.raises(LayoutMismatch, match="has no optimizer step of its own"):
        Composite(store.repo, replace(composite.composition, layers=layers)).plan(adam_step="per-layer")

    with monkeypatch.context() as patch:
        change_trees(patch, lambda _, optimizer: [state.update(step=4) for state in optimizer["state"].values()])
        composite.write(tmp_path / "integers", adam_step="per-layer")
    with monkeypatch.context() as patch:
        change_trees(patch, lambda _, optimizer: [state.pop("step") for state in optimizer["state"].values()])
        out = composite.write(tmp_path / "none", adam_step="per-layer").out

    integers = load(next((tmp_path / "integers").rglob("*rank_0_*optim_states.pt")))
    states = integers["optimizer_state_dict"]["optimizer_state_dict"]["state"].values()
    assert {type(state["step"]) for state in states} == {int}
    assert {2.0, 4.0} == set(steps_of(tmp_path / "integers").values())
    without = load(next(out.rglob("*rank_0_*optim_states.pt")))["optimizer_state_dict"]["optimizer_state_dict"]
    assert not any("step" in state for state in without["state"].values())


@pytest.mark.known_fault("llmtailor 8")
def test_layers_that_share_a_counter_cannot_keep_their_own(store: Store, tmp_path: Path) -> None:
    """Under two param groups the error names two layers, their steps and the way out; nothing is written."""
    store.ingest(odd_checkpoint(tmp_path / "a", step=4), run="two")
    store.ingest(odd_checkpoint(tmp_path / "b", step=2), run="three")
    composite = mixed(store, "two", "three", lambda layer: layer == "model.layers.1")

    both = r"\(optimizer step 4\) and 'model\.layers\.1' \(optimizer step 2\)"
    with pytest.raises(LayoutMismatch, match=both) as caught:
        composite.write(tmp_path / "out", adam_step="per-layer")
    assert "--adam-step unify" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()
