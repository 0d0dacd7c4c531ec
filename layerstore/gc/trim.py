"""
Trim: a commit without its moments takes the place of one that has them.

Weights and masters stay; what only a resume needs goes. Each trim is one transaction; its record supersedes the other.
"""

from dataclasses import dataclass, replace

from layerstore.errors import Overtaken
from layerstore.format import WITHOUT_MOMENTS, encode_version, make_commit, ref_of
from layerstore.history import Needs, objects_of_version
from layerstore.model import BlobRef, Commit, CommitId, CommitRecord, Kind, LayerEntry, LayerVersion
from layerstore.publish import Transaction
from layerstore.storage import RecordRow, Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Trim:
    """The commit that takes the place of one with moments."""

    commit: Commit
    versions: dict[BlobRef, bytes]
    """Version blobs that it names, with their bytes."""
    objects: tuple[BlobRef, ...]
    """What these name."""


def has_moments(repo: Repository, record: CommitRecord) -> bool:
    """Whether there is anything of *record* that could be dropped; most tell by their first layer."""
    return WITHOUT_MOMENTS not in record.flags and any(
        stored.kind is Kind.OPTIMIZER for entry in record.layers for stored in repo.version_of(entry).objects
    )


def without_moments(version: LayerVersion) -> LayerVersion:
    """Return what a collection that drops moments leaves of *version*."""
    return replace(version, objects=tuple(each for each in version.objects if each.kind is not Kind.OPTIMIZER))


def plan_trim(repo: Repository, commit: Commit) -> Trim:
    """Return what takes the place of *commit*, which has moments."""
    record = commit.record
    entries: list[LayerEntry] = []
    versions: dict[BlobRef, bytes] = {}
    objects: list[BlobRef] = []
    for entry in record.layers:
        bare = without_moments(repo.version_of(entry))
        data = encode_version(bare)
        versions[ref_of(data)] = data
        objects += objects_of_version(bare)
        entries.append(replace(entry, version=ref_of(data), optimizer_step=None))
    trimmed = replace(
        record, layers=tuple(entries), supersedes=(commit.id,), flags=tuple(sorted({*record.flags, WITHOUT_MOMENTS}))
    )
    # Saved when the other was: rules about age go on as before.
    observed = replace(commit.observed, bytes_new=0, bytes_reused=0)
    return Trim(commit=make_commit(trimmed, observed), versions=versions, objects=tuple(objects))


def saved_ns(repo: Repository, commit: Commit) -> int:
    """
    Return when *commit* was saved: the younger of its record's time and its file's.

    A node whose clock stands still writes old times; the file has the disk's, by which now is told, too. But the file
    of a commit without moments is as young as the collection that dropped them.
    """
    record = commit.record
    if WITHOUT_MOMENTS in record.flags:
        return commit.observed.time_ns
    path = repo.layout.record(record.run, record.step, commit.id)
    return max(commit.observed.time_ns, repo.files.modified_ns(path) or 0)


def add_needs(needs: Needs, trim: Trim) -> list[BlobRef]:
    """Note what *trim* will need once it is there; return what of it is there by now and was not needed before."""
    needs.add(trim.versions)
    new = needs.add(trim.objects)
    for state in trim.commit.record.states:
        new += needs.add_state(state)
    return new


def trim(repo: Repository, row: RecordRow) -> CommitId:
    """
    Put a commit without moments in the place of *row*, whose record goes for good; return its id.

    Raises:
        Overtaken: What it names is gone.
    """
    commit = repo.catalog.commit(row.name)
    plan = plan_trim(repo, commit)
    with Transaction(repo) as tx:
        # Not the versions: a blob that was just touched keeps the moments that it names until the next collection.
        tx.keep(replace(commit.record, layers=()))
        for ref in plan.objects:
            if not tx.objects.reuse(ref):
                raise Overtaken(f"object {ref.id} of {row.run}@{row.step} is gone", hint="repeat the command")
        for ref, data in plan.versions.items():
            tx.objects.put(data, ref)
        trimmed = tx.commit(plan.commit.record, observed=plan.commit.observed).commit
    repo.trash.remove_record(row.name)
    return trimmed.id
