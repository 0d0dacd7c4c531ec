"""The model of large trainings counts what a small one really does, and its page shows what it prints."""

from collections import Counter, defaultdict
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep
from layerstore.history import NextCommit
from tests.bench import scale_model
from tests.bench.counted import Call, calls
from tests.bench.scale_model import CASES, COUNTED, Save
from tests.faults.saving import begun, begun_after
from tests.generated import generate

RANKS = 3
PAGE = Path(__file__).parents[2] / "docs" / "internals" / "scale.md"


def folders(found: list[Call]) -> int:
    """Return into how many folders of objects new ones went."""
    return len({path.rpartition("/")[0] for call, path in found if call == "link" and path.startswith("objects/")})


def test_the_calls_are_those_that_a_real_save_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank that writes its share, and of rank 0 that joins the parts: each call about a name below the store."""
    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", str(tmp_path / "index"))
    sources = [generate(tmp_path / f"{step}", hidden=8, vocab=16, world_size=RANKS, step=step) for step in (1, 2)]
    with layerstore.init(tmp_path / "store") as store:
        for at in range(256):  # as they are in a store that is a day old
            (store.path / "objects" / f"{at:02x}").mkdir(exist_ok=True)
        first = begun(store, sources[0], session="0" * 32, place=NextCommit.begun(None), step=1)
        first.write_all()
        first.finish()
        save = begun_after(store, sources[1], half=True)
        for rank in range(1, RANKS):
            save.write(rank)
        with calls(store.path) as of_a_rank:
            save.write(0)
        objects = [len(layer.objects) for part in save.parts() for layer in part.layers]
        with calls(store.path) as of_the_first:
            commit = save.finish()

    entries = commit.record.layers
    versions = sum(entry.saved_by(commit.record) for entry in entries)
    counted = Save(ranks=RANKS, objects=sum(objects), versions=versions, inherited=len(entries) - versions)
    assert 0 < versions < len(entries)
    assert counted.of_a_rank(folders=folders(of_a_rank)) == Counter(call for call, _ in of_a_rank)
    assert counted.of_the_first(folders=folders(of_the_first)) == Counter(call for call, _ in of_the_first)


def test_a_collection_looks_at_what_goes_and_reads_what_says_what_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object of tensors that stays takes no call; each that goes takes the same ones, and so does each blob."""
    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", str(tmp_path / "index"))
    with layerstore.init(tmp_path / "store") as store:
        for at in range(256):
            (store.path / "objects" / f"{at:02x}").mkdir(exist_ok=True)
        for step in (1, 2, 3):
            store.ingest(generate(tmp_path / f"{step}", hidden=8, vocab=16, step=step), run="r")
        names = store.repo.records.names("r")
        records = [store.repo.records.read(name).record for name in names]
        objects = [{of.id for entry in each.layers for of in store.repo.version_of(entry).objects} for each in records]
        with calls(store.path) as found:
            store.gc(Keep(last=2), grace_seconds=0)

    made: dict[str, Counter[str]] = defaultdict(Counter)
    for call, path in found:
        made[path.rpartition("/")[2]][call] += 1
    gone, kept = objects[0], objects[1] | objects[2]
    blobs = [{blob.id for blob in each.blobs} for each in records]
    assert not [made[each] for each in kept if made[each]]
    assert [made[each] for each in gone] == [COUNTED["collected"]] * len(gone)
    assert [made[each] for each in blobs[1] | blobs[2]] == [COUNTED["read"]] * len(blobs[1] | blobs[2])
    assert [made[each] for each in blobs[0]] == [COUNTED["collected blob"]] * len(blobs[0])
    assert [made[each.file_name] for each in names] == [COUNTED["collected record"], *[COUNTED["kept record"]] * 2]
    folders = Counter(call for call, path in found if path.count("/") == 1 and path.startswith("objects/"))
    assert folders == {call: 256 * count for call, count in COUNTED["listed"].items()}


def test_the_shapes_are_those_of_the_family() -> None:
    """As published: 8.03, 70.55 and 405.85 billion parameters."""
    assert [round(case.model.parameters / 1e9, 2) for case in CASES] == [8.03, 70.55, 405.85]


@pytest.mark.parametrize(
    "table",
    [
        *(pytest.param(table, marks=pytest.mark.full) for table in ("a_month", "a_save", "packed")),
        # A blob of 8,192 objects.
        *(pytest.param(table, marks=pytest.mark.exhaustive) for table in ("metadata", "resumed")),
    ],
)
def test_the_page_shows_what_the_model_prints(table: str) -> None:
    """Line by line: all but the seconds are the same at every run."""
    shown = set(PAGE.read_text().splitlines())

    assert [line for line in getattr(scale_model, table)() if line not in shown] == []
