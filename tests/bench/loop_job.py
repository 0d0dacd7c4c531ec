"""
The training that the benchmark of the loop times: the program that each of its ranks runs.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.bench.loop_job --out RESULT.json --data DIR …

DeepSpeed starts once. Then the same job is done with every way to save in turns, on the same engine, whose state goes
on from job to job: only its values differ. The first rank writes down what all of them measured.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from layerstore.live.demo.launch import tell
from tests.bench.loop_variants import VARIANTS, Engine, Variant, Way, clear, folder_bytes
from tests.bench.measure import machine_busy_seconds, own_cpu_seconds, wait_for_quiet
from tests.bench.ranked import begin, end
from tests.bench.shapes import ModelShape

HIDDEN = 512
INTERMEDIATE = 1408
HEADS = 8
VOCAB_MIN = 4096


@dataclass(slots=True, kw_only=True)
class Job:
    """One run of the job; times are those of the slowest rank."""

    variant: str
    seconds: float = 0.0
    """From the first save until all that was saved is there, and every step is done."""
    blocked: list[float] = field(default_factory=list)
    """Of every save: inside it, and before updates until the next one."""
    durable: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    """Forward and backward of every step."""
    others_share: float = 0.0
    """How much of the machine's processors somebody else used meanwhile; the kernel's own flushing is in it."""


@dataclass(slots=True, kw_only=True)
class Result:
    """What the ranks found out."""

    state_bytes: int
    parameters: int
    layers: int
    memcpy_seconds: float
    """To copy each rank's state within its memory, all ranks at once."""
    sizes: dict[str, list[int]]
    """Of every variant, what each save of a whole cycle added to its folder."""
    jobs: list[Job]


def shape_of(gb: float) -> ModelShape:
    """Return a Llama whose masters and moments take about *gb* GB (10^9 bytes), most of it in blocks of one size."""
    one = ModelShape(layers=1, hidden=HIDDEN, intermediate=INTERMEDIATE, vocab=0)
    block = sum(parameter.elements for parameter in one.parameters()) - HIDDEN
    budget = gb * 1e9 / 12
    layers = max(int((budget - 2 * VOCAB_MIN * HIDDEN) // block), 2)
    vocab = -(-int(budget - layers * block) // (2 * HIDDEN))
    return ModelShape(layers=layers, hidden=HIDDEN, intermediate=INTERMEDIATE, vocab=max(64, -(-vocab // 64) * 64))


def main() -> None:
    """Go through all variants as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--gb", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--sequence", type=int, required=True)
    options = parser.parse_args()
    begin()
    training = Training(shape_of(options.gb), batch=options.batch, sequence=options.sequence)
    training.step()  # the optimizer has its moments now
    end(_measured(training, options), options.out)


class Training:
    """A Llama under ZeRO-3, and one step of its training."""

    def __init__(self, shape: ModelShape, *, batch: int, sequence: int) -> None:
        import torch.distributed as dist

        self._shape, self._batch, self._sequence = shape, batch, sequence
        self.engine = _engine(shape, sequence)
        self.rank = dist.get_rank()
        self.parameters = sum(parameter.elements for parameter in shape.parameters())

    def step(self) -> tuple[float, float]:
        """Make one step; return how long it took, and how long forward and backward did."""
        import torch

        started = time.monotonic()
        generator = torch.Generator().manual_seed(1000 * self.engine.global_steps + self.rank)
        tokens = torch.randint(0, self._shape.vocab, (self._batch, self._sequence), generator=generator)
        self.engine.backward(self.engine(input_ids=tokens, labels=tokens).loss)
        passes = time.monotonic() - started
        self.engine.step()
        return time.monotonic() - started, passes

    def state(self) -> list[Any]:
        """Return this rank's masters and moments."""
        zero = self.engine.optimizer
        flats = list(zero.fp32_partitioned_groups_flat)
        moments = [zero.optimizer.state[flat][name] for flat in flats for name in ("exp_avg", "exp_avg_sq")]
        return flats + moments


def _engine(shape: ModelShape, sequence: int) -> Engine:
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3},
    }
    llama = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=shape.vocab,
        max_position_embeddings=sequence,
        bos_token_id=None,
        eos_token_id=None,
    )
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = LlamaForCausalLM(llama)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    return engine


def _measured(training: Training, options: argparse.Namespace) -> Result:
    result = Result(
        state_bytes=int(_sum(sum(part.numel() * part.element_size() for part in training.state()))),
        parameters=training.parameters,
        layers=training._shape.layers,
        memcpy_seconds=_memcpy_seconds(training),
        sizes={},
        jobs=[],
    )
    for variant in VARIANTS:
        result.sizes[variant.name] = _rehearsed(training, variant, options.data)
    for number in range(options.rounds):
        start = number % len(VARIANTS)
        for variant in [*VARIANTS[start:], *VARIANTS[:start]]:
            result.jobs.append(_job(training, variant, options))
    return result


def _rehearsed(training: Training, variant: Variant, folder: Path) -> list[int]:
    """Save a whole cycle, one after the other, a step between them; return what each save added on disk."""
    _fresh(folder)
    way, sizes = variant.begin(training.engine, folder), [0]
    for _ in range(1 + variant.cycle):
        training.step()
        way.save()
        way.finish()
        _meet()
        sizes.append(folder_bytes(folder))
        _meet()
        tell("step", number=training.engine.global_steps)
    way.close()
    _fresh(folder)
    return [later - earlier for earlier, later in pairwise(sizes)]


def _job(training: Training, variant: Variant, options: argparse.Namespace) -> Job:
    """Do the job once: an interval of steps follows every save, the last one too."""
    _fresh(options.data)
    job = Job(variant=variant.name)
    way = variant.begin(training.engine, options.data)
    own = _sum(own_cpu_seconds())
    machine, started = machine_busy_seconds(), time.monotonic()
    for _ in range(options.saves):
        job.blocked.append(_max(_interval(training, way, options.every, job)))
        tell("step", number=training.engine.global_steps)
    way.finish()
    job.seconds = _max(time.monotonic() - started)
    others = machine_busy_seconds() - machine - (_sum(own_cpu_seconds()) - own)
    job.others_share = max(others, 0.0) / job.seconds / (os.cpu_count() or 1)
    job.durable = [_max(seconds) for seconds in way.durable_seconds]
    way.close()
    _fresh(options.data)
    return job


def _interval(training: Training, way: Way, steps: int, job: Job) -> float:
    _meet()  # ranks leave a step at different times; waiting for each other there is none of a save's time
    elsewhere, started = way.blocked_elsewhere(), time.monotonic()
    way.save()
    blocked = time.monotonic() - started
    for _ in range(steps):
        seconds, passes = training.step()
        job.steps.append(seconds)
        job.passes.append(passes)
    return blocked + way.blocked_elsewhere() - elsewhere


def _memcpy_seconds(training: Training) -> float:
    state = training.state()
    copies = [part.clone() for part in state]

    def times() -> Iterator[float]:
        for _ in range(3):
            _meet()
            started = time.monotonic()
            for copy, part in zip(copies, state, strict=True):
                copy.copy_(part)
            yield time.monotonic() - started

    return _max(statistics.median(times()))


def _fresh(folder: Path) -> None:
    """Make *folder* empty, and wait until disk and processors have nothing else to do, but not for ever."""
    import torch.distributed as dist

    _meet()
    if dist.get_rank() == 0:
        clear(folder)
        os.sync()
        wait_for_quiet()
    _meet()


def _meet() -> None:
    import torch.distributed as dist

    dist.barrier()


def _max(value: float) -> float:
    return max(_all(value))


def _sum(value: float) -> float:
    return sum(_all(value))


def _all(value: float) -> list[float]:
    import torch
    import torch.distributed as dist

    mine = torch.tensor([value], dtype=torch.float64)
    found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [float(each.item()) for each in found]


if __name__ == "__main__":
    main()
