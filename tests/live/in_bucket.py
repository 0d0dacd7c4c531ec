"""The programs of ranks that share no disk: each saves a tiny engine's slices straight to a bucket."""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

import layerstore
from layerstore import Keep
from layerstore.live.saver import background, collector
from layerstore.remote import Bucket, RemoteNotice
from layerstore.remote import bucket as bucket_room
from tests.forked import tell
from tests.live.module import programs
from tests.live.tiny import RUN, SAVED, STEPS, begin, build, done, resumed, to_the_end, told, train
from tests.remote.faulty import TROUBLES, let


def _settle(options: Any) -> Any:
    """Take the keys of the bucket, and a cache of this host's own; return the bucket's URL, or levels."""
    os.environ.update(options["environment"])
    if "caches" in options:
        os.environ["LAYERSTORE_CACHE_DIR"] = f"{options['caches']}/{dist.get_rank()}"
    background.PATIENCE_SECONDS = 0.5
    if "near" in options:
        return [str(Path(os.environ["XDG_CACHE_HOME"]).with_name(options["near"])), options["url"]]
    return options["url"]


def begun(options: Any) -> None:
    """Save at every step, from the first on, into a bucket that holds nothing yet."""
    begin(_settle(options), until=options["until"], **options["saver"])
    done()


def requeued(options: Any) -> None:
    """Go on from wherever the bucket says, to the end, saving at every step."""
    url = _settle(options)
    engine = resumed(url)
    if "whole" in options:
        _tell_whole(engine)
    to_the_end(engine, url, **options["saver"])
    done()


def killed(options: Any) -> None:
    """Save at every step; at the fourth one host stops at the request that *options* say, and waits to be killed."""
    url = _settle(options)
    is_doomed = dist.get_rank() == options["host"]
    wanted, is_armed = options["request"], list[bool]()

    def note(doing: str, name: str) -> None:
        if is_armed and f"{doing} {kind_of(name)}" == wanted:
            tell("held", name=name)
            time.sleep(1000)

    _watch(note)
    engine = build()
    saver = layerstore.attach(engine, url, run=RUN, **options["saver"])
    train(engine, SAVED, saver=saver, save_at=range(STEPS))
    saver.wait()
    if "whole" in options:
        _tell_whole(engine)
    assert saver._following.is_sent(60.0)
    dist.barrier()
    is_armed += [True] if is_doomed else []
    train(engine, STEPS, saver=saver, save_at=(SAVED + 1,))
    saver.wait()  # it never comes to an end, unless the save is near
    tell("durable")
    time.sleep(1000)


def _tell_whole(engine: Any) -> None:
    """Tell the digest of every parameter and moment as a whole, however many ranks share it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, parameter in engine.module.named_parameters():
        of_moments = (safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq"))
        states = (safe_get_full_fp32_param(parameter), *of_moments)
        found[name] = [hashlib.sha256(state.cpu().numpy().tobytes()).hexdigest() for state in states]
    tell("whole", digests=found)


def kind_of(name: str) -> str:
    """Return what *name* in a bucket is."""
    return name.partition("/")[0]


def _watch(note: Any) -> None:
    """Call *note* before and after each change of a bucket, with what is done and a name."""
    write, remove = Bucket.write, Bucket.remove

    def written(self: Bucket, name: str, chunks: Any) -> None:
        note("before", name)
        write(self, name, chunks)
        note("after", name)

    def removed(self: Bucket, names: Any, **options: Any) -> bool:
        for name in names:
            note("removing", name)
        return remove(self, names, **options)

    Bucket.write, Bucket.remove = written, removed  # type: ignore[method-assign] # in these processes alone


def troubled(options: Any) -> None:
    """Save at every step, each while the server makes another trouble; the last one is saved in peace."""
    url = _settle(options)
    warnings.simplefilter("error", RemoteNotice)  # a saver's retries are for its log
    vars(bucket_room).update(REMOTE_PAUSE_SECONDS=0.01)
    engine = build()
    with layerstore.attach(engine, url, run=RUN, **options["saver"]) as saver:
        for number, trouble in enumerate((*TROUBLES, ""), 1):
            if dist.get_rank() == 0:
                let(os.environ["AWS_ENDPOINT_URL"], trouble)
            dist.barrier()
            train(engine, number, saver=saver, save_at=(number,))
            saver.wait()
    told(saver)
    done()


def modules(options: Any) -> None:
    """Save modules in every form of so many ranks, by attach and through StoreWriter."""
    programs.everywhere(options | {"store": _settle(options)})


def modules_again(options: Any) -> None:
    """Resume what `modules` has saved, on so many ranks."""
    programs.from_everywhere(options | {"store": _settle(options)})


def kept(options: Any) -> None:
    """Keep the newest two saves only, collecting after each."""
    collector.BUCKET_SECONDS = 0.0
    begin(_settle(options), until=options["until"], keep=Keep(last=2), **options["saver"])
    done()
