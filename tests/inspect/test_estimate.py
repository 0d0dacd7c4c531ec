"""An estimate says what a real run would store, and refuses what it cannot know."""

import json
from collections.abc import Mapping
from fractions import Fraction
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import layerstore
from layerstore import Drift, Filter, Keep, Latest, Parity
from layerstore.errors import InvalidInput, SourceCheckpoint
from layerstore.inspect import Model, Training, estimate_saves, made_up, model_at, model_of_commit
from layerstore.inspect.estimate import due_sets, trained_bytes
from layerstore.inspect.model_shapes import model_of_shapes
from layerstore.policy import Policy
from layerstore.precision import PrecisionName
from layerstore.zero3 import Pointer, pointer_bytes
from tests.bench.published import models
from tests.bench.shapes import ModelShape
from tests.generated import generate

SHAPE: dict[str, Any] = {"layers": 7, "hidden": 64, "vocab": 101, "world_size": 3}
SAVES = 10
BESIDE_SHARE_MAX = 0.05
"""Of a tiny save: version blobs and states of ranks, which an estimate leaves out."""

CONFIG = json.dumps({"model_type": "llama", "vocab_size": 97})
POLICIES: dict[str, Policy] = {"full": Latest(), "parity": Parity(), "filter": Filter(first=1, last=1, every=3)}


def seen_at(path: Path) -> Model:
    """Return the model at *path*, of which every config describes one parameter."""
    return model_at(path, ask_transformers=lambda config: (("lm_head.weight", (config["vocab_size"], 2)),))


def training(**changed: Any) -> Training:
    """Return a training with round numbers."""
    usual: dict[str, Any] = {
        "world_size": 8,
        "steps": 1000,
        "every": 10,
        "step_seconds": 10.0,
        "bytes_per_second": 1e9,
        "copy_bytes_per_second": 1e10,
        "disk_bytes": 10**13,
    }
    return Training(**usual | changed)


def by_policy(found: dict[str, Any]) -> dict[str, Any]:
    """Return the lines of layerstore's own saves."""
    return {line["policy"]: line for line in found["lines"] if line["policy"] is not None}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return where a config goes."""
    return tmp_path / "config.json"


# -- what a run would store ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a save folder with a tag for every step."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in range(1, SAVES + 1):
        generate(folder, step=step, seed=step, **SHAPE)
    return folder


@pytest.mark.parametrize("policy", POLICIES)
def test_the_bytes_are_those_that_a_real_run_stores(policy: str, checkpoints: Path, tmp_path: Path) -> None:
    """Objects to the byte, over the run and at every save but for what lies beside them."""
    shape = ModelShape(intermediate=3 * SHAPE["hidden"], **SHAPE)
    model = model_of_shapes("tiny", [(of.name, of.shape) for of in shape.parameters()])
    found = estimate_saves(model, training(world_size=3, steps=SAVES, every=1), {policy: POLICIES[policy]})
    line = by_policy(found)[policy]
    with layerstore.init(tmp_path / "store") as store:
        new = [
            store.ingest(checkpoints, run="r", tag=f"global_step{step}", policy=POLICIES[policy]).bytes_new
            for step in range(1, SAVES + 1)
        ]
        kinds = store.stats("r").kinds

    stored = kinds["master"].unique_bytes + kinds["optimizer"].unique_bytes
    assert line["run_bytes"] == stored
    assert sum(kind.unique_bytes for kind in kinds.values()) == pytest.approx(stored, rel=BESIDE_SHARE_MAX)
    assert new[0] == pytest.approx(line["first_bytes"], rel=BESIDE_SHARE_MAX)
    assert max(new[1:]) == pytest.approx(line["largest_bytes"], rel=BESIDE_SHARE_MAX)


@pytest.mark.full
@pytest.mark.parametrize(("policy", "precision", "every"), [("full", "delta4", None), ("parity", "delta8", 3)])
def test_the_bytes_of_compact_saves_are_those_that_a_real_run_stores(
    policy: str, precision: PrecisionName, every: int | None, checkpoints: Path, tmp_path: Path
) -> None:
    """To the byte, keyframes included, also where a policy leaves layers out."""
    shape = ModelShape(intermediate=3 * SHAPE["hidden"], **SHAPE)
    model = model_of_shapes("tiny", [(of.name, of.shape) for of in shape.parameters()])
    kept = {"precision": precision, "exact_every": every}
    found = estimate_saves(model, training(world_size=3, steps=SAVES, every=1, **kept), {policy: POLICIES[policy]})
    with layerstore.init(tmp_path / "store") as store:
        for step in range(1, SAVES + 1):
            words: dict[str, Any] = {"policy": POLICIES[policy], **kept}
            store.ingest(checkpoints, run="r", tag=f"global_step{step}", **words)
        kinds = store.stats("r").kinds

    assert by_policy(found)[policy]["run_bytes"] == kinds["master"].unique_bytes + kinds["optimizer"].unique_bytes
    assert any(f"the others are in {precision}" in text for text in found["assumptions"])


@pytest.mark.parametrize(
    ("policy", "kept", "steps"),
    [
        ("full", {"precision": "delta4"}, 60),
        ("full", {"precision": "delta8"}, 10),
        ("full", {"precision": "delta8", "exact_every": 3}, 20),
        ("parity", {"precision": "delta8"}, 20),
    ],
)
def test_a_run_may_end_before_its_first_keyframe(policy: str, kept: dict[str, Any], steps: int) -> None:
    """Only what was saved is paid, and held: a longer run holds more."""
    short, longer = (
        by_policy(estimate_saves(made_up(10**9, 4), training(steps=count, **kept), {policy: POLICIES[policy]}))[policy]
        for count in (steps, steps + 300)
    )

    assert 0 < short["held_bytes"] == short["run_bytes"] < longer["held_bytes"]


@pytest.mark.parametrize("frozen", [(), ("model.layers.0", "lm_head")], ids=["all trained", "some frozen"])
def test_a_checkpoint_and_its_commit_tell_what_they_take(frozen: tuple[str, ...], tmp_path: Path) -> None:
    """Headers alone say what objects the store has of it, to the byte, and how many ranks there were."""
    folder = generate(tmp_path / "sft" / "checkpoint-7", step=7, layout="hf", frozen=frozen, **SHAPE)
    with layerstore.init(tmp_path / "store") as store:
        store.ingest(folder)
        kinds = store.stats().kinds
        stored = model_of_commit(store.repo, "sft@7")
    seen = seen_at(folder)
    stored_bytes = sum(kinds[kind].unique_bytes for kind in ("master", "optimizer", "weights"))

    for model, name in ((seen, "checkpoint-7"), (stored, "sft@7")):
        found = estimate_saves(model, training(world_size=model.world_size), POLICIES)
        later = kinds["master"].unique_bytes + kinds["optimizer"].unique_bytes

        assert (model.name, model.world_size, model.dtype) == (name, SHAPE["world_size"], "BF16")
        assert by_policy(found)["full"]["first_bytes"] == stored_bytes
        assert by_policy(found)["full"]["average_bytes"] == later
        assert (found["model"]["trained"] < model.parameters) == bool(model.frozen) == bool(frozen)
    assert stored.layers == seen.layers


def test_layers_are_those_that_somebody_has_cut(tmp_path: Path) -> None:
    """A commit that was saved with a rule of its own for layers is estimated by these layers."""
    folder = generate(tmp_path / "sft", step=7, **SHAPE)
    with layerstore.init(tmp_path / "store") as store:
        store.ingest(folder, layer_pattern=r"model\.layers\.\d+\.(self_attn|mlp)")
        model = model_of_commit(store.repo, "sft@7")
        own = [line.layer for line in store.show("sft@7").layers]

    assert list(model.layers) == own
    assert len(own) > SHAPE["layers"] + 3


def test_what_a_collection_has_dropped_is_estimated_all_the_same(checkpoints: Path, tmp_path: Path) -> None:
    """Moments that a commit lacks are saved again by whoever trains on from it."""
    with layerstore.init(tmp_path / "store") as store:
        for step in (1, 10):
            store.ingest(checkpoints, run="r", tag=f"global_step{step}")
        whole = model_of_commit(store.repo, "r@1")
        store.gc(Keep(every=1, drop_optimizer_older_than=5), grace_seconds=0)
        assert not next(entry for entry in store.log("r") if entry.step == 1).has_moments
        trimmed = model_of_commit(store.repo, "r@1")

    assert (
        estimate_saves(trimmed, training(), POLICIES)["lines"] == estimate_saves(whole, training(), POLICIES)["lines"]
    )


def test_full_checkpoints_have_the_published_sizes() -> None:
    """As LLMTailor's authors state them, to a thousandth: 14 bytes of each parameter."""
    for model, published_bytes in zip(models(), (112.47e9, 106.56e9), strict=True):
        found = estimate_saves(model, training(), POLICIES)
        trainer, deepspeed = found["lines"][:2]

        assert trainer["first_bytes"] == 14 * model.parameters == pytest.approx(published_bytes, rel=0.001)
        assert deepspeed["first_bytes"] == 12 * model.parameters
        full, parity = by_policy(found)["full"], by_policy(found)["parity"]
        assert full["first_bytes"] == full["average_bytes"] == pytest.approx(deepspeed["first_bytes"], rel=1e-4)
        assert parity["average_bytes"] == full["average_bytes"] / 2
        assert parity["cycle_saves"] == 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("saves", [1, 3, 10, 100])
def test_a_run_and_its_history_are_counted_save_by_save(policy: str, saves: int) -> None:
    """However the length of the run falls on the policy's cycle, and whichever save no longer fits."""
    model = models()[0]
    sizes = trained_bytes(model, training())
    due = due_sets(POLICIES[policy], tuple(sizes))
    totals = [sum(sizes.values()), *(sum(sizes[layer] for layer in layers) for layers in due)]
    fills = sum(totals[:saves])
    for disk_bytes, held in ((fills - 1, saves - 1), (fills, saves)):
        found = estimate_saves(model, training(steps=saves, every=1, disk_bytes=disk_bytes), POLICIES)
        line = by_policy(found)[policy]

        assert (line["first_bytes"], line["run_bytes"]) == (totals[0], fills)
        assert (line["history_saves"], line["history_seconds"]) == (held, held * 10)


def test_frozen_weights_are_stored_once() -> None:
    """And only what is trained has masters and moments."""
    model = models()[0]
    found = estimate_saves(model, training(trainable=Fraction(1, 100)), {"full": Latest()})
    trainer, deepspeed, full = found["lines"]

    assert found["model"]["trained"] == pytest.approx(model.parameters / 100, rel=1e-3)
    assert full["first_bytes"] == pytest.approx(
        12 * found["model"]["trained"] + 2 * (model.parameters - found["model"]["trained"]), rel=1e-3
    )
    assert full["average_bytes"] == pytest.approx(12 * found["model"]["trained"], rel=0.01)
    assert deepspeed["average_bytes"] == pytest.approx(full["first_bytes"], rel=1e-3)
    assert trainer["average_bytes"] == pytest.approx(14 * found["model"]["trained"], rel=1e-3)
    assert any("frozen" in text for text in found["assumptions"])


def test_drift_needs_to_know_how_far_layers_move() -> None:
    """Then its own rule decides: by the threshold, and in turns before layers grow too old."""
    model = models()[0]
    drift = {"drift": Drift(threshold=0.01, stalest=20)}
    with pytest.raises(InvalidInput, match="cannot be predicted") as raised:
        estimate_saves(model, training(), drift)
    assert "--movement" in str(raised.value.hint)

    still, moving = (estimate_saves(model, training(movement=movement), drift)["lines"][-1] for movement in (0.0, 0.02))

    assert still["average_bytes"] == pytest.approx(still["first_bytes"] / 20, rel=0.01)
    assert moving["average_bytes"] == moving["first_bytes"]


def test_a_policy_that_saves_nothing_fills_no_disk() -> None:
    """A user's own may do that: every later save inherits all of the first."""

    class Never:
        name = "never"
        parameters: Mapping[str, str] = {}

        def due(self, save: object) -> list[str]:
            return []

    line = estimate_saves(models()[0], training(), {"never": Never()})["lines"][-1]  # type: ignore[dict-item]  # plain mappings do

    assert (line["average_bytes"], line["history_saves"], line["run_bytes"]) == (0, None, line["first_bytes"])


@pytest.mark.parametrize(
    "changed",
    [{"steps": 9}, {"trainable": Fraction(0)}, {"trainable": Fraction(2)}, {"movement": -1.0}, {"movement": inf}]
    + [{"step_seconds": seconds} for seconds in (0.0, inf, nan)],
)
def test_a_training_that_cannot_be_is_refused(changed: dict[str, Any]) -> None:
    """Before anything is worked out."""
    with pytest.raises(InvalidInput):
        training(**changed)


# -- which model it is ---------------------------------------------------------------------------------------------


@given(st.integers(10**6, 10**12), st.integers(1, 200))
def test_a_made_up_model_has_just_the_parameters_that_were_asked_for(parameters: int, blocks: int) -> None:
    """In as many equal blocks, with a layer before and two after them; or there is none of that size."""
    try:
        model = made_up(parameters, blocks)
    except InvalidInput:
        assert parameters < 10**5 * blocks
        return

    assert model.parameters == parameters
    sizes = [sum(elements.values()) for layer, elements in model.layers.items() if ".layers." in layer]
    assert sizes == [sizes[0]] * blocks
    assert len(model.layers) == blocks + 3


@pytest.mark.parametrize(
    ("text", "message"),
    [("[" * 100_000, "not JSON"), ("[]", "not an object"), (None, "no such file")],
    ids=["deep", "a list", "missing"],
)
def test_what_is_no_config_is_refused(text: str | None, message: str, config: Path) -> None:
    """With what is wrong, and the way that needs no config."""
    if text is not None:
        config.write_text(text)

    with pytest.raises(InvalidInput, match=message) as raised:
        seen_at(config)
    assert "--params" in str(raised.value.hint)


def test_pointers_lead_to_the_store_that_knows(tmp_path: Path) -> None:
    """The hint is the command that asks it."""
    pointer = Pointer(store="/a store", store_id="0" * 32, name="sft@3", run="sft", attempt=1, step=3)
    (tmp_path / "global_step3").mkdir()
    for kind in ("model", "optim"):
        stem = f"zero_pp_rank_0_mp_rank_00_{kind}_states"
        (tmp_path / "global_step3" / f"{stem}.pt").write_bytes(pointer_bytes(pointer, Path(f"{stem}.pt")))
    with pytest.raises(InvalidInput, match="holds pointers to sft@3 in the store /a store") as raised:
        seen_at(tmp_path)

    assert raised.value.hint == "layerstore estimate sft@3 --store '/a store'"


def test_shards_that_cannot_be_read_are_no_model(tmp_path: Path) -> None:
    """An incomplete checkpoint is refused with what it lacks, and several of them with their names."""
    for step in (1, 2):
        generate(tmp_path / f"checkpoint-{step}", step=step, layout="hf", **SHAPE)
    with pytest.raises(InvalidInput, match="holds 2 checkpoints: checkpoint-1, checkpoint-2") as several:
        seen_at(tmp_path)
    next((tmp_path / "checkpoint-1").rglob("*rank_1*optim*")).unlink()
    with pytest.raises(SourceCheckpoint, match="optim_states of rank 1 missing"):
        seen_at(tmp_path / "checkpoint-1")

    assert several.value.hint == "name one of them, or its config.json"


def test_a_config_is_named_after_its_folder_and_shards_go_before_it(config: Path) -> None:
    """Or after its file, if that has a name of its own; the architecture is the config's."""
    config.write_text(CONFIG)
    own = config.with_name("tiny.json")
    own.write_text(CONFIG)

    models = [seen_at(path) for path in (config, config.parent, own)]
    assert [model.name for model in models] == [config.parent.name, config.parent.name, "tiny"]
    assert {(model.architecture, model.parameters, model.source) for model in models} == {("llama", 194, "config")}
    generate(config.parent, step=3, **SHAPE)
    assert [seen_at(path).source for path in (config, config.parent)] == ["config", "checkpoint"]
