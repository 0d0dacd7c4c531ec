"""
``migrate``: a store of an older format becomes one of the newest, and can be read at any moment.

There is one format so far, so the steps are those of tests/compat/steps: from a format 0 that never was, in which every
commit id is another, and to a format 2, in which records lie elsewhere.
"""

import errno as errnos
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import layerstore
from layerstore.errors import IntegrityError, Locked, NoStore, StorageIO, Unsupported
from layerstore.format.identity import FORMAT
from layerstore.migrations import STEPS
from layerstore.migrations.plan import plan_migration
from layerstore.migrations.runner import Migrated, migrate
from layerstore.migrations.step import Step
from layerstore.storage.files import Files
from layerstore.storage.locks import lock
from tests.compat import golden_ids, goldens
from tests.compat.format0 import as_format_0
from tests.compat.steps import m0000_flags, m0001_folders
from tests.faults.harness import snapshot, tiny_checkpoint, truth

TO_1 = (m0000_flags.STEP,)
TO_2 = (m0000_flags.STEP, m0001_folders.STEP)
FROM_1 = (m0001_folders.STEP,)
PAGE = Path(__file__).parents[2] / "docs" / "operating" / "migrations.md"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints, a store of today's format, and its twin of format 0; for copying."""
    folder = tmp_path_factory.mktemp("made")
    for name, step, seed in (("first", 2, 0), ("other", 2, 1), ("second", 4, 0), ("third", 6, 0)):
        tiny_checkpoint(folder / name, step=step, seed=seed)
    with layerstore.init(folder / "new") as store:
        store.ingest(folder / "first", run="run", pin="kept")
        store.ingest(folder / "other", run="run", replace=True)
        store.ingest(folder / "second", run="run")
        store.drop("run@4", last=True)
        store.ingest(folder / "second", run="run")
        store.ingest(folder / "second", run="else")
        store.compose("run@4", policy="parity").pin("mixed")
    shutil.rmtree(folder / "new" / "manifest")
    as_format_0(Path(shutil.copytree(folder / "new", folder / "old")))
    return folder


@pytest.fixture
def old(made: Path, tmp_path: Path) -> Path:
    """Return a store of format 0."""
    return Path(shutil.copytree(made / "old", tmp_path / "store"))


@pytest.fixture
def new(made: Path, tmp_path: Path) -> Path:
    """Return a store of today's format."""
    return Path(shutil.copytree(made / "new", tmp_path / "store"))


def without_backups(store: Path) -> dict[str, str]:
    """Return the truth of *store*, but for what migrations have kept."""
    return {name: content for name, content in truth(store).items() if not name.startswith("backups/")}


def number(store: Path) -> int:
    """Return the format that the store at *store* says it has."""
    found: int = json.loads((store / "store.json").read_bytes())["format"]
    return found


# -- what it does --------------------------------------------------------------------------------------------------


def test_a_migrated_store_is_what_it_would_be_had_it_been_written_today(made: Path, old: Path) -> None:
    """Every file of the truth, byte for byte: records with their new ids, pins, objects, store.json."""
    done = migrate(old, steps=TO_1)

    assert (done.found, done.format, len(done.taken)) == (0, 1, 1)
    assert without_backups(old) == truth(made / "new")
    with layerstore.open(old) as store:
        assert store.verify(read_data=True).ok
        assert store.ingest(made / "third", run="run").is_new


@pytest.mark.fault(82)
def test_a_golden_store_comes_through(tmp_path: Path) -> None:
    """What the first release wrote, taken back to a format before it, comes out of the migration byte for byte."""
    store = goldens.unpack_store(goldens.STORES / "format-1.zip", tmp_path / "store")
    golden = truth(store)

    migrate(as_format_0(store), steps=TO_1)

    assert without_backups(store) == golden
    with layerstore.open(store) as opened:
        assert goldens.composed(opened, "best", tmp_path / "out") == golden_ids.COMPOSED


def test_what_it_replaces_is_kept(made: Path, old: Path) -> None:
    """The backup has every file that only the old format read, as it was; its place is what the outcome says."""
    backup = migrate(old, steps=TO_1).taken[0].backup

    assert backup == old / "backups" / "format-0.1"
    kept = snapshot(backup / "folders")
    was = {
        name: content
        for name, content in snapshot(made / "old").items()
        if name.split("/")[0] in m0000_flags.STEP.leaves
    }
    assert kept == was
    assert (backup / "store.json").read_bytes() == (made / "old" / "store.json").read_bytes()


@pytest.mark.fault(84)
def test_steps_are_taken_in_order(old: Path) -> None:
    """Two formats behind: one step after the other, each with its backup."""
    planned = plan_migration(old, steps=TO_2)
    done = migrate(old, steps=TO_2)

    assert [step.source for step in planned.steps] == [0, 1]
    assert [taken.backup.name for taken in done.taken] == ["format-0.1", "format-1.1"]
    assert (number(old), sorted(os.listdir(old / "names-2"))) == (2, ["kept", "mixed"])


def test_a_plan_writes_nothing_and_says_what_would_be_written(old: Path) -> None:
    """Not even a lock; the counts are those of the deed."""
    before = snapshot(old)
    planned = plan_migration(old, steps=TO_1)

    assert snapshot(old) == before
    assert planned.volume is not None
    done = migrate(old, steps=TO_1)
    written = [path for folder in ("commits", "pins") for path in (old / folder).rglob("*") if path.is_file()]
    assert planned.volume.files == done.taken[0].files == len(written)
    assert planned.volume.size_bytes == sum(path.stat().st_size for path in written)


@pytest.mark.fault(84)
def test_a_second_time_there_is_nothing_to_do(old: Path) -> None:
    """Nothing is touched, not even a time."""
    migrate(old, steps=TO_1)
    before = {path: path.lstat().st_mtime_ns for path in [old, *old.rglob("*")]}

    assert migrate(old, steps=TO_1).taken == ()
    assert plan_migration(old, steps=TO_1).is_done
    assert {path: path.lstat().st_mtime_ns for path in [old, *old.rglob("*")]} == before


def test_a_store_of_today_has_nothing_to_do(new: Path) -> None:
    """With the steps that are released, and with such as lead to today's format."""
    before = snapshot(new)

    assert migrate(new) == Migrated(path=new, found=1, format=1, taken=())
    assert migrate(new, steps=TO_1).taken == ()
    assert snapshot(new) == before


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.fault(80)
@pytest.mark.parametrize("deed", [migrate, plan_migration], ids=["migrate", "plan"])
@pytest.mark.parametrize("found", [2, 999])
def test_a_newer_format_is_refused_and_left_alone(new: Path, deed: Callable[[Path], object], found: int) -> None:
    """There is no way down; whatever else the newer store.json says, it is not looked at, but for what it needs."""
    (new / "store.json").write_text(json.dumps({"format": found, "needs": "9.1", "else": ["?"]}))
    before = snapshot(new)

    with pytest.raises(Unsupported, match=f"of format {found}; this layerstore reads format 1") as caught:
        deed(new)
    assert caught.value.hint == "it needs layerstore >= 9.1"
    assert snapshot(new) == before


def test_an_older_format_without_a_step_is_refused(old: Path) -> None:
    """Where no step begins, or one is missing in between, nothing is tried."""
    before = snapshot(old)
    for steps in ((), FROM_1):
        with pytest.raises(Unsupported, match="knows no step on"):
            migrate(old, steps=steps)
    assert snapshot(old) == before


def test_what_is_no_store_is_not_made_one(tmp_path: Path) -> None:
    """Nothing is written where there is no store."""
    with pytest.raises(NoStore):
        migrate(tmp_path, steps=TO_1)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pattern", ["records/run/2.*", "records/else/*", "tags/kept", "store.json"])
def test_damage_stops_it_before_anything_is_written(old: Path, pattern: str) -> None:
    """A record that cannot be converted is named; the old store stays as it is."""
    path = sorted(old.glob(pattern))[0]
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    before = truth(old)

    with pytest.raises(IntegrityError, match=path.name):
        migrate(old, steps=TO_1)
    assert truth(old) == before
    assert plan_raises(old)


def plan_raises(store: Path) -> bool:
    """Whether the plan meets damage too."""
    with pytest.raises(IntegrityError):
        plan_migration(store, steps=TO_1)
    return True


def test_an_unknown_flag_stops_it(old: Path) -> None:
    """What a flag means is not known, so it cannot be carried over."""
    fields = m0000_flags.identity_fields((old / "store.json").read_bytes(), number=0)
    (old / "store.json").write_bytes(m0000_flags.identity_text(fields | {"flags": ["packs"]}))

    with pytest.raises(Unsupported, match="packs"):
        migrate(old, steps=TO_1)


@pytest.mark.parametrize("name", ["commits", "records", "migrating", "backups", "locks"])
def test_a_planted_link_is_not_followed(old: Path, tmp_path: Path, name: str) -> None:
    """A folder of the store that is a link to elsewhere is refused before anything is written."""
    (tmp_path / "elsewhere").mkdir()
    if (old / name).exists():
        (old / name).rename(tmp_path / "elsewhere" / name)
    (old / name).symlink_to(tmp_path / "elsewhere")
    before = snapshot(tmp_path)

    with pytest.raises(IntegrityError, match=f"{name} is no folder"):
        migrate(old, steps=TO_1)
    assert snapshot(tmp_path) == before


def test_whoever_works_with_the_store_is_waited_for(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of a run keeps the migration away until the deadline, with the holder's name."""
    monkeypatch.setenv("LAYERSTORE_LOCK_TIMEOUT", "0.1")
    with lock(old / "locks" / "run-run.lock", what="run 'run'", deadline_seconds=0), pytest.raises(Locked) as caught:
        migrate(old, steps=TO_1)

    assert str(os.getpid()) in str(caught.value)
    assert number(old) == 0


def test_it_begins_only_where_there_is_space(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is too full is told beforehand, with the numbers."""
    monkeypatch.setattr(Files, "free_bytes", lambda self, path: 100)
    before = truth(old)

    with pytest.raises(StorageIO, match=r"needs up to \d+ bytes, 100 are free") as caught:
        migrate(old, steps=TO_1)
    assert caught.value.errno == errnos.ENOSPC
    assert truth(old) == before


def test_a_record_that_this_layerstore_could_not_read_is_not_put_into_place(old: Path) -> None:
    """A step with a fault is found out before store.json is exchanged: what it made is read as it will be."""

    def broken(data: bytes) -> bytes:
        fields = m0000_flags.identity_fields(data, number=0) | {"format": 1, "store_id": "0" * 32}
        return m0000_flags.identity_text(fields)

    right = m0000_flags.STEP
    step = Step(
        source=0,
        target=1,
        summary="broken",
        leaves=right.leaves,
        makes=right.makes,
        identity=broken,
        convert=right.convert,
    )
    before = truth(old)

    with pytest.raises(IntegrityError, match="belongs to another store"):
        migrate(old, steps=(step,))
    assert truth(old) == before


# -- back again ----------------------------------------------------------------------------------------------------


def restore(store: Path, backup: str) -> None:
    """Do what the page tells a user to do."""
    (script,) = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert "format-1.1" in script
    subprocess.run(
        ["sh", "-eu", "-c", script.replace("STORE", str(store)).replace("format-1.1", backup)],
        check=True,
    )


def test_the_backup_can_be_restored_by_hand(made: Path, old: Path) -> None:
    """The commands of the page bring back the old store, and it can be migrated again."""
    migrate(old, steps=TO_1)
    restore(old, "format-0.1")
    again = {name: content for name, content in without_backups(old).items() if name in truth(made / "old")}

    assert again == truth(made / "old")
    assert number(old) == 0
    migrate(old, steps=TO_1)
    assert without_backups(old) == truth(made / "new")


def test_what_was_saved_before_it_was_undone_is_set_aside(made: Path, old: Path) -> None:
    """The commits of an undone migration neither come back by themselves, nor are they lost."""
    migrate(old, steps=TO_1)
    with layerstore.open(old) as store:
        commit = store.ingest(made / "third", run="run").commit
    restore(old, "format-0.1")
    migrate(old, steps=TO_1)

    assert [path.name for path in old.glob(f"backups/*/commits/run/6.{commit}")] == [f"6.{commit}"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the index knows a commit that is no more
        with layerstore.open(old) as store:
            assert {entry.step for entry in store.log("run") if not entry.damage} <= {2, 4, 6}


# -- who has the store open meanwhile ------------------------------------------------------------------------------


def test_who_has_the_store_open_cannot_write_to_it_any_more(made: Path, new: Path) -> None:
    """Nothing of this layerstore reaches a store of a newer format: it is told what has happened."""
    with layerstore.open(new) as store:
        store.log()
        migrate(new, steps=FROM_1)
        before = without_backups(new)
        for write in (
            lambda: store.ingest(made / "third", run="run"),
            lambda: store.pin("late", "run@2"),
            lambda: store.delete_pin("kept"),
            lambda: store.drop("run@2"),
            store.gc,
            store.reindex,
        ):
            with pytest.raises(Unsupported, match="format 2; this layerstore reads format 1"):
                write()
        for read in (store.log, lambda: store.log("run"), lambda: store.show("run@2"), store.verify, store.pins):
            with pytest.raises(Unsupported, match="format 2; this layerstore reads format 1"):
                read()

    after = {name: content for name, content in without_backups(new).items() if not name.startswith("manifest")}
    assert after == before


def test_the_second_look_converts_what_came_late(made: Path, tmp_path: Path) -> None:
    """A record that was linked after the first reading, and before its folder was moved, is in the new store."""
    store = Path(shutil.copytree(made / "new", tmp_path / "store"))
    late = next((made / "new" / "commits" / "else").iterdir())
    shutil.rmtree(store / "commits" / "else")

    def link(operation: str, path: Path) -> None:
        if operation == "rename" and path.name == "store.json":
            (store / "commits" / "else").mkdir(exist_ok=True)
            shutil.copy(late, store / "commits" / "else" / late.name)

    done = migrate(store, Files(link), steps=FROM_1)

    assert done.taken[0].came_meanwhile == 1
    assert (store / "records-2" / "else" / late.name).exists()


# -- an older layerstore meets a newer store -----------------------------------------------------------------------

_OLDER = """
import sys
import layerstore.format.identity as identity
identity.FORMAT = 0
from layerstore.cli.app import main
print([main([command, "--store", sys.argv[1]]) for command in ("log", "gc", "migrate")])
"""


@pytest.mark.fault(83)
def test_an_older_layerstore_refuses_a_migrated_store(old: Path) -> None:
    """Another process, whose format is the old one: a clear refusal of every command, and nothing written."""
    migrate(old, steps=TO_1)
    before = snapshot(old)

    done = subprocess.run([sys.executable, "-c", _OLDER, str(old)], check=True, capture_output=True, text=True)

    assert done.stdout == "[16, 16, 16]\n"
    assert done.stderr.count("is a store of format 1; this layerstore reads format 0; nothing was changed") == 3
    assert snapshot(old) == before


# -- the registry --------------------------------------------------------------------------------------------------


def test_released_steps_lead_to_todays_format() -> None:
    """One module per step, named by its source format, without a gap; the last gives what this layerstore writes."""
    folder = Path(__file__).parents[2] / "migrations"
    modules = sorted(path.name for path in folder.glob("m[0-9]*.py"))

    assert [int(name[1:5]) for name in modules] == [step.source for step in STEPS]
    assert [step.source for step in STEPS[1:]] == [step.target for step in STEPS[:-1]]
    assert not STEPS or STEPS[-1].target == FORMAT


def test_a_step_may_not_make_what_its_source_reads() -> None:
    """Such a step would change the old store before the new one is there."""
    right = m0000_flags.STEP
    for changes in ({"makes": ("records",)}, {"makes": ("objects",)}, {"makes": ("../x",)}, {"target": 2}):
        fields = {name: getattr(right, name) for name in right.__slots__} | changes
        with pytest.raises(AssertionError):
            Step(**fields)
