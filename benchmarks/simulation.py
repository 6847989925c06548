"""Hydra's published figures (arXiv 2110.08633) beside ours, simulated on the same workloads.

Baselines are flattered, not we: model parallelism and task parallelism pay for no copy and no optimizer, and have
all the memory they want; with `recompute=False` they keep every activation, too, while we repeat each forward. Ours is
simulated three times: with links that cost nothing; with PCIe 3 x16, 12e9 bytes/s each way for each device; and with
that link and host optimizers, AdamW at 100e9 bytes/s of host memory for all devices together, one trial after another.

Assumed, for the paper does not say: 4e12 flop/s a device (30% of an RTX 2080 Ti's fp32); for the scalings, trials
alike, of the shape of Hydra's language model (width 1024, sequence 128, batch 8), 100 steps, 1B weights unless
said; by model size 12 trials. Sweeps run a tenth of an epoch. Published figures are read off the authors' plots.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from benchmarks.measure import save
from hydra_tune.simulation.baselines import model_parallelism, one_spilled_at_a_time, task_parallelism
from hydra_tune.simulation.cost import CostModel, transformer_trial
from hydra_tune.simulation.simulate import Simulation, simulate
from hydra_tune.simulation.sweeps import RTX_2080_TI, hydra_bert, hydra_gpt2_xl, hydra_vit, random_heterogeneous
from hydra_tune.simulation.workload import TrialWork

MEMORY = "11GB"
PCIE_3 = 12e9
HOST = 100e9
SETTINGS = {"free links": (inf, inf), "PCIe 3": (PCIE_3, inf), "PCIe 3, host AdamW": (PCIE_3, HOST)}
SWEEPS: dict[str, Callable[[CostModel], list[TrialWork]]] = {
    "hydra-bert": hydra_bert,
    "hydra-vit": hydra_vit,
    "hydra-gpt2-xl": hydra_gpt2_xl,
}
CAUSES = ("promotion", "move", "gradients", "memory", "too few trials", "no ready task")
PUBLISHED: dict[str, Any] = {
    "sweeps": {"over model parallelism": 7.4, "utilisation": {"hydra-bert": 0.82, "hydra-vit": 0.81}},
    "devices, 4 trials": {2: 1.84, 4: 3.71, 6: 3.64, 8: 3.65},
    "trials, 8 devices": {2: 1.78, 4: 3.63, 8: 7.15, 12: 7.20, 16: 7.13},
    "weights, 12 trials, 8 devices": {"100M to 900M": [7.2, 7.4]},
    "ablation": {"spilling only": 13.0, "+ SHARP": 2.3, "+ double buffering": 1.0},
    "over the lower bound": {"sharded-lrtf": 1.0, "shuffled": [1.06, 1.2]},
}
LAYERS = {"100M": 6, "300M": 38, "500M": 69, "700M": 101, "900M": 133, "1B": 149}


def alike(trials: int, size: str, host: float) -> list[TrialWork]:
    cost = replace(RTX_2080_TI, host_bytes_per_s=host)
    model = {"width": 1024, "feed_forward": 1024, "sequence": 128, "vocabulary": 30522, "heads": 16}
    return [transformer_trial(cost, layers=LAYERS[size], **model, batch=8, steps=100, memory=MEMORY)] * trials


def ours(work: Sequence[TrialWork], devices: int, link: float, **options: Any) -> Simulation:
    return simulate(work, devices, memory=MEMORY, link_bytes_per_s=link, **options)


def beside(make: Callable[[float], list[TrialWork]], devices: int, *, spilled: bool = False) -> dict[str, Any]:
    """Ours in each setting: how much sooner it ends than the baselines, and how busy devices are."""
    found = {}
    for setting, (link, host) in SETTINGS.items():
        work = make(host)
        simulation = ours(work, devices, link)
        baselines_s = {
            "model parallelism": model_parallelism(work, devices),
            "model parallelism, activations kept": model_parallelism(work, devices, recompute=False),
        }
        if spilled:
            cost = CostModel(h2d_bytes_per_s=link, d2h_bytes_per_s=link)
            baselines_s |= {
                "task parallelism, if it fitted": task_parallelism(work, devices),
                "task parallelism, if it fitted, activations kept": task_parallelism(work, devices, recompute=False),
                "one spilled trial a device, prefetched": one_spilled_at_a_time(work, cost, devices=devices),
            }
        found[setting] = {
            "makespan_s": simulation.makespan_s,
            "over_lower_bound": simulation.ratio,
            "stalled_s": {cause: sum(of.get(cause, 0.0) for of in simulation.stalled_s) for cause in CAUSES},
            "utilisation": statistics.mean(simulation.utilisation),
            "sooner_than": {name: seconds / simulation.makespan_s for name, seconds in baselines_s.items()},
        }
    return found


def part_of(sweep: Callable[[CostModel], list[TrialWork]], host: float, part: float) -> list[TrialWork]:
    work = sweep(replace(RTX_2080_TI, host_bytes_per_s=host))
    return [replace(trial, steps=max(1, round(trial.steps * part))) for trial in work]


def ablation(part: float) -> dict[str, Any]:
    """Of the language model's sweep on 8 devices over PCIe 3; "spilling only" is one trial after another on one
    device, under the same machine, which keeps shards as long as there is room."""
    work = part_of(hydra_bert, inf, part)
    alone_s = {
        double: sum(ours([trial], 1, PCIE_3, double_buffering=double).makespan_s for trial in work)
        for double in (False, True)
    }
    full_s = ours(work, 8, PCIE_3).makespan_s
    cost = CostModel(h2d_bytes_per_s=PCIE_3, d2h_bytes_per_s=PCIE_3)
    return {
        "spilling only": alone_s[False] / full_s,
        "+ SHARP": ours(work, 8, PCIE_3, double_buffering=False).makespan_s / full_s,
        "+ double buffering": 1.0,
        "spilling and double buffering, one device": alone_s[True] / full_s,
        "one spilled trial a device, nothing prefetched": one_spilled_at_a_time(work, cost, prefetch=False, devices=8)
        / full_s,
    }


def over_lower_bound(sweeps: int) -> dict[str, Any]:
    """Random heterogeneous sweeps of 2 or 3 trials a device, on 2, 4 or 8; and, as Hydra, of 8 trials on 8."""
    found: dict[str, Any] = {}
    for name in ("2 or 3 trials a device", "8 trials, 8 devices"):
        drawn = []
        for seed in range(sweeps):
            rng = random.Random(seed)
            devices = rng.choice((2, 4, 8))
            many = (random_heterogeneous(seed, devices * rng.choice((2, 3))), devices)
            drawn.append(many if name.startswith("2") else (random_heterogeneous(seed, 8), 8))
        found[name] = {}
        for policy in ("sharded-lrtf", "fifo", "shuffled"):
            ratios = [simulate(work, devices, policy).ratio for work, devices in drawn]
            found[name][policy] = {"median": statistics.median(ratios), "worst": max(ratios)}
    return found


def show(title: str, rows: dict[str, Any], published: Callable[[Any], object]) -> None:
    """Sooner than model parallelism, which repeats forwards | which keeps activations, in each setting. At most: what
    no schedule beats, repeated forwards in both."""
    print(f"\n{title:<30}{'published':>11}{'at most':>9}" + "".join(f"{setting:>22}" for setting in SETTINGS))
    for row, settings in rows.items():
        free = settings["free links"]
        most = free["sooner_than"]["model parallelism"] * free["over_lower_bound"]
        cells = []
        for setting in SETTINGS:
            sooner = settings[setting]["sooner_than"]
            repeated, kept = (sooner[f"model parallelism{keeps}"] for keeps in ("", ", activations kept"))
            cells.append(f"{repeated:.2f} | {kept:.2f} ({settings[setting]['utilisation']:.0%})")
        print(f"{row!s:<30}{published(row)!s:>11}{most:>9.2f}" + "".join(f"{cell:>22}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=float, default=0.1, help="of an epoch that sweeps run (%(default)s)")
    parser.add_argument("--sweeps", type=int, default=100, help="random ones (%(default)s)")
    options = parser.parse_args()
    figures: dict[str, Any] = {
        "sweeps": {
            name: beside(lambda host, sweep=sweep: part_of(sweep, host, options.part), 8, spilled=True)
            for name, sweep in SWEEPS.items()
        },
        "devices, 4 trials": {n: beside(lambda host: alike(4, "1B", host), n) for n in (2, 4, 6, 8)},
        "trials, 8 devices": {n: beside(lambda host, n=n: alike(n, "1B", host), 8) for n in (2, 4, 8, 12, 16)},
        "weights, 12 trials, 8 devices": {
            size: beside(lambda host, size=size: alike(12, size, host), 8) for size in list(LAYERS)[:-1]
        },
    }
    print("sooner than model parallelism | than with activations kept (devices busy)")
    show("12 trials, 8 devices", figures["sweeps"], lambda row: PUBLISHED["sweeps"]["over model parallelism"])
    for title in ("devices, 4 trials", "trials, 8 devices"):
        show(title, figures[title], lambda row, title=title: PUBLISHED[title][row])
    title = "weights, 12 trials, 8 devices"
    show(title, figures[title], lambda row: "7.2 to 7.4")
    print("\n12 trials, 8 devices, PCIe 3: sooner than")
    for name, settings in figures["sweeps"].items():
        for baseline, sooner in settings["PCIe 3"]["sooner_than"].items():
            print(f"{name:<16}{baseline:<52}{sooner:6.2f}")
    figures["ablation"] = ablation(options.part)
    print("\nablation, times as slow as the whole (published)")
    for name, slower in figures["ablation"].items():
        print(f"{name:<52}{slower:6.2f}  ({PUBLISHED['ablation'].get(name, 'none')})")
    figures["over the lower bound"] = over_lower_bound(options.sweeps)
    print("\nmakespan over the lower bound: median, worst (published)")
    for name, policies in figures["over the lower bound"].items():
        for policy, of in policies.items():
            published = PUBLISHED["over the lower bound"].get(policy, "none")
            print(f"{name:<26}{policy:<16}{of['median']:8.4f}{of['worst']:8.4f}  ({published})")
    assumed = {"memory": MEMORY, "link_bytes_per_s": PCIE_3, "host_bytes_per_s": HOST, "part_of_an_epoch": options.part}
    device = {"flops_per_s": RTX_2080_TI.flops_per_s, "from": RTX_2080_TI.measured_on}
    path = save("simulation", {"assumed": {**assumed, **device}, "published": PUBLISHED, "simulated": figures})
    print(path.relative_to(path.parents[2]))


if __name__ == "__main__":
    main()
