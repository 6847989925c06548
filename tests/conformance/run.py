"""Optuna's own tests, once as they are and once with `HydraTrialRunner` under `Study.optimize`: where do they differ?

    pip download --no-deps --no-binary :all: optuna==5.0.0 && tar xzf optuna-5.0.0.tar.gz
    python -m tests.conformance.run optuna-5.0.0 --concurrency 1 4

A checkout is an unpacked source distribution, or a clone of Optuna's repository at a tag; its own `optuna` is what
runs. Its tests run once in Optuna's loop; those that call `optimize` are compared. Those that pass in one way and fail
in the other run several times more in both, and *fail* if they did in any run: some do at times. The exit status is 1
if a test fails through the runner and never in Optuna's loop with as many jobs, but for what `EXPECTED` says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from tests.conformance.document import EXPECTED, as_markdown, why

HERE = Path(__file__).parent
LEFT_OUT = ("artifacts_tests", "importance_tests", "visualization_tests", "test_cli.py")  # need a study, or a process
MORE_RUNS = 5
UNTIL_RUNS = 30  # of a test in Optuna's loop, if it has failed through the runner only
LIMIT_S = 3600.0  # of all tests in one way


class Comparison:
    """Of the tests that call `optimize`, at so many trials at a time: how often each ran and failed in either way."""

    def __init__(self, checkout: Path, at: int, tests: list[str]) -> None:
        self.checkout, self.at, self.tests = checkout, at, tests
        self.optuna = (checkout / "optuna" / "version.py").read_text().split('"')[1]
        self.runs: dict[str, Counter[str]] = defaultdict(Counter)
        self.failures: dict[str, Counter[str]] = defaultdict(Counter)
        self.messages: dict[str, dict[str, str]] = defaultdict(dict)

    def note(self, way: str, tests: list[str], lines: list[dict]) -> None:
        ended = {line["test"]: line for line in lines}
        for test in tests:
            line = ended.get(test, {"outcome": "none", "message": "it, or one before it, has not ended"})
            self.runs[way][test] += 1
            if line["outcome"] not in ("passed", "skipped"):
                self.failures[way][test] += 1
                self.messages[way][test] = line["message"]

    def run(self, way: str, tests: list[str]) -> None:
        if tests:
            self.note(way, tests, outcomes(self.checkout, way, self.at, tests))

    def fail(self, way: str) -> set[str]:
        return {*self.failures[way]}

    def run_again(self) -> None:
        unlike = sorted(self.fail("stock") ^ self.fail("hydra"))
        for _ in range(MORE_RUNS):
            self.run("stock", unlike)
            self.run("hydra", unlike)
        for _ in range(UNTIL_RUNS):
            self.run("stock", [test for test in self.only_here if why(test) not in EXPECTED])

    @property
    def only_here(self) -> list[str]:
        return sorted(self.fail("hydra") - self.fail("stock"))

    def as_json(self) -> dict:
        figures = {"optuna": self.optuna, "concurrency": self.at, "tests": len(self.tests), "only_here": self.only_here}
        for way in ("stock", "hydra"):
            figures[way] = {
                test: {"failed": failed, "runs": self.runs[way][test], "message": self.messages[way][test]}
                for test, failed in sorted(self.failures[way].items())
            }
        return figures


def outcomes(checkout: Path, way: str, at: int, only: list[str] | None = None) -> list[dict]:
    """What the plug-in wrote of each test. All run in one process: one that hangs leaves those after it without."""
    print(f"{checkout.name}: {way}, {at} at a time", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        written, kept = Path(folder, "outcomes"), Path(folder, "only")
        written.touch()
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "plugin", "-p", "no:cacheprovider"]
        command += ["--through", way, "--at", str(at), "--outcomes", str(written)]
        if only is None:
            files = sorted(path.relative_to(checkout) for path in checkout.glob("tests/**/test_*.py"))
            calling = (f for f in files if f.parts[1] not in LEFT_OUT and "optimize(" in (checkout / f).read_text())
            command += ["--continue-on-collection-errors", *map(str, calling)]
        else:
            kept.write_text("\n".join(only))
            command += ["--only", str(kept), *sorted({test.split("::")[0] for test in only})]
        environment = {"PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), str(HERE)]), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, cwd=checkout, env=os.environ | environment, timeout=LIMIT_S, stdout=subprocess.PIPE, text=True
            )
            print(*done.stdout.splitlines()[-1:], file=sys.stderr, flush=True)
        except subprocess.TimeoutExpired:
            print(f"ended after {LIMIT_S:.0f} s", file=sys.stderr, flush=True)
        return [json.loads(line) for line in written.read_text().splitlines()]


def compare(checkout: Path, concurrencies: list[int]) -> list[Comparison]:
    first = outcomes(checkout, "stock", 1)
    tests = [line["test"] for line in first if line["calls"]]
    compared = []
    for at in concurrencies:
        comparison = Comparison(checkout, at, tests)
        if at == 1:
            comparison.note("stock", tests, first)
        else:
            comparison.run("stock", tests)
        comparison.run("hydra", tests)
        comparison.run_again()
        compared.append(comparison)
    return compared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4], metavar="N")
    parser.add_argument("--json", type=Path, help="where all figures are kept; those of other versions stay")
    parser.add_argument("--markdown", type=Path, help="where to write them, as docs/conformance.md is")
    options = parser.parse_args()
    compared = [c for checkout in options.checkouts for c in compare(checkout.resolve(), options.concurrency)]
    figures = [c.as_json() for c in compared]
    if options.json and options.json.exists():
        new = {(f["optuna"], f["concurrency"]) for f in figures}
        known = json.loads(options.json.read_text())
        figures = [*(f for f in known if (f["optuna"], f["concurrency"]) not in new), *figures]
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(as_markdown(figures))
    print(as_markdown(figures))
    return int(any(why(test) not in EXPECTED for c in compared for test in c.only_here))


if __name__ == "__main__":
    sys.exit(main())
