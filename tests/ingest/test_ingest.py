"""Promises of the verbs, end to end on generated checkpoints: nothing is lost, doubled or guessed."""

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Store
from layerstore.errors import AlreadyExists, Conflict, IntegrityError, InvalidInput, NotFound, StorageIO
from layerstore.model import Kind
from tests.unit.checkpoints import change_gathered, checkpoint, digests, header_of, snapshot

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


@pytest.mark.known_fault("llmtailor 1")
def test_equal_layers_under_other_groupings_share_every_object(store: Store, tmp_path: Path) -> None:
    """What the optimizer's groups are makes no difference to any layer's bytes."""
    first = store.ingest(checkpoint(tmp_path / "a"), run="two")
    for grouping in ("layerwise", "layerwise_blocks_first"):
        source = checkpoint(tmp_path / grouping, groups=grouping, sub_group_size=200)
        again = store.ingest(source, run=grouping)
        assert (again.objects_new, again.objects_reused) == (2, first.objects_new - 2)  # the ranks' states differ
        assert [line.version for line in store.ls("two")] == [line.version for line in store.ls(grouping)]


def test_a_second_ingest_writes_nothing(store: Store, tmp_path: Path) -> None:
    """The same checkpoint again is recognised: no file of the store is new or other."""
    source = checkpoint(tmp_path, layout="hf")
    first = store.ingest(source)
    before = snapshot(store)

    again = store.ingest(source)

    assert (first.is_new, again.is_new) == (True, False)
    assert (first.commit, 0, 0) == (again.commit, again.objects_new, again.bytes_new)
    assert before == snapshot(store)


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


@pytest.mark.parametrize(("world_size", "offset"), [(1, 0), (3, 0), (3, -1)])
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


@pytest.mark.fault(70)
def test_what_is_shared_is_stored_once(store: Store, tmp_path: Path) -> None:
    """A tied parameter is stored with its alias, and a frozen layer is one version however often it is saved."""
    options: dict[str, Any] = {"tied": True, "frozen": ("model.layers.0",), "layout": "hf"}
    store.ingest(checkpoint(tmp_path, **options))
    source = checkpoint(tmp_path, step=4, **options)
    change_gathered(source, BLOCK_0)  # unlike the frozen weights: both are kept
    store.ingest(source)
    before, after = ({line.layer: line for line in store.ls(ref)} for ref in ("sft@2", "sft@4"))

    assert {name for name in before if before[name].version == after[name].version} == {"model.layers.0"}
    assert sum(before["model.embed_tokens"].bytes_by_kind.values()) > 0
    assert "lm_head" not in before
    written = store.compose("sft").write(tmp_path / "out")
    assert digests(source, leave_out="_states.pt") == digests(written.out, leave_out="_states.pt")


# -- replacing and pinning -----------------------------------------------------------------------------------------


def test_other_content_for_a_step_is_refused(store: Store, tmp_path: Path) -> None:
    """A step that is saved is not silently changed, and nothing is written by the attempt."""
    store.ingest(checkpoint(tmp_path / "a", seed=0))
    before = snapshot(store)
    with pytest.raises(Conflict, match="sft@2 is saved already, with other content") as caught:
        store.ingest(checkpoint(tmp_path / "b", seed=1))

    assert "--replace" in (caught.value.hint or "")
    assert before == snapshot(store)


def test_a_mixture_is_not_to_replace_the_save_that_it_is_based_on(store: Store, tmp_path: Path) -> None:
    """A composite goes by its base's run and step, and has other content; a pin is the place for it."""
    store.ingest(checkpoint(tmp_path / "a", step=2))
    store.ingest(checkpoint(tmp_path / "a", step=4, seed=1))
    mixed = store.compose("sft", policy="parity").write(tmp_path / "out" / "sft" / "checkpoint-4")
    with pytest.raises(Conflict, match="sft@4 is saved already, with other content") as caught:
        store.ingest(mixed.out)

    assert "compose --pin NAME" in (caught.value.hint or "")


def test_what_was_composed_from_one_save_is_no_mixture(store: Store, tmp_path: Path) -> None:
    """It differs all the same, if somebody changed a file of it; there is nothing to pin."""
    store.ingest(checkpoint(tmp_path / "a", step=4))
    out = store.compose("sft@4").write(tmp_path / "out" / "sft" / "checkpoint-4").out
    (next(out.glob("global_step*")) / "beside.txt").write_text("new")
    with pytest.raises(Conflict, match="sft@4 is saved already, with other content") as one_save:
        store.ingest(out)
    (out / "layerstore.json").write_text("[]")
    with pytest.raises(Conflict) as unknown:
        store.ingest(out)

    assert "--pin" not in (one_save.value.hint or "")
    assert "from one save" in (one_save.value.hint or "")
    assert "compose --pin NAME" in (unknown.value.hint or "")


def test_what_was_composed_from_a_compact_save_is_noted(store: Store, tmp_path: Path) -> None:
    """Its shards do not show it: only the summary beside them does."""
    for step in (2, 4):
        store.ingest(checkpoint(tmp_path / "a", step=step, seed=step), precision="delta8")
    exact, compact = (store.compose(f"sft@{step}").write(tmp_path / f"out-{step}").out for step in (2, 4))

    notes = store.ingest(compact, run="other").notes

    assert any("composed from a save that was not kept bit for bit (sft@4)" in note for note in notes)
    assert not any("composed" in note for note in store.ingest(exact, run="again").notes)


@pytest.mark.every_case
@pytest.mark.parametrize("is_mean", [False, True])
def test_what_was_composed_from_several_saves_is_noted(store: Store, tmp_path: Path, is_mean: bool) -> None:
    """As another run it looks like any save from then on."""
    for step in (2, 4):
        store.ingest(checkpoint(tmp_path / "a", step=step, seed=step))
    mixed = store.average("last:2") if is_mean else store.compose("sft", policy="parity")
    out = mixed.write(tmp_path / "out").out

    notes = store.ingest(out, run="other").notes

    assert "it was composed from several saves (sft@4 and others): log shows them as one" in notes
    again = store.compose("other@4").write(tmp_path / "again").out
    assert not any("composed" in note for note in store.ingest(again, run="third").notes)


@pytest.mark.parametrize(("saved", "other"), [(2, 3), (3, 2)])
def test_another_model_at_a_saved_step_is_refused(store: Store, tmp_path: Path, saved: int, other: int) -> None:
    """With more layers or with fewer; whoever means it may replace the commit."""
    store.ingest(checkpoint(tmp_path / "a", layers=saved))
    source = checkpoint(tmp_path / "b", layers=other)
    before = snapshot(store)
    with pytest.raises(Conflict, match="sft@2 is saved already, with other content"):
        store.ingest(source)
    assert before == snapshot(store)

    assert store.ingest(source, replace=True).is_new
    assert len(store.ls("sft@2")) == other + 3


def test_replacing_moves_the_old_commit_to_the_trash(store: Store, tmp_path: Path) -> None:
    """The new content is what the step means, a pin means what it meant, and replacing back is one more commit."""
    first, second = checkpoint(tmp_path / "a", seed=0), checkpoint(tmp_path / "b", seed=1)
    old = store.ingest(first, pin="best")
    assert not store.ingest(first, replace=True).is_new

    new = store.ingest(second, replace=True)

    assert store.show("sft@2").commit == new.commit != old.commit == store.show("best").commit
    assert [path.name for path in (store.path / "commits" / "sft").iterdir()] == [f"2.{new.commit}"]
    assert [each.commit.id for each in store.dropped()] == [old.commit]
    store.ingest(first, replace=True)
    assert len(store.dropped()) == 2
    assert (
        digests(first, leave_out="_states.pt").items()
        <= digests(store.compose("sft").write(tmp_path / "out").out).items()
    )
    assert store.verify(read_data=True).ok


def test_replacing_ends_what_was_ambiguous(store: Store, tmp_path: Path) -> None:
    """Two commits that writers of two stores left at one step: whichever is meant takes the place of both."""
    first, second = checkpoint(tmp_path / "a", seed=0), checkpoint(tmp_path / "b", seed=1)
    shutil.copytree(store.path, tmp_path / "other")
    store.ingest(first)
    with layerstore.open(tmp_path / "other") as other:
        other.ingest(second)
    for folder in ("objects", "commits"):
        shutil.copytree(tmp_path / "other" / folder, store.path / folder, dirs_exist_ok=True)
    with pytest.raises(Conflict, match=r"ambiguous|two commits"):
        store.show("sft@2")

    new = store.ingest(first, replace=True)

    assert store.show("sft@2").commit == new.commit == store.ingest(first, replace=True).commit
    assert len(store.dropped()) == 2


def test_replacing_leaves_other_attempts_alone(store: Store, tmp_path: Path) -> None:
    """A step that only an abandoned attempt has is not a step of the history: it is saved, and nothing replaced."""
    for step in (2, 4):
        store.ingest(checkpoint(tmp_path / "a", step=step))
    store.ingest(checkpoint(tmp_path / "b", seed=1), rollback=True)

    store.ingest(checkpoint(tmp_path / "b", step=4, seed=1), replace=True)

    assert sorted((line.attempt, line.step) for line in store.log()) == [(1, 2), (1, 4), (2, 2), (2, 4)]
    assert store.dropped() == []


def test_a_pin_that_means_what_is_replaced_is_told_of_before(store: Store, tmp_path: Path) -> None:
    """Nothing is replaced; the same command again is not an error once the pin means what it saves."""
    store.ingest(checkpoint(tmp_path / "a", seed=0), pin="best")
    before = snapshot(store)

    with pytest.raises(AlreadyExists, match="best"):
        store.ingest(checkpoint(tmp_path / "b", seed=1), pin="best", replace=True)

    assert snapshot(store) == before
    store.delete_pin("best")
    for _ in range(2):
        store.ingest(checkpoint(tmp_path / "b", seed=1), pin="best", replace=True)


def test_rot_in_an_inherited_layer_is_told_as_rot(store: Store, tmp_path: Path) -> None:
    """Repeating the command would not help: the layer and the way on are named, and nothing is written."""
    store.ingest(checkpoint(tmp_path))
    store.ingest(checkpoint(tmp_path, step=4), policy="parity")
    layer, entry = next((layer, each) for layer, each in store.compose("sft@4").layers.items() if each.step == 2)
    store.drop("sft@2")
    blob = store.path / "objects" / entry.version[:2] / entry.version
    blob.chmod(0o644)
    blob.write_bytes(b"rotten")

    for save in (
        lambda: store.pin("best", "sft@4"),
        lambda: store.ingest(checkpoint(tmp_path, step=4), policy="parity"),
    ):
        with pytest.raises(IntegrityError, match=f"version of '{layer}' of sft@2 cannot be inherited: .* is damaged"):
            save()


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
    with pytest.raises(AlreadyExists, match="pin 'best' already refers to sft@2"):
        store.pin("best", "sft@4")
    assert store.pin("best", "sft@2").base == store.show("sft@2").commit
    with pytest.raises(InvalidInput):
        store.pin("../best", "sft@2")
    store.delete_pin("best")
    with pytest.raises(NotFound):
        store.show("best")


# -- composing -----------------------------------------------------------------------------------------------------


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


# -- checking ------------------------------------------------------------------------------------------------------


@pytest.mark.fault(34, 35, 36)
def test_verify_names_what_is_damaged_and_who_needs_it(store: Store, tmp_path: Path) -> None:
    """A flipped byte is found by reading all data, a wrong size by looking; what nothing names is harmless."""
    frozen = ("model.layers.0",)
    store.ingest(checkpoint(tmp_path, frozen=frozen), pin="best")
    store.ingest(checkpoint(tmp_path, frozen=frozen, step=4))
    for path in objects_of(store):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        verdict = store.verify(read_data=True)
        path.write_bytes(data)
        (damage,) = verdict.damaged
        assert (damage.id, damage.path) == (path.name, f"objects/{path.name[:2]}/{path.name}")
        assert set(damage.needed_by) <= {"sft@2", "sft@4", "best"}
        assert damage.needed_by
    orphan = store.path / "objects" / "ab" / f"ab{'0' * 30}"
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"orphan")
    verdict = store.verify(read_data=True)
    assert (verdict.ok, verdict.orphans, verdict.records) == (True, 1, 3)  # a pin is one, too

    os.truncate(path, 1)
    assert [damage.id for damage in store.verify().damaged] == [path.name]


def test_one_fault_does_not_hide_another(store: Store, tmp_path: Path) -> None:
    """A damaged pin and a stranger are both reported; of one commit only what it needs is looked at."""
    store.ingest(checkpoint(tmp_path))
    mine = set(objects_of(store))
    store.ingest(checkpoint(tmp_path, step=4), pin="best")
    (store.path / "pins" / "best").write_bytes(b"torn")
    (store.path / "commits" / "sft" / "notes.txt").write_text("?")
    assert {damage.kind for damage in store.verify().damaged} == {"pin", "stranger"}

    next(path for path in objects_of(store) if path not in mine).unlink()

    assert store.verify("sft@2", read_data=True).ok
    assert not store.verify("sft@4").ok


# -- naming, opening, refusing -------------------------------------------------------------------------------------


def test_a_layer_pattern_is_kept_with_the_commit(store: Store, tmp_path: Path) -> None:
    """Layers named by the user's own rule come back in the same layout."""
    source = checkpoint(tmp_path, layout="hf")
    ingested = store.ingest(source, layer_pattern=r"model\.layers\.\d+\.(self_attn|mlp)")
    written = store.compose("sft").write(tmp_path / "out")

    assert {"self_attn", "mlp"} <= set(ingested.layers)
    assert digests(source, leave_out="_states.pt") == digests(written.out, leave_out="_states.pt")


@pytest.mark.parametrize(
    ("left", "sign"),
    [
        ("commits/run", "commits"),
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
    assert store.runs() == ["sft"]


def test_a_full_disk_says_in_readable_sizes_what_is_needed_and_what_is_free(tmp_path: Path) -> None:
    """Nobody counts the digits of a number of bytes."""

    def refuse(operation: str, path: Path) -> None:
        if operation == "create" and path.parent.name == "tmp":
            raise StorageIO("no space left", errno=errno.ENOSPC, filename=str(path))

    layerstore.init(tmp_path / "store").close()

    with Store(tmp_path / "store", hook=refuse) as store, pytest.raises(StorageIO) as caught:
        store.ingest(checkpoint(tmp_path), run="sft")

    assert caught.value.exit_code == 23
    assert re.search(r"needs up to [\d.]+ [kM]B, [\d.]+ [GT]B are free; earlier commits", str(caught.value))
