"""
What a delta between two saves of a training takes, at the learning rates of reinforcement learning.

A Llama is trained by torch's AdamW on random text: its first save is ingested, the later ones come back from
distributed checkpoints. Each delta is put onto an export of the first, which must then be that of the later one.
"""

import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import layerstore
from layerstore import Store
from layerstore.delta import ENCODINGS, DeltaWritten
from tests.bench.averages import llama_config
from tests.bench.generate import generate_size

RATES = (1e-6, 3e-6, 1e-5)
STEPS = (1, 10)

_RUN = "bench"
_WARM_STEPS = 20
"""Until Adam's moments are those of a training that goes on."""
_TOKENS = (4, 128)


def run(folder: Path, *, gb: float) -> None:
    """Print the table."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    source = generate_size(folder / "run" / "checkpoint-1", gb, layout="raw", step=1)
    with layerstore.init(folder / "store") as store:
        store.ingest(source, run=_RUN)
        store.compose(f"{_RUN}@1").export(folder / "first", format="dcp")
        head = f"{'rate':>7}{'steps':>6}{'changed':>10}{'encoding':>11}{'size':>11}"
        print(f"{head}{'of whole':>10}{'write':>9}{'apply':>9}", flush=True)
        for rate in RATES:
            _saves(store, folder, gb, rate)
            for steps in STEPS:
                _deltas(store, folder, rate, steps)


def _deltas(store: Store, folder: Path, rate: float, steps: int) -> None:
    """Print the line of each encoding, from the save before *steps* to the one after."""
    base, target = (f"rate-{rate:g}@{step}" for step in (_WARM_STEPS, _WARM_STEPS + steps))
    for name, ref in (("base", base), ("target", target)):
        shutil.rmtree(folder / name, ignore_errors=True)
        store.compose(ref).export(folder / name, dtype="bf16")
    for encoding in ENCODINGS:
        shutil.rmtree(folder / "delta", ignore_errors=True)
        shutil.copytree(folder / "base", folder / "put on", dirs_exist_ok=True)
        written = store.compose(target).export(
            folder / "delta", since=base, dtype="bf16", encoding=encoding, format="delta"
        )
        assert isinstance(written, DeltaWritten)
        started = time.monotonic()
        layerstore.apply(folder / "delta", folder / "put on")
        seconds = time.monotonic() - started
        weights = ["put on/model.safetensors", "target/model.safetensors"]
        assert len({(folder / path).read_bytes() for path in weights}) == 1, "a delta makes the later export"
        share = written.bytes_written / written.bytes_whole
        print(
            f"{rate:>7g}{steps:>6}{written.elements_changed / written.elements:>10.2%}{encoding:>11}"
            f"{written.bytes_written / 1e6:>8.2f} MB{share:>10.2%}{written.seconds:>8.2f}s{seconds:>8.2f}s",
            flush=True,
        )


def _saves(store: Store, folder: Path, gb: float, rate: float) -> None:
    """Train with *rate*, and store the save before the first of `STEPS` and those after each."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**llama_config(gb, is_gathered=False))
    model: Any = LlamaForCausalLM(config)
    named = list(model.named_parameters())
    norms = [parameter for name, parameter in named if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": [of for _, of in named if of.ndim > 1], "weight_decay": 0.1},
            {"params": norms, "weight_decay": 0.0},
        ]
    )
    model_state, optimizer_state = get_state_dict(model, optimizer)
    load({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder / "first", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.state.clear()  # made-up moments are not training's
    for step in range(1, _WARM_STEPS + max(STEPS) + 1):
        tokens = torch.randint(0, config.vocab_size, _TOKENS, generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in {_WARM_STEPS, *(_WARM_STEPS + steps for steps in STEPS)}:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            save({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder / "saved", no_dist=True)
            store.ingest(folder / "saved", onto=f"{_RUN}@1", run=f"rate-{rate:g}")
            shutil.rmtree(folder / "saved")
