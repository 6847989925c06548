"""The notebooks run as they are; that on Ray in test_ray_examples.py."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's own libraries
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("0[1345]_*.ipynb")), ids=lambda p: p.name)
def test_every_cell_runs(path, monkeypatch):
    monkeypatch.setenv("HYDRA_TUNE_CHECKS", "0")
    notebook = nbformat.read(path, as_version=4)
    assert len(notebook.cells) <= 10
    assert all(not cell.get("outputs") for cell in notebook.cells), "kept without outputs"
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(path.parent)}}).execute()
    printed = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))
    assert "bit for bit" in printed
