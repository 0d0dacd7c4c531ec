"""Bad names, references, stores and targets: one line says what was asked, what was found and what to do."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerstore.errors import (
    AlreadyExists,
    Conflict,
    IntegrityError,
    InvalidInput,
    NoStore,
    NotFound,
    StorageIO,
    Unsupported,
)
from layerstore.format import StoreIdentity
from layerstore.history import PushedNotice
from layerstore.store import Store, init
from tests.faults.crafted import Change, PartName, ask_all, craft
from tests.faults.harness import composed, refused, snapshot, tiny_checkpoint


@pytest.fixture(scope="module")
def pristine(fast_module_path: Path) -> Path:
    """Return a folder with a checkpoint and a store that holds it as ``other@2``."""
    tiny_checkpoint(fast_module_path / "raw")
    with init(fast_module_path / "store") as store:
        store.ingest(fast_module_path / "raw", run="other")
    return fast_module_path


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.fault(71)
@pytest.mark.parametrize("name", ["", "..", "a/b", "../x", "a\0b", "x" * 300, "e\u0301", "a@b", "-x", "\ud800"])
def test_an_odd_name_of_a_run_or_a_pin_is_refused(store: Store, folder: Path, name: str) -> None:
    """They become files: what could be mistaken is not a name. Which names that are, tests/unit/test_layers.py has."""
    for deed in (
        lambda: store.ingest(folder / "raw", run=name),
        lambda: store.ingest(folder / "raw", run="run", pin=name),
        lambda: store.pin(name, "other@2"),
    ):
        with refused(store.path, InvalidInput):
            deed()


@pytest.mark.fault(71)
def test_an_unusual_name_of_a_run_is_kept(store: Store, folder: Path) -> None:
    """Everything that cannot be mistaken is a name, for runs and for pins."""
    for name in ("🦙 llama", "50%", "a:b", "ж", "x" * 190, "a b", "#1", "'"):
        store.ingest(folder / "raw", run=name, pin=f"{name} pin")

        assert name in store.runs()
        assert composed(store, f"{name}@2", folder) == composed(store, f"{name} pin", folder)


def test_a_run_and_a_pin_share_their_names(store: Store, folder: Path) -> None:
    """Whichever came first has it, and a commit whose pin cannot be written is not made first."""
    store.pin("kept", "other@2")
    for run, pin in (("kept", None), ("run", "other"), ("run", "run")):
        with refused(store.path, Conflict, InvalidInput):
            store.ingest(folder / "raw", run=run, pin=pin)
    with refused(store.path, Conflict, InvalidInput):
        store.pin("other", "other@2")


@pytest.mark.parametrize("pattern", ["(", "[", "*", "(?P<layer>"])
def test_a_bad_layer_pattern_is_refused(store: Store, folder: Path, pattern: str) -> None:
    """It is the user's slip, and told as such."""
    with refused(store.path, InvalidInput):
        store.ingest(folder / "raw", run="run", layer_pattern=pattern)


def test_a_lock_timeout_that_is_no_time_is_refused(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever, or never; nothing is written."""
    for seconds in ("nan", "inf", "-inf", "-1", "soon", ""):
        monkeypatch.setenv("LAYERSTORE_LOCK_TIMEOUT", seconds)
        with refused(store.path, InvalidInput, naming="LAYERSTORE_LOCK_TIMEOUT"):
            store.ingest(folder / "raw", run="run")


@pytest.mark.fault(77)
@pytest.mark.parametrize(
    "ref",
    [
        *("", "@", "@2", "other@", "other@x", "other@3", "other~1", "other~x", "nothing", "other@2@2", "../other"),
        *("other@-2", "other@1e3", "oth\ner", "o\0", "other@" + "9" * 30, "\ud800"),
    ],
)
def test_an_odd_reference_is_refused(store: Store, ref: str) -> None:
    """With what there is instead."""
    with refused(store.path, NotFound, InvalidInput):
        store.compose(ref)


# -- stores that are none, and targets that must not be ------------------------------------------------------------


def _identity(path: Path) -> StoreIdentity:
    return StoreIdentity.decode((path / "store.json").read_bytes(), what="store.json")


@pytest.mark.fault(80)
@pytest.mark.parametrize("number", [0, 1, 999, 10**30])
def test_a_store_of_another_format_is_left_alone(folder: Path, number: int) -> None:
    """Nothing is written to it, not even a lock or an index; the message says what would help."""
    path = folder / "store"
    shutil.rmtree(path / "manifest")
    (path / "store.json").write_bytes(replace(_identity(path), format=number).encode())
    for use in (Store, init):
        with refused(path, Unsupported, AlreadyExists):
            use(path)


@pytest.mark.fault(81)
def test_a_store_with_an_unknown_flag_is_read_and_not_written(folder: Path) -> None:
    """Whoever does not know what it means might destroy it."""
    path = folder / "store"
    (path / "store.json").write_bytes(replace(_identity(path), flags=("packs",)).encode())
    with Store(path) as store:
        assert [entry.step for entry in store.log()] == [2]
        assert store.verify(read_data=True).ok
        assert composed(store, "other@2", folder)
        for deed in (lambda: store.ingest(folder / "raw", run="run"), lambda: store.pin("kept"), store.reindex):
            with refused(path, Unsupported, naming="packs"):
                deed()


@pytest.mark.fault(43)
@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b"\xff", b'{"format": true}', b'{"format": "1"}', b"[" * 100_000]
)
def test_a_damaged_store_json_is_damage(folder: Path, content: bytes) -> None:
    """It is refused, with what would help; nothing is written."""
    (folder / "store" / "store.json").write_bytes(content)

    with refused(folder / "store", IntegrityError, Unsupported):
        Store(folder / "store")


def test_a_store_json_that_is_emptied_under_an_open_store_is_damage(folder: Path) -> None:
    """Before it was ever checked again, too: nothing is written then."""
    with Store(folder / "store") as store:
        (folder / "store" / "store.json").write_bytes(b"")

        with pytest.raises(IntegrityError):
            store.pin("later")


BRACKETS = "[" * 100_000


@pytest.mark.fault(135)
def test_the_id_of_a_store_is_no_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of indexes are named by it, and the checksum of a ``store.json`` is easily made right."""
    path = folder / "store"
    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", str(folder / "indexes"))
    (path / "store.json").write_bytes(replace(_identity(path), store_id="../../elsewhere").encode())

    with refused(folder, IntegrityError, naming="store_id"):
        Store(path)


@pytest.mark.fault(134)
@pytest.mark.parametrize("content", [BRACKETS, "9" * 5000, "{}" * 2, '["\\ud800"]', "[" + "{}," * 1_100_000 + "{}]"])
def test_a_note_about_remotes_may_be_anything(folder: Path, content: str) -> None:
    """Which of them exist is refused in words, what was pushed is left out, and nothing is a traceback."""
    path = folder / "store"
    with Store(path) as store:
        expected = store.log()
    (path / "remotes.json").write_text(content)
    (path / "pushed.json").write_text(content)
    with Store(path) as store:
        with pytest.raises(IntegrityError, match=r"remotes\.json"):
            store.remotes.urls()
        with pytest.warns(PushedNotice, match="is damaged"):
            assert store.log() == expected
    (path / "partial.json").write_text(content)
    with refused(path, IntegrityError, naming="partial.json"):
        Store(path)


# -- stores that somebody has written on purpose ---------------------------------------------------------------------


def _at(*keys: Any, to: Any) -> Change:
    """Return what puts *to* at the place that *keys* lead to."""

    def change(plain: Any) -> None:
        *above, last = keys
        for key in above:
            plain = plain[key]
        plain[last] = to

    return change


def _bytes_of(elements: int) -> Change:
    """Return what lets the first storage in memory claim so many elements."""

    def change(plain: Any) -> None:
        rows = [row for file in ("model", "optimizer") for row in plain[file]["tree"][0]]
        next(row for row in rows if isinstance(row[3], bytes))[1] = elements

    return change


ORIGIN = ("layers", 0, "origin", "run")
STORED = {"object": {"id": "a" * 32, "size_bytes": 10}, "size_bytes": -1, "crc32": 0}
CRAFTED: list[tuple[PartName, Change]] = [
    *(("record", _at(*ORIGIN, to=name)) for name in ("../../raw", "/etc", "a\0b", "", "a/b", "x" * 300)),
    ("record", _at("layout", "tag", to="../../out")),
    ("record", _at("layers", 0, "version", "id", to="../" * 10 + "aa")),
    ("record", _at("layers", 0, "version", "size_bytes", to=-1)),
    *(("record", _at("world_size", to=count)) for count in (0, -1, 1, 10**7)),
    ("record", lambda plain: plain | {"world_size": 0, "states": []}),
    ("record", _at("stage", to=2**62)),
    ("record", _at("step", to=2**63)),
    ("record", _at("policy", "parameters", to=[[], 7])),
    *(("state", _at("files", 0, "path", to=path)) for path in ("", ".", "..", "../x", "/x", "a//b", "a\0")),
    *(("state", _at("optimizer", "path", to=path)) for path in ("", "global_step2/../../x")),
    ("state", _at("files", 0, "content", to=STORED)),
    ("state", _at("files", 0, "content", to=STORED | {"size_bytes": 11})),
    *(("state", _bytes_of(elements)) for elements in (-1, 7, 2**62)),
    ("version", _at("objects", 0, "id", to="../x")),
    ("version", _at("objects", 0, "size_bytes", to=-1)),
    ("version", _at("objects", 0, "shard", to=2**31)),
    ("version", _at("objects", 0, "tensors", 0, "name", to="..")),
    ("version", _at("parameters", 0, "shape", to=[2**63, 1])),
]


@pytest.mark.fault(135, 136)
@pytest.mark.parametrize(("part", "change"), CRAFTED)
@pytest.mark.sample(8)
def test_what_a_store_claims_is_checked_where_it_is_read(folder: Path, part: PartName, change: Change) -> None:
    """Names that would become paths, sizes and counts that nobody has: one verify names them, no verb trusts them."""
    path = folder / "store"
    craft(path, part, change)
    before = snapshot(folder / "raw")

    refusals = ask_all(path, "other@2", folder / "out")

    assert {"write", "compose"} & {*refusals}
    with Store(path) as store:
        assert part in {damage.kind for damage in store.verify().damaged}
    assert snapshot(folder / "raw") == before
    assert sorted(each.name for each in folder.iterdir()) == ["out", "raw", "store"]


@pytest.mark.fault(75, 78)
def test_what_is_no_store_is_not_opened_and_not_made_one(folder: Path) -> None:
    """Nothing is made where a file, a link or something else is, and ``init`` is named."""
    (folder / "dangling").symlink_to("nowhere")
    (folder / "link").symlink_to("raw/latest")
    os.mkfifo(folder / "pipe")
    odd = ["raw", "raw/latest", "nul\0", "x" * 300, "raw/latest/x"]
    for name in [*odd, "nothing", "dangling", "pipe", "new\nline"]:
        with refused(folder, NoStore, InvalidInput):
            Store(folder / name)
    for name in [*odd, "store", "link/x"]:
        with refused(folder, InvalidInput, AlreadyExists, StorageIO):
            init(folder / name)


@pytest.mark.fault(78)
@pytest.mark.parametrize("force", [False, True])
def test_a_target_that_must_not_be_is_refused(folder: Path, force: bool) -> None:
    """The store, inside it, around it, a file, a link, something else's folder: untouched."""
    (folder / "link").symlink_to("store")
    (folder / "full").mkdir()
    (folder / "full" / "diary").write_text("dear")
    os.mkfifo(folder / "pipe")
    targets = ["store", "store/objects/x", "store/new", ".", "raw/latest", "link", "link/x", "full"]
    targets += ["nul\0", "x" * 300, "raw/latest/x", "pipe", *([] if force else ["raw"])]
    with Store(folder / "store") as store:
        for target in targets:
            with refused(folder, InvalidInput, AlreadyExists, StorageIO):
                store.compose("other@2").write(folder / target, force=force)
