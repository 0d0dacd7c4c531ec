"""What collections have decided: the log of each."""

from layerstore.format.wrapped import unwrap, wrap
from layerstore.model import Collection


def collection_name(collection_id: str) -> str:
    """Return where the log of a collection belongs, below the store."""
    return f"gc/plans/{collection_id}"


def seal_collection(collection: Collection, *, store_id: str) -> bytes:
    """Return the bytes of *collection*'s file."""
    return wrap(collection, kind="collection", name=collection_name(collection.id), store_id=store_id)


def unseal_collection(data: bytes, *, name: str, store_id: str) -> Collection:
    """
    Read the collection whose file is called *name*.

    Raises:
        IntegrityError: It is damaged or misplaced.
    """
    return unwrap(
        Collection,
        data,
        kind="collection",
        name=name,
        store_id=store_id,
        name_of=lambda collection: collection_name(collection.id),
        other="collection's plan",
    )
