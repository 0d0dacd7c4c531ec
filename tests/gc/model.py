"""
A model of writers beside collections: what each does to one blob and the tensor object that it names, step by step.

Fault model: processes run at any relative speed, and never see each other's memory. A writer may stop anywhere for
longer than the grace. A collection may be killed anywhere, and another one begin; or two run at once, as if a lock had
been lost: but one that has slept for longer than the grace notices that at its next look at the lock, and stops.
Every step is one call of the filesystem.
The steps are those of `publish.transaction`, `publish.rank_parts`, `storage.objects` and `gc.sweep`;
docs/internals/durability.md argues from them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

TENSOR, BLOB = "tensor", "blob"
# In the order in which a collection comes upon them: ids are hashes, so both orders happen.
ORDERS = ((TENSOR, BLOB), (BLOB, TENSOR))


@dataclass(frozen=True, slots=True)
class Disk:
    """What the folders hold."""

    home: frozenset[str] = frozenset({TENSOR, BLOB})
    aside: frozenset[str] = frozenset()
    young: frozenset[str] = frozenset()
    """What was touched within the grace; all names of a file share its time."""
    records: int = 0
    """How many writers' records are linked."""
    naps: int = 0
    """How often everybody's files have grown old."""
    parts: frozenset[str] = frozenset()
    """Drafts and parts of two ranks; that of the second names the tensor object."""
    is_idle: bool = False
    """Whether nothing was done in their session for a day."""

    def touch(self, name: str) -> "Disk":
        """Refresh the time of what is at its place."""
        return replace(self, young=self.young | {name}) if name in self.home else self

    def take(self, name: str) -> "Disk":
        """Rename from its place to the folder aside; POSIX renames nothing where both are names of one file."""
        if name not in self.home or name in self.aside:
            return self
        return replace(self, home=self.home - {name}, aside=self.aside | {name})

    def link_back(self, name: str) -> "Disk":
        """Link what lies aside to its place."""
        return replace(self, home=self.home | {name}) if name in self.aside else self

    def drop(self, name: str) -> "Disk":
        """Unlink what lies aside."""
        gone = replace(self, aside=self.aside - {name})
        return gone if name in self.home else replace(gone, young=gone.young - {name})

    def has(self, name: str) -> bool:
        """Whether a reader finds it."""
        return name in self.home or name in self.aside


@dataclass(frozen=True, slots=True)
class Actor:
    """A process: where it is, and what it remembers."""

    at: str
    order: tuple[str, ...] = ORDERS[0]
    needs: frozenset[str] = frozenset()
    """Of a collection: what it knows to be needed. Of a writer: what it has found missing at its place."""
    index: int = 0
    todo: tuple[str, ...] = ()
    has_claimed: bool = False
    has_linked: bool = False
    """Of a writer: whether its record is visible."""
    is_saved: bool = False
    """Of ranks that save together: whether that was reported, although there is more to do."""
    listed: frozenset[str] = frozenset()
    """Of a collection: what lay aside before its second look."""
    is_idle: bool = False
    """Of a collection: whether the session was idle when it began, and still is."""
    wrong: str = ""
    """What is done in a wrong order, if anything."""

    def go(self, at: str, **changes: object) -> "Actor":
        """Return the process at another place."""
        return replace(self, at=at, index=0, **changes)  # type: ignore[arg-type]  # fields by name


Move = tuple[Disk, Actor]
FINAL = frozenset({"saved", "withdrawn", "refused", "collected", "killed", "left"})


# -- a writer that inherits the blob --------------------------------------------------------------------------------


def inherit(disk: Disk, me: Actor) -> Move:
    """Take the next step of a writer that names a version which an earlier commit has: it has no bytes of its own."""
    return _WRITER[me.at](disk, me)


def _touch_blob(disk: Disk, me: Actor) -> Move:
    return disk.touch(BLOB), me.go("stat blob")


def _stat_blob(disk: Disk, me: Actor) -> Move:
    return disk, me.go("link record", has_claimed=True) if BLOB in disk.home else me.go("reuse", todo=(TENSOR, BLOB))


def _reuse(disk: Disk, me: Actor) -> Move:
    """Touch each object, and link it back if it lies aside; the blob last."""
    if not me.todo:
        return disk, me.go("link record" if not me.has_linked else "saved")
    return disk.touch(me.todo[0]), me.go("reuse found")


def _reuse_found(disk: Disk, me: Actor) -> Move:
    name, rest = me.todo[0], me.todo[1:]
    if name in disk.home:
        return disk, me.go("reuse", todo=rest)
    if name in disk.aside:
        return disk.link_back(name), me.go("reuse linked")
    return disk, me.go("withdraw" if me.has_linked else "refused")


def _reuse_linked(disk: Disk, me: Actor) -> Move:
    return disk.touch(me.todo[0]), me.go("reuse", todo=me.todo[1:])


def _link_record(disk: Disk, me: Actor) -> Move:
    linked = replace(disk, records=disk.records + 1)
    return linked, me.go("look", todo=(BLOB,) if me.has_claimed else (TENSOR, BLOB), has_linked=True)


def _look(disk: Disk, me: Actor) -> Move:
    """Touch the blob, or all if each was reused; what is not at its place is reused, object by object."""
    if not me.todo:
        return disk, me.go("saved")
    return disk.touch(me.todo[0]), me.go("look stat")


def _look_stat(disk: Disk, me: Actor) -> Move:
    if me.todo[0] in disk.home:
        return disk, me.go("look", todo=me.todo[1:])
    return disk, me.go("reuse", todo=(TENSOR, BLOB))


def _withdraw(disk: Disk, me: Actor) -> Move:
    return replace(disk, records=disk.records - 1), me.go("withdrawn")


_WRITER: dict[str, Callable[[Disk, Actor], Move]] = {
    "touch blob": _touch_blob,
    "stat blob": _stat_blob,
    "reuse": _reuse,
    "reuse found": _reuse_found,
    "reuse linked": _reuse_linked,
    "link record": _link_record,
    "look": _look,
    "look stat": _look_stat,
    "withdraw": _withdraw,
}


# -- a writer whose differences refer to the tensor object -----------------------------------------------------------


def refer(disk: Disk, me: Actor) -> Move:
    """Take the next step of a writer of a compact version: the blob is its own, the tensor that it names is not."""
    return _REFERRER[me.at](disk, me)


def _putting_back(place: str, then: str, lost: str = "") -> dict[str, Callable[[Disk, Actor], Move]]:
    """Return the steps that claim the tensor object: touched, or linked back; then *then* or *lost* comes."""

    def touch(disk: Disk, me: Actor) -> Move:
        return disk.touch(TENSOR), me.go(f"{place}, aside" if TENSOR not in disk.home else f"{place}, look")

    def touch_aside(disk: Disk, me: Actor) -> Move:
        is_there = TENSOR in disk.aside
        touched = replace(disk, young=disk.young | {TENSOR}) if is_there else disk
        return touched, me.go(f"{place}, link" if is_there else f"{place}, look")

    def link(disk: Disk, me: Actor) -> Move:
        return disk.link_back(TENSOR), me.go(f"{place}, look")

    def look(disk: Disk, me: Actor) -> Move:
        otherwise = lost or ("withdraw" if me.has_linked else "refused")
        return disk, me.go(then if TENSOR in disk.home else otherwise)

    return {place: touch, f"{place}, aside": touch_aside, f"{place}, link": link, f"{place}, look": look}


def _link_own_blob(disk: Disk, me: Actor) -> Move:
    """Link the blob, or find that another writer has: touched before, its file is young."""
    home, young = disk.home | {BLOB}, disk.young | {BLOB}
    return replace(disk, home=home, young=young), me.go("saved" if me.has_linked else "link record")


def _link_own_record(disk: Disk, me: Actor) -> Move:
    return replace(disk, records=disk.records + 1), me.go("look at tensor", has_linked=True)


def _look_at_blob(disk: Disk, me: Actor) -> Move:
    """Link it once more if it was taken: its file in tmp/ is there still."""
    return disk.touch(BLOB), me.go("saved" if BLOB in disk.home else "link blob")


_REFERRER: dict[str, Callable[[Disk, Actor], Move]] = {
    **_putting_back("refer", "publish"),
    **_putting_back("publish", "link blob"),
    "link blob": _link_own_blob,
    "link record": _link_own_record,
    **_putting_back("look at tensor", "look at blob"),
    "look at blob": _look_at_blob,
    "withdraw": _withdraw,
}


# -- two ranks that save together ------------------------------------------------------------------------------------

FIRST, SECOND, DRAFT = "part of the first", "part of the second", "draft of the second"
WRONG = ("drafts are trusted", "parts go before the record comes", "parts are looked at once", "idle parts go last")


def save_together(disk: Disk, me: Actor) -> Move:
    """Take the next step of the second rank, which leaves a part, or of the first, which joins that with its own."""
    return _RANKS[me.at](disk, me)


def _with_part(disk: Disk, name: str, *, instead_of: str = "") -> Disk:
    return replace(disk, parts=disk.parts - {instead_of} | {name}, is_idle=False)


def _leave_draft(disk: Disk, me: Actor) -> Move:
    return _with_part(disk, DRAFT), me.go("look")


def _confirm(disk: Disk, me: Actor) -> Move:
    """Rename it: that fails where a collection has removed it."""
    if DRAFT not in disk.parts:
        return disk, me.go("refused")
    return _with_part(disk, SECOND, instead_of=DRAFT), me.go("left")


def _withdraw_draft(disk: Disk, me: Actor) -> Move:
    return replace(disk, parts=disk.parts - {DRAFT}), me.go("refused")


def _leave_first(disk: Disk, me: Actor) -> Move:
    return _with_part(disk, FIRST), me.go("wait")


def _are_there(disk: Disk, me: Actor) -> bool:
    seconds = {SECOND, DRAFT} if me.wrong == "drafts are trusted" else {SECOND}
    return FIRST in disk.parts and bool(disk.parts & seconds)


def _wait(disk: Disk, me: Actor) -> Move:
    return disk, me.go("trust") if _are_there(disk, me) else me


def _trust(disk: Disk, me: Actor) -> Move:
    if not _are_there(disk, me):
        return disk, me.go("refused")
    return disk, me.go("remove parts" if me.wrong == "parts go before the record comes" else "join blob")


def _join_blob(disk: Disk, me: Actor) -> Move:
    linked = replace(disk, home=disk.home | {BLOB}, young=disk.young | {BLOB})
    return linked, me.go("remove parts" if me.has_linked else "join record")


def _join_record(disk: Disk, me: Actor) -> Move:
    is_wrong = me.wrong in {"parts go before the record comes", "parts are looked at once"}
    linked = replace(disk, records=disk.records + 1)
    return linked, me.go("look at the blob" if is_wrong else "look at parts", has_linked=True)


def _look_at_parts(disk: Disk, me: Actor) -> Move:
    return disk, me.go("look at the blob" if _are_there(disk, me) else "withdraw")


def _look_at_the_blob(disk: Disk, me: Actor) -> Move:
    """Link it once more if it was taken: its file in tmp/ is there still."""
    return disk.touch(BLOB), me.go("remove parts" if BLOB in disk.home else "join blob", is_saved=BLOB in disk.home)


def _remove_parts(disk: Disk, me: Actor) -> Move:
    left = replace(disk, parts=frozenset())
    return left, me.go("saved" if me.has_linked else "join blob")


_RANKS: dict[str, Callable[[Disk, Actor], Move]] = {
    **_putting_back("find", "publish", "refused"),
    **_putting_back("publish", "leave a draft", "refused"),
    "leave a draft": _leave_draft,
    **_putting_back("look", "confirm", "withdraw the draft"),
    "confirm": _confirm,
    "withdraw the draft": _withdraw_draft,
    "leave": _leave_first,
    "wait": _wait,
    "trust": _trust,
    "join blob": _join_blob,
    "join record": _join_record,
    "look at parts": _look_at_parts,
    "look at the blob": _look_at_the_blob,
    "remove parts": _remove_parts,
    "withdraw": _withdraw,
}


# -- a collection ----------------------------------------------------------------------------------------------------


def collect(disk: Disk, me: Actor) -> Move:
    """Take the next step of a collection."""
    return _COLLECTION[me.at](disk, me)


def _begin(disk: Disk, me: Actor) -> Move:
    """Find out whether the session is idle: that is so by the time when the collection began."""
    return disk, me.go("list idle parts" if me.wrong != "idle parts go last" else "mark", is_idle=disk.is_idle)


def _list_idle_parts(disk: Disk, me: Actor) -> Move:
    return disk, me.go("remove idle parts", todo=tuple(sorted(disk.parts)) if me.is_idle else ())


def _remove_idle_parts(disk: Disk, me: Actor) -> Move:
    if not me.todo:
        return disk, me.go("collected" if me.wrong == "idle parts go last" else "mark")
    left = replace(disk, parts=disk.parts - {me.todo[0]}, is_idle=False)
    return left, me.go("remove idle parts", todo=me.todo[1:])


def _of_parts(disk: Disk, me: Actor) -> frozenset[str]:
    return me.needs | ({TENSOR} if disk.parts & {DRAFT, SECOND} and not me.is_idle else frozenset())


def _of_records(disk: Disk, me: Actor) -> frozenset[str]:
    return me.needs | ({TENSOR, BLOB} if disk.records else frozenset())


def _mark(disk: Disk, me: Actor) -> Move:
    return disk, me.go("mark records", needs=_of_parts(disk, me))


def _mark_records(disk: Disk, me: Actor) -> Move:
    return disk, me.go("find young", needs=_of_records(disk, me))


def _find_young(disk: Disk, me: Actor) -> Move:
    spared = {TENSOR} if BLOB in disk.home and BLOB in disk.young else frozenset()
    return disk, me.go("sweep", needs=me.needs | spared)


def _sweep(disk: Disk, me: Actor) -> Move:
    """Look at the time of the next object; a young blob's tensor is spared, what is old is about to be renamed."""
    if me.index == len(me.order):
        return disk, me.go("list aside")
    name = me.order[me.index]
    if name not in disk.home or name in me.needs:
        return disk, replace(me, index=me.index + 1)
    if name in disk.young:
        needs = me.needs | ({TENSOR} if name == BLOB else frozenset())
        return disk, replace(me, index=me.index + 1, needs=needs)
    return disk, replace(me, at="take")


def _take(disk: Disk, me: Actor) -> Move:
    """Rename it; where it has both names, that does nothing: the one aside is settled first."""
    return disk.take(me.order[me.index]), replace(me, at="sweep", index=me.index + 1)


def _list_aside(disk: Disk, me: Actor) -> Move:
    """List what it may unlink later: what comes aside after its second look is another collection's to settle."""
    return disk, me.go("mark again", listed=disk.aside)


def _mark_again(disk: Disk, me: Actor) -> Move:
    return disk, me.go("mark records again", needs=_of_parts(disk, me))


def _mark_records_again(disk: Disk, me: Actor) -> Move:
    return disk, me.go("look aside", needs=_of_records(disk, me))


def _is_needed(disk: Disk, me: Actor, name: str) -> bool:
    return name in me.needs or name in disk.young


def _look_aside(disk: Disk, me: Actor) -> Move:
    """Look at the time of the next object that it listed; what is young goes back, with what it names."""
    if me.index == len(me.order):
        return disk, me.go("list back")
    name = me.order[me.index]
    if name in disk.aside & me.listed and _is_needed(disk, me, name):
        needs = me.needs | ({TENSOR, BLOB} if name == BLOB else {TENSOR})
        return disk, replace(me, index=me.index + 1, needs=needs)
    return disk, replace(me, index=me.index + 1)


def _list_back(disk: Disk, me: Actor) -> Move:
    """Find what goes back; before a blob comes what it names, wherever it is."""
    back = tuple(name for name in (TENSOR, BLOB) if name in me.listed & me.needs)
    return disk, me.go("put back", todo=(TENSOR, BLOB) if BLOB in back else back, listed=me.listed - me.needs)


def _put_back(disk: Disk, me: Actor) -> Move:
    """Touch it first, wherever it is: to another collection it is young then."""
    if not me.todo:
        return disk, me.go("settle")
    return replace(disk, young=disk.young | {me.todo[0]}) if disk.has(me.todo[0]) else disk, me.go("put home")


def _put_home(disk: Disk, me: Actor) -> Move:
    if not disk.has(me.todo[0]):
        return disk, me.go("settle")  # a blob stays aside where what it names is gone
    if me.todo[0] not in disk.aside:
        return disk, me.go("put back", todo=me.todo[1:])
    return disk.link_back(me.todo[0]), me.go("forget")


def _forget(disk: Disk, me: Actor) -> Move:
    return disk.drop(me.todo[0]), me.go("put back", todo=me.todo[1:])


def _settle(disk: Disk, me: Actor) -> Move:
    """Look at the next of what may be unlinked: a blob before what it names."""
    if me.index == len((BLOB, TENSOR)):
        return disk, me.go("list idle parts" if me.wrong == "idle parts go last" else "collected")
    name = (BLOB, TENSOR)[me.index]
    if name not in disk.aside & me.listed:
        return disk, replace(me, index=me.index + 1)
    if not _is_needed(disk, me, name):
        return disk, replace(me, at="unlink")
    if name == TENSOR:
        return disk, replace(me, index=me.index + 1)
    return disk, me.go("put back", todo=(TENSOR, BLOB), listed=frozenset[str]())


def _unlink(disk: Disk, me: Actor) -> Move:
    name = (BLOB, TENSOR)[me.index]
    return disk.drop(name), replace(me, at="look home" if name == BLOB else "settle", index=me.index + 1)


def _look_home(disk: Disk, me: Actor) -> Move:
    """Look whether a writer has linked the blob back before it was unlinked: then what it names goes back, too."""
    if BLOB not in disk.home:
        return disk, replace(me, at="settle")
    return disk, me.go("put back", todo=(TENSOR,), listed=me.listed - {TENSOR})


_COLLECTION: dict[str, Callable[[Disk, Actor], Move]] = {
    "begin": _begin,
    "list idle parts": _list_idle_parts,
    "remove idle parts": _remove_idle_parts,
    "mark": _mark,
    "mark records": _mark_records,
    "find young": _find_young,
    "sweep": _sweep,
    "take": _take,
    "list aside": _list_aside,
    "mark again": _mark_again,
    "mark records again": _mark_records_again,
    "look aside": _look_aside,
    "list back": _list_back,
    "put back": _put_back,
    "put home": _put_home,
    "forget": _forget,
    "settle": _settle,
    "unlink": _unlink,
    "look home": _look_home,
}


# -- all interleavings -----------------------------------------------------------------------------------------------

World = tuple[Disk, tuple[Actor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Who is there."""

    writers: int
    collections: int
    naps_max: int = 0
    """How often everybody may sleep for longer than the grace."""
    is_compact: bool = False
    """Whether writers bring a blob of their own, and only what it refers to is there."""
    is_joint: bool = False
    """Whether the writers are two ranks that save together."""
    wrong: str = ""
    """What is done in a wrong order, if anything."""
    one_after_another: bool = False
    """Whether each collection begins once the one before has ended, or was killed somewhere."""
    order: tuple[str, ...] = ORDERS[0]


def worlds(scene: Scene) -> Iterator[World]:
    """Yield every state that any interleaving comes to."""
    begin = ["find", "leave"] if scene.is_joint else ["refer" if scene.is_compact else "touch blob"] * scene.writers
    first = "begin" if scene.is_joint else "mark"
    actors = (
        *(Actor(at, wrong=scene.wrong) for at in begin),
        *(Actor(first, order=scene.order, wrong=scene.wrong) for _ in range(scene.collections)),
    )
    start: World = (Disk() if first == "mark" and not scene.is_compact else Disk(home=frozenset({TENSOR})), actors)
    seen = {start}
    pending = [start]
    while pending:
        world = pending.pop()
        yield world
        for following in map(partial(_canonical, scene), _following(world, scene)):
            if following not in seen:
                seen.add(following)
                pending.append(following)


def _canonical(scene: Scene, world: World) -> World:
    """Return the one of several worlds that differ only in which of two like processes is which."""
    disk, actors = world
    writers, collections = actors[: scene.writers], actors[scene.writers :]
    if not scene.one_after_another:
        collections = tuple(sorted(collections, key=repr))
    return disk, (*sorted(writers, key=repr), *collections)


def _following(world: World, scene: Scene) -> Iterator[World]:
    disk, actors = world
    write = save_together if scene.is_joint else refer if scene.is_compact else inherit
    for place, actor in enumerate(actors):
        is_writer = place < scene.writers
        if actor.at in FINAL or (scene.one_after_another and not is_writer and _waits(actors, place, scene)):
            continue
        after, moved = (write if is_writer else collect)(disk, actor)
        others = actors
        if after.parts != disk.parts:  # to nobody the session is idle any more
            others, moved = tuple(replace(each, is_idle=False) for each in actors), replace(moved, is_idle=False)
        yield after, (*others[:place], moved, *others[place + 1 :])
        if scene.one_after_another and not is_writer:
            yield disk, (*actors[:place], Actor("killed"), *actors[place + 1 :])
    if (disk.young or disk.parts) and disk.naps < scene.naps_max:
        slept = replace(disk, young=frozenset(), naps=disk.naps + 1)
        yield slept, actors
        if disk.parts:
            yield replace(slept, is_idle=True), actors


def _waits(actors: tuple[Actor, ...], place: int, scene: Scene) -> bool:
    return any(actor.at not in FINAL for actor in actors[scene.writers : place])


def lacks(world: World) -> bool:
    """Whether a commit that was reported as saved lacks something."""
    disk, actors = world
    return any(actor.at == "saved" or actor.is_saved for actor in actors) and not (disk.has(TENSOR) and disk.has(BLOB))


def shows_what_lacks(world: World) -> bool:
    """Whether, with all at their ends, a visible record lacks something."""
    disk, actors = world
    is_over = all(actor.at in FINAL for actor in actors)
    return is_over and bool(disk.records) and not (disk.has(TENSOR) and disk.has(BLOB))
