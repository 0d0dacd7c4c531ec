"""
Write DeepSpeed-shaped ZeRO checkpoints of any size, without training and without torch.

Only the numbers are made up; every file, key and byte that a reader could look at is where DeepSpeed puts it.
Equal arguments give equal bytes. What is written streams to disk: memory does not grow with the size.
"""

import json
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from isal import isal_zlib

from layerstore.dtypes import by_code
from layerstore.numbers import convert
from layerstore.tree import OrderedMap, Storage, Tree
from layerstore.zero3.pt import layout_pt
from tests.bench.partitioned import partition_states, whole_model_states
from tests.bench.shapes import (
    Grouping,
    ModelShape,
    Parameter,
    group_parameters,
    is_frozen,
    shape_of_size,
)
from tests.bench.trees import (
    HALF_OF,
    Job,
    Precision,
    Recipe,
    Stretch,
    flat_tensor,
    model_states,
    optim_states,
    scheduler,
)
from tests.bench.values import MASTER, junk, words

Layout = Literal["raw", "hf", "accelerate", "lightning"]
LAYOUTS: tuple[Layout, ...] = ("raw", "hf", "accelerate", "lightning")

# As torch.save aligns storages: a source is never laid out the way that suits us best.
_ALIGNMENT_BYTES = 64


def generate(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    vocab: int = 64,
    world_size: int = 2,
    layout: Layout = "raw",
    step: int = 2,
    seed: int = 0,
    groups: Grouping = "two",
    sub_group_size: int = 10**9,
    tied: bool = False,
    frozen: Collection[str] = (),
    tag: str | None = None,
    intermediate: int | None = None,
    precision: Precision = "bf16",
    stage: int = 3,
    client_state: dict[Tree, Tree] | None = None,
) -> Path:
    """
    Write a checkpoint into *folder* and return the save folder, which is *folder*.

    *frozen* names parameters or whole modules, such as ``model.layers.0``.
    A raw save folder may be given again with another *step*: then it holds both, and ``latest`` names the last.
    Numbers depend on *seed* and *step* (those of frozen weights on *seed* alone), never on ranks or *groups*.
    """
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        intermediate=3 * hidden if intermediate is None else intermediate,
        vocab=vocab,
        tied=tied,
        world_size=world_size,
    )
    parameters = shape.parameters()
    trained = tuple(parameter for parameter in parameters if not is_frozen(parameter.name, frozen))
    job = Job(
        shape=shape,
        trained=trained,
        frozen=tuple(parameter for parameter in parameters if parameter not in trained),
        groups=group_parameters(
            trained, grouping=groups, sub_group_size=sub_group_size if stage == 3 else 10**18, world_size=world_size
        ),
        sub_group_size=sub_group_size,
        precision=precision,
        stage=stage,
        step=step,
        owns_scheduler=layout in ("raw", "lightning"),
        client_state=_client_state(layout, step) | (client_state or {}),
    )
    _Checkpoint(folder, job, layout=layout, seed=seed, tag=tag).write()
    return folder


def generate_size(
    folder: Path,
    gib: float,
    *,
    layout: Layout = "raw",
    odd: bool = False,
    world_size: int | None = None,
    stage: int = 3,
    step: int = 2,
    seed: int = 0,
) -> Path:
    """Write a checkpoint of about *gib* GiB; see ``shape_of_size`` for what *odd* and *world_size* mean."""
    shape = shape_of_size(gib, is_gathered=layout == "hf", is_odd=odd, world_size=world_size)
    return generate(
        folder,
        layers=shape.layers,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        vocab=shape.vocab,
        world_size=shape.world_size,
        layout=layout,
        stage=stage,
        step=step,
        seed=seed,
    )


def _client_state(layout: Layout, step: int) -> dict[Tree, Tree]:
    if layout != "lightning":
        return {}
    return {
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": "2.6.6",
        "loops": {"fit_loop": {"epoch_progress": {"current": {"ready": 1, "completed": 0}}}},
        "callbacks": {},
        "hparams_name": "kwargs",
        "hyper_parameters": OrderedMap({"lr": 1e-3}),
    }


class _Checkpoint:
    """One checkpoint on its way to disk."""

    def __init__(self, folder: Path, job: Job, *, layout: Layout, seed: int, tag: str | None) -> None:
        default = {"accelerate": "pytorch_model", "lightning": "checkpoint"}.get(layout, f"global_step{job.step}")
        self._folder = folder
        self._job = job
        self._layout = layout
        self._seed = seed
        self._tag = tag or default

    def write(self) -> None:
        """Write all files."""
        (self._folder / self._tag).mkdir(parents=True, exist_ok=True)
        prefix = "bf16_" if self._job.precision == "bf16" else ""
        for rank in range(self._job.shape.world_size):
            name = f"zero_pp_rank_{rank}_mp_rank_00_"
            optimizer = (optim_states if self._job.stage == 3 else partition_states)(self._job, rank=rank)
            self._write_pt(f"{self._tag}/{prefix}{name}optim_states.pt", optimizer, rank=rank)
            if self._job.stage == 3:
                self._write_pt(f"{self._tag}/{name}model_states.pt", model_states(self._job, rank=rank), rank=rank)
        if self._job.stage != 3:
            self._write_pt(f"{self._tag}/mp_rank_00_model_states.pt", whole_model_states(self._job), rank=0)
        self._write_text("latest", self._tag)
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):
            self._write_text(script, f"# stands for DeepSpeed's {script}\n")
            (self._folder / script).chmod(0o744)
        if self._layout == "hf":
            self._write_trainer_files()
        elif self._layout == "accelerate":
            self._write_accelerate_files()

    # -- what surrounds DeepSpeed's files --------------------------------------------------------------------------

    def _write_trainer_files(self) -> None:
        job, shape = self._job, self._job.shape
        self._write_gathered("model.safetensors")
        self._write_pt("scheduler.pt", scheduler(job), rank=0)
        for rank in range(shape.world_size):
            name = f"rng_state_{rank}.pth" if shape.world_size > 1 else "rng_state.pth"
            self._write_pt(name, self._random_state(rank), rank=rank)
        self._write_text("trainer_state.json", json.dumps({"global_step": job.step, "log_history": []}, indent=2))
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "tie_word_embeddings": shape.tied,
            "vocab_size": shape.vocab,
        }
        self._write_text("config.json", json.dumps(config, indent=2))

    def _write_accelerate_files(self) -> None:
        self._write_pt("scheduler.bin", scheduler(self._job), rank=0)
        for rank in range(self._job.shape.world_size):
            self._write_pt(f"random_states_{rank}.pkl", self._random_state(rank), rank=rank)

    def _random_state(self, rank: int) -> Tree:
        numbers = words(seed=self._seed, step=self._job.step, name=f"rng/{rank}", state=MASTER, start=0, elements=1250)
        return {
            "python": (3, tuple(range(rank, rank + 625)), None),
            "cpu": flat_tensor("U8", 5000, b"".join(numbers)),
        }

    def _write_text(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text)

    # -- files with tensors ----------------------------------------------------------------------------------------

    def _write_pt(self, name: str, tree: Tree, *, rank: int) -> None:
        path = self._folder / name
        layout = layout_pt(tree, name=path.stem, alignment_bytes=_ALIGNMENT_BYTES)
        with path.open("wb") as file:
            checksums = {}
            for storage, offset in layout.storages:
                file.seek(offset)
                checksums[storage] = _write_chunks(file, self._content(storage, rank))
            for offset, data in layout.skeleton(checksums):
                file.seek(offset)
                file.write(data)

    def _content(self, storage: Storage, rank: int) -> Iterator[bytes | memoryview]:
        if isinstance(storage.content, bytes):
            yield storage.content
            return
        assert isinstance(storage.content, Recipe)
        for part in storage.content.stretches:
            yield from self._stretch(part, storage.dtype)
            if part.padding:
                # The engine zeroes the padding of moments; that of masters is whatever memory held.
                left_over = junk(part.padding, rank=rank) if part.state == MASTER else bytes(4 * part.padding)
                yield left_over[: part.padding * by_code(storage.dtype).bytes]

    def _stretch(self, part: Stretch, dtype: str) -> Iterator[memoryview]:
        numbers = words(
            seed=self._seed,
            step=0 if part.parameter in self._job.frozen else self._job.step,
            name=part.parameter.name,
            state=part.state,
            start=part.start,
            elements=part.elements,
        )
        return (convert(chunk, source="F32", target=dtype) for chunk in numbers)

    def _write_gathered(self, name: str) -> None:
        dtype = HALF_OF[self._job.precision]
        ordered = sorted(self._job.shape.parameters(), key=lambda parameter: parameter.name)
        with (self._folder / name).open("wb") as file:
            file.write(_safetensors_header(ordered, dtype))
            for parameter in ordered:
                whole = Stretch(parameter=parameter, state=MASTER, start=0, elements=parameter.elements, padding=0)
                _write_chunks(file, self._stretch(whole, dtype))


def _write_chunks(file: BinaryIO, chunks: Iterator[bytes | memoryview]) -> int:
    """Write *chunks* where *file* stands; return their CRC."""
    checksum = 0
    for chunk in chunks:
        checksum = isal_zlib.crc32(chunk, checksum)
        file.write(chunk)
    return checksum


def _safetensors_header(parameters: list[Parameter], dtype: str) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for parameter in parameters:
        end = position + parameter.elements * by_code(dtype).bytes
        entries[parameter.name] = {"dtype": dtype, "shape": parameter.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
