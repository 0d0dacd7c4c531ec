"""
Write the golden ids and the golden store afresh: ``python -m tests.compat.regenerate``.

Only for a change of format that is meant, and only before the format is released:
from then on a changed format gets a number and files of its own, and the old ones stay for ever.
"""

import sys
import tempfile
from pathlib import Path

import layerstore
from layerstore.format import FORMAT
from tests.compat import goldens
from tests.compat.checkpoint import build

TARGET = Path(__file__).parent / "golden_ids.py"

HEAD = '''"""
The ids of the checkpoint that ``checkpoint.py`` builds, at step 2.

Changing one of OBJECTS, VERSIONS, STATES and COMMIT is a change of format: what users have stored would no longer
be recognised. COMPOSED are the files of a composite; they may change with the writer, if that is meant.
Written by ``python -m tests.compat.regenerate``.
"""
'''


def main() -> int:
    """Rewrite both; return 0."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "store"
        with layerstore.init(path) as store:
            commit = store.ingest(build(folder / "sft" / "checkpoint-2"), pin="best").commit
            store.ingest(build(folder / "sft" / "checkpoint-4", step=4))
            parts = {
                "OBJECTS": goldens.object_ids(path, "sft@2"),
                "VERSIONS": goldens.version_ids(path, "sft@2"),
                "STATES": goldens.state_ids(path, "sft@2"),
                "COMPOSED": goldens.composed(store, "sft@2", folder / "out"),
            }
        archive = goldens.STORES / f"format-{FORMAT}.zip"
        goldens.pack_store(path, archive)
    text = "".join([HEAD, f'\nCOMMIT = "{commit}"\n', *(_literal(name, values) for name, values in parts.items())])
    TARGET.write_text(text)
    sys.stdout.write(f"wrote {TARGET} and {archive} ({archive.stat().st_size} bytes)\n")
    return 0


def _literal(name: str, values: dict[str, str]) -> str:
    rows = "".join(f'    "{key}": "{value}",\n' for key, value in values.items())
    return f"\n{name} = {{\n{rows}}}\n"


if __name__ == "__main__":
    sys.exit(main())
