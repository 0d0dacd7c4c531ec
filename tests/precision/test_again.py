"""Saving compactly again, in place of another, elsewhere in a history, and by several processes at once."""

from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Store
from layerstore.errors import Conflict
from layerstore.model import Kind
from tests.precision.twins import counts, record, versions
from tests.shares.rehearsal import Rehearsal
from tests.unit.checkpoints import Checkpoints, digests, snapshot

PRECISIONS = ("moments8", "delta8", "delta4")


def referred(store: Store, ref: str) -> dict[str, set[str]]:
    """Return what the compact objects of each layer refer to."""
    return {layer: {stored.id for stored in version.references} for layer, version in versions(store, ref).items()}


def masters(store: Store, ref: str) -> dict[str, set[str]]:
    """Return the master objects of each layer."""
    return {
        layer: {stored.id for stored in version.objects if stored.kind is Kind.MASTER}
        for layer, version in versions(store, ref).items()
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_again_writes_nothing(store: Store, saved: Checkpoints, precision: Any) -> None:
    """Whatever is asked the second time, and however many saves came after it."""
    for step in (2, 4, 6):
        store.ingest(saved(step), run="r", precision=precision)
    before = snapshot(store)
    for step in (4, 6, 2):
        again = store.ingest(saved(step), run="r", precision=precision)
        assert (again.is_new, again.bytes_new, again.objects_new, again.notes) == (False, 0, 0, ())
    other = store.ingest(saved(4), run="r")
    assert not other.is_new
    assert f"r@4 was saved in precision {precision}; --replace stores it as exact" in other.notes
    assert before == snapshot(store)


def test_the_same_again_in_another_precision_warns_only_of_what_is_not_stored_as_asked(
    store: Store, saved: Checkpoints
) -> None:
    """Not of a keyframe, all of whose layers are exact, nor of a save whose compact layers are all inherited."""
    for step in (2, 4, 6):
        store.ingest(saved(step), run="r", precision="delta8", exact_every=2)
    store.ingest(saved(8), run="r", precision="delta8", exact_every=10)
    store.ingest(saved(10), run="r", policy="parity")
    assert store.show("r@10").precision == "mixed"

    assert store.ingest(saved(6), run="r").notes == ()
    assert store.ingest(saved(10), run="r", policy="parity", precision="delta8").notes == ()
    [note] = store.ingest(saved(8), run="r", precision="delta4").notes
    assert note == "r@8 was saved in precision delta8; --replace stores it as delta4"


def test_what_was_lost_of_a_compact_save_is_written_again(store: Store, saved: Checkpoints) -> None:
    """From the same checkpoint, with the reference of then."""
    for step in (2, 4, 6):
        store.ingest(saved(step), run="r", precision="delta8")
    before = snapshot(store)
    lost = {store.repo.layout.object(stored.id) for of in versions(store, "r@4").values() for stored in of.objects}
    for path in lost:
        path.unlink()

    again = store.ingest(saved(4), run="r", precision="delta8")

    assert (again.is_new, again.objects_new) == (False, len(lost))
    assert before == snapshot(store)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("first", "second"), [("delta8", "exact"), ("exact", "delta4"), ("delta4", "moments8")])
def test_a_save_is_replaced_by_one_in_another_precision(
    store: Store, saved: Checkpoints, tmp_path: Path, first: Any, second: Any
) -> None:
    """Exactly what it would have been had it been saved so in the first place."""
    store.ingest(saved(2), run="r")
    store.ingest(saved(4), run="r", precision=first)

    replaced = store.ingest(saved(4), run="r", precision=second, replace=True)

    with layerstore.init(tmp_path / "other") as other:
        other.ingest(saved(2), run="r")
        other.ingest(saved(4), run="r", precision=second)
        assert versions(store, "r@4") == versions(other, "r@4")
    assert replaced.is_new
    assert record(store, "r@4").precision == second
    assert store.verify(read_data=True).ok


def test_other_content_is_refused_in_any_precision(store: Store, saved: Checkpoints) -> None:
    """Codes of other numbers are other codes."""
    store.ingest(saved(2), run="r")
    store.ingest(saved(4), run="r", precision="delta4")
    with pytest.raises(Conflict, match="with other content"):
        store.ingest(saved(4, seed=77), run="r", precision="delta4")
    with pytest.raises(Conflict, match="with other content"):
        store.ingest(saved(4, seed=77), run="r")


@pytest.mark.full
@pytest.mark.parametrize("count", [3, pytest.param(7, marks=pytest.mark.full)])
def test_several_processes_store_what_one_does(store: Store, tmp_path: Path, count: int) -> None:
    """Objects, commits, references and measured losses, under a policy that takes turns as well."""
    checkpoints = Checkpoints(tmp_path / "in", world_size=4, layout="hf")
    with layerstore.init(tmp_path / "other") as other, Rehearsal(count) as job:
        with Store(other.path, shares=job) as shared:
            for step, policy in ((10, "full"), (20, "full"), (30, "parity"), (40, "parity"), (50, "full")):
                options: dict[str, Any] = {"run": "r", "policy": policy, "precision": "delta8", "exact_every": 3}
                alone, found = store.ingest(checkpoints(step), **options), shared.ingest(checkpoints(step), **options)
                assert (alone.commit, alone.bytes_new, alone.notes) == (found.commit, found.bytes_new, found.notes)
                losses = [
                    each.repo.catalog.commit(each.repo.records.names("r")[-1]).observed.losses
                    for each in (store, shared)
                ]
                assert losses[0] == losses[1]
            mine, theirs = snapshot(store), snapshot(other)
            assert {name for name in mine if name.startswith("objects")} == {
                name for name in theirs if name.startswith("objects")
            }
            a = store.compose("r@40").write(tmp_path / "a", world_size=3).out
            b = shared.compose("r@40").write(tmp_path / "b", world_size=3).out
            assert digests(a) == digests(b)
        assert other.verify(read_data=True).ok


@pytest.mark.sample(1, always=("parity",))
@pytest.mark.parametrize("policy", ["parity", "full"])
def test_every_nth_version_of_a_layer_is_exact(store: Store, saved: Checkpoints, policy: str) -> None:
    """Counted for each layer by itself, however seldom it is saved; what lies between refers to the last exact one."""
    newest: dict[str, set[str]] = {}
    had: dict[str, int] = {}
    for step in range(2, 24, 2):
        store.ingest(saved(step), run="r", policy=policy, precision="delta8", exact_every=3)
        found, refers, own = counts(store, f"r@{step}"), referred(store, f"r@{step}"), masters(store, f"r@{step}")
        for entry in record(store, f"r@{step}").layers:
            if entry.origin.step != step:
                continue
            number = had.setdefault(entry.layer, 0)
            had[entry.layer] += 1
            assert found[entry.layer] == number % 3
            if number % 3:
                assert refers[entry.layer] == newest[entry.layer]
            else:
                assert not refers[entry.layer]
                newest[entry.layer] = own[entry.layer]
    assert all(number > 3 for number in had.values())


def test_a_step_that_is_filled_in_refers_to_what_lies_below_it(store: Store, saved: Checkpoints) -> None:
    """Not to a newer version, which this step could not know."""
    store.ingest(saved(2), run="r")
    store.ingest(saved(8), run="r", precision="delta8", exact_every=1)
    store.ingest(saved(6), run="r", precision="delta8")
    assert set(counts(store, "r@6").values()) == {1}
    assert referred(store, "r@6") == masters(store, "r@2")


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["rollback", "resumed_from"])
def test_an_abandoned_attempt_is_never_referred_to(store: Store, saved: Checkpoints, how: str) -> None:
    """After training went back, compact saves count and refer from what they went back to."""
    for step in (2, 4, 6, 8):
        store.ingest(saved(step), run="r", precision="delta8", exact_every=3)
    assert set(counts(store, "r@8").values()) == {0}
    went_back: dict[str, Any] = {"rollback": True} if how == "rollback" else {"resumed_from": "r@4"}

    store.ingest(saved(6, seed=60), run="r", precision="delta8", exact_every=4, **went_back)
    assert set(counts(store, "r@6").values()) == {2}
    assert referred(store, "r@6") == masters(store, "r@2")
    store.ingest(saved(10), run="r", precision="delta8", exact_every=4)
    assert set(counts(store, "r@10").values()) == {3}
    assert referred(store, "r@10") == masters(store, "r@2")


def test_after_a_composite_each_layer_refers_to_what_was_resumed(store: Store, saved: Checkpoints) -> None:
    """A pinned mixture's layers have references of their own, which its successors take over."""
    for step in (2, 4, 6, 8):
        store.ingest(saved(step), run="r", precision="delta8", exact_every=3)
    store.compose("r@8", policy="parity").pin("mixture")
    chosen = {layer: choice.version for layer, choice in store.compose("mixture").layers.items()}
    exact = {layer: (of.references or of.objects) for layer, of in versions(store, "mixture").items()}

    store.ingest(saved(20), run="r", precision="delta8", exact_every=9, resumed_from="mixture")

    assert chosen
    for layer, ids in referred(store, "r@20").items():
        assert ids == {stored.id for stored in exact[layer] if stored.kind is Kind.MASTER}
    before = counts(store, "mixture")
    assert counts(store, "r@20") == {layer: number + 1 for layer, number in before.items()}
    assert len(set(before.values())) > 1
