"""
The first code that runs: Ctrl-C prints no traceback, even while the command line is being imported.

During this import, no work has begun, so the process just ends with the exit code of an interruption.
"""

import os
from typing import TYPE_CHECKING

from layerstore.cli.exits import EXIT_INTERRUPTED

if TYPE_CHECKING:
    import signal
    from types import FrameType
else:
    import _signal as signal  # the C part of the module, to avoid the import of enum


def main() -> int:
    """Run the command line on the process's arguments, or answer a shell's completion request."""
    # If SIGINT is ignored, as in a shell's background jobs, it stays ignored.
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, _leave)
    if "_LAYERSTORE_COMPLETE" in os.environ:  # cli.complete.VARIABLE
        from layerstore.cli.app import command_line
        from layerstore.cli.complete import answer_shell

        return answer_shell(command_line())
    from layerstore.cli.app import main as run

    try:
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:  # a second Ctrl-C, while the first was being handled
        return EXIT_INTERRUPTED
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, _leave)  # only the interpreter's shutdown is left


def _leave(number: int, frame: "FrameType | None") -> None:
    os._exit(EXIT_INTERRUPTED)
