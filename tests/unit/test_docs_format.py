"""What the reference pages say is what the code does: the worked example runs, and tables agree with it."""

import ast
import dataclasses
import re
import struct
from pathlib import Path
from typing import Any, cast

import pytest

from layerstore import limits, model
from layerstore.dtypes import DTYPES
from layerstore.format import records, store_json
from layerstore.layout import Layout
from layerstore.storage import index
from layerstore.store import init
from layerstore.zero3.pt import read_pt
from tests.deepspeed.scenarios import HUGGING_FACE_SCENARIO_OF, SCENARIO_OF
from tests.generated import generate
from tests.zero3.ptfiles import held

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FORMAT = (DOCS / "reference" / "format.md").read_text()
SUPPORT = (DOCS / "reference" / "support.md").read_text()

ELSEWHERE = {"Commit", "OwnVersion", "Slice", "FlatContent", "FragmentContent", "BufferContent"}
"""Never on disk by themselves: the page tells of them otherwise, or not at all."""
ON_DISK = [cls for name, cls in vars(model).items() if dataclasses.is_dataclass(cls) and name not in ELSEWHERE]


# -- the format page -----------------------------------------------------------------------------------------------


def test_the_worked_example_reads_a_fresh_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own code, which knows nothing of layerstore, finds the numbers that were ingested."""
    monkeypatch.chdir(tmp_path)
    source = generate(tmp_path / "tiny", step=2)
    with init(tmp_path / "store") as store:
        store.ingest(source, run="tiny")
    (code,) = re.findall(r"```python\n(.*?)```", FORMAT, flags=re.DOTALL)
    found: dict[str, object] = {}

    assert "layerstore" not in code.replace("# ", "")
    exec(code, found)

    tree: Any = read_pt(next(source.glob("*/*_rank_0_*optim_states.pt"))).tree
    assert found["name"] == "model.embed_tokens.weight"
    masters = cast("tuple[float, ...]", found["masters"])
    assert len(masters) == 64 * 64 // 2
    flat = tree["optimizer_state_dict"]["fp32_flat_groups"][0]
    assert held(flat.storage)[: 4 * len(masters)] == struct.pack(f"<{len(masters)}f", *masters)
    assert cast("list[str]", found["keys"])[0] == "module"


@pytest.mark.parametrize("cls", ON_DISK, ids=lambda cls: cls.__name__)
def test_every_field_on_disk_is_in_its_table(cls: type) -> None:
    """Each map's table lists exactly the fields that the code writes, in the code's order; no map was forgotten."""
    match = re.search(rf"^\*\*{cls.__name__}\*\*\n\n((?:\|.*\n)+)", FORMAT, flags=re.MULTILINE)
    assert match is not None, f"there is no table of {cls.__name__}"

    assert [field.name for field in dataclasses.fields(cls)] == re.findall(r"^\| `(\w+)` \|", match[1], re.MULTILINE)


def test_element_types_are_in_their_table() -> None:
    """The page knows each element type and its size."""
    listed = {(code, int(size)) for code, size in re.findall(r"`([A-Z][A-Z0-9_]+)` \| (\d)", FORMAT)}

    assert {(row.code, row.bytes) for row in DTYPES} == listed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("more than 32768 bytes that is not a layer", limits.INLINE_BYTES_MAX == 32768),
        ("The grace age is 5 minutes", limits.GC_GRACE_SECONDS == 5 * 60),
        ("in which nothing was done for a day", limits.GC_UNFINISHED_GRACE_SECONDS == 24 * 3600),
        ("of every 16 MiB of the file", limits.VERIFY_CHUNK_BYTES == 16 << 20),
        ("is the smallest multiple of 4096", limits.PAGE_BYTES == 4096),
        ("MUST NOT have more than 64 MiB", limits.RECORD_BYTES_MAX == 64 << 20),
        ("fields; at most 256 MiB", limits.BLOB_BYTES_MAX == 256 << 20),
        ("in `trash/` that are younger than 7 days", limits.TRASH_SECONDS == 7 * 24 * 3600),
        ("have 1 to 200 bytes of UTF-8", limits.NAME_BYTES_MAX == 200),
    ],
)
def test_numbers_on_the_page_are_the_codes(text: str, value: bool) -> None:
    """Sizes and bounds that the page states are those in force."""
    assert text in FORMAT
    assert value


@pytest.mark.parametrize(
    ("pattern", "number"),
    [
        (r"# The store format, version (\d+)", store_json.FORMAT),
        (r"\b[Ff]ormat (\d+)", store_json.FORMAT),
        (r"\| `format` \| integer \| (\d+)\.", store_json.FORMAT),
        (r"MUST look at `format` first, and MUST stop, having changed nothing, if it is not (\d+)", store_json.FORMAT),
        (r"`format` in `store.json` is not (\d+)", store_json.FORMAT),
        (r"schema, big-endian: (\d+)", records.SCHEMA),
        (r"the envelope \| its schema is not (\d+)", records.SCHEMA),
        (r'`\{"format": (\d+), "schema": \d+, "store": STORE_ID\}`', store_json.FORMAT),
        (r'`\{"format": \d+, "schema": (\d+), "store": STORE_ID\}`', index.SCHEMA),
    ],
)
def test_versions_on_the_page_are_the_codes(pattern: str, number: int) -> None:
    """The page describes the format and the schemas that are written; older ones stand in its last section alone."""
    found = re.findall(pattern, FORMAT.partition("## 14. Changes")[0])

    assert set(map(int, found)) == {number}


def test_the_last_change_is_the_format() -> None:
    """The table of changes ends with the format that is written."""
    rows = re.findall(r"^\| (\d+) \| [\d.]+ \|", FORMAT.partition("## 14. Changes")[2], re.MULTILINE)

    assert list(map(int, rows)) == list(range(1, store_json.FORMAT + 1))


def test_the_layout_is_the_codes() -> None:
    """The page's tree has every file and folder of a store and no other, and knows which ones ``init`` makes."""
    layout = Layout(Path("STORE"))
    ours = {layout.name(place) for place in vars(layout).values() if isinstance(place, Path)} - {"."}
    (tree,) = re.findall(r"```text\nSTORE/\n(.*?)```", FORMAT, flags=re.DOTALL)
    listed = re.findall(r"^  (\S+)", tree, flags=re.MULTILINE)
    (made,) = re.findall(r"`init` makes `(.*?)`", FORMAT)

    assert {path.partition("/")[0] for path in listed} == {place.partition("/")[0] for place in ours}
    assert "gc/aside/ID" in listed
    assert made.split() == [layout.name(folder) for folder in layout.folders]


# -- the support page ----------------------------------------------------------------------------------------------


def test_every_real_scenario_is_in_the_support_table() -> None:
    """What the page calls real was trained for real, and all of that is on the page."""
    scenarios = SCENARIO_OF.keys() | HUGGING_FACE_SCENARIO_OF.keys()
    named = {
        name
        for line in SUPPORT.splitlines()
        if "**real**" in line and line.startswith("|")
        for name in re.findall(r"`(\w+)`", line.partition("**real**")[2])
    }

    assert named <= scenarios
    assert scenarios - {"lightning"} == named - {"lightning"}


def test_words_of_refusals_are_the_codes() -> None:
    """Each refusal that the page quotes stands in a message of the library."""
    messages = "\n".join(
        node.value
        for path in (ROOT / "layerstore").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    quoted = {words for row in _refusals() for words in row}

    assert len(quoted) > 20
    assert sorted(words for words in quoted if words not in messages) == []


def _refusals() -> list[list[str]]:
    """Return what each row of the tables of refusals quotes in its last but one, or last, column."""
    settings = re.findall(r"^\| .*? \| refused \| (.*?) \|", SUPPORT, re.MULTILINE)
    states = SUPPORT.partition("## Checkpoints that are not whole")[2].partition("In all these cases")[0]
    states_words = re.findall(r"^\| .*? \| (`.*?`) \|$", states, re.MULTILINE)
    return [re.findall(r"`(.*?)`", cell) for cell in settings + states_words]
