"""``layerstore repair`` and ``verify`` say what is damaged, what that costs, what was done, and what to type next."""

import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import layerstore
from layerstore.format import StoreIdentity
from tests.cli.conftest import Run

NOTHING = "nothing to repair; tensor data was not read; --read-data checks it too"


def last_object(store: Path) -> Path:
    """Return an object that only sft@4 needs."""
    with layerstore.open(store) as opened:
        entries = opened.repo.records.read(opened.repo.records.names("sft")[-1]).record.layers
        entry = next(entry for entry in entries if entry.layer == "model.layers.1")
        return opened.repo.layout.object(opened.repo.version_of(entry).objects[0].id)


def test_a_sound_store_needs_no_repair(run: Run, store: Path) -> None:
    """And it says so."""
    people = run("repair", "--read-data", "--store", store)

    assert (people.code, people.out) == (0, "nothing to repair\n")


def test_what_has_a_copy_is_healed(run: Run, store: Path, tmp_path: Path) -> None:
    """The plan names it, changes nothing, and the deed does it."""
    shutil.copytree(store, tmp_path / "backup")
    path = last_object(store)
    os.truncate(path, 1)
    planned = run("repair", "--from", tmp_path / "backup", "--dry-run", "--store", store)
    unhealed = run("verify", "--store", store)
    done = run("repair", "--from", tmp_path / "backup", "--store", store)

    assert (planned.code, unhealed.code, done.code) == (0, 20, 0)
    assert f"would fetch object  objects/{path.name[:2]}/{path.name}" in planned.out
    assert planned.out.splitlines()[-1] == "nothing was changed"
    assert f"fetched object  objects/{path.name[:2]}/{path.name}" in done.out
    assert f"from {tmp_path / 'backup'}" in done.out
    assert f"moved damaged object  objects/{path.name[:2]}/{path.name} to trash/" in done.out
    assert run("verify", "--read-data", "--store", store).code == 0


def test_what_is_lost_is_told_with_the_way_out(run: Run, store: Path, checkpoints: Path) -> None:
    """Commit, layer, and the command that brings it back; it works."""
    last_object(store).unlink()

    verify = run("verify", "--store", store)
    of_one = run("verify", "sft@4", "--store", store)
    people = run("repair", "--store", store)
    programs = run("repair", "--store", store, "--json")

    assert "affects sft@4: 1 layer, model.layers.1" in verify.out
    assert "sft@4: 1 layer lost" in verify.out
    assert "sft: the newest intact step is sft@2" in verify.out
    assert "sft@4: 1 layer lost" in of_one.out
    assert "intact" not in of_one.out  # the other steps were not looked at
    assert verify.err.splitlines()[-1].endswith(" repair --dry-run says what can be done")
    assert (people.code, programs.code) == (20, 20)
    assert "lost from sft@4: 1 layer, model.layers.1" in people.out
    assert "; ingest the checkpoint of sft@4 again; " in people.err.splitlines()[-1]
    assert programs.fields["reingest"] == ["sft@4"]
    assert programs.fields["lost"] == [{"commit": "sft@4", "layers": ["model.layers.1"], "everything": False}]
    assert run("ingest", checkpoints / "global_step4", "--run", "sft", "--store", store).code == 0
    assert run("verify", "--read-data", "--store", store).code == 0


def test_a_lost_record_is_given_up_by_name(run: Run, store: Path) -> None:
    """gc says what to type, and works then; the pin too."""
    shutil.rmtree(store / "manifest")
    next((store / "commits" / "sft").glob("4.*")).write_bytes(b"rot")
    (store / "pins" / "best").write_bytes(b"rot")

    repaired = run("repair", "--store", store)
    programs = run("repair", "--store", store, "--json")
    blocked = run("gc", "--store", store)
    planned = run("drop", "sft@4", "--dry-run", "--store", store)
    given_up = run("drop", "sft@4", "--store", store, "--json")
    pin = run("gc", "--store", store)

    assert (repaired.code, programs.code, blocked.code, pin.code) == (20, 20, 20, 20)
    assert "sft@4 cannot be read, and gc removes nothing until it is healed or removed" in repaired.out
    assert programs.fields["unreadable"] == ["sft@4", "best"]
    assert repaired.err.splitlines()[-1].endswith(" drop sft@4 removes it")
    assert " drop sft@4 removes it" in blocked.err
    assert "nothing was changed" in planned.out
    assert len(given_up.fields["given_up"]) == 1
    assert " pin --delete best removes it" in pin.err
    assert run("pin", "--delete", "best", "--store", store).code == 0
    assert run("gc", "--store", store).code == 0
    assert run("drop", "sft@4", "--store", store).code == 13


def test_what_is_to_be_typed_can_be_typed_whatever_names_hold(run: Run, store: Path, checkpoints: Path) -> None:
    """A space, or what a shell would carry out, stays one word."""
    name = "a $(touch b)"
    run("ingest", checkpoints, "--run", name, "--store", store)
    shutil.rmtree(store / "manifest")
    next((store / "commits" / name).iterdir()).write_bytes(b"rot")
    run("repair", "--store", store)

    blocked = run("gc", "--store", store)
    [line] = [line for line in blocked.err.splitlines() if line.startswith("hint: ")]
    words = shlex.split(line.removeprefix("hint: ").partition(" removes it")[0].rpartition("; ")[2])

    assert words[-2:] == ["drop", f"{name}@4"]
    assert run(*words[1:]).code == 0
    assert run("gc", "--store", store).code == 0


def test_a_pin_that_may_have_been_moved_since_the_copy_is_said(run: Run, store: Path, tmp_path: Path) -> None:
    """Nothing proves that it meant the same here: the command that says so is there to be typed."""
    copy = shutil.copytree(store, tmp_path / "copy")
    (store / "pins" / "best").write_bytes(b"rot")

    told = run("repair", "--from", copy, "--store", store)
    [program] = run("repair", "--from", copy, "--store", store, "--json").fields["pins_elsewhere"]
    commands = [line for line in told.out.splitlines() if line.startswith("  layerstore ")]

    assert told.code == 20
    assert f" in {copy}; this store may have moved it since:" in " ".join(told.out.split())
    assert program == {"pin": "best", "reference": "sft@2", "store": str(copy)}
    assert [run(*shlex.split(command)[1:]).code for command in commands] == [0, 0]
    assert run("verify", "--store", store).code == 0


def test_the_way_on_looks_where_the_damage_was_found(run: Run, store: Path, tmp_path: Path) -> None:
    """A flipped byte is seen by who reads it, so the command that heals it has to read too."""
    copy = shutil.copytree(store, tmp_path / "copy")
    path = last_object(store)
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))

    told = run("repair", "--read-data", "--dry-run", "--store", store)
    hint = told.err.splitlines()[-1].removeprefix("hint: ").partition(";")[0]
    unread = run("repair", "--from", copy, "--store", store)
    healed = run(*shlex.split(hint.replace("COPY", str(copy)))[1:])

    assert told.code == 20
    assert unread.out == f"{NOTHING}\n"
    assert (healed.code, run("verify", "--read-data", "--store", store).code) == (0, 0)


def test_the_plan_fails_as_the_deed_would(run: Run, store: Path) -> None:
    """What a script asks first has the answer of what it would do."""
    last_object(store).unlink()
    before = {path for path in store.rglob("*") if "locks" not in path.parts}

    planned = run("repair", "--dry-run", "--store", store)
    programs = run("repair", "--dry-run", "--store", store, "--json")

    assert (planned.code, programs.code) == (20, 20)
    assert "1 commit cannot be healed: sft@4; nothing was changed" in planned.err
    assert " repair --from COPY; ingest the checkpoint of sft@4 again; " in planned.err.splitlines()[-1]
    assert {path for path in store.rglob("*") if "locks" not in path.parts} == before


def test_no_older_layers_are_offered_for_a_lost_state(run: Run, store: Path, checkpoints: Path) -> None:
    """There is no older one that would do: a copy heals it, or its checkpoint."""
    with layerstore.open(store) as opened:
        state = opened.repo.records.read(opened.repo.records.names("sft")[-1]).record.states[0]
        opened.repo.layout.object(state.id).unlink()

    done = run("repair", "--store", store)

    assert done.code == 20
    assert done.err.splitlines()[-1].endswith("; ingest the checkpoint of sft@4 again")
    assert "--without-damaged" not in done.err
    assert run("ingest", checkpoints / "global_step4", "--run", "sft", "--store", store).code == 0
    assert run("verify", "--read-data", "--store", store).code == 0


def test_an_ingest_that_brings_a_lost_record_back_says_so(run: Run, store: Path, checkpoints: Path) -> None:
    """And gc goes on."""
    shutil.rmtree(store / "manifest")
    next((store / "commits" / "sft").glob("2.*")).write_bytes(b"rot")
    run("repair", "--store", store)
    blocked = run("gc", "--store", store)

    saved = run("ingest", checkpoints / "global_step2", "--run", "sft", "--store", store)

    assert (blocked.code, saved.code) == (20, 0)
    assert saved.out.endswith("; its record was damaged and is written again\n")
    assert (run("verify", "--store", store).code, run("gc", "--store", store).code) == (0, 0)


def test_a_lost_identity_comes_back(run: Run, store: Path) -> None:
    """The error names the command; a wrong id changes nothing."""
    identity = (store / "store.json").read_text()
    (store / "store.json").unlink()
    hint = run("log", "--store", store).err.splitlines()[-1]
    words = hint.removeprefix("hint: layerstore ").partition(",")[0].split()

    wrong = run("repair", "--store-id", "0" * 32, "--store", store)
    planned = run(*words, "--dry-run")
    still = run("log", "--store", store)
    done = run(*words)

    assert words[:-1] == ["--store", str(store), "repair", "--store-id"]
    assert words[-1] in identity
    assert (wrong.code, planned.code, still.code, done.code) == (2, 0, 20, 0)
    assert done.out.splitlines() == [f"wrote store.json again, for store {words[-1]}", NOTHING]
    assert "warning: which features the store needs is not known; none is assumed" in done.err
    assert "none is assumed" in planned.err
    assert run("verify", "--read-data", "--store", store).code == 0


@pytest.mark.fault(43, 81)
def test_a_damaged_identity_comes_back_with_its_flags(run: Run, store: Path) -> None:
    """One digit of its format has flipped: that is damage, and what else it says still counts."""
    path = store / "store.json"
    identity = StoreIdentity.decode(path.read_bytes(), what="store.json")
    data = replace(identity, flags=("packs",)).encode()
    path.write_bytes(data.replace(b'"format": 2', b'"format": 3'))

    told = run("log", "--store", store)
    done = run("repair", "--store-id", identity.store_id, "--store", store)

    assert (told.code, done.code) == (20, 16)
    assert f"layerstore --store {store} repair --store-id {identity.store_id}" in told.err
    assert "none is assumed" not in done.err
    assert "uses packs, which this layerstore does not know" in done.err
    assert StoreIdentity.decode(path.read_bytes(), what="store.json").flags == ("packs",)
    assert run("log", "--store", store).code == 0


def _home(folder: Path) -> None:
    for name in ("Documents/objects", "backups/photos", ".git/objects/0a"):
        (folder / name).mkdir(parents=True)
    (folder / ".profile").write_text("umask 022\n")
    (folder / "Documents" / "store.json").write_text("{}")


def _project(folder: Path) -> None:
    for name in ("objects/0a", "commits/today", "pins"):
        (folder / name).mkdir(parents=True)
    (folder / "commits" / "today" / "letter").write_text("not a record")
    (folder / "store.json").write_text('{"shop": "bread"}')


@pytest.mark.fault(75)
@pytest.mark.parametrize("fill", [lambda folder: None, _home, _project], ids=["empty", "home", "project"])
def test_a_repair_of_what_is_no_store_writes_nothing(run: Run, tmp_path: Path, fill: Callable[[Path], None]) -> None:
    """With an id or without: an empty folder, somebody's home, and one with a ``store.json`` of its own."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    fill(folder)
    before = {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}
    commands = [[], ["--dry-run"], ["--read-data"], ["--store-id", "0" * 32]]

    codes = [run("repair", *words, "--store", folder).code for words in commands]

    assert set(codes) <= {2, 10, 20}, codes
    assert codes[-1] == 2
    assert {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")} == before


def test_a_part_of_the_objects_is_read(run: Run, store: Path) -> None:
    """A slice is the same each time, and all slices are everything; a percentage can be had again by its seed."""
    everything = run("verify", "--read-data", "--store", store, "--json").fields
    slices = [run("verify", "--read-data-subset", f"{at}/3", "--store", store, "--json").fields for at in (1, 2, 3)]
    sampled = run("verify", "--read-data-subset", "50%", "--store", store, "--json").fields
    seed = sampled["sample"].rpartition(" ")[2]
    again = run("verify", "--read-data-subset", "50%", "--seed", seed, "--store", store)

    assert sum(each["objects_read"] for each in slices) == everything["objects_read"] == everything["objects"]
    assert sum(each["bytes_read"] for each in slices) == everything["bytes_read"]
    assert 0 < sampled["objects_read"] < everything["objects"]
    assert f"{sampled['objects_read']} of them read (50%, seed {seed})" in again.out


def test_a_part_without_objects_is_not_called_sound(run: Run, store: Path) -> None:
    """Nothing was read, and that is said."""
    slices = [run("verify", "--read-data-subset", f"{at}/100000", "--store", store, "--json") for at in (1, 2, 3)]
    at = next(at for at, outcome in enumerate(slices, 1) if outcome.fields["objects_read"] == 0)

    outcome = run("verify", "--read-data-subset", f"{at}/100000", "--store", store)

    assert outcome.code == 0
    assert "0 of them read" in outcome.out
    assert "no damage in names and sizes; this part holds no object" in outcome.out


def test_one_orphan_harms_nothing(run: Run, store: Path) -> None:
    """It is said so in words that fit one."""
    (store / "objects" / "ab").mkdir(exist_ok=True)
    (store / "objects" / "ab" / ("ab" + "0" * 30)).write_bytes(b"orphan")

    outcome = run("verify", "--store", store)

    assert outcome.code == 0
    assert "1 object of no commit: harmless, and removed by the next gc" in outcome.out.splitlines()


def test_what_a_damaged_record_names_is_not_called_harmless(run: Run, store: Path) -> None:
    """It is needed again once the record is repaired."""
    newest = max((store / "commits" / "sft").iterdir(), key=lambda path: int(path.name.partition(".")[0]))
    newest.write_bytes(newest.read_bytes()[:100])

    outcome = run("verify", "--store", store)

    assert outcome.code == 20
    assert "of no commit: only what is damaged may need them: repair that first" in outcome.out


@pytest.mark.fault(128)
def test_a_run_under_another_name_is_told_and_comes_back(run: Run, store: Path) -> None:
    """Every command that meets it says what to do; nothing is moved or removed, and its objects are not orphans."""
    run("pin", "--delete", "best", "--store", store)
    folder = store / "commits" / "sft"
    stranger = folder.rename(folder.with_name("sft (copy)@1"))

    log, verify, repair, gc = (run(*words, "--store", store) for words in (["log"], ["verify"], ["repair"], ["gc"]))

    assert [each.code for each in (log, verify, repair, gc)] == [0, 20, 20, 20]
    assert "harmless" not in verify.out + verify.err
    for each in (verify, repair, gc):
        assert "commits/sft (copy)@1" in each.out + each.err
    for each in (repair, gc):
        assert "back its name, or move it out of the store" in each.err
    stranger.rename(folder)
    assert [run(command, "--store", store).code for command in ("verify", "gc")] == [0, 0]
