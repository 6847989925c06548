"""What a trial costs under Ray Tune: a proxy and a thread of the node's pool, beside stock Tune's process.

    start      a sweep of one trial, seconds: nearly all of it is the start of a process
    start_cpu  seconds of a CPU that what Tune starts for a trial has taken, at its first report
    memory     resident memory of what Tune starts for a trial, at its last report
    report     one `tune.report`, as the function sees it, milliseconds: with 1 and 8 trials live, which sleep between
               two reports, or compute in Python; stock Tune's are processes, ours threads of one
    many       32 trials live together over one pool: seconds, and resident memory of all of Ray's workers

Functions use torch, as they would; rounds of stock and ours alternate, figures are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import psutil
import ray
import ray.tune

import hydra_tune
from benchmarks.measure import save
from hydra_tune import HydraExecutor

PROTOTYPE = {"memory_MiB": {"stock": 316, "ours": 196}}
REPORTS = 60
MANY = 32


def report_often(config: dict[str, Any]) -> None:
    """The first wait for the others is not counted; tells how long its reports took."""
    import torch

    torch.zeros(1)
    Path(config["meet"], ray.tune.get_context().get_trial_id()).touch()
    while len(list(Path(config["meet"]).iterdir())) < config["trials"]:
        time.sleep(0.01)
    took_s = []
    for step in range(REPORTS):
        end_s = time.perf_counter() + 0.005
        if config["busy"]:
            while time.perf_counter() < end_s:
                sum(range(100))
        else:
            time.sleep(0.005)
        start_s = time.perf_counter()
        ray.tune.report({"step": step, "took_s": took_s if step == REPORTS - 1 else []})
        took_s.append(time.perf_counter() - start_s)


class Watch(ray.tune.Callback):
    """The memory and CPU time of what Tune starts."""

    def __init__(self) -> None:
        self.rss_bytes: dict[str, int] = {}
        self.start_cpu_s: list[float] = []
        self.most_bytes = 0

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        if result.get("step") == 0:
            took = psutil.Process(result["pid"]).cpu_times()
            self.start_cpu_s.append(took.user + took.system)
        if result.get("step") == REPORTS - 1:
            self.rss_bytes[trial.trial_id] = psutil.Process(result["pid"]).memory_info().rss
            self.most_bytes = max(self.most_bytes, workers_bytes())


def workers_bytes() -> int:
    """Resident, what is shared counted once a process."""
    return sum(
        process.memory_info().rss
        for process in psutil.process_iter(["cmdline"])
        if "ray::" in " ".join(process.info["cmdline"] or ())
    )


def sweep(kind: str, trials: int, *, busy: bool) -> tuple[Watch, list[float]]:
    """Once; seconds of each report."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "meet").mkdir()
        executor = HydraExecutor("1MiB", devices=["cpu"], concurrency=MANY)
        train: Any = report_often if kind == "stock" else hydra_tune.trainable(report_often, executor)
        analysis = ray.tune.run(
            train,
            config={"meet": str(Path(folder, "meet")), "trials": trials, "busy": busy},
            num_samples=trials,
            resources_per_trial={"cpu": 2 / MANY} if kind == "stock" else None,
            callbacks=[watch],
            storage_path=folder,
            verbose=0,
        )
        took_s = [t for trial in analysis.trials for t in trial.last_result["took_s"][5:]]
    return watch, took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    sweep("ours", 1, busy=False)  # the pool starts with its first trial
    reports: dict[str, list[float]] = defaultdict(list)
    starts: dict[str, list[float]] = defaultdict(list)
    memory: dict[str, list[float]] = defaultdict(list)
    start_cpu: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        for trials in (1, 8):
            for busy in (False, True):
                for kind in ("stock", "ours"):
                    start_s = time.perf_counter()
                    watch, took_s = sweep(kind, trials, busy=busy)
                    seconds = time.perf_counter() - start_s
                    key = f"{trials} {'busy' if busy else 'idle'} {kind}"
                    reports[key].append(statistics.median(took_s) * 1e3)
                    memory[kind] += [rss / 2**20 for rss in watch.rss_bytes.values()]
                    if trials == 1:
                        starts[kind].append(seconds)
                        start_cpu[kind] += watch.start_cpu_s
    start_s = time.perf_counter()
    watch, _ = sweep("ours", MANY, busy=False)
    many = {"trials": MANY, "seconds": time.perf_counter() - start_s, "memory_MiB": watch.most_bytes / 2**20}
    ray.shutdown()
    result: dict[str, Any] = {
        "ray": ray.__version__,
        "prototype": PROTOTYPE,
        "rounds": options.rounds,
        "report_ms": {key: statistics.median(values) for key, values in reports.items()},
        "start_s": {kind: statistics.median(values) for kind, values in starts.items()},
        "start_cpu_s": {kind: statistics.median(values) for kind, values in start_cpu.items()},
        "memory_MiB": {kind: statistics.median(values) for kind, values in memory.items()},
        "many": many,
    }
    ratios = [key.removesuffix(" ours") for key in reports if key.endswith("ours")]
    result["report_over_stock"] = {
        key: result["report_ms"][f"{key} ours"] / result["report_ms"][f"{key} stock"] for key in ratios
    }
    path = save("ray_reports", result)
    for key, ratio in result["report_over_stock"].items():
        ms = result["report_ms"]
        print(f"report, {key}: {ms[f'{key} ours']:.1f} ms, stock {ms[f'{key} stock']:.1f} ms: {ratio:.2f}")
    for what in ("start_s", "start_cpu_s", "memory_MiB"):
        print(f"{what}: {result[what]['ours']:.1f}, stock {result[what]['stock']:.1f}")
    print(f"{MANY} trials live: {many['seconds']:.0f} s, {many['memory_MiB']:.0f} MiB")
    print(path.relative_to(path.parents[2]))


if __name__ == "__main__":
    main()
