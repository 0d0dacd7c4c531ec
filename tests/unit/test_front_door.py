"""Promises of ``import layerstore``: what it offers, and that the examples in its docstrings are true."""

import doctest
import importlib
from inspect import signature
from pathlib import Path
from typing import get_type_hints

import pytest

import layerstore
from layerstore import errors
from layerstore.errors import LayerstoreError
from layerstore.live.saver import SaverKeywords
from layerstore.transformers import LayerstoreCallback
from tests.docs.python_api import INTERNAL, exported, named_in_returns

ROOT = Path(__file__).parents[2]


def documented_modules() -> list[str]:
    """Return the modules whose docstrings have examples."""
    found = []
    for folder, prefix in (("layerstore", ""), ("cli", "layerstore."), ("migrations", "layerstore.")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ">>>" in path.read_text():
                found.append(prefix + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    return found


@pytest.mark.parametrize("name", documented_modules())
def test_examples_in_docstrings_are_true(name: str) -> None:
    """Every example gives what it says."""
    outcome = doctest.testmod(importlib.import_module(name))

    assert outcome.failed == 0
    assert outcome.attempted > 0


def test_the_front_door_is_in_order() -> None:
    """Every public name is there, named once and in order, and the errors can be caught by one class."""
    assert sorted(layerstore.__all__) == layerstore.__all__
    assert all(hasattr(layerstore, name) for name in layerstore.__all__)
    assert layerstore.LayerstoreError is LayerstoreError
    assert sorted([*layerstore.__all__, "__version__"]) == dir(layerstore)


def test_every_error_is_exported() -> None:
    """What is to be caught can be named without another import."""
    tree = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, LayerstoreError)}

    assert tree <= set(layerstore.__all__)
    assert all(getattr(layerstore, name) is getattr(errors, name) for name in tree)


def test_every_result_is_exported() -> None:
    """The classes of what functions and methods return can be named, in annotations say."""
    results = {each.name for home in exported("layerstore").values() for each in named_in_returns(home)}

    assert results - INTERNAL <= set(layerstore.__all__)


def test_the_options_of_a_saver_are_known_by_name() -> None:
    """Of attach and of the Trainer's callback: to type checkers and editors, and to help() with their defaults."""
    taken = signature(layerstore.attach).parameters

    assert get_type_hints(SaverKeywords) == get_type_hints(layerstore.SaverOptions)
    assert [*taken] == ["engine", "optimizer", "store", "run", *get_type_hints(SaverKeywords)]
    assert taken["policy"].default == "latest"
    assert [*signature(LayerstoreCallback).parameters][:4] == ["store", "run", "every", "policy"]
