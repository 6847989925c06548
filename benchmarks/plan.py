"""The plan of a model before a run, beside what a trial alone then takes: device peak, link bytes, least budget.

Five small models with a larger evaluation batch: GPT-2, Llama, ViT and BERT of transformers, and a ResNet of basic
blocks, each at the comfortable budget that its plan names, and resident. The plan works on a copy of the model; the
trial is the model itself in a new pool, with an optimizer that steps.

    device peak     bytes reserved, and bytes that tensors took: planned over measured; goal: within a tenth
    link            bytes a training step and an evaluation, planned and measured; goal: equal
    least budget    a trial in it trains and evaluates, in 98% of it it is refused

The plan is made by rehearsals on the host, and these trials run there, too. So this measures whether a rehearsal tells
what a trial will do, not how far a GPU's kernels differ from the host's.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

import hydra_tune
from benchmarks.measure import save
from hydra_tune.config import format_bytes
from hydra_tune.preview.budget_plan import Plan, plan
from hydra_tune.preview.feeding import outputs_of

GOAL_PEAK = 0.10
STEPS = 5
VOCABULARY, TOKENS = 500, 64


class BasicBlock(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width))
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width))
        self.shortcut = (
            nn.Identity()
            if before == width
            else nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256), labels: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU())
        befores = (widths[0], *widths[:-1])
        self.stages = nn.ModuleList(
            block
            for before, width in zip(befores, widths, strict=True)
            for block in (BasicBlock(before, width, 1 if before == width else 2), BasicBlock(width, width, 1))
        )
        self.head = nn.Linear(widths[-1], labels)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.stem(pixel_values)
        for block in self.stages:
            x = block(x)
        logits = self.head(x.mean((2, 3)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    batch_of: Callable[[int], dict[str, torch.Tensor]]
    rows: int
    eval_rows: int


def causal(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (rows, TOKENS))
    return {"input_ids": ids, "labels": ids}


def sentences(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (rows, TOKENS))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, 2, (rows,))}


def images(rows: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(rows, 3, 32, 32), "labels": torch.randint(0, 10, (rows,))}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=128, n_layer=6, n_head=4, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512, image_size=32,
        patch_size=4, num_labels=10,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=TOKENS, num_labels=2,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


CASES = (
    Case("GPT-2", gpt2, causal, 4, 8),
    Case("Llama", llama, causal, 4, 8),
    Case("ViT", vit, images, 4, 8),
    Case("ResNet", ResNet, images, 4, 16),
    Case("BERT", bert, sentences, 4, 16),
)


def built(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = case.build().train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def train(case: Case, budget_bytes: int, evaluations: int = 3) -> dict[str, Any]:
    """A trial alone: the device's report, and the bytes that the last step and the last evaluation have moved."""
    model, optimizer = built(case)
    with hydra_tune.ShardPool("cpu", budget_bytes) as pool:
        hydra_tune.prepare(model, optimizer, pool=pool)

        def moved() -> tuple[int, int]:
            device = pool.report()["devices"][0]
            return device["promoted_bytes"], device["spilled_bytes"]

        batch, eval_batch = case.batch_of(case.rows), case.batch_of(case.eval_rows)
        steps, evaluated = [], []
        for _ in range(2):
            for _ in range(STEPS):
                before = moved()
                outputs = outputs_of(model, batch)
                outputs["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
                steps.append([b - a for a, b in zip(before, moved(), strict=True)])
            model.eval()
            for _ in range(evaluations):
                before = moved()
                with torch.no_grad():
                    outputs = outputs_of(model, eval_batch)
                evaluated.append(moved()[0] - before[0])
            model.train()
        return {**pool.report()["devices"][0], "steps": steps, "evaluations": evaluated}


def refusals(case: Case, budget_bytes: int) -> dict[str, bool]:
    """Whether a trial is refused, by how many evaluations it makes in a row: what they leave decides, too."""
    found = {}
    for evaluations in (1, 2, 3):
        try:
            train(case, budget_bytes, evaluations)
        except hydra_tune.BudgetError:
            found[str(evaluations)] = True
        else:
            found[str(evaluations)] = False
    return found


def compared(case: Case, found: Plan) -> dict[str, Any]:
    at = found.at_budget
    assert at is not None
    assert found.least_bytes is not None
    measured = train(case, at.budget_bytes)
    resident = plan(
        *built(case),
        batch=case.batch_of(case.rows),
        eval_batch=case.batch_of(case.eval_rows),
        memory=found.resident_bytes,
    ).at_budget
    assert resident is not None and resident.resident
    os.environ["HYDRA_TUNE_CHECKS"] = "1"  # so that tensors are counted in all steps, not in first ones alone
    counted_bytes = train(case, at.budget_bytes)["measured_peak_bytes"]
    resident_bytes = train(case, resident.budget_bytes)
    os.environ["HYDRA_TUNE_CHECKS"] = "0"
    planned_step = [at.step.to_device_bytes, at.step.gradient_bytes]
    return {
        "model": case.name,
        "resident from_bytes": found.resident_bytes,
        "budget_bytes": at.budget_bytes,
        "shards": at.shards,
        "planned reserved_bytes": at.reserved_bytes,
        "measured reserved_bytes": measured["peak_bytes"],
        "reserved, planned over measured": at.reserved_bytes / measured["peak_bytes"],
        "planned peak_bytes": at.peak_bytes,
        "measured peak_bytes": counted_bytes,
        "peak, planned over measured": at.peak_bytes / counted_bytes,
        "resident: planned reserved_bytes": resident.reserved_bytes,
        "resident: measured reserved_bytes": resident_bytes["peak_bytes"],
        "resident: planned peak_bytes": resident.peak_bytes,
        "resident: measured peak_bytes": resident_bytes["measured_peak_bytes"],
        "resident: peak, planned over measured": resident.peak_bytes / resident_bytes["measured_peak_bytes"],
        "resident: measured step_bytes": resident_bytes["steps"][-1],
        "planned step_bytes": planned_step,
        "measured step_bytes": measured["steps"][-1],
        "steps as planned": sum(step == planned_step for step in measured["steps"]),
        "steps": len(measured["steps"]),
        "planned evaluation_bytes": at.evaluation.to_device_bytes,
        "measured evaluation_bytes": measured["evaluations"][-1],
        "least_bytes": found.least_bytes,
        "refused in least": refusals(case, found.least_bytes),
        "refused in 98% of it": refusals(case, int(found.least_bytes * 0.98)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    found = []
    for case in CASES:
        model, optimizer = built(case)
        start_s = time.perf_counter()
        planned = plan(model, optimizer, batch=case.batch_of(case.rows), eval_batch=case.batch_of(case.eval_rows))
        plan_s = time.perf_counter() - start_s
        assert planned.at_budget is not None, planned
        found.append({**compared(case, planned), "plan_s": plan_s})
        print(case.name, {key: _shown(key, value) for key, value in found[-1].items() if key != "model"}, flush=True)
    print(save("plan_cpu", {"goal_peak": GOAL_PEAK, "models": found}).name)


def _shown(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return [format_bytes(each) for each in value]
    return (
        format_bytes(value) if key.endswith("_bytes") else value if isinstance(value, (str, dict)) else round(value, 3)
    )


if __name__ == "__main__":
    main()
