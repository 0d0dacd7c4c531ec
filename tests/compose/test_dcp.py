"""PyTorch's distributed checkpoints of composites: torch's own loader, other chunks, what is refused coming back."""

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from layerstore import Keep, Store
from layerstore.distcp import Chunk, DcpFolder, Entry, metadata_bytes
from layerstore.distcp import write as dcp
from layerstore.errors import (
    Conflict,
    IntegrityError,
    InvalidInput,
    LayoutMismatch,
    Overtaken,
    SourceCheckpoint,
    Unsupported,
)
from layerstore.filenames import DCP_METADATA
from layerstore.history import objects_of_state
from layerstore.limits import INLINE_BYTES_MAX
from layerstore.model import Kind
from layerstore.tree import Located
from layerstore.zero3.pt import read_pt
from tests.compose.test_hf import SHAPES, mixed, objects_of
from tests.deepspeed.compare import as_bits, full_tensors, whole_weights
from tests.unit.checkpoints import checkpoint, snapshot

# There is one process, and torch says so each time.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

State = dict[str, Any]


def loaded(folder: Path) -> State:
    """Return what torch makes of *folder*, with nested groups."""
    whole = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, whole)
    found: State = torch.load(whole)
    assert set(found) == {"model", "optim"}, "each tensor is there once, though it has several names"
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a checkpoint of two ranks."""
    return checkpoint(tmp_path)


@pytest.fixture
def stored(store: Store, source: Path) -> Store:
    """Return a store with that checkpoint."""
    store.ingest(source)
    return store


@pytest.fixture
def folder(stored: Store, tmp_path: Path) -> Path:
    """Return it as a distributed checkpoint."""
    return stored.compose("sft").export(tmp_path / "dcp", format="dcp").out


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_torch_loads_what_was_saved(store: Store, tmp_path: Path, shape: dict[str, Any]) -> None:
    """Masters as the model, moments under its names, frozen parameters and buffers too, to the last bit."""
    source = checkpoint(tmp_path, **shape)
    store.ingest(source)

    exported = store.compose("sft").export(tmp_path / "dcp", format="dcp")

    tag = source / (source / "latest").read_text()
    found = loaded(exported.out)
    weights, states = whole_weights(tag), full_tensors(tag)
    assert all(torch.equal(as_bits(found["model"][name]), as_bits(weights[name])) for name in weights)
    for name, kinds in states.items():
        for state in kinds.keys() - {"master"}:
            assert torch.equal(found["optim"]["state"][name][state].flatten(), kinds[state]), (name, state)
    named = [name for group in found["optim"]["param_groups"] for name in group["params"]]
    assert sorted(named) == sorted(states)
    assert exported.bytes_written == sum(path.stat().st_size for path in exported.out.rglob("*") if path.is_file())


def test_all_usual_names_lead_to_the_same_tensors(folder: Path) -> None:
    """Those of PyTorch's examples, torchtitan's and Accelerate's, groups nested or flattened."""
    name = "model.norm.weight"
    states = [f"{of}.state.{name}.exp_avg" for of in ("optim", "optimizer")]
    rates = [f"{of}.param_groups.{key}.lr" for of in ("optim", "optimizer") for key in (0, name)]
    found: State = {key: torch.zeros(16) for key in (f"model.{name}", name, *states)} | dict.fromkeys(rates)

    load(found, checkpoint_id=folder, no_dist=True)

    assert torch.equal(found[name], found[f"model.{name}"])
    assert found[name].any()
    assert torch.equal(found[states[0]], found[states[1]])
    assert len({found[rate] for rate in rates}) == 1
    assert found[rates[0]] > 0


def test_a_mixture_is_a_distributed_checkpoint_too(stored: Store, tmp_path: Path) -> None:
    """Each layer with its own moments, and with its own count of updates where that is wanted."""
    stored.ingest(checkpoint(tmp_path, step=4, seed=4))
    composite = mixed(stored, "sft@4", "sft@2")

    together = loaded(composite.export(tmp_path / "together", format="dcp").out)
    apart = loaded(composite.export(tmp_path / "apart", format="dcp", adam_step="per-layer").out)

    older = stored.compose("sft@2").tensors("optimizer", state="exp_avg")
    name = next(name for name in older if "layers" in name)
    assert together["optim"]["state"][name]["exp_avg"].numpy().tobytes() == older[name].tobytes()
    steps = [{float(of["step"]) for of in each["optim"]["state"].values()} for each in (together, apart)]
    assert len(steps[0]) == 1
    assert len(steps[1]) == 2


@pytest.mark.full
def test_large_tensors_lie_in_chunks_of_rows(stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no rank has to take more into memory than it needs."""
    whole = loaded(stored.compose("sft").export(tmp_path / "whole", format="dcp").out)
    monkeypatch.setattr(dcp, "_CHUNK_BYTES", 200)

    exported = stored.compose("sft").export(tmp_path / "cut", format="dcp")

    entries = DcpFolder(exported.out).entries
    assert max(len(entry.chunks) for entry in entries.values()) > 2
    cut = loaded(exported.out)
    assert all(torch.equal(cut["model"][name], whole["model"][name]) for name in whole["model"])
    assert stored.ingest(exported.out, onto="sft").is_new is False


def test_equal_composites_are_equal_bytes(stored: Store, folder: Path, tmp_path: Path) -> None:
    """Nothing in it depends on when or where it was written."""
    again = stored.compose("sft").export(tmp_path / "again", format="dcp").out

    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert all((folder / name).read_bytes() == (again / name).read_bytes() for name in names)


def test_a_damaged_object_leaves_no_folder(stored: Store, tmp_path: Path) -> None:
    """As with every other format."""
    path = objects_of(stored, "sft", Kind.OPTIMIZER)[0]
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    with pytest.raises(IntegrityError):
        stored.compose("sft").export(tmp_path / "out", format="dcp")

    assert not (tmp_path / "out").exists()


# -- and back ----------------------------------------------------------------------------------------------------------


def test_it_comes_back_as_the_same_commit(stored: Store, folder: Path) -> None:
    """Bit for bit, with all that the base supplies."""
    before = snapshot(stored)

    back = stored.ingest(folder, onto="sft")

    assert (back.run, back.step, back.is_new) == ("sft", 2, False)
    assert snapshot(stored) == before


@pytest.mark.full
def test_other_chunks_are_the_same_tensors(stored: Store, folder: Path, tmp_path: Path) -> None:
    """Columns, as tensor parallelism cuts, and in any order."""
    columns = tmp_path / "columns"
    columns.mkdir()
    archives, entries = bytearray(), []
    for entry in DcpFolder(folder).entries.values():
        if entry.dtype is None or len(entry.shape) != 2 or not entry.key.startswith("model.model."):
            entries.append(entry)
            continue
        tensor = torch.zeros(entry.shape)
        load({entry.key: tensor}, checkpoint_id=folder, no_dist=True)
        half = entry.shape[1] // 2
        chunks = []
        for first, last in ((half, entry.shape[1]), (0, half)):
            with io.BytesIO() as file:
                torch.save(tensor[:, first:last].clone(), file)
                size_bytes = file.tell()
                chunks.append(
                    Chunk(
                        offsets=(0, first),
                        sizes=(entry.shape[0], last - first),
                        file="__9_0.distcp",
                        offset_bytes=len(archives),
                        size_bytes=size_bytes,
                    )
                )
                archives += file.getvalue()
        entries.append(replace(entry, chunks=tuple(chunks)))
    for path in folder.glob("*.distcp"):
        shutil.copy(path, columns)
    (columns / "__9_0.distcp").write_bytes(archives)
    (columns / DCP_METADATA).write_bytes(metadata_bytes(entries))

    assert not stored.ingest(columns, onto="sft").is_new


def trained_on(folder: Path, out: Path, *, updates: int = 3, lr: float = 0.25) -> Path:
    """Return a folder as PyTorch saves it, after some updates with another learning rate."""
    state = loaded(folder)
    for tensor in state["model"].values():
        tensor.add_(1)
    for of in state["optim"]["state"].values():
        of["step"] += updates
    for group in state["optim"]["param_groups"]:
        group["lr"] = lr
    save(state, checkpoint_id=out, no_dist=True)
    return out


def test_an_older_base_is_not_counted_on_silently(stored: Store, folder: Path, tmp_path: Path) -> None:
    """The run would have two histories; whose it is, the user says."""
    stored.ingest(checkpoint(tmp_path / "in", step=4, seed=4))
    on = trained_on(folder, tmp_path / "on")

    with pytest.raises(Conflict, match="sft@2 is not the newest save of its run, sft@4 is"):
        stored.ingest(on, onto="sft@2")

    assert stored.ingest(on, onto="sft@2", run="other").run == "other"


@pytest.mark.parametrize("updates", [0, 3])
def test_what_the_base_has_lost_is_not_named_again(store: Store, tmp_path: Path, updates: int) -> None:
    """A collection may take it at any moment; the new commit would lack it and look whole."""
    source = checkpoint(tmp_path, layout="hf")
    (source / "tokenizer.json").write_bytes(bytes(2 * INLINE_BYTES_MAX))
    store.ingest(source)
    folder = store.compose("sft").export(tmp_path / "dcp", format="dcp").out
    on = trained_on(folder, tmp_path / "on", updates=updates) if updates else folder
    states = store.compose("sft").composition.base.states
    for ref in (ref for state in states for ref in objects_of_state(store.repo.state(state))):
        store.repo.layout.object(ref.id).unlink()

    with pytest.raises(Overtaken, match="a rank's state of sft@2 is gone; nothing was saved"):
        store.ingest(on, onto="sft", run="other")

    assert store.runs() == ["sft"]


def test_links_are_not_followed_unasked(stored: Store, folder: Path, tmp_path: Path) -> None:
    """What they point to may be anything."""
    [archive, *_] = sorted(folder.glob("*.distcp"))
    archive.rename(tmp_path / archive.name)
    archive.symlink_to(tmp_path / archive.name)

    with pytest.raises(SourceCheckpoint, match="link"):
        stored.ingest(folder, onto="sft")


def test_updates_since_count_on(stored: Store, folder: Path, tmp_path: Path) -> None:
    """Step, counters, schedule and learning rate are those after the updates; the rest is the base's."""
    saved = stored.ingest(trained_on(folder, tmp_path / "on"), onto="sft")
    stored.compose("sft@5").write(tmp_path / "shards")

    assert (saved.run, saved.step, len(saved.layers_saved)) == ("sft", 5, len(saved.layers))
    assert "are advanced by 3" in saved.notes[0]
    tag = tmp_path / "shards" / (tmp_path / "shards" / "latest").read_text()
    assert tag.name == "global_step5"
    trees = torch.load(next(tag.glob("*optim_states.pt")), weights_only=False)["optimizer_state_dict"]
    inner = trees["optimizer_state_dict"]
    assert {float(of["step"]) for of in inner["state"].values()} == {5.0}
    assert {group["lr"] for group in inner["param_groups"]} == {0.25}
    model = torch.load(next(tag.glob("*model_states.pt")), weights_only=False)
    assert model["global_steps"] == 5


def test_what_early_releases_of_python_3_11_saved_is_read(
    stored: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They pickle an enumeration by its member's name."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    other = changed(folder, tmp_path / "other", lambda _: None)

    assert b"getattr" in (other / ".metadata").read_bytes()
    assert not stored.ingest(other, onto="sft").is_new


def test_model_and_optimizer_may_lie_in_folders_of_their_own(stored: Store, folder: Path, tmp_path: Path) -> None:
    """As Accelerate saves them."""
    state = loaded(folder)
    save({"model": state["model"]}, checkpoint_id=tmp_path / "both/pytorch_model_fsdp_0", no_dist=True)
    save({"optimizer": state["optim"]}, checkpoint_id=tmp_path / "both/optimizer_0", no_dist=True)

    assert not stored.ingest(tmp_path / "both", onto="sft").is_new


def changed(folder: Path, out: Path, change: Any) -> Path:
    """Return a folder that torch saved after *change* was made to the state."""
    state = loaded(folder)
    change(state)
    save(state, checkpoint_id=out, no_dist=True)
    return out


def lose_a_parameter(state: State) -> None:
    """Leave a tensor out."""
    del state["model"]["model.norm.weight"]


def add_a_parameter(state: State) -> None:
    """Add a tensor that no model has."""
    state["model"]["model.extra.weight"] = torch.zeros(2)


def reshape(state: State) -> None:
    """Give a tensor another shape."""
    state["model"]["model.norm.weight"] = torch.zeros(17)


def halve(state: State) -> None:
    """Round a master."""
    state["model"]["model.norm.weight"] = state["model"]["model.norm.weight"].bfloat16()


def lose_a_moment(state: State) -> None:
    """Leave a moment out."""
    del state["optim"]["state"]["model.norm.weight"]["exp_avg"]


def go_back(state: State) -> None:
    """Count one update less."""
    for of in state["optim"]["state"].values():
        of["step"] -= 1


def count_apart(state: State) -> None:
    """Count one parameter on."""
    state["optim"]["state"]["model.norm.weight"]["step"] += 1


def lose_the_count(state: State) -> None:
    """Leave the counters out."""
    for of in state["optim"]["state"].values():
        del of["step"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_a_parameter, "has no tensor 'model.norm.weight', which sft@2 has"),
        (add_a_parameter, "has a tensor 'model.extra.weight', which sft@2 lacks"),
        (reshape, "'model.model.norm.weight' of .* is 17, in sft@2 16"),
        (halve, "'model.model.norm.weight' of .* is bf16, sft@2 keeps fp32"),
        (lose_a_moment, "has no moment 'state.model.norm.weight.exp_avg', which sft@2 has"),
        (go_back, "the folder is 1 updates older than the base"),
        (count_apart, "share a param group in the base, but the count of updates is"),
        (lose_the_count, "does not say how many updates"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    stored: Store, folder: Path, tmp_path: Path, change: Any, message: str
) -> None:
    """In one line, and nothing is written."""
    before = snapshot(stored)

    with pytest.raises(LayoutMismatch, match=message):
        stored.ingest(changed(folder, tmp_path / "other", change), onto="sft")

    assert snapshot(stored) == before


@pytest.fixture
def full(folder: Path, tmp_path: Path) -> Path:
    """Return it in the form that the Trainer saves by default: FSDP's ``FULL_STATE_DICT``."""
    state, path = loaded(folder), tmp_path / "full"
    path.mkdir()
    torch.save(state["model"], path / "pytorch_model_fsdp.bin")
    torch.save(state["optim"], path / "optimizer.bin")
    return path


@pytest.mark.fault(151)
def test_a_full_state_dict_is_read_like_a_sharded_one(stored: Store, full: Path) -> None:
    """It is the same commit."""
    assert not stored.ingest(full, onto="sft").is_new


@pytest.mark.fault(151)
def test_what_was_trained_comes_from_a_full_state_dict(stored: Store, full: Path, tmp_path: Path) -> None:
    """Masters, moments, settings of the groups, and the count of steps."""
    model, optimizer = (torch.load(full / name) for name in ("pytorch_model_fsdp.bin", "optimizer.bin"))
    for state in optimizer["state"].values():
        state["step"] += 3
    model["model.norm.weight"] += 1
    optimizer["param_groups"][0]["lr"] = 0.25
    torch.save(model, full / "pytorch_model_fsdp.bin")
    torch.save(optimizer, full / "optimizer.bin")

    saved = stored.ingest(full, onto="sft")

    stored.compose("sft@5").write(tmp_path / "out")
    assert saved.step == 5
    tag = tmp_path / "out" / (tmp_path / "out/latest").read_text()
    trees = torch.load(next(tag.glob("*optim_states.pt")), weights_only=False)
    assert trees["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][0]["lr"] == 0.25
    weights = whole_weights(tag)
    assert all(torch.equal(weights[name], of.to(weights[name].dtype)) for name, of in model.items())


def lose_the_optimizer(path: Path) -> None:
    """Remove the optimizer."""
    (path / "optimizer.bin").unlink()


def flip_a_byte(path: Path) -> None:
    """Change one byte of the largest tensor."""
    storages = read_pt(path / "pytorch_model_fsdp.bin").storages
    place = max((of.content for of in storages if isinstance(of.content, Located)), key=lambda at: at.size_bytes)
    data = bytearray((path / "pytorch_model_fsdp.bin").read_bytes())
    data[place.offset_bytes + place.size_bytes // 2] ^= 1
    (path / "pytorch_model_fsdp.bin").write_bytes(data)


def run_when_loaded(path: Path) -> None:
    """Put a call there."""
    torch.save({"model.norm.weight": Path("/")}, path / "pytorch_model_fsdp.bin")


@pytest.mark.fault(151)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_the_optimizer, "is incomplete: optimizer.bin missing"),
        (flip_a_byte, "is damaged: entry of model"),
        (run_when_loaded, "untrusted: its pickle names unknown globals: pathlib"),
    ],
)
def test_a_broken_full_state_dict_is_refused(stored: Store, full: Path, damage: Any, message: str) -> None:
    """Nothing of it is run, and nothing is written."""
    damage(full)
    before = snapshot(stored)

    with pytest.raises(SourceCheckpoint, match=message):
        stored.ingest(full, onto="sft")

    assert snapshot(stored) == before


def test_a_damaged_byte_is_found(stored: Store, folder: Path) -> None:
    """Each archive's own checksum is compared, which torch does not do."""
    path = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    chunk = next(
        entry.chunks[0]
        for entry in DcpFolder(folder).entries.values()
        if entry.dtype and entry.chunks[0].file == path.name and len(entry.shape) == 2
    )
    data[chunk.offset_bytes + chunk.size_bytes // 2] ^= 1
    path.write_bytes(data)
    before = snapshot(stored)

    with pytest.raises(SourceCheckpoint, match="is damaged: entry of model"):
        stored.ingest(folder, onto="sft")

    assert snapshot(stored) == before


def without_metadata(folder: Path) -> None:
    """Remove what says what there is."""
    (folder / DCP_METADATA).unlink()


def cut_short(folder: Path) -> None:
    """Cut that off."""
    path = folder / DCP_METADATA
    path.write_bytes(path.read_bytes()[:-100])


def lose_a_file(folder: Path) -> None:
    """Remove tensors."""
    next(folder.glob("*.distcp")).unlink()


def run_something(folder: Path) -> None:
    """Put a call to the shell there."""
    (folder / DCP_METADATA).write_bytes(b"\x80\x04cposix\nsystem\n(X\x04\x00\x00\x00truetR.")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_metadata, "is not a distributed checkpoint: it has no file '.metadata'"),
        (cut_short, "untrusted: its pickle is not one that torch.distributed.checkpoint writes"),
        (lose_a_file, "no such file"),
        (run_something, "untrusted: its pickle names unknown globals: posix.system"),
    ],
)
def test_a_broken_folder_is_refused(stored: Store, folder: Path, damage: Any, message: str) -> None:
    """Nothing of it is run, and nothing is written."""
    damage(folder)
    before = snapshot(stored)

    with pytest.raises(SourceCheckpoint, match=message):
        stored.ingest(folder, onto="sft")

    assert snapshot(stored) == before


def entry(**fields: Any) -> Entry:
    """Return a tensor that lies in one piece."""
    chunk = Chunk(offsets=(0,), sizes=(4,), file="x.distcp", offset_bytes=0, size_bytes=10)
    return replace(Entry(key="k", path=("k",), dtype="F32", shape=(4,), chunks=(chunk,)), **fields)


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "a/../../b"])
def test_metadata_cannot_name_files_elsewhere(tmp_path: Path, file: str) -> None:
    """A folder's own are all that is read."""
    chunk = replace(entry().chunks[0], file=file)
    (tmp_path / DCP_METADATA).write_bytes(metadata_bytes([entry(chunks=(chunk,))]))

    with pytest.raises(SourceCheckpoint, match="which is not below its folder"):
        DcpFolder(tmp_path)


def test_without_a_base_it_is_a_commit_of_its_own(stored: Store, folder: Path, tmp_path: Path) -> None:
    """It is written as DCP again, and DeepSpeed's form, for which there are no trees, is refused."""
    ingested = stored.ingest(folder, run="alone")
    composite = stored.compose(f"alone@{ingested.step}")

    assert composite.is_dcp
    assert composite.export(tmp_path / "again", format="dcp").step == ingested.step
    with pytest.raises(Unsupported, match="what else DeepSpeed needs is not known"):
        composite.write(tmp_path / "shards")


def test_options_of_deepspeeds_checkpoints_are_refused(stored: Store, folder: Path) -> None:
    """The base decides what they would."""
    with pytest.raises(InvalidInput, match="--onto and --tag were both given"):
        stored.ingest(folder, onto="sft", tag="global_step2")


def test_moments_that_were_dropped_cannot_be_written(stored: Store, tmp_path: Path) -> None:
    """A distributed checkpoint without an optimizer is weights, for which there is another format."""
    stored.ingest(checkpoint(tmp_path, step=8, seed=8))
    stored.gc(Keep(last=8, drop_optimizer_older_than=3), grace_seconds=0)

    with pytest.raises(LayoutMismatch, match="no longer has optimizer moments"):
        stored.compose("sft@2").export(tmp_path / "out", format="dcp")
