"""What collections have decided: the log of each. An envelope, and one canonical value in it."""

from layerstore.errors import IntegrityError
from layerstore.format.canonical import pack, unpack
from layerstore.format.envelope import Envelope, seal, unseal
from layerstore.format.fields import from_plain, to_plain
from layerstore.model import Collection


def collection_name(collection_id: str) -> str:
    """Return where the log of a collection belongs, below the store."""
    return f"gc/{collection_id}/plan"


def seal_collection(collection: Collection, *, store_id: str) -> bytes:
    """Return the bytes of *collection*'s file."""
    name = collection_name(collection.id)
    return seal(Envelope(store_id=store_id, name=name, payload=pack({"collection": to_plain(collection)})))


def unseal_collection(data: bytes, *, name: str, store_id: str) -> Collection:
    """
    Read the collection whose file is called *name*.

    Raises:
        IntegrityError: It is damaged or misplaced.
    """
    plain = unpack(unseal(data, name=name, store_id=store_id).payload, what=name)
    if not isinstance(plain, dict) or plain.keys() != {"collection"}:
        raise IntegrityError(f"{name} holds no collection", path=name)
    collection = from_plain(Collection, plain["collection"], what=name)
    if collection_name(collection.id) != name:
        raise IntegrityError(f"{name} holds another collection's plan", path=name)
    return collection
