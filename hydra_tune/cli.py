"""The command line: `hydra-tune demo`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import hydra_tune


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 where the demo's proof fails."""
    parser = argparse.ArgumentParser(prog="hydra-tune", description=hydra_tune.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=hydra_tune.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="a sweep of models larger than the device, and the proof of its numbers")
    demo.add_argument("--quick", action="store_true", help="four short trials, under a minute")
    demo.add_argument("--out", type=Path, default=Path("hydra-tune-demo"), help="folder of the report (%(default)s)")
    demo.set_defaults(command=_demo)
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


if __name__ == "__main__":
    sys.exit(main())
