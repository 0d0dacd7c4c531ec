"""
The model, an engine of it under ZeRO-3, and what it is good for; as a program, the base that all tasks begin from.

    python -m torch.distributed.run --nproc-per-node 1 -m tests.bench.quality.training --size real --work DIR …

Everything runs on one rank with one thread, so that the same seeds give the same bits; two jobs share two cores better
than two ranks do. What a mixture does to a model does not depend on how its state is cut into shards.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import layerstore
from tests.bench.quality.data import ANSWERS, IGNORED, Data, data_of, digest_of
from tests.bench.quality.settings import SIZES, Settings
from tests.bench.ranked import begin, leave
from tests.bench.rows import Rows
from tests.ranks.launch import tell

if TYPE_CHECKING:
    import torch

DATA = "data.npz"
BASE = "base.pt"
RUN = "base"
_EVALUATED_AT_ONCE = 64

Engine = Any  # deepspeed ships no types


def main() -> None:
    """Train the base, from its newest save if it was interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    options = parser.parse_args()
    begin()
    train_base(SIZES[options.size], work=options.work, rows=Rows(options.rows))
    leave()


def train_base(settings: Settings, *, work: Path, rows: Rows) -> None:
    """Train the base and write its weights to *work*."""
    import torch

    started = time.monotonic()
    data = data_of(work / DATA, "base", sequence=settings.sequence)
    trainer = Trainer(settings, data, rate=settings.base_rate, steps=settings.base_steps, warmup=settings.base_warmup)
    store = work / "base-store"
    if not store.exists():
        layerstore.init(store).close()
    layerstore.resume(trainer.engine, store, run=RUN)
    with layerstore.attach(trainer.engine, store, run=RUN, mode="sync") as saver:
        while trainer.step_number < settings.base_steps:
            trainer.step(seed=trainer.step_number)
            if trainer.step_number % settings.base_save_every == 0:
                saver.save()
                seconds = time.monotonic() - started
                tell("done", what=f"base, step {trainer.step_number}", loss=trainer.loss(), seconds=seconds)
    loss = trainer.loss()
    torch.save(trainer.weights(), work / f"{BASE}.part")
    (work / f"{BASE}.part").rename(work / BASE)
    rows.add(
        {
            "kind": "base",
            "made_by": settings.digest(digest_of(work / DATA)),
            "parameters": trainer.parameters,
            "steps": settings.base_steps,
            "loss": loss,
            "accuracy": trainer.accuracy(),
            "seconds": round(time.monotonic() - started, 1),
        }
    )


class Trainer:
    """An engine, what it is trained on, and what it is evaluated by."""

    def __init__(
        self, settings: Settings, data: Data, *, rate: float, steps: int, warmup: int, weights: Path | None = None
    ) -> None:
        self._settings, self._data = settings, data
        self._held_out, self._questions = data.held_out(), data.questions()
        self.engine = _engine(settings, schedule=schedule(steps=steps, warmup=warmup), rate=rate, weights=weights)
        self.parameters = sum(parameter.ds_numel for parameter in self.engine.module.parameters())

    @property
    def step_number(self) -> int:
        """How many steps were made."""
        return int(self.engine.global_steps)

    def step(self, *, seed: int) -> float:
        """Make one step on the batch of *seed*; return its loss."""
        tokens, labels = self._data.batch(seed=seed, count=self._settings.batch)
        loss = self.engine(input_ids=tokens, labels=labels).loss
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def loss(self) -> float:
        """Return the loss over all that is held out, in nats a token that counts."""
        tokens, labels = self._held_out
        count = int((labels[:, 1:] != IGNORED).sum())
        return float(self._losses(tokens, labels).sum().item()) / count

    def accuracy(self) -> float:
        """Return the share of questions whose true answer is the likeliest, token by token."""
        tokens, labels = (of.flatten(0, 1) for of in self._questions)
        mean = self._losses(tokens, labels) / (labels[:, 1:] != IGNORED).sum(-1)
        best = mean.view(-1, ANSWERS)
        return float((best[:, :1] < best[:, 1:]).all(-1).double().mean().item())

    def weights(self) -> "dict[str, torch.Tensor]":
        """Return all weights, as the forward pass uses them."""
        import deepspeed

        named = dict(self.engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(named.values())):
            return {name: parameter.detach().clone() for name, parameter in named.items()}

    def masters(self) -> "list[torch.Tensor]":
        """Return this rank's masters, which on one rank are all of them."""
        return list(self.engine.optimizer.fp32_partitioned_groups_flat)

    def _losses(self, tokens: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        """Return the summed loss of each sequence."""
        import torch

        found = []
        self.engine.eval()
        with torch.no_grad():
            parts = (torch.split(of, _EVALUATED_AT_ONCE) for of in (tokens, labels[:, 1:]))
            for part, wanted in zip(*parts, strict=True):
                logits = self.engine(input_ids=part).logits[:, :-1].float()
                each = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="none"
                )
                found.append(each.view(wanted.shape).double().sum(-1))
        self.engine.train()
        return torch.cat(found)


def schedule(*, steps: int, warmup: int) -> Callable[[int], float]:
    """
    Return a share of the rate for every step: a short way up, and a cosine down to a tenth.

    >>> share = schedule(steps=100, warmup=10)
    >>> [round(share(step), 2) for step in (0, 9, 55, 100)]
    [0.1, 1.0, 0.55, 0.1]
    """

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min((step - warmup) / (steps - warmup), 1.0)
        return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2

    return share


def llama(settings: Settings) -> Any:
    """Return the model with its first weights, the same every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": settings.hidden,
        "intermediate_size": settings.intermediate,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "vocab_size": settings.vocabulary,
        "max_position_embeddings": settings.sequence,
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**shape))


def _engine(settings: Settings, *, schedule: Callable[[int], float], rate: float, weights: Path | None) -> Engine:
    import deepspeed
    import torch

    torch.set_num_threads(1)
    model = llama(settings)
    if weights is not None:
        model.load_state_dict(torch.load(weights, weights_only=True))
    named = list(model.named_parameters())
    groups = [
        {"params": [parameter for name, parameter in named if "norm" not in name], "weight_decay": 0.1},
        {"params": [parameter for name, parameter in named if "norm" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate)
    config = {
        "train_micro_batch_size_per_gpu": settings.batch,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, schedule),
        config=config,
    )
    return engine


if __name__ == "__main__":
    main()
