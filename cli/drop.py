"""``layerstore drop``: move commits to the trash."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.render import (
    counted,
    print_json,
    print_line,
    print_paragraph,
    print_warning,
    shown,
    some,
    with_store,
)
from layerstore.errors import InvalidInput
from layerstore.json_fields import json_fields
from layerstore.layers import typed
from layerstore.units import short_id, size

if TYPE_CHECKING:
    from layerstore.gc import Dropped

ABOUT = About("Maintain", store="anywhere", elsewhere=("delete", "remove", "rm"))

# How many commits are listed by name; the others are only counted.
NAMED_MAX = 20

Refs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[REF]...", help="RUN@STEP, RUN~1@STEP, a commit's id, or RUN for its newest; never a pin."),
]
Runs = Annotated[
    list[str] | None,
    typer.Option("--run", metavar="RUN", help="Every commit of this run, in all its attempts; may be repeated."),
]


def drop(
    refs: Refs = None,
    *,
    run: Runs = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and write nothing.")] = False,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Move commits to the trash.

    layerstore undrop brings them back; a gc empties the trash after 7 days, in a bucket after a day.
    Later commits that inherited layers from them keep these layers, and so do pins.
    If one of several is not found, none is dropped.
    A commit whose record cannot be read is given up; until then, it blocks gc.
    A commit whose record file was moved is refused: rename the file back.

    \b
    Examples:
      layerstore drop sft@200 --dry-run
      layerstore drop sft@200
      layerstore drop sft@100 sft@1100
      layerstore drop --run sft
    """
    check_named("drop", refs, run)
    wanted = list(dict.fromkeys(refs or []))
    with opened(store) as opened_store:
        in_bucket = opened_store.repo.remote is not None
        # Dropping a commit reads its record; a commit whose record cannot be read can only be given up.
        given_up = {ref: lost for ref in wanted if (lost := opened_store.give_up(ref, dry_run=True))}
        sound = [ref for ref in wanted if ref not in given_up]
        dropped = opened_store.drop_commits(sound, runs=run or (), dry_run=dry_run)
        if not dry_run:  # only now: the line above raises, and drops none, if a commit is not found
            given_up = {ref: lost for ref in given_up if (lost := opened_store.give_up(ref))}
    if as_json:
        print_json(_fields(dropped, given_up, is_one=is_one_ref(refs, run)) | {"dry_run": dry_run})
        return
    for ref, commits in given_up.items():
        name = f"{shown(ref)} (commit {', '.join(map(short_id, commits))})"
        print_line(
            f"would give up {name}; nothing was changed" if dry_run else f"gave up {name}; its record is in trash/"
        )
    if dropped:
        _print_result(dropped, dry_run=dry_run, in_bucket=in_bucket, whole_runs=[] if refs else run or [])


def check_named(command: str, refs: Sequence[str] | None, runs: Sequence[str] | None) -> None:
    """Raise InvalidInput if neither *refs* nor *runs* were given to *command*, which is drop or undrop."""
    if not refs and not runs:
        raise InvalidInput(
            f"{command} takes REFs, or --run RUN for every commit of a run", hint=f"layerstore {command} --help"
        )


def is_one_ref(refs: Sequence[str] | None, runs: Sequence[str] | None) -> bool:
    """Whether exactly one REF was given, so that ``--json`` prints one commit instead of a list."""
    return len(refs or []) == 1 and not runs


def _fields(dropped: "Sequence[Dropped]", given_up: dict[str, tuple[str, ...]], *, is_one: bool) -> dict[str, object]:
    """Return the fields of the commits *dropped* and *given_up*; *is_one* if exactly one REF was given."""
    lost = list(dict.fromkeys(commit for commits in given_up.values() for commit in commits))
    if is_one:
        return json_fields(dropped[0]) if dropped else {"given_up": lost}
    return {
        "commits": [json_fields(commit) for commit in dropped],
        "bytes": sum(commit.size_bytes for commit in dropped),
        "given_up": lost,
    }


def _print_result(dropped: "Sequence[Dropped]", *, dry_run: bool, in_bucket: bool, whole_runs: Sequence[str]) -> None:
    """Print what was dropped, or would be, and the effects; *whole_runs* are the runs if only ``--run`` was given."""
    is_one = len(dropped) == 1
    references = [shown(commit.reference) for commit in dropped]
    name = (
        f"{references[0]} (commit {short_id(dropped[0].commit)})"
        if is_one
        else f"{counted(len(dropped), 'commit')}: {some(references, limit=NAMED_MAX)}"
    )
    print_paragraph(f"would drop {name}; nothing was changed" if dry_run else f"dropped {name}", indent=2)
    inheritors = list(dict.fromkeys(name for commit in dropped for name in commit.inherited_by))
    if inheritors:
        keep = "keeps" if len(inheritors) == 1 else "keep"
        them = "it" if is_one else "them"
        print_line(f"{counted(len(inheritors), 'later commit')} {keep} layers of {them}: {shown(some(inheritors))}")
    pins = list(dict.fromkeys(pin for commit in dropped for pin in commit.pins))
    if pins:
        print_line(f"kept by {counted(len(pins), 'pin')}: {shown(some(pins))}")
    for run in dict.fromkeys(commit.run for commit in dropped):
        _print_tip([commit for commit in dropped if commit.run == run])
    for note in dict.fromkeys(note for commit in dropped for note in commit.notes):
        print_warning(note)
    when = "a day later" if in_bucket else "after 7 days, or at once with --empty-trash"
    size_bytes = sum(commit.size_bytes for commit in dropped)
    up_to = f"frees up to {size(size_bytes)} {when}"
    freed = up_to if size_bytes else f"frees nothing: others need all that {'it has' if is_one else 'they have'}"
    named = short_id(dropped[0].commit) if is_one else " ".join(f"--run {typed(run)}" for run in whole_runs) or "REF"
    what = "it" if is_one else "them" if whole_runs else "one"
    back = f"to bring {what} back: {with_store(f'layerstore undrop {named}')}"
    print_line(f"gc then {freed}" if dry_run else f"gc {freed}; {back}")


def _print_tip(dropped: "Sequence[Dropped]") -> None:
    """Print which commit the name of the run refers to once *dropped* are gone."""
    run, tip = shown(dropped[0].run), dropped[0].tip
    if tip is None:
        print_line(f"{run} has no other commit")
    else:
        print_line(f"{run} {'then' if any(commit.is_tip for commit in dropped) else 'still'} refers to {shown(tip)}")
