"""
The pages of the reference that the code writes.

    python -m tests.docs.reference

writes docs/reference/commands.md, errors.md, models.md, the pages of python/ and the tables of docs/guides/policies.md
anew; a test compares them.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer.core import TyperCommand, TyperGroup

from layerstore import errors
from layerstore.cli import app as cli
from layerstore.cli.commands import COMMANDS, sections
from layerstore.cli.help import OTHERS, POLICY_SETTINGS, option_groups
from layerstore.policy import LATEST, OURS, Latest
from layerstore.setting import settings_of
from tests.docs import python_api, python_pages
from tests.docs.pages import DOCS, GENERATED
from tests.live.family_cases import CASES, MODELS, OPTIMIZERS, SAVES, STEPS

if TYPE_CHECKING:
    from typer._click.core import Parameter

FOLDER = DOCS / "reference"
GUIDE = DOCS / "guides" / "policies.md"

# Signs of examples of ``--help`` that take long, or name what nobody has.
NOT_RUN = {
    "layerstore demo": "it trains; test_demo.py runs it",
    "--before": "no store has that commit",
}

# The commands on which groups of options are listed that others take as well, by heading.
HOMES = {POLICY_SETTINGS: "ingest", "Precision": "ingest", "What to keep": "gc"}

# Options in a sentence, and what typer appends to the name of an argument.
_DASHED = re.compile(r"(?<![\w`-])--?[a-z][\w-]*")
_TYPE = re.compile(r" <.*>$")


# -- the command line ----------------------------------------------------------------------------------------------


@cache
def group() -> TyperGroup:
    """Return the command line as typer has made it."""
    return cli.command_line()


@cache
def commands() -> dict[str, TyperCommand]:
    """Return every command, in the order of ``--help``."""
    found = {name: cli.command_line().load(name) for name in COMMANDS}
    return {name: command for name, command in found.items() if isinstance(command, TyperCommand)}


def commands_page() -> str:
    """Return every command with its arguments, options and examples, as ``--help`` has them."""
    parts = [
        f"""\
# Commands

Every command with all that it takes, as `layerstore COMMAND --help` prints it.
How to name stores and commits, what tables mean, JSON fields and exit codes: [the command line](cli.md).
{GENERATED}

| | commands |
|---|---|
{_overview()}

## For every command

`--store`, `--json` and `--quiet` may also follow the command; `apply`, `clone` and `demo` use no store.

{_options(group())}
"""
    ]
    for section, names in sections().items():
        parts += [f"## {section}\n", *(_command(name, commands()[name]) for name in names)]
    return "\n".join(parts).rstrip() + "\n"


def _overview() -> str:
    """Return a row for each section of ``--help``, with links to its commands."""
    links = {section: ", ".join(f"[`{name}`](#{name})" for name in names) for section, names in sections().items()}
    return "\n".join(f"| {section} | {names} |" for section, names in links.items())


def _command(name: str, command: TyperCommand) -> str:
    text, _, examples = inspect.cleandoc(command.help or "").partition("\b\nExamples:\n")
    note = next((f"not run: {why}" for sign, why in NOT_RUN.items() if sign in examples), "afresh")
    return "\n".join(
        [
            f"### {name}",
            "",
            _paragraphs(text),
            "",
            _options(command),
            "",
            f"<!-- {note} -->",
            "```sh",
            inspect.cleandoc(examples),
            "```",
            "",
        ]
    )


def _paragraphs(text: str) -> str:
    """Return the help *text* as Markdown: what it gives as it stands goes into code."""
    kept = re.sub("\b\\n((?:.+\\n?)+)", lambda match: f"```text\n{match[1].rstrip()}\n```\n", text.strip())
    return _DASHED.sub(_in_code, kept)


def _options(command: TyperCommand | TyperGroup) -> str:
    """Return what *command* takes, under the headings of its help if there are several; not what all commands take."""
    lists = _lists(command)
    if not lists.keys() - {"Arguments", OTHERS}:
        return "\n".join(lists.values())
    return "\n\n".join(_under_heading(command, name, lines) for name, lines in lists.items())


def _under_heading(command: TyperCommand | TyperGroup, name: str, lines: str) -> str:
    """Return *lines* under their heading; a link where another command's section has them all."""
    home = HOMES.get(name, "")
    if home not in {"", command.name} and set(lines.splitlines()) <= _lines(commands()[home]):
        return f"{name.partition(',')[0]}: those of [`{home}`](#{home})."
    return f"{_DASHED.sub(_in_code, name)}:\n\n{lines}"


def _lines(command: TyperCommand) -> set[str]:
    return {line for lines in _lists(command).values() for line in lines.splitlines()}


def _lists(command: TyperCommand | TyperGroup) -> dict[str, str]:
    """Return what *command* takes, a line for each, by heading."""
    groups = option_groups([param for param in command.params if _is_its_own(command, param)], typer.Context(command))
    return {
        name: "\n".join(f"- `{_TYPE.sub('', option)}`: {_DASHED.sub(_in_code, text)}" for option, text in records)
        for name, records in groups.items()
    }


def _is_its_own(command: TyperCommand | TyperGroup, param: "Parameter") -> bool:
    return isinstance(command, TyperGroup) or param.name not in {"store", "as_json", "quiet"}


def _in_code(match: re.Match[str]) -> str:
    return f"`{match[0]}`"


# -- errors --------------------------------------------------------------------------------------------------------


def errors_page() -> str:
    """Return the tree of exceptions, and what each of them has."""
    _, drawing, *_ = inspect.cleandoc(errors.__doc__ or "").split("\n\n")
    return f"""\
# Errors

What layerstore raises by itself is a `layerstore.LayerstoreError`, in a branch by what a caller would do about it.
What a message means: [troubleshooting](../operating/troubleshooting/README.md).
{GENERATED}

```text
{drawing}
```

```python
import layerstore

try:
    layerstore.open("nowhere")
except layerstore.errors.NoStore as error:
    print(error.kind, error.exit_code, error.hint)      # no_store 10 layerstore init nowhere, or …
except layerstore.LayerstoreError as error:             # anything else that layerstore has to say
    raise SystemExit(error.exit_code) from error
```

Every error has

- `message`: one line that says what was asked, what was found and what is safe; `str(error)` is the same.
- `hint`: the next thing to do, best as a command; None where there is none.
- `kind`: a word for programs, the same as in `--json`, and `exit_code`: [all of them](cli.md#exit-codes).
- `facts`: the values behind the message, by name.
"""


# -- models and optimizers -----------------------------------------------------------------------------------------


_SHOWN = (
    "a resume from its first save, which is complete, has the same losses on both ranks, and at the end the same "
    "masters and moments, bit for bit",
    "a mixture of the last two saves has every master and moment of each layer as they were at the step of that layer, "
    "and training goes on alike, bit for bit, whether `layerstore.resume` fills the engine or DeepSpeed's "
    "`load_checkpoint` reads the shards that were composed",
    "an export of the mixture loads in Transformers, and every weight is the one that follows from its master",
)
_NOTES = (
    "DeepSpeed's Lion allocates a second moment and leaves it zero.",
    "Under ZeRO-3 an optimizer sees flat vectors: Adafactor has nothing to factor, and keeps its second moment whole.",
    "It also stores the RMS of each rank's part, but computes it anew before using it: a resume at another world size, "
    "which starts from that of rank 0, is not affected.",
    "Muon keeps a momentum for matrices, and Adam's moments for everything else.",
    "DeepSpeedCPUAdam is trained with betas whose powers are exact ([why](support.md#deepspeeds-c-adam)).",
)


def models_page() -> str:
    """Return which models and optimizers the tests train, as their cases have them."""
    shown = ";\n".join(f"- {each}" for each in _SHOWN) + "."
    notes = "\n".join(_NOTES)
    models = "\n".join(f"| {name} | `{family}` |" for family, name in MODELS.items())
    optimizers = "\n".join(
        f"| {name} | {', '.join(f'`{moment}`' for moment in moments)} |" for name, moments in OPTIMIZERS.items()
    )
    return f"""\
# Models and optimizers

Every model below is trained under every optimizer below: {len(CASES)} trainings by real DeepSpeed ZeRO-3 on two CPU
ranks, of models as small as their architecture allows, with random weights: this shows bookkeeping, not quality.
{GENERATED}

Each training saves its first {SAVES} steps by parity, and goes on to step {STEPS}. The command below trains them all,
and every `.ci/run` a sample. The tests then show that

{shown}

| model | case |
|---|---|
{models}

| optimizer | moments that are stored for each layer |
|---|---|
{optimizers}

{notes}

<!-- not run: it takes half an hour -->
```sh
pytest -n0 -m "full or exhaustive" tests/live/test_families.py
```

What else is supported, and what is refused: [support](support.md).
"""


# -- policies ------------------------------------------------------------------------------------------------------


def policies_page() -> str:
    """Return the guide to policies with its tables, which their classes say, written anew."""
    text = GUIDE.read_text()
    for name, lines in (("policies", _policies()), ("settings", _settings())):
        mark = f"<!-- {name}: written by python -m tests.docs.reference -->"
        assert text.count(mark) == 1, mark
        table = "\n".join(lines)
        text = re.sub(rf"({re.escape(mark)}\n).*?(\n<!-- end -->)", rf"\1\n{table}\n\2", text, flags=re.DOTALL)
    return text


def _policies() -> Iterator[str]:
    yield from ("| policy | due at a save |", "|---|---|")
    for policy in OURS:
        name = f"`{policy.name}` (as a choice of a composite: `{LATEST}`)" if policy is Latest else f"`{policy.name}`"
        yield f"| {name} | {' '.join((inspect.getdoc(policy) or '').split()).replace('``', '`')} |"


def _settings() -> Iterator[str]:
    yield from ("| option | policy | meaning | default |", "|---|---|---|---|")
    for policy in OURS:
        texts = {field.name: field.text for field in python_api.fields(_source(policy))}
        for name, setting in settings_of(policy).items():
            values = setting.metavar.split("|")
            options = ", ".join(f"`--{name.replace('_', '-')} {value}`" for value in values)
            yield f"| {options} | {policy.name} | {texts[name]} | {setting.default} |"


def _source(policy: type) -> ast.ClassDef:
    found = python_api.home(policy.__module__, policy.__name__)
    assert found is not None
    assert isinstance(found.node, ast.ClassDef)
    return found.node


# -- all of them ---------------------------------------------------------------------------------------------------

PAGES: Mapping[Path, Callable[[], str]] = {
    FOLDER / "commands.md": commands_page,
    FOLDER / "errors.md": errors_page,
    FOLDER / "models.md": models_page,
    GUIDE: policies_page,
    **python_pages.PAGES,
}


if __name__ == "__main__":
    for path, text in PAGES.items():
        path.write_text(text())
