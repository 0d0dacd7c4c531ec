"""Links lead somewhere, on the pages and on a site that is built from them."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.links import anchors, broken_on_pages, broken_on_site, is_address, on_forge, on_site
from tests.docs.pages import DOCS, PAGES, ROOT, prose

CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]


def test_links_of_the_pages_lead_somewhere() -> None:
    """To a file of the docs, and to a heading of it that a forge and the site call alike."""
    assert broken_on_pages() == []


def test_a_broken_link_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule above can fail, in each of its ways."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A: B\n\n[1](none.md) [2](#none) [3](#a-b) [4](https://no_host) [5](https://example.org/x) `[6](none)`\n"
        "![7](none.svg)\n[8](../../etc/passwd)\n"
    )
    monkeypatch.setattr("tests.docs.links.PAGES", (page,))
    monkeypatch.setattr("tests.docs.links.DOCS", tmp_path)
    monkeypatch.setattr("tests.docs.links.name", lambda path: path.name)

    broken = [line.split(": ")[1] for line in broken_on_pages()]

    assert broken == ["none.md", "#none", "https://no_host", "none.svg", "../../etc/passwd"]


def test_anchors_are_those_of_forge_and_site_alike(tmp_path: Path) -> None:
    """A heading whose anchors differ cannot be linked to."""
    (tmp_path / "page.md").write_text("## 6. Write order\n\n## `store.json` - and more\n\n```text\n# no heading\n```\n")

    assert anchors(tmp_path / "page.md") == {"6-write-order"}
    assert (on_forge("A -- B"), on_site("A -- B")) == ("a----b", "a-b")
    assert is_address("https://example.org/path") and not is_address("https:/example.org")  # noqa: PT018


def test_a_site_is_checked(tmp_path: Path) -> None:
    """Files, anchors and what a browser would fetch from elsewhere."""
    (tmp_path / "guides").mkdir()
    (tmp_path / "guides" / "a.html").write_text(
        '<a href="../index.html#there"></a><a href="../index.html#none"></a><a href="none.html"></a>'
        '<a href="../../x"></a><a href=".."></a><a href="https://example.org"></a><img src="data:image/png;base64,AA">'
    )
    (tmp_path / "index.html").write_text(
        '<h2 id="there"></h2><script src="https://cdn.example.org/a.js"></script>'
        '<link rel="stylesheet" href="//fonts.example.org/f.css"><link rel="canonical" href="https://example.org">'
    )

    assert [line.partition(": ")[2] for line in broken_on_site(tmp_path)] == [
        "../index.html#none: there is no such anchor",
        "none.html: there is no such file",
        "../../x: leads out of the site",
        "https://cdn.example.org/a.js: is loaded from elsewhere",
        "//fonts.example.org/f.css: is loaded from elsewhere",
    ]
    assert broken_on_site(tmp_path / "nowhere") != []


def entries(nav: object) -> list[str]:
    """Return the pages that a navigation names, in order."""
    if isinstance(nav, str):
        return [nav]
    items = nav.values() if isinstance(nav, dict) else nav
    assert isinstance(items, list | type({}.values()))
    return [page for item in items for page in entries(item)]


def test_every_page_is_in_the_navigation() -> None:
    """Once, but for decisions, which have a list of their own."""
    named = entries(CONFIG["nav"])
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES if page.is_relative_to(DOCS)}

    assert len(named) == len(set(named))
    assert set(named) == {page for page in pages if not re.match(r"adr/\d", page)}


def test_every_page_is_in_the_list_of_pages_or_in_that_of_its_folder() -> None:
    """A reader of the first page finds all others, in three steps at most."""
    every = DOCS / "pages.md"
    indexes = [every, *DOCS.rglob("README.md")]
    folders = {index.parent: index for index in indexes if index.parent != DOCS}
    linked = {
        index: {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)", index.read_text())}
        for index in indexes
    }
    pages = [page for page in PAGES if page.is_relative_to(DOCS)]

    assert every in linked[DOCS / "README.md"]
    for page in pages:
        index = every if page.name == "README.md" else folders.get(page.parent, every)
        assert page in linked[index] or (page.parent == DOCS and page.name in {"README.md", "pages.md"}), page


def test_the_site_fetches_nothing() -> None:
    """No web fonts; only extensions that forges have too."""
    assert CONFIG["theme"]["font"] is False
    assert set(CONFIG["markdown_extensions"]) == {"tables", "toc", "pymdownx"}
    assert set(CONFIG["markdown_extensions"]["pymdownx"]) == {"highlight", "superfences"}
    assert not {"extra_javascript", "plugins"} & CONFIG.keys()
    assert CONFIG["extra_css"] == ["site.css"]
    assert not re.search(r"url\(|@import", (DOCS / "site.css").read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_the_same_on_a_forge_and_on_the_site(page: Path) -> None:
    """Lists in lists are four spaces deep, a list follows an empty line, and no table hides a pipe in code."""
    text = prose(page)

    assert re.findall(r"(?m)^ {1,3}(?:[-*]|\d+\.) .*", text) == []
    assert re.findall(r"(?m)^(?![-*|#>]|\d+\. | |<!--|```).+\n(?:[-*]|\d+\.) .*", text) == []
    assert re.findall(r"(?m)^\|.*`[^`|]*\\\|[^`]*`.*", text) == []
