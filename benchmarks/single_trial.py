"""Step time of one trial: resident over plain PyTorch, spilled over activation checkpointing.

A GPT of 25 million parameters, batch 8 x 128, AdamW; on a GPU, of 400 million, batch 8 x
1024. Spilled: the budget has room for a third of the
weights, beside the activations of a step; its baseline recomputes each block
as well (torch.utils.checkpoint), with all weights in place. The goals are 1.03 and 1.10.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import hydra_tune
from benchmarks.checkpointed import CheckpointedGPT
from benchmarks.measure import interleaved, ratio, save
from hydra_tune.demo.gpt import GPT

DEPTH, WIDTH, HEADS, CONTEXT, BATCH = (8, 2048, 16, 1024, 8) if torch.cuda.is_available() else (8, 512, 8, 128, 8)


def build(kind: type[GPT], device: torch.device) -> GPT:
    torch.manual_seed(0)
    return kind(DEPTH, WIDTH, HEADS, CONTEXT, dropout=0.1).to(device)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Callable[[], None]:
    x = torch.randint(0, 256, (BATCH, CONTEXT), device=device)
    y = torch.randint(0, 256, (BATCH, CONTEXT), device=device)

    def step() -> None:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def need_beside_weights(device: torch.device) -> int:
    """Bytes of a spilled step besides slots: boundaries, loss, and the largest block's gradients and activations."""
    model = build(GPT, torch.device("cpu"))
    with hydra_tune.ShardPool([str(device)], 10 * WIDTH * WIDTH * 4 * DEPTH * 3) as pool:
        hydra_tune.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), pool=pool)
        model(torch.zeros(BATCH, CONTEXT, dtype=torch.long, device=device))
        (trial,) = pool.report()["trials"]
        assert not trial["resident"], trial
        hydra_tune.release(model)
    work = max(max(s["forward_work_bytes"], s["backward_work_bytes"]) for s in trial["shards"])
    return int(trial["held_bytes"] + trial["step_bytes"] + work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    host = torch.device("cpu")
    num_parameters = sum(p.numel() for p in build(GPT, host).parameters())
    weight_bytes = 4 * num_parameters
    steps: dict[str, Callable[[], None]] = {}
    for name, kind in (("plain", GPT), ("checkpointed", CheckpointedGPT)):
        model = build(kind, device)
        steps[name] = step_of(model, torch.optim.AdamW(model.parameters(), fused=True), device)
    pools = {}
    for name, budget in (("resident", 16 * weight_bytes), ("spilled", weight_bytes // 3 + need_beside_weights(device))):
        model = build(GPT, host)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        pools[name] = hydra_tune.ShardPool([str(device)], budget)
        hydra_tune.prepare(model, optimizer, pool=pools[name])
        steps[name] = step_of(model, optimizer, device)
        steps[name]()
    (trial,) = pools["spilled"].report()["trials"]
    assert not trial["resident"], trial
    assert pools["resident"].report()["trials"][0]["resident"]
    seconds = {}
    for pair in (("plain", "resident"), ("checkpointed", "spilled")):  # A B A B: a third would leave its caches to one
        seconds |= interleaved({name: steps[name] for name in pair}, rounds=options.rounds, warm_up=options.warm_up)
    (trial,) = pools["spilled"].report()["trials"]
    result = {
        "parameters": num_parameters,
        "batch": [BATCH, CONTEXT],
        "budget_bytes": {name: pool.devices[0].budget_bytes for name, pool in pools.items()},
        "spilled_slots_bytes": weight_bytes // 3,
        "spilled_promoted_bytes_a_step": trial["promoted_bytes"] // trial["steps"],
        "seconds": seconds,
        "resident_over_plain": ratio(seconds, "resident", "plain"),
        "spilled_over_checkpointed": ratio(seconds, "spilled", "checkpointed"),
        "goals": {"resident_over_plain": 1.03, "spilled_over_checkpointed": 1.10},
    }
    path = save(f"single_trial_{device.type}", result)
    for name, baseline in (("resident", "plain"), ("spilled", "checkpointed")):
        figures, goal = result[f"{name}_over_{baseline}"], result["goals"][f"{name}_over_{baseline}"]
        print(f"{name} / {baseline}: {figures['ratio_of_medians']:.3f} (goal {goal})")
    print(path.relative_to(path.parents[2]))


if __name__ == "__main__":
    main()
