"""
What it takes to make one checkpoint of others: copies, DeepSpeed's own tools, LLMTailor, and layerstore.

Each is a whole command, the interpreter's start included, and then the filesystem of its output is synced.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import layerstore
from tests.bench.generate import generate
from tests.bench.measure import FamilyPeak, wait_for_quiet
from tests.bench.peers.job import folder_of
from tests.bench.peers.systems import RUN, UNIVERSAL, DeepSpeed, Layerstore
from tests.bench.rows import Row, Rows
from tests.bench.shapes import shape_of_size
from tests.ranks.launch import cpu_environment

TO_UNIVERSAL = "ds_to_universal"
LLMTAILOR = "LLMTailor, merge"
COPY = "cp -r"

_MERGE = """
import sys, yaml
from llmtailor.config import MergeConfiguration
from llmtailor.merge import MergeOptions, run_merge
recipe, out, ranks = sys.argv[1:]
options = MergeOptions(num_gpus=int(ranks), copy_tokenizer=False)
run_merge(MergeConfiguration.model_validate(yaml.safe_load(open(recipe))), out_path=out, options=options)
"""
"""What LLMTailor's own examples do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One command that writes a folder."""

    name: str
    command: tuple[str | Path, ...]
    """`OUT` stands for the folder of its output."""
    environment: tuple[tuple[str, str], ...] = ()


OUT = "OUT"


class Failed(Exception):
    """What a command said last when it failed."""


def compose_all(stores: Path, rows: Rows, *, rounds: int, gb: float, is_patient: bool, llmtailor: Path | None) -> None:
    """Let all tools take turns; what ``ds_to_universal`` made last stays beside the checkpoint it is made of."""
    tools = [*_of_training(stores), *(_of_two(stores / "hf", gb, llmtailor) if llmtailor else ())]
    if llmtailor is None:
        reason = "not fetched: see docs/benchmarks.md, then --llmtailor DIR"
        rows.add({"kind": "absent", "system": LLMTAILOR, "reason": reason})
    for number in range(rounds):
        for tool in list(tools)[:: -1 if number % 2 else 1]:
            out = stores / "out"
            if is_patient:
                os.sync()
                wait_for_quiet()
            try:
                rows.add(_run(tool, out) | {"round": number})
            except Failed as failure:
                tools.remove(tool)
                rows.add({"kind": "absent", "system": tool.name, "reason": f"failed: {failure}"})
            if tool.name == TO_UNIVERSAL and number == rounds - 1 and out.exists():
                out.rename(folder_of(DeepSpeed, stores) / UNIVERSAL)
            print(f"  composing, round {number + 1}: {tool.name}", flush=True)
            shutil.rmtree(out, ignore_errors=True)


def _of_training(stores: Path) -> Iterator[Tool]:
    """Yield the tools that work on what the training has saved."""
    saves = folder_of(DeepSpeed, stores)
    for newest in saves.glob("[0-9]*"):  # one is left
        workers = str(os.cpu_count() or 1)
        yield Tool(name=COPY, command=("cp", "-r", "--reflink=never", newest, OUT))
        yield Tool(
            name=TO_UNIVERSAL,
            command=(
                *_python("deepspeed.checkpoint.ds_to_universal", "--input_folder", newest / "state"),
                *("--output_folder", OUT, "--num_extract_workers", workers, "--num_merge_workers", workers),
            ),
        )
        command = _python("deepspeed.utils.zero_to_fp32", "--safe_serialization", newest, OUT)
        yield Tool(name="zero_to_fp32, masters only", command=command)
    store = folder_of(Layerstore, stores) / "store"
    if store.exists():
        yield from _of_store(store)


def _of_store(store: Path, *, suffix: str = "") -> Iterator[Tool]:
    for policy in ("latest", "parity"):
        name = "layerstore compose" + (", parity" if policy == "parity" else "") + suffix
        command = _python("layerstore.cli", "--store", store, "compose", RUN, "--policy", policy, "-o", OUT)
        yield Tool(name=name, command=command)


def _of_two(folder: Path, gb: float, llmtailor: Path) -> Iterator[Tool]:
    """Yield LLMTailor's merge of two checkpoints as it wants them, a copy of one, and the same by layerstore."""
    shape = shape_of_size(gb * 1e9 / 2**30, is_gathered=True)
    older, newer = (
        generate(
            folder / f"checkpoint-{step}",
            layers=shape.layers,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            vocab=shape.vocab,
            layout="hf",
            step=step,
            groups="llmtailor",
        )
        for step in (1, 2)
    )
    recipe = folder / "recipe.yaml"
    recipe.write_text(parity_recipe(older, newer, layers=shape.layers))
    own = llmtailor / ".venv/bin/python"
    yield Tool(name=f"{COPY}, HF layout", command=("cp", "-r", "--reflink=never", newer, OUT))
    yield Tool(
        name=LLMTAILOR,
        command=(own if own.exists() else sys.executable, "-c", _MERGE, recipe, OUT, "2"),
        environment=(("PYTHONPATH", str(llmtailor)),),
    )
    with layerstore.init(folder / "store") as store:
        for source in (older, newer):
            store.ingest(source, run=RUN)
    yield from _of_store(folder / "store", suffix=", HF layout")


def parity_recipe(older: Path, newer: Path, *, layers: int) -> str:
    """Return LLMTailor's recipe for every other block, with the embedding, of *older* and all else of *newer*."""
    ranges = [
        (newer, 0, 0),
        *((older if block % 2 else newer, block, block + 1) for block in range(layers)),
        (newer, layers + 1, layers + 1),
        (older, layers + 2, layers + 2),
    ]
    slices = (f"  - {{sources: [{{model: {model}, layer_range: [{first}, {last}]}}]}}" for model, first, last in ranges)
    return "\n".join(
        [
            "slices:",
            *slices,
            f"pre_weights: [{{name: model.embed_tokens.weight, model: {older}}}]",
            "post_weights:",
            f"  - {{name: model.norm.weight, model: {newer}}}",
            f"  - {{name: lm_head.weight, model: {newer}}}",
            "merge_method: passthrough",
            "dtype: bfloat16",
            "",
        ]
    )


def _run(tool: Tool, out: Path) -> Row:
    """Run *tool* once; return its row."""
    words = [out if word == OUT else word for word in tool.command]
    started = perf_counter()
    log = out.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, env=cpu_environment() | dict(tool.environment)
        )
        with FamilyPeak(process.pid) as peak:
            status = process.wait()
    if status:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise Failed(lines[-1].strip() if lines else f"exit status {status}")
    subprocess.run(["sync", "--file-system", out], check=True)
    seconds = perf_counter() - started
    return {"kind": "compose", "tool": tool.name, "seconds": seconds, "memory": peak.size_bytes, "bytes": _bytes(out)}


def _python(module: str, *arguments: str | Path) -> tuple[str | Path, ...]:
    return (sys.executable, "-m", module, *arguments)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
