"""What the guide to saving while you train shows is so: its code parses, and calls what there is as it is."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore.live.attach import attach
from layerstore.live.callback import LayerstoreCallback
from layerstore.live.folder import checkpoint
from layerstore.live.resume import Resumed, resume
from layerstore.live.saver import Saver
from layerstore.policy import policy_named

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "training.md"
PAGES = (GUIDE, ROOT / "README.md")

CALLS: dict[str, Callable[..., object]] = {
    "attach": attach,
    "resume": resume,
    "checkpoint": checkpoint,
    "LayerstoreCallback": LayerstoreCallback,
}


def snippets(page: Path) -> list[str]:
    """Return the Python code of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def calls(page: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield every call in the code of a page, with the name that is called."""
    for node in (node for code in snippets(page) for node in ast.walk(ast.parse(code))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node.func.id if isinstance(node.func, ast.Name) else node.func.attr, node


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_calls_are_of_the_functions_as_they_are(page: Path) -> None:
    """Each call of the guide has arguments that the function takes, and policies that there are."""
    seen = set()
    for name, call in calls(page):
        named = {str(each.arg): each.value for each in call.keywords}
        if name in CALLS:
            inspect.signature(CALLS[name]).bind(*call.args, **named)
            seen.add(name)
        policy = named.get("policy")
        if isinstance(policy, ast.Constant):
            policy_named(str(policy.value))
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            if call.func.value.id == "saver":
                inspect.signature(getattr(Saver, name)).bind(None, *call.args, **named)
            if call.func.value.id == "layerstore":
                assert name in layerstore.__all__
    assert seen == set(CALLS)


def test_every_setting_is_shown_or_told() -> None:
    """The settings of attach that the guide leaves out are those for special needs, and are named here."""
    shown = {str(each.arg) for name, call in calls(GUIDE) if name == "attach" for each in call.keywords}

    assert set(inspect.signature(attach).parameters) - shown == {"engine", "store", "layer_pattern", "on_saved"}
    text = GUIDE.read_text()
    for choice in ("sync", "skip", "degrade", "exclude", "resumed.client_state", "saver.status()", "saver.wait()"):
        assert f"`{choice}" in text, choice
    assert "client_state" in Resumed.__dataclass_fields__


def test_links_of_the_guide_lead_somewhere() -> None:
    """Pages and examples that it names are there."""
    for link in re.findall(r"\]\(([^)]+)\)", GUIDE.read_text()):
        assert (GUIDE.parent / link).resolve().exists(), link
