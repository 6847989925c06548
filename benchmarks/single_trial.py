"""Step time of one trial: resident over plain PyTorch, spilled over activation checkpointing.

"gpt" has 25 million parameters, batch 8 x 128; on a GPU 400 million, batch 8 x 1024. "encoder" is a stack of 12
`nn.TransformerEncoderLayer`s of width 320, batch 8 x 64. Both train with fused AdamW. Spilled: the budget has room for
a third of the weights, beside the activations of a step; its baseline recomputes each block as well
(torch.utils.checkpoint), with all weights in place. The goals are 1.02 and 1.05.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hydra_tune
from benchmarks.checkpointed import CheckpointedGPT
from benchmarks.measure import interleaved, ratio, save
from hydra_tune.demo.gpt import GPT

DEPTH, WIDTH, HEADS, CONTEXT, BATCH = (8, 2048, 16, 1024, 8) if torch.cuda.is_available() else (8, 512, 8, 128, 8)
LAYERS, ENCODER_WIDTH, LENGTH = 12, 320, 64
GOALS = {"resident_over_plain": 1.02, "spilled_over_checkpointed": 1.05}


class Encoder(nn.Module):
    """Of vectors, which are the classes' own scores."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(ENCODER_WIDTH, 8, 4 * ENCODER_WIDTH, dropout=0.1, batch_first=True)
            for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def build(model: str, *, checkpointed: bool = False) -> nn.Module:
    torch.manual_seed(0)
    if model == "encoder":
        return Encoder(checkpointed=checkpointed)
    return (CheckpointedGPT if checkpointed else GPT)(DEPTH, WIDTH, HEADS, CONTEXT, dropout=0.1)


def batch_of(model: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    if model == "encoder":
        x = torch.randn(BATCH, LENGTH, ENCODER_WIDTH, device=device)
        return x, torch.randint(0, ENCODER_WIDTH, (BATCH, LENGTH), device=device)
    return tuple(torch.randint(0, 256, (BATCH, CONTEXT), device=device) for _ in range(2))  # type: ignore[return-value]


def step_of(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Callable[[], None]:
    x, y = batch_of(name, device)

    def step() -> None:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def prepared(name: str, budget: int, device: torch.device) -> tuple[hydra_tune.ShardPool, Callable[[], None]]:
    """After two steps, by the first of which it was measured."""
    pool, model = hydra_tune.ShardPool([str(device)], budget), build(name)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    hydra_tune.prepare(model, optimizer, pool=pool)
    step = step_of(name, model, optimizer, device)
    step()
    step()
    return pool, step


def need_beside_weights(name: str, weight_bytes: int, device: torch.device) -> int:
    """Bytes of a spilled step besides slots: boundaries, loss, and the largest block's gradients and activations."""
    pool, _ = prepared(name, int(2.5 * weight_bytes), device)
    (trial,) = pool.report()["trials"]
    assert not trial["resident"], trial
    pool.close()
    work = max(max(s["forward_work_bytes"], s["backward_work_bytes"]) for s in trial["shards"])
    return int(trial["held_bytes"] + trial["step_bytes"] + work)


def figures_of(name: str, device: torch.device, *, rounds: int, warm_up: int) -> dict[str, Any]:
    num_parameters = sum(p.numel() for p in build(name).parameters())
    weight_bytes = 4 * num_parameters
    steps: dict[str, Callable[[], None]] = {}
    for kind in ("plain", "checkpointed"):
        model = build(name, checkpointed=kind == "checkpointed").to(device)
        steps[kind] = step_of(name, model, torch.optim.AdamW(model.parameters(), fused=True), device)
    budgets = {
        "resident": 16 * weight_bytes,
        "spilled": weight_bytes // 3 + need_beside_weights(name, weight_bytes, device),
    }
    pools = {}
    for kind, budget in budgets.items():
        pools[kind], steps[kind] = prepared(name, budget, device)
        assert pools[kind].report()["trials"][0]["resident"] is (kind == "resident")
    seconds = {}
    for pair in (("plain", "resident"), ("checkpointed", "spilled")):  # A B A B: a third would leave its caches to one
        seconds |= interleaved({kind: steps[kind] for kind in pair}, rounds=rounds, warm_up=warm_up)
    (trial,) = pools["spilled"].report()["trials"]
    for pool in pools.values():
        pool.close()
    return {
        "parameters": num_parameters,
        "batch": list(batch_of(name, torch.device("cpu"))[0].shape),
        "budget_bytes": budgets,
        "spilled_slots_bytes": weight_bytes // 3,
        "spilled_promoted_bytes_a_step": trial["promoted_bytes"] // trial["steps"],
        "seconds": seconds,
        "resident_over_plain": ratio(seconds, "resident", "plain"),
        "spilled_over_checkpointed": ratio(seconds, "spilled", "checkpointed"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["gpt", "encoder"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    figures = {
        name: figures_of(name, device, rounds=options.rounds, warm_up=options.warm_up) for name in options.models
    }
    path = save(f"single_trial_{device.type}", {"goals": GOALS, **figures})
    for name, found in figures.items():
        for goal, value in GOALS.items():
            print(f"{name}: {goal.replace('_', ' ')} {found[goal]['ratio_of_medians']:.3f} (goal {value})")
    print(path.relative_to(path.parents[2]))


if __name__ == "__main__":
    main()
