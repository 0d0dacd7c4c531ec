"""
Any file, damaged at random while a process has the store open: of a store, a remote's cache, a partial clone, a bucket.

Every answer is then the right one, an error or a warning, in the process that had it open and in the next one; and a
verify names what is damaged. The number of silent outcomes is 0. The index has a sweep of its own, in test_index.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Store
from layerstore.dtypes import by_code
from layerstore.errors import LayerstoreError
from layerstore.history import named_by, resolve
from layerstore.limits import PAGE_BYTES
from layerstore.shards import RankLoad
from layerstore.zero3.pt import layout_pt
from tests.faults.harness import composed, copied, flip, in_child, masters, said_well, seeded, tiny_checkpoint

REFS = ("run@2", "run@4", "run@6", "kept")
CHUNK_BYTES = 512
"""Of objects larger than this, a rank fetches only what it needs."""
ABSENT = "absent"
BATCH = 20
"""Damages of one child, which imports torch once for all of them."""

PLACES = {
    "store": ("store", "store"),
    "cache": ("bucket", "cache"),
    "partial clone": ("clone", "clone"),
    "bucket": ("bucket", "bucket"),
    "bucket of a partial clone": ("clone", "bucket"),
}
"""What is open, and whose files are damaged."""
VERIFIED = {"store", "partial clone", "bucket"}
"""Where a verify of what is open answers for the damaged files; a cache is checked by whoever reads from it."""

Answers = dict[str, str]


# -- the scene ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scene:
    """Folders to damage copies of, and what they answer."""

    place: Path
    """Where the copies go: URLs name it."""
    sound: Path
    older: Path
    """The same folders a while ago."""
    truth: Answers
    was: Answers
    """What the older ones answered; a file that is put back may bring that back."""
    visible: frozenset[str]
    """The names of all files that visible commits need."""
    dropped_blobs: frozenset[str]
    """The versions and states of the dropped commit."""


@pytest.fixture(scope="module")
def scene(fast_module_path: Path) -> Scene:
    """
    Return a store, the bucket that it is pushed to, a partial clone of that, and a cache, twice.

    The newest save is a compact one: whatever is damaged of what it refers to, its answers are right or none.
    """
    return in_child(_make, fast_module_path).needed()  # type: ignore[no-any-return]


def _make(folder: Path) -> Scene:
    place, url = folder / "place", f"file://{folder}/place/bucket"
    _prepare(place)
    place.mkdir()
    with layerstore.init(place / "store") as store:
        store.ingest(tiny_checkpoint(folder / "2", step=2), run="run", pin="kept")
        store.ingest(tiny_checkpoint(folder / "4", step=4, seed=1), run="run", policy="parity")
        store.remotes.add("bucket", url)
        store.push(url)
        was = _answers(store, REFS, folder)
    layerstore.clone(url, place / "clone", records=True).close()
    older = copied(place, folder / "older")
    with Store(place / "store") as store:
        store.ingest(tiny_checkpoint(folder / "6", step=6, seed=2), run="run", precision="delta8")
        store.ingest(tiny_checkpoint(folder / "8", step=8, seed=3), run="run")
        dropped = frozenset(blob.id for blob in resolve(store.repo, "run@8").record.blobs)
        store.drop("run@8")
        store.delete_pin("kept")
        store.pin("kept", "run@4")
        store.push(url, move_pins=True)
        truth = _answers(store, REFS, folder)
        blobs = {blob for ref in REFS for blob in resolve(store.repo, ref).record.blobs}
        visible = frozenset(ref.id for blob in blobs for ref in (blob, *named_by(store.repo, blob)))
    with Store(place / "clone") as clone:
        clone.delete_pin("kept")
        clone.pull(url)
    sound = copied(place, folder / "sound")
    return Scene(place=place, sound=sound, older=older, truth=truth, was=was, visible=visible, dropped_blobs=dropped)


def _prepare(place: Path) -> None:
    """Keep the cache among the other folders, and let small objects be fetched in parts."""
    os.environ["LAYERSTORE_CACHE_DIR"] = str(place / "cache")
    import layerstore.remote  # noqa: F401  # imported late

    for module in ("layerstore.hashing", "layerstore.remote.fetch"):
        vars(sys.modules[module])["VERIFY_CHUNK_BYTES"] = CHUNK_BYTES


# -- answers -----------------------------------------------------------------------------------------------------------


def _digest(values: dict[str, bytes]) -> str:
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()


def _state_dict(store: Store, ref: str) -> str:
    import torch

    found = store.compose(ref).state_dict()
    return _digest({name: value.view(torch.uint8).numpy().tobytes() for name, value in found.items()})


def _moments(store: Store, ref: str) -> str:
    return _digest({name: each.tobytes() for name, each in store.compose(ref).tensors("optimizer").items()})


def _loaded(store: Store, ref: str) -> str:
    """Return what one rank of three loads, of a checkpoint of two."""
    load = RankLoad(store.repo, store.compose(ref).composition, rank=1, world_size=3)
    found = {}
    for file in (load.state.model, load.state.optimizer):
        for number, (storage, _) in enumerate(layout_pt(file.tree, name="any").storages):
            data = bytearray(storage.elements * by_code(storage.dtype).bytes)
            load.fill(storage, memoryview(data))
            found[f"{file.path}/{number}"] = bytes(data)
    return _digest(found)


def _answers(store: Store, refs: Iterable[str], scratch: Path) -> Answers:
    """Return all that *store* says of *refs*, or the error that it says instead."""
    forms: dict[str, Callable[[Store, str], str]] = {
        "files": lambda store, ref: composed(store, ref, scratch),
        "masters": lambda store, ref: _digest(masters(store, ref)),
        "moments": _moments,
        "a state_dict": _state_dict,
        "loaded": _loaded,
    }
    found = {f"{ref}, as {form}": _told(partial(ask, store, ref)) for ref in refs for form, ask in forms.items()}
    return found | _listed(store)


def _listed(store: Store) -> Answers:
    """Return what the lists of *store* say of each commit and pin."""
    found = dict.fromkeys((f"{ref} in the list" for ref in REFS), ABSENT)
    for entry in store.log():
        sound = f"{entry.commit}, {entry.layers_saved} of {entry.layers} layers"
        found[f"{entry.run}@{entry.step} in the list"] = f"error: {entry.damage}" if entry.damage else sound
    found |= {f"{pin.name} in the list": pin.base for pin in store.pins()}
    return found | {f"{name} in the list": f"error: {problem}" for name, problem in store.damaged_pins().items()}


def _told(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except LayerstoreError as error:
        said_well(error)
        return f"error: {error}"


# -- damage ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Damage:
    """One damage: what is open and where it happens; the seed decides on the file, and on what happens to it."""

    where: str
    seed: int
    warmed: tuple[str, ...]
    """What was composed before."""


def _flip(file: Path, scene: Scene, chance: random.Random) -> None:
    flip(file, chance.randrange(1 << 30), chance.randrange(8))


def _truncate(file: Path, scene: Scene, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(max(1, file.stat().st_size)))


def _grow(file: Path, scene: Scene, chance: random.Random) -> None:
    with file.open("ab") as out:
        out.write(chance.randbytes(chance.choice([1, 100, PAGE_BYTES])))


def _zero(file: Path, scene: Scene, chance: random.Random) -> None:
    at = chance.randrange(0, max(1, file.stat().st_size), PAGE_BYTES)
    with file.open("r+b") as out:
        out.seek(at)
        out.write(bytes(min(PAGE_BYTES, file.stat().st_size - at)))


def _swap(file: Path, scene: Scene, chance: random.Random) -> None:
    other = chance.choice([each for each in _files(scene.place, _top(scene.place, file)) if each != file])
    aside = scene.place / "aside"
    file.rename(aside)
    other.rename(file)
    aside.rename(other)


def _older(file: Path, scene: Scene, chance: random.Random) -> None:
    """Put back what the file was, or what another one of its kind was."""
    older = scene.older / file.relative_to(scene.place)
    if not older.exists():
        older = chance.choice(_files(scene.older, older.relative_to(scene.older).parts[0]))
    shutil.copy2(older, file.with_name("older"))
    file.with_name("older").replace(file)


def _remove(file: Path, scene: Scene, chance: random.Random) -> None:
    file.unlink()


DAMAGES = {made.__name__.removeprefix("_"): made for made in (_flip, _truncate, _grow, _zero, _swap, _older, _remove)}


def _top(place: Path, file: Path) -> str:
    return file.relative_to(place).parts[0]


def _files(place: Path, top: str) -> list[Path]:
    """Return the files of one of the folders, but for the index."""
    return sorted(
        file for file in (place / top).rglob("*") if file.is_file() and not {"manifest", "locks"} & {*file.parts}
    )


def _is_truth(file: Path) -> bool:
    """Whether *file* is one that a verify answers for: the rest is advice, or says where things are."""
    return bool({"objects", "commits", "pins"} & {*file.parts}) and not {"trash", "sparse"} & {*file.parts}


# -- the trial ---------------------------------------------------------------------------------------------------------


def _tries(scene: Scene, damages: list[Damage], log: Path) -> list[str]:
    """Try *damages*, one after another, each in a fresh copy; return what was silent."""
    _prepare(scene.place)
    return [f"{damage}: {wrong}" for damage in damages for wrong in _tried(scene, damage, log)]


def _tried(scene: Scene, damage: Damage, log: Path) -> list[str]:
    copied(scene.sound, scene.place)
    chance = random.Random(damage.seed)
    opened, top = PLACES[damage.where]
    path = f"file://{scene.place}/bucket" if opened == "bucket" else str(scene.place / opened)
    found = []
    with Store(path) as held:
        found += _silent("before", _answers(held, damage.warmed, scene.place), scene, set(), ())
        file = chance.choice(_files(scene.place, top))
        before = {each: each.read_bytes() for each in _files(scene.place, top)}
        how = chance.choice(list(DAMAGES))
        DAMAGES[how](file, scene, chance)
        what = f"{how} of {file.relative_to(scene.place)}"
        log.write_text(f"{damage}: {what}")
        hurt = {each for each, data in before.items() if not each.exists() or each.read_bytes() != data}
        found += _judged("while open", held, scene, hurt, before, chance, verified=damage.where in VERIFIED)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fresh = Store(path)
    except LayerstoreError as error:
        said_well(error)
        return [f"{what}: {each}" for each in found]
    with fresh:
        found += _judged(
            "opened again", fresh, scene, hurt, before, chance, verified=damage.where in VERIFIED, told=told
        )
    return [f"{what}: {each}" for each in found]


def _judged(
    when: str,
    store: Store,
    scene: Scene,
    hurt: set[Path],
    before: dict[Path, bytes],
    chance: random.Random,
    *,
    verified: bool,
    told: Iterable[Any] = (),
) -> list[str]:
    """Return which answers of *store* are silent about *hurt*, and what its verify does not name."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_verified_first = chance.random() < 0.5
        for verifies in (is_verified_first, not is_verified_first):
            if verifies and verified:
                found += _unnamed(when, store, scene, hurt, before)
            if not verifies:
                found += _silent(when, _answers(store, REFS, scene.place), scene, hurt, [*told, *caught])
    return found


def _silent(when: str, answers: Answers, scene: Scene, hurt: set[Path], told: Iterable[Any]) -> list[str]:
    """Return the *answers* that are neither right nor an error."""
    was_there = any((scene.older / file.relative_to(scene.place)).exists() for file in hurt)
    right = [scene.truth, *([scene.was] if was_there else [])]
    return [
        f"{when}, {question} is {answer}"
        for question, answer in answers.items()
        if not answer.startswith("error: ")
        and answer not in {truth.get(question) for truth in right}
        # The names in a folder say which commits and pins there are; the index remembers commits, and warns.
        and not (answer == ABSENT and (list(told) or any({"commits", "pins"} & {*file.parts} for file in hurt)))
    ]


def _unnamed(when: str, store: Store, scene: Scene, hurt: set[Path], before: dict[Path, bytes]) -> list[str]:
    """Return which of the files *hurt* a verify of all data does not name; a pin as it once was is a sound pin."""
    bad = {file for file in hurt if _is_truth(file) and file.exists() and file.read_bytes() != before[file]}
    bad -= {file for file in bad if "pins" in file.parts and _is_as_before(scene, file)}
    try:
        verdict = store.verify(read_data=True)
    except LayerstoreError as error:
        said_well(error)
        return []
    named = {damage.path.rpartition("/")[2] for damage in verdict.damaged}
    if any(damage.kind in {"record", "pin", "version", "state"} for damage in verdict.damaged):
        return []  # what only a lost record or version names, nobody can miss
    # And so it is with a record in the trash, which is only a way back, and with a version that it names.
    if any("trash" in file.parts for file in hurt) or named & scene.dropped_blobs:
        bad -= {file for file in bad if "objects" in file.parts and file.name not in scene.visible}
    return [f"{when}, verify does not name {file.name}" for file in bad if file.name not in named]


def _is_as_before(scene: Scene, file: Path) -> bool:
    older = scene.older / file.relative_to(scene.place)
    return older.exists() and older.read_bytes() == file.read_bytes()


def _chosen(chance: random.Random, count: int) -> list[Damage]:
    return [
        Damage(
            where=[*PLACES][number % len(PLACES)],
            seed=chance.randrange(10**9),
            warmed=tuple(chance.sample(REFS, chance.randrange(len(REFS) + 1))),
        )
        for number in range(count)
    ]


@pytest.mark.fault(137)
@pytest.mark.parametrize(
    "count",
    [
        len(PLACES),
        pytest.param(30, marks=[pytest.mark.full, pytest.mark.timeout(1500)]),
        pytest.param(300, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)]),
    ],
)
def test_no_damage_is_silent(scene: Scene, fast_path: Path, count: int) -> None:
    """Whatever happens to whichever file: the right bytes, or an error; and a verify names it."""
    damages = _chosen(seeded("random damages"), count)
    for start in range(0, count, BATCH):
        outcome = in_child(_tries, scene, damages[start : start + BATCH], fast_path / "log", timeout_seconds=1200.0)
        assert outcome.exit_code == 0, f"{outcome}: {(fast_path / 'log').read_text()}"
        assert outcome.needed() == []
    print(f"{count} damages, 0 silent")
