"""Promises of references: each means one commit, or an error that says what there is."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstore.errors import Conflict, IntegrityError, InvalidInput, NotFound
from layerstore.history import reference_to, resolve
from layerstore.layers import parse_reference
from layerstore.model import Commit, CommitId, Fork
from layerstore.storage import Repository
from tests.faults.harness import flip
from tests.unit import samples


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    """Return the repository of a new store."""
    return samples.repo(tmp_path / "store")


def publish(
    repo: Repository,
    step: int,
    *,
    run: str = "sft",
    attempt: int = 1,
    fork: Fork | None = None,
    tag: str = "t",
    **more: object,
) -> Commit:
    """Publish one commit; *tag* tells commits of one step apart."""
    supersedes = [str(more["hides"])] if "hides" in more else []
    record = samples.record(
        run=run,
        step=step,
        attempt=attempt,
        fork=fork,
        tag=tag,
        supersedes=[CommitId(commit) for commit in supersedes],
    )
    commit = samples.commit(record)
    repo.records.link(commit)
    return commit


def meant(repo: Repository, ref: str | None) -> tuple[int, int]:
    """Return attempt and step of the commit that *ref* means."""
    record = resolve(repo, ref).record
    return record.attempt, record.step


# -- the grammar ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@5",
        "~1",
        "sft@",
        "sft~",
        "sft@-1",
        "sft@1@2",
        "sft@1~1",
        "../x",
        "-x",
        f"sft@{'9' * 19}",
        "sft@5\n",
        "\ud800",
    ],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    """Everything else is the user's mistake, with a hint, and never a path or a crash."""
    with pytest.raises(InvalidInput) as caught:
        parse_reference(text)

    assert caught.value.hint


@given(st.text(max_size=20))
def test_any_text_is_a_reference_or_refused(text: str) -> None:
    """No text crashes the parser."""
    try:
        found = parse_reference(text)
    except InvalidInput:
        return
    assert text.startswith(found.name)


# -- one attempt ---------------------------------------------------------------------------------------------------


def test_a_step_that_is_not_there_lists_those_that_are(repo: Repository) -> None:
    """A wrong step is not found; the hint lists the steps, shortened where they are many."""
    for step in (2, 4):
        publish(repo, step)
    with pytest.raises(NotFound, match="run 'sft' has no step 3") as caught:
        resolve(repo, "sft@3")
    assert caught.value.hint == "did you mean sft@2 or sft@4? steps here: 2, 4"

    for step in range(10, 30):
        publish(repo, step)
    with pytest.raises(NotFound) as caught:
        resolve(repo, "sft@3")
    assert caught.value.hint == "did you mean sft@2 or sft@4? steps here: 2, 4, 10, 11, 12, …, 25, 26, 27, 28, 29"


def test_nothing_is_asked_of_an_empty_store(repo: Repository) -> None:
    """An empty store says so, whatever is asked."""
    with pytest.raises(NotFound, match="holds no commit yet"):
        resolve(repo, None)
    with pytest.raises(NotFound, match="no run 'sft'") as caught:
        resolve(repo, "sft")
    assert "layerstore ingest" in (caught.value.hint or "")


def test_several_runs_must_be_told_apart(repo: Repository) -> None:
    """Where no reference is given and runs are several, they are listed; none has an attempt ~1."""
    publish(repo, 2, run="one")
    publish(repo, 2, run="two")
    with pytest.raises(InvalidInput, match="holds 2 runs: one, two"):
        resolve(repo, None)
    with pytest.raises(NotFound, match="has no attempt ~1"):
        resolve(repo, "one~1")


# -- attempts ------------------------------------------------------------------------------------------------------


@pytest.fixture
def forked(repo: Repository) -> Repository:
    """
    Return a store in which training went back twice.

    Attempt 1: 100 … 1000. Attempt 2, forked at 800: 850, 900. Attempt 3, forked from 2 at 850: 860, 1100.
    """
    for step in (100, 800, 850, 1000):
        publish(repo, step, tag="first")
    for step in (850, 900):
        publish(repo, step, attempt=2, fork=Fork(attempt=1, step=800), tag="second")
    for step in (860, 1100):
        publish(repo, step, attempt=3, fork=Fork(attempt=2, step=850), tag="third")
    return repo


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("sft", (3, 1100)),
        ("sft@860", (3, 860)),
        ("sft@850", (2, 850)),
        ("sft@800", (1, 800)),
        ("sft~1", (2, 900)),
        ("sft~1@850", (2, 850)),
        ("sft~1@800", (1, 800)),
        ("sft~2", (1, 1000)),
        ("sft~2@850", (1, 850)),
    ],
)
def test_history_runs_on_below_the_fork(forked: Repository, ref: str, expected: tuple[int, int]) -> None:
    """A step is looked up along its attempt's history: what was abandoned above a fork never enters it."""
    assert expected == meant(forked, ref)


@pytest.mark.parametrize(("step", "hint"), [(900, "sft~1@900 refers to it"), (1000, "sft~2@1000 refers to it")])
def test_a_step_of_an_abandoned_attempt_is_told_as_such(forked: Repository, step: int, hint: str) -> None:
    """A step that only an abandoned attempt holds is not found, and the hint names it."""
    with pytest.raises(NotFound, match=f"sft@{step} belongs to an earlier attempt") as caught:
        resolve(forked, f"sft@{step}")

    name = hint.split("@", maxsplit=1)[0]
    assert caught.value.hint == f'{hint}; in Python, use resume(…, run="{name}")'
    assert meant(forked, hint.split(maxsplit=1)[0])[1] == step


@pytest.mark.parametrize(
    ("attempt", "step", "expected"),
    [
        (1, 800, "sft@800"),
        (1, 850, "sft~2@850"),
        (2, 850, "sft@850"),
        (2, 900, "sft~1@900"),
        (3, 1100, "sft@1100"),
    ],
)
def test_each_commit_has_a_reference_that_means_it(forked: Repository, attempt: int, step: int, expected: str) -> None:
    """The plain one where it will do, and else with the attempts counted back."""
    name = reference_to(forked, samples.record(run="sft", attempt=attempt, step=step))

    assert expected == name
    assert meant(forked, name) == (attempt, step)


def test_what_is_hidden_is_not_called_as_another_is(repo: Repository) -> None:
    """Words where its step is another attempt's by now; where its step means nothing, the plain name does no harm."""
    for step in (100, 200, 300):
        hidden = publish(repo, step, tag="first")
    publish(repo, 300, attempt=2, fork=Fork(attempt=1, step=200), tag="second")
    publish(repo, 400, attempt=2, fork=Fork(attempt=1, step=200), tag="second", hides=hidden.id)

    assert reference_to(repo, hidden.record) == "sft@300 of attempt 1"
    assert reference_to(repo, samples.record(run="sft", attempt=1, step=500)) == "sft@500"
    assert reference_to(repo, samples.record(run="gone", attempt=1, step=5)) == "gone@5"


def test_a_fork_that_leads_in_a_circle_ends(repo: Repository) -> None:
    """An attempt that claims to have left itself, or a later one, is followed no further."""
    publish(repo, 100, fork=Fork(attempt=2, step=200))
    publish(repo, 200, attempt=2, fork=Fork(attempt=2, step=100))

    assert meant(repo, "sft") == (2, 200)
    assert meant(repo, "sft~1") == (1, 100)


# -- hidden, doubled, damaged --------------------------------------------------------------------------------------


@pytest.mark.fault(102)
@pytest.mark.parametrize("ref", ["sft", "sft@4"])
def test_two_commits_of_one_step_are_ambiguous(repo: Repository, ref: str) -> None:
    """Two that stand side by side are never silently one: the error names both."""
    first, second = publish(repo, 4, tag="one"), publish(repo, 4, tag="two")
    with pytest.raises(Conflict, match="is ambiguous") as caught:
        resolve(repo, ref)

    assert first.id[:12] in str(caught.value)
    assert second.id[:12] in str(caught.value)
    assert "layerstore drop" in (caught.value.hint or "")


def damage(repo: Repository, commit: Commit) -> None:
    """Flip a bit of the record of *commit*."""
    path = repo.layout.record(commit.record.run, commit.record.step, commit.id)
    flip(path)


@pytest.mark.fault(91)
def test_a_damaged_tip_is_not_passed_over(repo: Repository) -> None:
    """The newest step comes from the listing: where its record is damaged no older one is given for it."""
    publish(repo, 2)
    damage(repo, publish(repo, 4))

    with pytest.raises(IntegrityError, match="is damaged"):
        resolve(repo, "sft")
    with pytest.raises(IntegrityError, match="is damaged"):
        resolve(repo, "sft@4")
    assert meant(repo, "sft@2") == (1, 2)


def test_a_run_of_damaged_records_is_damage(repo: Repository) -> None:
    """Where no record can be read the answer is damage, not absence."""
    damage(repo, publish(repo, 2))

    for ref in ("sft", "sft@2", None):
        with pytest.raises(IntegrityError):
            resolve(repo, ref)


def test_a_record_damaged_after_it_was_indexed_is_found(repo: Repository) -> None:
    """The index finds the record; the record itself is read and checked all the same."""
    commit = publish(repo, 2)
    repo.catalog.view("sft")
    damage(repo, commit)

    with pytest.raises(IntegrityError):
        resolve(repo, "sft@2")


# -- pins ----------------------------------------------------------------------------------------------------------


def test_a_pin_means_its_record(repo: Repository) -> None:
    """A pin is read by itself, whether or not its commit is still there."""
    pin = samples.pin("best")
    repo.records.link_pin(pin)

    found = resolve(repo, "best")

    assert (pin.record, pin.base, "best") == (found.record, found.commit, found.pin)


@pytest.mark.parametrize("ref", ["best@4", "best~1"])
def test_a_pin_takes_no_step(repo: Repository, ref: str) -> None:
    """A pin means one commit; one that cannot be read is damage, not absence."""
    repo.records.link_pin(samples.pin("best"))
    with pytest.raises(InvalidInput, match="is a pin"):
        resolve(repo, ref)
    repo.layout.pin("best").write_bytes(b"")
    with pytest.raises(IntegrityError):
        resolve(repo, "best")
