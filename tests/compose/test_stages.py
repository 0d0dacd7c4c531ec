"""Layers that stages 1, 2 and 3 have cut in their own ways: mixed, compared, averaged and exported all the same."""

from pathlib import Path
from typing import Any

import pytest

from layerstore import Store
from layerstore.history import resolve
from layerstore.tree import with_content
from layerstore.zero3.pt import read_pt
from tests.compose.test_world_size import odd_checkpoint, versions
from tests.deepspeed.compare import load
from tests.unit.checkpoints import checkpoint, tensors_of
from tests.zero3.ptfiles import held, write_pt


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
    source = checkpoint(tmp_path, stage=2)
    path = source / "global_step2" / "mp_rank_00_model_states.pt"
    tree: Any = read_pt(path).tree
    tensor = tree["module"]["model.norm.weight"]
    data = bytearray(held(tensor.storage)[2 * tensor.offset :][: 2 * tensor.elements])
    data[0] ^= 1
    tree["module"]["model.norm.weight"] = with_content(tensor, bytes(data))
    write_pt(path.with_name("aside"), tree).rename(path)
    store.ingest(source, run="odd")

    out = store.compose("odd").write(tmp_path / "out").out

    before, after = (load(folder / "global_step2" / path.name)["module"] for folder in (source, out))
    assert all(before[name].equal(after[name]) for name in before)
    assert dict(store.compose("odd").tensors("weights")).keys() == {"model.norm.weight"}
