"""What is refused and found, in a few dozen trials: run as a program, with assertions and without."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from layerstore.errors import LayerstoreError
from layerstore.store import Store, init
from tests.faults.harness import copied, tiny_checkpoint
from tests.faults.test_bad_input import BENT, OTHERS, ingest
from tests.faults.test_flips import truth_files


def said(work: Callable[[], object]) -> str:
    """Return what *work* ended in, in words."""
    try:
        return f"fine {type(work()).__name__}"
    except LayerstoreError as exc:
        return f"{type(exc).__name__}: {exc} ({exc.hint})"


def sources(folder: Path) -> None:
    """Ingest checkpoints with one thing wrong."""
    init(folder / "store").close()
    for name, change in {**OTHERS, **BENT}.items():
        place = folder / "place"
        copied(folder / "store", place / "store")
        tiny_checkpoint(place / "raw")
        change(place)
        print(name, said(lambda place=place: ingest(place)))  # type: ignore[misc]  # bound at once
        copied(folder / "store", place)


def damage(folder: Path) -> None:
    """Flip a bit in each file of a store, and ask for everything."""
    with init(folder / "sound") as store:
        store.ingest(tiny_checkpoint(folder / "source"), run="run", pin="kept")
    for number, file in enumerate(truth_files(folder / "sound")):
        path = copied(folder / "sound", folder / "hurt")
        hurt = path / file.relative_to(folder / "sound")
        data = bytearray(hurt.read_bytes())
        data[len(data) * (number % 7) // 7] ^= 1 << number % 8
        hurt.write_bytes(data)
        print(file.parent.name, said(lambda path=path: asked(path)))  # type: ignore[misc]  # bound at once


def asked(path: Path) -> None:
    """Verify and compose, one error after another."""
    with Store(path) as store:
        print(store.verify(read_data=True).damaged)
        for ref in ("run@2", "kept", "nothing", "run@9", "../x", "run~4"):
            print(ref, said(lambda ref=ref: store.compose(ref).write(path.parent / "out", force=True)))  # type: ignore[misc]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for part in (sources, damage):
        (Path(sys.argv[1]) / part.__name__).mkdir()
        part(Path(sys.argv[1]) / part.__name__)
    print("assertions are on" if __debug__ else "assertions are off")
