"""
DeepSpeed's own state for a commit saved by FSDP2: an earlier DeepSpeed commit's, advanced by the updates since then.

A commit saved by FSDP2 has only masters and moments. Trees, loss scaler and schedule are DeepSpeed's own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from layerstore.errors import InvalidInput, Unsupported
from layerstore.filenames import RANDOM_STATE, SCHEDULES
from layerstore.handover import (
    CLIENT_STATE,
    PARAM_GROUPS,
    DcpState,
    UpdatesSince,
    advance,
    group_settings,
    plain_setting,
    since,
    updates_counted,
)
from layerstore.history import references_to, resolve
from layerstore.model import CommitRecord, Kind
from layerstore.states import RankState, SourceFile
from layerstore.storage import Repository
from layerstore.tree import Tree
from layerstore.zero3.trees import ENGINE_KEYS, TreeView


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """The states of *before*, a DeepSpeed commit, as they would be at a later commit saved by FSDP2."""

    before: CommitRecord
    notes: tuple[str, ...]
    _updates_since: UpdatesSince
    _files: Mapping[str, SourceFile]
    """Files of the later commit, which replace the earlier commit's files of the same name."""
    _client_states: Sequence[Mapping[Tree, Tree]]
    """The user's own state at the later commit, by rank."""

    def state(self, state: RankState) -> RankState:
        """Return *state*, a rank's state at *before*, as it would be at the later commit."""
        moved = advance(state, self._updates_since, self._files)
        # Ranks that FSDP2 did not have get the first rank's client state.
        kept = self._client_states[state.rank if state.rank < len(self._client_states) else 0]
        tree: dict[Tree, Tree] = {
            key: value for key, value in TreeView.of(moved.model).mapping().items() if key in ENGINE_KEYS
        }
        tree |= {key: value for key, value in kept.items() if key not in ENGINE_KEYS}
        # Old random states are dropped: numbers that were drawn since must not be drawn again.
        files = [file for file in moved.files if not self._updates_since.updates or not self._is_stale(file)]
        return replace(moved, model=replace(moved.model, tree=tree), files=tuple(files))

    def _is_stale(self, file: SourceFile) -> bool:
        return RANDOM_STATE.fullmatch(file.path) is not None and file.path not in self._files


def successor(repo: Repository, base: CommitRecord, like: str | None) -> Successor:
    """
    Return DeepSpeed's states for *base*, which FSDP2 saved, advanced from the DeepSpeed commit *like*.

    Without *like*, the newest DeepSpeed commit in the history of *base* is used.

    Raises:
        Unsupported: The history has no DeepSpeed commit.
        InvalidInput: *like* was not saved by DeepSpeed.
        LayoutMismatch: The DeepSpeed commit has another model or optimizer, or more updates than *base*.
    """
    [called] = references_to(repo, [base])
    before = _newest(repo, base) if like is None else resolve(repo, like).record
    if before is None:
        raise Unsupported(
            f"{called} was saved by FSDP2, and its history has no commit saved by DeepSpeed: what else DeepSpeed needs "
            "is not known",
            hint="give a DeepSpeed commit of the same model with --like REF, or like=; for FSDP2, use --format dcp",
        )
    [named] = references_to(repo, [before])
    if before.is_dcp:
        raise InvalidInput(f"{named} was saved by FSDP2", hint="like must name a commit that DeepSpeed saved")
    states = [repo.state(ref) for ref in base.states]
    own = DcpState.read(states[0])
    names = [tensor.held.name for tensor in own.tensors.values() if tensor.held.kind is Kind.MASTER]
    counts = {name: own.values[key].tree for name, key in own.counters.items() if key in own.values}
    settings = {
        key: plain_setting(value.tree, f"{key!r} of {called}")
        for key, value in own.values.items()
        if PARAM_GROUPS in key
    }
    updates_since = since(
        repo.state(before.states[0]),
        {name: updates_counted(tree) for name, tree in counts.items()},
        group_settings(names, settings),
        later=called,
        earlier=named,
    )
    # The first rank's state has all tensors and values; the others have only their own values, such as client_state.
    kept = [_client_state(own if number == 0 else DcpState.read(state)) for number, state in enumerate(states)]
    files = {file.path: file for state in states for file in state.files}
    return Successor(
        before=before,
        notes=tuple(_notes(repo.state(before.states[0]), updates_since, files, kept[0], named=named)),
        _updates_since=updates_since,
        _files=files,
        _client_states=kept,
    )


def _client_state(own: DcpState) -> Mapping[Tree, Tree]:
    kept = own.values.get(CLIENT_STATE)
    return kept.tree if kept is not None and isinstance(kept.tree, dict) else {}


def _notes(
    first: RankState,
    updates_since: UpdatesSince,
    files: Mapping[str, SourceFile],
    kept: Mapping[Tree, Tree],
    *,
    named: str,
) -> Iterator[str]:
    yield f"DeepSpeed's own state comes from {named}, advanced by {updates_since.updates} updates"
    stale = [file.path for file in first.files if file.path.rpartition("/")[2] in SCHEDULES and file.path not in files]
    if stale and updates_since.updates:
        yield f"{stale[0]} comes from {named}, {updates_since.updates} steps earlier: set the schedule yourself"
    if taken := sorted(str(key) for key in kept if key in ENGINE_KEYS):
        yield f"client_state[{taken[0]!r}] is left out: DeepSpeed keeps its own under that key"


def _newest(repo: Repository, base: CommitRecord) -> CommitRecord | None:
    """Return the newest commit that DeepSpeed saved in the history of *base*."""
    rows = repo.catalog.view(base.run).history(base.attempt, step=base.step)
    records = (repo.catalog.commit(row.name).record for row in rows)
    return next((record for record in records if not record.is_dcp), None)
