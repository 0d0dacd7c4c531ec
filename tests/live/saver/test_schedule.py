"""Which layers are due at a save, given the outcomes of earlier saves: without any engine."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from layerstore.history import NextCommit
from layerstore.live.saver.schedule import Schedule
from layerstore.model import BlobRef, LayerEntry, ObjectId, Origin
from layerstore.numbers.distance import Movements
from layerstore.policy import Latest, Parity, Policy, Save
from layerstore.precision import Keyframes, keyframes

LAYERS = ("embed", "layers.0", "layers.1", "layers.2", "head")
ALL = frozenset(LAYERS)
MOMENTS = dict.fromkeys(LAYERS, True)


def schedule(policy: Policy | None = None) -> Schedule:
    """Return the schedule of a new run."""
    return Schedule(policy=policy or Parity(), number=0)


def due(of: Schedule, moments: Mapping[str, bool] = MOMENTS) -> frozenset[str]:
    """Return what is due now."""
    return of.due(LAYERS, moments=moments, moved=Movements(), sizes={})


def save(of: Schedule, moments: Mapping[str, bool] = MOMENTS) -> tuple[int, frozenset[str]]:
    """Begin a save of what is due; return its number with that."""
    found = due(of, moments)
    return of.begin(found, moments), found


def test_the_first_save_is_full_and_the_next_ones_take_turns() -> None:
    """As the policy says, without waiting for the outcome of a pending save."""
    of = schedule()

    saves = [save(of) for _ in range(3)]

    assert saves == [(0, ALL), (1, {"embed", "layers.1"}), (2, {"layers.0", "layers.2", "head"})]


def test_layers_of_a_save_that_was_given_up_are_due_again() -> None:
    """Together with what is due anyway; once they are saved they are owed no more."""
    of = schedule()
    save(of)
    of.resolve({0: True})
    number, lost = save(of)
    of.resolve(dict.fromkeys(range(-5, 1), False))  # resolved long ago, or never made
    assert not of.owed

    of.resolve({number: False})

    assert of.owed == lost
    again, found = save(of)
    assert found == ALL
    of.resolve({again: True})
    assert save(of)[1] == {"embed", "layers.1"}


def test_a_save_that_was_left_out_is_made_up_for() -> None:
    """It uses up its number and the policy's turn; its layers are due at the next save."""
    of = schedule()
    save(of)
    skipped = due(of)

    of.skip(skipped)

    assert skipped == {"embed", "layers.1"}
    assert save(of) == (2, ALL)


def test_fewer_layers_are_the_oldest_that_fit_and_at_least_one() -> None:
    """Layers that are left out stay due."""
    of = schedule(Latest())
    of.visible = {layer: age for age, layer in enumerate(reversed(LAYERS))}
    sizes = dict.fromkeys(LAYERS, 10)

    assert of.fewer(ALL, sizes, 25, moments=MOMENTS) == {"head", "layers.2"}
    assert of.owed == {"embed", "layers.0", "layers.1"}
    assert of.fewer(ALL, sizes, 0, moments=MOMENTS) == {"head"}
    assert of.fewer(ALL, sizes | {"layers.2": 100}, 25, moments=MOMENTS) == {"head", "layers.1"}
    assert of.fewer(ALL, sizes, 1000, moments=MOMENTS) == ALL


def test_no_layer_is_left_out_that_cannot_be_inherited() -> None:
    """A first save is full, however little fits; and so is the first one with moments."""
    of, sizes = schedule(Latest()), dict.fromkeys(LAYERS, 10)

    assert of.fewer(ALL, sizes, 10, moments=MOMENTS) == ALL
    assert not of.owed

    of.begin(ALL, dict.fromkeys(LAYERS, False))
    first = MOMENTS | {"head": False, "embed": False}
    assert of.fewer(ALL, sizes, 10, moments=first) == ALL - {"head", "embed"}
    assert of.owed == {"head", "embed"}


def test_saves_of_another_run_are_no_ages() -> None:
    """A run that goes on from another one inherits its layers, whatever numbers their saves had there."""
    seen: list[Mapping[str, int]] = []

    class Looking(Latest):
        """Notes what it is told, and has nothing saved."""

        def due(self, save: Save) -> frozenset[str]:
            """Return none."""
            seen.append(save.ages)
            return frozenset()

    def entry(run: str, number: int) -> LayerEntry:
        origin = Origin(run=run, attempt=1, step=number, save_number=number)
        return LayerEntry(
            layer="", version=BlobRef(id=ObjectId("0" * 32), size_bytes=1), origin=origin, optimizer_step=1
        )

    # One layer is of this run, but of a number that it has not come to again since it was begun anew.
    inherited = {layer: entry("other", 50) for layer in LAYERS} | {"head": entry("own", 1), "embed": entry("own", 9)}
    place = NextCommit(attempt=2, lineage=(), save_number=4, inherited=inherited)

    of = Schedule.after(place, Looking(), run="own")

    assert due(of) == frozenset()
    of.begin(frozenset({"embed"}), MOMENTS)
    assert due(of) == frozenset()
    assert seen == [{"head": 3}, {"head": 4, "embed": 1}]


@given(st.lists(st.tuples(st.sampled_from(["save", "skip", "fewer"]), st.booleans(), st.integers(0, 50)), max_size=30))
def test_nothing_is_inherited_that_never_became_visible(course: list[tuple[str, bool, int]]) -> None:
    """Whatever is left out, cut down or lost: once all is known, a layer that was never visible is due."""
    of, visible = schedule(), set[str]()
    for what, works, room in course:
        now = due(of)
        if what == "skip":
            of.skip(now)
            continue
        if what == "fewer":
            now = of.fewer(now, dict.fromkeys(LAYERS, 10), room, moments=MOMENTS)
        number = of.begin(now, MOMENTS)
        # As whoever commits does: a save is visible only if all that it leaves out is.
        is_visible = works and not ALL - visible - now
        visible |= now if is_visible else frozenset()
        of.resolve({number: is_visible})
        assert due(of) >= ALL - visible


THIRD = keyframes("delta8", 3)


def coded(of: Schedule, asked: Keyframes = THIRD, moments: Mapping[str, bool] = MOMENTS) -> tuple[int, frozenset[str]]:
    """Begin a save of what is due; return its number, and which layers are compact in it."""
    now = due(of, moments)
    found = of.compact_now(now, asked, moments)
    return of.begin(now, moments, found), found


def test_every_nth_version_of_a_layer_is_exact() -> None:
    """Counted for each layer by itself, and as if every pending save became visible."""
    of = schedule()

    saves = [coded(of)[1] for _ in range(8)]

    assert saves[0] == frozenset()  # there is nothing to refer to
    one, other = frozenset({"embed", "layers.1"}), ALL - {"embed", "layers.1"}
    assert saves[1:] == [one, other, one, other, frozenset(), frozenset(), one]


def test_what_follows_a_save_that_was_given_up_is_exact() -> None:
    """Whether that was compact or exact: it may not have been codable, and what it referred to or left may be gone."""
    of = schedule(Latest())
    outcomes = {1: True, 2: True, 3: False, 4: False, 5: True, 6: True}

    found = {}
    for save, is_visible in outcomes.items():
        number, found[save] = coded(of)
        of.resolve({number: is_visible})

    assert {save: bool(layers) for save, layers in found.items()} == {
        1: False, 2: True, 3: True, 4: False, 5: False, 6: True
    }  # fmt: skip


def test_damage_costs_one_save_and_not_one_for_each_layer() -> None:
    """Layers that the lost save did not have are exact next time, too: their exact version may be gone with it."""
    of = schedule()
    of.resolve(dict.fromkeys([coded(of)[0], coded(of)[0]], True))  # all, then one half

    number, lost = coded(of)
    of.resolve({number: False})

    assert lost == {"layers.0", "layers.2", "head"}
    assert due(of) == ALL
    assert coded(of)[1] == frozenset()
    assert coded(of)[1] == lost  # as before the loss


def test_a_pending_compact_save_vouches_for_nothing_after_a_loss() -> None:
    """It began before the loss was known: whatever becomes of it, the next save is exact, and the later ones not."""
    for is_visible in (True, False):
        of = schedule(Latest())
        of.resolve({coded(of)[0]: True})
        lost, pending = coded(of), coded(of)

        of.resolve({lost[0]: False})
        assert pending[1] == ALL
        assert coded(of)[1] == frozenset()
        of.resolve({pending[0]: is_visible})

        assert coded(of)[1] == ALL


def test_a_save_can_be_exact_or_compact_by_itself() -> None:
    """An exact one out of turn begins the count anew; a compact one of an exact run refers to the last exact one."""
    of, exact = schedule(Latest()), keyframes("exact", 3)

    found = [bool(coded(of, asked)[1]) for asked in (exact, THIRD, exact, THIRD, THIRD, THIRD)]

    assert found == [False, True, False, True, True, False]


def test_before_the_first_update_there_are_no_moments_to_code() -> None:
    """Such a save is exact in a precision that keeps masters as they are, and counts as that."""
    of, moments8 = schedule(Latest()), keyframes("moments8", 3)

    without = [coded(of, moments8, dict.fromkeys(LAYERS, False))[1] for _ in range(3)]

    assert without == [frozenset()] * 3
    assert [bool(coded(of, moments8)[1]) for _ in range(3)] == [True, True, False]


def test_what_cannot_be_referred_to_is_exact_after_a_resume() -> None:
    """Layers whose versions were cut for other ranks begin anew, the others go on counting."""
    origin = Origin(run="run", attempt=1, step=1, save_number=1)
    version = BlobRef(id=ObjectId("0" * 32), size_bytes=1)
    inherited = {
        layer: LayerEntry(layer=layer, version=version, origin=origin, optimizer_step=1, compact=1) for layer in LAYERS
    }
    place = NextCommit(attempt=1, lineage=(), save_number=2, inherited=inherited)

    of = Schedule.after(place, Latest(), run="run", referable=ALL - {"head"})

    assert [coded(of)[1] for _ in range(2)] == [ALL - {"head"}, {"head"}]


def test_nothing_refers_to_what_was_lost() -> None:
    """Once the commit to go on from is lost, every layer is exact."""
    of = schedule(Latest())
    coded(of)
    of.resolve({0: True})

    of.begin_anew()

    assert coded(of)[1] == frozenset()
