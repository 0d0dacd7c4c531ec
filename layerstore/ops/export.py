"""
Export: a composite's weights become a folder that Transformers loads, without a byte of the optimizer.

Planned like a compose: which bytes of which object go where. `fill` moves them.
"""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath

from layerstore.dtypes import by_code
from layerstore.errors import LayoutMismatch, Unsupported
from layerstore.export import hf
from layerstore.export.adapter import ADAPTER_CONFIG
from layerstore.export.members import Member, Run, SavedTensor, choose_members, saved_tensors, tensors_in
from layerstore.layers import ADAPTER_WEIGHTS
from layerstore.limits import BLOB_BYTES_MAX
from layerstore.model import Kind, LayerVersion, ObjectContent, RankState, SourceFile, TensorSource
from layerstore.ops.composition import Composition, check_members
from layerstore.ops.export_adapters import AdapterExport, configs_of, plan_adapters
from layerstore.ops.fill import Filling
from layerstore.ops.loading import content_of, header_of
from layerstore.ops.renaming import ask_transformers, may_be_renamed
from layerstore.ops.target import Product, appearing, checked_target
from layerstore.progress import Progress
from layerstore.storage.rooms import Rooms
from layerstore.zero3 import (
    OutputFile,
    Piece,
    Slices,
    TreeView,
    can_convert,
    merged,
    plan_source_file,
    stretches,
    valid_elements,
    whole,
)

_EXPORT = Product(what="an export", signs=(hf.WEIGHTS, hf.INDEX, ADAPTER_CONFIG))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """An export before it is written."""

    composition: Composition
    dtype: str
    """``bf16``, ``fp16``, ``fp32``, or ``mixed``."""
    shards: tuple[hf.ShardFile, ...]
    files: tuple[OutputFile, ...]
    """Of all files: the weights', the index, and what goes beside them."""
    doubts: tuple[str, ...]
    """What the reader of the folder should know, whether or not it is written yet."""
    config_dtype: str | None
    """The element type that the config is made to name, where the base's does not."""
    model_class: str | None
    """The class of Transformers that the config names."""
    seconds: float
    """That planning took, asking Transformers included."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader of the folder to be should know."""
        return self.notes_with("will say {}")

    def notes_with(self, config_says: str) -> tuple[str, ...]:
        """Return the notes, of which the one on the config says *config_says*."""
        if self.config_dtype is None:
            return self.doubts
        return (*self.doubts, f"{hf.CONFIG} {config_says.format(self.config_dtype)}, as the weights are")

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote."""

    run: str
    step: int
    policy: str
    format: str
    dtype: str
    """``bf16``, ``fp16``, ``fp32``, or ``mixed``."""
    out: Path
    files: tuple[str, ...]
    """Below *out*."""
    bytes_written: int
    seconds: float
    notes: tuple[str, ...]
    """What the reader of the folder should know."""
    model_class: str | None
    """The class of Transformers that loads the folder, where its config names one."""


def plan_export(
    rooms: Rooms, composition: Composition, *, dtype: str | None = None, max_shard_size: int | str = hf.MAX_SHARD_SIZE
) -> ExportPlan:
    """
    Decide which tensors go into which files.

    *dtype* is one of ``bf16``, ``fp16``, ``fp32``; None for the type in which each parameter is trained.

    Raises:
        InvalidInput: *dtype* or *max_shard_size* is none.
        LayoutMismatch: A layer has no weights to export.
    """
    started = time.monotonic()
    wanted, shard_bytes_max = hf.dtype_code(dtype), hf.size_in_bytes(max_shard_size)
    base = composition.base
    versions = check_members(rooms, composition)
    state = rooms.state(base.states[0])  # the first rank's: what is not a rank's own comes with it
    config = _config(rooms, state.files)
    slices = Slices(versions)
    own = composition.own_parameters(versions)
    if configs_of(state.files):
        adapters = plan_adapters(rooms, state.files, slices, tag=base.layout.tag, own=own, dtype=wanted, pieces=_pieces)
        return _adapter_plan(composition, adapters, started=started)
    chosen = choose_members(
        parameters=slices.parameters,
        buffers={buffer.name: buffer for version in versions for buffer in version.buffers},
        saved=[*saved_tensors(state.gathered), *_opaque_tensors(rooms, state.files)],
        dtype=wanted,
        is_own=own.__contains__,
        ask=partial(ask_transformers, config),
        is_always_asked=config is not None and may_be_renamed(config),
    )
    tensors = _in_model_order(chosen.tensors, state)
    shards = hf.shard_files(tensors, shard_bytes_max=shard_bytes_max)
    code = _uniform_dtype(tensors)
    files = [file for file in state.files if hf.goes_along(file.path, tag=base.layout.tag)]
    beside, doubts, config_dtype = _beside(rooms, files, code)
    index = [_literal_file(hf.INDEX, _index(shards))] if len(shards) > 1 else []
    return ExportPlan(
        composition=composition,
        dtype="mixed" if code is None else hf.dtype_name(code),
        shards=shards,
        files=(*(_weights_file(shard, slices) for shard in shards), *index, *beside),
        doubts=(*chosen.notes, *_doubts(state, versions, slices), *doubts),
        config_dtype=config_dtype,
        model_class=_model_class(config),
        seconds=time.monotonic() - started,
    )


def _adapter_plan(composition: Composition, adapters: AdapterExport, *, started: float) -> ExportPlan:
    code = _uniform_dtype(tensor for shard in adapters.weights for tensor in shard.tensors)
    return ExportPlan(
        composition=composition,
        dtype="mixed" if code is None else hf.dtype_name(code),
        shards=adapters.weights,
        files=adapters.files,
        doubts=adapters.notes,
        config_dtype=None,
        model_class=None,
        seconds=time.monotonic() - started,
    )


def execute_export(
    rooms: Rooms,
    plan: ExportPlan,
    out: Path,
    *,
    verify: bool = True,
    durable: bool = True,
    force: bool = False,
    progress: Progress,
) -> Exported:
    """
    Write *plan* to the folder *out*, which appears whole or not at all.

    *verify*, *durable* and *force* are those of a compose; only objects that are read are verified.

    Raises:
        AlreadyExists: *out* is there and *force* was not given.
        IntegrityError: An object is damaged or missing; nothing is left at *out*.
    """
    started = time.monotonic()
    target = checked_target(rooms, out, _EXPORT, force=force)
    with appearing(rooms, target, what="the export", is_older_form=_is_older_form) as partial:
        filling = Filling(rooms=rooms, folder=partial, verify=verify, durable=durable, progress=progress)
        filling.run(plan.files, plan.shards)
    base = plan.composition.base
    return Exported(
        run=base.run,
        step=base.step,
        policy=plan.composition.policy,
        format="hf",
        dtype=plan.dtype,
        out=target.path,
        files=tuple(file.path for file in plan.files),
        bytes_written=plan.size_bytes,
        seconds=plan.seconds + time.monotonic() - started,
        notes=(*plan.notes_with("says {} now"), *filling.notes(plan.dtype)),
        model_class=plan.model_class,
    )


def _is_older_form(path: Path) -> bool:
    return str(path) in {hf.INDEX, ADAPTER_WEIGHTS} or bool(hf.WEIGHTS_FILE.fullmatch(str(path)))


# -- planning ------------------------------------------------------------------------------------------------------


def _opaque_tensors(rooms: Rooms, files: Iterable[SourceFile]) -> Iterator[SavedTensor]:
    """Yield the tensors of weights files that are kept byte for byte, because no name in them is a layer's."""
    for file in files:
        if hf.WEIGHTS_FILE.fullmatch(file.path):
            yield from tensors_in(header_of(rooms, file)[0], file.path)


def _config(rooms: Rooms, files: Iterable[SourceFile]) -> dict[str, object] | None:
    """Return the base's config, None where it has none that can be read."""
    for file in files:
        if file.path == hf.CONFIG:
            with suppress(ValueError, RecursionError):
                found = json.loads(_content(rooms, file.content))
                return found if isinstance(found, dict) else None
    return None


def _model_class(config: dict[str, object] | None) -> str | None:
    names = (config or {}).get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name.isidentifier() else None


def _in_model_order(tensors: list[Member], state: RankState) -> list[Member]:
    """Return *tensors* in the order of the model's own ``state_dict``: the one that is dealt out to shards."""
    names = _model(state)["module"].mapping()
    places = {str(name): place for place, name in enumerate(names)}
    return sorted(tensors, key=lambda tensor: places.get(tensor.layer_name, len(places)))


def _model(state: RankState) -> TreeView:
    return TreeView(state.model.tree, path=PurePosixPath(state.model.path))


def _uniform_dtype(tensors: Iterable[Member]) -> str | None:
    """Return the one element type of all parameters, None where there are several."""
    codes = {tensor.dtype for tensor in tensors if tensor.source is TensorSource.PARAMETER}
    return codes.pop() if len(codes) == 1 else None


def _index(shards: tuple[hf.ShardFile, ...]) -> bytes:
    parameters = (
        prod(tensor.shape) for shard in shards for tensor in shard.tensors if tensor.source is TensorSource.PARAMETER
    )
    return hf.index_of(shards, parameters=sum(parameters))


def _literal_file(path: str, data: bytes) -> OutputFile:
    return OutputFile(path=path, size_bytes=len(data), executable=False, literals=((0, data),), pieces=())


def _weights_file(shard: hf.ShardFile, slices: Slices) -> OutputFile:
    pieces = (
        piece
        for tensor, offset in zip(shard.tensors, shard.offsets, strict=True)
        for piece in _pieces(tensor, slices, offset)
    )
    return OutputFile(
        path=shard.name,
        size_bytes=shard.size_bytes,
        executable=False,
        literals=((0, shard.header),),
        pieces=tuple(merged(pieces)),
    )


def _pieces(tensor: Member, slices: Slices, offset: int) -> Iterator[Piece]:
    elements = prod(tensor.shape)
    if not elements:
        return  # nothing of it is stored anywhere
    if tensor.source is TensorSource.STORED:
        assert tensor.stored is not None
        yield whole(tensor.stored, offset)
    elif tensor.source is TensorSource.BUFFER:
        yield slices.find(Kind.BUFFERS, tensor.layer_name, shard=0).piece(offset)
    else:
        for run in tensor.runs or (Run(name=tensor.layer_name, start=0, elements=elements),):
            yield from _run_pieces(run, tensor.dtype, slices, offset)
            offset += run.elements * by_code(tensor.dtype).bytes


def _run_pieces(run: Run, dtype: str, slices: Slices, offset: int) -> Iterator[Piece]:
    """Yield what every slice has of *run*, cut by however many ranks."""
    name, kind = run.name, _kind(run.name, dtype, slices)
    elements, shards = prod(slices.parameter(name).shape), slices.shards(kind, name)
    for stretch in stretches(elements, shards, begin=run.start, end=run.start + run.elements):
        place = slices.find(kind, name, shard=stretch.shard)
        source, valid = place.tensor.dtype, valid_elements(elements, shards, stretch.shard)
        if place.tensor.elements != valid:
            raise LayoutMismatch(f"{name!r} is stored in a slice of {place.tensor.elements} elements, not {valid}")
        if not can_convert(source, dtype):
            raise Unsupported(
                f"{name!r} is stored as {source} and cannot be written as {dtype}", hint="choose a --dtype"
            )
        yield Piece(
            object=place.object.ref,
            object_offset=place.offset + stretch.start * by_code(source).bytes,
            size_bytes=stretch.elements * by_code(source).bytes,
            offset=offset,
            rounding=None if source == dtype else (source, dtype),
        )
        offset += stretch.elements * by_code(dtype).bytes


def _kind(name: str, dtype: str, slices: Slices) -> Kind:
    """
    Return which of its bytes a parameter is exported from.

    Stored weights are what the trainer itself would have saved, so they are taken where they have the type asked for;
    a frozen parameter has nothing else. Everything else comes from the master, which knows more than they do.
    """
    if slices.shards(Kind.WEIGHTS, name):
        stored = slices.find(Kind.WEIGHTS, name, shard=0).tensor.dtype
        if stored == dtype or not slices.shards(Kind.MASTER, name):
            return Kind.WEIGHTS
    elif not slices.shards(Kind.MASTER, name):
        raise LayoutMismatch(f"the chosen layers have neither a master nor weights of {name!r}", name=name)
    return Kind.MASTER


def _beside(rooms: Rooms, files: list[SourceFile], code: str | None) -> tuple[list[OutputFile], list[str], str | None]:
    """Return the files that go beside the weights, what is to be said of them, and the config's type if it changes."""
    planned = [plan_source_file(file) for file in files if file.path != hf.CONFIG]
    config = next((file for file in files if file.path == hf.CONFIG), None)
    if config is None:
        note = (
            f"the base has no {hf.CONFIG}: from_pretrained needs the model's {hf.CONFIG} beside the weights, "
            "and its tokenizer files; the weights have the names that they have in memory, if no file told others"
        )
        return planned, [note], None
    if code is None:
        note = f"the parameters have several element types: {hf.CONFIG} is as the base has it"
        return [plan_source_file(config), *planned], [note], None
    data = _content(rooms, config.content)
    try:
        fitting = hf.config_with_dtype(data, code)
    except (ValueError, RecursionError) as exc:
        note = f"the base's {hf.CONFIG} is not JSON ({exc}): it is written as it is"
        return [plan_source_file(config), *planned], [note], None
    return [_literal_file(hf.CONFIG, fitting), *planned], [], None if fitting == data else by_code(code).torch_name


def _content(rooms: Rooms, content: bytes | ObjectContent) -> bytes:
    if isinstance(content, ObjectContent) and content.size_bytes > BLOB_BYTES_MAX:
        raise Unsupported(f"the base's {hf.CONFIG} has {content.size_bytes} bytes, which no config has")
    return content_of(rooms, content)


def _doubts(state: RankState, versions: list[LayerVersion], slices: Slices) -> Iterator[str]:
    """Tell what the export may lack."""
    fragments = _model(state).get("frozen_param_fragments")
    if fragments is not None and fragments.value is None:
        yield "the checkpoint was saved without its frozen parameters, if it has any: they are not in the export"
    buffers = [buffer.name for version in versions for buffer in version.buffers]
    differing = [name for name in buffers if slices.shards(Kind.BUFFERS, name) > 1]
    if differing:
        yield f"{differing[0]!r} is one of {len(differing)} buffers unlike on other ranks: the first rank's are written"
    names = _model(state).get("buffer_names")
    odd = {str(name) for name in names.sequence()} - {*buffers} if names is not None else set()
    if odd and not state.gathered:
        yield f"buffers are no plain blocks of memory ({min(odd)!r} is one of {len(odd)}): they are left out"
