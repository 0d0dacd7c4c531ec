"""
How often `bisect` finds a planted fault, and in how many trials: real trainings, judged by their loss.

The truth about a step is asked of every save; that of the layers is what was planted. A fault that training does not
notice by itself, or that needs only one of its two layers, is planted anew with the next number.
"""

import shutil
from collections import Counter
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path
from typing import Any

import layerstore
from layerstore import Store
from layerstore.bisect import Judged
from layerstore.live.demo.training import SEQUENCE, corpus
from tests.bench.bisect_job import CLEAN, HIDDEN, LAYERS, Fault
from tests.bench.ranked import result_of

_SAMPLES = 32
_MARGIN = 0.15
"""Nats above the worst save of the clean run: bad from there on."""


@dataclass(slots=True)
class _Tally:
    """What came out for one kind of faults."""

    planted: int = 0
    steps_found: int = 0
    layers_found: int = 0
    trials: int = 0
    most: int = 0
    bytes_written: int = 0


def run(folder: Path, *, faults: int, saves: int) -> None:
    """Print the table."""
    found = result_of("tests.bench.bisect_job", folder, faults=faults, saves=saves)
    steps, planted = found["steps"], [Fault(**fault) for fault in found["faults"]]
    evaluation = _Evaluation()
    tallies: dict[str, _Tally] = {}
    missed = Counter[str]()
    allowed = ceil(log2(len(steps))) + ceil(log2(LAYERS + 3)) + 2
    with layerstore.open(folder / "data" / "store") as store:
        clean = [evaluation.of_commit(store, f"{CLEAN}@{step}") for step in steps]
        bad_above = max(clean) + _MARGIN
        print(f"{len(steps)} saves, {LAYERS + 3} layers; clean {min(clean):.3f} to {max(clean):.3f} nats", flush=True)
        for fault in planted:
            losses = [evaluation.of_commit(store, f"{fault.run}@{step}") for step in steps]
            are_bad = [loss > bad_above for loss in losses]
            turn = next((step for step, is_bad in zip(steps, are_bad, strict=True) if is_bad), None)
            if turn is None or are_bad != [step >= turn for step in steps]:
                missed["not bad from one save on"] += 1
                continue
            shutil.rmtree(folder / "bisect", ignore_errors=True)
            answer = store.bisect(
                f"{fault.run}@{steps[0]}",
                f"{fault.run}@{steps[-1]}",
                lambda trial: Judged(verdict="bad" if evaluation.of_folder(trial) > bad_above else "good"),
                folder=folder / "bisect",
                dtype="fp32",
            )
            tally = tallies.setdefault(fault.kind, _Tally())
            tally.planted += 1
            tally.steps_found += answer.bad == f"{fault.run}@{turn}"
            tally.layers_found += answer.layers is not None and sorted(answer.layers) == fault.layers
            tally.trials += len(answer.trials)
            tally.most = max(tally.most, len(answer.trials))
            tally.bytes_written += answer.bytes_written
    print(f"{'':<10}{'faults':>8}{'step':>7}{'layers':>8}{'trials':>9}{'most':>6}{'written':>12}")
    for kind, tally in tallies.items():
        count = tally.planted
        print(
            f"{kind:<10}{count:>8}{tally.steps_found:>7}{tally.layers_found:>8}{tally.trials / count:>9.1f}"
            f"{tally.most:>6}{tally.bytes_written / count / 1e6:>9.1f} MB"
        )
    for why, count in missed.items():
        print(f"left out: {count}, {why}")
    print(f"log2 of the saves + log2 of the layers + 2 = {allowed}")


class _Evaluation:
    """The loss of a model over text, always the same."""

    def __init__(self) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(1)
        starts = torch.randint(0, len(text) - SEQUENCE, (_SAMPLES,), generator=generator)
        self._tokens = torch.stack([text[start : start + SEQUENCE] for start in starts.tolist()]).long()
        self._model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=HIDDEN,
                intermediate_size=3 * HIDDEN,
                num_hidden_layers=LAYERS,
                num_attention_heads=4,
                num_key_value_heads=4,
                vocab_size=256,
                max_position_embeddings=SEQUENCE,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
        self._model.eval()  # type: ignore[no-untyped-call]

    def of_commit(self, store: Store, ref: str) -> float:
        """Return the loss of a commit."""
        return self._of(store.compose(ref).state_dict(dtype="fp32"))

    def of_folder(self, folder: Path) -> float:
        """Return the loss of an export."""
        from safetensors.torch import load_file

        return self._of({name: of for file in folder.glob("*.safetensors") for name, of in load_file(file).items()})

    def _of(self, weights: dict[str, Any]) -> float:
        import torch

        self._model.load_state_dict(weights, strict=False)
        with torch.no_grad():
            return float(self._model(input_ids=self._tokens, labels=self._tokens).loss)
