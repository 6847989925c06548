"""The command line, `hydra-tune COMMAND`. What is wrong with its words is said in one line, with exit status 2."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import hydra_tune  # none of these imports torch
from hydra_tune.config import check_folder
from hydra_tune.errors import BudgetError, ConfigError, HydraTuneError
from hydra_tune.show.control_socket import COMMANDS
from hydra_tune.show.live_table import LiveTable
from hydra_tune.show.run_file import report_of_file
from hydra_tune.show.timeline import checked_path, save
from hydra_tune.show.top import command, look, process_to_show, show
from hydra_tune.simulation.baselines import baselines_s
from hydra_tune.simulation.cost import CostModel
from hydra_tune.simulation.simulate import simulate
from hydra_tune.simulation.sweeps import named_or_from_file


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status.

    It is 2 if the command means nothing, and 1 if it has failed: the demo's proof, or an error.
    """
    options = _parser().parse_args(arguments)
    # OpenMP's threads must not spin: trials have more threads than there are cores. It is read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        return int(options.command(options) or 0)
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (HydraTuneError, OSError) as error:
        print("hydra-tune:", " ".join(str(error).split()), file=sys.stderr)  # it may quote others, of several lines
        return 2 if isinstance(error, (ConfigError, BudgetError)) else 1
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"hydra-tune: {message}. See {self.prog} --help.\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hydra-tune", description=hydra_tune.__doc__.splitlines()[0])
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
    option("--no-sharing", action="store_true", help="each trial promotes weights that it shares for itself")
    option("--timeline", type=Path, metavar="OUT", help=".json for ui.perfetto.dev, or .html")
    option("--json", action="store_true", help="all figures, for programs")

    calibrate = commands.add_parser("calibrate", help="measure this machine for --cost, with OMP_NUM_THREADS threads")
    calibrate.set_defaults(command=_calibrate)
    option = calibrate.add_argument
    option("--devices", default="auto", help="that work at once in a sweep, such as cuda:0 or cpu,cpu (every GPU)")
    option("--out", type=Path, default=Path("cost.json"), metavar="COST", help="(%(default)s)")

    doctor = commands.add_parser("doctor", help="what works on this machine, what is slow, and what to do")
    doctor.set_defaults(command=_doctor)
    option = doctor.add_argument
    option("--devices", default="auto", help="such as cuda:0 or cpu,cpu (every GPU)")
    option("--no-copies", action="store_true", help="measure no copies, which takes a second or two")
    option("--json", action="store_true", help="all findings, for programs")

    plan = commands.add_parser("plan", help="what a trial will need, before it runs")
    plan.set_defaults(command=_plan)
    option = plan.add_argument
    option("where", metavar="MODULE:FACTORY", help="a function that returns a model, its optimizer and a batch")
    option("--memory", help="of the device, such as 20GiB (the default pool's)")
    option("--cost", type=Path, metavar="COST", help="what calibrate has written, for seconds")
    option("--json", action="store_true", help="all figures, for programs")

    report = commands.add_parser("report", help="a page on a run that ShardPool(record=..) has recorded")
    report.set_defaults(command=_report)
    report.add_argument("run", type=Path, metavar="RUN", help="the file of the recording")
    report.add_argument("-o", "--out", type=Path, metavar="OUT", help="a .html (RUN's name)")

    top = commands.add_parser("top", help="show the pools of a running process, and pause or stop their trials")
    top.set_defaults(command=_top)
    top.add_argument("pid", type=int, nargs="?", help="of the process (the only one that has a pool)")
    top.add_argument("--once", action="store_true", help="print one table, and leave")
    top.add_argument("--json", action="store_true", help="one snapshot, for programs")
    helps = {
        "pause": "hold a trial between two steps",
        "resume": "let a paused trial go on",
        "stop": "end a trial, which is told as pruned",
        "clone": "begin a trial with the parameters and weights of another one; needs checkpoint_dir",
    }
    for name in COMMANDS:
        command = commands.add_parser(name, help=helps[name])
        command.set_defaults(command=_command, name=name)
        command.add_argument("trial", help="its number, or its name")
        command.add_argument("--pid", type=int, help="of the process (the only one that has a pool)")
    return parser


def _plan(options: argparse.Namespace) -> int:
    """Returns 1 if something is refused."""
    from hydra_tune.preview.factory import plan_of_factory

    cost = None if options.cost is None else CostModel.load(options.cost)
    found = plan_of_factory(options.where, memory=options.memory, cost=cost)
    print(json.dumps(found.to_dict(), indent=1) if options.json else found)
    return int(bool(found.refused))


def _doctor(options: argparse.Namespace) -> int:
    """Returns 1 if something will not work."""
    from rich.console import Console

    from hydra_tune.doctor.examination import examine
    from hydra_tune.doctor.finding import exit_status
    from hydra_tune.doctor.table import table

    findings = examine(_devices_in(options.devices), measures=not options.no_copies)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        Console().print(table(findings))
    return exit_status(findings)


def _devices_in(text: str) -> str | list[str]:
    names = text.split(",")
    if text != "auto" and not all(re.fullmatch(r"(cpu|cuda)(:\d+)?", name) for name in names):
        raise ConfigError(f'--devices is "auto", or names such as cuda:0 or cpu,cpu; got {text!r}.')
    return text if text == "auto" else names


def _report(options: argparse.Namespace) -> None:
    print(f"written to {report_of_file(options.run, options.out)}")


def _top(options: argparse.Namespace) -> None:
    pid = process_to_show(options.pid)
    if options.json:
        print(json.dumps([pool.to_dict() for pool in look(pid)], indent=1))
    elif options.once or not sys.stdout.isatty():
        from rich import print as print_table

        for pool in look(pid):
            print_table(LiveTable(pool))
    else:
        show(pid)


def _command(options: argparse.Namespace) -> None:
    print(command(process_to_show(options.pid), options.name, options.trial))


def _demo(options: argparse.Namespace) -> bool:
    """Returns whether the proof failed."""
    try:
        from hydra_tune.demo.sweep import QUICK, Settings, run
    except ImportError as error:
        raise ConfigError(f'the demo needs optuna ({error}): pip install "hydra-tune[optuna]"') from error
    proof = run(QUICK if options.quick else Settings(), options.out)["proof"]
    return not (proof["losses_equal"] and proof["weights_equal"])


def _calibrate(options: argparse.Namespace) -> None:
    from hydra_tune.calibration import calibrate

    check_folder(options.out, "a cost model")
    cost = calibrate(_devices_in(options.devices))
    cost.save(options.out)
    for key, value in cost.to_dict().items():
        print(f"{key:16}  {value if isinstance(value, str) else format(value, '.4g')}")
    print(f"written to {options.out}")


def _simulate(options: argparse.Namespace) -> None:
    if options.timeline is not None:
        checked_path(options.timeline)
    cost = None if options.cost is None else CostModel.load(options.cost)
    trials = named_or_from_file(options.workload, cost)
    links = CostModel.from_link(options.link) if options.link is not None else cost or CostModel()
    simulation = simulate(
        trials,
        options.devices,
        options.policy,
        memory=options.memory,
        link_bytes_per_s=links.h2d_bytes_per_s,
        d2h_bytes_per_s=links.d2h_bytes_per_s,
        double_buffering=not options.no_double_buffering,
        sharing=not options.no_sharing,
        timeline=options.timeline is not None,
    )
    if options.timeline is not None:
        save(simulation.timeline, [f"device {number}" for number in range(options.devices)], options.timeline)
    others_s = baselines_s(trials, options.devices, links)
    print(json.dumps(simulation.figures(others_s), indent=1) if options.json else simulation.table(others_s))


if __name__ == "__main__":
    sys.exit(main())
