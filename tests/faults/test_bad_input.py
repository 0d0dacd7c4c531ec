"""
Bad input: one line says what was asked, what was found and what to do, and nothing has changed.

Every case is a sound checkpoint with one thing wrong. The store's whole tree is compared before and after.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerstore.errors import (
    AlreadyExists,
    Conflict,
    IntegrityError,
    InvalidInput,
    LayerstoreError,
    LayoutMismatch,
    NoStore,
    NotFound,
    SourceCheckpoint,
    Unsupported,
)
from layerstore.format import decode_identity, encode_identity
from layerstore.store import Store, init
from layerstore.tree import Global, Inert, Located
from layerstore.zero3.pt import read_pt
from tests.faults.harness import composed, copied, in_child, problems, seeded, snapshot, tiny_checkpoint
from tests.zero3.hostile.archives import HOSTILE_ARCHIVES, torch_like
from tests.zero3.hostile.pickles import HOSTILE_PICKLES, SLOW_PICKLES
from tests.zero3.ptfiles import write_pt

TAG = "global_step2"


@pytest.fixture(scope="module")
def originals(fast_module_path: Path) -> Path:
    """Return a folder with a sound store, which holds step 2 of ``other``, and a raw and an HF checkpoint."""
    tiny_checkpoint(fast_module_path / "raw")
    tiny_checkpoint(fast_module_path / "hf" / "checkpoint-2", layout="hf")
    with init(fast_module_path / "store") as store:
        store.ingest(fast_module_path / "raw", run="other")
    return fast_module_path


@pytest.fixture
def place(originals: Path, fast_path: Path) -> Path:
    """Return a copy of ``originals``."""
    return copied(originals, fast_path / "place")


def said_well(error: LayerstoreError) -> None:
    """Check the manners of *error*: one line, and a second one with what to do."""
    message, hint = str(error), error.hint
    assert message, "an error without words"
    assert "\n" not in message + (hint or "")
    assert "\r" not in message + (hint or "")
    assert hint, f"no hint: {message}"
    (message + hint).encode()  # a terminal must be able to show it


@contextlib.contextmanager
def refused(place: Path, *classes: type[LayerstoreError], naming: str = "") -> Iterator[None]:
    """Expect one of *classes*, well said, and a store that is as it was."""
    before = snapshot(place / "store")
    with pytest.raises(LayerstoreError) as caught:
        yield
    assert isinstance(caught.value, classes), repr(caught.value)
    said_well(caught.value)
    assert naming in str(caught.value) + str(caught.value.hint)
    assert changes(before, place / "store") == []


def changes(before: dict[str, str], tree: Path) -> list[str]:
    """Return what is no longer as in *before*, locks apart: they name their last holder."""
    now = snapshot(tree)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return [name for name in changed if not name.endswith((".lock", "lock.mdb"))]


def ingest(place: Path, source: str = "raw", **options: Any) -> None:
    """Ingest a checkpoint of *place* as the run ``run``."""
    with Store(place / "store") as store:
        store.ingest(place / source, **{"run": "run"} | options)


def shards(place: Path, what: str = "") -> list[Path]:
    """Return the raw checkpoint's shards whose names contain *what*."""
    return sorted(path for path in (place / "raw" / TAG).iterdir() if what in path.name)


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Let *change* alter the tree of a ``.pt`` file."""
    read = read_pt(path, allowed_globals=frozenset())
    change(read.tree)
    aside = path.parent / "aside" / path.name
    aside.parent.mkdir(exist_ok=True)
    write_pt(aside, read.tree)
    aside.replace(path)
    aside.parent.rmdir()


# -- files that are not there, or not whole ------------------------------------------------------------------------


@pytest.mark.fault(62)
@pytest.mark.known_fault("llmtailor 9", "llmtailor 12")
def test_every_missing_file_is_named(place: Path) -> None:
    """A lost shard of any rank makes the checkpoint incomplete, and the rank is told."""
    for path in shards(place):
        aside = path.rename(place / "aside")
        rank = path.name.partition("rank_")[2][0]

        with refused(place, SourceCheckpoint, naming=f"rank {rank}"):
            ingest(place)

        aside.rename(path)


@pytest.mark.fault(62)
@pytest.mark.known_fault("llmtailor 11")
def test_a_missing_last_rank_is_told_by_the_others(place: Path) -> None:
    """Even if both its files are gone, the world size in the rest tells."""
    for path in shards(place, "rank_1"):
        path.unlink()

    with refused(place, SourceCheckpoint, naming="missing: 1"):
        ingest(place)


@pytest.mark.fault(66)
@pytest.mark.known_fault("llmtailor 13")
def test_no_optimizer_files_at_all_are_unsupported(place: Path) -> None:
    """Weights alone are nothing to resume from."""
    for path in shards(place, "optim"):
        path.unlink()

    with refused(place, Unsupported):
        ingest(place)


@pytest.mark.fault(61)
@pytest.mark.known_fault("llmtailor 12")
@pytest.mark.parametrize("what", ["model", "optim"])
def test_a_cut_shard_is_incomplete(place: Path, what: str) -> None:
    """Wherever it was cut."""
    path = shards(place, what)[1]
    data = path.read_bytes()
    for part in range(10):
        path.write_bytes(data[: len(data) * part // 10])

        with refused(place, SourceCheckpoint, naming=path.name):
            ingest(place)


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
    for offset in [*inside, *chance.sample(range(len(data)), 40)]:
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 1 << chance.randrange(8)]) + data[offset + 1 :])
        if offset in inside:
            with refused(place, SourceCheckpoint, naming=path.name):
                ingest(place)
        else:
            harmless_or_refused(place)


def harmless_or_refused(place: Path) -> None:
    """Ingest into a copy of the store: what gets in must be what the sound checkpoint is."""
    twin = copied(place / "store", place / "twin")
    with Store(twin) as store:
        try:
            mine = store.ingest(place / "raw", run="other", replace=False)
        except LayerstoreError as error:
            assert isinstance(error, SourceCheckpoint | Unsupported | LayoutMismatch)  # noqa: PT017
            return
        assert not mine.is_new, "another checkpoint was stored"


def test_a_flipped_bit_in_gathered_weights_is_kept_as_it_is(place: Path) -> None:
    """safetensors carry no checksum: what differs from the masters is stored as found, and comes out again."""
    path = place / "hf" / "checkpoint-2" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with Store(place / "store") as store:
        store.ingest(place / "hf" / "checkpoint-2", run="run")
        store.compose("run@2").write(place / "out")

    assert (place / "out" / "model.safetensors").read_bytes() == bytes(data)


# -- ranks and tags that do not fit --------------------------------------------------------------------------------


@pytest.mark.fault(63)
@pytest.mark.known_fault("llmtailor 11")
def test_mixed_world_sizes_are_a_mismatch(place: Path) -> None:
    """A rank of another job among the others."""
    tiny_checkpoint(place / "three", world_size=3)
    for path in shards(place, "rank_1"):
        shutil.copy(place / "three" / TAG / path.name, path)

    with refused(place, LayoutMismatch):
        ingest(place)


@pytest.mark.fault(63)
def test_mixed_steps_are_a_mismatch(place: Path) -> None:
    """One rank of an earlier save."""
    tiny_checkpoint(place / "later", step=4)
    for path in shards(place, "rank_1"):
        shutil.copy(place / "later" / "global_step4" / path.name, path)

    with refused(place, LayoutMismatch, naming="global_steps"):
        ingest(place)


@pytest.mark.fault(62)
@pytest.mark.known_fault("llmtailor 11")
def test_an_extra_rank_is_a_mismatch(place: Path) -> None:
    """Files of a larger job that were left behind."""
    for path in shards(place, "rank_1"):
        shutil.copy(path, path.with_name(path.name.replace("rank_1", "rank_2")))

    with refused(place, LayoutMismatch):
        ingest(place)


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

    with refused(place, SourceCheckpoint, InvalidInput, naming="--tag"):
        ingest(place)
    ingest(place, tag=TAG)

    with Store(place / "store") as store:
        assert [entry.step for entry in store.log("run")] == [2]


@pytest.mark.fault(65)
def test_a_latest_with_a_newline_is_read(place: Path) -> None:
    """An editor may have put it there."""
    (place / "raw" / "latest").write_text(f"{TAG}\n")

    ingest(place)


@pytest.mark.fault(65)
@pytest.mark.parametrize(
    "tag", ["nothing", "..", ".", "", "/", "../raw/global_step2", f"./{TAG}", f"{TAG}/", "a\0b", "x\ny", "e\u0301"]
)
def test_an_odd_tag_is_refused(place: Path, tag: str) -> None:
    """A tag is the name of a folder beside the others, as it is listed."""
    with refused(place, NotFound, InvalidInput, SourceCheckpoint):
        ingest(place, tag=tag)


@pytest.mark.fault(71)
@pytest.mark.parametrize(
    "run",
    [
        "",
        ".",
        "..",
        "a/b",
        "../x",
        "a\0b",
        "a\nb",
        "x" * 300,
        "e\u0301",
        "a@b",
        "a~1",
        "-x",
        "\ud800",
        "a\u202eb",
        "\u200b",
        "a\\b",
    ],
)
def test_an_odd_name_of_a_run_is_refused(place: Path, run: str) -> None:
    """Runs and pins become files: what could be mistaken is no name."""
    with refused(place, InvalidInput):
        ingest(place, run=run)
    with refused(place, InvalidInput), Store(place / "store") as store:
        store.pin(run, "other@2")


@pytest.mark.fault(71)
@pytest.mark.parametrize("run", ["🦙 llama", "50%", "a:b", "ж", "x" * 200, "a b", "#1", "'"])
def test_an_unusual_name_of_a_run_is_kept(place: Path, run: str) -> None:
    """Everything that cannot be mistaken is a name, for runs and for pins."""
    ingest(place, run=run)
    with Store(place / "store") as store:
        store.pin(f"{run[:190]} pin", f"{run}@2")
        assert run in store.runs
        assert f"{run[:190]} pin" in [pin.name for pin in store.pins()]
        assert composed(store, f"{run}@2", place) == composed(store, f"{run[:190]} pin", place)


# -- what must not be believed -------------------------------------------------------------------------------------


# The whole lists, with those that take long, are tried one floor below, in tests/zero3/hostile.
QUICK_PICKLES = {what: make for what, make in HOSTILE_PICKLES.items() if make not in SLOW_PICKLES}


@pytest.mark.fault(57)
@pytest.mark.parametrize("what", list(QUICK_PICKLES)[::6])
@pytest.mark.sample(3)
def test_a_hostile_pickle_is_refused_and_never_run(place: Path, what: str) -> None:
    """The canary stays dead, in a model and in an optimizer file."""
    for path in (shards(place, "model")[0], shards(place, "optim")[1]):
        data = path.read_bytes()
        path.write_bytes(torch_like(QUICK_PICKLES[what](place / "canary")))

        with hostile(place, path):
            ingest(place)

        path.write_bytes(data)
    assert not (place / "canary").exists()


@contextlib.contextmanager
def hostile(place: Path, path: Path) -> Iterator[None]:
    """Expect a refusal that names *path*."""
    with refused(place, SourceCheckpoint, Unsupported, naming=path.name):
        yield


@pytest.mark.fault(59)
@pytest.mark.parametrize("what", list(HOSTILE_ARCHIVES)[::3])
@pytest.mark.sample(2)
def test_a_crooked_archive_is_refused(place: Path, what: str) -> None:
    """Bombs, odd names, overlaps: named, and not believed."""
    path = shards(place, "model")[1]
    path.write_bytes(HOSTILE_ARCHIVES[what]())

    with hostile(place, path):
        ingest(place)


@pytest.mark.fault(58)
def test_an_unknown_class_is_named_and_can_be_allowed(place: Path) -> None:
    """All are named at once with the flag that keeps them; then they come back as they were."""
    odd = Inert(
        name="acme.Clock", made_by_new=True, arguments=(), has_state=True, state={"tick": 1}, appended=[], items={}
    )
    names = ["acme.Clock", "acme.hooks.Hook"]

    def add(tree: Any) -> None:
        tree["client"] = odd
        tree["other"] = Global("acme.hooks.Hook")

    edit(shards(place, "model")[0], add)

    with refused(place, SourceCheckpoint, naming="--allow-global acme.Clock --allow-global acme.hooks.Hook"):
        ingest(place)
    ingest(place, allowed_globals=names)

    with Store(place / "store") as store:
        store.compose("run@2").write(place / "out")
    written = place / "out" / TAG / shards(place, "model")[0].name
    tree: Any = read_pt(written, allowed_globals=frozenset(names)).tree
    assert tree["client"] == odd
    assert tree["other"] == Global("acme.hooks.Hook")


@pytest.mark.fault(57)
def test_the_legacy_stream_is_refused(place: Path) -> None:
    """It has no checksums and cannot be read without running it."""
    for head in (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"not a zip at all", b""):
        shards(place, "model")[0].write_bytes(head)

        with refused(place, SourceCheckpoint):
            ingest(place)


# -- checkpoints of another kind -----------------------------------------------------------------------------------


def _renamed(name: str) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        for path in shards(place):
            path.unlink()
        (place / "raw" / TAG / name).write_bytes(b"x")

    return change


def _in_models(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def change_all(place: Path) -> None:
        for path in shards(place, "model"):
            edit(path, change)

    return change_all


def _in_optimizers(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def change_all(place: Path) -> None:
        for path in shards(place, "optim"):
            edit(path, lambda tree: change(tree["optimizer_state_dict"]))

    return change_all


def _not_a_tree(place: Path) -> None:
    shards(place, "model")[0].write_bytes(torch_like())


def _stage(number: int) -> Callable[[Any], None]:
    def change(state: Any) -> None:
        stage = state["zero_stage"]
        state["zero_stage"] = Inert(
            name=stage.name, made_by_new=stage.made_by_new, arguments=(number,), has_state=stage.has_state,
            state=stage.state, appended=stage.appended, items=stage.items,
        )  # fmt: skip

    return change


def _nvme(place: Path) -> None:
    (place / "raw" / TAG / "offloaded_tensors").mkdir()


def _tensor_parallel(place: Path) -> None:
    for path in shards(place):
        path.rename(path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))


def _super_offload(place: Path) -> None:
    _in_optimizers(lambda state: state["optimizer_state_dict"]["state"].clear())(place)
    offload = {"device": "cpu", "super_offload": True}
    _in_models(lambda tree: tree["ds_config"]["zero_optimization"].update(offload_optimizer=offload))(place)


OTHERS: dict[str, Callable[[Path], None]] = {
    "stage 1 or 2": _renamed("mp_rank_00_model_states.pt"),
    "pipeline": _renamed("layer_00-model_00-model_states.pt"),
    "experts": _renamed("layer_0_expert_0_mp_rank_00_model_states.pt"),
    "universal": _renamed("zero"),
    "distributed": _renamed("__0_0.distcp"),
    "nvme": _nvme,
    "tensor parallel": _tensor_parallel,
    "tensor parallel inside": _in_models(lambda tree: tree.update(mp_world_size=2)),
    "stage inside": _in_optimizers(_stage(2)),
    "twin flow": _in_optimizers(lambda state: state["optimizer_state_dict"]["state"].pop(0)),
    "super offload": _super_offload,
}


@pytest.mark.fault(66)
@pytest.mark.parametrize("kind", OTHERS)
def test_a_checkpoint_of_another_kind_is_unsupported(place: Path, kind: str) -> None:
    """Stages 1 and 2, pipelines, experts, universal, offloaded, partly saved: told what it is."""
    OTHERS[kind](place)

    with refused(place, Unsupported):
        ingest(place)


BENT: dict[str, Callable[[Path], None]] = {
    "no shapes": _in_models(lambda tree: tree.pop("param_shapes")),
    "no module": _in_models(lambda tree: tree.pop("module")),
    "no steps": _in_models(lambda tree: tree.pop("global_steps")),
    "steps in words": _in_models(lambda tree: tree.update(global_steps="two")),
    "shapes of others": _in_models(lambda tree: tree["param_shapes"][0].popitem()),
    "no groups": _in_optimizers(lambda state: state.pop("fp32_flat_groups")),
    "one group less": _in_optimizers(lambda state: state["fp32_flat_groups"].pop()),
    "no partition count": _in_optimizers(lambda state: state.pop("partition_count")),
    "not a tree": _not_a_tree,
}


@pytest.mark.fault(67)
@pytest.mark.parametrize("what", BENT)
def test_a_bent_tree_is_refused(place: Path, what: str) -> None:
    """What does not add up is named, never guessed."""
    BENT[what](place)

    with refused(place, SourceCheckpoint, LayoutMismatch, Unsupported):
        ingest(place)


# -- a source that moves -------------------------------------------------------------------------------------------


def _growing(path: Path, stop: threading.Event) -> None:
    data, size_bytes = path.read_bytes(), 0
    while not stop.is_set():
        size_bytes = (size_bytes + 997) % len(data)
        path.write_bytes(data[:size_bytes])
    path.write_bytes(data)


def _vanishing(path: Path, stop: threading.Event) -> None:
    data = path.read_bytes()
    while not stop.is_set():
        path.unlink()
        path.write_bytes(data)


def _cut(path: Path, stop: threading.Event) -> None:
    data = path.read_bytes()
    while not stop.is_set():
        os.truncate(path, 10)
        path.write_bytes(data)


@pytest.mark.fault(64)
@pytest.mark.parametrize("move", [_growing, _vanishing, _cut], ids=lambda move: move.__name__[1:])
def test_a_checkpoint_that_is_still_written_gets_in_whole_or_not_at_all(
    place: Path, move: Callable[[Path, threading.Event], None]
) -> None:
    """A writer beside us costs a clear refusal, never our process, and never a wrong commit."""
    assert in_child(_beside_a_writer, place, move).needed() == []


def _beside_a_writer(place: Path, move: Callable[[Path, threading.Event], None]) -> list[str]:
    found = []
    with Store(place / "store") as store:
        expected = composed(store, "other@2", place)
    stop = threading.Event()
    writers = [threading.Thread(target=move, args=(path, stop)) for path in shards(place, "rank_1")]
    for writer in writers:
        writer.start()
    refusals = 0
    for _ in range(25):
        try:
            ingest(place, run="moving")
        except SourceCheckpoint:
            refusals += 1
        except LayerstoreError as error:
            found.append(repr(error))
    stop.set()
    for writer in writers:
        writer.join()
    found += [] if refusals else ["a moving checkpoint was always taken for a whole one"]
    ingest(place, run="moving")
    return found + problems(place / "store", place, {"other@2": expected, "moving@2": expected})


@pytest.mark.fault(64)
def test_a_file_that_vanishes_meanwhile_is_told(place: Path) -> None:
    """The small files beside the shards too."""
    source = place / "hf" / "checkpoint-2"
    chance = random.Random(0)
    stop = threading.Event()
    names = ["config.json", "trainer_state.json", "rng_state_0.pth"]
    writer = threading.Thread(target=_come_and_go, args=([source / name for name in names], stop))
    writer.start()
    try:
        with Store(place / "store") as store:
            for number in range(40):
                with contextlib.suppress(SourceCheckpoint, Conflict):
                    store.ingest(source, run=f"run{number}")
                time.sleep(chance.random() * 0.002)
    finally:
        stop.set()
        writer.join()


def _come_and_go(paths: list[Path], stop: threading.Event) -> None:
    contents = {path: path.read_bytes() for path in paths}
    while not stop.is_set():
        for path in paths:
            path.unlink()
            time.sleep(0.001)
            path.write_bytes(contents[path])


# -- odd things in a source ----------------------------------------------------------------------------------------


@pytest.mark.fault(73)
def test_links_in_a_source_are_not_followed(place: Path) -> None:
    """To a file of the system, in a circle, or to nothing: refused unless the user says so."""
    for target in ("/etc/passwd", "nothing", "..", "loop"):
        link = place / "raw" / TAG / "loop"
        link.symlink_to(target)

        with refused(place, SourceCheckpoint, naming="loop"):
            ingest(place)

        link.unlink()


@pytest.mark.fault(73)
def test_a_linked_shard_tag_or_latest_is_not_followed(place: Path) -> None:
    """Not even where the name is one that is looked for."""
    for path in (shards(place, "model")[0], place / "raw" / TAG, place / "raw" / "latest"):
        shutil.move(path, place / "aside")
        path.symlink_to(place / "aside")

        with refused(place, SourceCheckpoint, naming=path.name):
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
def test_names_that_are_no_text_are_left_out_with_a_note(place: Path) -> None:
    """A stray file with a broken name harms nobody."""
    (Path(os.fsdecode(os.fsencode(place / "raw" / TAG) + b"/\xff.bin"))).write_bytes(b"x")
    with Store(place / "store") as store:
        done = store.ingest(place / "raw", run="run")

    assert len(done.notes) == 1
    assert "\\xff" in done.notes[0]


@pytest.mark.fault(72)
def test_a_source_with_a_name_that_is_no_text_is_refused_readably(place: Path) -> None:
    """The folder itself, or its tag: the message can be printed."""
    odd = Path(os.fsdecode(os.fsencode(place) + b"/\xff"))
    with refused(place, SourceCheckpoint, InvalidInput):
        ingest(place, os.fspath(odd))
    (place / "raw").rename(odd)
    with refused(place, SourceCheckpoint, InvalidInput), Store(place / "store") as store:
        store.ingest(odd)


@pytest.mark.parametrize(
    "source", ["nothing", "new\nline", "nul\0", "x" * 300, "store", "store/commits", "raw/latest", "empty"]
)
def test_what_is_no_checkpoint_is_refused(place: Path, source: str) -> None:
    """Nothing there, a file, a store, an empty folder, a name that cannot be."""
    (place / "empty").mkdir()

    with refused(place, SourceCheckpoint, InvalidInput):
        ingest(place, source)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"global_step": "2"}',
        b'{"global_step": -1}',
        b'{"global_step": true}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_a_bad_trainer_state_is_refused(place: Path, content: bytes) -> None:
    """The step is read from it, so it has to be one."""
    (place / "hf" / "checkpoint-2" / "trainer_state.json").write_bytes(content)

    with refused(place, SourceCheckpoint, naming="trainer_state.json"):
        ingest(place, "hf/checkpoint-2")


def test_a_step_beyond_all_bounds_is_refused(place: Path) -> None:
    """It becomes a file's name and 8 bytes of a key."""
    (place / "hf" / "checkpoint-2" / "trainer_state.json").write_text(json.dumps({"global_step": 10**30}))

    with refused(place, SourceCheckpoint, InvalidInput):
        ingest(place, "hf/checkpoint-2")


def safetensors(*, shape: list[int], end: int) -> bytes:
    """Return a file of one tensor that claims to have *shape*, and its bytes to end at *end*."""
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(end)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff" * 8,
        (8).to_bytes(8, "little") + b"[[[[[[[[",
        (2).to_bytes(8, "little") + b"{}x",
        (30).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1',
        safetensors(shape=[10**4000] * 1000, end=4),
        safetensors(shape=[1] * 65, end=4),
        safetensors(shape=[0, 10**30], end=0),
    ],
)
def test_bad_gathered_weights_are_refused(place: Path, header: bytes) -> None:
    """A safetensors file whose header does not add up."""
    (place / "hf" / "checkpoint-2" / "model.safetensors").write_bytes(header)

    with refused(place, SourceCheckpoint, naming="model.safetensors"):
        ingest(place, "hf/checkpoint-2")


# -- stores that are none, and targets that must not be ------------------------------------------------------------


def _with_format(place: Path, number: int) -> None:
    path = place / "store" / "store.json"
    identity = decode_identity(path.read_bytes(), what="store.json")
    path.write_bytes(encode_identity(replace(identity, format=number)))


@pytest.mark.fault(80)
@pytest.mark.parametrize("number", [0, 1, 999, 10**30])
def test_a_store_of_another_format_is_left_alone(place: Path, number: int) -> None:
    """Nothing is written to it, not even a lock or an index; the message says what would help."""
    shutil.rmtree(place / "store" / "manifest")
    _with_format(place, number)
    before = snapshot(place / "store")
    for use in (lambda: ingest(place), lambda: Store(place / "store").log(), lambda: init(place / "store")):
        with pytest.raises((Unsupported, AlreadyExists)) as caught:
            use()
        said_well(caught.value)

    assert snapshot(place / "store") == before


@pytest.mark.fault(81)
def test_a_store_with_an_unknown_flag_is_read_and_not_written(place: Path) -> None:
    """Whoever does not know what it means might destroy it."""
    path = place / "store" / "store.json"
    identity = decode_identity(path.read_bytes(), what="store.json")
    changed = {name: getattr(identity, name) for name in ("format", "store_id", "hash", "created")}
    path.write_bytes(encode_identity(type(identity)(**changed, flags=("packs",))))
    with Store(place / "store") as store:
        assert [entry.step for entry in store.log()] == [2]
        assert store.verify(read_data=True).ok
        assert composed(store, "other@2", place)

    with refused(place, Unsupported, naming="packs"):
        ingest(place)
    with refused(place, Unsupported, naming="packs"), Store(place / "store") as store:
        store.pin("kept")
    with refused(place, Unsupported, naming="packs"), Store(place / "store") as store:
        store.reindex()


@pytest.mark.fault(43)
@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b"\xff", b'{"format": true}', b'{"format": "1"}', b"[" * 100_000]
)
def test_a_damaged_store_json_is_damage(place: Path, content: bytes) -> None:
    """It is refused, with what would help; nothing is written."""
    (place / "store" / "store.json").write_bytes(content)

    with refused(place, IntegrityError, Unsupported):
        ingest(place)


@pytest.mark.fault(75)
@pytest.mark.parametrize(
    "name", ["nothing", "raw", "raw/latest", "dangling", "pipe", "nul\0", "x" * 300, "new\nline", "raw/latest/x"]
)
def test_what_is_no_store_is_not_opened(place: Path, name: str) -> None:
    """Nothing is made there, and ``init`` is named."""
    (place / "dangling").symlink_to("nowhere")
    os.mkfifo(place / "pipe")
    before = snapshot(place)
    with pytest.raises(LayerstoreError) as caught:
        Store(place / name)

    assert isinstance(caught.value, NoStore | InvalidInput)
    said_well(caught.value)
    assert changes(before, place) == []


@pytest.mark.parametrize("name", ["store", "raw", "raw/latest", "dangling/x", "raw/latest/x", "x" * 300, "nul\0"])
def test_what_cannot_become_a_store_is_left_alone(place: Path, name: str) -> None:
    """A store, a folder with something in it, a file."""
    (place / "dangling").symlink_to("raw/latest")
    before = snapshot(place)
    with pytest.raises(LayerstoreError) as caught:
        init(place / name)

    assert caught.value.exit_code in (1, 2, 14)
    assert "\n" not in str(caught.value)
    assert changes(before, place) == []


@pytest.mark.fault(78)
@pytest.mark.parametrize(
    "target",
    [
        "store",
        "store/objects/x",
        "store/new",
        ".",
        "raw",
        "raw/latest",
        "link",
        "link/x",
        "full",
        "nul\0",
        "x" * 300,
        "raw/latest/x",
        "pipe",
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_target_that_must_not_be_is_refused(place: Path, target: str, force: bool) -> None:
    """The store, inside it, around it, a file, a link, something else's folder: untouched."""
    (place / "link").symlink_to("store")
    (place / "full").mkdir()
    (place / "full" / "diary").write_text("dear")
    os.mkfifo(place / "pipe")
    if target == "raw" and force:
        pytest.skip("a checkpoint may be replaced with force")
    before = snapshot(place)
    with pytest.raises(LayerstoreError) as caught, Store(place / "store") as store:
        store.compose("other@2").write(place / target, force=force)

    assert caught.value.exit_code in (1, 2, 14)
    assert "\n" not in str(caught.value)
    assert changes(before, place) == []


@pytest.mark.fault(77)
@pytest.mark.parametrize(
    "ref",
    [
        "",
        "@",
        "@2",
        "other@",
        "other@x",
        "other@3",
        "other~1",
        "other~x",
        "nothing",
        "other@2@2",
        "../other",
        "other@-2",
        "other@1e3",
        "oth\ner",
        "o\0",
        "other@" + "9" * 30,
        "\ud800",
    ],
)
def test_an_odd_reference_is_refused(place: Path, ref: str) -> None:
    """With what there is instead."""
    with refused(place, NotFound, InvalidInput), Store(place / "store") as store:
        store.compose(ref)


def test_a_run_and_a_pin_share_their_names(place: Path) -> None:
    """Whichever came first has it."""
    with Store(place / "store") as store:
        store.pin("kept", "other@2")
    with refused(place, Conflict, InvalidInput):
        ingest(place, run="kept")
    with refused(place, Conflict, InvalidInput), Store(place / "store") as store:
        store.pin("other", "other@2")


def test_a_bad_pin_name_is_refused_before_anything_is_ingested(place: Path) -> None:
    """A commit whose pin cannot be written is not made first."""
    for name in ("", "a/b", "other", "run"):
        with refused(place, InvalidInput, Conflict):
            ingest(place, pin=name)


@pytest.mark.parametrize("pattern", ["(", "[", "*", "(?P<layer>"])
def test_a_bad_layer_pattern_is_refused(place: Path, pattern: str) -> None:
    """It is the user's slip, and told as such."""
    with refused(place, InvalidInput):
        ingest(place, layer_pattern=pattern)
