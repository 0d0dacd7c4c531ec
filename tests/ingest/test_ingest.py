"""Promises of the verbs, end to end on generated checkpoints: nothing is lost, doubled or guessed."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Store
from layerstore.errors import AlreadyExists, Conflict, IntegrityError, InvalidInput, NoStore, NotFound, SourceCheckpoint
from layerstore.model import GatheredFile, GatheredTensor, Kind, TensorSource
from layerstore.zero3 import Slices, gathered_pieces
from tests.generated import generate
from tests.unit.checkpoints import SMALL, change_gathered, checkpoint, digests, header_of, snapshot

BLOCK_0 = "model.layers.0.self_attn.q_proj.weight"


def weights_objects(store: Store, ref: str) -> dict[str, int]:
    """Return the bytes of kind weights that each layer has."""
    sizes = {line.layer: line.bytes_by_kind[Kind.WEIGHTS] for line in store.ls(ref)}
    return {layer: size_bytes for layer, size_bytes in sizes.items() if size_bytes}


# -- round trips ---------------------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "raw": {},
    "hf": {"layout": "hf"},
    "accelerate": {"layout": "accelerate"},
    "one rank": {"world_size": 1, "layout": "hf"},
    "three ranks": {"world_size": 3, "layout": "hf"},
    "more ranks than elements": {"world_size": 20, "layers": 1, "hidden": 4, "vocab": 4},
    "layerwise": {"groups": "layerwise"},
    "blocks first": {"groups": "layerwise_blocks_first", "layout": "hf"},
    "many sub-groups": {"sub_group_size": 100},
    "tied": {"tied": True, "layout": "hf"},
    "frozen layer": {"frozen": ("model.layers.0",), "layout": "hf"},
    "frozen embedding": {"frozen": ("model.embed_tokens",), "world_size": 3},
    "fp16": {"precision": "fp16", "layout": "hf"},
    "fp32": {"precision": "fp32", "layout": "hf"},
    "odd sizes": {"hidden": 18, "vocab": 37, "world_size": 3, "layout": "hf"},
}


@pytest.mark.known_fault("llmtailor 9", "llmtailor 11")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.sample(6)
def test_a_composite_is_its_source(store: Store, tmp_path: Path, shape: dict[str, Any]) -> None:
    """
    Everything of a checkpoint comes back.

    The files beside the shards are byte-identical. The composite, ingested into another store, has the very
    commit id of its source: so every layer, tree, counter and small file is equal to the last bit.
    """
    source = checkpoint(tmp_path, **shape)
    ingested = store.ingest(source)
    written = store.compose("sft@2").write(tmp_path / "out" / "sft" / "checkpoint-2")

    assert digests(source, leave_out="_states.pt") == digests(written.out, leave_out="_states.pt")
    assert digests(source).keys() == digests(written.out).keys()
    with layerstore.init(tmp_path / "other") as other:
        again = other.ingest(written.out)
    assert ingested.commit == again.commit
    assert store.verify(read_data=True).damaged == ()


def test_lightnings_layout_comes_back(store: Store, tmp_path: Path) -> None:
    """A folder ``*.ckpt`` keeps its tag ``checkpoint``."""
    source = generate(tmp_path / "sft" / "last.ckpt", layout="lightning", **SMALL)
    store.ingest(source)
    written = store.compose("sft@2").write(tmp_path / "out" / "sft" / "last.ckpt")

    assert digests(source).keys() == digests(written.out).keys()
    assert (written.out / "latest").read_bytes() == b"checkpoint"


@pytest.mark.known_fault("llmtailor 1")
def test_equal_layers_under_other_groupings_share_every_object(store: Store, tmp_path: Path) -> None:
    """What the optimizer's groups are makes no difference to any layer's bytes."""
    first = store.ingest(checkpoint(tmp_path / "a"), run="two")
    for grouping in ("layerwise", "layerwise_blocks_first"):
        source = checkpoint(tmp_path / grouping, groups=grouping, sub_group_size=200)
        again = store.ingest(source, run=grouping)
        assert (again.objects_new, again.objects_reused) == (2, first.objects_new - 2)  # the ranks' states differ
        assert [line.version for line in store.ls("two")] == [line.version for line in store.ls(grouping)]


def test_layers_that_did_not_change_are_shared_between_steps(store: Store, tmp_path: Path) -> None:
    """A frozen layer is stored once, however often it is saved."""
    frozen = ("model.layers.0",)
    store.ingest(checkpoint(tmp_path, frozen=frozen))
    store.ingest(checkpoint(tmp_path, frozen=frozen, step=4))
    before, after = ({line.layer: line.version for line in store.ls(ref)} for ref in ("sft@2", "sft@4"))

    assert {name for name in before if before[name] == after[name]} == {"model.layers.0"}


def test_a_second_ingest_writes_nothing(store: Store, tmp_path: Path) -> None:
    """The same checkpoint again is recognised: no file of the store is new or other."""
    source = checkpoint(tmp_path, layout="hf")
    first = store.ingest(source)
    before = snapshot(store)

    again = store.ingest(source)

    assert (first.is_new, again.is_new) == (True, False)
    assert (first.commit, 0, 0) == (again.commit, again.objects_new, again.bytes_new)
    assert before == snapshot(store)


def test_ids_do_not_depend_on_store_time_or_place(store: Store, tmp_path: Path) -> None:
    """Two stores that ingest copies of one checkpoint have the same commit, under the same name."""
    source = checkpoint(tmp_path, layout="hf")
    copy = tmp_path / "elsewhere" / "sft" / "checkpoint-2"
    shutil.copytree(source, copy)
    with layerstore.init(tmp_path / "other") as other:
        assert store.ingest(source).commit == other.ingest(copy).commit
    assert {name for name in digests(store.path) if name.startswith("objects")} == {
        name for name in digests(tmp_path / "other") if name.startswith("objects")
    }


# -- derived weights -----------------------------------------------------------------------------------------------


def test_gathered_weights_that_follow_from_the_masters_are_not_stored(store: Store, tmp_path: Path) -> None:
    """All of model.safetensors but its header is derived, and it is rebuilt byte for byte."""
    source = checkpoint(tmp_path, layout="hf")
    ingested = store.ingest(source)
    written = store.compose("sft").write(tmp_path / "out")
    header, payload = header_of(source / "model.safetensors")

    assert ingested.bytes_derived == (source / "model.safetensors").stat().st_size - payload
    assert weights_objects(store, "sft") == {}
    assert (source / "model.safetensors").read_bytes() == (written.out / "model.safetensors").read_bytes()
    assert header


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("offset", [0, -1])
def test_a_gathered_tensor_that_does_not_follow_is_stored(
    store: Store, tmp_path: Path, world_size: int, offset: int
) -> None:
    """One tensor that is not its master's rounding becomes its layer's stored weights; the file is still rebuilt."""
    source = checkpoint(tmp_path, layout="hf", world_size=world_size)
    header, payload = header_of(source / "model.safetensors")
    begin, end = header[BLOCK_0]["data_offsets"]
    change_gathered(source, BLOCK_0, offset=offset % (end - begin))

    ingested = store.ingest(source)
    written = store.compose("sft").write(tmp_path / "out")

    whole = (source / "model.safetensors").stat().st_size - payload
    assert ingested.bytes_derived == whole - (end - begin)
    assert weights_objects(store, "sft").keys() == {"model.layers.0"}
    assert (source / "model.safetensors").read_bytes() == (written.out / "model.safetensors").read_bytes()
    assert store.verify(read_data=True).ok


def test_frozen_weights_that_differ_from_the_gathered_ones_keep_both(store: Store, tmp_path: Path) -> None:
    """A frozen parameter has weights of its own; a gathered tensor unlike them is kept beside them."""
    frozen = ("model.layers.0",)
    source = checkpoint(tmp_path, layout="hf", frozen=frozen)
    change_gathered(source, BLOCK_0)
    store.ingest(source)
    written = store.compose("sft").write(tmp_path / "out" / "sft" / "checkpoint-2")

    assert digests(source, leave_out="_states.pt") == digests(written.out, leave_out="_states.pt")


@pytest.mark.fault(70)
def test_tied_weights_are_stored_once(store: Store, tmp_path: Path) -> None:
    """A tied parameter has one set of slices and its alias; the other layer has none of its own."""
    store.ingest(checkpoint(tmp_path, tied=True))
    sizes = {line.layer: sum(line.bytes_by_kind.values()) for line in store.ls("sft")}

    assert sizes["model.embed_tokens"] > 0
    assert not sizes.get("lm_head")


def test_an_empty_gathered_tensor_needs_no_slices() -> None:
    """A parameter without elements has no slice anywhere, and needs none to be rebuilt."""
    empty = GatheredTensor(
        name="empty", dtype="BF16", elements=0, crc32=0, source=TensorSource.PARAMETER, layer_name="empty", stored=None
    )
    file = GatheredFile(path="model.safetensors", header=b"\x02" + bytes(7) + b"{}", tensors=(empty,))

    assert list(gathered_pieces(file, Slices([]), rank=0, world_size=1)) == []


# -- replacing and pinning -----------------------------------------------------------------------------------------


def test_other_content_for_a_step_is_refused(store: Store, tmp_path: Path) -> None:
    """A step that is saved is not silently changed, and nothing is written by the attempt."""
    store.ingest(checkpoint(tmp_path / "a", seed=0))
    before = snapshot(store)
    with pytest.raises(Conflict, match="sft@2 is saved already, with other content") as caught:
        store.ingest(checkpoint(tmp_path / "b", seed=1))

    assert "--replace" in (caught.value.hint or "")
    assert before == snapshot(store)


def test_replacing_moves_the_old_commit_to_the_trash(store: Store, tmp_path: Path) -> None:
    """With replace the new content is what the step means; the old record can be had from the trash."""
    old = store.ingest(checkpoint(tmp_path / "a", seed=0))
    new = store.ingest(checkpoint(tmp_path / "b", seed=1), replace=True)

    assert store.show("sft@2").commit == new.commit != old.commit
    assert [entry.commit for entry in store.log()] == [new.commit]
    assert [path.name for path in (store.path / "commits" / "sft").iterdir()] == [f"2.{new.commit}"]
    assert [each.commit.id for each in store.dropped()] == [old.commit]
    assert store.verify(read_data=True).ok


def test_replacing_by_the_same_content_changes_nothing(store: Store, tmp_path: Path) -> None:
    """Replace is only needed, and only used, where content differs."""
    source = checkpoint(tmp_path)
    first = store.ingest(source)
    again = store.ingest(source, replace=True)

    assert (first.commit, False) == (again.commit, again.is_new)


def test_a_replacement_can_be_replaced_back(store: Store, tmp_path: Path) -> None:
    """Going back to the first content is one more commit, in the place of the second."""
    first, second = checkpoint(tmp_path / "a", seed=0), checkpoint(tmp_path / "b", seed=1)
    for source in (first, second, first):
        store.ingest(source, replace=True)
    written = store.compose("sft").write(tmp_path / "out" / "sft" / "checkpoint-2")

    assert len(store.dropped()) == 2
    assert len(store.log()) == 1
    with layerstore.init(tmp_path / "other") as other:
        assert other.ingest(first).commit == other.ingest(written.out).commit


def test_steps_are_numbered_in_order(store: Store, tmp_path: Path) -> None:
    """Saves are counted along the history, and the log is newest first."""
    for step in (2, 4, 6):
        store.ingest(checkpoint(tmp_path, step=step))

    numbers = {step: store.show(f"sft@{step}").save_number for step in (2, 4, 6)}

    assert numbers == {2: 0, 4: 1, 6: 2}
    assert list(reversed(numbers)) == [entry.step for entry in store.log("sft")]


def test_a_pin_outlives_a_replacement(store: Store, tmp_path: Path) -> None:
    """A pin means what it meant, whatever its step means later."""
    old = store.ingest(checkpoint(tmp_path / "a", seed=0), pin="best")
    store.ingest(checkpoint(tmp_path / "b", seed=1), replace=True)

    assert store.show("best").commit == old.commit
    assert store.show("best").pin == "best"
    assert [pin.name for pin in store.pins()] == ["best"]


@pytest.mark.fault(103)
def test_a_pin_outlives_its_record(store: Store, tmp_path: Path) -> None:
    """A pin is a whole record: the commit it was made from may be gone."""
    source = checkpoint(tmp_path)
    store.ingest(source, pin="best")
    shutil.rmtree(store.path / "commits" / "sft")
    written = store.compose("best").write(tmp_path / "out")

    assert digests(source, leave_out="_states.pt") == digests(written.out, leave_out="_states.pt")


def test_a_pins_name_is_its_own(store: Store, tmp_path: Path) -> None:
    """Pins and runs share their names, and a pin is not silently moved."""
    store.ingest(checkpoint(tmp_path), pin="best")
    store.ingest(checkpoint(tmp_path, step=4))

    with pytest.raises(Conflict, match="'best' is the name of a pin"):
        store.ingest(checkpoint(tmp_path, step=6), run="best")
    with pytest.raises(Conflict, match="'sft' is the name of a run"):
        store.pin("sft", "sft@2")
    with pytest.raises(AlreadyExists, match="pin 'best' means sft@2 already"):
        store.pin("best", "sft@4")
    assert store.pin("best", "sft@2").base == store.show("sft@2").commit
    with pytest.raises(InvalidInput):
        store.pin("../best", "sft@2")
    store.delete_pin("best")
    with pytest.raises(NotFound):
        store.show("best")


# -- composing -----------------------------------------------------------------------------------------------------


@pytest.mark.known_fault("llmtailor 9")
def test_a_target_that_is_there_is_not_replaced(store: Store, tmp_path: Path) -> None:
    """A folder with something in it is left alone without force; with force only what the composite renews goes."""
    store.ingest(checkpoint(tmp_path))
    out = tmp_path / "out"
    out.mkdir()
    store.compose("sft").write(out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(AlreadyExists, match="is not empty; nothing was changed"):
        store.compose("sft").write(out)
    assert (out / "notes.txt").exists()

    with pytest.raises(AlreadyExists, match=r"also holds 'notes\.txt'"):
        store.compose("sft").write(out, force=True)
    assert (out / "notes.txt").read_text() == "mine"

    (out / "notes.txt").unlink()
    store.compose("sft").write(out, force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"store", "sft", "out"}


@pytest.mark.fault(78)
@pytest.mark.parametrize("place", ["", "inside", "objects/new", ".."])
def test_a_target_inside_or_around_the_store_is_refused(store: Store, tmp_path: Path, place: str) -> None:
    """A composite never lands in the store, nor replaces a folder that holds it."""
    store.ingest(checkpoint(tmp_path))
    before = snapshot(store)
    with pytest.raises(InvalidInput, match=r"is inside the store|contains the store"):
        store.compose("sft").write(store.path / place, force=True)

    assert before == snapshot(store)


def test_a_target_that_is_a_link_or_a_file_is_refused(store: Store, tmp_path: Path) -> None:
    """Nothing is written through a link, and no file is replaced by a folder."""
    store.ingest(checkpoint(tmp_path))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(AlreadyExists, match="is not a folder"):
            store.compose("sft").write(tmp_path / name, force=True)

    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()


def objects_of(store: Store) -> list[Path]:
    """Return every object that a verified compose of the tip reads."""
    return sorted(path for path in (store.path / "objects").rglob("*") if path.is_file())


@pytest.mark.fault(35)
@pytest.mark.known_fault("llmtailor 12")
@pytest.mark.parametrize("layout", ["raw", "hf"])
def test_damage_anywhere_stops_a_verified_compose(store: Store, tmp_path: Path, layout: str) -> None:
    """Whichever object has a flipped byte: nothing appears at the target, and the error is damage."""
    store.ingest(checkpoint(tmp_path, layout=layout, layers=1))
    for path in objects_of(store):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(IntegrityError):
            store.compose("sft").write(tmp_path / "out")
        path.write_bytes(data)

    assert {path.name for path in tmp_path.iterdir()} == {"store", "sft"}
    store.compose("sft").write(tmp_path / "out")


@pytest.mark.fault(36)
@pytest.mark.known_fault("llmtailor 9", "llmtailor 12")
def test_a_missing_object_stops_every_compose(store: Store, tmp_path: Path) -> None:
    """An object that is gone is named, with or without verification, and re-ingesting heals it."""
    source = checkpoint(tmp_path)
    store.ingest(source)
    for path in objects_of(store):
        data = path.read_bytes()
        path.unlink()
        for verify in (True, False):
            with pytest.raises(IntegrityError, match=path.name):
                store.compose("sft").write(tmp_path / "out", verify=verify)
        path.write_bytes(data)
    objects_of(store)[0].unlink()
    assert not store.verify().ok

    store.ingest(source)

    assert store.verify(read_data=True).ok


def test_policies_that_are_not_there_are_named(store: Store, tmp_path: Path) -> None:
    """A wrong policy is refused with those there are; exact and latest agree on a full save."""
    store.ingest(checkpoint(tmp_path))
    with pytest.raises(InvalidInput, match="no policy 'newest'") as caught:
        store.compose("sft", policy="newest")
    assert caught.value.hint == "policies: drift, exact, filter, full, latest, parity"

    assert store.compose("sft", policy="exact").layers == store.compose("sft").layers


# -- checking ------------------------------------------------------------------------------------------------------


@pytest.mark.fault(34, 35, 36)
def test_verify_names_what_is_damaged_and_who_needs_it(store: Store, tmp_path: Path) -> None:
    """A flipped byte is found by reading all data, a wrong size or a missing object by looking."""
    frozen = ("model.layers.0",)
    store.ingest(checkpoint(tmp_path, frozen=frozen), pin="best")
    store.ingest(checkpoint(tmp_path, frozen=frozen, step=4))
    shared = min(objects_of(store), key=lambda path: (path.stat().st_mtime_ns, path.name))
    for path in objects_of(store):
        shared = path
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        verdict = store.verify(read_data=True)
        path.write_bytes(data)
        (damage,) = verdict.damaged
        assert (damage.id, damage.path) == (path.name, f"objects/{path.name[:2]}/{path.name}")
        assert set(damage.needed_by) <= {"sft@2", "sft@4", "best"}
        assert damage.needed_by
    assert store.verify(read_data=True).ok

    os.truncate(shared, 1)
    assert [damage.id for damage in store.verify().damaged] == [shared.name]


def test_verify_counts_orphans_without_blame(store: Store, tmp_path: Path) -> None:
    """An object that nothing names is harmless."""
    store.ingest(checkpoint(tmp_path))
    name = "ab" + "0" * 30
    (store.path / "objects" / "ab").mkdir(exist_ok=True)
    (store.path / "objects" / "ab" / name).write_bytes(b"orphan")

    verdict = store.verify(read_data=True)

    assert verdict.ok
    assert (verdict.orphans, verdict.records) == (1, 1)


def test_verify_reports_strangers_and_damaged_pins(store: Store, tmp_path: Path) -> None:
    """One fault does not hide another."""
    store.ingest(checkpoint(tmp_path), pin="best")
    (store.path / "pins" / "best").write_bytes(b"torn")
    (store.path / "commits" / "sft" / "notes.txt").write_text("?")

    assert {damage.kind for damage in store.verify().damaged} == {"pin", "stranger"}


def test_verify_of_one_commit_looks_at_what_it_needs(store: Store, tmp_path: Path) -> None:
    """Damage in another commit is not its business."""
    store.ingest(checkpoint(tmp_path))
    mine = set(objects_of(store))
    store.ingest(checkpoint(tmp_path, step=4))
    other = next(path for path in objects_of(store) if path not in mine)
    other.unlink()

    assert store.verify("sft@2", read_data=True).ok
    assert not store.verify("sft@4").ok


@pytest.mark.fault(101)
def test_reindexing_changes_no_answer(store: Store, tmp_path: Path) -> None:
    """The index is made afresh from the records, and log, show and verify say the same."""
    for step in (2, 4):
        store.ingest(checkpoint(tmp_path, step=step))
    before = (store.log(), store.show("sft@2"), store.show("sft"))

    assert store.reindex() == 2
    assert before == (store.log(), store.show("sft@2"), store.show("sft"))
    shutil.rmtree(store.path / "manifest")
    with layerstore.open(store.path) as again:
        assert before == (again.log(), again.show("sft@2"), again.show("sft"))


# -- naming, opening, refusing -------------------------------------------------------------------------------------


def test_a_layer_pattern_is_kept_with_the_commit(store: Store, tmp_path: Path) -> None:
    """Layers named by the user's own rule come back in the same layout."""
    source = checkpoint(tmp_path, layout="hf")
    ingested = store.ingest(source, layer_pattern=r"model\.layers\.\d+\.(self_attn|mlp)")
    written = store.compose("sft").write(tmp_path / "out")

    assert {"self_attn", "mlp"} <= set(ingested.layers)
    assert digests(source, leave_out="_states.pt") == digests(written.out, leave_out="_states.pt")


@pytest.mark.fault(60)
def test_a_flipped_byte_in_the_source_is_not_ingested(store: Store, tmp_path: Path) -> None:
    """Rot in the source is found by its checksum before anything becomes visible."""
    source = checkpoint(tmp_path)
    for path in sorted(source.rglob("*optim_states.pt")):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(SourceCheckpoint):
            store.ingest(source)

    assert store.runs == []
    assert store.verify().orphans == 0


@pytest.mark.fault(75)
def test_what_is_no_store_is_not_opened(tmp_path: Path) -> None:
    """A folder without store.json is no store, and opening it writes nothing there."""
    with pytest.raises(NoStore, match="there is no store at") as caught:
        layerstore.open(tmp_path)

    assert f"layerstore init {tmp_path}" in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("left", "sign"),
    [
        ("commits/run", "commits"),
        ("objects/0a", "objects"),
        ("pins/best", "pins"),
        ("migrating/new", "a migration under way"),
        ("backups/format-0.1", "backups of a migration"),
    ],
)
def test_what_was_a_store_is_not_made_one_afresh(tmp_path: Path, left: str, sign: str) -> None:
    """Whatever only a store has says that ``store.json`` is missing: nobody is told to init there."""
    (tmp_path / left).mkdir(parents=True)
    for ask in (layerstore.open, layerstore.init):
        with pytest.raises(IntegrityError, match=f"holds {sign}, but its store.json is missing") as caught:
            ask(tmp_path)
        assert "put back a copy of store.json" in (caught.value.hint or "")
        assert "init" not in (caught.value.hint or "").split(";")[0]

    assert [path.name for path in tmp_path.iterdir()] == [Path(left).parts[0]]


def test_a_store_is_made_once(store: Store, tmp_path: Path) -> None:
    """Init neither touches a store that is there nor a folder with something else in it."""
    before = snapshot(store)
    with pytest.raises(AlreadyExists, match="is a store already"):
        layerstore.init(store.path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(AlreadyExists, match="it holds 'file'"):
        layerstore.init(tmp_path / "mine")

    assert before == snapshot(store)


@pytest.mark.fault(43)
def test_a_store_that_lost_its_identity_is_damage_not_absence(store: Store, tmp_path: Path) -> None:
    """Commits without a store.json are never taken for an empty folder."""
    store.ingest(checkpoint(tmp_path))
    (store.path / "store.json").unlink()
    with pytest.raises(IntegrityError, match=r"its store\.json is missing"):
        layerstore.open(store.path)
    with pytest.raises(IntegrityError, match=r"its store\.json is missing"):
        layerstore.init(store.path)
    assert not (store.path / "store.json").exists()


@pytest.mark.fault(74)
@pytest.mark.parametrize("folder", ["objects", "commits", "pins", "tmp", "locks"])
def test_a_folder_that_is_a_link_is_refused(store: Store, tmp_path: Path, folder: str) -> None:
    """A planted link in the place of a folder is found before anything is read or written through it."""
    shutil.move(store.path / folder, tmp_path / "moved")
    (store.path / folder).symlink_to(tmp_path / "moved")
    with pytest.raises(IntegrityError, match="is not a folder of the store"):
        layerstore.open(store.path)


@pytest.mark.fault(74, 90)
def test_a_store_is_found_through_a_link(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of the store itself may be a link, may have odd names in it, and is resolved once."""
    (tmp_path / "odd\n name").mkdir()
    (tmp_path / "odd\n name" / "link").symlink_to(store.path)
    monkeypatch.chdir(tmp_path / "odd\n name")
    with layerstore.open("link") as again:
        monkeypatch.chdir("/")
        assert again.path == store.path
        again.ingest(checkpoint(tmp_path))
    assert store.runs == ["sft"]
