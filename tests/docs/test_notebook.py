"""A notebook shows results as lines and tables."""

from pathlib import Path

import pytest

import layerstore
from tests.unit.checkpoints import checkpoint

pytestmark = pytest.mark.full

CELLS = (
    "import layerstore; store = layerstore.open('store'); store",
    "store.log()",
    "store.compose('sft@2')",
    "store.pin('best', 'sft@2')",
    "store.compose('sft@2').tensors()['model.norm.wieght']",
)


# A kernel leaves sockets and loops to the end of its process.
@pytest.mark.filterwarnings("ignore")
def test_a_real_kernel_draws_results(tmp_path: Path) -> None:
    """Tables for stores, logs and composites, a line for a pin, and for an error its hint."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    traitlets = pytest.importorskip("traitlets.config")
    pytest.importorskip("ipykernel")
    with layerstore.init(tmp_path / "store") as store:
        store.ingest(checkpoint(tmp_path))
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)

    # By default a kernel is told ports that are free now, and dies if another test has taken one by the time it starts.
    kernel = traitlets.Config(
        KernelManager={"transport": "ipc", "connection_file": str(tmp_path / "kernel.json")},
    )
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, config=kernel, resources=resources, allow_errors=True, kernel_name="python3"
    ).execute()

    *shown, error = [cell.outputs[-1] for cell in notebook.cells]
    drawn, log, composite, pin = (output["data"] for output in shown)
    for data in (drawn, log, composite):
        assert data["text/html"].startswith("<table>")
    assert drawn["text/plain"] == f"<Store {tmp_path / 'store'}>"
    assert "text/html" not in pin
    assert pin["text/plain"].startswith("<Pin best: sft@2, ")
    assert "did you mean model.norm.weight" in "".join(error["traceback"])
