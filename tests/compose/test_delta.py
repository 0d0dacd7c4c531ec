"""Deltas: what changed between two exports, read as slime, SGLang and vLLM read it, and put onto the first."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from safetensors import safe_open

import layerstore
from layerstore import DeltaWritten, Keep, Store
from layerstore.delta import ENCODINGS, Encoding
from layerstore.delta.codec import decode_into, encode_tensor
from layerstore.delta.delta_folder import DeltaWriter, read_delta
from layerstore.disk import Files, NewFile
from layerstore.dtypes import DTYPES, DType
from layerstore.errors import AlreadyExists, InvalidInput, LayoutMismatch, SourceCheckpoint, Unsupported
from tests.compose.test_hf import mixed, weights_in
from tests.unit.checkpoints import checkpoint, digests

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

LACKS = "is not a whole delta: it lacks"

each_encoding = pytest.mark.parametrize("encoding", ENCODINGS)


@pytest.fixture
def store(store: Store, tmp_path: Path) -> Store:
    """Return a store of three saves; of the second only the blocks are others than in the first."""
    for step in (2, 4, 6):
        store.ingest(checkpoint(tmp_path / "in", step=step, seed=step))
    mixed(store, "sft@2", "sft@4").pin("moved")
    return store


def export(store: Store, ref: str, out: Path, **options: Any) -> Path:
    """Return the export of a commit in bf16."""
    return store.compose(ref).export(out, dtype="bf16", **options).out


def delta(store: Store, out: Path, *, ref: str = "moved", **options: Any) -> DeltaWritten:
    """Return the delta from the first save."""
    written = store.compose(ref).export(out, format="delta", since="sft@2", **{"dtype": "bf16", **options})
    assert isinstance(written, DeltaWritten)
    return written


@each_encoding
@pytest.mark.parametrize("shard", ["5GB", "2KB"])
def test_put_onto_the_base_it_makes_the_target(store: Store, tmp_path: Path, encoding: Encoding, shard: str) -> None:
    """Byte for byte, whatever files the base has; what is as it should be already is not written again."""
    base = export(store, "sft@2", tmp_path / "base", max_shard_size=shard)
    target = export(store, "moved", tmp_path / "target", max_shard_size=shard)
    written = delta(store, tmp_path / "delta", encoding=encoding)

    applied = layerstore.apply(written.out, base)
    again = layerstore.apply(written.out, base)

    assert digests(base) == digests(target)
    assert 0 < applied.tensors_changed == applied.tensors == written.tensors_changed < written.tensors
    assert (again.tensors_changed, again.bytes_written) == (0, 0)
    assert (applied.base_name, applied.name) == ("sft@2", "a composite of sft@2")
    assert json.loads((base / "layerstore.json").read_text())["delta"]["since"] == "sft@2"
    assert written.bytes_written == sum(path.stat().st_size for path in written.out.iterdir())


def test_sglang_reads_it(store: Store, tmp_path: Path) -> None:
    """The folder is as slime publishes it: an index between versions, and a checksum of each new tensor."""
    base, target = (
        {name: tensor.view(torch.uint8).numpy().ravel() for name, tensor in weights_in(folder).items()}
        for folder in (export(store, ref, tmp_path / ref) for ref in ("sft@2", "sft@4"))
    )
    written = delta(store, tmp_path / "delta", ref="sft@4")

    index = json.loads((written.out / INDEX).read_text())
    facts = {key: value for key, value in index["metadata"].items() if key != "base_checksums"}
    assert facts == {
        "version": "000004",
        "base_version": "000002",
        "name": "sft@4",
        "base_name": "sft@2",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    for name, file in index["weight_map"].items():
        with safe_open(written.out / file, framework="np") as opened:
            changed = zstandard.ZstdDecompressor().decompress(opened.get_tensor(name).tobytes())
            made = (base[name] ^ np.frombuffer(changed, np.uint8)).tobytes()
            assert made == target[name].tobytes()
            assert opened.metadata()[name] == xxhash.xxh3_128(made).hexdigest()
    sums = {name: xxhash.xxh3_128(data.tobytes()).hexdigest() for name, data in base.items()}
    assert index["metadata"]["base_checksums"] == sums
    unchanged = base.keys() - index["weight_map"].keys()
    assert all(base[name].tobytes() == target[name].tobytes() for name in unchanged)


def test_vllm_gets_flat_indices_and_values(store: Store, tmp_path: Path) -> None:
    """Of exactly the elements that changed, in order."""
    base, target = (weights_in(export(store, ref, tmp_path / ref)) for ref in ("sft@2", "moved"))
    written = delta(store, tmp_path / "delta", encoding="sparse")

    parts = weights_in(written.out)
    names = {key.removesuffix(".indices") for key in parts if key.endswith(".indices")}
    total = 0
    for name in names:
        indices, values = parts[f"{name}.indices"], parts[f"{name}.values"]
        total += len(indices)
        made = base[name].flatten()
        assert (made[indices] != values).all()
        made[indices.long()] = values
        assert made.equal(target[name].flatten())
    assert total == written.elements_changed


def test_equal_weights_are_an_empty_delta(store: Store, tmp_path: Path) -> None:
    """Which changes nothing."""
    written = delta(store, tmp_path / "delta", ref="sft@2")
    base = export(store, "sft@2", tmp_path / "base")

    assert written.tensors_changed == 0
    assert layerstore.apply(written.out, base).tensors == 0
    assert "both are of step 2: a reader that compares versions sees no change" in written.notes
    with pytest.raises(LayoutMismatch, match="does not match sft@2, which the delta is for; nothing was changed"):
        layerstore.apply(written.out, export(store, "sft@4", tmp_path / "other"))


def test_a_missed_delta_is_told(store: Store, tmp_path: Path) -> None:
    """Even if the next one changes other tensors: those that it leaves are compared too."""
    base = export(store, "sft@2", tmp_path / "base")
    second = store.compose("sft@4").export(tmp_path / "second", format="delta", since="moved", dtype="bf16")
    assert not weights_in(second.out).keys() & weights_in(delta(store, tmp_path / "first").out).keys()

    with pytest.raises(
        LayoutMismatch, match="does not match a composite of sft@2, which the delta is for; nothing was changed"
    ):
        layerstore.apply(second.out, base)

    layerstore.apply(tmp_path / "first", base)
    layerstore.apply(second.out, base)
    assert (base / WEIGHTS).read_bytes() == (export(store, "sft@4", tmp_path / "target") / WEIGHTS).read_bytes()


def test_an_average_has_a_delta_too(store: Store, tmp_path: Path) -> None:
    """As every composite that can be exported."""
    mean = store.average("sft@2,sft@4")
    base = export(store, "sft@2", tmp_path / "base")
    written = mean.export(tmp_path / "delta", format="delta", since="sft@2", dtype="bf16")

    layerstore.apply(written.out, base)

    assert (base / WEIGHTS).read_bytes() == (mean.export(tmp_path / "mean", dtype="bf16").out / WEIGHTS).read_bytes()


@each_encoding
@pytest.mark.parametrize("row", DTYPES, ids=lambda row: row.code)
def test_every_element_type_has_a_delta(tmp_path: Path, row: DType, encoding: Encoding) -> None:
    """Whose values have its own code in the file."""
    old, new = (np.zeros(5 * row.bytes, np.uint8) for _ in range(2))
    new[-row.bytes :] = 1
    writer = DeltaWriter(Files(), tmp_path, encoding)
    parts, count = encode_tensor("x", old.data, new.data, dtype=row.code, encoding=encoding)
    writer.add("x", parts, base="before", target="after")
    writer.finish(version=2, base_version=1, name="b", base_name="a")

    tensor = read_delta(tmp_path).tensors["x"]
    made = bytearray(old)
    decode_into(made, tensor.read(), dtype=row.code, encoding=encoding)

    assert bytes(made) == new.tobytes()
    assert (count, tensor.base, tensor.target) == (1, "before", "after")
    codes = {"x": "U8"} if encoding == "xor" else {"x.indices": "I32", "x.values": row.code}
    with safe_open(tmp_path / "model-00000.safetensors", framework="np") as opened:
        assert {key: opened.get_slice(key).get_dtype() for key in codes} == codes


# -- what is refused ---------------------------------------------------------------------------------------------------


@each_encoding
def test_another_base_is_refused(store: Store, tmp_path: Path, encoding: Encoding) -> None:
    """Before anything is written."""
    other = export(store, "sft@6", tmp_path / "other")
    written = delta(store, tmp_path / "delta", encoding=encoding)
    before = digests(other)

    with pytest.raises(LayoutMismatch, match="does not match sft@2, which the delta is for; nothing was changed"):
        layerstore.apply(written.out, other)

    assert digests(other) == before


def test_a_folder_of_another_model_is_refused(store: Store, tmp_path: Path) -> None:
    """It has no such tensors."""
    store.ingest(checkpoint(tmp_path / "other", layers=1), run="small")
    other = export(store, "small", tmp_path / "model")
    written = delta(store, tmp_path / "delta")

    with pytest.raises(LayoutMismatch, match=r"has no tensor .*, which the delta names; nothing was changed"):
        layerstore.apply(written.out, other)


def test_two_models_have_no_delta(store: Store, tmp_path: Path) -> None:
    """Their tensors are not the same kind."""
    store.ingest(checkpoint(tmp_path / "other", layers=1), run="small")

    with pytest.raises(LayoutMismatch, match="is not the same kind of tensor in sft@2 and in small@2; nothing was"):
        delta(store, tmp_path / "delta", ref="small")

    assert not (tmp_path / "delta").exists()


def test_a_damaged_delta_changes_nothing(store: Store, tmp_path: Path) -> None:
    """Each tensor is compared with its checksum before any file is replaced."""
    base = export(store, "sft@2", tmp_path / "base", max_shard_size="2KB")
    written = delta(store, tmp_path / "delta", encoding="sparse")
    path = written.out / "model-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = digests(base)

    with pytest.raises(SourceCheckpoint, match="does not match its checksum after applying the delta; nothing was"):
        layerstore.apply(written.out, base)

    assert digests(base) == before
    assert not [path for path in base.iterdir() if "partial" in path.name]


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change the index of the delta in *folder*."""
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda index: index["metadata"].update(delta_encoding="gap"), Unsupported, "is encoded as gap"),
        (lambda index: index["metadata"].update(compression_format="lz4"), Unsupported, "is encoded as xor (lz4)"),
        (lambda index: index["metadata"].update(checksum_format="adler32"), Unsupported, "with checksums of adler32"),
        (lambda index: index["weight_map"].popitem(), SourceCheckpoint, f"{LACKS} a file that fits its index"),
        (lambda index: index.pop("weight_map"), SourceCheckpoint, f"{LACKS} its index"),
        (lambda index: index["weight_map"].update(more="../m"), SourceCheckpoint, f"{LACKS} the file '../m'"),
        (lambda index: index["weight_map"].update(more=[]), SourceCheckpoint, f"{LACKS} the file '[]'"),
    ],
)
def test_what_its_index_says_else_is_refused(
    store: Store, tmp_path: Path, change: Callable[[dict[str, Any]], object], error: type[Exception], message: str
) -> None:
    """Other encodings by name, and of what is not whole what it lacks."""
    base, written = export(store, "sft@2", tmp_path / "base"), delta(store, tmp_path / "delta")

    with pytest.raises(error, match=re.escape(message)):
        layerstore.apply(changed(written.out, change), base)


def test_its_index_need_not_say_a_version(store: Store, tmp_path: Path) -> None:
    """It is for those who write one."""
    base, written = export(store, "sft@2", tmp_path / "base"), delta(store, tmp_path / "delta")

    applied = layerstore.apply(changed(written.out, lambda index: index["metadata"].update(version=None)), base)

    assert applied.tensors_changed


def test_what_is_no_delta_is_refused(store: Store, tmp_path: Path) -> None:
    """An export has an index too, or none."""
    base = export(store, "sft@2", tmp_path / "base")
    sharded = export(store, "sft@2", tmp_path / "sharded", max_shard_size="2KB")

    for folder in (base, sharded, tmp_path / "nowhere"):
        with pytest.raises(SourceCheckpoint, match=r"is not a delta: no .* in it says how it is encoded"):
            layerstore.apply(folder, base)
    with pytest.raises(SourceCheckpoint, match="has no weights files"):
        layerstore.apply(delta(store, tmp_path / "delta").out, tmp_path)


def test_a_folder_that_is_more_than_weights_is_refused(store: Store, tmp_path: Path) -> None:
    """Shards beside would not fit the weights any more; a link's target is somebody else's; of two, which is read?"""
    written = delta(store, tmp_path / "delta")
    whole = export(store, "sft@2", tmp_path / "whole")
    shutil.copytree(tmp_path / "in" / "sft" / "checkpoint-2", whole, dirs_exist_ok=True)
    before = digests(whole)
    with pytest.raises(LayoutMismatch, match="is a checkpoint to resume from, whose shards the new weights would"):
        layerstore.apply(written.out, whole)
    assert digests(whole) == before

    base = export(store, "sft@2", tmp_path / "base")
    shutil.copy(base / WEIGHTS, base / "consolidated.safetensors")
    with pytest.raises(SourceCheckpoint, match=r"is in consolidated.safetensors and in model.safetensors; nothing"):
        layerstore.apply(written.out, base)
    (base / WEIGHTS).rename(tmp_path / WEIGHTS)
    (base / "consolidated.safetensors").unlink()
    (base / WEIGHTS).symlink_to(tmp_path / WEIGHTS)
    with pytest.raises(SourceCheckpoint, match="is a link; nothing was changed"):
        layerstore.apply(written.out, base)


@pytest.mark.parametrize("durable", [True, False])
def test_its_files_are_synced_where_that_is_asked_for(store: Store, tmp_path: Path, durable: bool) -> None:
    """As those of other formats are; without, only the folder's own name is."""
    with patch.object(NewFile, "sync", autospec=True, side_effect=NewFile.sync) as sync:
        written = delta(store, tmp_path / "delta", durable=durable)

    assert sync.call_count == (len(written.files) if durable else 0)


def test_a_delta_and_an_export_do_not_replace_each_other(store: Store, tmp_path: Path) -> None:
    """Not even with force: they are for different readers."""
    base = export(store, "sft@2", tmp_path / "base", max_shard_size="2KB")
    written = delta(store, tmp_path / "delta")

    with pytest.raises(AlreadyExists, match="is an export, not a delta, so it is not replaced"):
        delta(store, base, force=True)
    with pytest.raises(AlreadyExists, match="is a delta"):
        export(store, "sft@2", written.out, force=True)
    assert delta(store, written.out, force=True).tensors_changed == written.tensors_changed


def test_an_unknown_encoding_is_refused(store: Store, tmp_path: Path) -> None:
    """With those that there are."""
    with pytest.raises(InvalidInput, match="encoding is 'gap', but must be 'xor' or 'sparse'"):
        delta(store, tmp_path / "delta", encoding="gap")


def test_moments_are_not_needed(store: Store, tmp_path: Path) -> None:
    """As for every export."""
    store.gc(Keep(last=8, drop_optimizer_older_than=1), grace_seconds=0)

    assert delta(store, tmp_path / "delta", ref="sft@4").tensors_changed


# -- kills -------------------------------------------------------------------------------------------------------------


def test_a_kill_between_two_files_is_finished_by_the_same_command(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some files are old then and some new: each tensor says which it is."""
    base = export(store, "sft@2", tmp_path / "base", max_shard_size="2KB")
    target = export(store, "moved", tmp_path / "target", max_shard_size="2KB")
    written = delta(store, tmp_path / "delta")
    renamed: list[Path] = []
    rename = Files.rename

    def killed(files: Files, source: Path, path: Path) -> None:
        if len(renamed) == 1:
            os.kill(os.getpid(), 9)
        renamed.append(path)
        rename(files, source, path)

    monkeypatch.setattr(Files, "rename", killed)
    child = os.fork()
    if not child:
        try:
            layerstore.apply(written.out, base)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 9
    monkeypatch.undo()
    assert digests(base) != digests(target)

    assert 0 < layerstore.apply(written.out, base).tensors_changed < written.tensors_changed
    assert digests(base) == digests(target)
    shutil.rmtree(base)
