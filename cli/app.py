"""
The top level of the command line: the group of all commands, and how exceptions become exit codes.

Commands import the library when they run, so that ``--help`` is fast. The exit codes are in docs/reference/cli.md.
"""

import contextlib
import errno as errnos
import functools
import itertools
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperArgument, TyperGroup
from typer.exceptions import TyperException

import layerstore
from layerstore.cli.commands import COMMANDS, about, function_of
from layerstore.cli.complete import Shell, choices, items, script_for
from layerstore.cli.exits import (
    EXIT_CLOSED_PIPE,
    EXIT_INTERRUPTED,
    EXIT_NO_MEMORY,
    EXIT_TERMINATED,
    EXIT_USAGE,
)
from layerstore.cli.help import Command, write_commands, write_options
from layerstore.cli.options import AsJson
from layerstore.cli.render import output, print_error, print_json, print_line, print_warning
from layerstore.cli.shares import is_follower, led, work_for_lead
from layerstore.cli.usage import store_hint, usage_hint, usage_message
from layerstore.errors import Internal, LayerstoreError, StorageIO
from layerstore.limits import MIB
from layerstore.units import size_in_bytes

if TYPE_CHECKING:
    from typer._click.core import Command as AnyCommand
    from typer._click.core import Context
    from typer._click.formatting import HelpFormatter
    from typer._click.shell_completion import CompletionItem

# Plans and lists are answers too, so ``--quiet`` does not silence them.
ANSWERING_OPTIONS = frozenset({"--dry-run", "--list"})


class Commands(TyperGroup):
    """All commands; each is imported on demand, since importing all would be too slow for completion."""

    def list_commands(self, ctx: "Context") -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: "Context", cmd_name: str) -> "AnyCommand | None":
        """Return the command *cmd_name*; None if it does not exist."""
        return self.load(cmd_name) if cmd_name in COMMANDS else None

    def load(self, name: str) -> "AnyCommand":
        """Return the command *name*, imported at its first use; ``--quiet`` may also come after the name."""
        if name not in self.commands:
            single = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
            single.command(name, cls=Command)(function_of(name))
            command = typer.main.get_command(single)
            for param in command.params:
                param.shell_complete = partial(choices, param)  # type: ignore[method-assign]
                if isinstance(param, TyperArgument):
                    # Show the argument's name alone; typer would add the Python type: list[Path].
                    param.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
            command.params += [param for param in self.params if param.name == "quiet"]
            self.commands[name] = command
        return self.commands[name]

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write the commands, then the options that may precede them."""
        write_commands(formatter)
        write_options(self.get_params(ctx), ctx, formatter)

    def shell_complete(self, ctx: "Context", incomplete: str) -> "list[CompletionItem]":
        """Return matching commands and options, without the commands' help, since that would import them all."""
        names = [name for name in COMMANDS if name.startswith(incomplete)]
        return [*items(names), *super(TyperGroup, self).shell_complete(ctx, incomplete)]


# Help and usage errors are plain text, without rich's markup: importing rich would take three times as long.
app = typer.Typer(
    name="layerstore",
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,  # typer's would guess the shell, and offer to edit its settings
    suggest_commands=False,  # our hint suggests commands
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Terminated(BaseException):
    """Raised on SIGTERM, to unwind as after Ctrl-C, so that temporary files are removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a failed command ended."""

    kind: str
    code: int
    message: str
    hint: str | None = None


_OUT_OF_MEMORY = Failure(
    kind="no_memory",
    code=EXIT_NO_MEMORY,
    message="memory ran out; what was saved before is not affected",
    hint="raise the memory limit (ulimit -v, job, container), or end what else uses memory, and repeat the command",
)


# Address space reserved for printing `_OUT_OF_MEMORY`: a process out of memory may lack room for a few lines.
_room = [bytearray(4 * MIB)]


def _if_quiet(value: bool) -> bool:
    """Silence notes if ``--quiet`` was given anywhere."""
    if value:
        output.is_quiet = True
    return value


@app.callback(invoke_without_command=True)
def layerstore_(
    context: typer.Context,
    *,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            envvar="LAYERSTORE_STORE",
            metavar="STORE",
            help="A folder or URL. [default: .layerstore here or above]",
        ),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            "--cache", metavar="SIZE", help="Cache up to SIZE of remotes on this host, like 20GB. [default: 100GiB]"
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            help="Print only what was asked for, and errors.",
            callback=_if_quiet,
            expose_value=False,
        ),
    ] = False,
    show_completion: Annotated[
        Shell | None,
        typer.Option(
            "--show-completion", metavar="bash|zsh|fish", help="Print the script that lets this shell complete words."
        ),
    ] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """
    Keep DeepSpeed ZeRO and FSDP2 checkpoints as versions of layers; compose checkpoints from them.

    \b
    Examples:
      layerstore init
      layerstore ingest out/checkpoint-200 --run sft
      layerstore compose sft@200 -o resume
    """
    if version:
        output.answers = True
        current = layerstore.__version__
        print_json({"version": current}) if as_json else print_line(f"layerstore {current}")
        raise typer.Exit
    if show_completion is not None:
        output.answers = True
        print_line(script_for(show_completion, context.command))
        raise typer.Exit
    if context.invoked_subcommand is None:
        if as_json:
            context.fail("Missing command.")
        output.answers = True
        print_line(context.get_help())
        raise typer.Exit(EXIT_USAGE)
    if about(context.invoked_subcommand).answers:
        output.answers = True
    if cache is not None:
        size_in_bytes(cache)  # raises if it is not a size
        os.environ["LAYERSTORE_CACHE_SIZE"] = cache  # the cache reads its size only from this variable
    shared = {"store": store, "as_json": as_json}
    # So that --store and --json may come before the command as well as after it.
    context.default_map = {context.invoked_subcommand: shared}


@functools.cache
def command_line() -> Commands:
    """Return the top-level command with all its subcommands."""
    group = typer.main.get_command(app)
    assert isinstance(group, Commands)
    for param in group.params:
        param.shell_complete = partial(choices, param)  # type: ignore[method-assign]
    return group


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on *arguments*, the process's own by default; return the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    output.store = store_in(words)
    if not ANSWERING_OPTIONS.isdisjoint(_options(words)):
        output.answers = True
    try:
        return _main(words)
    finally:
        output.store = None
        output.is_quiet = output.answers = False


def _main(words: list[str]) -> int:
    _occupy_standard_descriptors()
    _tolerate_any_text()
    with _unwound_by_sigterm(), _warnings_in_one_line():
        try:
            failure = _run(words)
        except BrokenPipeError:
            failure = Failure(kind="closed_pipe", code=EXIT_CLOSED_PIPE, message="")
        except (KeyboardInterrupt, Terminated) as exc:
            _show_traceback()
            how = ("terminated", EXIT_TERMINATED) if isinstance(exc, Terminated) else ("interrupted", EXIT_INTERRUPTED)
            failure = Failure(kind=how[0], code=how[1], message=f"{how[0]}; nothing half-done is left behind")
    if failure is None:
        return 0
    with contextlib.suppress(OSError):  # nobody can see the error
        if failure.message and not is_follower():
            if failure is _OUT_OF_MEMORY:
                _room.clear()
            # Look for --json in the words, because a usage error is raised before there are parsed options.
            print_error(**asdict(failure), as_json="--json" in _options(words))
    _discard_output()
    return failure.code


def _run(words: list[str]) -> Failure | None:
    """Run one command; turn every exception into a `Failure`, except those of signals, exits and closed pipes."""
    try:
        code = _command(words)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except TyperException as exc:
        return Failure(
            kind="usage", code=exc.exit_code, message=usage_message(exc), hint=usage_hint(exc, COMMANDS, words)
        )
    except LayerstoreError as exc:
        exc.hint = store_hint(exc, words)
        return _failed(exc)
    except BrokenPipeError:
        raise
    except SystemExit as exc:
        cause = exc.__context__
        if isinstance(cause, OSError) and cause.errno == errnos.EPIPE:  # typer turns a closed pipe into an exit
            raise BrokenPipeError from exc
        raise
    except Exception as exc:  # noqa: BLE001  # anything else is a bug of ours and must be reported
        return _unexpected(exc)
    if code == EXIT_INTERRUPTED:  # typer's way to pass on Ctrl-C
        raise KeyboardInterrupt
    return Failure(kind="usage", code=code, message="") if code else None


def _unexpected(exc: Exception) -> Failure:
    if _is_out_of_memory(exc):  # checked first: an import that runs out of memory may raise an OSError
        _show_traceback()
        return _OUT_OF_MEMORY
    if isinstance(exc, OSError):
        where = "the output" if exc.filename is None else exc.filename
        return _failed(StorageIO(f"{where}: {exc.strerror or exc}", errno=exc.errno, filename=str(where)))
    report = "this is a fault of layerstore; please report it with the lines above"
    return _failed(Internal(f"unexpected {type(exc).__name__}: {exc}", hint=report))


def _command(words: list[str]) -> int:
    """Run the command, or work for the process that runs it; return the exit code."""
    if is_follower():
        work_for_lead()
        return 0
    with led(words) as its_words:
        return command_line().main(args=its_words, prog_name="layerstore", standalone_mode=False) or 0


def _failed(problem: LayerstoreError) -> Failure:
    _show_traceback(always=isinstance(problem, Internal))
    return Failure(kind=problem.kind, code=problem.exit_code, message=str(problem), hint=problem.hint)


def _is_out_of_memory(exc: BaseException | None) -> bool:
    """Whether *exc*, or its cause, means that memory ran out."""
    while exc is not None:
        text = str(exc)
        if (
            isinstance(exc, MemoryError)
            or (isinstance(exc, OSError) and exc.errno == errnos.ENOMEM)
            or (isinstance(exc, RuntimeError) and text == "can't start new thread")
            or (isinstance(exc, ImportError) and "failed to map segment" in text)  # numpy's libraries
            or (isinstance(exc, SystemError) and "_find_and_load" in text)  # any library written in C
        ):
            return True
        exc = exc.__cause__
    return False


def _options(words: list[str]) -> list[str]:
    return words[: words.index("--")] if "--" in words else words


def store_in(words: list[str]) -> str | None:
    """Return the last store given in *words*; None if no store is given."""
    options = _options(words)
    named = [following for word, following in itertools.pairwise(options) if word == "--store"]
    named += [word.removeprefix("--store=") for word in options if word.startswith("--store=")]
    return named[-1] if named else None


def _show_traceback(*, always: bool = False) -> None:
    if always or os.environ.get("LAYERSTORE_DEBUG", "0") not in {"", "0"}:
        traceback.print_exc()


# -- the process ---------------------------------------------------------------------------------------------------


def _occupy_standard_descriptors() -> None:
    """Open closed standard descriptors, so that no file of the store gets one of them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this descriptor's


def _tolerate_any_text() -> None:
    """Escape invalid Unicode and whatever the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # the stream is closed, or was replaced by a simpler object
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # or AttributeError, see above


@contextlib.contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM; a second SIGTERM kills the process."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def unwind(number: int, frame: FrameType | None) -> None:
        # Restore the default: a second SIGTERM must end the process even if unwinding hangs.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print_warning(str(message))
        yield


def _discard_output() -> None:
    """Discard what is still buffered, so that the interpreter's last flush cannot fail again."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stdout is closed, or does not exist
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
