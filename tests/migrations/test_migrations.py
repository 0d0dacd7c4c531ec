"""
``migrate``: a store of an older format becomes one of the newest, with a backup, or stays as it is.

The first release's stores are in tests/compat/stores; tests/compat/format1.py takes today's back to format 1.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import layerstore
from layerstore.disk import Files, lock
from layerstore.errors import Conflict, IntegrityError, Locked, NoStore, Unsupported
from layerstore.format import FORMAT
from layerstore.migrations import STEPS, migrate, plan_migration
from layerstore.migrations.m0001_lineage import identity_fields, identity_text, seal, unseal
from layerstore.model import Fork
from tests.compat import goldens
from tests.compat.format1 import as_format_1
from tests.faults.harness import flip, snapshot, tiny_checkpoint, truth

DROPPED = goldens.STORES / "dropped-1.zip"
PAGE = Path(__file__).parents[2] / "docs" / "operating" / "migrations.md"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints, a store of today's format, and its twin of format 1; for copying."""
    folder = tmp_path_factory.mktemp("made")
    for name, step, seed in (("first", 2, 0), ("other", 2, 1), ("second", 4, 0), ("third", 6, 0)):
        tiny_checkpoint(folder / name, step=step, seed=seed)
    with layerstore.init(folder / "new") as store:
        store.ingest(folder / "first", run="run", pin="kept")
        store.ingest(folder / "other", run="run", replace=True)
        store.ingest(folder / "second", run="run")
        store.ingest(folder / "third", run="run")
        store.ingest(folder / "second", run="run", rollback=True)
        store.drop("run~1@6")
        store.ingest(folder / "second", run="else")
        store.compose("run@4", policy="parity").pin("mixed")
    shutil.rmtree(folder / "new" / "manifest")
    as_format_1(Path(shutil.copytree(folder / "new", folder / "old")))
    return folder


@pytest.fixture
def old(made: Path, tmp_path: Path) -> Path:
    """Return a store of format 1."""
    return Path(shutil.copytree(made / "old", tmp_path / "store"))


@pytest.fixture
def new(made: Path, tmp_path: Path) -> Path:
    """Return a store of today's format."""
    return Path(shutil.copytree(made / "new", tmp_path / "store"))


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """Return the store of format 1 in which much is hidden, and whose collection was interrupted."""
    return goldens.unpack_store(DROPPED, tmp_path / "dropped")


@pytest.fixture
def dropped(interrupted: Path) -> Path:
    """Return it as the next collection left it."""
    return goldens.collected(interrupted)


def without_backups(store: Path) -> dict[str, str]:
    """Return the truth of *store*, but for what migrations have kept."""
    return {name: content for name, content in truth(store).items() if not name.startswith("backups/")}


def number(store: Path) -> int:
    """Return the format that the store at *store* says it has."""
    found: int = json.loads((store / "store.json").read_bytes())["format"]
    return found


# -- what it does --------------------------------------------------------------------------------------------------


def test_a_migrated_store_is_what_it_would_be_had_it_been_written_today(made: Path, old: Path) -> None:
    """Every file, byte for byte: records with new ids, trash, pins, objects; the backup has the old ones."""
    done = migrate(old)

    assert (done.found, done.format, len(done.steps)) == (1, 2, 1)
    assert without_backups(old) == truth(made / "new")
    backup = done.steps[0].backup
    assert backup == old / "backups" / "format-1.1"
    kept = ("store.json", "commits/", "pins/")
    assert truth(backup) == {name: each for name, each in truth(made / "old").items() if name.startswith(kept)}
    with layerstore.open(old) as store:
        assert store.verify(read_data=True).ok
        assert store.ingest(made / "third", run="run").is_new


def test_what_format_1_hid_lies_in_the_trash_and_can_come_back(dropped: Path) -> None:
    """A dropped commit and a replaced one; one that shows again under its id does not lie there as well."""
    told = json.loads(DROPPED.with_suffix(".json").read_text())
    migrate(dropped)

    with layerstore.open(dropped) as store:
        trash = [(each.commit.record.step, each.commit.id) for each in store.dropped("sft")]
        shown = {entry.commit for entry in store.log("sft")}
        assert [step for step, _ in trash] == [9, 6]
        assert shown.isdisjoint(commit for _, commit in trash)
        assert {step for _, step, _ in told["hidden"]} == {6, 8, 9}

        store.undrop("sft@9")
        store.drop("sft@6")
        store.undrop(trash[1][1])

        assert {entry.commit for entry in store.log("sft")} >= {commit for _, commit in trash}
        versions = {line.layer: line.version for line in store.show("sft@9").layers}
        assert versions == dict(next(layers for _, step, layers in told["hidden"] if step == 9))
        assert store.verify(read_data=True).ok


def test_a_lineage_leads_through_an_attempt_of_which_nothing_is_left(dropped: Path) -> None:
    """Records without layers say where such an attempt forked; a pin's lineage goes as far."""
    migrate(dropped)

    with layerstore.open(dropped) as store:
        repo = store.repo
        record = next(repo.records.read(name).record for name in repo.records.names("sft") if name.step == 8)
        assert record.lineage == (Fork(attempt=2, step=5), Fork(attempt=1, step=4))
        assert repo.records.read_pin("outlived").record.lineage == (Fork(attempt=1, step=4),)
        assert repo.records.read_pin("plain").base == repo.records.names("sft")[-1].id


def test_a_collection_that_was_interrupted_has_to_be_finished_first(interrupted: Path) -> None:
    """What it has moved aside is in no place where format 2 looks."""
    before = truth(interrupted)

    with pytest.raises(IntegrityError, match="a collection was interrupted, and objects lie in gc/") as caught:
        migrate(interrupted)
    assert caught.value.hint == "with layerstore 0.1: gc finishes it"
    assert truth(interrupted) == before


def test_plans_of_collections_go_to_the_backup_and_the_reserve_for_good(dropped: Path) -> None:
    """Format 2 has neither."""
    backup = migrate(dropped).steps[0].backup

    assert backup is not None
    assert list(backup.glob("gc/plans/*"))
    assert not (dropped / "locks" / "gc.reserve").exists()


def test_a_plan_writes_nothing_and_says_what_would_be_written(old: Path) -> None:
    """Not even a lock; the counts are those of the deed."""
    before = snapshot(old)
    (planned,) = plan_migration(old).steps

    assert snapshot(old) == before
    (done,) = migrate(old).steps
    written = [path for name in ("commits", "pins", "trash") for path in (old / name).rglob("*") if path.is_file()]
    assert planned.files == done.files == len(written)
    assert planned.size_bytes == sum(path.stat().st_size for path in written)


@pytest.mark.fault(84)
def test_a_second_time_there_is_nothing_to_do(old: Path) -> None:
    """Nothing is touched, not even a time."""
    migrate(old)
    before = {path: path.lstat().st_mtime_ns for path in [old, *old.rglob("*")]}

    assert migrate(old).steps == plan_migration(old).steps == ()
    assert {path: path.lstat().st_mtime_ns for path in [old, *old.rglob("*")]} == before


# -- an interrupted one --------------------------------------------------------------------------------------------


class _Interrupted(BaseException):
    """A test has stopped a migration."""


def interrupt(store: Path, operation: str, name: str) -> None:
    """Migrate *store* and stop in front of *operation* on a path that ends in *name*; what was made stays."""

    def hook(called: str, path: Path) -> None:
        if (called, path.name) == (operation, name):
            raise _Interrupted

    with pytest.raises(_Interrupted):
        migrate(store, Files(hook))


@pytest.mark.fault(14)
def test_a_store_whose_migration_was_interrupted_opens_once_that_is_finished(made: Path, old: Path) -> None:
    """Opening it refuses, with the command that helps; a dry run says what is left, and writes nothing."""
    interrupt(old, "rename", "pins")  # commits/ is replaced, pins/ is not
    before = snapshot(old)

    with pytest.raises(Unsupported, match="was interrupted") as caught:
        layerstore.open(old)
    assert caught.value.hint == "layerstore migrate finishes it"
    assert plan_migration(old).is_unfinished
    assert snapshot(old) == before
    assert migrate(old).is_unfinished
    assert without_backups(old) == truth(made / "new")
    assert not (old / "migrating").exists()


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.fault(80)
@pytest.mark.parametrize("deed", [migrate, plan_migration], ids=["migrate", "plan"])
def test_a_newer_format_is_refused_and_left_alone(new: Path, deed: Callable[[Path], object]) -> None:
    """There is no way down; whatever else the newer store.json says, it is not looked at, but for what it needs."""
    (new / "store.json").write_text(json.dumps({"format": 3, "needs": "9.1", "else": ["?"]}))
    before = snapshot(new)

    with pytest.raises(Unsupported, match="of format 3; this layerstore reads format 2") as caught:
        deed(new)
    assert caught.value.hint == "it needs layerstore >= 9.1"
    assert snapshot(new) == before


def test_what_no_step_leads_away_from_is_refused(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no step begins nothing is tried; where there is no store none is made."""
    before = snapshot(old)
    (tmp_path / "none").mkdir()

    with monkeypatch.context() as patch:
        patch.setattr("layerstore.migrations.runner.STEPS", ())
        with pytest.raises(Unsupported, match="which this layerstore cannot migrate"):
            migrate(old)
    with pytest.raises(NoStore):
        migrate(tmp_path / "none")
    assert snapshot(old) == before
    assert not os.listdir(tmp_path / "none")


@pytest.mark.parametrize("pattern", ["commits/run/2.*", "pins/kept", "store.json"])
def test_damage_stops_it_before_anything_is_written(old: Path, pattern: str) -> None:
    """A record or pin that cannot be converted is named, with the way on; the old store stays as it is."""
    path = sorted(old.glob(pattern))[0]
    flip(path, -20)
    before = truth(old)

    for deed in (migrate, plan_migration):
        with pytest.raises(IntegrityError, match=rf"{path.name} is damaged: .*nothing was changed") as caught:
            deed(old)
        assert path.name == "store.json" or "with layerstore 0.1: repair heals it" in str(caught.value.hint)
    assert truth(old) == before


def test_unknown_flags_stop_it(old: Path) -> None:
    """What a flag means is not known, so it cannot be carried over: of a record, or of the store."""
    fields = identity_fields((old / "store.json").read_bytes(), number=1)
    path = old / "pins" / "kept"
    pin = unseal(path.read_bytes(), name="pins/kept", store_id=str(fields["store_id"]))["pin"]
    assert isinstance(pin, dict)
    assert isinstance(pin["record"], dict)
    changed = pin | {"record": pin["record"] | {"flags": ["half"]}}
    path.write_bytes(seal({"pin": changed}, name="pins/kept", store_id=str(fields["store_id"]), schema=1))

    with pytest.raises(Unsupported, match="pins/kept uses half"):
        migrate(old)
    (old / "store.json").write_bytes(identity_text(fields | {"flags": ["packs"]}))
    with pytest.raises(Unsupported, match="packs"):
        migrate(old)


def test_what_is_lost_in_quarantine_has_to_be_healed_or_given_up_first(dropped: Path) -> None:
    """What is sound at its place or given up is kept in the backup, and stops nothing."""
    repair = dropped / "quarantine" / "00000001-0badcafe"
    records, given_up, pins = repair / "commits" / "sft", repair / "given-up" / "commits" / "sft", repair / "pins"
    for folder in (records, given_up, pins):
        folder.mkdir(parents=True)
    for name in os.listdir(dropped / "commits" / "sft"):
        (records / name).write_bytes(b"damaged")
    lost = f"12.{'a' * 32}"
    for path in (pins / "mixed", records / lost, pins / "lost"):
        path.touch()
    before = truth(dropped)

    with pytest.raises(IntegrityError, match=rf"^commits/sft/{lost}, pins/lost are in quarantine: neither healed nor"):
        migrate(dropped)
    assert truth(dropped) == before
    (records / lost).rename(given_up / lost)
    (pins / "lost").unlink()
    backup = migrate(dropped).steps[0].backup
    assert backup is not None
    assert (backup / "quarantine" / repair.name / "pins" / "mixed").exists()


@pytest.mark.parametrize("name", ["commits", "migrating", "backups"])
def test_a_planted_link_is_not_followed(old: Path, tmp_path: Path, name: str) -> None:
    """A folder of the store that is a link to elsewhere is refused before anything is written."""
    (tmp_path / "elsewhere").mkdir()
    if (old / name).exists():
        (old / name).rename(tmp_path / "elsewhere" / name)
    (old / name).symlink_to(tmp_path / "elsewhere")
    before = snapshot(tmp_path)

    with pytest.raises(IntegrityError, match=f"{name} is not a folder"):
        migrate(old)
    assert snapshot(tmp_path) == before


def test_it_refuses_while_somebody_holds_a_lock(old: Path) -> None:
    """At once, since a job may hold its run's for days; the error names the holder."""
    with lock(old / "locks" / "run-run.lock", what="run 'run'", deadline_seconds=0), pytest.raises(Locked) as caught:
        migrate(old)

    assert str(os.getpid()) in str(caught.value)
    assert number(old) == 1


def test_a_record_that_came_meanwhile_stops_it(made: Path, old: Path) -> None:
    """A writer without a lock has linked a record after the others were read: nothing is exchanged."""
    late = next((old / "commits" / "else").iterdir())
    data = late.read_bytes()
    late.unlink()

    def link(operation: str, path: Path) -> None:
        if (operation, path.name) == ("create", "mixed"):
            late.write_bytes(data)

    with pytest.raises(Conflict, match="was written to while it was migrated; nothing was changed"):
        migrate(old, Files(link))
    assert truth(old) == truth(made / "old")
    migrate(old)
    assert without_backups(old) == truth(made / "new")


# -- back again, and who has it open -------------------------------------------------------------------------------


def test_the_backup_can_be_restored_by_hand(made: Path, old: Path) -> None:
    """The commands of the page bring back the old store, and it can be migrated again."""
    migrate(old)
    (script,) = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    subprocess.run(["sh", "-eu", "-c", script.replace("STORE", str(old))], check=True)

    assert without_backups(old) == truth(made / "old")
    migrate(old)
    assert without_backups(old) == truth(made / "new")


@pytest.mark.fault(83)
def test_who_has_the_store_open_cannot_write_to_it_any_more(made: Path, new: Path) -> None:
    """A layerstore that is older than the store by now is told what has happened, and changes no file of it."""
    with layerstore.open(new) as store:
        store.log()
        identity = json.loads((new / "store.json").read_bytes())
        (new / "store.json").write_text(json.dumps(identity | {"format": 3, "checksum": "computed otherwise"}))
        (new / "backups").mkdir()
        for name in ("commits", "pins"):
            (new / name).rename(new / "backups" / name)
        before = without_backups(new)
        for call in (
            lambda: store.ingest(made / "third", run="run"),
            lambda: store.pin("late", "run@2"),
            lambda: store.delete_pin("kept"),
            lambda: store.drop("run@2"),
            store.gc,
            store.reindex,
            store.log,
            lambda: store.show("run@2"),
            store.verify,
            store.pins,
        ):
            with pytest.raises(Unsupported, match="format 3; this layerstore reads format 2"):
                call()

    assert without_backups(new) == before


def test_released_steps_lead_to_todays_format() -> None:
    """One module per step, named by its source format, without a gap; the last gives what this layerstore writes."""
    folder = Path(__file__).parents[2] / "migrations"
    modules = sorted(path.name for path in folder.glob("m[0-9]*.py"))

    assert [int(name[1:5]) for name in modules] == [step.source for step in STEPS] == list(range(1, FORMAT))
