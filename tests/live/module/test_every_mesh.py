"""A module that was saved on any mesh is resumed on every other one, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerstore import Store
from layerstore.arrays import TensorKind
from tests.forked import Launch, Nursery
from tests.live.module.launched import launched
from tests.live.module.models import FORMS
from tests.live.module.programs import RUNS, SAVED_AT

KEYS = 32
"""The tensors of the model, tied ones under both names."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the store and torch's folders lie."""
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="module")
def saved(ranks: Nursery, folder: Path) -> dict[int, Launch]:
    """Return what was told by those that have saved, by their number."""
    return {count: launched(ranks, folder, "everywhere", count=count) for count in FORMS}


def resumed(ranks: Nursery, folder: Path, count: int, runs: dict[str, list[str]], name: str = "") -> Launch:
    """Return what is told by those that resume, in each form, the runs that are listed with it, and read all runs."""
    more = {"runs": runs, "also_read": RUNS}
    return launched(ranks, folder, "from_everywhere", count=count, name=f"resumed{name}-{count}", **more)


def check(launch: Launch, expected: dict[str, list[str]]) -> None:
    """Make sure that every tensor and value was torch's: in the saver's commits and the writer's, resumed and read."""
    for form, resumed_runs in expected.items():
        events = [event for event in launch.events() if event.get("on") == f"{form}{launch.count}"]
        for kind, runs in (("read", RUNS), ("resumed", resumed_runs)):
            for run in runs:
                found = [event for event in events if event["kind"] == kind and event["run"] in {run, f"w-{run}"}]
                assert len(found) == 2 * launch.count, (kind, form, run)
                assert [event["other"] for event in found] == [[]] * len(found), (kind, form, run)
        assert {event["keys"] for event in events if event["kind"] == "resumed"} == {KEYS}


def losses(launch: Launch) -> dict[tuple[str, int], list[str]]:
    """Return the losses of every rank in every form."""
    return {(event["run"], event["rank"]): event["losses"] for event in launch.events("losses")}


def test_what_was_saved_is_a_whole_commit(saved: dict[int, Launch], folder: Path) -> None:
    """Nothing is missing, nothing is damaged, and all have the same layers."""
    assert saved
    with Store(folder / "store") as store:
        assert store.verify(read_data=True).ok
        for prefix in ("", "w-"):
            layers = [list(store.compose(f"{prefix}{run}").layers) for run in RUNS]
            assert layers == layers[:1] * len(RUNS)


@pytest.mark.parametrize("run", RUNS)
def test_arrays_are_those_of_torchs_own_folder(saved: dict[int, Launch], folder: Path, run: str) -> None:
    """However the mesh has cut them: by rows, or by columns."""
    assert saved
    with Store(folder / "store") as store:
        store.ingest(folder / "plain" / run, run=f"plain-{run}", step=SAVED_AT)
        kinds: tuple[TensorKind, ...] = ("master", "optimizer")
        for kind in kinds:
            found, expected = (
                {name: array.tobytes() for name, array in store.compose(name).tensors(kind).items()}
                for name in (f"w-{run}", f"plain-{run}")
            )
            assert found == expected


@pytest.mark.parametrize("count", FORMS)
def test_every_form_resumes_what_it_and_another_one_have_saved(
    saved: dict[int, Launch], ranks: Nursery, folder: Path, count: int
) -> None:
    """
    All tensors and values are torch's; and training goes on with the same losses, to the last bit, on every rank.

    Every form also reads, without training on, what every other one has saved.
    """
    wanted = {}
    for form in FORMS[count]:
        own = RUNS.index(f"{form}{count}")
        wanted[form] = [RUNS[own], RUNS[(own + 4) % len(RUNS)]]

    launch = resumed(ranks, folder, count, wanted)

    check(launch, wanted)
    went_on = losses(saved[count])
    assert losses(launch) == went_on | {(f"w-{run}", rank): each for (run, rank), each in went_on.items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("on", RUNS)
def test_every_form_resumes_what_every_form_has_saved(
    saved: dict[int, Launch], ranks: Nursery, folder: Path, on: str
) -> None:
    """All tensors and values are those that torch's own save and load of the same state give."""
    assert saved
    wanted = {on[:-1]: RUNS}

    check(resumed(ranks, folder, int(on[-1]), wanted, name=on), wanted)
