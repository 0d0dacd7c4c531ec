"""Promises of the page in a browser: it shows the facts, by mouse and by keyboard, in light, dark and print."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from tests.inspect.chromium import Browser, Page, opened, program
from tests.inspect.made_up import STARTED_NS, History, build
from tests.inspect.test_facts import logged
from tests.inspect.test_page import HOSTILE, HOSTILE_RUN
from tests.unit.checkpoints import Checkpoints

pytestmark = pytest.mark.skipif(program() is None, reason="no Chromium is installed (Debian: chromium)")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Return a made-up store with a run that drifted in two attempts, and one of full saves."""
    path = tmp_path_factory.mktemp("made-up") / "store"
    build(
        path,
        History(run="drift", saves=24, layers=12, policy="drift", goes_back=(16,), is_live=True),
        History(run="full", saves=9, layers=7),
    )
    with layerstore.open(path) as found:
        yield found


@pytest.fixture(scope="module")
def report(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page about that store."""
    out = tmp_path_factory.mktemp("page") / "report.html"
    store.report(out, keep=Keep(last=3, every=400))
    return out


def test_the_whole_curve_of_a_trainer_is_drawn(browser: Browser, store: Store, tmp_path: Path) -> None:
    """Through every step that it logged, in order, between the columns of its saves; a dot is where it was saved."""
    checkpoints = Checkpoints(tmp_path / "source", layout="hf")
    with layerstore.init(tmp_path / "store") as trained:
        for step in (20, 40):
            losses = {at: 4 - at / 20 for at in range(2, step + 1, 2)}
            trained.ingest(logged(checkpoints(step), losses), run="sft")
        trained.report(tmp_path / "report.html")

    with opened(browser, tmp_path / "report.html") as page:
        line = page.look("document.querySelector('#metric path.curve').getAttribute('d')")
        dots = page.look("document.querySelector('#metric path.point').getAttribute('d')")
        assert page.said() == []
    places = [tuple(map(float, place)) for place in re.findall(r"[ML]([0-9.]+) ([0-9.]+)", line)]
    assert len(places) == 20
    assert places == sorted(places)
    assert line.count("M") == 1
    assert dots.count("M") == 2


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    """Return a tab that shows the page; at the end it has complained of nothing and asked for nothing."""
    with opened(browser, report) as found:
        yield found
        assert found.said() == []


# Long enough for what was asked to be drawn.
SETTLED = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 60))))"


def middle_of(page: Page, column: int, layer: int) -> tuple[float, float]:
    """Return where the cell of a save and a layer is in the window, found by its label and the picked band."""
    box = page.look(
        f"""(() => {{
            const heat = document.getElementById("heat");
            heat.scrollIntoView({{block: "start"}});
            const svg = heat.querySelector("svg"), box = svg.getBoundingClientRect();
            const label = svg.querySelectorAll("text title")[{layer}].parentNode;
            const blocks = svg.querySelector("path.c0").getAttribute("d").matchAll(/M([0-9.]+) /g);
            const starts = [...new Set([...blocks].map((found) => Number(found[1])))].sort((a, b) => a - b);
            return {{x: box.left, y: box.top, row: Number(label.getAttribute("y")) - 3.5, starts}};
        }})()"""
    )
    return box["x"] + box["starts"][column] + 4, box["y"] + box["row"]


def cells_of(page: Page) -> list[list[str]]:
    """Return the table of the picked composite."""
    found: list[list[str]] = page.look(
        "[...document.querySelectorAll('#composite tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    return found


def commands_of(page: Page) -> list[str]:
    """Return the commands of what was picked."""
    found: list[str] = page.look("[...document.querySelectorAll('#commands pre')].map((line) => line.innerText)")
    return found


def test_it_loads_and_shows_the_figures(page: Page, store: Store) -> None:
    """Commits and runs as stats count them; the newest step of the longest run is picked; every section is there."""
    assert page.look("document.title").startswith("layerstore report: ")
    assert f"{store.stats().commits}\ncommits of 2 runs" in page.text("#figures")
    assert page.text("#picked-summary").startswith("drift@")
    assert [heading for heading in page.text("main").splitlines() if heading in {"Runs", "Drift", "Retention"}] == [
        "Runs",
        "Drift",
        "Retention",
    ]
    assert page.look("document.querySelectorAll('svg').length") > 5
    # Thousands of cells are a few elements.
    assert page.look("document.querySelectorAll('#heat svg path').length") <= 7


def test_hovering_says_what_is_below_the_pointer(page: Page, store: Store) -> None:
    """The layer, the step, the save that the version is from, and its age; gone when the pointer leaves."""
    entry = sorted(store.log("drift"), key=lambda each: (each.attempt, each.step))[5]
    shown = store.show(f"drift~1@{entry.step}" if entry.attempt == 1 and entry.step > 600 else f"drift@{entry.step}")
    line = shown.layers[3]

    page.mouse("mouseMoved", *middle_of(page, 5, 3))
    tip = page.text("#tip")

    assert tip.splitlines()[0] == line.layer
    assert f"@{entry.step}" in tip.splitlines()[1]
    assert f"step {line.step}," in tip
    assert f"version {line.version[:8]}" in tip
    page.mouse("mouseMoved", 2, 2)
    assert page.look("document.getElementById('tip').hidden") is True


def test_clicking_picks_a_step_and_shows_its_composite(page: Page, store: Store) -> None:
    """Layer by layer what compose would take, with the commands that show and write it."""
    page.click(*middle_of(page, 7, 2))
    reference = page.text("#picked-summary strong")
    composite = store.compose(reference)
    rows = cells_of(page)

    assert reference != store.report()["runs"][0]["saves"]["reference"][-1]
    assert [row[0] for row in rows] == list(composite.layers)
    assert [row[1] for row in rows] == [f"step {layer.step:,}, attempt 1" for layer in composite.layers.values()]
    assert [(row[3], row[4]) for row in rows] == [
        (f"{age.steps:,}", f"{age.saves:,}") for age in composite.staleness.layers
    ]
    assert [row[5] for row in rows] == [layer.version[:8] for layer in composite.layers.values()]
    assert commands_of(page) == [
        f"layerstore show --store {store.path} {reference}",
        f"layerstore compose --store {store.path} {reference} -o resume",
    ]
    assert page.look("document.querySelector('#composite tr.at td').innerText") == list(composite.layers)[2]


def test_the_keyboard_reaches_everything(page: Page) -> None:
    """Tab goes from control to control; arrows, Home and End choose the step, and a screen reader is told."""
    reached = []
    for _ in range(12):
        page.press("Tab")
        reached.append(page.look("document.activeElement.id || document.activeElement.textContent"))
        if reached[-1] == "heat":
            break
    assert [name for name in reached if name != "policy"] == ["theme", "runs", "drift", "full", "run", "heat"]

    def now() -> tuple[int, int, str]:
        heat = "document.getElementById('heat')"
        names = ("valuenow", "valuemax")
        told = [int(page.look(f"{heat}.getAttribute('aria-{name}')")) for name in names]
        return (told[0], told[1], page.look(f"{heat}.getAttribute('aria-valuetext')"))

    assert now()[:2] == (24, 24)
    page.press("ArrowLeft")
    assert now()[0] == 23
    assert page.text("#picked-summary").startswith(now()[2].split(",")[0])
    page.press("Home")
    assert now() == (1, 24, now()[2])
    assert "all layers from this step" in now()[2]
    page.press("PageDown")
    page.press("ArrowDown")
    page.press("ArrowDown")
    assert now()[0] == 6
    assert "model.layers.0" in page.text("#live")
    page.press("End")
    assert now()[0] == 24
    assert page.look("getComputedStyle(document.getElementById('heat')).outlineStyle") != "none"


def test_another_run_and_another_policy(page: Page, store: Store) -> None:
    """Of full saves the page tells what parity would take, as compose does."""
    page.choose("#run", "1")
    page.choose("#policy", "parity")
    composite = store.compose("full", policy="parity")

    assert page.text("#picked-summary").startswith(f"full@{composite.step} by parity: ")
    assert [row[1] for row in cells_of(page)] == [f"step {layer.step}" for layer in composite.layers.values()]
    assert "--policy parity" in page.text("#commands")
    assert page.look("document.getElementById('drift-section').hidden") is True
    assert page.look("document.getElementById('timing-section').hidden") is True


def test_light_and_dark_follow_the_system_and_the_button(page: Page) -> None:
    """Text can be read in both: dark on light, light on dark, with more than enough contrast."""

    def colours() -> tuple[float, float]:
        found = page.look("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
        return _luminance(found[0]), _luminance(found[1])

    page.emulate(prefers_color_scheme="light")
    ink, paper = colours()
    assert (paper + 0.05) / (ink + 0.05) > 7
    page.emulate(prefers_color_scheme="dark")
    ink, paper = colours()
    assert (ink + 0.05) / (paper + 0.05) > 7
    for expected in ("light", "dark", "system"):
        page.look("document.getElementById('theme').click()")
        assert page.text("#theme") == f"Theme: {expected}"
    page.look("document.getElementById('theme').click()")
    ink, paper = colours()
    assert paper > ink  # chosen by hand, though the system is dark


def _luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colour_is_not_the_only_signal(page: Page) -> None:
    """Every age has a height of its own in the picture, and its words in the legend."""
    heights: dict[str, list[float]] = page.look(
        """Object.fromEntries([...document.querySelectorAll("#heat svg path")].map((path) =>
            [path.getAttribute("class"), [...new Set([...path.getAttribute("d").matchAll(/v([0-9.]+)h/g)]
                .map((found) => Number(found[1])))]]))"""
    )

    assert all(len(found) == 1 for found in heights.values())
    assert len({found[0] for found in heights.values()}) == len(heights) >= 4
    assert "saved at this step" in page.text("#legend")


def test_it_opens_on_the_run_with_the_most_commits(browser: Browser, tmp_path: Path) -> None:
    """Not on the first by name, nor on the newest; of equal ones on the newest. The list keeps its order."""
    runs = {"a-retry": (1, 9), "b-old": (4, 1), "c-main": (4, 5), "d-test": (2, 7)}
    histories = [
        History(run=name, saves=saves, layers=4, has_objects=False, started_ns=STARTED_NS + hours * 3600 * 10**9)
        for name, (saves, hours) in runs.items()
    ]
    build(tmp_path / "store", *histories)
    with layerstore.open(tmp_path / "store") as store:
        store.report(tmp_path / "report.html")
    with opened(browser, tmp_path / "report.html") as page:
        assert page.text("#picked-summary").startswith("c-main@200 ")
        assert page.look("[...document.getElementById('run').options].map((each) => each.innerText)") == list(runs)
        assert page.look("document.querySelector('#runs tr.at td').innerText") == "c-main"
        assert page.said() == []


def test_what_a_collection_would_do(browser: Browser, tmp_path: Path) -> None:
    """Afterwards nothing more would go."""
    build(tmp_path / "store", History(run="full", saves=9, layers=4))
    with layerstore.open(tmp_path / "store") as store:
        store.report(tmp_path / "before.html", keep=Keep(last=2))
        store.gc(Keep(last=2), grace_seconds=0)
        store.report(tmp_path / "after.html", keep=Keep(last=2))
    with opened(browser, tmp_path / "before.html") as page:
        before = page.text("#retention-section")
    with opened(browser, tmp_path / "after.html") as page:
        after = page.text("#retention-section")
        assert page.said() == []

    assert "would remove 7 commits and keep 2." in before
    assert "would remove no commit: all 2 stay. It would free nothing." in after


def test_narrow_and_wide_windows(page: Page) -> None:
    """The page itself never scrolls sideways; pictures are drawn anew, and what was picked stays."""
    page.press("Tab")
    before = page.text("#picked-summary")
    for width in (360, 800, 1900):
        page.resize(width, 800)
        page.look(SETTLED)
        assert page.look("document.documentElement.scrollWidth") <= width
        assert page.look("document.querySelector('#heat svg').getBoundingClientRect().width") > 300 or width == 360
    assert page.text("#picked-summary") == before


def test_it_is_printed(page: Page) -> None:
    """As a PDF of a few pages, in light colours, with the whole table and without the controls."""
    page.emulate(prefers_color_scheme="dark")
    printed = page.printed()
    page.call("Emulation.setEmulatedMedia", media="print")

    assert printed.startswith(b"%PDF-")
    assert 2 <= len(re.findall(rb"/Type /Page\b", printed)) <= 8
    assert page.look("getComputedStyle(document.getElementById('theme')).display") == "none"
    assert page.look("getComputedStyle(document.getElementById('composite')).maxHeight") == "none"


@pytest.mark.fault(71)
def test_names_stay_text_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    """Nothing of a hostile store runs, becomes an element or asks for anything; all of it can be read."""
    path = tmp_path / "st'o\"re <i>&"
    build(path, History(run=HOSTILE_RUN, saves=3, names=[name for name in HOSTILE if name != "\ud800"]))
    with layerstore.open(path) as store:
        store.pin("<u>'\"&", f"{HOSTILE_RUN}@50")
        store.report(tmp_path / "report.html", keep=Keep(last=1))
    with opened(browser, tmp_path / "report.html") as page:
        assert page.look("typeof window.hurt") == "undefined"
        assert page.look("document.querySelectorAll('img, i, u, b[onclick], body script + svg').length") == 0
        assert page.look("document.querySelectorAll('script').length") == 2
        rows = [row[0] for row in cells_of(page)]
        page.mouse("mouseMoved", *middle_of(page, 1, 1))
        assert page.text("#tip").splitlines()[0] == HOSTILE[1]
        page.press("Tab")
        commands = page.text("#commands")
        assert page.said() == []

    assert rows[0] == HOSTILE[0]
    assert rows[5] == "a\\u{2028}b\\u{2029}c\\u{202e}d\\u{1b}[2Je\\u{0}f"
    assert "日本語 🙂 ﷽" in rows
    assert "'<b onclick=alert(1)>'\\''\"&{{FACTS}}@150'" in commands


def test_the_policy_stops_what_got_in_all_the_same(browser: Browser, report: Path, tmp_path: Path) -> None:
    """A script that somebody adds to the file does not run, and an image is not asked for."""
    hurt = tmp_path / "hurt.html"
    added = b"<script>window.hurt = 1</script><img src=https://example.invalid/x.png onerror='window.hurt = 2'></body>"
    hurt.write_bytes(report.read_bytes().replace(b"</body>", added))
    with opened(browser, hurt) as page:
        assert page.look("typeof window.hurt") == "undefined"
        assert page.text("#picked-summary").startswith("drift@")
        complaints = page.said()

    assert any("Content Security Policy" in complaint for complaint in complaints)


@pytest.mark.parametrize(
    ("histories", "text"),
    [
        ([], "No commits yet; next: layerstore ingest CHECKPOINT"),
        (
            [History(run="one", saves=1, names=["head"])],
            "one@50 as it was saved: 1 of 1 layer from this very step.",
        ),
    ],
    ids=["empty", "one save of one layer"],
)
def test_next_to_nothing_is_shown_too(browser: Browser, tmp_path: Path, histories: list[History], text: str) -> None:
    """An empty store says what comes next; a single save is a picture."""
    build(tmp_path / "store", *histories)
    with layerstore.open(tmp_path / "store") as store:
        store.report(tmp_path / "report.html")
    with opened(browser, tmp_path / "report.html") as page:
        assert page.said() == []
        assert text in page.text("body")


def test_compact_cells_are_fainter_and_exact_saves_are_marked(browser: Browser, tmp_path: Path) -> None:
    """With a line in the legend, and the precision of a cell in words; a run without compact saves has none of it."""
    with layerstore.init(tmp_path / "store") as store:
        Checkpoints(tmp_path / "compact").into(store, 1, 2, 3, 4, precision="delta8", exact_every=3)
        Checkpoints(tmp_path / "exact").into(store, 1, 2, run="plain")
        store.report(tmp_path / "report.html")
        layers = len(store.ls("r"))
    with opened(browser, tmp_path / "report.html", fragment="#run=r&step=4") as page:
        drawn = {
            name: page.look(f"document.querySelector('#heat {name}').getAttribute('d')").count("M")
            for name in (".c0:not(.compact)", ".c0.compact", ".keyframe")
        }
        legend, tips = page.text("#legend"), []
        (x, y), width = middle_of(page, 0, 1), page.look("document.querySelector('#heat .band').width.baseVal.value")
        for column in (0, 1):
            page.mouse("mouseMoved", x + column * width, y)
            tips.append(page.text("#tip").splitlines()[5])
        opacity = float(page.look("getComputedStyle(document.querySelector('#heat .compact')).fillOpacity"))
        assert "exact, bit for bit" in page.text("#picked-facts")
        assert not any("--exact" in command for command in commands_of(page))
        page.click(x + width, y)
        assert "delta8; compose --exact takes the newest exact save" in page.text("#picked-facts")
        assert commands_of(page)[-1].endswith(" r@2 --exact -o exact")
        page.choose("#run", "0")
        assert page.text("#legend") + "\nmarked: an exact save; fainter: in fewer bytes" == legend
        assert page.look("document.querySelectorAll('svg .compact, svg .keyframe').length") == 0
        assert page.said() == []

    assert drawn == {".c0:not(.compact)": 2 * layers, ".c0.compact": 2 * layers, ".keyframe": 2}
    assert tips == ["precision exact", "precision delta8"]
    assert 0.3 < opacity < 0.6


def test_pins_of_dropped_commits_are_shown_alone(browser: Browser, tmp_path: Path) -> None:
    """Without a commit there is no picture, but there are pins, and a note."""
    build(tmp_path / "store", History(run="one", saves=2, layers=4))
    with layerstore.open(tmp_path / "store") as store:
        store.pin("kept", "one@50")
        store.drop("one@50")
        store.drop("one@100")
        store.report(tmp_path / "report.html")
    with opened(browser, tmp_path / "report.html") as page:
        assert page.said() == []
        assert page.text("#notes") == "Every commit was dropped; 1 pin remains."
        assert "kept" in page.text("#pins")
        assert page.text("main").startswith("Pins")
        assert "Layers and steps" not in page.text("main")


def test_a_damaged_store_says_so(browser: Browser, tmp_path: Path) -> None:
    """What could not be read is named, and what a collection would refuse, in words."""
    build(tmp_path / "store", History(run="hurt", saves=3, layers=4, has_objects=False))
    with layerstore.open(tmp_path / "store") as store:
        [*_, name] = store.repo.records.names("hurt")
        store.repo.layout.record(name.run, name.step, name.id).write_bytes(b"x")
        store.report(tmp_path / "report.html", keep=Keep(last=1))
    with opened(browser, tmp_path / "report.html") as page:
        text = page.text("body")
        assert page.said() == []

    assert "What could not be read is in no figure:" in text
    assert f"hurt@{name.step}" in text.partition("What could not be read")[2].partition("Layers and steps")[0]
    assert "A collection by these rules would refuse: " in text
