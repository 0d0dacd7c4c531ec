"""The reference is what the code says."""

import re
from pathlib import Path

import pytest

import layerstore
import layerstore.transformers
from layerstore import errors
from tests.docs.pages import DOCS
from tests.docs.reference import PAGES, commands, group


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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


def test_everything_exported_is_on_its_page() -> None:
    """Each public name with what it takes; and the values that come back, with their fields."""
    text = next(page for page in PAGES if page.name == "python.md").read_text()

    for module in (layerstore, layerstore.transformers):
        for name in set(module.__all__) - {"errors", *vars(errors)}:
            assert f"# {module.__name__}.{name}\n" in text
    for name in ("layerstore.Ingested", "layerstore.GcOutcome", "CommitRecord", "Damage"):
        assert f"\n### {name}\n" in text
    assert "- `bytes_reused: int`" in text
