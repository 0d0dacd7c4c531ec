"""``layerstore stats``: how much is stored, and how much space that saves."""

from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import Column, counted, print_facts, print_json, print_line, print_table, print_warning
from layerstore.units import size

if TYPE_CHECKING:
    from layerstore.inspect import Stats

ABOUT = About("Look", store="anywhere", answers=True, elsewhere=("du",))


def stats(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Only what this run needs.", show_default=False)
    ] = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Count bytes: by run, by kind and by layer.

    LOGICAL is the size if each visible commit, and each pin of anything else, were stored whole.
    UNIQUE counts every object once; OWN counts only objects that no other run needs.

    \b
    Examples:
      layerstore stats
      layerstore stats sft --json
    """
    with opened(store) as opened_store, shown_progress(as_json=as_json) as progress:
        counts = opened_store.stats(run, progress=progress)
        place = "on disk" if opened_store.repo.remote is None else "in the bucket"
    for problem in counts.left_out:
        print_warning(f"left out: {problem}")
    if counts.missing:
        print_warning(f"missing: {counted(counts.missing, 'object')}; layerstore verify lists them")
    if as_json:
        from layerstore.inspect import stats_fields

        print_json(stats_fields(counts))
    else:
        _print_result(counts, place)


def _print_result(counts: "Stats", place: str) -> None:
    print_facts(_facts(counts, place))
    if not counts.logical_bytes:
        return
    figures = [Column("LOGICAL", "right"), Column("UNIQUE", "right")]
    own = [Column("OWN", "right", drops=1)] if counts.run is None else []  # unknown if only one run is counted
    print_line()
    print_table(
        [Column("RUN", folds=True), Column("COMMITS", "right", drops=2), *figures, *own],
        (
            [run.run, f"{run.commits:,}", *_sizes(run.logical_bytes, run.unique_bytes, *[run.own_bytes] * len(own))]
            for run in counts.runs
        ),
    )
    for columns, amounts in (
        (
            [Column("KIND"), Column("OBJECTS", "right", drops=1)],
            {name: kind for name, kind in counts.kinds.items() if kind.count},
        ),
        ([Column("LAYER", folds=True), Column("VERSIONS", "right", drops=1)], counts.layers),
    ):
        print_line()
        print_table(
            [*columns, *figures],
            (
                [name, f"{amount.count:,}", *_sizes(amount.logical_bytes, amount.unique_bytes)]
                for name, amount in amounts.items()
            ),
        )


def _facts(counts: "Stats", place: str) -> dict[str, str]:
    pins = f"; also {counted(counts.pins, 'pin')} of mixtures or hidden commits" if counts.pins else ""
    facts = {
        "commits": f"{counts.commits:,} in {counted(len(counts.runs), 'run')}{pins}",
        "logical": f"{size(counts.logical_bytes)} if each commit and pin were stored whole",
        "unique": f"{size(counts.unique_bytes)} with each object counted once: {counts.saved_ratio:.1%} less",
        "physical": f"{size(counts.physical_bytes)} {place}",
    }
    if counts.unneeded is not None:
        facts["unneeded"] = (
            f"{size(counts.unneeded.bytes)} {place}, in {counted(counts.unneeded.objects, 'object')} "
            "that no visible commit and no pin needs"
            if counts.unneeded.objects
            else "nothing: every object belongs to a visible commit or a pin"
        )
    return facts


def _sizes(*sizes_bytes: int) -> list[str]:
    return [size(size_bytes) for size_bytes in sizes_bytes]
