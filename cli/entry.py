"""
The first lines that run: Ctrl-C is quiet from here on, also while the command line is still being imported.

Nothing has been begun then, so the process just ends, with the exit code that an interruption has later on.
Only what Python itself does before it runs a program, and the package's own first lines, are out of reach.
"""

import os
from typing import TYPE_CHECKING

from layerstore.cli.exits import EXIT_INTERRUPTED

if TYPE_CHECKING:
    import signal
    from types import FrameType
else:
    import _signal as signal  # what the module of that name is made of, without the time that it takes to import enum


def main() -> int:
    """Run the command line on the process's own arguments, or answer a shell that completes one."""
    # Whoever started us may ignore SIGINT, as shells do for what runs in the background: that stays.
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
    except KeyboardInterrupt:  # a second one, while the first was being dealt with
        return EXIT_INTERRUPTED
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, _leave)  # all is done and said: what is left is the interpreter's own end


def _leave(number: int, frame: "FrameType | None") -> None:
    os._exit(EXIT_INTERRUPTED)
