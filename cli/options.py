"""
Options that many commands share, and how a command opens its store.

A ``--store`` or ``--json`` before the command is the default for the same option after the command.
"""

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_args

import typer

import layerstore
from layerstore.cli.render import print_aside
from layerstore.cli.shares import shares
from layerstore.errors import InvalidInput
from layerstore.layout import is_url
from layerstore.setting import Setting, settings_of

if TYPE_CHECKING:
    from layerstore import Store

DEFAULT_STORE = Path(".layerstore")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, as the last line.")]
StorePath = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="STORE",
        help="A folder or URL. [default: LAYERSTORE_STORE, else .layerstore here or above]",
        show_default=False,
    ),
]
ReferenceArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="REF",
        help="RUN@STEP, RUN, RUN~1, a pin or the beginning of a commit's id. [default: the only run's newest step]",
    ),
]


def nearest_store() -> Path:
    """
    Return the nearest ``.layerstore``: in this folder, otherwise in a folder above, up to the home folder.

    Above this folder, only a store that this user owns counts: anybody may make one in a folder like /tmp. If no store
    is found, return the path in this folder.
    """
    here = Path.cwd()
    home = Path(os.path.expanduser("~")).resolve()  # noqa: PTH111  # Path.home raises for a user without a home
    for folder in (here, *here.parents):
        if os.path.exists(folder / DEFAULT_STORE):  # noqa: PTH110  # also False without permission to look
            if folder == here:
                return DEFAULT_STORE
            if (folder / DEFAULT_STORE).stat().st_uid == os.getuid():
                return folder / DEFAULT_STORE
        if folder == home:
            break
    return DEFAULT_STORE


def store_or_nearest(path: str | None) -> str | Path:
    """Return *path* or, if it is None, the nearest store, whose path is printed unless it is in this folder."""
    if path is not None:
        return path
    nearest = nearest_store()
    if nearest != DEFAULT_STORE:
        print_aside(f"using the store {nearest}")
    return nearest


CommandFunction: TypeAlias = Callable[..., None]
OptionTable: TypeAlias = Mapping[str, tuple[Any, str, str]]
"""Options by name: the type of each, its metavar and its help."""


def one_of(choices: Any) -> str:
    """
    Return the metavar of an option that takes one of a few words, the values of a Literal.

    >>> from typing import Literal
    >>> one_of(Literal["zero3", "hf"])
    'zero3|hf'
    """
    return "|".join(get_args(choices))


def table_of(options: object) -> OptionTable:
    """Return the options that the fields of the class *options* describe."""
    settings = settings_of(options).items()
    return {name: option_row(setting, f"{setting.help[0].upper()}{setting.help[1:]}") for name, setting in settings}


def read_settings(options: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the texts in *given* as settings of the class *options*; raise InvalidInput if a text is invalid."""
    settings = settings_of(options)
    return {name: settings[name].value(value) for name, value in given.items()}


def option_row(setting: Setting, text: str) -> tuple[Any, str, str]:
    """Return the `OptionTable` entry of *setting*, with the help *text*; a default of None or False is left out."""
    default = "" if setting.default in {"None", "False"} else f" [default: {setting.default}]"
    return setting.kind, setting.metavar, f"{text}.{default}"


def with_options(place: str, table: OptionTable, *, panel: str) -> Callable[[CommandFunction], CommandFunction]:
    """
    Replace a command's parameter *place* with the options of *table*, which ``--help`` lists under *panel*.

    The command receives only the options that were given.
    """

    def extended(command: CommandFunction) -> CommandFunction:
        @functools.wraps(command)
        def run(**words: object) -> None:
            given = {name: words.pop(name) for name in table}
            # Only what was given: the library knows the defaults.
            command(
                **words,
                **{place: {name: value for name, value in given.items() if value is not None and value is not False}},
            )

        parameters = []
        for parameter in inspect.signature(command).parameters.values():
            if parameter.name != place:
                parameters.append(parameter)
                continue
            for name, (accepted, metavar, text) in table.items():
                option = typer.Option(
                    f"--{name.replace('_', '-')}", metavar=metavar or None, help=text, rich_help_panel=panel
                )
                kind, default = (bool, False) if accepted is bool else (accepted | None, None)
                parameters.append(parameter.replace(name=name, default=default, annotation=Annotated[kind, option]))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        return run

    return extended


@contextlib.contextmanager
def opened(path: str | None, *, remote: str | None = None) -> Iterator["Store"]:
    """Yield the store at *path* (None: the nearest), or its *remote*; repeat notices, but warn of durability once."""
    from layerstore.disk import WeakDurability
    from layerstore.remote import RemoteNotice
    from layerstore.storage import IndexNotice

    # By default, Python shows a warning with the same text from the same line of code only once.
    warnings.simplefilter("always", IndexNotice)
    warnings.simplefilter("once", WeakDurability)
    warnings.simplefilter("always", RemoteNotice)
    if remote is not None and is_url(remote):
        path, remote = remote, None
    with layerstore.Store(store_or_nearest(path), shares=shares()) as store:
        if remote is None:
            yield store
            return
        url = store.remotes.url(remote)
    with layerstore.open(url) as store:
        yield store


def chosen_reference(store: "Store", *, ref: str | None, run: str | None, step: int | None) -> str | None:
    """
    Combine REF, ``--run`` and ``--step`` into one reference; None means the newest step of the only run.

    Raises:
        InvalidInput: Both REF and the options were given, or it is unclear which run's step is meant.
    """
    if ref is not None and (run is not None or step is not None):
        raise InvalidInput("REF and --run or --step were both given", hint=f"choose one: {ref}, or --run R --step N")
    if step is None:
        return ref or run
    runs = store.runs()
    if run is None and len(runs) != 1:
        raise InvalidInput(f"--step {step} of which run? The store holds {len(runs)}", hint="name it with --run")
    return f"{run or runs[0]}@{step}"
