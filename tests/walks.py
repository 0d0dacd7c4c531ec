"""
Walk through the house: the files, rooms and functions that a warm verb enters on the main thread.

Each verb runs twice in one process, and the second call is counted: what is imported, opened or filled once is not
part of what somebody has to read to follow the verb.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests import operators
from tests.ranks.launch import cpu_environment, free_port

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What one call of a verb entered."""

    files: int
    rooms: int
    functions: int


def walk(verb: Callable[[], object]) -> Walk:
    """Call *verb* and return what it entered on this thread."""
    codes: set[CodeType] = set()

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(enter)
    try:
        verb()
    finally:
        sys.setprofile(None)
    places = {code: Path(code.co_filename) for code in codes}
    ours = {code: path.relative_to(ROOT) for code, path in places.items() if _is_product(path)}
    files = set(ours.values())
    functions = {(path, code.co_qualname) for code, path in ours.items() if not code.co_name.startswith("<")}
    return Walk(files=len(files), rooms=len({path.parent for path in files}), functions=len(functions))


def _is_product(path: Path) -> bool:
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in {"layerstore", "cli", "migrations"}


def walks() -> dict[str, Walk]:
    """Return the walk of every verb, by its name."""
    with tempfile.TemporaryDirectory() as folder:
        return {name: walk(verb) for name, verb in _warm_verbs(Path(folder))}


def _warm_verbs(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    import layerstore
    from tests.bench.generate import generate

    with layerstore.init(folder / "store") as store:

        def ingest(number: int) -> None:
            store.ingest(sources[number], run="run")

        def compose(number: int) -> None:
            store.compose("run", policy="parity").write(folder / f"out-{number}")

        def push(number: int) -> None:
            store.push((folder / "bucket").as_uri(), refs=[f"run@{number}"])

        sources = [generate(folder / f"source-{step}", step=step, seed=step) for step in range(1, 5)]
        for number in range(3):
            ingest(number)
        yield "ingest", partial(ingest, 3)
        compose(0)
        yield "compose and write", partial(compose, 1)
        (folder / "bucket").mkdir()
        push(3)
        yield "push", partial(push, 4)
        store.gc(layerstore.Keep(last=3), grace_seconds=0)
        yield "gc", partial(store.gc, layerstore.Keep(last=1), grace_seconds=0)
    with _engine() as engine, layerstore.attach(engine, folder / "store", run="live") as saver:
        engine.global_steps = 1
        saver.save()
        saver.wait()
        engine.global_steps = 2
        yield "live save", saver.save


@contextmanager
def _engine() -> Iterator[Any]:
    """Make an engine of one CPU rank; what DeepSpeed prints goes to stderr."""
    os.environ |= cpu_environment() | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    claimed = operators.claim()
    with redirect_stdout(sys.stderr):
        import deepspeed

        from tests.live.tiny import build, step

        deepspeed.init_distributed(dist_backend="gloo")
        engine = build()
        step(engine)
        yield engine
    if claimed is not None:
        claimed.release()


def table(walked: dict[str, Walk]) -> str:
    """Return *walked* as text."""
    lines = [f"{'walk':20} {'files':>6} {'rooms':>6} {'functions':>10}"]
    lines += [f"{name:20} {each.files:>6} {each.rooms:>6} {each.functions:>10}" for name, each in walked.items()]
    return "\n".join(lines)
