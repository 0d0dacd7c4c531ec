"""
What is put into the store before anything names it: objects of slices, objects of bare bytes, and ranks' states.

Where the bytes come from is the reader's business: files of a checkpoint, or the memory of a running engine.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from layerstore.errors import Unsupported
from layerstore.format.blobs import encode_state, encode_version, ref_of
from layerstore.format.hashing import crc32
from layerstore.limits import BLOB_BYTES_MAX, INLINE_BYTES_MAX
from layerstore.model import (
    BlobRef,
    GatheredFile,
    Kind,
    LayerVersion,
    ObjectContent,
    RankState,
    SourceFile,
    StoredObject,
)
from layerstore.publish.hashing import Checksums, Inspected, Reader, Witness, inspect
from layerstore.storage.objects import ObjectWriter
from layerstore.tree import Located, Storage, Tensor
from layerstore.zero3 import BYTES_KEY, ObjectSource, SliceSource, replace_tensors

_KINDS = tuple(Kind)


def in_order(objects: Iterable[StoredObject]) -> tuple[StoredObject, ...]:
    """Return the *objects* of a version in the order in which every version has them."""
    return tuple(sorted(objects, key=lambda of: (_KINDS.index(of.kind), of.shards, of.shard)))


class Staging:
    """One checkpoint's way into a store."""

    def __init__(
        self,
        writer: ObjectWriter,
        reader: Callable[[], Reader],
        *,
        source: str,
        checksums: Checksums,
        advance: Callable[[int], None],
        known_before: bool = False,
        reads_once: bool = False,
    ) -> None:
        """
        *reader* gives each thread its own; *source* names the checkpoint in errors.

        What is *known_before* is looked at before it is written; with *reads_once* nothing can be read a second time.
        """
        self._writer = writer
        self._reader = reader
        self._source = source
        self._checksums = checksums
        self._advance = advance
        self._known_before = known_before
        self._reads_once = reads_once
        self._likely_known: dict[str, bool] = {}

    def object(self, source: ObjectSource, witness: Witness | None = None) -> StoredObject:
        """Stage the slices of *source*."""
        found = self._staged(source.kind, source.slices, witness)
        return StoredObject(
            id=found.ref.id,
            size_bytes=found.ref.size_bytes,
            kind=source.kind,
            shard=source.shard,
            shards=source.shards,
            tensors=found.tensors,
            chunks=found.chunks,
        )

    def _staged(self, kind: str, slices: tuple[SliceSource, ...], witness: Witness | None = None) -> Inspected:
        """
        Stage the object of *slices*, unless the store has it.

        Which it is, is known once all bytes were seen. What is likely to be new is written as it is read;
        what is likely to be there is read first, and once more, most likely from memory, if it is not.
        """
        reader = self._reader()
        look = partial(inspect, slices, reader, self._checksums, witness=witness, advance=self._advance)
        if not self._reads_once and self._likely_known.get(kind, self._known_before):
            found = look()
            is_known = self._writer.spares_writing(found.ref)
            if not is_known:
                self._writer.stage(found.ref, found.content(reader))
        else:
            with self._writer.draft() as draft:
                found = look(write=draft.write_at)
                is_known = not draft.keep_as(found.ref)
        # Frozen layers lie among others: the latest of the same kind is the best guess for the next.
        self._likely_known[kind] = is_known
        return found

    def bytes_object(self, path: Path, offset: int, size_bytes: int) -> ObjectContent:
        """Stage a stretch of *path* as an object of its own."""
        part = SliceSource(name=BYTES_KEY, state="", dtype="U8", elements=size_bytes, path=path, offset_bytes=offset)
        found = self._staged(BYTES_KEY, (part,) if size_bytes else ())
        checksum = found.tensors[0].crc32 if found.tensors else 0
        return ObjectContent(object=found.ref, size_bytes=size_bytes, crc32=checksum)

    def version(self, version: LayerVersion) -> BlobRef:
        """Stage *version*, its objects brought into their order."""
        return self._blob(encode_version(replace(version, objects=in_order(version.objects))))

    def state(self, state: RankState, files: Iterable[SourceFile], gathered: Iterable[GatheredFile] = ()) -> BlobRef:
        """Stage a rank's *state*, complete with its *files*: the bytes that its trees only point at come with it."""
        for file in (state.model, state.optimizer):
            replace_tensors(file.tree, self._with_bytes)
        return self._blob(encode_state(replace(state, files=tuple(files), gathered=tuple(gathered))))

    def _with_bytes(self, tensor: Tensor) -> Tensor:
        """Exchange the place of a tensor's bytes for the bytes, or for an object that holds them."""
        located = tensor.storage.content
        if isinstance(located, Located):
            tensor.storage.content = self._stored_content(tensor.storage, located)
        return tensor

    def _stored_content(self, storage: Storage, located: Located) -> bytes | ObjectContent:
        if located.size_bytes > INLINE_BYTES_MAX:
            return self.bytes_object(located.path, located.offset_bytes, located.size_bytes)
        chunks = self._reader().chunks(located.path, located.offset_bytes, located.size_bytes)
        data = b"".join(map(bytes, chunks))
        self._checksums.note(located.path, located.offset_bytes, len(data), crc32(data))
        return data

    def _blob(self, data: bytes) -> BlobRef:
        if len(data) > BLOB_BYTES_MAX:
            raise Unsupported(
                f"{self._source}: what is not a layer takes {len(data)} bytes in small pieces, "
                f"at most {BLOB_BYTES_MAX} are supported",
                hint="are there thousands of small files in the checkpoint's folder that do not belong to it?",
            )
        ref = ref_of(data)
        self._writer.put(data, ref)
        return ref
