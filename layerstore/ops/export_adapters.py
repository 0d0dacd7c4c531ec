"""
Export of a run that trains adapters: a folder as PEFT's ``save_pretrained`` leaves it.

The base's own file of each adapter lends names, shapes and whatever is in no layer; without one, PEFT's rule for LoRA
says what is in it.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from layerstore.errors import Unsupported
from layerstore.export import hf
from layerstore.export.adapter import ADAPTER_CONFIG, adapter_at, names_by_rule
from layerstore.export.members import FLOATS, Member
from layerstore.layers import ADAPTER_WEIGHTS
from layerstore.model import SourceFile, TensorSource
from layerstore.ops.adapters import AdapterFile, patched, read_adapter
from layerstore.ops.loading import content_of
from layerstore.storage.rooms import Rooms
from layerstore.zero3 import OutputFile, Piece, Slices, merged, plan_source_file

Pieces = Callable[[Member, Slices, int], Iterator[Piece]]
"""Says what supplies a tensor that begins at an offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterExport:
    """The files of an export that is a folder of adapters."""

    weights: tuple[hf.ShardFile, ...]
    files: tuple[OutputFile, ...]
    """All of them, the weights' too."""
    notes: tuple[str, ...]


def configs_of(files: Iterable[SourceFile]) -> dict[str, SourceFile]:
    """Return the config of each adapter that *files* tell of, by the adapter's name."""
    found = {adapter_at(file.path): file for file in files if PurePosixPath(file.path).name == ADAPTER_CONFIG}
    return {adapter: file for adapter, file in found.items() if adapter is not None}


def plan_adapters(
    rooms: Rooms,
    files: Sequence[SourceFile],
    slices: Slices,
    *,
    tag: str,
    own: Collection[str],
    dtype: str | None,
    pieces: Pieces,
) -> AdapterExport:
    """
    Decide what PEFT's folder of the adapters is whose configs are among *files*, those of the base.

    *own* are the parameters whose layers the base itself has saved; *dtype* is the code of what was asked for, None
    for what the files have. *pieces* says what supplies a tensor.

    Raises:
        Unsupported: A trained parameter has no place in such a folder, or its file cannot be made.
    """
    by_path = {file.path: file for file in files}
    planned = []
    used: set[str] = set()
    for adapter, config in configs_of(files).items():
        path = str(PurePosixPath(config.path).with_name(ADAPTER_WEIGHTS))
        stored = read_adapter(rooms, by_path[path], slices, adapter) if path in by_path else None
        if stored is not None and stored.tensors:
            output, shard = _as_saved(stored, slices, own=own, dtype=dtype, pieces=pieces)
        else:
            names = names_by_rule(slices.parameters, adapter, content_of(rooms, config.content), path=config.path)
            if not names:
                raise Unsupported(
                    f"the base has {config.path}, but the chosen layers have no parameter of adapter {adapter!r}",
                    hint="an adapter that is not trained is not in the checkpoint: take it from where it came from",
                )
            output, shard = _made(path, names, slices, dtype=dtype, pieces=pieces)
        planned.append((config, output, shard))
        used |= {member.layer_name for member in shard.tensors}
    _check_all_used(slices, used)
    beside = [plan_source_file(file) for file in files if hf.goes_along(file.path, tag=tag)]
    return AdapterExport(
        weights=tuple(shard for _, _, shard in planned),
        files=(
            *(output for _, output, _ in planned),
            *(plan_source_file(config) for config, _, _ in planned),
            *beside,
        ),
        notes=tuple(_notes(slices, used)),
    )


def _as_saved(
    stored: AdapterFile,
    slices: Slices,
    *,
    own: Collection[str],
    dtype: str | None,
    pieces: Pieces,
) -> tuple[OutputFile, hf.ShardFile]:
    """Return the base's own file with the values of the chosen layers; laid out anew for another *dtype*."""
    shapes = {name: entry.get("shape") for name, entry in json.loads(stored.header[8:]).items()}
    members = tuple(
        Member(
            name=tensor.name,
            dtype=_wanted(dtype, tensor.dtype),
            shape=tuple(shapes[tensor.name]),
            source=TensorSource.PARAMETER,
            layer_name=tensor.supplier,
        )
        for tensor in stored.tensors
    )
    if any(member.dtype != tensor.dtype for member, tensor in zip(members, stored.tensors, strict=True)):
        alone = [member.name for member in members if not member.layer_name]
        if alone:
            raise Unsupported(
                f"{alone[0]!r} is in {stored.file.path} and in no layer: it cannot be written in another type",
                hint="leave --dtype out",
            )
        return _laid_out(stored.file.path, members, slices, pieces=pieces)
    by_name = {member.name: member for member in members}
    older = slices.parameters.keys() - set(own)
    output = patched(stored, older, lambda tensor: pieces(by_name[tensor.name], slices, tensor.offset_bytes))
    shard = hf.ShardFile(
        name=stored.file.path,
        tensors=members,
        header=stored.header,
        offsets=tuple(tensor.offset_bytes for tensor in stored.tensors),
        size_bytes=stored.size_bytes,
    )
    return output, shard


def _made(
    path: str,
    names: Mapping[str, str],
    slices: Slices,
    *,
    dtype: str | None,
    pieces: Pieces,
) -> tuple[OutputFile, hf.ShardFile]:
    """Return a file of the parameters that *names* has by their names in it: the base has none of its own."""
    members = [
        Member(
            name=name,
            dtype=_wanted(dtype, slices.parameter(of).dtype),
            shape=slices.parameter(of).shape,
            source=TensorSource.PARAMETER,
            layer_name=of,
        )
        for name, of in names.items()
    ]
    return _laid_out(path, members, slices, pieces=pieces)


def _laid_out(
    path: str, members: Iterable[Member], slices: Slices, *, pieces: Pieces
) -> tuple[OutputFile, hf.ShardFile]:
    shard = hf.single_file(path, members)
    placed = zip(shard.tensors, shard.offsets, strict=True)
    output = OutputFile(
        path=path,
        size_bytes=shard.size_bytes,
        executable=False,
        literals=((0, shard.header),),
        pieces=tuple(merged(piece for member, offset in placed for piece in pieces(member, slices, offset))),
    )
    return output, shard


def _wanted(dtype: str | None, own: str) -> str:
    return dtype if dtype and own in FLOATS else own


def _check_all_used(slices: Slices, used: Collection[str]) -> None:
    """Raise if a trained parameter is in no adapter's file: PEFT itself would leave it out in silence."""
    left = [name for name, parameter in slices.parameters.items() if not parameter.frozen and name not in used]
    if left:
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise Unsupported(
            f"{left[0]!r}{more} is trained and belongs to no adapter with a config: PEFT's folder has no place for it",
            hint="compose --format zero3 keeps it; PEFT keeps whole modules that modules_to_save names",
        )


def _notes(slices: Slices, used: Collection[str]) -> Iterator[str]:
    left = [name for name in slices.parameters if name not in used]
    if left:
        yield f"{len(left)} frozen weights are left out: PeftModel.from_pretrained takes them from the base model"
