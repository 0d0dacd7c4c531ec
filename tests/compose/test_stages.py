"""Layers that stages 1, 2 and 3 have cut in their own ways: mixed, compared, averaged and exported all the same."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerstore import Store
from layerstore.errors import Unsupported
from layerstore.history import resolve
from layerstore.states import FragmentContent
from layerstore.tree import with_content
from layerstore.zero3.pt import read_pt
from layerstore.zero3.trees import TreeView, is_dealt
from tests.bench.trees import flat_tensor
from tests.compose.test_world_size import odd_checkpoint, versions
from tests.deepspeed.compare import load
from tests.unit.checkpoints import checkpoint, tensors_of
from tests.zero3.ptfiles import held, write_pt


def changed(folder: Path, change: Callable[[Any], object]) -> Path:
    """Let *change* alter the tree of the model's file in *folder*."""
    path = folder / "global_step2" / "mp_rank_00_model_states.pt"
    tree: Any = read_pt(path).tree
    change(tree)
    write_pt(path.with_name("aside"), tree).rename(path)
    return folder


def model_of(store: Store, ref: str) -> Any:
    """Return the tree of the model's file of a commit, as it is stored."""
    repo = store.repo
    return repo.state(resolve(repo, ref).record.states[0]).model.tree


def masters(store: Store, ref: str) -> dict[str, bytes]:
    """Return every master of a commit, whole."""
    tensors = store.compose(ref).tensors("master")
    return {name: b"".join(bytes(part.data) for part in tensors.parts(name)) for name in tensors}


@pytest.fixture
def staged(store: Store, tmp_path: Path) -> Store:
    """Return a store with the same numbers as runs ``stage1``, ``stage2`` and ``stage3``, two steps of each."""
    for stage in (1, 2, 3):
        for step in (2, 4):
            store.ingest(odd_checkpoint(tmp_path / str(stage), stage=stage, step=step), run=f"stage{stage}")
    return store


def test_masters_are_the_same_whatever_stage_cut_them(staged: Store) -> None:
    """Equal layers are stored once among stages 1 and 2, and cut otherwise under stage 3."""
    assert masters(staged, "stage1@2") == masters(staged, "stage2@2") == masters(staged, "stage3@2")
    assert versions(staged, "stage1@2") == versions(staged, "stage2@2")
    assert dict(versions(staged, "stage2@2")).items().isdisjoint(versions(staged, "stage3@2"))
    for ref in ("stage1@2", "stage2@4"):
        assert staged.verify(ref, read_data=True).ok


def test_a_diff_of_two_stages_is_re_sliced_and_nothing_else(staged: Store) -> None:
    """Numbers are compared element by element."""
    diff = staged.diff("stage2@2", "stage3@2", stat=True)

    for layer in diff.layers:
        assert {kind.status for kind in layer.kinds.values()} == {"re-sliced"}
        assert layer.distance is not None
        assert layer.distance.relative_l2 == 0


@pytest.mark.parametrize("stage", [1, 3])
def test_one_composite_has_layers_of_two_stages(staged: Store, tmp_path: Path, stage: int) -> None:
    """The base's stage is that of the shards; a recipe takes half of the layers from another stage's step."""
    other = 3 if stage == 1 else 1
    recipe = tmp_path / "mix.yaml"
    recipe.write_text(
        f"base: stage{stage}@4\nlayers:\n  model.layers.*: stage{other}@2\nrest: base\n", encoding="utf-8"
    )

    written = staged.compose(recipe=recipe).write(tmp_path / "sft" / "checkpoint-4", world_size=3)

    staged.ingest(written.out, run="mixed")
    expected = masters(staged, f"stage{stage}@4")
    older = masters(staged, f"stage{other}@2")
    expected |= {name: data for name, data in older.items() if name.startswith("model.layers.")}
    assert masters(staged, "mixed") == expected
    names = {path.name for path in (written.out / "global_step4").iterdir()}
    assert ("mp_rank_00_model_states.pt" in names) == (stage == 1)


def test_weights_in_the_models_file_are_of_the_layers(staged: Store, tmp_path: Path) -> None:
    """A composite of two steps has each layer's own weights there, rounded from its masters."""
    out = staged.compose("stage2@4", policy="parity").write(tmp_path / "out").out

    found = load(out / "global_step4" / "mp_rank_00_model_states.pt")["module"]
    exported = staged.compose("stage2@4", policy="parity").state_dict(dtype="bf16")
    assert found.keys() == exported.keys()
    assert all(found[name].equal(exported[name]) for name in found)


def test_an_export_an_average_and_a_mixture_need_no_stage(staged: Store, tmp_path: Path) -> None:
    """What stages 2 and 3 give is the same, byte for byte."""
    for number, stage in enumerate(("stage2", "stage3")):
        staged.compose(f"{stage}@4").export(tmp_path / f"export{number}")
        staged.average("last:2", ref=stage).export(tmp_path / f"mean{number}")
    for name in ("export", "mean"):
        first, second = (tensors_of(tmp_path / f"{name}{number}" / "model.safetensors") for number in range(2))
        assert first == second


def test_a_policy_weighs_what_has_moved(store: Store, tmp_path: Path) -> None:
    """Under every stage by the same amounts."""
    found = []
    for stage in (2, 3):
        run = f"stage{stage}"
        for step in (2, 4):
            store.ingest(odd_checkpoint(tmp_path / run, stage=stage, step=step), run=run, policy="drift")
        found.append(resolve(store.repo, f"{run}@4").record.policy.decisions)

    for measure in ("movements", "weighted_movements"):
        assert found[0][measure] == pytest.approx(found[1][measure])


def test_weights_that_are_not_their_rounded_masters_come_back(store: Store, tmp_path: Path) -> None:
    """As somebody's own code may leave them: they are stored with their layer."""

    def flip(tree: Any) -> None:
        tensor = tree["module"]["model.norm.weight"]
        data = bytearray(held(tensor.storage)[2 * tensor.offset :][: 2 * tensor.elements])
        data[0] ^= 1
        tree["module"]["model.norm.weight"] = with_content(tensor, bytes(data))

    source = changed(checkpoint(tmp_path, stage=2), flip)
    store.ingest(source, run="odd")

    out = store.compose("odd").write(tmp_path / "out").out

    before, after = (load(of / "global_step2" / "mp_rank_00_model_states.pt")["module"] for of in (source, out))
    assert all(before[name].equal(after[name]) for name in before)
    assert dict(store.compose("odd").tensors("weights")).keys() == {"model.norm.weight"}


def test_what_is_no_parameter_stays_as_it_is(store: Store, tmp_path: Path) -> None:
    """Stage 2 says which parameters are frozen; what else a module saves is neither frozen nor emptied."""
    stray = flat_tensor("F32", 3, bytes(range(12)))
    source = changed(checkpoint(tmp_path, stage=2), lambda tree: tree["module"].update({"quantized.absmax": stray}))
    store.ingest(source, run="r")

    out = store.compose("r").write(tmp_path / "out", as_zero3=True).out

    module = load(out / "global_step2" / "zero_pp_rank_0_mp_rank_00_model_states.pt")["module"]
    assert module["quantized.absmax"].numpy().tobytes() == bytes(range(12))
    assert "quantized" not in {line.layer for line in store.ls("r")}


def test_frozen_weights_that_were_copied_are_stored_once(store: Store, tmp_path: Path) -> None:
    """DeepSpeed copies them from a device when it saves them for the second time."""
    name = "model.norm.weight"

    def copy(tree: Any) -> None:
        tensor = tree["frozen_param_fragments"][name]
        tree["frozen_param_fragments"][name] = with_content(tensor, held(tensor.storage))

    store.ingest(changed(checkpoint(tmp_path, stage=2, frozen=("model.norm",)), copy), run="r")

    tree = model_of(store, "r")
    assert tree["module"][name].storage is tree["frozen_param_fragments"][name].storage
    assert isinstance(tree["module"][name].storage.content, FragmentContent)


def test_frozen_weights_that_stage_1_left_out_are_left_out_under_stage_3(store: Store, tmp_path: Path) -> None:
    """DeepSpeed would look for each of them in a map that has none."""
    source = checkpoint(tmp_path, stage=1, frozen=("model.norm",))
    store.ingest(changed(source, lambda tree: tree["module"].pop("model.norm.weight")), run="r")

    out = store.compose("r").write(tmp_path / "out", as_zero3=True).out

    model = load(out / "global_step2" / "zero_pp_rank_1_mp_rank_00_model_states.pt")
    assert (model["frozen_param_shapes"], model["frozen_param_fragments"]) == (None, None)


def test_weights_in_another_order_are_refused(store: Store, tmp_path: Path) -> None:
    """Nothing says how their bytes are to be cut."""

    def turn(tree: Any) -> None:
        tensor = tree["module"]["lm_head.weight"]
        tree["module"]["lm_head.weight"] = replace(tensor, stride=tuple(reversed(tensor.stride)))

    source = changed(checkpoint(tmp_path, stage=1, frozen=("lm_head",)), turn)

    with pytest.raises(Unsupported, match=r"lm_head\.weight' are not stored in the order"):
        store.ingest(source)


def test_only_one_optimizer_deals_parameters_out() -> None:
    """The other one of stage 1 has no stage in its state, and does not look at the setting."""
    model = TreeView({"ds_config": {"zero_optimization": {"round_robin_gradients": True}}}, path=Path("model"))

    assert is_dealt(model, TreeView({"zero_stage": 2}, path=Path("optimizer")))
    assert not is_dealt(model, TreeView({}, path=Path("optimizer")))
