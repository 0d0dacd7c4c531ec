"""Mistakes that people make at the command line: each gets its exit code and an answer, and changes nothing."""

import errno
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.conftest import Run


@dataclass(frozen=True, slots=True)
class Mistake:
    """A command line that cannot be meant, and its answer."""

    words: str
    code: int
    error: str
    """What the error says."""
    hint: str
    """What the hint says."""
    has_store: bool = True


MODEL = "--params 8B --layers 32"
FORMATS = "'shards', 'zero3', 'hf', 'dcp', 'universal', 'delta'"
DTYPES = "--dtype: 'int8' is not one of 'bf16', 'fp16', 'fp32'"
PRECISIONS = "--precision: '{}' is not one of 'exact', 'moments8', 'delta8', 'delta4'"
DELTAS = "did you mean delta8 or delta4? layerstore ingest --help"

MISTAKES = [
    # a name of the other kind
    Mistake("log best", 13, "'best' is a pin, not a run", "layerstore show best"),
    Mistake("stats best", 13, "'best' is a pin, not a run", "layerstore show best"),
    Mistake("gc best --keep-last 1", 13, "'best' is a pin, not a run", "layerstore show best"),
    Mistake("report --run best -o page.html", 13, "'best' is a pin, not a run", "layerstore show best"),
    Mistake("log sft@4", 13, "no run 'sft@4'", "layerstore show sft@4"),
    Mistake("gc sft@4 --keep-last 1", 13, "no run 'sft@4'", "layerstore show sft@4"),
    Mistake("show 4", 13, "no run '4'", "sft@4"),
    Mistake("drop best", 2, "'best' is a pin", "layerstore pin --delete best"),
    Mistake("show .layerstore", 2, "is a path, not a reference", "RUN@STEP"),
    Mistake("diff sft@2 sft/global_step4", 2, "is a path, not a reference", "RUN@STEP"),
    # the wrong order, or something left out
    Mistake("pin sft@4 nice", 2, "pin takes NAME, then REF: 'sft@4'", "layerstore pin nice sft@4"),
    Mistake("pin sft nice", 2, "pin takes NAME, then REF: 'sft'", "layerstore pin nice sft"),
    Mistake("pin best nice", 2, "pin takes NAME, then REF: 'best'", "layerstore pin nice best"),
    Mistake("pin nice", 2, "the REF for 'nice' is missing", "layerstore pin nice RUN@STEP"),
    Mistake("pin sft@4", 2, "the NAME for 'sft@4' is missing", "layerstore pin NAME sft@4"),
    Mistake("remote add origin", 2, "remote add takes NAME and URL", "layerstore remote --help"),
    Mistake("compose sft@4", 2, "does not know where to write", "-o DIR"),
    Mistake("compose sft@4 out", 2, "compose takes REF; unexpected: out", "-o DIR"),
    Mistake("compose", 2, "does not know where to write", "-o DIR"),
    Mistake("diff sft@2", 2, "missing argument 'B'", "layerstore diff --help"),
    Mistake("bisect sft@2 sft@4", 2, "bisect takes GOOD, BAD and a command", "-- python judge.py {}"),
    Mistake("bisect sft@2", 2, "bisect takes GOOD, BAD and a command", "-- python judge.py {}"),
    Mistake("bisect sft@2 sft@4 -- true", 2, "the command has no {}", "-- python judge.py {}"),
    # several where one is taken: the first is not touched
    Mistake("drop", 2, "drop takes REFs, or --run RUN", "layerstore drop --help"),
    Mistake("drop sft@2 sft@9", 13, "run 'sft' has no step 9", "did you mean sft@4"),
    Mistake("drop sft@2 best", 2, "'best' is a pin", "layerstore pin --delete best"),
    Mistake("verify sft@2 sft@9", 2, "verify takes REF; unexpected: sft@9", "one commit at a time"),
    Mistake("undrop", 2, "undrop takes REFs, or --run RUN", "layerstore undrop --help"),
    Mistake("undrop sft@2 sft@9", 13, "sft@2 is not in the trash", "layerstore log --dropped"),
    Mistake("reindex now", 2, "reindex takes no argument; unexpected: now", "layerstore reindex --help"),
    Mistake("push origin sft@2 sft@9", 13, "has no step 9", "sft@4"),
    Mistake("gc sft other --keep-last 1", 13, "no run 'other'", "runs here: sft"),
    Mistake(
        "ingest SOURCE/global_step2 SOURCE/global_step9 --run new",
        21,
        "does not exist; a ZeRO checkpoint is a folder; none of 2 checkpoints were taken",
        "SOURCE/global_step2",
    ),
    # other tools' verbs
    Mistake("inspect sft", 2, "no such command 'inspect'", "did you mean show?"),
    Mistake("get sft@2", 2, "no such command 'get'", "did you mean compose?"),
    Mistake("rename best better", 2, "no such command 'rename'", "layerstore pin NEW OLD"),
    Mistake("tags", 2, "no such command 'tags'", "layerstore pin --list"),
    Mistake("unpin best", 2, "no such command 'unpin'", "layerstore pin --delete PIN"),
    Mistake("forget sft@2", 2, "no such command 'forget'", "layerstore drop REF"),
    Mistake("snapshots", 2, "no such command 'snapshots'", "did you mean log?"),
    Mistake("restore", 2, "no such command 'restore'", "hint: did you mean compose? layerstore --help"),
    Mistake("save", 2, "no such command 'save'", "hint: did you mean ingest? layerstore --help"),
    Mistake("prune", 2, "no such command 'prune'", "hint: did you mean gc? layerstore --help"),
    Mistake("help", 2, "no such command 'help'", "layerstore --help"),
    Mistake("help gc", 2, "no such command 'help'", "layerstore COMMAND --help"),
    Mistake("undelete sft@2", 2, "no such command 'undelete'", "did you mean undrop?"),
    # places
    Mistake("ingest SOURCE/global_step", 21, "does not exist", "did you mean SOURCE/global_step"),
    Mistake("ingest nope", 21, "does not exist; a ZeRO checkpoint is a folder", "the training run saved to"),
    Mistake("compose -o .layerstore/inside", 2, "is inside the store", "choose a path outside the store with -o"),
    Mistake("report -o mix.yaml", 14, "mix.yaml exists and is not a report; nothing was changed", "choose another -o"),
    Mistake("report -o pgae/report.html", 2, "there is no folder pgae for a report", "mkdir -p pgae"),
    Mistake("estimate meta-llama/Llama-3.1-8B", 2, "estimate downloads nothing", "hf download meta-llama/Llama-3.1-8B"),
    Mistake("estimate gone", 13, "gone is not a file or folder", "runs here: sft"),
    Mistake("show --store SOURCE", 10, "there is no store at SOURCE", "name yours with --store"),
    # numbers and words of options
    Mistake("gc --keep 3", 2, "no such option: --keep", "--keep-last"),
    Mistake("gc --keep-within 3", 2, "'3' is not a duration", "36h"),
    Mistake(
        "compose --format safetensors -o out",
        2,
        "'safetensors' is not one of 'shards', 'zero3', 'hf'",
        "compose --help",
    ),
    Mistake("verify --read-data-subset 200%", 2, "'200%' is not a sample", "10%"),
    # mistyped: the nearest is suggested, unless a guess would only confuse
    Mistake("compsoe", 2, "no such command 'compsoe'", "did you mean compose? layerstore --help"),
    Mistake("compose --polcy parity", 2, "no such option: --polcy", "did you mean --policy? layerstore compose --help"),
    Mistake("ingest c --precision delt8", 2, PRECISIONS.format("delt8"), DELTAS),
    Mistake("log stf", 13, "there is no run 'stf' in this store", "hint: did you mean sft? runs here: sft"),
    Mistake("log zzz", 13, "there is no run 'zzz' in this store", "hint: runs here: sft"),
    Mistake("show bset", 13, "there is no run 'bset'", "hint: did you mean best? runs here: sft"),
    Mistake("show SFT", 13, "there is no run 'SFT'", "hint: did you mean sft? runs here: sft"),
    Mistake("show sft@3", 13, "run 'sft' has no step 3", "hint: did you mean sft@2 or sft@4? steps here: 2, 4"),
    Mistake("show sft@1", 13, "run 'sft' has no step 1", "hint: did you mean sft@2? steps here: 2, 4"),
    Mistake("show sft@400", 13, "run 'sft' has no step 400", "hint: did you mean sft@4? steps here: 2, 4"),
    Mistake("pin --delete bets", 13, "there is no pin 'bets'", "hint: did you mean best? layerstore pin --list"),
    Mistake("gc stf --dry-run", 13, "there is no run 'stf'", "hint: did you mean sft? runs here: sft"),
    Mistake("ls sft lm_haed", 13, "there is no layer 'lm_haed' in this commit", "hint: did you mean lm_head? layers: "),
    Mistake("compose --policy partiy --dry-run", 2, "unknown policy 'partiy'", "hint: did you mean parity? policies: "),
    Mistake("compose --recipe mix.yaml --dry-run", 2, "no layer of the model is called", "hint: did you mean lm_head?"),
    Mistake(
        "diff sft@2 sft@4 model.layer.1", 13, "'model.layer.1' in sft@2 or sft@4", "hint: did you mean model.layers.1"
    ),
    Mistake("diff sft@2 sft@4 model.layers.1.up.weight", 13, "there is no layer", "hint: did you mean model.layers.1?"),
    Mistake(
        "diff sft@2 sft@4 model.norm --sort exp_avgs",
        2,
        "parameters of this layer cannot be sorted by 'exp_avgs'",
        "hint: did you mean exp_avg or exp_avg_sq? choose one of name, elements, master, exp_avg, exp_avg_sq",
    ),
    # what is not there, or is already
    Mistake("compose nope --dry-run", 13, "there is no run 'nope'", "runs here: sft"),
    Mistake("diff sft@2 nope", 13, "there is no run 'nope'", "runs here: sft"),
    Mistake("stats nope", 13, "there is no run 'nope'", "runs here: sft"),
    Mistake("gc other --keep-last 1", 13, "there is no run 'other'", "runs here: sft"),
    Mistake("report -o report.html --run nope", 13, "there is no run 'nope'", "runs here: sft"),
    Mistake("pin best sft@4", 14, "pin 'best' already refers to sft@2", "layerstore pin --delete best"),
    Mistake("pin sft sft@4", 15, "'sft' is the name of a run", "choose another name"),
    Mistake("show a@b@c", 2, "'a@b@c' is not a reference", "write RUN@STEP"),
    Mistake("bisect log", 2, "there is no bisection in layerstore-bisect", "layerstore bisect GOOD BAD -- COMMAND {}"),
    # what an option is not
    Mistake("compose --step x", 2, "--step x is not a whole number", "layerstore compose --help"),
    Mistake("compose --step 1.5", 2, "--step 1.5 is not a whole number", "layerstore compose --help"),
    Mistake("compose --step=-1", 2, "--step -1 is less than 0", "layerstore compose --help"),
    Mistake("compose --step -1", 2, "--step -1 is less than 0", "layerstore compose --help"),
    Mistake(f"compose --step {'1' * 5000}", 2, f"--step {'1' * 5000} is too large", "layerstore compose --help"),
    Mistake("compose --threshold x", 2, "--threshold x is not a number", "layerstore compose --help"),
    Mistake("compose --adam-step no", 2, "--adam-step: 'no' is not one of 'unify', 'per-layer'", "compose --help"),
    Mistake("log -n ten", 2, "--limit ten is not a whole number", "layerstore log --help"),
    Mistake("log --limit", 2, "option '--limit' requires an argument", "hint: layerstore log --help"),
    Mistake("gc --keep-last 0", 2, "keep last cannot be 0", "a whole number, 1 or more"),
    Mistake("gc --keep-best eval_loss:x", 2, "'eval_loss:x' does not name the best", "METRIC[:N][:min|max]"),
    Mistake("gc --keep-best f1", 2, "no commit has the metric 'f1'", "no metrics at all"),
    Mistake("gc --grace soon", 2, "'soon' is not a duration", "36h"),
    Mistake("report -o report.html --keep-best f1", 2, "no commit has the metric 'f1'", "no metrics at all"),
    Mistake("diff sft@2 sft@4 --sort master", 2, "--sort sorts the parameters of one layer", "name the layer after B"),
    Mistake("verify --read-data-subset 0/3", 2, "'0/3' is not a sample", "10%"),
    Mistake("verify --read-data-subset 4/3", 2, "'4/3' is not a sample", "10%"),
    Mistake("verify --read-data-subset 0%", 2, "'0%' is not a sample", "10%"),
    Mistake("verify --read-data-subset 101%", 2, "'101%' is not a sample", "10%"),
    Mistake("verify --read-data-subset some", 2, "'some' is not a sample", "10%"),
    Mistake("verify --read-data-subset 1/3 --seed 1", 2, "a seed is for percentages", "leave it out"),
    Mistake("verify --seed 1", 2, "--seed is for --read-data-subset", "layerstore verify --help"),
    Mistake("verify --read-data --read-data-subset 1/3", 2, "were both given", "leave one of the two out"),
    Mistake("ingest SOURCE --precision delta9", 2, PRECISIONS.format("delta9"), DELTAS),
    Mistake("ingest SOURCE --exact-every 0", 2, "exact_every is 0: every Nth version of a layer is exact", "10th"),
    Mistake("ingest SOURCE --exact-every often", 2, "invalid count 'often' for --exact-every", "a number, or none"),
    Mistake("ingest SOURCE --exact-every 10", 2, "exact_every has no effect without a precision", "such as delta8"),
    Mistake("compose --dtype bf16 -o model", 2, "format shards has no option dtype", "of hf, delta"),
    Mistake("compose --max-shard-size 1GB -o model", 2, "format shards has no option max_shard_size", "of hf"),
    Mistake("compose --format gguf -o model", 2, f"--format: 'gguf' is not one of {FORMATS}", "--help"),
    Mistake("compose --format hf --dtype int8 -o model", 2, DTYPES, "layerstore compose --help"),
    Mistake("compose --format hf --max-shard-size big -o model", 2, "'big' is not a size", "5GB"),
    Mistake("compose --format hf --max-shard-size 0 -o model", 2, "a size needs at least one byte", "5GB"),
    # estimates, which need no store
    Mistake(
        "estimate --world-size 2000000", 2, "--world-size 2000000 is more than 1000000", "layerstore estimate --help"
    ),
    Mistake(
        "estimate --params 8B --layers 2 --policy filter:evry=2", 2, "no setting 'evry'", "hint: did you mean every? "
    ),
    Mistake("estimate config.json MODEL", 2, "which model? MODEL or --params with --layers", "RUN@STEP"),
    Mistake("estimate --params 8B", 2, "--params and --layers go together", "--params 8B --layers 32"),
    Mistake("estimate --params eight --layers 32", 2, "'eight' is not a number of parameters", "8B"),
    Mistake("estimate --params 1K --layers 32", 2, "1,000 parameters are too few for 32 blocks", "8B and 32"),
    Mistake("estimate --params 8B --layers 1000000000", 2, "no model has 1,000,000,000 blocks", "from 1 to 2,000"),
    Mistake("estimate MODEL --step-seconds inf", 2, "the step time finite", "--step-seconds"),
    Mistake("estimate MODEL --trainable none", 2, "--trainable 'none' is not a share", "0.5%"),
    Mistake("estimate MODEL --trainable 200%", 2, "the trained share cannot be 2", "0.5%"),
    Mistake("estimate MODEL --bandwidth fast", 2, "'fast' is not a size", "5GB"),
    Mistake("estimate MODEL --copy-rate fast", 2, "'fast' is not a size", "5GB"),
    Mistake(
        "estimate MODEL --disk 500", 2, "--disk 500 has no unit, and would be 500 bytes", "hint: --disk 500GB, say"
    ),
    Mistake("estimate MODEL --dtype int8", 2, DTYPES, "layerstore estimate --help"),
    Mistake("estimate MODEL --steps 10 --save-every 100", 2, "ends before step 100, its first save", "--save-every"),
    Mistake(
        "estimate MODEL --price 1,2,3", 2, "invalid --price '1,2,3': 3 instead of two values", "--price 0.023,2.50"
    ),
    Mistake("estimate MODEL --price 1,-4", 2, "a price cannot be -4.0", "--price 0.023,2.50"),
    Mistake("estimate MODEL --keep-last 0 --price 1,1", 2, "keep last cannot be 0", "a whole number, 1 or more"),
    Mistake("estimate none", 2, "no such file or folder: none, and no store at", "name a store", has_store=False),
    Mistake(
        "estimate empty", 2, "empty holds neither ZeRO shards nor a config.json", "needs no config", has_store=False
    ),
]


def _everything(folder: Path) -> dict[Path, str]:
    """Return what every file below *folder* holds, apart from those that reading alone may touch."""
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in folder.rglob("*")
        if not {"manifest", "locks"} & {*path.parts}
    }


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.words[:60])
def test_a_mistake_is_answered_and_changes_nothing(
    run: Run, store: Path, checkpoints: Path, tmp_path: Path, mistake: Mistake
) -> None:
    """The exit code, what is wrong, and what to type instead; programs get the same text."""
    shutil.move(store, tmp_path / (".layerstore" if mistake.has_store else "elsewhere"))
    if mistake.has_store:
        run("remote", "add", "origin", f"file://{tmp_path}/bucket")
    (tmp_path / "mix.yaml").write_text("base: 4\nlayers: {lm_haed: 2}\nrest: base\n")
    (tmp_path / "empty").mkdir()
    before = _everything(tmp_path), _everything(checkpoints)
    command, *words = mistake.words.replace("SOURCE", str(checkpoints)).replace("MODEL", MODEL).split()

    people = run(command, *words)
    programs = run(command, "--json", *words)

    error, hint = people.err.splitlines()
    assert (mistake.code, "") == (people.code, people.out) == (programs.code, programs.out)
    assert mistake.error.replace("SOURCE", str(checkpoints)) in error
    assert mistake.hint.replace("SOURCE", str(checkpoints)) in hint
    assert [error, hint] == [f"error: {programs.error['message']}", f"hint: {programs.error['hint']}"]
    assert programs.error["code"] == mistake.code
    assert before == (_everything(tmp_path), _everything(checkpoints))


def test_an_unreadable_source_is_a_matter_of_permission(
    run: Run, store: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying it again would not help: the hint shows whose it is."""

    def refuse(path: Path) -> list[str]:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("layerstore.zero3.discovery.os.listdir", refuse)  # root may read everything

    outcome = run("ingest", checkpoints, "--store", store)

    assert outcome.code == 12
    assert outcome.err.splitlines() == [
        f"error: cannot list {checkpoints}: Permission denied",
        f"hint: ls -ld {checkpoints} shows who may read it",
    ]


def test_the_store_of_a_folder_above_is_found(
    run: Run, store: Path, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As git finds its own; which one it is goes to stderr, and a nearer one wins."""
    shutil.move(store, tmp_path / ".layerstore")
    below = tmp_path / "job" / "logs"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)

    found = run("log", "--json")
    saved = run("ingest", checkpoints / "global_step4", "--run", "other")
    quiet = run("log", "--quiet")
    run("init", tmp_path / "job" / ".layerstore")
    nearer = run("log", "--json")

    assert [len(outcome.fields["commits"]) for outcome in (found, nearer)] == [2, 0]
    assert f"using the store {tmp_path}/.layerstore\n" == saved.err
    assert (saved.code, quiet.code, quiet.err) == (0, 0, "")
    assert f"using the store {tmp_path}/job/.layerstore\n" == nearer.err


def test_a_store_above_the_home_folder_is_not_looked_for(
    run: Run, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies outside of a user's own folders is another's; without a store, this folder's is missing."""
    shutil.move(store, tmp_path / ".layerstore")
    home = tmp_path / "home"
    (home / "job").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "job")

    outcome = run("log")

    assert (outcome.code, outcome.err.splitlines()[0]) == (10, "error: there is no store at .layerstore")
