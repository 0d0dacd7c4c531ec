"""
The training that the benchmark of the loop times, and the ways to save it: the program that each of its ranks runs.

DeepSpeed starts once. Then the same job is done with every way to save in turns, on the same engine, whose state goes
on from job to job: only its values differ. Every way keeps the same state on every rank: its masters with their two
moments, 12 bytes a parameter over all ranks. The first rank writes down what all of them measured.
"""

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Unpack

import layerstore
from layerstore import Keep
from layerstore.live.saver.options import SaverKeywords
from layerstore.live.saver.saver import Saver
from layerstore.precision import PrecisionName
from tests.bench.measure import disk_bytes, machine_busy_seconds, own_cpu_seconds, wait_for_quiet
from tests.bench.ranked import asked, begin, end
from tests.bench.shapes import ModelShape

HIDDEN = 512
INTERMEDIATE = 1408
HEAD = 64
VOCAB_MIN = 4096
BATCH = 2
SEQUENCE = 8
"""Short: half-precision arithmetic on a CPU takes a time for each token, and what is saved does not depend on it."""
RUN = "bench"
KEPT = 3
"""How many saves are kept by a job that saves every step."""

Engine = Any  # deepspeed ships no types


# -- ways to save --------------------------------------------------------------------------------------------------


class Way:
    """One way to save, for the time of one job; this one saves nothing."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._folder = folder

    def save(self) -> None:
        """Save the engine's state: training stands still meanwhile."""

    def blocked_elsewhere(self) -> float:
        """Return how many seconds training has been held so far outside of `save`."""
        return 0.0

    def finish(self) -> None:
        """Return once every save is there."""

    def durable_seconds(self) -> list[float]:
        """Return how long every save took that is known to be on disk; nothing where nobody can tell."""
        return []

    def written_bytes(self) -> int:
        """Return what this rank has written, and nobody else has counted."""
        return 0

    def close(self) -> None:
        """Let go of the engine; every rank calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One line of the table."""

    name: str
    begin: Callable[[Engine, Path], Way]
    """Called on every rank with a folder that is its own, and empty."""
    cycle: int = 1
    """How many saves after the first it takes until the same layers come again."""
    in_memory: bool = False
    """Whether its folder is in memory instead of on the disk."""


class DeepSpeed(Way):
    """DeepSpeed's own ``engine.save_checkpoint``; it neither syncs its files nor tells when they are on disk."""

    def save(self) -> None:
        """Save a checkpoint."""
        self._engine.save_checkpoint(str(self._folder), tag=f"global_step{self._engine.global_steps}")


class FewDeepSpeed(DeepSpeed):
    """The same, and all saves but the newest are removed."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        super().__init__(engine, folder)
        self._removed_bytes = 0

    def save(self) -> None:
        """Save a checkpoint; the first rank removes what is older."""
        import torch.distributed as dist

        super().save()
        if dist.get_rank() == 0:
            for tag in sorted(self._folder.glob("global_step*"), key=lambda tag: tag.stat().st_mtime)[:-KEPT]:
                self._removed_bytes += disk_bytes(tag)
                shutil.rmtree(tag)

    def written_bytes(self) -> int:
        """Return the sizes of all saves; the first rank knows them."""
        import torch.distributed as dist

        return self._removed_bytes + disk_bytes(self._folder) if dist.get_rank() == 0 else 0


class SyncedDeepSpeed(DeepSpeed):
    """The same, on disk before training goes on, as layerstore's saves are before they show: like against like."""

    def save(self) -> None:
        """Save a checkpoint, and sync it; the ranks share the files among them."""
        import torch.distributed as dist

        super().save()
        dist.barrier()
        files = sorted(path for path in self._folder.rglob("*.pt") if path.is_file())
        for path in files[dist.get_rank() :: dist.get_world_size()]:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        dist.barrier()


class Layerstore(Way):
    """A saver of this project, on a store of its own."""

    def __init__(self, engine: Engine, folder: Path, **options: Unpack[SaverKeywords]) -> None:
        import torch.distributed as dist

        super().__init__(engine, folder)
        if dist.get_rank() == 0:
            layerstore.init(folder / "store").close()
        dist.barrier()
        self._saver: Saver = layerstore.attach(engine, folder / "store", run=RUN, **options)
        self._within = 0.0

    def durable_seconds(self) -> list[float]:
        """Return how long every save took until the commit of all ranks was visible."""
        return [of.visible_seconds for of in self._saver.store.timings(RUN) if of.visible_seconds is not None]

    def save(self) -> None:
        """Begin a save, in sync mode end it too."""
        started = time.monotonic()
        self._saver.save()
        self._within += time.monotonic() - started

    def blocked_elsewhere(self) -> float:
        """Return what was waited for before updates: the saver counts that with what `save` took."""
        return max(self._saver.status().blocked_seconds - self._within, 0.0)

    def finish(self) -> None:
        """Wait until all is durable, and make sure that nothing was given up."""
        self._saver.wait()
        status = self._saver.status()
        if status.failed:
            raise RuntimeError(f"a save came to nothing: {status.errors}")

    def written_bytes(self) -> int:
        """Return the bytes of this rank that the store did not have."""
        return self._saver.status().written_bytes

    def close(self) -> None:
        """Detach."""
        self._saver.close()


NONE = Variant(name="no checkpoints", begin=Way)
DEEPSPEED = Variant(name="engine.save_checkpoint", begin=DeepSpeed)
SYNCED = Variant(name="the same, and synced", begin=SyncedDeepSpeed)
FULL = Variant(name="layerstore, full", begin=partial(Layerstore, policy="latest"))

VARIANTS = (
    NONE,
    DEEPSPEED,
    SYNCED,
    FULL,
    Variant(name="layerstore, full, sync", begin=partial(Layerstore, policy="latest", mode="sync")),
    Variant(name="layerstore, parity", begin=partial(Layerstore, policy="parity"), cycle=2),
    Variant(name="layerstore, filter", begin=partial(Layerstore, policy="filter"), cycle=10),
    Variant(name="layerstore, drift", begin=partial(Layerstore, policy="drift"), cycle=10),
)
"""What takes turns; a policy that is added here has its line in every table."""


def _each_step(place: str, *, in_memory: bool) -> Iterator[Variant]:
    """Yield the ways to save every step into *place*; each keeps the newest few."""
    yield Variant(name=f"DeepSpeed{place}", begin=FewDeepSpeed, in_memory=in_memory)
    for precision in EACH_STEP_PRECISIONS:
        begin = partial(Layerstore, precision=precision, keep=Keep(last=KEPT))
        yield Variant(name=f"{precision}{place}", begin=begin, in_memory=in_memory)


EACH_STEP_PRECISIONS: tuple[PrecisionName, ...] = ("exact", "delta8", "delta4")
EACH_STEP = (NONE, *_each_step(", disk", in_memory=False), *_each_step(", memory", in_memory=True))
"""What takes turns if every step is saved: in memory, a save outlives the job, but not the machine."""


def variants(every: int) -> tuple[Variant, ...]:
    """Return what takes turns in a job that saves once in *every* steps."""
    return EACH_STEP if every == 1 else VARIANTS


# -- the job ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Job:
    """One run of the job; times are those of the slowest rank."""

    variant: str
    seconds: float = 0.0
    """From the first save until all that was saved is there, and every step is done."""
    blocked: list[float] = field(default_factory=list)
    """Of every save: inside it, and before updates until the next one."""
    durable: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    """Of all ranks."""
    written_bytes: int = 0
    """By all ranks in all saves, what was removed again included; nothing where nobody counts."""
    others_share: float = 0.0
    """How much of the machine's processors somebody else used meanwhile; the kernel's own flushing is in it."""


@dataclass(slots=True, kw_only=True)
class Result:
    """What the ranks found out."""

    state_bytes: int
    parameters: int
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
    options = asked(gb=float, rounds=int, saves=int, every=int, tokens=int, memory=Path, is_patient=int)
    begin()
    training = Training(shape_of(options.gb), sequence=options.tokens // BATCH)
    training.step()  # the optimizer has its moments now
    end(_measured(training, options), options.out)


class Training:
    """A Llama under ZeRO-3, and one step of its training."""

    def __init__(self, shape: ModelShape, *, sequence: int = SEQUENCE) -> None:
        import torch.distributed as dist

        self._shape, self._sequence = shape, sequence
        self.engine = _engine(shape, sequence)
        self.rank = dist.get_rank()
        self.parameters = sum(parameter.elements for parameter in shape.parameters())

    def step(self) -> None:
        """Make one step."""
        import torch

        generator = torch.Generator().manual_seed(1000 * self.engine.global_steps + self.rank)
        tokens = torch.randint(0, self._shape.vocab, (BATCH, self._sequence), generator=generator)
        tokens = tokens.to(self.engine.device)
        self.engine.backward(self.engine(input_ids=tokens, labels=tokens).loss)
        self.engine.step()

    def state_bytes(self) -> int:
        """Return the size of all ranks' masters and moments."""
        zero = self.engine.optimizer
        flats = list(zero.fp32_partitioned_groups_flat)
        moments = [zero.optimizer.state[flat][name] for flat in flats for name in ("exp_avg", "exp_avg_sq")]
        return int(_sum(sum(part.numel() * part.element_size() for part in flats + moments)))


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
        num_attention_heads=shape.hidden // HEAD,
        num_key_value_heads=shape.hidden // HEAD,
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
    result = Result(state_bytes=training.state_bytes(), parameters=training.parameters, sizes={}, jobs=[])
    contenders = variants(options.every)
    for variant in contenders:
        result.sizes[variant.name] = _rehearsed(training, variant, options)
    for number in range(options.rounds):
        start = number % len(contenders)
        for variant in [*contenders[start:], *contenders[:start]]:
            result.jobs.append(_job(training, variant, options))
    return result


def _folder(variant: Variant, options: argparse.Namespace) -> Path:
    folder: Path = options.memory if variant.in_memory else options.data
    return folder


def _rehearsed(training: Training, variant: Variant, options: argparse.Namespace) -> list[int]:
    """Save a whole cycle, one after the other, a step between them; return what each save added on disk."""
    folder = _folder(variant, options)
    _fresh(folder, is_patient=False)
    way, sizes = variant.begin(training.engine, folder), [0]
    for _ in range(1 + variant.cycle):
        training.step()
        way.save()
        way.finish()
        _meet()
        sizes.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        _meet()
    way.close()
    _fresh(folder, is_patient=False)
    return [later - earlier for earlier, later in pairwise(sizes)]


def _job(training: Training, variant: Variant, options: argparse.Namespace) -> Job:
    """Do the job once: an interval of steps follows every save, the last one too."""
    folder = _folder(variant, options)
    _fresh(folder, is_patient=bool(options.is_patient))
    job = Job(variant=variant.name)
    way = variant.begin(training.engine, folder)
    own = _sum(own_cpu_seconds())
    machine, started = machine_busy_seconds(), time.monotonic()
    for _ in range(options.saves):
        job.blocked.append(_max(_interval(training, way, options.every)))
    way.finish()
    job.seconds = _max(time.monotonic() - started)
    job.cpu_seconds = _sum(own_cpu_seconds()) - own
    others = machine_busy_seconds() - machine - job.cpu_seconds
    job.others_share = max(others, 0.0) / job.seconds / (os.cpu_count() or 1)
    job.durable = [_max(seconds) for seconds in way.durable_seconds()]
    job.written_bytes = int(_sum(way.written_bytes()))
    way.close()
    _fresh(folder, is_patient=False)
    return job


def _interval(training: Training, way: Way, steps: int) -> float:
    _meet()  # ranks leave a step at different times; waiting for each other there is none of a save's time
    elsewhere, started = way.blocked_elsewhere(), time.monotonic()
    way.save()
    blocked = time.monotonic() - started
    for _ in range(steps):
        training.step()
    return blocked + way.blocked_elsewhere() - elsewhere


def _fresh(folder: Path, *, is_patient: bool) -> None:
    """Make *folder* empty and, if told to, wait until disk and processors have nothing else to do, but not for ever."""
    import torch.distributed as dist

    _meet()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if is_patient:
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
