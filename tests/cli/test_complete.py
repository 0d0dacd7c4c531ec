"""A shell that completes a line is told what may come next, at once and without a word of complaint."""

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import layerstore
from layerstore.cli.app import command_line
from layerstore.cli.commands import COMMANDS
from layerstore.cli.complete import Shell, completed
from layerstore.tree import Tree
from tests.cli.conftest import Run
from tests.environment import processor_seconds
from tests.generated import generate

COMPLETION_SECONDS_MAX = 0.2

Complete = Callable[[str], list[str]]


def _asking(line: str) -> dict[str, str]:
    """Return how typer's script for bash asks what the last word of *line* may become."""
    words = len(shlex.split(line))
    return {"COMP_WORDS": line, "COMP_CWORD": str(words if line.endswith(" ") else words - 1)}


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: Path) -> Complete:
    """Return what completes a line where the environment names the store."""
    monkeypatch.setenv("LAYERSTORE_STORE", str(store))

    def answer(line: str) -> list[str]:
        for name, value in _asking(line).items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        assert completed(command_line(), "complete_bash") == 0
        return capsys.readouterr().out.split()

    return answer


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("layerstore ", list(COMMANDS)),
        ("layerstore re", ["report", "repair", "reindex", "remote"]),
        ("layerstore --js", ["--json"]),
        ("layerstore --store elsewhere lo", ["log"]),
        ("layerstore --show-completion ", ["bash", "zsh", "fish"]),
        ("layerstore log ", ["sft"]),
        ("layerstore log sft ", []),
        ("layerstore log --gr", ["--graph"]),
        ("layerstore log --qu", ["--quiet"]),
        ("layerstore log --limit ", []),
        ("layerstore log --limit 3 s", ["sft"]),
        ("layerstore show ", ["best", "sft"]),
        ("layerstore show s", ["sft", "sft@4", "sft@2"]),
        ("layerstore show sft@", ["sft@4", "sft@2"]),
        ("layerstore show 'sft@2'", ["sft@2"]),
        ("layerstore show nope@", []),
        ("layerstore diff best s", ["sft", "sft@4", "sft@2"]),
        ("layerstore diff best sft model.n", ["model.norm"]),
        ("layerstore gc sft s", ["sft"]),
        ("layerstore pin new b", ["best"]),
        ("layerstore pin --delete ", ["best"]),
        ("layerstore compose --policy ", ["drift", "exact", "filter", "full", "latest", "parity"]),
        ("layerstore compose --format ", ["shards", "zero3", "hf", "dcp", "universal", "delta"]),
        ("layerstore compose --run ", ["sft"]),
        ("layerstore compose --run sft --step ", ["4", "2"]),
        ("layerstore compose --step 4", ["4"]),
        ("layerstore compose -o ", []),
        ("layerstore ingest --policy ", ["drift", "filter", "full", "latest", "parity"]),
        ("layerstore drop ", ["sft", "sft@4", "sft@2"]),
        ("layerstore bisect s", ["sft", "sft@4", "sft@2"]),
        ("layerstore bisect sft@2 sft@", ["sft@4", "sft@2"]),
        ("layerstore undrop ", []),
        ("layerstore push ", ["best", "sft"]),
        ("layerstore verify --remote ", []),
        ("layerstore ls sft model.n", ["model.norm"]),
        ("layerstore ingest ", []),
        ("layerstore estimate s", []),
        ("layerstore estimate sft@", ["sft@4", "sft@2"]),
    ],
)
def test_what_may_come_next(complete: Complete, line: str, expected: list[str]) -> None:
    """Commands, options, choices, and what the store holds; nothing where the shell's own files are right."""
    assert expected == complete(line)


def test_metrics_of_the_newest_commits_are_offered(
    complete: Complete, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``log`` and by what names a best commit; in a store without any, nothing."""
    before = complete("layerstore log --metric ")
    with layerstore.open(store) as opened:
        measured: dict[Tree, Tree] = {"metrics": {"loss": 2.0, "eval_loss": 2.5, "a b": 1.0}}
        opened.ingest(generate(tmp_path / "measured", step=6, client_state=measured), run="dpo")

    assert before == []
    assert complete("layerstore log --metric ") == ["eval_loss", "loss"]
    assert complete("layerstore gc --keep-best ev") == ["eval_loss"]


def test_undrop_offers_what_is_in_the_trash(complete: Complete, store: Path) -> None:
    """And nothing that is visible: that cannot be brought back."""
    with layerstore.open(store) as opened:
        opened.drop("sft@2")

    assert complete("layerstore undrop ") == ["sft", "sft@2"]
    assert complete("layerstore undrop sft@") == ["sft@2"]
    assert complete("layerstore show sft@") == ["sft@4"]


def test_remotes_are_offered_by_name(complete: Complete, store: Path) -> None:
    """To what takes one: as a push's first word only, and to ``remote remove``, but not to ``remote add``."""
    with layerstore.open(store) as opened:
        opened.remotes.add("origin", "s3://bucket/prefix")
        opened.remotes.add("other", "s3://bucket/other")

    for line in ("verify --remote ", "gc --remote ", "gc --pushed-to ", "repair --remote ", "remote remove "):
        assert complete(f"layerstore {line}") == ["origin", "other"]
    assert complete("layerstore push ") == ["origin", "other", "best", "sft"]
    assert complete("layerstore pull or") == ["origin"]
    assert complete("layerstore push origin o") == []
    assert complete("layerstore push origin sft@") == ["sft@4", "sft@2"]
    assert complete("layerstore remote add ") == []
    (store / "remotes.json").write_text("[")
    assert complete("layerstore push o") == []


def test_layers_are_those_of_the_commit_on_the_line(complete: Complete, store: Path) -> None:
    """With the command's other words around it."""
    with layerstore.open(store) as opened:
        layers = list(opened.compose("sft@2").layers)

    assert complete("layerstore ls sft@2 ") == layers
    assert complete("layerstore ls --json best model.layers.") == [name for name in layers if ".layers." in name]


def test_a_name_that_a_shell_would_act_upon_is_not_offered(complete: Complete, store: Path) -> None:
    """It would be another word, or a command, once it stands on the line."""
    with layerstore.open(store) as opened:
        for name in ("a b", "a;b", "a$b", "größe", "a-1.b_2"):
            opened.pin(name, "sft")

    assert complete("layerstore pin --delete ") == ["a-1.b_2", "best", "größe"]


def test_with_several_runs_their_steps_wait_for_the_run(complete: Complete, store: Path, checkpoints: Path) -> None:
    """A step without its run says nothing, and a list of all steps of all runs too much."""
    with layerstore.open(store) as opened:
        opened.ingest(checkpoints / "global_step2", run="dpo")

    assert complete("layerstore show ") == ["best", "dpo", "sft"]
    assert complete("layerstore show d") == ["dpo", "dpo@2"]
    assert complete("layerstore compose --step ") == []
    assert complete("layerstore compose --run sft --step ") == ["4", "2"]


def test_the_store_on_the_line_counts(
    complete: Complete, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the command and behind it; with ~ for the home folder."""
    monkeypatch.delenv("LAYERSTORE_STORE")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert complete(f"layerstore --store {store} log ") == ["sft"]
    assert complete(f"layerstore log --store={store} ") == ["sft"]
    assert complete("layerstore log --store ~/store ") == ["sft"]


# -- as shells do it -----------------------------------------------------------------------------------------------


def _asked(line: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAYERSTORE_")}
    return subprocess.run(
        [sys.executable, "-m", "layerstore.cli"],
        env={**environment, "_LAYERSTORE_COMPLETE": "complete_bash", **_asking(line), **more},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("store", ["nowhere", "/dev/null", "a\nb"])
def test_nothing_is_said_where_there_is_no_store(store: str, tmp_path: Path) -> None:
    """No words, no store made, no error: the command itself will say what is wrong."""
    before = sorted(tmp_path.iterdir())
    asked = _asked("layerstore show ", LAYERSTORE_STORE=store)

    assert (asked.stdout.strip(), asked.stderr) == ("", "")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("instruction", ["complete_tcsh", "nonsense", "source"])
def test_a_shell_that_asks_wrongly_is_told_nothing(instruction: str) -> None:
    """It asks while somebody types."""
    asked = _asked("layerstore show ", _LAYERSTORE_COMPLETE=instruction)

    assert (asked.returncode, asked.stdout, asked.stderr) == (1, "", "")


def test_a_store_is_not_touched(store: Path) -> None:
    """No index is made, no record read: a damaged one is offered like any other."""
    with layerstore.open(store) as opened:
        opened.log()
    shutil.rmtree(store / "manifest")
    next((store / "commits" / "sft").glob("4.*")).write_bytes(b"")

    assert _asked("layerstore show sft@", LAYERSTORE_STORE=str(store)).stdout == "sft@4\nsft@2\n"
    assert not (store / "manifest").exists()


def test_no_library_is_loaded_for_it(store: Path) -> None:
    """Neither what opens stores nor what draws tables: that is what makes it fast."""
    heavy = ["torch", "numpy", "lmdb", "msgpack", "xxhash", "rich", "pydantic", "layerstore.store", "layerstore.model"]
    code = (
        "import sys; from layerstore.cli.app import command_line; from layerstore.cli.complete import answer_shell; "
        "answer_shell(command_line()); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    environment = os.environ | _asking("layerstore show sft@") | {"_LAYERSTORE_COMPLETE": "complete_bash"}

    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"LAYERSTORE_STORE": str(store)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == "sft@4\nsft@2\n[]\n"


def test_completing_takes_less_than_200_ms(store: Path) -> None:
    """One of many, since other work on the machine only ever adds."""
    start = partial(_asked, "layerstore show sft@", LAYERSTORE_STORE=str(store))

    assert start().stdout
    assert any(processor_seconds(start) < COMPLETION_SECONDS_MAX for _ in range(25))


@pytest.mark.parametrize("shell", Shell)
def test_each_shell_is_given_what_it_has_to_be_told(run: Run, shell: Shell) -> None:
    """The documented line prints it; where the shell is there, it finds no fault with it."""
    script = run("--show-completion", shell.value)
    program = shutil.which(shell.value)

    assert script.code == 0
    assert "_LAYERSTORE_COMPLETE" in script.out
    assert run("--show-completion", "tcsh").code == 2
    if program is not None:
        subprocess.run([program, "-n", "/dev/stdin"], input=script.out.encode(), check=True)


# Keys, and the words that the program is started with once they were typed. A shell may strike the / of a folder.
TYPED = {
    "layerstore verif\t": ["verify"],
    "layerstore show be\t": ["show", "best"],
    "layerstore show sft@4\t": ["show", "sft@4"],
    "layerstore diff best sft@2\t--sta\t": ["diff", "best", "sft@2", "--stat"],
    "layerstore compose --policy par\t": ["compose", "--policy", "parity"],
    "layerstore ingest sub/fo\t": ["ingest", "sub/folder"],
    "layerstore ls sft@4 model.no\t": ["ls", "sft@4", "model.norm"],
    "layerstore undrop sf\t@\t": ["undrop", "sft@9"],
    "layerstore push or\t": ["push", "origin"],
    "layerstore verify --remote or\t": ["verify", "--remote", "origin"],
    "layerstore ingest --policy pa\t": ["ingest", "--policy", "parity"],
}
# How each is started without a user's own settings, and told what the documentation says it has to be told.
STARTED = {
    Shell.BASH: (["--norc", "--noprofile", "-i"], 'eval "$(layerstore --show-completion bash)"'),
    Shell.ZSH: (
        ["-f", "-i"],
        "layerstore --show-completion zsh > _layerstore; fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D",
    ),
    Shell.FISH: (
        ["-i"],
        "mkdir -p config/fish/completions; layerstore --show-completion fish > config/fish/completions/layerstore.fish",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("shell", Shell)
def test_in_a_real_shell(store: Path, tmp_path: Path, shell: Shell) -> None:
    """Keys on a terminal become the words that the program is started with."""
    if shutil.which(shell.value) is None:
        pytest.skip(f"there is no {shell.value} (Debian: {shell.value})")
    (tmp_path / "sub" / "folder").mkdir(parents=True)
    options, told_once = STARTED[shell]
    with layerstore.open(store) as opened:
        opened.remotes.add("origin", "s3://bucket/prefix")
        opened.ingest(generate(tmp_path / "dropped", step=9), run="sft")
        opened.drop("sft@9")
    environment = {
        **os.environ,
        "PATH": f"{_noting(tmp_path).parent}:{os.environ['PATH']}",
        "LAYERSTORE_STORE": str(store),
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "PS1": "$ ",
        "TERM": "dumb" if shell is Shell.BASH else "xterm",
        "INPUTRC": "/dev/null",
    }
    process, terminal = pty.fork()
    if process == 0:  # pragma: no cover
        os.chdir(tmp_path)
        os.execvpe(shell.value, [shell.value, *options], environment)
    got = tmp_path / "got"
    try:
        _type(terminal, f"{told_once}; touch got", until=got)
        for keys, words in TYPED.items():
            got.unlink()
            _type(terminal, keys, until=got)

            assert words == [word.rstrip("/") for word in got.read_text().splitlines()]
    finally:
        os.write(terminal, b"\nexit\n")
        os.close(terminal)
        os.waitpid(process, 0)


def _noting(folder: Path) -> Path:
    """Return a program that completes as ours does, and else notes the words that it is given."""
    program = folder / "bin" / "layerstore"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/bash\n"
        "if [[ -n $_LAYERSTORE_COMPLETE || $1 == --show-completion ]]; then\n"
        f'exec {sys.executable} -m layerstore.cli "$@"\n'
        f'fi\nprintf "%s\\n" "$@" > {folder}/got.partial; mv {folder}/got.partial {folder}/got\n'
    )
    program.chmod(0o755)
    return program


def _type(terminal: int, keys: str, *, until: Path) -> None:
    """Type *keys* and a newline, and read what the shell says, which it waits for, until a file is there."""
    os.write(terminal, keys.encode() + b"\n")
    said, deadline = b"", time.monotonic() + 60
    while not until.exists():
        if select.select([terminal], [], [], 0.02)[0]:
            said += os.read(terminal, 1 << 16)
        assert time.monotonic() < deadline, f"{keys!r} came to nothing: {said[-500:]!r}"
