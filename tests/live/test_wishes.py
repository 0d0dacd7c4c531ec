"""What a user asks of ``attach`` and ``resume`` is what it says, or refused in one line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import Conflict, InvalidInput
from layerstore.live.resume import check_run
from layerstore.live.settings import Settings
from tests.generated import generate

USUAL: dict[str, Any] = {
    "mode": "async",
    "host_buffer": "auto",
    "on_pressure": "wait",
    "frozen": "once",
    "layer_pattern": None,
    "keep": Keep(last=3),
    "on_saved": None,
}


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
        ("keep", 3, "say layerstore.Keep(last=3)"),
    ],
)
def test_a_mistyped_setting_is_refused(name: str, value: object, hint: str) -> None:
    """What it would have meant nobody could tell."""
    assert Settings(**USUAL).mode == "async"

    with pytest.raises(InvalidInput, match=f"{name} is {value!r}") as caught:
        Settings(**USUAL | {name: value})

    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("run", "error", "words"),
    [
        ("sft@12", InvalidInput, "'sft@12' is no run but a reference"),
        ("sft~1", InvalidInput, "'sft~1' is no run but a reference"),
        ("best", Conflict, "'best' is a pin"),
        ("a/b", InvalidInput, "the run's name 'a/b'"),
    ],
)
def test_a_run_is_no_reference(store: Store, run: str, error: type[Exception], words: str) -> None:
    """Else an engine would begin from nothing, without a word."""
    with pytest.raises(error, match=words):
        check_run(store, run)

    for name in ("sft", "new"):
        check_run(store, name)


def test_a_traceback_shows_the_hint(store: Store) -> None:
    """In Python nobody prints it."""
    with pytest.raises(InvalidInput) as caught:
        check_run(store, "sft@12")

    assert caught.value.__notes__ == [f"hint: {caught.value.hint}"]
