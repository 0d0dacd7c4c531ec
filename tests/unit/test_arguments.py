"""Public methods answer wrong arguments in one line, and a closed store answers nothing."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest

import layerstore
from layerstore import Composite, Store
from layerstore.errors import InvalidInput
from layerstore.remote import Remotes
from tests.unit.checkpoints import checkpoint

Owners: TypeAlias = dict[type, Store | Composite | Remotes]

# Of the right type: nothing is done with them.
REQUIRED = {
    "checkpoint": "c",
    "good": "sft@2",
    "bad": "sft@2",
    "judge": print,
    "name": "n",
    "saves": [],
    "run": "sft",
    "a": "sft",
    "b": "sft",
    "layer": "model.norm",
    "ref": "sft",
    "remote": "file:///nowhere",
    "out": "out",
    "since": "sft",
    "url": "s3://bucket/prefix",
}
# A plan is what gc itself has returned; `compose` and `ingest` leave a policy to its own room, which says the same.
UNCHECKED = {"confirmed", "policy", "keep"}


def methods(of: type) -> list[str]:
    """Return the names of the public methods of a class."""
    return [name for name, _ in inspect.getmembers(of, inspect.isfunction) if not name.startswith("_")]


def parameters(method: Callable[..., object]) -> list[inspect.Parameter]:
    """Return what a method takes by name; options of a format are checked by the format."""
    return [each for each in inspect.signature(method).parameters.values() if each.kind is not each.VAR_KEYWORD]


def required(method: Callable[..., object]) -> dict[str, object]:
    """Return arguments of the right types for everything that *method* must be given."""
    return {each.name: REQUIRED[each.name] for each in parameters(method) if each.default is inspect.Parameter.empty}


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[Owners]:
    """Return a store with a commit, a composite of it, and its remotes."""
    with layerstore.init(tmp_path / "store") as store:
        store.ingest(checkpoint(tmp_path))
        yield {Store: store, Composite: store.compose(), Remotes: store.remotes}


@pytest.mark.parametrize("owner", [Store, Composite])
def test_every_argument_of_every_method_is_checked(owner: type, owners: Owners) -> None:
    """The message names method and argument, and what it may be; nothing was done before."""
    wrong = {
        (name, each.name): object()
        for name in methods(owner)
        for each in parameters(getattr(owners[owner], name))
        if each.name not in UNCHECKED
    }
    assert len(wrong) >= 20

    for (name, argument), value in wrong.items():
        method = getattr(owners[owner], name)
        with pytest.raises(InvalidInput, match=rf"^{owner.__name__}\.{name}: {argument} is <object.*>, but must be "):
            method(**required(method) | {argument: value})


def test_the_usual_mistakes_say_what_is_possible(owners: Owners) -> None:
    """Rules as a number, a step as a reference, one run as a list, a misspelt name, one too many."""
    store = owners[Store]
    assert isinstance(store, Store)
    attached = {"engine": object(), "optimizer": [SimpleNamespace(param_groups=[])], "store": store, "run": "sft"}
    mistakes: list[tuple[Callable[..., object], dict[str, object], str, str]] = [
        (store.gc, {"keep": 3}, "keep cannot be 3", "layerstore.Keep(last=3)"),
        (store.gc, {"grace_seconds": float("nan")}, "grace_seconds cannot be nan", "None"),
        (store.gc, {"confirmed": 40}, "confirmed cannot be 40", "gc(dry_run=True)"),
        (store.report, {"keep": 3}, "keep cannot be 3", "layerstore.Keep(last=3)"),
        (store.show, {"ref": 40}, "Store.show: ref is 40, but must be text or None", "RUN@STEP"),
        (store.compose, {"policy": 3}, "int is not a policy", "a policy has a name"),
        (store.gc, {"runs": "sft"}, "Store.gc: runs is 'sft', but must be a list or None", "runs=['sft']"),
        (store.push, {"refs": ["sft", 4]}, "Store.push: refs is ['sft', 4]", ""),
        (store.gc, {"dry_run": "no"}, "Store.gc: dry_run is 'no', but must be True or False", ""),
        (store.compose().state_dict, {"dtype": 16}, "dtype is 16, but must be 'bf16' or ", ""),
        (store.gc, {"dryrun": True}, "an unexpected keyword argument 'dryrun'", "did you mean dry_run?"),
        (store.pin, {}, "missing a required argument: 'name'", "it takes name, ref"),
        (layerstore.Keep, {"lst": 3}, "Keep: got an unexpected keyword argument 'lst'", "did you mean last?"),
        (layerstore.Parity, {"frsh": "even"}, "Parity: got an unexpected", "did you mean fresh? it takes fresh"),
        (layerstore.open, {"path": 3}, "open: path is 3, but must be text or a path", ""),
        (layerstore.Store, {"path": 3}, "open: path is 3, but must be text or a path", ""),
        (store.remotes.add, {"name": "origin", "url": 3}, "Remotes.add: url is 3, but must be text", ""),
        (layerstore.init, {"path": None}, "init: path is None, but must be text or a path", ""),
        (layerstore.resume, {"engine": object(), "store": store, "run": "sft"}, "object is not a DeepSpeed engine", ""),
        (layerstore.resume, {"engine": object(), "store": store, "run": 3}, "resume: run is 3, but must be text", ""),
        (layerstore.attach, attached | {"keep": 3}, "attach: keep is 3", "layerstore.Keep(last=3)"),
        (layerstore.attach, attached | {"store": None}, "attach: no store was given", "attach(model, optimizer, "),
    ]

    for method, arguments, message, hint in mistakes:
        with pytest.raises(InvalidInput) as raised:
            method(**arguments)
        assert message in str(raised.value)
        assert hint in (raised.value.hint or "")
        assert raised.value.__context__ is None or raised.value.__suppress_context__


def test_what_resembles_a_type_is_taken(owners: Owners) -> None:
    """numpy's numbers, any iterable of texts, any path."""
    numpy = pytest.importorskip("numpy")
    store = owners[Store]
    assert isinstance(store, Store)

    assert len(store.log(limit=numpy.int64(1))) == 1
    assert store.gc(runs=iter(["sft"]), dry_run=numpy.bool_(True), grace_seconds=1).removed == []
    assert store.report(store.path.parent / "page.html")["runs"]


def test_editors_and_help_see_the_methods_as_they_are_written() -> None:
    """Signature, docstring and place in the source."""
    assert list(inspect.signature(Store.pin).parameters) == ["self", "name", "ref"]
    assert "outlives" in (Store.pin.__doc__ or "")
    assert inspect.getsource(Store.pin).lstrip().startswith("def pin(self, name")


@pytest.mark.parametrize("owner", [Store, Composite, Remotes])
def test_after_close_every_method_refuses(owner: type, owners: Owners) -> None:
    """In one line that says how to open it again; what was read before stays, and closing twice is harmless."""
    store, composite = owners[Store], owners[Composite]
    assert isinstance(store, Store)
    assert isinstance(composite, Composite)
    store.close()
    store.close()

    for name in set(methods(owner)) - {"close", "summary", "to_pandas"}:
        method = getattr(owners[owner], name)
        with pytest.raises(InvalidInput, match="is closed") as raised:
            method(**required(method))
        assert raised.value.hint == f"open it again: layerstore.open({str(store.path)!r})"
    assert repr(store) == f"<Store {store.path}, closed>"
    assert (composite.run, composite.step, composite.summary()["step"]) == ("sft", 2, 2)
