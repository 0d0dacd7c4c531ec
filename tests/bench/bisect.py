"""
How often `bisect` finds a planted fault, and in how many trials: real trainings, judged by their loss.

The truth about a step is asked of every save; that of the layers is what was planted. Left out are faults that are not
bad from one save on, and pairs that are no worse than one of the two layers.
"""

import shutil
from collections import Counter
from dataclasses import dataclass
from functools import partial
from math import ceil, log2
from pathlib import Path
from typing import Any

import layerstore
from layerstore import Store
from layerstore.bisect import Judged
from tests.bench.bisect_job import CLEAN, HIDDEN, LAYERS, Fault
from tests.bench.ranked import result_of
from tests.ranks.llama import SEQUENCE, corpus

_SAMPLES = 32
_MARGIN = 0.15
"""Nats above the worst save of the clean run: bad from there on."""
_PAIR_MARGIN = 0.02
"""Nats by which two layers together have to be worse than each of them."""


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
    found = result_of("tests.bench.bisect_job", folder, ranks=1, faults=faults, saves=saves)
    steps, planted = found["steps"], [Fault(**fault) for fault in found["faults"]]
    evaluation = _Evaluation()
    tallies: dict[str, _Tally] = {}
    missed = Counter[str]()
    allowed = ceil(log2(len(steps))) + ceil(log2(LAYERS + 3)) + 2
    with layerstore.open(folder / "data" / "store") as store:
        clean = [evaluation.of_commit(store, f"{CLEAN}@{step}") for step in steps]
        print(f"{len(steps)} saves, {LAYERS + 3} layers; clean {min(clean):.3f} to {max(clean):.3f} nats", flush=True)
        for fault in planted:
            losses = [evaluation.of_commit(store, f"{fault.run}@{step}") for step in steps]
            bad_above = max(clean) + _MARGIN
            if fault.kind == "pair":
                less, more = evaluation.of_pair(store, fault, before=steps[steps.index(fault.step) - 1])
                if more < less + _PAIR_MARGIN:
                    missed["one of two layers is as bad"] += 1
                    continue
                bad_above = (less + more) / 2
            are_bad = [loss > bad_above for loss in losses]
            turn = next((step for step, is_bad in zip(steps, are_bad, strict=True) if is_bad), None)
            if turn is None or are_bad != [step >= turn for step in steps]:
                missed["not bad from one save on"] += 1
                continue
            shutil.rmtree(folder / "bisect", ignore_errors=True)
            answer = store.bisect(
                f"{fault.run}@{steps[0]}",
                f"{fault.run}@{steps[-1]}",
                partial(evaluation.judged, bad_above=bad_above),
                name=str(bad_above),
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
            is_found = answer.bad == f"{fault.run}@{turn}" and sorted(answer.layers or ()) == fault.layers
            print(
                f"{fault.run} {fault.kind}: {'found' if is_found else 'missed'}, {len(answer.trials)} trials",
                flush=True,
            )
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

    def of_pair(self, store: Store, fault: Fault, *, before: int) -> tuple[float, float]:
        """Return the loss of the worse of the two layers in the save *before* them, and that of both."""
        good, bad = (store.compose(f"{fault.run}@{step}").state_dict(dtype="fp32") for step in (before, fault.step))

        def mixed(*layers: str) -> float:
            places = tuple(f"{layer}." for layer in layers)
            return self._of({name: (bad if name.startswith(places) else good)[name] for name in good})

        return max(mixed(layer) for layer in fault.layers), mixed(*fault.layers)

    def judged(self, folder: Path, *, bad_above: float) -> Judged:
        """Judge a trial."""
        return Judged(verdict="bad" if self.of_folder(folder) > bad_above else "good")

    def of_folder(self, folder: Path) -> float:
        """Return the loss of an export."""
        from safetensors.torch import load_file

        return self._of({name: of for file in folder.glob("*.safetensors") for name, of in load_file(file).items()})

    def _of(self, weights: dict[str, Any]) -> float:
        import torch

        self._model.load_state_dict(weights, strict=False)
        with torch.no_grad():
            return float(self._model(input_ids=self._tokens, labels=self._tokens).loss)
