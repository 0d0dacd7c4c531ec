"""``layerstore diff``: what two commits have in common."""

import math
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import (
    SHORT_ID_DIGITS,
    Column,
    counted,
    say,
    say_json,
    say_paragraph,
    say_table,
    say_warning,
    shown,
    size,
)

if TYPE_CHECKING:
    from layerstore.ops.diff import Diff, KindDiff, LayerDiff, Side
    from layerstore.ops.distance import Distance

_REF_HELP = "RUN@STEP, RUN, RUN~1 or a pin."


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_REF_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help=_REF_HELP)],
    *,
    stat: Annotated[
        bool, typer.Option("--stat", help="Also read the masters: how far B's are from A's, and at what angle.")
    ] = False,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Compare two commits, layer by layer and kind by kind.

    They may be of different runs. A difference is no failure: the exit code is 0.
    REL L2 is the length of B - A over the length of A; COSINE is that of the angle between them.

    \b
    Examples:
      layerstore diff sft@100 sft@200
      layerstore diff best sft --stat
    """
    with opened(store) as opened_store, shown_progress(as_json=as_json) as progress:
        found = opened_store.diff(a, b, stat=stat, progress=progress)
    _warn(found)
    if as_json:
        say_json(_fields(found, stat=stat))
    else:
        _tell(found, stat=stat)


def _warn(found: "Diff") -> None:
    for layer in found.layers:
        if layer.distance is None:
            continue
        for side, count in ((found.a, layer.distance.nonfinite_a), (found.b, layer.distance.nonfinite_b)):
            if count:
                say_warning(f"{layer.layer} of {side.name} holds {counted(count, 'number')} that are NaN or infinite")
        if layer.distance.left_out:
            names = ", ".join(layer.distance.left_out[:4])
            say_warning(f"{layer.layer}: not comparable, so left out: {names}")


# -- for people ----------------------------------------------------------------------------------------------------


def _tell(found: "Diff", *, stat: bool) -> None:
    from layerstore.model import Kind

    kinds = [kind.value for kind in Kind if any(kind.value in layer.kinds for layer in found.layers)]
    columns = [
        Column("LAYER", folds=True),
        *(Column(kind.upper()) for kind in kinds),
        Column("CHANGED", "right"),
        *([Column("REL L2", "right"), Column("COSINE", "right")] if stat else []),
    ]
    say(f"a  {_side(found.a)}")
    say(f"b  {_side(found.b)}")
    say()
    say_table(columns, (_row(layer, kinds, stat=stat) for layer in found.layers))
    say()
    say_paragraph(_total(found), indent=2)
    say_paragraph(
        f"all else (counters, scheduler, random states, other files): {_sameness(found.same_state)}", indent=2
    )
    if not stat and any(kind.status == "re-sliced" for layer in found.layers for kind in layer.kinds.values()):
        say(f"re-sliced: cut for {found.a.world_size} and for {found.b.world_size} ranks: compare with --stat")


def _sameness(is_same: bool) -> str:
    return "same" if is_same else "changed"


def _side(side: "Side") -> str:
    pin = f", pin {side.pin}" if side.pin else ""
    return shown(f"{side.reference} (commit {side.commit[:SHORT_ID_DIGITS]}{pin}), {counted(side.world_size, 'rank')}")


def _row(layer: "LayerDiff", kinds: list[str], *, stat: bool) -> list[str]:
    return [
        layer.layer,
        *(layer.kinds[kind].status if kind in layer.kinds else "-" for kind in kinds),
        size(layer.bytes_changed) if layer.bytes_changed else "-",
        *(_numbers(layer.distance) if stat else []),
    ]


def _numbers(distance: "Distance | None") -> list[str]:
    if distance is None or not distance.elements:
        return ["-", "-"]
    length, cosine = distance.relative_l2, distance.cosine
    return [_in_column(length), "-" if math.isnan(cosine) else f"{cosine:.6f}"]


def _in_column(number: float) -> str:
    """
    Return *number* so that those of a column stand below each other: as wide whether it is small or not.

    >>> _in_column(1.1), _in_column(0.0123), _in_column(0.0000123), _in_column(0.0)
    ('1.100000', '0.012300', '1.23e-05', '0.000000')
    """
    return f"{number:.2e}" if 0 < number < 0.0001 else f"{number:.6f}"


def _total(found: "Diff") -> str:
    parts = [
        f"{found.count('same')} same",
        f"{found.count('changed')} changed",
        *([f"{found.count('only in a')} only in a ({size(found.bytes_only_a)})"] if found.count("only in a") else []),
        *([f"{found.count('only in b')} only in b ({size(found.bytes_only_b)})"] if found.count("only in b") else []),
    ]
    return (
        f"{counted(len(found.layers), 'layer')}: {', '.join(parts)}; "
        f"{size(found.bytes_same)} same, {size(found.bytes_changed)} changed"
    )


# -- for programs --------------------------------------------------------------------------------------------------


def _fields(found: "Diff", *, stat: bool) -> dict[str, object]:
    return {
        "a": _side_fields(found.a),
        "b": _side_fields(found.b),
        "layers": [_layer_fields(layer, stat=stat) for layer in found.layers],
        "same_state": found.same_state,
        "bytes_same": found.bytes_same,
        "bytes_changed": found.bytes_changed,
        "bytes_only_a": found.bytes_only_a,
        "bytes_only_b": found.bytes_only_b,
    }


def _side_fields(side: "Side") -> dict[str, object]:
    return {
        "run": side.run,
        "step": side.step,
        "commit": side.commit,
        "pin": side.pin,
        "world_size": side.world_size,
    }


def _layer_fields(layer: "LayerDiff", *, stat: bool) -> dict[str, object]:
    fields: dict[str, object] = {
        "layer": layer.layer,
        "same": layer.status == "same",
        "status": layer.status,
        "kinds": {name: _kind_fields(kind) for name, kind in layer.kinds.items()},
        "bytes_changed": layer.bytes_changed,
    }
    if not stat:
        return fields
    distance = layer.distance
    if distance is None:
        return fields | {"elements": 0, "relative_l2": None, "cosine": None}
    return fields | {
        "elements": distance.elements,
        "relative_l2": _finite(distance.relative_l2),
        "cosine": _finite(distance.cosine),
        "nonfinite_a": distance.nonfinite_a,
        "nonfinite_b": distance.nonfinite_b,
        "left_out": list(distance.left_out),
    }


def _kind_fields(kind: "KindDiff") -> dict[str, object]:
    return {
        "status": kind.status,
        "bytes_a": kind.bytes_a,
        "bytes_b": kind.bytes_b,
        "bytes_changed": kind.bytes_changed,
    }


def _finite(number: float) -> float | None:
    """JSON has no word for NaN and infinity."""
    return number if math.isfinite(number) else None
