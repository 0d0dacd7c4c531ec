"""``layerstore diff``: compare two commits."""

import math
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import (
    Column,
    counted,
    print_json,
    print_line,
    print_paragraph,
    print_table,
    print_warning,
    shown,
)
from layerstore.errors import InvalidInput
from layerstore.json_fields import json_fields
from layerstore.units import short_id, size

if TYPE_CHECKING:
    from layerstore.inspect import Diff, DiffSide, LayerDiff, ParameterDiff, ParametersDiff, StateDiff
    from layerstore.numbers import Distance

ABOUT = About("Look", store="anywhere", answers=True)

_REF_HELP = "RUN@STEP, RUN, RUN~1 or a pin."


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_REF_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help=_REF_HELP)],
    layer: Annotated[
        str | None,
        typer.Argument(metavar="LAYER", help="Only this layer, by parameter: masters and optimizer states, measured."),
    ] = None,
    *,
    stat: Annotated[
        bool, typer.Option("--stat", help="Also measure how far B's masters are from A's, and at what angle.")
    ] = False,
    sort: Annotated[
        str | None,
        typer.Option(
            "--sort",
            metavar="COLUMN",
            help="With LAYER: largest first by master, a state such as exp_avg, or elements. [default: name]",
            show_default=False,
        ),
    ] = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Compare two commits by layer and kind, or one layer by parameter.

    The commits may belong to different runs. The exit code is 0 whether or not they differ.
    REL L2 is the norm of B - A divided by the norm of A, COSINE the cosine of the angle between A and B.
    With LAYER, a parameter's masters and optimizer states each show REL L2 if they differ in any bit.

    \b
    Examples:
      layerstore diff sft@100 sft@200
      layerstore diff best sft --stat
      layerstore diff sft@100 sft@200 model.layers.0 --sort master
    """
    if sort is not None and layer is None:
        raise InvalidInput("--sort sorts the parameters of one layer", hint="name the layer after B")
    with opened(store) as opened_store, shown_progress(as_json=as_json) as progress:
        if layer is not None:
            of_layer = opened_store.diff_layer(a, b, layer, sort=sort or "name", progress=progress)
            _warn_of_layer(of_layer)
            print_json(json_fields(of_layer)) if as_json else _print_layer(of_layer)
            return
        difference = opened_store.diff(a, b, stat=stat, progress=progress)
    _warn(difference)
    if as_json:
        print_json(_fields(difference, stat=stat))
    else:
        _print_result(difference, stat=stat)


def _warn(difference: "Diff") -> None:
    for layer in difference.layers:
        if layer.distance is None:
            continue
        for side, count in ((difference.a, layer.distance.nonfinite_a), (difference.b, layer.distance.nonfinite_b)):
            if count:
                print_warning(f"{layer.layer} of {side.name} has NaN or infinity in {counted(count, 'number')}")
        if layer.distance.left_out:
            names = ", ".join(layer.distance.left_out[:4])
            print_warning(f"{layer.layer}: not comparable, so left out: {names}")


# -- for people ----------------------------------------------------------------------------------------------------


def _print_result(difference: "Diff", *, stat: bool) -> None:
    from layerstore.model import Kind

    kinds = [kind.value for kind in Kind if any(kind.value in layer.kinds for layer in difference.layers)]
    columns = [
        Column("LAYER", folds=True),
        # --stat measures the masters, so their column is the last of these to be left out.
        *(Column(kind.upper(), drops=1 + (kind != Kind.MASTER.value)) for kind in kinds),
        Column("CHANGED", "right"),
        *([Column("REL L2", "right"), Column("COSINE", "right")] if stat else []),
    ]
    print_line(f"a  {_side(difference.a)}")
    print_line(f"b  {_side(difference.b)}")
    print_line()
    print_table(columns, (_row(layer, kinds, stat=stat) for layer in difference.layers))
    print_line()
    print_paragraph(_total(difference), indent=2)
    other_state = "same" if difference.same_state else "changed"
    print_paragraph(f"other state (RNG, scheduler, counters, files): {other_state}", indent=2)
    if not stat and any(kind.status == "re-sliced" for layer in difference.layers for kind in layer.kinds.values()):
        ours, theirs = (
            f"{counted(side.world_size, 'rank')} of stage {side.stage}" for side in (difference.a, difference.b)
        )
        print_line(f"re-sliced: {ours} in a, {theirs} in b; --stat compares the numbers")


def _side(side: "DiffSide") -> str:
    pin = f", pin {side.pin}" if side.pin else ""
    return shown(f"{side.reference} (commit {short_id(side.commit)}{pin}), {counted(side.world_size, 'rank')}")


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
    Return *number* with a fixed width, so that the numbers of a column align.

    >>> _in_column(1.1), _in_column(0.0123), _in_column(0.0000123), _in_column(0.0)
    ('1.100000', '0.012300', '1.23e-05', '0.000000')
    """
    return f"{number:.2e}" if 0 < number < 0.0001 else f"{number:.6f}"


def _total(difference: "Diff") -> str:
    counts = Counter[str](layer.status for layer in difference.layers)
    parts = [f"{counts[status]} {status}" for status in ("same", "changed")]
    for status, bytes_only in (("only in a", difference.bytes_only_a), ("only in b", difference.bytes_only_b)):
        if counts[status]:
            parts.append(f"{counts[status]} {status} ({size(bytes_only)})")
    return (
        f"{counted(len(difference.layers), 'layer')}: {', '.join(parts)}; "
        f"{size(difference.bytes_same)} same, {size(difference.bytes_changed)} changed"
    )


# -- for programs --------------------------------------------------------------------------------------------------


def _fields(difference: "Diff", *, stat: bool) -> dict[str, object]:
    fields = json_fields(difference)
    if stat:
        nothing = {"elements": 0, "relative_l2": None, "cosine": None}
        fields["layers"] = [
            json_fields(layer) | (nothing if layer.distance is None else json_fields(layer.distance))
            for layer in difference.layers
        ]
    return fields


# -- one layer -----------------------------------------------------------------------------------------------------


def _warn_of_layer(difference: "ParametersDiff") -> None:
    for parameter in difference.parameters:
        for state, state_diff in parameter.states.items():
            for side, count in ((difference.a, state_diff.nonfinite_a), (difference.b, state_diff.nonfinite_b)):
                if count:
                    numbers = counted(count, "number")
                    print_warning(f"{state} of {parameter.parameter} in {side.name} has NaN or infinity in {numbers}")
        if any(state_diff.status == "not comparable" for state_diff in parameter.states.values()):
            shape_a, shape_b = (list(shape or ()) for shape in (parameter.shape_a, parameter.shape_b))
            why = "they are not numbers" if shape_a == shape_b else f"shape {shape_a} in a, {shape_b} in b"
            print_warning(f"{parameter.parameter} is not comparable: {why}")


def _print_layer(difference: "ParametersDiff") -> None:
    layer = difference.layer
    columns = [
        Column("PARAMETER", folds=True),
        Column("ELEMENTS", "right", drops=2),
        *(Column(state.upper(), "right") for state in difference.totals),
        Column("COSINE", "right", drops=1),
    ]
    rows = [
        [_name(parameter, layer.layer), f"{parameter.elements:,}", *_cells(parameter.states, list(difference.totals))]
        for parameter in difference.parameters
    ]
    total = ["total", f"{sum(parameter.elements for parameter in difference.parameters):,}"]
    print_line(f"a  {_side(difference.a)}")
    print_line(f"b  {_side(difference.b)}")
    print_line()
    print_table(
        columns, rows, total=[*total, *_cells(difference.totals, list(difference.totals))] if len(rows) > 1 else None
    )
    print_line()
    kinds = ", ".join(f"{name} {kind.status}" for name, kind in layer.kinds.items())
    if layer.is_same:
        text = f"{layer.layer}: same, one version in both; nothing was read"
    else:
        text = f"{layer.layer}: {kinds}; {size(layer.bytes_changed)} only in b"
    print_paragraph(shown(text), indent=2)


def _name(parameter: "ParameterDiff", layer: str) -> str:
    """Return the name of *parameter* inside *layer*, and whether it is frozen or tied."""
    name = parameter.parameter.removeprefix(f"{layer}.")
    tied = f"tied to {', '.join(parameter.tied)}" if parameter.tied else ""
    about = ", ".join(filter(None, ["frozen" if parameter.frozen else "", tied]))
    return f"{name} ({about})" if about else name


def _cells(states: "dict[str, StateDiff]", columns: list[str]) -> list[str]:
    """Return a cell for each state of *columns*, and the cosine of the masters."""
    cosine = states["master"].cosine if "master" in states else None
    return [
        *(_apart(states[state]) if state in states else "-" for state in columns),
        "-" if cosine is None or math.isnan(cosine) else f"{cosine:.6f}",
    ]


def _apart(state: "StateDiff") -> str:
    return state.status if state.status != "changed" or state.relative_l2 is None else _in_column(state.relative_l2)
