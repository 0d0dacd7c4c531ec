"""Objects in a bucket: listed, and checked against their names as they arrive."""

import threading
from collections.abc import Iterator

from layerstore.errors import IntegrityError, NoStore, NotFound
from layerstore.hashing import NameHasher
from layerstore.layers import typed
from layerstore.layout import OBJECT_ID, Layout
from layerstore.model import BlobRef, ObjectId
from layerstore.remote.bucket import Bucket
from layerstore.storage import check_hash


class Source:
    """The objects in a bucket; *url* is opened on first use."""

    def __init__(self, url: str, layout: Layout, *, bucket: Bucket | None = None) -> None:
        self.url = url
        self._layout = layout
        self._bucket = bucket
        self._guard = threading.Lock()
        self._sizes: dict[str, dict[ObjectId, int]] = {}

    @property
    def bucket(self) -> Bucket:
        """The bucket."""
        with self._guard:
            if self._bucket is None:
                self._bucket = Bucket(self.url)
            return self._bucket

    def listed(self, prefix: str) -> dict[ObjectId, int]:
        """Return the sizes of the objects whose ids start with the two digits *prefix*; listed once for a question."""
        sizes = self._sizes  # what this question began to list is no answer to the next one
        if prefix not in sizes:
            folder = f"{self._layout.objects.name}/{prefix}"
            names = ((each.name.removeprefix(f"{folder}/"), each.size_bytes) for each in self.bucket.listed(folder))
            sizes[prefix] = {ObjectId(name): size for name, size in names if OBJECT_ID.fullmatch(name)}
        return sizes[prefix]

    def check_process(self) -> None:
        """Raise Internal in a child of the process that opened the bucket."""
        if self._bucket is not None:
            self._bucket.check_process()

    def look_anew(self) -> None:
        """Forget the listings: a new question begins."""
        self._sizes = {}

    def check_there(self, ref: BlobRef) -> None:
        """Raise IntegrityError unless the bucket lists *ref* in full size."""
        size_bytes = self.listed(ref.id[:2]).get(ref.id)
        if size_bytes != ref.size_bytes:
            found = "is missing" if size_bytes is None else f"has {size_bytes} bytes, expected {ref.size_bytes}"
            raise self.damaged(ref, IntegrityError(f"object {ref.id} {found}"))

    def checked(self, ref: BlobRef) -> Iterator[tuple[int, memoryview]]:
        """
        Yield the bytes of *ref* from the bucket, each piece with its offset.

        Raises:
            IntegrityError: It is missing; or, raised at the end, the bytes do not match its name.
        """
        hasher = NameHasher()
        name = self._layout.object_name(ref.id)
        try:
            for data in self.bucket.chunks(name, start=0, size_bytes=ref.size_bytes, is_whole=True):
                yield hasher.size_bytes, data
                hasher.update(data)
            check_hash(ref, hasher)
        except NoStore:
            raise  # the bucket itself is not there, which says nothing about the object
        except (NotFound, IntegrityError) as exc:
            raise self.damaged(ref, exc) from exc

    def check_bytes(self, ref: BlobRef) -> None:
        """Read all of *ref* from the bucket and compare it with its name; raises as `checked` does."""
        for _ in self.checked(ref):
            pass

    def damaged(self, ref: BlobRef, problem: Exception) -> IntegrityError:
        """Return the error for *ref*, which the bucket has lost or damaged."""
        text = str(problem)
        return IntegrityError(
            text if text.startswith(self.url) else f"{self.url}: {text}",
            hint=f"layerstore repair --remote {typed(self.url)}, in a store that has it sound, puts it back",
            object_id=ref.id,
        )
