"""What a composite is made of, in words and in fields: the same whatever is made of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from layerstore.cli.render import Column, counted, say, say_json, say_paragraph, say_table, say_warning, shown, size

if TYPE_CHECKING:
    from layerstore import Composite


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What was asked for beside the plan."""

    out: Path | None
    pin: str | None
    is_dry_run: bool
    world_size: int | None
    adam_step: Literal["unify", "per-layer"]

    @property
    def outcome(self) -> str:
        """What became of the plan."""
        is_kept = self.pin is not None and not self.is_dry_run
        return f"kept as pin {shown(self.pin)}" if is_kept else "nothing was written"


def say_plan(composite: "Composite", options: PlanOptions, *, as_json: bool) -> None:
    """Print which save each layer comes from, and what would not carry over."""
    notes = composite.notes(world_size=options.world_size, adam_step=options.adam_step)
    world_size = options.world_size or composite.world_size
    say_notes(notes)
    if as_json:
        say_json(
            {
                **composite_fields(composite, notes),
                "world_size": world_size,
                "out": None if options.out is None else str(options.out),
                "bytes_written": 0,
                "seconds": 0.0,
                "pin": options.pin,
                "dry_run": options.is_dry_run,
            }
        )
        return
    say_layers(composite)
    say()
    say_mixture(composite)
    say_step(composite, options.adam_step)
    ranks = counted(world_size, "rank")
    base = f"base {shown(composite.name)}, policy {composite.policy}"
    say_paragraph(f"{base}, {ranks}; {options.outcome}", indent=2)


def say_layers(composite: "Composite") -> None:
    """Print the table of layers."""
    columns = [
        Column("LAYER", folds=True),
        Column("FROM", folds=True),
        Column("STEPS BEHIND", "right"),
        Column("SAVES BEHIND", "right"),
        Column("SIZE", "right"),
    ]
    ages = composite.staleness.layers
    sizes = [sum(line.bytes_by_kind.values()) for line in composite.ls()]
    rows = (
        [age.layer, name, _behind(age.steps), _behind(age.saves), size(of_line)]
        for age, name, of_line in zip(ages, composite.names_of(ages), sizes, strict=True)
    )
    say_table(columns, rows, total=["total", "", "", "", size(sum(sizes))])


def _behind(count: int | None) -> str:
    if count is None:
        return "?"
    return "newer" if count < 0 else str(count)


def _age(steps: int | None) -> str:
    if steps is None:
        return "of another run"
    return f"{counted(abs(steps), 'step')} {'newer than' if steps < 0 else 'behind'} the base"


def say_mixture(composite: "Composite", *, has_optimizer: bool = True) -> None:
    """Say how old the oldest layer is, and what else of the mixture a reader should know."""
    staleness = composite.staleness
    if staleness.is_mixed:
        oldest = staleness.oldest
        [name] = composite.names_of([oldest])
        say_paragraph(f"oldest layer: {shown(oldest.layer)} from {shown(name)}, {_age(oldest.steps)}", indent=2)
    if has_optimizer and len(staleness.optimizer_steps) > 1:
        counts = ", ".join(f"{step} ({counted(of, 'layer')})" for step, of in staleness.optimizer_steps.items())
        say_paragraph(f"updates that the optimizer had counted: {counts}; see --adam-step", indent=2)
    if composite.older_than_due:
        first = composite.older_than_due[0]
        say_paragraph(
            f"{counted(len(composite.older_than_due), 'layer')} had not been written when due "
            f"(first: {shown(first)}): the version before stands in",
            indent=2,
        )


def say_step(composite: "Composite", adam_step: Literal["unify", "per-layer"]) -> None:
    """Say at which step training resumes where layers of several are mixed: a checkpoint knows one alone."""
    staleness = composite.staleness
    if not staleness.is_mixed:
        return
    counted_by_base = {age.optimizer_step for age in staleness.layers if age.steps == 0} - {None}
    counts = ""
    if adam_step == "per-layer":
        counts = ", with each layer's own count of updates"
    elif len(counted_by_base) == 1:
        counts = f", with {counted(counted_by_base.pop() or 0, 'update')} counted of each layer"
    say_paragraph(f"training resumes at step {composite.step}{counts}", indent=2)


def policy_in_words(name: str, parameters: Mapping[str, object]) -> str:
    """
    Return a policy with its settings.

    >>> policy_in_words("parity", {"fresh": "even"}), policy_in_words("full", {})
    ('parity (fresh even)', 'full')
    """
    # A limit that was not set is none.
    settings = ", ".join(f"{key} {value}" for key, value in parameters.items() if str(value) != "None")
    return f"{name} ({settings})" if settings else name


def say_notes(notes: tuple[str, ...]) -> None:
    """Print what does not carry over, a warning each."""
    for note in notes:
        say_warning(note)


def composite_fields(composite: "Composite", notes: tuple[str, ...]) -> dict[str, object]:
    """Return what programs are told of a composite."""
    return {**composite.summary(), "notes": list(notes)}
