"""The report, clicked through: what-ifs, pins, comparisons, links and copies, on a wide screen and on a phone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.publish import make_pin
from tests.inspect.chromium import Browser, Page, opened, program
from tests.inspect.made_up import History, build
from tests.inspect.test_browser import cells_of, commands_of, middle_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(program() is None, reason="no Chromium is installed (Debian: chromium)"),
]

WIDE, PHONE = 1440, 390
ALL = [(WIDE, "light"), (WIDE, "dark"), (PHONE, "light"), (PHONE, "dark")]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Return a store with a run of two attempts, one of full saves and a short one, and two pins, one of a mixture."""
    path = tmp_path_factory.mktemp("made-up") / "store"
    build(
        path,
        History(
            run="drift",
            saves=24,
            layers=12,
            policy="drift",
            goes_back=(16,),
            is_live=True,
            metrics=("loss", "eval_loss"),
        ),
        History(run="full", saves=9, layers=7),
        History(run="short", saves=3, layers=4),
    )
    with layerstore.open(path) as found:
        found.pin("best", "full@100")
        make_pin(found.repo, "mixed", found.compose("full@300", policy="filter").composition.as_resolved())
        yield found


@pytest.fixture(scope="module")
def report(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page about that store."""
    out = tmp_path_factory.mktemp("page") / "report.html"
    store.report(out, keep=Keep(last=3))
    return out


@pytest.fixture(params=[(WIDE, "light"), (PHONE, "dark")], ids=str)
def page(browser: Browser, report: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Return a tab of some width and colour; at the end it has complained of nothing and asked for nothing."""
    width, colours = request.param
    with opened(browser, report, fragment="#run=full&step=450", width=width) as found:
        found.emulate(prefers_color_scheme=colours)
        yield found
        assert found.said() == []


def hash_of(page: Page) -> str:
    """Return the fragment of the page's address."""
    return str(page.look("location.hash"))


def facts_of(page: Page) -> dict[str, str]:
    """Return the facts about what was picked."""
    found: dict[str, str] = page.look(
        "Object.fromEntries([...document.querySelectorAll('#picked-facts dt')]"
        ".map((term) => [term.innerText, term.nextSibling.innerText]))"
    )
    return found


def drawn(page: Page, selector: str) -> str:
    """Return the outline of a shape."""
    return str(page.look(f"document.querySelector({json.dumps(selector)}).getAttribute('d')"))


def shown_size(size_bytes: int) -> str:
    """Return a size as the page writes it."""
    return f"{size_bytes / 1000:.1f}\N{NO-BREAK SPACE}kB"


def test_a_what_if_changes_bytes_and_pictures(page: Page, store: Store) -> None:
    """The sum, the save alone, and the charts of storage; as saved again, all is as before."""
    found = store.report(run="full")["runs"][0]["what_if"]["filter"]
    before = {name: drawn(page, f"#{name} path.unique") for name in ("storage", "added")}
    assert page.look("document.getElementById('what-if').hidden") is True

    page.choose("#policy", "filter")

    said, facts = page.text("#what-if"), facts_of(page)
    assert f"of this run: {shown_size(found['total_bytes'][-1])}, instead of " in said
    assert "This is exact" in said
    assert facts["what if"].startswith(f"{shown_size(found['bytes'][-1])} new to the run")
    assert all(drawn(page, f"#{name} path.unique") != drawing for name, drawing in before.items())
    page.choose("#policy", "latest")
    assert {name: drawn(page, f"#{name} path.unique") for name in before} == before
    page.choose("#run", "0")
    page.choose("#policy", "parity")
    assert "are an estimate" in page.text("#what-if")


def test_a_mixture_is_told_in_the_words_of_the_command_line(page: Page, store: Store) -> None:
    """By a policy, and by what was saved; a whole save is none."""
    assert page.look("document.getElementById('mixture').hidden") is True
    page.choose("#policy", "parity")
    assert page.text("#mixture") == store.compose("full", policy="parity").composition.mixture
    page.choose("#policy", "latest")
    page.choose("#run", "0")
    assert page.text("#mixture") == store.compose("drift").composition.mixture


def test_what_was_measured_is_a_strip_above_the_layers(page: Page, store: Store) -> None:
    """A point above the middle of each column that has one; another curve from the list; none without metrics."""
    assert page.look("document.getElementById('metric').hidden") is True
    page.choose("#run", "0")
    [run] = store.report(run="drift")["runs"]
    starts = """(id, style, shift) => [...document.querySelector(`#${id} path.${style}`).getAttribute("d")
        .matchAll(/M([0-9.]+) /g)].map((found) => Number(found[1]) + shift)"""
    points, first = page.look(f"(({starts})('metric', 'point', 0))"), drawn(page, "#metric path.curve")
    stored = page.look(f"[({starts})('storage', 'unique', 0), document.querySelector('.band').getAttribute('width')]")
    middles = [left + float(stored[1]) / 2 for left in stored[0]]

    measured = [value for value in run["metrics"]["loss"] if value is not None]
    assert len(points) == len(measured) < len(middles) == 24
    has_point = [value is not None for value in run["metrics"]["loss"]]
    centres = [middle for middle, is_there in zip(middles, has_point, strict=True) if is_there]
    radius = [centre - point for centre, point in zip(centres, points, strict=True)]
    assert max(radius) - min(radius) < 0.05
    assert 1 <= radius[0] <= 3.1
    assert facts_of(page)["measured"].startswith(f"loss {run['metrics']['loss'][-1]:.4g}")
    page.choose("#metric-name", "eval_loss")
    assert drawn(page, "#metric path.curve") != first
    assert "eval_loss" in page.text("#metric")


def test_pins_are_opened(page: Page, store: Store) -> None:
    """A mixture with each layer's origin, version and size, and the words about it; a commit with its save's."""
    composite = store.compose("mixed")

    page.click_on("#pins button", text="mixed")

    rows = cells_of(page)
    assert page.text("#picked-title") == "Picked pin"
    assert page.text("#pins tr.at").startswith("mixed")
    assert page.text("#picked-summary") == "mixed pins a composite of 7 layers on top of full@300."
    assert page.text("#mixture") == composite.composition.mixture
    assert [row[0] for row in rows] == list(composite.layers)
    assert [row[1] for row in rows] == [f"step {layer.step}" for layer in composite.layers.values()]
    assert [(row[3], row[4]) for row in rows] == [
        (str(age.steps), str(age.saves)) for age in composite.staleness.layers
    ]
    assert [row[5] for row in rows] == [layer.version[:8] for layer in composite.layers.values()]
    assert [row[6] for row in rows] == [shown_size(sum(line.bytes_by_kind.values())) for line in store.ls("mixed")]
    assert commands_of(page)[1] == f"layerstore compose --store {store.path} mixed -o resume"
    assert hash_of(page) == "#run=full&pin=mixed"

    page.click_on("#pins button", text="best")
    assert page.text("#picked-summary") == "best pins full@100."
    assert [row[5] for row in cells_of(page)] == [line.version[:8] for line in store.show("full@100").layers]

    page.click(*middle_of(page, 3, 2))
    assert (page.text("#picked-title"), hash_of(page)) == ("Picked step", "#run=full&step=200")
    assert page.look("document.querySelectorAll('#pins tr.at').length") == 0


def test_only_a_key_that_moves_changes_the_address(page: Page) -> None:
    """Escape and Tab leave the link that was opened."""
    link = hash_of(page)
    page.look("location.hash = '#run=full&step=450&policy=latest'")
    page.look("document.getElementById('heat').focus()")
    for key in ("Escape", "Tab"):
        page.press(key)
    assert hash_of(page) == "#run=full&step=450&policy=latest" != link

    page.look("document.getElementById('heat').focus()")
    page.press("ArrowLeft")
    assert hash_of(page) == "#run=full&step=400"


def test_two_steps_are_compared(page: Page, store: Store) -> None:
    """By shift-click or from the list: which layers differ, and what both share, as diff has it."""
    page.choose("#run", "0")
    page.click(*middle_of(page, 16, 2))
    page.click(*middle_of(page, 19, 2), shift=True)
    picked = page.text("#picked-summary strong")
    other = page.text("#compared-summary strong:last-of-type")
    diff = store.diff(picked, other)
    rows: list[list[str]] = page.look(
        "[...document.querySelectorAll('#compared-layers tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.innerText))"
    )

    status: dict[str, str] = {"same": "same", "changed": "differs"}
    assert [row[:2] for row in rows] == [[layer.layer, status[layer.status]] for layer in diff.layers]
    assert {row[1] for row in rows} == {"same", "differs"}
    assert [row[2:5] for row in rows] == [
        [shown_size(layer.bytes_a), shown_size(layer.bytes_b), shown_size(layer.bytes_b) if layer.is_same else ""]
        for layer in diff.layers
    ]
    said = page.text("#compared-summary")
    assert f"{diff.count('changed')} of 12 layers differ. They share {shown_size(diff.bytes_same)}, in" in said
    command = page.text("#compared-commands pre")
    assert command == f"layerstore diff --store {store.path} {picked} {other} --stat"
    assert page.look("getComputedStyle(document.querySelector('#heat .compared')).visibility") == "visible"

    page.choose("#compare", "-1")
    assert page.look("document.getElementById('compared').hidden") is True


def test_distances_that_a_save_recorded_are_told(page: Page, store: Store) -> None:
    """Of a layer that the earlier one has as the save before the later has it; of no other."""
    page.choose("#run", "0")
    [run] = store.report(run="drift")["runs"]
    page.click(*middle_of(page, 4, 2))
    page.choose("#compare", "5")
    heads = page.look("[...document.querySelectorAll('#compared-layers th')].map((each) => each.innerText)")
    told = page.look("[...document.querySelectorAll('#compared-layers tbody tr')].map((row) => row.cells[5].innerText)")
    page.choose("#compare", "9")
    later = page.look(
        "[...document.querySelectorAll('#compared-layers tbody tr')].map((row) => row.cells[5].innerText)"
    )

    def expected(moved: Any) -> str:
        return str(moved) if isinstance(moved, str) else f"{float(f'{100 * moved:.3g}'):g}\N{NO-BREAK SPACE}%"

    assert heads[-1] == "Moved"
    assert told == [expected(moved) for moved in run["drift"][5]]
    kept = [run["versions"][4][8 * layer :][:8] == run["versions"][8][8 * layer :][:8] for layer in range(12)]
    assert later == [expected(moved) if is_kept else "" for moved, is_kept in zip(run["drift"][9], kept, strict=True)]
    assert 0 < sum(kept) < 12


def test_a_link_leads_back_to_what_was_picked(browser: Browser, report: Path, page: Page) -> None:
    """Run, step, attempt, policy and comparison; copied by a button, and followed when the page opens."""
    page.choose("#run", "0")
    page.click(*middle_of(page, 13, 2))
    page.choose("#policy", "filter")
    page.choose("#compare", "20")
    said = {name: page.text(name) for name in ("#picked-summary", "#compared-summary", "#what-if")}
    link = hash_of(page)

    assert link.startswith("#run=drift&step=700&attempt=1&policy=filter&compare=")
    with opened(browser, report, fragment=link) as again:
        assert {name: again.text(name) for name in said} == said
        assert again.look("document.getElementById('link-note').hidden") is True
        again.look("location.hash = '#run=full&step=100'")
        assert again.look("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 60)))") is None
        assert again.text("#picked-summary").startswith("full@100 ")
        assert again.said() == []


@pytest.mark.fault(71)
@pytest.mark.parametrize(
    ("fragment", "note"),
    [
        ("run=full&step=120", "Step 120 of the link is not shown here; the nearest before it is."),
        ("run=full&step=1", "Step 1 of the link is not shown here."),
        ("run=%3Cimg%20src=x%20onerror=alert(1)%3E", "does not show the run <img src=x onerror=alert(1)>, which"),
        ("run=full&step=%3Cb%3E%E2%80%AE&policy=__proto__", "Step <b>\\u{202e} of the link is not shown here."),
        ("pin=%00%3Ci%3E", "does not list the pin \\u{0}<i>, which the link names."),
    ],
)
def test_a_link_is_data(browser: Browser, report: Path, fragment: str, note: str) -> None:
    """One that names nothing here is told so, in text; the page is whole all the same."""
    with opened(browser, report, fragment=f"#{fragment}") as page:
        assert note in page.text("#link-note")
        assert page.look("document.querySelectorAll('img, i, #link-note b').length") == 0
        assert page.text("#picked-summary")
        page.choose("#policy", "parity")
        assert page.look("document.getElementById('link-note').hidden") is True
        assert page.said() == []


@pytest.mark.parametrize("has_clipboard", [True, False], ids=["clipboard", "file"])
def test_commands_and_links_are_copied(page: Page, has_clipboard: bool) -> None:
    """By the browser's clipboard, or where it keeps that from files, by a selection."""
    page.look(
        """(() => {
            window.copies = [];
            const clipboard = {writeText: (text) => { window.copies.push(text); return Promise.resolve(); }};
            const refused = {writeText: () => Promise.reject(new Error("not for files"))};
            Object.defineProperty(navigator, "clipboard", {value: HAS ? clipboard : refused});
            document.addEventListener("copy", () => window.copies.push(document.getSelection().toString()));
        })()""".replace("HAS", json.dumps(has_clipboard))
    )
    commands = commands_of(page)

    for selector in ("#commands .command:first-child button", "#commands .command:last-child button", "#copy-link"):
        page.click_on(selector)
        page.look("new Promise((done) => setTimeout(done, 50))")
        assert page.text(selector) == "Copied"

    copies = page.look("window.copies")
    assert copies[:2] == commands
    assert copies[2].endswith("/report.html#run=full&step=450")
    assert page.look("document.querySelectorAll('textarea').length") == 0
    assert page.text("#commands button") == "Copy"


@pytest.mark.parametrize("page", ALL, indirect=True, ids=str)
def test_no_number_is_broken_and_nothing_sticks_out(page: Page) -> None:
    """Of all text on the page, with everything open."""
    page.choose("#policy", "filter")
    page.choose("#compare", "2")
    page.look("document.getElementById('saves-details').open = true")
    for run in ("0", "1"):
        page.choose("#run", run)
        broken = page.look(
            r"""(() => {
                const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
                while (walker.nextNode()) {
                    const text = walker.currentNode;
                    if (text.parentNode.closest("script, style, svg, [hidden], .hidden-text")) continue;
                    for (const word of text.data.matchAll(/\S*\d\S*/g)) {
                        const range = document.createRange();
                        range.setStart(text, word.index);
                        range.setEnd(text, word.index + word[0].length);
                        const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
                        if (lines.size > 1) found.push(word[0]);
                    }
                }
                return found;
            })()"""
        )
        assert [word for word in broken if not word.startswith("/")] == []  # but for a path
        assert page.look("document.documentElement.scrollWidth <= innerWidth") is True


@pytest.mark.parametrize("page", ALL, indirect=True, ids=str)
def test_few_saves_fill_the_width(page: Page) -> None:
    """Three are as wide as the picture."""
    page.choose("#run", "2")
    widths = page.look(
        """(() => {
            const svg = document.querySelector("#heat svg"), shape = svg.querySelector("path.c0").getBBox();
            return [shape.x + shape.width, document.getElementById("heat").clientWidth];
        })()"""
    )

    assert widths[1] - 40 < widths[0] <= widths[1]
    assert page.look("document.querySelectorAll('#heat .axis').length") == 3
