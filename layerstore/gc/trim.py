"""
Trim: replace a commit by a copy without optimizer moments; weights and masters stay.

Each trim is one transaction, whose record supersedes the old one.
"""

from dataclasses import dataclass, replace

from layerstore.errors import Overtaken
from layerstore.format import WITHOUT_MOMENTS, encode_blob, make_commit, ref_of
from layerstore.history import Needs
from layerstore.model import BlobRef, Commit, CommitRecord, Kind, LayerEntry, LayerVersion
from layerstore.precision import flagged, stated
from layerstore.publish import Transaction
from layerstore.storage import RecordName, Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Trim:
    """The planned replacement of a commit, without moments."""

    commit: Commit
    versions: dict[BlobRef, bytes]
    """The replacement's version blobs, with their bytes."""
    objects: tuple[BlobRef, ...]
    """The objects that the version blobs refer to."""


def has_moments(repo: Repository, record: CommitRecord) -> bool:
    """Whether *record* has moments; reading its first layer is usually enough."""
    return WITHOUT_MOMENTS not in record.flags and any(
        stored.kind is Kind.OPTIMIZER for entry in record.layers for stored in repo.version(entry.version).objects
    )


def without_moments(version: LayerVersion) -> LayerVersion:
    """Return *version* without its moments."""
    return replace(version, objects=tuple(stored for stored in version.objects if stored.kind is not Kind.OPTIMIZER))


def plan_trim(repo: Repository, commit: Commit) -> Trim:
    """Plan the replacement of *commit* by a commit without moments."""
    record = commit.record
    entries: list[LayerEntry] = []
    versions: dict[BlobRef, bytes] = {}
    objects: list[BlobRef] = []
    for entry in record.layers:
        bare = without_moments(repo.version(entry.version))
        data = encode_blob(bare)
        versions[ref_of(data)] = data
        objects += [stored.ref for stored in bare.named]
        # If only moments were coded, the rest is kept bit for bit.
        still = 0 if bare.is_exact else entry.compact
        entries.append(replace(entry, version=ref_of(data), optimizer_step=None, compact=still))
    trimmed = replace(
        record,
        layers=tuple(entries),
        supersedes=(commit.id,),
        precision=stated(record.precision, entries),
        flags=flagged({*record.flags, WITHOUT_MOMENTS}, entries),
    )
    # With the old commit's time, for retention rules about age.
    losses = tuple(loss for loss in commit.observed.losses if not loss.state)
    observed = replace(commit.observed, bytes_new=0, bytes_reused=0, losses=losses)
    return Trim(commit=make_commit(trimmed, observed), versions=versions, objects=tuple(objects))


def add_needs(needs: Needs, trim: Trim) -> list[BlobRef]:
    """Add to *needs* what *trim* will need; return the objects that exist already and were not needed before."""
    needs.add(trim.versions)
    new = needs.add(trim.objects)
    for state in trim.commit.record.states:
        new += needs.add_blob(state)
    return new


def trim(repo: Repository, name: RecordName) -> None:
    """
    Replace the commit *name* by a commit without moments, and remove the old record for good.

    Raises:
        Overtaken: An object that the replacement needs is gone.
    """
    commit = repo.catalog.commit(name)
    plan = plan_trim(repo, commit)
    with Transaction(repo) as tx:
        # Do not touch the old versions: a touched blob would keep its moments until the next collection.
        tx.keep(replace(commit.record, layers=()))
        for ref in plan.objects:
            if not tx.objects.reuse(ref):
                raise Overtaken(f"object {ref.id} of {name.run}@{name.step} is gone", hint="repeat the command")
        for ref, data in plan.versions.items():
            tx.objects.put(data, ref)
        tx.commit(plan.commit.record, observed=plan.commit.observed)
    # `tx.commit` has just moved the old record to the trash, where it would keep the moments for days.
    repo.trash.remove_record(name)
