"""``layerstore ingest``: checkpoints on disk become commits."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.ingest_many import IngestBatch, Take, take_all, take_one
from layerstore.cli.ingest_many import watch as watch_folders
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.policy import described_policy, with_settings
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import (
    SHORT_ID_DIGITS,
    counted,
    say,
    say_json,
    say_paragraph,
    say_warning,
    shown,
    size,
)
from layerstore.errors import InvalidInput, LayerstoreError
from layerstore.json_fields import json_fields

if TYPE_CHECKING:
    from layerstore.ingest import Ingested

Checkpoints = Annotated[list[Path], typer.Argument(metavar="CHECKPOINT", help="Folders of ZeRO-3 checkpoints.")]
All = Annotated[bool, typer.Option("--all", help="Take every checkpoint below the folders, in step order.")]
Watch = Annotated[
    bool, typer.Option("--watch", help="Take every checkpoint below the folders, and each that comes, until Ctrl-C.")
]
RunName = Annotated[
    str | None,
    typer.Option(
        metavar="R",
        help="The run's name; else the save folder's, for checkpoint-N and the like its parent's.",
    ),
]
Tag = Annotated[str | None, typer.Option(metavar="T", help="DeepSpeed's tag; else what `latest` names.")]
PinName = Annotated[str | None, typer.Option(metavar="NAME", help="Pin the commit under this name.")]
Replace = Annotated[bool, typer.Option("--replace", help="Other content saved for this step goes to the trash.")]
PolicyName = Annotated[
    str,
    typer.Option(
        metavar="P", help="full, parity, filter, drift, or an installed one: only layers that are due are stored."
    ),
]
Rollback = Annotated[
    bool, typer.Option("--rollback", help="Training went back to an earlier step: a new attempt begins.")
]
ResumedFrom = Annotated[
    str | None,
    typer.Option("--resumed-from", metavar="REF", help="The commit or pinned composite that training went on from."),
]
LayerPattern = Annotated[
    str | None,
    typer.Option(metavar="REGEX", help="Finds the layer in a parameter's name, where the built-in rule does not."),
]
AllowGlobal = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Keep this class of a foreign pickle as an inert object; may be repeated."),
]
TrustStore = Annotated[
    bool, typer.Option("--trust-store", help="Do not read what the store has already; its size has to do.")
]
Follow = Annotated[bool, typer.Option("--follow", help="Follow links to files inside the checkpoint.")]


@with_settings
def ingest(
    checkpoints: Checkpoints,
    *,
    all_: All = False,
    watch: Watch = False,
    run: RunName = None,
    tag: Tag = None,
    pin: PinName = None,
    replace: Replace = False,
    policy: PolicyName = "full",
    settings: Mapping[str, object],
    rollback: Rollback = False,
    resumed_from: ResumedFrom = None,
    layer_pattern: LayerPattern = None,
    allow_global: AllowGlobal = None,
    follow: Follow = False,
    trust_store: TrustStore = False,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Save ZeRO-3 checkpoints in the store.

    They may come from DeepSpeed, the HF Trainer, Accelerate or Lightning; several go in the order of their numbers.
    The same checkpoint a second time writes nothing, but for what is missing or damaged in the store.
    Without --run the run is called like the folder of the training: sft for sft/checkpoint-200,
    for Accelerate's sft/step_200 and sft/epoch_2, and for its own sft/checkpoints/checkpoint_2.

    \b
    Examples:
      layerstore ingest out/checkpoint-200 --run sft
      layerstore ingest --all out --policy parity
      layerstore ingest --watch out
    """
    is_open = all_ or watch
    several, opens_attempt = is_open or len(checkpoints) > 1, rollback or resumed_from is not None
    _check_number(several=several, pin=pin, tag=tag if is_open else None, opens_attempt=opens_attempt)
    batch, chosen = IngestBatch(), described_policy(policy, settings)
    try:
        with opened(store) as opened_store:

            def take(checkpoint: Path, tag: str | None) -> None:
                with shown_progress(as_json=as_json) as progress:
                    ingested = opened_store.ingest(
                        checkpoint,
                        run=run,
                        tag=tag,
                        pin=pin,
                        replace=replace,
                        policy=chosen,
                        rollback=rollback,
                        resumed_from=resumed_from,
                        layer_pattern=layer_pattern,
                        allowed_globals=allow_global or (),
                        follow=follow,
                        trust_store=trust_store,
                        progress=progress,
                    )
                batch.saved.append(ingested)
                _tell(ingested, pin=pin, as_json=as_json)

            if is_open:
                (watch_folders if watch else take_all)(checkpoints, take, batch, as_json=as_json)
            else:
                _take_each(checkpoints, tag, take)
    finally:
        # Also where a later checkpoint fails: what was saved before it stays saved.
        if as_json and (batch.saved or is_open):
            say_json(_fields(batch, one=len(checkpoints) == 1, is_open=is_open))
    batch.raise_first()


def _check_number(*, several: bool, pin: str | None, tag: str | None, opens_attempt: bool) -> None:
    """Raise InvalidInput if something was given with several checkpoints that can only be meant for one."""
    if tag is not None:
        raise InvalidInput(
            "--tag chooses one checkpoint; --all and --watch take every one", hint="leave one of them out"
        )
    if pin is not None and several:
        raise InvalidInput(f"--pin {pin} was given with several checkpoints: a pin means one commit")
    if opens_attempt and several:
        raise InvalidInput(
            "--rollback and --resumed-from are for one checkpoint: the first that was saved after going back",
            hint="ingest that one alone, then the others without the option",
        )


def _take_each(checkpoints: list[Path], tag: str | None, take: Take) -> None:
    """Take *checkpoints* in step order; an error says how many came before it: those after it were not looked at."""
    for number, checkpoint in enumerate(sorted(checkpoints, key=_in_step_order)):
        try:
            take_one(checkpoint, tag, take)
        except LayerstoreError as exc:
            if len(checkpoints) > 1:
                taken = f"{number or 'none'} of {len(checkpoints)} checkpoints {'was' if number == 1 else 'were'} taken"
                exc.message = f"{exc.message}; {taken}"
            raise


def _in_step_order(path: Path) -> list[tuple[int, str]]:
    """Order ``checkpoint-200`` before ``checkpoint-1000``, which a shell does not."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _tell(ingested: "Ingested", *, pin: str | None, as_json: bool) -> None:
    for note in ingested.notes:
        say_warning(note)
    if as_json:
        return
    name = f"{shown(ingested.run)}@{ingested.step} (commit {ingested.commit[:SHORT_ID_DIGITS]})"
    if not ingested.is_new:
        healed = ", ".join(_written_again(ingested))
        unread = "" if ingested.reused_read else "; reused, not read"
        if pin is None:
            say(f"already saved: {name}; {healed or 'nothing was written'}{unread}")
        else:
            say(f"already saved: {name}; pinned as {shown(pin)}, {healed or 'no layer was written'}{unread}")
        return
    if ingested.record_healed:
        say(f"{name} had lost its record, and has the very same again")
    pinned = "" if pin is None else f"; pinned as {shown(pin)}"
    derived = f", {size(ingested.bytes_derived)} derived" if ingested.bytes_derived else ""
    layers = counted(len(ingested.layers_saved), "layer")
    if len(ingested.layers_saved) < len(ingested.layers):
        layers += f" of {len(ingested.layers)}"
    unread = "" if ingested.reused_read else ", not read"
    say_paragraph(
        f"saved {name}: {layers}, {size(ingested.bytes_new)} new, "
        f"{size(ingested.bytes_reused)} reused{unread}{derived}, in {ingested.seconds:.1f} s, "
        f"from {shown(ingested.source)}{pinned}",
        indent=2,
    )


def _written_again(ingested: "Ingested") -> Iterator[str]:
    """Yield what an ingest wrote of a commit that was saved before."""
    missing = ingested.objects_new - ingested.objects_healed
    if missing:
        yield f"{counted(missing, 'missing object')} written again"
    if ingested.objects_healed:
        yield f"{counted(ingested.objects_healed, 'damaged object')} written again"
    if ingested.record_healed:
        yield "its record was damaged and is written again"


def _fields(batch: IngestBatch, *, one: bool, is_open: bool) -> dict[str, object]:
    """Return the fields of one checkpoint as they are, those of several as a list: with ``--all`` always."""
    if is_open:
        return batch.fields
    return json_fields(batch.saved[0]) if one else {"commits": batch.fields["commits"]}
