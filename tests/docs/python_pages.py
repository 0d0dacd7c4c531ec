"""The pages of the Python reference: which name is on which, and their text from signatures and docstrings."""

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from tests.docs import python_api
from tests.docs.pages import DOCS, GENERATED

FOLDER = DOCS / "reference" / "python"
_DOORS = ("layerstore", "layerstore.transformers", "layerstore.dcp")


@dataclass(frozen=True, slots=True)
class Topic:
    """What one page has."""

    file: str
    title: str
    does: str
    """What it is for, in the list of pages."""
    names: tuple[str, ...]
    """Functions and classes in the order of the page; a method of `Store` as ``Store.log``."""


# A value is on the first page that has a function which returns it.
TOPICS = (
    Topic(
        "opening.md",
        "Opening and looking",
        "open or make a store; list, show, compare and report what is in it",
        (
            *(
                "open",
                "init",
                "Store",
                "Store.runs",
                "Store.overview",
                "Store.log",
                "Store.log_page",
                "Store.timings",
                "Store.show",
                "Store.ls",
            ),
            *("Store.diff", "Store.diff_layer", "Store.stats", "Store.report", "Store.close", "Table", "Progress"),
        ),
    ),
    Topic("ingesting.md", "Ingesting", "store checkpoints that lie in folders", ("find_checkpoints", "Store.ingest")),
    Topic(
        "saving.md",
        "Saving and resuming",
        "save from a training loop or a Trainer, or by torch.distributed.checkpoint, and resume",
        (
            *("attach", "SaverOptions", "Saver", "resume", "LayerstoreCallback", "checkpoint"),
            *("StoreWriter", "StoreReader"),
        ),
    ),
    Topic(
        "policies.md",
        "Policies",
        "choose which layers are due, or write your own policy",
        ("Policy", "Save", "Latest", "Parity", "Filter", "Drift"),
    ),
    Topic(
        "keeping.md",
        "Pins, dropping and retention",
        "name commits, drop them, say what to keep and free the rest",
        (
            *("Store.pin", "Store.pins", "Store.damaged_pins", "Store.delete_pin", "Store.drop"),
            *("Store.drop_commits", "Store.undrop", "Store.undrop_commits", "Store.dropped", "Store.give_up"),
            *("Store.gc", "Keep", "Best"),
        ),
    ),
    Topic(
        "composing.md",
        "Composing",
        "compose a checkpoint, export weights, read tensors, average saves, find what went bad",
        (
            "Store.compose",
            "Store.average",
            "Composite",
            "ExportPlan",
            "apply",
            "DeltaWritten",
            "Tensors",
            "Store.bisect",
            "Judged",
        ),
    ),
    Topic(
        "checking.md",
        "Checking and repairing",
        "verify and repair a store, test a filesystem",
        ("Store.verify", "Store.repair", "Store.reindex", "doctor"),
    ),
    Topic(
        "remotes.md",
        "Remotes",
        "copy a store to a bucket and back",
        ("clone", "Remotes", "Store.push", "Store.follow", "Store.pull", "Store.check_remote"),
    ),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A function or a class, with the name that its heading has."""

    name: str
    home: python_api.Home

    @property
    def anchor(self) -> str:
        """Where its heading is on the page."""
        return re.sub(r"[^\w]", "", self.name.lower())


@cache
def known() -> dict[str, Entry]:
    """Return all that may be on a page, by the names of the topics."""
    found = {}
    for module in _DOORS:
        for name, home in python_api.exported(module).items():
            found[name] = Entry(f"{module}.{name}", home)
    store = found["Store"].home
    assert isinstance(store.node, ast.ClassDef)
    for each in python_api.methods(store.node):
        found[f"Store.{each.name}"] = Entry(f"Store.{each.name}", python_api.Home(store.module, each))
    return found


@cache
def values() -> dict[str, list[Entry]]:
    """Return for each page the values that come back from what it has, and what is in them."""
    acting = {name for topic in TOPICS for name in topic.names}
    seen, found = set(acting), {}
    for topic in TOPICS:
        # What a store returns is told of each method; the class itself has all of them.
        homes = [known()[name].home for name in topic.names if name != "Store"]
        new = [each for each in python_api.returned(homes) if each.name not in seen and not _is_error(each)]
        seen |= {each.name for each in new}
        found[topic.file] = [known().get(each.name) or Entry(each.name, each) for each in new]
    return found


def _is_error(home: python_api.Home) -> bool:
    return home.module == "layerstore.errors"


def _first_page() -> str:
    rows = "\n".join(
        f"| [{topic.title}]({topic.file}): {topic.does} | {_links(topic, [known()[name] for name in topic.names])} "
        f"| {_links(topic, values()[topic.file])} |"
        for topic in TOPICS
    )
    return f"""\
# Python

What `import layerstore` offers, and what comes back from it.
`import layerstore` loads neither numpy nor torch: what needs them is loaded at first use.
The exceptions, such as `layerstore.NotFound`, have [a page of their own](../errors.md).
Anything that is not on these pages may change at any time.
{GENERATED}

| page | functions and classes | what comes back |
|---|---|---|
{rows}
"""


def _links(topic: Topic, entries: Iterable[Entry]) -> str:
    return ", ".join(f"[`{entry.name.removeprefix('layerstore.')}`]({topic.file}#{entry.anchor})" for entry in entries)


def _page(topic: Topic) -> str:
    parts = [
        f"# {topic.title}\n\n{GENERATED}\n[All names](README.md).\n",
        *(_entry(known()[name]) for name in topic.names),
    ]
    if values()[topic.file]:
        parts.append("## What comes back\n\nThe values that these return, and what is in them.\n")
    parts += [_value(entry) for entry in values()[topic.file]]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def _entry(entry: Entry) -> str:
    node = entry.home.node
    if isinstance(node, ast.FunctionDef):
        text = python_api.signature(node, name=entry.name, of_class=entry.name.startswith("Store."))
        return f"## {entry.name}\n\n```py\n{text}\n```\n\n{python_api.docstring(node)}\n"
    own_fields = "\n".join(map(str, python_api.fields(node)))
    made = python_api.constructor(node)
    called = "" if made is None else f"```py\n{python_api.signature(made, name=entry.name, of_class=True)}\n```\n"
    called = re.sub(r" -> None\n```", "\n```", called)
    functions = [
        f"### {node.name}.{each.name}\n\n```py\n{python_api.signature(each, of_class=True)}\n```\n\n"
        f"{python_api.docstring(each)}\n"
        for each in python_api.methods(node)
        if node.name != "Store"  # by topic
    ]
    return "\n".join([f"## {entry.name}", "", called, python_api.docstring(node), "", own_fields, "", *functions])


def _value(entry: Entry) -> str:
    assert isinstance(entry.home.node, ast.ClassDef)
    # Nobody makes these, so their defaults are of no use.
    listed = "\n".join(str(replace(each, usual="")) for each in python_api.fields(entry.home.node))
    return f"### {entry.name}\n\n{python_api.docstring(entry.home.node)}\n\n{listed}\n"


PAGES: dict[Path, Callable[[], str]] = {
    FOLDER / "README.md": _first_page,
    **{FOLDER / topic.file: partial(_page, topic) for topic in TOPICS},
}
