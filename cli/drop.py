"""``layerstore drop``: hide one commit."""

from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.render import SHORT_ID_DIGITS, counted, say, say_json, shown

if TYPE_CHECKING:
    from layerstore import Store
    from layerstore.gc.drop import Dropped

_NAMES_SHOWN_MAX = 8


def drop(
    ref: Annotated[str, typer.Argument(metavar="REF", help="RUN@STEP, RUN or RUN~1@STEP; never a pin.")],
    *,
    last: Annotated[
        bool, typer.Option("--last", help="Also where it is the last visible commit of its attempt.")
    ] = False,
    quarantined: Annotated[
        bool, typer.Option("--quarantined", help="Give up a record that a repair has put into quarantine.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be hidden, and write nothing.")] = False,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Hide one commit.

    Its objects stay until layerstore gc takes what nothing needs.
    Later commits that have layers from it keep them, and so does a pin.
    To show it again, ingest the same checkpoint again.

    \b
    Examples:
      layerstore drop sft@200 --dry-run
      layerstore drop sft@200
    """
    with opened(store) as opened_store:
        if quarantined:
            _give_up(opened_store, ref, dry_run=dry_run, as_json=as_json)
            return
        dropped = opened_store.drop(ref, last=last, dry_run=dry_run)
    if as_json:
        say_json(_fields(dropped, dry_run=dry_run))
    else:
        _tell(dropped, dry_run=dry_run)


def _give_up(store: "Store", ref: str, *, dry_run: bool, as_json: bool) -> None:
    commits = store.give_up(ref, dry_run=dry_run)
    if as_json:
        say_json({"given_up": list(commits), "dry_run": dry_run})
        return
    name = f"{shown(ref)} (commit {', '.join(commit[:SHORT_ID_DIGITS] for commit in commits)})"
    say(f"would give up {name}; nothing was changed" if dry_run else f"gave up {name}; its file stays in quarantine")


def _tell(dropped: "Dropped", *, dry_run: bool) -> None:
    name = f"{shown(dropped.reference)} (commit {dropped.commit[:SHORT_ID_DIGITS]})"
    say(f"would drop {name}; nothing was changed" if dry_run else f"dropped {name}; nothing was removed")
    if dropped.inherited_by:
        keep = "keeps" if len(dropped.inherited_by) == 1 else "keep"
        say(f"{counted(len(dropped.inherited_by), 'later commit')} {keep} layers of it: {_some(dropped.inherited_by)}")
    if dropped.pins:
        say(f"kept by {counted(len(dropped.pins), 'pin')}: {_some(dropped.pins)}")
    if dropped.tip is None:
        say("the run has no other commit")
    else:
        say(f"{shown(dropped.run)} {'then' if dropped.is_tip else 'still'} means {shown(dropped.tip)}")


def _some(names: tuple[str, ...]) -> str:
    return shown(", ".join(names[:_NAMES_SHOWN_MAX]) + (" …" if len(names) > _NAMES_SHOWN_MAX else ""))


def _fields(dropped: "Dropped", *, dry_run: bool) -> dict[str, object]:
    return {
        "run": dropped.run,
        "step": dropped.step,
        "attempt": dropped.attempt,
        "commit": dropped.commit,
        "hidden_by": dropped.hidden_by,
        "inherited_by": list(dropped.inherited_by),
        "pins": list(dropped.pins),
        "tip": dropped.tip,
        "is_tip": dropped.is_tip,
        "dry_run": dry_run,
    }
