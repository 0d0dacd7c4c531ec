"""
The parameters of a model, with their names and shapes: from a config, a checkpoint, a commit, or made up from a size.

For a checkpoint, only the shards' headers are read; for a commit, only version blobs. Configs are interpreted by
Transformers: the caller passes in a function that asks Transformers, since importing it takes seconds.
"""

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt, prod
from pathlib import Path
from typing import Any, ClassVar, Literal

from layerstore.errors import InvalidInput, SourceCheckpoint
from layerstore.history import resolve
from layerstore.json_text import parse_json
from layerstore.layers import layers_in_order
from layerstore.limits import MODEL_BLOCKS_MAX, RECORD_BYTES_MAX
from layerstore.model import Kind, Parameter
from layerstore.source import read_source_file, real_path
from layerstore.storage import Repository
from layerstore.zero3 import discover, holds_zero, read_checkpoint, read_pointer

CONFIG = "config.json"
MADE_UP_VOCABULARY = 128_000
"""The vocabulary of a model if only its size is known; about as large as that of today's tokenizers."""

INSTEAD = "--params 8B --layers 32 needs no config"

ADAM = ("exp_avg", "exp_avg_sq")
"""The states that Adam keeps for each element besides its master."""

Shapes = Sequence[tuple[str, tuple[int, ...]]]

ModelSource = Literal["config", "params", "checkpoint", "commit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model, as far as its checkpoints are concerned."""

    _JSON: ClassVar = "name architecture source parameters"

    name: str
    source: ModelSource
    """Where the facts come from; ``params`` if it is made up."""
    layers: Mapping[str, Mapping[str, int]]
    """The elements of each parameter, by layer, in the model's order; tied parameters once, by their first name."""
    architecture: str | None = None
    """Transformers' name for the architecture (``model_type``); None if no config states it."""
    frozen: frozenset[str] = frozenset()
    """Parameters that are not trained."""
    states: tuple[str, ...] = ADAM
    """The states that the optimizer keeps for each trained element besides its master."""
    world_size: int | None = None
    """The number of ranks that saved it; None if it was never saved."""
    dtype: str | None = None
    """Code of the element type of most elements; None if the model was never saved."""
    precision: str | None = None
    """The precision of the commit; None if the model is not from a commit."""

    @property
    def parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(sum(elements.values()) for elements in self.layers.values())


def model_of_shapes(name: str, shapes: Shapes, *, architecture: str | None = None) -> Model:
    """Return the model whose parameters have *shapes*; their names determine their layers."""
    elements = {parameter: prod(shape) for parameter, shape in shapes}
    layers = {
        layer: {parameter: elements[parameter] for parameter in parameters}
        for layer, parameters in layers_in_order(elements).items()
    }
    return Model(name=name, source="config", layers=layers, architecture=architecture)


def model_at(path: Path, *, ask_transformers: Callable[[Mapping[str, Any]], Shapes]) -> Model:
    """
    Return the model of *path*: a ``config.json``, a folder with ZeRO shards, or a folder with a config but no shards.

    *ask_transformers* returns the parameters of the model that a config describes.

    Raises:
        InvalidInput: *path* has none of these, several checkpoints, or pointers into a store; the message says which.
        SourceCheckpoint: The shards are incomplete, damaged or untrusted.
        Unsupported: Transformers is missing or does not know the model, or a setting kept state out of the shards.
    """
    place = real_path(path)
    if place.is_dir() and holds_zero(place):
        return _model_of_checkpoint(place)
    file = place / CONFIG if place.is_dir() else place
    if place.is_dir() and not file.is_file():
        raise InvalidInput(
            f"{path} holds neither ZeRO shards nor a {CONFIG} to estimate from",
            hint=f"a checkpoint's folder, or a commit of a store; {INSTEAD}",
        )
    try:
        config = parse_json(read_source_file(file, size_bytes_max=RECORD_BYTES_MAX))
    except SourceCheckpoint as exc:
        raise InvalidInput(f"there is no {CONFIG} to estimate from: {exc}", hint=INSTEAD) from exc
    except ValueError as exc:
        raise InvalidInput(f"{file} is not JSON: {exc}", hint=INSTEAD) from exc
    if not isinstance(config, dict):
        raise InvalidInput(f"{file} is not an object", hint=INSTEAD)
    kind = config.get("model_type")
    return model_of_shapes(
        file.parent.name if file.name == CONFIG else file.stem,
        ask_transformers(config),
        architecture=kind if isinstance(kind, str) else None,
    )


def _model_of_checkpoint(folder: Path) -> Model:
    try:
        checkpoint_files = discover(folder)
    except InvalidInput as exc:
        raise InvalidInput(str(exc), hint="name one of them, or its config.json") from exc
    pointer = read_pointer(checkpoint_files.ranks[0].model)
    if pointer is not None:
        raise InvalidInput(
            f"{folder} holds pointers to {pointer.name} in the store {pointer.store}",
            hint=f"layerstore estimate {shlex.quote(pointer.name)} --store {shlex.quote(pointer.store)}",
        )
    checkpoint = read_checkpoint(checkpoint_files)
    tensors = (
        (source.kind, part.name, part.state)
        for layer in checkpoint.layers
        for source in layer.objects
        for part in source.slices
    )
    layers = {layer.layer: layer.parameters for layer in checkpoint.layers}
    return _model_seen(
        checkpoint_files.folder.name, "checkpoint", layers, set(tensors), world_size=checkpoint.world_size
    )


def model_of_commit(repo: Repository, reference: str) -> Model:
    """
    Return the model of the commit or pin that *reference* refers to.

    Raises:
        NotFound: There is no such run, step or pin.
        IntegrityError: A version of the commit is damaged or missing.
    """
    record = resolve(repo, reference).record
    versions = [repo.version_of(entry) for entry in record.layers]
    tensors = (
        (stored.kind, tensor.name, tensor.state)
        for version in versions
        for stored in version.objects
        for tensor in stored.tensors
    )
    layers = {version.layer: version.parameters for version in versions}
    model = _model_seen(reference, "commit", layers, set(tensors), world_size=record.world_size)
    return replace(model, precision=record.kept_precision)


def _model_seen(
    name: str,
    source: ModelSource,
    layers: Mapping[str, Iterable[Parameter]],
    tensors: set[tuple[Kind, str, str]],
    *,
    world_size: int,
) -> Model:
    """Return the model of *layers*, leaving out frozen parameters whose weights are in none of *tensors*."""
    held = {name for kind, name, _ in tensors if kind in {Kind.MASTER, Kind.WEIGHTS}}
    held_parameters = {
        layer: [parameter for parameter in parameters if parameter.name in held] for layer, parameters in layers.items()
    }
    parameters = [parameter for of_layer in held_parameters.values() for parameter in of_layer]
    types = Counter[str]()
    for parameter in parameters:
        types[parameter.dtype] += prod(parameter.shape)
    return Model(
        name=name,
        source=source,
        layers={
            layer: {parameter.name: prod(parameter.shape) for parameter in of_layer}
            for layer, of_layer in held_parameters.items()
        },
        frozen=frozenset(parameter.name for parameter in parameters if parameter.frozen),
        # gc may have dropped a commit's moments; further training creates new ones.
        states=tuple(sorted({state for kind, _, state in tensors if kind is Kind.OPTIMIZER})) or ADAM,
        world_size=world_size,
        dtype=max(types, key=types.__getitem__, default=None),
    )


def made_up(parameters: int, blocks: int) -> Model:
    """
    Return a model of *parameters* elements in *blocks* equal blocks, with an embedding, a norm and a head.

    Its width is that of a Transformer of this size and depth: a block has 12 * width**2 parameters.

    Raises:
        InvalidInput: There are too many blocks, or too few parameters for the blocks.
    """
    if not 0 < blocks <= MODEL_BLOCKS_MAX:
        raise InvalidInput(f"no model has {blocks:,} blocks", hint=f"--layers is from 1 to {MODEL_BLOCKS_MAX:,}")
    vocabulary = MADE_UP_VOCABULARY
    # The root of 12 * blocks * width**2 + 2 * vocabulary * width = parameters.
    width = max(1, (isqrt(vocabulary**2 + 12 * blocks * parameters) - vocabulary) // (12 * blocks))
    block, rest = divmod(parameters - 2 * vocabulary * width - width, blocks)
    if block < 1:
        raise InvalidInput(
            f"{parameters:,} parameters are too few for {blocks} blocks, an embedding and a head",
            hint="--params and --layers describe the whole model: 8B and 32",
        )
    # The embedding gets the remainder of the division, so that the sizes add up to *parameters*.
    sizes = {"model.embed_tokens": vocabulary * width + rest}
    sizes |= {f"model.layers.{index}": block for index in range(blocks)}
    sizes |= {"model.norm": width, "lm_head": vocabulary * width}
    layers = {layer: {f"{layer}.weight": elements} for layer, elements in sizes.items()}
    return Model(name=f"a model of {blocks} blocks", source="params", layers=layers)
