"""The folder of parts, at the end of a session."""

from pathlib import Path

import layerstore

SESSION = "0" * 32


def test_parts_of_a_save_that_was_given_up_go_with_their_session(tmp_path: Path) -> None:
    """A rank may write its part after the first rank has given the save up: it is removed once all have written."""
    with layerstore.init(tmp_path / "store") as store:
        parts, folder = store.rooms.parts, store.path / "parts" / SESSION
        parts.open_session(SESSION)
        (folder / "1.0").touch()

        parts.close_session(SESSION, is_over=False)
        assert folder.exists()
        parts.close_session(SESSION, is_over=True)
        assert not folder.exists()
        parts.close_session(SESSION, is_over=True)  # twice is harmless
