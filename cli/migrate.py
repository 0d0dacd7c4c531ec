"""``layerstore migrate``: migrate a store to the format that this layerstore writes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, store_or_nearest
from layerstore.cli.render import Column, counted, print_json, print_line, print_table, shown, with_store
from layerstore.json_fields import json_fields
from layerstore.layout import folder_of
from layerstore.units import size

if TYPE_CHECKING:
    from layerstore.migrations import Migration, Step

ABOUT = About("Rarely needed", elsewhere=("upgrade",))


def migrate(
    *,
    list_: Annotated[bool, typer.Option("--list", help="List the formats, and what each changed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and write nothing.")] = False,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Migrate a store of an older format to this layerstore's format.

    Nothing else may use the store during a migration. Replaced files go to the store's backups/; the path is printed.
    If it is interrupted, run it again. A store of a newer format is refused.

    \b
    Examples:
      layerstore migrate --list
      layerstore migrate --dry-run
      layerstore migrate
    """
    from layerstore import migrations

    if list_:
        return _list(migrations.STEPS, as_json=as_json)
    work = migrations.plan_migration if dry_run else migrations.migrate
    migration = work(folder_of(store_or_nearest(store)))
    if as_json:
        return print_json(json_fields(migration) | {"dry_run": dry_run})
    if not migration.steps:
        return print_line(
            f"nothing to do: {shown(migration.path)} has format {migration.format}, which this layerstore writes"
        )
    return _print_plan(migration) if dry_run else _print_done(migration)


def _list(steps: Sequence["Step"], *, as_json: bool) -> None:
    if as_json:
        return print_json({"format": steps[-1].target, "steps": [json_fields(step) for step in steps]})
    print_line(f"this layerstore reads and writes format {steps[-1].target}")
    rows = [[f"{step.source} to {step.target}", shown(step.summary)] for step in steps]
    return print_table([Column("STEP"), Column("WHAT CHANGES", folds=True)], rows)


def _print_plan(plan: "Migration") -> None:
    path = shown(plan.path)
    for outcome in plan.steps:
        step = outcome.step
        if plan.is_unfinished and outcome is plan.steps[0]:
            print_line(f"would finish the migration of {path} from format {step.source} to {step.target}")
            continue
        print_line(f"would migrate {path} from format {step.source} to {step.target}: {shown(step.summary)}")
        if outcome.files is not None:
            kept = ", ".join(("store.json", *(f"{name}/" for name in (*step.makes, *step.leaves))))
            print_line(f"  {counted(outcome.files, 'file')} to write, {size(outcome.size_bytes or 0)}")
            print_line(f"  if they exist, {kept} would move to backups/")
    print_line("nothing was changed")


def _print_done(migration: "Migration") -> None:
    for outcome in migration.steps:
        wrote = "finished" if outcome.files is None else f"{counted(outcome.files, 'file')} written"
        print_line(f"format {outcome.step.source} to {outcome.step.target}: {wrote}")
        if outcome.backup is not None:
            print_line(f"  the replaced files are in {shown(outcome.backup)}")
    print_line(f"{shown(migration.path)} now has format {migration.format}")
    print_line(with_store("check it with layerstore verify; remove the backup once you are sure"))
