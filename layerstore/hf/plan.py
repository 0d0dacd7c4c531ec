"""
The format ``hf``: a composite's weights as a folder that Transformers (or PEFT) loads; the optimizer is not read.

Like ``zero3``, this format only plans its files; ``assemble`` and ``target`` write them.
"""

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath

from layerstore.assemble import (
    ExportPlan,
    OutputFile,
    WeightsFile,
    WeightTensor,
    export_notes,
    literal_file,
    plan_source_file,
    weights_files,
)
from layerstore.compose import Composition, cautions, load_versions
from layerstore.dtypes import by_code, dtype_code, dtype_name
from layerstore.errors import Unsupported
from layerstore.filenames import SUMMARY, WEIGHTS, WEIGHTS_FILE, WEIGHTS_INDEX
from layerstore.hf.peft import ADAPTER_CONFIG, configs_of, header_of, plan_adapters
from layerstore.hf.weight_names import ExportTensors, ask_transformers, may_be_renamed, saved_tensors
from layerstore.json_text import parse_json
from layerstore.layers import ADAPTER_WEIGHTS
from layerstore.limits import BLOB_BYTES_MAX, SHARD_SIZE
from layerstore.source import tensors_in
from layerstore.states import ObjectContent, RankState, SourceFile, TensorSource
from layerstore.storage import Repository
from layerstore.units import size_in_bytes
from layerstore.zero3.trees import TreeView

CONFIG = "config.json"

# Files for resuming training, or with weights of their own: loading a model does not need them.
_TRAINING_NAMES = frozenset({"trainer_state.json", "latest", "zero_to_fp32.py", "zero_to_torch.py"})
_TRAINING_SUFFIXES = frozenset(
    {".bin", ".ckpt", ".distcp", ".h5", ".msgpack", ".npz", ".pkl", ".pt", ".pth", ".safetensors"}
)


def plan_export(
    repo: Repository,
    composition: Composition,
    *,
    dtype: str | None = None,
    max_shard_size: int | str = SHARD_SIZE,
) -> ExportPlan:
    """
    Decide which tensors go into which files.

    *dtype* is one of ``bf16``, ``fp16``, ``fp32``; None for the type in which each parameter is trained.

    Raises:
        LayoutMismatch: A layer has no weights to export.
    """
    started = time.monotonic()
    wanted_code, shard_bytes_max = dtype_code(dtype), size_in_bytes(max_shard_size)
    base = composition.base
    # An export has no moments, so the layers' optimizer states may differ.
    versions = load_versions(repo, composition, states=False)
    slices, own = composition.slices(repo, versions), composition.own_parameters(versions)
    state = repo.state(base.states[0])  # the first rank's, which includes everything that no rank owns
    beside = [file for file in state.files if goes_along(file.path, tag=base.layout.tag)]
    model_class = None
    if configs_of(state.files):
        weights, files, notes = plan_adapters(repo, state.files, slices, own=own, dtype=wanted_code)
        code = _uniform_dtype(weights)
    else:
        names_outside = TreeView.of(state.model).get("outside")
        outside = set() if names_outside is None else {*names_outside.sequence()}
        config, fields, problem = _read_config(repo, state.files)
        model_class = _model_class(fields)
        chosen = ExportTensors(
            parameters={name: parameter for name, parameter in slices.parameters.items() if name not in outside},
            buffers={buffer.name: buffer for version in versions for buffer in version.buffers},
            dtype=wanted_code,
            is_own=own.__contains__,
            ask=partial(ask_transformers, fields),
        )
        saved = [*saved_tensors(state.gathered), *_opaque_tensors(repo, state.files)]
        chosen.choose(saved, may_rename=fields is not None and may_be_renamed(fields))
        ordered = _in_model_order(chosen.tensors, state)
        weights = [*weights_files(ordered, shard_bytes_max=shard_bytes_max)]
        code = _uniform_dtype(weights)
        files = [file.output(slices) for file in weights]
        if len(weights) > 1:
            files.append(literal_file(WEIGHTS_INDEX, index_of(weights)))
        config_files, config_notes = _plan_config(config, fields, problem, code)
        files += config_files
        notes = [*chosen.notes, *export_notes(state, versions, slices), *config_notes]
        beside = [file for file in beside if file.path != CONFIG]
    notes = [*cautions(repo, composition, moments=False), *notes]
    type_name = "mixed" if code is None else dtype_name(code)
    summary = literal_file(SUMMARY, composition.summary_file(notes, format="hf", dtype=type_name))
    return ExportPlan(
        composition=composition,
        format="hf",
        dtype=type_name,
        weights=tuple(weights),
        files=(*files, *map(plan_source_file, beside), summary),
        notes=tuple(notes),
        signs=(WEIGHTS, WEIGHTS_INDEX, ADAPTER_CONFIG),
        is_older_form=_is_older_form,
        model_class=model_class,
        loading=_loading([file.path for file in files] + [file.path for file in beside], model_class),
        seconds=time.monotonic() - started,
    )


def _loading(paths: Collection[str], model_class: str | None) -> str:
    if ADAPTER_CONFIG in paths:
        return "load it with PeftModel.from_pretrained(model, {folder})"
    return f"load it with {model_class or 'AutoModel'}.from_pretrained({{folder}})" if CONFIG in paths else ""


def _is_older_form(path: Path) -> bool:
    return str(path) in {WEIGHTS_INDEX, ADAPTER_WEIGHTS} or bool(WEIGHTS_FILE.fullmatch(str(path)))


# -- weights -------------------------------------------------------------------------------------------------------


def _opaque_tensors(repo: Repository, files: Iterable[SourceFile]) -> Iterator[WeightTensor]:
    """Yield the tensors of weights files that are kept byte for byte, because no layer has any of their names."""
    for file in files:
        if WEIGHTS_FILE.fullmatch(file.path):
            with suppress(Unsupported):  # unknown element types: the layers' own names are used
                for tensor in tensors_in(Path(file.path), *header_of(repo, file), {}):
                    yield WeightTensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape)


def _in_model_order(tensors: list[WeightTensor], state: RankState) -> list[WeightTensor]:
    """Return *tensors* in the order of the model's own ``state_dict``, which decides how files are filled."""
    module = TreeView.of(state.model).optional("module")  # a DCP commit has no module: the order of layers stays
    places = {str(name): place for place, name in enumerate(module)}
    return sorted(tensors, key=lambda tensor: places.get(tensor.layer_name, len(places)))


def _uniform_dtype(weights: Iterable[WeightsFile]) -> str | None:
    """Return the common element type of all parameters, None if there are several."""
    tensors = (tensor for file in weights for tensor in file.tensors)
    codes = {tensor.dtype for tensor in tensors if tensor.source is TensorSource.PARAMETER}
    return codes.pop() if len(codes) == 1 else None


# -- the config and the other files next to the weights ------------------------------------------------------------


def goes_along(path: str, *, tag: str) -> bool:
    """
    Whether the base's small file *path* belongs to the model: its config, tokenizer, processor, code, card.

    A file belongs to the model unless its name or suffix is on a list, since a tokenizer may give its files any names.
    """
    file = PurePosixPath(path)
    is_of_training = file.parts[0] == tag or file.name in _TRAINING_NAMES or file.suffix in _TRAINING_SUFFIXES
    # An adapter's config would make Transformers look for weights that the folder lacks.
    is_other = file.name.startswith(("adapter_", "events.out.tfevents")) or file.name.endswith(".index.json")
    return not (is_of_training or is_other)


def _read_config(
    repo: Repository, files: Iterable[SourceFile]
) -> tuple[SourceFile | None, dict[str, object] | None, str]:
    """Return the base's config and its fields (None for what is missing), and why the fields cannot be read."""
    file = next((file for file in files if file.path == CONFIG), None)
    if file is None:
        return None, None, ""
    if isinstance(file.content, ObjectContent) and file.content.size_bytes > BLOB_BYTES_MAX:
        raise Unsupported(f"the base's {CONFIG} has {file.content.size_bytes} bytes, which no config has")
    try:
        return file, parse_config(repo.content_of(file.content)), ""
    except ValueError as exc:
        return file, None, str(exc)


def _model_class(fields: Mapping[str, object] | None) -> str | None:
    names = (fields or {}).get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name.isidentifier() else None


def _plan_config(
    file: SourceFile | None, fields: dict[str, object] | None, problem: str, code: str | None
) -> tuple[list[OutputFile], list[str]]:
    """Return the config for weights of the element type *code* (None for several), and the notes on it."""
    if file is None:
        note = (
            f"the base has no {CONFIG}: from_pretrained needs the model's {CONFIG} beside the weights, "
            "and its tokenizer files; the weights have their names in memory, unless the base's files use others"
        )
        return [], [note]
    if code is None:
        note = f"the parameters have several element types: {CONFIG} is the base's, unchanged"
        return [plan_source_file(file)], [note]
    if fields is None:
        note = f"the base's {CONFIG} is not JSON ({problem}): it is written as it is"
        return [plan_source_file(file)], [note]
    new_fields = config_with_dtype(fields, code)
    if new_fields == fields:
        return [plan_source_file(file)], []
    note = f"{CONFIG} is changed to {by_code(code).torch_name}, the element type of the weights"
    return [literal_file(CONFIG, json.dumps(new_fields, indent=2).encode() + b"\n")], [note]


def parse_config(data: bytes) -> dict[str, object]:
    """
    Return the fields of a config.

    Raises:
        ValueError: *data* is not JSON, or not an object, or nested deeper than any config.
    """
    try:
        fields = parse_json(data)
        json.dumps(fields, indent=2)  # whatever can be dumped is not nested too deeply for the rest of this module
    except RecursionError as exc:
        raise ValueError("it is nested too deep") from exc
    if not isinstance(fields, dict):
        raise ValueError("it is not an object")  # noqa: TRY004  # one error class for the caller
    return fields


def config_with_dtype(fields: dict[str, object], code: str) -> dict[str, object]:
    """Return the config *fields* with the element type *code*, which the configs inside it get too."""
    name = by_code(code).torch_name
    new_fields = _with_dtype(fields, name)
    if not {"dtype", "torch_dtype"} & new_fields.keys():
        new_fields["torch_dtype"] = name  # all versions of Transformers know this key
    return new_fields


def _with_dtype(fields: dict[str, object], name: str) -> dict[str, object]:
    made: dict[str, object] = {}
    for key, value in fields.items():
        if key in {"dtype", "torch_dtype"}:
            made[key] = name
        elif isinstance(value, dict) and key.endswith("_config") and key != "quantization_config":
            made[key] = _with_dtype(value, name)
        else:
            made[key] = value
    return made


def index_of(files: Sequence[WeightsFile]) -> bytes:
    """Return the index of several *files*."""
    tensors = [tensor for file in files for tensor in file.tensors]
    parameters = sum(prod(tensor.shape) for tensor in tensors if tensor.source is TensorSource.PARAMETER)
    metadata = {"total_parameters": parameters, "total_size": sum(tensor.size_bytes for tensor in tensors)}
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True).encode() + b"\n"
