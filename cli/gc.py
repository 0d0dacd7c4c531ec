"""``layerstore gc``: remove commits that no rule keeps, and everything that nothing needs."""

import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.policy import keep_of, with_rules
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import (
    Column,
    age,
    counted,
    output,
    print_json,
    print_line,
    print_note,
    print_paragraph,
    print_table,
    print_warning,
    shown,
    some,
    with_store,
)
from layerstore.json_fields import json_fields
from layerstore.layers import typed
from layerstore.units import size

if TYPE_CHECKING:
    from layerstore.gc import CommitFate, GcOutcome, Gone

ABOUT = About("Maintain", store="anywhere", elsewhere=("prune",))

_LINES_MAX = 50

Runs = Annotated[
    list[str] | None, typer.Argument(metavar="RUN", help="The runs that the rules apply to; all by default.")
]
Grace = Annotated[
    str | None,
    typer.Option(
        "--grace",
        metavar="AGE",
        help=(
            "Keep objects younger than this; 0s only if nothing writes now. Unfinished files, and everything in a "
            "remote, are kept for 24h, except with 0s. [default: 5m, in a remote 24h]"
        ),
    ),
]


RemoteName = Annotated[
    str | None, typer.Option(metavar="REMOTE", help="Remove from this remote (name or URL), not the store.")
]


@with_rules
def gc(
    run: Runs = None,
    *,
    rules: Mapping[str, object],
    grace: Grace = None,
    empty_trash: Annotated[
        bool, typer.Option("--empty-trash", help="Also remove what was dropped or replaced less than 7 days ago.")
    ] = False,
    remote: RemoteName = None,
    pushed_to: Annotated[
        str | None, typer.Option("--pushed-to", metavar="REMOTE", help="Keep what this remote lacks.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, and remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask at a terminal.")] = False,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Remove what no rule keeps and nothing needs, for good.

    What it removes cannot be brought back (but in a bucket, without --grace 0s, the trash
    keeps commits for a day); drop moves commits to the trash instead.
    A commit is kept if any rule matches it. Without a rule, every commit stays:
    gc only removes what was dropped or replaced over 7 days ago, and what killed writers left.
    The newest commit of a run always stays, and so do pins with all that they need.
    FREES charges each object to the first listed commit that needs it; "later" is for objects still too young to go.
    Safe during training, ingest and compose; may be stopped and repeated at any time.

    \b
    Examples:
      layerstore gc --dry-run --keep-last 3 --keep-every 1000
      layerstore gc sft --keep-within 14d --keep-best eval_loss:2
      layerstore gc --keep-last 2 --pushed-to origin
    """
    from layerstore.policy import duration

    keep = keep_of(rules)
    grace_seconds = None if grace is None else duration(grace).total_seconds()
    with opened(store) as opened_store:
        collect = partial(
            opened_store.gc,
            keep,
            runs=run or None,
            grace_seconds=grace_seconds,
            empty_trash=empty_trash,
            remote=remote,
            pushed_to=pushed_to,
        )
        plan: GcOutcome | None = None
        url = opened_store.repo.remote if remote is None else opened_store.remotes.url(remote)
        trash_url = None if grace_seconds == 0 else url  # without a grace, a bucket's trash is emptied, too
        if not (dry_run or yes or as_json) and sys.stdin.isatty():
            with shown_progress(as_json=as_json) as progress:
                plan = collect(dry_run=True, progress=progress)
            if not _is_confirmed(plan, pushed_to=pushed_to, trash_url=trash_url):
                print_line("nothing was removed")
                return
        with shown_progress(as_json=as_json) as progress:
            # Other processes may have saved or dropped since the plan: gc refuses to remove more than the plan shows.
            outcome = collect(dry_run=dry_run, confirmed=plan, progress=progress)
        # The note below suggests --empty-trash, which a bucket refuses: its trash is removed by age.
        has_trash = not (as_json or outcome.bytes_freed or url or empty_trash)
        dropped = opened_store.dropped() if has_trash else []
    if as_json:
        print_json(_fields(outcome, dry_run=dry_run))
    else:
        _print_result(outcome, is_done=not dry_run, pushed_to=pushed_to, trash_url=trash_url)
        if dropped:
            commits, them = _staying(len(dropped), "dropped commit")
            print_note(f"{commits} in the trash: --empty-trash removes {them}")


def _is_confirmed(plan: "GcOutcome", *, pushed_to: str | None, trash_url: str | None) -> bool:
    """Show *plan* and ask; anything but a yes means no, including the end of the input."""
    if not (plan.removed or plan.trimmed or plan.trash.count):
        return True
    output.answers = True  # the user must see the plan before answering, even with --quiet
    _print_result(plan, is_done=False, pushed_to=pushed_to, trash_url=trash_url)
    sys.stdout.write("Remove them for good? [y/N]: " if trash_url is None else "Remove them? [y/N]: ")
    sys.stdout.flush()
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):
        print_line()  # Ctrl-D leaves the cursor on the line of the question
    return answer.strip().lower() in {"y", "yes"}


def _print_result(outcome: "GcOutcome", *, is_done: bool, pushed_to: str | None, trash_url: str | None) -> None:
    from layerstore.gc import NOT_PUSHED, NOT_REQUESTED

    # Doomed commits first, because a long list is cut at its end.
    fates = sorted(outcome.commits, key=lambda fate: (bool(fate.kept_by), not fate.loses_moments))
    fates = [fate for fate in fates if fate.kept_by != (NOT_REQUESTED,)]
    if outcome.removed or outcome.trimmed:
        columns = [Column("COMMIT", folds=True), Column("SAVED", drops=1), Column(""), Column("WHY", folds=True)]
        print_table([*columns, Column("FREES", "right")], map(_line, fates[:_LINES_MAX]))
        if len(fates) > _LINES_MAX:
            print_line(f"… and {len(fates) - _LINES_MAX:,} more; --json has them all")
        if len(fates) < len(outcome.commits):
            print_line(
                f"… and {len(outcome.commits) - len(fates):,} kept in runs that were not named; --json has them all"
            )
        print_line()
    kept = sum(bool(fate.kept_by) for fate in outcome.commits)
    pins = f" and {counted(len(outcome.pins), 'pin')}" if outcome.pins else ""
    verb, tense = ("removed", "") if is_done else ("would remove", "; nothing was changed")
    is_for_good = trash_url is None and (outcome.removed or outcome.trimmed or outcome.trash.count)
    for_good = " for good" if is_for_good else ""
    freed = f"{size(outcome.bytes_freed)}; keeps {counted(kept, 'commit')}{pins}{tense}"
    print_paragraph(f"{verb} {_parts(outcome)}{for_good}: {freed}", indent=2)
    if outcome.dropped:
        print_paragraph(f"{'removed' if is_done else 'would remove'} trash: {shown(some(outcome.dropped))}", indent=2)
    if trash_url is not None and outcome.removed and is_done:
        commits, them = _staying(len(outcome.removed), "commit")
        undrop = f"layerstore --store {typed(trash_url)} undrop RUN@STEP"
        print_line(f"{commits} in the bucket's trash for a day: {shown(undrop)} brings {them} back")
    unpushed = sum(NOT_PUSHED in fate.kept_by for fate in outcome.commits)
    if unpushed and pushed_to is not None:
        commits, them = _staying(unpushed, "commit")
        push = with_store(f"layerstore push {typed(pushed_to)}")
        print_line(f"{commits} because {shown(pushed_to)} lacks {them}: {push}")
    for note in outcome.notes:
        print_warning(note)
    if outcome.young.count:
        and_trash = "" if trash_url is None else ", with all of the trash,"
        later = f"a later gc removes them, or --grace 0s now{and_trash} if nothing writes to the store"
        print_paragraph(f"too young to remove: {_amount(outcome.young)}; {later}", indent=2)
    if outcome.waiting.count:
        aside = f"moved aside (network filesystem): {_amount(outcome.waiting)}"
        print_paragraph(f"{aside}; the next gc removes them", indent=2)


def _staying(count: int, noun: str) -> tuple[str, str]:
    """Return *count* with *noun* and "stays" or "stay", and the pronoun: "it" or "them"."""
    stay, them = ("stays", "it") if count == 1 else ("stay", "them")
    return f"{counted(count, noun)} {stay}", them


def _line(fate: "CommitFate") -> list[str]:
    saved = age(fate.time_ns) if fate.time_ns else ""
    name = fate.reference
    if fate.loses_moments:
        return [name, saved, "trim", f"{', '.join(fate.kept_by)}; its moments go", _frees(fate)]
    if fate.kept_by:
        return [name, saved, "keep", ", ".join(fate.kept_by), ""]
    return [name, saved, "remove", fate.goes_because, _frees(fate)]


def _frees(fate: "CommitFate") -> str:
    if not fate.bytes_freed_later:
        return size(fate.bytes_freed) if fate.bytes_freed else ""
    later = f"{size(fate.bytes_freed_later)} later"
    return f"{size(fate.bytes_freed)}, {later}" if fate.bytes_freed else later


def _parts(outcome: "GcOutcome") -> str:
    unfinished = f" and {counted(outcome.unfinished.count, 'unfinished file')}" if outcome.unfinished.count else ""
    orphans = f" ({outcome.orphans.count:,} of no removed commit)" if outcome.orphans.count else ""
    objects = f"{counted(outcome.objects.count, 'object')}{orphans}"
    trash = f", {counted(outcome.trash.count, 'file')} in the trash" if outcome.trash.count else ""
    trimmed = f", the moments of {counted(len(outcome.trimmed), 'commit')}" if outcome.trimmed else ""
    return f"{counted(len(outcome.removed), 'commit')}{trimmed}{trash}, {objects}{unfinished}"


def _amount(gone: "Gone") -> str:
    return f"{counted(gone.count, 'object')}, {size(gone.size_bytes)}"


def _fields(outcome: "GcOutcome", *, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "commits_removed": len(outcome.removed),
        "objects_removed": outcome.objects.count - outcome.waiting.count,
        "bytes_freed": outcome.bytes_freed,
        "removed": [
            {
                **_named(fate),
                "reason": fate.goes_because,
                "bytes_freed": fate.bytes_freed,
                "bytes_freed_later": fate.bytes_freed_later,
            }
            for fate in outcome.removed
        ],
        "kept": [
            {**_named(fate), "reason": ", ".join(fate.kept_by), "loses_moments": fate.loses_moments}
            for fate in outcome.commits
            if fate.kept_by
        ],
        **json_fields(outcome),
    }


def _named(fate: "CommitFate") -> dict[str, object]:
    return json_fields(fate) | ({} if fate.time_ns else {"time": None})
