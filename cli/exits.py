"""Exit codes that are no error's own: those stand in ``layerstore.errors``, all of them in docs/reference/cli.md."""

EXIT_NO_MEMORY = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141
EXIT_TERMINATED = 143
