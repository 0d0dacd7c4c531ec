"""``layerstore show``: everything about one commit."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, ReferenceArgument, StorePath, opened
from layerstore.cli.policy import policy_in_words
from layerstore.cli.render import (
    Column,
    age,
    print_facts,
    print_json,
    print_line,
    print_rows,
    some,
)
from layerstore.json_fields import iso_time, json_fields
from layerstore.units import short_id, size

if TYPE_CHECKING:
    from layerstore.inspect import CommitView, LayerLine

ABOUT = About("Look", store="anywhere", answers=True, elsewhere=("describe", "info", "inspect"))


def show(ref: ReferenceArgument = None, store: StorePath = None, as_json: AsJson = False) -> None:
    """
    Show one commit, and where its layers were saved.

    SAVED AT is the step that wrote a layer's version: the commit's own, or an earlier one if the layer is inherited.
    For a mixture (a pinned composite), the policy chose where the layers come from.
    If a layer is not kept bit for bit, its masters are stored as differences from the save in REFERS TO. LOST is
    the measured error: its RMS divided by that of the masters' movement since then or, where REFERS TO is (moments),
    by that of the moments. The line lost covers all layers; worst error is the greatest error divided by the greatest
    movement or value.

    \b
    Examples:
      layerstore show sft@200
      layerstore show best --json
    """
    with opened(store) as opened_store:
        view = opened_store.show(ref)
        [name], names = opened_store.names_of([view]), opened_store.names_of(view.layers)
    if as_json:
        print_json(json_fields(view))
        return
    print_facts(_facts(view, name))
    print_line()
    columns: dict[Column, Callable[[tuple[LayerLine, str]], str]] = {
        Column("LAYER", folds=True): lambda row: row[0].layer,
        Column("SAVED AT", folds=True): lambda row: row[1],
        Column("VERSION", drops=1): lambda row: short_id(row[0].version),
        Column("PARAMETERS", "right", drops=2): lambda row: f"{row[0].parameters:,}",
        Column("SIZE", "right"): lambda row: size(sum(row[0].bytes_by_kind.values())),
    }
    if view.precision != "exact":
        columns[Column("REFERS TO", folds=True)] = lambda row: refers_to(row[0])
        columns[Column("LOST", "right", drops=3)] = lambda row: _lost_of(row[0])
    print_rows(columns, zip(view.layers, names, strict=True))


def _facts(view: "CommitView", name: str) -> dict[str, str]:
    is_dcp = view.is_dcp
    facts = {
        "commit": view.commit,
        "run": name,
        "attempt": f"{view.attempt}, forked from {view.fork}" if view.fork else str(view.attempt),
        "pins": ", ".join(view.pins),
        "mixture": f"{_policy(view)} chose the layers; everything else is from {name}" if view.is_mixture else "",
        "saved": f"{age(view.time_ns)} ({iso_time(view.time_ns)})",
        "world size": f"{view.world_size}, {'FSDP' if is_dcp else f'ZeRO stage {view.stage}'}",
        "layout": "torch.distributed.checkpoint" if is_dcp else f"{view.flavour}, tag {view.tag}",
        # A mixture's policy chose layers but saved none.
        "policy": "" if view.is_mixture else f"{_policy(view)}, save {view.save_number + 1}",
        "precision": "" if _is_usual(view) else f"{view.precision}, {_exact(view)}",
        "lost": ", ".join(f"{loss.state} {loss.relative_rms:.2%}" for loss in view.losses),
        "worst error": _worst_error(view),
        "replaces": ", ".join(short_id(commit) for commit in view.supersedes),
        "layers": f"{len(view.layers)}, {_saved(view)}, {size(view.size_bytes)}",
        "moments": "" if view.has_moments else "weights only: gc removed its moments",
        "other state": f"{size(view.beside_bytes)} (RNG, scheduler, files)",
        "files": some(view.files, limit=6),
        "metrics": _metrics(view),
    }
    return {name: value for name, value in facts.items() if value}


def refers_to(line: "LayerLine") -> str:
    """Return the save that the masters are stored as differences from; ``(moments)`` if only moments are inexact."""
    return line.refers_to or ("-" if line.is_exact else "(moments)")


def _lost_of(line: "LayerLine") -> str:
    """Return the error of a layer's masters or, if they are exact, the largest error of its moments."""
    losses = {loss.state: loss.relative_rms for loss in line.losses}
    lost = losses.get("master", max(losses.values(), default=None))
    return "-" if lost is None else f"{lost:.2%}"


def _worst_error(view: "CommitView") -> str:
    """Return the greatest coding error divided by the greatest movement or value, perhaps of a different element."""
    worst = ", ".join(f"{loss.state} {loss.relative_greatest:.2%}" for loss in view.losses)
    return worst and f"{worst} of the greatest"


def _metrics(view: "CommitView") -> str:
    if view.metrics is None:
        return "cannot be read; layerstore verify says what is damaged"
    return some([f"{name} {value:.6g}" for name, value in view.metrics.items()])


def _is_usual(view: "CommitView") -> bool:
    """Whether this save and all others of its run are exact."""
    return view.precision == "exact" and not view.is_among_compact


def _exact(view: "CommitView") -> str:
    exact = sum(line.is_exact for line in view.layers)
    return f"{exact} of {len(view.layers)} layers bit for bit" if exact else "no layer bit for bit"


def _saved(view: "CommitView") -> str:
    others = len(view.layers) - view.layers_saved
    if view.is_mixture:
        return f"{view.layers_saved} from this step, {others} from others"
    return f"{view.layers_saved} saved at this step, {others} inherited" if others else "all saved at this step"


def _policy(view: "CommitView") -> str:
    return policy_in_words(view.policy, view.policy_parameters)
