"""Promises of the page: one file, below 1 MB, in which nothing runs or is loaded but what we put there."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import layerstore
from layerstore.errors import AlreadyExists, InvalidInput, StorageIO, Unsupported
from layerstore.inspect.page import BEGINS, PAGE_BYTES_MAX, render
from layerstore.inspect.report import rooms
from tests.inspect.made_up import History, build

PIECES = Path(layerstore.__file__).parent / "inspect" / "page"
HOSTILE = (
    "</script><script>window.hurt=1</script>",
    "<img src=x onerror=window.hurt=2>",
    "\"'><svg onload=window.hurt=3>",
    "<!--<script>",
    "{{SCRIPT}}{{FACTS}}",
    "a\u2028b\u2029c\u202ed\x1b[2Je\0f",
    "日本語 🙂 ﷽",
    "&lt;b&gt;&amp;",
    "\ud800",
    "$& \\u003c \\",
    "__proto__",
    "constructor",
)
"""Names of layers: those of runs and pins are more closely checked."""
HOSTILE_RUN = "<b onclick=alert(1)>'\"&{{FACTS}}"


class Elements(HTMLParser):
    """What a browser finds in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self._text: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.found.append((tag, dict(attrs)))
        self._text = {"script": self.scripts, "style": self.styles}.get(tag)
        if self._text is not None:
            self._text.append("")

    def handle_endtag(self, tag: str) -> None:
        """Note that what follows is not a script or style any more."""
        self._text = None

    def handle_data(self, data: str) -> None:
        """Note the text of scripts and styles, which comes in pieces."""
        if self._text is not None:
            self._text[-1] += data


def elements_of(page: bytes) -> Elements:
    """Return what is in *page*."""
    found = Elements()
    found.feed(page.decode())
    return found


def facts_in(page: bytes) -> dict[str, Any]:
    """Return the facts that the script of *page* will read."""
    text = page.decode().partition('<script type="application/json" id="facts">')[2].partition("</script>")[0]
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store whose names try to become something else than text."""
    path = tmp_path_factory.mktemp("hostile") / "st'o\"re <i>&"
    build(path, History(run=HOSTILE_RUN, saves=3, names=HOSTILE[:8] + HOSTILE[9:]))
    with layerstore.open(path) as store:
        store.pin("<u>'\"&", f"{HOSTILE_RUN}@50")
    return path


@pytest.mark.fault(71)
def test_names_are_data_and_nothing_else(hostile: Path) -> None:
    """Whatever a text is and wherever, the page has an empty one's elements, and the facts come back as they were."""
    with layerstore.open(hostile) as store:
        facts = store.report()
    facts |= {text: [text, {text: text}] for text in HOSTILE}
    page, empty = render(facts), render({"runs": []})

    assert elements_of(page).found == elements_of(empty).found
    assert elements_of(page).scripts[1:] == elements_of(empty).scripts[1:]
    assert facts_in(page) == json.loads(json.dumps(facts))
    [run] = facts_in(page)["runs"]
    assert set(run["layers"]) == {*HOSTILE[:8], *HOSTILE[9:]}
    assert (run["run"], run["saves"]["pins"][0]) == (HOSTILE_RUN, ["<u>'\"&"])


def test_only_the_pages_own_script_and_style_may_run() -> None:
    """The policy names both by their hashes, allows no address, and comes before them."""
    page = render({"runs": []})
    found = elements_of(page)
    [policy] = [attributes["content"] for tag, attributes in found.found if "http-equiv" in attributes]
    kinds = [attributes.get("type") for tag, attributes in found.found if tag == "script"]

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert policy is not None
    assert kinds == ["application/json", None]
    assert f"script-src {hashed(found.scripts[1])};" in policy
    assert f"style-src {hashed(found.styles[0])};" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert page.index(b"Content-Security-Policy") < page.index(b"<style>") < page.index(b"<script")


def test_nothing_in_the_page_refers_to_anything_outside() -> None:
    """No address but the names of namespaces, no attribute that loads or runs, no style of an element's own."""
    page = render({"runs": []}).decode()
    addresses = set(re.findall(r"\b(?:https?:|//)[^\s\"'`;)]+", page)) - {"//www.w3.org/2000/svg"}
    attributes = {name for _, found in elements_of(page.encode()).found for name in found}

    assert {address for address in addresses if "w3.org" not in address and "/" in address[2:]} == set()
    assert not {name for name in attributes if name.startswith("on") or name in {"src", "style", "srcset", "action"}}
    assert "url(" not in page.partition("<style>")[2].partition("</style>")[0]
    assert "@import" not in page


def test_the_script_makes_no_markup_and_asks_nobody() -> None:
    """What could turn text into elements or code, or reach a network, is not in it."""
    script = elements_of(render({"runs": []})).scripts[1]
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|createContextualFragment|\beval\b|\bFunction\(|"
        r"fetch\(|XMLHttpRequest|WebSocket|EventSource|sendBeacon|import\(|localStorage|\.src\b|\.href\b|setTimeout\(|srcdoc"
    )

    assert re.findall(forbidden, script) == []
    assert script.startswith('"use strict";')
    assert all(piece.read_text() in script for piece in PIECES.glob("*.js") if piece.name != "served.js")


def test_a_served_page_asks_its_server_and_nobody_else() -> None:
    """That script alone may, and the policy allows it nothing else."""
    served, alone = (elements_of(render({"runs": []}, version=version)) for version in ("1f", None))
    policies = [
        next(found["content"] or "" for name, found in page.found if found.get("http-equiv"))
        for page in (served, alone)
    ]
    [asked] = re.findall(r"fetch\((.*?),", served.scripts[1])

    assert asked == '"version"'
    assert (PIECES / "served.js").read_text() in served.scripts[1]
    assert "connect-src" not in policies[1]
    assert policies[0].endswith("; connect-src 'self'")


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize(("runs", "saves", "layers"), [(1, 250, 130), (40, 30, 24), (100, 2, 4)])
def test_a_page_stays_below_its_bound(tmp_path: Path, runs: int, saves: int, layers: int) -> None:
    """Whatever there are many of; what is left out is said in the facts, and the newest save is never left out."""
    made = History(run="", saves=saves, layers=layers, policy="drift", is_live=True, has_objects=False)
    build(tmp_path / "store", *(replace(made, run=f"sft-{number}") for number in range(runs)))
    with layerstore.open(tmp_path / "store") as store:
        store.report(tmp_path / "report.html")
        newest = [store.log(run, limit=1)[0].commit for run in store.runs()]
    page = (tmp_path / "report.html").read_bytes()
    shown = facts_in(page)

    assert len(page) <= PAGE_BYTES_MAX
    assert [(each["commits"], len(each["layers"])) for each in shown["runs"]] == [(saves, layers)] * runs
    assert [each["saves"]["commit"][-1] for each in shown["runs"]] == newest
    assert shown["is_sampled"] == (len(shown["runs"][0]["saves"]["step"]) < saves)


@pytest.mark.full
def test_what_is_too_large_all_the_same_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the saves go, and again, until it fits; a page that cannot fit is refused with what would."""
    out = tmp_path / "report.html"
    build(tmp_path / "store", History(run="long", saves=60, layers=20, has_objects=False))
    with layerstore.open(tmp_path / "store") as store:
        steps = store.report(out)["runs"][0]["saves"]["step"]
        monkeypatch.setattr("layerstore.inspect.report.PAGE_BYTES_MAX", len(out.read_bytes()) - 1)
        smaller = store.report(out)
        kept = smaller["runs"][0]["saves"]["step"]
        monkeypatch.setattr("layerstore.inspect.report.PAGE_BYTES_MAX", 1000)
        with pytest.raises(Unsupported, match="more than 1,000 bytes"):
            store.report(out)

    assert len(steps) == 60 > len(kept) > 1
    assert kept[-1] == steps[-1]
    assert smaller["is_sampled"]
    assert facts_in(out.read_bytes()) == smaller


def test_room_that_a_small_run_leaves_goes_to_a_large_one() -> None:
    """No run shows more saves than it has, nor all together more than the page has room for."""
    views: Any = [
        SimpleNamespace(run=f"run-{saves}-{layers}", visible=[SimpleNamespace(layer_names=("layer",) * layers)] * saves)
        for saves, layers in ((1, 1), (900, 1), (5, 1), (0, 1), (901, 1))
    ]

    assert list(rooms(views, 640_000).values()) == [0, 1, 5, 360, 360]
    assert sum(rooms([*views, *views[:3]] * 100, 640_000).values()) < 2_000


# -- the file ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small made-up store."""
    path = tmp_path_factory.mktemp("small") / "store"
    build(path, History(run="sft", saves=2, layers=4))
    return path


def test_an_older_report_is_replaced(small: Path, tmp_path: Path) -> None:
    """By the same name, in one rename, with nothing left beside it; its folder has to be there."""
    out = tmp_path / "folder" / "report.html"
    with layerstore.open(small) as store:
        with pytest.raises(InvalidInput, match="there is no folder"):
            store.report(out)
        out.parent.mkdir()
        store.report(out)
        first = out.read_bytes()
        out.write_bytes(BEGINS + b"older")
        store.report(out)

    assert first.startswith(BEGINS)
    assert out.read_bytes().startswith(BEGINS)
    assert len(out.read_bytes()) == pytest.approx(len(first), abs=10)
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]


def test_nothing_else_is_replaced(small: Path, tmp_path: Path) -> None:
    """Not even an empty file; a link is not followed, a folder not entered, and the store holds only the store."""
    for name, content in {
        "empty": b"",
        "mine": b"<!doctype html>\n<p>mine",
        "torn": BEGINS[:-5],
        "page": BEGINS,
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "link").symlink_to(tmp_path / "page")
    (tmp_path / "folder").mkdir()
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with layerstore.open(small) as store:
        for name in ("empty", "mine", "torn"):
            with pytest.raises(AlreadyExists, match="is not a report; nothing was changed"):
                store.report(tmp_path / name)
        for out, error in {
            tmp_path / "link": AlreadyExists,
            tmp_path / "folder": AlreadyExists,
            small / "report.html": InvalidInput,
            small / "objects" / "report.html": InvalidInput,
            small.parent: InvalidInput,
            tmp_path / "mine" / "report.html": InvalidInput,
            Path("a\0b"): InvalidInput,
        }.items():
            with pytest.raises(error):
                store.report(out)

    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert not list(small.glob("*.html"))


@pytest.mark.parametrize("step", ["create", "write", "fsync", "rename"])
def test_a_disk_that_refuses_leaves_the_older_one(small: Path, tmp_path: Path, step: str) -> None:
    """Whatever fails before the rename: what was there is whole, and nothing lies beside it."""
    out = tmp_path / "report.html"
    out.write_bytes(BEGINS + b"older")

    def refuse(operation: str, path: Path) -> None:
        if operation == step and path.name.startswith("report.html"):
            raise StorageIO("the disk is full", errno=28, filename=str(path))

    with layerstore.Store(small, hook=refuse) as store, pytest.raises(StorageIO):
        store.report(out)

    assert out.read_bytes() == BEGINS + b"older"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
