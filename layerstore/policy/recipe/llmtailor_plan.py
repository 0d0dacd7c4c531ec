"""
Interpret an LLMTailor recipe for a model, with every check that needs the model.

Our layers are whole: a layer's weights, master and optimizer state come from the same step. LLMTailor takes the weights
of auxiliary layers from ``pre_weights`` and ``post_weights``, or by default from its first or last slice, and their
optimizer state from the slices with empty ranges. For us, the slices with empty ranges decide; any listed weights must
agree with them, and a note lists layers for which LLMTailor's default differs.

In LLMTailor's group ids, 0 is the norm, 1 to L are the blocks, then come the head and the embedding; tied models have
no head. LLMTailor uses the ids as positions in an optimizer; for us, each stands for a layer, which we find by its name
and the layers' order in the model.
"""

import re
from dataclasses import dataclass

from layerstore.errors import InvalidInput
from layerstore.layers import anatomy, block_index, layer_of, norms, strip_wrappers
from layerstore.model import LayerVersion
from layerstore.policy.recipe.document import Spot
from layerstore.policy.recipe.patterns import listed, near
from layerstore.policy.recipe.plan import Choice, ModelOutline, RecipePlan, notes_of_later_layers

_EMBEDDING = re.compile(r"embed|wte|tok", re.IGNORECASE)
_OTHER_EMBEDDING = re.compile(r"pos|wpe|type|segment", re.IGNORECASE)
_HINT = "write base: and layers: instead, which call layers by their names"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRange:
    """One slice: a range of blocks, or one auxiliary layer, of one checkpoint."""

    checkpoint: Choice
    start: int
    stop: int
    spot: Spot
    """The position of the range."""

    @property
    def is_group(self) -> bool:
        """Whether it selects an auxiliary layer by its group id."""
        return self.start == self.stop

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightEntry:
    """Where the weights of one auxiliary parameter come from."""

    name: str
    checkpoint: Choice
    spot: Spot
    """The position of the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightList:
    """``pre_weights`` or ``post_weights``; unless empty, it replaces LLMTailor's default."""

    key: str
    entries: tuple[WeightEntry, ...]
    spot: Spot


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """The layers of a model, by the role that LLMTailor's group ids give them."""

    blocks: tuple[str, ...]
    """The blocks, by index."""
    norm: str
    """The final norm, outside the blocks."""
    head: str | None
    """The output layer; None if it is tied to the embedding."""
    embedding: str

    @property
    def auxiliary(self) -> dict[int, str]:
        """The auxiliary layers by group id."""
        behind = [self.embedding] if self.head is None else [self.head, self.embedding]
        return {0: self.norm, **dict(enumerate(behind, len(self.blocks) + 1))}


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMTailorRecipe:
    """A recipe in LLMTailor's grammar, not yet matched with a model."""

    name: str
    """The file's name in errors."""
    base: Choice
    """``base_model`` or, if the recipe does not give it, the newest step in the recipe."""
    run_hint: str | None
    """The run name that ``ingest`` would have given to the recipe's folders."""
    slices: tuple[LayerRange, ...]
    """In file order; at least one."""
    pre_weights: WeightList
    post_weights: WeightList
    spot: Spot
    """The position of ``slices``."""
    notes: tuple[str, ...]
    grammar: str = "llmtailor"

    def plan(self, model: ModelOutline) -> RecipePlan:
        """
        Return which version every layer of *model* comes from.

        Raises:
            InvalidInput: The recipe does not fit the model.
        """
        with self.spot.located():
            groups = groups_of(model)
        frozen = {version.layer for version in model.layers if all(each.frozen for each in version.parameters)}
        decided = _blocks(self, groups) | _auxiliary(self, groups, frozen)
        chosen, named = dict(decided), set[str]()
        for entry in self.pre_weights.entries + self.post_weights.entries:
            layer = _owner(entry, groups, model)
            named.add(layer)
            first = chosen.setdefault(layer, entry.checkpoint)
            if entry.checkpoint.step != first.step:
                raise entry.spot.error(
                    f"the weights of {layer} come from step {entry.checkpoint.step}, "
                    f"but the rest of the layer from step {first.step} ({first.spot})",
                    hint="take both from one checkpoint: a layer is whole",
                )
        notes = [*self.notes, *_notes_of_defaults(self, groups, decided, named)]
        if left := [name for name in model.names if name not in chosen]:
            notes.append(f"{self.spot}: the recipe does not name {listed(left)}; taken from the base")
        own = Choice(run=None, step=None, spot=self.base.spot)
        layers = {name: chosen.get(name, own) for name in model.names}
        notes += notes_of_later_layers(self.base, layers)
        return RecipePlan(base=self.base, layers=layers, notes=tuple(notes))


# -- which layer has which group id --------------------------------------------------------------------------------


def groups_of(model: ModelOutline) -> LayerGroups:
    """
    Find the layers that group ids stand for, by the layers' names and order.

    Raises:
        InvalidInput: The model has several stacks of blocks, or auxiliary layers whose role is ambiguous.
    """
    parts = anatomy(model.names)
    if len(parts.stacks) != 1:
        blocks = f"{len(parts.stacks)} stacks of blocks: {listed(parts.blocks)}" if parts.stacks else "no blocks"
        raise InvalidInput(
            f"LLMTailor's layer_range counts one stack of blocks, and this model has {blocks}", hint=_HINT
        )
    trained = {version.layer: version for version in model.layers if version.parameters}
    before = [name for name in parts.input_side if name in trained]
    after = [name for name in parts.output_side if name in trained]
    tied = [name for name in before + after if _ties(trained[name])]
    embedding = _one(tied or _embeddings(before), what="embedding")
    before, after = ([name for name in side if name != embedding] for side in (before, after))
    heads = [name for name in after if name.rpartition(".")[2] == "lm_head"]
    # The norm is after the blocks in most models, before them if the code creates it first.
    named = norms(after) or norms(before) or set(after) - set(heads)
    norm = _one([name for name in before + after if name in named], what="norm")
    if not tied and not heads:
        heads = [name for name in after if name != norm]
    return LayerGroups(
        blocks=tuple(sorted(parts.blocks, key=lambda block: block_index(block) or 0)),
        norm=norm,
        head=_one(heads, what="head") if heads or not tied else None,
        embedding=embedding,
    )


def _ties(version: LayerVersion) -> list[str]:
    """Return the names under which other layers use this layer's parameters, such as a tied ``lm_head.weight``."""
    # Both names go through `layer_of`: `version.layer` may come from a user's pattern, and would not compare.
    return [alias for each in version.parameters for alias in each.aliases if layer_of(alias) != layer_of(each.name)]


def _embeddings(before: list[str]) -> list[str]:
    """Return candidates for an untied model's embedding; *before* may hold position embeddings, norms, projectors."""
    others = [name for name in before if name not in norms(before)]
    named = [name for name in others if _EMBEDDING.search(name) and not _OTHER_EMBEDDING.search(name)]
    return others if len(others) == 1 else named or others


def _one(candidates: list[str], *, what: str) -> str:
    if len(candidates) != 1:
        problem = f"several candidates: {listed(candidates)}" if candidates else "none"
        raise InvalidInput(f"LLMTailor's grammar takes one {what}, and this model has {problem}", hint=_HINT)
    return candidates[0]


# -- slices --------------------------------------------------------------------------------------------------------


def _blocks(recipe: LLMTailorRecipe, groups: LayerGroups) -> dict[str, Choice]:
    """Return where each block comes from; the ranges must cover every block once, in order."""
    blocks = groups.blocks
    choices: list[Choice] = []
    spot = recipe.spot
    for part in recipe.slices:
        if part.is_group:
            continue
        spot = part.spot
        if part.start != len(choices):
            raise spot.error(
                f"{part} is out of order: block {len(choices)} comes next",
                hint="write the ranges in ascending order, each block in one of them; [a, b] ends before block b",
            )
        if part.stop > len(blocks):
            raise spot.error(
                f"{part} ends after block {part.stop - 1}, but the model has {len(blocks)}: 0 to {len(blocks) - 1}",
                hint=f"the ranges must total {len(blocks)} blocks; auxiliary layers are written [g, g]",
            )
        choices += [part.checkpoint] * (part.stop - part.start)
    if len(choices) < len(blocks):
        raise spot.error(
            f"the ranges total {len(choices)} blocks and the model has {len(blocks)}: "
            f"{listed(blocks[len(choices) :])} is missing",
            hint="add a slice for every block; in layer_range [a, b] the last block is b-1",
        )
    return dict(zip(blocks, choices, strict=True))


def _auxiliary(recipe: LLMTailorRecipe, groups: LayerGroups, frozen: set[str]) -> dict[str, Choice]:
    """Return where each auxiliary layer comes from: the slice that copies its optimizer state decides."""
    auxiliary = groups.auxiliary
    owner: dict[str, LayerRange] = {}
    for part in recipe.slices:
        if not part.is_group:
            continue
        layer = auxiliary.get(part.start)
        if layer is None:
            known = ", ".join(f"[{group}, {group}] {name}" for group, name in auxiliary.items())
            raise part.spot.error(
                f"{part} is not an auxiliary layer of this model",
                hint=f"auxiliary layers here: {known}; one block is written [g, g+1]",
            )
        if layer in owner:
            raise part.spot.error(
                f"{part} takes {layer}, which line {owner[layer].spot.line} took already",
                hint="keep one of the two slices",
            )
        owner[layer] = part
    # LLMTailor has no group for frozen layers, since they have no optimizer state.
    missing = {group: layer for group, layer in auxiliary.items() if layer not in owner and layer not in frozen}
    if missing:
        lines = " and ".join(f"layer_range: [{group}, {group}]" for group in missing)
        raise recipe.spot.error(
            f"no slice takes the optimizer state of {listed(missing.values())}", hint=f"add a slice with {lines}"
        )
    return {layer: part.checkpoint for layer, part in owner.items()}


# -- weights -------------------------------------------------------------------------------------------------------


def _owner(entry: WeightEntry, groups: LayerGroups, model: ModelOutline) -> str:
    """Return the auxiliary layer that has the parameter of *entry*."""
    name = strip_wrappers(entry.name)
    outside = [version for version in model.layers if version.layer not in groups.blocks]
    owners = {strip_wrappers(each.name): version.layer for version in outside for each in version.parameters}
    ties = {strip_wrappers(alias): version.layer for version in outside for alias in _ties(version)}
    if name in ties:
        raise entry.spot.error(
            f"{entry.name!r} is tied: it is the same memory as the weights of {ties[name]}",
            hint=f"remove this entry; the tensor comes with {ties[name]}",
        )
    if name not in owners:
        raise entry.spot.error(
            f"the model has no parameter {entry.name!r} outside its blocks",
            hint=near(name, owners, what="outside the blocks"),
        )
    return owners[name]


def _notes_of_defaults(
    recipe: LLMTailorRecipe, groups: LayerGroups, decided: dict[str, Choice], named: set[str]
) -> list[str]:
    """
    Return a note on each layer whose weights LLMTailor's default would take from a step other than its slice's.

    Raises:
        InvalidInput: A list of weights, which replaces the default, leaves out a layer of its side.
    """
    notes = []
    output_side = [groups.norm, *([] if groups.head is None else [groups.head])]
    for weights, layers, default in (
        (recipe.pre_weights, [groups.embedding], recipe.slices[0].checkpoint),
        (recipe.post_weights, output_side, recipe.slices[-1].checkpoint),
    ):
        unnamed = [layer for layer in layers if layer not in named]
        if weights.entries and unnamed:
            raise weights.spot.error(
                f"{weights.key} leaves out the weights of {listed(unnamed)}; a list replaces the default",
                hint="add an entry with name and model, or remove the list",
            )
        for layer in unnamed:
            if layer in decided and decided[layer].step != default.step:
                notes.append(
                    f"{decided[layer].spot}: {layer} comes whole from step {decided[layer].step}; "
                    f"without {weights.key}, LLMTailor would take its weights from step {default.step}"
                )
    return notes
