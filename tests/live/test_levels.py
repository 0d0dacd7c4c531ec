"""Several levels: what is lost of the nearer ones is read from the others, and one that fails stops no other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore.errors import AlreadyExists, Conflict, InvalidInput, StorageIO
from layerstore.layout import MARK_PREFIX
from layerstore.live.attaching import options_for
from layerstore.live.levels import _check_new, levels_of, make_levels, open_levels
from layerstore.live.nodes import send_objects
from layerstore.live.ranks import Exchange, store_if_there
from layerstore.live.saver import SaverKeywords
from layerstore.live.saver.collector import _sent
from tests.forked import Nursery
from tests.generated import generate
from tests.live.launched import losses, one
from tests.live.tiny import RUN, STEPS

PROGRAMS = "tests.live.on_levels"
NAMES = ("near", "shared", "bucket")


def options_in(folder: Path, **more: object) -> dict[str, Any]:
    """Return the options of a program with three levels in *folder*."""
    levels = [str(folder / "near"), str(folder / "shared"), f"file://{folder}/bucket"]
    return {"levels": levels, "cache": str(folder / "cache"), **more}


def steps_in(level: str) -> list[int]:
    """Return the steps that *level* has, newest first."""
    with layerstore.open(level) as store:
        assert store.verify(read_data=True).damaged == ()
        return [entry.step for entry in store.log(RUN)]


def ids_in(level: str) -> dict[int, str]:
    """Return the commits that *level* has, by step."""
    with layerstore.open(level) as store:
        return {entry.step: entry.commit for entry in store.log(RUN)}


@pytest.mark.full
def test_the_nearest_level_that_is_left_is_resumed_from(
    ranks: Nursery, tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """All levels but the last are trimmed; whatever is lost of them, the next job goes on without a trace."""
    first = tmp_path / "first"
    first.mkdir()
    options = options_in(first, until=4)
    with ranks.launch(f"{PROGRAMS}:begun", options, folder=tmp_path, name="begun") as begun:
        begun.done()
    assert one(begun, "status")["pushed_step"] == 4
    assert one(begun, "status")["collection_error"] == ""
    assert [steps_in(level) for level in options["levels"]] == [[4, 3], [4, 3], [4, 3, 2, 1]]
    commits = [ids_in(level) for level in options["levels"]]
    assert commits[0] == commits[1] == {step: commit for step, commit in commits[2].items() if step > 2}

    for count in range(3):  # of the nearer levels, lost
        folder = tmp_path / f"lost{count}"
        shutil.copytree(first, folder, symlinks=True)
        for name in NAMES[:count]:
            shutil.rmtree(folder / name)
        with ranks.launch(f"{PROGRAMS}:requeued", options_in(folder), folder=tmp_path, name=folder.name) as again:
            again.done()
        assert one(again, "resumed")["step"] == 4
        assert losses(begun) | losses(again) == undisturbed
        read = [line for line in again.log.read_text().splitlines() if "is read from" in line]
        assert len(read) == bool(count)
        assert all(options_in(folder)["levels"][count] in line for line in read)
        near, shared, bucket = map(steps_in, options_in(folder)["levels"])
        assert near[: STEPS - 4] == bucket[: STEPS - 4] == [*range(STEPS, 4, -1)]
        assert shared[0] == STEPS  # a new one begins with the newest commit


@pytest.mark.full
@pytest.mark.parametrize("broken", [("shared",), ("bucket",), ("shared", "bucket")])
def test_a_level_that_breaks_stops_no_other(
    broken: tuple[str, ...], ranks: Nursery, tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """The others have every save, the status says which has not, and what was near is not lost with the process."""
    options = options_in(tmp_path, broken=[str(tmp_path / name) for name in broken])
    with ranks.launch(f"{PROGRAMS}:broken", options, folder=tmp_path, name="broken") as first:
        first.until("killed", count=2)
        first.statuses()
    for name in broken:
        (tmp_path / name).unlink()
        (tmp_path / f"{name}.gone").rename(tmp_path / name)
    places = dict(zip(NAMES, options["levels"], strict=True))
    error = one(first, "status")["collection_error"]
    assert str(tmp_path / broken[0]) in error
    for name in NAMES:
        assert steps_in(places[name])[0] == (2 if name in broken else 4)

    with ranks.launch(f"{PROGRAMS}:requeued", options, folder=tmp_path, name="requeued") as second:
        second.done()
    assert one(second, "resumed")["step"] == 4
    assert losses(first) | losses(second) == undisturbed
    near, shared, bucket = map(steps_in, options["levels"])
    assert near == bucket == [*range(STEPS, 0, -1)]
    assert shared[0] == STEPS


def test_what_was_saved_before_is_in_the_last_level_too(tmp_path: Path) -> None:
    """A folder behind a store that has saves gets all of them, and one between the two the newest."""
    places = [str(tmp_path / name) for name in ("shared", "last")]
    with layerstore.init(tmp_path / "near") as near:
        for step in (1, 2, 3):
            near.ingest(generate(tmp_path / f"{step}", layers=1, hidden=8, vocab=8, step=step), run=RUN)
        make_levels(near, places)

        answer = _sent(near, near.repo.catalog.view(RUN).visible[-1].name, places)

        [record] = (near.path / "commits" / RUN).glob("2.*")
        data = bytearray(record.read_bytes())
        record.chmod(0o644)
        record.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
        new = str(tmp_path / "new")
        make_levels(near, [new])
        damaged = _sent(near, near.repo.catalog.view(RUN).visible[-1].name, [new])

    assert answer == {"push_error": "", "pushed_step": 3}
    assert [steps_in(place) for place in places] == [[3], [3, 2, 1]]
    assert (damaged["push_error"], damaged["pushed_step"], steps_in(new)) == ("", 3, [3, 1])
    assert "is damaged" in damaged["error"]


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ([], r"the levels are \[\]"),
        ([1], r"the levels are \[1\]"),
        (["s3://bucket/store", "near"], "is the first level, and a bucket"),
        (["near", "./near"], "comes twice"),
        (["near", "s3://bucket/store", "s3://bucket/store"], "comes twice"),
        (["near", "near/behind"], "near/behind is inside level /"),
        (["near", "s3://bucket/store/behind", "s3://bucket/store/"], "is inside level s3://bucket/store"),
    ],
)
def test_levels_are_places_in_order(named: list[str], said: str) -> None:
    """Anything else is refused before a store is looked at."""
    with pytest.raises(InvalidInput, match=said):
        levels_of(named)


def test_a_place_that_cannot_be_a_store_is_refused(tmp_path: Path) -> None:
    """A resume says so, before an attach has made the levels before it."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "today").touch()

    assert store_if_there(tmp_path / "new") is None
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted" / f"{MARK_PREFIX}0.1").touch()  # another rank is about to remove it, or was killed
    assert store_if_there(tmp_path / "mounted") is None
    with pytest.raises(AlreadyExists, match="is not empty: it holds 'today'"):
        store_if_there(tmp_path / "notes")
    with pytest.raises(AlreadyExists, match="exists and is not a folder"):
        store_if_there(tmp_path / "notes" / "today")


def test_the_same_folder_under_two_names_is_one(tmp_path: Path) -> None:
    """A link, or a URL, would be a second copy that is none."""
    (tmp_path / "near").mkdir()
    (tmp_path / "link").symlink_to("near")
    for other in ("link", "near/../near/"):
        with pytest.raises(InvalidInput, match="comes twice"):
            levels_of([str(tmp_path / "near"), str(tmp_path / other)])
    with pytest.raises(InvalidInput, match="comes twice"):
        levels_of([str(tmp_path / "near"), f"file://{tmp_path}/near"])


def test_versions_are_not_sent_before_what_they_name(tmp_path: Path) -> None:
    """A version there would promise the objects of other nodes, which may be gone."""
    with layerstore.init(tmp_path / "near") as near:
        near.ingest(generate(tmp_path / "checkpoint", layers=1, hidden=8, vocab=8, step=1), run=RUN)
        make_levels(near, [str(tmp_path / "behind")])
        [commit] = [near.repo.catalog.commit(row.name) for row in near.repo.catalog.view(RUN).visible]
        with layerstore.open(tmp_path / "behind") as behind:
            send_objects(near.repo, behind.repo)
            for entry in commit.record.layers:
                assert behind.repo.objects.find(entry.version) is None
                assert all(behind.repo.objects.find(of.ref) for of in near.repo.version_of(entry).objects)
            assert all(map(behind.repo.objects.find, commit.record.states))


def test_a_level_that_is_not_there_is_not_made_anew(tmp_path: Path) -> None:
    """The nodes have commits that were made in it, so it is not mounted, say."""
    with layerstore.init(tmp_path / "near") as near:
        near.ingest(generate(tmp_path / "checkpoint", layers=1, hidden=8, vocab=8, step=1), run=RUN)
    with pytest.raises(Conflict, match="there is no store at /gone, where commits are made"):
        _check_new(tmp_path / "near", "/gone", RUN)
    _check_new(tmp_path / "near", "/gone", "another")
    _check_new(tmp_path / "none", "/gone", RUN)


def test_levels_and_push_are_one_thing() -> None:
    """A list says where saves go; whoever also says push= means something else by one of them."""
    levels = levels_of(["near", "s3://bucket/store"])
    assert options_for(levels, SaverKeywords()).places == ("s3://bucket/store",)
    assert options_for(levels_of("near"), SaverKeywords(push=["/shared", "origin"])).places == ("/shared", "origin")
    with pytest.raises(InvalidInput, match="push= is given together with a list of stores"):
        options_for(levels, SaverKeywords(push="origin"))


def test_all_levels_are_one_store(tmp_path: Path) -> None:
    """A folder that is another store is refused, and stays as it is; an empty place becomes a copy of the store."""
    near, other, new = (str(tmp_path / name) for name in ("near", "other", "new"))
    layerstore.init(near).close()
    layerstore.init(other).close()
    with pytest.raises(Conflict, match="is another store"):
        open_levels(Exchange(), levels_of([near, other]), RUN)
    with layerstore.open(near) as store:
        with pytest.raises(Conflict, match="is another store"):
            make_levels(store, [other])
        make_levels(store, [new, f"file://{tmp_path}/bucket"])
        assert open_levels(Exchange(), levels_of([new, near, f"file://{tmp_path}/bucket"]), RUN) is not None
        with layerstore.open(new) as copy:
            assert copy.id == store.id


def test_a_level_that_cannot_be_read_may_have_newer_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To resume from an older step unknowingly would be worse than to stop; the error says how to go on."""
    near = str(tmp_path / "near")
    layerstore.init(near).close()
    monkeypatch.setattr("layerstore.remote.bucket.REMOTE_PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with (
        pytest.raises(StorageIO, match=r"s3://bucket/store may have newer steps than .*, and cannot be read"),
        pytest.warns(layerstore.remote.RemoteNotice),
    ):
        open_levels(Exchange(), levels_of([near, "s3://bucket/store"]), RUN)
