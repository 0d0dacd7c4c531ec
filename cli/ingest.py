"""
``layerstore ingest``: turn checkpoints on disk into commits.

Checkpoints come one by one from a source (the command line, a scan of some folders, or a watch on them), and each goes
to `Store.ingest`. A broken checkpoint given by name stops the command; --all and --watch warn and continue.
"""

import os
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import layerstore
from layerstore.arguments import check_effect
from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened, read_settings, table_of, with_options
from layerstore.cli.policy import with_settings
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import (
    counted,
    print_json,
    print_line,
    print_paragraph,
    print_warning,
    shown,
)
from layerstore.errors import (
    IntegrityError,
    Internal,
    InvalidInput,
    JobLost,
    LayerstoreError,
    Locked,
    Overtaken,
    SourceCheckpoint,
    StorageIO,
)
from layerstore.filenames import natural
from layerstore.ingest_options import IngestOptions
from layerstore.json_fields import json_fields
from layerstore.policy import OURS, policy_named
from layerstore.units import short_id, size

if TYPE_CHECKING:
    from collections.abc import Callable

    from layerstore.ingest import Ingested
    from layerstore.zero3 import FoundTag

    Checkpoint = tuple[Path, str | None]
    """A folder and a tag in it; None stands for the tag that the folder's file `latest` contains."""

ABOUT = About("Save", store="anywhere", elsewhere=("add", "commit", "import", "save"))

POLL_SECONDS = 2.0
"""How often a watch scans the folders."""

REST_SECONDS = 10.0
"""A checkpoint that has not changed for this long is complete: no writer pauses that long between files."""

Checkpoints = Annotated[list[Path], typer.Argument(metavar="CHECKPOINT", help="Folders that training saved to.")]
All = Annotated[bool, typer.Option("--all", help="Take every ZeRO checkpoint below the folders, in step order.")]
Watch = Annotated[
    bool,
    typer.Option("--watch", help="Like --all, then each new checkpoint, until Ctrl-C."),
]
PolicyName = Annotated[
    str,
    typer.Option(
        metavar="P",
        help=f"Store only layers that are due: {', '.join(policy.name for policy in OURS)}, filter:every=10.",
    ),
]
AllowGlobal = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Keep this class of a foreign pickle as an inert object; may be repeated."),
]


@with_settings
@with_options("options", table_of(IngestOptions), panel="Options")
def ingest(
    checkpoints: Checkpoints,
    *,
    all_: All = False,
    watch: Watch = False,
    policy: PolicyName = "full",
    settings: Mapping[str, object],
    options: Mapping[str, Any],
    allow_global: AllowGlobal = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Save folders of checkpoints in the store.

    Takes ZeRO checkpoints saved by DeepSpeed, the HF Trainer, Accelerate or Lightning, and folders that FSDP2 or
    torchtitan saved with torch.distributed.checkpoint; several are ingested in the order of their numbers.
    Ingesting the same checkpoint again writes only what is missing or damaged in the store.
    Without --run, the run is named after training's output folder: sft for sft/checkpoint-200,
    and for Accelerate's sft/step_200, sft/epoch_2 and sft/checkpoints/checkpoint_2.

    \b
    Examples:
      layerstore ingest out/checkpoint-200 --run sft
      layerstore ingest --all out --policy parity
      layerstore ingest --watch out
    """
    is_open, chosen = all_ or watch, policy_named(policy, settings)
    several = is_open or len(checkpoints) > 1
    options = read_settings(IngestOptions, options)
    ingest_options = IngestOptions(**options)
    check_effect(options)
    _check_number(ingest_options, several=several, is_open=is_open)
    saved: list[Ingested] = []
    problems: list[tuple[Path, LayerstoreError]] | None = [] if is_open else None
    with opened(store) as opened_store:
        words = {name: value for name, value in options.items() if name != "tag"}
        save = partial(opened_store.ingest, policy=chosen, allowed_globals=allow_global or (), **words)
        look = partial(
            _named, tag=ingest_options.tag, follow=ingest_options.follow, is_dcp=ingest_options.onto is not None
        )
        to_save = (
            (_arriving_checkpoints if watch else _existing_checkpoints)(checkpoints, as_json)
            if is_open
            else look(checkpoints)
        )
        try:
            for folder, its_tag in to_save:
                _take(save, folder, its_tag, saved, problems, pin=ingest_options.pin, as_json=as_json)
        except LayerstoreError as exc:
            if problems is None and several:
                were = "was" if len(saved) == 1 else "were"
                exc.message += f"; {len(saved) or 'none'} of {len(checkpoints)} checkpoints {were} taken"
            raise
        finally:
            # Even if a later checkpoint fails, earlier ones stay saved.
            if as_json and (saved or is_open):
                print_json(_fields(saved, problems) if several else json_fields(saved[0]))
            elif problems is not None and watch:
                print_line(f"stopped watching: {counted(len(saved), 'checkpoint')} taken, {len(problems)} not saved")
    if problems:
        raise _first(problems, tried=len(saved) + len(problems))


def _check_number(options: IngestOptions, *, several: bool, is_open: bool) -> None:
    """Raise InvalidInput if an option for one checkpoint came with several, or one for named folders with a search."""
    if options.onto is not None and is_open:
        raise InvalidInput(
            "--onto is for folders of torch.distributed.checkpoint; --all and --watch look for DeepSpeed's",
            hint="name the folders",
        )
    if options.tag is not None and is_open:
        raise InvalidInput(
            "--tag chooses one checkpoint; --all and --watch take every one", hint="leave one of them out"
        )
    if options.step is not None and several:
        raise InvalidInput(
            f"--step {options.step} is for one checkpoint: each of several has its own", hint="name one folder alone"
        )
    if options.pin is not None and several:
        raise InvalidInput(f"--pin {options.pin} was given with several checkpoints: a pin refers to one commit")
    if options.opens_attempt and several:
        raise InvalidInput(
            "--rollback and --resumed-from are for one checkpoint: the first that was saved after going back",
            hint="ingest that one alone, then the others without the option",
        )


def _take(
    save: "Callable[..., Ingested]",
    folder: Path,
    tag: str | None,
    saved: "list[Ingested]",
    problems: list[tuple[Path, LayerstoreError]] | None,
    *,
    pin: str | None,
    as_json: bool,
) -> None:
    """Ingest one checkpoint; append an error to *problems*; raise it if there is no list, or if it affects all."""
    path = folder if tag is None else folder / tag
    was_there = path.exists()
    try:
        with shown_progress(as_json=as_json) as progress:
            try:
                ingested = save(folder, tag=tag, progress=progress)
            except Overtaken:  # a collection removed something that this save would reuse: save again, writing it
                ingested = save(folder, tag=tag, progress=progress)
    except LayerstoreError as exc:
        problem = exc
        if isinstance(exc, SourceCheckpoint) and was_there and not path.exists():  # removing *path* caused *exc*
            problem = SourceCheckpoint(
                f"{path} was removed while it was read; nothing of it was saved",
                hint="if the job's own rotation did it, ingest sooner, or let the job keep more",
            )
        if problems is None or _concerns_all(problem, folder):
            raise problem from exc.__cause__
        print_warning(f"{path} was not saved: {problem}{f'; {problem.hint}' if problem.hint else ''}")
        problems.append((path, problem))
        return
    saved.append(ingested)
    _print_result(ingested, pin=pin, as_json=as_json)


def _first(problems: list[tuple[Path, LayerstoreError]], *, tried: int) -> LayerstoreError:
    """Return the first problem, with the number of problems in its message; its exit code is the command's."""
    _, first = problems[0]
    first.message = f"{len(problems)} of {counted(tried, 'checkpoint')} not saved: {first.message}"
    return first


def _concerns_all(problem: LayerstoreError, folder: Path) -> bool:
    """Whether *problem* is with the store, its disk or its lock rather than with the checkpoint in *folder*."""
    if isinstance(problem, StorageIO):
        return not Path(str(problem.filename)).is_relative_to(folder)
    return isinstance(problem, IntegrityError | Internal | JobLost | Locked)


# -- where checkpoints come from -----------------------------------------------------------------------------------


def _named(checkpoints: list[Path], *, tag: str | None, follow: bool, is_dcp: bool) -> "Iterator[Checkpoint]":
    """Yield *checkpoints* in step order; if there are several, first check that all can be found, unless *is_dcp*."""
    from layerstore.distcp import open_folder
    from layerstore.source import real_path
    from layerstore.zero3 import discover, distributed_at

    # A shell sorts checkpoint-1000 before checkpoint-200.
    in_order = sorted(checkpoints, key=lambda path: natural(str(path)))
    for checkpoint in in_order if len(in_order) > 1 and not is_dcp else []:
        folder = real_path(checkpoint)
        if folder.is_dir() and distributed_at(folder):
            open_folder(folder, follow=follow)
        else:
            discover(checkpoint, tag=tag, follow=follow)
    yield from ((checkpoint, tag) for checkpoint in in_order)


def _existing_checkpoints(folders: list[Path], as_json: bool) -> "Iterator[Checkpoint]":
    """Yield every checkpoint below *folders*."""
    survey = layerstore.find_checkpoints(*folders)
    for note in survey.notes:
        print_warning(note)
    if not as_json:
        print_line(f"found {counted(len(survey.found), 'checkpoint')}")
    for tag in survey.found:
        yield tag.folder, tag.tag


def _arriving_checkpoints(folders: list[Path], as_json: bool) -> "Iterator[Checkpoint]":
    """Yield every checkpoint below *folders* once it has stopped changing, and again after a change; never ends."""
    for top in folders:
        if not top.exists():
            print_warning(f"{shown(top)} is not there yet; waiting for it")
    if not as_json:
        print_line(f"watching {', '.join(shown(top) for top in folders)}; Ctrl-C ends it")
    seen: dict[Path, int] = {}
    while True:
        for top in folders:
            try:
                survey = layerstore.find_checkpoints(top)
            except SourceCheckpoint:
                continue  # nothing there yet, or a rotation is removing something right now
            for tag in survey.found:
                newest = _newest_change(tag)
                if newest is None or seen.get(tag.path) == newest or time.time_ns() - newest <= REST_SECONDS * 1e9:
                    continue
                seen[tag.path] = newest
                yield tag.folder, tag.tag
        time.sleep(POLL_SECONDS)


def _newest_change(checkpoint: "FoundTag") -> int | None:
    """Return when a file of *checkpoint* was last changed; None if the checkpoint is gone."""
    newest = 0
    try:
        for folder in (checkpoint.folder, checkpoint.path):
            with os.scandir(folder) as entries:
                newest = max([newest, *(entry.stat().st_mtime_ns for entry in entries)])
    except OSError:
        return None  # the trainer removed it, or it is not readable now: look again later
    return newest


# -- output --------------------------------------------------------------------------------------------------------


def _print_result(ingested: "Ingested", *, pin: str | None, as_json: bool) -> None:
    for note in ingested.notes:
        print_warning(note)
    if as_json:
        return
    name = f"{shown(ingested.run)}@{ingested.step} (commit {short_id(ingested.commit)})"
    if not ingested.is_new:
        healed = ", ".join(_written_again(ingested))
        unread = "" if ingested.reused_read else "; reused objects not read"
        if pin is None:
            print_line(f"already saved: {name}; {healed or 'nothing was written'}{unread}")
        else:
            print_line(f"already saved: {name}; pinned as {shown(pin)}, {healed or 'no layer was written'}{unread}")
        return
    if ingested.record_healed:
        print_line(f"{name}: its lost record is back")
    pinned = "" if pin is None else f"; pinned as {shown(pin)}"
    derived = f", {size(ingested.bytes_derived)} derived" if ingested.bytes_derived else ""
    layers = counted(len(ingested.layers_saved), "layer")
    if len(ingested.layers_saved) < len(ingested.layers):
        layers += f" of {len(ingested.layers)}"
    if ingested.precision != "exact":
        compact, exact = len(ingested.layers_compact), len(ingested.layers_saved) - len(ingested.layers_compact)
        both = f", {compact} in {ingested.precision}, {exact} exactly"
        layers += both if compact and exact else " exactly" if exact else f" in {ingested.precision}"
    unread = "" if ingested.reused_read else ", not read"
    reused = f", {size(ingested.bytes_reused)} reused{unread}" if ingested.bytes_reused else ""
    print_paragraph(
        f"saved {name}: {layers}, {size(ingested.bytes_new)} new{reused}{derived}, in {ingested.seconds:.1f} s, "
        f"from {shown(ingested.source)}{pinned}",
        indent=2,
    )


def _written_again(ingested: "Ingested") -> Iterator[str]:
    """Yield what an ingest rewrote for a commit that was already saved."""
    missing = ingested.objects_new - ingested.objects_healed
    if missing:
        yield f"{counted(missing, 'missing object')} written again"
    if ingested.objects_healed:
        yield f"{counted(ingested.objects_healed, 'damaged object')} written again"
    if ingested.record_healed:
        yield "its record was damaged and is written again"


def _fields(saved: "list[Ingested]", problems: list[tuple[Path, LayerstoreError]] | None) -> dict[str, object]:
    """Return the JSON fields of several checkpoints and of their *problems*."""
    fields: dict[str, object] = {"commits": [json_fields(ingested) for ingested in saved]}
    if problems is not None:
        fields["problems"] = [
            {
                "path": str(path),
                "kind": problem.kind,
                "code": problem.exit_code,
                "message": problem.message,
                "hint": problem.hint,
            }
            for path, problem in problems
        ]
    return fields
