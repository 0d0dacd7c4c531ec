"""Turn a store of today into the store of format 1 that a migration would make it from: for tests of migrations."""

import shutil
from graphlib import TopologicalSorter
from pathlib import Path
from typing import cast

from layerstore.format import Plain
from layerstore.migrations.m0001_lineage import Body, id_of, identity_fields, identity_text, seal, unseal


def as_format_1(store: Path) -> Path:
    """
    Turn the store at *store* back into format 1; return it.

    What lies in the trash is hidden by records without layers, as format 1's drop left it. The index goes.
    """
    fields = identity_fields((store / "store.json").read_bytes(), number=2)
    store_id = str(fields["store_id"])
    ids: dict[str, str] = {}
    files: dict[str, Plain] = {}
    for run in sorted({path.name for path in store.glob("**/commits/*")}):
        files |= _records(store, run, store_id, ids)
    for path in sorted((store / "pins").iterdir()):
        pin = cast("Body", _read(path, f"pins/{path.name}", store_id)["pin"])
        changed = {"base": ids.get(str(pin["base"]), pin["base"]), "record": _older(cast("Body", pin["record"]), ids)}
        files[f"pins/{path.name}"] = {"pin": pin | changed}
    for folder in ("commits", "pins", "trash", "manifest", "gc"):
        shutil.rmtree(store / folder, ignore_errors=True)
    for folder in ("commits", "pins", "gc"):
        (store / folder).mkdir()
    for name, payload in files.items():
        (store / name).parent.mkdir(exist_ok=True)
        (store / name).write_bytes(seal(payload, name=name, store_id=store_id, schema=1))
    (store / "store.json").write_bytes(identity_text(fields | {"format": 1}))
    return store


def _records(store: Path, run: str, store_id: str, ids: dict[str, str]) -> dict[str, Plain]:
    """Return the payloads of the records of *run* in format 1, by name; note their ids by the new ones."""
    shown = {path.name: path for path in store.glob(f"commits/{run}/*")}
    dropped = {path.name: path for path in store.glob(f"trash/commits/{run}/*")}
    payloads = {
        name.partition(".")[2]: _read(path, f"commits/{run}/{name}", store_id)
        for name, path in (dropped | shown).items()
    }
    bodies = {new: cast("Body", payload["body"]) for new, payload in payloads.items()}
    mentions = {new: [str(each) for each in cast("list[Plain]", body["supersedes"])] for new, body in bodies.items()}
    found: dict[str, Plain] = {}
    for new in TopologicalSorter(mentions).static_order():
        if new in bodies:
            body = _older(bodies[new], ids)
            ids[new] = id_of(body)
            found[f"commits/{run}/{body['step']!r}.{ids[new]}"] = {**payloads[new], "body": body}
    hidden = {each for mentioned in mentions.values() for each in mentioned}
    for name in dropped.keys() - shown.keys():
        new = name.partition(".")[2]
        if new not in hidden:
            hider = _older(bodies[new], ids) | {"layers": [], "states": [], "supersedes": [ids[new]]}
            found[f"commits/{run}/{hider['step']!r}.{id_of(hider)}"] = {**payloads[new], "body": hider}
    return found


def _read(path: Path, name: str, store_id: str) -> Body:
    return unseal(path.read_bytes(), name=name, store_id=store_id, schema=2)


def _older(body: Body, ids: dict[str, str]) -> Body:
    lineage = cast("list[Plain]", body["lineage"])
    assert (body["stage"], body["notes"]) == (3, [])
    kept = {name: value for name, value in body.items() if name not in {"lineage", "stage", "notes"}}
    superseded = sorted(ids[str(new)] for new in cast("list[Plain]", body["supersedes"]) if str(new) in ids)
    changed: Body = {"fork": lineage[0] if lineage else None, "supersedes": cast("Plain", superseded)}
    return dict(sorted((kept | changed).items()))
