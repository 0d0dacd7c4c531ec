"""What ranks do that train a module: save by attach, resume what others have saved, be killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

import layerstore
from layerstore import Keep, Store
from layerstore.dcp import StoreWriter
from layerstore.live.saver.snapshot import Copier
from tests.forked import tell
from tests.live.dcp.states import bits
from tests.live.module.models import (
    FORMS,
    Every,
    as_reader_loads,
    as_torch_loads,
    build,
    each_of,
    everything,
    mesh_of,
    optimizers_of,
    other,
    train,
)
from tests.live.tiny import Faults, attempt, done, hold

RUNS = [f"{form}{count}" for count, forms in FORMS.items() for form in forms]

SAVED_AT = 3
TRAINED_FOR = 5


def everywhere(options: Any) -> None:
    """Save in every form of so many ranks, and tell how training goes on from there."""
    count = dist.get_world_size()
    for form in FORMS[count]:
        run = f"{form}{count}"
        model, optimizers = build(form)
        train(model, optimizers, 0, SAVED_AT)
        state = everything(model, optimizers)
        save(state, checkpoint_id=Path(options["out"], run))
        save(state, storage_writer=StoreWriter(options["store"], run=f"w-{run}", step=SAVED_AT))
        with layerstore.attach(model, optimizers, options["store"], run=run) as saver:
            saver.save(SAVED_AT, client_state={"rank": dist.get_rank()})
            tell("losses", run=run, losses=train(model, optimizers, SAVED_AT, TRAINED_FOR))
    done()


def from_everywhere(options: Any) -> None:
    """
    Read and resume in each form what *options* name for it, and go on if the form is the same.

    The runs *also_read* of *options*, which should include them, are read in every form.
    """
    count = dist.get_world_size()
    for form, runs in options["runs"].items():
        like_model, like_optimizers = build(form, seed=1)
        train(like_model, like_optimizers, 0, 1)
        like = everything(like_model, like_optimizers)
        for run in options.get("also_read", runs):
            expected = as_torch_loads(Path(options["out"], run), like)
            for name in (run, f"w-{run}"):
                read = as_reader_loads(options["store"], name, like)
                tell("read", run=name, on=f"{form}{count}", other=other(read, expected))
                if run not in runs:
                    continue
                model, optimizers = build(form, seed=2)
                resumed = layerstore.resume(model, optimizers, options["store"], run=name)
                assert resumed is not None
                tell(
                    "resumed",
                    run=name,
                    on=f"{form}{count}",
                    other=other(everything(model, optimizers), expected),
                    keys=len(expected["model"]),
                    client_state=resumed.client_state,
                )
                if run == f"{form}{count}":
                    tell("losses", run=name, losses=train(model, optimizers, SAVED_AT, TRAINED_FOR))
    done()


def going_on(options: Any) -> None:
    """In each form of *options*, save while training goes on: all that may be wanted of a saver."""
    folder = Path(options["out"])
    for form in options["forms"]:
        for kind in ("adamw", "momentum"):
            run = f"{form}-{kind}"
            states, losses = _saved_while_training(options["store"], run, form, kind, policy="latest")
            for step, state in states.items():
                model, optimizers = build(form, seed=3, kind=kind)
                layerstore.resume(model, optimizers, options["store"], run=run, step=step)
                same = raw(model, optimizers) == state
                tell("same", run=run, step=step, same=same)
                if step == 1:
                    tell("losses", run=run, same=train(model, optimizers, 1, 4) == losses)
        for policy in ("parity", "filter", *(() if form == "tensor" else ("drift",))):
            run = f"{form}-{policy}"
            states, _ = _saved_while_training(options["store"], run, form, "adamw", policy=policy)
            model, optimizers = build(form, seed=3)
            found = layerstore.resume(model, optimizers, options["store"], run=run)
            assert found is not None
            weights = raw(model, optimizers)["model"]
            steps = {
                name: [step for step, state in states.items() if state["model"][name] == bits]
                for name, bits in weights.items()
            }
            tell("mixed", run=run, steps=steps, layers=found.layers)
        if form == "ddp":
            _buffers(options["store"])
        _with_options(options["store"], f"{form}-options", form, folder)
        _compactly(options["store"], f"{form}-delta8", form)
    done()


def raw(model: Any, optimizers: Any) -> Any:
    """Return the bits of what this rank holds."""
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    states = [each.state_dict() for each in each_of(optimizers)]
    of_model = {name: bits(local(value)) for name, value in bare.state_dict().items()}
    moments = {name: bits(local(value)) for name, value in leaves({"optimizers": states}).items()}
    return {"model": of_model, "optimizers": moments}


def leaves(state: Any, path: str = "") -> dict[str, Any]:
    """Return everything in a nested state, tensors as they are."""
    if isinstance(state, dict | list | tuple) and state:
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        return {name: leaf for key, value in pairs for name, leaf in leaves(value, f"{path}/{key}").items()}
    return {path: state}


def local(value: Any) -> Any:
    """Return this rank's part."""
    return value.to_local() if isinstance(value, DTensor) else value


def _saved_while_training(store: str, run: str, form: str, kind: str, *, policy: Any) -> tuple[Any, Any]:
    """Save at steps 0 to 3, with an evaluation in between; return the states, and losses from step 1 on."""
    model, optimizers = build(form, kind=kind)
    states, losses = {}, list[str]()
    with layerstore.attach(model, optimizers, store, run=run, policy=policy) as saver:
        for step in range(4):
            states[step] = raw(model, optimizers)
            saver.save(step)
            losses += train(model, optimizers, step, step + 1)
            if step == 1:
                evaluate(model)
    return states, losses[1:]


def evaluate(model: Any) -> None:
    """Compute a loss without gradients."""
    model.eval()
    with torch.no_grad():
        model(torch.zeros(4, 8, dtype=torch.long))


def _buffers(store: str) -> None:
    """Save buffers that differ between ranks, as DDP leaves them: at the next forward the first rank's count."""
    model, optimizers = build("ddp")
    for buffer in model.buffers():
        buffer.fill_(dist.get_rank())
    with layerstore.attach(model, optimizers, store, run="buffers") as saver:
        saver.save()
    layerstore.resume(model, optimizers, store, run="buffers")
    tell("buffers", sums=[float(value.sum()) for name, value in model.named_buffers() if "not_saved" not in name])


def _with_options(store: str, run: str, form: str, folder: Path) -> None:
    """Each rank keeps something of its own; the next saver goes on; an older step begins an attempt."""
    rank = dist.get_rank()
    model, optimizers = build(form)
    folder.mkdir(exist_ok=True)
    (folder / f"{rank}.txt").write_text(run)
    torch.manual_seed(rank + 7)
    with layerstore.attach(model, optimizers, store, run=run, keep=Keep(last=2), frozen="exclude") as saver:
        for step in (1, 2, 3):
            train(model, optimizers, step - 1, step)
            saver.save(
                client_state={"rank": rank, "epoch": step},
                metrics={"loss": 0.5 * step},
                extra_files={f"own-{rank}.txt": folder / f"{rank}.txt"},
                pin=f"{run}-first" if step == 1 else None,
            )
        saver.wait()
        tell("status", run=run, errors=saver.status().errors, newest=saver.status().newest_step)
    drawn = torch.rand(2).tolist()
    train(model, optimizers, 3, 4)
    with layerstore.attach(model, optimizers, store, run=run, mode="sync", frozen="exclude") as saver:
        tell("second", run=run, step=saver.save().step)
    again, its = build(form)
    found = layerstore.resume(again, its, store, run=run, step=3)
    assert found is not None
    tell(
        "back",
        run=run,
        client_state=found.client_state,
        restored=found.random_state_restored,
        drawn=torch.rand(2).tolist() == drawn,
    )
    with layerstore.attach(again, its, store, run=run, frozen="exclude") as saver:
        train(again, its, 3, 4)
        saver.save()


def _compactly(store: str, run: str, form: str) -> None:
    """Save with differences, by two savers one after the other."""
    model, optimizers = build(form)
    for steps in (range(1, 4), range(4, 6)):
        with layerstore.attach(model, optimizers, store, run=run, precision="delta8", exact_every=4) as saver:
            for step in steps:
                train(model, optimizers, step - 1, step)
                saver.save()
            tell("compact", run=run, errors=saver.status().errors)
    state = raw(model, optimizers)
    again, its = build(form, seed=3)
    layerstore.resume(again, its, store, run=run)
    tell("exact", run=run, same=raw(again, its) == state)  # the fifth


def killed(options: Any) -> None:
    """Save after two steps and go on; the last rank stays in the next save where the test kills it."""
    form, last = options["form"], dist.get_rank() == dist.get_world_size() - 1
    model, optimizers = build(form)
    faults = Faults()
    with Store(options["store"], hook=faults) as store:
        saver = layerstore.attach(model, optimizers, store, run="sft")
        train(model, optimizers, 0, 2)
        saver.save()
        saver.wait()
        if options["where"] == "copy" and last:
            Copier.begin = lambda *_: hold("copy")(Path("copy"))  # type: ignore[method-assign, assignment]
        if options["where"] != "copy":
            rank = 0 if options["where"] == "commit" else dist.get_world_size() - 1
            faults.on(*PLACES[options["where"]], hold(options["where"]), rank=rank)
        train(model, optimizers, 2, 3)
        saver.save()
        train(model, optimizers, 3, 4)
        saver.wait()


PLACES = {"write": ("write", "/tmp/"), "part": ("link", "/parts/"), "commit": ("link", "/commits/")}


def undisturbed(options: Any) -> None:
    """Tell the losses of a training that nothing stops."""
    model, optimizers = build(options["form"])
    tell("losses", losses=train(model, optimizers, 0, 6))
    done()


def requeued(options: Any) -> None:
    """Go on from what is there, and save what the killed one could not."""
    model, optimizers = build(options["form"], seed=9)
    found = layerstore.resume(model, optimizers, options["store"], run="sft", must_exist=True)
    assert found is not None
    with layerstore.attach(model, optimizers, options["store"], run="sft") as saver:
        losses = train(model, optimizers, found.step, found.step + 1)
        saver.save()
        losses += train(model, optimizers, found.step + 1, 6)
    tell("losses", losses=losses, step=found.step)
    done()


def refused(options: Any) -> None:
    """Ask for what ranks cannot have; tell how each is refused."""
    store = options["store"]
    model, optimizers = build("fsdp")
    train(model, optimizers, 0, 1)
    with layerstore.attach(model, optimizers, store, run="sft") as saver:
        saver.save()

    def tried(name: str, work: Any) -> None:
        attempt(work, name)
        dist.barrier()

    other = Every()
    if dist.get_rank() == 1:
        other.register_buffer("more", torch.ones(1))
    its = optimizers_of(other, "sgd")
    tried("ranks-differ", lambda: layerstore.attach(other, its, store, run="new"))
    tried("ranks-differ-resume", lambda: layerstore.resume(other, optimizers_of(other, "adamw"), store, run="sft"))
    tried("other-runs", lambda: layerstore.attach(model, optimizers, store, run=f"run{dist.get_rank()}"))
    tried("step", lambda: layerstore.resume(model, optimizers, store, run="sft", step=9))

    factored, rows = build("fsdp", seed=4, kind="sgd")
    weight = factored.get_parameter("embed.weight")
    each_of(rows)[0].state[weight]["rows"] = torch.zeros(len(weight))  # as Adafactor keeps them
    tried("rows", lambda: layerstore.attach(factored, rows, store, run="new"))

    sums, _ = build("fsdp", seed=4)
    handle = sums.get_submodule("layers.0")
    handle.register_buffer("sums", _partial())
    tried("partial", lambda: layerstore.attach(sums, optimizers_of(sums, "sgd"), store, run="new"))
    if options["tensor"]:
        split, its = build("tensor")
        tried("drift", lambda: layerstore.attach(split, its, store, run="new", policy="drift"))
    done()


def _partial() -> Any:
    """Return a tensor of which each rank has a summand."""
    return DTensor.from_local(torch.ones(3), mesh_of("fsdp"), [Partial()])
