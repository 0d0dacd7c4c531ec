"""
One test for each fault of LLMTailor's that a composite can have: what was wrong in silence there is right here.

Those that a recipe can bring about are in test_recipe_faults.py; all are listed in docs/internals/known-faults.md.
"""

import json
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from layerstore import Drift, Filter, Parity, Store
from layerstore.disk import NewFile, OpenFile
from layerstore.errors import InvalidInput, NotFound, SourceCheckpoint
from layerstore.limits import RECIPE_BYTES_MAX
from layerstore.model import BlobRef
from layerstore.storage import ObjectStore, RunView
from layerstore.storage.catalog import Catalog
from layerstore.tree import Tree
from tests.bench.shapes import GROUPINGS, ModelShape
from tests.deepspeed.compare import full_tensors, load, raw_bytes
from tests.faults.harness import Recorder, snapshot
from tests.generated import generate
from tests.unit.checkpoints import tensors_of
from tests.zero3.ptfiles import change_tree

MIB = 1 << 20
OLD, NEW = 100, 200
SMALL: dict[str, Any] = {"layers": 4, "hidden": 8, "vocab": 8}
POLICIES = ("parity", "filter", "drift", Parity(fresh="odd"), Filter(first=0, last=0, every=2), Drift(threshold=0.5))


def checkpoint(tmp_path: Path, step: int, **options: Any) -> Path:
    """Write the checkpoint that run ``r`` saves at *step*."""
    return generate(tmp_path / "r" / f"checkpoint-{step}", step=step, **SMALL | options)


def ingested(
    store: Store, tmp_path: Path, *, edit: Callable[[Path, int], object] | None = None, **options: Any
) -> None:
    """Put two checkpoints of run ``r`` into *store*, each as *edit* leaves it."""
    for step in (OLD, NEW):
        folder = checkpoint(tmp_path, step, **options)
        if edit is not None:
            edit(folder, step)
        store.ingest(folder, run="r")


def shards(folder: Path, what: str = "") -> list[Path]:
    """Return the shards below *folder* whose names contain *what*."""
    return sorted(path for path in folder.rglob("*_states.pt") if what in path.name)


def tensors(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return master and moments of every parameter of a checkpoint."""
    return {
        name: {kind: raw_bytes(tensor).tobytes() for kind, tensor in kinds.items()}
        for name, kinds in full_tensors(folder / (folder / "latest").read_text()).items()
    }


# -- which tensors -------------------------------------------------------------------------------------------------

# Names that contain one another, blocks of two stacks, routers, and parameters that no language model's rule knows.
STRANGE: dict[str, tuple[int, ...]] = {
    "visual.patch_embed.proj.weight": (5, 3),
    "visual.blocks.0.norm.weight": (7,),
    "visual.blocks.1.norm.weight": (7,),
    "visual.merger.lm_head.weight": (3, 3),
    "model.embed_tokens.weight": (8, 8),
    "model.embed_tokens_norm.weight": (8,),
    **{f"model.layers.{index}.mlp.router.weight": (5, 3) for index in range(12)},
    **{f"model.layers.{index}.lm_head.norm.weight": (5,) for index in range(12)},
    "model.norm.weight": (8,),
    "model.norm_head.weight": (3, 8),
    "lm_head.weight": (8, 8),
    "lm_head_norm.weight": (8,),
}
OLD_LAYERS = ("visual.blocks.1", "model.embed_tokens", "model.layers.1", "model.norm", "lm_head")


@pytest.fixture
def strange_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checkpoints be made of the strange model's parameters, layer by layer."""
    in_order = sorted(STRANGE.items(), key=lambda item: [int(part) for part in item[0].split(".") if part.isdecimal()])
    monkeypatch.setattr(ModelShape, "_named", lambda shape: iter(in_order))


@pytest.mark.known_fault("llmtailor 1", "llmtailor 2")
@pytest.mark.usefixtures("strange_model")
@pytest.mark.parametrize("sub_group_size", [1, 20, 10**9])
@pytest.mark.parametrize("groups", GROUPINGS)
@pytest.mark.sample(4)
def test_layers_are_told_by_whole_names_in_any_model(
    store: Store, tmp_path: Path, groups: str, sub_group_size: int
) -> None:
    """Two groups or one a layer, however ZeRO cuts them: exactly the layers that were asked for are the old ones."""
    ingested(store, tmp_path, groups=groups, sub_group_size=sub_group_size)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base: {NEW}\nrest: base\nlayers:\n" + "".join(f"  {name}: {OLD}\n" for name in OLD_LAYERS))

    found = tensors(store.compose(recipe=recipe, run="r").write(tmp_path / "out").out)

    old, new = (tensors(tmp_path / "r" / f"checkpoint-{step}") for step in (OLD, NEW))
    is_old = {name for name in STRANGE if name.startswith(tuple(f"{layer}." for layer in OLD_LAYERS))}
    assert len(is_old) == 6
    assert found == {name: old[name] if name in is_old else new[name] for name in STRANGE}
    assert all(old[name] != new[name] for name in STRANGE)


@pytest.mark.known_fault("llmtailor 3", "llmtailor 4", "llmtailor 5")
@pytest.mark.parametrize(("text", "tied"), [('{"architectures": ["NobodyKnowsIt"]}', False), ("{}", True)])
def test_a_config_that_does_not_speak_of_ties_costs_no_layer(
    store: Store, tmp_path: Path, text: str, tied: bool
) -> None:
    """Ties are read from the shards: a tied head is not a layer of its own, and every parameter has its moments."""
    ingested(store, tmp_path, layout="hf", tied=tied, edit=lambda folder, _: (folder / "config.json").write_text(text))

    composite = store.compose("r", policy="parity")
    out = composite.write(tmp_path / "out").out

    found, source = tensors(out), tmp_path / "r" / f"checkpoint-{NEW}"
    assert found.keys() == tensors(source).keys()
    assert ("lm_head" in composite.layers) is not tied
    assert tensors_of(out / "model.safetensors").keys() == tensors_of(source / "model.safetensors").keys()
    shared = load(shards(out, "model_states")[0])["shared_params"]
    assert shared == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    assert ("lm_head.weight" in found) is not tied
    assert {tuple(kinds) for kinds in found.values()} == {("exp_avg", "exp_avg_sq", "master")}
    assert (out / "config.json").read_text() == text


# -- what is beside them -------------------------------------------------------------------------------------------


@pytest.mark.known_fault("llmtailor 6")
@pytest.mark.parametrize("groups", GROUPINGS)
@pytest.mark.parametrize("layout", ["raw", "hf", "accelerate"])
@pytest.mark.sample(4)
def test_the_scheduler_is_the_bases_own_and_whole(store: Store, tmp_path: Path, layout: str, groups: str) -> None:
    """Nothing is spliced: as many entries as the optimizer has groups, each the base's, in the engine or its file."""

    def edit(folder: Path, step: int) -> None:
        """Give every group a rate that tells group and step; what the other source lacks costs nothing."""
        if layout == "hf" and step == OLD:
            return scheduler_file(folder).unlink()
        if layout != "raw":
            return change_tree(scheduler_file(folder), lambda tree: tell(tree, step))
        for path in shards(folder, "model_states"):
            change_tree(path, lambda tree: tell(cast("dict[Tree, Tree]", tree["lr_scheduler"]), step))
        return None

    def tell(tree: dict[Tree, Tree], step: int) -> None:
        tree["_last_lr"] = [step + index / 100 for index, _ in enumerate(cast("list[Tree]", tree["_last_lr"]))]

    ingested(store, tmp_path, layout=layout, groups=groups, edit=edit)

    out = store.compose("r", policy="parity").write(tmp_path / "out").out

    files = shards(out, "model_states") if layout == "raw" else [scheduler_file(out)]
    (optimizer, *_) = (load(path)["optimizer_state_dict"]["optimizer_state_dict"] for path in shards(out, "optim"))
    expected = [NEW + index / 100 for index, _ in enumerate(optimizer["param_groups"])]
    assert len(expected) == (2 if groups == "two" else 11)
    for path in files:
        state = load(path)
        assert (state["lr_scheduler"] if layout == "raw" else state)["_last_lr"] == expected


def scheduler_file(folder: Path) -> Path:
    """Return where Trainer or Accelerate keep the scheduler."""
    return next(folder.glob("scheduler.*"))


@pytest.mark.known_fault("llmtailor 8")
@pytest.mark.parametrize("world_size", [None, 3])
@pytest.mark.parametrize("layout", ["raw", "hf"])
def test_every_counter_says_the_bases_step(store: Store, tmp_path: Path, layout: str, world_size: int | None) -> None:
    """Trainer, engine, scheduler and each sub-group's Adam agree, on every rank, at any number of ranks."""
    ingested(store, tmp_path, layout=layout, groups="layerwise")

    out = store.compose("r", policy="parity").write(tmp_path / "out", world_size=world_size).out

    engines = [load(path) for path in shards(out, "model_states")]
    optimizers = [load(path)["optimizer_state_dict"]["optimizer_state_dict"] for path in shards(out, "optim_states")]
    assert {len(engines), len(optimizers)} == {world_size or 2}
    assert {tree["global_steps"] for tree in engines} == {NEW}
    assert {float(state["step"]) for tree in optimizers for state in tree["state"].values()} == {NEW}
    if layout == "raw":
        assert {tree["lr_scheduler"]["last_epoch"] for tree in engines} == {NEW}
    else:
        assert json.loads((out / "trainer_state.json").read_text())["global_step"] == NEW
        assert load(out / "scheduler.pt")["last_epoch"] == NEW


@pytest.mark.known_fault("llmtailor 14")
def test_all_that_is_no_layer_is_the_bases(store: Store, tmp_path: Path) -> None:
    """Config, tokenizer and DeepSpeed's settings: whichever source was read first or last, and however many."""

    def edit(folder: Path, step: int) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (folder / name).write_text(json.dumps({"of step": step}))
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "of step": step}))
        for path in shards(folder):
            change_tree(path, lambda tree: cast("dict[Tree, Tree]", tree["ds_config"]).update(of_step=step))

    ingested(store, tmp_path, layout="hf", edit=edit)

    for base, policy in ((OLD, "parity"), (NEW, "parity"), (NEW, "filter")):
        out = store.compose(f"r@{base}", policy=policy).write(tmp_path / f"{base}-{policy}").out
        beside = {path.name: path.read_text() for path in out.glob("*.json") if path.name != "layerstore.json"}
        source = tmp_path / "r" / f"checkpoint-{base}"
        assert beside == {path.name: path.read_text() for path in source.glob("*.json")}
        assert {load(path)["ds_config"]["of_step"] for path in shards(out)} == {base}


@pytest.mark.known_fault("llmtailor 14")
@pytest.mark.parametrize("world_size", [None, 1, 3])
def test_keys_that_nobody_knows_survive(store: Store, tmp_path: Path, world_size: int | None) -> None:
    """What another version of DeepSpeed writes, in any of its maps, is in the files of every rank."""
    unknown: Tree = {"added": [1, 2.5, {"deep": (None, True, "text")}]}

    def edit(folder: Path, step: int) -> None:
        for path in shards(folder, "model_states"):
            change_tree(path, lambda tree: tree.update(of_tomorrow=[unknown]))
        for path in shards(folder, "optim_states"):
            change_tree(path, of_tomorrow)

    def of_tomorrow(tree: dict[Tree, Tree]) -> None:
        outer = cast("dict[Tree, dict[Tree, Tree]]", tree)["optimizer_state_dict"]
        inner = cast("dict[Tree, list[dict[Tree, Tree]]]", outer["optimizer_state_dict"])
        for level in (tree, outer, *inner["param_groups"]):
            level["of_tomorrow"] = [unknown]
        # Empty it says nothing; with something in it, ingest refuses by name what it would have to understand.
        outer["ds_zero_partition_groups"] = []

    ingested(store, tmp_path, edit=edit)

    out = store.compose("r", policy="parity").write(tmp_path / "out", world_size=world_size).out

    assert len(shards(out)) == 2 * (world_size or 2)
    for path in shards(out, "model_states"):
        assert load(path)["of_tomorrow"] == [unknown]
    for path in shards(out, "optim_states"):
        tree = load(path)
        outer = tree["optimizer_state_dict"]
        groups = outer["optimizer_state_dict"]["param_groups"]
        assert [level["of_tomorrow"] for level in (tree, outer, *groups)] == [[unknown]] * 4
        assert outer["ds_zero_partition_groups"] == []


# -- which steps ---------------------------------------------------------------------------------------------------


@pytest.mark.known_fault("llmtailor 15")
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.sample(4)
def test_no_layer_is_newer_than_the_base(store: Store, tmp_path: Path, policy: Any, tied: bool) -> None:
    """Also where later saves are in the store, one step away: a composite of step N takes nothing from after it."""
    for step in (4, 6, 1, 3, 5, 2):
        store.ingest(checkpoint(tmp_path, step, tied=tied), run="r")

    for base in range(1, 7):
        steps = {layer: choice.step for layer, choice in store.compose(f"r@{base}", policy=policy).layers.items()}
        assert max(steps.values()) == base
        assert ("lm_head" in steps) is not tied


@pytest.mark.known_fault("llmtailor 13")
def test_a_recipe_of_a_checkpoint_without_shards_is_one_clear_message(store: Store, tmp_path: Path) -> None:
    """It cannot be ingested, and the recipe that names it says where, which step is missing and what to do."""
    ingested(store, tmp_path, layout="hf")
    shutil.rmtree(checkpoint(tmp_path, 150, layout="hf") / "global_step150")
    with pytest.raises(SourceCheckpoint, match="global_step150"):
        store.ingest(tmp_path / "r" / "checkpoint-150", run="r")
    recipe = tmp_path / "recipe.yaml"
    ranges = [(NEW, 0, 0), (NEW, 0, 2), (150, 2, 4), (NEW, 5, 5), (NEW, 6, 6)]
    recipe.write_text(
        "merge_method: passthrough\nslices:\n"
        + "".join(
            f"  - {{sources: [{{model: r/checkpoint-{step}, layer_range: [{a}, {b}]}}]}}\n" for step, a, b in ranges
        )
    )

    with pytest.raises(NotFound, match=r"recipe\.yaml:5:24: run 'r' has no step 150") as caught:
        store.compose(recipe=recipe, run="r")

    assert "layerstore ingest r/checkpoint-150" in str(caught.value.hint)


@pytest.mark.fault(76)
def test_the_size_of_a_recipe_is_bounded(store: Store, tmp_path: Path) -> None:
    """A file of another kind is not parsed for minutes first."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_bytes(b"#" * (RECIPE_BYTES_MAX + 1))

    with pytest.raises(InvalidInput, match=f"the recipe cannot be read: .*at most {RECIPE_BYTES_MAX} were expected"):
        store.compose(recipe=recipe)


# -- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.known_fault("llmtailor 7")
@pytest.mark.parametrize("verb", ["write", "export"])
def test_composing_changes_no_source(store: Store, tmp_path: Path, verb: str) -> None:
    """Neither the checkpoints nor the objects, not even when every file of the composite is written over."""
    ingested(store, tmp_path, layout="hf")
    before = snapshot(tmp_path / "r"), snapshot(store.path / "objects")

    composite = store.compose("r", policy="parity")
    out = composite.write(tmp_path / "out").out if verb == "write" else composite.export(tmp_path / "out").out
    files = [path for path in out.rglob("*") if path.is_file()]
    for path in files:
        with path.open("r+b") as file:
            file.write(b"changed in place")

    assert {path.stat().st_nlink for path in files} == {1}
    assert before == (snapshot(tmp_path / "r"), snapshot(store.path / "objects"))


@pytest.mark.known_fault("llmtailor 9")
def test_nothing_of_an_older_composite_is_left_in_the_folder(store: Store, tmp_path: Path) -> None:
    """Another step of more ranks, written over: no shard, tag, random state or counter of the old one is there."""
    ingested(store, tmp_path, layout="hf")
    out = tmp_path / "out"
    store.compose(f"r@{OLD}").write(out, world_size=4)

    store.compose(f"r@{NEW}").write(out, force=True)
    store.compose(f"r@{NEW}").write(tmp_path / "fresh")

    assert snapshot(out) == snapshot(tmp_path / "fresh")
    assert (out / "latest").read_text() == f"global_step{NEW}"


@pytest.mark.known_fault("llmtailor 10")
def test_latest_comes_after_the_shards_and_the_folder_last_of_all(store: Store, tmp_path: Path) -> None:
    """Nothing is at the target before one rename, and by then every file is synced; ``latest`` follows the shards."""
    ingested(store, tmp_path, layout="hf")
    calls = Recorder()
    with Store(store.path, hook=calls) as hooked:
        hooked.compose("r", policy="parity").write(tmp_path / "out")

    steps = [(call.operation, path) for call, path in calls.paths if tmp_path / "store" not in path.parents]
    (end,) = (at for at, (operation, _) in enumerate(steps) if operation == "rename")
    synced = [path for operation, path in steps[:end] if operation == "fsync"]
    written = {path for operation, path in steps if operation in {"create", "write", "copy", "truncate"}}
    assert {path.name for path in written} == {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert written <= {*synced}
    (latest,) = (path for path in written if path.name == "latest")
    begun = steps.index(("create", latest))
    assert not [path for operation, path in steps[begun:] if path in written and path.name.endswith(".pt")]
    assert not [path for _, path in steps[:end] if tmp_path / "out" in (path, *path.parents)]
    assert steps[end + 1 :] == [("fsync", tmp_path)]


# -- what it costs -------------------------------------------------------------------------------------------------


class Costs:
    """What composing reads and copies; it is the progress of a write, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verified: Counter[str] = Counter()
        self.copied: Counter[tuple[str, int]] = Counter()
        """Words of four bytes that the kernel copies, each by its object and place."""
        self.bytes_needed = 0
        self.bytes_moved = 0
        verify, copy = ObjectStore.verify, NewFile.copy_from

        def counted_verify(store: ObjectStore, ref: BlobRef) -> None:
            self.verified[ref.id] += 1
            verify(store, ref)

        def counted_copy(file: NewFile, source: OpenFile, source_offset: int, offset: int, size_bytes: int) -> None:
            for start in range(source_offset, source_offset + size_bytes, 4):
                self.copied[source.path.name, start] += 1
            copy(file, source, source_offset, offset, size_bytes)

        monkeypatch.setattr(ObjectStore, "verify", counted_verify)
        monkeypatch.setattr(NewFile, "copy_from", counted_copy)

    def start(self, what: str, total_bytes: int) -> None:
        """Note what all chosen layers have."""
        self.bytes_needed += total_bytes

    def advance(self, size_bytes: int) -> None:
        """Note what was moved."""
        self.bytes_moved += size_bytes


def mixture(tmp_path: Path, sources: int) -> Path:
    """Write a recipe that takes the four blocks from so many steps."""
    recipe = tmp_path / f"{sources}.yaml"
    layers = "".join(f"  model.layers.{index}: {4 - index % sources}\n" for index in range(4))
    recipe.write_text(f"base: 4\nrest: base\nlayers:\n{layers}")
    return recipe


def test_a_recipe_looks_at_each_run_once(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of its commits give layers."""
    for step in (1, 2, 3, 4):
        store.ingest(checkpoint(tmp_path, step), run="r")
    looks: list[str] = []
    view = Catalog.view

    def counted(catalog: Catalog, run: str) -> RunView:
        looks.append(run)
        return view(catalog, run)

    monkeypatch.setattr(Catalog, "view", counted)
    costs = []
    for sources in (1, 4):
        looks.clear()
        store.compose(recipe=mixture(tmp_path, sources), run="r")
        costs.append(len(looks))

    assert costs[0] == costs[1]


@pytest.mark.known_fault("llmtailor 17")
@pytest.mark.parametrize("groups", GROUPINGS)
@pytest.mark.parametrize("world_size", [None, 2, 5])
@pytest.mark.sample(3)
def test_each_needed_byte_is_read_once_however_many_sources(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, world_size: int | None
) -> None:
    """Every object is verified once and each element moved once, for all ranks: four sources cost what one costs."""
    for step in (1, 2, 3, 4):
        store.ingest(checkpoint(tmp_path, step, groups=groups, world_size=3), run="r")
    costs = []
    for sources in (1, 2, 4):
        with monkeypatch.context() as patch:
            costs.append(Costs(patch))
            composite = store.compose(recipe=mixture(tmp_path, sources), run="r")
            assert len({choice.step for choice in composite.layers.values()}) == sources
            out = composite.write(tmp_path / f"out-{sources}", world_size=world_size, progress=costs[-1]).out

    bytes_held = sum(len(data) for kinds in tensors(out).values() for data in kinds.values())
    for cost in costs:
        assert {*cost.verified.values()} == {*cost.copied.values()} == {1}
        assert cost.bytes_moved == cost.bytes_needed == bytes_held
        # Slices that are cut for other ranks pass through memory instead.
        assert 4 * len(cost.copied) == bytes_held or world_size is not None
    assert len({len(cost.verified) for cost in costs}) == 1


@pytest.mark.full
@pytest.mark.fault(26)
@pytest.mark.known_fault("llmtailor 17")
@pytest.mark.parametrize("world_size", [None, 3])
def test_memory_does_not_grow_with_the_number_of_sources(store: Store, tmp_path: Path, world_size: int | None) -> None:
    """A few chunks are in memory, whatever the size of the checkpoint and however many it is made from."""
    for step in (1, 2, 3, 4):
        folder = checkpoint(tmp_path, step, hidden=192)
        store.ingest(folder, run="r")
        shutil.rmtree(folder)
    peaks = {}
    for sources in (1, 4):
        composite = store.compose(recipe=mixture(tmp_path, sources), run="r")
        tracemalloc.start()
        written = composite.write(tmp_path / f"out-{sources}", world_size=world_size, durable=False)
        peaks[sources] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert written.bytes_written > 20 * MIB

    assert peaks[4] < peaks[1] + MIB
    assert max(peaks.values()) < 8 * MIB
