"""
The demo: a real DeepSpeed ZeRO-3 training run goes through a store and comes out the same.

A tiny Llama is trained and saved on two CPU ranks. Its checkpoints are ingested under every policy that measures
nothing. DeepSpeed resumes from three composites: one of a single step, after which every loss is compared bit by bit
with the uninterrupted run's; a mixture of steps; and one for a single rank, whose masters and moments are compared.
Then most commits are collected, but for a run of the same saves by filter, and an HTML page shows what is left.
Losses do not depend on every weight (for example, the embedding of a byte that is not in the text), so the layers that
both runs save at the last step are compared too: they have the same version only if all their weights and moments are
the same bytes. All numbers are measured in this run. Only the ranks load torch and DeepSpeed.
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from layerstore.demo.launch import Event, run_ranks
from layerstore.demo.stores import (
    POLICIES,
    Facts,
    collect,
    ingest_under,
    mixture_of,
    resized,
    same_layers,
    size_bytes,
    usage_of_deepspeed,
    usage_under,
)
from layerstore.disk import mapped_errors
from layerstore.errors import AlreadyExists, InvalidInput, LayerstoreError, Unsupported
from layerstore.policy import Keep
from layerstore.store import open_store
from layerstore.units import size

RANKS = 2
OTHER_RANKS = 1
RUN = "demo"
SAVES = 10
"""How often the uninterrupted run saves, the last time at its last step; composites are based on the middle save."""

FILTERED_RUN = "demo-filter"
"""The same saves by filter: they take nothing more at first, and their layers are of different ages."""
RESUMED_RUN = "resumed"
RESIZED_RUN = "on-one-rank"
MIXED = "parity"
"""The policy of the mixed composite, and the name of its pin."""

STEPS = 20
STEPS_MIN = SAVES

MARKER = "layerstore-demo.txt"
"""The file that marks a demo's folder, which ``force`` may clear."""

_MARKER_TEXT = "Made by `layerstore demo`; `layerstore demo --force` removes the folders beside this file.\n"
_RESULTS = ("checkpoints", "store", "policies", "composites", "resumed", "report.html")
_CHECKPOINTS, _STORE, _POLICIES, _COMPOSITES, _RESUMED, _REPORT = _RESULTS
_LOGS = "logs"
_TRAINING = "training"

_MODULE = "layerstore.demo.training"

_PACKAGES = ("torch", "deepspeed", "transformers")


def loss_of(step: int, *, uninterrupted: float, resumed: float) -> Facts:
    """Return both losses of a step, averaged over the ranks, and whether they are the same to the last bit."""
    identical = math.isfinite(resumed) and uninterrupted.hex() == resumed.hex()
    return {"step": step, "uninterrupted": uninterrupted, "resumed": resumed, "identical": identical}


def problems_of(facts: Facts) -> list[str]:
    """Return in words every fact that is not as expected."""
    losses = sum(not loss["identical"] for loss in facts["losses"])
    layers = sum(not is_same for is_same in facts["layers"].values())
    mixture, other = facts["mixture"], facts["other_ranks"]
    mixed, tensors = mixture["layers"] - mixture["same"], other["tensors"] - other["same"]
    found = {
        f"{losses} of {len(facts['losses'])} losses after the resume are not the uninterrupted run's": losses,
        f"{layers} of {len(facts['layers'])} layers at the last step are not the uninterrupted run's": layers,
        f"{mixed} of {mixture['layers']} layers of the mixture are not those that were saved by parity": mixed,
        f"{tensors} of {other['tensors']} tensors are others on another number of ranks": tensors,
        "what the collection left is damaged": not facts["gc"]["is_sound"],
    }
    return [text for text, is_wrong in found.items() if is_wrong]


def run_demo(
    folder: Path,
    *,
    steps: int = STEPS,
    keep: bool = False,
    force: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> Facts:
    """
    Train, ingest, compose, resume and compare, all below *folder*; return what ``layerstore demo --json`` prints.

    The store and the logs stay. Unless *keep*, checkpoints are removed once they are ingested, and composites once all
    have proved identical. *force* removes what an earlier demo left in *folder*. *say* gets progress lines. However it
    ends, no rank is left running; an interrupt removes everything but the logs.

    Raises:
        Unsupported: DeepSpeed needs something that is missing; nothing was changed.
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
        return _Demo(folder, steps=steps, keep=keep, say=say).run()
    except BaseException as exc:
        if not isinstance(exc, Exception):  # after a failure everything stays for inspection
            for name in _RESULTS:
                _remove(folder / name)
        raise


def check_needs() -> None:
    """
    Check that DeepSpeed can train here, without importing anything heavy.

    Raises:
        Unsupported: Packages, ninja or the C++ compiler are missing; the message names everything that is missing.
    """
    packages = [name for name in _PACKAGES if find_spec(name) is None]
    if not _program("ninja"):
        packages.append("ninja")
    # torch compiles DeepSpeed's operators with $CXX, else with c++.
    compiler = os.environ.get("CXX", "c++")
    missing = [*packages, *([] if _program(compiler) else [f"the C++ compiler {compiler}"])]
    if missing:
        hints = ["in a fresh virtual environment: pip install -e '.[demo]'"] if packages else []
        if len(missing) > len(packages):
            hints.append("install a C++ compiler, for example with: apt-get install g++")
        raise Unsupported(
            f"the demo trains with DeepSpeed, and this is missing: {', '.join(missing)}", hint="; ".join(hints)
        )


def _program(name: str) -> str | None:
    """Return where the ranks find *name*: on the PATH, or in this Python's own folder."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def _prepare(folder: Path, *, force: bool) -> None:
    """Make *folder*, or clear what an earlier demo left there."""
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
    """One demo while it runs."""

    def __init__(self, folder: Path, *, steps: int, keep: bool, say: Callable[[str], object]) -> None:
        self._folder = folder
        self._store = folder / _STORE
        self._steps = steps
        self._keeps_all = keep
        self._say = say
        self._saves = [steps * save // SAVES for save in range(1, SAVES + 1)]
        self._base = self._saves[SAVES // 2 - 1]
        self._rules = Keep(last=3, every=self._base)
        self._facts: Facts = {"resumed_from": self._base, "sizes": {}, "seconds_by_part": {}}
        self._facts |= {"dir": folder, "store": self._store, "report": folder / _REPORT}

    def run(self) -> Facts:
        """Run all parts."""
        facts, began = self._facts, time.monotonic()
        uninterrupted = self._train()
        self._ingest()
        self._compose()
        resumed, mixed = self._resume()
        self._compare_layers()
        self._resume_elsewhere()
        self._collect()
        self._report()
        facts["seconds"] = time.monotonic() - began
        facts["mixture"]["loss"] = mixed[self._steps]
        facts["losses"] = [
            loss_of(step, uninterrupted=uninterrupted[step], resumed=resumed[step])
            for step in range(self._base + 1, self._steps + 1)
        ]
        problems = problems_of(facts)
        if not problems:
            self._drop(_COMPOSITES)
        return {"identical": not problems, "problems": problems, **facts}

    def _train(self) -> dict[int, float]:
        checkpoints = self._folder / _CHECKPOINTS
        text = f"training a tiny Llama with DeepSpeed ZeRO-3 on {RANKS} CPU ranks, {self._steps} steps"
        with self._part(_TRAINING, text):
            (losses,) = self._trained(_TRAINING, first=1, last=self._steps, out=checkpoints, saves=self._saves)
        self._facts["sizes"]["checkpoints"] = size_bytes(checkpoints)
        return losses

    def _ingest(self) -> None:
        checkpoints = self._folder / _CHECKPOINTS
        with self._part("ingest", f"ingesting {SAVES} checkpoints under each of {len(POLICIES)} policies"):
            saved = [usage_of_deepspeed(checkpoints, self._saves)]
            (self._folder / _POLICIES).mkdir()
            for name in POLICIES:
                saved.append(usage_under(name, checkpoints, self._saves, store=self._store_of(name), run=RUN))
                self._note(f"{name}: {size(saved[-1]['total_bytes'])} of store")
            self._facts["sizes"]["store"] = size_bytes(self._store)
            with open_store(self._store) as store:
                ingest_under("filter", checkpoints, self._saves, store=store, run=FILTERED_RUN)
        self._facts["saved"] = saved
        self._drop(_CHECKPOINTS)

    def _store_of(self, policy: str) -> Path:
        """Return the store of the saves under *policy*; the demo's main store has the full ones."""
        return self._store if policy == next(iter(POLICIES)) else self._folder / _POLICIES / policy

    def _compose(self) -> None:
        ref, folder = f"{RUN}@{self._base}", self._folder / _COMPOSITES
        text = f"composing {ref}: as it is, mixed by {MIXED}, and for another number of ranks"
        with self._part("compose", text), open_store(self._store) as store:
            folder.mkdir()
            exact, mixed = store.compose(ref), store.compose(ref, policy=POLICIES[MIXED])
            written = exact.write(folder / "exact")
            exact.write(folder / "other", world_size=OTHER_RANKS)
            mixed.write(folder / MIXED)
            mixed.pin(MIXED)
            self._facts["mixture"] = mixture_of(mixed, MIXED, saved=self._store_of(MIXED))
        self._facts["sizes"]["composite"] = written.bytes_written
        self._note(f"{size(written.bytes_written)} of ZeRO-3 shards each, every byte verified")
        self._drop(_POLICIES)

    def _resume(self) -> tuple[dict[int, float], dict[int, float]]:
        composites = self._folder / _COMPOSITES
        text = f"resuming from step {self._base} in new processes, and once more from the mixture"
        with self._part("resume", text):
            exact, mixed = self._trained(
                "resumed",
                first=self._base + 1,
                last=self._steps,
                out=self._folder / _RESUMED / "exact",
                saves=[self._steps],
                resume=[composites / "exact", composites / MIXED],
            )
        return exact, mixed

    def _compare_layers(self) -> None:
        text = f"ingesting what the resumed run saved at step {self._steps}"
        with self._part("compare", text), open_store(self._store) as store:
            ingested = store.ingest(self._folder / _RESUMED / "exact", run=RESUMED_RUN)
            same = self._facts["layers"] = same_layers(
                store.compose(f"{RUN}@{self._steps}"), store.compose(RESUMED_RUN)
            )
        self._note(f"{sum(same.values())} of {len(same)} layers are stored already, {size(ingested.bytes_new)} new")

    def _resume_elsewhere(self) -> None:
        out = self._folder / _RESUMED / "other"
        text = f"resuming on {OTHER_RANKS} rank instead of {RANKS}, and saving what it has loaded"
        with self._part("other ranks", text):
            self._note("one rank trains on other texts than two, so its loss is another; masters and moments count")
            self._trained(
                "other-ranks",
                count=OTHER_RANKS,
                first=self._base + 1,
                last=self._base + 1,
                out=out,
                saves=[self._base],
                resume=[self._folder / _COMPOSITES / "other"],
            )
            with open_store(self._store) as store:
                store.ingest(out, run=RESIZED_RUN)
                found = self._facts["other_ranks"] = resized(
                    store.compose(f"{RUN}@{self._base}"), store.compose(RESIZED_RUN)
                )
        self._note(f"{found['same']} of {found['tensors']} masters and moments have the same bits")
        self._drop(_RESUMED)

    def _collect(self) -> None:
        text = (
            f"removing what is neither of the newest 3 commits nor of every {self._base}th step; {FILTERED_RUN} stays"
        )
        with self._part("gc", text), open_store(self._store) as store:
            found = self._facts["gc"] = collect(store, self._rules, runs=[RUN, RESUMED_RUN, RESIZED_RUN])
        freed = found["before_bytes"] - found["after_bytes"]
        self._note(f"{size(freed)} freed; what is left is verified")

    def _report(self) -> None:
        text = f"writing {_REPORT}: what is left, what has gone, and what composites are made of"
        with self._part("report", text), open_store(self._store) as store:
            store.report(self._folder / _REPORT, keep=self._rules)

    def _trained(
        self,
        name: str,
        *,
        first: int,
        last: int,
        out: Path,
        saves: list[int],
        resume: Sequence[Path] = (),
        count: int = RANKS,
    ) -> list[dict[int, float]]:
        """Run the training program; return the losses of steps *first* to *last*, one dict for each of *resume*."""
        log = self._folder / _LOGS / f"{name}.log"
        losses: list[dict[int, float]] = [{} for _ in range(max(1, len(resume)))]
        arguments = ["--steps", str(last), "--out", str(out), "--save-at", *map(str, saves)]
        arguments += ["--resume", *map(str, resume)] if resume else []
        current = 0

        def hear(event: Event) -> None:
            nonlocal current
            if event["kind"] == "resumed":
                current = event["checkpoint"]
                self._note(f"DeepSpeed has loaded {resume[current].relative_to(self._folder)}")
                if resume[current].name == MIXED:
                    self._note("a mixture is another model: its losses are near those above, and not the same")
            else:
                step, loss = event["step"], float.fromhex(event["loss"])
                losses[current][step] = loss
                self._note(f"step {step} of {last}, loss {loss:.4f}")

        if name == _TRAINING:
            self._note(
                "starting torch and DeepSpeed, which compiles its C++ operator the first time, for a minute or more; "
                f"the log: {log}"
            )
        run_ranks(_MODULE, arguments, count=count, folder=self._folder, log=log, hear=hear)
        if any(list(found) != list(range(first, last + 1)) for found in losses):
            raise LayerstoreError(f"the training told of other steps than {first} to {last}; its log is {log}")
        return losses

    def _drop(self, name: str) -> None:
        """Remove the folder *name* unless everything is kept."""
        if not self._keeps_all:
            _remove(self._folder / name)

    def _note(self, text: str) -> None:
        """Say a fact about the current part."""
        self._say(f"  {text}")

    @contextmanager
    def _part(self, name: str, text: str) -> Iterator[None]:
        """Announce the part *name*, and time it."""
        self._say(text)
        started = time.monotonic()
        yield
        self._facts["seconds_by_part"][name] = time.monotonic() - started


def _remove(path: Path) -> None:
    with mapped_errors(path, doing="remove"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
