"""What repairs have taken out of the way: the log of each."""

from layerstore.format.wrapped import unwrap, wrap
from layerstore.model import QuarantineLog


def log_name(quarantine_id: str) -> str:
    """Return where the log of a repair belongs, below the store."""
    return f"quarantine/{quarantine_id}/log"


def seal_log(log: QuarantineLog, *, store_id: str) -> bytes:
    """Return the bytes of *log*'s file."""
    return wrap(log, kind="quarantine", name=log_name(log.id), store_id=store_id)


def unseal_log(data: bytes, *, name: str, store_id: str) -> QuarantineLog:
    """
    Read the log whose file is called *name*.

    Raises:
        IntegrityError: It is damaged or misplaced.
    """
    return unwrap(
        QuarantineLog,
        data,
        kind="quarantine",
        name=name,
        store_id=store_id,
        name_of=lambda log: log_name(log.id),
        other="repair's log",
    )
