"""The doctor on a machine with a GPU: NVML and torch agree on which GPU is which, and copies are from pinned memory."""

import pytest
import torch

from hydra_tune.doctor.examination import examine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_every_gpu_is_found_tried_and_measured():
    pytest.importorskip("pynvml")
    findings = examine()
    devices = [f.found for f in findings if f.area == "devices"]
    measured = [f for f in findings if f.area == "copies"]
    assert not [f for f in findings if f.level == "problem" and f.area in ("devices", "copies")]
    for index, finding in enumerate(measured):
        assert any(found.startswith(f"cuda:{index}: ") and " free" in found for found in devices), "UUIDs were matched"
        assert finding.found.startswith(f"cuda:{index}: ") and "(pinned)" in finding.found
        assert finding.figures["h2d_bytes_per_s"] > 1e8
    assert len(measured) == torch.cuda.device_count()
