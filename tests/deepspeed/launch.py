"""Start the training programs, once: some train for a minute.

What a launch left is kept under pytest's cache, by a hash of all that decides it: these sources, the versions
of the libraries, and the bytes of the checkpoints it resumes from. So a second test run starts nothing,
and a composite that differs by one bit is trained again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.deepspeed.compare import file_tree
from tests.deepspeed.scenarios import WORLD_SIZE
from tests.environment import REPOSITORY
from tests.forked import nursery
from tests.ranks.launch import cpu_environment, end_of, free_port, search_path

HERE = Path(__file__).parent

LAUNCH_SECONDS_MAX = 800
"""Half a minute is usual; on a fresh machine DeepSpeed first compiles two C++ operators."""

STOP_SECONDS_MAX = 60
"""Torchrun itself gives its ranks 30 seconds before it kills them."""

STALE_SECONDS = 24 * 3600
"""Cached launches that nothing has used for a day are removed when a new one is made."""

SOURCES = (
    "scenarios.py",
    "models.py",
    "client_states.py",
    "poke.py",
    "compare.py",
    "training.py",
    "trainer.py",
)
LIBRARIES = ("torch", "deepspeed", "transformers", "accelerate", "numpy", "safetensors")


class LaunchError(Exception):
    """A training program ended with an error; the message holds the end of its output."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What one launch left behind."""

    root: Path
    """Its ``--out`` folder."""

    def trace(self, name: str) -> list[dict[str, Any]]:
        """Return the entries that scenario *name* wrote, one per step."""
        return [json.loads(line) for line in (self.root / name / "trace.jsonl").read_text().splitlines()]


def cached_launch(
    cache: Path,
    module: str,
    *options: str,
    resume_from: Path | None = None,
    names: Sequence[str] = (),
    world_size: int = WORLD_SIZE,
) -> Launch:
    """
    Return the result of training *module* on *world_size* ranks, from the cache if just this was trained before.

    *options* are more arguments of the program.

    Safe against other test runs: they wait for the one that trains. An interrupted launch leaves no result.

    Raises:
        LaunchError: The program failed or took too long.
    """
    key = launch_key(module, options, resume_from, names, world_size)
    root = cache / f"{module}-{key}"
    finished = cache / f"{module}-{key}.finished"  # written last; its age says when the result was last used
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "launch.lock", timeout=2 * LAUNCH_SECONDS_MAX):
        if not finished.exists():
            remove_stale(cache)
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            arguments = ["--out", str(root), *options]
            arguments += ["--resume-from", str(resume_from)] if resume_from else []
            arguments += [part for name in names for part in ("--scenario", name)]
            log = cache / f"{module}-{key}.log"
            train(f"tests.deepspeed.{module}", arguments, log=log, world_size=world_size)
        finished.touch()
    return Launch(root)


def launch_key(
    module: str, options: Iterable[str], resume_from: Path | None, names: Iterable[str], world_size: int
) -> str:
    """Return a short hash of everything that decides what a launch leaves behind."""
    digest = hashlib.sha256(module.encode())
    own = f"{module}.py"
    for source in SOURCES if own in SOURCES else (*SOURCES, own):
        digest.update((HERE / source).read_bytes())
    if world_size != WORLD_SIZE:
        digest.update(f"{world_size} ranks\n".encode())
    for library in LIBRARIES:
        digest.update(f"{library}={version(library)}\n".encode())
    digest.update("\n".join([*options, *names]).encode())
    if resume_from is not None:
        for path, payload in file_tree(resume_from).items():
            # Nothing that trains reads this report, and it may hold times.
            if not path.endswith("layerstore.json"):
                digest.update(f"{path}\n{hashlib.sha256(payload).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def printed(module: str, arguments: Iterable[object], *, environment: Mapping[str, str] | None = None) -> Any:
    """Run the program *module* and return the JSON on its last line: pytest itself imports no heavy library."""
    command = [sys.executable, "-m", f"tests.deepspeed.{module}", *map(str, arguments)]
    env = cpu_environment() | {"HF_HUB_OFFLINE": "1"} | dict(environment or {})
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def remove_stale(cache: Path) -> None:
    """Remove results in *cache* that were not used for a day."""
    for finished in cache.glob("*.finished"):
        if time.time() - finished.stat().st_mtime > STALE_SECONDS:
            finished.unlink()  # first: what is half removed must not look finished
            shutil.rmtree(finished.with_suffix(""), ignore_errors=True)
            finished.with_suffix(".log").unlink(missing_ok=True)


def train(
    module: str, arguments: Sequence[str], *, log: Path, world_size: int = WORLD_SIZE, on_cuda: bool = False
) -> None:
    """
    Run *module* on *world_size* ranks, with its output in *log*.

    Raises:
        LaunchError: It failed or took too long; no process of it is left.
    """
    if on_cuda:
        _torchrun(module, arguments, log=log, world_size=world_size)
        return
    statuses = nursery().run(module, arguments, log=log, count=world_size, seconds=LAUNCH_SECONDS_MAX)
    if any(statuses):
        raise LaunchError(f"{module} exited with {statuses}; {tail(log)}")


def _torchrun(module: str, arguments: Sequence[str], *, log: Path, world_size: int) -> None:
    """Run *module* on CUDA, where processes that were forked may not be."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", module, *arguments]
    env = {**os.environ, "DS_ACCELERATOR": "cuda", "PATH": search_path()}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        status = process.wait(LAUNCH_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{module} took over {LAUNCH_SECONDS_MAX} s; {tail(log)}") from None
    finally:
        stop(process)
    if status != 0:
        raise LaunchError(f"{module} exited with {status}; {tail(log)}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a torchrun that may still run, and all its ranks."""
    # Asked, not killed: only torchrun knows its ranks, each of which leads a process group of its own.
    process.terminate()
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tail(log: Path) -> str:
    """Return the end of *log*, with its path."""
    return f"the end of {log}:\n{end_of(log, 8000)}"
