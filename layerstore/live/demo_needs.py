"""What the demo needs beyond the library itself, looked for before anything is written or started."""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from layerstore.errors import Unsupported

PACKAGES = ("torch", "deepspeed", "transformers")

PACKAGES_HINT = "in a fresh virtual environment: pip install -e '.[demo]'"
COMPILER_HINT = "install a C++ compiler, for example with: apt-get install g++"


def check_needs() -> None:
    """
    Check that DeepSpeed can train here. Nothing heavy is imported.

    Raises:
        Unsupported: A package, ninja or the C++ compiler is missing; all that is missing is named at once.
    """
    packages = [name for name in PACKAGES if find_spec(name) is None]
    if not _program("ninja"):
        packages.append("ninja")
    # torch compiles DeepSpeed's operators with $CXX, else with c++.
    compiler = os.environ.get("CXX", "c++")
    missing = [*packages, *([] if _program(compiler) else [f"the C++ compiler {compiler}"])]
    if missing:
        hints = [PACKAGES_HINT] * bool(packages) + [COMPILER_HINT] * (len(missing) > len(packages))
        raise Unsupported(
            f"the demo trains with DeepSpeed, and this is missing: {', '.join(missing)}", hint="; ".join(hints)
        )


def _program(name: str) -> str | None:
    """Return where *name* is on the path of the ranks: that of this process, and this Python's own folder."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
