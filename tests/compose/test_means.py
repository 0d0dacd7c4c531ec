"""Averages: the mean of several saves' masters, in every form that a composite has, and what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layerstore import Keep, Store
from layerstore.errors import IntegrityError, InvalidInput, LayerstoreError, LayoutMismatch, NotFound, Unsupported
from layerstore.model import Kind
from tests.compose.test_hf import objects_of, weights_in
from tests.deepspeed.compare import rank_trees, whole_weights
from tests.unit.checkpoints import checkpoint, digests, snapshot

STEPS = (2, 4, 6, 8)


@pytest.fixture
def store(store: Store, tmp_path: Path) -> Store:
    """Return a store of four saves by different numbers of ranks."""
    for step, world_size in zip(STEPS, (2, 3, 1, 2), strict=True):
        store.ingest(checkpoint(tmp_path / "in", step=step, world_size=world_size))
    return store


def masters(store: Store, ref: str) -> dict[str, torch.Tensor]:
    """Return the masters of a commit."""
    tensors = store.compose(ref).tensors("master")
    return {name: torch.from_numpy(tensors[name].copy()) for name in tensors}


def expected(store: Store, weights: dict[str, float]) -> dict[str, torch.Tensor]:
    """Return what torch makes of it in double precision."""
    saves = {ref: masters(store, ref) for ref in weights}
    total = sum(weights.values())
    first = saves[next(iter(weights))]
    return {
        name: (
            torch.stack([saves[ref][name].double() * weight for ref, weight in weights.items()]).sum(0) / total
        ).float()
        for name in first
    }


def is_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Whether all of *wanted* are in *found*, to the last bit."""
    return all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("saves", "ema", "weights"),
    [
        ("last:4", None, dict.fromkeys(("sft@2", "sft@4", "sft@6", "sft@8"), 1.0)),
        ("last:2", None, {"sft@6": 1.0, "sft@8": 1.0}),
        ("sft@2,sft@8:3", None, {"sft@2": 1.0, "sft@8": 3.0}),
        ("last:3", 0.5, {"sft@4": 0.25, "sft@6": 0.5, "sft@8": 1.0}),
        (None, 0.9, {"sft@2": 0.9**3, "sft@4": 0.9**2, "sft@6": 0.9, "sft@8": 1.0}),
    ],
)
def test_the_mean_is_torchs_in_double_precision(
    store: Store, tmp_path: Path, saves: str | None, ema: float | None, weights: dict[str, float]
) -> None:
    """In an export, in memory, and as shards for any number of ranks, which have it in the gathered weights too."""
    mean, wanted = store.average(saves, ema=ema), expected(store, weights)

    assert is_same(weights_in(mean.export(tmp_path / "hf", dtype="fp32").out), wanted)
    assert is_same(weights_in(mean.export(tmp_path / "hf16", dtype="bf16").out), wanted)
    assert is_same(mean.state_dict(dtype="fp32"), wanted)
    for world_size in (1, 2, 3):
        out = mean.write(tmp_path / f"zero{world_size}", world_size=world_size).out
        assert is_same(whole_weights(out / (out / "latest").read_text()), wanted)


def test_all_but_the_masters_is_the_bases(store: Store, tmp_path: Path) -> None:
    """The moments are its own, and the notes say so; the files beside it are those of the base."""
    plain, mean = store.compose("sft@8").write(tmp_path / "plain"), store.average("last:3").write(tmp_path / "mean")

    assert any("moments are those of sft@8, not averaged" in note for note in mean.notes)
    said = "the mean of 3 saves, sft@4 to sft@8, everything else of step 8: this model never existed"
    assert any(said in note for note in mean.notes)
    assert (
        digests(plain.out, leave_out="_optim_states.pt").keys()
        == digests(mean.out, leave_out="_optim_states.pt").keys()
    )
    for kind in ("exp_avg", "exp_avg_sq"):
        assert moments(plain.out, kind) == moments(mean.out, kind)


def optimizer_states(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the optimizer's state of each sub-group on each rank."""
    tag = folder / (folder / "latest").read_text()
    for rank in range(len([*tag.glob("*_optim_states.pt")])):
        outer = rank_trees(tag, rank)["optim_states"]["optimizer_state_dict"]
        yield from outer["optimizer_state_dict"]["state"].values()


def moments(folder: Path, kind: str) -> list[bytes]:
    """Return the bytes of one moment on all ranks."""
    return [state[kind].numpy().tobytes() for state in optimizer_states(folder)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_gathered_weights_are_the_means(store: Store, tmp_path: Path, world_size: int) -> None:
    """A Trainer's folder has the weights again, in half precision."""
    for step in (10, 12):
        store.ingest(checkpoint(tmp_path / "in", step=step, layout="hf"))
    out = store.average("sft@10,sft@12").write(tmp_path / "out", world_size=world_size).out

    wanted = expected(store, {"sft@10": 1.0, "sft@12": 1.0})
    assert is_same(weights_in(out), wanted)
    assert is_same(whole_weights(out / (out / "latest").read_text()), wanted)


def test_fresh_moments_are_zero_and_counted_from_zero(store: Store, tmp_path: Path) -> None:
    """With a mean or without, and even where a collection has dropped the moments."""
    store.gc(Keep(last=4, drop_optimizer_older_than=2), grace_seconds=0)
    with pytest.raises(LayoutMismatch, match="no longer has optimizer moments"):
        store.compose("sft@2").write(tmp_path / "gone")
    whole = store.compose("sft@2").write(tmp_path / "trimmed", moments="fresh").out
    assert is_same(whole_weights(whole / (whole / "latest").read_text()), masters(store, "sft@2"))
    written = store.average("last:2").write(tmp_path / "mean", moments="fresh")

    assert any("moments are zero and its counters 0" in note for note in written.notes)
    assert not any(any(part) for kind in ("exp_avg", "exp_avg_sq") for part in moments(written.out, kind))
    assert {int(state["step"]) for state in optimizer_states(written.out)} == {0}
    assert store.ingest(written.out, run="anew").notes == (
        "it was composed from several saves (sft@8 and others): log shows them as one",  # nothing of the moments
    )
    with pytest.raises(InvalidInput, match="have no steps of their own"):
        store.average("last:2", ref="sft").write(tmp_path / "no", moments="fresh", adam_step="per-layer")


def test_only_some_layers(store: Store, tmp_path: Path) -> None:
    """The others are the base's; a pattern that fits none is refused."""
    mean = store.average("last:4", layers="model.layers.[0]")
    wanted, own = expected(store, dict.fromkeys((f"sft@{step}" for step in STEPS), 1.0)), masters(store, "sft@8")
    found = mean.state_dict(dtype="fp32")

    for name in own:
        assert torch.equal(found[name], (wanted if name.startswith("model.layers.0.") else own)[name])
    with pytest.raises(InvalidInput, match="no layer of the model is called"):
        store.average("last:4", layers="model.blocks.*")


def test_what_saves_share_is_read_once_and_counts_for_each(store: Store, tmp_path: Path) -> None:
    """Partial saves inherit layers: the mean is that of the composites."""
    for step in (10, 12):
        store.ingest(checkpoint(tmp_path / "in", step=step), policy="parity")
    refs = ("sft@8", "sft@10", "sft@12")
    mean = store.average("last:3")

    assert is_same(mean.state_dict(dtype="fp32"), expected(store, dict.fromkeys(refs, 1.0)))
    averaged = mean.composition.mean
    assert averaged is not None
    assert any(len(parts) < 3 for parts in averaged.layers.values())


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({}, InvalidInput, "which saves are averaged"),
        ({"saves": "last:9"}, InvalidInput, "sft@8 has 3 saves before it: there are no 9 to average"),
        ({"saves": "last:2", "ref": "sft@2"}, InvalidInput, "sft@2 has no save before it: there are no 2 to average"),
        *(
            ({"saves": saves}, InvalidInput, "does not say how many saves")
            for saves in ("last:0", "last:x", "last:-1", "last", "last:3 ", "last:10000000", "last:2,sft@4")
        ),
        *(
            ({"saves": saves}, InvalidInput, "is not a save with a weight")
            for saves in ("sft@2,sft@8:0", "sft@2,,sft@8", "sft@2:nan", "sft@2:-1", "sft@2:", ":2")
        ),
        ({"saves": "sft@2,sft@5"}, NotFound, "no step 5"),
        ({"saves": ["sft@2"]}, InvalidInput, r"saves is \['sft@2'\], but must be text"),
        ({"ema": 1.0}, InvalidInput, "ema 1.0 is not between 0 and 1"),
        ({"ema": 0.5, "saves": "sft@2,sft@8"}, InvalidInput, "names others"),
    ],
)
def test_what_does_not_say_which_saves_is_refused(
    store: Store, asked: dict[str, object], error: type[LayerstoreError], says: str
) -> None:
    """In one line."""
    with pytest.raises(error, match=says):
        store.average(**asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [{"layers": 3}, {"hidden": 24}, {"vocab": 32}])
def test_a_mean_over_different_models_is_refused(store: Store, tmp_path: Path, other: dict[str, int]) -> None:
    """Nothing is written, to the store or beside it."""
    store.ingest(checkpoint(tmp_path / "other", **other), run="other")
    before = snapshot(store)
    for saves in ("sft@8,other", "other,sft@8"):
        with pytest.raises(LayoutMismatch):
            store.average(saves).export(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert snapshot(store) == before


def test_a_mean_has_no_place_in_the_store(store: Store) -> None:
    """It cannot be pinned, and has no objects to be mapped."""
    mean = store.average("last:2")
    with pytest.raises(Unsupported, match="the mean of sft@6 and sft@8: no object of the store has its bytes"):
        mean.pin("mean")
    with pytest.raises(Unsupported, match="no object of the store has"):
        mean.tensors("master")
    with pytest.raises(InvalidInput, match="an average has saves of several ages"):
        mean.check(max_staleness=10)


def test_what_is_no_average_is_none(store: Store) -> None:
    """The newest save alone is itself; another save's masters are said to be that."""
    assert store.average("last:1").mixture is None
    assert store.average("last:1").tensors("master").keys() == store.compose("sft").tensors("master").keys()

    other = store.average("sft@2", ref="sft@8")
    assert is_same(other.state_dict(dtype="fp32"), masters(store, "sft@2"))
    assert (other.mixture or "").startswith("masters of sft@2, everything else of step 8: this model never existed")
    assert repr(other) == "<Composite sft@8: policy average, masters of sft@2, world size 2>"
    some = store.average("last:2", layers="model.norm")
    assert (some.mixture or "").startswith("the mean of sft@6 and sft@8 in 1 of 5 layers, everything else of step 8")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.7, 0.99])
def test_a_damaged_save_is_named(store: Store, tmp_path: Path, share: float) -> None:
    """Each of the averaged objects is verified, header, padding and all."""
    of_base = {path.name for path in objects_of(store, "sft@8", Kind.MASTER)}
    victim = next(path for path in objects_of(store, "sft@4", Kind.MASTER) if path.name not in of_base)
    data = bytearray(victim.read_bytes())
    data[int(share * len(data))] ^= 1
    victim.chmod(0o644)
    victim.write_bytes(data)
    for form in ("export", "write"):
        with pytest.raises(IntegrityError, match="of sft@4"):
            getattr(store.average("last:3"), form)(tmp_path / form)
        assert not (tmp_path / form).exists()


def test_infinities_and_nans_are_passed_on() -> None:
    """As torch does."""
    from layerstore.numbers import mean

    parts = [np.array(each, np.float32) for each in ([np.inf, np.inf, np.nan, 3e38], [1, -np.inf, 1, 3e38])]
    found = np.frombuffer(mean([(part.tobytes(), 1.0) for part in parts], dtype="F32"), np.float32)

    wanted = torch.stack([torch.from_numpy(part).double() for part in parts]).mean(0).float().numpy()
    np.testing.assert_array_equal(found, wanted)
