"""
The log of a bisection: its question, every verdict, and its answer, each as a line of JSON.

Each new line starts with a line feed, so a line that a killed process left unfinished stays separate, and is ignored.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from layerstore.bisect.search import TrialVerdict
from layerstore.disk import Files
from layerstore.errors import AlreadyExists, InvalidInput, StorageIO
from layerstore.json_fields import json_fields
from layerstore.json_text import parse_json
from layerstore.limits import RECORD_BYTES_MAX

_NAME = "log.jsonl"
OWN = frozenset({_NAME, "lock", "trial", "files"})
"""What a bisection makes in its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One question and its answer."""

    number: int
    """From 1."""
    key: str
    """Identifies what was judged, by its content."""
    asked: str
    """What was judged, in words."""
    verdict: TrialVerdict
    metric: float | None
    bytes_written: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a bisection asks; asking the same question again continues from the log."""

    good: str
    """As the user typed it."""
    bad: str
    judge: str
    """Identifies the judge: a command with its threshold."""
    dtype: str | None
    has_layers: bool
    good_commit: str
    """The commit that *good* referred to when the bisection began."""
    bad_commit: str

    def is_same(self, other: "Question") -> bool:
        """Whether *other* asks the same question, even if its references resolve to other commits now."""
        return self == replace(other, good_commit=self.good_commit, bad_commit=self.bad_commit)


class Log:
    """A log, open for writing."""

    def __init__(self, files: Files, folder: Path, question: Question) -> None:
        """Continue or begin the log in *folder*; raise AlreadyExists if another bisection in *folder* is unfinished."""
        self._files = files
        self._path = folder / _NAME
        self._has_answer = False
        self.question = question
        self.trials: list[Trial] = []
        if files.size(self._path):
            known, trials, answer = read_trials(folder)
            # An unfinished bisection goes on with its recorded commits; an answer is reused only for the same commits.
            is_same = known == question if answer else known.is_same(question)
            if is_same:
                self.question, self.trials, self._has_answer = known, trials, bool(answer)
                return
            if trials and not answer:
                raise AlreadyExists(
                    f"{folder} holds another bisection, which has not ended; nothing was changed",
                    hint="choose another folder with --dir, or remove this one",
                )
        self.discard()
        files.append(self._path, json.dumps(json_fields(question)).encode())

    def add(self, trial: Trial) -> None:
        """Append *trial*, so that the same bisection need not repeat it."""
        self.trials.append(trial)
        self._append(json_fields(trial))

    def end(self, answer: str) -> None:
        """Append the *answer*; after that, another bisection may replace this log."""
        if not self._has_answer:
            self._append({"answer": answer})

    def discard(self) -> None:
        """Remove the log, so that none of its verdicts is used again."""
        if self._files.exists(self._path):
            self._files.unlink(self._path)

    def _append(self, line: dict[str, object]) -> None:
        self._files.append(self._path, b"\n" + json.dumps(line).encode())


def read_trials(folder: Path) -> tuple[Question, list[Trial], str]:
    """Return the log in *folder*: the question, the trials, and any answer; raises InvalidInput without a log."""
    path = folder / _NAME
    text = Files().read_if_there(path, size_bytes_max=RECORD_BYTES_MAX)
    if not text:
        raise InvalidInput(f"there is no bisection in {folder}", hint="layerstore bisect GOOD BAD -- COMMAND {}")
    first, *lines = text.decode(errors="replace").split("\n")
    try:
        records = [parse_json(line) for line in lines if line.endswith("}")]  # a kill left the others unfinished
        answer = next((line["answer"] for line in records if "answer" in line), "")
        return Question(**parse_json(first)), [Trial(**line) for line in records if "answer" not in line], answer
    except (ValueError, TypeError) as exc:
        raise StorageIO(f"{path} is not a log of a bisection: {exc}", errno=None, filename=str(path)) from exc
