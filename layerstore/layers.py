"""
From parameter names to layers, and from layers to the parts of a model, by rule: never by a list of architectures.

A **block** ends in its index (``model.layers.3``, ``transformer.h.3``, ``decoder.block.0``);
all other layers are **auxiliary** and are named after the module that owns the parameter (``model.norm``, ``lm_head``).
Blocks form stacks; the other layers are on the input or the output side.
This module also defines the names allowed for runs and pins, and the syntax of references.
"""

import re
import shlex
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from layerstore.errors import InvalidInput
from layerstore.limits import NAME_BYTES_MAX

# Wrappers add these before or between the model's own names.
_WRAPPER_COMPONENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_WRAPPER_PREFIXES = ("base_model.model.", "module.")
# No block's index is longer than this, and Python refuses to parse much longer numbers.
_INDEX_DIGITS_MAX = 18
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""PEFT's name for the file of an adapter's weights."""

# An adapter belongs to the layer of the module that it adapts.
_ADAPTER_COMPONENTS = re.compile(r"base_layer|lora_\w+|modules_to_save|original_module|ia3_\w+")

# A word that needs no quoting in any shell.
_ONE_WORD = re.compile(r"[\w@%+=:,./-][\w@%+=:,./~-]*", re.ASCII)
# Accepts almost any name: check_name reports invalid ones.
_REF = re.compile(r"(?P<name>[^@~]+)(?:~(?P<back>\d{1,9}))?(?:@(?P<step>\d{1,18}))?")


def typed(name: str) -> str:
    """
    Return *name* quoted for a shell, as one word.

    >>> typed("sft~1@200"), typed("my run@200")
    ('sft~1@200', "'my run@200'")
    """
    return name if _ONE_WORD.fullmatch(name) else shlex.quote(name)


def unwrapped(name: str) -> str:
    """
    Return *name* without the components that torch's wrappers add to it, such as those for compiling.

    >>> unwrapped("_orig_mod.model.norm.weight")
    'model.norm.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_COMPONENTS) or name


def strip_wrappers(name: str) -> str:
    """
    Return *name* as in the bare model.

    >>> strip_wrappers("base_model.model.model.layers.0.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    bare = unwrapped(name)
    for prefix in _WRAPPER_PREFIXES:
        bare = bare.removeprefix(prefix)
    return bare or name


def is_of_adapter(name: str) -> bool:
    """
    Whether the parameter *name* belongs to an adapter, or to a module that an adapter wraps.

    >>> is_of_adapter("base_model.model.lm_head.lora_A.default.weight"), is_of_adapter("lm_head.weight")
    (True, False)
    """
    return any(_ADAPTER_COMPONENTS.fullmatch(part) for part in name.split("."))


@lru_cache(maxsize=1 << 14)  # each save of a running engine asks for the same names again
def layer_of(name: str, *, pattern: re.Pattern[str] | None = None) -> str:
    """
    Return the layer that the parameter or buffer *name* belongs to.

    *pattern* overrides the rule if it matches: the layer is its group ``layer``, otherwise its first group, otherwise
    the whole match.

    >>> layer_of("model.layers.3.self_attn.q_proj.weight")
    'model.layers.3'
    >>> layer_of("lm_head.weight"), layer_of("base_model.model.lm_head.lora_A.default.weight")
    ('lm_head', 'lm_head')
    >>> layer_of("encoder.stage2.conv.bias", pattern=re.compile(r"encoder\\.stage\\d+"))
    'encoder.stage2'
    """
    if pattern is not None and (match := pattern.search(name)):
        layer = match.groupdict().get("layer") or (match.group(1) if match.groups() else match.group())
        if not layer:
            raise InvalidInput(
                f"the layer pattern {pattern.pattern!r} gives {name!r} no layer name",
                hint="let its first group, or the whole match, be the layer's name",
            )
        return layer
    return _layer_by_rule(strip_wrappers(name))


def _layer_by_rule(name: str) -> str:
    parts = name.split(".")
    for position, part in enumerate(parts[:-1]):
        # The first number is the block's; a later one belongs to an expert, or to a module inside the block.
        if part.isdecimal():
            return ".".join(parts[: position + 1])
    owner = parts[:-1]
    for position, part in enumerate(owner):
        # Never cut at the first component: nothing would be left to name the layer.
        if position and _ADAPTER_COMPONENTS.fullmatch(part):
            owner = owner[:position]
            break
    return ".".join(owner) or name


def block_index(layer: str) -> int | None:
    """
    Return the index of a block, None for an auxiliary layer.

    >>> block_index("model.layers.3"), block_index("lm_head")
    (3, None)
    """
    last = layer.rpartition(".")[2]
    return int(last) if last.isdecimal() and len(last) <= _INDEX_DIGITS_MAX else None


def layers_in_order(names: Iterable[str], *, pattern: re.Pattern[str] | None = None) -> dict[str, list[str]]:
    """
    Gather *names* by layer.

    Layers come in the order of their first name, which is the model's order if *names* come from its ``state_dict``.
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(layer_of(name, pattern=pattern), []).append(name)
    return layers


def compile_pattern(pattern: str | None) -> re.Pattern[str] | None:
    """Compile a user's layer pattern."""
    if pattern is None:
        return None
    try:
        return re.compile(pattern)
    except re.error as exc:
        raise InvalidInput(
            f"the layer pattern {pattern!r} is not a regular expression: {exc}",
            hint="write one for Python's re; its first group is the layer's name",
        ) from exc


# -- the parts of a model, as policies see it ----------------------------------------------------------------------

# A word in the last component of a norm's name: norm, final_layer_norm, norm_f, layernorm, norm1, ln_f.
_NORM = re.compile(r"[a-z]*norm\d*|ln\d*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of a model, each in the model's order."""

    stacks: tuple[tuple[str, ...], ...]
    """Blocks by the module that holds them: one stack in most models, two in an encoder-decoder."""
    input_side: tuple[str, ...]
    """Layers before the blocks that they belong to: embeddings."""
    output_side: tuple[str, ...]
    """Layers after their blocks: norms and heads."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """All blocks, stack after stack."""
        return tuple(block for stack in self.stacks for block in stack)

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """All layers that are not blocks."""
        return self.input_side + self.output_side

    def ends(self, first: int, last: int) -> frozenset[str]:
        """Return the *first* and *last* blocks of every stack."""
        return frozenset(
            block for stack in self.stacks for block in (*stack[:first], *stack[max(0, len(stack) - last) :])
        )


@lru_cache(maxsize=64)
def anatomy(layers: tuple[str, ...]) -> Anatomy:
    """
    Return the parts of a model.

    >>> anatomy(("embed", "layers.0", "layers.1", "norm", "head")).output_side
    ('norm', 'head')
    """
    stacks: dict[str, list[str]] = {}
    for layer in layers:
        if block_index(layer) is not None:
            stacks.setdefault(layer.rpartition(".")[0], []).append(layer)
    first = {stack: layers.index(blocks[0]) for stack, blocks in stacks.items()}
    sides: dict[bool, list[str]] = {True: [], False: []}
    for position, layer in enumerate(layers):
        if block_index(layer) is None:
            sides[position < _beginning(layer, first, end=len(layers))].append(layer)
    return Anatomy(
        stacks=tuple(map(tuple, stacks.values())), input_side=tuple(sides[True]), output_side=tuple(sides[False])
    )


def _beginning(layer: str, first: Mapping[str, int], *, end: int) -> int:
    """
    Return the position of the first block of the stack that an auxiliary *layer* belongs to; *end* if there is none.

    The layer belongs to the stack whose name shares the most leading parts with the layer's name
    (``encoder.final_layer_norm`` and ``encoder.block``); if several do, to the first of these.
    """
    shared = {stack: _shared(layer.split("."), stack.split(".")) for stack in first}
    most = max(shared.values(), default=0)
    return min((first[stack] for stack, count in shared.items() if count == most), default=end)


def _shared(left: Sequence[str], right: Sequence[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def norms(layers: Sequence[str]) -> frozenset[str]:
    """
    Return the norms among *layers*, by name.

    >>> sorted(norms(["model.embed_tokens", "model.norm", "transformer.ln_f", "lm_head"]))
    ['model.norm', 'transformer.ln_f']
    """
    return frozenset(layer for layer in layers if any(map(_NORM.fullmatch, layer.rpartition(".")[2].split("_"))))


# -- names of runs and pins, and references ------------------------------------------------------------------------


def check_name(name: str, *, what: str) -> str:
    """
    Return *name* if it may name a run or a pin.

    ``@`` and ``~`` are not allowed because references use them.

    Raises:
        InvalidInput: *name* is empty, too long, not NFC, or has characters that could be mistaken for something else.
    """
    problem = _name_problem(name)
    if problem is not None:
        raise InvalidInput(
            f"{what} {name!r} {problem}", hint="a name is like sft-8b_lr2.5; with spaces it needs quotes"
        )
    return name


@lru_cache(maxsize=1 << 10)  # a commit has a run's name for each layer
def is_name(name: str) -> bool:
    """Whether *name* may name a run or a pin."""
    return _name_problem(name) is None


def is_inside(path: str) -> bool:
    """Whether the untrusted *path* stays inside the folder that it is relative to."""
    return "\0" not in path and not {"", ".", ".."}.intersection(path.split("/"))


def _name_problem(name: str) -> str | None:  # noqa: PLR0911  # one line per rule
    if not name:
        return "is empty"
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if size_bytes > NAME_BYTES_MAX:
        return f"is longer than {NAME_BYTES_MAX} bytes"
    if unicodedata.normalize("NFC", name) != name:
        return "is not in Unicode's composed form (NFC)"
    if any(unicodedata.category(letter) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for letter in name):
        return "contains control characters"
    if name.startswith("-") or set(name) & set("@~/\\*?"):
        return "starts with '-' or contains one of @ ~ / \\ * ?"
    if ".." in name or name.startswith("."):
        return "starts with '.' or contains '..'"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A parsed reference."""

    name: str
    """The name of a run or a pin."""
    back: int
    """How many attempts before the newest."""
    step: int | None
    """The step; None for the tip."""


def parse_reference(text: str) -> Reference:
    """
    Parse the reference *text*.

    >>> parse_reference("sft~1@200")
    Reference(name='sft', back=1, step=200)

    Raises:
        InvalidInput: *text* is not a reference, or its name is invalid.
    """
    match = _REF.fullmatch(text)
    hint = "write RUN@STEP, RUN, RUN~1, RUN~1@STEP or a pin's name"
    if "/" in text or text.startswith("."):
        raise InvalidInput(f"{text!r} is a path, not a reference to what the store holds", hint=hint, name=text)
    if match is None:
        raise InvalidInput(f"{text!r} is not a reference", hint=hint)
    step = match["step"]
    return Reference(
        name=check_name(match["name"], what="the name"),
        back=int(match["back"] or 0),
        step=None if step is None else int(step),
    )
