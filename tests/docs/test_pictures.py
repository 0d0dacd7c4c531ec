"""Pictures are plain files that anybody can read: on light and on dark, and where they cannot be seen."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, prose

SVG = "{http://www.w3.org/2000/svg}"
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))
SHOWN = [
    (page, text, (page.parent / target).resolve())
    for page in PAGES
    for text, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", prose(page))
]
CONTRAST_MIN = 4.5
GROUNDS = ("paper", "one", "two", "three", "none")


def test_every_picture_is_shown_and_there() -> None:
    """None is left over, none is missing, and at least three explain the words."""
    assert {picture for _, _, picture in SHOWN} == set(PICTURES)
    assert sum(page.name == "concepts.md" for page, _, _ in SHOWN) >= 3


@pytest.mark.parametrize(("page", "text"), [(page, text) for page, text, _ in SHOWN])
def test_whoever_cannot_see_it_is_told(page: Path, text: str) -> None:
    """The text in its place says what the picture says, not that there is one."""
    assert len(text) > 80
    assert not text.lower().startswith(("picture", "image", "diagram"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
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


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_letters_stand_out_on_light_and_on_dark(picture: Path) -> None:
    """Whatever a letter may stand on, it has the contrast that is asked for small text; and it brings its own paper."""
    text = picture.read_text()
    light, _, dark = text.partition("</style>")[0].partition("@media (prefers-color-scheme: dark)")

    assert re.search(r'<rect class="paper" width="\d+" height="\d+"', text)
    for scheme in (light, dark):
        colours = dict(re.findall(r"\b(?:\.)?(\w+) \{[^}]*?fill: (#[0-9a-f]{6})", scheme))
        for ground in GROUNDS:
            assert contrast(colours["text"], colours[ground]) >= CONTRAST_MIN, (ground, colours)


def contrast(one: str, other: str) -> float:
    """Return how much two colours differ, as the guidelines for accessible content measure it."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    """Return how bright *colour* is, from 0 to 1."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_nothing_is_drawn_beside_the_paper(picture: Path) -> None:
    """Boxes and the beginnings of texts lie inside."""
    root = ET.fromstring(picture.read_text())
    _, _, width, height = map(float, (root.get("viewBox") or "").split())

    for each in root.iter():
        if each.tag in {f"{SVG}rect", f"{SVG}text"} and each.get("x"):
            x, y = float(each.get("x") or 0), float(each.get("y") or 0)
            assert 0 <= x + float(each.get("width") or 0) <= width, ET.tostring(each)
            assert 0 <= y + float(each.get("height") or 0) <= height, ET.tostring(each)
