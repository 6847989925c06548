"""A driver of its own: `python ray_driver.py ADDRESS FOLDER [POOL]`, for tests that interrupt or kill it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray

import hydra_tune
from hydra_tune import HydraExecutor, tune


def long_step(config: dict[str, Any]) -> None:
    """Leaves a file once it is under way, and trains until it is stopped, for ten minutes at most."""
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    end_s = time.monotonic() + 600
    while time.monotonic() < end_s:
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        Path(config["folder"], f"under way {config['n']}").touch()


def main() -> None:
    address, folder, *pool = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    tune.run(
        long_step,
        config={"folder": folder, "n": tune.grid_search([0, 1])},
        resources=HydraExecutor("256KiB", devices=["cpu"], concurrency=4, pool=pool[0] if pool else None),
        storage_path=folder,
        verbose=0,
    )


if __name__ == "__main__":
    main()
