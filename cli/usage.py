"""Usage errors in our own words, with a hint."""

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from typer.exceptions import TyperException

from layerstore.cli.commands import COMMANDS, about
from layerstore.cli.options import DEFAULT_STORE
from layerstore.cli.render import output
from layerstore.errors import LayerstoreError, NoStore
from layerstore.layers import is_name, typed
from layerstore.layout import is_url, layout_at
from layerstore.nearest import did_you_mean, nearest

# Only typer's message contains the unknown command's name.
_NO_COMMAND = re.compile(r"No such command '(?P<name>.*)'\.?", re.DOTALL)

_EXTRA = re.compile(r"Got unexpected extra argument\(s\) \((?P<words>.*)\)\.?", re.DOTALL)

# typer lists the choices only in its message.
_QUOTED = re.compile("'([^']+)'")

# Other tools' commands whose equivalent in layerstore takes more than one word.
_IN_OUR_WORDS = {
    "forget": "layerstore drop REF moves one commit to the trash; layerstore gc --keep-last N removes by rules",
    "help": "layerstore --help lists the commands, layerstore COMMAND --help explains one",
    "ps": "layerstore log lists the commits",
    "rename": "layerstore pin NEW OLD, then layerstore pin --delete OLD, renames a pin; a run keeps its name",
    "tags": "layerstore pin --list lists the pins",
    "unpin": "layerstore pin --delete PIN",
    "untag": "layerstore pin --delete PIN",
}

# Messages by pydantic's error code; for other codes, typer's message is kept.
_PROBLEMS = {
    "int_parsing": "is not a whole number",
    "int_parsing_size": "is too large",
    "float_parsing": "is not a number",
    "greater_than_equal": "is less than {ge}",
    "less_than_equal": "is more than {le}",
}


def usage_message(problem: TyperException) -> str:
    """Return what is wrong with the command line, in one line."""
    option, refusal = _option(problem), _refused(problem)
    if option is not None and refusal is not None:
        facts = refusal.get("ctx")
        facts = facts if isinstance(facts, Mapping) else {}
        if refusal.get("type") in _PROBLEMS:
            return f"{option} {refusal.get('input')} {_PROBLEMS[str(refusal['type'])].format_map(facts)}"
        if "error" in facts:  # a choice, which typer checks itself
            return f"{option}: {str(facts['error']).rstrip('.')}"
    # For an unknown option, the hint has the suggestions.
    extra = _EXTRA.fullmatch(problem.message)
    if extra is not None:
        return f"{_command(problem)} takes {_arguments(problem) or 'no argument'}; unexpected: {extra['words']}"
    is_unknown = isinstance(getattr(problem, "possibilities", None), list)
    text = " ".join((problem.message if is_unknown else problem.format_message()).split()).rstrip(".")
    return text[:1].lower() + text[1:]


def usage_hint(problem: TyperException, commands: Sequence[str], words: Sequence[str]) -> str | None:
    """Return a suggestion for the mistyped *words*, or the command whose help lists the choices."""
    context = getattr(problem, "ctx", None)
    if context is None:  # from the parser: an option lacks its value
        command = next((f" {word}" for word in words if word in commands), "")
        return f"layerstore{command} --help"
    possible = getattr(problem, "possibilities", None)
    similar = list(possible) if isinstance(possible, list) else []  # nearest first
    unknown = _NO_COMMAND.fullmatch(problem.message)
    if unknown is not None:
        name = unknown["name"]
        if name in _IN_OUR_WORDS:
            return _IN_OUR_WORDS[name]
        similar = [ours for ours in commands if name in about(ours).elsewhere] or nearest(name, commands)
    _, is_choice, choices = problem.message.partition(" is not one of ")
    if is_choice:
        similar = nearest(str((_refused(problem) or {}).get("input")), _QUOTED.findall(choices))
    help_ = f"{context.command_path} --help"
    if _EXTRA.match(problem.message) and _arguments(problem) == "REF":
        instead = "name the folder with -o DIR" if _command(problem) == "compose" else "one commit at a time"
        return f"{instead}; {help_}"
    return did_you_mean(similar, else_=help_)


def store_hint(problem: LayerstoreError, words: Sequence[str]) -> str | None:
    """Return the hint of *problem*, or a better one if a REF is a store, or if the command cannot use a new store."""
    is_missing = isinstance(problem, NoStore)
    for before, word in itertools.pairwise(["", *words]):
        is_argument = is_missing and not before.startswith("-")
        if (is_argument or problem.facts.get("name") == word) and _is_store(word):
            named = f"name the store with --store {typed(word)}"
            return f"{named}; {problem.hint}" if problem.hint and not is_missing else named
    if is_missing and problem.facts.get("path") == str(DEFAULT_STORE) and _is_store("."):
        return "this folder is a store itself: --store ."
    if is_missing and problem.facts.get("inside"):
        return f"name the one inside it: --store {typed(str(problem.facts['inside']))}"
    if not problem.facts.get("can_be_made"):
        return problem.hint
    if not problem.facts.get("path") and not is_url(output.store or ""):
        return problem.hint  # the problem is with a remote: the store was found
    command = next((word for word in words if word in COMMANDS), None)
    makes_one = command is not None and about(command).section in {"Save", "Elsewhere"}
    path, yours = problem.facts.get("path"), "name yours with --store or LAYERSTORE_STORE"
    if makes_one:
        # For a folder, the library's own hint ends in "name yours", which refers to a Python argument.
        yours = f"{problem.hint} with --store" if path else str(problem.hint)
    if command == "runs" and path and is_name(str(path)):  # at this position, other commands take a run
        yours = f"{yours}; layerstore log {typed(str(path))} lists the saves of a run"
    return did_you_mean(_stores_beside(Path(str(path))) if path else (), else_=yours)


def _stores_beside(path: Path) -> Iterator[str]:
    """Yield a ``--store`` option for each store next to *path* with a similar name."""
    with contextlib.suppress(OSError):
        for name in nearest(path.name, (entry.name for entry in path.parent.iterdir())) if path.name else ():
            if _is_store(str(path.with_name(name))):
                yield f"--store {typed(str(path.with_name(name)))}"


def _is_store(word: str) -> bool:
    try:
        return layout_at(Path(word)).identity.exists()
    except (LayerstoreError, OSError):  # not a path, or no permission to read it
        return False


def _command(problem: TyperException) -> str:
    return str(getattr(getattr(problem, "ctx", None), "info_name", None))


def _arguments(problem: TyperException) -> str:
    """Return the names of the arguments that the command takes."""
    params = getattr(getattr(getattr(problem, "ctx", None), "command", None), "params", [])
    return " and ".join(str(param.metavar) for param in params if param.param_type_name == "argument")


def _option(problem: TyperException) -> str | None:
    """Return the long name of the option whose value is wrong."""
    names = getattr(getattr(problem, "param", None), "opts", [])
    return max((name for name in names if name.startswith("-")), key=len, default=None)


def _refused(problem: TyperException) -> Mapping[str, object] | None:
    """Return pydantic's first error for the value; typer keeps pydantic's exception as the cause."""
    errors = getattr(problem.__cause__, "errors", None)
    refusals = errors() if callable(errors) else []
    return refusals[0] if refusals else None
