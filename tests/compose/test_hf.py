"""Promises of an export, end to end on generated checkpoints: the right bits, whole or not at all."""

import json
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from layerstore import Composite, Store
from layerstore.assemble import ExportPlan, assemble
from layerstore.dtypes import DTypeName
from layerstore.errors import IntegrityError, InvalidInput
from layerstore.hf.plan import config_with_dtype, goes_along, parse_config
from layerstore.limits import PAGE_BYTES
from layerstore.model import Kind
from layerstore.tree import Located
from layerstore.zero3.pt import layout_pt, read_pt
from tests.compose.test_target import rounded_differently
from tests.deepspeed.compare import differing, rank_trees, whole_weights
from tests.ingest.test_ingest import SHAPES as INGESTED
from tests.unit.checkpoints import change_gathered, checkpoint, digests, header_of

NORM = "model.norm.weight"
ALONG = """
    config.json generation_config.json tokenizer.json tokenizer_config.json tokenizer.model merges.txt vocab.json
    chat_template.jinja preprocessor_config.json modeling_mine.py README.md 1_Pooling/config.json qwen.tiktoken
"""
NOT_ALONG = """
    optimizer.pt scheduler.pt scheduler.bin rng_state.pth rng_state_0.pth random_states_1.pkl trainer_state.json
    training_args.bin zero_to_fp32.py zero_to_torch.py latest pytorch_model.bin pytorch_model.bin.index.json
    model.safetensors.index.json extra.safetensors adapter_config.json global_step2/notes.json
    custom_checkpoint_0.pkl runs/events.out.tfevents.17
"""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Tensors = dict[str, torch.Tensor]


def weights_in(folder: Path) -> Tensors:
    """Return all tensors that an export has, in whatever files."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def source_weights(folder: Path, dtype: torch.dtype) -> Tensors:
    """Return the weights of a checkpoint as torch casts them."""
    tag = (folder / "latest").read_text()
    return {name: tensor.to(dtype) for name, tensor in whole_weights(folder / tag).items()}


def objects_of(store: Store, ref: str, *kinds: Kind) -> list[Path]:
    """Return the files of all objects of some kinds."""
    repo = store.repo
    versions = [repo.version_of(entry) for entry in store.compose(ref).composition.layers]
    ids = {stored.id for version in versions for stored in version.objects if stored.kind in kinds}
    return [repo.layout.object(object_id) for object_id in sorted(ids)]


def is_block(name: str) -> bool:
    """Whether *name* is a block, or of one."""
    return "layers" in name


def mixed(store: Store, base: str, other: str, is_other: Callable[[str], bool] = is_block) -> Composite:
    """Return *base* with some layers of *other*, by default the blocks."""
    composition = store.compose(base).composition
    theirs = {entry.layer: entry for entry in store.compose(other).composition.layers}
    layers = tuple(theirs[entry.layer] if is_other(entry.layer) else entry for entry in composition.layers)
    return Composite(store.repo, replace(composition, layers=layers))


SHAPES: dict[str, dict[str, Any]] = INGESTED | {"whole pages": {"hidden": 64, "vocab": 64, "world_size": 2}}


@pytest.mark.parametrize("dtype", [None, *DTYPES])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.sample(16)
def test_an_export_is_what_torch_makes_of_the_masters(
    store: Store, tmp_path: Path, shape: dict[str, Any], dtype: DTypeName | None
) -> None:
    """Every parameter once, cast from its master, or from its weights where they are frozen, to the last bit."""
    source = checkpoint(tmp_path, **shape)
    store.ingest(source)

    exported = store.compose("sft").export(tmp_path / "out", dtype=dtype)

    trained_in = shape.get("precision", "bf16")
    assert exported.dtype == (dtype or trained_in)
    assert not differing(source_weights(source, DTYPES[dtype or trained_in]), weights_in(exported.out))
    assert exported.bytes_written == sum(path.stat().st_size for path in exported.out.iterdir())
    assert sorted(exported.files) == sorted(path.name for path in exported.out.iterdir())


@pytest.mark.parametrize("padding", ["", "x" * 100_000])
def test_what_belongs_to_the_model_goes_along(store: Store, tmp_path: Path, padding: str) -> None:
    """Byte for byte, but for the type in the config; also what is large enough to be an object of its own."""
    source = checkpoint(tmp_path, layout="hf")
    config = {"model_type": "llama", "dtype": "bfloat16", "padding": padding}
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer.json").write_text(f'["{padding}"]')
    for name in ("training_args.bin", "optimizer.pt"):
        (source / name).write_bytes(b"training")
    store.ingest(source)

    exported = store.compose("sft").export(tmp_path / "out", dtype="fp32")
    same = store.compose("sft").export(tmp_path / "same")

    assert json.loads((exported.out / "config.json").read_text()) == config | {"dtype": "float32"}
    assert exported.notes == ("config.json is changed to float32, the element type of the weights",)
    assert set(same.files) == {"model.safetensors", "tokenizer.json", "config.json", "layerstore.json"}
    assert all(
        (source / name).read_bytes() == (same.out / name).read_bytes()
        for name in set(same.files) - {"model.safetensors", "layerstore.json"}
    )
    assert same.notes == ()


@pytest.mark.parametrize(("config", "note"), [(None, "no config.json"), ("{torn", "not JSON")])
def test_weights_are_written_also_without_a_config(store: Store, tmp_path: Path, config: str | None, note: str) -> None:
    """A raw save folder has none; one that cannot be read is written as it is. A note says so."""
    source = checkpoint(tmp_path, layout="hf" if config else "raw")
    if config is not None:
        (source / "config.json").write_text(config)
    store.ingest(source)

    exported = store.compose("sft").export(tmp_path / "out")

    assert exported.files == ("model.safetensors", *(["config.json"] if config else []), "layerstore.json")
    assert config is None or (exported.out / "config.json").read_text() == config
    assert note in exported.notes[0]


# -- what is read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_an_export_needs_nothing_of_the_optimizer(store: Store, tmp_path: Path, dtype: DTypeName | None) -> None:
    """With all its objects deleted the weights are the same, and verified."""
    source = checkpoint(tmp_path, layout="hf", frozen=("model.layers.0",))
    store.ingest(source)
    expected = digests(store.compose("sft").export(tmp_path / "before", dtype=dtype).out)
    removed = objects_of(store, "sft", Kind.OPTIMIZER)
    for path in removed:
        path.unlink()

    exported = store.compose("sft").export(tmp_path / "after", dtype=dtype)

    assert removed
    assert expected == digests(exported.out)
    with pytest.raises(IntegrityError, match="is missing"):
        store.compose("sft").write(tmp_path / "shards")


@pytest.mark.parametrize("kind", [Kind.MASTER, Kind.WEIGHTS])
@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_a_flipped_bit_is_found_before_the_folder_appears(
    store: Store, tmp_path: Path, kind: Kind, dtype: DTypeName | None
) -> None:
    """In any object that is read, whether copied or converted; unverified, it is not looked for."""
    store.ingest(checkpoint(tmp_path, frozen=("model.layers.0",)))
    damaged = objects_of(store, "sft", kind)[-1]
    data = bytearray(damaged.read_bytes())
    data[-3] ^= 0x10
    damaged.write_bytes(data)
    neighbours = sorted(tmp_path.iterdir())

    with pytest.raises(IntegrityError, match=f"object {damaged.name} is damaged"):
        store.compose("sft").export(tmp_path / "out", dtype=dtype)

    assert neighbours == sorted(tmp_path.iterdir())
    assert store.compose("sft").export(tmp_path / "out", dtype=dtype, verify=False).out.is_dir()


def test_masters_move_in_the_kernel_in_whole_pages(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fp32 nothing passes through the process, and what fills pages starts on them in both files."""
    store.ingest(checkpoint(tmp_path, hidden=64, vocab=64, world_size=2))
    moved: list[tuple[int, int, int]] = []
    original = os.copy_file_range

    def copy(source: int, target: int, count: int, offset_src: int, offset_dst: int) -> int:
        moved.append((offset_src, offset_dst, count))
        return original(source, target, count, offset_src, offset_dst)

    monkeypatch.setattr(os, "copy_file_range", copy)
    monkeypatch.setattr(assemble, "convert", None)

    exported = store.compose("sft").export(tmp_path / "out", dtype="fp32")

    whole = [piece for piece in moved if piece[2] % PAGE_BYTES == 0]
    assert sum(count for _, _, count in moved) == sum(
        tensor.numel() * 4 for tensor in weights_in(exported.out).values()
    )
    assert sum(count for _, _, count in whole) > 0.9 * sum(count for _, _, count in moved)
    assert all(source % PAGE_BYTES == target % PAGE_BYTES == 0 for source, target, _ in whole)


# -- stored weights ------------------------------------------------------------------------------------------------


def test_stored_weights_are_taken_in_their_own_type_and_masters_in_any_other(store: Store, tmp_path: Path) -> None:
    """What the trainer saved is what it gets back; what it did not save is rounded from what is known best."""
    source = checkpoint(tmp_path, layout="hf")
    change_gathered(source, NORM)
    store.ingest(source)
    saved, masters = load_file(source / "model.safetensors"), source_weights(source, torch.float32)
    assert differing(saved, source_weights(source, torch.bfloat16)) == [NORM]

    dtypes: tuple[DTypeName | None, ...] = (None, "bf16", "fp16")
    default, asked, other = (
        weights_in(store.compose("sft").export(tmp_path / f"{dtype}", dtype=dtype).out) for dtype in dtypes
    )

    assert not differing(saved, default)
    assert not differing(saved, asked)
    assert not differing({name: master.half() for name, master in masters.items()}, other)


def test_rounding_that_differs_from_the_trainers_stops_an_export(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the trainer's own file tells the checksum, in the same type, of the same layer."""
    store.ingest(checkpoint(tmp_path, layout="hf"))
    monkeypatch.setattr(assemble, "convert", rounded_differently)

    with pytest.raises(IntegrityError, match="rounded from its master, does not match"):
        store.compose("sft").export(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert store.compose("sft").export(tmp_path / "out", dtype="fp16").out.is_dir()


def test_values_beyond_the_range_become_infinite_and_are_noted(store: Store, tmp_path: Path) -> None:
    """With the first tensor's name and their number; infinities that were there are not counted."""
    source = checkpoint(tmp_path, world_size=1)
    _poke_masters(source, [65504.0, 65519.9, 65520.0, -1e30, float("inf"), float("nan")])
    store.ingest(source)

    exported = store.compose("sft").export(tmp_path / "out", dtype="fp16")
    same = store.compose("sft").export(tmp_path / "same", dtype="fp32")

    tensors = weights_in(exported.out)
    (name,) = (name for name, tensor in tensors.items() if tensor.isnan().any())
    assert tensors[name].flatten()[:5].tolist() == [65504.0, 65504.0, float("inf"), float("-inf"), float("inf")]
    assert any(f"2 values of {name!r} are beyond the range of fp16" in note for note in exported.notes)
    assert not any("range" in note for note in same.notes)


def _poke_masters(source: Path, values: list[float]) -> None:
    """Put *values* at the start of the first group's masters, and the right checksum around them."""
    (path,) = source.glob("*/*optim_states.pt")
    tree: Any = read_pt(path).tree
    poked = tree["optimizer_state_dict"]["fp32_flat_groups"][0].storage
    data = bytearray(path.read_bytes())
    start = poked.content.offset_bytes
    data[start : start + 4 * len(values)] = struct.pack(f"<{len(values)}f", *values)
    held = {}
    layout = layout_pt(tree, name=path.stem, alignment_bytes=64)
    for storage, offset in layout.storages:
        located = storage.content
        assert isinstance(located, Located)
        content = bytes(data[located.offset_bytes : located.offset_bytes + located.size_bytes])
        held[storage] = zlib.crc32(content)
        assert offset == located.offset_bytes
    for offset, literal in layout.skeleton(held):
        data[offset : offset + len(literal)] = literal
    path.write_bytes(data)


# -- composites ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(2, 2), (1, 3), (3, 2)])
@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_layers_of_two_steps_and_of_any_number_of_ranks_make_one_export(
    store: Store, tmp_path: Path, ranks: tuple[int, int], dtype: DTypeName | None
) -> None:
    """Each tensor comes from the step that its layer was chosen from."""
    sources = {
        step: checkpoint(tmp_path, step=step, world_size=world_size, layout="hf", hidden=18)
        for step, world_size in zip((2, 4), ranks, strict=True)
    }
    for source in sources.values():
        store.ingest(source)
    composite = mixed(store, "sft@4", "sft@2")
    per_step = {step: source_weights(source, DTYPES[dtype or "bf16"]) for step, source in sources.items()}

    exported = composite.export(tmp_path / "out", dtype=dtype)

    expected = {name: per_step[2 if is_block(name) else 4][name] for name in per_step[4]}
    assert all(differing(weights, expected) for weights in per_step.values())
    assert not differing(expected, weights_in(exported.out))


# -- shards --------------------------------------------------------------------------------------------------------


def test_shards_and_their_index_hold_every_tensor_once(store: Store, tmp_path: Path) -> None:
    """In the model's own order, and no file larger than was asked for, unless one tensor is; the index names each."""
    source = checkpoint(tmp_path, layout="hf", layers=12)
    store.ingest(source)

    exported = store.compose("sft").export(tmp_path / "out", max_shard_size="4KB")

    index = json.loads((exported.out / "model.safetensors.index.json").read_text())
    shards = sorted(exported.out.glob("model-*-of-*.safetensors"))
    assert [path.name for path in shards] == [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    assert not (exported.out / "model.safetensors").exists()
    assert index["weight_map"] == {name: path.name for path in shards for name in load_file(path)}
    sizes = {path: [tensor.nbytes for tensor in load_file(path).values()] for path in shards}
    assert all(sum(of_shard) <= 4000 or len(of_shard) == 1 for of_shard in sizes.values())
    assert index["metadata"]["total_size"] == sum(map(sum, sizes.values()))
    assert not differing(source_weights(source, torch.bfloat16), weights_in(exported.out))
    assert all(header_of(path)[0]["__metadata__"] == {"format": "pt"} for path in shards)
    names = list(rank_trees(source / "global_step2", 0)["model_states"]["module"])
    in_order = [index["weight_map"][name] for name in names]
    assert in_order == sorted(in_order)
    assert [index["weight_map"][name] for name in sorted(names)] != in_order


def test_a_plan_writes_nothing_and_tells_every_file(store: Store, tmp_path: Path) -> None:
    """With the sizes that an export then has."""
    store.ingest(checkpoint(tmp_path, layout="hf"))
    composite = store.compose("sft")
    neighbours = sorted(tmp_path.iterdir())

    plan = composite.plan("hf", max_shard_size="2KB")
    assert isinstance(plan, ExportPlan)

    assert neighbours == sorted(tmp_path.iterdir())
    exported = composite.export(tmp_path / "out", max_shard_size="2KB")
    assert {file.path: file.size_bytes for file in plan.files} == {
        path.name: path.stat().st_size for path in exported.out.iterdir()
    }


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"max_shard_size": "many"}, {"max_shard_size": 0}])
def test_bad_options_are_refused_before_anything_is_read(store: Store, tmp_path: Path, options: dict[str, Any]) -> None:
    """And nothing is written."""
    store.ingest(checkpoint(tmp_path))

    with pytest.raises(InvalidInput):
        store.compose("sft").export(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


# -- what goes beside the weights ----------------------------------------------------------------------------------


def test_small_files_of_the_model_go_along_and_those_of_training_do_not() -> None:
    """Whatever a tokenizer or processor calls its files."""
    expected = {**dict.fromkeys(ALONG.split(), True), **dict.fromkeys(NOT_ALONG.split(), False)}

    assert expected == {path: goes_along(path, tag="global_step2") for path in expected}


def test_a_config_is_told_the_type_and_nothing_else() -> None:
    """Under the name that it uses, in the configs inside it too, but not in how a quantizer computes."""
    config: dict[str, object] = {
        "model_type": "both",
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "size": 1},
        "vision_config": {"depth": 2},
        "quantization_config": {"dtype": "bfloat16"},
    }

    changed = config_with_dtype(config, "F32")

    assert list(changed) == list(config)
    assert changed == config | {"torch_dtype": "float32", "text_config": {"dtype": "float32", "size": 1}}
    # Without a type, older versions of Transformers would widen everything.
    assert config_with_dtype({"model_type": "llama"}, "F16")["torch_dtype"] == "float16"


@pytest.mark.parametrize("config", [b"", b"[1]", b"{", b"\xff", b"null", b"[" * 100_000])
def test_a_config_that_is_none_is_not_guessed_at(config: bytes) -> None:
    """The caller is told by a ValueError."""
    with pytest.raises(ValueError, match=r"."):
        parse_config(config)
