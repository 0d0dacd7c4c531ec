"""
A model of pushes and undrops beside collections of a remote: what each does to one object, request by request.

Time passes in halves of the grace. Everybody may sleep anywhere, for any of them; a collection may be killed anywhere,
and another one begin, or two run at once. The steps are those of `remote.push` and `remote.collect`;
docs/internals/durability.md argues from them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

HALF, GRACE = 1, 2
WAITS = "look at the object"
"""Where a push waits until no collection is between listing and removing."""
_OLD = GRACE
"""Ages are counted up to here."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What it holds: the object, an old record that names it, and the new one that a push sends."""

    object_age: int | None
    """Since it was written; None where it is not there."""
    has_old: bool
    trash_age: int | None = None
    """Since the old record came to the trash."""
    has_new: bool = False

    def passed(self) -> "Bucket":
        """Let half a grace pass."""
        return replace(self, object_age=_older(self.object_age), trash_age=_older(self.trash_age))


@dataclass(frozen=True, slots=True)
class Actor:
    """A process: where it is, what it remembers, and since when."""

    at: str
    since: int = 0
    """Since a push listed, or a collection asked for the time; only whether that is half a grace counts."""
    counts_on: bool = False
    """Of a push: whether it counts on the object without sending it."""
    is_watched: bool = False
    """Of a push: whether a collection was at work at any time since it listed."""
    is_named: bool = False
    """Of a push: whether it found a record in the bucket that names the object."""
    object_is_old: bool = False
    """Of a collection: whether it was when the collection asked for the time, and has not been written since."""
    trash_is_old: bool = False
    wants: bool = False
    """Of a collection: whether it has found nothing so far that names the object."""
    is_doomed: bool = False
    """Of a collection: whether it has listed the object as one to be removed."""

    def go(self, at: str, **changes: bool | int) -> "Actor":
        """Return the process at another place."""
        return replace(self, at=at, **changes)  # type: ignore[arg-type]  # fields by name


Move = tuple[Bucket, Actor]


def _older(age: int | None) -> int | None:
    return None if age is None else min(age + HALF, _OLD)


# -- a push ------------------------------------------------------------------------------------------------------------


def _list_records(bucket: Bucket, me: Actor) -> Move:
    return bucket, me.go("list objects", since=0, is_watched=False, is_named=bucket.has_old)


def _list_objects(bucket: Bucket, me: Actor) -> Move:
    is_young = bucket.object_age is not None and bucket.object_age < HALF
    return bucket, me.go("send", counts_on=me.is_named or is_young)


def _send(bucket: Bucket, me: Actor) -> Move:
    return bucket if me.counts_on else replace(bucket, object_age=0), me.go("look at the watch")


def _look_at_the_watch(bucket: Bucket, me: Actor) -> Move:
    return bucket, me.go("list records" if me.since >= HALF else "look for collections")


def _look_for_collections(bucket: Bucket, me: Actor) -> Move:
    """Look for marks, unless a record names the object: those of killed ones only make for more looks."""
    return bucket, me.go("look at the object" if me.is_watched and not me.is_named else "write")


def _look_at_the_object(bucket: Bucket, me: Actor) -> Move:
    return bucket, me.go("list records" if bucket.object_age is None else "write")


def _write(bucket: Bucket, me: Actor) -> Move:
    return replace(bucket, has_new=True), me.go("look once more")


def _look_once_more(bucket: Bucket, me: Actor) -> Move:
    return bucket, me.go("list records" if me.since >= HALF else "pushed")


PUSH: dict[str, Callable[[Bucket, Actor], Move]] = {
    "list records": _list_records,
    "list objects": _list_objects,
    "send": _send,
    "look at the watch": _look_at_the_watch,
    "look for collections": _look_for_collections,
    "look at the object": _look_at_the_object,
    "write": _write,
    "look once more": _look_once_more,
}


# -- a collection ------------------------------------------------------------------------------------------------------


def _ask(bucket: Bucket, me: Actor) -> Move:
    """Ask for the time: what is older than the grace by now is old, unless somebody writes it again."""
    is_old = {"object_is_old": _is_old(bucket.object_age), "trash_is_old": _is_old(bucket.trash_age)}
    return bucket, me.go("mark records", since=0, **is_old)


def _is_old(age: int | None) -> bool:
    return age is not None and age >= GRACE


def _mark_records(bucket: Bucket, me: Actor) -> Move:
    """Mark from them all; the one that it moves away will be in the trash for less than a grace."""
    return bucket, me.go("mark trash", wants=not (bucket.has_old or bucket.has_new))


def _mark_trash(bucket: Bucket, me: Actor) -> Move:
    holds = bucket.trash_age is not None and not me.trash_is_old
    return bucket, me.go("copy", wants=me.wants and not holds)


def _copy(bucket: Bucket, me: Actor) -> Move:
    return replace(bucket, trash_age=0) if bucket.has_old else bucket, me.go("remove record")


def _remove_record(bucket: Bucket, me: Actor) -> Move:
    """Remove it, unless this collection has slept for too long by now: then it begins afresh."""
    if me.since >= HALF:
        return bucket, Actor("ask")
    return replace(bucket, has_old=False), me.go("list")


def _list(bucket: Bucket, me: Actor) -> Move:
    return bucket, me.go("remove", is_doomed=me.wants and me.object_is_old and bucket.object_age is not None)


def _remove(bucket: Bucket, me: Actor) -> Move:
    if me.since >= HALF:
        return bucket, Actor("ask")
    left = replace(bucket, trash_age=None) if me.trash_is_old else bucket
    return replace(left, object_age=None) if me.is_doomed else left, Actor("ask")


COLLECTION: dict[str, Callable[[Bucket, Actor], Move]] = {
    "ask": _ask,
    "mark records": _mark_records,
    "mark trash": _mark_trash,
    "copy": _copy,
    "remove record": _remove_record,
    "list": _list,
    "remove": _remove,
}


# -- an undrop ---------------------------------------------------------------------------------------------------------


def _renew(bucket: Bucket, me: Actor) -> Move:
    """Write the record to the trash once more: every collection that begins from now on finds it young."""
    return replace(bucket, trash_age=0), me.go("look for collections", since=0, is_watched=False)


def _look_for_marks(bucket: Bucket, me: Actor) -> Move:
    return bucket, me.go("refused" if me.is_watched else "look at all")


def _look_at_all(bucket: Bucket, me: Actor) -> Move:
    return bucket, me.go("refused" if bucket.object_age is None or me.since >= HALF else "write")


def _restore(bucket: Bucket, me: Actor) -> Move:
    return replace(bucket, has_new=True), me.go("look at the clock")


def _look_at_the_clock(bucket: Bucket, me: Actor) -> Move:
    """Withdraw the record if this has slept, to the trash."""
    if me.since >= HALF:
        return replace(bucket, has_new=False, trash_age=0), me.go("refused")
    return bucket, me.go("look for more marks")


def _look_for_more_marks(bucket: Bucket, me: Actor) -> Move:
    return bucket, me.go("restored" if me.is_watched else "remove the copy")


def _remove_copy(bucket: Bucket, me: Actor) -> Move:
    return replace(bucket, trash_age=None), me.go("restored")


UNDROP: dict[str, Callable[[Bucket, Actor], Move]] = {
    "renew": _renew,
    "look for collections": _look_for_marks,
    "look at all": _look_at_all,
    "write": _restore,
    "look at the clock": _look_at_the_clock,
    "look for more marks": _look_for_more_marks,
    "remove the copy": _remove_copy,
}


# -- all of them -------------------------------------------------------------------------------------------------------

World = tuple[Bucket, tuple[Actor, ...]]


def worlds(first: Bucket, *, pushes: int, collections: int, undrops: bool = False) -> Iterator[World]:
    """
    Yield every state that pushes and collections, which begin again and again, can bring about.

    With *undrops*, those take the place of the pushes.
    """
    others = (Actor("renew" if undrops else "list records") for _ in range(pushes))
    begin: World = (first, (*others, *(Actor("ask") for _ in range(collections))))
    seen, waiting = {begin}, [begin]
    steps = UNDROP if undrops else PUSH
    while waiting:
        world = waiting.pop()
        yield world
        for following in _following(world, pushes, steps):
            if following not in seen:
                seen.add(following)
                waiting.append(following)


def _following(world: World, pushes: int, steps: dict[str, Callable[[Bucket, Actor], Move]]) -> Iterator[World]:
    bucket, actors = world
    yield bucket.passed(), tuple(map(_slept, actors))
    is_removing = any(each.at == "remove" for each in actors)
    if any(each.at != "ask" for each in actors[pushes:]):
        actors = (*(replace(each, is_watched=True) for each in actors[:pushes]), *actors[pushes:])
    for number, me in enumerate(actors):
        step = (steps if number < pushes else COLLECTION).get(me.at)
        if step is not None and not (me.at == WAITS and is_removing):
            after, moved = step(bucket, me)
            all_moved = (*actors[:number], moved, *actors[number + 1 :])
            yield after, tuple(_told(bucket, after, each) for each in all_moved)
        if number >= pushes and me.at != "ask":
            yield bucket, (*actors[:number], Actor("ask"), *actors[number + 1 :])  # killed; another one begins


def _slept(each: Actor) -> Actor:
    """Let half a grace pass for *each*; a collection that sleeps between its listing and removing lists again."""
    slept = replace(each, since=HALF)
    return slept.go("list", is_doomed=False) if each.at == "remove" else slept


def _told(before: Bucket, after: Bucket, each: Actor) -> Actor:
    """Return *each*, to whom what was just written is not old."""
    return replace(
        each,
        object_is_old=each.object_is_old and (after.object_age == before.object_age or after.object_age is None),
        trash_is_old=each.trash_is_old and (after.trash_age == before.trash_age or after.trash_age is None),
    )


def lacks(world: World) -> bool:
    """Whether a push or an undrop has ended, and the bucket lacks what its record names."""
    bucket, actors = world
    return any(each.at in {"pushed", "restored"} for each in actors) and bucket.object_age is None
