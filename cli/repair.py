"""``layerstore repair``: take what is damaged out of the way, write back what there is a copy of, tell what is lost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.options import DEFAULT_STORE, AsJson, StorePath, opened
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import (
    SHORT_ID_DIGITS,
    age,
    counted,
    iso_time,
    say,
    say_json,
    say_note,
    say_paragraph,
    say_warning,
    shown,
    size,
    with_store,
)
from layerstore.layers import typed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from layerstore.check.fall_back import FallBack
    from layerstore.check.given_up import Kept
    from layerstore.check.healing import Elsewhere
    from layerstore.check.identity import RestoredIdentity
    from layerstore.check.repaired import Reingest, Repaired

_NAMES_MAX = 8
_LINES_MAX = 50

Sources = Annotated[
    list[Path] | None,
    typer.Option(
        "--from",
        metavar="STORE",
        help="Another store that may have what is lost, best a copy of this one; may be given again.",
    ),
]


def repair(
    *,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Look at every byte first, not only at sizes.")
    ] = False,
    sources: Sources = None,
    fall_back: Annotated[
        bool, typer.Option("--fall-back", help="Hurt commits take older versions of the layers that they have lost.")
    ] = False,
    store_id: Annotated[
        str | None,
        typer.Option("--store-id", metavar="ID", help="Write a lost store.json again.", show_default=False),
    ] = None,
    as_list: Annotated[bool, typer.Option("--list", help="Show what is in quarantine, and do nothing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and write nothing.")] = False,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Take damage out of the way, and write back what has a copy.

    Nothing is removed: damaged files go to quarantine/ in the store.
    Records come back from the copies beside the index, objects from the stores that --from names,
    pins from those of them that are copies of this one.
    What is lost is listed, and a failure; ingesting the same checkpoint again brings it back,
    with --replace where its commit has fallen back.
    May be stopped and repeated at any time.

    \b
    Examples:
      layerstore repair --read-data --dry-run
      layerstore repair --read-data --from /backup/store
      layerstore repair --fall-back
    """
    from layerstore.errors import IntegrityError, InvalidInput

    if as_list:
        if read_data or sources or fall_back or store_id is not None or dry_run:
            raise InvalidInput("--list only shows what is in quarantine", hint="leave the other options out")
        _list(store, as_json=as_json)
        return
    restored = None if store_id is None else _restored(store, store_id, dry_run=dry_run)
    if restored is not None and restored.is_assumed:
        say_warning("which features the store needs is not known; none is assumed")
    if restored is not None and dry_run:
        # What else would be found, only a store that opens can tell.
        fields = {"dry_run": True, **_identity_fields(restored)}
        say_json(fields) if as_json else say("would write store.json again")
        return
    with opened(store) as opened_store, shown_progress(as_json=as_json) as progress:
        repaired = opened_store.repair(
            read_data=read_data, sources=sources or (), fall_back=fall_back, dry_run=dry_run, progress=progress
        )
    if as_json:
        say_json(_fields(repaired, dry_run=dry_run, restored=restored))
    else:
        if restored is not None:
            say(f"wrote store.json again, for store {shown(store_id)}")
        _tell(repaired, dry_run=dry_run)
    if repaired.has_lost:
        raise IntegrityError(
            _lost_in_words(repaired, dry_run=dry_run), hint=_hint(repaired, dry_run=dry_run, read_data=read_data)
        )


def _restored(store: Path | None, store_id: str, *, dry_run: bool) -> "RestoredIdentity | None":
    from layerstore.store import restore_identity

    return restore_identity(store or DEFAULT_STORE, store_id, dry_run=dry_run)


def _identity_fields(restored: "RestoredIdentity | None") -> dict[str, object]:
    return {"identity": restored is not None, "flags_assumed": restored is not None and restored.is_assumed}


def _list(store: Path | None, *, as_json: bool) -> None:
    with opened(store) as opened_store:
        kept = opened_store.quarantined()
    if as_json:
        say_json({"kept": [_kept_fields(each) for each in kept]})
        return
    for each in kept:
        say(f"{shown(each.kind)}  {shown(each.path)}")
        say_paragraph(f"  {shown(each.reason)}", indent=4)
        when = "" if each.time_ns is None else f", {age(each.time_ns)}"
        say(f"  quarantine/{each.quarantine}{when}; {each.status}")
    if kept:
        say_note("files stay in quarantine/ until you remove them by hand")
    else:
        say("nothing is in quarantine")


def _kept_fields(kept: "Kept") -> dict[str, object]:
    return {
        "quarantine": kept.quarantine,
        "time": None if kept.time_ns is None else iso_time(kept.time_ns),
        "kind": kept.kind,
        "path": kept.path,
        "reason": kept.reason,
        "status": kept.status,
    }


def _some(names: "Sequence[str]", *, limit: int = _NAMES_MAX) -> str:
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return f"{', '.join(names[:limit])}{more}"


def _is_pin(name: str) -> bool:
    return "@" not in name


def _lost_in_words(repaired: "Repaired", *, dry_run: bool) -> str:
    names = sorted({*(cost.holder for cost in repaired.lost), *repaired.lost_records, *repaired.held_back})
    could, done = ("cannot", "changed") if dry_run else ("could not", "removed")
    pins = sum(map(_is_pin, names))
    kinds = (counted(count, noun) for count, noun in ((len(names) - pins, "commit"), (pins, "pin")) if count)
    return f"{' and '.join(kinds)} {could} be healed: {_some(names)}; nothing was {done}"


def _hint(repaired: "Repaired", *, dry_run: bool, read_data: bool) -> str:
    """
    Return what heals: a rank's state has no older one to fall back to, and a pin may be named again.

    After a dry run what is damaged still lies at its place: there an ingest takes it for sound, and what only reading
    has found is only found by reading again.
    """
    lost = sorted({*repaired.lost_records, *repaired.held_back})
    has_layers = not repaired.cannot_fall_back and any(
        not cost.everything and not _is_pin(cost.holder) for cost in repaired.lost
    )
    or_fall_back = ", or --fall-back where layers are lost" if has_layers else ""
    ways = [f"layerstore repair{' --read-data' if dry_run and read_data else ''} --from COPY{or_fall_back}"]
    if repaired.reingest:
        first = repaired.reingest[0]
        after = "after a repair " if dry_run else ""
        ways.append(f"{after}{_ingest(first)} heals what {first.reference} saved")
    ways += [f"layerstore pin {typed(name)} REF names a pin again" for name in lost if _is_pin(name)][:1]
    return "; ".join(ways)


def _ingest(save: "Reingest") -> str:
    """
    Return the command that brings back what *save* wrote: under its own policy, else it is another commit.

    Where its run has something else at its place by now, any new run brings it back: equal bytes are one object.
    """
    policy = "" if save.policy is None else f" --policy {save.policy}"
    run = "NEW_RUN" if save.run is None else typed(save.run)
    return f"layerstore ingest CHECKPOINT --run {run}{policy}"


def _tell(repaired: "Repaired", *, dry_run: bool) -> None:
    would = "would " if dry_run else ""
    for file in repaired.quarantined[:_LINES_MAX]:
        say(f"{would}quarantine{'' if dry_run else 'd'} {file.kind}  {shown(file.path)}")
        say_paragraph(f"  {shown(file.reason)}", indent=4)
    _more(len(repaired.quarantined))
    for each in repaired.healed[:_LINES_MAX]:
        say(f"{would}heal{'' if dry_run else 'ed'} {each.kind}  {shown(each.path)} ({size(each.size_bytes)})")
        say(f"  from {shown(each.origin)}")
    _more(len(repaired.healed))
    for fall in repaired.fell_back[:_LINES_MAX]:
        say(f"{shown(fall.reference)} {would}fall{'' if dry_run else 's'} back: {shown(_ages(fall))}")
    _more(len(repaired.fell_back))
    if repaired.fell_back:
        say("  layerstore ingest CHECKPOINT --run RUN --replace stores such a commit again as it was")
    _tell_lost(repaired)
    if not repaired.has_done:
        say("nothing to repair" if not repaired.has_lost else "nothing more can be done here")
    elif dry_run:
        say("nothing was changed")
    else:
        say(f"{'made the index afresh; ' if repaired.reindexed else ''}nothing was removed")
    if repaired.quarantine is not None:
        say(f"what was taken out of the way is in quarantine/{repaired.quarantine}")


def _more(count: int) -> None:
    if count > _LINES_MAX:
        say(f"… and {count - _LINES_MAX:,} more; --json has them all")


def _ages(fall: "FallBack") -> str:
    ages = [f"{age.layer} is from step {age.step}{_behind(age.steps)}" for age in fall.ages]
    return _some(ages, limit=4)


def _behind(steps: int | None) -> str:
    return "" if steps is None else f", {counted(steps, 'step')} older"


def _tell_lost(repaired: "Repaired") -> None:
    for cost in repaired.lost[:_LINES_MAX]:
        lost = (
            "all of it" if cost.everything else f"{counted(len(cost.layers), 'layer')}, {_some(cost.layers, limit=4)}"
        )
        say(f"lost of {shown(cost.holder)}: {shown(lost)}")
    _more(len(repaired.lost))
    for name in repaired.lost_records:
        what = "what this pin meant cannot be read" if _is_pin(name) else "no copy of its record is left"
        say(f"lost {shown(name)}: {what}")
    for pin in repaired.pins_elsewhere:
        say(f"{shown(pin.name)} is {shown(pin.reference)} in {shown(pin.store)}; nothing proves that it was so here:")
        say(f"  {shown(with_store(f'layerstore pin {typed(pin.name)} {typed(pin.reference)}'))}")
    for name, layers in repaired.cannot_fall_back.items():
        say(f"{shown(name)} cannot fall back: no older version of {shown(_some(layers, limit=4))} is whole and fits")
    for name in repaired.shown_again:
        say(f"{shown(name)} shows again: what had hidden it is lost")
    for each in repaired.reingest[:_NAMES_MAX]:
        elsewhere = ", as a new run" if each.run is None else ""
        say(f"to heal what {shown(each.reference)} saved, with the checkpoint of that step{elsewhere}:")
        say(f"  {shown(with_store(_ingest(each)))}")  # on a line of its own, as it is copied
    for name in repaired.newer[:_LINES_MAX]:
        say(f"left as it is  {shown(name)}")
        say("  it is for a newer layerstore")
    _more(len(repaired.newer))
    from layerstore.check.given_up import given_up_by

    for name in repaired.held_back:
        say_warning(f"{name} holds gc back until it is healed or given up")
        say(f"to give up {shown(name)}: {shown(with_store(given_up_by(name)))}")
    _tell_elsewhere(repaired.elsewhere)


def _tell_elsewhere(elsewhere: "Sequence[Elsewhere]") -> None:
    for each in elsewhere[:_LINES_MAX]:
        name = f"{shown(each.run)}@{each.step} (commit {each.commit[:SHORT_ID_DIGITS]})"
        say(f"only in {shown(each.store)}: {name}")
    _more(len(elsewhere))
    if elsewhere:
        say("nothing here says that these were lost, so they are left there; compose and ingest what you want")


def _fields(repaired: "Repaired", *, dry_run: bool, restored: "RestoredIdentity | None") -> dict[str, object]:
    return {
        "dry_run": dry_run,
        **_identity_fields(restored),
        "quarantine": repaired.quarantine,
        "quarantined": [{"path": file.path, "kind": file.kind, "reason": file.reason} for file in repaired.quarantined],
        "healed": [
            {"kind": each.kind, "path": each.path, "from": each.origin, "bytes": each.size_bytes}
            for each in repaired.healed
        ],
        "fell_back": [
            {
                "reference": fall.reference,
                "hurt": fall.hurt,
                "commit": fall.commit.id,
                "layers": {
                    age.layer: {"run": age.run, "step": age.step, "steps": age.steps, "saves": age.saves}
                    for age in fall.ages
                },
            }
            for fall in repaired.fell_back
        ],
        "cannot_fall_back": {name: list(layers) for name, layers in repaired.cannot_fall_back.items()},
        "lost": [
            {"commit": cost.holder, "layers": list(cost.layers), "everything": cost.everything}
            for cost in repaired.lost
        ],
        "lost_records": list(repaired.lost_records),
        "reingest": [
            {"run": each.run, "step": each.step, "reference": each.reference, "policy": each.policy}
            for each in repaired.reingest
        ],
        "held_back": list(repaired.held_back),
        "shown_again": list(repaired.shown_again),
        "elsewhere": [
            {"run": each.run, "step": each.step, "commit": each.commit, "store": each.store}
            for each in repaired.elsewhere
        ],
        "pins_elsewhere": [
            {"pin": each.name, "reference": each.reference, "store": each.store} for each in repaired.pins_elsewhere
        ],
        "newer": list(repaired.newer),
        "reindexed": repaired.reindexed,
    }
