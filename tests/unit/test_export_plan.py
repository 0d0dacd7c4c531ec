"""Promises of an export's plan: names, order, shards, config; no store, no disk."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
from huggingface_hub import split_state_dict_into_shards_factory
from hypothesis import given
from hypothesis import strategies as st

from layerstore.errors import InvalidInput, LayoutMismatch, Unsupported
from layerstore.export.hf import (
    config_with_dtype,
    dtype_code,
    goes_along,
    index_of,
    member_bytes,
    shard_files,
    size_in_bytes,
)
from layerstore.export.members import Member, Members, Run, SavedTensor, Written, choose_members, saved_tensors
from layerstore.limits import PAGE_BYTES
from layerstore.model import (
    BlobRef,
    Buffer,
    GatheredFile,
    GatheredTensor,
    ObjectContent,
    ObjectId,
    Parameter,
    TensorSource,
)

GIGABYTE = 10**9

ALONG = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "merges.txt",
    "vocab.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "modeling_mine.py",
    "README.md",
    "1_Pooling/config.json",
    "qwen.tiktoken",
)
NOT_ALONG = (
    "optimizer.pt",
    "scheduler.pt",
    "scheduler.bin",
    "rng_state.pth",
    "rng_state_0.pth",
    "random_states_1.pkl",
    "trainer_state.json",
    "training_args.bin",
    "zero_to_fp32.py",
    "zero_to_torch.py",
    "latest",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.safetensors.index.json",
    "extra.safetensors",
    "adapter_config.json",
    "global_step2/notes.json",
    "custom_checkpoint_0.pkl",
    "runs/events.out.tfevents.17",
)


def member(name: str, *shape: int, dtype: str = "BF16") -> Member:
    """Return a parameter of an export."""
    return Member(name=name, dtype=dtype, shape=shape, source=TensorSource.PARAMETER, layer_name=name)


# -- sizes and types -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5GB", 5 * GIGABYTE),
        ("500MB", 500_000_000),
        ("2GiB", 2 << 30),
        ("8KB", 8000),
        ("1.5 kib", 1536),
        ("1tb", 10**12),
        ("123", 123),
        ("123B", 123),
        (77, 77),
    ],
)
def test_sizes_are_read(text: int | str, expected: int) -> None:
    """Decimal and binary units, in any case, with or without a blank."""
    assert expected == size_in_bytes(text)


@pytest.mark.parametrize("text", ["", "GB", "5 GB please", "-1", "5XB", "iB", "3iB", "1e3", "0", "0.1B", 0, -5, "٣GB!"])
def test_what_is_no_size_is_refused(text: int | str) -> None:
    """In one line that shows how to write one."""
    with pytest.raises(InvalidInput, match=r"no size|at least one byte") as caught:
        size_in_bytes(text)
    assert "2GiB" in str(caught.value.hint)


def test_only_three_types_may_be_asked_for() -> None:
    """The error names them."""
    assert [dtype_code(name) for name in ("bf16", "fp16", "fp32", None)] == ["BF16", "F16", "F32", None]
    with pytest.raises(InvalidInput, match="'int8'") as caught:
        dtype_code("int8")
    assert caught.value.hint == "choose one of bf16, fp16, fp32"


# -- shards --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 60), min_size=1, max_size=30), st.integers(1, 100))
def test_tensors_are_dealt_out_as_transformers_does(elements: list[int], shard_bytes_max: int) -> None:
    """The same tensors in files of the same names, and so the same index."""
    tensors = [member(f"t{number:02d}", count) for number, count in enumerate(elements)]
    expected = split_state_dict_into_shards_factory(
        {tensor.name: tensor for tensor in tensors},
        get_storage_size=member_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes_max,
    )

    files = shard_files(tensors, shard_bytes_max=shard_bytes_max)

    assert {name: sorted(names) for name, names in expected.filename_to_tensors.items()} == {
        file.name: sorted(tensor.name for tensor in file.tensors) for file in files
    }
    index = json.loads(index_of(files, parameters=sum(elements)))
    assert index["weight_map"] == expected.tensor_to_filename
    assert index["metadata"] == {"total_parameters": sum(elements), "total_size": 2 * sum(elements)}
    assert all(sum(map(member_bytes, file.tensors)) <= shard_bytes_max or len(file.tensors) == 1 for file in files)


def test_a_shards_payload_starts_on_pages(tmp_path: Path) -> None:
    """Whole pages come first, each tensor lies on a multiple of its element, and safetensors reads the header."""
    tensors = [member("a", 3), member("b", PAGE_BYTES, dtype="F32"), member("c", 5, dtype="F32"), member("d", 2048)]

    (file,) = shard_files(tensors, shard_bytes_max=GIGABYTE)

    starts = {tensor.name: offset for tensor, offset in zip(file.tensors, file.offsets, strict=True)}
    assert list(starts) == ["b", "d", "c", "a"]
    assert len(file.header) % PAGE_BYTES == 0
    assert [starts[name] % PAGE_BYTES for name in ("b", "d", "c")] == [0, 0, 0]
    assert file.tensor_at(starts["d"]).name == file.tensor_at(starts["c"] - 1).name == "d"
    path = tmp_path / file.name
    path.write_bytes(file.header + bytes(file.size_bytes - len(file.header)))
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert sorted(opened.keys()) == ["a", "b", "c", "d"]
        assert opened.get_slice("b").get_shape() == [PAGE_BYTES]


# -- what goes beside the weights ----------------------------------------------------------------------------------


def test_small_files_of_the_model_go_along_and_those_of_training_do_not() -> None:
    """Whatever a tokenizer or processor calls its files."""
    expected = {**dict.fromkeys(ALONG, True), **dict.fromkeys(NOT_ALONG, False)}

    assert expected == {path: goes_along(path, tag="global_step2") for path in expected}


def test_a_config_that_says_it_already_stays_byte_for_byte() -> None:
    """However it is spaced."""
    config = b'{ "dtype":"bfloat16","model_type" :"llama"}'

    assert config == config_with_dtype(config, "BF16")


def test_a_config_is_told_the_type_and_nothing_else() -> None:
    """Under the name that it uses, in the configs inside it too, but not in how a quantizer computes."""
    config = {
        "model_type": "both",
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "size": 1},
        "vision_config": {"depth": 2},
        "quantization_config": {"dtype": "bfloat16"},
    }

    changed = json.loads(config_with_dtype(json.dumps(config).encode(), "F32"))

    assert list(changed) == list(config)
    assert changed == config | {"torch_dtype": "float32", "text_config": {"dtype": "float32", "size": 1}}


def test_a_config_without_a_type_is_given_one() -> None:
    """Else older versions of Transformers would widen everything."""
    assert json.loads(config_with_dtype(b'{"model_type": "llama"}', "F16"))["torch_dtype"] == "float16"


@pytest.mark.parametrize("config", [b"", b"[1]", b"{", b"\xff", b"null", b"[" * 100_000])
def test_a_config_that_is_none_is_not_guessed_at(config: bytes) -> None:
    """The caller is told by a ValueError."""
    with pytest.raises(ValueError, match=r"."):
        config_with_dtype(config, "F16")


# -- names ---------------------------------------------------------------------------------------------------------


def parameter(name: str, *, aliases: tuple[str, ...] = (), dtype: str = "BF16") -> Parameter:
    """Return a parameter of two elements."""
    return Parameter(name=name, dtype=dtype, shape=(2,), frozen=False, aliases=aliases)


def buffer(name: str) -> Buffer:
    """Return a buffer of two elements."""
    return Buffer(name=name, dtype="F32", shape=(2,))


def gathered(*tensors: GatheredTensor, shape: tuple[int, ...] = (2,)) -> GatheredFile:
    """Return a file of whole weights."""
    entries = {tensor.name: {"dtype": tensor.dtype, "shape": list(shape)} for tensor in tensors}
    return GatheredFile(path="model.safetensors", header=bytes(8) + json.dumps(entries).encode(), tensors=tensors)


def derived(
    name: str, layer_name: str | None = None, *, source: TensorSource = TensorSource.PARAMETER
) -> GatheredTensor:
    """Return a gathered tensor that follows from its layer."""
    return GatheredTensor(
        name=name,
        dtype="BF16" if source is TensorSource.PARAMETER else "F32",
        elements=2,
        crc32=7,
        source=source,
        layer_name=layer_name or name,
        stored=None,
    )


def stored(name: str) -> GatheredTensor:
    """Return a gathered tensor that is an object of its own."""
    content = ObjectContent(object=BlobRef(id=ObjectId("c" * 32), size_bytes=9), size_bytes=4, crc32=1)
    return GatheredTensor(
        name=name, dtype="BF16", elements=2, crc32=1, source=TensorSource.STORED, layer_name="", stored=content
    )


def chosen(*items: Parameter | Buffer, files: tuple[GatheredFile, ...] = (), **options: Any) -> Members:
    """Choose the members of an export of *items*."""
    is_own: Callable[[str], bool] = lambda name: True  # noqa: E731  # read as a default
    return choose_members(
        parameters={item.name: item for item in items if isinstance(item, Parameter)},
        buffers={item.name: item for item in items if isinstance(item, Buffer)},
        **{"saved": saved_tensors(files), "dtype": None, "is_own": is_own, "ask": nobody} | options,
    )


def nobody(shapes: object, expected: object) -> dict[str, Written]:
    """Answer as where there is no Transformers to ask."""
    raise Unsupported("nobody knows")


def whole(name: str) -> Written:
    """Return a tensor that is all of the parameter or buffer *name*."""
    return Written(shape=(2,), runs=(Run(name=name, start=0, elements=2),))


def names(members: Members) -> dict[str, str]:
    """Return whose bytes each tensor has."""
    return {tensor.name: tensor.layer_name for tensor in members.tensors}


def test_wrappers_are_stripped_where_no_file_tells_the_names() -> None:
    """A tied parameter is there once, and persistent buffers are, too."""
    members = chosen(
        parameter("_orig_mod.model.embed.weight", aliases=("_orig_mod.lm_head.weight",)),
        parameter("module.norm.weight"),
        buffer("module.shift"),
    )

    assert names(members) == {
        "model.embed.weight": "_orig_mod.model.embed.weight",
        "norm.weight": "module.norm.weight",
        "shift": "module.shift",
    }
    assert members.notes == []


def test_the_bases_own_files_lend_their_names() -> None:
    """Also the alias of a tied parameter; a second name of the same memory is left out, and so are other buffers."""
    file = gathered(
        derived("lm_head.weight", "embed.weight"),
        derived("embed.weight"),
        derived("rotary", "model.rotary", source=TensorSource.BUFFER),
    )

    members = chosen(
        parameter("embed.weight", aliases=("lm_head.weight",)),
        buffer("model.rotary"),
        buffer("model.other"),
        files=(file,),
    )

    assert names(members) == {"lm_head.weight": "embed.weight", "rotary": "model.rotary"}
    assert members.notes == []


def test_checksums_are_kept_only_for_the_same_bytes() -> None:
    """Another type, or another version of the layer, has other bytes."""
    file = gathered(derived("a"))

    assert [
        chosen(parameter("a"), files=(file,), **options).tensors[0].crc32
        for options in ({}, {"dtype": "BF16"}, {"dtype": "F16"}, {"is_own": lambda name: False})
    ] == [7, 7, None, None]


def test_a_shape_is_the_one_of_the_bases_own_file() -> None:
    """Where both describe the same elements."""
    assert chosen(parameter("a"), files=(gathered(derived("a"), shape=(1, 2)),)).tensors[0].shape == (1, 2)


def test_adapters_keep_their_own_names_and_are_noted() -> None:
    """What is adapted, too: merging is not ours to do."""
    adapter = "base_model.model.lm_head.lora_A.default.weight"
    wrapped = "base_model.model.lm_head.base_layer.weight"

    members = chosen(parameter(adapter), parameter(wrapped), parameter("base_model.model.norm.weight"))

    assert list(names(members)) == [adapter, wrapped, "norm.weight"]
    assert "not merged" in members.notes[0]
    assert adapter in members.notes[0]


def test_parameters_that_no_file_names_are_written_and_noted() -> None:
    """An export has all weights."""
    members = chosen(parameter("a"), parameter("module.b"), files=(gathered(derived("a")),))

    assert names(members) == {"a": "a", "b": "module.b"}
    assert members.notes == ["'module.b': in none of the base's own weights files; written under their own names"]


def test_what_only_the_file_has_goes_along_as_it_is() -> None:
    """Nobody need be asked: it cannot be a parameter in another form."""
    members = chosen(parameter("a"), files=(gathered(derived("a"), stored("extra")),), dtype="F32")

    assert [(tensor.name, tensor.dtype) for tensor in members.tensors] == [("a", "F32"), ("extra", "BF16")]


def test_other_names_in_the_file_are_asked_for() -> None:
    """With the model's names, wrappers aside, and what the file has of it; the answer says which is which."""
    asked: list[tuple[object, object]] = []

    def ask(shapes: object, expected: object) -> dict[str, Written]:
        asked.append((shapes, expected))
        first, second = (Written(shape=(1,), runs=(Run(name="b", start=start, elements=1),)) for start in (0, 1))
        return {"a": whole("a"), "b.0": first, "b.1": second, "shift.old": whole("shift")}

    file = gathered(derived("a"), stored("b.0"), stored("b.1"), stored("shift.old"))
    members = chosen(parameter("a"), parameter("module.b"), buffer("shift"), files=(file,), ask=ask)

    assert asked == [({"a": (2,), "b": (2,), "shift": (2,)}, {"b.0": (2,), "b.1": (2,), "shift.old": (2,)})]
    assert names(members) == {"a": "a", "b.0": "module.b", "b.1": "module.b", "shift.old": "shift"}
    runs = {tensor.name: tensor.runs for tensor in members.tensors}
    assert runs["b.1"] == (Run(name="module.b", start=1, elements=1),)
    assert not runs["a"]
    assert not runs["shift.old"]
    assert {tensor.name: tensor.crc32 for tensor in members.tensors}["b.0"] == 1


def test_other_names_that_nobody_knows_are_refused() -> None:
    """They are no warning: whoever loads the folder would miss its weights."""
    file = gathered(derived("a"), stored("extra"))

    with pytest.raises(Unsupported, match="nobody knows"):
        chosen(parameter("a"), parameter("b"), files=(file,))


def test_a_parameter_that_no_name_in_the_file_means_is_refused() -> None:
    """Though all names there are understood."""
    file = gathered(derived("a"), stored("b.old"))

    with pytest.raises(Unsupported, match="no tensor there is 'c'"):
        chosen(parameter("a"), parameter("b"), parameter("c"), files=(file,), ask=lambda *_: {"b.old": whole("b")})


def unknown(name: str, *, shape: tuple[int, ...]) -> SavedTensor:
    """Return a tensor of a weights file that is kept byte for byte."""
    return SavedTensor(name=name, dtype="BF16", shape=shape)


def test_a_file_without_elements_lends_nothing() -> None:
    """ZeRO-3 leaves such names where nobody gathers the weights."""
    members = chosen(parameter("a"), saved=[unknown("a", shape=(0,))])

    assert [(tensor.name, tensor.shape) for tensor in members.tensors] == [("a", (2,))]


@pytest.mark.parametrize("elements", [1, 4])
def test_a_name_with_another_number_of_elements_is_asked_about(elements: int) -> None:
    """It is the parameter in another form, or none at all: nothing is cut short, and nothing padded."""
    with pytest.raises(Unsupported, match="nobody knows"):
        chosen(parameter("a"), saved=[unknown("a", shape=(elements,))])


def test_without_a_file_all_names_are_asked_for() -> None:
    """A tied parameter is written once, under the first of its names."""
    answer = {"old.b": whole("b"), "old.head": whole("head"), "old.a": whole("a")}

    members = chosen(parameter("a"), parameter("b", aliases=("head",)), ask=lambda *_: answer, is_always_asked=True)

    assert names(members) == {"old.b": "b", "old.a": "a"}


def test_an_adapter_is_nothing_to_ask_about() -> None:
    """Its names are its own library's."""
    adapter = "base_model.model.lm_head.lora_A.default.weight"

    assert names(chosen(parameter(adapter), is_always_asked=True)) == {adapter: adapter}


def test_weights_unlike_their_layer_come_from_the_layer_and_are_noted() -> None:
    """A buffer that the trainer saved with other bytes is as it saved it."""
    file = gathered(stored("a"), stored("shift"))

    members = chosen(parameter("a"), buffer("shift"), files=(file,))

    assert names(members) == {"a": "a", "shift": ""}
    assert members.notes == [
        "'a': the base's own weights files have other values than its layers; the layers' are written"
    ]


def test_names_that_would_meet_are_kept_apart() -> None:
    """Both then keep the wrapper."""
    members = chosen(parameter("module.a"), parameter("_orig_mod.a"))

    assert names(members) == {"module.a": "module.a", "_orig_mod.a": "_orig_mod.a"}


def test_two_tensors_of_one_name_are_refused() -> None:
    """Nothing is dropped silently."""
    with pytest.raises(Unsupported, match="two tensors would be called 'a'"):
        chosen(parameter("b"), files=(gathered(derived("a", "b")), gathered(stored("a"))))


def test_a_layer_that_is_missing_is_named() -> None:
    """The base's file has a parameter that no chosen layer has."""
    with pytest.raises(LayoutMismatch, match="'gone'"):
        chosen(parameter("a"), files=(gathered(derived("gone")),))


def test_what_is_no_floating_point_keeps_its_type() -> None:
    """And that is noted, where a type was asked for."""
    members = chosen(parameter("a"), parameter("q", dtype="I8"), dtype="F32")

    assert {tensor.name: tensor.dtype for tensor in members.tensors} == {"a": "F32", "q": "I8"}
    assert members.notes == ["'q': no floating point, so written unchanged"]
