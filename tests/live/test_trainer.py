"""What the Trainer's callback refuses when it is made, before a model and its data are set up."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import layerstore
from layerstore import Keep
from layerstore.errors import AlreadyExists, Conflict, InvalidInput, NoStore, NotFound
from tests.generated import generate


def callback(store: Any, **settings: Any) -> object:
    """Return a new callback."""
    from layerstore.transformers import LayerstoreCallback  # here: every process would import Transformers

    return LayerstoreCallback(store, **settings)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with a run and a pin."""
    with layerstore.init(tmp_path / "store") as made:
        made.ingest(generate(tmp_path / "c", layers=1, hidden=8, vocab=8, step=2), run="sft", pin="best")
    return tmp_path / "store"


@pytest.mark.fault(146)
@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"evry": 3}, InvalidInput, "LayerstoreCallback: got an unexpected keyword argument 'evry'"),
        ({"on_presure": "skip"}, InvalidInput, "'on_presure'"),
        ({"every": "3"}, InvalidInput, "every is '3'"),
        ({"every": -1}, InvalidInput, "every cannot be -1"),
        ({"policy": "partiy"}, InvalidInput, "unknown policy 'partiy'"),
        ({"policy": "filter:evry=3"}, InvalidInput, "policy 'filter' has no setting 'evry'"),
        ({"mode": "synchronous"}, InvalidInput, "mode cannot be 'synchronous'"),
        ({"host_buffer": "8 GBX"}, InvalidInput, "8 GBX"),
        ({"host_buffer": None}, InvalidInput, "host_buffer is None"),
        ({"create": "no"}, InvalidInput, "create is 'no'"),
        ({"push": 5}, InvalidInput, "push is 5"),
        ({"push": "nosuch"}, NotFound, "this store has no remote"),
        ({"layer_pattern": 4}, InvalidInput, "layer_pattern is 4"),
        ({"layer_pattern": "("}, InvalidInput, r"\("),
        ({"keep": 3}, InvalidInput, "keep is 3"),
        ({"on_saved": 3}, InvalidInput, "on_saved is 3"),
        ({"on_failed": "print"}, InvalidInput, "on_failed is 'print'"),
        ({"run": "a/b"}, InvalidInput, "a/b"),
        ({"run": "sft@3"}, InvalidInput, "'sft@3' is not a run but a reference"),
        ({"run": "best"}, Conflict, "'best' is a pin"),
    ],
)
def test_a_callback_is_checked_when_it_is_made(
    settings: dict[str, Any], error: type[Exception], words: str, store: Path
) -> None:
    """Every mistake that shows in the arguments alone, with the words that attach has for it."""
    with pytest.raises(error, match=words):
        callback(store, **{"run": "sft"} | settings)


@pytest.mark.fault(146)
@pytest.mark.parametrize(("name", "meant"), [("evry", "every"), ("on_presure", "on_pressure")])
def test_a_misspelt_option_of_a_callback_leads_to_the_nearest(name: str, meant: str, store: Path) -> None:
    """The callback's own, and those of attach."""
    with pytest.raises(InvalidInput, match=name) as caught:
        callback(store, run="sft", **{name: 3})

    assert str(caught.value.hint).startswith(f"did you mean {meant}?")


@pytest.mark.fault(146)
def test_a_callback_looks_at_its_store_when_it_is_made(store: Path, tmp_path: Path) -> None:
    """A path without a store is one for a new store, or it is refused; nothing is made yet."""
    new, other = tmp_path / "new", tmp_path / "other"
    (other / "thesis").mkdir(parents=True)

    with pytest.raises(NoStore, match="there is no store at"):
        callback(new, run="sft", create=False)
    with pytest.raises(AlreadyExists, match="is not empty: it holds 'thesis'"):
        callback(other, run="sft")
    with pytest.raises(InvalidInput, match="is inside the store"):
        callback(store / "new", run="sft")
    with pytest.raises(InvalidInput, match="is a URL"):
        callback(Path("s3://bucket/prefix"), run="sft")
    with pytest.raises(InvalidInput, match="a/b"):
        callback(new, run="a/b")
    with pytest.raises(NotFound, match="no remote 'nosuch': the store does not exist yet"):
        callback(new, run="sft", push="nosuch")

    fifty: Any = np.int64(50)
    callback(new, run="sft", every=fifty, keep=Keep(last=3), policy="parity", host_buffer="4GB")
    with layerstore.open(store) as opened:
        callback(opened, run="sft")
    callback(f"file://{tmp_path}/bucket", run="sft")
    assert not new.exists()
    assert not (tmp_path / "bucket").exists()
