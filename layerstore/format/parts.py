"""Parts: what each rank leaves for the one that commits."""

from layerstore.format.wrapped import unwrap, wrap
from layerstore.model import Part


def part_name(session: str, save: int, rank: int) -> str:
    """Return where a part belongs, below the store."""
    return f"parts/{session}/{save}.{rank}"


def seal_part(part: Part, *, store_id: str) -> bytes:
    """Return the bytes of *part*'s file."""
    return wrap(part, kind="part", name=part_name(part.session, part.save, part.rank), store_id=store_id)


def unseal_part(data: bytes, *, name: str, store_id: str) -> Part:
    """
    Read the part whose file is called *name*.

    Raises:
        IntegrityError: It is damaged or misplaced.
    """
    return unwrap(
        Part,
        data,
        kind="part",
        name=name,
        store_id=store_id,
        name_of=lambda part: part_name(part.session, part.save, part.rank),
        other="rank's part, or another save's",
    )
