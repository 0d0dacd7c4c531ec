"""
PEFT's adapters: which adapters a composite has, their parameters' names in files, and the files.

A parameter of the adapter ``default`` is ``….lora_A.default.weight`` in the model and ``….lora_A.weight`` in the
adapter's file, since loading gives the adapter a new name. Adapters other than ``default`` have folders of their own.

If the base has its own file of an adapter, that file is kept, with the tensors from other saves replaced. Without such
a file, an export makes one by PEFT's rule for LoRA.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from layerstore.assemble import (
    OutputFile,
    WeightsFile,
    WeightTensor,
    merged,
    plan_source_file,
    weights_file,
    whole,
)
from layerstore.dtypes import FLOATS
from layerstore.errors import SourceCheckpoint, Unsupported
from layerstore.framing import Frame
from layerstore.json_text import parse_json
from layerstore.layers import ADAPTER_WEIGHTS, unwrapped
from layerstore.model import Buffer, Parameter
from layerstore.slices import Piece, Slices
from layerstore.source import read_header, tensors_in
from layerstore.states import SourceFile, TensorSource
from layerstore.storage import Repository

ADAPTER_CONFIG = "adapter_config.json"

_DEFAULT = "default"
_LORA = re.compile(r"lora_\w+|trainable_tokens_delta")
_DORA = "lora_magnitude_vector"
_TO_SAVE = "modules_to_save"


# -- names ---------------------------------------------------------------------------------------------------------


def adapter_at(path: str) -> str | None:
    """
    Return the adapter whose file belongs at *path*, None if PEFT puts no adapter's file there.

    >>> adapter_at("adapter_config.json"), adapter_at("reference/adapter_config.json"), adapter_at("a/b/c.json")
    ('default', 'reference', None)
    """
    folders = PurePosixPath(path).parts[:-1]
    return None if len(folders) > 1 else folders[0] if folders else _DEFAULT


def configs_of(files: Iterable[SourceFile]) -> dict[str, SourceFile]:
    """Return the adapter configs among *files*, by adapter name."""
    configs = {adapter_at(file.path): file for file in files if PurePosixPath(file.path).name == ADAPTER_CONFIG}
    return {adapter: file for adapter, file in configs.items() if adapter is not None}


def name_in_file(parameter: str, adapter: str) -> str | None:
    """
    Return PEFT's name for *parameter* in the file of *adapter*, None if it does not belong to that adapter.

    >>> name_in_file("base_model.model.q_proj.lora_A.default.weight", "default")
    'base_model.model.q_proj.lora_A.weight'
    >>> name_in_file("base_model.model.lm_head.modules_to_save.default.weight", "default")
    'base_model.model.lm_head.weight'
    >>> name_in_file("base_model.model.q_proj.lora_A.other.weight", "default")
    """
    *parts, last = _parts(parameter)
    if _TO_SAVE in parts and (at := parts.index(_TO_SAVE)) and parts[at + 1 : at + 2] == [adapter]:
        return ".".join([*parts[:at], *parts[at + 2 :], last])
    if parts and last == adapter:
        return ".".join(parts)
    if len(parts) > 1 and parts[-1] == adapter:
        # DoRA's vectors were once parameters themselves, and are still saved under the names they had then.
        return ".".join(parts[:-1] if parts[-2] == _DORA else [*parts[:-1], last])
    return None


def _parts(parameter: str) -> list[str]:
    return unwrapped(parameter.removeprefix("module.")).split(".")


def _names_by_rule(repo: Repository, config: SourceFile, parameters: Iterable[str], adapter: str) -> dict[str, str]:
    """
    Return the *parameters* that PEFT saves for a LoRA adapter with *config*, by their names in the adapter's file.

    Raises:
        Unsupported: The adapter is not LoRA: other methods have rules of their own.
    """
    try:
        fields = parse_json(repo.content_of(config.content))
        method, bias = fields["peft_type"], fields.get("bias", "none")
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise SourceCheckpoint(f"the base's {config.path} is not a config of an adapter ({exc})") from exc
    if method != "LORA":
        raise Unsupported(
            f"adapter {adapter!r} is of type {method}, and the base has no file of it: only LoRA's files can be made",
            hint="export a commit of a Trainer's own save, which has that file",
        )
    # With lora_only, PEFT saves the biases of the modules that it wraps; it calls a wrapped module base_layer.
    suffix = None if bias == "none" else ".bias" if bias == "all" else ".base_layer.bias"
    names = {}
    for parameter in parameters:
        if any(part == _TO_SAVE or _LORA.fullmatch(part) for part in parameter.split(".")):
            name = name_in_file(parameter, adapter)
        else:
            name = ".".join(_parts(parameter)) if suffix and parameter.endswith(suffix) else None
        if name is not None:
            names[name] = parameter
    return names


# -- the base's own files ------------------------------------------------------------------------------------------


def _read(repo: Repository, file: SourceFile, slices: Slices, adapter: str) -> WeightsFile:
    """Return *adapter*'s *file* as it was saved, with the parameter of each tensor."""
    header, size_bytes = header_of(repo, file)
    suppliers: dict[str, Parameter | Buffer] = {}
    for parameter in slices.parameters.values():
        for name in (parameter.name, *parameter.aliases):
            own_name = name_in_file(name, adapter) or ".".join(_parts(name))
            suppliers.setdefault(own_name, parameter)
    tensors = tensors_in(Path(file.path), header, size_bytes, suppliers)
    return WeightsFile(
        name=file.path,
        tensors=tuple(_tensor(tensor.name, tensor.supplier, tensor.shape, tensor.dtype) for tensor in tensors),
        frame=Frame(header=header, offsets=tuple(tensor.offset_bytes for tensor in tensors), size_bytes=size_bytes),
    )


def plan_beside(repo: Repository, file: SourceFile, slices: Slices, *, own: Collection[str]) -> OutputFile:
    """
    Plan a *file* next to the shards: an adapter's weights with the chosen layers' values, any other file unchanged.

    *own* are the parameters of the layers that the base itself saved.

    Raises:
        Unsupported: Some tensors of an adapter's file belong to unknown parameters.
    """
    if PurePosixPath(file.path).name != ADAPTER_WEIGHTS:
        return plan_source_file(file)
    older = slices.parameters.keys() - own
    adapter = adapter_at(file.path)
    if not older or adapter is None:
        return plan_source_file(file)
    weights = _read(repo, file, slices, adapter)
    strange = [tensor.name for tensor in weights.tensors if not tensor.layer_name]
    of_adapter = {name for name in older if adapter in name.split(".")}
    lost = of_adapter - {tensor.layer_name for tensor in weights.tensors}
    # Refuse only if both exist: an unknown tensor is kept unchanged, unless it may be a lost parameter's.
    if strange and lost:
        raise Unsupported(
            f"{file.path} cannot be mixed from several saves: {strange[0]!r} in it belongs to no parameter, and "
            f"{min(lost)!r} is not in it",
            hint="use --policy exact, for layers of one save only",
        )
    return _patched(file, weights, slices, older)


def _patched(file: SourceFile, weights: WeightsFile, slices: Slices, names: Collection[str]) -> OutputFile:
    """Plan *file*, which holds *weights*, with the tensors of the parameters *names* replaced from *slices*."""
    begin = 0
    literals: list[tuple[int, bytes]] = []
    pieces: list[Piece] = []

    def keep(end: int) -> None:
        if isinstance(file.content, bytes):
            literals.append((begin, file.content[begin:end]))
        elif end > begin:
            start = whole(file.content, 0).object_offset + begin
            pieces.append(Piece(object=file.content.object, object_offset=start, size_bytes=end - begin, offset=begin))

    for tensor, offset in zip(weights.tensors, weights.frame.offsets, strict=True):
        if tensor.layer_name in names:
            keep(offset)
            kind = slices.weights_kind(tensor.layer_name, tensor.dtype)
            pieces += slices.pieces(kind, tensor.layer_name, dtype=tensor.dtype, offset=offset)
            begin = offset + tensor.size_bytes
    keep(weights.frame.size_bytes)
    return OutputFile(
        path=file.path,
        size_bytes=weights.frame.size_bytes,
        executable=file.executable,
        literals=tuple(literals),
        pieces=merged(pieces),
    )


# -- export --------------------------------------------------------------------------------------------------------


def plan_adapters(
    repo: Repository, files: Sequence[SourceFile], slices: Slices, *, own: Collection[str], dtype: str | None
) -> tuple[list[WeightsFile], list[OutputFile], list[str]]:
    """
    Plan a folder as PEFT's ``save_pretrained`` leaves it; return its weights, all its files, and notes.

    *files* are the base's; *own* are the parameters of the layers that the base itself saved; *dtype* is the code of
    the wanted element type, None to keep the files' own.

    Raises:
        Unsupported: A trained parameter has no place in such a folder, or an adapter's file cannot be made.
    """
    by_path = {file.path: file for file in files}
    weights, outputs = [], []
    configs = configs_of(files)
    for adapter, config in configs.items():
        path = str(PurePosixPath(config.path).with_name(ADAPTER_WEIGHTS))
        stored = _read(repo, by_path[path], slices, adapter) if path in by_path else None
        if stored is not None and stored.tensors:
            adapter_file, output = _as_saved(by_path[path], stored, slices, own=own, dtype=dtype)
        else:
            names = _names_by_rule(repo, config, slices.parameters, adapter)
            if not names:
                raise Unsupported(
                    f"the base has {config.path}, but the chosen layers have no parameter of adapter {adapter!r}",
                    hint="an adapter that is not trained is not in the checkpoint: copy its original file",
                )
            parameters = {name: slices.parameter(source) for name, source in names.items()}
            tensors = (
                _tensor(name, parameter.name, parameter.shape, parameter.dtype)
                for name, parameter in parameters.items()
            )
            adapter_file = weights_file(path, (_typed(tensor, dtype) for tensor in tensors))
            output = adapter_file.output(slices)
        weights.append(adapter_file)
        outputs.append(output)
    used = {tensor.layer_name for file in weights for tensor in file.tensors}
    trained = [name for name, parameter in slices.parameters.items() if not parameter.frozen and name not in used]
    if trained:  # PEFT itself would silently leave it out
        more = f" (and {len(trained) - 1} more)" if len(trained) > 1 else ""
        raise Unsupported(
            f"{trained[0]!r}{more} is trained and belongs to no adapter with a config: PEFT's folder has no place for "
            "it",
            hint="compose --format shards keeps it; PEFT keeps whole modules that modules_to_save names",
        )
    unused = len(slices.parameters.keys() - used)
    note = f"{unused} frozen weights are left out: PeftModel.from_pretrained takes them from the base model"
    return weights, [*outputs, *map(plan_source_file, configs.values())], [note] if unused else []


def _as_saved(
    file: SourceFile, stored: WeightsFile, slices: Slices, *, own: Collection[str], dtype: str | None
) -> tuple[WeightsFile, OutputFile]:
    """Return the base's own file with the values of the chosen layers; a new *dtype* changes its layout."""
    path = file.path
    tensors = tuple(_typed(tensor, dtype) for tensor in stored.tensors)
    if tensors != stored.tensors:
        alone = [tensor.name for tensor in tensors if not tensor.layer_name]
        if alone:
            raise Unsupported(
                f"{alone[0]!r} is in {path} and in no layer: it cannot be written in another type",
                hint="leave --dtype out",
            )
        retyped = weights_file(path, tensors)
        return retyped, retyped.output(slices)
    return stored, _patched(file, stored, slices, slices.parameters.keys() - own)


def _tensor(name: str, supplier: str, shape: tuple[int, ...], dtype: str) -> WeightTensor:
    return WeightTensor(name=name, dtype=dtype, shape=shape, source=TensorSource.PARAMETER, layer_name=supplier)


def _typed(tensor: WeightTensor, dtype: str | None) -> WeightTensor:
    return replace(tensor, dtype=dtype) if dtype and tensor.dtype in FLOATS else tensor


def header_of(repo: Repository, file: SourceFile) -> tuple[bytes, int]:
    """Return the header of a safetensors file that is kept byte for byte, and the size of the file."""
    content, path = file.content, Path(file.path)
    if isinstance(content, bytes):
        return read_header(path, lambda start, count: content[start : start + count], len(content)), len(content)
    begin = whole(content, 0).object_offset
    repo.objects.verify(content.object)  # now: the header decides what is written, and might not be read again
    with repo.objects.open(content.object) as source:
        header = read_header(path, lambda start, count: source.read_at(begin + start, count), content.size_bytes)
    return header, content.size_bytes
