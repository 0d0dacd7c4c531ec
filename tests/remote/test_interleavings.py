"""Every interleaving of pushes, undrops and collections of a remote, in a model: what was pushed stays whole."""

import pytest

from tests.remote import model
from tests.remote.model import UNDROP, Actor, Bucket, lacks, worlds

BUCKETS = {
    "an old commit names it": Bucket(object_age=model.GRACE, has_old=True),
    "a killed push left it": Bucket(object_age=0, has_old=False),
    "nobody has it": Bucket(object_age=None, has_old=False),
}


@pytest.mark.parametrize("name", BUCKETS)
@pytest.mark.parametrize(
    ("pushes", "collections"),
    [(1, 1), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((1, 2), (2, 1)))],
)
def test_no_interleaving_costs_a_commit_an_object(name: str, pushes: int, collections: int) -> None:
    """Whoever sleeps for days, or is killed, wherever."""
    count = pushed = 0
    for world in worlds(BUCKETS[name], pushes=pushes, collections=collections):
        count += 1
        pushed += any(actor.at == "pushed" for actor in world[1])
        assert not lacks(world), world
    assert count > 100
    assert pushed


@pytest.mark.parametrize(
    ("step", "following"),
    [("look once more", "pushed"), ("look for collections", "write"), (model.WAITS, "write")],
)
def test_without_this_step_a_push_would_lose(monkeypatch: pytest.MonkeyPatch, step: str, following: str) -> None:
    """The model has teeth: a push that does not look ends with less than it counted on."""
    monkeypatch.setitem(model.PUSH, step, lambda bucket, me: (bucket, me.go(following)))
    assert _loses()


def test_without_waiting_a_push_would_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look before the collection removes what it has listed."""
    monkeypatch.setattr(model, "WAITS", "nowhere")
    assert _loses()


def _loses() -> bool:
    return any(any(map(lacks, worlds(bucket, pushes=1, collections=1))) for bucket in BUCKETS.values())


@pytest.mark.full
def test_without_the_trash_a_push_would_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an old commit names has to be held for as long as a push may count on that commit."""

    def forgetful(bucket: Bucket, me: Actor) -> tuple[Bucket, Actor]:
        return bucket, me.go("copy")

    monkeypatch.setitem(model.COLLECTION, "mark trash", forgetful)
    assert any(map(lacks, worlds(BUCKETS["an old commit names it"], pushes=1, collections=1)))


def test_counting_on_the_old_a_push_would_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that nothing names is good for half a grace only."""

    def trusting(bucket: Bucket, me: Actor) -> tuple[Bucket, Actor]:
        return bucket, me.go("send", counts_on=bucket.object_age is not None)

    monkeypatch.setitem(model.PUSH, "list objects", trusting)
    assert any(map(lacks, worlds(BUCKETS["a killed push left it"], pushes=1, collections=1)))


DROPPED = [Bucket(object_age=model.GRACE, has_old=False, trash_age=age) for age in (0, model.HALF, model.GRACE)]


@pytest.mark.parametrize("bucket", DROPPED, ids=lambda bucket: f"dropped {bucket.trash_age} halves ago")
@pytest.mark.parametrize("collections", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_no_interleaving_costs_an_undropped_commit_an_object(bucket: Bucket, collections: int) -> None:
    """However long it has lain in the trash."""
    ends = set()
    for world in worlds(bucket, pushes=1, collections=collections, undrops=True):
        ends.add(world[1][0].at)
        assert not lacks(world), world
    assert ends >= {"restored", "refused"}


@pytest.mark.parametrize(
    ("step", "following"),
    [
        ("renew", "look for collections"),
        ("look for collections", "look at all"),
        ("look at all", "write"),
        ("look at the clock", "look for more marks"),
        ("look for more marks", "remove the copy"),
    ],
)
def test_without_this_step_an_undrop_would_lose(monkeypatch: pytest.MonkeyPatch, step: str, following: str) -> None:
    """Each of them is needed."""
    monkeypatch.setitem(UNDROP, step, lambda bucket, me: (bucket, me.go(following, since=0, is_watched=False)))
    if step != "renew":
        monkeypatch.setitem(UNDROP, step, lambda bucket, me: (bucket, me.go(following)))
    assert any(any(map(lacks, worlds(each, pushes=1, collections=1, undrops=True))) for each in DROPPED)
