"""Exit codes besides those of ``layerstore.errors``; docs/reference/cli.md lists all."""

EXIT_NO_MEMORY = 1
EXIT_USAGE = 2
# 128 plus the signal's number, as shells report a process that a signal ended.
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141
EXIT_TERMINATED = 143
