"""
Find the ZeRO checkpoint in a folder: its layout, its tag and its files.

Only ``latest``, ``trainer_state.json`` and the index of sharded weights are read. Steps are never taken from a folder's
name. Symbolic links are refused unless the caller allows them.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from layerstore.errors import (
    InvalidInput,
    LayoutMismatch,
    NotFound,
    SourceCheckpoint,
    Unsupported,
)
from layerstore.filenames import (
    FSDP,
    INCOMPLETE,
    LATEST,
    LATEST_BYTES_MAX,
    MODEL_STATES,
    NOT_SUPPORTED,
    READABLE,
    SCRIPTS,
    SHARD,
    SUMMARY,
    TRAINER_FILES,
    TRAINER_STATE,
    WHOLE_MODEL,
    folder_kind,
    is_of_fsdp,
    is_shard,
    is_text,
    natural,
    rank_of_file,
    run_name,
)
from layerstore.json_text import parse_json
from layerstore.layers import ADAPTER_WEIGHTS, typed
from layerstore.limits import RECORD_BYTES_MAX, SOURCE_FILES_MAX, STEP_MAX
from layerstore.nearest import did_you_mean, nearest
from layerstore.source import list_folder, read_source_file, real_path, stat_source
from layerstore.zero3.distributed import refuse_distributed


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """The pair of files that one rank wrote."""

    rank: int
    model: Path
    """Under stages 1 and 2, all ranks share one file."""
    optimizer: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """The files of one checkpoint."""

    folder: Path
    """The save folder; paths of files are relative to it."""
    tag: str
    flavour: str
    """``raw``, ``hf``, ``accelerate`` or ``lightning``."""
    ranks: tuple[RankFiles, ...]
    """By rank, from 0, without gaps."""
    others: tuple[Path, ...]
    """Everything else that belongs to the checkpoint, sorted."""
    stamps: Mapping[Path, tuple[int, int]]
    """Size and modification time (ns) of each of these files; a file whose stamp changes is still being written."""
    notes: tuple[str, ...]
    """Messages for the user about what was left out."""

    @property
    def run_name(self) -> str:
        """The default name of the run."""
        return run_name(self.folder, flavour=self.flavour)


def discover(path: Path, *, tag: str | None = None, follow: bool = False) -> FoundCheckpoint:
    """
    Find the checkpoint at *path*: a save folder, its parent, or a tag folder.

    Raises:
        SourceCheckpoint: Files are missing, or the checkpoint is not finished.
        Unsupported: The checkpoint is not a ZeRO checkpoint, or was saved with an unsupported setting.
        InvalidInput: *path* holds several checkpoints and none was chosen.
    """
    # Resolve first: the run's default name must not be ".." or the name of a link.
    given_path, wanted_tag = real_path(path), tag
    folder, tag = _resolve(given_path, wanted_tag)
    for inner in (folder / tag, folder / LATEST):
        if inner.is_symlink() and not follow:
            raise linked(inner)
    names = list_folder(folder / tag)
    # Before `_pair_up`, which would report that another program's folder lacks every ZeRO file.
    _refuse_foreign(folder / tag, names)
    ranks = _pair_up(folder / tag, names)
    _refuse_unfinished(folder)
    flavour = flavour_of(folder, tag)
    shards = {file for pair in ranks for file in (pair.model, pair.optimizer)}
    notes = [] if wanted_tag is not None or given_path == folder / tag else _other_tags(folder, tag)
    others = tuple(sorted(file for file in _belonging(folder, tag, flavour, follow, notes) if file not in shards))
    # Stamp the files before any is read; `check_unchanged` compares with these stamps.
    return FoundCheckpoint(
        folder=folder,
        tag=tag,
        flavour=flavour,
        ranks=ranks,
        others=others,
        stamps={file: stamp_of(file) for file in sorted([*shards, *others])},
        notes=tuple(notes),
    )


def check_unchanged(found: FoundCheckpoint) -> None:
    """Raise SourceCheckpoint if any file has changed since it was found."""
    for path, stamp in found.stamps.items():
        if stamp_of(path) != stamp:
            raise SourceCheckpoint(
                f"{path} is still changing: its size or time differs from a moment ago; nothing was ingested",
                hint="repeat the command once the save has finished",
            )


def holds_zero(path: Path) -> bool:
    """Whether `discover` would find a ZeRO checkpoint, complete or not, in the folder *path*."""
    folders = [path]
    # *path* may be a tag folder, a save folder or its parent, as for `discover`.
    for _ in range(3):
        names = {folder: list_folder(folder) for folder in folders}
        if any(folder_kind(inside) in READABLE for inside in names.values()):
            return True
        folders = [folder / name for folder, inside in names.items() for name in inside if (folder / name).is_dir()]
    return False


# -- which folder, which tag ---------------------------------------------------------------------------------------


def _resolve(path: Path, tag: str | None) -> tuple[Path, str]:
    """Return the save folder and the tag."""
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        beside = [str(path.with_name(name)) for name in nearest(path.name, _names_beside(path))]
        hint = did_you_mean(beside, else_="give the folder that the training run saved to")
        if path.is_file():
            hint = f"give its folder, {path.parent}"
        raise SourceCheckpoint(f"{path} {what}; a ZeRO checkpoint is a folder", hint=hint)
    if _is_tag_folder(path):
        if tag is not None and tag != path.name:
            raise InvalidInput(
                f"{path} is the folder of tag {path.name!r}, but tag {tag!r} was asked for",
                hint="leave --tag out, or give the folder above",
            )
        return path.parent, path.name
    tags = _tags(path)
    if not tags:
        refuse_distributed(path)
    if tags or (path / LATEST).exists() or tag is not None:
        return path, _choose_tag(path, tags, tag)
    return _only_save_folder(path)


def _names_beside(path: Path) -> list[str]:
    return list_folder(path.parent) if path.parent.is_dir() else []


def _choose_tag(folder: Path, tags: list[str], wanted: str | None) -> str:
    known = f"tags here: {', '.join(tags)}" if tags else "there is no tag folder here"
    if wanted is not None:
        if wanted not in tags:
            raise NotFound(f"{folder} has no tag {wanted!r}", hint=known)
        return wanted
    if (folder / LATEST).exists():
        named = read_latest(folder)
        if named in tags:
            return named
        # An empty `latest` is ignored.
        if named:
            raise SourceCheckpoint(
                f"{folder / LATEST} names {named!r}, which is not a checkpoint next to it",
                hint=f"{known}; choose one with --tag" if tags else known,
            )
    if len(tags) == 1:
        return tags[0]
    raise InvalidInput(f"{folder} does not say which tag is meant", hint=f"{known}; choose one with --tag")


def _other_tags(folder: Path, chosen: str) -> list[str]:
    """Return a note if *folder* holds tags besides the chosen one."""
    others = sorted((name for name in _tags(folder) if name != chosen), key=natural)
    shown = f"{', '.join(others[:5])}{' …' if len(others) > 5 else ''}"
    note = f"took {chosen!r}, as {LATEST!r} says; {folder} holds {len(others)} more: {shown}"
    return [f"{note}; use --all for all of them, --tag for another"] if others else []


def read_latest(folder: Path) -> str:
    """Return the tag in the file ``latest`` of *folder*, or '' if that file is empty."""
    path = folder / LATEST
    data = read_source_file(path, size_bytes_max=LATEST_BYTES_MAX)
    try:
        named = data.decode().strip()
    except UnicodeDecodeError as exc:
        raise SourceCheckpoint(f"{path} is not text", hint="choose a tag with --tag") from exc
    if "/" in named or "\0" in named or named in {".", ".."}:
        raise SourceCheckpoint(
            f"{path} names {named!r}, which is not a folder next to it; a tag is a single name",
            hint="choose one with --tag",
        )
    return named


def _only_save_folder(path: Path) -> tuple[Path, str]:
    inner = [name for name in list_folder(path) if (path / name).is_dir() and _tags(path / name)]
    if len(inner) == 1:
        return _resolve(path / inner[0], None)
    if inner:
        inner.sort(key=natural)
        more = f" and {len(inner) - 10} more" if len(inner) > 10 else ""
        raise InvalidInput(
            f"{path} holds {len(inner)} checkpoints: {', '.join(inner[:10])}{more}",
            hint=f"layerstore ingest --all {typed(str(path))}; one: layerstore ingest {typed(str(path / inner[-1]))}",
        )
    _refuse_foreign(path, list_folder(path))
    raise SourceCheckpoint(
        f"{path} holds no ZeRO checkpoint: no folder with zero_pp_rank_*_states.pt files was found",
        hint="give the folder that DeepSpeed, the Trainer, Accelerate, Lightning or PyTorch's DCP saved to",
    )


def _tags(folder: Path) -> list[str]:
    return [name for name in list_folder(folder) if _is_tag_folder(folder / name)]


def _is_tag_folder(path: Path) -> bool:
    return path.is_dir() and folder_kind(list_folder(path)) not in {None, *FSDP}


# -- what kind -----------------------------------------------------------------------------------------------------


def flavour_of(folder: Path, tag: str) -> str:
    """Return who wrote *folder*: ``raw`` (DeepSpeed alone), ``hf``, ``accelerate`` or ``lightning``."""
    if (folder / TRAINER_STATE).exists():
        return "hf"
    if re.fullmatch(r"pytorch_model(_\d+)?", tag):
        return "accelerate"
    if tag == "checkpoint" and folder.name.endswith(".ckpt"):
        return "lightning"
    return "raw"


def _refuse_foreign(folder: Path, names: list[str]) -> None:
    kind = folder_kind(names)
    if kind in NOT_SUPPORTED:
        raise Unsupported(f"{folder} is a {kind} checkpoint, which is not supported", hint=NOT_SUPPORTED[kind])
    if "offloaded_tensors" in names:
        raise Unsupported(
            f"{folder} has its optimizer offloaded to NVMe (offloaded_tensors): its state is not in the shards",
            hint="save with offload_optimizer.device 'cpu' or 'none'",
        )
    shards = (SHARD.fullmatch(name) or WHOLE_MODEL.fullmatch(name) for name in names)
    degrees = {int(match["mp"]) for match in shards if match is not None}
    if degrees - {0}:
        raise Unsupported(
            f"{folder} was saved with tensor parallelism of degree {max(degrees) + 1}, which is not supported",
            hint="train without tensor parallelism and save again",
        )


def _refuse_unfinished(folder: Path) -> None:
    """Refuse a Trainer's unfinished save; ``trainer_state.json`` is one of its last files."""
    names = set(list_folder(folder))
    problem = None
    if INCOMPLETE in names:
        problem = f"the Trainer was interrupted and left {INCOMPLETE}"
    elif re.fullmatch(r"checkpoint-\d+", folder.name) and names & TRAINER_FILES and TRAINER_STATE not in names:
        problem = f"it has files of a Trainer, but no {TRAINER_STATE}"
    if problem is not None:
        raise SourceCheckpoint(
            f"{folder} is not finished: {problem}", hint="wait for the save to end, or ingest an earlier checkpoint"
        )


# -- which files ---------------------------------------------------------------------------------------------------


def _pair_up(folder: Path, names: list[str]) -> tuple[RankFiles, ...]:
    by_kind: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
    for match in filter(None, map(SHARD.fullmatch, names)):
        rank, files = int(match["rank"]), by_kind[match["what"]]
        if rank in files:
            raise SourceCheckpoint(
                f"{folder} has two {match['what']}_states files of rank {rank}: {files[rank].name}, {match[0]}"
            )
        files[rank] = folder / match[0]
    # Stages 1 and 2 have one model file, rank 0's, for all ranks.
    is_whole = not by_kind["model"] and MODEL_STATES in names
    if is_whole:
        by_kind["model"] = dict.fromkeys(by_kind["optim"], folder / MODEL_STATES)
    ranks = sorted(by_kind["model"].keys() | by_kind["optim"].keys())
    if not by_kind["optim"] and (ranks or MODEL_STATES in names):
        raise Unsupported(
            f"{folder} has no optim_states files: the fp32 weights and the optimizer's state are not in it",
            hint="layerstore needs a checkpoint that training could resume from, of ZeRO stage 1, 2 or 3",
        )
    if not by_kind["model"]:
        _refuse_missing(folder, [f"{MODEL_STATES}, or zero_pp_rank_*_{MODEL_STATES} of all ranks,"])
    halves = [f"{kind}_states of rank {rank}" for rank in ranks for kind in by_kind if rank not in by_kind[kind]]
    what = "optim_states" if is_whole else "both files"
    # Only gaps between found ranks show here: how many ranks there were is read from the files later (see `agreed`).
    gaps = [f"{what} of rank {rank}" for rank in range(len(ranks)) if rank not in ranks]
    _refuse_missing(folder, halves + gaps)
    if len({path.name.startswith("bf16_") for path in by_kind["optim"].values()}) > 1:
        raise LayoutMismatch(
            f"{folder} is mixed: the optim_states of some ranks begin with bf16_ and those of others do not",
            hint="the files of all ranks must come from one save; ingest another checkpoint",
        )
    return tuple(RankFiles(rank=rank, model=by_kind["model"][rank], optimizer=by_kind["optim"][rank]) for rank in ranks)


def beside_shards(folder: Path, tag: str) -> Iterator[Path]:
    """
    Yield the files of *folder* to keep byte for byte; a trainer may still be writing to the folder.

    Gathered weights are not kept: they can be derived from the masters, and compose can remake them. An adapter's
    weights are kept: no other file has PEFT's names, and nothing else is trained.
    """
    for path in _belonging(folder, tag, flavour_of(folder, tag), False, []):
        is_weights = path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
        if not is_shard(path.name) and not is_of_fsdp(path.name) and (not is_weights or path.name == ADAPTER_WEIGHTS):
            yield path


def _belonging(folder: Path, tag: str, flavour: str, follow: bool, notes: list[str]) -> Iterator[Path]:
    """Yield the files of one checkpoint in *folder*; add to *notes* what is left out."""
    if flavour == "raw":
        # A raw save folder may hold anything next to its tags; only DeepSpeed's own scripts belong to this checkpoint.
        yield from _walk(folder / tag, folder, follow, notes)
        yield from (folder / name for name in SCRIPTS if (folder / name).is_file())
        return
    for file in _walk(folder, folder, follow, notes):
        top = file.relative_to(folder).parts[0]
        # Compose writes these two files anew.
        if file not in {folder / LATEST, folder / SUMMARY} and (top == tag or not _is_tag_folder(folder / top)):
            yield file


def _walk(directory: Path, folder: Path, follow: bool, notes: list[str]) -> Iterator[Path]:
    count = 0
    pending = [directory]
    while pending:
        for name in list_folder(current := pending.pop()):
            path = current / name
            count += 1
            if count > SOURCE_FILES_MAX:
                raise InvalidInput(
                    f"{folder} holds more than {SOURCE_FILES_MAX} files", hint="give the checkpoint's own folder"
                )
            if not is_text(name):
                notes.append(f"ignored {os.fsencode(path)!r}: its name is not UTF-8")
                continue
            is_link = path.is_symlink()
            if is_link and not follow:
                raise linked(path)
            mode = stat_source(path).st_mode
            if stat.S_ISREG(mode):
                yield path
            elif not stat.S_ISDIR(mode):
                raise SourceCheckpoint(f"{path} is neither a file nor a folder", hint="remove it from the checkpoint")
            elif is_link:
                notes.append(f"ignored {path}: a link to a folder could lead in circles")
            elif (path / "store.json").is_file() and (path / "objects").is_dir():
                notes.append(f"ignored {path}: it is a store")
            else:
                pending.append(path)


def linked(path: Path) -> SourceCheckpoint:
    """Make the error for a symbolic link that must not be followed."""
    return SourceCheckpoint(
        f"{path} is a symbolic link; links in a checkpoint are not followed",
        hint="replace it with a copy of its target, or pass --follow if you trust where it points",
    )


def stamp_of(path: Path) -> tuple[int, int]:
    """Return a checkpoint file's size and modification time; raises SourceCheckpoint if the file is gone."""
    try:
        state = path.stat()
    except OSError as exc:
        raise SourceCheckpoint(f"{path} has vanished: {exc.strerror}", hint="repeat the command") from exc
    return state.st_size, state.st_mtime_ns


# -- the files next to the shards ----------------------------------------------------------------------------------


def check_companions(found: FoundCheckpoint, world_size: int) -> None:
    """Raise if an index lists a missing shard, or if only some ranks saved their random state."""
    others = set(found.others)
    ranks = {rank_of_file(file.name) for file in others if file.parent == found.folder} - {None}
    missing = [
        f"the random state of rank {rank}"
        for rank in range(world_size)
        if ranks and world_size > 1 and rank not in ranks
    ]
    for file in found.others:
        if file.name.endswith(".safetensors.index.json"):
            named = sorted(shards_of_index(file))
            missing += [f"{name} of {file.name}" for name in named if file.parent / name not in others]
    _refuse_missing(found.folder, missing)


def _refuse_missing(folder: Path, missing: list[str]) -> None:
    if missing:
        raise SourceCheckpoint(
            f"{folder} is incomplete: {', '.join(missing[:8])}{' …' if len(missing) > 8 else ''} missing",
            hint="wait for the save to end, copy the missing files from their node, or ingest another checkpoint",
            missing=missing,
        )


def shards_of_index(path: Path) -> set[str]:
    """Return the files that an index of sharded weights lists; raises SourceCheckpoint if it is malformed."""
    names = _json_at(path, "weight_map")
    if not isinstance(names, dict):
        raise SourceCheckpoint(f"{path} is not the index of sharded weights")
    return {str(name) for name in names.values()}


def step_of_trainer(path: Path) -> int:
    """Return the step in a ``trainer_state.json``; raises SourceCheckpoint if it has none."""
    return checked_step(_json_at(path, "global_step"), path)


def _json_at(path: Path, key: str) -> object:
    try:
        return parse_json(read_source_file(path, size_bytes_max=RECORD_BYTES_MAX))[key]
    except (ValueError, TypeError, KeyError) as exc:
        raise SourceCheckpoint(f"{path} has no {key}: {exc}") from exc


def checked_step(step: object, path: PurePath) -> int:
    """Return *step* if references, record names and index keys can hold it; else raise SourceCheckpoint."""
    if type(step) is not int or not 0 <= step < STEP_MAX:
        raise SourceCheckpoint(f"{path} has global_step {str(step)[:60]}, which is not a step")
    return step
