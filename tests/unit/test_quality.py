"""The parts of the quality benchmark that need no training: texts, tokens, rows, intervals, the table."""

import math
import tomllib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import mean

import pytest

import layerstore
from layerstore.policy import Drift, Filter, Parity, Policy
from tests.bench.quality import corpus, precision_trial, real_model, run, table, tokenizer, trial
from tests.bench.quality.arms import FULL, NOISE, RARE, SELDOM, DriftByBudget, arms
from tests.bench.quality.data import texts_of
from tests.bench.quality.intervals import Interval, interval
from tests.bench.quality.job import movements
from tests.bench.quality.page import BEGIN
from tests.bench.quality.settings import REAL, TINY
from tests.bench.report import filled
from tests.bench.rows import Row, Rows
from tests.generated import generate

DOCS = Path(__file__).parents[2] / "docs"

FUNCTION = 'def {name}(side: int) -> int:\n    """Return {name}, with enough words to count.\n\n    More."""\n'


def packages(folder: Path) -> corpus.Files:
    """Return the files of 40 packages, each with the same function twice."""
    found: corpus.Files = []
    for number in range(40):
        path = folder / f"package{number}.py"
        path.write_text(FUNCTION.format(name=f"function_{number}") * 2)
        found.append((f"package{number}/functions.py", path))
    return found


def test_no_package_is_on_both_sides_of_the_split(tmp_path: Path) -> None:
    """Else a model would be asked for what it has read."""
    split = corpus.docstrings(packages(tmp_path), files_per_package=5, pairs_per_package=5)

    names = [{pair.docstring.split()[1] for pair in side} for side in (split.trained, split.held_out)]
    assert not names[0] & names[1]
    assert (len(names[0] | names[1]), 0 < len(names[1]) < 20) == (40, True)


def test_the_texts_do_not_depend_on_the_order_of_files(tmp_path: Path) -> None:
    """A package lists its files as it was built, and folders as their disk likes."""
    files = packages(tmp_path)

    def texts(files: corpus.Files) -> str:
        docstrings = corpus.docstrings(files, files_per_package=5, pairs_per_package=5)
        prose = corpus.documentation(files, size_bytes_max=10**6)
        return corpus.Texts(base=prose, documentation=prose, docstrings=docstrings).digest()

    assert texts(files) == texts(files[::-1]) != texts(files[1:])


def test_a_package_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line that says what to type; its texts would give rows that do not join."""
    corpus.check_pins()  # the environment of the tests has them all

    monkeypatch.setitem(corpus.PINS, "sympy", "0.7.6")
    with pytest.raises(SystemExit) as refused:
        corpus.check_pins()
    monkeypatch.setitem(corpus.PINS, "sympy-that-is-not-there", "1.0")
    monkeypatch.delitem(corpus.PINS, "sympy")
    with pytest.raises(SystemExit, match="not none"):
        corpus.check_pins()

    assert str(refused.value) == (
        f"the texts are those of sympy 0.7.6, not {version('sympy')}: pip install sympy==0.7.6"
    )


def test_the_pins_are_those_of_the_test_extra() -> None:
    """Who installs it can make the same texts, of the base and of both tasks."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

    assert {f"{name}=={of}" for name, of in corpus.PINS.items()} <= set(project["optional-dependencies"]["test"])
    assert {*corpus.SOURCES, *corpus.DOCUMENTED} < corpus.PINS.keys()
    assert not {*corpus.SOURCES} & {*corpus.DOCUMENTED}


@pytest.mark.full
def test_the_texts_are_the_same_on_every_machine() -> None:
    """Also under another Python: what they are is written down, and others are refused."""
    texts_of(TINY)

    with pytest.raises(SystemExit, match="not those of the pins: pip install"):
        texts_of(replace(TINY, base_bytes=TINY.base_bytes // 2))


@pytest.mark.parametrize(
    ("source", "signature"),
    [
        ("def area(\n    side,  # of a square\n    unit='#',\n):\n    ", "def area(side, unit='#'):"),
        ("def größe(seite='ä'): ", "def größe(seite='ä'):"),
        ("@cached\ndef area[side](", ""),
        ("class A:\n    def area(self, by: float=1.50) -> 'A':\n        ", "def area(self, by: float=1.50) -> 'A':"),
    ],
)
def test_a_signature_is_as_its_author_wrote_it(source: str, signature: str) -> None:
    """Python's own way to write one changes between versions."""
    found = [pair.signature for pair in corpus.pairs(source + '"""Return how large it is."""')]

    assert found == ([signature] if signature else [])


def test_a_pair_is_the_signature_and_the_first_paragraph() -> None:
    """Private functions count; those that cannot be parsed, and those without a docstring, do not."""
    source = FUNCTION.format(name="_area") + "def bare(side):\n    pass\n"

    found = list(corpus.pairs(source))

    assert [pair.signature for pair in found] == ["def _area(side: int) -> int:"]
    assert [pair.docstring for pair in found] == ["Return _area, with enough words to count."]
    assert list(corpus.pairs("def broken(:")) == []


def test_documentation_is_what_long_docstrings_say() -> None:
    """Without their margin, and without what is too short to be read by itself."""
    long = "word " * 100
    source = f'"""Short."""\nclass A:\n    """\n    {long}\n\n        indented\n    """\n'

    [found] = corpus.prose(source)

    assert found == f"{long.strip()}\n\n    indented"


def test_any_text_comes_back_from_its_tokens() -> None:
    """Also what the tokenizer has never seen: it knows all bytes."""
    spoken = tokenizer.trained(["def area(side):\n    return side * side\n"] * 3, vocabulary=300)

    for text in ("def area(side):", "\tLöwe ≠ 🦁\r\n", ""):
        assert text == spoken.decode(spoken.encode(text).ids)
    assert spoken.token_to_id("<end>") == tokenizer.END


def test_the_same_texts_give_the_same_tokenizer() -> None:
    """Or no second run would give the same numbers."""
    texts = [path.read_text() for path in sorted(Path(corpus.__file__).parent.glob("*.py"))]

    assert tokenizer.trained(texts, vocabulary=400).to_str() == tokenizer.trained(texts, vocabulary=400).to_str()


def test_an_interrupted_row_counts_as_not_written(tmp_path: Path) -> None:
    """What is appended afterwards is whole."""
    rows = Rows(tmp_path / "rows.jsonl")
    assert rows.find() == []
    rows.add({"kind": "save", "step": 5}, {"kind": "save", "step": 10})
    with rows.path.open("a") as file:
        file.write('{"kind": "trunk", "st')

    rows.add({"kind": "save", "step": 15})

    assert [row["step"] for row in rows.find(kind="save")] == [5, 10, 15]
    assert rows.find(kind="trunk") == []


@pytest.mark.parametrize(
    ("values", "half_width"),
    [([1.0], math.inf), ([0.0, 1.0], 3.157), ([1.0, 2.0, 3.0], 1.686), ([float(each) for each in range(40)], 3.041)],
)
def test_an_interval_is_that_of_student(values: list[float], half_width: float) -> None:
    """One value says nothing, and many are nearly normal."""
    found = interval(values)

    assert mean(values) == found.mean
    assert half_width == pytest.approx(found.half_width, rel=1e-3)


def test_the_rare_save_is_behind_by_what_it_did_not_save() -> None:
    """It takes the first opportunity, then one in so many; its work is that of the others."""
    assert [TINY.resumed_at(failure) for failure in TINY.failures] == [10, 20]
    assert [REAL.rare_base(failure) for failure in REAL.failures] == [5, 5]
    assert REAL.seldom_lost == 10  # two saves, on average, of one in five
    assert [REAL.equal_work(failure) for failure in REAL.failures] == [400 - 125, 400 - 260]


def test_drift_by_budget_has_no_turns() -> None:
    """Within its budget it takes what moved most, and waits for what does not fit."""
    from layerstore.policy import Save

    layers = tuple(f"model.layers.{number}" for number in range(4))
    moved = {layer: 0.1 * number for number, layer in enumerate(layers)}

    def due(budget: int, number: int) -> set[str]:
        sizes, ages = dict.fromkeys(layers, 100), dict.fromkeys(layers, 1)
        save = Save(number=number, layers=layers, ages=ages, movements=moved, sizes=sizes)
        return set(DriftByBudget(budget).due(save))

    assert [{layers[3]}] * 4 == [due(100, number) for number in range(1, 5)]
    assert {layers[3], layers[2]} == due(200, 1)
    assert set() == due(10, 1)


def test_a_control_that_differs_by_a_bit_is_reported() -> None:
    """Its loss may be the same all the same; and a job that is trained again is meant to give the same bits."""
    rows = Rows(run.COMMITTED / "docstrings-0.jsonl").find()
    resume = next(row for row in rows if row["kind"] == "resume" and row["arm"] == FULL)
    trunk = next(row for row in rows if row["kind"] == "trunk")

    same = list(table.lines(REAL, [*rows, trunk]))
    other = list(table.lines(REAL, [*rows, {**resume, "masters": "abd"}, {**trunk, "masters": "abd"}]))

    assert "whole jobs trained again from their seeds: 1, the same bits" in same
    assert "whole jobs trained again from their seeds: 1, OTHER BITS" in other
    assert any(line.startswith("control identical to the last bit: yes") for line in same)
    assert any(line.startswith("control identical to the last bit: NO") for line in other)


def test_the_control_saves_everything_and_measures_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far each layer moved since the save before is in its records."""
    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", str(tmp_path / "index"))
    control = next(arm for arm in arms(REAL) if arm.name == FULL)
    assert control.policy is not None
    with layerstore.init(tmp_path / "store") as store:
        for step in (1, 2):
            done = store.ingest(
                generate(tmp_path / f"{step}", hidden=8, vocab=16, step=step, seed=step),
                run=trial.RUN,
                policy=control.policy(1000),
            )
            moved = movements(store)

    assert done.layers == done.layers_saved
    assert done.layers == tuple(moved)
    assert min(moved.values()) > 0


def test_a_trial_asks_the_policies_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it finds over a history is what ingesting the history under the policy saves."""
    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", str(tmp_path / "index"))
    policies: dict[str, Policy] = {"parity": Parity(), "filter": Filter(), "drift": Drift(threshold=1.3, stalest=3)}
    settings = replace(TINY, steps=30)
    stores = {name: layerstore.init(tmp_path / name) for name in ("full", *policies)}
    for step in range(settings.save_every, settings.steps + 1, settings.save_every):
        source = generate(tmp_path / f"{step}", hidden=8, vocab=16, layers=4, step=step, seed=step)
        for name, store in stores.items():
            store.ingest(source, run=trial.RUN, policy=policies.get(name, "full"))

    history = trial.History(settings, tmp_path / "full")

    for name, policy in policies.items():
        *_, last = history.choices(policy)
        assert last == {line.layer: line.step for line in stores[name].ls(trial.RUN)}, name
    assert history.times_fewer(list(history.choices(Parity()))) == pytest.approx(2, rel=0.3)
    for store in stores.values():
        store.close()


def test_every_arm_has_a_name_of_its_own() -> None:
    """Rows are found by it."""
    names = [arm.name for arm in (*arms(REAL), *arms(TINY))]

    assert {FULL, NOISE, "moments8", "delta8", "delta4", "parity, delta8"} < set(names)
    assert not {RARE, SELDOM} & set(names)
    assert len(arms(REAL)) == len({arm.name for arm in arms(REAL)})


def test_the_page_and_its_pictures_are_those_of_the_committed_rows(tmp_path: Path) -> None:
    """Nobody has changed one without the others, by hand or by changing what writes them."""
    page = (DOCS / "evidence.md").read_text()
    (tmp_path / "evidence.md").write_text(filled(page, ["an older table"], begin=BEGIN))

    run.write_page(REAL, rows=run.COMMITTED, docs=tmp_path)

    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")}
    assert len(written) == 6
    assert {name for name in written if (DOCS / name).read_bytes() != (tmp_path / name).read_bytes()} == set()


def test_what_no_committed_row_shows_is_said_too() -> None:
    """Compact saves that are too large, a gain, and a single seed, of which nothing is certain."""
    rows = [row for path in run.COMMITTED.glob("*-0.jsonl") for row in Rows(path).find() if row["kind"] != "mean"]
    by_drift = f"drift, 1/{REAL.fewer}"

    def changed(row: Row) -> Row:
        if row["kind"] == "save" and row["arm"] == "delta4":
            return {**row, "bytes": 10 * row["bytes"]}
        return {**row, "loss": 0.0} if row["kind"] == "resume" and row["arm"] == by_drift else row

    text = "\n".join(table.lines(REAL, [changed(row) for row in rows]))

    assert "MISSED" in text
    assert "MISSED" not in "\n".join(table.lines(REAL, rows))
    assert f"{by_drift} is not told apart from full saves" in text
    assert Interval(mean=-0.03, half_width=0.01).verdict(0.01) == "outside"
    assert Interval(mean=-0.004, half_width=0.003).verdict(0.01) == "within"
    others = [{**row, "seed": seed} for row in rows for seed in (0, 1, 2)]
    assert f"{by_drift} beats full saves" in "\n".join(table.lines(REAL, [changed(row) for row in others]))
    assert real_model.table(rows) is precision_trial.table(rows) is None
