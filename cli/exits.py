"""Exit codes besides those of ``layerstore.errors``; docs/reference/cli.md lists all."""

EXIT_NO_MEMORY = 1
EXIT_USAGE = 2
# As shells report a process that a signal ended: 128 and the signal's number.
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141
EXIT_TERMINATED = 143
