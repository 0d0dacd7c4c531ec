"""
The layout of ``--help``: options in groups under headings, their defaults last, and commands grouped by purpose.

Plain text, as typer writes it without rich; importing rich would take three times as long.
"""

import re
from typing import TYPE_CHECKING

from typer.core import TyperArgument, TyperCommand, TyperOption

from layerstore.cli.commands import COMMANDS, function_of, sections

if TYPE_CHECKING:
    from typer._click.core import Context, Parameter
    from typer._click.formatting import HelpFormatter

# typer's way to write the bounds of a number.
_AT_LEAST, _BETWEEN = re.compile(r"x>=(\d+)(?=[;\]])"), re.compile(r"(\d+)<=x<=(\d+)(?=[;\]])")

# Options without a heading come last, followed only by the settings of policies, which few users need.
OTHERS = "Options"
POLICY_SETTINGS = "Policy settings, also written as --policy filter:every=10,aux=always"


class Command(TyperCommand):
    """A command whose help has the options in groups."""

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write arguments, then options by heading."""
        write_options(self.get_params(ctx), ctx, formatter)


def write_options(params: "list[Parameter]", ctx: "Context", formatter: "HelpFormatter") -> None:
    """Write the options among *params* under their headings."""
    for name, records in option_groups(params, ctx).items():
        with formatter.section(name):
            formatter.write_dl(records)


def option_groups(params: "list[Parameter]", ctx: "Context") -> dict[str, list[tuple[str, str]]]:
    """Return the options among *params* by heading, in order of appearance; `OTHERS`, then `POLICY_SETTINGS`, last."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        record = _help_record(param, ctx)
        if record is not None:
            groups.setdefault(_heading(param), []).append(record)
    for name in (OTHERS, POLICY_SETTINGS):
        if name in groups:
            groups[name] = groups.pop(name)
    return groups


def _heading(param: "Parameter") -> str:
    """Return the heading that *param* comes under."""
    if isinstance(param, TyperArgument):
        return "Arguments"
    return (isinstance(param, TyperOption) and param.rich_help_panel) or OTHERS


def _help_record(param: "Parameter", ctx: "Context") -> tuple[str, str] | None:
    """Return how *param* is written, and its help with the default at the end; None if it is hidden."""
    record = param.get_help_record(ctx)
    if record is None:
        return None
    text = _BETWEEN.sub(r"\1 to \2", _AT_LEAST.sub(r"at least \1", record[1]))
    return record[0], text.replace("  [", " [")


def write_commands(formatter: "HelpFormatter") -> None:
    """Write all commands by section, each with the first line of its help."""
    width = max(map(len, COMMANDS))
    for name, commands in sections().items():
        with formatter.section(name):
            formatter.write_dl([(command.ljust(width), _summary(command)) for command in commands])


def _summary(command: str) -> str:
    return (function_of(command).__doc__ or "").strip().partition("\n")[0]
