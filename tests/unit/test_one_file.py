"""What is added to the project is a file of its own, and a name in one list; everything else finds it there."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.generated import generate
from tests.unit.test_architecture import ROOT

POLICY = '''
"""``tides``: everything at every n-th save."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from layerstore.arguments import check_fields
from layerstore.policy.due import Save
from layerstore.setting import Setting
from layerstore.tree import Tree


@dataclass(frozen=True, slots=True)
class Tides:
    """Everything at every n-th save, and one layer between."""

    every: Annotated[int, Setting("saves from flood to flood", metavar="N")] = 3
    """Saves from one full save to the next."""
    ebb: Annotated[Literal["top", "bottom"], Setting("the layer between")] = "top"
    """Which layer is due between."""

    name = "tides"
    composed = "everything from the last flood"
    by_number: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def parameters(self) -> dict[Tree, Tree]:
        """Its settings."""
        return {"every": self.every, "ebb": self.ebb}

    def due(self, save: Save) -> frozenset[str]:
        """Return everything at flood."""
        between = save.layers[-1:] if self.ebb == "top" else save.layers[:1]
        return frozenset(between if save.number % self.every else save.layers)
'''

COMMAND = '''
"""``layerstore greet``: say hello to a run."""

from typing import Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath
from layerstore.cli.render import print_line

ABOUT = About("Look", store="anywhere", answers=True, elsewhere=("salute",))


def greet(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Whom.")],
    *,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Say hello to a run.
    """
    print_line(f"hello {run}")
'''

FORMAT = '''
"""``census``: how many layers there are."""

import time
from dataclasses import dataclass
from typing import Annotated, ClassVar

from layerstore.arguments import check_fields
from layerstore.formats.format import FilesFormat
from layerstore.setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Census(FilesFormat):
    """In a file of one line."""

    name: ClassVar[str] = "census"
    about: ClassVar[str] = "how many layers there are"

    unit: Annotated[str, Setting("what is counted", metavar="WORD")] = "layers"

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, repo, composition):
        """Return its only file."""
        from layerstore.assemble import ExportPlan, literal_file

        text = f"{len(composition.layers)} {self.unit}"
        return ExportPlan(
            composition=composition,
            format=self.name,
            dtype="mixed",
            files=(literal_file("census.txt", text.encode()),),
            notes=(),
            seconds=0.0,
            signs=("census.txt",),
            is_older_form=lambda path: path.name == "census.txt",
            loading="read {folder}",
        )
'''

Said = Callable[..., str]


def listed(path: Path, name: str, *, behind: str) -> None:
    """Write *name* into the list in the file *path*, *behind* another one."""
    text = path.read_text()
    assert text.count(behind) == 1
    path.write_text(text.replace(behind, behind + name))


@pytest.fixture(scope="module")
def say(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Return the command line of a copy of the project with one more of each, where there is a run."""
    root, folder = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("run")
    library = Path(shutil.copytree(ROOT / "layerstore", root / "layerstore"))  # with its two links as folders
    (library / "policy" / "tides.py").write_text(POLICY)
    registry = library / "policy" / "registry.py"
    listed(registry, "\nfrom layerstore.policy.tides import Tides", behind="import settings_of")
    listed(registry, ", Tides", behind="Filter, Drift")
    (library / "cli" / "greet.py").write_text(COMMAND)
    listed(library / "cli" / "commands.py", ', "greet"', behind='"bisect"')
    (library / "formats" / "census.py").write_text(FORMAT)
    formats = library / "formats" / "__init__.py"
    listed(
        formats, "\nfrom layerstore.formats.census import Census", behind="from layerstore.errors import InvalidInput"
    )
    listed(formats, ", Census", behind="Universal, Delta")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("LAYERSTORE_")}

    def said(*words: object, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "layerstore.cli", *map(str, words)],
            cwd=folder,
            env=plain | {"PYTHONPATH": str(root)} | more,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    said("init")
    steps = [
        generate(folder / "sft" / f"checkpoint-{step}", layers=4, hidden=8, vocab=8, step=step) for step in (1, 2, 3)
    ]
    said("ingest", *steps)
    return said


def completed(say: Said, line: str) -> list[str]:
    """Return what the shell offers for *line*."""
    words = line.split(" ")
    asked = {"_LAYERSTORE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return say(**asked).split()


def test_a_policy_is_one_file_and_one_name(say: Said) -> None:
    """Its options are in the help, it composes, is estimated and completed, and reported without being asked."""
    wanted = say("compose", "--policy", "tides:every=2,ebb=bottom", "--dry-run", "--json")
    composed = json.loads(wanted.splitlines()[-1])
    estimated = json.loads(say("estimate", "--params", "1B", "--layers", "4", "--json"))
    report = json.loads(say("report", "--json").splitlines()[-1])
    compose, ingest = (" ".join(say(command, "--help").split()) for command in ("compose", "ingest"))

    assert "; tides: everything from the last flood. [default: latest]" in compose
    assert "full, parity, filter, drift, tides, filter:every=10" in ingest
    for text in (compose, ingest):
        assert "tides: the layer between. [default: top]" in text
        assert "filter: a turn at every Nth save. [default: 5] tides: saves from flood to flood. [default: 3]" in text
    assert (composed["policy"], composed["parameters"]) == ("tides", {"every": 2, "ebb": "bottom"})
    assert [line["policy"] for line in estimated["lines"][2:]] == ["full", "parity", "filter", "tides"]
    assert completed(say, "layerstore ingest --ebb ") == ["top", "bottom"]
    assert "tides" in report["runs"][0]["what_if"]
    assert "tides" in report["runs"][0]["composites"]
    assert "ebb is 'x', but must be 'top' or 'bottom'" in say("compose", "--policy", "tides:ebb=x", "--dry-run")
    assert "every is 'x', but must be a whole number" in say("compose", "--policy", "tides:every=x", "--dry-run")


def test_a_command_is_one_file_and_one_name(say: Said) -> None:
    """It stands in its section of the help, is completed and suggested, and answers even if told to be quiet."""
    look = say("--help").partition("Look:")[2].partition("Restore:")[0]

    assert look.rstrip().splitlines()[-1].split() == ["greet", "Say", "hello", "to", "a", "run."]
    assert completed(say, "layerstore gre") == ["greet"]
    assert say("greet", "sft", "--quiet") == "hello sft\n"
    assert "did you mean greet?" in say("salute")


def test_an_output_format_is_one_file_and_one_name(say: Said, tmp_path: Path) -> None:
    """It is in the help with its option, completed, planned and written; other formats do not have its option."""
    out = tmp_path / "out"
    help_text = " ".join(say("compose", "--help").split())
    planned = json.loads(say("compose", "--format", "census", "--dry-run", "--json").splitlines()[-1])
    written = say("compose", "--format", "census", "--unit", "of them", "-o", out)

    assert "shards|zero3|hf|dcp|universal|delta|census" in help_text
    assert "census: how many layers there are" in help_text
    assert "--unit WORD census: what is counted. [default: layers]" in help_text
    assert completed(say, "layerstore compose --format ce") == ["census"]
    assert (planned["format"], planned["files"]) == ("census", ["census.txt"])
    assert (out / "census.txt").read_text().endswith(" of them")
    assert f'read "{out}"' in " ".join(written.split())
    assert "format hf has no option unit" in say("compose", "--format", "hf", "--unit", "x", "-o", tmp_path / "hf")
