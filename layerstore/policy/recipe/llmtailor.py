"""
Read LLMTailor's grammar, with every check that needs no model; `llmtailor_plan` interprets it.

Settings that would change tensors are refused; settings without effect on a checkpoint of whole layers are noted.
"""

import posixpath
import re
from collections.abc import Iterable, Iterator

from layerstore.layers import is_name
from layerstore.policy.recipe.document import (
    MapNode,
    Node,
    Scalar,
    as_integer,
    as_list,
    as_map,
    as_scalar,
    required,
)
from layerstore.policy.recipe.llmtailor_plan import (
    LayerRange,
    LLMTailorRecipe,
    WeightEntry,
    WeightList,
)
from layerstore.policy.recipe.plan import Choice

_BODIES = ("slices", "models", "modules")
_WEIGHTS = ("pre_weights", "post_weights")
# Keys without effect, in the recipe and in a slice.
_INERT = ("dtype", "out_dtype", "tokenizer_source", "tokenizer", "chat_template")
_INERT_OF_SLICE = ("base_model", "residual_weight")
KEYS = (*_BODIES, *_WEIGHTS, "merge_method", "base_model", "parameters", *_INERT)

_FOLDER = re.compile(r"checkpoint-(?P<step>[0-9]{1,18})")
_RANGE_HINT = "[a, b] means blocks a to b-1, counted from 0; [g, g] means an auxiliary layer by its group id"


def read_llmtailor(document: MapNode, *, name: str) -> LLMTailorRecipe:
    """Read the recipe *document*; *name* is the file's name in errors."""
    as_map(document, what="the recipe", keys=KEYS)
    _check_frame(document)
    notes = [*_parameters(document), *_inert(document, _INERT)]
    _check_tokenizer(document)
    slices = _slices(document, notes)
    pre, post = (_weights(document, key) for key in _WEIGHTS)
    used = [part.checkpoint for part in slices] + [entry.checkpoint for entry in pre.entries + post.entries]
    base_model = document.get("base_model")
    base = (
        max(used, key=lambda checkpoint: checkpoint.step or 0)
        if base_model is None
        else _checkpoint(base_model, what="base_model")
    )
    for checkpoint in (*used, base):
        _check_one_run(used[0], checkpoint)
    run = posixpath.basename(_run_folder(base))
    return LLMTailorRecipe(
        name=name,
        base=base,
        run_hint=run if is_name(run) else None,
        slices=slices,
        pre_weights=pre,
        post_weights=post,
        spot=document.key_spot("slices"),
        notes=tuple(notes),
    )


def _check_frame(document: MapNode) -> None:
    for key in ("models", "modules"):
        if document.get(key) is not None:
            raise document.key_spot(key).error(
                f"{key!r} merges weights and ignores the optimizer; only 'slices' says where each layer comes from",
                hint="write slices: with a layer_range each, or base: and layers:",
            )
    required(document, "slices", what="the recipe")
    method = as_scalar(required(document, "merge_method", what="the recipe"), what="merge_method")
    if method.text != "passthrough":
        raise method.spot.error(
            f"merge_method {method.text!r} computes new weights; a resumable checkpoint takes layers as they are",
            hint="merge_method: passthrough",
        )


def _slices(document: MapNode, notes: list[str]) -> tuple[LayerRange, ...]:
    entries = as_list(required(document, "slices", what="the recipe"), what="slices")
    if not entries.items:
        raise entries.spot.error("slices is empty", hint="add one slice for every range of layers")
    return tuple(_slice(item, notes) for item in entries.items)


def _slice(node: Node, notes: list[str]) -> LayerRange:
    outer = as_map(node, what="a slice", keys=("sources", "parameters", *_INERT_OF_SLICE))
    sources = as_list(required(outer, "sources", what="a slice"), what="sources")
    if len(sources.items) != 1:
        spot = sources.items[1].spot if sources.items else sources.spot
        raise spot.error(
            f"a slice of {len(sources.items)} sources; passthrough takes exactly one", hint="split the slice"
        )
    source = as_map(sources.items[0], what="a source", keys=("model", "layer_range", "parameters"))
    notes += [*_inert(outer, _INERT_OF_SLICE), *_parameters(outer), *_parameters(source)]
    checkpoint = _checkpoint(required(source, "model", what="a source"), what="model")
    ends = as_list(required(source, "layer_range", what="a source"), what="layer_range")
    if len(ends.items) != 2:
        raise ends.spot.error(f"layer_range has {len(ends.items)} numbers", hint=_RANGE_HINT)
    start, stop = (as_integer(end, what="layer_range") for end in ends.items)
    if start < 0 or stop < start:
        raise ends.spot.error(f"layer_range [{start}, {stop}] is not a range", hint=_RANGE_HINT)
    return LayerRange(checkpoint=checkpoint, start=start, stop=stop, spot=ends.spot)


def _parameters(node: MapNode) -> Iterator[str]:
    """Yield notes on the parameters of *node*; refuse ``scale``, which would change tensors."""
    parameters = node.get("parameters")
    if parameters is None:
        return
    if not isinstance(parameters, MapNode):
        raise parameters.spot.error("parameters is not a mapping", hint="remove it: passthrough needs none")
    yield from _inert(parameters, [key.text for key, _ in parameters.entries if key.text != "scale"])
    scale = parameters.get("scale")
    if scale is not None and not (isinstance(scale, Scalar) and scale.text in {"1", "1.0"}):
        error = parameters.key_spot("scale").error
        raise error("'scale' would change weights but not their masters", hint="remove it")


def _inert(node: MapNode, keys: Iterable[str]) -> list[str]:
    """Return a note on each of *keys* that *node* has."""
    notes: list[str] = []
    for key in keys:
        if node.get(key) is not None:
            notes.append(f"{node.key_spot(key)}: {key!r} has no effect on a checkpoint of whole layers")
    return notes


def _check_tokenizer(document: MapNode) -> None:
    """Refuse a tokenizer that would need new embeddings; with any other, the base's tokenizer is used."""
    if (tokenizer := document.get("tokenizer")) is not None:
        inner = as_map(tokenizer, what="tokenizer", keys=("source", "tokens", "pad_to_multiple_of"))
        for key in ("tokens", "pad_to_multiple_of"):
            value = inner.get(key)
            if value is not None and not (isinstance(value, MapNode) and not value.entries):
                raise inner.key_spot(key).error(f"{key!r} would make new embeddings", hint="remove it")


def _weights(document: MapNode, key: str) -> WeightList:
    node = document.get(key)
    items = () if node is None else as_list(node, what=key).items
    return WeightList(key=key, entries=tuple(_weight(item, key) for item in items), spot=document.key_spot(key))


def _weight(node: Node, key: str) -> WeightEntry:
    what = f"an entry of {key}"
    entry = as_map(node, what=what, keys=("name", "model"))
    name = as_scalar(required(entry, "name", what=what), what="name")
    checkpoint = _checkpoint(required(entry, "model", what=what), what="model")
    return WeightEntry(name=name.text, checkpoint=checkpoint, spot=name.spot)


# -- references to models ------------------------------------------------------------------------------------------


def _checkpoint(node: Node, *, what: str) -> Choice:
    """Read ``path``, ``{model: path}`` or ``{model: {path: path}}``; only in the last form may paths have @ or +."""
    if isinstance(node, MapNode):
        node = _only(node, "model", ("lora", "override_architecture"), what=what)
        if isinstance(node, MapNode):
            return _folder(as_scalar(_only(node, "path", ("revision",), what=what), what=what))
    value = as_scalar(node, what=what)
    if "@" in value.text or "+" in value.text:
        raise value.spot.error(
            f"{value.text!r} asks for a revision or an adapter, and a step of a run has neither",
            hint="if that is the folder's own name, write model: {model: {path: …}}",
        )
    return _folder(value)


def _only(node: MapNode, key: str, unsupported: tuple[str, ...], *, what: str) -> Node:
    as_map(node, what=what, keys=(key, *unsupported))
    for other in unsupported:
        if node.get(other) is not None:
            raise node.key_spot(other).error(f"{other!r} is not supported: layers stay unchanged", hint="remove it")
    return required(node, key, what=what)


def _folder(value: Scalar) -> Choice:
    match = _FOLDER.fullmatch(posixpath.basename(posixpath.normpath(value.text)))
    if match is None:
        raise value.spot.error(
            f"{value.text!r} is not a folder called checkpoint-N, so its step is unknown",
            hint="write …/checkpoint-N, or a recipe with base: and layers:, which names runs and steps",
        )
    return Choice(run=None, step=int(match["step"]), path=value.text, spot=value.spot)


def _run_folder(checkpoint: Choice) -> str:
    return posixpath.dirname(posixpath.normpath(checkpoint.path or ""))


def _check_one_run(first: Choice, other: Choice) -> None:
    if _run_folder(other) != _run_folder(first):
        raise other.spot.error(
            f"{other.path!r} is in a different folder from {first.path!r} in line {first.spot.line}; "
            "the checkpoints of one recipe are steps of one run",
            hint="to mix runs, write base: and layers: with RUN@STEP",
        )
