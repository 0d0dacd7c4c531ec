"""Parts: what each rank leaves for the one that commits. An envelope, and one canonical value in it."""

from layerstore.errors import IntegrityError
from layerstore.format.canonical import pack, unpack
from layerstore.format.envelope import Envelope, seal, unseal
from layerstore.format.fields import from_plain, to_plain
from layerstore.model import Part


def part_name(session: str, save: int, rank: int) -> str:
    """Return where a part belongs, below the store."""
    return f"parts/{session}/{save}.{rank}"


def seal_part(part: Part, *, store_id: str) -> bytes:
    """Return the bytes of *part*'s file."""
    name = part_name(part.session, part.save, part.rank)
    return seal(Envelope(store_id=store_id, name=name, payload=pack({"part": to_plain(part)})))


def unseal_part(data: bytes, *, name: str, store_id: str) -> Part:
    """
    Read the part whose file is called *name*.

    Raises:
        IntegrityError: It is damaged or misplaced.
    """
    plain = unpack(unseal(data, name=name, store_id=store_id).payload, what=name)
    if not isinstance(plain, dict) or plain.keys() != {"part"}:
        raise IntegrityError(f"{name} holds no part", path=name)
    part = from_plain(Part, plain["part"], what=name)
    if part_name(part.session, part.save, part.rank) != name:
        raise IntegrityError(f"{name} holds another rank's part, or another save's", path=name)
    return part
