"""``layerstore estimate``: what a model's saves would take, before it is trained."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.options import DEFAULT_STORE, AsJson, StorePath, opened
from layerstore.cli.policy import policy_from
from layerstore.cli.render import Column, counted, say, say_json, say_paragraph, say_table, say_warning, shown, size
from layerstore.errors import InvalidInput, NotFound
from layerstore.json_fields import json_fields
from layerstore.units import size_in_bytes

if TYPE_CHECKING:
    from fractions import Fraction

    from layerstore.inspect import Estimate, EstimateLine, Model, Training

_POLICIES = ("full", "parity", "filter")
_COUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kKmMbBgGtT]?)")
_POWERS = {"": 0, "K": 1, "M": 2, "B": 3, "G": 3, "T": 4}
_PARAMETERS_MAX = 10**15
_DAY = 86400.0
_UNITS = ((_DAY, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
# From here on in years.
_YEARS_MIN, _YEAR = 730 * _DAY, 365.25 * _DAY
_NUMBERS = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (10**3, "thousand"))

# A size without a unit is in bytes; fewer than these are a forgotten unit.
_BARE_BYTES_MIN = 10**6

# Defaults; those that apply are listed as assumed.
_WORLD_SIZE, _STEPS, _EVERY, _STEP_SECONDS = 8, 10_000, 100, 10.0
_BANDWIDTH, _DISK, _DTYPE = "2GB/s", "10TB", "bf16"

ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A config.json or a folder with one, a ZeRO-3 checkpoint, or a REF: RUN@STEP of the store.",
        show_default=False,
    ),
]
Parameters = Annotated[
    str | None, typer.Option("--params", metavar="8B", help="Instead of MODEL: how large it is.", show_default=False)
]
Layers = Annotated[
    int | None, typer.Option("--layers", metavar="N", help="With --params: its blocks.", min=1, show_default=False)
]
WorldSize = Annotated[
    int | None, typer.Option("--world-size", metavar="W", help=f"GPUs: {_WORLD_SIZE}.", min=1, max=1_000_000)
]
Steps = Annotated[int | None, typer.Option("--steps", metavar="N", help=f"The run's steps: {_STEPS:,}.", min=1)]
Every = Annotated[int | None, typer.Option("--every", metavar="STEPS", help=f"A save every so often: {_EVERY}.", min=1)]
StepSeconds = Annotated[
    float | None, typer.Option("--step-seconds", metavar="S", help=f"What a step takes: {_STEP_SECONDS:.0f}.")
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="P",
        help="full, parity and filter; again for several, with settings: filter:every=10.",
        show_default=False,
    ),
]
Bandwidth = Annotated[
    str | None, typer.Option("--bandwidth", metavar="RATE", help=f"What all ranks write together: {_BANDWIDTH}.")
]
Measure = Annotated[
    Path | None,
    typer.Option("--measure", metavar="DIR", help="Write there for two seconds, and take that.", show_default=False),
]
Disk = Annotated[str | None, typer.Option("--disk", metavar="SIZE", help=f"Space for history: {_DISK}.")]
Dtype = Annotated[str | None, typer.Option("--dtype", metavar="bf16|fp16|fp32", help=f"What is trained in: {_DTYPE}.")]
Trainable = Annotated[
    str,
    typer.Option("--trainable", metavar="SHARE", help="The share that is trained, like 0.5%: LoRA, frozen layers."),
]
Movement = Annotated[
    float | None,
    typer.Option("--movement", metavar="X", help="drift: how far layers move from save to save.", show_default=False),
]


def estimate(
    model: ModelName = None,
    *,
    params: Parameters = None,
    layers: Layers = None,
    world_size: WorldSize = None,
    steps: Steps = None,
    every: Every = None,
    step_seconds: StepSeconds = None,
    policy: Policies = None,
    bandwidth: Bandwidth = None,
    measure: Measure = None,
    disk: Disk = None,
    dtype: Dtype = None,
    trainable: Trainable = "1",
    movement: Movement = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Estimate what saving a model takes under each policy.

    The table compares it with full checkpoints. Nothing is trained, downloaded or stored.
    The policies decide as they would in training. What is assumed is listed below the table.
    Of a checkpoint or a commit only headers are read. A config.json needs Transformers and PyTorch installed.
    If MODEL is both a path and a REF, the path wins.

    \b
    Examples:
      layerstore estimate Llama-3.1-8B/config.json --world-size 16
      layerstore estimate sft@200 --policy filter:every=10 --measure /scratch
      layerstore estimate --params 70B --layers 80 --every 50 --disk 40TB
    """
    from layerstore.dtypes import dtype_code
    from layerstore.inspect import Training, estimate_saves

    chosen = _model(model, params=params, layers=layers, store=store)
    seen = chosen.world_size
    policies = {text: policy_from(text) for text in policy or _POLICIES}
    training = Training(
        world_size=world_size or seen or _WORLD_SIZE,
        steps=_STEPS if steps is None else steps,
        every=_EVERY if every is None else every,
        step_seconds=_STEP_SECONDS if step_seconds is None else step_seconds,
        bytes_per_second=_rate(bandwidth, measure),
        disk_bytes=_size(disk or _DISK, "--disk"),
        dtype=dtype_code(dtype) or chosen.dtype or dtype_code(_DTYPE) or "",
        trainable=_share(trainable),
        movement=movement,
    )
    found = estimate_saves(chosen, training, policies)
    said: dict[str, object] = {"--world-size": world_size or seen, "--steps": steps, "--every": every, "--disk": disk}
    said |= {"--step-seconds": step_seconds, "--bandwidth": bandwidth or measure}
    assumed = {name for name, value in said.items() if value is None}
    if as_json:
        say_json(_fields(found, assumed))
    else:
        _tell(found, assumed, measured=measure)


# -- what was asked ------------------------------------------------------------------------------------------------


def _model(name: str | None, *, params: str | None, layers: int | None, store: Path | None) -> "Model":
    from layerstore.inspect import made_up, model_at

    if (name is None) == (params is None and layers is None):
        raise InvalidInput(
            "which model? MODEL or --params with --layers",
            hint="a checkpoint's folder, a Transformers config.json, RUN@STEP, or for example --params 8B --layers 32",
        )
    if name is not None and os.path.lexists(name):
        from layerstore.live.meta_model import parameter_shapes

        return model_at(Path(name), ask_transformers=parameter_shapes)
    if name is not None:
        return _stored_model(name, store)
    if params is None or layers is None:
        raise InvalidInput("--params and --layers go together", hint="for example --params 8B --layers 32")
    return made_up(_count(params), layers)


def _stored_model(name: str, store: Path | None) -> "Model":
    from layerstore.inspect import model_of_commit

    if store is None and not DEFAULT_STORE.exists():
        raise InvalidInput(
            f"there is no such file or folder: {name}, and no store at {DEFAULT_STORE} with a commit of that name",
            hint="name a store with --store; --params 8B --layers 32 needs neither",
        )
    with opened(store) as opened_store:
        try:
            return model_of_commit(opened_store.repo, name)
        except NotFound as exc:
            raise NotFound(
                f"{name} is no file or folder, and no commit of {opened_store.path}: {exc}", hint=exc.hint
            ) from exc
        except InvalidInput as exc:
            raise InvalidInput(f"there is no such file or folder: {name}, and it cannot be a commit: {exc}") from exc


def _count(text: str) -> int:
    match = _COUNT.fullmatch(text.strip())
    count = 0 if match is None else round(float(match["number"]) * 1000 ** _POWERS[match["unit"].upper()])
    if not 0 < count <= _PARAMETERS_MAX:
        raise InvalidInput(f"--params {text!r} is no number of parameters", hint="write it like 8B, 350M or 1.5T")
    return count


def _share(text: str) -> "Fraction":
    from fractions import Fraction

    bare = text.strip()
    try:
        return Fraction(bare.removesuffix("%")) / (100 if bare.endswith("%") else 1)
    except (ValueError, ZeroDivisionError) as exc:
        raise InvalidInput(f"--trainable {text!r} is no share", hint="write it like 0.5%, 0.005 or 1/200") from exc


def _size(text: str, option: str) -> int:
    size_bytes = size_in_bytes(text)
    if size_bytes < _BARE_BYTES_MIN and not text.strip()[-1:].isalpha():
        raise InvalidInput(
            f"{option} {text} has no unit, and would be {counted(size_bytes, 'byte')}", hint=f"{option} {text}GB, say"
        )
    return size_bytes


def _rate(bandwidth: str | None, measure: Path | None) -> float:
    from layerstore.inspect import measure_speed

    if measure is None:
        return _size((bandwidth or _BANDWIDTH).removesuffix("/s"), "--bandwidth")
    if bandwidth is not None:
        raise InvalidInput("--bandwidth and --measure were both given", hint="choose one")
    return measure_speed(measure).bytes_per_second


# -- the answer ----------------------------------------------------------------------------------------------------


def _tell(found: "Estimate", assumed: set[str], *, measured: Path | None) -> None:
    training, model = found.training, found.model
    kinds = {"config": model.architecture, "checkpoint": "a checkpoint", "commit": "a commit"}
    kind = f" ({kinds[model.source]})" if kinds.get(model.source) else ""
    frozen = "" if found.trained == model.parameters else f", {_number(found.trained)} of them trained"
    say(
        f"{shown(model.name)}{kind}: {_number(model.parameters)} parameters in {counted(found.layers, 'layer')}{frozen}"
    )
    say(
        f"{counted(training.world_size, 'rank')}; {counted(training.saves, 'save')} in "
        f"{counted(training.steps, 'step')}, one every {_time(training.interval_seconds)}"
    )
    say()
    columns = [Column("SAVED BY", folds=True), Column("A SAVE", "right"), Column("LARGEST", "right")]
    columns += [Column("OF FULL", "right"), Column("THE RUN", "right"), Column("TAKES", "right")]
    say_table([*columns, Column("HISTORY", "right")], (_row(found, line) for line in found.lines))
    say()
    for text in _explained(found):
        say_paragraph(text)
    say()
    say("assumed:")
    for text in (*_unsaid(training, assumed, measured), *found.assumptions):
        say_paragraph(f"- {text}", indent=2)
    for line in found.lines:
        if line.policy is not None and line.save_seconds > training.interval_seconds:
            say_warning(
                f"{_label(line)}: a save takes {_time(line.save_seconds)}, and the next comes after "
                f"{_time(training.interval_seconds)}: training would wait"
            )


def _label(line: "EstimateLine") -> str:
    return line.saved_by if line.policy is None else f"{line.saved_by} {line.policy}"


def _row(found: "Estimate", line: "EstimateLine") -> list[str]:
    history = "no end" if line.history_seconds is None else _time(line.history_seconds)
    return [
        _label(line),
        size(line.average_bytes),
        size(line.largest_bytes),
        f"{line.average_bytes / found.full_bytes:.0%}",
        size(line.run_bytes),
        _time(line.save_seconds),
        history if line.history_saves != 0 else "no save",
    ]


def _explained(found: "Estimate") -> Iterator[str]:
    yield (
        "A SAVE is the average of those after the first, which is full, LARGEST the largest of them, TAKES the writing "
        f"of an average one. OF FULL: of a checkpoint by DeepSpeed. HISTORY: how long until "
        f"{size(found.training.disk_bytes)} are full."
    )
    share = f"{found.held_share:.1%}" if found.held_share >= 0.001 else "less than 0.1%"
    yield (f"Training stops while DeepSpeed writes: {share} of the time. layerstore writes in the background.")
    if found.training.movement is None:
        yield "Drift cannot be predicted; with --movement X it is estimated for layers that all move alike."


def _unsaid(training: "Training", assumed: set[str], measured: Path | None) -> Iterator[str]:
    """Yield the figures that were not given, with the options that give them."""
    rate = f"all ranks together write {size(round(training.bytes_per_second))}/s"
    texts: Mapping[str, str] = {
        "--world-size": counted(training.world_size, "rank"),
        "--steps": counted(training.steps, "step"),
        "--every": f"a save every {counted(training.every, 'step')}",
        "--step-seconds": f"a step takes {_time(training.step_seconds)}",
        "--bandwidth": rate,
        "--disk": f"{size(training.disk_bytes)} of disk",
    }
    unsaid = [f"{text} ({name})" for name, text in texts.items() if name in assumed]
    if unsaid:
        yield "; ".join(unsaid)
    if measured is not None:
        yield f"{rate}, as one process has just done in {shown(measured)}"


def _time(seconds: float) -> str:
    """
    Return *seconds* for people.

    >>> _time(0.0123), _time(90), _time(2 * 86400), _time(1e9)
    ('12.3 ms', '1.5 min', '2.0 days', '31.7 years')
    """
    if seconds >= _YEARS_MIN:
        return f"{seconds / _YEAR:,.1f} years"
    length, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{seconds / length:,.1f} {unit}"


def _number(count: int) -> str:
    """
    Return *count* for people.

    >>> _number(8_030_261_248), _number(6_240), _number(12)
    ('8.03 billion', '6.24 thousand', '12')
    """
    power, word = next((each for each in _NUMBERS if count >= each[0]), (1, ""))
    return f"{count / power:,.2f} {word}" if word else f"{count:,}"


def _fields(found: "Estimate", assumed: set[str]) -> dict[str, object]:
    model = json_fields(found.model) | {"trained": found.trained, "layers": found.layers}
    return {"model": model, **json_fields(found.training), **json_fields(found), "assumed": sorted(assumed)}
