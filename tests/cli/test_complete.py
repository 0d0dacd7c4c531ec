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

from layerstore.cli.app import command_line
from layerstore.cli.commands import COMMANDS
from layerstore.cli.complete import Shell, completed
from tests.cli.conftest import Run
from tests.environment import processor_seconds

COMPLETION_SECONDS_MAX = 0.2

Complete = Callable[[str], list[str]]


def _asking(line: str) -> dict[str, str]:
    """Return how typer's script for bash asks what the last word of *line* may become."""
    words = len(shlex.split(line))
    return {"COMP_WORDS": line, "COMP_CWORD": str(words if line.endswith(" ") else words - 1)}


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Complete:
    """Return what completes a line."""

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
        ("layerstore re", ["report", "repair", "remote", "reindex"]),
        ("layerstore --js", ["--json"]),
        ("layerstore --store elsewhere lo", ["log"]),
        ("layerstore --show-completion ", ["bash", "zsh", "fish"]),
        ("layerstore log ", []),
        ("layerstore log --gr", ["--graph"]),
        ("layerstore log --qu", ["--quiet"]),
        ("layerstore compose --format ", ["shards", "zero3", "hf", "dcp", "universal", "delta"]),
        ("layerstore compose -o ", []),
        ("layerstore ingest ", []),
    ],
)
def test_what_may_come_next(complete: Complete, line: str, expected: list[str]) -> None:
    """Commands, options and choices; nothing where the shell's own files are right."""
    assert expected == complete(line)


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


@pytest.mark.parametrize("instruction", ["complete_tcsh", "nonsense", "source"])
def test_a_shell_that_asks_wrongly_is_told_nothing(instruction: str) -> None:
    """It asks while somebody types."""
    asked = _asked("layerstore show ", _LAYERSTORE_COMPLETE=instruction)

    assert (asked.returncode, asked.stdout, asked.stderr) == (1, "", "")


def test_no_library_is_loaded_for_it() -> None:
    """Neither what opens stores nor what draws tables: that is what makes it fast."""
    heavy = ["torch", "numpy", "lmdb", "msgpack", "xxhash", "rich", "pydantic", "layerstore.store", "layerstore.model"]
    code = (
        "import sys; from layerstore.cli.app import command_line; from layerstore.cli.complete import answer_shell; "
        "answer_shell(command_line()); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    environment = os.environ | _asking("layerstore compose --format h") | {"_LAYERSTORE_COMPLETE": "complete_bash"}

    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == "hf\n[]\n"


def test_completing_takes_less_than_200_ms() -> None:
    """One of many, since other work on the machine only ever adds."""
    start = partial(_asked, "layerstore compose --format h")

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
    "layerstore compose --format hf\t": ["compose", "--format", "hf"],
    "layerstore diff best sft@2 --sta\t": ["diff", "best", "sft@2", "--stat"],
    "layerstore ingest sub/fo\t": ["ingest", "sub/folder"],
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
def test_in_a_real_shell(tmp_path: Path, shell: Shell) -> None:
    """Keys on a terminal become the words that the program is started with."""
    if shutil.which(shell.value) is None:
        pytest.skip(f"there is no {shell.value} (Debian: {shell.value})")
    (tmp_path / "sub" / "folder").mkdir(parents=True)
    options, told_once = STARTED[shell]
    environment = {
        **os.environ,
        "PATH": f"{_noting(tmp_path).parent}:{os.environ['PATH']}",
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
