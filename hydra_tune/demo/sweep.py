"""The demo: eight trials, none of which fits its device, four at a time; and the proof that their numbers are exact.

First it says what plain PyTorch says on a device of that size. Then it is an ordinary Optuna study over an ordinary
training loop, shown as any search is, with a report at the end. Afterwards the best trial is trained again, alone and
in plain PyTorch, and compared bit for bit. On a GPU this needs two things. Operators must be deterministic. And the
plain optimizer, too, must step on the host, since a GPU rounds differently.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import optuna
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import hydra_tune
from hydra_tune.config import format_bytes
from hydra_tune.demo.gpt import GPT
from hydra_tune.demo.text import Windows, documentation
from hydra_tune.devices.device import Device
from hydra_tune.devices.meter import TrialMeter
from hydra_tune.errors import ConfigError

DEPTHS = (12, 14, 16)
CONTEXT = 64
BITS = 1 / 0.6931471805599453  # nats to bits
CONCURRENCY = 4
PROOF_SETUP = {"cpu": "alone", "cuda": "alone, its optimizer on the CPU as well"}


@dataclass(frozen=True)
class Settings:
    """Sizes of the sweep. `steps`, `batch` and `validation_batches` are of one trial; `report_every` is in steps."""

    trials: int = 8
    steps: int = 16
    batch: int = 2
    report_every: int = 8
    validation_batches: int = 6
    seed: int = 0


QUICK = Settings(trials=4, steps=4, report_every=2, validation_batches=2)


@dataclass
class TrialRecord:
    """What one trial did. Its `weights` are not written to the report."""

    number: int
    config: dict[str, float]
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps, bits per byte)
    weights: list[torch.Tensor] = field(default_factory=list)


class OnDevice(torch.nn.Module):
    """Plain PyTorch for the proof on a GPU: weights are in host memory. Each forward copies all of them to the device,
    and each backward copies their gradients back."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = {name: p.to(self.device) for name, p in self.model.named_parameters()}
        outputs: torch.Tensor = torch.func.functional_call(self.model, weights, (x.to(self.device),))
        return outputs


def suggest(trial: optuna.Trial) -> dict[str, float]:
    return {
        "lr": trial.suggest_float("lr", 3e-4, 6e-3, log=True),
        "depth": trial.suggest_categorical("depth", DEPTHS),
        "dropout": trial.suggest_float("dropout", 0.0, 0.2),
        "weight_decay": trial.suggest_float("weight_decay", 1e-3, 0.3, log=True),
    }


def train(
    record: TrialRecord,
    settings: Settings,
    text: tuple[torch.Tensor, torch.Tensor],
    report: Callable[[int, float], None],
    *,
    plain_on: torch.device | None = None,
) -> float:
    """An ordinary training loop: only the call of `prepare` is special. Returns the last validation's bits per byte.

    Args:
        report: called with the step and its validation's bits per byte.
        plain_on: the device on which to train in plain PyTorch, without `prepare`.
    """
    torch.manual_seed(settings.seed + record.number)
    config = record.config
    model: torch.nn.Module = GPT(depth=int(config["depth"]), context=CONTEXT, dropout=config["dropout"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"], fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=config["lr"], total_steps=settings.steps)
    train_loader = DataLoader(Windows(text[0], CONTEXT), batch_size=settings.batch, shuffle=True)
    validation_loader = DataLoader(Windows(text[1], CONTEXT), batch_size=settings.batch)
    if plain_on is None:
        model, optimizer, train_loader, validation_loader = hydra_tune.prepare(
            model, optimizer, train_loader, validation_loader
        )
    elif plain_on.type != "cpu":
        model = OnDevice(model, plain_on)
    for step, (x, y) in enumerate(train_loader, start=1):
        loss = loss_of(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        record.losses.append(loss.item())
        if step % settings.report_every == 0:
            record.validation.append((step, validate(model, validation_loader, settings)))
            report(*record.validation[-1])
        if step == settings.steps:
            break
    record.weights = [p.detach().to("cpu", copy=True) for p in model.parameters()]
    return record.validation[-1][1]


def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.to(logits.device).flatten())


@torch.no_grad()
def validate(model: torch.nn.Module, loader: Any, settings: Settings) -> float:
    """Mean bits per byte over the first batches of the validation text."""
    model.eval()
    total = 0.0
    for _, (x, y) in zip(range(settings.validation_batches), loader, strict=False):
        total += loss_of(model(x), y).item()
    model.train()
    return BITS * total / settings.validation_batches


def say_line(line: str) -> None:
    """Print a line in one write, so that trials, which are threads, do not mix their lines."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run(settings: Settings, folder: Path, say: Callable[[str], None] = say_line) -> dict[str, Any]:
    """Run the sweep and its proof, and write the report to `folder`; returns the report as plain data.

    Raises:
        ConfigError: the folder cannot be made.
        AssertionError: a trial promoted fewer bytes in a step than half of its weights, or a budget was exceeded.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the report is saved in a folder, but {str(folder)!r} cannot be made ({error.strerror}). Name another one."
        ) from None
    torch_device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if torch_device.type == "cpu":
        return _run(settings, folder, say, torch_device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    mode_before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    try:
        return _run(settings, folder, say, torch_device)
    finally:
        torch.set_deterministic_debug_mode(mode_before)


def _run(settings: Settings, folder: Path, say: Callable[[str], None], torch_device: torch.device) -> dict[str, Any]:
    text = documentation()
    weights = [weight_bytes(depth) for depth in DEPTHS]
    pool = hydra_tune.ShardPool([torch_device], min(weights) // 2, seed=settings.seed)
    device = pool.devices[0]
    say(f"text      {len(text[0]):,} bytes to train on, {len(text[1]):,} to validate: Python's own documentation")
    sizes = f"{format_bytes(weights[0])} to {format_bytes(weights[-1])} of weights"
    say(f"models    {DEPTHS[0]} to {DEPTHS[-1]} layers, {sizes}")
    say(f"device    {device.name} with {format_bytes(device.budget_bytes)}: no model fits, and four share it")
    say(f"plain     PyTorch there: {error_of_plain_pytorch(device)}")
    start = time.perf_counter()
    study, records = sweep(settings, pool, text, say)
    sweep_s = time.perf_counter() - start
    figures = pool.report()
    check(figures, settings)
    best = records[study.best_trial.number]
    say(f"best      trial {best.number}: {study.best_value:.3f} bits per byte with {format_config(best.config)}")
    say(f"memory    peak {format_bytes(device.peak_bytes)} of {format_bytes(device.budget_bytes)}")
    proof = prove(best, settings, text, torch_device)
    say(
        f"proof     trial {best.number} again in plain PyTorch, {PROOF_SETUP[torch_device.type]}: losses "
        f"{'equal' if proof['losses_equal'] else 'DIFFERENT'}, final weights "
        f"{'equal, bit for bit' if proof['weights_equal'] else 'DIFFERENT'}"
    )
    report = {
        "settings": asdict(settings),
        "environment": environment(),
        "sweep_s": sweep_s,
        "total_s": time.perf_counter() - start,
        "best": {"trial": best.number, "bits_per_byte": study.best_value, **best.config},
        "proof": proof,
        "again": PROOF_SETUP[torch_device.type],
        "trials": [{k: v for k, v in asdict(r).items() if k != "weights"} for r in records.values()],
        "pool": figures,
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    hydra_tune.save_report(pool, folder / "report.html", study)
    pool.close()
    say(f"report    {folder / 'report.html'} and report.json, after {report['total_s']:.0f} s")
    return report


def sweep(
    settings: Settings, pool: hydra_tune.ShardPool, text: tuple[torch.Tensor, torch.Tensor], say: Callable[[str], None]
) -> tuple[optuna.Study, dict[int, TrialRecord]]:
    """Run the study; returns it, and the record of each trial by its number."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logger, handler = logging.getLogger("hydra_tune"), SayHandler(say)
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    is_live = sys.stderr.isatty()  # then a table shows how each trial is
    records: dict[int, TrialRecord] = {}

    def objective(trial: optuna.Trial) -> float:
        record = records[trial.number] = TrialRecord(trial.number, suggest(trial))
        if not is_live:
            say(f"trial {trial.number}   starts with {format_config(record.config)}")

        def report(step: int, value: float) -> None:
            trial.report(value, step)
            if not is_live:
                loss = f"loss {record.losses[-1]:.3f}"
                say(f"trial {trial.number}   step {step:>3}  {loss}  validation {value:.3f} bits per byte")
            if trial.should_prune():
                raise optuna.TrialPruned

        return train(record, settings, text, report)

    # TPE's default of ten random trials is more than the sweep has
    sampler = optuna.samplers.TPESampler(seed=settings.seed, n_startup_trials=CONCURRENCY)
    study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.NopPruner(), study_name="hydra_tune demo")
    try:
        hydra_tune.HydraTrialRunner(pool, concurrency=CONCURRENCY).optimize(study, objective, n_trials=settings.trials)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return study, records


class SayHandler(logging.Handler):
    """What hydra_tune logs is said as the demo's own lines are."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        for line in record.getMessage().splitlines():
            self._say(f"          {line}")


def error_of_plain_pytorch(device: Device) -> str:
    """What plain PyTorch says if the smallest model is moved to a device with this budget. A virtual device counts the
    weights; a GPU is limited to the budget meanwhile."""
    model = GPT(depth=DEPTHS[0], context=CONTEXT)
    try:
        if device.is_virtual:
            TrialMeter(Device(device.number, device.budget_bytes), 0, always=True).add(model.parameters())
        else:
            with torch.cuda.device(device.torch_device):
                whole_bytes = torch.cuda.get_device_properties(device.torch_device).total_memory
                torch.cuda.set_per_process_memory_fraction(device.budget_bytes / whole_bytes)
                try:
                    model.to(device.torch_device)
                finally:
                    torch.cuda.set_per_process_memory_fraction(1.0)
    except torch.OutOfMemoryError as error:
        return f"OutOfMemoryError: {str(error).split('. ')[0]}."
    return "no error"


def prove(
    best: TrialRecord, settings: Settings, text: tuple[torch.Tensor, torch.Tensor], torch_device: torch.device
) -> dict[str, Any]:
    """Train the best configuration in plain PyTorch, alone, and compare every loss and weight."""
    plain = TrialRecord(best.number, best.config)
    train(plain, settings, text, lambda step, value: None, plain_on=torch_device)
    return {
        "trial": best.number,
        "losses_equal": plain.losses == best.losses and plain.validation == best.validation,
        "weights_equal": all(torch.equal(a, b) for a, b in zip(plain.weights, best.weights, strict=True)),
    }


def check(figures: dict[str, Any], settings: Settings) -> None:
    """Check that every trial was spilled, so that the proof is about spilling, and that no budget was exceeded."""
    for trial in figures["trials"]:
        assert len(trial["shards"]) >= 8, trial
        assert trial["promoted_bytes"] >= settings.steps * trial["weight_bytes"] / 2, trial
    for device in figures["devices"]:
        assert device["peak_bytes"] <= device["budget_bytes"], device


def weight_bytes(depth: int) -> int:
    """Bytes of a model's weights; allocates none of them."""
    with torch.device("meta"):
        return sum(p.numel() * p.element_size() for p in GPT(depth=depth, context=CONTEXT).parameters())


def format_config(config: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in config.items())


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "optuna": optuna.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
