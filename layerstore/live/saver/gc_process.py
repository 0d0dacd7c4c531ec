"""
The helper process of the collector: reads one question as JSON from stdin and prints one answer.

    python -P gc_process.py <question.json >answer.json
"""

import json
import os
import sys


def main() -> None:
    """Collect as the question says."""
    question = json.load(sys.stdin)
    os.nice(19)  # it computes when training does not
    sys.path.append(question["path"])  # last: it shadows nothing

    from layerstore.errors import LayerstoreError, Locked
    from layerstore.policy import Keep
    from layerstore.store import Store

    answer: dict[str, object] = {"is_locked": False, "commits_removed": 0, "bytes_freed": 0}
    try:
        with Store(question["store"]) as store:
            found = store.gc(Keep(**question["keep"]), runs=[question["run"]], grace_seconds=question["grace_seconds"])
        answer |= {"commits_removed": len(found.removed), "bytes_freed": found.bytes_freed}
    except Locked:
        answer["is_locked"] = True
    except LayerstoreError as exc:
        answer["error"] = " ".join(str(exc).split())
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
