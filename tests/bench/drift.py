"""
What drift saves, and what training loses by it: real ZeRO-3 on two CPU ranks, resumed from every policy's store.

The demo's own training, learning rate included, is saved under each policy into a store of its own. The run fails
just before its next save is due. From every store it is resumed at the newest step that is there, as a mixture
of layers of different ages, and trained on. It is compared with the run that never stopped, as many steps after its
own last save: by evaluation of text that is never trained on, the same in all. That is done twice: 20 steps after the
resume, and 20 beyond the step of the failure, up to which work is done again.
"""

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.bench.drift_job import HIDDEN, LAYERS, Course, Result
from tests.bench.published import DEEPSPEED_BYTES, TRAINER_BYTES
from tests.bench.ranked import RANKS, result_of


def run(folder: Path, *, seeds: int, saves: int, every: int) -> None:
    """Run the job with every seed and print a table of each."""
    print(
        f"{RANKS} CPU ranks; the demo's training with {LAYERS} blocks of width {HIDDEN}; a first save and {saves} "
        f"after it, one every {every} steps",
        flush=True,
    )
    for seed in range(seeds):
        found = result_of("tests.bench.drift_job", folder / f"seed{seed}", seed=seed, saves=saves, every=every)
        courses = {
            name: Course(**course | {"losses": _by_number(course["losses"])})
            for name, course in found["courses"].items()
        }
        result = Result(**found | {"losses": _by_number(found["losses"]), "courses": courses})
        print("\n".join(["", *_table(result)]), flush=True)


def _by_number(losses: Mapping[str, float]) -> dict[int, float]:
    return {int(steps): loss for steps, loss in losses.items()}


def _table(result: Result) -> Iterator[str]:
    _, further, beyond = sorted(result.losses)
    yield (
        f"seed {result.seed}: {result.parameters / 1e6:.2f} million parameters; last save at step {result.last}, "
        f"failure after step {result.failure}; the uninterrupted run's loss, {further} and {beyond} steps after that "
        f"save: {result.losses[further]:.4f}, {result.losses[beyond]:.4f}"
    )
    yield (
        f"  {'':<18}{'a save':>9}{'x 12 B':>8}{'x 14 B':>8}{'with 1st':>9}{'largest':>9}{'base':>6}{'oldest':>8}"
        f"{'mean':>7}{'loss at once':>14}{f'+{further}':>9}{f'+{beyond}':>9}"
    )
    for name, course in result.courses.items():
        ages = [result.failure - step for step in course.layers.values()]
        yield (
            f"  {name:<18}{_sizes(result, course.bytes)}{course.base:>6}{max(ages):>8}{statistics.mean(ages):>7.0f}"
            + "".join(
                f"{course.losses[steps] / result.losses[steps] - 1:>+{width}.2%}"
                for steps, width in zip(sorted(result.losses), (14, 9, 9), strict=True)
            )
        )


def _sizes(result: Result, sizes: list[int]) -> str:
    """Say how many times fewer bytes were saved than by 12 or 14 a parameter at every moment."""
    later = sizes[1:]
    if not later:
        return " " * 43
    full = DEEPSPEED_BYTES * result.parameters
    return (
        f"{sum(later) / result.saves / 1e6:>6.2f} MB{full * result.saves / sum(later):>7.1f}x"
        f"{TRAINER_BYTES * result.parameters * result.saves / sum(later):>7.1f}x"
        f"{full * (result.saves + 1) / sum(sizes):>8.1f}x{max(later) / sum(later):>9.1%}"
    )
