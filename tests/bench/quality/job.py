"""
One job: a trunk that is saved under every arm, failures, and a resume of every arm after each of them.

    python -m torch.distributed.run --nproc-per-node 1 -m tests.bench.quality.job --task documentation --seed 0 …

DeepSpeed starts once. The engine that trained the trunk is filled from each arm's store in turn: the control, saved in
full, ends with the trunk's masters to the last bit, which every job shows again.

What is saved rarely or seldom resumes at an earlier step and then repeats the trunk, so it needs no training: it loses
work instead of quality. The trunk's own model stands for it, at the step that it reaches while the others reach the
last.
"""

import argparse
import hashlib
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

import layerstore
from layerstore.model import CommitRecord
from layerstore.policy import Policy
from tests.bench.quality import means, trial
from tests.bench.quality.arms import EXACT_EVERY, FULL, RARE, SELDOM, Arm, arms
from tests.bench.quality.coded import Way, bytes_of, factored
from tests.bench.quality.data import digest_of, task_data
from tests.bench.quality.settings import SIZES, TASKS, Settings, TaskName
from tests.bench.quality.training import BASE, DATA, Trainer
from tests.bench.ranked import begin, leave
from tests.bench.rows import Row, Rows
from tests.ranks.launch import tell
from tests.ranks.llama import tag_of

Saving = tuple[layerstore.Store, Policy | str, Arm]
"""A store, what is saved into it, and how finely."""

_STRIDE = 1_000_003
"""So far apart are the seeds of the batches of two jobs: more than either has steps."""


def main() -> None:
    """Train, save, fail and resume as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--history", action="store_true", help="only make the control's history")
    options = parser.parse_args()
    begin()
    job = Job(SIZES[options.size], task=options.task, seed=options.seed, work=options.work, rows=Rows(options.rows))
    if options.history:
        job.make_history()
    else:
        job.run()
    leave()


def lacking(settings: Settings, rows: Rows, of: Row) -> list[tuple[int, Arm]]:
    """Return the failures and arms of the job *of* that *rows* have no resume of."""
    done = {(row["failure"], row["arm"]) for row in rows.find(kind="resume", **of)}
    return [
        (failure, arm)
        for arm in arms(settings)
        for failure in arm.failures(settings)
        if (failure, arm.name) not in done
    ]


class Job:
    """A task and a seed, and what is known of them so far."""

    def __init__(self, settings: Settings, *, task: TaskName, seed: int, work: Path, rows: Rows) -> None:
        self._settings, self._seed, self._rows = settings, seed, rows
        self._work, self._folder = work, work / f"{task}-{seed}"
        self._task = task
        self._of = {"made_by": settings.digest(digest_of(work / DATA)), "task": task, "seed": seed}
        self._arms = arms(settings)

    def run(self) -> None:
        """Do what the rows lack; the stores are removed when nothing is, but for a history for the trial."""
        missing, counts = lacking(self._settings, self._rows, self._of), means.lacking(self._rows, self._of)
        if missing or counts:
            self._trainer = self._begun()
            self._do(missing, counts)
        if self._seed == 0:
            self._keep_history()
        shutil.rmtree(self._folder, ignore_errors=True)

    def make_history(self) -> None:
        """Train without an interruption, save everything, and keep that for the trials."""
        self._trainer = self._begun()
        self._train_trunk({FULL})
        self._keep_history()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _keep_history(self) -> None:
        if (self._folder / FULL).exists():
            kept = self._work / trial.history_name(self._task)
            shutil.rmtree(kept, ignore_errors=True)
            (self._folder / FULL).rename(kept)

    def _do(self, missing: list[tuple[int, Arm]], counts: list[int]) -> None:
        wanted = {FULL, *(arm.store for _, arm in missing if not arm.resumes_often)}
        if not self._rows.find(kind="trunk", **self._of) or not all((self._folder / of).exists() for of in wanted):
            self._train_trunk(wanted)
        for failure, arm in missing:
            if arm.resumes_often:
                self._resume_often(arm)
            else:
                self._resume(arm, failure)
        found = means.run(self._settings, self._task, store=self._folder / FULL, counts=counts, work=self._work)
        for row in found:
            self._rows.add({**self._of, **row})

    def _begun(self) -> Trainer:
        settings = self._settings
        return Trainer(
            settings,
            task_data(self._work / DATA, self._task, settings),
            rate=settings.task_rate,
            steps=settings.steps,
            warmup=settings.warmup,
            weights=self._work / BASE,
        )

    # -- the trunk -----------------------------------------------------------------------------------------------

    def _train_trunk(self, wanted: Collection[str]) -> None:
        """Train without an interruption, save into the *wanted* stores, and evaluate where a resumed job will be."""
        settings, started = self._settings, time.monotonic()
        shutil.rmtree(self._folder, ignore_errors=True)
        stores = {arm.name: self._store(arm) for arm in self._arms if arm.policy is not None and arm.store in wanted}
        checks = {step for failure in settings.failures for step in settings.checks(failure)}
        rarely = {settings.equal_work(failure): failure for failure in settings.failures}
        seldom = settings.steps - settings.seldom_lost
        losses, trained, saves = dict[int, float](), [], list[Row]()
        saving = evaluating = 0.0
        while self._trainer.step_number < settings.steps:
            trained.append(round(self._step(), 4))
            step = self._trainer.step_number
            begun = time.monotonic()
            if step % settings.save_every == 0:
                saves += self._save(stores)
            saved = time.monotonic()
            if step in checks:
                losses[step] = self._trainer.loss()
            if step in rarely:
                self._add_earlier(RARE, rarely[step], base=settings.rare_base(rarely[step]))
            if step == seldom:
                for failure in settings.failures:
                    self._add_earlier(SELDOM, failure, base=settings.resumed_at(failure) - settings.seldom_lost)
            saving, evaluating = saving + saved - begun, evaluating + time.monotonic() - saved
        for store, _, _ in stores.values():
            store.close()
        took = time.monotonic() - started
        self._rows.add(
            *saves,
            {
                "kind": "trunk",
                **self._of,
                "parameters": self._trainer.parameters,
                "trained_losses": trained,
                **self._end(losses),
                "seconds": {
                    "steps": round(took - saving - evaluating, 1),
                    "saves": round(saving, 1),
                    "evaluations": round(evaluating, 1),
                },
            },
        )
        self._tell("trunk", losses[settings.steps], took)

    def _store(self, arm: Arm) -> Saving:
        policy = "full" if arm.policy is None else arm.policy(self._trainer.parameters)
        path = self._folder / arm.store
        path.parent.mkdir(parents=True, exist_ok=True)
        return layerstore.init(path), policy, arm

    def _save(self, stores: Mapping[str, Saving], *, keeps: bool = True) -> list[Row]:
        """Write a checkpoint and ingest it into each store; return a row for each, and for what they stand for."""
        step, folder = self._trainer.step_number, self._folder / "checkpoint"
        self._trainer.engine.save_checkpoint(str(folder), tag=tag_of(step))
        rows = list[Row]()
        for name, (store, policy, arm) in stores.items():
            done = store.ingest(
                folder,
                run=trial.RUN,
                policy=policy,
                precision=arm.precision,
                exact_every=EXACT_EVERY,
                trust_store=True,
            )
            row = {
                "kind": "save",
                **self._of,
                "arm": name,
                "step": step,
                "bytes": done.bytes_new,
                "is_exact": _is_exact(store, done),
                "layers": list(done.layers_saved),
                "movements": movements(store),
            }
            rows += [row, *self._counted(arm, row)]
        if keeps and step in self._averaged():
            folder.rename(self._folder / f"kept-{step}")
        else:
            shutil.rmtree(folder)
        return rows

    def _counted(self, parent: Arm, saved: Row) -> Iterator[Row]:
        """Yield what the ways would have saved that are made of the *parent* arm's saves; exact ones are the same."""
        shapes = [tuple(parameter.ds_shape) for parameter in self._trainer.engine.module.parameters()]
        for arm in self._arms:
            if arm.is_made_at_resume and arm.store == parent.store and arm.way and parent.way:
                fewer = 0 if saved["is_exact"] else bytes_of(parent.way, shapes) - bytes_of(arm.way, shapes)
                yield {**saved, "arm": arm.name, "bytes": saved["bytes"] - fewer, "is_counted": True}

    def _averaged(self) -> set[int]:
        settings = self._settings
        bases = (settings.resumed_at(failure) for failure in settings.failures)
        return {base - number * settings.save_every for base in bases for number in range(settings.averaged)}

    def _add_earlier(self, name: str, failure: int, *, base: int) -> None:
        """Note the trunk's model as that of an arm which has lost the steps that are still to come."""
        self._rows.add(
            {
                "kind": "resume",
                **self._of,
                "arm": name,
                "failure": failure,
                "base": base,
                "losses": {},
                "loss": self._trainer.loss(),
                "accuracy": self._trainer.accuracy(),
                "step": self._trainer.step_number,
            }
        )

    # -- the resumes ---------------------------------------------------------------------------------------------

    def _resume(self, arm: Arm, failure: int) -> None:
        """Fill the engine from what *arm* has saved before *failure*, train to the end, and note what came out."""
        settings, trainer, started = self._settings, self._trainer, time.monotonic()
        base = settings.resumed_at(failure)
        resumed = self._fill(arm.store, base)
        if arm.is_averaged:
            self._load_average(base)
        if arm.is_made_at_resume and arm.way is not None:
            self._remake(arm.way, base)
        filled = time.monotonic() - started
        losses, checks = dict[int, float](), settings.checks(failure)
        while True:
            if trainer.step_number in checks:
                losses[trainer.step_number] = trainer.loss()
            if trainer.step_number == settings.steps:
                break
            self._step(other=arm.reads_other_batches)
        took = time.monotonic() - started
        row = {"kind": "resume", **self._of, "arm": arm.name, "failure": failure, "base": base}
        ages = {layer: base - step for layer, step in resumed.layers.items()}
        row |= {"ages": ages, **self._end(losses), "step": settings.steps}
        self._rows.add(row | {"seconds": {"filling": round(filled, 1), "all": round(took, 1)}})
        self._tell(f"{arm.name}, failed after {failure}", losses[settings.steps], took)

    def _resume_often(self, arm: Arm) -> None:
        """Train from the first save to the end, saved in the arm's own precision and resumed from it on the way."""
        settings, trainer, started = self._settings, self._trainer, time.monotonic()
        shutil.rmtree(self._folder / arm.store, ignore_errors=True)
        self._fill(FULL, settings.save_every)
        saving, saves = self._store(arm), list[Row]()
        while True:
            if trainer.step_number % settings.save_every == 0:
                saves += self._save({arm.name: saving}, keeps=False)
            if trainer.step_number % settings.resume_every == 0:
                assert not saves[-1]["is_exact"]
                self._fill(arm.store, trainer.step_number)
            if trainer.step_number == settings.steps:
                break
            self._step()
        saving[0].close()
        shutil.rmtree(self._folder / arm.store)
        took, losses = time.monotonic() - started, {settings.steps: trainer.loss()}
        row = {"kind": "resume", **self._of, "arm": arm.name, "failure": settings.steps, "base": settings.steps}
        self._rows.add(*saves, {**row, **self._end(losses), "step": settings.steps, "seconds": {"all": round(took, 1)}})
        self._tell(arm.name, losses[settings.steps], took)

    def _fill(self, store: str, step: int) -> layerstore.Resumed:
        found = layerstore.resume(self._trainer.engine, self._folder / store, run=trial.RUN, step=step, must_exist=True)
        assert found is not None
        return found

    def _remake(self, way: Way, base: int) -> None:
        """Make of the engine's state what a *way* leaves that layerstore does not offer."""
        import torch
        from deepspeed.utils import safe_set_full_optimizer_state

        engine = self._trainer.engine
        if way.rounds_masters:
            for flat in self._trainer.masters():
                flat.data.copy_(flat.data.bfloat16())
        if way.drops_moments:
            for state in engine.optimizer.optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq", "step"):
                    state[name].zero_()
        if way.factors:
            with layerstore.open(self._folder / FULL) as store:
                squares = store.compose(f"{trial.RUN}@{base}").tensors("optimizer", state="exp_avg_sq", verify=False)
                for name, parameter in engine.module.named_parameters():
                    second = torch.from_numpy(factored(np.asarray(squares[name])).copy())
                    safe_set_full_optimizer_state(parameter, second, "exp_avg_sq")

    def _load_average(self, base: int) -> None:
        """Load the checkpoint at *base* with the mean masters of the last saves, through DeepSpeed's own loader."""
        import torch

        settings = self._settings
        target = self._folder / "average"
        shutil.copytree(self._folder / f"kept-{base}", target)
        [path] = target.rglob("*optim_states.pt")
        steps = [base - number * settings.save_every for number in range(settings.averaged)]
        found = [_states(self._folder / f"kept-{step}") for step in steps]
        flats = zip(*(each["optimizer_state_dict"]["fp32_flat_groups"] for each in found), strict=True)
        found[0]["optimizer_state_dict"]["fp32_flat_groups"] = [torch.stack(same).mean(0) for same in flats]
        torch.save(found[0], path)
        self._trainer.engine.load_checkpoint(str(target))
        shutil.rmtree(target)

    # -- both ----------------------------------------------------------------------------------------------------

    def _step(self, *, other: bool = False) -> float:
        """Make one step; which batch it reads, or which *other* one, depends on seed and step alone."""
        return self._trainer.step(seed=(2 * self._seed + other) * _STRIDE + self._trainer.step_number)

    def _tell(self, what: str, loss: float, seconds: float) -> None:
        tell("done", what=f"{self._task}, seed {self._seed}: {what}", loss=loss, seconds=seconds)

    def _end(self, losses: dict[int, float]) -> Row:
        """Return what is known of the model now: losses by step, the share of right answers, and its masters' hash."""
        masters = hashlib.sha256()
        for flat in self._trainer.masters():
            masters.update(flat.detach().numpy().tobytes())
        return {
            "losses": losses,
            "loss": losses[self._settings.steps],
            "accuracy": self._trainer.accuracy(),
            "masters": masters.hexdigest()[:16],
        }


def movements(store: layerstore.Store) -> dict[str, float]:
    """Return how far each layer had moved at the newest save of *store*, since it was saved; nothing if unmeasured."""
    decisions = _newest(store).policy.decisions
    movements = cast("dict[str, float]", decisions.get("movements", {}))
    return {layer: float(f"{movement:.3g}") for layer, movement in movements.items()}


def _is_exact(store: layerstore.Store, done: layerstore.Ingested) -> bool:
    """Return whether all that the newest save wrote is bit for bit."""
    return not any(entry.compact for entry in _newest(store).layers if entry.layer in done.layers_saved)


def _newest(store: layerstore.Store) -> CommitRecord:
    newest = store.repo.catalog.view(trial.RUN).visible[-1]
    return store.repo.catalog.commit(newest.name).record


def _states(folder: Path) -> dict[str, Any]:
    """Return the optimizer's states that DeepSpeed has saved in *folder*."""
    import torch

    [path] = folder.rglob("*optim_states.pt")
    states: dict[str, Any] = torch.load(path, weights_only=False)
    return states


if __name__ == "__main__":
    main()
