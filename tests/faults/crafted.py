"""Stores that somebody has written on purpose: every name and checksum is right, and what they say is not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import layerstore
from layerstore import Composite, Keep, Store
from layerstore.errors import Internal, LayerstoreError
from layerstore.format import STATE_MAGIC, VERSION_MAGIC, Plain, pack, ref_of, unpack
from layerstore.format.records import seal, unseal
from layerstore.hashing import digest

Change = Callable[[Any], Any]
"""Alters a plain value, or returns another one in its place."""
PartName = Literal["record", "version", "state"]


def parts_of(store: Path) -> dict[PartName, Any]:
    """Return the plain body of the only record of *store*, its first version and its first state."""
    body = _body(_record(store))[0]
    blobs = {"version": body["layers"][0]["version"], "state": body["states"][0]}
    return {"record": body} | {
        part: unpack(_object(store, ref).read_bytes()[8:], what=part) for part, ref in blobs.items()
    }  # type: ignore[return-value]  # the names are parts


def craft(store: Path, part: PartName, change: Change) -> None:
    """Let *change* alter a part of the only commit of *store*; everything that names it follows."""
    record, plain = _record(store), parts_of(store)[part]
    body, observed = _body(record)
    new = change(plain)
    if part == "record":
        body = plain if new is None else new
    else:
        magic = VERSION_MAGIC if part == "version" else STATE_MAGIC
        ref = _add(store, magic + pack(plain if new is None else new))
        if part == "version":
            body["layers"][0]["version"] = ref
        else:
            body["states"][0] = ref
    record.unlink()
    name = f"commits/{record.parent.name}/{record.name.partition('.')[0]}.{digest(pack(body)).hex()}"
    payload = pack({"body": body, "observed": observed})
    (store / name).write_bytes(seal(payload, name=name, store_id=_id(store)))
    shutil.rmtree(store / "manifest", ignore_errors=True)


def _record(store: Path) -> Path:
    [found] = (store / "commits").glob("*/*")
    return found


def _id(store: Path) -> str:
    with Store(store) as opened:
        return opened.id


def _body(record: Path) -> tuple[Any, Plain]:
    store = record.parents[2]
    name = record.relative_to(store).as_posix()
    payload: Any = unpack(unseal(record.read_bytes(), name=name, store_id=_id(store)), what=name)
    return payload["body"], payload["observed"]


def _object(store: Path, ref: Any) -> Path:
    name: str = ref["id"]
    return store / "objects" / name[:2] / name


def _add(store: Path, data: bytes) -> dict[str, Any]:
    found = ref_of(data)
    ref = {"id": found.id, "size_bytes": found.size_bytes}
    _object(store, ref).parent.mkdir(exist_ok=True)
    _object(store, ref).write_bytes(data)
    return ref


# -- everything that reads -------------------------------------------------------------------------------------------


def _of_store(store: Store, ref: str, out: Path) -> dict[str, Callable[[], object]]:
    return {
        "log": lambda: (repr(store.log(metrics=True)), store.log_page(graph=True)),
        "show": lambda: repr(store.show(ref)),
        "ls": lambda: repr(store.ls(ref)),
        "stats": lambda: repr(store.stats()),
        "overview": lambda: repr(store.overview()),
        "diff": lambda: repr(store.diff(ref, ref)),
        "verify": lambda: repr(store.verify(read_data=True)),
        "gc": lambda: store.gc(Keep(last=1), dry_run=True),
        "repair": lambda: store.repair(dry_run=True),
        "replay": lambda: store.compose(ref, policy="parity"),
        "report": lambda: store.report(out / "report.html"),
        "pin": lambda: store.pin("pinned", ref),
        "push": lambda: store.push(f"file://{out}/bucket"),
    }


def _of_composite(made: Composite, ref: str, out: Path) -> dict[str, Callable[[], object]]:
    return {
        "summary": lambda: (repr(made), made.layers, made.staleness, made.summary(), made.name, made.plan().notes),
        "write": lambda: made.write(out / "written", durable=False),
        "resize": lambda: made.write(out / "resized", world_size=3, durable=False),
        "export": lambda: made.export(out / "exported", durable=False),
        "dcp": lambda: made.export(out / "dcp", durable=False, format="dcp"),
        "universal": lambda: made.export(out / "universal", durable=False, format="universal"),
        "delta": lambda: made.export(out / "delta", format="delta", since=ref),
        "masters": lambda: [each.tobytes() for each in made.tensors().values()],
        "moments": lambda: [each.tobytes() for each in made.tensors("optimizer").values()],
    }


def _in_words(error: LayerstoreError, name: str) -> str:
    assert str(error).isprintable(), name
    assert str(error), name
    return name


def ask_all(path: Path, ref: str, out: Path) -> list[str]:
    """
    Ask the store at *path* everything about *ref*; return which questions it refused.

    Whatever is not a refusal in words is raised, a fault of our own among it.
    """
    out.mkdir()
    refused = []

    def ask(questions: dict[str, Callable[[], object]]) -> None:
        for name, question in questions.items():
            try:
                question()
            except Internal:
                raise
            except LayerstoreError as error:
                refused.append(_in_words(error, name))

    with layerstore.open(path) as store:
        ask(_of_store(store, ref, out))
        made: list[Composite] = []
        ask({"compose": lambda: made.append(store.compose(ref))})
        for composite in made:
            ask(_of_composite(composite, ref, out))
    return refused
