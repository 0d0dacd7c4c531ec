"""
The Python API as its source says it: signatures, docstrings and fields, read from the syntax trees.

Nothing is imported that brings torch along, and the text is the same under every version of Python.
"""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT

_LINE_MAX = 100
# What is public for other rooms of the library or for a framework that calls back, and for nobody else.
INTERNAL = {
    *(
        "small",
        "repo",
        "composition",
        "names_of",
        "exchange",
        "reasons",
        "anchored",
        "take",
        "captured",
        "pointer",
        "rebase_on",
    ),
    *("step_of", "on_train_begin", "on_step_begin", "on_step_end", "on_train_end"),
    *("reset", "set_up_storage_writer", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan"),
    *("write_data", "read_data", "read_metadata", "finish", "validate_checkpoint_id", "stage"),
    *("should_synchronize_after_execute", "is_dcp"),
    *(
        "Repository",
        "Composition",
        "Resolved",
        "OutputFile",
        "Piece",
        "BlobRef",
        "Pointer",
        "RecordName",
        "Exchange",
        "WeightsFile",
    ),
    # Parts of a record: the format's page has them.
    *("CodingLoss", "Fork", "LayerEntry", "Observed", "Origin", "PolicyUse", "SourceLayout"),
}
# Classes that people make themselves by calling them; all others are given by something else.
_CALLED = {"LayerstoreCallback", "StoreReader", "StoreWriter"}

Definition = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Home:
    """Where a name is defined."""

    module: str
    node: Definition

    @property
    def name(self) -> str:
        """The name there."""
        return self.node.name


@cache
def _tree(module: str) -> ast.Module:
    path = ROOT / Path(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_bytes())


@cache
def home(module: str, name: str) -> Home | None:
    """Return where the *name* that *module* knows is defined; None where that is not in layerstore."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and node in _tree(module).body:
            return Home(module, node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("layerstore"):
            if node.module == module:
                continue  # a room of its own, no name of another's
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return home(str(node.module), alias.name)
    return None


def exported(module: str) -> dict[str, Home]:
    """
    Return the functions and classes of a front door by the names that it exports, in its own order.

    What it loads at first use stands in it under ``if TYPE_CHECKING``, for type checkers and for us. Errors are left
    out: they have a page of their own.
    """
    names = ast.literal_eval(
        next(
            node.value
            for node in _tree(module).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
    )
    found = {name: home(module, name) for name in names}
    return {name: place for name, place in found.items() if place is not None and place.module != "layerstore.errors"}


# -- as text -------------------------------------------------------------------------------------------------------


def signature(node: ast.FunctionDef, *, name: str | None = None, of_class: bool = False) -> str:
    """Return the head of a function as people write it, one argument on a line where one line is too short."""
    arguments = [*_arguments(node.args)][of_class:]
    returns = "" if node.returns is None else f" -> {_plain(ast.unparse(node.returns))}"
    called = name or node.name
    short = f"{called}({', '.join(arguments)}){returns}"
    if len(short) <= _LINE_MAX:
        return short
    lines = "".join(f"    {argument},\n" for argument in arguments)
    return f"{called}(\n{lines}){returns}"


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    for argument, default in zip(positional, [*defaults, *arguments.defaults], strict=True):
        yield _argument(argument, default)
    if arguments.vararg is not None:
        yield f"*{_argument(arguments.vararg, None)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(argument, default)
    if arguments.kwarg is not None:
        yield f"**{_argument(arguments.kwarg, None)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    annotated = f"{argument.arg}: {_plain(ast.unparse(argument.annotation))}" if argument.annotation else argument.arg
    if default is None:
        return annotated
    equals = " = " if argument.annotation else "="
    return f"{annotated}{equals}{ast.unparse(default)}"


def _plain(annotation: str) -> str:
    """Return an annotation without the quotes that spare an import."""
    return re.sub(r"^'(.*)'$", r"\1", annotation)


def docstring(node: Definition) -> str:
    """Return the docstring of *node* as Markdown: what it raises as a list, its examples as code."""
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    main, _, raises = text.partition("\nRaises:\n")
    main = re.sub(r"(?m)((?:^>>> .*\n(?:(?!>>>).+\n?)*)+)", r"```pycon\n\1```\n", f"{main}\n")
    main = re.sub(r"(?m)((?:^    .+\n)+)", _as_code, main).strip()
    if not raises:
        return main
    entries = re.split(r"\n(?=    \S)", "\n" + raises.rstrip())
    lines = [" ".join(entry.split()) for entry in entries if entry.strip()]
    listed = "\n".join(f"- `{line.partition(': ')[0]}`: {line.partition(': ')[2]}" for line in lines)
    return f"{main}\n\nRaises\n\n{listed}"


def _as_code(match: re.Match[str]) -> str:
    return f"```py\n{inspect.cleandoc(match[1])}\n```\n"


def is_public(name: str) -> bool:
    """Whether people are meant to use *name*."""
    return not name.startswith("_") and name not in INTERNAL


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a value, or a property."""

    name: str
    type: str
    text: str
    usual: str = ""
    """Its default."""

    def __str__(self) -> str:
        return f"- `{self.name}: {self.type}{self.usual}`" + (f": {self.text}" if self.text else "")


def fields(node: ast.ClassDef) -> Iterator[Field]:
    """Yield the public fields and properties of a class."""
    for entry, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and is_public(entry.target.id):
            text = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = " ".join(str(following.value.value).split())
            usual = f" = {ast.unparse(entry.value)}" if isinstance(entry.value, ast.Constant) else ""
            yield Field(entry.target.id, _plain(ast.unparse(_bare(entry.annotation))), text, usual)
        if isinstance(entry, ast.FunctionDef) and _is_property(entry) and is_public(entry.name):
            returns = _plain(ast.unparse(entry.returns)) if entry.returns else "object"
            yield Field(entry.name, returns, " ".join((ast.get_docstring(entry) or "").split()))


def _bare(annotation: ast.expr) -> ast.expr:
    """Return the type of a field whose annotation says more."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        return annotation.slice.elts[0]
    return annotation


def methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Yield the public methods of a class, in the order of its source."""
    for entry in node.body:
        if isinstance(entry, ast.FunctionDef) and is_public(entry.name) and not _is_property(entry):
            yield entry


def _is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)


def constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    """Return the constructor of a class that people call."""
    if node.name not in _CALLED:
        return None
    return next((entry for entry in node.body if isinstance(entry, ast.FunctionDef) and entry.name == "__init__"), None)


def parameters(node: Definition) -> inspect.Signature:
    """Return what a function takes, a method without the object, or a class when it is called."""
    if isinstance(node, ast.ClassDef):
        made = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
        if made is not None:
            return parameters(made)
        own = [
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
        return inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in own]
        )
    positional = [*node.args.posonlyargs, *node.args.args]
    required = len(positional) - len(node.args.defaults)
    found = [
        inspect.Parameter(
            each.arg,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if index < required else None,
        )
        for index, each in enumerate(positional)
        if each.arg != "self"
    ]
    if node.args.vararg is not None:
        found.append(inspect.Parameter(node.args.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for each, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        empty = inspect.Parameter.empty if default is None else None
        found.append(inspect.Parameter(each.arg, inspect.Parameter.KEYWORD_ONLY, default=empty))
    if node.args.kwarg is not None:
        found.append(inspect.Parameter(node.args.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(found)


# -- what comes back -----------------------------------------------------------------------------------------------


def returned(known: Iterable[Home]) -> list[Home]:
    """Return the classes of values that the functions and methods of *known* return, and those in their fields."""
    known = list(known)
    seen = {each.name for each in known}
    found: dict[str, Home] = {}
    waiting = [each for of in known for each in (*named_in_returns(of), *_named_in_fields(of))]
    while waiting:
        each = waiting.pop(0)
        if each.name in seen or not is_public(each.name) or not isinstance(each.node, ast.ClassDef):
            continue
        seen.add(each.name)
        found[each.name] = each
        waiting += _named_in_fields(each)
    return [found[name] for name in sorted(found)]


def named_in_returns(of: Home) -> Iterator[Home]:
    """Yield the classes that a function returns, or the methods of a class."""
    functions = [of.node] if isinstance(of.node, ast.FunctionDef) else list(methods(of.node))
    for function in functions:
        if function.returns is not None:
            yield from _named(of.module, function.returns)


def _named_in_fields(of: Home) -> Iterator[Home]:
    if isinstance(of.node, ast.ClassDef):
        for field in fields(of.node):
            yield from _named(of.module, ast.parse(field.type, mode="eval").body)


def _named(module: str, annotation: ast.expr) -> Iterator[Home]:
    parsed = ast.parse(_plain(ast.unparse(annotation)), mode="eval")
    for node in ast.walk(parsed):
        if isinstance(node, ast.Name) and (found := home(module, node.id)) is not None:
            yield found
