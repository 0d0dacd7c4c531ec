"""``compose --format hf`` writes a folder for Transformers, and says so to people and to programs."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

import layerstore
from tests.cli.conftest import Run
from tests.generated import generate


@pytest.fixture
def trainers(tmp_path: Path) -> Path:
    """Return a store with one checkpoint of a Trainer, and its config."""
    with layerstore.init(tmp_path / "trainers") as store:
        store.ingest(generate(tmp_path / "run" / "checkpoint-2", layers=2, hidden=16, vocab=32, layout="hf"))
    return tmp_path / "trainers"


def test_it_writes_weights_and_says_how_to_load_them(run: Run, trainers: Path, tmp_path: Path) -> None:
    """What was written, in which type, and what to do with it; a changed config is warned of."""
    outcome = run("compose", "run@2", "--format", "hf", "--dtype", "fp32", "-o", "model", "--store", trainers)

    assert outcome.code == 0
    assert outcome.out.startswith(f"wrote {tmp_path / 'model'}: run@2, policy latest, fp32, 3 files, ")
    assert 'load it with LlamaForCausalLM.from_pretrained("' in outcome.out
    assert outcome.err == "warning: config.json is changed to float32, the element type of the weights\n"
    assert {str(tensor.dtype) for tensor in load_file(tmp_path / "model" / "model.safetensors").values()} == {
        "torch.float32"
    }


def test_it_does_not_promise_what_cannot_be_loaded(run: Run, store: Path) -> None:
    """Without a config there is a warning instead."""
    outcome = run("compose", "sft@2", "--format", "hf", "-o", "model", "--store", store)

    assert outcome.code == 0
    assert "from_pretrained" not in outcome.out
    assert outcome.err.startswith("warning: the base has no config.json")


def test_it_tells_programs(run: Run, trainers: Path, tmp_path: Path) -> None:
    """What was written and what is to be known of it, and of a plan the same notes."""
    words = ("compose", "run@2", "--format", "hf", "--dtype", "fp16", "--max-shard-size", "3KB", "-o", "model")
    planned = run(*words, "--dry-run", "--store", trainers, "--json").fields
    fields = run(*words, "--store", trainers, "--json").fields

    assert (fields["out"], fields["format"], fields["dtype"]) == (str(tmp_path / "model"), "hf", "fp16")
    assert sorted(fields["files"]) == sorted(path.name for path in (tmp_path / "model").iterdir())
    assert fields["bytes_written"] == sum(path.stat().st_size for path in (tmp_path / "model").iterdir())
    assert fields["notes"] == planned["notes"] == ["config.json is changed to float16, the element type of the weights"]


def test_a_delta_tells_programs_that_it_is_one(run: Run, trainers: Path) -> None:
    """Whether it was asked for by its name or by --since."""
    words = ("compose", "run@2", "--since", "run@2", "--store", trainers, "--json")

    formats = [run(*words, "--format", of, "-o", f"as-{of}").fields["format"] for of in ("delta", "hf")]

    assert formats == ["delta", "delta"]


def test_a_delta_has_no_dry_run_and_nothing_is_composed_to_say_so(run: Run, trainers: Path) -> None:
    """Not even the commit is looked for: with --without-damaged, all that it holds would be read."""
    outcome = run("compose", "nowhere@2", "--format", "hf", "--since", "run@2", "--dry-run", "--store", trainers)

    assert outcome.code == 2
    assert "a delta cannot be planned" in outcome.err


def test_a_dry_run_lists_the_files_and_writes_nothing(run: Run, trainers: Path, tmp_path: Path) -> None:
    """With their sizes; to programs it says that it was one."""
    before = sorted(tmp_path.iterdir())
    words = ("compose", "--format", "hf", "--max-shard-size", "3KB", "--dry-run", "--store", trainers)

    outcome, fields = run(*words), run(*words, "-o", "model", "--json").fields

    assert outcome.code == 0
    assert "model.safetensors.index.json" in outcome.out
    assert outcome.out.endswith("base run@2, policy latest, bf16; nothing was written\n")
    assert (fields["dry_run"], fields["bytes_written"], fields["out"]) == (True, 0, "model")
    assert all(name in outcome.out for name in fields["files"])
    assert before == sorted(tmp_path.iterdir())


def test_it_replaces_only_when_forced(run: Run, trainers: Path, tmp_path: Path) -> None:
    """As for shards; and neither format replaces the other."""
    words = ("compose", "--store", trainers, "-o")

    codes = [
        run(*words, "model", "--format", "hf").code,
        run(*words, "model", "--format", "hf").code,
        run(*words, "model", "--format", "hf", "--force", "--no-verify").code,
        run(*words, "model", "--force").code,
        run(*words, "shards").code,
        run(*words, "shards", "--format", "hf", "--force").code,
    ]

    assert codes == [0, 14, 0, 14, 0, 14]
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        "layerstore.json",
        "model.safetensors",
    ]
