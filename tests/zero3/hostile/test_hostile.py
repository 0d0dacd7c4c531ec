"""Hostile files are refused by name, run nothing, and cost next to nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from layerstore.errors import LayerstoreError, SourceCheckpoint, Unsupported
from layerstore.zero3.pt import read_pt
from tests.zero3.hostile import archives, pickles
from tests.zero3.hostile.archives import HOSTILE_ARCHIVES, torch_like
from tests.zero3.hostile.pickles import HOSTILE_PICKLES, SLOW_PICKLES, text

MEMORY_BYTES_MAX = 300 * 1024 * 1024


@pytest.mark.fault(57)
@pytest.mark.parametrize(
    "what",
    # The usual tier has two of the slow ones below, with their memory measured.
    [
        pytest.param(what, marks=[pytest.mark.exhaustive] * (HOSTILE_PICKLES[what] in SLOW_PICKLES))
        for what in HOSTILE_PICKLES
    ],
)
@pytest.mark.sample(20)
def test_a_hostile_pickle_is_refused_and_never_run(tmp_path: Path, what: str) -> None:
    """Whatever the pickle tries, the error names the file, and the canary stays dead."""
    path, canary = tmp_path / "hostile.pt", tmp_path / "canary"
    path.write_bytes(torch_like(HOSTILE_PICKLES[what](canary)))

    with pytest.raises(LayerstoreError) as caught:
        read_pt(path)

    assert isinstance(caught.value, SourceCheckpoint | Unsupported)
    assert str(path) in str(caught.value)
    assert not canary.exists()


def test_a_real_unpickler_wakes_the_canary(tmp_path: Path) -> None:
    """The plainest hostile pickle does run under Python's own unpickler."""
    canary = tmp_path / "canary"
    (tmp_path / "payload").write_bytes(pickles.system_call(canary))
    run = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"

    subprocess.run([sys.executable, "-c", run, str(tmp_path / "payload")], check=True)

    assert canary.exists()


@pytest.mark.fault(59)
@pytest.mark.parametrize("what", HOSTILE_ARCHIVES)
def test_a_hostile_archive_is_refused(tmp_path: Path, what: str) -> None:
    """Whatever the archive pretends, it is refused before any of its records is believed."""
    path = tmp_path / "hostile.pt"
    path.write_bytes(HOSTILE_ARCHIVES[what]())

    with pytest.raises(SourceCheckpoint) as caught:
        read_pt(path)

    assert str(path) in str(caught.value)


@pytest.mark.fault(57, 58)
def test_all_unknown_globals_are_named_at_once_with_their_places(tmp_path: Path) -> None:
    """One error lists every unknown name, where it occurs, and the flag that would keep it."""
    path = tmp_path / "hostile.pt"
    callback = text("callback") + b"cacme.hooks\nCallback\n)\x81"
    system = text("state") + b"](cos\nsystem\n" + text("true") + b"\x85Re"
    path.write_bytes(torch_like(b"\x80\x02}(" + text("client") + b"}(" + callback + system + b"uu."))

    with pytest.raises(SourceCheckpoint) as caught:
        read_pt(path)

    error = caught.value
    assert error.facts["reason"] == "untrusted"
    assert error.facts["names"] == ("acme.hooks.Callback", "os.system")
    assert "acme.hooks.Callback (at client.callback), os.system (at client.state[0])" in error.message
    assert error.hint is not None
    assert "--allow-global acme.hooks.Callback --allow-global os.system" in error.hint


@pytest.mark.full
@pytest.mark.fault(59)
def test_no_bomb_explodes(tmp_path: Path) -> None:
    """Each of the files that promise too much is refused within a few hundred megabytes of memory."""
    for make in (
        pickles.too_many_opcodes,
        pickles.too_many_objects,
        pickles.repeated_parts,
        pickles.deep_key,
    ):
        (tmp_path / f"{make.__name__}.pt").write_bytes(torch_like(make(tmp_path / "canary")))
    for make_archive in (archives.deflate_bomb, archives.million_entries):
        (tmp_path / f"{make_archive.__name__}.pt").write_bytes(make_archive())
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    read = (
        "import pathlib, sys\n"
        "from layerstore.errors import SourceCheckpoint\n"
        "from layerstore.zero3.pt import read_pt\n"
        "try:\n"
        "    read_pt(pathlib.Path(sys.argv[1]))\n"
        "except SourceCheckpoint:\n"
        "    status = pathlib.Path('/proc/self/status').read_text()\n"
        "    print(status.split('VmHWM:')[1].split()[0])\n"
    )

    for path in tmp_path.glob("*.pt"):
        command = [sys.executable, "-c", read, str(path)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)

        assert int(done.stdout) * 1024 < MEMORY_BYTES_MAX, path.name
