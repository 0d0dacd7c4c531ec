"""``layerstore stats``: how much is stored, and how much space that saves."""

from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import Column, counted, say, say_facts, say_json, say_table, say_warning
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

    LOGICAL is what the visible commits, and pins of anything else, would take if each were stored whole.
    UNIQUE counts every object once, OWN only those that no other run needs.

    \b
    Examples:
      layerstore stats
      layerstore stats sft --json
    """
    with opened(store) as opened_store, shown_progress(as_json=as_json) as progress:
        found = opened_store.stats(run, progress=progress)
        place = "on disk" if opened_store.repo.remote is None else "in the bucket"
    for problem in found.left_out:
        say_warning(f"left out: {problem}")
    if found.missing:
        say_warning(f"missing: {counted(found.missing, 'object')}; layerstore verify says which")
    if as_json:
        from layerstore.inspect import stats_fields

        say_json(stats_fields(found))
    else:
        _tell(found, place)


def _tell(found: "Stats", place: str) -> None:
    say_facts(_facts(found, place))
    if not found.logical_bytes:
        return
    figures = [Column("LOGICAL", "right"), Column("UNIQUE", "right")]
    own = [Column("OWN", "right", drops=1)] if found.run is None else []  # unknown if only one run is counted
    say()
    say_table(
        [Column("RUN", folds=True), Column("COMMITS", "right", drops=2), *figures, *own],
        (
            [of.run, f"{of.commits:,}", *_sizes(of.logical_bytes, of.unique_bytes, *[of.own_bytes] * len(own))]
            for of in found.runs
        ),
    )
    for columns, amounts in (
        (
            [Column("KIND"), Column("OBJECTS", "right", drops=1)],
            {name: of for name, of in found.kinds.items() if of.count},
        ),
        ([Column("LAYER", folds=True), Column("VERSIONS", "right", drops=1)], found.layers),
    ):
        say()
        say_table(
            [*columns, *figures],
            ([name, f"{of.count:,}", *_sizes(of.logical_bytes, of.unique_bytes)] for name, of in amounts.items()),
        )


def _facts(found: "Stats", place: str) -> dict[str, str]:
    pins = f"; {counted(found.pins, 'pin')} besides, of mixtures or hidden commits" if found.pins else ""
    facts = {
        "commits": f"{found.commits:,} in {counted(len(found.runs), 'run')}{pins}",
        "logical": f"{size(found.logical_bytes)} if each commit and pin were stored whole",
        "unique": f"{size(found.unique_bytes)} with each object counted once: {found.saved_ratio:.1%} less",
        "physical": f"{size(found.physical_bytes)} {place}",
    }
    if found.unneeded is not None:
        facts["unneeded"] = (
            f"{size(found.unneeded.bytes)} {place}, in {counted(found.unneeded.objects, 'object')} "
            "that no visible commit and no pin needs"
            if found.unneeded.objects
            else "nothing: every object belongs to a visible commit or a pin"
        )
    return facts


def _sizes(*sizes_bytes: int) -> list[str]:
    return [size(each) for each in sizes_bytes]
