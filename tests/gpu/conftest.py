import pytest
import torch


@pytest.fixture
def deterministic(monkeypatch):
    """Algorithms are, where an operator has one."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
