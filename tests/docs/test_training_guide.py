"""What the guide to saving while you train says of settings is so: none is left out, and each choice is named."""

import ast
import inspect

from layerstore.live.engine.resume import Resumed
from layerstore.live.saver.attach import attach
from tests.docs.pages import DOCS, blocks

GUIDE = DOCS / "guides" / "training.md"


def test_every_setting_is_shown_or_told() -> None:
    """The settings of attach that the guide's code leaves out are those for special needs, and are named here."""
    calls = [
        node
        for block in blocks(GUIDE, "python")
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "attach"
    ]
    shown = {str(each.arg) for call in calls for each in call.keywords}

    assert set(inspect.signature(attach).parameters) - shown == {"engine", "store", "layer_pattern", "on_saved"}
    text = GUIDE.read_text()
    for choice in ("sync", "skip", "degrade", "exclude", "resumed.client_state", "saver.status()", "saver.wait()"):
        assert f"`{choice}" in text, choice
    assert "client_state" in Resumed.__dataclass_fields__
