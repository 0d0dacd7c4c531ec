"""``layerstore verify``: is everything still as it was written?"""

from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import (
    counted,
    lost_in_words,
    print_each,
    print_json,
    print_line,
    print_note,
    print_paragraph,
    shown,
    some,
)
from layerstore.errors import IntegrityError, InvalidInput
from layerstore.json_fields import json_fields
from layerstore.layers import typed
from layerstore.units import size

if TYPE_CHECKING:
    from layerstore.check import Damage, Hurt, Verdict

ABOUT = About("Maintain", store="anywhere", answers=True, elsewhere=("check", "fsck"))

_HURT_MAX = 20

Subset = Annotated[
    str | None,
    typer.Option(
        "--read-data-subset", metavar="PART", help="Read only a part: 10%, at random, or 3/10, the third tenth."
    ),
]


def verify(
    ref: Annotated[
        str | None,
        typer.Argument(metavar="REF", help="Only what this commit or pin needs."),
    ] = None,
    *,
    read_data: Annotated[bool, typer.Option("--read-data", help="Also read and hash every byte.")] = False,
    read_data_subset: Subset = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Repeat an earlier verify that printed N.")] = None,
    remote: Annotated[
        str | None, typer.Option(metavar="REMOTE", help="Check this remote (name or URL) instead of the store.")
    ] = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Check that everything is as it was written.

    Checks every record's checksum and every object's size; with --read-data, every byte.
    Lists damage with the affected commits and layers, and what is still intact.
    With --read-data-subset, 1/10 to 10/10 read everything in ten nights.

    \b
    Examples:
      layerstore verify
      layerstore verify sft@200 --read-data
      layerstore verify --read-data-subset 3/10
    """
    if seed is not None and read_data_subset is None:
        raise InvalidInput("--seed is for --read-data-subset", hint="layerstore verify --help")
    reads = read_data or read_data_subset is not None
    with opened(store, remote=remote) as opened_store, shown_progress(as_json=as_json) as progress:
        reference = None if ref is None else opened_store.compose(ref).name  # a run resolves to its newest commit
        verdict = opened_store.verify(
            ref, read_data=read_data, read_data_subset=read_data_subset, seed=seed, progress=progress
        )
        url = opened_store.repo.remote
    if as_json:
        print_json(json_fields(verdict))
    else:
        _print_verdict(verdict, reference, is_bucket=url is not None)
        if not reads:
            print_note("tensor data was not read; --read-data checks it too")
    if verdict.damaged:
        option = " --read-data" if reads else ""  # without it, repair would not find this damage
        where = ""
        if remote is not None:
            option += f" --remote {typed(remote)}"
        elif url is not None:
            option += f" --remote {typed(url)}"
            where = ", in a store that still has the lost data,"
        raise IntegrityError(
            _damage_in_words(verdict), hint=f"layerstore repair{option} --dry-run{where} says what can be done"
        )


def _damage_in_words(verdict: "Verdict") -> str:
    needed_by = sorted({name for damage in verdict.damaged for name in damage.needed_by})
    affected = f"; it affects {some(needed_by, limit=5)}" if needed_by else ""
    return f"damage found in {counted(len(verdict.damaged), 'place')}{affected}; nothing was changed"


def _print_verdict(verdict: "Verdict", reference: str | None, *, is_bucket: bool) -> None:
    for damage in verdict.damaged:
        _print_damage(damage)
    print_each(
        [f"{shown(holder.reference)}: {shown(_stands(holder))}" for holder in verdict.standing.hurt], limit=_HURT_MAX
    )
    for run, whole in verdict.standing.whole.items():
        print_line(f"{shown(run)}: {f'the newest intact step is {shown(whole)}' if whole else 'no step is intact'}")
    scope = "" if reference is None else f"{shown(reference)}: "
    checked = f"{counted(verdict.records, 'record')}, {counted(verdict.objects, 'object')}{_read(verdict)}"
    (print_note if verdict.ok else print_line)(f"checked {scope}{checked}: {_result(verdict)}")
    if verdict.orphans:
        of_names = {"record", "pin", "version", "state", "stranger"}
        may_be_needed = any(damage.kind in of_names for damage in verdict.damaged)
        removed = (
            "harmless, and removed by a gc once they are a day old"
            if is_bucket
            else "harmless, and removed by the next gc"
        )
        what = "only what is damaged may need them: repair that first" if may_be_needed else removed
        print_note(f"{counted(verdict.orphans, 'object')} of no commit: {what}")


def _result(verdict: "Verdict") -> str:
    if verdict.damaged:
        return f"{len(verdict.damaged)} damaged"
    if verdict.sample is not None and not verdict.objects_read:
        return "no damage in names and sizes; this part holds no object"
    return "no damage"


def _read(verdict: "Verdict") -> str:
    if verdict.sample is not None:
        return f", {verdict.objects_read:,} of them read ({verdict.sample}), {size(verdict.bytes_read)}"
    return f", {size(verdict.bytes_read)} read" if verdict.bytes_read else ""


def _print_damage(damage: "Damage") -> None:
    """Print one damage, then each effect on its own line; table cells would fold them beyond recognition."""
    what = "unknown entry" if damage.kind == "stranger" else f"damaged {damage.kind}"
    print_line(f"{what}  {shown(damage.path)}")
    print_paragraph(f"  {shown(damage.reason)}", indent=4)
    holders: dict[str, list[str]] = {}  # list a layer only once, even if many commits inherited it
    for cost in damage.costs:
        holders.setdefault(lost_in_words(cost.layers, everything=cost.everything), []).append(cost.holder)
    for lost, names in holders.items():
        print_paragraph(f"  affects {shown(some(names))}: {shown(lost)}", indent=4)


def _stands(hurt: "Hurt") -> str:
    if hurt.everything:
        return "cannot be composed: a rank's state is lost"
    lost = f"{counted(len(hurt.layers), 'layer')} lost"
    if hurt.stands is None:
        return lost
    policies = [f"--policy {name}" for name in hurt.stands if name != "weights"]
    stands = [*policies, *(["--format hf"] if "weights" in hurt.stands else [])]
    return (
        f"{lost}; can still be composed with {' or '.join(stands)}"
        if stands
        else f"{lost}; no policy avoids that, compose --without-damaged may"
    )
