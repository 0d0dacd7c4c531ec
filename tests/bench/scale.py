"""
How long verify and gc take on a store of a million objects, and how much memory they hold.

Records, version blobs and state blobs are real and encoded by the library. Objects have their sizes and no bytes: that
is all that a quick verify and a collection look at. Each question is asked in a process of its own, so that its memory
is its own; what the page cache holds is not counted, and the folders are in it.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import layerstore
from tests.bench.histories import RUN, build_objects

# What a process of its own does: one question, with its time and the most memory that it held meanwhile.
_ASKED = """
import json, sys, time
import layerstore
from layerstore import Keep
from tests.bench.measure import measure
found = []
def ask():
    with layerstore.open(sys.argv[1]) as store:
        found.append(QUESTION)
timing = measure(ask)
print(json.dumps([timing.seconds, timing.cpu_seconds, timing.anonymous_bytes, found[0]]))
"""
_QUESTIONS = {
    "nothing but opening it": "time.sleep(0.1)",
    "the index made afresh": "store.reindex()",
    "verify, quick": "[(v := store.verify()).ok, v.records, v.objects, v.orphans]",
    "verify, quick, one object missing": "[len(store.verify().damaged[0].needed_by)]",
    "gc, plan that keeps all": "(lambda g: [len(g.removed), g.objects.count])(store.gc(dry_run=True, grace_seconds=0))",
    "gc, plan that keeps half": (
        "(lambda g: [len(g.removed), g.objects.count])(store.gc(Keep(last=HALF), dry_run=True, grace_seconds=0))"
    ),
    "gc that keeps half": "(lambda g: [len(g.removed), g.objects.count])(store.gc(Keep(last=HALF), grace_seconds=0))",
}


def run(folder: Path, *, commits: int, shares: Sequence[int] = (4, 1)) -> None:
    """
    Make stores of two sizes, so that growth shows, and print what each question takes.

    What a process holds that opens the store and asks nothing is a row of its own: the rest is the question's.
    """
    for share in shares:
        path = folder / f"store-{share}"
        saves = commits // share
        started = time.perf_counter()
        build_objects(path, commits=saves)
        made = sum(len(os.listdir(path / "objects" / name)) for name in os.listdir(path / "objects"))
        print(f"\n{made:,} objects, {saves:,} commits, made in {time.perf_counter() - started:.0f} s")
        print(f"{'':<40}{'seconds':>9}{'cpu':>9}{'peak MB':>9}  found")
        for question, code in _QUESTIONS.items():
            hurt = _hide_one(path) if "missing" in question else None
            seconds, cpu_seconds, peak_bytes, found = json.loads(_ask(path, code.replace("HALF", str(saves // 2))))
            print(f"{question:<40}{seconds:>9.1f}{cpu_seconds:>9.1f}{peak_bytes / 1e6:>9.0f}  {found}", flush=True)
            if hurt is not None:
                hurt.with_name("hidden").rename(hurt)


def _hide_one(path: Path) -> Path:
    """Take away an object that a version of the last commit names."""
    with layerstore.open(path) as store:
        [entry, *_] = store.repo.records.read(store.repo.records.names(RUN)[-1]).record.layers
        target = store.repo.layout.object(store.repo.version_of(entry).objects[0].id)
    target.rename(target.with_name("hidden"))
    return target


def _ask(path: Path, code: str) -> str:
    program = _ASKED.replace("QUESTION", code)
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]
