"""What more nodes bring under Ray Tune: steps a second of three nodes' pools together, over those of one.

Nodes of `ray.cluster_utils.Cluster` on one machine, each with one CPU and two trials at a time. A step computes for
a few milliseconds and waits for 100, as for a loader, so that the machine's cores do not decide. Rounds of one node and
of three alternate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
import ray.tune
from ray.cluster_utils import Cluster

import hydra_tune
from benchmarks.measure import save
from hydra_tune import HydraExecutor

TRIALS, STEPS, A_NODE = 6, 60, 2
WAIT_S = 0.1


def train(config: dict[str, Any]) -> None:
    import torch
    from torch import nn

    torch.manual_seed(config["n"])
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        time.sleep(WAIT_S)
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        node = ray.get_runtime_context().get_node_id()
        ray.tune.report({"step": step, "at_s": time.time(), "node": node})


class Moments(ray.tune.Callback):
    """Of every report."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.nodes: set[str] = set()

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        self.at_s.append(result["at_s"])
        self.nodes.add(result["node"])


def steps_per_s(nodes: int) -> float:
    """Between the first report and the last one."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(nodes - 1):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        executor = HydraExecutor("96KiB", devices=["cpu"], concurrency=A_NODE)
        moments = Moments()
        with tempfile.TemporaryDirectory() as folder:
            ray.tune.run(
                hydra_tune.trainable(train, executor),
                config={"n": ray.tune.grid_search(list(range(TRIALS * nodes // 3)))},
                storage_path=str(Path(folder)),
                callbacks=[moments],
                reuse_actors=True,
                verbose=0,
            )
        assert len(moments.nodes) == nodes, moments.nodes
        return len(moments.at_s) / (max(moments.at_s) - min(moments.at_s))
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rates: dict[int, list[float]] = {1: [], 3: []}
    for _ in range(options.rounds):
        for nodes, values in rates.items():
            values.append(steps_per_s(nodes))
    medians = {nodes: statistics.median(values) for nodes, values in rates.items()}
    result = {"ray": ray.__version__, "steps_per_s": rates, "three_over_one": medians[3] / medians[1]}
    path = save("ray_nodes", result)
    print(f"one node {medians[1]:.1f} steps/s, three {medians[3]:.1f}: {result['three_over_one']:.2f}")
    print(path.relative_to(path.parents[2]))


if __name__ == "__main__":
    main()
