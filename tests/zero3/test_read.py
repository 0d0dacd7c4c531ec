"""Promises of the reader: every element of every parameter is found, in any cutting into groups and ranks."""

import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from layerstore.errors import LayoutMismatch
from layerstore.model import Kind
from layerstore.tree import Inert, OrderedMap, Size, Storage, Tensor, Tree
from layerstore.zero3 import Checkpoint, SliceSource, discover, read_checkpoint
from tests.zero3.ptfiles import held, write_pt

# The worked example: sub_group_size = 10, group 0 has a, b and c, group 1 has d and e.
ELEMENTS = {"a": 15, "b": 12, "c": 7, "d": 3, "e": 5}
JUNK = float("nan")

# For each world size: the sub-groups, and what lies in each rank's flat buffers; _ is padding.
EXAMPLE = {
    2: (
        ("ab", "c", "de"),
        (
            ("a0-7 b0-5", "c0-3", "d0-1 e0-2"),
            ("a8-14 _ b6-11", "c4-6 _", "d2 _ e3-4 _"),
        ),
    ),
    3: (
        ("abc", "de"),
        (
            ("a0-4 b0-3 c0-2", "d0 e0-1"),
            ("a5-9 b4-7 c3-5", "d1 e2-3"),
            ("a10-14 b8-11 c6 _ _", "d2 e4 _"),
        ),
    ),
}


def value(name: str, element: int, state: str) -> float:
    """Return a number that tells what it is."""
    return ord(name) * 1000 + element + {"": 0.0, "exp_avg": 0.25, "exp_avg_sq": 0.5}[state]


def spelled(text: str, state: str) -> bytes:
    """Return the flat buffer that *text* spells, as ``a0-7 _`` does."""
    numbers: list[float] = []
    for part in text.split():
        if part == "_":
            numbers.append(JUNK)
            continue
        first, _, last = part[1:].partition("-")
        numbers += [value(part[0], element, state) for element in range(int(first), int(last or first) + 1)]
    return struct.pack(f"<{len(numbers)}f", *numbers)


def flat(data: bytes, dtype: str = "F32") -> Tensor:
    """Return a tensor that fills a storage of its own."""
    storage = Storage(dtype=dtype, elements=len(data) // 4, device="cpu", content=data)
    return Tensor(storage=storage, offset=0, shape=Size((len(data) // 4,)), stride=(1,))


def model(world_size: int) -> Tree:
    """Return the tree of a rank's model_states."""
    groups, _ = EXAMPLE[world_size]
    shapes: list[Tree] = [OrderedMap({f"{name}.weight": Size((ELEMENTS[name],)) for name in group}) for group in groups]
    return {
        "module": OrderedMap({f"{name}.weight": flat(b"", "BF16") for name in ELEMENTS}),
        "buffer_names": [],
        "param_shapes": shapes,
        "frozen_param_shapes": OrderedMap(),
        "shared_params": {},
        "frozen_param_fragments": OrderedMap(),
        "skipped_steps": 0,
        "global_steps": 2,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 3}},
    }


def optimizer(world_size: int, rank: int) -> Tree:
    """Return the tree of a rank's optim_states."""
    groups, ranks = EXAMPLE[world_size]
    states: dict[Tree, Tree] = {
        number: {state: flat(spelled(ranks[rank][number], state)) for state in ("exp_avg", "exp_avg_sq")}
        for number in range(len(groups))
    }
    return {
        "optimizer_state_dict": {
            "zero_stage": Inert(name="deepspeed.runtime.zero.config.ZeroStageEnum", arguments=(3,)),
            "partition_count": world_size,
            "optimizer_state_dict": {"state": states, "param_groups": []},
            "fp32_flat_groups": [*in_one_storage([flat(spelled(text, "")) for text in ranks[rank]])],
        }
    }


def in_one_storage(masters: list[Tensor]) -> list[Tensor]:
    """Return *masters* as views of one storage, as DeepSpeed means to have them in fp32."""
    whole = flat(b"".join(held(master.storage) for master in masters))
    starts = [sum(before.elements for before in masters[:index]) for index in range(len(masters))]
    return [replace(one, storage=whole.storage, offset=start) for one, start in zip(masters, starts, strict=True)]


def write(folder: Path, world_size: int) -> Path:
    """Write the worked example into *folder*."""
    shards = folder / "global_step2"
    shards.mkdir(parents=True)
    for rank in range(world_size):
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        write_pt(shards / f"{name}_model_states.pt", model(world_size))
        write_pt(shards / f"bf16_{name}_optim_states.pt", optimizer(world_size, rank))
    (folder / "latest").write_text("global_step2")
    return folder


def read(folder: Path) -> Checkpoint:
    """Read the checkpoint in *folder*."""
    return read_checkpoint(discover(folder))


def numbers(part: SliceSource) -> list[float]:
    """Return the numbers of a slice, from its file."""
    with part.path.open("rb") as file:
        file.seek(part.offset_bytes)
        return list(struct.unpack(f"<{part.elements}f", file.read(part.size_bytes)))


@pytest.mark.parametrize("world_size", EXAMPLE)
def test_every_element_of_the_worked_example_is_found(tmp_path: Path, world_size: int) -> None:
    """The slices of all ranks together are the parameter: each element once, padding never, from any offset."""
    checkpoint = read(write(tmp_path / "run", world_size))

    assert [layer.layer for layer in checkpoint.layers] == list(ELEMENTS)
    for layer in checkpoint.layers:
        for kind, state in ((Kind.MASTER, ""), (Kind.OPTIMIZER, "exp_avg"), (Kind.OPTIMIZER, "exp_avg_sq")):
            sources = [source for source in layer.objects if source.kind is kind]
            found = [
                number
                for source in sorted(sources, key=lambda source: source.shard)
                for part in source.slices
                if part.state == state
                for number in numbers(part)
            ]
            assert found == [value(layer.layer, element, state) for element in range(ELEMENTS[layer.layer])]


@pytest.mark.fault(67)
def test_padding_content_makes_no_difference(tmp_path: Path) -> None:
    """Padding is junk by nature: it is in no slice."""
    checkpoint = read(write(tmp_path / "run", 3))

    for layer in checkpoint.layers:
        for source in layer.objects:
            for part in source.slices:
                assert not any(math.isnan(number) for number in numbers(part))


@pytest.mark.fault(67)
@pytest.mark.parametrize("text", ["a0-7 b0-4", "a0-7 b0-5 _"])
def test_a_buffer_of_another_length_is_a_mismatch(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are never guessed: a flat buffer that its parameters do not fill exactly is refused."""
    groups, (_, second) = EXAMPLE[2]
    monkeypatch.setitem(EXAMPLE, 2, (groups, ((text, "c0-3", "d0-1 e0-2"), second)))

    with pytest.raises(LayoutMismatch, match="its parameters need 14"):
        read(write(tmp_path / "run", 2))
