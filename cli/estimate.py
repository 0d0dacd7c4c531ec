"""``layerstore estimate``: what a model's saves would take, before any training."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerstore.arguments import check_effect
from layerstore.cli.commands import About
from layerstore.cli.options import (
    DEFAULT_STORE,
    AsJson,
    OptionTable,
    StorePath,
    nearest_store,
    one_of,
    opened,
    read_settings,
    table_of,
    with_options,
)
from layerstore.cli.render import (
    Column,
    counted,
    print_json,
    print_line,
    print_paragraph,
    print_table,
    print_warning,
    shown,
)
from layerstore.dtypes import DTypeName, dtype_code
from layerstore.errors import InvalidInput, NotFound
from layerstore.ingest_options import IngestOptions
from layerstore.policy import OURS, PREDICTABLE
from layerstore.units import size, size_in_bytes

if TYPE_CHECKING:
    from fractions import Fraction

    from layerstore.inspect import Model

ABOUT = About("Before you start", store=None, answers=True)

_POLICIES = [policy.name for policy in PREDICTABLE]
_MEASURING = ", ".join(policy.name for policy in OURS if policy.name not in _POLICIES)
_COUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kKmMbBgGtT]?)")
_POWERS = {"": 0, "K": 1, "M": 2, "B": 3, "G": 3, "T": 4}
_PARAMETERS_MAX = 10**15

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*/\w[\w.-]*")
"""A model of the Hugging Face hub: ``meta-llama/Llama-3.1-8B``."""

_DAY = 86400.0
_TIMES = ((365.25 * _DAY, "years"), (_DAY, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
_NUMBERS = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))

# A size without a unit is in bytes; if it is below this, the unit was probably forgotten.
_BARE_BYTES_MIN = 10**6

# The defaults that are used are listed as assumptions.
_DEFAULTS: dict[str, Any] = {
    "--world-size": 8,
    "--steps": 10_000,
    "--save-every": 100,
    "--step-seconds": 10.0,
    "--bandwidth": "2GB/s",
    "--copy-rate": "10GB/s",
    "--disk": "10TB",
}


def _option(name: str, metavar: str, text: str, **more: Any) -> Any:
    """Return the option *name*, whose help ends with its default."""
    if name in _DEFAULTS:
        default = _DEFAULTS[name]
        text += f". [default: {default if isinstance(default, str) else format(default, ',g')}]"
    return typer.Option(name, metavar=metavar, help=text, show_default=False, **more)


ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A config.json or a folder with one, a ZeRO checkpoint, or a REF: RUN@STEP of the store.",
        show_default=False,
    ),
]
Policies = Annotated[
    list[str] | None,
    _option("--policy", "P", f"A policy, such as filter:every=10; may be repeated. [default: {', '.join(_POLICIES)}]"),
]


Trainable = Annotated[
    str, _option("--trainable", "SHARE", "The share of parameters that is trained, like 0.5% for LoRA.")
]
Movement = Annotated[float | None, _option("--movement", "X", f"{_MEASURING}: how far layers move from save to save.")]
_COSTS: OptionTable = {
    "keep_last": (int, "N", "Keep the newest N. [default: all]"),
    "keep_every": (int, "STEPS", "Keep every multiple of STEPS."),
    "copy_rate": (str, "RATE", f"How fast a rank copies while training waits. [default: {_DEFAULTS['--copy-rate']}]"),
    "price": (
        str,
        "GB-MONTH,GPU-HOUR",
        "Show costs, too, at these prices in dollars: 0.023,2.50.",
    ),
}
"""The options for what to keep of a run, and for its costs."""

TrainedType = Annotated[DTypeName | None, _option("--dtype", one_of(DTypeName), "The training dtype. [default: bf16]")]

_PRECISION = {name: row for name, row in table_of(IngestOptions).items() if name in {"precision", "exact_every"}}


@with_options("costs", _COSTS, panel="What is kept, and costs")
@with_options("precision", _PRECISION, panel="Precision")
def estimate(
    model: ModelName = None,
    *,
    params: Annotated[str | None, _option("--params", "8B", "Instead of MODEL: its parameters.")] = None,
    layers: Annotated[int | None, _option("--layers", "N", "With --params: its number of blocks.", min=1)] = None,
    world_size: Annotated[int | None, _option("--world-size", "W", "GPUs", min=1, max=1_000_000)] = None,
    steps: Annotated[int | None, _option("--steps", "N", "The run's steps", min=1)] = None,
    every: Annotated[int | None, _option("--save-every", "STEPS", "Steps from one save to the next", min=1)] = None,
    step_seconds: Annotated[float | None, _option("--step-seconds", "S", "How long a step takes")] = None,
    policy: Policies = None,
    bandwidth: Annotated[str | None, _option("--bandwidth", "RATE", "How fast all ranks together write")] = None,
    disk: Annotated[str | None, _option("--disk", "SIZE", "Space for history")] = None,
    dtype: TrainedType = None,
    trainable: Trainable = "1",
    movement: Movement = None,
    precision: Mapping[str, Any],
    costs: Mapping[str, Any],
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Estimate what saving a model takes under each policy.

    The table compares the policies with full checkpoints. Nothing is trained, downloaded or stored.
    With --price, a second table shows what the run costs: storage, and idle GPU hours.
    Assumptions are listed below the table.
    For a checkpoint or a commit, only headers are read. A config.json needs Transformers and PyTorch installed.
    If MODEL is both a path and a REF, the path wins.

    \b
    Examples:
      layerstore estimate Llama-3.1-8B/config.json --world-size 16
      layerstore estimate sft@200 --policy filter:every=10 --bandwidth 900MB/s
      layerstore estimate --params 70B --layers 80 --precision delta8 --disk 40TB
      layerstore estimate sft@200 --keep-last 3 --price 0.023,2.5
    """
    from layerstore.inspect import Training, estimate_saves

    check_effect(precision)
    chosen = _model(model, params=params, layers=layers, store=store)
    given: dict[str, Any] = {
        "--world-size": world_size or chosen.world_size,
        "--steps": steps,
        "--save-every": every,
        "--step-seconds": step_seconds,
        "--bandwidth": bandwidth,
        "--copy-rate": costs.get("copy_rate"),
        "--disk": disk,
    }
    assumed = sorted(name for name, value in given.items() if value is None)
    used = given | {name: _DEFAULTS[name] for name in assumed}
    training = Training(
        world_size=used["--world-size"],
        steps=used["--steps"],
        every=used["--save-every"],
        step_seconds=used["--step-seconds"],
        bytes_per_second=_size(used["--bandwidth"].removesuffix("/s"), "--bandwidth"),
        copy_bytes_per_second=_size(used["--copy-rate"].removesuffix("/s"), "--copy-rate"),
        disk_bytes=_size(used["--disk"], "--disk"),
        dtype=dtype_code(dtype) or chosen.dtype or "BF16",
        trainable=_share(trainable),
        movement=movement,
        **read_settings(IngestOptions, precision),
        **_rules_and_prices(costs),
    )
    estimated = estimate_saves(chosen, training, policy or _POLICIES) | {"assumed": assumed}
    print_json(estimated) if as_json else _print_result(estimated)


# -- input ---------------------------------------------------------------------------------------------------------


def _model(name: str | None, *, params: str | None, layers: int | None, store: str | None) -> "Model":
    from layerstore.inspect import made_up, model_at

    if (name is None) == (params is None and layers is None):
        raise InvalidInput(
            "which model? MODEL or --params with --layers",
            hint="a checkpoint's folder, a Transformers config.json, RUN@STEP, or for example --params 8B --layers 32",
        )
    if name is not None and os.path.lexists(name):
        from layerstore.hf import parameter_shapes

        return model_at(Path(name), ask_transformers=parameter_shapes)
    if name is not None:
        return _stored_model(name, store)
    if params is None or layers is None:
        raise InvalidInput("--params and --layers go together", hint="for example --params 8B --layers 32")
    return made_up(_count(params), layers)


def _stored_model(name: str, store: str | None) -> "Model":
    from layerstore.inspect import model_of_commit

    if _HUB_NAME.fullmatch(name):
        folder = name.partition("/")[2]
        raise InvalidInput(
            f"there is no such file or folder: {name}; estimate downloads nothing",
            hint=f"hf download {name} config.json --local-dir {folder}, then "
            f"layerstore estimate {folder}/config.json; or --params 8B --layers 32",
        )
    sized = (
        f"layerstore estimate --params {name} --layers 32" if _COUNT.fullmatch(name) and name[-1].isalpha() else None
    )
    if store is None and not nearest_store().exists():
        raise InvalidInput(
            f"there is no such file or folder: {name}, and no store at {DEFAULT_STORE} with a commit of that name",
            hint=sized or "name a store with --store; --params 8B --layers 32 needs neither",
        )
    with opened(store) as opened_store:
        try:
            return model_of_commit(opened_store.repo, name)
        except NotFound as exc:
            place = opened_store.path
            raise NotFound(
                f"{name} is not a file or folder, and no commit of {place}: {exc}", hint=sized or exc.hint
            ) from exc
        except InvalidInput as exc:
            raise InvalidInput(f"there is no such file or folder: {name}, and it cannot be a commit: {exc}") from exc


def _count(text: str) -> int:
    match = _COUNT.fullmatch(text.strip())
    count = 0 if match is None else round(float(match["number"]) * 1000 ** _POWERS[match["unit"].upper()])
    if not 0 < count <= _PARAMETERS_MAX:
        raise InvalidInput(f"--params {text!r} is not a number of parameters", hint="write it like 8B, 350M or 1.5T")
    return count


def _share(text: str) -> "Fraction":
    from fractions import Fraction

    bare = text.strip()
    try:
        return Fraction(bare.removesuffix("%")) / (100 if bare.endswith("%") else 1)
    except (ValueError, ZeroDivisionError) as exc:
        raise InvalidInput(f"--trainable {text!r} is not a share", hint="write it like 0.5%, 0.005 or 1/200") from exc


def _size(text: str, option: str) -> int:
    size_bytes = size_in_bytes(text)
    if size_bytes < _BARE_BYTES_MIN and not text.strip()[-1:].isalpha():
        raise InvalidInput(
            f"{option} {text} has no unit, and would be {counted(size_bytes, 'byte')}", hint=f"{option} {text}GB, say"
        )
    return size_bytes


def _rules_and_prices(costs: Mapping[str, Any]) -> dict[str, Any]:
    from layerstore.inspect import Prices

    rules = {name: costs.get(name) for name in ("keep_last", "keep_every")}
    return rules | {"prices": Prices.parse(costs["price"]) if "price" in costs else None}


# -- the answer ----------------------------------------------------------------------------------------------------


def _print_result(estimated: Mapping[str, Any]) -> None:
    model, every = estimated["model"], _time(estimated["interval_seconds"])
    labelled = {_label(line, estimated["precision"]): line for line in estimated["lines"]}
    kinds = {"config": model["architecture"], "checkpoint": "a checkpoint", "commit": "a commit"}
    kind = f" ({kinds[model['source']]})" if kinds.get(model["source"]) else ""
    frozen = "" if model["trained"] == model["parameters"] else f", {_number(model['trained'])} of them trained"
    layers = counted(model["layers"], "layer")
    print_line(f"{shown(model['name'])}{kind}: {_number(model['parameters'])} parameters in {layers}{frozen}")
    saves = f"{counted(estimated['saves'], 'save')} in {counted(estimated['steps'], 'step')}"
    print_line(f"{counted(estimated['world_size'], 'rank')}; {saves}, one every {every}")
    print_line()
    columns = [Column("SAVED BY", folds=True)]
    columns += [Column("A SAVE", "right"), Column("LARGEST", "right", drops=3), Column("OF FULL", "right")]
    columns += [Column("THE RUN", "right", drops=1), Column("TAKES", "right"), Column("HISTORY", "right", drops=2)]
    # With prices, the table of costs shows what is kept, as STORAGE.
    kept = "" if estimated["prices"] else _kept(estimated)
    columns += [Column("KEPT", "right")] if kept else []
    full_bytes = labelled["DeepSpeed"]["first_bytes"]
    print_table(columns, (_row(label, line, full_bytes)[: len(columns)] for label, line in labelled.items()))
    print_line()
    print_paragraph(
        "A SAVE: average size of all saves but the first, which is full. LARGEST: the largest of them. TAKES: the time "
        f"to write an average save. OF FULL: share of a DeepSpeed checkpoint. HISTORY: how long until "
        f"{size(estimated['disk_bytes'])} are full."
        + (f" KEPT: what is stored at the end if gc keeps {kept}, and what the last save replaced." if kept else "")
    )
    share = f"{estimated['held_share']:.1%}" if estimated["held_share"] >= 0.001 else "less than 0.1%"
    print_paragraph(f"Training stops while DeepSpeed writes: {share} of the time. layerstore writes in the background.")
    if estimated["prices"] is not None:
        _print_costs(estimated, labelled)
    if estimated["movement"] is None:
        print_paragraph(
            f"{_MEASURING.capitalize()} cannot be predicted; with --movement X it is estimated for layers that all "
            "move alike."
        )
    print_line()
    print_line("assumed:")
    for text in (*_assumed_figures(estimated), *estimated["assumptions"]):
        print_paragraph(f"- {text}", indent=2)
    for label, line in labelled.items():
        if line["policy"] is not None and line["save_seconds"] > estimated["interval_seconds"]:
            takes = _time(line["save_seconds"])
            print_warning(f"{label}: a save takes {takes}, and the next comes after {every}: training would wait")


def _print_costs(estimated: Mapping[str, Any], labelled: Mapping[str, Mapping[str, Any]]) -> None:
    print_line()
    columns = [Column("SAVED BY", folds=True)]
    columns += [Column(text, "right", drops=1) for text in ("STORAGE", "HELD UP")]
    columns += [Column("IN ALL", "right"), Column("OF DEEPSPEED", "right")]
    deepspeed = labelled["DeepSpeed"]["cost"]["total"]
    print_table(columns, ([label, *_cost_row(line["cost"], deepspeed)] for label, line in labelled.items()))
    print_line()
    print_paragraph(
        f"What the run costs, in a bucket that keeps {_kept(estimated) or 'all saves'}. HELD UP: the GPU hours "
        "spent waiting for saves."
    )


def _kept(estimated: Mapping[str, Any]) -> str:
    """Return which saves the rules keep; empty without rules."""
    rules = {"keep_last": "the newest {:,}", "keep_every": "every {:,} steps"}
    return " and ".join(text.format(estimated[rule]) for rule, text in rules.items() if estimated[rule] is not None)


def _cost_row(cost: Mapping[str, float], deepspeed: float) -> list[str]:
    costs = [f"${cost[what]:,.2f}" for what in ("storage", "held_up", "total")]
    return [*costs, f"{cost['total'] / deepspeed:.0%}" if deepspeed else "-"]


def _label(line: Mapping[str, Any], precision: str) -> str:
    by = " ".join(filter(None, (line["saved_by"], line["policy"])))
    return by if line["policy"] is None or precision == "exact" else f"{by} in {precision}"


def _row(label: str, line: Mapping[str, Any], full_bytes: int) -> list[str]:
    history = "no end" if line["history_seconds"] is None else _time(line["history_seconds"])
    return [
        label,
        size(line["average_bytes"]),
        size(line["largest_bytes"]),
        f"{line['average_bytes'] / full_bytes:.0%}",
        size(line["run_bytes"]),
        _time(line["save_seconds"]),
        history if line["history_saves"] != 0 else "no save",
        size(line["held_bytes"]),
    ]


def _assumed_figures(estimated: Mapping[str, Any]) -> Iterator[str]:
    """Yield the assumed figures, each with the option that sets it."""
    texts = {
        "--world-size": counted(estimated["world_size"], "rank"),
        "--steps": counted(estimated["steps"], "step"),
        "--save-every": f"a save every {counted(estimated['every'], 'step')}",
        "--step-seconds": f"a step takes {_time(estimated['interval_seconds'] / estimated['every'])}",
        "--bandwidth": f"all ranks together write {size(round(estimated['bytes_per_second']))}/s",
        "--copy-rate": f"a rank copies {size(round(estimated['copy_bytes_per_second']))}/s",
        "--disk": f"{size(estimated['disk_bytes'])} of disk",
    }
    if estimated["prices"] is None:
        del texts["--copy-rate"]
    assumed = [f"{text} ({name})" for name, text in texts.items() if name in estimated["assumed"]]
    if assumed:
        yield "; ".join(assumed)


def _time(seconds: float) -> str:
    """
    Return *seconds* for people.

    >>> _time(0.0123), _time(90), _time(2 * 86400), _time(1e9)
    ('12.3 ms', '1.5 min', '2.0 days', '31.7 years')
    >>> _time(0), _time(1e11)
    ('under 0.1 ms', 'over 100 years')
    """
    if seconds < 1e-4:
        return "under 0.1 ms"
    if seconds > 100 * 365.25 * _DAY:
        return "over 100 years"
    length, unit = next((scale for scale in _TIMES if seconds >= scale[0]), _TIMES[-1])
    return f"{seconds / length:,.1f} {unit}"


def _number(count: int) -> str:
    """
    Return *count* in a form that is easy to read.

    >>> _number(8_030_261_248), _number(6_240), _number(12)
    ('8.03 billion', '6,240', '12')
    """
    power, word = next((scale for scale in _NUMBERS if count >= scale[0]), (0, ""))
    return f"{count / power:,.2f} {word}" if word else f"{count:,}"
