"""What ranks write together, and that it is into one store."""

import secrets

from layerstore.errors import InvalidInput, LayerstoreError
from layerstore.live.exchange import Exchange
from layerstore.storage.rooms import Rooms


def open_session(exchange: Exchange, rooms: Rooms) -> str:
    """Agree on a name for what the ranks write together, and make sure that all see the same store."""
    session = exchange.first(secrets.token_hex(16) if exchange.rank == 0 else "")
    problem = ""
    if exchange.rank == 0:
        try:
            rooms.parts.open_session(session)
        except LayerstoreError as exc:
            problem = str(exc)
    exchange.agree_on_disk(problem, rooms.layout.root)
    if not rooms.parts.has_session(session):
        problem = f"{rooms.layout.root} is not the store that rank 0 has under this path"
    exchange.agree(problem, InvalidInput)
    return session
