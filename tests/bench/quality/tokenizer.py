"""A byte-pair tokenizer of the experiment's own texts: small, so that most of the model is in its blocks."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = 0
"""The token that ends a text."""


def trained(texts: Iterable[str], *, vocabulary: int) -> "Tokenizer":
    """Return a tokenizer of *vocabulary* tokens, the 256 bytes among them, so that it can spell anything."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def load(path: Path) -> "Tokenizer":
    """Return the tokenizer that was saved at *path*."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
