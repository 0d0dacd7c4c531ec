"""
What the mean of ten saves takes, beside reading their masters once, and beside mergekit's linear merge where that is
installed: of the same saves, exported in fp32 before.

Reading is timed twice: from the disk, and from the page cache. Equal means: what torch makes of it in fp64, rounded.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import layerstore
from layerstore import Store
from layerstore.model import Kind
from tests.bench.generate import generate_size
from tests.bench.measure import Contender, alternate, median_seconds, peak_bytes_of
from tests.bench.shapes import shape_of_size

_RUN = "bench"
_READ_BYTES = 1 << 20
_MERGEKIT = "mergekit, linear, of exports in fp32"


def run(folder: Path, *, gb: float, saves: int, rounds: int) -> None:
    """Print the table."""
    store = layerstore.init(folder / "store")
    for step in range(1, saves + 1):
        source = generate_size(folder / "run" / f"checkpoint-{step}", gb, layout="hf", step=step)
        (source / "config.json").write_text(json.dumps(llama_config(gb)))
        store.ingest(source, run=_RUN)
        shutil.rmtree(source)
    masters = _masters(store, range(1, saves + 1))
    size_bytes = sum(path.stat().st_size for path in masters)
    print(f"{saves} saves of {gb:g} GiB, {size_bytes / 1e9:.2f} GB of masters; export in bf16", flush=True)
    out = folder / "out"
    mean = [*_compose(store), "--mean", f"last:{saves}", "--dtype", "bf16", "-o", str(out)]
    for state, evict in (("from the disk", True), ("from the page cache", False)):

        def prepare(*, evict: bool = evict) -> None:
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            for path in masters if evict else ():
                _evict(path)

        contenders = [
            Contender("reading the masters once", partial(_read, masters), prepare),
            Contender("compose --mean", partial(_call, mean), prepare),
        ]
        if find_spec("mergekit") is not None:
            contenders.append(Contender(_MERGEKIT, _mergekit(store, folder, out, saves), prepare))
        timings = alternate(contenders, rounds=rounds, tell=lambda line: print(f"  {line}", flush=True))
        medians = {name: median_seconds(runs) for name, runs in timings.items()}
        base = medians["reading the masters once"]
        for name, seconds in medians.items():
            print(f"{state}: {name:<40}{seconds:>7.2f} s{seconds / base:>7.2f} ×", flush=True)
    shutil.rmtree(out, ignore_errors=True)
    print(f"memory of compose --mean: {peak_bytes_of(*mean[1:]) / 1e6:.0f} MB")
    print(f"equal to torch's mean in fp64, rounded: {_is_equal(store, saves)}")


def llama_config(gb: float, *, is_gathered: bool = True) -> dict[str, Any]:
    """Return a config of Transformers for what is generated: mergekit wants one."""
    shape = shape_of_size(gb, is_gathered=is_gathered)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _compose(store: Store) -> list[str]:
    return [sys.executable, "-m", "layerstore.cli", "compose", _RUN, "--format", "hf", "--store", str(store.path)]


def _call(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _masters(store: Store, steps: range) -> list[Path]:
    repo = store.repo
    entries = {entry.version for step in steps for entry in store.compose(f"{_RUN}@{step}").composition.layers}
    stored = (part for version in entries for part in repo.version(version).objects if part.kind is Kind.MASTER)
    return [path for path in (repo.objects.find(part.ref) for part in stored) if path is not None]


def _read(paths: list[Path]) -> None:
    buffer = bytearray(_READ_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _evict(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _mergekit(store: Store, folder: Path, out: Path, saves: int) -> Callable[[], None]:
    """Return the call of mergekit, once every save is exported."""
    models = []
    for step in range(1, saves + 1):
        export = folder / "exports" / str(step)
        if not export.exists():
            store.compose(f"{_RUN}@{step}").export(export, dtype="fp32")
        models.append(f"  - model: {export}\n    parameters: {{weight: 1.0}}")
    recipe = folder / "linear.yaml"
    recipe.write_text("models:\n" + "\n".join(models) + "\nmerge_method: linear\ndtype: float32\n")
    return partial(_call, [str(Path(sys.executable).with_name("mergekit-yaml")), str(recipe), str(out)])


def _is_equal(store: Store, saves: int) -> bool:
    """Whether the mean of every parameter is torch's, to the last bit; one parameter at a time."""
    import torch

    tensors = [store.compose(f"{_RUN}@{step}").tensors("master", verify=False) for step in range(1, saves + 1)]
    found = store.average(f"last:{saves}", ref=_RUN).state_dict(dtype="fp32")
    return all(
        torch.equal(
            found[name], torch.stack([torch.from_numpy(of[name].copy()).double() for of in tensors]).mean(0).float()
        )
        for name in tensors[0]
    )
