"""The fields that ``--json`` prints are those in the table of the command line's page, in the row of its command."""

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from layerstore.cli.app import main
from layerstore.cli.commands import COMMANDS
from tests.docs.pages import DOCS
from tests.docs.scene import BUCKET, scene_at

PAGE = (DOCS / "reference" / "cli.md").read_text()
TABLE = PAGE.partition("## For programs")[2].partition("On failure the last line")[0]

# Each row of the table, and commands that print its fields, in the order in which one scene is taken through them.
ROWS = {
    "`ingest`, one checkpoint": ["ingest out/checkpoint-1250 --run sft"],
    "`ingest`, several": ["ingest out/checkpoint-100 out/checkpoint-200 --run sft"],
    "`ingest --all`, `--watch`": ["ingest --all out --run sft"],
    "`log`": ["log", "log --timing", "log --metric eval_loss", "log --dropped"],
    "`show`": ["show sft@200", "show mixed"],
    "`ls`": ["ls sft@200"],
    "`compose`": ["compose sft@200 -o a", "compose sft --policy parity --dry-run", "compose --mean last:2 --dry-run"],
    "`compose --format hf`, `dcp`, `universal`": [
        "compose sft@200 --format hf -o b",
        "compose sft@100 --format hf -o base",
        "compose sft@200 --format dcp -o d",
        "compose sft@200 --format universal -o u",
    ],
    "`compose --since`": ["compose sft@200 --format hf --since sft@100 -o delta"],
    "`apply`": ["apply delta base"],
    "`diff`": ["diff sft@100 sft@200 --stat", "diff sft@100 sft@200 model.layers.0"],
    "`stats`": ["stats", "stats sft"],
    "`report`": ["report -o report.html --keep-last 1"],
    "`bisect`": ["bisect --json sft@100 sft@1200 -- python judge.py {}"],
    "`bisect log`": ["bisect log"],
    "`pin NAME REF`": ["pin other sft@100"],
    "`pin --list`": ["pin --list"],
    "`pin --delete`": ["pin --delete other"],
    "`drop`": ["drop sft@1100 --dry-run", "drop sft@1100"],
    "`undrop`": ["undrop sft@1100"],
    "`drop`, several, or `--run`": ["drop --run sft --dry-run", "drop sft@1100 sft@1200"],
    "`undrop`, several, or `--run`": ["undrop sft@1100 sft@1200"],
    "`gc`": ["gc --keep-last 1 --dry-run"],
    "`verify`": ["verify", "verify sft@200"],
    "`repair`": ["repair --dry-run"],
    "`reindex`": ["reindex"],
    "`migrate`": ["migrate --list"],
    "`doctor`": ["doctor"],
    "`--version`": ["--version"],
    "`init`": ["init other"],
    "`push`": ["push"],
    "`pull`": ["pull"],
    "`clone`": ["clone {bucket} copy"],
    "`remote add`, `remote remove`": ["remote add other {bucket}", "remote remove other"],
    "`remote list`": ["remote list"],
    "`runs`": ["runs"],
    "`estimate`": [
        "estimate --params 8B --layers 32 --disk 40TB",
        "estimate out/checkpoint-200 --step-seconds 6",
        "estimate sft@200 --price 0.023,2.50",
    ],
}
# Rows that speak of another one's fields.
AS_ABOVE = {
    "`ingest`, several": "`ingest`, one checkpoint",
    "`ingest --all`, `--watch`": "`ingest`, one checkpoint",
    "`compose --format hf`, `dcp`, `universal`": "`compose`",
    "`compose --since`": "`compose`",
    "`pin --list`": "`pin NAME REF`",
    "`drop`, several, or `--run`": "`drop`",
    "`undrop`, several, or `--run`": "`undrop`",
    "`bisect log`": "`bisect`",
}
# Fields whose value is a mapping from names of a user's: they are data.
MAPPINGS = {"layers", "whole", "versions", "bytes", "kinds", "policy_parameters", "metrics", "curves"} | {
    "parameters",
    "optimizer_steps",
    *("states", "totals"),
}

# Words in a row that are not field, or one that only damage, a live save or another option brings.
SELDOM = {
    "`ingest`, one checkpoint": "store trust",
    "`ingest`, several": "store trust",
    "`ingest --all`, `--watch`": "code hint kind message path store trust",
    "`log`": "blocked_seconds copied_bytes damaged durable_seconds queued reason visible_seconds written_bytes "
    "metric name value",
    "`runs`": "name value",
    "`show`": "kind name relative_greatest relative_rms size state value",
    "`ls`": "kind relative_greatest relative_rms size state",
    "`bisect log`": "layers layers_from sentence skipped",
    "`compose`": "count name",
    "`compose --format hf`, `dcp`, `universal`": "count dry_run mean name pin stage weight world_size",
    "`compose --since`": "count dry_run mean name pin stage weight world_size",
    "`diff`": "kind stat state",
    "`report`": "blocked durable given_up max median visible",
    "`pin --list`": "damaged reason",
    "`drop`": "given_up",
    "`verify`": "commit costs everything id kind layers needed_by path reason run stands",
    "`repair`": "bytes commit everything from gc json kind layers or path pin reason reference store",
    "`migrate`": "backup bytes dry_run files found list path unfinished",
    "`doctor`": "name version",
    "`push`": "follow",
    "`estimate`": "checkpoint commit config params",
}


def documented(row: str) -> set[str]:
    """Return the fields that the table has for *row*."""
    match = re.search(rf"(?m)^\| {re.escape(row)} \| (.*) \|$", TABLE)
    assert match is not None, f"there is no row of {row}"
    own = {name for code in re.findall(r"`([^`]+)`", match[1]) for name in re.findall(r"[a-z0-9_]+", code)}
    own |= set(re.findall(r"\*([a-z_]+)\*", match[1]))
    return own | documented(AS_ABOVE[row]) if row in AS_ABOVE else own


def printed(value: object) -> Iterator[str]:
    """Yield the names of all fields in *value*, at any depth, but not those that are a user's."""
    if isinstance(value, list):
        for each in value:
            yield from printed(each)
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            is_mapping = key in MAPPINGS and isinstance(each, dict)
            yield from printed(list(each.values()) if is_mapping else each)


@pytest.mark.full
def test_the_fields_are_the_documented_ones(furnished: Path, disk_path: Path) -> None:
    """A program's author finds on the page whatever a program may see, and a program sees whatever is on the page."""
    wrong: dict[str, set[str]] = {}
    with scene_at(disk_path / "scene", furnished, with_store=True) as scene, contextlib.chdir(scene.root):
        bucket = f"file://{scene.root}{BUCKET}/sft"
        for row, lines in ROWS.items():
            seen = set(SELDOM.get(row, "").split())
            for line in lines:
                told = io.StringIO()
                with contextlib.redirect_stdout(told), contextlib.redirect_stderr(io.StringIO()):
                    assert main([*line.format("{}", bucket=bucket).split(), "--json"]) == 0, line
                fields = json.loads(told.getvalue().splitlines()[-1])
                assert fields.pop("schema") == 1
                assert fields, line
                seen |= set(printed(fields))
            wrong[row] = seen ^ documented(row)

    assert {row: fields for row, fields in wrong.items() if fields} == {}


def test_every_row_is_tried() -> None:
    """A command that comes to the table comes to this test, but for what needs damage first, or trains."""
    rows = set(re.findall(r"(?m)^\| (`[^|]*?) \|", TABLE))

    assert rows - ROWS.keys() == {"`demo`"}
    assert ROWS.keys() <= rows


def test_every_command_has_a_row() -> None:
    """A command's author writes down its fields: all commands have ``--json``."""
    assert set(COMMANDS) == set(re.findall(r"(?m)^\| `([a-z]+)", TABLE))
