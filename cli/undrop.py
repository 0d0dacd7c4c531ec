"""``layerstore undrop``: bring commits back from the trash."""

from collections import Counter
from typing import Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.drop import NAMED_MAX, check_named, is_one_ref
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.render import counted, print_json, print_line, print_note, print_paragraph, shown, some, with_store
from layerstore.json_fields import json_fields
from layerstore.layers import typed
from layerstore.units import short_id

ABOUT = About("Restore", store="anywhere", elsewhere=("undelete", "unrm"))


def undrop(
    refs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[REF]...", help="RUN@STEP, RUN~1@STEP, or a commit's id."),
    ] = None,
    *,
    run: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="RUN", help="The last dropped commit of each step of this run; may be repeated."),
    ] = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Bring dropped or replaced commits back.

    layerstore log --dropped lists what is in the trash.
    If one of several cannot come back, none does.
    With --run, a step that has a commit now keeps that commit.

    \b
    Examples:
      layerstore drop sft@200
      layerstore undrop sft@200
      layerstore drop --run sft
      layerstore undrop --run sft
    """
    from layerstore.history import references_to

    check_named("undrop", refs, run)
    with opened(store) as opened_store:
        commits = opened_store.undrop_commits(refs or (), runs=run or ())
        references = [shown(ref) for ref in references_to(opened_store.repo, (commit.record for commit in commits))]
        views = [opened_store.repo.catalog.view(name) for name in dict.fromkeys(commit.run for commit in commits)]
        tips = {view.run: next(view.history(view.attempts[-1])).step for view in views}
        in_trash = Counter(name.run for name in opened_store.repo.trash.only_here())
    if as_json:
        fields = [json_fields(commit) for commit in commits]
        print_json(fields[0] if is_one_ref(refs, run) else {"commits": fields})
        return
    if len(commits) == 1:
        print_line(f"{references[0]} is back (commit {short_id(commits[0].id)})")
    else:
        print_paragraph(f"{len(commits):,} commits are back: {some(references, limit=NAMED_MAX)}", indent=2)
    for name, step in tips.items():  # the run's newest attempt may be back, and end at an earlier step
        print_line(f"{shown(name)} now refers to {shown(f'{name}@{step}')}")
    for name in dict.fromkeys(run or ()):
        if count := in_trash[name]:
            listed = with_store(f"layerstore log {typed(name)} --dropped")
            print_note(f"{counted(count, 'older commit')} of {shown(name)} stayed in the trash: {listed}")
