"""Pictures are plain files that anybody can read, also where they cannot be seen."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.docs.drawn import PICTURES as PROGRAMS
from tests.docs.drawn import drawn
from tests.docs.drawn.recording import said
from tests.docs.pages import DOCS, PAGES, prose
from tests.inspect.chromium import Browser, program

SVG = "{http://www.w3.org/2000/svg}"
DRAWN = sorted((DOCS / "pictures").glob("*.svg"))
PICTURES = sorted((DOCS / "pictures").iterdir())
SHOWN = [
    (page, text, (page.parent / target).resolve())
    for page in PAGES
    for text, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", prose(page))
]


def test_every_picture_is_shown_and_there() -> None:
    """None is left over, none is missing, and at least three explain the words."""
    assert {picture for _, _, picture in SHOWN} == set(PICTURES)
    assert sum(page.name == "concepts.md" for page, _, _ in SHOWN) >= 3


@pytest.mark.parametrize(("page", "text"), [(page, text) for page, text, _ in SHOWN])
def test_whoever_cannot_see_it_is_told(page: Path, text: str) -> None:
    """The text in its place says what the picture says, not that there is one."""
    assert len(text) > 80
    assert not text.lower().startswith(("picture", "image", "diagram"))


@pytest.mark.parametrize("picture", DRAWN, ids=lambda picture: picture.name)
def test_a_picture_is_whole_by_itself(picture: Path) -> None:
    """It has a title and a description, scales, runs nothing and fetches nothing."""
    root = ET.fromstring(picture.read_text())
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")

    assert root.get("role") == "img"
    assert root.get("viewBox") is not None
    assert title is not None
    assert description is not None
    assert root.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
    assert len(description.text or "") > 100
    assert not any(each.tag in {f"{SVG}script", f"{SVG}image", f"{SVG}foreignObject"} for each in root.iter())
    assert re.findall(r"(?:href|src|url\()\S*?//", picture.read_text().replace("http://www.w3.org/2000/svg", "")) == []


@pytest.mark.full
@pytest.mark.skipif(program() is None, reason="no Chromium is installed (Debian: chromium)")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_picture_is_what_its_program_draws(browser: Browser, name: str) -> None:
    """Whoever changes what it shows, or the page of the report, draws it anew: python -m tests.docs.drawn."""
    # Of a recording its words: seconds and ids are its own.
    alike = said if name == "first-minute" else str

    assert alike(drawn(name).read_text()) == alike(PROGRAMS[name](browser))
