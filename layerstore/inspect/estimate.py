"""
Estimate: the space and time that saving a model would take under each policy, before any training.

The policies decide, save by save, as they would in training, and objects are laid out as they would be written.
Anything that cannot be known in advance is assumed, and listed as an assumption.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from layerstore.coding import CODINGS
from layerstore.dtypes import by_code
from layerstore.errors import InvalidInput
from layerstore.framing import canonical_order, coded_frame
from layerstore.inspect.cost import COLLECTED_SECONDS, GB, MONTH_SECONDS, SaveGroup, Stored, Training, stored
from layerstore.inspect.model_shapes import MADE_UP_VOCABULARY, Model
from layerstore.json_fields import json_fields
from layerstore.limits import GC_GRACE_SECONDS, REMOTE_GRACE_SECONDS
from layerstore.model import Kind, StoredTensor
from layerstore.policy import Policy, Save, anchored, chosen_policy, due_layers
from layerstore.precision import PRECISIONS, Keyframes, Precision, keyframes
from layerstore.slices import slice_length, valid_elements

DEEPSPEED, TRAINER, LAYERSTORE = "DeepSpeed", "HF Trainer", "layerstore"

_SAVES_LOOKED_AT = 2_000
"""Enough to see two cycles of a policy; filter's longest cycle has one save per rotating block."""


def estimate_saves(model: Model, training: Training, policies: Mapping[str, Policy] | Sequence[str]) -> dict[str, Any]:
    """
    Return the estimate for full checkpoints of *model*, and for saves under each of *policies*.

    *policies* may also be a list of names, with or without settings: ``filter:every=10``. The result has the fields of
    ``layerstore estimate --json``.

    Raises:
        InvalidInput: A policy uses the movement of layers, and *training* does not state it.
    """
    if not isinstance(policies, Mapping):
        policies = {name: chosen_policy(name) for name in policies}
    measuring = [name for name, policy in policies.items() if getattr(policy, "measures", False)]
    if measuring and training.movement is None:
        raise InvalidInput(
            f"what {measuring[0]} saves cannot be predicted: it depends on how far each layer moves",
            hint="--movement X, the relative L2 that `layerstore diff A B --stat` shows for two neighbouring saves",
        )
    parts = list(_parts(model, training))
    trained = [count for _, elements, _ in parts for count in elements.values()]
    weights = by_code(training.dtype).bytes
    shards = _padded(trained, training) * _sharded_bytes(model)
    frozen = _padded([count for _, _, elements in parts for count in elements.values()], training) * weights
    gathered = sum(trained) * weights  # no frozen parameters, as with PEFT
    sizes = trained_bytes(model, training)
    compact = trained_bytes(model, training, precision=PRECISIONS[training.precision])
    version_bytes = {
        **{(layer, True): size_bytes for layer, size_bytes in sizes.items()},
        **{(layer, False): size_bytes for layer, size_bytes in compact.items()},
    }
    # Frozen weights never change, so the first save writes them and all later ones inherit them.
    once = sum(_bytes(_objects(elements, {"": ""}, training.dtype, training.world_size)) for _, _, elements in parts)
    first = sum(sizes.values()) + once
    full = shards + frozen
    lingers_seconds = GC_GRACE_SECONDS if training.prices is None else REMOTE_GRACE_SECONDS + COLLECTED_SECONDS
    lines = [_full_line(TRAINER, shards + gathered, training), _full_line(DEEPSPEED, full, training)]
    for name, policy in policies.items():
        due = due_sets(policy, tuple(sizes), movement=training.movement if name in measuring else None, sizes=sizes)
        kept = kept_exactly(due, keyframes(training.precision, training.exact_every))
        cycle = cycle_of(kept)
        # If the simulated saves show no cycle, all of them together count as the cycle.
        later = [sum(version_bytes[version] for version in save) for save in kept[:cycle]]
        line = _line(LAYERSTORE, name, first, later, training, cycle=cycle)
        groups = [SaveGroup(size_bytes=once), *_groups(version_bytes, kept[:cycle])]
        use = stored(groups, training, lingers_seconds=lingers_seconds)
        lines.append(_with_cost(line, use, training, held_seconds=_held_seconds(line, training)))
    # The seconds that one of DeepSpeed's saves holds training up: until it is written.
    seconds = full / training.bytes_per_second
    return {
        "model": json_fields(model) | {"trained": sum(trained), "layers": len(parts)},
        **json_fields(training),
        "held_share": seconds / (seconds + training.interval_seconds),
        "lines": lines,
        "assumptions": [
            *_assumptions(model, training, is_measured=bool(measuring)),
            *(() if training.prices is None else _cost_assumptions(training)),
        ],
    }


# -- bytes ---------------------------------------------------------------------------------------------------------


def _parts(model: Model, training: Training) -> Iterator[tuple[str, dict[str, int], dict[str, int]]]:
    """Yield each layer with its trained and frozen elements, by parameter."""
    for layer, elements in model.layers.items():
        trained = {
            name: 0 if name in model.frozen else round(count * training.trainable) for name, count in elements.items()
        }
        yield layer, trained, {name: count - trained[name] for name, count in elements.items()}


def trained_bytes(model: Model, training: Training, *, precision: Precision = PRECISIONS["exact"]) -> dict[str, int]:
    """Return the bytes of each layer's masters and moments on all ranks; each save of the layer writes them anew."""
    return {layer: _bytes(objects) for layer, objects in trained_objects(model, training, precision=precision)}


def trained_objects(
    model: Model, training: Training, *, precision: Precision = PRECISIONS["exact"]
) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield each layer with the objects that a save of it writes, as pairs: how many objects, and the size of each."""
    masters = {"": precision.coding(Kind.MASTER, "", "F32")}
    moments = {state: precision.coding(Kind.OPTIMIZER, state, "F32") for state in model.states}
    ranks = training.world_size
    for layer, trained, _ in _parts(model, training):
        yield layer, [*_objects(trained, masters, "F32", ranks), *_objects(trained, moments, "F32", ranks)]


def _sharded_bytes(model: Model) -> int:
    """Return the bytes of a trained element in DeepSpeed's shards: its master and optimizer states, in float32."""
    return 4 * (1 + len(model.states))


def _padded(counts: Sequence[int], training: Training) -> int:
    """Return the elements, padding included, that DeepSpeed's shards have for parameters of *counts* elements."""
    return sum(training.world_size * slice_length(count, training.world_size) for count in counts)


def _bytes(objects: Iterable[tuple[int, int]]) -> int:
    return sum(count * size_bytes for count, size_bytes in objects)


def _objects(
    elements: Mapping[str, int], states: Mapping[str, str], dtype: str, world_size: int
) -> Iterator[tuple[int, int]]:
    """
    Yield a layer's objects of one kind as pairs: how many objects, and the size of each.

    There is an object for each rank that has a slice. *states* maps each state to its coding.
    """
    # Ranks with equal slices have equal objects, so sizes change only at these edges.
    edges = {0, world_size}
    for count in filter(None, elements.values()):
        full = count // slice_length(count, world_size)
        edges |= {full, min(full + 1, world_size)}
    for rank, end in pairwise(sorted(edges)):
        tensors = [
            StoredTensor(name=name, state=state, dtype=dtype, elements=valid, crc32=0, coding=coding)
            for name, count in elements.items()
            for state, coding in states.items()
            if (valid := valid_elements(count, world_size, rank))
        ]
        if tensors:
            refers = any(tensor.coding and CODINGS[tensor.coding].needs_reference for tensor in tensors)
            # Any id will do: only its length counts in the header.
            framed, _ = coded_frame(canonical_order(tensors), reference="0" * 32 if refers else "")
            yield end - rank, framed.size_bytes


# -- saves ---------------------------------------------------------------------------------------------------------


def due_sets(
    policy: Policy,
    layers: tuple[str, ...],
    *,
    movement: float | None = None,
    sizes: Mapping[str, int] | None = None,
    saves: int = _SAVES_LOOKED_AT,
) -> list[frozenset[str]]:
    """
    Return which layers are due under *policy* at each of *saves* saves after a full save.

    For policies that measure, each layer has moved by *movement* times its age.
    """
    last, due_by_save = dict.fromkeys(layers, 0), []
    for number in range(1, saves + 1):
        ages = {layer: number - last[layer] for layer in layers}
        movements = {} if movement is None else {layer: age * movement for layer, age in ages.items()}
        save = Save(number=number, layers=layers, ages=ages, movements=movements, sizes=sizes or {})
        # Numbered as `ingest` numbers saves: the full save before these is number 0.
        due = due_layers(anchored(policy, 0), save)
        last |= dict.fromkeys(due, number)
        due_by_save.append(due)
    return due_by_save


def kept_exactly(due: Iterable[frozenset[str]], keyframes: Keyframes) -> list[frozenset[tuple[str, bool]]]:
    """
    Return, for each save after a full, exact save, which layers it stores, and whether exactly.

    >>> every_other = Keyframes(precision=PRECISIONS["delta8"], every=2)
    >>> kept_exactly([frozenset("a")] * 3, every_other)
    [frozenset({('a', False)}), frozenset({('a', True)}), frozenset({('a', False)})]
    """
    compact: dict[str, int] = {}
    saves_kept = []
    for layers in due:
        save = frozenset((layer, keyframes.is_exact(compact.get(layer, 0))) for layer in layers)
        compact |= {layer: 0 if is_exact else compact.get(layer, 0) + 1 for layer, is_exact in save}
        saves_kept.append(save)
    return saves_kept


def cycle_of(items: Sequence[object]) -> int | None:
    """
    Return the length of the cycle of *items*; None unless two whole rounds show it.

    >>> cycle_of("abcabcab"), cycle_of("abcd")
    (3, None)
    """
    lengths = range(1, len(items) // 2 + 1)
    return next((length for length in lengths if items[length:] == items[:-length]), None)


def _line(
    saved_by: str, policy: str | None, first: int, later: list[int], training: Training, *, cycle: int | None
) -> dict[str, Any]:
    """Return the line of a run that saves *first* bytes, then those of *later* again and again."""
    # The first save is full, and not part of the cycle.
    rounds, rest = divmod(training.saves - 1, len(later))
    average = sum(later) / len(later)
    held = _saves_held(training.disk_bytes, first, later)
    return {
        "saved_by": saved_by,
        "policy": policy,
        "first_bytes": first,
        "average_bytes": round(average),
        "largest_bytes": max(later),
        "cycle_saves": cycle,
        "run_bytes": first + rounds * sum(later) + sum(later[:rest]),
        "save_seconds": average / training.bytes_per_second,
        "history_saves": held,
        "history_seconds": None if held is None else held * training.interval_seconds,
    }


def _full_line(saved_by: str, full: int, training: Training) -> dict[str, Any]:
    """Return the line of a run whose saves have *full* bytes and hold training up while they are written."""
    line = _line(saved_by, None, full, [full], training, cycle=1)
    # Old checkpoints are removed at once.
    use = stored([SaveGroup(size_bytes=full, due=(0,))], training, lingers_seconds=0.0)
    return _with_cost(line, use, training, held_seconds=training.saves * line["save_seconds"])


def _with_cost(line: dict[str, Any], use: Stored, training: Training, *, held_seconds: float) -> dict[str, Any]:
    line |= {"held_seconds": held_seconds, "held_bytes": use.end_bytes, "cost": None}
    if training.prices is not None:
        cost = {
            "storage": use.byte_seconds / GB / MONTH_SECONDS * training.prices.gb_month,
            "held_up": held_seconds * training.world_size / 3600 * training.prices.gpu_hour,
        }
        line["cost"] = cost | {"total": sum(cost.values())}
    return line


def _held_seconds(line: Mapping[str, Any], training: Training) -> float:
    """Return how long layerstore holds a run up: while it copies, and when saves come faster than it can write."""
    # Ranks copy at the same time, each its own share.
    copied_seconds: float = line["run_bytes"] / training.world_size / training.copy_bytes_per_second
    late_seconds: float = max(0.0, line["save_seconds"] - training.interval_seconds)
    return copied_seconds + training.saves * late_seconds


def _groups(
    version_bytes: Mapping[tuple[str, bool], int], kept: Sequence[frozenset[tuple[str, bool]]]
) -> Iterator[SaveGroup]:
    """Yield a group for each set of versions that are always saved together, all exact or all compact."""
    together: dict[tuple[bool, tuple[int, ...]], list[tuple[str, bool]]] = {}
    for version in version_bytes:
        at = tuple(at for at, save in enumerate(kept) if version in save)
        together.setdefault((version[1], at), []).append(version)
    for (is_exact, at), versions in together.items():
        # A compact version that is never due is in no save; an exact one is always in the first save.
        if is_exact or at:
            size_bytes = sum(version_bytes[version] for version in versions)
            yield SaveGroup(size_bytes=size_bytes, due=at, cycle=len(kept), is_in_first=is_exact)


def _saves_held(disk_bytes: int, first: int, later: list[int]) -> int | None:
    """Return how many saves fit on the disk; None if all do."""
    if disk_bytes < first:
        return 0
    # Later saves add nothing, so the disk never fills.
    if not sum(later):
        return None
    rounds, rest = divmod(disk_bytes - first, sum(later))
    return 1 + rounds * len(later) + sum(so_far <= rest for so_far in accumulate(later))


def _ordinal(number: int) -> str:
    """
    Return *number* as an ordinal.

    >>> [_ordinal(number) for number in (1, 2, 3, 10, 12, 23)]
    ['1st', '2nd', '3rd', '10th', '12th', '23rd']
    """
    is_teen = number // 10 % 10 == 1
    return f"{number}{'th' if is_teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def _assumptions(model: Model, training: Training, *, is_measured: bool) -> Iterator[str]:
    weights = by_code(training.dtype)
    per_element = f"{_sharded_bytes(model)} bytes per trained parameter"
    if model.source == "params":
        yield (
            f"the model is made up: equal blocks, an embedding and a head of {MADE_UP_VOCABULARY:,} tokens each; "
            "a config.json gives its real layers"
        )
    if model.source in {"checkpoint", "commit"}:
        ranks = "ranks, " if training.world_size == model.world_size else ""
        yield f"{ranks}layers, frozen parameters and the optimizer are those of the {model.source}, {per_element}"
    else:
        yield f"the optimizer is Adam: a master and two moments, {per_element}"
    yield (
        f"{TRAINER} also gathers the weights, {weights.bytes} bytes a parameter ({weights.torch_name}); "
        f"{LAYERSTORE} does not store them where they are just the rounded masters"
    )
    if training.trainable != 1:
        yield f"{float(training.trainable):.3%} of every layer is trained"
    if training.trainable != 1 or model.frozen:
        yield (
            f"frozen weights are stored once by {LAYERSTORE}, at each save by {DEEPSPEED}, and not by {TRAINER}, as "
            "with PEFT"
        )
    yield "the first save of a run is full; nothing fails, and no byte is in the store already"
    if training.precision == "exact" and model.precision in PRECISIONS and model.precision != "exact":
        yield f"every save is exact; {model.name} is kept in {model.precision} (--precision {model.precision})"
    if training.precision != "exact":
        often = "only the first" if training.exact_every is None else f"every {_ordinal(training.exact_every)}"
        yield f"of each layer, {often} version is exact, the others are in {training.precision}"
    yield (
        f"every object of {LAYERSTORE} begins with a header of 4 kB or more, which is a lot for a tiny model; the "
        "ranks' own states, records and small files are not counted: kilobytes per save"
    )
    if is_measured:
        yield (
            f"every layer moves by {training.movement} of its length from one save to the next, always in one "
            "direction: real layers differ, and move less over many saves"
        )


def _cost_assumptions(training: Training) -> Iterator[str]:
    yield (
        "every save goes to a bucket as it is made; storage is paid for until the run ends; requests and traffic "
        "are not counted"
    )
    if training.has_rules:
        yield (
            f"{LAYERSTORE} collects the bucket every {COLLECTED_SECONDS / 3600:.0f} h, and what no save needs "
            f"stays there for {REMOTE_GRACE_SECONDS / 3600:.0f} h longer; {DEEPSPEED}'s old saves are removed at once"
        )
    yield (
        f"GPUs are idle while {DEEPSPEED} and {TRAINER} write; with {LAYERSTORE}, while a rank copies what is due to "
        f"its host, at {training.copy_bytes_per_second / 1e9:g} GB/s with nothing else running, and when saves come "
        "faster than they can be written"
    )
