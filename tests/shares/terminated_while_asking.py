"""The command line, whose first process gets SIGTERM once the others have a question, before it hears answers."""

import os
import signal
import sys
import time

from torch import distributed

from layerstore.cli.entry import main

scatter = distributed.scatter_object_list


def terminated(*args: object, **kwargs: object) -> None:
    """Send SIGTERM after the first question, and let the main thread hear it."""
    distributed.scatter_object_list = scatter
    scatter(*args, **kwargs)  # type: ignore[arg-type]  # passed on as they are
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)


if os.environ["RANK"] == "0":
    distributed.scatter_object_list = terminated

sys.exit(main())
