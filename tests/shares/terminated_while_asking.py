"""The command line, whose first process gets SIGTERM once the others have a question, before it hears answers."""

import itertools
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from layerstore.cli.entry import main

send = Connection.send
others = int(os.environ["WORLD_SIZE"]) - 1
sent = itertools.count(1)


def terminated(self: Connection, message: Any) -> None:
    """Send SIGTERM after the first question to the last process, and let the main thread hear it."""
    send(self, message)
    if next(sent) == others:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)


if os.environ["RANK"] == "0":
    Connection.send = terminated  # type: ignore[assignment]

sys.exit(main())
