"""
The demo: real DeepSpeed ZeRO-3 training goes through a store, and comes out the same.

A tiny Llama is trained on two CPU ranks and saved on the way. Its checkpoints are ingested, one is composed from
the store, DeepSpeed resumes from that, and every later loss is compared with the uninterrupted run's, bit by bit.
A loss can be blind (nobody sees the embedding of a byte that the text lacks), so what both runs save at the last step
is compared, too: layers have the same version only where all their weights and moments are the same bytes.
All numbers are measured in the run at hand. torch and DeepSpeed are loaded by the ranks alone.
"""

import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from layerstore.errors import AlreadyExists, InvalidInput, LayerstoreError
from layerstore.live.demo_needs import check_needs
from layerstore.live.demo_training import tag_of
from layerstore.live.ranks import Event, Ranks
from layerstore.storage.kernel import mapped_errors
from layerstore.store import init, open_store

RANKS = 2
RUN = "demo"
SAVES = 4
"""Saves of the uninterrupted run, the last at its last step; the composite is made from the second."""

RESUMED_RUN = "resumed"

STEPS = 20
STEPS_MIN = SAVES

MARKER = "layerstore-demo.txt"
"""Tells that a folder is a demo's own, so that ``force`` may clear it."""

_MARKER_TEXT = "Made by `layerstore demo`; `layerstore demo --force` removes the folders beside this file.\n"
_CHECKPOINTS, _STORE, _COMPOSITE, _RESUMED = _RESULTS = ("checkpoints", "store", "composite", "resumed")
_LOGS = "logs"

_MODULE = "layerstore.live.demo_training"


class Audience(Protocol):
    """Hears how far the demo is."""

    def phase(self, text: str) -> None:
        """Note that the next part begins; *text* says which."""

    def note(self, text: str) -> None:
        """Note a fact about the part that runs."""

    def step(self, step: int, *, steps: int, loss: float) -> None:
        """Note that step *step* of *steps* is done."""


class Nobody:
    """Hears nothing."""

    def phase(self, text: str) -> None:
        """Ignore the part."""

    def note(self, text: str) -> None:
        """Ignore the fact."""

    def step(self, step: int, *, steps: int, loss: float) -> None:
        """Ignore the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """The losses of one step, means over the ranks."""

    step: int
    uninterrupted: float
    resumed: float

    @property
    def identical(self) -> bool:
        """Whether both are the same number, to the last bit."""
        return math.isfinite(self.resumed) and self.uninterrupted.hex() == self.resumed.hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demo measured."""

    folder: Path
    store: Path
    resumed_from: int
    """The step of the composite."""
    losses: tuple[StepLoss, ...]
    """Of every later step."""
    layers: dict[str, bool]
    """Whether both runs saved the same version of a layer at the last step."""
    seconds: dict[str, float]
    """Of each part, and ``total``."""
    sizes: dict[str, int]
    """Bytes on disk: ``checkpoints`` (all of them), ``store``, ``composite``."""

    @property
    def identical(self) -> bool:
        """Whether every later loss is the same in both runs, and every layer that they saved at the last step."""
        return all(loss.identical for loss in self.losses) and all(self.layers.values())


def run_demo(
    folder: Path,
    *,
    steps: int = STEPS,
    keep: bool = False,
    force: bool = False,
    audience: Audience | None = None,
) -> DemoResult:
    """
    Train, ingest, compose, resume and compare, all below *folder*.

    The store and the logs stay there. The checkpoints are removed as soon as they are ingested, and the composite once
    all proved identical, unless *keep*. With *force* what an earlier demo left in *folder* is removed first.
    Whatever ends it, no process of it goes on; an interrupt leaves the logs alone.

    Raises:
        Unsupported: Something that DeepSpeed needs is missing; nothing was changed.
        AlreadyExists: *folder* is not empty, or with *force* not a demo's; nothing was changed.
        LayerstoreError: The training failed; the message names its log, and ``facts["tail"]`` has the log's end.
    """
    if steps < STEPS_MIN:
        raise InvalidInput(
            f"{steps} steps are too few: the demo saves {SAVES} times", hint=f"--steps {STEPS_MIN} or more"
        )
    check_needs()
    folder = folder.resolve()
    _prepare(folder, force=force)
    try:
        return _Demo(folder, steps=steps, keep=keep, audience=audience or Nobody()).run()
    except Exception:
        raise  # what a failure left is there to be looked at
    except BaseException:
        for name in _RESULTS:
            _remove(folder / name)
        raise


def _prepare(folder: Path, *, force: bool) -> None:
    """Make *folder*, or clear what an earlier demo left in it."""
    if folder.exists() and not folder.is_dir():
        raise AlreadyExists(f"{folder} is there and is not a folder; nothing was changed", hint="choose another --dir")
    with mapped_errors(folder, doing="use"):
        if folder.exists() and any(folder.iterdir()):
            _check_replaceable(folder, force=force)
            for name in (*_RESULTS, _LOGS):
                _remove(folder / name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).write_text(_MARKER_TEXT)
        (folder / _LOGS).mkdir()


def _check_replaceable(folder: Path, *, force: bool) -> None:
    if not (folder / MARKER).exists():
        hint = "choose another --dir"
        raise AlreadyExists(f"{folder} is not empty and not a demo's folder; nothing was changed", hint=hint)
    if not force and any((folder / name).exists() for name in _RESULTS):
        hint = "choose another --dir, or replace it with --force"
        raise AlreadyExists(f"{folder} holds an earlier demo; nothing was changed", hint=hint)


class _Demo:
    """One demo on its way."""

    def __init__(self, folder: Path, *, steps: int, keep: bool, audience: Audience) -> None:
        self._folder = folder
        self._steps = steps
        self._keep = keep
        self._audience = audience
        self._saves = [steps * save // SAVES for save in range(1, SAVES + 1)]
        self._resume_from = self._saves[1]
        self._seconds: dict[str, float] = {}
        self._sizes: dict[str, int] = {}

    def run(self) -> DemoResult:
        """Run all parts."""
        with self._timed("total"):
            uninterrupted = self._train()
            self._ingest()
            self._compose()
            resumed = self._resume()
            layers = self._compare_layers()
        losses = tuple(
            StepLoss(step=step, uninterrupted=uninterrupted[step], resumed=resumed[step])
            for step in range(self._resume_from + 1, self._steps + 1)
        )
        result = DemoResult(
            folder=self._folder,
            store=self._folder / _STORE,
            resumed_from=self._resume_from,
            losses=losses,
            layers=layers,
            seconds=self._seconds,
            sizes=self._sizes,
        )
        if result.identical and not self._keep:
            _remove(self._folder / _COMPOSITE)
        return result

    def _train(self) -> dict[int, float]:
        checkpoints = self._folder / _CHECKPOINTS
        self._audience.phase(f"training a tiny Llama with DeepSpeed ZeRO-3 on {RANKS} CPU ranks, {self._steps} steps")
        with self._timed("training"):
            losses = self._trained("training", first=1, out=checkpoints, saves=self._saves)
        self._sizes["checkpoints"] = _size_bytes(checkpoints)
        return losses

    def _ingest(self) -> None:
        checkpoints = self._folder / _CHECKPOINTS
        self._audience.phase(f"ingesting {SAVES} checkpoints")
        with self._timed("ingest"), init(self._folder / _STORE) as store:
            for step in self._saves:
                ingested = store.ingest(checkpoints, run=RUN, tag=tag_of(step))
                self._audience.note(f"step {step}: {len(ingested.layers)} layers, {_megabytes(ingested.bytes_new)} new")
        self._sizes["store"] = _size_bytes(self._folder / _STORE)
        if not self._keep:
            _remove(checkpoints)
            self._audience.note("the checkpoints are removed: from here on there is only the store")

    def _compose(self) -> None:
        ref = f"{RUN}@{self._resume_from}"
        self._audience.phase(f"composing {ref}")
        with self._timed("compose"), open_store(self._folder / _STORE) as store:
            written = store.compose(ref).write(self._folder / _COMPOSITE)
        self._sizes["composite"] = written.bytes_written
        self._audience.note(f"{_megabytes(written.bytes_written)} of ZeRO-3 shards, every byte verified")

    def _resume(self) -> dict[int, float]:
        self._audience.phase(f"resuming from the composite: a new DeepSpeed run from step {self._resume_from}")
        with self._timed("resume"):
            return self._trained(
                "resumed",
                first=self._resume_from + 1,
                out=self._folder / _RESUMED,
                saves=[self._steps],
                resume=self._folder / _COMPOSITE,
            )

    def _compare_layers(self) -> dict[str, bool]:
        self._audience.phase(f"ingesting what the resumed run saved at step {self._steps}")
        with self._timed("compare"), open_store(self._folder / _STORE) as store:
            ingested = store.ingest(self._folder / _RESUMED, run=RESUMED_RUN)
            expected = store.compose(f"{RUN}@{self._steps}").layers
            actual = store.compose(f"{RESUMED_RUN}@{self._steps}").layers
        same = {
            layer: layer in actual and actual[layer].version == choice.version for layer, choice in expected.items()
        }
        self._audience.note(
            f"{sum(same.values())} of {len(same)} layers are stored already, {_megabytes(ingested.bytes_new)} new"
        )
        if not self._keep:
            _remove(self._folder / _RESUMED)
        return same

    def _trained(
        self, name: str, *, first: int, out: Path, saves: list[int], resume: Path | None = None
    ) -> dict[int, float]:
        """Run the training program; return the loss of every step from *first* to the last."""
        log = self._folder / _LOGS / f"{name}.log"
        losses: dict[int, float] = {}
        arguments = ["--steps", str(self._steps), "--out", str(out), "--save-at", *map(str, saves)]
        arguments += [] if resume is None else ["--resume", str(resume)]
        with Ranks(_MODULE, arguments, count=RANKS, folder=self._folder, log=log) as ranks:
            self._audience.note(f"two processes load torch and DeepSpeed; their log is {log}")
            for event in ranks.events():
                self._hear(event, losses)
        if list(losses) != list(range(first, self._steps + 1)):
            raise LayerstoreError(f"the training told of other steps than {first} to {self._steps}; its log is {log}")
        return losses

    def _hear(self, event: Event, losses: dict[int, float]) -> None:
        match event.kind:
            case "compiling":
                self._audience.note("DeepSpeed compiles its C++ operator: about a minute, once on this machine")
            case "step":
                losses[event.number] = float.fromhex(event.loss)
                self._audience.step(event.number, steps=self._steps, loss=losses[event.number])
            case "saved":
                self._audience.note(f"saved step {event.number}")

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._seconds[part] = time.monotonic() - started


def _remove(folder: Path) -> None:
    with mapped_errors(folder, doing="remove"):
        if folder.exists():
            shutil.rmtree(folder)


def _size_bytes(folder: Path) -> int:
    """Return the bytes that the files below *folder* have together."""
    return sum((Path(parent) / name).stat().st_size for parent, _, names in os.walk(folder) for name in names)


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"
