"""What a user asks of ``attach``, ``resume`` and ``save``: settings, run names, and the files of a save."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import layerstore
from layerstore import Store
from layerstore.errors import Conflict, InvalidInput
from layerstore.filenames import TRAINER_STATE
from layerstore.live.engine import Engine, Memory, NotPlain
from layerstore.live.resuming import check_run
from layerstore.live.saver.options import SaverOptions
from layerstore.live.saver.request import SaveFiles, SaveRequest, read_request
from tests.generated import generate


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a store with a run and a pin."""
    with layerstore.init(tmp_path / "store") as made:
        made.ingest(generate(tmp_path / "c", layers=1, hidden=8, vocab=8, step=2), run="sft", pin="best")
        yield made


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("mode", "synchronous", "choose one of: 'async', 'sync'"),
        ("on_pressure", "drop", "choose one of: 'wait', 'skip', 'degrade'"),
        ("frozen", "never", "choose one of: 'once', 'exclude'"),
        ("durable", "there", "choose one of: 'local', 'remote'"),
    ],
)
def test_a_mistyped_setting_is_refused(name: str, value: object, hint: str) -> None:
    """The hint lists the choices."""
    assert SaverOptions().mode == "async"

    with pytest.raises(InvalidInput, match=f"the option {name} cannot be {value!r}") as caught:
        SaverOptions(**cast(Any, {name: value}))

    assert hint in str(caught.value.hint)


def test_a_save_is_durable_there_only_if_it_is_pushed() -> None:
    """Nobody should wait for what never comes."""
    with pytest.raises(InvalidInput, match="push is not set"):
        SaverOptions(durable="remote")


ASKED: dict[str, Any] = {
    "engine_keys": frozenset({"module"}),
    "run": "sft",
    "tag": "t",
    "step": 7,
    "client_state": None,
    "extra_files": None,
    "pin": None,
}


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"step": "7"}, InvalidInput, "step= is '7', not a whole number"),
        ({"step": -1}, InvalidInput, "step= is -1; steps are counted from 0, and have at most 18 digits"),
        ({"step": 2**63}, InvalidInput, "step= is 9223372036854775808; steps"),
        ({"extra_files": {"a": None}}, TypeError, "os.PathLike object"),
        ({"extra_files": {5: "a"}}, TypeError, "os.PathLike object"),
        ({"extra_files": [("a", "b")]}, InvalidInput, "extra_files is a list, not a mapping of names to paths"),
        ({"extra_files": {"../tokenizer.json": "a"}}, InvalidInput, "which is not below the checkpoint's folder"),
        ({"pin": 7}, InvalidInput, "pin= is 7, not a name"),
        ({"client_state": ["epoch"]}, NotPlain, "client_state is a list, not a dictionary"),
        ({"client_state": {"module": 1}}, InvalidInput, "client_state has the key 'module'"),
        ({"metrics": [2.5]}, InvalidInput, "metrics= is a list, not a mapping of names to numbers"),
        ({"metrics": {"loss": "low"}}, InvalidInput, "metrics= has 'loss': 'low', which is not a number"),
        ({"metrics": {"loss": [1, 2]}}, InvalidInput, "metrics= has 'loss': [1, 2], which is not a number"),
        ({"metrics": {"n": 10**400}}, InvalidInput, "which is not a number"),
    ],
)
def test_what_cannot_be_saved_is_refused(
    store: Store, asked: dict[str, Any], error: type[Exception], words: str
) -> None:
    """In words for the user; steps may be numbers of any kind that counts."""
    with pytest.raises(error, match=re.escape(words)):
        read_request(store.repo, **ASKED | asked)

    found = read_request(store.repo, **ASKED | {"step": np.int64(7), "extra_files": {"a/b": "c"}, "pin": "new"})
    assert (found.step, found.files, found.pin) == (7, {"a/b": Path("c")}, "new")


def test_metrics_become_plain_numbers_of_client_state(store: Store) -> None:
    """Whatever counts as one number; the mapping that the user gave stays as it is."""
    given = {"epoch": 1, "metrics": {"loss": 9.0}}
    metrics = {"loss": np.float32(2.5), "score": np.asarray(1.0), "tokens": 7}

    found = read_request(store.repo, **ASKED | {"client_state": given, "metrics": metrics})

    assert found.client_state == {"epoch": 1, "metrics": {"loss": 2.5, "score": 1.0, "tokens": 7.0}}
    assert {type(value) for value in found.client_state["metrics"].values()} == {float}  # type: ignore[attr-defined]
    assert given == {"epoch": 1, "metrics": {"loss": 9.0}}


@pytest.mark.parametrize(
    ("run", "error", "words"),
    [
        ("sft@12", InvalidInput, "'sft@12' is not a run but a reference"),
        ("best", Conflict, "'best' is a pin"),
        ("a/b", InvalidInput, "the run's name 'a/b'"),
    ],
)
def test_a_run_is_no_reference(store: Store, run: str, error: type[Exception], words: str) -> None:
    """Otherwise an engine would silently begin from nothing."""
    with pytest.raises(error, match=words):
        check_run(store, run)

    for name in ("sft", "new"):
        check_run(store, name)


def test_a_traceback_shows_the_hint(store: Store) -> None:
    """Python prints the notes of an exception, and not its attributes."""
    with pytest.raises(InvalidInput) as caught:
        check_run(store, "sft@12")

    assert caught.value.__notes__ == [f"hint: {caught.value.hint}"]


TAG = "global_step7"


def files_in(folder: Path) -> SaveFiles:
    """Return the files of a save of one rank, to which more may come."""
    engine = cast(Engine, SimpleNamespace(rank=0, world_size=1, scripts=[]))
    request = SaveRequest(step=7, client_state={}, folder=folder, tag=TAG, is_complete=False)
    return SaveFiles(engine, Memory("model"), request)


@pytest.mark.parametrize("is_trainers", [True, False])
def test_a_folder_is_what_it_was_when_training_went_on(tmp_path: Path, *, is_trainers: bool) -> None:
    """The layout is read once, when training continues, not earlier or later."""
    folder = tmp_path / "checkpoint-7"
    (folder / TAG).mkdir(parents=True)
    files = files_in(folder)
    if is_trainers:
        (folder / TRAINER_STATE).write_text("{}")

    files.seal()
    shutil.rmtree(folder)
    if not is_trainers:
        folder.mkdir()
        (folder / TRAINER_STATE).write_text("{}")

    layout = files.layout(layer_pattern=None, is_dcp=False)
    assert (layout.flavour, layout.tag) == ("hf" if is_trainers else "raw", TAG)
    assert {file.name for file in files.wait()} == {"rng_state.pth", *([TRAINER_STATE] if is_trainers else [])}
