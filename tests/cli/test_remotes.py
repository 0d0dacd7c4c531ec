"""What commands say of remotes, and of stores that are opened by their URLs."""

import json
from pathlib import Path

import pytest

import layerstore
from tests.cli.conftest import Run
from tests.faults.harness import flip


@pytest.fixture
def url(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a remote that has all of the store: sft@2, sft@4, and the pin best."""
    monkeypatch.setenv("LAYERSTORE_CACHE_DIR", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/bucket"
    with layerstore.open(store) as opened:
        opened.push(url)
    return url


def test_a_collection_says_how_many_commits_wait_for_a_push(run: Run, store: Path, tmp_path: Path) -> None:
    """With the push to type; not once the remote has them."""
    run("--store", store, "remote", "add", "b", f"file://{tmp_path}/b")
    run("--store", store, "push", "b", "sft@4")
    run("--store", store, "pin", "--delete", "best")
    words = ["--store", store, "gc", "--keep-last", "1", "--pushed-to", "b", "--dry-run"]
    before = run(*words)
    run("--store", store, "push", "b")

    line = f"1 commit stays because b lacks it: layerstore --store {store} push b"
    assert before.out.splitlines()[-1] == line
    assert "lacks" not in run(*words).out


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (
            ["remote", "add", "far", "s3://a/b"],
            16,
            "layerstore clone {url} PATH makes a store on a disk, and pushes there",
        ),
        (
            ["migrate"],
            2,
            "layerstore --store {url} verify checks a store in a bucket, and layerstore clone brings it to a disk",
        ),
        (
            ["doctor"],
            2,
            "layerstore --store {url} verify checks a store in a bucket, and layerstore clone brings it to a disk",
        ),
        (["repair"], 16, "layerstore repair --remote {url}, in a store that still has the lost data"),
        (["init"], 14, "layerstore log --store {url}"),
        (["show", "stf"], 13, "did you mean sft? runs here: sft"),
    ],
)
def test_hints_for_a_store_by_its_url_can_be_followed(
    run: Run, url: str, words: list[str], code: int, hint: str
) -> None:
    """Nothing that moves files is suggested there."""
    outcome = run("--store", url, *words, "--json")
    assert (outcome.code, outcome.error["hint"]) == (code, hint.format(url=url))


def test_a_commit_there_is_dropped_and_brought_back(run: Run, url: str) -> None:
    """What the commands say can be done there."""
    dropped = run("--store", url, "drop", "sft@4")
    assert f"a day later; to bring it back: layerstore --store {url} undrop" in dropped.out
    assert "--empty-trash" not in dropped.out
    assert "sft" in run("--store", url, "log", "--dropped").out
    assert "sft@4 is back" in run("--store", url, "undrop", "sft@4").out
    run("--store", url, "drop", "--run", "sft")
    assert run("--store", url, "log", "sft", "--json").error["hint"] == (
        f"its commits were dropped: layerstore --store {url} log sft --dropped lists them, "
        f"layerstore --store {url} undrop --run sft brings them back"
    )
    assert "2 commits are back" in run("--store", url, "undrop", "--run", "sft").out


def test_what_a_collection_there_removes_can_come_back(run: Run, url: str) -> None:
    """For a day, in which its trash keeps the commits; without a grace they are gone for good."""
    run("--store", url, "pin", "--delete", "best")
    collect = ("--store", url, "gc", "--keep-last", "1")
    kept, gone = run(*collect).out, run(*collect, "--grace", "0s").out

    stays = f"1 commit stays in the bucket's trash for a day: layerstore --store {url} undrop RUN@STEP brings it back"
    assert stays in kept.splitlines()
    assert (" for good" in kept, " for good: " in gone) == (False, True)
    dropped = run("--store", url, "log", "--dropped")
    assert "the trash holds no commit" in dropped.out + dropped.err


def test_a_pull_says_what_it_leaves_in_the_trash(run: Run, store: Path, url: str) -> None:
    """Where it would have said that nothing is missing, with the command that brings it back."""
    command = run("--store", store, "drop", "sft@4").out.partition("to bring it back: ")[2].strip()
    one = run("--store", store, "pull", url)
    run("--store", store, "drop", "sft@2")
    two = run("--store", store, "pull", url)

    rest = f"this store has every other commit and pin of {url}\n"
    assert one.out == f"{rest}1 remote commit was dropped here: {command} brings it back\n"
    assert two.out == f"{rest}2 remote commits were dropped here: layerstore --store {store} log --dropped lists them\n"
    assert set(run("--store", store, "pull", url, "--json").fields) == (
        {"schema", "url", "commits", "pins", "objects", "bytes_received"}
    )


def test_what_is_counted_there_is_in_the_bucket(run: Run, url: str, store: Path) -> None:
    """And objects that nothing names stay there for a day."""
    assert " in the bucket" in run("--store", url, "stats").out
    assert " on disk" in run("--store", store, "stats").out
    orphan = Path(url.removeprefix("file://"), "objects", "ab", "ab" * 16)
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"nothing names it")
    verified = run("--store", url, "verify")
    assert "1 object of no commit: harmless, and removed by a gc once they are a day old" in verified.out + verified.err


def test_damage_there_names_the_repair_from_here(run: Run, url: str, store: Path) -> None:
    """Which works as it stands, in the store that has pushed."""
    largest = max(Path(url.removeprefix("file://"), "objects").rglob("*"), key=lambda path: path.stat().st_size)
    flip(largest)

    verify = run("--store", url, "verify", "--read-data")

    assert verify.err.splitlines()[-1] == (
        f"hint: layerstore repair --read-data --remote {url} --dry-run, in a store that still has the lost data, "
        "says what can be done"
    )
    assert run("--store", store, "repair", "--read-data", "--remote", url).code == 0
    assert run("--store", url, "verify", "--read-data").code == 0


def test_an_empty_store_by_its_url_is_pushed_to(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or saved to."""
    monkeypatch.setenv("LAYERSTORE_CACHE_DIR", str(tmp_path / "cache"))
    with layerstore.init(tmp_path / "empty") as empty:
        empty.push(f"file://{tmp_path}/bucket")
    outcome = run("--store", f"file://{tmp_path}/bucket", "log")
    assert (
        "no commits yet; next: save or ingest into it, or push to it from another store: layerstore push URL"
        in outcome.out + outcome.err
    )


def test_a_push_says_that_it_makes_the_store(run: Run, store: Path, tmp_path: Path) -> None:
    """Once, before anything is sent: the next push to that URL finds it; --quiet and --json answer as ever."""
    right, mistyped = f"file://{tmp_path}/bucket", f"file://{tmp_path}/bukcet"
    outcomes = [run("--store", store, "push", url) for url in (right, right, mistyped)]
    quiet = run("--store", store, "--quiet", "push", f"file://{tmp_path}/other")

    said = "there was no store at {}: this push makes one\n"
    assert [outcome.code for outcome in outcomes] == [0, 0, 0]
    assert [outcome.err for outcome in outcomes] == [said.format(right), "", said.format(mistyped)]
    assert (quiet.code, quiet.err) == (0, "")


def test_a_bucket_that_is_not_there_any_more(run: Run, store: Path, tmp_path: Path) -> None:
    """An unmounted share, say: a push says that it had been there, and no hint is about the store that was found."""
    bucket = tmp_path / "bucket"
    run("--store", store, "push", bucket.as_uri())
    bucket.rename(tmp_path / "away")

    plan = run("--store", store, "gc", "--keep-last", "1", "--pushed-to", bucket.as_uri(), "--dry-run")
    assert plan.err.endswith("hint: check its name; layerstore init URL or a push from a store makes one\n")
    again = run("--store", store, "push", bucket.as_uri())
    assert f"there was no store at {bucket.as_uri()}, where 2 commits had been pushed" in again.err


def test_a_push_or_pull_of_one_commit_says_which_it_was(run: Run, store: Path, tmp_path: Path) -> None:
    """That the remote has this one does not mean that it has all."""
    url = f"file://{tmp_path}/bucket"
    ref = run("--store", store, "log", "--json").fields["commits"][0]
    name = f"{ref['run']}@{ref['step']}"
    run("--store", store, "push", url, name)

    assert run("--store", store, "push", url, name).out == f"{url} has {name}\n"
    assert run("--store", store, "pull", url, name).out == f"this store has {name}\n"


def test_remotes_without_a_name_are_listed_and_told_apart(run: Run, store: Path, tmp_path: Path) -> None:
    """By the ends of their URLs, or by the whole URLs if these end alike; programs get those with a name."""
    urls = [f"file://{tmp_path}/{place}" for place in ("named/bucket", "a/bucket", "b/bucket", "a/other")]
    run("--store", store, "remote", "add", "origin", urls[0])
    for url in urls:
        run("--store", store, "push", url)
    listed = run("--store", store, "remote", "list").out.splitlines()
    pushed = [run("--store", store, command).out for command in ("runs", "log")]

    assert [line.split() for line in listed[1:]] == [["origin", urls[0]], *(["-", url] for url in sorted(urls[1:]))]
    assert run("--store", store, "remote", "list", "--json").fields["remotes"] == [{"name": "origin", "url": urls[0]}]
    for out in pushed:
        assert all(name in out for name in ("origin", urls[1], urls[2], "…/other")), out


def test_a_store_is_no_remote_of_itself(run: Run, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder above, a clone's default path is the remote's own; nothing is made in it."""
    folder = Path(url.removeprefix("file://"))
    monkeypatch.chdir(folder.parent)
    before = sorted(folder.rglob("*"))
    with layerstore.init(tmp_path / "own") as own:
        cloned = run("clone", url)
        added = run("--store", own.path, "remote", "add", "self", f"file://{own.path}/")
        pushed = run("--store", own.path, "push", f"file://{own.path}")

    for outcome in (cloned, added, pushed):
        assert (outcome.code, "is this very folder; nothing was changed" in outcome.err) == (2, True)
    assert sorted(folder.rglob("*")) == before


def test_a_folder_where_a_url_belongs_is_said_as_one(run: Run, store: Path, tmp_path: Path) -> None:
    """The URL to type; but no word that may be a key."""
    folder, key = tmp_path / "my bucket", "/wJalrXUtnFEMI"
    added = run("--store", store, "remote", "add", "b", folder)
    cloned = run("clone", store, tmp_path / "clone")
    hidden = run("--store", store, "remote", "add", "b", key)

    assert [outcome.code for outcome in (added, cloned, hidden)] == [2, 2, 2]
    assert added.err.splitlines()[0] == f"error: the folder {folder} is not a URL"
    assert added.err.splitlines()[1] == f"hint: write file://{tmp_path}/my%20bucket"
    assert cloned.err.splitlines()[1] == f"hint: write file://{store}"
    assert key not in hidden.err


def test_a_clone_that_was_cut_off_is_pulled_into(run: Run, url: str, tmp_path: Path) -> None:
    """An empty store that has a remote is one."""
    layerstore.init(tmp_path / "clone").remotes.add("origin", url)
    outcome = run("--store", tmp_path / "clone", "log")
    assert f"next: layerstore --store {tmp_path}/clone pull" in outcome.out + outcome.err


def test_a_remotes_pin_is_moved_and_deleted(run: Run, store: Path, url: str) -> None:
    """From the store that pushes there."""
    with layerstore.open(store) as opened:
        opened.delete_pin("best")
        opened.pin("best", "sft@4")
    refused = run("--store", store, "push", url, "--json")
    assert (refused.code, "push --move-pins moves it there" in refused.error["hint"]) == (14, True)

    assert run("--store", store, "push", url, "--move-pins", "--json").fields["pins"] == ["best"]
    assert run("--store", store, "pin", "--delete", "best", "--remote", url).code == 0
    assert layerstore.open(url).pins() == []
    assert run("--store", store, "pin", "--remote", url, "--list").code == 2


def test_a_cache_that_makes_no_sense_is_told(
    run: Run, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is fetched: a size that is none, and a file in the folder's place."""
    monkeypatch.setenv("LAYERSTORE_CACHE_SIZE", "foo")
    assert run("--store", url, "log").code == 2
    monkeypatch.delenv("LAYERSTORE_CACHE_SIZE")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAYERSTORE_CACHE_DIR", str(tmp_path / "file"))
    outcome = run("--store", url, "log", "--json")
    assert (outcome.code, outcome.error["hint"]) == (1, "set LAYERSTORE_CACHE_DIR to a folder of your own")


_KEYS = [
    "s3://AKIAX:hUsH@bucket/x",
    "s3://bucket/x#hUsH",
    "s3:/AKIAX:hUsH@b/x",
    "s3://b/x?X-Amz-Signature=hUsH",
    "ID:hUsH@b/x",
    "s3//ID:hUsH@b/x",
]


@pytest.mark.fault(121)
@pytest.mark.parametrize("url", _KEYS)
def test_a_key_in_a_url_is_never_repeated(
    run: Run, store: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it was given as, to people and to programs; nor is it in the store, where locks name their holders."""
    monkeypatch.chdir(tmp_path)
    commands: list[list[object]] = [
        ["remote", "add", "origin", url],
        ["remote", "add", url, "s3://b"],
        ["remote", "remove", url],
        ["push", url],
        ["pull", url],
        ["push", "origin", url],
        ["clone", url, "clone"],
        ["init", url],
        ["gc", "--keep-last", "1", "--pushed-to", url, "--yes"],
        ["gc", "--keep-last", "1", "--remote", url, "--yes"],
        ["verify", "--remote", url],
        ["repair", "--from", url],
        ["log", url],
        ["show", url],
        ["ls", url],
        ["diff", "sft@2", url],
        ["pin", "new", url],
        ["pin", url, "sft@2"],
        ["drop", url],
        ["compose", url, "-o", "out"],
        ["compose", "sft@2", "--policy", url, "-o", "out"],
        ["ingest", url],
        ["stats", url],
        [f"--{url}"],
        [url],
    ]
    outcomes = [run("--store", store, *words, *rest) for words in commands for rest in ([], ["--json"])]
    opening: list[list[str]] = [["log"], ["log", "--json"], ["drop", "sft"]]
    opening += [["doctor"]] if url.startswith("s3:") else []  # any other text names a folder, of which it tells
    outcomes += [run("--store", url, *words) for words in opening]
    monkeypatch.setattr("sys.argv", ["layerstore", "push", url])
    outcomes.append(run("--store", store, "pin", "another", "sft@2"))
    (store / "remotes.json").write_text(json.dumps({"origin": url}))
    listed = [run("--store", store, "remote", *rest) for rest in (["list"], ["list", "--json"], ["remove", "origin"])]

    for outcome in (*outcomes, *listed):
        assert "hUsH" not in outcome.out + outcome.err
        assert "AKIAX" not in outcome.out + outcome.err
    assert {outcome.code for outcome in listed} == {0}
    assert not [path for path in store.rglob("*") if path.is_file() and b"hUsH" in path.read_bytes()]
