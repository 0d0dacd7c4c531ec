"""
Export: a composite's weights become a folder that Transformers loads, without a byte of the optimizer.

Planned like a compose: which bytes of which object go where. `fill` moves them.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from layerstore.dtypes import by_code
from layerstore.errors import LayoutMismatch, Unsupported
from layerstore.export import hf
from layerstore.export.members import Member, choose_members
from layerstore.limits import BLOB_BYTES_MAX
from layerstore.model import Kind, LayerVersion, ObjectContent, RankState, SourceFile, TensorSource
from layerstore.ops.composition import Composition, check_members
from layerstore.ops.fill import Filling
from layerstore.ops.loading import content_of
from layerstore.ops.progress import Progress
from layerstore.ops.rooms import Rooms
from layerstore.ops.target import Product, appearing, checked_target
from layerstore.zero3.places import OutputFile, Piece, Slices, merged, whole
from layerstore.zero3.rounding import can_convert
from layerstore.zero3.slices import elements_of, valid_elements
from layerstore.zero3.trees import TreeView
from layerstore.zero3.write import plan_source_file

_EXPORT = Product(what="an export", signs=(hf.WEIGHTS, hf.INDEX))


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
    wanted, shard_bytes_max = hf.dtype_code(dtype), hf.size_in_bytes(max_shard_size)
    base = composition.base
    versions = check_members(rooms, composition)
    state = rooms.state(base.states[0])  # the first rank's: what is not a rank's own comes with it
    slices = Slices(versions)
    chosen = choose_members(
        parameters=slices.parameters,
        buffers={buffer.name: buffer for version in versions for buffer in version.buffers},
        gathered=state.gathered,
        dtype=wanted,
        is_own=composition.own_parameters(versions).__contains__,
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
        seconds=time.monotonic() - started,
        notes=(*plan.notes_with("says {} now"), *filling.notes(plan.dtype)),
    )


def _is_older_form(path: Path) -> bool:
    return str(path) == hf.INDEX or bool(hf.WEIGHTS_FILE.fullmatch(str(path)))


# -- planning ------------------------------------------------------------------------------------------------------


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
        elements_of(tensor.shape)
        for shard in shards
        for tensor in shard.tensors
        if tensor.source is TensorSource.PARAMETER
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
    elements = elements_of(tensor.shape)
    if not elements:
        return  # nothing of it is stored anywhere
    if tensor.source is TensorSource.STORED:
        assert tensor.stored is not None
        yield whole(tensor.stored, offset)
    elif tensor.source is TensorSource.BUFFER:
        yield slices.find(Kind.BUFFERS, tensor.layer_name, shard=0).piece(offset)
    else:
        yield from _parameter_pieces(tensor, slices, elements, offset)


def _parameter_pieces(tensor: Member, slices: Slices, elements: int, offset: int) -> Iterator[Piece]:
    """Yield every slice of a parameter, cut by however many ranks."""
    name, kind = tensor.layer_name, _kind(tensor, slices)
    shards = slices.shards(kind, name)
    for shard in range(shards):
        valid = valid_elements(elements, shards, shard)
        if not valid:
            break  # from here on, padding
        place = slices.find(kind, name, shard=shard)
        source = place.tensor.dtype
        if place.tensor.elements != valid:
            raise LayoutMismatch(f"{name!r} is stored in a slice of {place.tensor.elements} elements, not {valid}")
        if not can_convert(source, tensor.dtype):
            raise Unsupported(
                f"{name!r} is stored as {source} and cannot be written as {tensor.dtype}", hint="choose a --dtype"
            )
        piece = place.piece(offset)
        yield piece if source == tensor.dtype else _converted(piece, source, tensor.dtype)
        offset += valid * by_code(tensor.dtype).bytes


def _converted(piece: Piece, source: str, target: str) -> Piece:
    return Piece(
        object=piece.object,
        object_offset=piece.object_offset,
        size_bytes=piece.size_bytes,
        offset=piece.offset,
        rounding=(source, target),
    )


def _kind(tensor: Member, slices: Slices) -> Kind:
    """
    Return which of its bytes a parameter is exported from.

    Stored weights are what the trainer itself would have saved, so they are taken where they have the type asked for;
    a frozen parameter has nothing else. Everything else comes from the master, which knows more than they do.
    """
    name = tensor.layer_name
    if slices.shards(Kind.WEIGHTS, name):
        stored = slices.find(Kind.WEIGHTS, name, shard=0).tensor.dtype
        if stored == tensor.dtype or not slices.shards(Kind.MASTER, name):
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
            "and its tokenizer files"
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
