"""The page that ``report --serve`` serves, in a browser, while two ranks train with DeepSpeed and save."""

import contextlib
from pathlib import Path

import pytest

import layerstore
from tests.forked import Nursery
from tests.inspect.chromium import Browser, opened, program
from tests.inspect.test_served import COLUMNS, served, wait_until
from tests.live.launched import losses
from tests.live.tiny import RUN

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(program() is None, reason="no Chromium is installed (Debian: chromium)"),
]

SAVES = 4


def names(folder: Path) -> set[Path]:
    """Return all that is in *folder*."""
    return set(folder.rglob("*"))


def test_each_save_of_a_training_is_a_column_more(
    browser: Browser, ranks: Nursery, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    """A server that is killed leaves no trace, another one goes on in its place, and the training notices neither."""
    store, asked = tmp_path / "store", tmp_path / "asked"
    asked.mkdir()
    options = {"store": str(store), "asked": str(asked), "saves": SAVES}
    with (
        ranks.launch("tests.live.faulty:watched", options, folder=tmp_path, name="watched") as training,
        contextlib.ExitStack() as tab,
    ):
        (asked / "1").touch()
        training.until("quiet", count=2)
        before = names(store)
        with served(store) as url:
            page = tab.enter_context(opened(browser, url))
            wait_until(page, f"{COLUMNS} === 1")
        wait_until(page, "!document.getElementById('away').hidden")
        assert names(store) == before
        with served(store, port=int(url.rpartition(":")[2].strip("/"))):
            for step in range(2, SAVES + 1):
                (asked / str(step)).touch()
                wait_until(page, f"{COLUMNS} === {step}")
                assert page.text("#picked-summary").startswith(f"{RUN}@{step} ")
            training.done()

    assert losses(training) == {step: loss for step, loss in undisturbed.items() if step <= SAVES}
    with layerstore.open(store) as saved:
        assert saved.verify(read_data=True).ok
