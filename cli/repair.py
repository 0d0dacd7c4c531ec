"""``layerstore repair``: move damaged files to the trash, fetch them from another store, and report what is lost."""

from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened, store_or_nearest
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import (
    counted,
    lost_in_words,
    print_each,
    print_json,
    print_line,
    print_warning,
    shown,
    some,
    with_store,
)
from layerstore.errors import IntegrityError
from layerstore.json_fields import json_fields
from layerstore.layers import typed
from layerstore.units import size

if TYPE_CHECKING:
    from layerstore.check import Repaired

ABOUT = About("Maintain")

Sources = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="STORE",
        help="Another store, or a remote by name or URL, that may have intact copies; may be repeated.",
    ),
]


def repair(
    *,
    read_data: Annotated[bool, typer.Option("--read-data", help="Check every byte first, not only sizes.")] = False,
    sources: Sources = None,
    store_id: Annotated[
        str | None,
        typer.Option("--store-id", metavar="ID", help="Write a lost store.json again, with this id."),
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(metavar="REMOTE", help="Restore what this remote (name or URL) lost, from this store."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and write nothing.")] = False,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Move damaged files to the trash, and fetch intact ones.

    Objects and records come from the stores that --from names.
    Anything that none of these stores has is listed, and the command fails: ingesting the checkpoint again restores
    objects; drop and pin --delete give up a commit or a pin that cannot be read.
    May be stopped and repeated at any time.

    \b
    Examples:
      layerstore repair --read-data --dry-run
      layerstore repair --read-data --from /backup/store
      layerstore repair --from origin
    """
    restored = None
    if store_id is not None:
        from layerstore.store import restore_identity

        restored = restore_identity(store_or_nearest(store), store_id, dry_run=dry_run)
    is_assumed = restored is not None and restored.is_assumed
    identity = {"dry_run": dry_run, "identity": restored is not None, "flags_assumed": is_assumed}
    if is_assumed:
        print_warning("which features the store needs is not known; none is assumed")
    if restored is not None and dry_run:  # the rest can be checked only in a store that can be opened
        print_json(identity) if as_json else print_line("would write store.json again")
        return
    with opened(store) as opened_store, shown_progress(as_json=as_json) as progress:
        repaired = opened_store.repair(
            read_data=read_data, sources=sources or (), remote=remote, dry_run=dry_run, progress=progress
        )
    if as_json:
        print_json({**identity, **json_fields(repaired)})
    else:
        if restored is not None:
            print_line(f"wrote store.json again, for store {shown(store_id)}")
        _print_result(repaired, dry_run=dry_run, read_data=read_data)
    if repaired.has_lost:
        raise IntegrityError(_lost_in_words(repaired, dry_run=dry_run), hint=_hint(repaired, read_data=read_data))


def _is_pin(name: str) -> bool:
    return "@" not in name


def _lost_in_words(repaired: "Repaired", *, dry_run: bool) -> str:
    names = sorted({*(cost.holder for cost in repaired.lost), *repaired.unreadable})
    could, done = ("cannot", "changed") if dry_run else ("could not", "removed")
    pins = sum(map(_is_pin, names))
    kinds = (counted(count, noun) for count, noun in ((len(names) - pins, "commit"), (pins, "pin")) if count)
    healed = f"{' and '.join(kinds)} {could} be healed: {some(names)}" if names else ""
    strangers = f"unknown among records, pins and parts: {some(repaired.strangers)}" if repaired.strangers else ""
    return f"{'; '.join(filter(None, (healed, strangers)))}; nothing was {done}"


def _hint(repaired: "Repaired", *, read_data: bool) -> str:
    """Return the remedies; `_print_result` has printed how to restore a damaged pin from another store's copy."""
    option = " --read-data" if read_data else ""
    pins_only = not repaired.lost and all(map(_is_pin, repaired.unreadable))
    is_complete = pins_only and (repaired.pins_elsewhere or not repaired.unreadable)
    ways = [] if is_complete else [f"layerstore repair{option} --from COPY"]
    ways += ["give each unknown entry back its name, or move it out of the store"] if repaired.strangers else []
    if repaired.reingest:
        ways.append(f"ingest the checkpoint of {some(repaired.reingest, limit=3)} again")
    if any(not cost.everything for cost in repaired.lost):
        ways.append("layerstore compose --without-damaged takes older versions of the lost layers")
    for name in repaired.unreadable[:1]:
        ways.append(f"layerstore {'pin --delete' if _is_pin(name) else 'drop'} {typed(name)} removes it")
    return "; ".join(ways)


def _print_result(repaired: "Repaired", *, dry_run: bool, read_data: bool) -> None:
    move, fetch = ("would move", "would fetch") if dry_run else ("moved", "fetched")
    print_each(
        [
            f"{move} damaged {moved.kind}  {shown(moved.path)} to trash/\n  {shown(moved.reason)}"
            for moved in repaired.moved
        ]
    )
    print_each(
        [
            f"{fetch} {part.kind}  {shown(part.path)} ({size(part.size_bytes)})\n  from {shown(part.source)}"
            for part in repaired.fetched
        ]
    )
    print_each(
        [
            f"lost from {shown(cost.holder)}: {shown(lost_in_words(cost.layers, everything=cost.everything))}"
            for cost in repaired.lost
        ]
    )
    for name in repaired.unreadable:
        print_line(f"{shown(name)} cannot be read, and gc removes nothing until it is healed or removed")
    for name in repaired.strangers:
        print_line(f"{shown(name)} is not named like a record, pin or part; gc removes nothing while it is there")
    for pin in repaired.pins_elsewhere:
        print_line(
            f"{shown(pin.name)} is {shown(pin.reference)} in {shown(pin.source)}; this store may have moved it since:"
        )
        print_line(f"  {shown(with_store(f'layerstore pin --delete {typed(pin.name)}'))}")
        print_line(f"  {shown(with_store(f'layerstore pin {typed(pin.name)} {typed(pin.reference)}'))}")
    print_each([f"{shown(name)} is for a newer layerstore, and was left as it is" for name in repaired.newer])
    if not repaired.has_done:
        unread = "" if read_data else "; tensor data was not read; --read-data checks it too"
        print_line("nothing else can be repaired" if repaired.has_lost else f"nothing to repair{unread}")
    elif dry_run:
        print_line("nothing was changed")
    elif repaired.reindexed:
        print_line("rebuilt the index")
