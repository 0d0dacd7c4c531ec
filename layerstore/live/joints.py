"""What a save is to become once all ranks have written: the record, but for what they write."""

from collections.abc import Callable, Mapping

from layerstore.errors import LayerstoreError
from layerstore.live.background import Job
from layerstore.live.log import LOG
from layerstore.model import PolicyUse
from layerstore.policy import Latest, Policy
from layerstore.publish.shares import ShareWork
from layerstore.storage.rooms import Rooms
from layerstore.storage.timings import SaveTiming, note_timing
from layerstore.tree import Tree
from layerstore.zero3 import Share


def in_order(share: Share, due: frozenset[str]) -> tuple[str, ...]:
    """Return the layers *due* in the model's order."""
    return tuple(layer.layer for layer in share.layers if layer.layer in due)


def use_of(policy: Policy, work: ShareWork, movements: Mapping[str, float]) -> PolicyUse:
    """Return what the record says of *policy*: what was due, and what that was decided from."""
    said: dict[Tree, Tree] = {}
    if not isinstance(policy, Latest) or len(work.due) < len(work.share.layers):
        said["due"] = list(in_order(work.share, work.due))
    if movements:
        said["movements"] = dict(movements.items())
    return PolicyUse(name=policy.name, parameters=policy.parameters, decisions=said)


def note_job(rooms: Rooms, session: str, job: Job, on_saved: Callable[[SaveTiming], None] | None) -> None:
    """Note in the store what *job*, which is finished, took, and tell who wants to hear it."""
    timing = _timing_of(job)
    try:
        note_timing(rooms, session, timing)
    except LayerstoreError as exc:
        LOG.warning("what step %d took is not noted: %s", job.step, exc)
    try:
        if on_saved is not None:
            on_saved(timing)
    except Exception as exc:  # noqa: BLE001  # it is the user's, and of the first rank alone: the others wait
        LOG.warning("on_saved failed at step %d: %s", job.step, exc)


def _timing_of(job: Job) -> SaveTiming:
    """Return what *job*, which is finished, took."""
    joint, timing = job.joint, job.timing
    assert joint is not None
    assert timing.durable_seconds is not None
    return SaveTiming(
        run=joint.run,
        attempt=joint.place.attempt,
        step=joint.step,
        save_number=joint.save_number,
        blocked_seconds=timing.blocked_seconds,
        durable_seconds=timing.durable_seconds,
        visible_seconds=timing.visible_seconds,
        copied_bytes=job.snapshot.size_bytes,
        written_bytes=timing.written_bytes,
        layers_saved=len(joint.work.due),
        layers=len(joint.work.share.layers),
        queued=timing.queued,
        failure=job.failure,
    )
