"""A judge of folders: a user's command, which decides by its exit code or by a number that it prints."""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from layerstore.bisect.search import TrialVerdict
from layerstore.errors import InvalidInput
from layerstore.json_text import parse_json
from layerstore.policy import Best

PLACE = "{}"
"""The placeholder for the folder in a command."""

# As for `git bisect run`: shells use higher codes if a command could not run or was killed, which is no verdict.
_SKIP, _BAD_MAX = 125, 124


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A judge's verdict on one folder."""

    verdict: TrialVerdict
    metric: float | None = None
    """The number that decided the verdict; None if the exit code did."""


def command_judge(
    command: Sequence[str],
    *,
    metric: str | None,
    threshold: float | None,
    on_output: Callable[[str], None],
) -> Callable[[Path], Judged]:
    """
    Return a judge that runs *command* with a folder's path in place of ``{}``.

    The command exits with 0 for good, 125 to skip, and 1 to 124 for bad. With a *metric*, the last line that it prints
    is the number, or a JSON object with the number; a number worse than *threshold* is bad. *on_output* gets all that
    the command prints.

    Raises:
        InvalidInput: The command lacks ``{}``, or only one of *metric* and *threshold* is given.
    """
    if not any(PLACE in word for word in command):
        raise InvalidInput(
            "the command has no {} for the folder that it judges", hint="for example: -- python judge.py {}"
        )
    if (metric is None) != (threshold is None):
        raise InvalidInput("--metric and --threshold go together", hint="--metric eval_loss --threshold 2.5")
    best = None if metric is None else Best.parse(metric)

    def judge(folder: Path) -> Judged:
        words = [word.replace(PLACE, str(folder)) for word in command]
        try:
            ended = subprocess.run(words, stdout=subprocess.PIPE, check=False)
        except OSError as exc:
            hint = (
                "leave out the quotes around it"
                if len(words) == 1 and " " in words[0]
                else "try it by hand with a folder"
            )
            raise InvalidInput(f"the command cannot be run: {words[0]}: {exc.strerror}", hint=hint) from exc
        output = ended.stdout.decode(errors="replace")
        on_output(output)
        code = ended.returncode
        if code == _SKIP:
            return Judged(verdict="skip")
        if not 0 <= code <= _BAD_MAX or (best is not None and code):
            ended_by = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
            raise InvalidInput(
                f"the command {ended_by}, which is not a verdict{'' if best is None else ' with --metric'}",
                hint="nothing is lost: fix it, and call bisect again as before",
            )
        if best is None or threshold is None:
            return Judged(verdict="bad" if code else "good")
        value = _number(output, best.metric)
        is_bad = not (value <= threshold if best.direction == "min" else value >= threshold)  # a NaN is bad
        return Judged(verdict="bad" if is_bad else "good", metric=value)

    return judge


def _number(output: str, metric: str) -> float:
    """Return the number in the last line of *output*."""
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    try:
        value = parse_json(last)
    except ValueError:
        value = last  # float() reads more than JSON has: nan, inf, .5
    if isinstance(value, dict):
        value = value.get(metric)
    try:
        return float(value)
    except (TypeError, ValueError) as exc:
        raise InvalidInput(
            f"the command's last line has no {metric}: {last[:80]!r}",
            hint=f'print a number, or JSON such as {{"{metric}": 2.5}}',
        ) from exc
