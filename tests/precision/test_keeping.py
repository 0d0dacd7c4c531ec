"""Whoever keeps a compact save keeps what its differences refer to, and no more of that save."""

from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.history import resolve
from layerstore.model import Kind
from layerstore.remote import Bucket
from tests.gc.test_gc import collect, grow_old, objects, once, steps
from tests.precision.twins import counts, versions
from tests.unit.checkpoints import Checkpoints, digests

LAST = Keep(last=1)


def ids(store: Store, ref: str, *kinds: Kind) -> set[str]:
    """Return the objects of *kinds*, or of all, of *ref*."""
    return {
        stored.id for of in versions(store, ref).values() for stored in of.objects if not kinds or stored.kind in kinds
    }


def composed(store: Store, ref: str, out: Path) -> dict[str, str]:
    """Return the digests of what *ref* is composed to for another number of ranks."""
    return digests(store.compose(ref).write(out, world_size=3, durable=False).out)


@pytest.fixture
def four(store: Store, saved: Checkpoints) -> Store:
    """Return a store of an exact save and three compact ones that refer to it."""
    for step in (2, 4, 6, 8):
        store.ingest(saved(step), run="r", precision="delta8", exact_every=None)
    return store


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_keyframe_that_is_gone_leaves_its_masters(four: Store, tmp_path: Path, is_dropped: bool) -> None:
    """Not its moments; once the compact saves are gone too, nothing is left of it."""
    kept, moments = ids(four, "r@2", Kind.MASTER), ids(four, "r@2", Kind.OPTIMIZER)
    before = composed(four, "r@8", tmp_path / "before")
    if is_dropped:
        four.drop("r@2")
        collect(four)
    else:
        collect(four, Keep(last=3))

    assert kept <= objects(four).keys()
    assert moments.isdisjoint(objects(four))
    assert composed(four, "r@8", tmp_path / "after") == before
    verdict = four.verify(read_data=True)
    assert (verdict.ok, verdict.orphans) == (True, 0)


@pytest.mark.parametrize("step", [2, 4, 8])
def test_a_drop_says_to_the_byte_what_it_frees(four: Store, step: int) -> None:
    """A keyframe's masters stay for what refers to them, and so does what a compact save refers to."""
    planned = four.drop(f"r@{step}", dry_run=True)
    before = objects(four)

    dropped = four.drop(f"r@{step}")
    collect(four)

    assert planned.size_bytes == dropped.size_bytes == sum(before.values()) - sum(objects(four).values()) > 0


def test_without_compact_saves_nothing_is_left_of_their_keyframe(four: Store, saved: Checkpoints) -> None:
    """A collection that keeps an exact save alone frees all others to the byte."""
    kept = ids(four, "r@2", Kind.MASTER)
    four.ingest(saved(10), run="r")
    planned = collect(four, LAST, dry_run=True)
    before = objects(four)

    done = collect(four, LAST)

    assert planned.bytes_freed == done.bytes_freed == sum(before.values()) - sum(objects(four).values())
    assert kept.isdisjoint(objects(four))
    assert steps(four) == [10]
    assert four.verify(read_data=True).orphans == 0


def test_whatever_removes_the_last_exact_save_says_so_in_one_line(four: Store) -> None:
    """Before and after, and not where an exact save is left, a pinned one included, or there was none."""
    note = "no exact save of r is left: r@8 and {} not kept bit for bit"

    assert collect(four, LAST, dry_run=True).notes == ("no exact save of r is left: r@8 was not kept bit for bit",)
    assert four.drop("r@4", dry_run=True).notes == ()
    four.pin("best", "r@2")
    assert four.drop("r@2", dry_run=True).notes == ()
    four.delete_pin("best")
    assert four.drop("r@2", dry_run=True).notes == (note.format("2 others were"),)
    assert four.drop("r@2").notes == (note.format("2 others were"),)
    assert four.drop("r@4").notes == ()
    assert collect(four, LAST).notes == ()


def test_a_collection_of_a_bucket_says_so_too(four: Store, tmp_path: Path) -> None:
    """Before it removes anything."""
    url = (tmp_path / "bucket").as_uri()
    four.push(url)

    with layerstore.open(url) as bucket:
        notes = bucket.gc(LAST, dry_run=True).notes

    assert notes == ("no exact save of r is left: r@8 was not kept bit for bit",)


def test_a_compact_save_that_was_dropped_keeps_its_keyframe_until_the_trash_is_emptied(
    four: Store, tmp_path: Path
) -> None:
    """It can be undropped, and is whole."""
    before = composed(four, "r@8", tmp_path / "before")
    for step in (2, 4, 6):
        four.drop(f"r@{step}")
    four.pin("tip", "r@8")
    collect(four, empty_trash=False)
    assert composed(four, "tip", tmp_path / "pinned") == before
    four.undrop("r@4")
    assert four.verify(read_data=True).ok


def test_trimmed_saves_keep_their_masters(four: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """Keyframes and compact saves lose their moments, and are exported as before."""
    before = {step: digests(four.compose(f"r@{step}").export(tmp_path / f"{step}").out) for step in (2, 4, 8)}
    four.ingest(saved(100), run="r", precision="delta8", exact_every=None)
    referred = {stored.id for of in versions(four, "r@8").values() for stored in of.references}

    collect(four, Keep(drop_optimizer_older_than=50))

    for step, wanted in before.items():
        found = versions(four, f"r@{step}")
        assert not any(stored.kind is Kind.OPTIMIZER for of in found.values() for stored in of.objects)
        assert digests(four.compose(f"r@{step}").export(tmp_path / f"{step} again").out) == wanted
    assert set(counts(four, "r@2").values()) == {0}
    assert set(counts(four, "r@4").values()) == {1}
    assert {stored.id for of in versions(four, "r@8").values() for stored in of.references} == referred
    assert counts(four, "r@100").keys() == counts(four, "r@8").keys()
    four.ingest(saved(102), run="r", precision="delta8", exact_every=None)
    assert {stored.id for of in versions(four, "r@102").values() for stored in of.references} == referred
    verdict = four.verify(read_data=True)
    assert (verdict.ok, verdict.orphans) == (True, 0)


def test_moments_that_were_compact_alone_leave_exact_masters(store: Store, saved: Checkpoints) -> None:
    """Trimmed, such a save is an exact one, and later differences may refer to it."""
    for step in (2, 4, 100):
        store.ingest(saved(step), run="r", precision="moments8")
    assert set(counts(store, "r@4").values()) == {1}
    collect(store, Keep(drop_optimizer_older_than=50))
    assert set(counts(store, "r@4").values()) == {0}
    assert not store.repo.catalog.commit(
        next(name for name in store.repo.records.names("r") if name.step == 4)
    ).record.flags.count("compact")
    assert store.verify(read_data=True).ok


@pytest.mark.filterwarnings("ignore:the commit r@2")
@pytest.mark.parametrize("part", ["objects", "commits"])
def test_a_collection_beside_a_compact_save_never_takes_its_reference(
    store: Store, saved: Checkpoints, tmp_path: Path, part: str
) -> None:
    """Though its own save has just gone: it is touched when it is first read, and again before a record names it."""
    keyframe = resolve(store.repo, store.ingest(saved(2), run="r").commit)
    referred, moments = ids(store, "r@2", Kind.MASTER), ids(store, "r@2", Kind.OPTIMIZER)
    grow_old(store)
    left: list[set[str]] = []

    def drop_and_collect() -> None:
        store.repo.layout.record("r", 2, keyframe.commit).unlink()
        with layerstore.open(store.path) as other:
            collect(other, grace_seconds=3600)
            left.append(set(objects(other)))

    with Store(store.path, hook=once("link", part, drop_and_collect)) as hooked:
        hooked.ingest(saved(4), run="r", precision="delta8")

    assert referred <= left[0]
    assert moments.isdisjoint(left[0])
    assert set(counts(store, "r@4").values()) == {1}
    assert store.verify(read_data=True).ok
    composed(store, "r@4", tmp_path / "out")


# -- elsewhere -----------------------------------------------------------------------------------------------------


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty bucket."""
    monkeypatch.setenv("LAYERSTORE_CACHE_DIR", str(tmp_path / "cache"))
    return f"file://{tmp_path}/remote"


def test_a_push_of_one_compact_save_sends_what_it_refers_to(four: Store, url: str, tmp_path: Path) -> None:
    """And nothing else of its keyframe; a clone composes it, and saves on."""
    before = composed(four, "r@8", tmp_path / "here")
    four.push(url, refs=["r@8"])
    with layerstore.clone(url, tmp_path / "clone") as clone:
        assert ids(four, "r@2", Kind.MASTER) <= objects(clone).keys()
        assert ids(four, "r@2", Kind.OPTIMIZER).isdisjoint(objects(clone))
        assert clone.verify(read_data=True).ok
        assert composed(clone, "r@8", tmp_path / "there") == before
        assert clone.verify().orphans == 0


def test_a_partial_clone_fetches_what_decoding_takes(four: Store, url: str, saved: Checkpoints, tmp_path: Path) -> None:
    """Of another save's objects the masters alone; and it saves compactly, referring to what it has to fetch."""
    before = composed(four, "r@6", tmp_path / "here")
    four.push(url)
    with layerstore.clone(url, tmp_path / "clone", records=True) as clone:
        assert ids(clone, "r@6").isdisjoint(objects(clone))
        assert composed(clone, "r@6", tmp_path / "there") == before
        fetched = objects(clone).keys()
        assert ids(clone, "r@6", Kind.MASTER, Kind.OPTIMIZER) | ids(clone, "r@2", Kind.MASTER) <= fetched
        assert (ids(clone, "r@2", Kind.OPTIMIZER) | ids(clone, "r@4")).isdisjoint(fetched)
        clone.ingest(saved(10), run="r", precision="delta8", exact_every=None)
        clone.push()
    with layerstore.clone(url, tmp_path / "another", records=True) as another:
        another.ingest(saved(10), run="r", precision="delta8", exact_every=None)
        assert versions(another, "r@10")
        another.ingest(saved(12), run="r", precision="delta8", exact_every=None)
        assert set(counts(another, "r@12").values()) == {5}
    four.pull(url)
    four.ingest(saved(10), run="other")
    assert four.verify(read_data=True).ok


def test_straight_from_a_bucket_only_some_stretches_are_read(
    store: Store, saved: Checkpoints, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor of a compact save is read from its codes and from what they add to, not from all moments."""
    for step in (2, 4):
        store.ingest(saved(step), run="r", precision="delta8")
    store.push(url)
    found: set[str] = set()
    chunks = Bucket.chunks

    def counted(self: Bucket, name: str, **options: Any) -> Any:
        found.add(name.rpartition("/")[2])
        return chunks(self, name, **options)

    monkeypatch.setattr(Bucket, "chunks", counted)
    with layerstore.open(url) as mirror:
        name = "model.layers.0.self_attn.q_proj.weight"
        array = mirror.compose("r@4").tensors("master")[name]
    assert (array == store.compose("r@4").tensors("master")[name]).all()
    moments = ids(store, "r@2", Kind.OPTIMIZER) | ids(store, "r@4", Kind.OPTIMIZER)
    assert found.isdisjoint(moments)
    assert found & ids(store, "r@2", Kind.MASTER)


def test_the_bucket_keeps_what_compact_saves_there_refer_to(four: Store, url: str, tmp_path: Path) -> None:
    """A collection of the remote frees the keyframe's moments and nothing that is referred to."""
    four.remotes.add("origin", url)
    four.push()
    before = composed(four, "r@8", tmp_path / "here")
    four.gc(LAST, remote="origin", grace_seconds=0)
    with layerstore.clone(url, tmp_path / "clone") as clone:
        assert steps(clone) == [8]
        assert clone.verify(read_data=True).ok
        assert composed(clone, "r@8", tmp_path / "there") == before


def test_what_is_referred_to_is_repaired_from_a_copy(four: Store, url: str, tmp_path: Path) -> None:
    """From another store that has only a compact save of it."""
    four.push(url, refs=["r@8"])
    with layerstore.clone(url, tmp_path / "clone"):
        pass
    lost = sorted(ids(four, "r@2", Kind.MASTER))
    for name in lost:
        (four.path / "objects" / name[:2] / name).unlink()
    assert not four.verify().ok
    four.repair(sources=[tmp_path / "clone"])
    assert four.verify(read_data=True).ok
