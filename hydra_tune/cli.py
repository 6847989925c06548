"""The command line: `hydra-tune demo` and `hydra-tune simulate`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra_tune
from hydra_tune.errors import ConfigError, HydraTuneError

if TYPE_CHECKING:
    from hydra_tune.simulation import Simulation
    from hydra_tune.workload import TrialWork


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 where the demo's proof fails or an argument means nothing."""
    parser = argparse.ArgumentParser(prog="hydra-tune", description=hydra_tune.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=hydra_tune.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="a sweep of models larger than the device, and the proof of its numbers")
    demo.add_argument("--quick", action="store_true", help="four short trials, under a minute")
    demo.add_argument("--out", type=Path, default=Path("hydra-tune-demo"), help="folder of the report (%(default)s)")
    demo.set_defaults(command=_demo)
    simulate = commands.add_parser("simulate", help="what the scheduler would do with a sweep, on paper")
    simulate.add_argument(
        "workload", metavar="FILE", help="JSON with a list of trials, or a sweep's name, such as hydra-gpt2-xl"
    )
    simulate.add_argument("--devices", type=int, default=8, help="how many, all equal (%(default)s)")
    simulate.add_argument("--policy", default="sharded-lrtf", help="the order of ready tasks (%(default)s)")
    simulate.add_argument("--memory", help="of each device, such as 11GB (unlimited)")
    simulate.add_argument(
        "--link",
        default="inf",
        help="bytes a second between host and each device, each way: 12e9 or 12GB (%(default)s)",
    )
    simulate.add_argument(
        "--no-double-buffering",
        dest="double_buffering",
        action="store_false",
        help="one at a time: promotions, tasks, gradients",
    )
    simulate.add_argument("--timeline", type=Path, metavar="OUT", help=".json for ui.perfetto.dev, or .html")
    simulate.add_argument("--json", action="store_true", help="all figures, for programs")
    simulate.set_defaults(command=_simulate)
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # trials' threads outnumber the cores; read when torch loads
    status: int = options.command(options)
    return status


def _demo(options: argparse.Namespace) -> int:
    try:
        import optuna  # noqa: F401
    except ImportError:
        print(
            'the demo runs an Optuna study, but optuna is not installed: pip install "hydra-tune[optuna]"',
            file=sys.stderr,
        )
        return 1
    from hydra_tune.demo.sweep import QUICK, Settings, run

    report = run(QUICK if options.quick else Settings(), options.out, lambda line: print(line, flush=True))
    return 0 if report["proof"]["losses_equal"] and report["proof"]["weights_equal"] else 1


# ---- simulate ----


def _simulate(options: argparse.Namespace) -> int:
    try:
        print(_simulated(options))
    except (HydraTuneError, OSError) as error:
        print(f"hydra-tune: {error}", file=sys.stderr)
        return 1
    return 0


def _simulated(options: argparse.Namespace) -> str:
    from hydra_tune.simulation import simulate
    from hydra_tune.timeline import save

    trials, link_bytes_per_s = _sweep(options.workload), _rate(options.link)
    found = simulate(
        trials,
        options.devices,
        options.policy,
        memory=options.memory,
        link_bytes_per_s=link_bytes_per_s,
        double_buffering=options.double_buffering,
        timeline=options.timeline is not None,
    )
    if options.timeline is not None:
        save(found.timeline, [f"device {number}" for number in range(options.devices)], options.timeline)
    baselines_s = _baselines(trials, options.devices, link_bytes_per_s)
    return json.dumps(_figures(found, baselines_s), indent=1) if options.json else _tables(found, baselines_s)


def _rate(text: str) -> float:
    from hydra_tune.config import parse_bytes

    try:
        return float(text)
    except ValueError:
        return parse_bytes(text)


def _sweep(name: str) -> list[TrialWork]:
    from hydra_tune.sweeps import SWEEPS
    from hydra_tune.workload import parse

    if name in SWEEPS:
        return SWEEPS[name]()
    if not Path(name).exists():
        raise ConfigError(f"a workload is a JSON file or one of {', '.join(SWEEPS)}; got {name!r}. Check the path.")
    return parse(name)


def _baselines(trials: list[TrialWork], devices: int, link: float) -> dict[str, float]:
    from hydra_tune.baselines import model_parallelism, one_spilled_at_a_time, task_parallelism
    from hydra_tune.cost import CostModel

    cost = CostModel(h2d_bytes_per_s=link, d2h_bytes_per_s=link)
    return {
        "model parallelism": model_parallelism(trials, devices),
        "model parallelism, activations kept": model_parallelism(trials, devices, recompute=False),
        "task parallelism, as if each trial fitted": task_parallelism(trials, devices),
        "one spilled trial at a time, prefetched": one_spilled_at_a_time(trials, cost),
        "one spilled trial a device, prefetched": one_spilled_at_a_time(trials, cost, devices=devices),
    }


def _figures(found: Simulation, baselines_s: dict[str, float]) -> dict[str, Any]:
    return {
        "makespan_s": found.makespan_s,
        "lower_bound_s": found.lower_bound_s,
        "ratio": found.ratio,
        "promoted_bytes": found.promoted_bytes,
        "ended_s": found.ended_s,
        "devices": [
            {"busy_s": busy_s, "utilisation": share, "stalled_s": stalled_s}
            for busy_s, share, stalled_s in zip(found.busy_s, found.utilisation, found.stalled_s, strict=True)
        ],
        "baselines_s": baselines_s,
    }


def _tables(found: Simulation, baselines_s: dict[str, float]) -> str:
    seconds = {"simulated": found.makespan_s, "lower bound": found.lower_bound_s, **baselines_s}
    makespans = [["", "makespan_s", "of simulated"]]
    makespans += [[name, f"{of_s:.1f}", f"{of_s / found.makespan_s:.3f}"] for name, of_s in seconds.items()]
    causes = sorted({cause for of in found.stalled_s for cause in of})
    devices = [["device", "busy_s", "busy", *causes]]
    for number, (busy_s, stalled_s) in enumerate(zip(found.busy_s, found.stalled_s, strict=True)):
        stalls = [f"{stalled_s.get(cause, 0.0):.1f}" for cause in causes]
        devices.append([str(number), f"{busy_s:.1f}", f"{found.utilisation[number]:.1%}", *stalls])
    return f"{_aligned(makespans)}\n\n{_aligned(devices)}"


def _aligned(rows: list[list[str]]) -> str:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    sys.exit(main())
