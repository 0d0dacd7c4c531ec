"""The site in a browser: nothing is cut off, nobody complains, and the search finds."""

import functools
import http.server
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT
from tests.inspect.chromium import Browser, opened, program

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(program() is None, reason="no Chromium is installed (Debian: chromium)"),
    pytest.mark.skipif(shutil.which("zensical") is None, reason="zensical is not installed: pip install -e '.[docs]'"),
]

# A table that does not fit on a phone is scrolled in its own frame, with its words whole.
CUT = """[
    ...(document.documentElement.scrollWidth > innerWidth ? ["the page"] : []),
    ...[...document.querySelectorAll(".md-content pre > code")]
        .filter((code) => code.scrollWidth > code.clientWidth + 1).map((code) => code.innerText.split("\\n")[0]),
    ...[...document.querySelectorAll(".md-content table")]
        .filter((table) => innerWidth > 700 && table.offsetWidth > table.closest("article").clientWidth)
        .map((table) => table.rows[0].innerText),
]"""

SECONDS_MAX = 30


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing for a request."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """Build the site; yield its URL and its pages."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "zensical.toml"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
    subprocess.run(["zensical", "build", "--clean"], cwd=folder, check=True, capture_output=True)
    handler = functools.partial(_Quiet, directory=str(folder / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        pages = sorted(path.relative_to(folder / "site").as_posix() for path in (folder / "site").rglob("*.html"))
        yield f"http://127.0.0.1:{server.server_port}/", pages
        server.shutdown()


@pytest.mark.timeout(600)
def test_nothing_is_cut_off(browser: Browser, site: tuple[str, list[str]]) -> None:
    """No line of code and no column, on a phone, a laptop and a large screen, light and dark; no page complains."""
    url, pages = site
    cut: dict[tuple[str, str, int], list[str]] = {}
    with opened(browser, url) as tab:
        for page in pages:
            tab.load(url + page)
            for width in (390, 1300, 1920):
                tab.resize(width, 900)
                for scheme in ("default", "slate"):
                    tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
                    cut[page, scheme, width] = tab.look(CUT)
        complaints = [line for line in tab.said() if not line.startswith(f"asked for: {url}")]

    assert len(pages) > 60
    assert {place: found for place, found in cut.items() if found} == {}
    assert complaints == []


def test_the_search_finds(browser: Browser, site: tuple[str, list[str]]) -> None:
    """What is typed leads to pages that have it."""
    results = """[...document.querySelectorAll("*")].filter((each) => each.shadowRoot)
        .flatMap((each) => [...each.shadowRoot.querySelectorAll("ol[role=listbox] a")])
        .map((link) => link.getAttribute("href")).join(" ")"""
    found, end = "", time.monotonic() + SECONDS_MAX
    with opened(browser, f"{site[0]}index.html") as tab:
        tab.click_on(".md-search__button")
        time.sleep(0.5)
        tab.call("Input.insertText", text="bisect")
        while "guides/bisect.html" not in found and time.monotonic() < end:
            time.sleep(0.1)
            found = tab.look(results)

    assert "guides/bisect.html" in found
