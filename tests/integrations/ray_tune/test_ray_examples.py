"""The Tune examples of README, docs and notebooks run as they are."""

from __future__ import annotations

import re
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from paths import ROOT, python_path

pytest.importorskip("ray")
pytestmark = pytest.mark.proof
BEFORE = """
import torch, hydra_tune
STEPS = 3
build_model = lambda config: torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))


def train_step(model, optimizer):
    loss = model(torch.ones(4, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""


@pytest.fixture(autouse=True)
def _without_tokens(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", python_path())


@pytest.mark.parametrize("document", ["README.md", "docs/ray.md"])
def test_the_example_runs(document, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    (example,) = (block for block in blocks if "HydraExecutor(" in block)
    before = BEFORE if document == "README.md" else ""
    script = tmp_path / "example.py"
    # here a pool has no GPU, and Ray two CPUs
    example = example.replace('memory="20GiB"', 'memory="256KiB", devices=["cpu"]').replace(
        "\ndef train", "\nimport ray\nray.init(num_cpus=2, include_dashboard=False)\n\ndef train", 1
    )
    script.write_text(before + example)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "TERMINATED" in done.stdout


def test_the_notebook_runs():
    path = ROOT / "notebooks" / "02_ray_tune.ipynb"
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(path.parent)}}).execute()
    printed = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))
    assert printed.count("loss") == 8 and "best" in printed
