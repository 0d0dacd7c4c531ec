"""
The demo, from top to bottom: a real DeepSpeed ZeRO-3 training run resumes from a store with identical results.

Losses do not depend on every weight (for example, the embedding of a byte that is not in the text), so the layers that
both training runs save at the last step are compared, too: they have the same version only if all weights and moments
are the same bytes. All numbers are measured by this demo. Only the ranks load torch and DeepSpeed.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from layerstore.composite import Composite
from layerstore.demo.training import SAVE_EVERY
from layerstore.disk import mapped_errors
from layerstore.errors import AlreadyExists, LayerstoreError, Unsupported
from layerstore.policy import PREDICTABLE, Keep, policy_named
from layerstore.store import init, open_store

STEPS, BASE = 20, 10  # composites are based on step 10
TAGS = [f"global_step{step}" for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)]
POLICIES = {policy.name: policy_named(policy.name, getattr(policy, "small", None)) for policy in PREDICTABLE}
"""The policies by name, with settings for the model's six blocks."""
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
"""Where DeepSpeed finds ninja, even if the environment is not activated."""

DemoFacts = dict[str, Any]


def run_demo(folder: Path, *, report: Callable[[str], object] = lambda line: None) -> DemoFacts:
    """Train, ingest, compose, resume and compare in the new *folder*; return what ``--json`` prints."""
    missing = [name for name in ("torch", "deepspeed", "transformers") if find_spec(name) is None]
    missing += [name for name in ("ninja", os.environ.get("CXX", "c++")) if not shutil.which(name, path=PATH)]
    if missing:
        raise Unsupported(
            f"the demo trains with DeepSpeed, and this is missing: {', '.join(missing)}",
            hint="in a fresh virtual environment: pip install -e '.[demo]'; a C++ compiler: apt-get install g++",
        )
    folder, began = folder.resolve(), time.monotonic()
    with mapped_errors(folder, doing="use"):
        if folder.exists() and any(folder.iterdir()):
            raise AlreadyExists(f"{folder} is not empty; nothing was changed", hint="choose another --dir")
        (folder / "logs").mkdir(parents=True)
    facts = _run(folder, report)
    checks = {
        "losses after the resume": all(loss["identical"] for loss in facts["losses"]),
        "layers at the last step": all(facts["layers"].values()),
        "layers of the mixture": facts["mixture"]["same"] == facts["mixture"]["layers"],
        "masters and moments on one rank": facts["other_ranks"]["same"] == facts["other_ranks"]["tensors"],
        "bytes that the collection left": facts["gc"]["is_sound"],
    }
    facts["problems"] = [name for name, is_right in checks.items() if not is_right]
    if not facts["problems"]:
        shutil.rmtree(folder / "work")
    return facts | {"identical": not facts["problems"], "seconds": time.monotonic() - began}


def _run(folder: Path, report: Callable[[str], object]) -> DemoFacts:
    work, saved, times = folder / "work", folder / "work" / "saved", dict[str, float]()
    facts: DemoFacts = {
        "resumed_from": BASE,
        "dir": folder,
        "store": folder / "store",
        "report": folder / "report.html",
    }

    def begin(part: str, text: str) -> None:
        report(text)
        times[part] = time.monotonic()

    begin("training", f"training a tiny Llama with DeepSpeed ZeRO-3 on 2 CPU ranks, {STEPS} steps")
    report("  the first time, DeepSpeed compiles its C++ operator, for a minute or more")
    (losses,) = _train(folder, "saved")
    begin("ingest", f"ingesting {len(TAGS)} checkpoints under each of {len(POLICIES)} policies")
    facts["saved"] = [_usage("DeepSpeed", saved, [_size_bytes(saved / tag) for tag in TAGS])]
    for name, policy in POLICIES.items():
        with init(facts["store"] if name == "full" else work / name) as store:
            new = [store.ingest(saved, run="demo", tag=tag, policy=policy).bytes_new for tag in TAGS]
        facts["saved"].append(_usage(name, store.path, new))
    facts["sizes"] = {"checkpoints": _size_bytes(saved), "store": _size_bytes(facts["store"])}
    with open_store(facts["store"]) as store:
        for tag in TAGS:  # adds no tensors to this store, but gives the report layers of different ages
            store.ingest(saved, run="demo-filter", tag=tag, policy=POLICIES["filter"])
        begin("compose", f"composing demo@{BASE}: as it is, mixed by parity, and for one rank")
        exact, mixed = store.compose(f"demo@{BASE}"), store.compose(f"demo@{BASE}", policy="parity")
        facts["sizes"]["composite"] = exact.write(work / "exact").bytes_written
        exact.write(work / "one-rank", world_size=1)
        mixed.write(work / "mixed")
        mixed.pin("parity")
        with open_store(work / "parity") as by_parity:
            facts["mixture"] = _mixture(mixed, by_parity.compose(f"demo@{BASE}"))
        begin("resume", f"resuming from step {BASE} in new processes, and then from the mixture")
        resumed, from_mixed = _train(folder, "resumed", "exact", "mixed")
        facts["mixture"]["loss"] = from_mixed[-1]
        facts["losses"] = [
            {"step": step, "uninterrupted": one, "resumed": other, "identical": one == other}
            for step, one, other in zip(range(BASE + 1, STEPS + 1), losses[BASE:], resumed, strict=True)
        ]
        begin("compare", f"ingesting what the resumed run saved at step {STEPS}")
        store.ingest(work / "resumed", run="resumed")
        facts["layers"] = same_layers(store.compose(f"demo@{STEPS}"), store.compose("resumed"))
        begin("other ranks", "resuming on 1 rank instead of 2, and saving what it has loaded")
        _train(folder, "resized", "one-rank", steps=BASE, ranks=1)
        store.ingest(work / "resized", run="on-one-rank")
        facts["other_ranks"] = same_arrays(store.compose(f"demo@{BASE}"), store.compose("on-one-rank"))
        begin("gc", f"removing all but the newest 3 commits and step {BASE}; demo-filter stays")
        keep, before = Keep(last=3, every=BASE), _size_bytes(store.path)
        outcome = store.gc(keep, runs=["demo", "resumed", "on-one-rank"], grace_seconds=0)  # nobody else writes
        removed, is_sound = len(outcome.removed), store.verify(read_data=True).ok
        facts["gc"] = {"removed": removed, "kept": len(outcome.commits) - removed, "is_sound": is_sound}
        facts["gc"] |= {"before_bytes": before, "after_bytes": _size_bytes(store.path)}
        begin("report", "writing report.html")
        store.report(facts["report"], keep=keep)
    ends = [*times.values(), time.monotonic()][1:]
    return facts | {"seconds_by_part": {part: end - times[part] for part, end in zip(times, ends, strict=True)}}


def _train(folder: Path, out: str, *composites: str, steps: int = STEPS, ranks: int = 2) -> list[list[float]]:
    """Train from each of *composites*, or from the beginning; return the losses of each training run."""
    paths = [str(folder / "work" / name) for name in (out, *composites)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), "-m", "layerstore.demo.training", str(steps), *paths]
    # One thread, since the order of a sum changes its bits; lo, since a host's name may not resolve without a network.
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PATH": PATH}
    settings |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    log = folder / "logs" / f"{out}.log"
    # In a process session of its own: Ctrl-C then reaches only the demo, which lets torchrun end its ranks cleanly.
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env=os.environ | settings, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            status = process.wait()
        finally:
            process.terminate()  # has an effect only if we were interrupted
            process.wait()
    if status != 0:
        raise LayerstoreError(f"training on {ranks} ranks failed; its log is {log}", log=str(log))
    return [list(map(float, losses)) for losses in json.loads((folder / "work" / out / "losses.json").read_text())]


def _usage(saved_by: str, folder: Path, saves: list[int]) -> DemoFacts:
    first, *later = saves
    facts = {"saved_by": saved_by, "saves": len(saves), "total_bytes": _size_bytes(folder)}
    return facts | {"first_bytes": first, "later_bytes": sum(later) / len(later)}


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _mixture(mixed: Composite, saved: Composite) -> DemoFacts:
    same, steps = same_layers(saved, mixed), Counter(choice.step for choice in mixed.layers.values())
    facts = {"policy": mixed.policy, "step": mixed.step, "steps": dict(sorted(steps.items(), reverse=True))}
    return facts | {"oldest_steps": mixed.staleness.oldest.steps, "layers": len(same), "same": sum(same.values())}


def same_layers(expected: Composite, actual: Composite) -> dict[str, bool]:
    """Return for each layer whether both composites have the same version: equal weights and moments, bit for bit."""
    versions = {layer: choice.version for layer, choice in actual.layers.items()}
    return {layer: versions.get(layer) == choice.version for layer, choice in expected.layers.items()}


def same_arrays(expected: Composite, actual: Composite) -> DemoFacts:
    """Compare masters and moments of two commits for different numbers of ranks, array by array."""
    pairs = [(expected.tensors(kind), actual.tensors(kind)) for kind in ("master", "optimizer")]
    same = [ours[name].tobytes() == theirs[name].tobytes() for ours, theirs in pairs for name in ours]
    return {"ranks": actual.world_size, "tensors": len(same), "same": sum(same)}
