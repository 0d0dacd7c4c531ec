"""What one rank alone cannot do is refused on all, with the same words; nothing is saved, and training goes on."""

from __future__ import annotations

from pathlib import Path

import layerstore
from layerstore.store import Store
from tests.forked import Nursery
from tests.live.launched import losses, one
from tests.live.tiny import RUN

WORDS = {
    "capture": ("InvalidInput", "step 2 cannot be saved: made up (on rank 1)"),
    "capture, by the engine": ("InvalidInput", "step 2 cannot be saved: made up (on rank 1)"),
    "other": ("LayoutMismatch", "parameter embed.weight and 18 more: [32, 5] in the checkpoint, [64, 5] in the engine"),
    "cut": ("IntegrityError", "rank 0 finds a pointer to "),
    "undecided": ("Conflict", "policy 'wayward' chooses different layers on different ranks"),
}


def test_what_one_rank_cannot_do_none_does(ranks: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    """Capturing, leaving pointers, following them, reading what they mean, loading what does not fit."""
    layerstore.init(tmp_path / "store").close()
    options = {"store": str(tmp_path / "store"), "out": str(tmp_path)}

    with ranks.launch("tests.live.faulty_alone:alone", options, folder=tmp_path, name="alone") as launch:
        launch.done()

    raised = {(event["name"], event["rank"]): (event["error"], event["message"]) for event in launch.events("raised")}
    names = {name for name, _ in raised}
    assert names == {*WORDS, "pointer", "look up", "read", "folder", "policy"}
    for name in names:
        first, last = raised[name, 0], raised[name, 1]
        if name in WORDS:
            assert first == last
            assert first[0] == WORDS[name][0]
            assert WORDS[name][1] in first[1]
        else:
            assert "made up" in last[1]
            assert first[1] == f"rank 1: {last[1]}", name
    assert {event["rank"] for event in launch.events("worked") if event["name"] == "at last"} == {0, 1}
    assert losses(launch) == undisturbed
    assert one(launch, "status")["errors"] == []
    with Store(tmp_path / "store") as store:
        assert store.verify(read_data=True).damaged == ()
        found = sorted((entry.attempt, entry.step) for entry in store.log(RUN))
        decided = sorted(entry.step for entry in store.log("decided"))
    assert found == [(1, 1), (1, 3), (1, 4), (2, 4)]
    assert decided == [6, 7]


def test_accelerate_saves_at_the_end_of_an_accumulation(ranks: Nursery, tmp_path: Path) -> None:
    """Accelerate counts batches itself, DeepSpeed's counter counts updates then; nothing is loaded in between."""
    layerstore.init(tmp_path / "store").close()
    options = {"store": str(tmp_path / "store"), "out": str(tmp_path / "out")}

    with ranks.launch("tests.live.faulty_alone:accumulated", options, folder=tmp_path, name="accumulated") as launch:
        launch.done()

    assert {event["name"] for event in launch.events("worked")} == {"after 1", "after 2", "after 3"}
    raised = {event["name"]: event["message"] for event in launch.events("raised")}
    assert raised.keys() == {"within 1", "within 2", "within 3", "load within 2", "load within 3"}
    assert all("gradients are being accumulated" in words for words in raised.values())
    with Store(tmp_path / "store") as store:
        assert sorted(entry.step for entry in store.log(RUN)) == [1, 2, 3]
