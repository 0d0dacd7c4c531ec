"""``layerstore migrate``: take a store to the format that this layerstore writes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.options import DEFAULT_STORE, AsJson, StorePath
from layerstore.cli.render import Column, counted, say, say_json, say_table, shown, size, with_store

if TYPE_CHECKING:
    from layerstore.migrations.plan import MigrationPlan
    from layerstore.migrations.runner import Migrated
    from layerstore.migrations.step import Step


def migrate(
    *,
    list_: Annotated[bool, typer.Option("--list", help="Say which formats there are and what each changed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and write nothing.")] = False,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Take a store of an older format to the one of this layerstore.

    What is replaced is kept in the store's backups/, whose place is printed.
    The store can be read at any moment, by the older layerstore or by this one.
    If it is interrupted, run it again. A store of a newer format is refused.

    \b
    Examples:
      layerstore migrate --list
      layerstore migrate --dry-run
      layerstore migrate
    """
    from layerstore.migrations import STEPS, plan, runner

    if list_:
        return _list(STEPS, as_json=as_json)
    path = store or DEFAULT_STORE
    if dry_run:
        planned = plan.plan_migration(path, steps=STEPS)
        return say_json(_planned_fields(planned)) if as_json else _say_plan(planned)
    migrated = runner.migrate(path, steps=STEPS)
    return say_json(_fields(migrated)) if as_json else _say_done(migrated)


def _list(steps: Sequence["Step"], *, as_json: bool) -> None:
    from layerstore.format.identity import FORMAT

    if as_json:
        return say_json({"format": FORMAT, "steps": [_step_fields(step) for step in steps]})
    say(f"this layerstore reads and writes format {FORMAT}")
    if steps:
        rows = [[f"{step.source} to {step.target}", shown(step.summary)] for step in steps]
        return say_table([Column("STEP"), Column("WHAT CHANGES", folds=True)], rows)
    return say("it is the first one, so no step leads there")


def _say_plan(plan: "MigrationPlan") -> None:
    where = shown(plan.path)
    if plan.is_done:
        return say(_nothing_to_do(where, plan.found))
    if plan.unfinished:
        say(f"would finish the migration of {where} from format {plan.unfinished.source} to {plan.unfinished.target}")
    for step in plan.steps:
        say(f"would take {where} from format {step.source} to {step.target}: {shown(step.summary)}")
        if plan.volume and step is plan.steps[0]:
            say(f"  {counted(plan.volume.files, 'file')} to write, {size(plan.volume.size_bytes)}; {_kept(step)}")
    return say("nothing was changed")


def _kept(step: "Step") -> str:
    kept = ", ".join(("store.json", *(f"{name}/" for name in step.leaves)))
    return f"{kept} would be kept in backups/"


def _say_done(migrated: "Migrated") -> None:
    where = shown(migrated.path)
    if not migrated.taken:
        return say(_nothing_to_do(where, migrated.format))
    for taken in migrated.taken:
        late = f", {taken.came_meanwhile:,} of them saved meanwhile" if taken.came_meanwhile else ""
        say(f"format {taken.step.source} to {taken.step.target}: {counted(taken.files, 'file')} written{late}")
        say(f"  what they replace is in {shown(taken.backup)}")
    say(f"{where} is of format {migrated.format} now")
    return say(with_store("check it with layerstore verify; remove the backup once you are sure"))


def _nothing_to_do(where: str, number: int) -> str:
    return f"nothing to do: {where} is of format {number}, which this layerstore writes"


def _step_fields(step: "Step") -> dict[str, object]:
    return {"source": step.source, "target": step.target, "summary": step.summary}


def _planned_fields(plan: "MigrationPlan") -> dict[str, object]:
    return {
        "path": str(plan.path),
        "found": plan.found,
        "format": plan.newest,
        "dry_run": True,
        "unfinished": plan.unfinished is not None,
        "steps": [
            _step_fields(step)
            | {
                "files": plan.volume.files if plan.volume and step is plan.steps[0] else None,
                "bytes": plan.volume.size_bytes if plan.volume and step is plan.steps[0] else None,
            }
            for step in plan.steps
        ],
    }


def _fields(migrated: "Migrated") -> dict[str, object]:
    return {
        "path": str(migrated.path),
        "found": migrated.found,
        "format": migrated.format,
        "dry_run": False,
        "steps": [
            _step_fields(taken.step)
            | {"files": taken.files, "came_meanwhile": taken.came_meanwhile, "backup": str(taken.backup)}
            for taken in migrated.taken
        ],
    }
