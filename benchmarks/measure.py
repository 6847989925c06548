"""Interleaved measurement, and what a figure must travel with."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def interleaved(steps: dict[str, Callable[[], None]], *, rounds: int, warm_up: int) -> dict[str, list[float]]:
    """Seconds of each step, run A B C A B C; the first `warm_up` rounds are thrown away."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(warm_up + rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if i >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, baseline: str) -> dict[str, float]:
    """Median of `name` over median of `baseline`, and the quartiles of the ratio round by round."""
    pairs = [a / b for a, b in zip(seconds[name], seconds[baseline], strict=True)]
    low, _, high = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else pairs * 3
    return {
        "ratio_of_medians": statistics.median(seconds[name]) / statistics.median(seconds[baseline]),
        "median_of_ratios": statistics.median(pairs),
        "quartile_low": low,
        "quartile_high": high,
    }


def environment() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "commit": commit.stdout.strip(),
        "command": " ".join(["python -m", "benchmarks." + Path(sys.argv[0]).stem, *sys.argv[1:]]),
    }


def save(name: str, result: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **result}, indent=1) + "\n")
    return path
