"""Is a checkpoint one that is stored already, in another attempt or without its moments?"""

from collections.abc import Collection

from layerstore.errors import IntegrityError
from layerstore.format.records import WITHOUT_MOMENTS
from layerstore.model import BlobRef, CommitRecord
from layerstore.ingest.plan import IngestPlan
from layerstore.history.needs import objects_of_state
from layerstore.progress import Silent
from layerstore.storage.rooms import Rooms
from layerstore.ingest.transfer import Content, content_without_moments, transfer
from layerstore.storage.objects import ObjectWriter


def is_same_content(rooms: Rooms, plan: IngestPlan, record: CommitRecord, content: Content) -> bool:
    """
    Whether *record* holds what *content* was taken from: all that is no layer, and the layers that both saved.

    Equal states alone prove nothing: a raw checkpoint says there little more than its counters and its schedule, which
    another attempt comes to at the same step with other weights. Nor do frozen layers, which all attempts share.
    So where no trained layer was saved by both, those that *record* saved are read from the source, too.
    """
    if record.states != content.states:
        return False
    trained = {layer.layer for layer in plan.checkpoint.layers if not all(of.frozen for of in layer.parameters)}
    saved = {entry.layer: entry.version for entry in record.layers if entry.saved_by(record)}
    moments = WITHOUT_MOMENTS not in record.flags
    versions = (content if moments else content_without_moments(content)).versions
    if not saved.keys() & versions.keys() & trained:
        versions = _versions_in_source(rooms, plan, saved.keys(), moments=moments)
    both = saved.keys() & versions.keys()
    return bool(both & trained) and all(saved[of] == versions[of] for of in both)


def is_whole(rooms: Rooms, record: CommitRecord) -> bool:
    """Whether all is there that the save of *record* wrote."""
    if any(rooms.whole_version_of(entry) is None for entry in record.layers if entry.saved_by(record)):
        return False
    try:
        return all(rooms.objects.find(ref) for state in record.states for ref in objects_of_state(rooms.state(state)))
    except IntegrityError:
        return False


def _versions_in_source(
    rooms: Rooms, plan: IngestPlan, layers: Collection[str], *, moments: bool
) -> dict[str, BlobRef]:
    """Return what *layers* would be stored as; nothing is kept of it."""
    with ObjectWriter(rooms.layout, rooms.files, rooms.objects) as aside:
        return transfer(plan.checkpoint, aside, Silent(), due=layers, known_before=True, moments=moments).versions
