"""Promises of the page that ``report --serve`` serves, in a browser: it follows a run while it saves."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import layerstore
from tests.inspect.chromium import Browser, Navigated, Page, opened, program
from tests.inspect.made_up import History, build
from tests.inspect.test_page import HOSTILE, HOSTILE_RUN
from tests.unit.checkpoints import Checkpoints

pytestmark = pytest.mark.skipif(program() is None, reason="no Chromium is installed (Debian: chromium)")

SECONDS_MAX = 60
"""The page asks every five seconds; the machine may be busy."""

COLUMNS = (
    "new Set([...document.querySelector('#heat path.c0').getAttribute('d').matchAll(/M([0-9.]+) /g)]"
    ".map((found) => found[1])).size"
)


@contextlib.contextmanager
def served(store: Path, *, port: int = 0) -> Iterator[str]:
    """Start a server in a process of its own; yield its URL, and kill it at the end."""
    words = [sys.executable, "-m", "layerstore.cli", "--store", str(store), "report", "--serve", "--port", str(port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[1]
        finally:
            process.kill()


def wait_until(page: Page, expression: str) -> None:
    """Wait for what the page shows by itself."""
    end = time.monotonic() + SECONDS_MAX
    # In between the page is loaded anew, and has no picture.
    while True:
        with contextlib.suppress(Navigated):
            if page.look(f"(() => {{ try {{ return {expression}; }} catch {{ return false; }} }})()"):
                return
        assert time.monotonic() < end, page.text("body")
        time.sleep(0.1)


def test_each_save_of_a_run_is_a_column_more(browser: Browser, tmp_path: Path) -> None:
    """Without a reload by hand; what was picked stays, and colours do; a server that comes back goes on."""
    checkpoints, path = Checkpoints(tmp_path / "checkpoints"), tmp_path / "store"
    with layerstore.init(path) as store, contextlib.ExitStack() as tab:
        checkpoints.into(store, 1)
        with served(path) as url:
            page = tab.enter_context(opened(browser, url))
            assert page.look(COLUMNS) == 1
            page.look("document.getElementById('theme').click()")
            for step in (2, 3):
                checkpoints.into(store, step)
                wait_until(page, f"{COLUMNS} === {step}")
                assert page.text("#picked-summary").startswith(f"r@{step} ")
            page.look("document.getElementById('heat').focus()")
            page.press("Home")
            assert page.look("location.hash") == "#run=r&step=1"
            assert {line for line in page.said() if not line.startswith(f"asked for: {url}")} == set()
        wait_until(page, "!document.getElementById('away').hidden")
        with served(path, port=int(url.rpartition(":")[2].strip("/"))) as again:
            assert again == url
            checkpoints.into(store, 4)
            wait_until(page, f"{COLUMNS} === 4")
            assert page.text("#picked-summary").startswith("r@1 ")
            assert page.text("#theme") == "Theme: light"
            assert page.look("document.getElementById('away').hidden") is True


def test_names_stay_text_in_a_served_page(browser: Browser, tmp_path: Path) -> None:
    """Nothing of a hostile store runs or becomes an element, and no other site reads it."""
    path = tmp_path / "st'o\"re <i>&"
    build(path, History(run=HOSTILE_RUN, saves=3, names=[name for name in HOSTILE if name != "\ud800"]))
    with served(path) as url:
        with opened(browser, url) as page:
            assert page.look("typeof window.hurt") == "undefined"
            assert page.look("document.querySelectorAll('img, i, u, b[onclick]').length") == 0
            assert page.text("#picked-summary").startswith(HOSTILE_RUN)
        with opened(browser, "data:text/html,<title>elsewhere") as other:
            assert other.look(f"fetch('{url}').then(() => 'read', () => 'refused')") == "refused"
