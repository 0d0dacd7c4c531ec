"""`python -m tests.house` counts what is there, and nothing twice."""

import pytest

from layerstore.units import size
from tests.house import ALONE, Count, counted, door, public_names, room_of, sources_here, table
from tests.walks import Walk, walk

NAMES_MAX = 30
FILES_MAX = 15


def test_files_count_in_the_room_that_they_lie_in() -> None:
    """Rooms inside live, policy and zero3 stand for themselves, those of other rooms and of tests do not."""
    assert room_of("layerstore/zero3/pt/ptread.py") == "layerstore/zero3/pt"
    assert room_of("layerstore/policy/recipe/own.py") == "layerstore/policy/recipe"
    assert room_of("layerstore/inspect/page/__init__.py") == "layerstore/inspect"
    assert room_of("layerstore/store.py") == "layerstore/*.py"
    assert room_of("tests/gc/model.py") == "tests"


def test_public_names_are_those_that_others_may_use() -> None:
    """Names with an underscore, and functions inside functions, are nobody else's."""
    text = (
        "class A:\n    def b(self):\n        def c(): ...\n    def _d(self): ...\ndef _e(): ...\nasync def f(): ...\n"
    )

    assert public_names(text) == 3


def test_a_door_has_the_names_that_a_room_exports() -> None:
    """Only its own ``__init__`` is a door, and what that imports from other rooms is for its own use."""
    text = (
        "from layerstore.disk import a\nfrom layerstore.gc.mark import b, c as d\n"
        "E: int = 1\nF = 2\n_G = 3\ndef i(): ...\nclass _J: ...\n"
    )

    assert door("layerstore/gc/__init__.py", text) == 5
    assert door("layerstore/gc/page/__init__.py", text) == 0
    assert door("layerstore/gc/mark.py", text) == 0


def test_rooms_add_up_to_the_product() -> None:
    """What the table calls product is the sum of its rooms, before and now."""
    now = counted({"layerstore/gc/mark.py": "def a(): ...\n", "cli/gc.py": "x = 1\n\n", "tests/a.py": "y = 2\n"})
    before = {"cli": Count(lines=7, files=1, names=0)}

    lines = {line.split()[0]: line.split()[1:] for line in table(now, before).splitlines()[1:]}

    assert lines["product"] == ["7", "1", "0", "0", "3", "2", "1", "0"]
    assert lines["tests"] == ["0", "0", "0", "0", "1", "1", "0", "0"]


@pytest.mark.full
def test_no_room_is_overfull() -> None:
    """Who comes new to a room has to read its door and look through its files: 30 names and 15 files at most."""
    rooms = {name: count for name, count in counted(sources_here()).items() if name not in {ALONE, "tests"}}

    assert {name: count.door for name, count in rooms.items() if count.door > NAMES_MAX} == {}
    # The command line has a file for each command, as its users look for them.
    assert {name: count.files for name, count in rooms.items() if count.files > FILES_MAX and name != "cli"} == {}


def test_linked_folders_count_once() -> None:
    """The command line is in the tree twice, by a link, and is counted under its own name."""
    paths = sources_here()

    assert "cli/gc.py" in paths
    assert not [path for path in paths if path.startswith(("layerstore/cli/", "layerstore/migrations/"))]


def test_a_walk_counts_the_products_functions() -> None:
    """Each once, however often it is called; functions of tests and of other libraries are not part of it."""
    walked = walk(lambda: [size(number) for number in range(3)])

    assert Walk(files=1, rooms=1, functions=1) == walked
