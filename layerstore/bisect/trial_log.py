"""
The log of a bisection: what it asks, every verdict, and its answer, a line of JSON each.

Each line is begun with a line feed, so one that a killed process left unfinished is a line of its own, and left out.
"""

import json
from dataclasses import dataclass
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
    """Names what was judged by its content."""
    asked: str
    """What was judged, in words."""
    verdict: TrialVerdict
    metric: float | None
    bytes_written: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a bisection asks; the same question continues from its log."""

    good: str
    """As it was typed."""
    bad: str
    judge: str
    """What tells the judge from others: a command with its threshold."""
    dtype: str | None
    has_layers: bool
    good_commit: str
    """What *good* meant when it began."""
    bad_commit: str

    def is_same(self, other: "Question") -> bool:
        """Whether *other* asks the same, whatever its references mean by now."""
        return self._words() == other._words()

    def _words(self) -> tuple[object, ...]:
        return self.good, self.bad, self.judge, self.dtype, self.has_layers


class Log:
    """A log that is written to."""

    def __init__(self, files: Files, folder: Path, question: Question) -> None:
        """Go on with the log in *folder*, or begin one; raise AlreadyExists if it is another one's, and not ended."""
        self._files = files
        self._path = folder / _NAME
        self._has_answer = False
        self.question = question
        self.trials: list[Trial] = []
        if files.size(self._path):
            known, trials, answer = read_trials(folder)
            # Unfinished, it continues with the commits that it began with. Answered, the words may mean others now.
            is_same = known == question if answer else known.is_same(question)
            if is_same:
                self.question, self.trials, self._has_answer = known, trials, bool(answer)
                return
            if trials and not answer:
                raise AlreadyExists(
                    f"{folder} holds another bisection, which has not ended; nothing was changed",
                    hint="choose another place with --dir, or remove that one",
                )
        self.discard()
        files.append(self._path, json.dumps(json_fields(question)).encode())

    def add(self, trial: Trial) -> None:
        """Append *trial*, which the same bisection need not repeat."""
        self.trials.append(trial)
        self._append(json_fields(trial))

    def end(self, answer: str) -> None:
        """Note the *answer*: another bisection may take this one's place now."""
        if not self._has_answer:
            self._append({"answer": answer})

    def discard(self) -> None:
        """Remove it: nothing that it has is to be believed."""
        if self._files.exists(self._path):
            self._files.unlink(self._path)

    def _append(self, line: dict[str, object]) -> None:
        self._files.append(self._path, b"\n" + json.dumps(line).encode())


def read_trials(folder: Path) -> tuple[Question, list[Trial], str]:
    """Return the log in *folder*: the question, the trials, and the answer if there is one; raises InvalidInput."""
    path = folder / _NAME
    text = Files().read_if_there(path, size_bytes_max=RECORD_BYTES_MAX)
    if not text:
        raise InvalidInput(f"there is no bisection in {folder}", hint="layerstore bisect GOOD BAD -- COMMAND {}")
    first, *lines = text.decode(errors="replace").split("\n")
    try:
        records = [parse_json(line) for line in lines if line.endswith("}")]  # else torn by a kill
        answer = next((line["answer"] for line in records if "answer" in line), "")
        return Question(**parse_json(first)), [Trial(**line) for line in records if "answer" not in line], answer
    except (ValueError, TypeError) as exc:
        raise StorageIO(f"{path} is not a log of a bisection: {exc}", errno=None, filename=str(path)) from exc
