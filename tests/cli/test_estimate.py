"""``layerstore estimate``: what is asked, what is told, and what is refused."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.docs.scene import LLAMA_8B

MODEL = ("--params", "8B", "--layers", "32")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Return a folder with Llama-3.1-8B's config."""
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


def test_programs_get_every_figure(run: Run, llama: Path) -> None:
    """In bytes and seconds, with what was assumed."""
    found = run("estimate", llama, "--world-size", 16, "--bandwidth", "1GB/s", "--save-every", 50, "--json").fields

    assert found["model"]["parameters"] == found["model"]["trained"] == 8_030_261_248
    assert (found["model"]["name"], found["model"]["architecture"]) == ("Llama-3.1-8B", "llama")
    assert (found["saves"], found["interval_seconds"]) == (200, 500.0)
    assert found["assumed"] == ["--copy-rate", "--disk", "--step-seconds", "--steps"]
    lines = {line["policy"] or line["saved_by"]: line for line in found["lines"]}
    assert list(lines) == ["HF Trainer", "DeepSpeed", "full", "parity", "filter"]
    assert lines["HF Trainer"]["average_bytes"] == 14 * 8_030_261_248
    assert lines["DeepSpeed"]["save_seconds"] == pytest.approx(96.4, abs=0.1)
    assert lines["filter"]["cycle_saves"] == 10
    assert lines["parity"]["history_seconds"] == 500.0 * lines["parity"]["history_saves"]
    assert found["held_share"] == pytest.approx(96.4 / 596.4, rel=0.01)


def test_people_get_a_table_and_all_that_was_assumed(run: Run, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 80 columns; what nobody gave is named with the option that gives it."""
    monkeypatch.setenv("COLUMNS", "80")

    told = run("estimate", llama, "--policy", "filter:every=10,aux=always", "--policy", "full")

    assert told.code == 0
    assert max(map(len, told.out.splitlines())) <= 80
    for text in ("8.03 billion", "112.4 GB", "filter:every=10,aux=always", "100%", "--step-seconds", "cannot be"):
        assert text in "".join(told.out.split("\n")).replace("  ", " ") or text in told.out


def test_a_checkpoint_or_a_commit_will_do(run: Run, store: Path, checkpoints: Path, tmp_path: Path) -> None:
    """Both tell the same: ranks, layers, sizes. The path wins over a REF of the same name."""
    seen = run("estimate", checkpoints / "global_step4", "--json")
    stored = run("estimate", "sft@4", "--store", store, "--json")
    pinned = run("--store", store, "estimate", "best", "--world-size", 4, "--json").fields
    told = run("estimate", "sft@4", "--store", store)

    assert (seen.code, stored.code) == (0, 0)
    assert seen.fields["model"] | {"name": "", "source": ""} == stored.fields["model"] | {"name": "", "source": ""}
    assert (seen.fields["model"]["name"], seen.fields["model"]["source"]) == ("sft", "checkpoint")
    assert (stored.fields["model"]["name"], stored.fields["model"]["source"]) == ("sft@4", "commit")
    assert (seen.fields["world_size"], seen.fields["dtype"], pinned["world_size"]) == (2, "BF16", 4)
    assert seen.fields["lines"] == stored.fields["lines"]
    assert "--world-size" not in stored.fields["assumed"]
    assert told.out.startswith("sft@4 (a commit): ")
    assert "ranks, layers, frozen parameters and the optimizer are those of the commit" in told.out
    (tmp_path / "best").mkdir()
    assert "best holds neither" in run("estimate", "best", "--store", store).err


def test_what_is_neither_a_path_nor_a_commit_is_told(run: Run, store: Path) -> None:
    """With what was looked for and what there is; each place has its own code."""
    unknown = run("estimate", "sft@3", "--store", store)
    typo = run("estimate", "confg.json", "--store", store)
    path = run("estimate", "no/such/config.json", "--store", store)
    nowhere = run("estimate", "sft@3", "--store", "nowhere")

    assert (unknown.code, typo.code, path.code, nowhere.code) == (13, 13, 2, 10)
    assert unknown.err.splitlines() == [
        f"error: sft@3 is not a file or folder, and no commit of {store}: run 'sft' has no step 3",
        "hint: did you mean sft@2 or sft@4? steps here: 2, 4",
    ]
    assert typo.err.startswith(f"error: confg.json is not a file or folder, and no commit of {store}: ")
    assert len(typo.err.splitlines()) == 2


def test_a_size_in_the_place_of_a_model_leads_to_params(
    run: Run, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a store and without one; the hint can be typed as it stands."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")

    for place in (["--store", store], []):
        outcome = run("estimate", "8B", *place)
        hint = outcome.err.splitlines()[-1]

        assert outcome.code in {2, 13}
        assert hint == "hint: layerstore estimate --params 8B --layers 32"
    assert run(*hint.split()[2:]).code == 0


def test_the_same_layers_trained_alike_can_be_asked_for_drift(run: Run) -> None:
    """Without that it is refused, and the hint says where the number comes from."""
    refused = run("estimate", *MODEL, "--policy", "drift:stalest=20", "--json")
    found = run("estimate", *MODEL, "--policy", "drift:stalest=20", "--movement", 0.004, "--json").fields

    assert (refused.code, refused.error["kind"]) == (2, "invalid_input")
    assert "layerstore diff" in refused.error["hint"]
    assert found["lines"][-1]["average_bytes"] < found["lines"][-1]["first_bytes"] / 2
    assert any("one direction" in text for text in found["assumptions"])


def test_what_a_run_costs_is_told_beside_deepspeed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a table of its own, with what it rests on; programs get the same figures."""
    monkeypatch.setenv("COLUMNS", "80")
    words = ("estimate", *MODEL, "--keep-last", 3, "--keep-every", 1000, "--price", "0.023,2.50")

    told, found = run(*words), run(*words, "--json").fields

    lines = {line["policy"] or line["saved_by"]: line["cost"] for line in found["lines"]}
    assert found["prices"] == {"gb_month": 0.023, "gpu_hour": 2.5}
    assert (found["keep_last"], found["keep_every"], found["copy_bytes_per_second"]) == (3, 1000, 10**10)
    assert lines["DeepSpeed"]["held_up"] == pytest.approx(100 * 48.0 * 8 / 3600 * 2.5, rel=0.001)
    assert lines["parity"]["total"] < lines["full"]["total"] < lines["DeepSpeed"]["total"]
    row = next(line for line in told.out.splitlines() if line.startswith("DeepSpeed") and "$" in line)
    costs = [f"${lines['DeepSpeed'][what]:,.2f}" for what in ("storage", "held_up", "total")]
    assert row.split() == ["DeepSpeed", *costs, "100%"]
    assert max(map(len, told.out.splitlines())) <= 80
    said = " ".join(told.out.split())
    for text in ("the newest 3 and every 1,000 steps", "a rank copies 10.0 GB/s (--copy-rate)", "every 1 h"):
        assert text in said


def test_what_is_kept_is_counted_without_prices(run: Run) -> None:
    """On a disk: three full saves, and the one that the last of them replaces."""
    words = ("estimate", *MODEL, "--policy", "full", "--keep-last", 3)
    told, found = run(*words), run(*words, "--json").fields
    plain = run("estimate", *MODEL, "--policy", "full")

    *_, deepspeed, full = found["lines"]
    assert (found["prices"], full["held_bytes"]) == (None, 4 * full["first_bytes"])
    assert deepspeed["held_bytes"] == 3 * deepspeed["first_bytes"]
    header, row = (
        next(line for line in told.out.splitlines() if word in line) for word in ("SAVED BY", "layerstore full")
    )
    assert (header.split()[-1], row.split()[-2:]) == ("KEPT", ["384.0", "GB"])
    assert "if gc keeps the newest 3, and what the last save replaced" in " ".join(told.out.split())
    assert "KEPT" not in plain.out


def test_a_disk_that_is_too_slow_or_too_small_is_told(run: Run) -> None:
    """The figures stand, and what they mean is said."""
    told = run("estimate", *MODEL, "--save-every", 1, "--policy", "full", "--disk", "50GB")

    assert (told.code, told.out.count("no save")) == (0, 3)
    assert told.err.splitlines() == [
        "warning: layerstore full: a save takes 48.0 s, and the next comes after 10.0 s: training would wait"
    ]


def test_rows_name_how_finely_layers_are_kept(run: Run) -> None:
    """Of layerstore's saves; other programs keep everything exactly."""
    rows = run("estimate", *MODEL, "--policy", "full", "--precision", "delta8").out.splitlines()

    assert any(row.startswith("layerstore full in delta8  ") for row in rows)
    assert not any(row.startswith("DeepSpeed, ") for row in rows)


def test_a_small_model_is_told_in_units_that_fit_it(run: Run) -> None:
    """Two digits that say something, and not 0.00 billion parameters in 0.0 s."""
    told = run("estimate", "--params", "600M", "--layers", "12", "--trainable", "0.01%", "--steps", 100)

    assert re.search(r"^a model of 12 blocks: \d\d\d\.\d\d million parameters in \d+ layers, ", told.out)
    assert re.search(r", \d\d,\d\d\d of them trained$", told.out.splitlines()[0])
    assert re.search(r"\d\.\d ms +over 100 years$", told.out, re.MULTILINE)
    assert "less than 0.1% of the time" in told.out
    assert not re.search(r" 0\.0+ ", told.out)


def test_a_config_that_nobody_knows_is_refused(run: Run, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Transformers, or for want of it; with the way that needs no config."""
    (llama / "config.json").write_text(json.dumps(LLAMA_8B | {"architectures": ["BrandNew"]}))

    unknown = run("estimate", llama, "--json")
    monkeypatch.setitem(sys.modules, "transformers", None)
    missing = run("estimate", llama, "--json")

    assert (unknown.code, missing.code) == (16, 16)
    assert "BrandNew" in unknown.error["message"]
    assert "only Transformers knows" in missing.error["message"]
    for outcome in (unknown, missing):
        assert "--params 8B --layers 32" in outcome.error["hint"]
