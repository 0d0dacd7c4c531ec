"""``layerstore stats``: how much is stored, and how much that saves."""

from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import Column, counted, say, say_facts, say_json, say_table, say_warning, size

if TYPE_CHECKING:
    from layerstore.ops.stats import Amount, RunStats, Stats


def stats(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Only what this run needs.", show_default=False)
    ] = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Count bytes: by run, by kind and by layer.

    LOGICAL is what the visible commits would take if each were stored whole.
    UNIQUE counts every object once; OWN, without RUN, is what no other run needs of it.

    \b
    Examples:
      layerstore stats
      layerstore stats sft --json
    """
    with opened(store) as opened_store, shown_progress(as_json=as_json) as progress:
        found = opened_store.stats(run, progress=progress)
    for problem in found.left_out:
        say_warning(f"left out: {problem}")
    if found.missing:
        say_warning(f"missing: {counted(found.missing, 'object')}; layerstore verify says which")
    if as_json:
        say_json(_fields(found))
    else:
        _tell(found)


def _tell(found: "Stats") -> None:
    say_facts(_facts(found))
    if not found.logical_bytes:
        return
    figures = [Column("LOGICAL", "right"), Column("UNIQUE", "right")]
    is_all = found.run is None  # of one run alone nobody has looked at what the others need
    say()
    own = [Column("OWN", "right")] if is_all else []
    say_table(
        [Column("RUN", folds=True), Column("COMMITS", "right"), *figures, *own],
        ([run.run, f"{run.commits:,}", *_sizes(run), *([size(run.own_bytes)] if is_all else [])] for run in found.runs),
    )
    say()
    say_table(
        [Column("KIND"), Column("OBJECTS", "right"), *figures],
        ([name, f"{kind.count:,}", *_sizes(kind)] for name, kind in found.kinds.items() if kind.count),
    )
    say()
    say_table(
        [Column("LAYER", folds=True), Column("VERSIONS", "right"), *figures],
        ([name, f"{layer.count:,}", *_sizes(layer)] for name, layer in found.layers.items()),
    )


def _facts(found: "Stats") -> dict[str, str]:
    pins = f"; {counted(found.pins, 'pin')} beside them, of mixtures or hidden commits" if found.pins else ""
    facts = {
        "commits": f"{found.commits:,} in {counted(len(found.runs), 'run')}{pins}",
        "logical": f"{size(found.logical_bytes)} if each were stored whole",
        "unique": f"{size(found.unique_bytes)} with each object counted once: {found.saved_ratio:.1%} less",
        "physical": f"{size(found.physical_bytes)} on disk",
    }
    if found.unneeded is not None:
        facts["unneeded"] = (
            f"{size(found.unneeded.bytes)} on disk, in {counted(found.unneeded.objects, 'object')} "
            "that neither a visible commit nor a pin needs"
            if found.unneeded.objects
            else "nothing: a visible commit or a pin needs each object"
        )
    return facts


def _sizes(of: "Amount | RunStats") -> list[str]:
    return [size(of.logical_bytes), size(of.unique_bytes)]


def _fields(found: "Stats") -> dict[str, object]:
    return {
        "run": found.run,
        "commits": found.commits,
        "pins": found.pins,
        "logical_bytes": found.logical_bytes,
        "unique_bytes": found.unique_bytes,
        "physical_bytes": found.physical_bytes,
        "saved_ratio": found.saved_ratio,
        "unneeded": None
        if found.unneeded is None
        else {"objects": found.unneeded.objects, "bytes": found.unneeded.bytes},
        "missing": found.missing,
        "runs": [
            {
                "run": run.run,
                "commits": run.commits,
                "logical_bytes": run.logical_bytes,
                "unique_bytes": run.unique_bytes,
                "own_bytes": run.own_bytes if found.run is None else None,
            }
            for run in found.runs
        ],
        "kinds": [{"kind": name, "objects": kind.count, **_amount(kind)} for name, kind in found.kinds.items()],
        "layers": [{"layer": name, "versions": layer.count, **_amount(layer)} for name, layer in found.layers.items()],
        "left_out": list(found.left_out),
    }


def _amount(of: "Amount") -> dict[str, int]:
    return {"logical_bytes": of.logical_bytes, "unique_bytes": of.unique_bytes}
