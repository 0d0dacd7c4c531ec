"""What a save is to become once all ranks have written: the record, but for what they write."""

from collections.abc import Callable, Mapping

from layerstore.model import PolicyUse, SourceLayout
from layerstore.ops.joining import Joint
from layerstore.ops.place import Place
from layerstore.ops.shares import ShareWork
from layerstore.policy import Latest, Policy
from layerstore.tree import Tree
from layerstore.zero3.share import Share


def in_order(share: Share, due: frozenset[str]) -> tuple[str, ...]:
    """Return the layers *due* in the model's order."""
    return tuple(layer.layer for layer in share.layers if layer.layer in due)


def use_of(
    policy: Policy, work: ShareWork, movements: Mapping[str, float], decisions: Mapping[Tree, Tree]
) -> PolicyUse:
    """Return what the record says of *policy*: what was due, and what that was decided from."""
    said = dict(decisions)
    if not isinstance(policy, Latest) or len(work.due) < len(work.share.layers):
        said["due"] = list(in_order(work.share, work.due))
    if movements:
        said["movements"] = dict(movements.items())
    return PolicyUse(name=policy.name, parameters=policy.parameters, decisions=said)


def joint_of(
    work: ShareWork,
    *,
    run: str,
    place: Place,
    step: int,
    number: int,
    use: PolicyUse,
    layout: Callable[[], SourceLayout],
) -> Joint:
    """Return what all ranks' parts are to be joined to."""
    return Joint(
        session=work.session,
        save=work.save,
        run=run,
        attempt=place.attempt,
        fork=place.fork,
        step=step,
        save_number=number,
        share=work.share,
        due=work.due,
        policy=use,
        layout=layout,
    )
