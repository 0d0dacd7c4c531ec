"""What results look like in a session: a line each, frames of pandas, times, and why there is nothing."""

import re
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from layerstore.errors import NotFound, Unsupported
from layerstore.tables import Table
from tests.generated import generate
from tests.unit.checkpoints import checkpoint


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a store with one commit."""
    with layerstore.init(tmp_path / "store") as made:
        made.ingest(checkpoint(tmp_path))
        yield made


def test_results_are_one_readable_line(store: Store, tmp_path: Path) -> None:
    """A store, an ingest, a commit, a pin, a composite, a diff."""
    pin, composite, view = store.pin("best", "sft@2"), store.compose("sft@2"), store.show("sft@2")
    again = store.ingest(checkpoint(tmp_path / "again"))
    diff = store.diff("sft@2", "best")
    store.delete_pin("best")
    store.drop("sft@2")
    (dropped,) = store.dropped()

    assert repr(store) == f"<Store {tmp_path / 'store'}>"
    assert repr(again) == f"<Ingested sft@2 {view.commit[:12]}: was in the store before>"
    assert repr(pin).startswith("<Pin best: sft@2, ")
    assert repr(dropped.commit).startswith(f"<Commit {view.commit[:12]} sft@2, ")
    assert repr(composite).startswith("<Composite sft@2: policy latest, 0 of ")
    assert repr(diff).startswith("<Diff sft@2 -> best: layers ")
    assert not [each for each in (pin, composite, view, again, diff, dropped) if "\n" in repr(each)]


def test_reports_are_one_readable_line(store: Store, tmp_path: Path) -> None:
    """Counts, a verify, a measured diff, a doctor's report, an export before it is written, the ages of layers."""
    composite = store.compose("sft@2")
    diff = store.diff("sft@2", "sft@2", stat=True)
    lines = {
        "Stats": repr(store.stats()),
        "Verdict": repr(store.verify()),
        "Diff": repr(diff),
        "Diagnosis": repr(layerstore.doctor(tmp_path / "store")),
        "ExportPlan": repr(composite.plan("hf")),
        "Staleness": repr(composite.staleness),
        "GcOutcome": repr(store.gc(dry_run=True)),
    }

    assert lines["Stats"].startswith("<Stats of the store: commits 1, ")
    assert lines["Verdict"].startswith("<Verdict no damage; records 1, ")
    assert "; moved most: " in lines["Diff"]
    assert repr(store.stats("sft")).startswith("<Stats of sft: commits 1, ")
    assert {name: line for name, line in lines.items() if len(line) > 300 or not line.startswith(f"<{name}")} == {}


def test_a_verdict_names_the_first_damage(store: Store) -> None:
    """Whoever looks at it in a session sees at once that something is wrong, and where."""
    victim = max((store.path / "objects").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    victim.unlink()

    assert re.match(rf"<Verdict 1 damaged: .*{victim.name}; ", repr(store.verify()))


def test_what_was_measured_is_in_frames(store: Store, tmp_path: Path) -> None:
    """If the log was asked for it; a commit without a metric has a gap there."""
    pandas = pytest.importorskip("pandas")
    measured = generate(tmp_path / "measured", step=3, client_state={"metrics": {"loss": 2.25}})
    store.ingest(measured, run="other")

    log = store.log(metrics=True)

    frame = log.to_pandas().set_index("run")
    assert frame.loc["other", "metrics.loss"] == 2.25
    assert pandas.isna(frame.loc["sft", "metrics.loss"])


def test_times_are_times_too(store: Store) -> None:
    """In UTC, beside the nanoseconds; a pin has its base's run, step and time."""
    (entry,), pin = store.log(), store.pin("best")

    assert entry.time is not None
    assert entry.time.tzinfo is UTC
    assert abs((entry.time - datetime.fromtimestamp(entry.time_ns / 1e9, UTC)).total_seconds()) < 1e-3
    assert (pin.run, pin.step, pin.time) == ("sft", 2, entry.time)
    assert store.show().time == store.compose().time == entry.time


def test_an_empty_answer_says_why(tmp_path: Path) -> None:
    """It is an empty list all the same."""
    with layerstore.init(tmp_path / "new") as store:
        assert [*store.log(), *store.pins(), *store.dropped()] == []
        assert repr(store.log()) == "[]  # no commits yet: store.ingest(CHECKPOINT, run=RUN) makes one"
        assert "store.pin(NAME, REF)" in repr(store.pins())


def test_no_weights_says_why(store: Store) -> None:
    """A mapping without tensors, and what is asked of it."""
    weights = store.compose().tensors("weights")

    assert repr(weights) == "<Tensors: none of kind weights: all weights here follow from their masters>"
    with pytest.raises(NotFound) as caught:
        weights["model.norm.weight"]
    assert caught.value.hint == "all weights here follow from their masters"


def test_a_mistyped_name_names_the_nearest(store: Store) -> None:
    """Of a tensor and of a layer; a traceback shows it, and it is still a KeyError."""
    composite = store.compose()

    with pytest.raises(KeyError) as tensor:
        composite.tensors()["model.norm.wieght"]
    with pytest.raises(NotFound) as layer:
        composite.layers["model.nrom"]

    assert "hint: did you mean model.norm.weight" in "".join(traceback.format_exception(tensor.value))
    assert layer.value.hint is not None
    assert layer.value.hint.startswith("did you mean model.norm")


def test_frames_have_the_fields_of_json(store: Store) -> None:
    """With times as times, and a line for each commit or layer."""
    pytest.importorskip("pandas")
    log, composite, diff = store.log().to_pandas(), store.compose().to_pandas(), store.diff("sft", "sft").to_pandas()

    assert list(log["step"]) == [2]
    assert log["time"].dt.tz is not None
    assert list(composite["layer"]) == list(diff["layer"]) == list(store.compose().layers)
    assert "bytes.master" in store.ls().to_pandas().columns


def test_without_pandas_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is optional."""
    monkeypatch.setitem(sys.modules, "pandas", None)

    with pytest.raises(Unsupported, match="to_pandas needs pandas") as caught:
        Table([]).to_pandas()
    assert caught.value.hint == "pip install pandas"
