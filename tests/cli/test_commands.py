"""Each command does its work, and says what it did to people and to programs."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

import layerstore
from layerstore.publish import SaveTiming
from tests.cli.conftest import Run
from tests.faults.harness import flip, object_of
from tests.generated import generate

LAYERS = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]


def test_ingest_says_what_it_saved_and_that_it_was_saved_already(run: Run, checkpoints: Path) -> None:
    """The second time nothing is written, which is not an error."""
    run("init")

    first, second = (run("ingest", checkpoints, "--tag", "global_step2") for _ in range(2))

    assert (first.code, second.code) == (0, 0)
    assert first.out.startswith("saved sft@2 (commit ")
    assert "5 layers" in first.out
    assert second.out.startswith("already saved: sft@2 (commit ")


def test_ingest_says_that_the_store_had_rotted_or_was_not_read(run: Run, store: Path, checkpoints: Path) -> None:
    """What was damaged is counted and warned of; with --trust-store nothing is read, which is said for both readers."""
    words = ("ingest", "--store", store, checkpoints / "global_step2", "--run")
    with layerstore.open(store) as opened:
        rotten = object_of(opened, "sft@2", "lm_head")
    flip(rotten)

    trusting = run(*words, "first", "--trust-store")
    trusting_again = run(*words, "first", "--trust-store", "--json")
    reading = run(*words, "second")
    flip(rotten)
    again = run(*words, "second")
    counts = run(*words, "second", "--json").fields

    assert " reused, not read, in " in trusting.out.replace("\n  ", " ")
    assert (trusting_again.fields["reused_read"], trusting_again.fields["objects_healed"]) == (False, 0)
    assert "not read" not in reading.out
    assert reading.err.startswith("warning: 1 object in the store was damaged")
    assert again.out.rstrip().endswith("; 1 damaged object written again")
    assert (counts["reused_read"], counts["objects_healed"], counts["objects_new"]) == (True, 0, 0)
    trusted = run(*words, "second", "--trust-store")
    assert trusted.out.rstrip().endswith("; nothing was written; reused objects not read")


def test_ingest_takes_several_in_the_order_of_their_numbers(run: Run, tmp_path: Path) -> None:
    """A shell lists checkpoint-10 before checkpoint-9; saves are counted in the order of training."""
    folders = [generate(tmp_path / "run" / f"checkpoint-{step}", hidden=16, vocab=32, step=step) for step in (10, 9)]
    run("init")

    fields = run("ingest", *folders, "--json").fields

    assert [commit["step"] for commit in fields["commits"]] == [9, 10]
    assert [commit["run"] for commit in fields["commits"]] == ["run", "run"]


def test_ingest_reports_what_was_saved_before_a_failure(run: Run, checkpoints: Path, tmp_path: Path) -> None:
    """A later checkpoint's damage does not hide, nor undo, what came before."""
    run("init")
    torn = tmp_path / "torn" / "global_step4"
    shutil.copytree(checkpoints / "global_step4", torn, copy_function=shutil.copy)
    shard = next(torn.glob("*optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:1000])

    outcome = run("ingest", checkpoints / "global_step2", torn, "--run", "sft", "--json")

    assert outcome.code == 21
    assert [commit["step"] for commit in outcome.fields["commits"]] == [2]
    assert outcome.error["kind"] == "source_checkpoint"
    assert [commit["step"] for commit in run("log", "--json").fields["commits"]] == [2]


def test_ingest_pins_a_single_commit_only(run: Run, checkpoints: Path) -> None:
    """A pin means one commit: with two checkpoints nothing is begun."""
    run("init")

    pinned = run("ingest", checkpoints / "global_step2", "--pin", "best")
    refused = run("ingest", checkpoints / "global_step2", checkpoints / "global_step4", "--pin", "worst")

    assert (pinned.code, refused.code) == (0, 2)
    assert pinned.out.splitlines()[-1].endswith("; pinned as best")
    assert [commit["pins"] for commit in run("log", "--json").fields["commits"]] == [["best"]]


def test_ingest_says_that_it_pinned_what_was_saved_already(run: Run, store: Path, checkpoints: Path) -> None:
    """To say that nothing was written would not be true."""
    again = run("ingest", checkpoints / "global_step4", "--pin", "second", "--store", store)
    plain = run("ingest", checkpoints / "global_step4", "--store", store)

    assert again.out.startswith("already saved: sft@4 (commit ")
    assert again.out.endswith("; pinned as second, no layer was written\n")
    assert plain.out.endswith("; nothing was written\n")
    assert run("show", "second", "--store", store).code == 0


def test_ingest_replaces_only_when_asked(run: Run, store: Path, tmp_path: Path) -> None:
    """Other content for a saved step is a conflict, whose hint is the option that overrides it."""
    other = generate(tmp_path / "sft", hidden=16, vocab=32, step=2, seed=1)

    refused = run("ingest", other, "--store", store)
    replaced = run("ingest", other, "--store", store, "--replace")

    assert (refused.code, replaced.code) == (15, 0)
    assert "--replace" in refused.err


def test_log_lists_commits_newest_first(run: Run, store: Path) -> None:
    """One line per commit, under a heading; the attempt is only shown where there are several."""
    outcome = run("log", "--store", store)
    lines = [line.split() for line in outcome.out.splitlines()]

    assert outcome.code == 0
    assert lines[0] == ["RUN", "STEP", "COMMIT", "SAVED", "LAYERS", "NEW", "PINS"]
    assert [(line[0], line[1]) for line in lines[1:]] == [("sft", "4"), ("sft", "2")]
    assert lines[2][-1] == "best"


def test_what_a_commit_lacks_is_said(run: Run, store: Path, checkpoints: Path) -> None:
    """Moments that a collection has dropped."""
    run("pin", "--delete", "best", "--store", store)
    run("gc", "--drop-optimizer-older-than", "1", "--grace", "0s", "--yes", "--store", store)

    logged = [line.split() for line in run("log", "--store", store).out.splitlines()]
    commits = run("log", "--json", "--store", store).fields["commits"]
    shown = {step: run("show", f"sft@{step}", "--store", store).out for step in (2, 4)}
    again = run("ingest", checkpoints / "global_step2", "--store", store)

    assert logged[0] == ["RUN", "STEP", "COMMIT", "SAVED", "LAYERS", "NEW", "LACKS"]
    assert logged[2][-1] == "moments"
    assert [each["has_moments"] for each in commits] == [True, False]
    assert "weights only: gc removed its moments" in shown[2]
    assert "moments" not in shown[4]
    assert (again.code, "stored without its moments" in again.out + again.err) == (0, True)


def test_log_comes_in_pages(run: Run, store: Path) -> None:
    """The last line of a page is the command that shows the next; programs are told that there is more."""
    first = run("log", "--limit", "1", "--store", store)
    fields = run("log", "--limit", "1", "--store", store, "--json").fields
    hint, _, command = first.out.splitlines()[-1].partition(": ")

    assert hint == "1 older commit"
    assert [commit["step"] for commit in fields["commits"]] == [4]
    assert fields["more"] is True

    words = command.split()[1:]
    assert ["--store", str(store), "log", "sft", "--before", fields["commits"][0]["commit"][:12]] == words[:6]
    assert words[6:] == ["--limit", "1"]
    drawn = run("log", "-n", "1", "--graph", "--store", store).out.splitlines()[-1]
    assert drawn.split()[-3:] == ["--limit", "1", "--graph"]
    last = run(*words, "--store", store)
    assert [line.split()[1] for line in last.out.splitlines()] == ["STEP", "2"]
    assert run(*words, "--store", store, "--json").fields["more"] is False
    assert run("log", "--limit", "0", "--store", store, "--json").fields["more"] is False


@pytest.mark.parametrize(("commit", "code"), [("0000", 13), ("", 2), ("nonsense", 13)])
def test_log_goes_on_after_one_commit_only(run: Run, store: Path, commit: str, code: int) -> None:
    """What is not a commit of the log, or could be several, is refused in one line."""
    outcome = run("log", "--before", commit, "--store", store)

    assert outcome.code == code
    assert len(outcome.err.splitlines()) == 2


def test_no_store_is_made_below_a_folder_called_by_the_sign_for_home(run: Run, tmp_path: Path) -> None:
    """Quotes keep a shell from expanding it, and whoever tidied up with `rm -r ~` would lose a home."""
    outcome = run("init", tmp_path / "~" / "store")

    assert (outcome.code, "which only a shell expands" in outcome.err) == (2, True)
    assert not (tmp_path / "~").exists()


def test_a_store_is_not_made_inside_another(run: Run, store: Path, tmp_path: Path) -> None:
    """Its files would be strangers there. And who looks beside a store is shown to it."""
    inside = run("init", store / "commits" / "mine")
    beside = run("log", "--store", store.parent)
    elsewhere = run("log", "--store", tmp_path / "new")

    assert (inside.code, "is inside the store" in inside.err) == (2, True)
    assert f"name the one inside it: --store {store}" in beside.err
    assert "hint: name yours with --store or LAYERSTORE_STORE" in elsewhere.err
    assert run("verify", "--store", store).code == 0


def test_who_names_no_store_is_shown_what_is_near(run: Run, store: Path) -> None:
    """A store of a similar name, or that a store is a folder."""
    resembling = run("log", "--store", store.with_name(f"{store.name}s"))
    in_a_file = run("ingest", "c", "--store", store / "store.json")

    assert f"hint: did you mean --store {store}? name yours with --store or LAYERSTORE_STORE" in resembling.err
    assert in_a_file.err.splitlines() == [
        f"error: there is no store at {store / 'store.json'}: a store is a folder, not a file",
        "hint: layerstore init makes one in a new or empty folder, or name yours with --store",
    ]


def test_log_of_an_empty_store_says_what_to_do_next(run: Run) -> None:
    """An empty answer is not a failure."""
    run("init")

    assert "layerstore ingest" in run("log").out
    assert run("log", "--json").fields["commits"] == []


def test_log_warns_of_a_damaged_record(run: Run, store: Path) -> None:
    """The others are listed; the damaged one is named on stderr and, for programs, apart from them."""
    record = next((store / "commits" / "sft").glob("2.*"))
    record.write_bytes(b"damaged")

    outcome = run("log", "--store", store, "--json")

    assert outcome.code == 0
    assert [commit["step"] for commit in outcome.fields["commits"]] == [4]
    assert [(entry["run"], entry["step"]) for entry in outcome.fields["damaged"]] == [("sft", 2)]
    assert outcome.err.startswith("warning: sft@2 is left out")


def test_a_lost_index_is_one_warning(run: Run, store: Path) -> None:
    """A damaged index is rebuilt, said in one line, and answers are the same."""
    before = run("log", "--store", store, "--json").fields
    (store / "manifest" / "data.mdb").write_bytes(b"damaged" * 1000)

    after = run("log", "--store", store, "--json")

    assert before == after.fields
    assert [line.startswith("warning: ") for line in after.err.splitlines()] == [True]


def test_show_tells_everything_about_one_commit(run: Run, store: Path) -> None:
    """A summary, then where each layer was saved."""
    outcome = run("show", "best", "--store", store)
    lines = outcome.out.splitlines()

    assert lines[0].startswith("commit ")
    assert "sft@2" in lines[1]
    assert [line.split()[0] for line in lines[lines.index("") + 2 :]] == LAYERS


def test_show_tells_what_a_commit_replaced(run: Run, store: Path, tmp_path: Path) -> None:
    """The id that it hides, the pins of its content (a pin of what it replaced is none), and its policy."""
    old = run("show", "sft@2", "--store", store, "--json").fields
    run("ingest", generate(tmp_path / "sft", hidden=16, vocab=32, step=2, seed=1), "--replace", "--store", store)

    new = run("show", "sft@2", "--store", store, "--json").fields
    people = run("show", "sft@2", "--store", store).out

    assert (old["pins"], old["supersedes"]) == (["best"], [])
    assert (new["pins"], new["supersedes"]) == ([], [old["commit"]])
    assert (new["policy"], new["policy_parameters"], new["layers_saved"]) == ("full", {}, 5)
    assert f"replaces     {old['commit'][:12]}" in people
    assert "5, all saved at this step" in people
    assert "(RNG, scheduler, files)" in people


def test_ls_adds_up_the_kinds(run: Run, store: Path) -> None:
    """Each layer's sizes by kind, and a total; kinds that nothing has are left out."""
    lines = run("ls", "sft@4", "--store", store).out.splitlines()

    assert lines[0].split() == ["LAYER", "STEP", "PARAMETERS", "MASTER", "OPTIMIZER", "SIZE"]
    assert [*LAYERS, "total"] == [line.split()[0] for line in lines[1:]]


def test_compose_writes_a_checkpoint(run: Run, store: Path, tmp_path: Path) -> None:
    """The output has DeepSpeed's files, and is only replaced by force."""
    first = run("compose", "sft@2", "-o", "out", "--store", store)
    second = run("compose", "sft@2", "-o", "out", "--store", store)
    third = run("compose", "sft@4", "-o", "out", "--store", store, "--force", "--no-verify", "--policy", "exact")

    assert (first.code, second.code, third.code) == (0, 14, 0)
    assert first.out.startswith(f"wrote {tmp_path / 'out'}: sft@2, policy latest, 5 layers, 2 ranks, ")
    assert (tmp_path / "out" / "latest").read_text() == "global_step4"


def test_compose_dry_run_prints_the_plan_and_writes_nothing(run: Run, store: Path, tmp_path: Path) -> None:
    """No -o is needed; each layer is listed with the save that it comes from."""
    before = sorted(tmp_path.iterdir())

    outcome = run("compose", "--step", "2", "--dry-run", "--store", store)

    rows = [line.split() for line in outcome.out.splitlines()]
    assert rows[0] == ["LAYER", "FROM", "STEPS", "BEHIND", "SAVES", "BEHIND", "SIZE"]
    assert [[name, "sft@2"] for name in LAYERS] == [row[:2] for row in rows[1:6]]
    assert before == sorted(tmp_path.iterdir())
    assert run("compose", "--dry-run", "--store", store, "--json").fields["dry_run"] is True


@pytest.mark.parametrize("format_", ["dcp", "universal"])
def test_a_dry_run_for_another_trainer_lists_layers_before_files(run: Run, store: Path, format_: str) -> None:
    """As for DeepSpeed's shards: which save each layer comes from, and how old it is."""
    outcome = run("compose", "sft@4", "--policy", "parity", "--format", format_, "--dry-run", "--store", store)

    layers, files, facts = outcome.out.split("\n\n")
    assert {row.split()[1] for row in layers.splitlines()[1:6]} == {"sft@2", "sft@4"}
    assert files.startswith("FILE ")
    assert "oldest layer: " in facts


def test_compose_for_other_ranks_says_what_does_not_carry_over(run: Run, store: Path, tmp_path: Path) -> None:
    """Notes are warnings for people and a field for programs, also of a dry run; the plan names the ranks."""
    words = ("compose", "sft@2", "--world-size", "3", "--store", store)
    planned, written = run(*words, "--dry-run"), run(*words, "-o", "out", "--json")

    notes = written.fields["notes"]
    assert [f"warning: {note}" for note in notes] == planned.err.splitlines() == written.err.splitlines()
    assert "with 3 ranks instead of 2 it is 1.5 times what it was" in notes[-1]
    assert planned.out.splitlines()[-1] == "base sft@2, policy latest, 3 ranks, ZeRO stage 3; nothing was written"
    assert written.fields["world_size"] == 3
    assert len(list((tmp_path / "out" / "global_step2").glob("*optim_states.pt"))) == 3


@pytest.mark.parametrize("words", [("--world-size", "0"), ("--world-size", "x"), ("--adam-step", "own")])
def test_compose_refuses_sizes_and_steps_that_are_none(run: Run, store: Path, words: tuple[str, ...]) -> None:
    """There is no checkpoint of no ranks, and two ways to set the counters."""
    assert run("compose", "--dry-run", *words, "--store", store).code == 2


@pytest.mark.parametrize(
    ("words", "step"),
    [((), 4), (("sft",), 4), (("best",), 2), (("--run", "sft"), 4), (("--run", "sft", "--step", "2"), 2)],
)
def test_compose_finds_the_base(run: Run, store: Path, words: tuple[str, ...], step: int) -> None:
    """REF, --run and --step, or nothing at all for the only run's newest step."""
    assert step == run("compose", *words, "--dry-run", "--json", "--store", store).fields["step"]


def test_compose_asks_what_is_not_clear(run: Run, store: Path, checkpoints: Path) -> None:
    """REF and --run or --step are alternatives; with two runs, --step alone is not enough."""
    both = run("compose", "sft", "--step", "2", "--dry-run", "--store", store)
    run("ingest", checkpoints / "global_step2", "--run", "other", "--store", store)
    whose = run("compose", "--step", "2", "--dry-run", "--store", store)

    assert (both.code, whose.code) == (2, 2)
    assert "both" in both.err
    assert "--run" in whose.err


def test_pins_are_made_listed_and_deleted(run: Run, store: Path) -> None:
    """Deleting a pin leaves its commit."""
    made = run("pin", "newest", "sft", "--store", store, "--json").fields
    listed = run("pin", "--list", "--store", store, "--json").fields["pins"]
    unasked = run("pin", "--quiet", "--store", store)
    deleted = run("pin", "--delete", "best", "--store", store, "--json").fields

    assert (made["attempt"], made["mixture"], made["policy"]) == (1, False, "full")
    assert [(pin["pin"], pin["step"], pin["layers"]) for pin in listed] == [("best", 2, 5), ("newest", 4, 5)]
    assert [line.split()[0] for line in unasked.out.splitlines()] == ["PIN", "best", "newest"]
    assert deleted["deleted"] == "best"
    assert [line.split()[0] for line in run("pin", "--list", "--store", store).out.splitlines()] == ["PIN", "newest"]
    assert len(run("log", "--store", store, "--json").fields["commits"]) == 2


def test_deleting_a_pin_says_what_stays(run: Run, store: Path) -> None:
    """A visible commit does; of a dropped one the next collection takes what nothing else needs."""
    said = {}
    run("compose", "sft@4", "--policy", "parity", "--pin", "mix", "--store", store)
    run("pin", "other", "sft@2", "--store", store)
    said["visible"] = run("pin", "--delete", "other", "--store", store).out
    said["mixture"] = run("pin", "--delete", "mix", "--store", store).out
    run("drop", "sft@2", "--store", store)
    run("pin", "again", "best", "--store", store)
    fields = run("pin", "--delete", "again", "--json", "--store", store).fields
    said["hidden"] = run("pin", "--delete", "best", "--store", store).out
    collected = run("gc", "--grace", "0s", "--empty-trash", "--json", "--store", store).fields

    assert said == {
        "visible": "deleted the pin other; its commit stays\n",
        "mixture": "deleted the pin mix, a mixture by parity; the next gc removes what only this pin kept\n",
        "hidden": "deleted the pin best; the next gc removes what only this pin kept\n",
    }
    assert fields == {"schema": 1, "deleted": "again", "commit_visible": False}
    assert collected["objects_removed"] > 0


def test_a_damaged_pin_is_not_left_out_in_silence(run: Run, store: Path) -> None:
    """The others are listed, the damaged one is named: it may be what kept a commit."""
    run("pin", "newest", "sft", "--store", store)
    (store / "pins" / "best").write_bytes(b"damaged")

    people = run("pin", "--list", "--store", store)
    programs = run("pin", "--list", "--store", store, "--json")

    assert (people.code, programs.code) == (0, 0)
    assert people.out.splitlines()[0].split() == ["PIN", "MEANS", "COMMIT", "SAVED", "LAYERS"]
    assert [line.split()[0] for line in people.out.splitlines()[1:]] == ["newest"]
    assert people.err.startswith("warning: pin best is left out, it is damaged: ")
    assert [pin["pin"] for pin in programs.fields["damaged"]] == ["best"]


@pytest.mark.parametrize("words", [("best",), ("--list", "--delete", "best"), ("best", "sft", "--list")])
def test_pin_wants_one_deed(run: Run, store: Path, words: tuple[str, ...]) -> None:
    """Half an order is refused, and so are two."""
    assert run("pin", *words, "--store", store).code == 2


def test_verify_of_a_sound_store(run: Run, store: Path) -> None:
    """Quick or thorough, for people and for programs; orphans are counted and harm nothing."""
    quick = run("verify", "--store", store)
    thorough = run("verify", "sft@2", "--read-data", "--store", store, "--json")

    assert (quick.code, thorough.code) == (0, 0)
    assert "no damage" in quick.out
    assert run("verify", "sft", "--store", store).out.startswith("checked sft@4: 1 record, ")
    assert tuple(thorough.fields[key] for key in ("ok", "damaged", "orphans")) == (True, [], 0)
    assert thorough.fields["bytes_read"] > 0


def test_verify_tells_what_is_damaged_and_who_needs_it(run: Run, store: Path) -> None:
    """Damage is on stdout, in full; the exit code and the last line of stderr say that there is some."""
    damaged = _largest_object(store)
    flip(damaged)

    unread = run("verify", "--store", store)
    people = run("verify", "--read-data", "--store", store)
    programs = run("verify", "--read-data", "--store", store, "--json")

    hint = run("compose", programs.fields["damaged"][0]["needed_by"][0], "--store", store, "-o", "out").err

    assert (unread.code, people.code, programs.code) == (0, 20, 20)
    assert unread.out.splitlines()[-1] == "tensor data was not read; --read-data checks it too"
    assert "were not read" not in people.out + run("verify", "--store", store, "--json").out
    assert re.search(r"hint: layerstore .*verify sft@\d+ --read-data says which composites are still intact", hint)
    assert people.err.splitlines()[-1].endswith(" repair --read-data --dry-run says what can be done")
    assert "1 damaged" in people.out
    assert f"damaged object  objects/{damaged.name[:2]}/{damaged.name}" in people.out.splitlines()
    assert people.err.startswith("error: ")
    assert programs.fields["ok"] is False
    assert list(programs.fields["damaged"][0]) == ["kind", "id", "path", "needed_by", "reason", "costs"]
    assert damaged.name == programs.fields["damaged"][0]["id"]
    assert programs.fields["damaged"][0]["needed_by"]
    assert (programs.error["kind"], programs.error["code"]) == ("damaged", 20)


def _largest_object(store: Path) -> Path:
    return max(
        (path for path in (store / "objects").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def test_a_save_that_nobody_timed_is_said_to_be(run: Run, store: Path) -> None:
    """Its columns are not gap in the table, and a line below says why."""
    timed, quiet = run("log", "--timing", "--store", store), run("log", "--timing", "--store", store, "-q")

    *_, newer, older, why = timed.out.splitlines()
    assert [line.split()[-3:] for line in (newer, older)] == [["-", "-", "-"]] * 2
    assert why == "-: not measured; only saves made with attach() are timed"
    assert why not in quiet.out


@pytest.mark.parametrize("edited", ["blocked_seconds", "durable_seconds", "visible_seconds", "copied_bytes"])
def test_a_timing_that_somebody_edited_is_none(run: Run, store: Path, edited: str) -> None:
    """A text is no number of seconds or bytes: the save is as one that nobody timed."""
    timing = SaveTiming(
        run="sft", attempt=1, step=4, save_number=1, blocked_seconds=0.1, durable_seconds=1.0, visible_seconds=1.0,
        copied_bytes=1, written_bytes=1, layers_saved=1, layers=2, queued=0, failure="",
    )  # fmt: skip
    path = store / "stats" / "sft" / "0.jsonl"
    path.parent.mkdir(parents=True)

    path.write_text(json.dumps(asdict(timing)))
    sound = run("log", "--timing", "--store", store)
    path.write_text(json.dumps(asdict(timing) | {edited: "0.1"}))
    unsound = run("log", "--timing", "--store", store)

    assert sound.out.splitlines()[1].endswith(" 100.0 ms   1.00 s     1 B")
    assert (unsound.code, unsound.out.splitlines()[1].split()[-3:]) == (0, ["-", "-", "-"])


def test_compose_says_at_which_step_a_mixture_resumes(run: Run, store: Path) -> None:
    """The base's, whatever the age of the layers."""
    mixed = ("compose", "sft@4", "--policy", "parity", "--store", store)

    planned, written = run(*mixed, "--dry-run"), run(*mixed, "-o", "out")
    plain = run("compose", "sft@4", "--dry-run", "--store", store)

    for outcome in (planned, written):
        assert "training resumes at step 4" in outcome.out.splitlines()
        assert re.search(r"^oldest layer: \S+ from sft@2, 2 steps behind the base$", outcome.out, re.MULTILINE)
        assert "Adam steps differ: 2 in 2 layers, 4 in 3; written as 4" in outcome.out.splitlines()
    assert "training resumes" not in plain.out


def test_the_next_step_is_ready_to_paste(run: Run, store: Path, tmp_path: Path) -> None:
    """With the folder that was written, as Python takes it."""
    outcome = run("compose", "sft@4", "-o", "out", "--store", store)

    assert f'engine.load_checkpoint("{tmp_path / "out"}")' in outcome.out


def test_compose_says_which_save_a_damaged_layer_is_of(run: Run, store: Path) -> None:
    """Of a composite that is not its base, and a look at the base would find nothing."""
    with layerstore.open(store) as opened:
        line = next(line for line in opened.compose("sft@4", policy="parity").ls() if line.step == 2)
    (store / "objects" / line.version[:2] / line.version).unlink()

    outcome = run("compose", "sft@4", "--policy", "parity", "--store", store, "-o", "out")

    assert outcome.err.startswith(f"error: {line.layer} of sft@2: object ")
    assert f"hint: layerstore --store {store} verify sft@2 says which composites are still intact" in outcome.err
    assert "sft@2: 1 layer lost" in run("verify", "sft@2", "--store", store).out


@pytest.mark.parametrize("command", ["ls", "show"])
def test_ls_and_show_say_which_layer_has_lost_its_version(run: Run, store: Path, command: str) -> None:
    """In the words of compose."""
    with layerstore.open(store) as opened:
        version = opened.compose("sft").layers["lm_head"].version
    (store / "objects" / version[:2] / version).unlink()

    outcome = run(command, "sft", "--store", store)

    assert outcome.code == 20
    assert re.search(r"error: lm_head of sft@\d+: object [0-9a-f]+ \(\d+ bytes\) is missing", outcome.err)
    assert re.search(r"hint: layerstore .*verify sft@\d+ says which composites are still intact", outcome.err)


def test_reindex_counts_what_it_covers(run: Run, store: Path) -> None:
    """Commits that are no longer there are named once, and damage nothing."""
    record = max((store / "commits").glob("*/*"), key=lambda path: int(path.name.split(".")[0]))
    record.unlink()

    told = run("log", "--store", store)
    assert f"({record.name.split('.')[1][:12]}) is no longer there" in told.err
    done = run("reindex", "--store", store)
    assert (done.code, done.out, done.err) == (0, "rebuilt the index; it covers 1 commit\n", "")
    assert run("reindex", "--store", store, "--json").fields == {"schema": 1, "commits": 1}
    assert run("verify", "--store", store).code == 0
    shutil.rmtree(store / "manifest")
    assert run("reindex", "--store", store, "--json").fields["commits"] == 1


def test_version(run: Run) -> None:
    """For people and for programs."""
    assert run("--version").out == "layerstore 0.2.0\n"
    assert run("--version", "--json").fields == {"schema": 1, "version": "0.2.0"}
