"""Which engine a Trainer's callback attaches to: a Trainer passes the bare model, and earlier engines may be alive."""

import gc
from typing import Any

import pytest
from torch import nn

from layerstore.errors import InvalidInput
from layerstore.live.deepspeed import engine_of
from layerstore.live.deepspeed.engine import engine_with


class Wrapper:
    """Accelerate's wrapper around an optimizer."""

    def __init__(self, optimizer: object) -> None:
        """Wrap *optimizer*."""
        self.optimizer = optimizer


def engine(model: nn.Module, optimizer: object, checkpoint_engine: object = None) -> Any:
    """Return an engine of *model*, which knows nothing else."""
    from deepspeed import DeepSpeedEngine

    made: Any = object.__new__(type("Made", (DeepSpeedEngine,), {"__del__": lambda _: None}))
    vars(made).update(module=model, optimizer=optimizer, checkpoint_engine=checkpoint_engine)
    return made


def test_the_trainers_own_optimizer_tells_its_engine_from_earlier_ones() -> None:
    """Whichever order the garbage collector lists them in: `train` was called twice, and the old engine is alive."""
    model, optimizers = nn.Linear(1, 1), [object(), object(), object()]
    engines = [engine(model, optimizer) for optimizer in optimizers]

    for own, optimizer in zip(engines, optimizers, strict=True):
        for given in (optimizer, Wrapper(optimizer)):
            assert engine_of(model, given) is own
            gc.collect(0)  # moves the younger ones


@pytest.mark.fault(145)
def test_engines_that_cannot_be_told_apart_are_refused() -> None:
    """One is taken, whatever the optimizer; of two none is guessed, and the message says of what model they are."""
    model = nn.Linear(1, 1)
    first = engine(model, object())
    assert engine_of(model, object()) is first

    second = engine(model, object())
    with pytest.raises(InvalidInput, match="there are 2 DeepSpeed engines of this Linear") as caught:
        engine_of(model, object())

    assert "layerstore.attach" in str(caught.value.hint)
    assert engine_of(model, second.optimizer) is second


@pytest.mark.fault(145)
def test_a_model_without_an_engine_is_refused() -> None:
    """The hint says how a Trainer gets one."""
    with pytest.raises(InvalidInput, match="trains under neither DeepSpeed nor FSDP2"):
        engine_of(nn.Linear(1, 1), object())


def test_a_checkpoint_engine_of_two_engines_is_refused() -> None:
    """A load would fill one of them by chance."""
    shared = object()
    both = [engine(nn.Linear(1, 1), object(), shared) for _ in range(2)]

    with pytest.raises(InvalidInput, match="there are 2 DeepSpeed engines"):
        engine_with(shared)

    assert len(both) == 2
