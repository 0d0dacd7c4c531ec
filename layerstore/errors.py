"""
The exception tree.

LayerstoreError
  InvalidInput (ValueError)     a wrong argument, recipe, name or id
  StorageIO (OSError)           the disk refused; errno and filename are kept
  Locked                        another process held the lock until the deadline
  NotFound (KeyError)           no such run, step, pin or layer
    NoStore                     no store at this path
  AlreadyExists                 the store, pin or target already exists
  Conflict                      other content for this (run, step), or a concurrent change
    Overtaken                   something was removed during the command: repeat it
  Unsupported                   a newer format, a setting, a dtype
  IntegrityError                damage found in the store
  SourceCheckpoint              the source is incomplete, damaged or untrusted
  LayoutMismatch                ranks, world sizes or layers that do not fit each other
  JobLost                       another process that shares the work has ended
  Internal                      a bug in layerstore

Classes are split by what a caller would do about the error.
Every class has a stable *kind* and the exit code of the command line.
"""

import errno as errnos

PERMISSION_ERRNOS = frozenset({errnos.EACCES, errnos.EPERM, errnos.EROFS})
# A limit on open files or memory was reached: these errors reveal nothing about the file.
PROCESS_ERRNOS = frozenset({errnos.EMFILE, errnos.ENFILE, errnos.ENOMEM})
FULL_DISK_ERRNOS = frozenset({errnos.ENOSPC, errnos.EDQUOT})
# EFBIG is the process's limit on file size: freeing space does not help.
NO_SPACE_ERRNOS = FULL_DISK_ERRNOS | {errnos.EFBIG}


DAMAGED_HINT = (
    "ingest the same checkpoint again, which puts its bytes in place of the damaged ones; "
    "or layerstore repair --read-data --from COPY"
)


class LayerstoreError(Exception):
    """
    An error whose message states in one line what was asked, what was found and what is safe.

    *hint* is the next thing to do, preferably a command; a class may have a usual hint.
    *facts* are the values behind the message, for programs.
    Unprintable characters, which file names may hold, are escaped. A URL that may hold a key is cut to its scheme:
    users may pass such a URL as any argument, and messages quote arguments.
    """

    exit_code: int = 1
    kind: str = "failure"
    usual_hint: str | None = None

    def __init__(self, message: str, *, hint: str | None = None, **facts: object) -> None:
        message = _without_keys(message)
        super().__init__(message)
        self.message = _in_one_line(message)
        self.hint = self.usual_hint if hint is None else _in_one_line(_without_keys(hint))
        self.facts = facts
        if self.hint:
            self.add_note(f"hint: {self.hint}")  # so that a traceback shows it

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        # By default, unpickling would call the class with *args* alone, but StorageIO needs more arguments.
        return _unpickled, (type(self), self.args, self.__dict__)

    def locate(self, place: object) -> None:
        """Prefix the message with *place*."""
        self.message = _in_one_line(_without_keys(f"{place}: {self.message}"))


def _unpickled(kind: type[LayerstoreError], words: tuple[object, ...], state: dict[str, object]) -> LayerstoreError:
    error = kind.__new__(kind, *words)
    for name, value in state.items():
        setattr(error, name, value)
    return error


def _without_keys(text: str) -> str:
    if ":" not in text:
        return text
    from layerstore.redact import redacted  # `import layerstore` must not load what redact imports

    return redacted(text)


def _in_one_line(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


class InvalidInput(LayerstoreError, ValueError):
    """A wrong argument, recipe, name or id."""

    exit_code = 2
    kind = "invalid_input"


class StorageIO(LayerstoreError, OSError):
    """The disk refused; *errno* and *filename* are kept."""

    kind = "storage_io"

    def __init__(self, message: str, *, errno: int | None, filename: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.errno = errno
        self.filename = filename
        if errno in PERMISSION_ERRNOS:
            self.exit_code, self.kind = 12, "permission"
        elif errno in NO_SPACE_ERRNOS:
            self.exit_code, self.kind = 23, "no_space"

    def __reduce__(self) -> tuple[object, ...]:
        # OSError keeps errno and filename outside of __dict__.
        return _unpickled, (type(self), self.args, {**self.__dict__, "errno": self.errno, "filename": self.filename})


class Locked(LayerstoreError):
    """Another process held the lock until the deadline."""

    exit_code = 11
    kind = "locked"


class NotFound(LayerstoreError, KeyError):
    """There is no such run, step, pin or layer."""

    exit_code = 13
    kind = "not_found"


class NoStore(NotFound):
    """There is no store at this path."""

    exit_code = 10
    kind = "no_store"


class AlreadyExists(LayerstoreError):
    """The store, pin or target already exists."""

    exit_code = 14
    kind = "already_exists"


class Conflict(LayerstoreError):
    """Other content was saved for this (run, step), or something changed during the call."""

    exit_code = 15
    kind = "conflict"


class Overtaken(Conflict):
    """Something that the command relied on was removed while it ran; repeating the command succeeds."""


class Unsupported(LayerstoreError):
    """A newer format, or a setting or dtype that is not supported."""

    exit_code = 16
    kind = "unsupported"


class IntegrityError(LayerstoreError):
    """Damage was found in the store."""

    exit_code = 20
    usual_hint = (
        "layerstore verify --read-data lists what is damaged, repair --read-data --dry-run shows what can be done"
    )
    kind = "damaged"


class SourceCheckpoint(LayerstoreError):
    """The source checkpoint is incomplete, damaged or untrusted."""

    exit_code = 21
    usual_hint = "copy it again from where it was saved, or ingest another checkpoint"
    kind = "source_checkpoint"


class LayoutMismatch(LayerstoreError):
    """Ranks, world sizes or layers do not fit each other."""

    exit_code = 22
    usual_hint = "all files and layers must come from one model, and all files from one save"
    kind = "layout_mismatch"


class JobLost(LayerstoreError):
    """Another process that shares the work has ended, or cannot be reached; nothing was made visible."""

    kind = "job_lost"


class Internal(LayerstoreError):
    """A bug in layerstore: please report it."""

    kind = "internal"
