"""The code of the documentation runs as it stands, and what cannot run is at least what the code would take."""

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
from typer.core import TyperOption

from layerstore.errors import LayerstoreError
from layerstore.layers import parse_reference
from layerstore.live.attaching import attach
from layerstore.live.resuming import Resumed
from layerstore.policy import policy_named
from tests.docs.pages import DOCS, PAGES, ROOT, Block, blocks, inline_code, name
from tests.docs.python_api import exported, methods, parameters
from tests.docs.reference import commands as known_commands
from tests.docs.reference import group
from tests.docs.scene import ENDLESS, commands, scene_at

LANGUAGES = {"sh", "python", "py", "pycon", "yaml", "text", "json"}
RUNNABLE = {page: [block for block in blocks(page, "sh", "python") if block.runs] for page in PAGES}
ALL = [block for page in PAGES for block in blocks(page)]

# The format's own example knows nothing of layerstore; it has a store and a test of its own.
ELSEWHERE = {DOCS / "reference" / "format.md"}

# Not for everybody, so not in the front door; the pages name it in full.
KNOWN_TO_FEW = {"layerstore.store.restore_identity"}


def parts(found: list[Block]) -> list[list[Block]]:
    """Return *found* in the parts that each begin afresh."""
    cut: list[list[Block]] = [[]] if not found or found[0].note != "afresh" else []
    for block in found:
        if block.note == "afresh":
            cut.append([])
        cut[-1].append(block)
    return cut


def makes_its_store(part: list[Block]) -> bool:
    """Whether the store of a part is made by a command in it."""
    return any(words == ["layerstore", "init"] for block in part if block.language == "sh" for words in commands(block))


@pytest.mark.parametrize("page", [page for page in PAGES if RUNNABLE[page] and page not in ELSEWHERE], ids=name)
def test_code_runs_as_it_stands(page: Path, furnished: Path, disk_path: Path) -> None:
    """Every command ends with 0, or with the code that the page says; every line of Python does its work."""
    for number, part in enumerate(parts(RUNNABLE[page])):
        with scene_at(disk_path / str(number), furnished, with_store=not makes_its_store(part)) as scene:
            for block in part:
                scene.run(block)


def test_most_code_runs() -> None:
    """Blocks that do not run are the exception."""
    code = [block for block in ALL if block.language in {"sh", "python"}]
    run = [block for block in code if block.runs]

    assert len(run) > 50
    assert len(run) > 0.6 * len(code)


def test_every_block_says_what_it_is() -> None:
    """A block without a language is neither coloured nor tested."""
    assert {str(block): block.language for block in ALL if block.language not in LANGUAGES} == {}


@pytest.mark.parametrize("block", [block for block in ALL if block.said("lines of ")], ids=str)
def test_what_is_quoted_is_there(block: Block) -> None:
    """Every line of a quoted block is one of the file, in the file's order: that file is what tests run."""
    lines = iter(line.strip() for line in (ROOT / str(block.said("lines of "))).read_text().splitlines())

    for line in block.text.splitlines():
        assert not line.strip() or line.strip() in lines, line


# -- commands ------------------------------------------------------------------------------------------------------


def mentioned_commands() -> Iterator[tuple[str, str]]:
    """Yield every command of layerstore's in blocks and in the prose, with its place."""
    for block in ALL:
        if block.language == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                yield str(block), line
    for page in PAGES:
        for code in inline_code(page):
            if code.startswith("layerstore "):
                yield name(page), code


def wrong_in(line: str) -> str | None:
    """Return what is wrong with the command of layerstore's in *line*; None where there is none, or nothing is."""
    found = re.search(r"(?:^|[ ;&(])layerstore ((?:--store \S+ )?)([a-z]+)( .*)?$", line.partition("  #")[0].strip())
    if found is None:
        return None
    command = known_commands().get(found[2])
    if command is None:
        return f"there is no command {found[2]}"
    options = {
        spelt
        for parameter in (*command.params, *group().params)
        if isinstance(parameter, TyperOption)
        for spelt in (*parameter.opts, *parameter.secondary_opts)
    } | {"--help", "-h"}
    words = shlex.split((found[3] or "").replace("…", ""), comments=True)
    own = takewhile(lambda word: word != "--", words)  # the rest is another command's
    strange = [word for word in own if word.startswith("-") and word.partition("=")[0] not in options]
    return f"{found[2]} has no option {', '.join(strange)}" if strange else None


def test_every_command_is_one_that_there_is() -> None:
    """Wherever a command is written, it and its options are those of the command line."""
    wrong = [f"{place}: {line}: {told}" for place, line in mentioned_commands() if (told := wrong_in(line))]

    assert wrong == []


def test_a_wrong_command_is_noticed() -> None:
    """The rule above can fail."""
    assert wrong_in("layerstore compsoe sft -o resume") == "there is no command compsoe"
    assert wrong_in("srun layerstore gc --keep-lost 3") == "gc has no option --keep-lost"
    assert wrong_in("layerstore --store x log sft --graph   # all attempts") is None
    for command, option in ENDLESS:
        assert option in {spelt for each in known_commands()[command].params for spelt in each.opts}


# -- calls ---------------------------------------------------------------------------------------------------------


@cache
def known_calls() -> dict[str, inspect.Signature]:
    """Return what the pages call, by how they write it, with what it takes."""
    found: dict[str, inspect.Signature] = {}
    for module in ("layerstore", "layerstore.transformers", "layerstore.dcp"):
        for each, home in exported(module).items():
            found[f"{module}.{each}"] = parameters(home.node)
            if each not in {"open", "init", "doctor"}:
                found[each] = parameters(home.node)
            if isinstance(home.node, ast.ClassDef):
                found |= {f"{each.lower()}.{method.name}": parameters(method) for method in methods(home.node)}
    return found


def trees() -> Iterator[tuple[str, ast.AST]]:
    """Yield the syntax of all Python, in blocks and, where it is a call, in the prose."""
    for block in ALL:
        if block.language == "python":
            yield str(block), ast.parse(block.text) if not block.said("lines of ") else ast.Module([], [])
    for page in PAGES:
        for code in inline_code(page):
            if re.fullmatch(r"(?:layerstore|store|composite|saver|attach|resume)\b[\w.]*\(.*\)", code):
                shortened = code.replace("(…, ", "(*some, ").replace("(…)", "(*some)")
                if "…" not in shortened:
                    yield name(page), ast.parse(shortened)


def test_every_call_is_one_that_the_code_takes() -> None:
    """Whatever the pages call of layerstore's is there, and takes the arguments that it is given."""
    wrong, seen = [], set()
    for place, tree in trees():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            written = re.sub(r"^store\.compose\(.*\)\.", "composite.", ast.unparse(call.func))
            if written in known_calls():
                seen.add(written)
                told = refused(known_calls()[written], call, takes_reference=written.startswith("store."))
                wrong += [f"{place}: {ast.unparse(call)}: {told}"] if told else []
            elif written.startswith(("layerstore.", "store.", "saver.")) and written not in KNOWN_TO_FEW:
                wrong.append(f"{place}: there is no {written}")

    assert wrong == []
    assert seen >= {
        "layerstore.attach",
        "layerstore.resume",
        "checkpoint",
        "LayerstoreCallback",
        "store.gc",
        "saver.save",
    }


def refused(signature: inspect.Signature, call: ast.Call, *, takes_reference: bool) -> str | None:
    """Return why *signature* would not take the arguments of *call*, or the library its policy or reference."""
    named = {str(each.arg): each.value for each in call.keywords}
    given = [each for each in call.args if not isinstance(each, ast.Starred)]
    bind = signature.bind if len(given) == len(call.args) else signature.bind_partial
    policy, reference = named.get("policy"), given[0] if given else None
    try:
        bind(*given, **named)
        if isinstance(policy, ast.Constant):
            policy_named(str(policy.value))
        if takes_reference and "ref" in signature.parameters and isinstance(reference, ast.Constant):
            parse_reference(str(reference.value))
    except (TypeError, LayerstoreError) as exc:
        return str(exc)
    return None


def test_a_wrong_call_is_noticed() -> None:
    """The rule above can fail."""
    for code in ("layerstore.attach(engine, store)", "store.compose('a@b@c')", "store.gc(keeps=1)", "Keep(newest=3)"):
        call = ast.parse(code, mode="eval").body
        assert isinstance(call, ast.Call)
        assert refused(known_calls()[ast.unparse(call.func)], call, takes_reference=True), code


def test_every_setting_is_shown_or_told() -> None:
    """The settings of attach that the guide's code leaves out are those for special needs, and are named here."""
    guide = DOCS / "guides" / "training.md"
    calls = [
        node
        for block in blocks(guide, "python")
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "attach"
    ]
    shown = {str(each.arg) for call in calls for each in call.keywords}

    assert set(inspect.signature(attach).parameters) - shown == {
        *("engine", "optimizer", "store", "layer_pattern", "on_saved", "on_failed", "create", "push", "durable")
    }
    text = guide.read_text()
    for choice in ("sync", "skip", "degrade", "exclude", "resumed.client_state", "saver.status()", "saver.wait()"):
        assert f"`{choice}" in text, choice
    assert "client_state" in Resumed.__dataclass_fields__
