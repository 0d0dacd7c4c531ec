"""How often a save is exact, what forces it to be, and what numbers cannot be coded."""

import math
from pathlib import Path
from typing import Any

import pytest

from layerstore import Store
from layerstore.errors import InvalidInput, Unsupported
from layerstore.precision import PrecisionName
from tests.precision.twins import counts, record, spoiled, versions
from tests.unit.checkpoints import Checkpoints, checkpoint, snapshot


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("every", "expected"), [(1, [0, 0, 0, 0, 0]), (3, [0, 1, 2, 0, 1]), (None, [0, 1, 2, 3, 4]), (10, [0, 1, 2, 3, 4])]
)
def test_every_nth_save_is_exact(store: Store, saved: Checkpoints, every: int | None, expected: list[int]) -> None:
    """With 1 all are, and are what they would have been; with none the first alone."""
    for number, step in enumerate((2, 4, 6, 8, 10)):
        store.ingest(saved(step), run="r", precision="delta8", exact_every=every)
        store.ingest(saved(step), run="exact")
        found = counts(store, f"r@{step}")
        assert set(found.values()) == {expected[number]}
        is_same = versions(store, f"r@{step}") == versions(store, f"exact@{step}")
        assert is_same == (not expected[number])
        assert ("compact" in record(store, f"r@{step}").flags) == bool(expected[number])


def test_for_another_number_of_ranks_a_save_is_exact_and_says_so(store: Store, saved: Checkpoints) -> None:
    """Differences need the very slices that they are taken from; the saves after it refer to this one."""
    store.ingest(saved(2), run="r")
    store.ingest(saved(4), run="r", precision="delta8")
    moved = store.ingest(saved(6, world_size=3), run="r", precision="delta8")
    after = store.ingest(saved(8, world_size=3), run="r", precision="delta8")

    [note] = [note for note in moved.notes if "kept exactly" in note]
    assert note.startswith("model.embed_tokens and 4 more are kept exactly")
    assert set(counts(store, "r@6").values()) == {0}
    assert set(counts(store, "r@8").values()) == {1}
    assert after.notes == ()
    for layer, version in versions(store, "r@8").items():
        assert {stored.id for stored in version.references} <= {of.id for of in versions(store, "r@6")[layer].objects}
    assert store.verify(read_data=True).ok


def test_moments_alone_need_no_reference(store: Store, saved: Checkpoints) -> None:
    """So another number of ranks changes nothing for them."""
    store.ingest(saved(2), run="r")
    moved = store.ingest(saved(4, world_size=3), run="r", precision="moments8")
    assert moved.notes == ()
    assert set(counts(store, "r@4").values()) == {1}


def test_another_stage_of_the_same_layers_is_exact(store: Store, tmp_path: Path) -> None:
    """Stages 1 and 2 cut layers their own way."""
    store.ingest(checkpoint(tmp_path / "3", step=2), run="r")
    found = store.ingest(checkpoint(tmp_path / "2", step=4, stage=2), run="r", precision="delta8")
    assert any("kept exactly" in note for note in found.notes)
    assert set(counts(store, "r@4").values()) == {0}


def test_differences_follow_exact_masters_under_coded_moments(store: Store, saved: Checkpoints) -> None:
    """Whatever precisions take turns, what is referred to is exact."""
    taken: list[PrecisionName] = ["moments8", "moments8", "delta8", "delta4", "delta8"]
    for step, precision in zip((2, 4, 6, 8, 10), taken, strict=True):
        store.ingest(saved(step), run="r", precision=precision)
    for step in (6, 8, 10):
        for layer, version in versions(store, f"r@{step}").items():
            referred = {stored.id for stored in version.references}
            assert referred <= {stored.id for stored in versions(store, "r@4")[layer].objects}
            assert not any(stored.is_coded for stored in version.references)
    assert set(counts(store, "r@10").values()) == {4}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "delta9"}, "there is no precision 'delta9'"),
        ({"precision": "delta8", "exact_every": 0}, "exact_every is 0"),
        ({"precision": "delta8", "exact_every": -1}, "exact_every is -1"),
        ({"exact_every": 10}, "exact_every has no effect without a precision"),
    ],
)
def test_wrong_settings_are_named(store: Store, saved: Checkpoints, options: Any, said: str) -> None:
    """Before anything is written."""
    with pytest.raises(InvalidInput, match=said) as caught:
        store.ingest(saved(2), run="r", **options)
    assert store.runs() == []
    if options.get("precision") == "delta8":
        assert "with none (None in Python)" in str(caught.value.hint)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("where", "number", "precision"),
    [
        ("fp32_flat_groups", math.nan, "delta8"),
        ("fp32_flat_groups", math.inf, "delta4"),
        ("exp_avg", -math.inf, "moments8"),
        ("exp_avg_sq", math.nan, "delta8"),
        ("exp_avg_sq", -1.0, "moments8"),
    ],
)
def test_numbers_that_cannot_be_coded_are_refused_in_one_line(
    store: Store, saved: Checkpoints, tmp_path: Path, where: str, number: float, precision: Any
) -> None:
    """The line says which, and that an exact save takes them; nothing was stored, and such a save is."""
    store.ingest(saved(2), run="r")
    before = snapshot(store)
    source = spoiled(saved(4, hidden=16), number, where=where)
    store.ingest(saved(2, hidden=16), run="other")
    before = snapshot(store)

    with pytest.raises(Unsupported, match="cannot be kept compactly") as caught:
        store.ingest(source, run="other", precision=precision)

    assert "\n" not in caught.value.message
    assert "exact" in (caught.value.hint or "")
    assert "model." in caught.value.message or "lm_head" in caught.value.message
    assert snapshot(store) == before
    store.ingest(source, run="other")
    assert store.verify(read_data=True).ok
