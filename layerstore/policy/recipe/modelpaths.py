"""
LLMTailor's references to models, down to the step that they mean.

A reference is ``path``, ``path@revision``, ``path+lora``, or a mapping
``{model: path or {path, revision}, lora, override_architecture}``.
Only folders called ``checkpoint-N`` mean anything here.
In ``{model: {path: …}}`` an ``@`` or ``+`` is a character like any other.
"""

import posixpath
import re
from dataclasses import dataclass

from layerstore.policy.recipe.document import MapNode, Node, Scalar
from layerstore.policy.recipe.fields import as_map, as_scalar, required
from layerstore.policy.recipe.spots import Spot

_FOLDER = re.compile(r"checkpoint-(?P<step>[0-9]{1,18})")
_LITERAL = "if the folder itself is called so, write model: {model: {path: …}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint that a recipe names."""

    step: int
    run_folder: str
    """The folder that it is in."""
    path: str
    """As written."""
    spot: Spot


def read_checkpoint(node: Node, *, what: str) -> Checkpoint:
    """Return the checkpoint that *node* refers to."""
    if not isinstance(node, MapNode):
        value = as_scalar(node, what=what)
        if "+" in value.text:
            raise value.spot.error(f"{value.text!r} adds a LoRA adapter, which layers do not need", hint=_LITERAL)
        return _with_revision(value)
    as_map(node, what=what, keys=("model", "lora", "override_architecture"))
    for key, why in (("lora", "an adapter's layers are in the checkpoint"), ("override_architecture", _BY_NAME)):
        if node.get(key) is not None:
            raise node.key_spot(key).error(f"{key!r} is not supported: {why}", hint="remove it")
    return _path(required(node, "model", what=what), what=what)


_BY_NAME = "layers are found by their names, whatever the architecture"


def _path(node: Node, *, what: str) -> Checkpoint:
    if not isinstance(node, MapNode):
        return _with_revision(as_scalar(node, what=what))
    as_map(node, what=what, keys=("path", "revision"))
    if node.get("revision") is not None:
        raise node.key_spot("revision").error("a revision of a hub's model is no step of a run", hint="remove it")
    return _checkpoint(as_scalar(required(node, "path", what=what), what=what))


def _with_revision(value: Scalar) -> Checkpoint:
    if "@" in value.text:
        raise value.spot.error(f"{value.text!r} asks for a revision of a hub's model, no step of a run", hint=_LITERAL)
    return _checkpoint(value)


def _checkpoint(value: Scalar) -> Checkpoint:
    folder, name = posixpath.split(posixpath.normpath(value.text))
    match = _FOLDER.fullmatch(name)
    if match is None:
        raise value.spot.error(
            f"{value.text!r} is no folder called checkpoint-N, so its step is unknown",
            hint="write …/checkpoint-N, or a recipe with base: and layers:, which names runs and steps",
        )
    return Checkpoint(step=int(match["step"]), run_folder=folder, path=value.text, spot=value.spot)
