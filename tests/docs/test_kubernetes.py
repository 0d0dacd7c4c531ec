"""The file for Kubernetes: nobody runs it here, but what it names is there, and its parts fit together."""

import re
import shlex
from typing import Any

import pytest
import yaml

from layerstore.errors import AlreadyExists
from tests.docs.pages import DOCS, ROOT
from tests.docs.test_blocks import wrong_in

PARTS = {each["kind"]: each for each in yaml.safe_load_all((DOCS / "examples" / "kubernetes-job.yaml").read_text())}
JOB = PARTS["Job"]["spec"]
POD = JOB["template"]["spec"]
(TRAINING,) = POD["containers"]
CONTAINERS = [*POD["initContainers"], TRAINING]

# torchrun gives its ranks so long between SIGTERM and SIGKILL.
TORCHRUN_SECONDS = 30


def option(name: str) -> str:
    """Return the value of an option of the training's command."""
    (found,) = [word.partition("=")[2] for word in TRAINING["command"] if word.startswith(f"--{name}=")]
    return str(found)


def environment(container: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a container whose values the file says."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def test_pods_find_each_other() -> None:
    """The Service selects the Job's pods and is their subdomain; the first of them is where they meet."""
    service, name = PARTS["Service"], PARTS["Job"]["metadata"]["name"]

    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert POD["subdomain"] == service["metadata"]["name"]
    assert option("rdzv-endpoint").startswith(f"{name}-0.{POD['subdomain']}:")
    assert JOB["completionMode"] == "Indexed"
    assert int(option("nnodes")) == JOB["completions"] == JOB["parallelism"]
    assert int(option("nproc-per-node")) == TRAINING["resources"]["limits"]["nvidia.com/gpu"]


def test_a_pod_that_ends_is_replaced_after_its_save() -> None:
    """It has longer than torchrun gives its ranks; Kubernetes takes the policy of failures with ``Never`` alone."""
    assert POD["terminationGracePeriodSeconds"] > TORCHRUN_SECONDS
    assert POD["restartPolicy"] == "Never"
    assert JOB["backoffLimit"] > 0


def test_volumes_are_there() -> None:
    """All that is mounted is a volume; the store lies on the claim, which all pods write to, and the index does not."""
    volumes = {each["name"]: each for each in POD["volumes"]}
    for container in CONTAINERS:
        places = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
        variables = environment(container)
        (claim,) = [at for at, volume in places.items() if "persistentVolumeClaim" in volume]
        assert places[claim]["persistentVolumeClaim"]["claimName"] == PARTS["PersistentVolumeClaim"]["metadata"]["name"]
        assert variables["LAYERSTORE_STORE"].startswith(f"{claim}/")
        assert "emptyDir" in places[variables["LAYERSTORE_MANIFEST_DIR"]]
    assert option("store") == environment(TRAINING)["LAYERSTORE_STORE"]
    assert PARTS["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_variables_are_read_by_somebody() -> None:
    """Ours by the code, those of the bucket as the guide to buckets says."""
    sources = "".join(path.read_text() for room in ("layerstore", "cli") for path in (ROOT / room).rglob("*.py"))
    told = (DOCS / "guides" / "remotes.md").read_text()
    for container in CONTAINERS:
        for name in (each["name"] for each in container["env"]):
            assert re.search(rf"\b{name}\b", sources if name.startswith("LAYERSTORE_") else told), name


def test_commands_are_there() -> None:
    """What layerstore is asked for, and what the script takes."""
    for container in POD["initContainers"]:
        command, _, rest = container["command"][-1].partition(" || ")
        assert wrong_in(command) is None
        assert rest == f"[ $? -eq {AlreadyExists.exit_code} ]"
    words = TRAINING["command"]
    (script,) = (word for word in words if word.endswith(".py"))
    text = (DOCS / "examples" / script).read_text()
    for word in words[words.index(script) + 1 :]:
        assert f'add_argument("{word.partition("=")[0]}"' in text, word


@pytest.mark.exhaustive
def test_torchrun_takes_its_options() -> None:
    """As its own parser says: it imports torch."""
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(shlex.split(shlex.join(TRAINING["command"][1:])))
    assert (parsed.nnodes, parsed.rdzv_backend, parsed.training_script) == ("2", "c10d", "with_slurm.py")
    assert parsed.training_script_args[0] == "--store=/store/sft"
