"""Promises of the exception tree: programs and scripts depend on every class, kind and exit code."""

import errno
import inspect
import pickle

import pytest

from layerstore import errors
from layerstore.errors import Conflict, IntegrityError, LayerstoreError, NotFound, StorageIO

TREE = {
    "LayerstoreError": ((Exception,), "failure", 1),
    "InvalidInput": ((LayerstoreError, ValueError), "invalid_input", 2),
    "StorageIO": ((LayerstoreError, OSError), "storage_io", 1),
    "Locked": ((LayerstoreError,), "locked", 11),
    "NotFound": ((LayerstoreError, KeyError), "not_found", 13),
    "NoStore": ((NotFound,), "no_store", 10),
    "AlreadyExists": ((LayerstoreError,), "already_exists", 14),
    "Conflict": ((LayerstoreError,), "conflict", 15),
    "Overtaken": ((Conflict,), "conflict", 15),
    "Unsupported": ((LayerstoreError,), "unsupported", 16),
    "IntegrityError": ((LayerstoreError,), "damaged", 20),
    "SourceCheckpoint": ((LayerstoreError,), "source_checkpoint", 21),
    "LayoutMismatch": ((LayerstoreError,), "layout_mismatch", 22),
    "JobLost": ((LayerstoreError,), "job_lost", 1),
    "Internal": ((LayerstoreError,), "internal", 1),
}


def test_the_tree_is_pinned() -> None:
    """Every class has the parents, the kind and the exit code that its users were told, and there is no other."""
    found = {
        name: (cls.__bases__, cls.kind, cls.exit_code)
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, LayerstoreError)
    }

    assert found == TREE


def test_the_tree_is_drawn_in_the_docstring() -> None:
    """Whoever opens the module sees every class in the drawing at its top."""
    drawn = {line.split()[0] for line in (errors.__doc__ or "").splitlines() if line.strip()}

    assert set(TREE) <= drawn


@pytest.mark.parametrize(
    "problem",
    [
        IntegrityError("object 00 is damaged", object_id="00"),
        NotFound("there is no run 'a'", hint="b"),
        StorageIO("out: no space", errno=errno.ENOSPC, filename="out"),
    ],
    ids=lambda problem: problem.kind,
)
def test_an_error_comes_over_from_another_process(problem: LayerstoreError) -> None:
    """With all that it says, to people and to programs."""
    problem.locate("process 1")
    found = pickle.loads(pickle.dumps(problem))
    for name in ("message", "hint", "facts", "kind", "exit_code", "errno", "filename", "__notes__"):
        assert getattr(found, name, None) == getattr(problem, name, None), name
    assert (type(found), str(found)) == (type(problem), str(problem))


@pytest.mark.parametrize(
    ("number", "kind", "exit_code"),
    [
        (errno.EACCES, "permission", 12),
        (errno.EPERM, "permission", 12),
        (errno.EROFS, "permission", 12),
        (errno.ENOSPC, "no_space", 23),
        (errno.EDQUOT, "no_space", 23),
        (errno.EFBIG, "no_space", 23),
        (errno.EIO, "storage_io", 1),
        (None, "storage_io", 1),
    ],
)
def test_the_disk_refuses_in_three_ways(number: int | None, kind: str, exit_code: int) -> None:
    """A refusal by permissions, by space and by anything else have kinds and codes of their own."""
    error = StorageIO("cannot write x", errno=number, filename="x", hint="do y")

    assert (kind, exit_code) == (error.kind, error.exit_code)
    assert (number, "x", "do y") == (error.errno, error.filename, error.hint)
    assert isinstance(error, OSError)
    # The class itself is as it was: one instance's code must not leak into the next.
    assert (StorageIO.kind, StorageIO.exit_code) == ("storage_io", 1)


@pytest.mark.parametrize("cls", [cls for cls in map(errors.__dict__.get, TREE) if cls not in {None, StorageIO}])
def test_the_message_is_what_is_printed(cls: type[LayerstoreError]) -> None:
    """The text of an error is its message, even for the classes that are also a KeyError."""
    error = cls("run 'a' is not here", hint="look elsewhere", run="a")

    assert str(error) == "run 'a' is not here"
    assert error.hint == "look elsewhere"
    assert error.facts == {"run": "a"}
