"""``layerstore verify``: is everything as it was written?"""

from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import counted, say, say_json, shown, size

if TYPE_CHECKING:
    from layerstore.ops.verify import Verdict


def verify(
    ref: Annotated[
        str | None,
        typer.Argument(metavar="REF", help="Only what this commit or pin needs.", show_default=False),
    ] = None,
    read_data: Annotated[bool, typer.Option("--read-data", help="Also read and hash every byte.")] = False,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Check that everything is as it was written.

    That is every record's checksum and every object's size; with --read-data, every byte.

    \b
    Examples:
      layerstore verify
      layerstore verify --read-data
      layerstore verify sft@200 --read-data
    """
    from layerstore.errors import IntegrityError

    with opened(store) as opened_store, shown_progress(as_json=as_json) as progress:
        verdict = opened_store.verify(ref, read_data=read_data, progress=progress)
    if as_json:
        say_json(_fields(verdict))
    else:
        _say_verdict(verdict, read_data=read_data)
    if not verdict.ok:
        raise IntegrityError(_damage_in_words(verdict), hint=None if read_data else _hint(ref))


def _hint(ref: str | None) -> str:
    return f"layerstore verify {f'{ref} ' if ref else ''}--read-data finds out whether more is damaged"


def _damage_in_words(verdict: "Verdict") -> str:
    needed_by = sorted({name for damage in verdict.damaged for name in damage.needed_by})
    affected = f"; it affects {', '.join(needed_by[:5])}{' …' if len(needed_by) > 5 else ''}" if needed_by else ""
    return f"damage found in {counted(len(verdict.damaged), 'place')}{affected}; nothing was changed"


def _say_verdict(verdict: "Verdict", *, read_data: bool) -> None:
    for damage in verdict.damaged:
        # No table: a path, a reason and a list of commits beside each other would be folded beyond reading.
        say(f"damaged {damage.kind}  {shown(damage.path)}")
        say(f"  {shown(damage.reason)}")
        if damage.needed_by:
            say(f"  needed by {shown(', '.join(damage.needed_by))}")
    read = f", {size(verdict.bytes_read)} read" if read_data else ""
    result = "no damage" if verdict.ok else f"{len(verdict.damaged)} damaged"
    orphans = f"; {counted(verdict.orphans, 'orphan')}, which harm nothing" if verdict.orphans else ""
    say(f"checked {counted(verdict.records, 'record')}, {counted(verdict.objects, 'object')}{read}: {result}{orphans}")


def _fields(verdict: "Verdict") -> dict[str, object]:
    return {
        "ok": verdict.ok,
        "damaged": [
            {
                "kind": damage.kind,
                "id": damage.id,
                "path": damage.path,
                "needed_by": list(damage.needed_by),
                "reason": damage.reason,
            }
            for damage in verdict.damaged
        ],
        "orphans": verdict.orphans,
        "records": verdict.records,
        "objects": verdict.objects,
        "bytes_read": verdict.bytes_read,
    }
