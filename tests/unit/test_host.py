"""Other versions of libraries, other machines, no assertions, odd paths: refused with the reason, or all the same."""

import errno
import json
import os
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore.errors import LayerstoreError, StorageIO, Unsupported
from layerstore.host import NEEDS, check_host
from tests.generated import generate

ROOT = Path(__file__).parents[2]


def run(code: str, *arguments: object, options: tuple[str, ...] = (), before: Path | None = None) -> str:
    """Run *code* in a new interpreter, in which modules in *before* come first; return what it prints."""
    paths = os.pathsep.join([*([str(before)] if before else []), *(path for path in sys.path if path)])
    done = subprocess.run(
        [sys.executable, *options, "-c", code, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- libraries and machines ----------------------------------------------------------------------------------------


def test_the_ranges_are_those_of_the_installer() -> None:
    """What is refused here is what pip would not install."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pinned = {
        name: (least, beyond) for line in wanted for name, least, beyond in re.findall(r"^(\w+)>=(.*),<(.*)", line)
    }

    for library, (least, beyond) in NEEDS.items():
        assert pinned[library] == (".".join(map(str, least)), ".".join(map(str, beyond)))


@pytest.mark.fault(87)
def test_a_library_of_another_version_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """A real process, to which another version is told, exits with the documented code."""
    told = tmp_path / "xxhash-5.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: xxhash\nVersion: 5.0\n")
    code = "import sys\nfrom layerstore.cli.app import main\nprint(main(['init', sys.argv[1], '--json']))"

    assert run(code, tmp_path / "store", before=tmp_path) == "16\n"
    assert not (tmp_path / "store").exists()


@pytest.mark.fault(87)
@pytest.mark.parametrize("library", NEEDS)
@pytest.mark.parametrize("version", ["0.9", "5.0rc1", "99.1.post1+local.2"])
def test_the_refusal_names_the_range(monkeypatch: pytest.MonkeyPatch, library: str, version: str) -> None:
    """What was found, what is needed, and what to type."""
    monkeypatch.setattr("layerstore.host.metadata.version", lambda name: version if name == library else _least(name))

    with pytest.raises(
        Unsupported, match=rf"^{library} is {re.escape(version)} here; layerstore needs {library}>="
    ) as caught:
        check_host.__wrapped__()
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(f'pip install "{library}>=')


def _least(name: str) -> str:
    return ".".join(map(str, NEEDS[name][0]))


@pytest.mark.fault(87)
def test_a_big_endian_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason: it would read every number wrong."""
    monkeypatch.setattr("sys.byteorder", "big")

    with pytest.raises(Unsupported, match="this machine is big-endian"):
        check_host.__wrapped__()


# -- without assertions --------------------------------------------------------------------------------------------

_WORK = """
import contextlib, io, json, re, shutil, sys
from pathlib import Path
from layerstore.cli.app import main
from tests.generated import generate
folder = Path(sys.argv[1])
source, store = folder / "sft", folder / "store"
for step in (2, 4):
    generate(source, layers=1, hidden=16, vocab=16, step=step)
told = []

def tell(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*map(str, words), "--store", str(store)])
    said = re.sub("store-id [0-9a-f]{32}", "store-id ID", err.getvalue().replace(str(folder), ""))
    told.append([words[0], code, said])

def hurt(path, change):
    data = path.read_bytes()
    path.write_bytes(change(data))
    yield
    path.write_bytes(data)

def flip(data):
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]

def cut(data):
    return data[:-9]

tell("init")
tell("ingest", source / "global_step2", "--pin", "best")
tell("ingest", source / "global_step4")
for change in (flip, cut):
    for pattern in ("store.json", "commits/*/2.*", "pins/*", "objects/*/*"):
        for _ in hurt(sorted(store.glob(pattern))[0], change):
            tell("show", "best")
            tell("verify", "--read-data")
            tell("compose", "sft@2", "-o", folder / "x")
            shutil.rmtree(folder / "x", ignore_errors=True)
    for _ in hurt(sorted((source / "global_step4").iterdir())[0], change):
        tell("ingest", source / "global_step4", "--run", "other")
for line in ("show a@b@c", "show sft@3", "pin -x sft", "pin a/b sft", "compose -o IN", "gc --keep-last -1",
             "ingest none", "drop best", "migrate"):
    tell(*line.replace("IN", str(store / "in")).split())
print(json.dumps({"debug": __debug__, "told": told}))
"""


def test_without_assertions_all_is_the_same(tmp_path: Path) -> None:
    """
    ``python -O`` takes assertions away: damage, wrong use and hostile sources are refused as ever, in the same words.

    Ids of stores differ, so they are no part of what is compared.
    """

    def told(*options: str) -> dict[str, Any]:
        folder = tmp_path / f"with{''.join(options)}"
        folder.mkdir()
        found: dict[str, Any] = json.loads(run(_WORK, folder, options=options).splitlines()[-1])
        return found

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(told), pool.submit(told, "-O")
        plain, optimised = first.result(), second.result()

    assert (plain["debug"], optimised["debug"]) == (True, False)
    assert plain["told"] == optimised["told"]
    codes = [code for _, code, _ in plain["told"]]
    assert {0, 2, 13, 20, 21} <= set(codes)
    assert codes[:3] == [0, 0, 0]
    assert 1 not in codes, "no fault of our own"


# -- odd paths -----------------------------------------------------------------------------------------------------


def test_a_store_may_have_a_long_and_odd_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of bytes, spaces, newlines and quotes in it: everything works, also from a relative path."""
    source = generate(tmp_path / "sft", layers=1, hidden=16, vocab=16)
    folder = tmp_path
    while len(os.fsencode(folder)) < 3500:
        folder /= "odd \n'\"\\ ü" + "x" * 180
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)

    with layerstore.init("store") as store:
        monkeypatch.chdir("/")
        store.ingest(source, pin="best")
        store.compose("best").write(tmp_path / "out")
        assert store.verify(read_data=True).ok
        assert store.reindex() == 1
        assert store.path == folder / "store"
    with layerstore.open(folder / "store") as store:
        assert [entry.step for entry in store.log()] == [2]


def test_a_path_that_is_too_long_is_told(tmp_path: Path) -> None:
    """Longer than the system takes: an error with the number, and nothing that cannot be removed again."""
    folder = tmp_path
    while len(os.fsencode(folder)) < 4200:
        folder /= "x" * 200

    with pytest.raises(LayerstoreError) as caught:
        layerstore.init(folder)
    assert isinstance(caught.value, StorageIO)
    assert caught.value.errno == errno.ENAMETOOLONG
