"""``layerstore drop``: move a commit to the trash."""

from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.render import counted, print_json, print_line, print_warning, shown, some, with_store
from layerstore.json_fields import json_fields
from layerstore.units import short_id, size

if TYPE_CHECKING:
    from layerstore.gc import Dropped

ABOUT = About("Maintain", elsewhere=("delete", "remove", "rm"))


def drop(
    ref: Annotated[str, typer.Argument(metavar="REF", help="RUN@STEP, RUN or RUN~1@STEP; never a pin.")],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and write nothing.")] = False,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Move one commit to the trash.

    layerstore undrop brings it back; a gc empties the trash after 7 days, in a bucket after a day.
    Later commits that have layers from it keep them, and so does a pin.
    A commit whose record cannot be read is given up; until then, it blocks gc.

    \b
    Examples:
      layerstore drop sft@200 --dry-run
      layerstore drop sft@200
    """
    with opened(store) as opened_store:
        in_bucket = opened_store.repo.remote is not None
        # Before a drop, which has to read the record.
        given_up = opened_store.give_up(ref, dry_run=dry_run)
        dropped = None if given_up else opened_store.drop(ref, dry_run=dry_run)
    if dropped is None:
        if as_json:
            print_json({"given_up": list(given_up), "dry_run": dry_run})
        else:
            name = f"{shown(ref)} (commit {', '.join(short_id(commit) for commit in given_up)})"
            print_line(
                f"would give up {name}; nothing was changed" if dry_run else f"gave up {name}; its record is in trash/"
            )
    elif as_json:
        print_json({**json_fields(dropped), "dry_run": dry_run})
    else:
        _print_result(dropped, dry_run=dry_run, in_bucket=in_bucket)


def _print_result(dropped: "Dropped", *, dry_run: bool, in_bucket: bool) -> None:
    name = f"{shown(dropped.reference)} (commit {short_id(dropped.commit)})"
    print_line(f"would drop {name}; nothing was changed" if dry_run else f"dropped {name}")
    if dropped.inherited_by:
        keep = "keeps" if len(dropped.inherited_by) == 1 else "keep"
        commits = counted(len(dropped.inherited_by), "later commit")
        print_line(f"{commits} {keep} layers of it: {shown(some(dropped.inherited_by))}")
    if dropped.pins:
        print_line(f"kept by {counted(len(dropped.pins), 'pin')}: {shown(some(dropped.pins))}")
    if dropped.tip is None:
        print_line("the run has no other commit")
    else:
        print_line(f"{shown(dropped.run)} {'then' if dropped.is_tip else 'still'} means {shown(dropped.tip)}")
    for note in dropped.notes:
        print_warning(note)
    when = "a day later" if in_bucket else "after 7 days, or at once with --empty-trash"
    up_to = f"frees up to {size(dropped.size_bytes)} {when}"
    freed = up_to if dropped.size_bytes else "frees nothing: others need all that it has"
    back = with_store(f"layerstore undrop {short_id(dropped.commit)}")
    print_line(f"gc then {freed}" if dry_run else f"gc {freed}; to bring it back: {back}")
