"""
LLMTailor's grammar, from nodes to values: all that can be checked without the model.

Its meaning is in `layerstore.policy.recipe.llmtailor_plan`.
What it says of weights, tokenizer and the like that has no meaning for a checkpoint made of whole layers
is either refused, where following it would change tensors, or noted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from posixpath import basename

from layerstore.layers import is_name
from layerstore.policy.recipe.document import ListNode, MapNode, Node, Scalar
from layerstore.policy.recipe.fields import as_integer, as_list, as_map, as_scalar, required
from layerstore.policy.recipe.llmtailor_plan import LLMTailorRecipe, Slice, WeightEntry, WeightList
from layerstore.policy.recipe.modelpaths import Checkpoint, read_checkpoint
from layerstore.policy.recipe.plan import Choice

_BODIES = ("slices", "models", "modules")
_WEIGHTS = ("pre_weights", "post_weights")
_TOKENIZER = ("tokenizer_source", "tokenizer")
KEYS = (
    *_BODIES,
    *_WEIGHTS,
    "merge_method",
    "base_model",
    "dtype",
    "out_dtype",
    "parameters",
    *_TOKENIZER,
    "chat_template",
)

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ignored:
    """Something that has no meaning here, and why."""

    node: Node
    text: str

    def __str__(self) -> str:
        return f"{self.node.spot}: {self.text}"


def read_llmtailor(document: MapNode, *, name: str) -> LLMTailorRecipe:
    """Return the recipe that *document* spells."""
    as_map(document, what="the recipe", keys=KEYS)
    _check_body(document)
    _check_method(document)
    notes = list(_parameters(document))
    slices = _slices(document, notes)
    pre, post = (_weights(document, key) for key in _WEIGHTS)
    used = [part.checkpoint for part in slices] + [entry.checkpoint for entry in pre.entries + post.entries]
    base = _base(document, used)
    _check_one_run([*used, base])
    notes += [*_tokenizer_notes(document, base), *_template_notes(document)]
    run = basename(base.run_folder)
    return LLMTailorRecipe(
        name=name,
        base=Choice(run=None, step=base.step, path=base.path, spot=base.spot),
        run_hint=run if is_name(run) else None,
        slices=slices,
        pre_weights=pre,
        post_weights=post,
        dtype=_dtype(document),
        dtype_spot=document.key_spot("out_dtype" if document.get("out_dtype") is not None else "dtype"),
        spot=document.key_spot("slices"),
        notes=tuple(str(note) for note in notes),
    )


def _check_body(document: MapNode) -> None:
    given = [key for key in _BODIES if document.get(key) is not None]
    if given == ["slices"]:
        return
    if not given:
        raise document.key_spot("slices").error(
            "the recipe has no slices", hint="add slices:, or write base: and layers:"
        )
    other = next(key for key in given if key != "slices")
    raise document.key_spot(other).error(
        f"{other!r} merges weights and knows no optimizer; only 'slices' says where each layer comes from",
        hint="write slices: with a layer_range each, or base: and layers:",
    )


def _check_method(document: MapNode) -> None:
    method = as_scalar(required(document, "merge_method", what="the recipe"), what="merge_method")
    if method.text != "passthrough":
        raise method.spot.error(
            f"merge_method {method.text!r} computes new weights; a resumable checkpoint takes layers as they are",
            hint="merge_method: passthrough",
        )


# -- slices --------------------------------------------------------------------------------------------------------


def _slices(document: MapNode, notes: list[_Ignored]) -> tuple[Slice, ...]:
    found = as_list(required(document, "slices", what="the recipe"), what="slices")
    if not found.items:
        raise found.spot.error("slices is empty", hint="add one slice for every range of layers")
    return tuple(_slice(item, notes) for item in found.items)


def _slice(node: Node, notes: list[_Ignored]) -> Slice:
    keys = ("sources", "base_model", "residual_weight", "parameters")
    outer = as_map(node, what="a slice", keys=keys)
    for key in ("base_model", "residual_weight"):
        if (ignored := outer.get(key)) is not None:
            notes.append(_Ignored(node=ignored, text=f"{key!r} of a slice means nothing to passthrough; ignored"))
    sources = as_list(required(outer, "sources", what="a slice"), what="sources")
    if len(sources.items) != 1:
        spot = sources.items[1].spot if sources.items else sources.spot
        raise spot.error(
            f"a slice of {len(sources.items)} sources; passthrough takes exactly one", hint="split the slice"
        )
    source = as_map(sources.items[0], what="a source", keys=("model", "layer_range", "parameters"))
    notes += [*_parameters(outer), *_parameters(source)]
    checkpoint = read_checkpoint(required(source, "model", what="a source"), what="model")
    ends = as_list(required(source, "layer_range", what="a source"), what="layer_range")
    if len(ends.items) != 2:
        raise ends.spot.error(f"layer_range has {len(ends.items)} numbers", hint=_RANGE_HINT)
    start, stop = (as_integer(end, what="layer_range") for end in ends.items)
    if start < 0 or stop < start:
        raise ends.spot.error(f"layer_range [{start}, {stop}] is no range", hint=_RANGE_HINT)
    return Slice(checkpoint=checkpoint, start=start, stop=stop, spot=ends.spot)


_RANGE_HINT = "[a, b] means blocks a to b-1, counted from 0; [g, g] means an auxiliary layer by its group id"


def _parameters(node: MapNode) -> Iterator[_Ignored]:
    """Yield notes on the parameters of *node*; refuses the one that would change tensors."""
    given = node.get("parameters")
    if given is None:
        return
    if not isinstance(given, MapNode):
        raise given.spot.error("parameters is not a mapping", hint="remove it: passthrough needs none")
    for key, value in given.entries:
        if key.text != "scale":
            yield _Ignored(node=key, text=f"passthrough has no parameter {key.text!r}; ignored")
        elif not (isinstance(value, Scalar) and (value.is_null or value.text in {"1", "1.0"})):
            raise key.spot.error("'scale' would change weights and leave their masters behind", hint="remove it")


# -- weights -------------------------------------------------------------------------------------------------------


def _weights(document: MapNode, key: str) -> WeightList:
    node = document.get(key)
    spot = document.key_spot(key)
    if node is None or (isinstance(node, ListNode) and not node.items):
        return WeightList(key=key, is_given=False, entries=(), spot=spot)
    entries = tuple(_weight(item, key) for item in as_list(node, what=key).items)
    return WeightList(key=key, is_given=True, entries=entries, spot=spot)


def _weight(node: Node, what: str) -> WeightEntry:
    what = f"an entry of {what}"
    found = as_map(node, what=what, keys=("name", "model"))
    name = as_scalar(required(found, "name", what=what), what="name")
    checkpoint = read_checkpoint(required(found, "model", what=what), what="model")
    return WeightEntry(name=name.text, checkpoint=checkpoint, spot=name.spot)


# -- everything that is not a layer --------------------------------------------------------------------------------


def _base(document: MapNode, used: list[Checkpoint]) -> Checkpoint:
    """Return ``base_model`` if there is one, else the newest checkpoint of the recipe."""
    given = document.get("base_model")
    if given is not None:
        return read_checkpoint(given, what="base_model")
    return max(used, key=lambda checkpoint: checkpoint.step)


def _check_one_run(checkpoints: list[Checkpoint]) -> None:
    first = checkpoints[0]
    for other in checkpoints:
        if other.run_folder != first.run_folder:
            raise other.spot.error(
                f"{other.path!r} is in another folder than {first.path!r} in line {first.spot.line}; "
                "the checkpoints of one recipe are steps of one run",
                hint="to mix runs, write base: and layers: with RUN@STEP",
            )


def _dtype(document: MapNode) -> str | None:
    chosen: str | None = None
    for key in ("dtype", "out_dtype"):  # the second is what LLMTailor writes, where both are given
        node = document.get(key)
        if node is not None:
            value = as_scalar(node, what=key)
            chosen = _DTYPES.get(value.text.removeprefix("torch."))
            if chosen is None:
                raise value.spot.error(f"{key} {value.text!r} is unknown", hint=f"known: {', '.join(_DTYPES)}")
    return chosen


def _tokenizer_notes(document: MapNode, base: Checkpoint) -> Iterator[_Ignored]:
    source, tokenizer = (document.get(key) for key in _TOKENIZER)
    if source is not None and tokenizer is not None:
        raise document.key_spot("tokenizer").error("tokenizer_source and tokenizer exclude each other", hint="keep one")
    if tokenizer is not None:
        inner = as_map(tokenizer, what="tokenizer", keys=("source", "tokens", "pad_to_multiple_of"))
        for key in ("tokens", "pad_to_multiple_of"):
            value = inner.get(key)
            if value is not None and not (isinstance(value, MapNode) and not value.entries):
                raise inner.key_spot(key).error(f"{key!r} would make new embeddings", hint="remove it")
        source = inner.get("source")
    if source is None or (isinstance(source, Scalar) and source.text == "base"):
        return
    named = "the union" if isinstance(source, Scalar) and source.text == "union" else None
    if named is None:
        checkpoint = read_checkpoint(source, what="tokenizer_source")
        _check_one_run([base, checkpoint])
        named = None if checkpoint.step == base.step else f"that of step {checkpoint.step}"
    if named is not None:
        yield _Ignored(node=source, text=f"the tokenizer is that of the base, step {base.step}, not {named}")


def _template_notes(document: MapNode) -> Iterator[_Ignored]:
    template = document.get("chat_template")
    if template is not None:
        text = "chat_template is ignored: the tokenizer's files are those of the base, byte for byte"
        yield _Ignored(node=template, text=text)
