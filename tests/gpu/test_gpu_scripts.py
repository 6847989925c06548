"""The first promise on a GPU, over the training loops with something particular: bit for bit, the optimizer too.

As the plain loop is written for the CPU, some fail on a GPU without us: those are skipped."""

import warnings

import pytest
import torch

import test_attributes_and_hooks
import test_backward_of_blocks
import test_buffers
import test_changed_modules
import test_changes_before_backward
import test_evaluation
import test_forward_of_models
import test_graph_outside_blocks
import test_state_beside_weights
import test_writes_by_hooks
from comparison import assert_trains_as_in_plain_pytorch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
DEVICE = "cuda:0"
MODULES = (
    test_attributes_and_hooks, test_backward_of_blocks, test_buffers, test_changed_modules,
    test_changes_before_backward, test_evaluation, test_forward_of_models, test_graph_outside_blocks,
    test_state_beside_weights, test_writes_by_hooks,
)  # fmt: skip
OTHERWISE = {
    test_buffers.SharesABuffer: "`.to(device)` gives each module a buffer of its own",
    test_state_beside_weights.OtherStrides: "computes with weights, which are in host memory",
    test_buffers.RoundsToNegativeZeros: "computes with buffers, which are in host memory",
    test_forward_of_models.MarksAWeight: "computes with weights, which are in host memory",
    test_forward_of_models.RetainsAGradient: "adds a gradient on the device to a weight, which is in host memory",
    test_evaluation.CallsAPart: "calls a part before the first batch, which is refused",
}
SCRIPTS = [script for module in MODULES for script in module.SCRIPTS if script not in OTHERWISE]


@pytest.fixture(autouse=True)
def quiet(deterministic):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script")  # torch's own, in jvp
        yield


@pytest.mark.parametrize("budget", ["few blocks", "three shards", "resident"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_it_trains_as_in_plain_cuda(script, budget):
    plain = script()
    plain.device = DEVICE
    try:
        plain.run()
    except RuntimeError as error:
        if "Expected all tensors to be on the same device" not in str(error):
            raise
        pytest.skip("its own tensors are in host memory")
    assert_trains_as_in_plain_pytorch(script, budget, DEVICE)
