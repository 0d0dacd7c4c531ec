"""The reference is what the code says."""

import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

import layerstore
import layerstore.dcp
import layerstore.transformers
from layerstore import errors
from tests.docs import python_pages
from tests.docs.pages import DOCS, name
from tests.docs.reference import PAGES, commands, group


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_page_is_the_generated_one(page: Path) -> None:
    """Whoever changes an option, an error or a signature writes it anew: python -m tests.docs.reference."""
    assert page.read_text() == PAGES[page]()


def test_options_are_listed_once() -> None:
    """On the generated page; the one that is written by hand says what a line is too short for, of what there is."""
    text = (DOCS / "reference" / "cli.md").read_text()
    known = {option for command in (group(), *commands().values()) for each in command.params for option in each.opts}

    assert "| option |" not in text
    assert set(re.findall(r"(?m)^### (.+)$", text)) <= set(commands())
    assert set(re.findall(r"`(--[a-z-]+)", text)) <= known | {"--help"}


def annotation_of(param: Any) -> Any:
    """Return the type that typer reads a parameter by."""
    return param.type_descriptor.annotation


def choices(annotation: Any) -> list[Any]:
    """Return the words of a Literal, or of a Literal that may be None."""
    return next(([*get_args(of)] for of in (annotation, *get_args(annotation)) if get_origin(of) is Literal), [])


def test_words_to_choose_from_are_those_that_are_taken() -> None:
    """An option whose help says ``one|of|these`` takes these, and every option that takes few words says which."""
    said, taken = {}, {}
    for command in (group(), *commands().values()):
        for each in command.params:
            place, metavar = f"{command.name} {each.name}", str(each.metavar)
            if re.fullmatch(r"[\w-]+(?:\|[\w-]+)+", metavar) and each.name != "show_completion":  # an enumeration
                said[place] = metavar.split("|")
            if words := choices(annotation_of(each)):
                taken[place] = words

    assert said == taken
    assert taken["compose format"] == ["shards", "zero3", "hf", "dcp", "universal", "delta"]


def headings() -> list[str]:
    """Return every heading of the Python reference, of all its pages."""
    return [line for page in python_pages.PAGES for line in page.read_text().splitlines() if line.startswith("#")]


def test_everything_exported_is_on_one_page() -> None:
    """Each public name, each method of a store, and the values that come back, with their fields."""
    found = Counter(heading.lstrip("# ") for heading in headings())
    exported = {
        f"{module.__name__}.{each}"
        for module in (layerstore, layerstore.transformers, layerstore.dcp)
        for each in set(module.__all__) - {"errors", *vars(errors)}
    }

    expected = {*exported, "Store.ingest", "Store.gc", "CommitRecord", "Damage"}
    assert {each for each in expected if found[each] != 1} == set()
    assert {each for each in python_pages.known() if each.startswith("Store.")} <= set(found)
    assert "- `bytes_reused: int`" in (python_pages.FOLDER / "ingesting.md").read_text()
