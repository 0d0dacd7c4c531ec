"""What the reference pages say is what the code does: the worked example runs, and tables agree with it."""

import ast
import dataclasses
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from layerstore import errors, limits, model
from layerstore.dtypes import DTYPES
from layerstore.store import init
from layerstore.tree import Inert, Size, Storage, Tensor, Tree
from layerstore.zero3.pt import read_pt
from tests.deepspeed.scenarios import HUGGING_FACE_SCENARIO_OF, SCENARIO_OF
from tests.generated import generate
from tests.zero3.ptfiles import held, write_pt

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FORMAT = (DOCS / "reference" / "format.md").read_text()
SUPPORT = (DOCS / "reference" / "support.md").read_text()

ON_DISK = (
    model.Part,
    model.LayerPart,
    model.LayerVersion,
    model.Parameter,
    model.Buffer,
    model.StoredObject,
    model.StoredTensor,
    model.RankState,
    model.TreeFile,
    model.SourceFile,
    model.ObjectContent,
    model.BlobRef,
    model.GatheredFile,
    model.GatheredTensor,
    model.CommitRecord,
    model.LayerEntry,
    model.Origin,
    model.Fork,
    model.SourceLayout,
    model.PolicyUse,
    model.Observed,
    model.Pin,
)


# -- the format page -----------------------------------------------------------------------------------------------


def test_the_worked_example_reads_a_fresh_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own code, which knows nothing of layerstore, finds the numbers that were ingested."""
    monkeypatch.chdir(tmp_path)
    source = generate(tmp_path / "tiny", step=2)
    with init(tmp_path / "store") as store:
        store.ingest(source, run="tiny")
    (code,) = re.findall(r"```python\n(.*?)```", FORMAT, flags=re.DOTALL)
    found: dict[str, object] = {}

    assert "layerstore" not in code.replace("# ", "")
    exec(code, found)

    tree = cast("dict[str, list[Tensor]]", _optimizer(read_pt(next(source.glob("*/*_rank_0_*optim_states.pt"))).tree))
    assert found["name"] == "model.embed_tokens.weight"
    masters = cast("tuple[float, ...]", found["masters"])
    assert len(masters) == 64 * 64 // 2
    assert held(tree["fp32_flat_groups"][0].storage)[: 4 * len(masters)] == _float32(masters)
    assert cast("list[str]", found["keys"])[0] == "module"


def _float32(values: tuple[float, ...]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


@pytest.mark.parametrize("cls", ON_DISK, ids=lambda cls: cls.__name__)
def test_every_field_on_disk_is_in_its_table(cls: type) -> None:
    """Each map's table lists exactly the fields that the code writes, in the code's order."""
    match = re.search(rf"^\*\*{cls.__name__}\*\*\n\n((?:\|.*\n)+)", FORMAT, flags=re.MULTILINE)
    assert match is not None, f"there is no table of {cls.__name__}"

    assert [field.name for field in dataclasses.fields(cls)] == re.findall(r"^\| `(\w+)` \|", match[1], re.MULTILINE)


def test_no_map_on_disk_was_forgotten() -> None:
    """Every dataclass of the model is on the page, but for those that never reach the disk by themselves."""
    known = {cls.__name__ for cls in ON_DISK}
    described_otherwise = {"Commit", "FlatContent", "FragmentContent", "BufferContent"}

    defined = {name for name, value in vars(model).items() if dataclasses.is_dataclass(value)}

    assert defined - described_otherwise == known & defined


def test_element_types_are_in_their_table() -> None:
    """The page knows each element type and its size."""
    listed = {(code, int(size)) for code, size in re.findall(r"`([A-Z][A-Z0-9_]+)` \| (\d)", FORMAT)}

    assert {(row.code, row.bytes) for row in DTYPES} == listed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("more than 32768 bytes that is no layer", limits.INLINE_BYTES_MAX == 32768),
        ("The grace age is 5 minutes", limits.GC_GRACE_SECONDS == 5 * 60),
        ("in which nothing was done for a day", limits.GC_UNFINISHED_GRACE_SECONDS == 24 * 3600),
        ("of every 16 MiB of the file", limits.VERIFY_CHUNK_BYTES == 16 << 20),
        ("is the smallest multiple of 4096", limits.PAGE_BYTES == 4096),
        ("MUST NOT have more than 64 MiB", limits.RECORD_BYTES_MAX == 64 << 20),
        ("fields; at most 256 MiB", limits.BLOB_BYTES_MAX == 256 << 20),
        ("have 1 to 200 bytes of UTF-8", limits.NAME_BYTES_MAX == 200),
    ],
)
def test_numbers_on_the_page_are_the_codes(text: str, value: bool) -> None:
    """Sizes and bounds that the page states are those in force."""
    assert text in FORMAT
    assert value


# -- the support page ----------------------------------------------------------------------------------------------


def test_every_real_scenario_is_in_the_support_table() -> None:
    """What the page calls real was trained for real, and all of that is on the page."""
    scenarios = SCENARIO_OF.keys() | HUGGING_FACE_SCENARIO_OF.keys()
    named = {
        name
        for line in SUPPORT.splitlines()
        if "**real**" in line and line.startswith("|")
        for name in re.findall(r"`(\w+)`", line.partition("**real**")[2])
    }

    assert named <= scenarios
    assert scenarios - {"lightning"} == named - {"lightning"}


def test_words_of_refusals_are_the_codes() -> None:
    """Each refusal that the page quotes stands in a message of the library."""
    messages = "\n".join(
        node.value
        for path in (ROOT / "layerstore").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    quoted = {words for row in _refusals() for words in row}

    assert len(quoted) > 20
    assert sorted(words for words in quoted if words not in messages) == []


def _refusals() -> list[list[str]]:
    """Return what each row of the tables of refusals quotes in its last but one, or last, column."""
    settings = re.findall(r"^\| .*? \| refused \| (.*?) \|", SUPPORT, re.MULTILINE)
    states = SUPPORT.partition("## Checkpoints that are not whole")[2].partition("In all these cases")[0]
    states_words = re.findall(r"^\| .*? \| (`.*?`) \|$", states, re.MULTILINE)
    return [re.findall(r"`(.*?)`", cell) for cell in settings + states_words]


Edit = Callable[[Path], object]


def _optimizer(tree: Tree) -> dict[Tree, Tree]:
    return cast("dict[Tree, dict[Tree, Tree]]", tree)["optimizer_state_dict"]


def _edited(what: str, change: Callable[[dict[Tree, Tree]], object], *, ranks: str = "*") -> Edit:
    """Return what changes the trees of *what* files in place."""

    def edit(folder: Path) -> None:
        for path in sorted(folder.glob(f"*/*pp_rank_{ranks}_mp*{what}_states.pt")):
            tree = cast("dict[Tree, Tree]", read_pt(path).tree)
            change(tree)
            aside = folder / path.name
            write_pt(aside, tree)
            aside.replace(path)

    return edit


def _setting(name: str, value: Tree) -> Edit:
    def change(tree: dict[Tree, Tree]) -> None:
        cast("dict[Tree, dict[Tree, Tree]]", tree["ds_config"])["zero_optimization"][name] = value

    return _edited("model", change)


def _without_state(tree: dict[Tree, Tree]) -> None:
    cast("dict[Tree, dict[Tree, Tree]]", _optimizer(tree)["optimizer_state_dict"])["state"].pop(0)


def _swapped_out(tree: dict[Tree, Tree]) -> None:
    nothing = Storage(dtype="F32", elements=0, device="cpu", content=b"")
    masters = cast("list[Tree]", _optimizer(tree)["fp32_flat_groups"])
    masters[0] = Tensor(storage=nothing, offset=0, shape=Size((0,)), stride=(1,))


def _stage(number: int) -> Callable[[dict[Tree, Tree]], object]:
    name = "deepspeed.runtime.zero.config.ZeroStageEnum"
    return lambda tree: _optimizer(tree).update(zero_stage=Inert(name=name, arguments=(number,)))


def _remove(pattern: str) -> Edit:
    def edit(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return edit


def _cut(folder: Path) -> None:
    path = next(folder.glob("*/*rank_1*optim*"))
    path.write_bytes(path.read_bytes()[:-100])


def _flip(folder: Path) -> None:
    path = next(folder.glob("*/*rank_1*optim*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _as_another_model_rank(folder: Path) -> None:
    path = next(folder.glob("*/zero_pp_rank_0*"))
    shutil.copy(path, path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))


def _as_third_rank(folder: Path) -> None:
    for path in folder.glob("*/*rank_1_*"):
        shutil.copy(path, path.with_name(path.name.replace("rank_1_", "rank_2_")))


def _only(name: str) -> Edit:
    def edit(folder: Path) -> None:
        _remove("global_step2/*")(folder)
        (folder / "global_step2" / name).write_bytes(b"?")

    return edit


REFUSED: list[tuple[Edit, str, type[errors.LayerstoreError]]] = [
    (_edited("optim", _without_state), "the rest was never saved", errors.Unsupported),
    (lambda folder: (folder / "global_step2" / "offloaded_tensors").mkdir(), "offloaded to NVMe", errors.Unsupported),
    (_edited("optim", _swapped_out), "its optimizer was offloaded to NVMe", errors.Unsupported),
    (_setting("offload_param", {"device": "nvme"}), "frozen weights were offloaded", errors.Unsupported),
    (_setting("zero_quantized_nontrainable_weights", True), "frozen weights were quantized", errors.Unsupported),
    (_setting("mics_shard_size", 2), "was saved under MiCS", errors.Unsupported),
    (_edited("model", lambda tree: tree.update(mp_world_size=2)), "tensor parallelism of degree 2", errors.Unsupported),
    (_as_another_model_rank, "tensor parallelism of degree 2", errors.Unsupported),
    (_edited("model", lambda tree: tree.update(ds_autoep_layers=["x"])), "AutoEP layers", errors.Unsupported),
    (
        _edited("optim", lambda tree: _optimizer(tree).update(ds_zero_partition_groups=["x"])),
        "AutoEP expert parallelism",
        errors.Unsupported,
    ),
    (_edited("optim", _stage(2)), "was saved under ZeRO stage 2", errors.Unsupported),
    (_only("mp_rank_00_model_states.pt"), "only ZeRO stage 3 is supported", errors.Unsupported),
    (_only("layer_01-model_00-model_states.pt"), "pipeline-parallel", errors.Unsupported),
    (_only("layer_0_expert_0_mp_rank_00_model_states.pt"), "mixture-of-experts", errors.Unsupported),
    (_only("zero"), "universal", errors.Unsupported),
    (_only(".metadata"), "torch.distributed.checkpoint", errors.Unsupported),
    (_remove("*/*rank_1*optim*"), "is incomplete: optim_states of rank 1", errors.SourceCheckpoint),
    (_remove("*/*rank_1*"), "missing: 1", errors.SourceCheckpoint),
    (_remove("*/*optim*"), "has no optim_states files", errors.Unsupported),
    (_as_third_rank, "holds files of 3 ranks", errors.LayoutMismatch),
    (_cut, "truncated: ", errors.SourceCheckpoint),
    (_flip, "is damaged: entry", errors.SourceCheckpoint),
    (_edited("model", lambda tree: tree.update(global_steps=3), ranks="1"), "are mixed: ", errors.LayoutMismatch),
    (lambda folder: (folder / "latest").write_text("x"), "not a checkpoint beside it", errors.SourceCheckpoint),
    (lambda folder: (folder / "latest").write_text("../x"), "a tag is one name", errors.SourceCheckpoint),
    (lambda folder: (folder / "global_step2" / "l").symlink_to("x"), "is a symbolic link", errors.SourceCheckpoint),
    (
        _edited("model", lambda tree: tree.update(mine=Inert(name="my.Config"))),
        "names globals that are on no list: my.Config",
        errors.SourceCheckpoint,
    ),
]


@pytest.mark.fault(66)
@pytest.mark.known_fault("llmtailor 11")
@pytest.mark.parametrize(("edit", "words", "kind"), REFUSED, ids=[words for _, words, _ in REFUSED])
def test_what_the_support_page_refuses_is_refused(
    tmp_path: Path, edit: Edit, words: str, kind: type[errors.LayerstoreError]
) -> None:
    """A checkpoint of a refused shape is refused in the words of the page, and the store stays empty."""
    source = generate(tmp_path / "run", layers=1, hidden=8, vocab=16, frozen=("model.embed_tokens",))
    edit(source)
    with init(tmp_path / "store") as store:
        with pytest.raises(kind) as raised:
            store.ingest(source)

        assert words in str(raised.value)
        assert store.runs == []
        assert [
            path for path in store.path.rglob("*") if path.is_file() and path.parent.name in {"tmp", "commits"}
        ] == []


class _Meddler:
    """Writes to a checkpoint once its bytes are being read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, what: str, total_bytes: int) -> None:
        """Give the file a new time, as its writer would."""
        os.utime(self._path)

    def advance(self, size_bytes: int) -> None:
        """Let the bytes pass."""


@pytest.mark.fault(64)
def test_a_checkpoint_that_is_still_written_is_refused(tmp_path: Path) -> None:
    """A file that changes during ingest is noticed before anything is published."""
    source = generate(tmp_path / "run", layers=1, hidden=8, vocab=16)
    with init(tmp_path / "store") as store:
        with pytest.raises(errors.SourceCheckpoint, match="is still changing"):
            store.ingest(source, progress=_Meddler(source / "zero_to_fp32.py"))

        assert store.runs == []


@pytest.mark.fault(64)
def test_an_interrupted_trainer_is_refused(tmp_path: Path) -> None:
    """The Trainer's own sign of an unfinished save is heeded."""
    source = generate(tmp_path / "run" / "checkpoint-2", layers=1, hidden=8, vocab=16, layout="hf")
    (source / "checkpoint-is-incomplete.txt").touch()
    with init(tmp_path / "store") as store, pytest.raises(errors.SourceCheckpoint, match="is not finished: "):
        store.ingest(source)


def test_parameters_on_nvme_are_accepted_where_nothing_is_frozen(tmp_path: Path) -> None:
    """The masters are in the shards, whatever became of the parameters."""
    source = generate(tmp_path / "run", layers=1, hidden=8, vocab=16)
    _setting("offload_param", {"device": "nvme"})(source)
    with init(tmp_path / "store") as store:
        assert store.ingest(source).step == 2


# -- the map -------------------------------------------------------------------------------------------------------
