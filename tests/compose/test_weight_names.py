"""Promises of an export's names: which tensors it has, and whose values; no store, no disk."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from layerstore.assemble.safetensors import Run, WeightTensor
from layerstore.dtypes import by_code
from layerstore.errors import LayoutMismatch, Unsupported
from layerstore.hf.weight_names import ExportTensors, FileTensor, saved_tensors
from layerstore.model import BlobRef, Buffer, ObjectId, Parameter
from layerstore.states import GatheredFile, GatheredTensor, ObjectContent, TensorSource


def parameter(name: str, *, aliases: tuple[str, ...] = (), dtype: str = "BF16") -> Parameter:
    """Return a parameter of two elements."""
    return Parameter(name=name, dtype=dtype, shape=(2,), frozen=False, aliases=aliases)


def buffer(name: str) -> Buffer:
    """Return a buffer of two elements."""
    return Buffer(name=name, dtype="F32", shape=(2,))


def gathered(*tensors: GatheredTensor, shape: tuple[int, ...] = (2,)) -> GatheredFile:
    """Return a file of whole weights."""
    entries, begin = {}, 0
    for tensor in tensors:
        end = begin + tensor.elements * by_code(tensor.dtype).bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
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


def chosen(*items: Parameter | Buffer, files: tuple[GatheredFile, ...] = (), **options: Any) -> ExportTensors:
    """Choose the tensors of an export of *items*."""
    is_own: Callable[[str], bool] = lambda name: True  # noqa: E731  # read as a default
    saved, may_rename = options.pop("saved", saved_tensors(files)), options.pop("may_rename", False)
    found = ExportTensors(
        parameters={item.name: item for item in items if isinstance(item, Parameter)},
        buffers={item.name: item for item in items if isinstance(item, Buffer)},
        **{"dtype": None, "is_own": is_own, "ask": nobody} | options,
    )
    found.choose(saved, may_rename=may_rename)
    return found


def nobody(shapes: object, expected: object) -> dict[str, FileTensor]:
    """Answer as where there is no Transformers to ask."""
    raise Unsupported("nobody knows")


def whole(name: str) -> FileTensor:
    """Return a tensor that is all of the parameter or buffer *name*."""
    return FileTensor(shape=(2,), runs=(Run(name=name, start=0, elements=2),))


def names(choice: ExportTensors) -> dict[str, str]:
    """Return whose bytes each tensor has."""
    return {tensor.name: tensor.layer_name for tensor in choice.tensors}


def test_wrappers_are_stripped_where_no_file_tells_the_names() -> None:
    """A tied parameter is there once, and persistent buffers are, too."""
    choice = chosen(
        parameter("_orig_mod.model.embed.weight", aliases=("_orig_mod.lm_head.weight",)),
        parameter("module.norm.weight"),
        buffer("module.shift"),
    )

    assert names(choice) == {
        "model.embed.weight": "_orig_mod.model.embed.weight",
        "norm.weight": "module.norm.weight",
        "shift": "module.shift",
    }
    assert choice.notes == []


def test_the_bases_own_files_lend_their_names() -> None:
    """Also the alias of a tied parameter, unless they have its own name, too; other buffers are left out."""
    alias, rotary = (
        derived("lm_head.weight", "embed.weight"),
        derived("rotary", "model.rotary", source=TensorSource.BUFFER),
    )
    for saved, name in (
        ((alias, rotary), "lm_head.weight"),
        ((alias, derived("embed.weight"), rotary), "embed.weight"),
    ):
        choice = chosen(
            parameter("embed.weight", aliases=("lm_head.weight",)),
            buffer("model.rotary"),
            buffer("model.other"),
            files=(gathered(*saved),),
        )

        assert names(choice) == {name: "embed.weight", "rotary": "model.rotary"}
        assert choice.notes == []


@pytest.mark.parametrize(("elements", "is_asked"), [(0, False), (1, True), (4, True)])
def test_a_name_with_another_number_of_elements_is_asked_about(elements: int, is_asked: bool) -> None:
    """It may be the parameter in another form; ZeRO-3 leaves empty ones where nobody gathers the weights."""
    saved = [WeightTensor(name="a", dtype="BF16", shape=(elements,))]

    if is_asked:
        with pytest.raises(Unsupported, match="nobody knows"):
            chosen(parameter("a"), saved=saved)
    else:
        assert [(tensor.name, tensor.shape) for tensor in chosen(parameter("a"), saved=saved).tensors] == [("a", (2,))]


def test_checksums_are_kept_only_for_the_same_bytes() -> None:
    """Another type, or another version of the layer, has other bytes."""
    file = gathered(derived("a"))

    assert [
        chosen(parameter("a"), files=(file,), **options).tensors[0].crc32
        for options in ({}, {"dtype": "BF16"}, {"dtype": "F16"}, {"is_own": lambda name: False})
    ] == [7, 7, None, None]


def test_adapters_keep_their_own_names_and_are_noted() -> None:
    """What is adapted, too: merging is not ours to do."""
    adapter = "base_model.model.lm_head.lora_A.default.weight"
    wrapped = "base_model.model.lm_head.base_layer.weight"

    choice = chosen(parameter(adapter), parameter(wrapped), parameter("base_model.model.norm.weight"))

    assert list(names(choice)) == [adapter, wrapped, "norm.weight"]
    assert "not merged" in choice.notes[0]
    assert adapter in choice.notes[0]


def test_parameters_that_no_file_names_are_written_and_noted() -> None:
    """An export has all weights, and what only the file has goes along as it is."""
    extra = chosen(parameter("a"), files=(gathered(derived("a"), stored("extra")),), dtype="F32")
    assert [(tensor.name, tensor.dtype) for tensor in extra.tensors] == [("a", "F32"), ("extra", "BF16")]
    choice = chosen(parameter("a"), parameter("module.b"), files=(gathered(derived("a")),))

    assert names(choice) == {"a": "a", "b": "module.b"}
    assert choice.notes == ["'module.b': in none of the base's own weights files; written under their own names"]


def test_other_names_in_the_file_are_asked_for() -> None:
    """With the model's names, wrappers aside, and what the file has of it; the answer says which is which."""
    asked: list[tuple[object, object]] = []

    def ask(shapes: object, expected: object) -> dict[str, FileTensor]:
        asked.append((shapes, expected))
        first, second = (FileTensor(shape=(1,), runs=(Run(name="b", start=start, elements=1),)) for start in (0, 1))
        return {"a": whole("a"), "b.0": first, "b.1": second, "shift.old": whole("shift")}

    file = gathered(derived("a"), stored("b.0"), stored("b.1"), stored("shift.old"))
    choice = chosen(parameter("a"), parameter("module.b"), buffer("shift"), files=(file,), ask=ask)

    assert asked == [({"a": (2,), "b": (2,), "shift": (2,)}, {"b.0": (2,), "b.1": (2,), "shift.old": (2,)})]
    assert names(choice) == {"a": "a", "b.0": "module.b", "b.1": "module.b", "shift.old": "shift"}
    runs = {tensor.name: tensor.runs for tensor in choice.tensors}
    assert runs["b.1"] == (Run(name="module.b", start=1, elements=1),)
    assert not runs["a"]
    assert not runs["shift.old"]
    assert {tensor.name: tensor.crc32 for tensor in choice.tensors}["b.0"] == 1


def test_a_parameter_that_no_name_in_the_file_means_is_refused() -> None:
    """Though all names there are understood."""
    file = gathered(derived("a"), stored("b.old"))

    with pytest.raises(Unsupported, match="no tensor there is 'c'"):
        chosen(parameter("a"), parameter("b"), parameter("c"), files=(file,), ask=lambda *_: {"b.old": whole("b")})


def test_without_a_file_all_names_are_asked_for() -> None:
    """A tied parameter is written once, under the first of its names."""
    answer = {"old.b": whole("b"), "old.head": whole("head"), "old.a": whole("a")}

    choice = chosen(parameter("a"), parameter("b", aliases=("head",)), ask=lambda *_: answer, may_rename=True)

    assert names(choice) == {"old.b": "b", "old.a": "a"}


def test_weights_unlike_their_layer_come_from_the_layer_and_are_noted() -> None:
    """A buffer that the trainer saved with other bytes is as it saved it."""
    file = gathered(stored("a"), stored("shift"))

    choice = chosen(parameter("a"), buffer("shift"), files=(file,))

    assert names(choice) == {"a": "a", "shift": ""}
    assert choice.notes == [
        "'a': the base's own weights files differ from its layers in value; the layers' are written"
    ]


def test_two_tensors_of_one_name_and_missing_layers_are_refused() -> None:
    """Nothing is dropped silently; names that would meet without their wrappers keep them."""
    assert names(chosen(parameter("module.a"), parameter("_orig_mod.a"))).keys() == {"module.a", "_orig_mod.a"}
    with pytest.raises(LayoutMismatch, match="'gone'"):
        chosen(parameter("a"), files=(gathered(derived("gone")),))
    with pytest.raises(Unsupported, match="two tensors would be called 'a'"):
        chosen(parameter("b"), files=(gathered(derived("a", "b")), gathered(stored("a"))))


def test_what_is_no_floating_point_keeps_its_type() -> None:
    """And that is noted, where a type was asked for."""
    choice = chosen(parameter("a"), parameter("q", dtype="I8"), dtype="F32")

    assert {tensor.name: tensor.dtype for tensor in choice.tensors} == {"a": "F32", "q": "I8"}
    assert choice.notes == ["'q': not floating point, so written unchanged"]


def test_a_tensor_in_no_layer_whose_bytes_only_a_kept_file_has_is_left_out() -> None:
    """A note names it; the export has every parameter."""
    choice = chosen(
        parameter("a"),
        saved=[*saved_tensors([gathered(derived("a"))]), WeightTensor(name="extra", dtype="BF16", shape=(1,))],
    )

    assert names(choice) == {"a": "a"}
    assert choice.notes == [
        "'extra': in the base's own weights files, but in no layer; left out, as only the base has it"
    ]
