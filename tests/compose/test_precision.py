"""Composites of saves that were not kept bit for bit: they say so, and what is exact can be had."""

import json
from pathlib import Path

import pytest

from layerstore import Store
from layerstore.compose import naming_damage
from layerstore.errors import IntegrityError, InvalidInput, NotFound
from layerstore.shards import RankLoad
from tests.faults.harness import flip
from tests.unit.checkpoints import Checkpoints, tensors_of


@pytest.fixture
def saved(store: Store, tmp_path: Path) -> Store:
    """Return a store whose run has exact saves at steps 1 and 4, and compact ones between and after."""
    Checkpoints(tmp_path / "source").into(store, 1, 2, 3, 4, 5, precision="delta8", exact_every=3)
    return store


def test_the_newest_exact_save_up_to_a_reference_is_taken(saved: Store) -> None:
    """One that is exact is taken itself; a pin of a compact save leads to the save before it."""
    saved.pin("best", "r@3")

    steps = {ref: saved.compose(ref, exact=True).step for ref in ("r@1", "r@2", "r@3", "r@4", "r", "best")}

    assert steps == {"r@1": 1, "r@2": 1, "r@3": 1, "r@4": 4, "r": 4, "best": 1}
    assert saved.compose("r", exact=True, policy="exact").step == 4


def test_an_earlier_attempts_exact_save_is_found(saved: Store, tmp_path: Path) -> None:
    """A history goes on below a fork: what comes after it belongs to another."""
    checkpoints = Checkpoints(tmp_path / "again", hidden=8)
    saved.ingest(checkpoints(3, seed=9), run="r", rollback=True, precision="delta8", exact_every=3)

    assert not saved.compose("r").composition.base.is_exact
    assert saved.compose("r", exact=True).name == "r@1"


def test_without_an_exact_save_there_is_one_line(saved: Store) -> None:
    """After the exact one was dropped, say; it tells what to do instead."""
    saved.drop("r@1")

    with pytest.raises(NotFound, match=r"^no save up to r@3 is exact: each has layers"):
        saved.compose("r@3", exact=True)


def test_an_exact_save_takes_no_layers_from_others(saved: Store, tmp_path: Path) -> None:
    """They may be compact; so it is refused, and nothing is read."""
    for options in ({"policy": "parity"}, {"recipe": tmp_path / "mix.yaml"}, {"without_damaged": True}):
        with pytest.raises(InvalidInput, match="takes no layer from others"):
            saved.compose(exact=True, **options)


def test_a_damaged_exact_save_leads_to_an_earlier_one(saved: Store, tmp_path: Path) -> None:
    """An older version of one layer would be no exact save; a live run has no checkpoint to ingest."""
    composite = saved.compose("r", exact=True)
    version = saved.repo.version_of(composite.composition.layers[0])
    flip(saved.repo.layout.object(version.objects[0].id))

    with pytest.raises(IntegrityError) as caught:
        composite.write(tmp_path / "out")
    with pytest.raises(IntegrityError) as live, naming_damage(saved.repo, composite.composition, resumes=True):
        saved.repo.objects.verify(version.objects[0].ref)
    with (
        pytest.raises(IntegrityError) as plain,
        naming_damage(saved.repo, saved.compose("r@4").composition, resumes=True),
    ):
        saved.repo.objects.verify(version.objects[0].ref)

    assert "; compose r@1 --exact takes an earlier exact save; or ingest" in str(caught.value.hint)
    assert "--without-damaged" not in str(caught.value.hint)
    assert live.value.hint == (
        "resume(…, step=1, exact=True) takes an earlier step: layerstore verify --read-data names the newest intact "
        "one; or layerstore repair --read-data --from COPY"
    )
    assert str(plain.value.hint).startswith("resume(…, step=…) takes an earlier step")


def test_a_composite_says_what_was_not_kept_bit_for_bit(saved: Store, tmp_path: Path) -> None:
    """In Python, in every plan, and beside the shards; weights alone say it of the masters alone."""
    composite = saved.compose("r@3")
    said, weights = composite.inexact, composite.plan("hf").notes[0]
    assert said is not None

    assert said.endswith(
        "were kept in 8 bits: this resume is not bit for bit; the newest exact save is r@1 (use --exact)"
    )
    assert "not bit for bit, world size" in repr(composite)
    assert {composite.plan(form).notes[0] for form in ("shards", "dcp", "universal")} == {said}
    assert weights.startswith("masters")
    assert "kept in 8 bits: these weights are not bit for bit; the" in weights
    composite.write(tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "layerstore.json").read_bytes())
    assert summary["notes"][0] == said
    assert set(summary["compact"]) == {entry.layer for entry in composite.composition.layers if entry.compact}


def test_a_live_resume_says_it_and_names_what_a_program_can_do(saved: Store) -> None:
    """The sentence of the command, but for the way to the exact save; of an exact one nothing."""
    composite = saved.compose("r@3")
    load = RankLoad(saved.repo, composite.composition, rank=0, world_size=composite.world_size)
    exact = RankLoad(saved.repo, saved.compose("r@4").composition, rank=0, world_size=composite.world_size)

    assert load.notes == (str(composite.inexact).replace("(use --exact", "(use resume(…, exact=True)"),)
    assert "exact=True" in load.notes[0]
    assert exact.notes == ()


def test_an_exact_composite_says_nothing(saved: Store) -> None:
    """Neither does an export of weights, if moments alone were kept in fewer bits."""
    assert saved.compose("r@4").inexact is None
    assert saved.compose("r@4").plan().notes == ()


def test_weights_are_exact_if_moments_alone_are_not(store: Store, tmp_path: Path) -> None:
    """And a resume from them is not."""
    Checkpoints(tmp_path / "moments").into(store, 1, 2, precision="moments8")
    composite = store.compose()

    assert str(composite.inexact).startswith("moments")
    assert not any("bit for bit" in note for note in composite.plan("hf").notes)


def test_gathered_weights_and_exports_are_of_the_decoded_masters(store: Store, tmp_path: Path) -> None:
    """A folder agrees with itself, though the weights that were gathered had been rounded from other numbers."""
    Checkpoints(tmp_path / "source", layout="hf").into(store, 1, 2, precision="delta8")
    composite = store.compose("r@2")
    composite.write(tmp_path / "shards")
    composite.export(tmp_path / "hf", format="hf")
    shards, weights = (tensors_of(tmp_path / of / "model.safetensors") for of in ("shards", "hf"))

    assert composite.inexact is not None
    assert shards == weights
    assert shards != tensors_of(tmp_path / "source" / "2-2" / "model.safetensors")


def test_of_two_precisions_the_coarsest_is_told(saved: Store, tmp_path: Path) -> None:
    """Layers of saves in 8 and in 4 bits; if no exact save is left, that is told too."""
    saved.ingest(Checkpoints(tmp_path / "again")(6), run="r", precision="delta4")
    saved.drop("r@1")
    saved.drop("r@4")
    said = str(saved.compose("r", policy="parity").inexact)

    assert "were kept in 4 bits: " in said
    assert said.endswith("not bit for bit; no save up to it is exact")


def test_a_policy_chooses_among_compact_saves(saved: Store) -> None:
    """What the index says of a layer's precision is what its record says."""
    composition = saved.compose("r", policy="parity").composition

    assert {entry.origin.step: entry.compact for entry in composition.layers} == {5: 1, 4: 0}
    assert not composition.as_resolved().record.is_exact
