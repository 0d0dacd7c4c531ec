"""
Bad checkpoints: refused with what was asked, what was found and what to do, and the store is as it was.

Each is a sound checkpoint with one thing wrong. What the support page refuses is refused in the page's words.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerstore.errors import (
    InvalidInput,
    LayerstoreError,
    LayoutMismatch,
    NotFound,
    SourceCheckpoint,
    Unsupported,
)
from layerstore.ingest import Ingested
from layerstore.store import Store, init
from layerstore.tree import Global, Inert, Located, OrderedMap, Size, Storage, Tensor
from layerstore.zero3.pt import Pickles, read_pt
from tests.environment import REPOSITORY
from tests.faults.harness import composed, copied, in_child, problems, refused, said_well, seeded, tiny_checkpoint
from tests.generated import generate
from tests.zero3.hostile.archives import HOSTILE_ARCHIVES, torch_like
from tests.zero3.hostile.pickles import HOSTILE_PICKLES, SLOW_PICKLES
from tests.zero3.ptfiles import write_pt

TAG = "global_step2"
HF = "checkpoint-2"


@pytest.fixture(scope="module")
def originals(fast_module_path: Path) -> Path:
    """Return a folder with a store that holds ``other@2``, and checkpoints: raw, HF, and of another step or size."""
    tiny_checkpoint(fast_module_path / "raw")
    tiny_checkpoint(fast_module_path / HF, layout="hf")
    tiny_checkpoint(fast_module_path / "later", step=4)
    tiny_checkpoint(fast_module_path / "three", world_size=3)
    tiny_checkpoint(fast_module_path / "two", stage=2)
    generate(fast_module_path / "frozen", layers=1, hidden=8, vocab=16, frozen=("model.embed_tokens",))
    with init(fast_module_path / "store") as store:
        store.ingest(fast_module_path / "raw", run="other")
    return fast_module_path


@pytest.fixture
def place(originals: Path, fast_path: Path) -> Path:
    """Return a copy of ``originals``."""
    return copied(originals, fast_path / "place")


def ingest(place: Path, source: str = "raw", **options: Any) -> Ingested:
    """Ingest a checkpoint of *place* as the run ``run``."""
    with Store(place / "store") as store:
        return store.ingest(place / source, **{"run": "run"} | options)


def shards(place: Path, what: str = "", *, of: str = "raw") -> list[Path]:
    """Return the shards of a raw checkpoint whose names contain *what*."""
    return sorted(path for path in (place / of / TAG).iterdir() if what in path.name)


# -- what does not add up ------------------------------------------------------------------------------------------

Edit = Callable[[Path], object]
"""Changes checkpoints of a place."""


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Let *change* alter the tree of a ``.pt`` file."""
    tree = read_pt(path).tree
    change(tree)
    aside = path.parent / "aside" / path.name
    aside.parent.mkdir(exist_ok=True)
    write_pt(aside, tree)
    aside.replace(path)
    aside.parent.rmdir()


def _edited(what: str, change: Callable[[Any], object], *, of: str = "raw") -> Edit:
    """Return what changes the trees of *what* files; of optimizers, the part that is ZeRO's."""

    def change_all(place: Path) -> None:
        for path in shards(place, what, of=of):
            edit(path, (lambda tree: change(tree["optimizer_state_dict"])) if what == "optim" else change)

    return change_all


def _model(**fields: object) -> Edit:
    return _edited("model", lambda tree: tree.update(fields))


def _optimizer(**fields: object) -> Edit:
    return _edited("optim", lambda tree: tree.update(fields))


def _without(what: str, name: str) -> Edit:
    return _edited(what, lambda tree: tree.pop(name))


def _setting(name: str, value: object, *, of: str = "raw") -> Edit:
    return _edited("model", lambda tree: tree["ds_config"]["zero_optimization"].update({name: value}), of=of)


def _mesh(data: int, sequence: int) -> Edit:
    sizes = {"data_parallel_size": data, "sequence_parallel_size": sequence}
    return _edited("model", lambda tree: tree["ds_config"].update(sizes))


def _both(*edits: Edit) -> Edit:
    return lambda place: [each(place) for each in edits]


def _stage(number: int) -> Inert:
    return Inert(name="deepspeed.runtime.zero.config.ZeroStageEnum", arguments=(number,))


def _removed(what: str) -> Edit:
    def remove(place: Path) -> None:
        for path in shards(place, what):
            path.unlink()

    return remove


def _only(name: str) -> Edit:
    return _both(_removed(""), lambda place: (place / "raw" / TAG / name).write_bytes(b"?"))


def _file(name: str, content: bytes | str) -> Edit:
    data = content.encode() if isinstance(content, str) else content
    return lambda place: (place / name).write_bytes(data)


def _shard(what: str, change: Callable[[bytes], bytes]) -> Edit:
    def change_one(place: Path) -> None:
        path = shards(place, what)[-1]
        path.write_bytes(change(path.read_bytes()))

    return change_one


def _copies(what: str, *, of: str, to: str = "rank_1") -> Edit:
    """Return what puts the *what* files of rank 1, or of another checkpoint's, in the place of those called *to*."""

    def copy(place: Path) -> None:
        for path in shards(place, what):
            if "rank_1" in path.name:
                (source,) = (place / of).glob(f"*/{path.name}")
                shutil.copy(source, path.with_name(path.name.replace("rank_1", to)))

    return copy


def _swapped(what: str) -> Edit:
    def swap(place: Path) -> None:
        first, second = shards(place, what)
        aside = first.rename(place / "aside")
        second.rename(first)
        aside.rename(second)

    return swap


def _renamed(what: str, old: str, new: str) -> Edit:
    def rename(place: Path) -> None:
        path = shards(place, what)[-1]
        path.rename(path.with_name(path.name.replace(old, new)))

    return rename


def _swapped_out(tree: Any) -> None:
    nothing = Storage(dtype="F32", elements=0, device="cpu", content=b"")
    tree["fp32_flat_groups"][0] = Tensor(storage=nothing, offset=0, shape=Size((0,)), stride=(1,))


def _shortened(groups: slice) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        states = tree["optimizer_state_dict"]["state"]
        for number in sorted(states)[groups]:
            moment = states[number]["exp_avg_sq"]
            states[number]["exp_avg_sq"] = replace(moment, shape=Size((moment.elements - 1,)))

    return change


def _address_of(tree: Any) -> Any:
    return list(tree["param_slice_mappings"][0].values())[-1].state


def _shorten_master(tree: Any) -> None:
    master = tree["single_partition_of_fp32_groups"][0]
    tree["single_partition_of_fp32_groups"][0] = replace(master, shape=Size((master.elements - 2,)))


def _reshape(tree: Any) -> None:
    weights = tree["module"]["model.norm.weight"]
    tree["module"]["model.norm.weight"] = replace(weights, shape=Size((weights.elements // 2,)))


def _in_two_sub_groups(tree: Any) -> None:
    first, second = tree["param_shapes"]
    names = [next(iter(first)), *list(second)[1:]]
    tree["param_shapes"][1] = OrderedMap(dict(zip(names, second.values(), strict=True)))


def _safetensors(*, shape: list[int], offsets: Sequence[float]) -> bytes:
    header = json.dumps({"a": {"dtype": "BF16", "shape": shape, "data_offsets": offsets}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(8)


_NO_STATES = _edited("optim", lambda tree: tree["optimizer_state_dict"]["state"].clear())
_OFFLOADING = {"device": "cpu", "ratio": 0.5}
_SUPER_OFFLOADING = {"device": "cpu", "super_offload": True}
_INDEX = "model.safetensors.index.json"

RAW: list[tuple[Edit, str, type[LayerstoreError]]] = [
    # Files.
    (_removed("rank_1_mp_rank_00_optim"), "is incomplete: optim_states of rank 1", SourceCheckpoint),
    (_removed("rank_1"), "missing: rank 1", SourceCheckpoint),
    (_removed("optim"), "has no optim_states files", Unsupported),
    (_copies("", of="raw", to="rank_2"), "holds files of 3 ranks", LayoutMismatch),
    (_shard("optim", lambda data: data[:-100]), "truncated: ", SourceCheckpoint),
    (_shard("model", lambda data: b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."), "model_states.pt", SourceCheckpoint),
    (_shard("model", lambda data: b"not a zip at all"), "model_states.pt", SourceCheckpoint),
    (_shard("model", lambda data: b""), "model_states.pt", SourceCheckpoint),
    (_shard("model", lambda data: torch_like()), "model_states.pt", SourceCheckpoint),
    (lambda place: (place / "raw" / TAG / "l").symlink_to("x"), "is a symbolic link", SourceCheckpoint),
    # Checkpoints of another kind.
    (_only("mp_rank_00_model_states.pt"), "has no optim_states files", Unsupported),
    (_only("layer_01-model_00-model_states.pt"), "pipeline-parallel", Unsupported),
    (
        _only("layer_0_expert_0_mp_rank_00_model_states.pt"),
        "is a mixture-of-experts (DeepSpeed's own) checkpoint, which is not supported",
        Unsupported,
    ),
    (_only("zero"), "universal", Unsupported),
    (_only(".metadata"), "holds distributed checkpoints", SourceCheckpoint),
    (_only("__0_0.distcp"), "holds distributed checkpoints", SourceCheckpoint),
    (
        _optimizer(zero_stage=_stage(2)),
        "has a name of stage 3, but the optimizer was saved under ZeRO stage 2",
        Unsupported,
    ),
    (_optimizer(zero_stage=_stage(4)), "was saved under ZeRO stage 4", Unsupported),
    (_model(param_shapes=None), "was saved under ZeRO stage 0", Unsupported),
    (_model(mp_world_size=2), "tensor parallelism of degree 2", Unsupported),
    (_renamed("model", "mp_rank_00", "mp_rank_01"), "tensor parallelism of degree 2", Unsupported),
    (_model(ds_autoep_layers=["x"]), "AutoEP layers", Unsupported),
    (_optimizer(ds_zero_partition_groups=["x"]), "AutoEP expert parallelism", Unsupported),
    (_setting("mics_shard_size", 2), "was saved under MiCS", Unsupported),
    (_mesh(2, 2), "was saved by 4 ranks whose state was shared among 2", Unsupported),
    # What was offloaded, and is not there.
    (lambda place: (place / "raw" / TAG / "offloaded_tensors").mkdir(), "offloaded to NVMe", Unsupported),
    (_edited("optim", _swapped_out), "its optimizer was offloaded to NVMe", Unsupported),
    (
        _edited("optim", lambda tree: tree["optimizer_state_dict"]["state"].pop(0)),
        "the rest was never saved",
        Unsupported,
    ),
    (_both(_NO_STATES, _setting("offload_optimizer", _OFFLOADING)), "never saved", Unsupported),
    (_both(_NO_STATES, _setting("offload_optimizer", _SUPER_OFFLOADING)), "", Unsupported),
    # Files that do not belong together.
    (_copies("", of="three"), "", LayoutMismatch),
    (_copies("", of="later"), "are mixed: ", LayoutMismatch),
    (_copies("optim", of="later"), "optimizer_steps", LayoutMismatch),
    (_copies("model", of="raw", to="rank_0"), "was saved as", LayoutMismatch),
    (_copies("", of="raw", to="rank_0"), "was saved as", LayoutMismatch),
    (_swapped("model"), "was saved as", LayoutMismatch),
    (_swapped("optim"), "was saved as", LayoutMismatch),
    (_renamed("optim", "bf16_", ""), "bf16_", LayoutMismatch),
    # Trees.
    (_model(mine=Inert(name="my.Config")), "names unknown globals: my.Config", SourceCheckpoint),
    (_without("model", "param_shapes"), "", SourceCheckpoint),
    (_without("model", "module"), "lacks module", SourceCheckpoint),
    (_without("model", "global_steps"), "", SourceCheckpoint),
    (_model(global_steps="two"), "", SourceCheckpoint),
    (_edited("model", lambda tree: tree["param_shapes"][0].popitem()), "", LayoutMismatch),
    (_without("optim", "fp32_flat_groups"), "", SourceCheckpoint),
    (_edited("optim", lambda tree: tree["fp32_flat_groups"].pop()), "", LayoutMismatch),
    (_without("optim", "partition_count"), "", SourceCheckpoint),
    (_edited("optim", _shortened(slice(1))), "exp_avg_sq", LayoutMismatch),
    (_edited("optim", _shortened(slice(None))), "exp_avg_sq", LayoutMismatch),
    (_edited("model", _in_two_sub_groups), "occurs twice", LayoutMismatch),
]

STAGE_2: list[tuple[Callable[[Any], object], str, str, type[LayerstoreError]]] = [
    # What is changed, in the files of what, the words, the kind.
    (lambda tree: tree.update(partition_count=[2, 3]), "optim", "is for 3 ranks, the model for 2", LayoutMismatch),
    (lambda tree: _address_of(tree).update(start=1), "optim", "order of its parameters puts it at", LayoutMismatch),
    (lambda tree: tree["param_slice_mappings"][0].popitem(), "optim", "but the order of its param", LayoutMismatch),
    (_shorten_master, "optim", "its parameters need", LayoutMismatch),
    (lambda tree: tree["param_alignment_paddings"][0].pop(), "optim", "does not fit the parameters", LayoutMismatch),
    (lambda tree: tree["param_alignment_paddings"][0].insert(0, -1), "optim", "does not fit", LayoutMismatch),
    (lambda tree: tree["single_partition_of_fp32_groups"].pop(), "optim", "has 1 flat groups", LayoutMismatch),
    (lambda tree: tree.update(base_optimizer_state=[]), "optim", "was saved with elastic_checkpoint", Unsupported),
    (
        lambda tree: tree.update(zero_stage=_stage(3)),
        "optim",
        "has a name of stages 1 and 2, but the optimizer was",
        Unsupported,
    ),
    (lambda tree: tree.pop("base_optimizer_state"), "optim", "lacks optimizer_state_dict", SourceCheckpoint),
    (lambda tree: tree.update(param_shapes=None), "model", "was saved under ZeRO stage 0", Unsupported),
    (lambda tree: tree.update(dp_world_size=3), "model", "", LayoutMismatch),
    (_reshape, "model", "the shape of parameter 'model.norm.weight' is", LayoutMismatch),
    (lambda tree: tree["module"].pop("model.norm.weight"), "model", "which the module does not have", LayoutMismatch),
    (lambda tree: tree["param_shapes"].reverse(), "model", "", LayoutMismatch),
]

FROZEN: list[tuple[Edit, str]] = [
    (_setting("offload_param", {"device": "nvme"}, of="frozen"), "frozen weights were offloaded"),
    (_setting("zero_quantized_nontrainable_weights", True, of="frozen"), "frozen weights were quantized"),
]

TRAINERS: list[tuple[Edit, str]] = [
    (_file(f"{HF}/checkpoint-is-incomplete.txt", ""), "is not finished: "),
    (lambda place: (place / HF / "rng_state_1.pth").unlink(), "the random state of rank 1"),
    (lambda place: (place / HF / "trainer_state.json").unlink(), "no trainer_state.json"),
    *(
        (_file(f"{HF}/trainer_state.json", text), "trainer_state.json")
        for text in (b"", b"{", b"[]", b'{"global_step": "2"}', b'{"global_step": -1}', b'{"global_step": true}')
    ),
    (_file(f"{HF}/trainer_state.json", b"\xff"), "trainer_state.json"),
    (_file(f"{HF}/trainer_state.json", "[" * 100_000), "trainer_state.json"),
    (_file(f"{HF}/trainer_state.json", json.dumps({"global_step": 10**30})), ""),
    (_file(f"{HF}/{_INDEX}", json.dumps({"weight_map": {"b": "absent.safetensors"}})), "absent.safetensors"),
    *((_file(f"{HF}/{_INDEX}", text), _INDEX) for text in ("", "[]", "{}", '{"weight_map": []}', "[" * 100_000)),
    *(
        (_file(f"{HF}/model.safetensors", _safetensors(shape=[1], offsets=offsets)), "not whole numbers")
        for offsets in ([0.0, 2.0], [0, 2.0], [False, 2], [-2, 0])
    ),
    *(
        (_file(f"{HF}/model.safetensors", data), "model.safetensors")
        for data in (
            b"",
            b"\xff" * 8,
            (8).to_bytes(8, "little") + b"[[[[[[[[",
            (2).to_bytes(8, "little") + b"{}x",
            (30).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1',
            _safetensors(shape=[10**4000] * 1000, offsets=[0, 8]),
            _safetensors(shape=[1] * 65, offsets=[0, 8]),
            _safetensors(shape=[0, 10**30], offsets=[0, 0]),
        )
    ),
]

REFUSED = [
    *(("raw", *row) for row in RAW),
    *(("frozen", *row, Unsupported) for row in FROZEN),
    *((HF, *row, SourceCheckpoint) for row in TRAINERS),
]


@pytest.mark.fault(57, 61, 62, 63, 64, 66, 67, 73, 153)
@pytest.mark.known_fault("llmtailor 9", "llmtailor 11", "llmtailor 12", "llmtailor 13")
@pytest.mark.parametrize(("source", "change", "words", "kind"), REFUSED)
def test_what_does_not_add_up_is_refused(
    place: Path, source: str, change: Edit, words: str, kind: type[LayerstoreError]
) -> None:
    """Missing, mixed, bent or of another kind: told what it is, never guessed."""
    change(place)

    with refused(place / "store", kind, naming=words):
        ingest(place, source)


@pytest.mark.fault(62, 63, 66)
@pytest.mark.parametrize(("change", "what", "words", "kind"), STAGE_2)
def test_what_does_not_add_up_under_stage_2_is_refused(
    place: Path, change: Callable[[Any], object], what: str, words: str, kind: type[LayerstoreError]
) -> None:
    """Partitions are where the order of parameters puts them, or nowhere."""
    _edited(what, change, of="two")(place)

    with refused(place / "store", kind, naming=words):
        ingest(place, "two")


@pytest.mark.fault(63)
def test_a_model_of_another_save_is_refused(place: Path) -> None:
    """Under stages 1 and 2, its weights are not those of the masters, and its counter is not the optimizer's."""
    tiny_checkpoint(place / "two", step=4, stage=2)
    name = "mp_rank_00_model_states.pt"
    shutil.copy(place / "two" / "global_step4" / name, place / "two" / TAG / name)

    with refused(place / "store", LayoutMismatch, naming="the file is from another save"):
        ingest(place, "two", tag=TAG)


@pytest.mark.fault(62)
def test_every_missing_file_of_stage_2_is_named(place: Path) -> None:
    """The model's one file, and every rank's."""
    for path in shards(place, of="two"):
        aside = path.rename(place / "aside")

        with refused(place / "store", SourceCheckpoint, naming="is incomplete: "):
            ingest(place, "two")

        aside.rename(path)


@pytest.mark.full
@pytest.mark.fault(89)
def test_no_check_of_the_world_is_an_assertion() -> None:
    """Bad checkpoints, names, records and objects are refused under ``python -O``: ``pytest.raises`` still counts."""
    command = [sys.executable, "-O", "-m", "pytest", "-n0", "-q", "-W", "ignore::pytest.PytestConfigWarning"]
    chosen = [f"{__file__}::test_what_does_not_add_up_is_refused", "tests/faults/test_bad_input.py", "tests/format"]
    chosen += ["tests/storage/test_objects.py", "tests/storage/test_commits.py"]
    done = subprocess.run([*command, *chosen], cwd=REPOSITORY, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout


@pytest.mark.fault(62)
@pytest.mark.known_fault("llmtailor 9", "llmtailor 12")
def test_every_missing_file_is_named(place: Path) -> None:
    """A lost shard of any rank makes the checkpoint incomplete, and the rank is told."""
    for path in shards(place):
        aside = path.rename(place / "aside")

        with refused(place / "store", SourceCheckpoint, naming=f"rank {path.name.partition('rank_')[2][0]}"):
            ingest(place)

        aside.rename(path)


@pytest.mark.fault(60)
@pytest.mark.known_fault("llmtailor 12")
@pytest.mark.parametrize("what", ["model", "optim"])
def test_a_flipped_bit_in_a_shard_is_never_ingested(place: Path, what: str) -> None:
    """Anywhere in the file: refused, or without any effect on what is stored."""
    chance = seeded(f"source flips in {what}")
    path = shards(place, what)[0]
    data = path.read_bytes()
    contents = [storage.content for storage in read_pt(path).storages]
    payloads = [content for content in contents if isinstance(content, Located) and content.size_bytes]
    inside = [located.offset_bytes + chance.randrange(located.size_bytes) for located in payloads]
    for offset in [*inside, *chance.sample(range(len(data)), 15)]:
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 1 << chance.randrange(8)]) + data[offset + 1 :])
        if offset in inside:
            with refused(place / "store", SourceCheckpoint, naming=path.name):
                ingest(place)
            continue
        copied(place / "store", place / "twin")
        with Store(place / "twin") as store, contextlib.suppress(SourceCheckpoint, Unsupported, LayoutMismatch):
            assert not store.ingest(place / "raw", run="other").is_new, "another checkpoint was stored"


# -- what is taken all the same ------------------------------------------------------------------------------------


def taken(place: Path) -> Ingested:
    """Ingest the raw checkpoint of *place*; check that all of it came through."""
    ingested = ingest(place)
    with Store(place / "store") as store:
        store.compose("run@2").write(place / "out", durable=False)
    assert {path.name for path in shards(place)} == {path.name for path in (place / "out" / TAG).iterdir()}
    return ingested


def test_a_flipped_bit_in_gathered_weights_is_kept_as_it_is(place: Path) -> None:
    """safetensors carry no checksum: what differs from the masters is stored as found, and comes out again."""
    path = place / HF / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with Store(place / "store") as store:
        store.ingest(place / HF, run="run")
        store.compose("run@2").write(place / "out")

    assert (place / "out" / "model.safetensors").read_bytes() == bytes(data)


def test_optimizers_that_all_counted_otherwise_are_noted(place: Path) -> None:
    """An optimizer can be younger than its engine, so this is a doubt and no refusal."""
    assert taken(copied(place, place.with_name("sound"))).notes == ()
    for path in shards(place, "optim"):
        shutil.copy(place / "later" / "global_step4" / path.name, path)

    (note,) = taken(place).notes

    assert "the optimizer has counted 4 updates, the engine 2" in note


@pytest.mark.parametrize(
    "change", [_NO_STATES, _setting("offload_param", {"device": "nvme"})], ids=["SGD", "nothing frozen on NVMe"]
)
def test_what_only_looks_incomplete_is_taken(place: Path, change: Edit) -> None:
    """Plain SGD has no state after any number of steps; masters are in the shards wherever the parameters are."""
    change(place)

    assert taken(place).is_new


def test_weights_of_an_unknown_type_are_kept_as_they_are(place: Path) -> None:
    """Safetensors may gain element types that nobody here knows."""
    header = json.dumps({"a": {"dtype": "F3_E1M1", "shape": [8], "data_offsets": [0, 3]}}).encode()
    data = len(header).to_bytes(8, "little") + header + b"odd"
    (place / HF / "adapter.safetensors").write_bytes(data)
    with Store(place / "store") as store:
        store.ingest(place / HF, run="run")
        store.compose("run@2").write(place / "out")

    assert (place / "out" / "adapter.safetensors").read_bytes() == data


def test_a_store_inside_a_checkpoint_is_left_out_with_a_note(place: Path) -> None:
    """Otherwise every save would hold all saves before it."""
    with init(place / HF / "mine") as store:
        (note,) = store.ingest(place / HF, run="run").notes
        store.compose("run@2").write(place / "out")

    assert "it is a store" in note
    names = {path.name for path in (place / HF).iterdir()} - {"mine"}
    assert {path.name for path in (place / "out").iterdir()} - {"layerstore.json"} == names


# -- tags ----------------------------------------------------------------------------------------------------------


@pytest.mark.fault(65)
@pytest.mark.known_fault("llmtailor 16")
@pytest.mark.parametrize(
    "latest", [None, b"", b"\n", b"global_step9", b"../../x", b"/etc", b".", b"..", b"\xff\xfe", b"a\nb"]
)
def test_a_latest_that_leads_nowhere_is_refused_and_a_tag_helps(place: Path, latest: bytes | None) -> None:
    """One tag is one folder beside ``latest``; two of them are never guessed between."""
    tiny_checkpoint(place / "raw", step=4)
    path = place / "raw" / "latest"
    path.unlink()
    if latest is not None:
        path.write_bytes(latest)

    with refused(place / "store", SourceCheckpoint, InvalidInput, naming="--tag"):
        ingest(place)
    ingest(place, tag=TAG)

    path.write_text(f"{TAG}\n")  # an editor may have put it there
    assert not ingest(place).is_new


@pytest.mark.fault(65)
@pytest.mark.parametrize(
    "tag", ["nothing", "..", ".", "", "/", "../raw/global_step2", f"./{TAG}", f"{TAG}/", "a\0b", "x\ny", "e\u0301"]
)
def test_an_odd_tag_is_refused(place: Path, tag: str) -> None:
    """A tag is the name of a folder beside the others, as it is listed."""
    with refused(place / "store", NotFound, InvalidInput, SourceCheckpoint):
        ingest(place, tag=tag)


# -- what must not be believed -------------------------------------------------------------------------------------

# The whole lists, with those that take long, are tried one floor below, in tests/zero3/hostile.
QUICK_PICKLES = {what: make for what, make in HOSTILE_PICKLES.items() if make not in SLOW_PICKLES}


@pytest.mark.fault(57, 59)
@pytest.mark.parametrize("what", [*list(QUICK_PICKLES)[::6], *list(HOSTILE_ARCHIVES)[::3]])
@pytest.mark.sample(5)
def test_a_hostile_file_is_refused_and_never_run(place: Path, what: str) -> None:
    """The canary stays dead; bombs, odd names and overlaps are named, and not believed."""
    path = shards(place, seeded(what).choice(["model", "optim"]))[1]
    if what in QUICK_PICKLES:
        path.write_bytes(torch_like(QUICK_PICKLES[what](place / "canary")))
    else:
        path.write_bytes(HOSTILE_ARCHIVES[what]())

    with refused(place / "store", SourceCheckpoint, Unsupported, naming=path.name):
        ingest(place)
    assert not (place / "canary").exists()


@pytest.mark.fault(58)
def test_an_unknown_class_is_named_and_can_be_allowed(place: Path) -> None:
    """All are named at once with the flag that keeps them; then they come back as they were."""
    odd = Inert(
        name="acme.Clock", made_by_new=True, arguments=(), has_state=True, state={"tick": 1}, appended=[], items={}
    )
    names = ["acme.Clock", "acme.hooks.Hook"]
    path = shards(place, "model")[0]
    edit(path, lambda tree: tree.update(client=odd, other=Global("acme.hooks.Hook")))

    with refused(place / "store", SourceCheckpoint, naming="--allow-global acme.Clock --allow-global acme.hooks.Hook"):
        ingest(place)
    ingest(place, allowed_globals=names)

    with Store(place / "store") as store:
        store.compose("run@2").write(place / "out")
    tree: Any = read_pt(place / "out" / TAG / path.name, Pickles(frozenset(names))).tree
    assert (tree["client"], tree["other"]) == (odd, Global("acme.hooks.Hook"))


# -- a source that moves -------------------------------------------------------------------------------------------


class _Meddler:
    """Gives a file a new time, as its writer would, once bytes are being read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, what: str, total_bytes: int) -> None:
        """Meddle."""
        os.utime(self._path)

    def advance(self, size_bytes: int) -> None:
        """Let the bytes pass."""


@pytest.mark.fault(64)
def test_a_checkpoint_that_is_still_written_is_refused(place: Path) -> None:
    """A file that changes during ingest is noticed before anything is published."""
    with refused(place / "store" / "commits", SourceCheckpoint, naming="is still changing"):
        ingest(place, progress=_Meddler(place / "raw" / "zero_to_fp32.py"))


def _growing(path: Path, stop: threading.Event) -> None:
    data, size_bytes = path.read_bytes(), 0
    while not stop.is_set():
        size_bytes = (size_bytes + 997) % len(data)
        path.write_bytes(data[:size_bytes])
    path.write_bytes(data)


def _coming_and_going(path: Path, stop: threading.Event) -> None:
    data = path.read_bytes()
    while not stop.is_set():
        path.unlink()
        time.sleep(0.001)
        path.write_bytes(data)


def _cut(path: Path, stop: threading.Event) -> None:
    data = path.read_bytes()
    while not stop.is_set():
        os.truncate(path, 10)
        path.write_bytes(data)


Move = Callable[[Path, threading.Event], None]


@pytest.mark.full
@pytest.mark.fault(64)
@pytest.mark.parametrize("move", [_growing, _coming_and_going, _cut], ids=lambda move: move.__name__[1:])
def test_a_moving_checkpoint_gets_in_whole_or_not_at_all(place: Path, move: Move) -> None:
    """A writer beside us costs a clear refusal, never our process, and never a wrong commit."""
    assert in_child(_beside_a_writer, place, move).needed() == []


@contextlib.contextmanager
def _moved(move: Move, *paths: Path) -> Any:
    stop = threading.Event()
    writers = [threading.Thread(target=move, args=(path, stop)) for path in paths]
    for writer in writers:
        writer.start()
    yield
    stop.set()
    for writer in writers:
        writer.join()


def _beside_a_writer(place: Path, move: Move) -> list[str]:
    found, refusals = [], 0
    with Store(place / "store") as store:
        expected = composed(store, "other@2", place)
    with _moved(move, *shards(place, "rank_1")):
        for _ in range(25):
            try:
                ingest(place, run="moving")
            except SourceCheckpoint:
                refusals += 1
            except LayerstoreError as error:
                found.append(repr(error))
    found += [] if refusals else ["a moving checkpoint was always taken for a whole one"]
    ingest(place, run="moving")
    return found + problems(place / "store", place, {"other@2": expected, "moving@2": expected})


# -- odd things in a source ----------------------------------------------------------------------------------------


@pytest.mark.fault(73)
def test_links_in_a_source_are_not_followed(place: Path) -> None:
    """To a file of the system, in a circle, to nothing, or in the place of a shard, a tag or ``latest``."""
    for target in ("/etc/passwd", "nothing", "..", "loop"):
        link = place / "raw" / TAG / "loop"
        link.symlink_to(target)
        with refused(place / "store", SourceCheckpoint, naming="loop"):
            ingest(place)
        link.unlink()
    for path in (shards(place, "model")[0], place / "raw" / TAG, place / "raw" / "latest"):
        shutil.move(path, place / "aside")
        path.symlink_to(place / "aside")
        with refused(place / "store", SourceCheckpoint, naming=path.name):
            ingest(place)
        path.unlink()
        shutil.move(place / "aside", path)


def test_a_pipe_in_a_source_blocks_nobody(place: Path) -> None:
    """A fifo among the files, or in the place of one."""
    assert in_child(_meets_pipes, place, timeout_seconds=30.0).needed() == []


def _meets_pipes(place: Path) -> list[str]:
    found = []
    for path in (place / "raw" / TAG / "pipe", shards(place, "optim")[0], place / "raw" / "latest"):
        data = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        try:
            ingest(place)
        except SourceCheckpoint as error:
            said_well(error)
        else:
            found.append(f"{path} was ingested")
        path.unlink()
        path.write_bytes(data) if data is not None else None
    return found


@pytest.mark.fault(72)
def test_names_that_are_no_text_are_noted_or_refused_readably(place: Path) -> None:
    """A stray file with a broken name harms nobody; a checkpoint or tag with one is refused in words."""
    Path(os.fsdecode(os.fsencode(place / "raw" / TAG) + b"/\xff.bin")).write_bytes(b"x")
    (note,) = ingest(place).notes
    assert "\\xff" in note

    odd = Path(os.fsdecode(os.fsencode(place) + b"/\xff"))
    for _ in range(2):
        with refused(place / "store", SourceCheckpoint, InvalidInput):
            ingest(place, os.fspath(odd), run=None)
        if not odd.exists():
            (place / "raw").rename(odd)


@pytest.mark.parametrize(
    "source", ["nothing", "new\nline", "nul\0", "x" * 300, "store", "store/commits", "raw/latest", "empty"]
)
def test_what_is_no_checkpoint_is_refused(place: Path, source: str) -> None:
    """Nothing there, a file, a store, an empty folder, a name that cannot be."""
    (place / "empty").mkdir()

    with refused(place / "store", SourceCheckpoint, InvalidInput):
        ingest(place, source)
