"""torch.distributed.checkpoint saves into a store and loads from it, in one process: every bit, checked, or refused."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import layerstore
from layerstore import Store
from layerstore.arrays import TensorKind
from layerstore.dcp import StoreReader, StoreWriter
from layerstore.distcp import DcpFolder
from layerstore.errors import (
    Conflict,
    IntegrityError,
    InvalidInput,
    LayerstoreError,
    LayoutMismatch,
    NotFound,
    Unsupported,
)
from tests.compose.test_hf import mixed
from tests.live.dcp.states import LAYERS, State, Training, all_bits, blank, cause, extras, kept, leaves, read
from tests.unit.checkpoints import checkpoint, snapshot, tensors_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # there is one process
]


def titanic(training: Training) -> State:
    """Return a state as torchtitan has it: the model at the top, the optimizer flattened below its own name."""
    state = training.state(flat=True)
    return {**state["model"], "optimizer": state["optim"], "train_state": {"step": torch.tensor(3)}}


FORMS: dict[str, Callable[[Training], State]] = {
    "nested": lambda training: training.state(**extras()),
    "flattened": lambda training: training.state(flat=True, **extras()),
    "model only": lambda training: {"model": training.state()["model"]},
    "raw": Training.raw,
    "torchtitan": titanic,
    "bare": lambda training: training.state()["model"],
}

each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def test_all_kinds_of_parameters_are_there() -> None:
    """The tests below would not notice if their model lost some."""
    state = Training().train(2).state()
    model, moments = state["model"], state["optim"]["state"]

    assert {tensor.dtype for tensor in model.values()} == {torch.float32, torch.bfloat16}
    assert model["embed.weight"].data_ptr() == model["head.weight"].data_ptr()
    assert not model["nothing"].numel()
    assert "layers.0.norm.weight" in model
    assert "layers.0.norm.weight" not in moments
    assert moments["layers.0.down.weight"]["exp_avg"].any()


@each_form
def test_what_was_saved_is_loaded_bit_for_bit(store: Store, form: Callable[[Training], State]) -> None:
    """Tensors and values of every form that trainers have."""
    state = form(Training().train(3))
    expected = all_bits(state)

    kept(store, state)

    assert all_bits(state) == expected
    assert all_bits(read(store, "sft@1", state)) == expected


@each_form
def test_ingest_of_torchs_own_folder_holds_the_same(
    store: Store, tmp_path: Path, form: Callable[[Training], State]
) -> None:
    """A save that went to a folder first is, tensor by tensor, the one that went straight to the store."""
    state = form(Training().train(3))
    kept(store, state, step=3)
    save(state, checkpoint_id=tmp_path / "plain")

    ingested = store.ingest(tmp_path / "plain", run="plain", step=3)

    assert all_bits(read(store, "plain@3", state)) == all_bits(state)
    assert len(ingested.layers_saved) == len(ingested.layers)
    assert contents(store, "plain@3") == contents(store, "sft@3")


def contents(store: Store, ref: str) -> dict[str, Any]:
    """Return all tensors that layers hold, whoever cut them."""
    composite = store.compose(ref)
    found: dict[str, Any] = {"layers": list(composite.layers)}
    kinds: list[tuple[TensorKind, str | None]] = [("master", None), ("weights", None)]
    kinds += [("optimizer", state) for state in ("exp_avg", "exp_avg_sq")]
    for kind, state in kinds:
        try:
            tensors = composite.tensors(kind, state=state)
        except LayerstoreError as exc:
            found[f"{kind} {state}"] = type(exc)
            continue
        found[f"{kind} {state}"] = {name: tensors[name].tobytes() for name in tensors}
    return found


def test_training_goes_on_as_if_nothing_had_been_saved(store: Store) -> None:
    """Losses are a function of every bit."""
    training = Training().train(3)
    state = training.state(rng=torch.get_rng_state())
    kept(store, state)
    expected = all_bits(training.train(2).raw())

    other = Training(seed=1).train(1)
    found = other.state(rng=torch.get_rng_state())
    load(found, storage_reader=StoreReader(store, "sft@1"))
    other.model.load_state_dict(found["model"])
    raw = other.optimizer.state_dict()
    names = [name for name, parameter in other.model.named_parameters() if parameter.requires_grad]
    raw["state"] = {number: found["optim"]["state"][name] for number, name in enumerate(names)}
    other.optimizer.load_state_dict(raw)
    torch.set_rng_state(found["rng"])

    assert all_bits(other.train(2).raw()) == expected


def test_only_what_is_asked_for_is_loaded(store: Store) -> None:
    """A part of the state is a state too."""
    state = Training().train(1).state(**extras())
    kept(store, state)

    part = {"model": {"layers.1.up.weight": state["model"]["layers.1.up.weight"]}, "rate": state["rate"]}

    assert all_bits(read(store, "sft@1", part)) == all_bits(part)


def test_what_was_saved_twice_is_stored_once(store: Store) -> None:
    """As by every other way into the store."""
    state = Training().train(1).state()

    first, second = (kept(store, state, run=run).observed for run in ("one", "other"))

    assert first.bytes_new > 0
    assert second.bytes_new == 0


# -- policies ----------------------------------------------------------------------------------------------------------


def is_of(layer: str, name: str) -> bool:
    """Whether a layer holds the parameter *name*."""
    return name == layer or name.startswith(f"{layer}.")


@pytest.fixture
def parity(store: Store) -> dict[int, State]:
    """Return the states of three saves, of which run ``half`` has only those layers that were due, and ``full`` all."""
    training, states = Training(), dict[int, State]()
    for step in (1, 2, 3):
        state = training.train().state(step=step)
        kept(store, state, run="half", step=step, policy="parity")
        kept(store, state, run="full", step=step)
        states[step] = {"model": {name: value.clone() for name, value in state["model"].items()}}
    return states


def test_only_layers_that_are_due_are_written(store: Store, parity: dict[int, State]) -> None:
    """The first save has all of them, the next ones every other layer, and the others are inherited."""
    written = {entry.step: entry.layers_saved for entry in store.log("half")}
    full = {entry.step: entry.layers_saved for entry in store.log("full")}

    assert set(full.values()) == {full[1]}
    assert written[1] == full[1]
    assert 0 < written[2] < full[1]
    assert 0 < written[3] < full[1]


def test_a_composite_is_that_of_full_saves(store: Store, parity: dict[int, State]) -> None:
    """Each layer of it is, bit for bit, the one that a full save of its step has."""
    composite = store.compose("half@3")

    steps = {name: choice.step for name, choice in composite.layers.items()}
    assert set(steps.values()) == {2, 3}
    for name, choice in composite.layers.items():
        assert choice.version == store.compose(f"full@{choice.step}").layers[name].version, name
    with pytest.warns(UserWarning, match="half@3: "):
        found = read(store, "half@3", parity[3], policy="latest")["model"]
    for name, tensor in found.items():
        (step,) = {step for layer, step in steps.items() if is_of(layer, name)} or {3}
        assert torch.equal(tensor, parity[step]["model"][name]), (name, step)


@pytest.mark.usefixtures("parity")
def test_layers_of_several_saves_are_refused_unless_they_are_asked_for(store: Store) -> None:
    """Such a model has never existed; nobody gets one by mistake."""
    with pytest.raises(Conflict, match="half@3: ") as refused:
        StoreReader(store, "half@3")

    assert "policy=" in str(refused.value.hint)
    assert StoreReader(store, "half@1").step == 1


def test_layers_may_be_kept_compactly(store: Store) -> None:
    """Later saves say what they have lost, and hold nearly what was saved; the newest exact one can be asked for."""
    training = Training()
    for step in (1, 2):
        state = training.train().state()
        commit = kept(store, state, step=step, precision="delta8")
        if step == 1:
            exact = all_bits(state)
    assert commit.observed.losses

    with pytest.warns(UserWarning, match="sft@2: "):
        found = leaves(read(store, "sft@2", state))
    assert all_bits(read(store, "sft@2", state, exact=True)) == exact
    for name, tensor in leaves(state).items():
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            assert torch.allclose(found[name].float(), tensor.float(), atol=2e-2), name


# -- of DeepSpeed ------------------------------------------------------------------------------------------------------


def everything(reader: StoreReader) -> State:
    """Return an empty state with every key that *reader* has."""
    entries = reader.read_metadata().state_dict_metadata
    return {
        key: torch.full(entry.size, 1, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in entries.items()
    }


@pytest.mark.full
@pytest.mark.parametrize("is_mixed", [False, True], ids=["one save", "a mixture"])
def test_a_commit_of_deepspeed_is_loaded_as_its_exported_folder_is(
    store: Store, tmp_path: Path, is_mixed: bool
) -> None:
    """All keys, the same bits, and no folder in between."""
    for step in (2, 4):
        store.ingest(checkpoint(tmp_path, step=step, seed=step))
    composite, ref = (mixed(store, "sft@4", "sft@2"), "mixture") if is_mixed else (store.compose("sft@2"), "sft@2")
    folder = composite.export(tmp_path / "dcp", format="dcp").out
    if is_mixed:
        composite.pin(ref)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a mixture
        reader = StoreReader(store, ref, policy="latest" if is_mixed else None)
    ours, theirs = everything(reader), everything(reader)

    load(ours, storage_reader=reader)
    load(theirs, checkpoint_id=folder)

    assert set(DcpFolder(folder).entries) == set(ours)
    assert all_bits(ours) == all_bits(theirs)
    assert any(key.endswith("exp_avg") and ours[key].any() for key in ours)


@pytest.mark.parametrize("policy", ["parity", "filter"])
def test_layers_of_deepspeed_and_of_dcp_make_one_composite(store: Store, tmp_path: Path, policy: str) -> None:
    """What a policy leaves out of the first save of DCP is DeepSpeed's; all of it loads, as shards too."""
    for step in (2, 4):
        store.ingest(checkpoint(tmp_path, step=step, seed=step))
    reader = StoreReader(store, "sft@4")
    state = {key: value for key, value in everything(reader).items() if key.startswith(("model.", "optim."))}
    load(state, storage_reader=reader)
    before = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    for tensor in filter(torch.is_tensor, state.values()):
        tensor.add_(1)

    kept(store, state, step=5, policy=policy)

    found = blank(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a mixture
        load(found, storage_reader=StoreReader(store, "sft@5", policy="latest"))
    steps = {of.step for of in store.compose("sft@5").layers.values()}
    assert steps == {4, 5}
    is_new = {key: torch.equal(found[key], state[key]) for key in before if before[key].numel()}
    is_old = {key: torch.equal(found[key], before[key]) for key in is_new}
    assert all(is_new[key] != is_old[key] for key in is_new)
    assert {True, False} == {is_new[key] for key in is_new if key.startswith("model.")}
    written = store.compose("sft@5").export(tmp_path / "shards", format="zero3")
    assert any("DeepSpeed's own state comes from sft@4" in note for note in written.notes)
    assert store.ingest(tmp_path / "shards", run="again").layers
    assert store.compose("sft@5").export(tmp_path / "hf", format="hf").files


# -- async_save --------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Be the only rank of a group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_training_that_goes_on_changes_nothing_that_was_staged(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are copied at once, and those that an update waits for; and values."""
    monkeypatch.setattr("layerstore.live.dcp.copies._AT_ONCE_BYTES", 64)
    training = Training().train(2)
    progress = {"updates": 2, "losses": [1.0]}
    state = training.state(progress=progress, **extras())
    expected = all_bits(state)
    writer = StoreWriter(store, run="sft", step=2)

    future = async_save(state, storage_writer=writer, async_stager=writer)
    progress["updates"] = 3
    progress["losses"].append(2.0)  # type: ignore[attr-defined] # of the list
    training.train(3)
    future.result()  # type: ignore[union-attr] # of a future

    assert all_bits(state) != expected
    assert all_bits(read(store, "sft@2", state)) == expected


# -- damage ------------------------------------------------------------------------------------------------------------


def test_flipped_bytes_are_noticed_by_the_load(store: Store, tmp_path: Path) -> None:
    """In any object, at any place: nothing damaged is loaded."""
    state = Training().train(2).state(**extras())
    kept(store, state)
    expected = all_bits(read(store.path, "sft@1", state))
    chance = random.Random(7)
    objects = sorted(path for path in (store.path / "objects").rglob("*") if path.is_file())

    unnoticed = []
    for path in chance.sample(objects, 10):
        path.chmod(0o600)
        data = path.read_bytes()
        for place in {0, len(data) - 1, *chance.sample(range(len(data)), 2)}:
            path.write_bytes(data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :])
            try:
                found = read(store.path, "sft@1", state)
            except (CheckpointException, IntegrityError) as exc:
                if isinstance(cause(exc), IntegrityError):
                    continue
                raise
            unnoticed.append((path.name, place, all_bits(found) == expected))
        path.write_bytes(data)

    assert not unnoticed
    assert all_bits(read(store.path, "sft@1", state)) == expected


# -- wrong use ---------------------------------------------------------------------------------------------------------


class Custom:
    """A class that nobody knows."""


def refused(store: Store, error: type[Exception], message: str, work: Callable[[], object]) -> LayerstoreError:
    """Make sure that *work* is refused in one line, and that nothing is written."""
    before = snapshot(store)
    with pytest.raises(BaseException) as raised:
        work()
    found = cause(raised.value)
    assert isinstance(found, error), found
    assert isinstance(found, LayerstoreError)
    assert message in str(found)
    assert "\n" not in str(found)
    assert snapshot(store) == before
    return found


def saved(store: Store, *, state: State | None = None, step: int = 3, **options: Any) -> None:
    """Save *state*, or one that there is nothing wrong with."""
    writer = StoreWriter(store, run="sft", step=step)
    save(Training().state() if state is None else state, storage_writer=writer, **options)


UNKNOWN = "'mine' of the state cannot be kept: untrusted: its pickle names unknown globals: "


@pytest.mark.parametrize(
    ("error", "message", "work"),
    [
        (Conflict, "sft@2 is saved already", lambda store: saved(store, step=2)),
        (InvalidInput, "checkpoint_id='elsewhere' was", lambda store: saved(store, checkpoint_id="elsewhere")),
        (Unsupported, f"{UNKNOWN}{__name__}.Custom", lambda store: saved(store, state=Training().state(mine=Custom()))),
        (InvalidInput, "the state holds no tensors", lambda store: saved(store, state={"epoch": 3})),
        (NotFound, "run 'sft' has no step 7", lambda store: StoreReader(store, "sft@7")),
        (NotFound, "no run 'other'", lambda store: StoreReader(store, "other")),
        # at once, before training goes on for hours
        (InvalidInput, "the run's name '' is empty", lambda store: StoreWriter(store, run="", step=3)),
        (InvalidInput, "the run's name 'a/b'", lambda store: StoreWriter(store, run="a/b", step=3)),
        (InvalidInput, "the run's name 'a@1'", lambda store: StoreWriter(store, run="a@1", step=3)),
        (InvalidInput, "step -1 is not a step", lambda store: StoreWriter(store, run="sft", step=-1)),
        (InvalidInput, f"step {2**63} is not a step", lambda store: StoreWriter(store, run="sft", step=2**63)),
    ],
)
def test_wrong_use_is_refused(
    store: Store, error: type[Exception], message: str, work: Callable[[Store], object]
) -> None:
    """A history is not changed behind its readers, nothing is ignored, and nothing is lost without a word."""
    saved(store, step=2)

    refused(store, error, message, lambda: work(store))


def test_an_earlier_step_is_refused_unless_it_is_said_where_training_went_on(store: Store) -> None:
    """Then it is an attempt of its own."""
    state = Training().state()
    for step in (1, 3):
        kept(store, state, step=step)

    found = refused(store, Conflict, "step 2 is before sft@3", lambda: kept(store, state, step=2))

    assert "resumed_from" in str(found.hint)
    assert kept(store, state, step=2, resumed_from="sft@1").record.attempt == 2


def test_a_planner_that_sends_no_plan_is_refused(store: Store) -> None:
    """PyTorch's cache of plans leaves out from the second save what has not changed: nobody could tell what is due."""
    state = Training().state()

    def twice() -> None:
        for step in (1, 2):
            planner = DefaultSavePlanner(enable_plan_caching=True)
            save(state, storage_writer=StoreWriter(store, run="sft", step=step), planner=planner)

    with pytest.raises(BaseException, match="sent none") as raised:
        twice()
    assert isinstance(cause(raised.value), Unsupported)
    assert [entry.step for entry in store.log("sft")] == [1]


class Shortening(DefaultSavePlanner):
    """Converts after it has planned."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return half of the bytes."""
        found = super().resolve_data(write_item)
        return found.half() if isinstance(found, torch.Tensor) and found.dtype == torch.float32 else found


def test_a_planner_whose_data_are_shorter_than_its_plan_is_refused(store: Store) -> None:
    """The rest would be what was read before it, and nothing would notice: its hash would be right."""

    def save_shortened() -> None:
        save(Training().state(), storage_writer=StoreWriter(store, run="sft", step=1), planner=Shortening())

    with pytest.raises(BaseException, match="its plan has with at least") as raised:
        save_shortened()
    assert isinstance(cause(raised.value), InvalidInput)
    assert not store.log()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_types_without_a_mean_are_not_averaged(store: Store, tmp_path: Path, dtype: torch.dtype) -> None:
    """Doubles would lose precision, complex numbers a half, and what has 8 bits is no number to numpy."""
    for step in (1, 2):
        name, weight = "layers.0.weight", torch.full((4,), step).to(dtype)
        moments = {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4), "step": torch.tensor(float(step))}
        groups = [{"params": [name], "lr": 0.1}]
        state = {"model": {name: weight}, "optim": {"state": {name: moments}, "param_groups": groups}}
        save(state, storage_writer=StoreWriter(store, run="sft", step=step))

    with pytest.raises(LayoutMismatch, match="these have no mean"):
        store.average("last:2", ref="sft").export(tmp_path / "out", format="dcp")
    assert not (tmp_path / "out").exists()


def test_ranks_that_found_different_commits_are_refused(store: Store) -> None:
    """A save became visible between two ranks' looks at the run."""
    first, second = Training().train(1), Training().train(2)
    kept(store, first.state(), step=1)
    early = StoreReader(store, "sft")
    kept(store, second.state(), step=2)
    plans = [reader.prepare_local_plan(LoadPlan([])) for reader in (early, StoreReader(store, "sft"))]

    with pytest.raises(Conflict, match="the ranks found different commits"):
        early.prepare_global_plan(plans)


def test_a_reader_without_a_commit_takes_it_from_the_checkpoint_id(store: Store) -> None:
    """Or says what it lacks."""
    state = Training().train(1).state()
    kept(store, state)
    found = blank(state)

    with pytest.raises(BaseException, match="no commit was given"):
        load(found, storage_reader=StoreReader(store))
    load(found, storage_reader=StoreReader(store), checkpoint_id="sft@1")

    assert all_bits(found) == all_bits(state)


def test_another_shape_is_refused(store: Store) -> None:
    """Of one tensor, and the trainer's others stay as they are."""
    kept(store, Training().state())
    other = {"model": {"embed.weight": torch.zeros(5, 8)}}

    with pytest.raises(BaseException, match=r"embed\.weight"):
        load(other, storage_reader=StoreReader(store, "sft@1"))

    assert not other["model"]["embed.weight"].any()


def test_another_models_key_is_refused(store: Store) -> None:
    """A load that finds only a part is not a load."""
    kept(store, Training().state())

    with pytest.raises(BaseException, match=r"model\.other\.weight"):
        load({"model": {"other.weight": torch.zeros(2)}}, storage_reader=StoreReader(store, "sft@1"))


def test_a_store_is_made_unless_that_was_forbidden(tmp_path: Path) -> None:
    """A path with a mistake in it makes no store where nobody looks for one."""
    state = Training().state()
    with pytest.raises(BaseException, match="no store"):
        save(state, storage_writer=StoreWriter(tmp_path / "absent", run="sft", step=1, create=False))
    assert not (tmp_path / "absent").exists()

    save(state, storage_writer=StoreWriter(tmp_path / "new", run="sft", step=1))

    with layerstore.open(tmp_path / "new") as made:
        assert [entry.step for entry in made.log("sft")] == [1]


# -- what is made of such commits --------------------------------------------------------------------------------------


def test_the_usual_export_is_a_distributed_checkpoint(store: Store, tmp_path: Path) -> None:
    """Which torch loads bit for bit."""
    state = Training().train(2).state(**extras())
    kept(store, state)

    exported = store.compose("sft@1").export(tmp_path / "out", format="dcp")

    found = blank(state)
    load(found, checkpoint_id=exported.out)
    assert all_bits(found) == all_bits(state)
    shutil.rmtree(exported.out)


def test_weights_leave_out_what_no_model_has(store: Store, tmp_path: Path) -> None:
    """Random states and the like are in the state, and no part of the model."""
    state = Training().train(2).state(flat=True, **extras())
    kept(store, state)

    out = store.compose("sft@1").export(tmp_path / "hf", format="hf").out

    found = {name for path in out.glob("*.safetensors") for name in tensors_of(path)}
    model = {name for name, tensor in state["model"].items() if tensor.numel()}
    assert found - {"nothing"} == model - {"head.weight"} or found - {"nothing"} == model
    assert len([name for name in found if name.startswith("layers.0.")]) * LAYERS == len(
        [name for name in found if name.startswith("layers.")]
    )


def test_shards_of_deepspeed_are_refused(store: Store, tmp_path: Path) -> None:
    """What else DeepSpeed needs is in no commit of DCP."""
    kept(store, Training().state())

    refused(
        store,
        Unsupported,
        "what else DeepSpeed needs is not known",
        lambda: store.compose("sft@1").write(tmp_path / "shards"),
    )
    assert not (tmp_path / "shards").exists()
