"""
Where the links of the documentation lead.

    python -m tests.docs.links          the pages as they lie in the repository
    python -m tests.docs.links site     the site that was built from them

Every link inside leads to a file that is there and, behind a #, to a heading of it. Addresses elsewhere are held
against their syntax alone, so that no network is needed. A page of the site loads nothing from elsewhere.
Headings have the same anchors on a forge and on the site, or nobody may link to them.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.docs.pages import DOCS, PAGES, README, name, prose

_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`[^`\n]*`")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_HOST = re.compile(r"([a-z0-9-]+\.)+[a-z]{2,}(:\d+)?")

# What a browser fetches by itself when it shows a page.
_LOADED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "video": "src", "audio": "src"}
_LOADED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "manifest", "preconnect", "dns-prefetch"}


# -- the pages -----------------------------------------------------------------------------------------------------


def broken_on_pages() -> list[str]:
    """Return what is wrong with the links of all pages, each with its place."""
    return [f"{name(page)}: {link}: {wrong}" for page in PAGES for link, wrong in _wrong_on(page)]


def _wrong_on(page: Path) -> Iterator[tuple[str, str]]:
    text = _CODE.sub("``", prose(page))
    for link in _LINK.findall(text):
        if urlsplit(link).scheme:
            if not is_address(link):
                yield link, "is not an address"
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield link, "there is no such file"
        elif page != README and not target.is_relative_to(DOCS):
            yield link, "leads out of the site"
        elif anchor and anchor not in anchors(target):
            yield link, "there is no such heading, or a forge and the site call it differently"


def is_address(link: str) -> bool:
    """Whether *link* is an address that a browser could go to."""
    parts = urlsplit(link)
    return parts.scheme in {"https", "http"} and _HOST.fullmatch(parts.netloc) is not None


def anchors(page: Path) -> set[str]:
    """Return the anchors that the headings of *page* have on a forge and on the site alike."""
    return {anchor for heading in _HEADING.findall(prose(page)) if (anchor := on_forge(heading)) == on_site(heading)}


def on_forge(heading: str) -> str:
    """Return the anchor that a forge gives to *heading*: each space becomes a hyphen."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def on_site(heading: str) -> str:
    """Return the anchor that the site gives to *heading*: spaces and hyphens that meet become one hyphen."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


# -- the site ------------------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """The links, anchors and loaded files of one page of the site."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what *tag* names."""
        has = {key: value or "" for key, value in attrs}
        if "id" in has:
            self.ids.add(has["id"])
        if tag == "a" and "href" in has:
            self.links.append(has["href"])
        if tag == "link" and _LOADED_LINKS & set(has.get("rel", "").split()):
            self.loaded.append(has.get("href", ""))
        if has.get(_LOADED.get(tag, "")):
            self.loaded.append(has[_LOADED[tag]])


def broken_on_site(site: Path) -> list[str]:
    """Return what is wrong with the links of the site that was built at *site*, each with its page."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    if not pages:
        return [f"{site}: there is no site"]
    # What a server shows for an address that is not there is shown anywhere, so its links begin at the root.
    pages.pop(site / "404.html", None)
    return [
        f"{path.relative_to(site)}: {link}: {wrong}"
        for path, page in pages.items()
        for link, wrong in _wrong_on_site(site.resolve(), path, page, pages)
    ]


def _wrong_on_site(site: Path, path: Path, page: _Page, pages: dict[Path, _Page]) -> Iterator[tuple[str, str]]:
    for link in page.loaded:
        if urlsplit(link).netloc or urlsplit(link).scheme not in {"", "data"}:
            yield link, "is loaded from elsewhere"
    for link in (*page.links, *page.loaded):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            if link in page.links and not is_address(link):
                yield link, "is not an address"
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
        target = target / "index.html" if target.is_dir() else target
        known = pages.get(site / target.relative_to(site)) if target.is_relative_to(site) else None
        if not target.is_relative_to(site):
            yield link, "leads out of the site"
        elif not target.is_file():
            yield link, "there is no such file"
        elif parts.fragment and known is not None and unquote(parts.fragment) not in known.ids:
            yield link, "there is no such anchor"


def main(arguments: list[str]) -> int:
    """Print what is broken on the pages, or on the site that is named; return the exit code."""
    broken = broken_on_site(Path(arguments[0]).resolve()) if arguments else broken_on_pages()
    print("\n".join([*broken, f"{len(broken)} broken links"]))
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
