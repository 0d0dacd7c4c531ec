"""
Which layers the saves of a run hold, by each policy and in fewer bytes, as the page of a report draws it.

What each policy chose, it chose in the training of the evidence: its rows say so, save by save.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import layerstore
from tests.bench import quality
from tests.docs.drawn.panels import panel, picture
from tests.environment import memory
from tests.inspect.chromium import Browser, Page, opened
from tests.inspect.made_up import History, build
from tests.unit.checkpoints import Checkpoints

WIDTH = 560
SAVES = 20
ROWS = Path(quality.__file__).parent / "rows" / "docstrings-0.jsonl"
POLICIES = {
    "parity": "parity: half of the layers at each save, in turns",
    "filter": "filter: two blocks at each end and the norms at every save, the rest in turns",
    "drift": "drift: what has moved most, and every layer in its turn",
}

PRECISE_SAVES = 22
"""By parity the second half of the layers has its second exact save at the 21st."""
PRECISIONS = {
    "delta8": "delta8: every tenth save is exact",
    "parity": "delta8 and parity: every tenth version of a layer is exact",
}


def policies(browser: Browser) -> str:
    """Draw the first saves of one training under each policy."""
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        build(Path(folder) / "store", *map(_history, POLICIES))
        return _drawn(
            browser,
            Path(folder),
            POLICIES,
            title="What each policy saves",
            description=f"Three grids of the same training: a row for each layer, a column for each of the first "
            f"{SAVES} saves. The first save holds every layer. Parity then alternates between two halves. Filter "
            "holds the first two and last two blocks and the norm each time, and half of the others at every fifth "
            "save. Drift holds the first block, the norm and the head nearly each time, and the others when they have "
            "moved or when it is their turn.",
        )


def _history(policy: str) -> History:
    rows = map(json.loads, ROWS.read_text().splitlines())
    saves = [row for row in rows if row["kind"] == "save" and row["arm"] == policy][:SAVES]
    due = [row["layers"] for row in saves]
    return History(run=policy, saves=SAVES, names=due[0], policy=policy, due=due, step_size=saves[0]["step"])


def precisions(browser: Browser) -> str:
    """Draw a run that is saved in fewer bytes, and one that is saved by parity as well."""
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        checkpoints, steps = Checkpoints(Path(folder) / "source"), range(5, 5 * PRECISE_SAVES + 1, 5)
        with layerstore.init(Path(folder) / "store") as store:
            checkpoints.into(store, *steps, run="delta8", precision="delta8")
            checkpoints.into(store, *steps, run="parity", precision="delta8", policy="parity")
        return _drawn(
            browser,
            Path(folder),
            PRECISIONS,
            title="What a compact precision keeps exactly",
            description=f"Two grids of {PRECISE_SAVES} saves, fainter where a layer was saved in fewer bytes. Under "
            "delta8 all layers of the first, the eleventh and the twenty-first save are exact, and these saves are "
            "marked. With parity each layer is in every other save, so that one half is exact again at the twentieth "
            "and the other at the twenty-first, which is marked: from then on all of its layers are exact.",
        )


def _drawn(browser: Browser, folder: Path, runs: Mapping[str, str], *, title: str, description: str) -> str:
    """Return the grids of *runs*, which have these headings, as the report of the store in *folder* draws them."""
    with _reported(browser, folder) as page:
        panels = []
        for run, heading in runs.items():
            names = page.look("[...document.getElementById('run').options].map((option) => option.text)")
            page.choose("#run", names.index(run))
            panels.append(panel(page, heading))
        return picture(panels, title=title, description=description)


@contextmanager
def _reported(browser: Browser, folder: Path) -> Iterator[Page]:
    with layerstore.open(folder / "store") as store:
        store.report(folder / "report.html")
    with opened(browser, folder / "report.html", width=WIDTH) as page:
        yield page
