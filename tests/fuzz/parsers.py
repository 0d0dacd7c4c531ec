"""
Every parser of the library, with sound samples of what it reads and the errors that it may end in.

Checksums are made right again in one half of the inputs: else nothing behind them would ever be tried.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st

import layerstore
from layerstore.errors import IntegrityError, InvalidInput, SourceCheckpoint, Unsupported
from layerstore.format import (
    STATE_MAGIC,
    VERSION_MAGIC,
    Plain,
    StoreIdentity,
    decode_state,
    decode_version,
    encode_blob,
    pack,
    pack_object,
    part_name,
    ref_of,
    seal_commit,
    seal_part,
    seal_pin,
    unpack,
    unseal_commit,
    unseal_part,
    unseal_pin,
)
from layerstore.format.records import unseal
from layerstore.hashing import digest
from layerstore.hf import weight_names
from layerstore.hf.plan import config_with_dtype, parse_config
from layerstore.history import note_pushed, pushed_to
from layerstore.history.metrics import Measured, _log_history, _logged_at
from layerstore.limits import KIB, RECIPE_BYTES_MAX
from layerstore.model import CommitId
from layerstore.parts import LayerPart, Part
from layerstore.policy.recipe import parse_recipe, read_text
from layerstore.precision import PrecisionName
from layerstore.publish import SaveTiming
from layerstore.publish.timings import _timing
from layerstore.remote.pull import completed
from layerstore.remote.remotes import Remotes
from layerstore.source.gathered import read_gathered
from layerstore.storage import Repository, row_of
from layerstore.storage.index import Index, IndexUnusable, _scan
from layerstore.tree import Located
from layerstore.zero3 import Pointer, pointer_bytes, read_pointer
from layerstore.zero3.discovery import shards_of_index, step_of_trainer
from layerstore.zero3.pt import layout_pt, read_pt
from layerstore.zero3.pt.ptwrite import write_pickle
from layerstore.zero3.pt.unpickle import read_pickle
from tests.faults.crafted import PartName, ask_all, craft, parts_of
from tests.faults.harness import copied, tiny_checkpoint
from tests.fuzz.harness import Parser, changed, changed_values
from tests.policy.recipes import FILE, llama
from tests.unit import samples
from tests.zero3.hostile.archives import HOSTILE_ARCHIVES, SLOW_ARCHIVES, torch_like
from tests.zero3.hostile.pickles import HOSTILE_PICKLES, SLOW_PICKLES, repeated_parts

_SOURCE = (SourceCheckpoint, Unsupported)
_STORED = (IntegrityError, Unsupported)
CANARY = "canary"

Blob = TypeVar("Blob")


def _either(*inputs: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.one_of(*inputs)


# -- .pt files -----------------------------------------------------------------------------------------------------


def _hostile_pickles() -> list[bytes]:
    quick = [make for make in HOSTILE_PICKLES.values() if make not in {repeated_parts, *SLOW_PICKLES}]
    return [made for make in quick if len(made := make(Path(CANARY))) < 64 * KIB]


@cache
def _pickles() -> list[bytes]:
    tree = write_pickle(samples.tree())[0]
    state = write_pickle({"module": {"a.weight": samples.tensor(bytes(16))}, "global_steps": 2, "args": {1, 2}})[0]
    return [tree, state]


# What torch.save can write, and what only others would: with arguments, so that much of it is a pickle.
_OPCODES = [
    b"N", b"\x88", b"\x89", b"K\x01", b"M\x01\x01", b"J\xff\xff\xff\xff", b"\x8a\x01\x05", b"G?\xf0\0\0\0\0\0\0",
    b"X\x01\0\0\0a", b"\x8c\x01b", b"C\x01c", b"(", b")", b"]", b"}", b"\x8f", b"t", b"\x85", b"\x86", b"\x87",
    b"l", b"d", b"a", b"e", b"s", b"u", b"\x90", b"q\0", b"r\x01\0\0\0", b"h\0", b"j\x01\0\0\0", b"\x94", b"2", b"0",
    b"1", b"R", b"b", b"\x81", b"\x92", b"Q", b"\x93", b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch\nFloatStorage\n", b"ccollections\nOrderedDict\n", b"cos\nsystem\n",
    b"cbuiltins\neval\n", b"ctorch\nSize\n", b"ibuiltins\nexec\n",
    b"cbuiltins\ngetattr\n", b"c_codecs\nencode\n", b"\x82\x01", b"P0\n", b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"X\x07\0\0\0storage", b"X\x01\0\0\x000", b"X\x03\0\0\0cpu", b"L1L\n", b"I01\n", b"F1.5\n", b"S'a'\n", b"\x80\x05",
]  # fmt: skip
_made_pickles = st.lists(st.sampled_from(_OPCODES), max_size=60).map(lambda parts: b"\x80\x02" + b"".join(parts) + b".")


def _pickle() -> Parser:
    records = {"0": Located(path=Path("x"), offset_bytes=64, size_bytes=16, crc32=0)}

    def parse(data: bytes, folder: Path) -> object:
        found, _ = read_pickle(data, path=Path("x.pt"), records=records)
        return write_pickle(found)  # whatever was accepted can be written

    inputs = _either(changed(_pickles()), changed(_hostile_pickles()), _made_pickles)
    return Parser(inputs=inputs, parse=parse, right=(*_SOURCE, InvalidInput))


def _crooked_archives() -> list[bytes]:
    quick = [make for make in HOSTILE_ARCHIVES.values() if make not in SLOW_ARCHIVES]
    return [made for make in quick if len(made := make()) < 64 * KIB]


def _sound_archive() -> bytes:
    tree: Any = {
        "module": {"a.weight": samples.tensor(bytes(16)), "b": samples.tensor(b"12345678" * 2)},
        "global_steps": 2,
    }
    return _assembled(tree, name="a")


def _assembled(tree: Any, *, name: str) -> bytes:
    layout = layout_pt(tree, name=name, alignment_bytes=64)
    data = bytearray(layout.size_bytes)
    for offset, part in layout.skeleton({storage: 0 for storage, _ in layout.storages}):
        data[offset : offset + len(part)] = part
    return bytes(data)


def _pt() -> Parser:
    def parse(data: bytes, folder: Path) -> object:
        path = folder / "x.pt"
        path.write_bytes(data)
        found = read_pt(path)
        for storage in found.storages:
            place = storage.content
            assert isinstance(place, Located)
            assert 0 <= place.offset_bytes <= place.offset_bytes + place.size_bytes <= len(data), (
                "bytes outside the file"
            )
        return layout_pt(found.tree, name="x")

    wrapped = _either(changed(_pickles()), _made_pickles).map(torch_like)
    inputs = _either(changed([_sound_archive(), torch_like()]), changed(_crooked_archives()), wrapped)
    return Parser(inputs=inputs, parse=parse, right=(*_SOURCE, InvalidInput))


def _pointer() -> Parser:
    plain = Pointer(store="/data/store", store_id="5e" * 16, name="sft@4", run="sft", attempt=2, step=4)
    mixture: list[Any] = [{"layer": "model.norm", "optimizer_step": 4}]
    pointers = [plain, dataclasses.replace(plain, layers=mixture, policy="parity")]
    files = [pointer_bytes(pointer, Path("states.pt")) for pointer in pointers]

    def edited(fields: Any) -> bytes:
        # As a pointer is made, but with any fields.
        whole: Any = samples.tree()
        return _assembled({"layerstore": fields, "this file cannot be loaded": whole["inert"]}, name="states")

    def parse(data: bytes, folder: Path) -> object:
        path = folder / "states.pt"
        path.write_bytes(data)
        found = read_pointer(path)
        if found is None:
            raise InvalidInput("no pointer")
        for field in dataclasses.fields(Pointer):
            value = getattr(found, field.name)
            assert field.name == "layers" or type(value) is field.type, f"{field.name} is {value!r}"
        return found.command

    values = changed_values([dataclasses.asdict(pointer) for pointer in pointers]).filter(_is_shallow).map(edited)
    return Parser(inputs=_either(changed(files), values), parse=parse, right=(InvalidInput,))


def _is_shallow(value: Any, depth: int = 0) -> bool:
    """Whether a tree can be written out at all."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 50 and all(_is_shallow(part, depth + 1) for part in parts)


# -- JSON ----------------------------------------------------------------------------------------------------------


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, default=lambda odd: odd.decode("latin-1")).encode()
    except (ValueError, RecursionError):
        return b"{}"


def _json_inputs(value: Any) -> st.SearchStrategy[bytes]:
    return _either(changed([_json(value)]), changed_values([value]).map(_json))


def _safetensors() -> Parser:
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
    }
    long = {"a": {"dtype": "U8", "shape": [int("9" * 200)] * 70, "data_offsets": [0, 0]}}

    def framed(text: bytes, claimed: int | None = None) -> bytes:
        return (len(text) if claimed is None else claimed).to_bytes(8, "little") + text + bytes(24)

    def parse(data: bytes, folder: Path) -> object:
        path = folder / "model.safetensors"
        path.write_bytes(data)
        return read_gathered([path], parameters={}, buffers={})

    texts = [json.dumps(header).encode(), json.dumps(long).encode()]
    values = changed_values([header, long]).map(_json)
    inputs = _either(changed([framed(text) for text in texts]), changed(texts).map(framed), values.map(framed))
    return Parser(inputs=inputs, parse=parse, right=_SOURCE)


def _trainer_state() -> Parser:
    state = {"global_step": 4, "log_history": [{"step": 4, "loss": 1.5}, {"step": 2, "eval_loss": 2}], "best": None}

    def parse(data: bytes, folder: Path) -> object:
        entries = _log_history(data)
        by_step = [metrics for _, metrics in Measured({}, entries).by_step()]
        assert all(type(value) is float for metrics in (_logged_at(entries, 4), *by_step) for value in metrics.values())
        path = folder / "trainer_state.json"
        path.write_bytes(data)
        return step_of_trainer(path)

    return Parser(inputs=_json_inputs(state), parse=parse, right=(SourceCheckpoint,))


def _weights_index() -> Parser:
    index = {"metadata": {"total_size": 5}, "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "x"}}

    def parse(data: bytes, folder: Path) -> object:
        path = folder / "model.safetensors.index.json"
        path.write_bytes(data)
        return shards_of_index(path)

    return Parser(inputs=_json_inputs(index), parse=parse, right=(SourceCheckpoint,))


def _config() -> Parser:
    config = {"dtype": "float32", "text_config": {"torch_dtype": "float32", "x_config": {}}, "n": 1}

    def parse(data: bytes, folder: Path) -> object:
        try:
            return config_with_dtype(parse_config(data), "BF16")
        except ValueError as exc:
            raise InvalidInput("no config") from exc

    return Parser(inputs=_json_inputs(config), parse=parse, right=(InvalidInput,))


def _identity() -> Parser:
    identity = StoreIdentity(format=1, store_id="5e" * 16, hash="xxh3_128", created="2026-01-01T00:00:00+0000")
    sound = identity.encode()
    fields = {name: value for name, value in json.loads(sound).items() if name != "checksum"}

    def checked(fields: Any) -> bytes:
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str)
        whole = fields | {"checksum": digest(text.encode()).hex()} if isinstance(fields, dict) else fields
        return (json.dumps(whole, indent=2, sort_keys=True, default=str) + "\n").encode()

    def parse(data: bytes, folder: Path) -> object:
        found = StoreIdentity.decode(data, what="store.json")
        assert found.encode() == data, "another spelling was accepted"
        return found

    inputs = _either(changed([sound]), changed_values([fields]).filter(_is_shallow).map(checked))
    return Parser(inputs=inputs, parse=parse, right=_STORED)


def _timings() -> Parser:
    timing = SaveTiming(
        run="sft", attempt=1, step=4, save_number=0, blocked_seconds=0.1, durable_seconds=1.0, visible_seconds=None,
        copied_bytes=1, written_bytes=1, layers_saved=1, layers=2, queued=0, failure="",
    )  # fmt: skip
    return Parser(inputs=_json_inputs(dataclasses.asdict(timing)), parse=lambda data, _: _timing(data), right=())


def _own_notes() -> Parser:
    """Return the parser of the notes about remotes, one text for all three."""
    commits = ["a" * 32, "b" * 32]
    values = [{"url": "s3://bucket/x"}, {"origin": "s3://bucket/x", "b": "file:///b"}, {"s3://bucket/x": commits}]

    def parse(data: bytes, folder: Path) -> object:
        repo = _opened(folder)
        for path in (repo.layout.remotes, repo.layout.pushed, repo.layout.partial):
            path.write_bytes(data)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            note_pushed(repo, "s3://bucket/y", {name for names in pushed_to(repo).values() for name in names})
        urls = Remotes(repo).urls()
        assert all(type(url) is str for url in urls.values())
        completed(repo).objects.close()
        return urls

    inputs = _either(*map(_json_inputs, values), changed([b"[" * 100_000, b'{"a":' * 100_000]))
    return Parser(inputs=inputs, parse=parse, right=(IntegrityError,), may_write=True)


@cache
def _opened(folder: Path) -> Repository:
    return samples.repo(Path(tempfile.mkdtemp(dir=folder)) / "store")  # one for each child


# -- envelopes and blobs -------------------------------------------------------------------------------------------


def _packed(value: Plain) -> bytes | None:
    try:
        return pack(value)
    except InvalidInput:
        return None


def _in_an_envelope(
    name: str, sound: list[bytes], read: Callable[[bytes], Any], write: Callable[[Any], bytes]
) -> Parser:
    """Return the parser of files called *name*: as they are, and with a payload that was changed and sealed again."""

    def sealed(payload: bytes) -> bytes:
        body = head + len(payload).to_bytes(8, "big") + payload  # by hand: `seal` refuses what nobody could read
        return body + digest(body)

    def parse(data: bytes, folder: Path) -> object:
        found = read(data)
        assert write(found) == data, "another spelling was accepted"
        return found

    payloads = [unseal(data, name=name, store_id=samples.STORE_ID) for data in sound]
    head = sound[0][:-16].removesuffix(payloads[0])[:-8]  # without the digest, the payload and its length
    assert sealed(payloads[0]) == sound[0]
    values = [unpack(payload, what="") for payload in payloads]
    inputs = _either(
        changed(sound),
        changed(sound).map(lambda data: data[:-16] + digest(data[:-16])),
        changed(payloads).map(sealed),
        _encodable(values).map(sealed),
    )
    return Parser(inputs=inputs, parse=parse, right=_STORED)


def _encodable(values: list[Any]) -> st.SearchStrategy[bytes]:
    packed: st.SearchStrategy[Any] = changed_values(values).map(_packed).filter(lambda data: data is not None)
    return packed


_STEP = "commits/sft/4." + "a" * 32


def _commit() -> Parser:
    plain = samples.commit()
    other = samples.commit(samples.record(supersedes=[CommitId("f" * 32)], layers=[]))
    sound = [seal_commit(commit, name=_STEP, store_id=samples.STORE_ID) for commit in (plain, other)]

    return _in_an_envelope(
        _STEP,
        sound,
        lambda data: unseal_commit(data, name=_STEP, store_id=samples.STORE_ID),
        lambda commit: seal_commit(commit, name=_STEP, store_id=samples.STORE_ID),
    )


def _pin() -> Parser:
    name = "pins/best"
    return _in_an_envelope(
        name,
        [seal_pin(samples.pin(), name=name, store_id=samples.STORE_ID)],
        lambda data: unseal_pin(data, name=name, store_id=samples.STORE_ID),
        lambda pin: seal_pin(pin, name=name, store_id=samples.STORE_ID),
    )


def part() -> Part:
    """Return a rank's part of a commit."""
    layers = (LayerPart(layer="head", objects=tuple(map(pack_object, samples.version("head").objects))),)
    return Part(
        session="0" * 32, save=1, rank=0, agreement="x", layers=layers, state=samples.blob_ref(),
        bytes_new=1, bytes_reused=0, failure="",
    )  # fmt: skip


def _part() -> Parser:
    name = part_name("0" * 32, 1, 0)
    return _in_an_envelope(
        name,
        [seal_part(part(), store_id=samples.STORE_ID)],
        lambda data: unseal_part(data, name=name, store_id=samples.STORE_ID),
        lambda found: seal_part(found, store_id=samples.STORE_ID),
    )


def _version() -> Parser:
    return _blob(samples.version(), encode_blob, decode_version, magic=VERSION_MAGIC)


def _coded_version() -> Parser:
    return _blob(samples.coded_version(), encode_blob, decode_version, magic=VERSION_MAGIC)


def _state() -> Parser:
    return _blob(samples.state(), encode_blob, decode_state, magic=STATE_MAGIC)


def _blob(sample: Blob, encode: Callable[[Blob], bytes], decode: Callable[..., Blob], *, magic: bytes) -> Parser:
    sound = encode(sample)

    def parse(data: bytes, folder: Path) -> object:
        found = decode(data, ref=ref_of(data))
        assert encode(found) == data, "another spelling was accepted"
        return found

    values = _encodable([unpack(sound[len(magic) :], what="")]).map(lambda data: magic + data)
    return Parser(inputs=_either(changed([sound]), values), parse=parse, right=_STORED)


def _index() -> Parser:
    """Return the parser of an index's values: a row under its key."""
    index = Index(Path(tempfile.mkdtemp(prefix="index-")), store_id=samples.STORE_ID)
    hidden = samples.commit(samples.record(step=2))
    sound = row_of(samples.commit(samples.record(step=4, supersedes=[hidden.id])))
    index.add([sound])
    with index._transaction() as transaction:
        ((key, data),) = list(_scan(transaction, b"step/"))

    def parse(value: bytes, folder: Path) -> object:
        index._change(lambda transaction: transaction.put(key, value))
        found = index.rows("sft")
        assert found == {sound.file_name: sound}, "another row"
        return found

    return Parser(inputs=changed([data]), parse=parse, right=(IndexUnusable,))


# -- recipes -------------------------------------------------------------------------------------------------------

_RECIPES = [
    b"base: 200\nlayers:\n  model.layers.[0-1]: 100\n  model.embed_tokens: sft@100\nrest: base\n",
    b"base: sft~1@200\nlayers: {'model.layers.*': base, lm_head: 100, model.norm: {step: 100}}\nrest: base\n",
    b"merge_method: passthrough\nbase_model: out/checkpoint-200\ndtype: bfloat16\nslices:\n"
    b"  - sources: [{model: out/checkpoint-100, layer_range: [0, 2]}]\n"
    b"  - sources: [{model: out/checkpoint-200, layer_range: [2, 4]}]\n",
]


def _recipe() -> Parser:
    def parse(data: bytes, folder: Path) -> object:
        text = read_text(data[:RECIPE_BYTES_MAX], name=FILE)  # no more is read of a file
        return parse_recipe(text, name=FILE).plan(llama())

    yamls = changed_values([{"base": 200, "layers": {"model.layers.0": 100, "model.norm": "base"}, "rest": "base"}])
    return Parser(inputs=_either(changed(_RECIPES), yamls.map(_json)), parse=parse, right=(InvalidInput,))


# -- whole stores --------------------------------------------------------------------------------------------------


def _crafted(part: PartName, precision: PrecisionName = "exact") -> Parser:
    """Return the parser of a store with one commit, a *part* of which says something else; asked everything."""

    def is_not_asked(question: str) -> object:
        raise Unsupported("Transformers would be asked in a process of its own")

    vars(weight_names)["_answer"] = is_not_asked
    folder = Path(tempfile.mkdtemp(prefix="crafted-"))
    with layerstore.init(folder / "sound") as store:
        if precision != "exact":  # only the compact save is left, and what it refers to
            store.ingest(tiny_checkpoint(folder / "hf", layout="hf", step=1), run="run")
            shutil.rmtree(folder / "hf")
        store.ingest(tiny_checkpoint(folder / "hf", layout="hf"), run="run", precision=precision)
        for record in store.path.glob("commits/*/1.*"):
            record.unlink()
    plain = parts_of(folder / "sound")[part]
    ask_all(copied(folder / "sound", folder / "store"), "run@2", folder / "out")  # imports what it needs

    def parse(data: bytes, scratch: Path) -> object:
        shutil.rmtree(folder / "out", ignore_errors=True)
        store = copied(folder / "sound", folder / "store")
        craft(store, part, lambda _: unpack(data, what="a crafted part"))
        refused = ask_all(store, "run@2", folder / "out")
        assert sorted(each.name for each in folder.iterdir()) == ["hf", "out", "sound", "store"], "a path led out"
        if "write" in refused or "compose" in refused:
            raise InvalidInput(f"{len(refused)} questions were refused")
        return None

    return Parser(
        inputs=_encodable([plain]), parse=parse, right=(IntegrityError, InvalidInput), seconds_max=20.0, may_write=True
    )


STORES: dict[str, Callable[[], Parser]] = {
    "crafted_record": partial(_crafted, "record"),
    "crafted_version": partial(_crafted, "version"),
    "crafted_state": partial(_crafted, "state"),
    "crafted_compact": partial(_crafted, "version", "delta8"),
}
"""Each input is a whole store, which takes a hundred times as long as a file."""

PARSERS: dict[str, Callable[[], Parser]] = {
    **STORES,
    "pt": _pt,
    "pickle": _pickle,
    "pointer": _pointer,
    "safetensors": _safetensors,
    "trainer_state": _trainer_state,
    "weights_index": _weights_index,
    "config": _config,
    "identity": _identity,
    "commit": _commit,
    "pin": _pin,
    "part": _part,
    "version": _version,
    "coded_version": _coded_version,
    "state": _state,
    "index": _index,
    "own_notes": _own_notes,
    "recipe": _recipe,
    "timings": _timings,
}
"""Each made where it is used: samples take a moment."""
