"""Every fault that is known from other tools has a test here, and the page of them is the generated one."""

from pathlib import Path

import pytest

from tests.known_faults import LISTS, PAGE, faults_with_tests, marked_tests, page

TESTS = marked_tests()


@pytest.mark.parametrize("fault", [reference for of in LISTS for reference in of.references])
def test_every_known_fault_has_a_test(fault: str) -> None:
    """Whoever adds a fault to a list, or removes the last test of one, is told."""
    assert faults_with_tests(TESTS)[fault], f"no test is marked with known_fault({fault!r})"


def test_no_test_names_a_fault_that_is_on_no_list() -> None:
    """A slip of the pen would otherwise mark nothing."""
    known = {reference for of in LISTS for reference in of.references}

    assert [(test.name, fault) for test in TESTS for fault in test.faults if fault not in known] == []


def test_the_page_is_the_generated_one() -> None:
    """What the page says is what the marks say: python -m tests.known_faults writes it anew."""
    assert PAGE.read_text() == page(TESTS)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("pytestmark = pytest.mark.known_fault('x 1')\n", r"test_x\.py:1: known_fault is no decorator of a test"),
        ("@pytest.mark.known_fault\ndef test_x(): ...\n", r"test_x\.py:1: known_fault is no decorator of a test"),
        ("@pytest.mark.known_fault('x 1')\ndef helper(): ...\n", r"test_x\.py:1: known_fault is no decorator"),
        ("@pytest.mark.known_fault(7)\ndef test_x(): ...\n", r"test_x\.py:1: a fault is named by a plain string"),
    ],
)
def test_a_mark_that_the_page_would_miss_is_refused(tmp_path: Path, source: str, match: str) -> None:
    """The page reads marks from the source: one in another place, or another form, is told with its line."""
    (tmp_path / "test_x.py").write_text(source)

    with pytest.raises(ValueError, match=match):
        marked_tests(tmp_path)


def test_marks_are_found_wherever_tests_are(tmp_path: Path) -> None:
    """In classes and beside other decorators, several to a test."""
    (tmp_path / "tests" / "deep").mkdir(parents=True)
    (tmp_path / "tests" / "deep" / "test_x.py").write_text(
        "class TestX:\n    @other\n    @pytest.mark.known_fault('x 1', 'y 2')\n    def test_x(self): ...\n"
    )

    (found,) = marked_tests(tmp_path / "tests")

    assert (found.path, found.name, found.faults) == ("tests/deep/test_x.py", "test_x", ("x 1", "y 2"))
