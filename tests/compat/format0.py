"""Turn stores of format 1 into such of format 0, which never was: what tests migrate."""

import shutil
from pathlib import Path
from typing import cast

from layerstore.format.canonical import Plain
from tests.compat.steps.m0000_flags import Body, id_of, identity_fields, identity_text, seal, unseal


def as_format_0(store: Path) -> Path:
    """
    Turn the store at *store*, none of whose records has a flag, back into format 0; return it.

    The index goes, as it would with a copy, and what a collection has left.
    """
    fields = identity_fields((store / "store.json").read_bytes(), number=1)
    store_id = str(fields["store_id"])
    known: dict[str, str] = {}
    for run in sorted((store / "commits").iterdir()):
        _records_as_format_0(store, run, store_id, known)
    (store / "tags").mkdir()
    for path in sorted((store / "pins").iterdir()):
        pin = cast("Body", unseal(path.read_bytes(), name=f"pins/{path.name}", store_id=store_id)["pin"])
        name = f"tags/{path.name}"
        record = _without_flags(cast("Body", pin["record"]), known)
        changed = pin | {"base": known.get(str(pin["base"]), pin["base"]), "record": record}
        (store / name).write_bytes(seal({"pin": changed}, name=name, store_id=store_id))
    for folder in ("commits", "pins", "manifest", "gc"):
        shutil.rmtree(store / folder, ignore_errors=True)
    (store / "store.json").write_bytes(identity_text(fields | {"format": 0}))
    return store


def _records_as_format_0(store: Path, run: Path, store_id: str, known: dict[str, str]) -> None:
    payloads = {
        path.name: unseal(path.read_bytes(), name=f"commits/{run.name}/{path.name}", store_id=store_id)
        for path in sorted(run.iterdir())
    }
    (store / "records" / run.name).mkdir(parents=True)
    waiting = dict(payloads)
    while waiting:
        here = {name.partition(".")[2] for name in waiting}
        for name, payload in list(waiting.items()):
            body = cast("Body", payload["body"])
            if here & set(cast("list[str]", body["supersedes"])):
                continue  # after those that it mentions
            old = _without_flags(body, known)
            step, _, new_id = name.partition(".")
            known[new_id] = id_of(old)
            called = f"records/{run.name}/{step}.{known[new_id]}"
            (store / called).write_bytes(seal({**payload, "body": old}, name=called, store_id=store_id))
            del waiting[name]


def _without_flags(body: Body, known: dict[str, str]) -> Body:
    assert body["flags"] == [], "format 0 has no flags"
    superseded = sorted(known.get(str(new), str(new)) for new in cast("list[Plain]", body["supersedes"]))
    return {name: value for name, value in body.items() if name != "flags"} | {"supersedes": cast("Plain", superseded)}
