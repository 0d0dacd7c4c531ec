"""
What an LLMTailor recipe means for a model, checked in every way in which it could mean something else.

Our layers are whole: weights, master and optimizer state travel together.
LLMTailor takes the weights of auxiliary layers from ``pre_weights`` and ``post_weights``, or by default from its first
or last slice, and their optimizer state from the slices with empty ranges. Here those slices decide;
weights that are named must agree, and a default that would have disagreed is noted.
"""

from dataclasses import dataclass

from layerstore.layers import strip_wrappers
from layerstore.policy.recipe.anatomy import Anatomy, anatomy_of
from layerstore.policy.recipe.modelpaths import Checkpoint
from layerstore.policy.recipe.names import listed, near
from layerstore.policy.recipe.plan import Choice, ModelOutline, RecipePlan, notes_of_later_layers
from layerstore.policy.recipe.spots import Spot


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A range of blocks, or one auxiliary layer, of one checkpoint."""

    checkpoint: Checkpoint
    start: int
    stop: int
    spot: Spot
    """Of the range."""

    @property
    def is_group(self) -> bool:
        """Whether it means an auxiliary layer by its group id."""
        return self.start == self.stop

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightEntry:
    """Where the weights of one auxiliary parameter come from."""

    name: str
    checkpoint: Checkpoint
    spot: Spot
    """Of the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightList:
    """``pre_weights`` or ``post_weights``."""

    key: str
    is_given: bool
    """Whether it replaces LLMTailor's defaults: an empty list does not."""
    entries: tuple[WeightEntry, ...]
    spot: Spot


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMTailorRecipe:
    """A recipe in LLMTailor's grammar."""

    name: str
    base: Choice
    """``base_model``, else the newest step of the recipe."""
    run_hint: str | None
    slices: tuple[Slice, ...]
    """In file order; at least one."""
    pre_weights: WeightList
    post_weights: WeightList
    dtype: str | None
    """Code of the element type that the weights are to have."""
    dtype_spot: Spot
    spot: Spot
    """Of ``slices``."""
    notes: tuple[str, ...]
    grammar: str = "llmtailor"

    @property
    def weights(self) -> tuple[WeightEntry, ...]:
        """Both lists: LLMTailor itself tells them apart by their place in the file only."""
        return self.pre_weights.entries + self.post_weights.entries

    def plan(self, model: ModelOutline) -> RecipePlan:
        """Return each layer's choice; raises as `Recipe.plan` says."""
        with self.spot.located():
            parts = anatomy_of(model)
        frozen = {layer.name for layer in model.layers if layer.frozen}
        decided = _blocks(self, parts) | _auxiliary(self, parts, frozen)
        weights = [(_owner(entry, parts, model), entry) for entry in self.weights]
        chosen = decided | _by_weights_alone(decided, weights)
        named = {layer for layer, _ in weights}
        _check_replaced_defaults(self, parts, named)
        layers = {name: _choice(chosen.get(name), self.base) for name in model.names}
        notes = [
            *self.notes,
            *_notes_of_defaults(self, parts, {layer: decided[layer] for layer in decided if layer not in named}),
            *_notes_of_the_base(self, [name for name in model.names if name not in chosen]),
            *_notes_of_dtype(self, model),
            *notes_of_later_layers(self.base, layers),
        ]
        return RecipePlan(base=self.base, layers=layers, notes=tuple(notes))


def _choice(checkpoint: Checkpoint | None, base: Choice) -> Choice:
    if checkpoint is None:
        return Choice(run=None, step=None, spot=base.spot)
    return Choice(run=None, step=checkpoint.step, path=checkpoint.path, spot=checkpoint.spot)


# -- blocks --------------------------------------------------------------------------------------------------------


def _blocks(recipe: LLMTailorRecipe, parts: Anatomy) -> dict[str, Checkpoint]:
    """Return where each block comes from: all of them, once each, in order."""
    ranges = [part for part in recipe.slices if not part.is_group]
    owner: dict[int, Slice] = {}
    for part in ranges:
        _check_end(part, len(parts.blocks))
        for index in range(part.start, part.stop):
            if index in owner:
                raise part.spot.error(
                    f"{part} takes {parts.blocks[index]}, which {owner[index]} in line {owner[index].spot.line} took",
                    hint="let every block be in one range",
                )
            owner[index] = part
    _check_total(recipe, ranges, owner, parts.blocks)
    _check_order(ranges)
    return {block: owner[index].checkpoint for index, block in enumerate(parts.blocks)}


def _check_end(part: Slice, blocks: int) -> None:
    if part.stop > blocks:
        raise part.spot.error(
            f"{part} ends after block {part.stop - 1}, but the model has {blocks}: 0 to {blocks - 1}",
            hint=f"the ranges must total {blocks} blocks; auxiliary layers are written [g, g]",
        )


def _check_total(
    recipe: LLMTailorRecipe, ranges: list[Slice], owner: dict[int, Slice], blocks: tuple[str, ...]
) -> None:
    missing = [block for index, block in enumerate(blocks) if index not in owner]
    if not missing:
        return
    # A gap is shown where it ends; what is missing at the end, at the last range.
    gap = next(index for index in range(len(blocks)) if index not in owner)
    behind = [part for part in ranges if part.start > gap]
    spot = min(behind, key=lambda part: part.start).spot if behind else ranges[-1].spot if ranges else recipe.spot
    where = "before this" if behind else "at the end"
    raise spot.error(
        f"the ranges total {len(owner)} blocks and the model has {len(blocks)}: {where}, {listed(missing)} is missing",
        hint="add a slice for every block; in layer_range [a, b] the last block is b-1",
    )


def _check_order(ranges: list[Slice]) -> None:
    expected = 0
    for part in ranges:
        if part.start != expected:
            raise part.spot.error(
                f"{part} stands where block {expected} is due; LLMTailor would move its blocks to another place",
                hint="write the ranges in ascending order: a layer keeps its place",
            )
        expected = part.stop


# -- auxiliary layers ----------------------------------------------------------------------------------------------


def _auxiliary(recipe: LLMTailorRecipe, parts: Anatomy, frozen: set[str]) -> dict[str, Checkpoint]:
    """Return where each auxiliary layer comes from, by the slices that copy its optimizer state."""
    owner: dict[str, Slice] = {}
    for part in recipe.slices:
        if part.is_group:
            layer = _layer_of_group(part, parts)
            if layer in owner:
                raise part.spot.error(
                    f"{part} takes {layer}, which line {owner[layer].spot.line} took already",
                    hint="keep one of the two slices",
                )
            owner[layer] = part
    # What is frozen has no optimizer state, so LLMTailor has no group for it.
    missing = {group: layer for group, layer in parts.groups.items() if layer not in owner and layer not in frozen}
    if missing:
        lines = " and ".join(f"layer_range: [{group}, {group}]" for group in missing)
        raise recipe.spot.error(
            f"no slice takes the optimizer state of {listed(missing.values())}", hint=f"add a slice with {lines}"
        )
    return {layer: part.checkpoint for layer, part in owner.items()}


def _layer_of_group(part: Slice, parts: Anatomy) -> str:
    group, blocks = part.start, len(parts.blocks)
    if group in parts.groups:
        return parts.groups[group]
    if group <= blocks:
        raise part.spot.error(
            f"{part} is an optimizer group of {parts.blocks[group - 1]}, half a block",
            hint=f"the whole block is written [{group - 1}, {group}]",
        )
    if parts.head is None and group == blocks + 2:
        raise part.spot.error(
            f"{part} would be the embedding of an untied model; here head and embedding are one layer, "
            f"{parts.embedding}, with the group id {blocks + 1}",
            hint=f"keep one slice for it, [{blocks + 1}, {blocks + 1}]",
        )
    raise part.spot.error(f"{part} is no group of this model", hint=f"auxiliary layers here: {parts.described()}")


# -- weights -------------------------------------------------------------------------------------------------------


def _owner(entry: WeightEntry, parts: Anatomy, model: ModelOutline) -> str:
    """Return the auxiliary layer that *entry* speaks of."""
    name = strip_wrappers(entry.name)
    owners = {strip_wrappers(parameter): layer.name for layer in model.layers for parameter in layer.parameters}
    ties = {strip_wrappers(alias): layer.name for layer in model.layers for alias in layer.ties}
    if name in ties:
        raise entry.spot.error(
            f"{entry.name!r} is tied: it is the same memory as the weights of {ties[name]}",
            hint=f"remove this entry; {ties[name]} brings it along",
        )
    if name not in owners:
        outside = [parameter for parameter, layer in owners.items() if layer not in parts.blocks]
        raise entry.spot.error(
            f"the model has no parameter {entry.name!r}", hint=near(name, outside, what="outside the blocks")
        )
    if owners[name] in parts.blocks:
        raise entry.spot.error(f"{entry.name!r} is in a block, {owners[name]}", hint="blocks come by layer_range alone")
    return owners[name]


def _by_weights_alone(decided: dict[str, Checkpoint], weights: list[tuple[str, WeightEntry]]) -> dict[str, Checkpoint]:
    """Hold the weights against what slices *decided*, and each other; return the layers that only weights name."""
    alone: dict[str, Checkpoint] = {}
    seen: dict[str, WeightEntry] = {}
    for layer, entry in weights:
        first = seen.setdefault(strip_wrappers(entry.name), entry)
        if first is not entry:
            raise entry.spot.error(
                f"{entry.name!r} stands here again, first in line {first.spot.line}", hint="keep one of the two"
            )
        if layer in decided:
            _check_agrees(entry, layer, decided[layer], how="optimizer state")
        else:
            _check_agrees(entry, layer, alone.setdefault(layer, entry.checkpoint), how="other weights")
    return alone


def _check_agrees(entry: WeightEntry, layer: str, decided: Checkpoint, *, how: str) -> None:
    if entry.checkpoint.step != decided.step:
        raise entry.spot.error(
            f"the weights of {layer} are to come from step {entry.checkpoint.step}, "
            f"its {how} from step {decided.step} ({decided.spot})",
            hint="take both from one checkpoint: a layer is whole",
        )


def _check_replaced_defaults(recipe: LLMTailorRecipe, parts: Anatomy, named: set[str]) -> None:
    """Raise if a list is given, which replaces the default, and leaves a layer of its side out."""
    for weights, layers in _sides(recipe, parts):
        left_out = [layer for layer in layers if layer not in named]
        if weights.is_given and left_out:
            raise weights.spot.error(
                f"{weights.key} leaves out the weights of {listed(left_out)}; a list replaces the default",
                hint="add an entry with name and model, or remove the list",
            )


def _sides(recipe: LLMTailorRecipe, parts: Anatomy) -> list[tuple[WeightList, list[str]]]:
    """Return the two lists with the layers whose default they replace."""
    output_side = [parts.norm, *([parts.head] if parts.head is not None else [])]
    return [(recipe.pre_weights, [parts.embedding]), (recipe.post_weights, output_side)]


# -- notes ---------------------------------------------------------------------------------------------------------


def _notes_of_defaults(recipe: LLMTailorRecipe, parts: Anatomy, unnamed: dict[str, Checkpoint]) -> list[str]:
    """Say where LLMTailor's defaults would have taken weights of *unnamed* from another step than the slices do."""
    notes = []
    for (weights, layers), default in zip(_sides(recipe, parts), (recipe.slices[0], recipe.slices[-1]), strict=True):
        for layer in layers:
            if layer in unnamed and unnamed[layer].step != default.checkpoint.step:
                notes.append(
                    f"{unnamed[layer].spot}: {layer} comes whole from step {unnamed[layer].step}; "
                    f"without {weights.key}, LLMTailor would take its weights from step {default.checkpoint.step}"
                )
    return notes


def _notes_of_the_base(recipe: LLMTailorRecipe, left: list[str]) -> list[str]:
    if not left:
        return []
    return [f"{recipe.spot}: the recipe does not name {listed(left)}; taken from the base"]


def _notes_of_dtype(recipe: LLMTailorRecipe, model: ModelOutline) -> list[str]:
    dtypes = sorted(frozenset[str]().union(*(layer.dtypes for layer in model.layers)))
    if recipe.dtype is None or dtypes in ([recipe.dtype], []):
        return []
    return [f"{recipe.dtype_spot}: weights stay as they were trained ({', '.join(dtypes)}), not {recipe.dtype}"]
