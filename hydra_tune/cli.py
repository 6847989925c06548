"""The command line: `hydra-tune demo`, `hydra-tune simulate` and `hydra-tune calibrate`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra_tune
from hydra_tune.errors import ConfigError, HydraTuneError

if TYPE_CHECKING:
    from hydra_tune.cost import CostModel
    from hydra_tune.simulation import Simulation
    from hydra_tune.workload import TrialWork


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 where the demo's proof fails or an argument means nothing."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # trials' threads outnumber the cores; read when torch loads
    try:
        return int(options.command(options))
    except (HydraTuneError, OSError) as error:
        print(f"hydra-tune: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hydra-tune", description=hydra_tune.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=hydra_tune.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="a sweep of models larger than the device, and the proof of its numbers")
    demo.set_defaults(command=_demo)
    demo.add_argument("--quick", action="store_true", help="four short trials, under a minute")
    demo.add_argument("--out", type=Path, default=Path("hydra-tune-demo"), help="folder of the report (%(default)s)")

    simulate = commands.add_parser("simulate", help="what the scheduler would do with a sweep, on paper")
    simulate.set_defaults(command=_simulate)
    option = simulate.add_argument
    option("workload", metavar="FILE", help="JSON with a list of trials, or a sweep's name, such as hydra-gpt2-xl")
    option("--devices", type=int, default=8, help="how many, all equal (%(default)s)")
    option("--policy", default="sharded-lrtf", help="the order of ready tasks (%(default)s)")
    option("--memory", help="of each device, such as 11GB (unlimited)")
    option("--cost", type=Path, metavar="COST", help="what calibrate has written")
    option("--link", help="bytes a second from host to device and back: 12e9 or 12GB (COST's, else unlimited)")
    option("--no-double-buffering", action="store_true", help="one at a time: promotions, tasks, gradients")
    option("--timeline", type=Path, metavar="OUT", help=".json for ui.perfetto.dev, or .html")
    option("--json", action="store_true", help="all figures, for programs")

    calibrate = commands.add_parser("calibrate", help="measure this machine for simulate --cost")
    calibrate.set_defaults(command=_calibrate)
    option = calibrate.add_argument
    option("--devices", default="auto", help="that work at once in a sweep, such as cuda:0 or cpu,cpu (every GPU)")
    option("--threads", type=int, help="of each device on the CPU (as many as torch chooses)")
    option("--out", type=Path, default=Path("cost.json"), metavar="COST", help="(%(default)s)")
    return parser


def _demo(options: argparse.Namespace) -> int:
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ConfigError('the demo needs optuna, which is not installed: pip install "hydra-tune[optuna]"') from error
    from hydra_tune.demo.sweep import QUICK, Settings, run

    proof = run(QUICK if options.quick else Settings(), options.out, say)["proof"]
    return not (proof["losses_equal"] and proof["weights_equal"])


def say(line: str) -> None:
    """In one write: trials, each in a thread, would break each other's lines."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _calibrate(options: argparse.Namespace) -> int:
    import torch

    from hydra_tune.calibration import calibrate
    from hydra_tune.config import check_folder

    if options.threads is not None and options.threads < 1:
        raise ConfigError(f"--threads is a whole number of at least 1, got {options.threads}.")
    check_folder(options.out, "a cost model")
    torch.set_num_threads(options.threads or torch.get_num_threads())
    cost = calibrate("auto" if options.devices == "auto" else options.devices.split(","))
    cost.save(options.out)
    for key, value in cost.to_dict().items():
        print(f"{key:16}  {value if isinstance(value, str) else format(value, '.4g')}")
    print(f"written to {options.out}")
    return 0


# ---- simulate ----


def _simulate(options: argparse.Namespace) -> int:
    from hydra_tune.cost import CostModel
    from hydra_tune.simulation import simulate
    from hydra_tune.timeline import checked_path, save

    if options.timeline is not None:
        checked_path(options.timeline)
    cost = None if options.cost is None else CostModel.load(options.cost)
    trials, links = _sweep(options.workload, cost), _links(options.link, cost)
    found = simulate(
        trials,
        options.devices,
        options.policy,
        memory=options.memory,
        link_bytes_per_s=links.h2d_bytes_per_s,
        d2h_bytes_per_s=links.d2h_bytes_per_s,
        double_buffering=not options.no_double_buffering,
        timeline=options.timeline is not None,
    )
    if options.timeline is not None:
        save(found.timeline, [f"device {number}" for number in range(options.devices)], options.timeline)
    baselines_s = _baselines(trials, options.devices, links)
    print(json.dumps(_figures(found, baselines_s), indent=1) if options.json else _tables(found, baselines_s))
    return 0


def _links(text: str | None, cost: CostModel | None) -> CostModel:
    """The link's rates: as written, each way; else as measured."""
    from hydra_tune.config import parse_bytes
    from hydra_tune.cost import CostModel

    if text is None:
        return cost or CostModel()
    try:
        rate = float(text)
    except ValueError:
        rate = parse_bytes(text, "--link")
    return CostModel(h2d_bytes_per_s=rate, d2h_bytes_per_s=rate)


def _sweep(name: str, cost: CostModel | None) -> list[TrialWork]:
    from hydra_tune.sweeps import SWEEPS
    from hydra_tune.workload import parse

    if name not in SWEEPS:
        if not Path(name).exists():
            raise ConfigError(f"a workload is a JSON file or one of {', '.join(SWEEPS)}; got {name!r}. Check the path.")
        return parse(name)
    if cost is None:
        return SWEEPS[name]()
    if "cost" not in signature(SWEEPS[name]).parameters:
        raise ConfigError(f"the seconds of {name} are drawn at random, whatever a machine takes. Leave --cost out.")
    return SWEEPS[name](cost=cost)


def _baselines(trials: list[TrialWork], devices: int, cost: CostModel) -> dict[str, float]:
    from hydra_tune.baselines import model_parallelism, one_spilled_at_a_time, task_parallelism

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
    lines = [f"{'':42}{'makespan_s':>14}{'of simulated':>14}"]
    lines += [f"{name:42}{of_s:14.1f}{of_s / found.makespan_s:14.3f}" for name, of_s in seconds.items()]
    causes = sorted({cause for of in found.stalled_s for cause in of})
    lines += ["", f"{'device':8}{'busy_s':>10}{'busy':>8}" + "".join(f"{cause:>16}" for cause in causes)]
    for number, (busy_s, stalled_s) in enumerate(zip(found.busy_s, found.stalled_s, strict=True)):
        stalls = "".join(f"{stalled_s.get(cause, 0.0):16.1f}" for cause in causes)
        lines.append(f"{number:<8}{busy_s:10.1f}{found.utilisation[number]:8.1%}{stalls}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
