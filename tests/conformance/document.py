"""docs/conformance.md: the figures of `run.py`, and why tests fail where several trials run at a time."""

from __future__ import annotations

import os
import platform
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Any

BESIDE = ("torch", "numpy", "SQLAlchemy", "cmaes", "fakeredis", "grpcio", "pandas", "scikit-learn", "scipy", "pytest")
UNKNOWN = "no reason known"
ONLY_HERE = "at the first report the runner tries the pruner out, on another study; the test lets no trial be asked for"
WHY = {  # by the end of a test's name
    "trials that run together do not know each other's results: a point is drawn twice, or some are drawn in excess": (
        "test_hyperband_pruner_and_brute_force_sampler",
        "test_hyperband_pruner_and_grid_sampler",
        "test_brute_force.py::test_study_optimize_with_single_search_space",
        "test_brute_force.py::test_study_optimize_with_single_search_space_user_added",
        "test_brute_force.py::test_study_optimize_with_pruned_trials",
        "test_brute_force.py::test_study_optimize_with_failed_trials",
        "test_brute_force.py::test_objective_with_nan",
    ),
    "counts on all trials before to have finished": (
        "test_successive_halving_pruner_with_auto_min_resource",
        "test_init_cmaes_opts",
        "test_warm_starting_cmaes_maximize",
        "test_restore_optimizer_from_substrings",
        "test_get_solution_trials",
        "test_constraints_func_nan",
        "test_population_size",
        "test_child_generation_strategy_generation_key",
        "test_infer_relative_search_space",
        "test_warn_independent_sampling",
        "test_after_trial",
        "test_after_trial_pruning",
    ),
    "counts on the order in which trials draw; with several jobs each draws a new seed, too": (
        "test_qmc_sampler_suggest_int_balanced",
        "test_sample_relative_seeding",
        "test_samplers.py::test_reproducible",
    ),
    "allows for as many trials as one job, or as many as it asks for, can begin": (
        "test_optimize_parallel_timeout",
        "test_terminator_callback_terminator",
    ),
    "of several jobs, Optuna does not raise what one of the last raised": (
        "test_brute_force.py::test_study_optimize_with_infinite_search_space",
        "test_brute_force.py::test_study_optimize_with_dynamic_range_search_space",
        "test_out_of_the_range_categorical",
        "test_enqueued_insufficient_trial",
        "test_optimize_with_catch",
        "test_optimize_with_catch_invalid_type",
        "test_after_trial_failing",
        "test_after_trial_failing_in_after_trial",
    ),
    "Optuna draws no bar of a timeout for several jobs": (
        "test_optimize_with_progbar_timeout",
        "test_optimize_with_progbar_timeout_formats",
    ),
    ONLY_HERE: ("test_hyperband_no_call_of_filter_study_in_should_prune",),
}
PROSE = """\
Each test runs once in Optuna's own loop and once with `HydraTrialRunner(pool, concurrency).optimize(study, ...)` in
place of `study.optimize(...)`, with as many jobs. Counted are those that call `optimize`, of the tests of pruners,
samplers, search spaces, storages, studies, terminators, trials, callbacks and several objectives. A test that asks for
more `n_jobs` gets as many, in both. Four at a time begin with a pause of 10 ms, in both: without, many of these
objectives are over before the next one begins. Those that pass in one way and fail in the other run five times more in
both; a test fails that has failed in any run.
"""
HEADER = """\
| Optuna | trials at a time | call `optimize` | pass: stock | runner | fail: both | only stock | only the runner |
|---|---|---|---|---|---|---|---|
"""


def as_markdown(figures: list[dict[str, Any]]) -> str:
    parts = ["# Optuna's own tests through the runner\n", f"Written by `{command()}`.\n", PROSE, environment() + "\n"]
    parts.append(HEADER + "".join(map(row, figures)))
    for figure in figures:
        if figure["stock"] or figure["hydra"]:
            parts.append(f"## What fails with Optuna {figure['optuna']}, {figure['concurrency']} at a time\n")
            parts.append(reasons(figure))
    return "\n".join(parts)


def command() -> str:
    words = [Path(word).name for word in sys.argv[1:]]
    return " ".join(["python -m tests.conformance.run", *words])


def environment() -> str:
    beside = ", ".join(f"{name} {version(name)}" for name in BESIDE)
    system = f"{platform.system()} on {os.cpu_count()} cores, Python {platform.python_version()}"
    return fill(f"{system}, {beside}.", 120, break_on_hyphens=False)


def row(figure: dict[str, Any]) -> str:
    stock, runner = set(figure["stock"]), set(figure["hydra"])
    total = figure["tests"]
    counts = (total, total - len(stock), total - len(runner), len(stock & runner), len(stock - runner))
    counted = " | ".join(f"{n:,}" for n in (*counts, len(runner - stock)))
    return f"| {figure['optuna']} | {figure['concurrency']} | {counted} |\n"


def why(test: str) -> str:
    name = test.split("[")[0]
    return next((why for why, names in WHY.items() if name.endswith(names)), UNKNOWN)


def reasons(figure: dict[str, Any]) -> str:
    """For each reason the tests, with how many of their cases fail in stock Optuna and through the runner."""
    cases: dict[str, dict[str, int]] = defaultdict(lambda: {"stock": 0, "hydra": 0})
    for way in ("stock", "hydra"):
        for test in figure[way]:
            cases[test.split("[")[0]][way] += 1
    listed: dict[str, list[str]] = defaultdict(list)
    for test, failed in sorted(cases.items()):
        name = test.removeprefix("tests/").replace("_tests/", "/")
        listed[why(test)].append(f"`{name}` {failed['stock']}, {failed['hydra']}")
    lines = [fill(f"- {reason}: {'; '.join(tests)}.", 120, **WRAP) for reason, tests in listed.items()]
    return "How many cases of each fail in stock Optuna, and through the runner:\n\n" + "\n".join(lines) + "\n"


WRAP: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
